"""Files of ranks under any names: what they hold says what they are, and their DTensors which ranks'.

ckpt_rank0.pt, checkpoint-500.rank0.pt, ...       {"model": state dict, "optimizer": state dict, ...}, or one of both
"""

from __future__ import annotations

import math
from pathlib import Path

from zckpt.errors import ShardError, SourceError, UnsupportedError, about, listed
from zckpt.formats.format import Search
from zckpt.formats.fsdp_rank_files.contents import Place, at
from zckpt.formats.fsdp_rank_files.directory import MODEL, OPTIMIZER, Directory, complete
from zckpt.formats.fsdp_rank_files.held import RankReader, is_share
from zckpt.formats.suffixes import READ_SUFFIXES
from zckpt.formats.torch_files.content import EXTRA_STATE, STATE_DICT_KEYS
from zckpt.formats.torch_files.optimizer import looks_like_optimizer
from zckpt.storage.files import entries_of
from zckpt.torchfile import MetaTensor, TorchFile, is_tensor, read_torchfile


def find(search: Search) -> Directory | None:
    """Find the files of all ranks in a directory, and in those of other nodes; None where none has a DTensor.

    Raises SourceError: a rank's file is missing or damaged, is of another step, or has several models.
    """
    folders = (search.path, *search.roots)
    paths = [
        Path(one.path)
        for folder in folders
        for one in entries_of(folder)
        if one.name.endswith(READ_SUFFIXES) and one.is_file()
    ]
    damaged: list[SourceError] = []
    files: list[TorchFile] = []
    for path in paths:
        try:
            file = read_torchfile(path)
        except SourceError as error:
            damaged.append(error)
            continue
        if is_share(file):
            files.append(file)
    if not files:
        return None
    if damaged:
        raise damaged[0]
    kinds: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    places: list[set[Place]] = [set(), set()]
    sizes = set()
    for file in files:
        with about(file.path):
            found = _places(file.root)
            rank, size = _rank(file.root, found)
        sizes.add(size)
        for kind, place, known in zip(kinds, found, places, strict=True):
            if place is None:
                continue
            known.add(place)
            if rank in kind:
                raise ShardError(
                    f"holds several files of rank {rank}, as of several steps or models",
                    path=search.path,
                    expected="one of each rank",
                    found=listed([kind[rank].name, Path(file.path).name]),
                    advice="put the files of one step into a directory of its own",
                    ranks=[rank],
                )
            kind[rank] = Path(file.path)
    world_size = max(sizes)
    if len(sizes) > 1 or any(len(known) > 1 for known in places) or not kinds[0]:
        raise UnsupportedError(
            "holds files of ranks that are not of one save",
            path=search.path,
            expected="each rank's part of one model, and of its optimizer, under the same keys",
            found=f"world sizes {listed(sorted(sizes))}; models under {listed(sorted(map(str, places[0])))}; "
            f"optimizers under {listed(sorted(map(str, places[1])))}",
        )
    models, optimizers = (
        complete(search.path, kind, found, world_size) for kind, found in zip((MODEL, OPTIMIZER), kinds, strict=True)
    )
    model, optimizer = (next(iter(known), ()) for known in places)
    return Directory(search.path, world_size, models, optimizers, places=(model, optimizer))


def _places(root: object) -> tuple[Place | None, Place | None]:
    """Return where a file has its model and its optimizer."""
    if _is_model(root):
        return (), None
    if looks_like_optimizer(root):
        return None, ()
    items = root.items() if isinstance(root, dict) else ()
    optimizers = [key for key, value in items if looks_like_optimizer(value)]
    models = [key for key, value in items if _is_model(value)]
    shared = [key for key in models if _has_share(at(root, (key,)))]
    models = shared or [key for key in models if key in STATE_DICT_KEYS]
    if max(len(models), len(optimizers)) > 1 or not models + optimizers:
        raise UnsupportedError(
            "holds one rank's part of what ranks share, and not just one model and one optimizer",
            expected="{model: state dict, optimizer: state dict, ...}",
            found=f"models {listed(models) or 'none'}; optimizers {listed(optimizers) or 'none'}",
            advice="save it with torch.distributed.checkpoint, at all ranks of the program that wrote it",
        )
    return (models[0],) if models else None, (optimizers[0],) if optimizers else None


def _has_share(node: object) -> bool:
    return isinstance(node, dict) and any(isinstance(one, MetaTensor) for one in node.values())


def _is_model(node: object) -> bool:
    if not isinstance(node, dict) or not node or not all(isinstance(key, str) for key in node):
        return False
    values = [value for key, value in node.items() if not key.endswith(EXTRA_STATE)]
    return bool(values) and all(map(is_tensor, values))


def _rank(root: object, places: tuple[Place | None, Place | None]) -> tuple[int, int]:
    """Return which rank a file is of, and of how many, as the meshes of its tensors say."""
    model, optimizer = (None if place is None else at(root, place) for place in places)
    nodes = list(model.values()) if isinstance(model, dict) else []
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    for slots in state.values() if isinstance(state, dict) else ():
        nodes += slots.values() if isinstance(slots, dict) else ()
    reader = RankReader()
    held = [reader.held(node) for node in nodes if isinstance(node, MetaTensor)]
    meshes = [one.mesh for one in held if one is not None and one.mesh is not None]
    ranks = {mesh.rank for mesh in meshes}
    size = max((math.prod(mesh.sizes) for mesh in meshes), default=0)
    rank = next(iter(ranks), None)
    if len(ranks) != 1 or rank is None or not 0 <= rank < size:
        raise UnsupportedError(
            "holds one rank's part of what ranks share, and does not say which rank's",
            expected="meshes of all ranks with the rank that wrote the file",
            found=f"rank {listed([str(one) for one in ranks]) or 'none'} of {size}",
            advice="save it with torch.distributed.checkpoint, at all ranks of the program that wrote it",
        )
    return rank, size
