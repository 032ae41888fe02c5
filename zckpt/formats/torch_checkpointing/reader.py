"""Which files of a directory are of which item and rank, held against what `metadata.pkl` says.

{"version": "2.0", "world_size": W, "metadata": {item: {
    "rank_to_layout_info": {rank: None or {"file_path", "serialization_format": {"type"}}},
    "nested_path_to_metadata": {JSON of keys: [{"ranks", "sharding_metadata": {"type", "data": {...}}}]}}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.formats.dcp.reader import STEP_PLACES
from zckpt.formats.fsdp_rank_files.directory import MODEL, Directory, complete
from zckpt.formats.fsdp_rank_files.free_names import places_of
from zckpt.formats.fsdp_rank_files.held import is_share
from zckpt.formats.fsdp_rank_files.reader import read as read_ranks
from zckpt.formats.lost import is_lost
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.tensors import with_scalars
from zckpt.state import Checkpoint, GivenNames, SourceFile, dict_of, number_of
from zckpt.state.inventory import IMPLIED, Claim
from zckpt.storage.files import files_in, is_file
from zckpt.storage.nodes import on_each, wherever
from zckpt.torchfile import Place, TorchFile, brief, node_of, read_pickle, read_torchfile

NAME, VERSION = "metadata.pkl", "2.0"
DTENSOR = "DTensorShardingMetadata"

_FILE = re.compile(r"([A-Za-z0-9_-]+)_([0-9]{1,7})\.pt")


def find(path: Path) -> Directory | None:
    """Find the items of all ranks; None where nothing shows that they are such.

    Without `metadata.pkl`, whole tensors of several numbers may be those of epochs. Raises SourceError: a rank's file
    is missing, or it is of a form that is not read.
    """
    items: dict[str, dict[int, Path]] = {}
    for name in chain.from_iterable(map(files_in, on_each(path))):
        if (match := _FILE.fullmatch(name)) is not None:
            items.setdefault(match[1], {})[int(match[2])] = wherever(path / name)
    said = _said(path / NAME)
    if said is None and (MODEL not in items or not ({*items[MODEL]} == {0} or is_share(_first(items[MODEL])))):
        return None
    size = 1 + max(items[MODEL]) if said is None else said["world_size"]
    for item, one in said["metadata"].items() if said is not None else ():
        with about(path / NAME):
            items[item] = {**items.get(item, {}), **_moved(path, item, one)}
    places: dict[str, tuple[Place | None, Place | None]] = {}
    for item, ranks in items.items():
        try:
            file = _first(ranks)
            places[item] = places_of(file.root, file.path)
        except UnsupportedError:  # neither
            places[item] = None, None
    optimizers = [item for item, (_, place) in places.items() if place is not None]
    if MODEL not in items or places[MODEL][0] is None or len(optimizers) > 1:
        raise UnsupportedError(
            "does not hold exactly one model and one optimizer",
            path=path,
            expected=f"{MODEL}_R.pt with a state dict, and at most one optimizer item",
            found=f"{listed([*items])}, of which {listed(optimizers) or 'none'} is an optimizer",
        )
    extras = {
        item: tuple(found[rank] for rank in sorted(found))  # what is a rank's own, further ranks may lack
        if item not in (MODEL, *optimizers) and {*found} == {*range(len(found))}
        else complete(path, item, found, size)
        for item, found in items.items()
    }
    model, optimizer = extras.pop(MODEL), extras.pop(optimizers[0]) if optimizers else ()
    place = places[optimizers[0]][1] if optimizers else ()
    own = path / OWN_NAME
    return Directory(path, size, model, optimizer, extras, own=own if is_file(own) else None,
                     places=(places[MODEL][0] or (), place or ()), format="torch-checkpointing")  # fmt: skip


def _first(ranks: Mapping[int, Path]) -> TorchFile:
    return read_torchfile(ranks[min(ranks)])


def _said(index: Path) -> dict[str, Any] | None:
    """Return what `metadata.pkl` holds; None where it is another program's, or not there."""
    root = dict_of(read_pickle(index).root) if is_file(index) else {}
    if not {"metadata", "world_size"} <= root.keys():
        return None
    metadata, size = root["metadata"], root["world_size"]
    if root.get("version") != VERSION or not isinstance(metadata, dict) or type(size) is not int or size < 1:
        raise UnsupportedError("has an unsupported version", path=index, expected=VERSION,
                               found=brief(root.get("version")))  # fmt: skip
    return root


def _moved(path: Path, item: str, said: dict[str, Any]) -> dict[int, Path]:
    """Return the files of an item that have other names; raise SourceError where it says what is not read."""
    try:
        layouts, tensors = said["rank_to_layout_info"], said["nested_path_to_metadata"]
        kinds = {one["sharding_metadata"]["type"] for ranks in tensors.values() for one in ranks}
        named = {int(rank): one for rank, one in layouts.items() if one is not None}
        kinds |= {one["serialization_format"]["type"] for one in named.values()} - {"TorchSerialization"}
        files = {rank: Path(str(one["file_path"])) for rank, one in named.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError("unexpected content", found=f"{type(error).__name__}: {error}") from error
    if strange := sorted(map(str, kinds - {DTENSOR})):
        raise UnsupportedError(
            f"{item} is saved in an unsupported way", expected=f"{DTENSOR} in torch files", found=listed(strange),
            advice="save it with DefaultResharder and without a custom layout",
        )  # fmt: skip
    if any(file.is_absolute() or ".." in file.parts for file in files.values()):
        raise DamagedFileError("names a file outside the directory", found=listed([*map(str, files.values())]))
    return {rank: wherever(path / file) for rank, file in files.items()}


def read(directory: Directory, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of all ranks' files. Raises SourceError: they are damaged, or contradict `metadata.pkl`."""
    checkpoint = read_ranks(directory, names=names)
    for state in (
        checkpoint.metadata[key] for key in STEP_PLACES if key in checkpoint.metadata
    ):  # as torchtitan has it
        inner = node_of(state)
        step = dict_of(inner).get("step")
        found = number_of(with_scalars({"step": step}, getattr(state, "path", ""))["step"])
        checkpoint.step = found if type(found) is int else checkpoint.step
    index = directory.path / NAME
    said = _said(index)
    if said is None:
        return checkpoint
    checkpoint.files.append(SourceFile(str(index), index.stat().st_size, "metadata"))
    checkpoint.claims[str(index)] = Claim(IMPLIED, "how each tensor is cut")
    if any(map(is_lost, directory.models)):
        return checkpoint
    place = [*map(str, directory.places[0])]
    shapes = {one.name: one.shape for one in checkpoint.tensors()}
    for keys, ranks in said["metadata"].get(MODEL, {}).get("nested_path_to_metadata", {}).items():
        try:
            *above, name = map(str, json.loads(keys))
            found = {tuple(one["sharding_metadata"]["data"]["global_shape"]) for one in ranks}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DamagedFileError("unexpected content", path=index, found=why) from error
        if above == place and found != {shapes.get(name)}:
            raise LayoutError(
                f"{name} differs from {NAME}", path=index, expected=listed([*map(str, found)]),
                found=shapes.get(name), parameters=[name],
            )  # fmt: skip
    return checkpoint
