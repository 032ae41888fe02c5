"""A directory of torch's DCP without items of the optimizer's state: the same `.metadata` without them, shorter files.

DIR/__R_N.distcp     items that stay, in their order, each byte for byte; a file that no item is left of goes
DIR/.metadata        the pickle as it was, but for what is gone, and for where each item lies now

Param groups stay, and with them all hyperparameters: `torch.distributed.checkpoint.load` loads every key that is there.
What is no tensor of a parameter's state, or a single number, goes with the last of its slots.

In an optimizer of the saved dict, a key of the state is `state.NAME.SLOT`, as a path or joined; in one that is nested,
what lies below a slot (a dict of codes and scales) goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, listed
from zckpt.formats.companions import copy_of
from zckpt.formats.dcp.directory import find, is_whole
from zckpt.formats.dcp.items import read_items
from zckpt.formats.dcp.metadata import Metadata, read_metadata
from zckpt.formats.dcp.tree import STATE, Node, OptimizerPart, build, find_optimizers, leaves
from zckpt.formats.stripping import (
    UNREFERENCED,
    Edited,
    Request,
    Rewritten,
    Stripping,
    as_it_is,
    completed,
    gone,
    kept_ranges,
    replaced,
    rewrite,
    shares,
)
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.optimizer import split_key
from zckpt.state import MASTER, Checkpoint
from zckpt.state.boxes import merge, without
from zckpt.torchfile import ALIGNMENT, Object, TorchFile, dump, read_pickle

TABLES = ("state_dict_metadata", "planner_data", "storage_data")

Dropped = dict[str, str]
"""Slots that go, by the keys of their items."""


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a directory, or of the last one of a run.

    Parameters
    ----------
    checkpoint : Checkpoint
        As read from `source`.
    source : Path
        The directory as the user named it.

    Raises
    ------
    SourceError
        A file cannot be read.
    UnsupportedError
        Its tensors lie in a safetensors file within each file, which torch itself does not read back.
    """
    directory = find(Path(checkpoint.source))
    if directory is None:
        raise TypeError("not a checkpoint that was read from a directory of DCP")
    if checkpoint.details.get("serialization") == "safetensors":
        raise UnsupportedError(
            "files that hold a safetensors file cannot be stripped",
            path=checkpoint.source,
            advice="`zckpt convert --to dcp` writes it as torch.save does, and `zckpt strip` takes it from there",
        )
    own: list[Rewritten] = []
    masters_go = False
    for path in filter(is_whole, directory.folders.values()):
        metadata = read_metadata(path)
        dropped = _dropped(checkpoint, metadata, request) if request.slots else {}
        masters_go = masters_go or MASTER in dropped.values()
        within = path.relative_to(directory.path).as_posix()
        own += without_items("" if within == "." else f"{within}/", metadata, dropped, request)
    if directory.own is not None and masters_go:
        own.append(rewrite(directory.own, OWN_NAME, _without_masters, unreferenced=False))
    return completed(source, directory.path, own, notes=request.notes)


def _without_masters(file: TorchFile) -> Edited:
    """Take from `zckpt.pt` that a weight without a master is one: the masters have gone."""
    if isinstance(file.root, dict):
        file.root["masters"] = False
    return Edited(file.root, changed=True)


