"""Files of ranks under any names: what they hold says what they are, and their DTensors which ranks'.

ckpt_rank0.pt, checkpoint-500.rank0.pt, ...       {"model": state dict, "optimizer": state dict, ...}, or one of both
rank_0/NAME.pt, rank_1/NAME.pt, ...               the same, each in a folder of its rank
"""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path

from zckpt.errors import ShardError, SourceError, UnsupportedError, about, listed
from zckpt.formats.format import Search
from zckpt.formats.fsdp_rank_files.directory import MODEL, OPTIMIZER, Directory, complete, whole_model
from zckpt.formats.fsdp_rank_files.held import RankReader, is_share, shares, with_shares
from zckpt.formats.lost import tensor_of
from zckpt.formats.suffixes import READ_SUFFIXES
from zckpt.formats.torch_files.beside import OF_A_RANK
from zckpt.formats.torch_files.content import content_of
from zckpt.state import dict_of
from zckpt.storage.files import files_in, folders_in
from zckpt.storage.nodes import on_each
from zckpt.torchfile import Place, TorchFile, read_torchfile, value_at


def find(search: Search, first: str | None = None) -> Directory | None:
    """Find the files of all ranks in a directory, and in those of other nodes; None where none has a DTensor.

    `first`: the name of a file of one rank, to which others are alike but for its last number. Raises SourceError: a
    rank's file is missing or damaged, is of another step, or has several models.
    """
    root = search.path
    alike = re.compile(".*" if first is None else re.sub(r"[0-9]+(?=[^0-9]*$)", "[0-9]+", re.escape(first)))
    paths: list[Path] = []
    nodes = on_each(root)
    for folder in chain(nodes, (one for node in nodes for one in folders_in(node) if OF_A_RANK.fullmatch(one.name))):
        own = [folder / name for name in files_in(folder) if name.endswith(READ_SUFFIXES)]
        paths += [path for path in own if alike.fullmatch(path.name)] or own
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
            found = places_of(file.root, file.path)
            rank, size = _rank(file.root, found)
        sizes.add(size)
        for kind, place, known in zip(kinds, found, places, strict=True):
            if place is None:
                continue
            known.add(place)
            if rank in kind:
                raise ShardError(
                    f"holds several files of rank {rank}, perhaps of several steps or models",
                    path=root,
                    expected="one per rank",
                    found=listed([kind[rank].name, Path(file.path).name]),
                    advice="put the files of one step into a separate directory",
                    ranks=[rank],
                )
            kind[rank] = Path(file.path)
    world_size = max(sizes)
    whole = None if kinds[0] else whole_model(root)
    if len(sizes) > 1 or any(len(known) > 1 for known in places) or not (kinds[0] or whole):
        raise UnsupportedError(
            "holds rank files that are not from one save",
            path=root,
            expected="each rank's part of one model and its optimizer, under the same keys",
            found=f"world sizes {listed(sorted(sizes))}; models under {listed(sorted(map(str, places[0])))}; "
            f"optimizers under {listed(sorted(map(str, places[1])))}",
        )
    models, optimizers = (
        complete(root, kind, found, world_size) for kind, found in zip((MODEL, OPTIMIZER), kinds, strict=True)
    )
    model, optimizer = (next(iter(known), ()) for known in places)
    return Directory(root, world_size, models, optimizers, places=(model, optimizer), whole=whole)


def led(error: SourceError, path: Path) -> SourceError:
    """Return the error that a file is one rank's, with what its directory has of the others."""
    try:
        found = find(Search(path.parent), path.name)
        said = f"give its directory, {path.parent}" + (f", which has all {found.world_size} files" if found else "")
    except SourceError as other:
        said = f"give its directory, {path.parent}, with the files of all ranks: there, {other.message}"
    error.advice = f"{said}, or {error.advice}"
    return error


def places_of(root: object, path: str) -> tuple[Place | None, Place | None]:
    """Return where a file has its model and its optimizer.

    Raises UnsupportedError: it has several of one of both, that ranks share, or none.
    """
    whole = with_shares(root, lambda node: tensor_of(node.dtype, node.shape, str(id(node))))
    content = content_of(dict_of(whole), Path(path))
    models = [content.place if key is None else (*content.place, key) for key in content.keys]
    models = [place for place in models if any(shares(value_at(root, place)))] or models
    optimizers = [one.path for one in content.optimizers]
    if max(len(models), len(optimizers)) > 1 or not models + optimizers:
        raise UnsupportedError(
            "holds one rank's part of a sharded checkpoint, but not exactly one model and one optimizer",
            expected="{model: state dict, optimizer: state dict, ...}",
            found=f"models {listed(models) or 'none'}; optimizers {listed(optimizers) or 'none'}",
            advice="save it with torch.distributed.checkpoint on all ranks of the program that wrote it",
        )
    return next(iter(models), None), next(iter(optimizers), None)


def _rank(root: object, places: tuple[Place | None, Place | None]) -> tuple[int, int]:
    """Return which rank a file is of, and of how many, as the meshes of its tensors say."""
    shared = [node for place in places if place is not None for _, node in shares(value_at(root, place))]
    reader = RankReader()
    held = [reader.held(node) for node in shared]
    meshes = [one.mesh for one in held if one is not None and one.mesh is not None]
    ranks = {mesh.rank for mesh in meshes}
    size = max((math.prod(mesh.sizes) for mesh in meshes), default=0)
    rank = next(iter(ranks), None)
    if len(ranks) != 1 or rank is None or not 0 <= rank < size:
        raise UnsupportedError(
            "holds one rank's part of a sharded checkpoint, but does not say which rank's",
            expected="meshes that cover all ranks and state the rank that wrote the file",
            found=f"rank {listed(list(ranks)) or 'none'} of {size}",
            advice="save it with torch.distributed.checkpoint on all ranks of the program that wrote it",
        )
    return rank, size
