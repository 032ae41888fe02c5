"""Lay out a file for each item of each rank, and the pickle by which torch-checkpointing cuts them for other ranks.

Tensors are those of `fsdp_rank_files`: DTensors of a mesh of all ranks, cut along their first dimension.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from zckpt.engine.targets import Lazily, TargetFile
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.fsdp_rank_files.directory import EXTRA, MODEL, OPTIMIZER
from zckpt.formats.fsdp_rank_files.kept import own_tree
from zckpt.formats.fsdp_rank_files.writer import Ranks, Target, refuse
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_checkpointing.reader import DTENSOR, NAME, VERSION
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.optimizer import FORM_KEY, GROUPS_KEY, flattened, with_names
from zckpt.formats.torch_files.writer import SlotTensor, ValueTensor
from zckpt.state.boxes import torch_strides
from zckpt.state.partition import check_world_size
from zckpt.torchfile import MetaTensor, Tensor, dump

ITEM = re.compile(r"[A-Za-z0-9_-]+")


def lay_out(job: Job) -> TargetFiles:
    """Return the files of all ranks. Raises UsageError, UnsupportedError: as for files of FSDP's ranks."""
    checkpoint, options = job.checkpoint, job.options
    refuse(checkpoint)
    size = checkpoint.world_size if options.world_size is None else options.world_size
    check_world_size(size)
    ranks = Ranks(checkpoint, Target(size, size, options.device), None)

    def items(rank: int) -> dict[str, Any]:
        trees = ranks.trees(rank)
        others = trees.pop(EXTRA)
        tree = trees.pop(OPTIMIZER, None)
        if tree is not None and options.keys != "numbers":
            tree = with_names(tree, checkpoint.grouped)
            if options.keys == "flat":
                tree = flattened(tree)
            else:
                groups = [{"param_names": one.pop("params"), **one} for one in tree[GROUPS_KEY]]
                tree = {**tree, GROUPS_KEY: groups, FORM_KEY: 1}
        if tree is not None:
            trees["optimizer"] = dict(tree)
        others = {"step": checkpoint.step, **others}
        return trees | {key: one for key, one in others.items() if one is not None and ITEM.fullmatch(key)}

    def files() -> Iterator[TargetFile]:
        for rank in range(size):
            for item, tree in items(rank).items():
                yield torch_writer.lay_out(f"{item}_{rank}.pt", tree)

    first = items(0)
    index = {
        item: {
            "nested_path_to_metadata": {
                json.dumps(keys, separators=(",", ":")): [{"sharding_metadata": one, "ranks": tuple(range(size))}]
                for keys, one in _cuts(first[item], [], size, options.device)
            },
            "rank_to_layout_info": dict.fromkeys(range(size)),
        }
        for item in (MODEL, "optimizer")
        if item in first
    }
    own = [
        torch_writer.lay_out(OWN_NAME, own_tree(checkpoint, None)),
        TargetFile.of(NAME, dump({"metadata": index, "world_size": size, "version": VERSION}).data),
    ]
    return TargetFiles(Lazily(lambda: chain(own, files()), len(own) + size * len(first)))


def _cuts(node: object, keys: list[object], size: int, device: str) -> Iterator[tuple[list[object], object]]:
    """Yield the keys of each tensor below a node, and how it is cut over the ranks."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(value, (MetaTensor, Tensor, SlotTensor, ValueTensor)):
            is_cut = isinstance(value, MetaTensor)
            shape = value.slot.shape if isinstance(value, SlotTensor) else value.shape
            mesh = {"device_type": device if is_cut else "cpu", "mesh_shape": (size,), "mesh_data": tuple(range(size))}
            data = {
                "global_shape": list(shape),
                "dtype": f"torch.{value.dtype}",
                "stride": list(torch_strides(shape)),
                "mesh_spec": {**mesh, "mesh_dim_names": ("fsdp",) if is_cut else None},
                "placements": [{"type": "Shard", "dim": 0} if is_cut else {"type": "Replicate"}],
            }
            yield [*keys, key], {"type": DTENSOR, "data": data}
        else:
            yield from _cuts(value, [*keys, key], size, device)
