"""Lay out a directory of `torch.distributed.checkpoint`, as the ranks of an FSDP2 training would have written it.

DIR/.metadata             what there is and where: see `write_metadata`
DIR/__<rank>_0.distcp     items one after the other, each a whole torch archive
DIR/zckpt.pt              what such a directory has no place for: `formats.remainder`, and below; torch leaves it alone

In `zckpt.pt` is {"dcp": {"absent": {name: about}, "unnamed": {label: about}, "hyperparameters": {index: {key: value}}}}
with about = {"shape": [int], "dtype": str}: parameters of which the model has no tensor, parameters that the optimizer
knows by number only, and the hyperparameters of a group that torch stores leaf by leaf, as they were. A value beside
model and optimizer that has tensors and comes back from its items as it was is not in it: {"dcp": {"items": [key]}}.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from zckpt.engine.plan import Literal, TargetFile
from zckpt.formats.consolidated.optimizer import value_node
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.write_archives import Archives, TensorPiece
from zckpt.formats.dcp.write_items import Item, expanded, items
from zckpt.formats.dcp.write_metadata import Chunk, Entry, metadata
from zckpt.formats.remainder import WITH_ITEMS, remainder
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotTensor, ValueTensor
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter
from zckpt.state.partition import check_world_size

REST_NAME = "zckpt.pt"
KEY = "dcp"
"""Under which `zckpt.pt` says what is peculiar to these directories."""

CUT_NBYTES = 1 << 16
"""Tensors above this are cut for the ranks: a smaller piece would be little more than the archive around it."""

Piece = tuple[int, object]
"""A rank, and what of an item is in its file."""


def lay_out(checkpoint: Checkpoint, *, world_size: int = 1, dtype: str = "keep") -> list[TargetFile]:
    """Return the files of a directory.

    Parameters
    ----------
    checkpoint : Checkpoint
    world_size : int
        Files that the tensors are spread over; any number of ranks loads them. Large tensors are cut along their
        first dimension, as FSDP2 cuts them, so that as many ranks each read one file.
    dtype : {"float32", "bfloat16", "float16", "keep"}
        Of trained parameters in the model: an FSDP2 training in mixed precision has float32 ones.

    Raises
    ------
    UsageError
        A world without ranks.
    UnsupportedError
        State that no single parameter can hold, or that cannot be written.
    """
    check_world_size(world_size)
    archives = Archives()
    found = items(checkpoint, dtype)
    files = [TargetFile(f"__{rank}_0.distcp", 0) for rank in range(world_size)]
    entries = []
    for item, pieces in zip(found, _spread(found, world_size, archives), strict=True):
        entries.append(_entry(item, [_put(archives, files[rank], value) for rank, value in pieces]))
    content = metadata(entries)
    rest = torch_writer.lay_out(REST_NAME, _rest(checkpoint, found))
    return [*(file for file in files if file.nbytes), rest, TargetFile(NAME, len(content), [Literal(0, content)])]


def _rest(checkpoint: Checkpoint, found: Sequence[Item]) -> dict[str, object]:
    """Return the tree of `zckpt.pt`, without the values that items are all of."""
    held = sorted({item.whole_of for item in found if item.whole_of is not None})
    beside = {key: value for key, value in checkpoint.metadata.items() if key not in held}
    tree = remainder(replace(checkpoint, metadata=beside))
    version = {"version": WITH_ITEMS} if held else {}  # an older zckpt would miss them
    return {**tree, **version, KEY: {**_peculiar(checkpoint), **({"items": held} if held else {})}}


def _put(archives: Archives, file: TargetFile, value: object) -> Chunk:
    offset, nbytes = archives.put(file, value)
    if isinstance(value, TensorPiece):
        return Chunk(value.offsets, value.sizes, file.name, offset, nbytes)
    shape = value.shape if isinstance(value, ValueTensor) else ()
    return Chunk((0,) * len(shape), shape, file.name, offset, nbytes)


def _entry(item: Item, chunks: Sequence[Chunk]) -> Entry:
    value = item.value
    if isinstance(value, SlotTensor):
        return Entry(item.key, item.path, value.dtype, value.slot.shape, tuple(chunks))
    if isinstance(value, ValueTensor):
        return Entry(item.key, item.path, value.dtype, value.shape, tuple(chunks))
    return Entry(item.key, item.path, None, (), tuple(chunks))


def _spread(found: Sequence[Item], world_size: int, archives: Archives) -> list[list[Piece]]:
    """Return the pieces of each item: large tensors cut for all ranks, the rest given to the rank with the least."""
    cut = [_cut(item.value, 1 if item.whole_of is not None else world_size) for item in found]
    sizes = [[archives.nbytes(value) for value in pieces] for pieces in cut]
    loads = [0] * world_size
    for nbytes in sizes:
        if len(nbytes) > 1:
            for rank, size in enumerate(nbytes):
                loads[rank] += size
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    ranks = [0] * len(found)
    whole = (index for index, pieces in enumerate(cut) if len(pieces) == 1)
    for index in sorted(whole, key=lambda index: -sizes[index][0]):
        load, ranks[index] = least[0]
        heapq.heapreplace(least, (load + sizes[index][0], ranks[index]))
    return [
        list(enumerate(pieces)) if len(pieces) > 1 else [(rank, pieces[0])]
        for rank, pieces in zip(ranks, cut, strict=True)
    ]


def _cut(value: object, world_size: int) -> list[object]:
    """Return an item's value in pieces: the first is rank 0's, or there is only one.

    Source: torch.chunk, with which FSDP2 shards dimension 0: pieces of ceil(n / world size) rows.
    """
    if not isinstance(value, SlotTensor):
        return [value]
    slot = value.slot
    if world_size == 1 or not slot.shape or slot.nbytes <= CUT_NBYTES:
        return [TensorPiece(value, (0,) * len(slot.shape), slot.shape)]
    rows, rest = slot.shape[0], slot.shape[1:]
    step = -(-rows // world_size)
    return [
        TensorPiece(value, (start, *(0 for _ in rest)), (min(step, rows - start), *rest))
        for start in range(0, rows, step)
    ]


def _peculiar(checkpoint: Checkpoint) -> dict[str, object]:
    absent = [p for p in checkpoint.parameters.values() if not {WEIGHT, MASTER} & set(checkpoint.owner(p.name).slots)]
    hyperparameters = {
        index: {key: value_node(value) for key, value in expanded(group.hyperparameters).items()}
        for index, group in enumerate(checkpoint.param_groups)
    }
    return {
        "absent": {p.name: _about(p) for p in absent},
        "unnamed": {label: _about(p) for label, p in checkpoint.unnamed.items()},
        "hyperparameters": {index: values for index, values in hyperparameters.items() if values},
    }


def _about(parameter: Parameter) -> dict[str, object]:
    return {"shape": list(parameter.shape), "dtype": parameter.dtype}