def _dropped(checkpoint: Checkpoint, metadata: Metadata, request: Request) -> Dropped:
    """Return the items that go."""
    masters = any(p.master and not p.weight for p in checkpoint.all_parameters)
    names = frozenset(checkpoint.wrapped.get(name, name) for name in checkpoint.parameters) | {*checkpoint.parameters}
    items, tensors = read_items(metadata), metadata.tensors
    if items.quantised:
        raise UnsupportedError(
            f"{listed(items.quantised)}: quantised slots, whose items cannot be taken out one by one",
            path=metadata.path,
            advice="`zckpt consolidate` writes the model; `zckpt convert --to dcp --dequantize` floats",
        )
    found: Dropped = {}
    for part in find_optimizers(build({**items.tensors, **items.objects}, metadata.paths, metadata.path)):
        slots: dict[str, dict[str, list[str]]] = {}
        for parameter, slot, node in _state(part, names | part.names):
            keys = [leaf.key for leaf in leaves(node) if leaf.key in metadata.paths]
            slots.setdefault(parameter, {}).setdefault(slot, []).extend(keys)
        every = [(slot, keys) for its in slots.values() for slot, keys in its.items()]
        shaped = {slot for slot, keys in every if any(key in tensors and tensors[key].shape for key in keys)}
        for its in slots.values():
            present = {slot for slot, keys in its.items() if slot in shaped and any(key in tensors for key in keys)}
            goes, whole = request.of(present - {MASTER})
            if whole:
                goes = its.keys() - ({MASTER} if masters or not request.optimizer else set())
            found |= {key: slot for slot in goes for key in its[slot]}
    return found


def _state(part: OptimizerPart, names: frozenset[str]) -> Iterator[tuple[str, str, Node]]:
    """Yield parameter, slot and node of an optimizer's state; the slot is empty of what is all of a parameter's."""
    state = part.node.get(STATE)
    if part.is_flat:
        for key, node in part.node.items():
            kind, _, name = str(key).partition(".")
            if kind == STATE:
                yield *split_key(name, names), node
    elif isinstance(state, dict):
        for parameter, its in state.items():
            for slot, node in its.items() if isinstance(its, dict) else (("", its),):
                yield str(parameter), str(slot), node
    for parameter, item in part.masters.items():
        yield parameter, MASTER, item


def without_items(within: str, metadata: Metadata, dropped: Dropped, request: Request) -> Iterator[Rewritten]:
    """Yield what becomes of a folder's files, whose items are those of `.metadata`, which was found well-formed."""
    index = Path(metadata.path)
    root = read_pickle(index).root
    tables: dict[str, Any] = {name: root.get(name) for name in TABLES} if isinstance(root, Object) else {}
    by_file: dict[str, list[tuple[str | None, Any]]] = {}
    for which, info in tables["storage_data"].items():
        parts = info.state if isinstance(info.state, tuple) else (info.state,)
        where = next(part for part in parts if isinstance(part, dict) and "offset" in part)
        by_file.setdefault(where["relative_path"], []).append((dropped.get(which.get("fqn")), where))
    shorter = False
    for name, items in by_file.items():
        path = index.parent / name
        nbytes = path.stat().st_size
        ranges = [(one["offset"], one["offset"] + one["length"], slot) for slot, one in items]
        lost = [(low, high, slot) for low, high, slot in ranges if slot is not None]
        used = [(low, high) for low, high, slot in ranges if slot is None]
        alignment = ALIGNMENT if all(low % ALIGNMENT == 0 for low, _, _ in ranges) else 1
        stay = [one for slot, one in items if slot is None]
        if not request.unreferenced:
            used = without([(0, nbytes)], merge((low, min(high + -high % alignment, nbytes)) for low, high, _ in lost))
        kept = kept_ranges(used, nbytes, alignment)
        if kept.nbytes == nbytes:
            yield as_it_is(path, within + name)
            continue
        shorter = True
        kinds = shares(without([(0, nbytes)], kept.ranges), lost)
        rest = nbytes - kept.nbytes - sum(kinds.values())
        kinds |= {UNREFERENCED: rest} if rest and request.unreferenced else {}
        if not stay:
            yield gone(path, within + name, kinds)
            continue
        for one in stay:
            one["offset"] = kept.place(one["offset"])
        yield replaced(within + name, nbytes, copy_of(path, within + name, kept.ranges), kinds)
    name = within + index.name
    if not shorter:
        yield as_it_is(index, name)
        return
    for table in (one for one in tables.values() if isinstance(one, dict)):
        for key in [key for key in table if (key.get("fqn") if isinstance(key, Object) else key) in dropped]:
            del table[key]
    data = dump(root).data
    yield replaced(name, index.stat().st_size, TargetFile.of(name, data), {})
