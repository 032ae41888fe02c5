"""A directory of torch's DCP without items of the optimizer's state: the same `.metadata` without them, shorter files.

DIR/__R_N.distcp     items that stay, in their order, each byte for byte; a file that no item is left of goes
DIR/.metadata        the pickle as it was, but for what is gone, and for where each item lies now

Param groups stay, and with them all hyperparameters: `torch.distributed.checkpoint.load` loads every key that is there.
What is no tensor of a parameter's state, or a single number, goes with the last of its slots.

In an optimizer of the saved dict, a key of the state is `state.NAME.SLOT`, as a path or joined; in one that is nested,
what lies below a slot (a dict of codes and scales) goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.engine.targets import Hole, Literal, TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.directory import OWN_NAME, find
from zckpt.formats.dcp.items import read_items
from zckpt.formats.dcp.metadata import Metadata, read_metadata
from zckpt.formats.dcp.optimizer import split_key
from zckpt.formats.dcp.tree import STATE, Node, OptimizerPart, build, find_optimizers, leaves
from zckpt.formats.shrinking import Kept, kept_ranges, shares
from zckpt.formats.stripped_directory import completed
from zckpt.formats.stripping import (
    STRUCTURE,
    UNREFERENCED,
    Edited,
    Request,
    Rewritten,
    Stripping,
    as_it_is,
    replaced,
    rewrite,
)
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Slot, Span
from zckpt.state.ranges import merge, without
from zckpt.torchfile import Object, TorchFile, dump, read_pickle

ALIGNMENT = 64
"""Bytes, of which zckpt starts each item at a multiple; torch packs them without."""

Dropped = dict[str, str]
"""Slots that go, by the keys of their items."""


@dataclass(slots=True)
class _Folder:
    """A folder with a `.metadata`: what it says, and the items that go."""

    name: str
    path: Path
    metadata: Metadata
    dropped: Dropped = field(default_factory=dict)


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
            "nothing is taken out of files that hold a safetensors file",
            path=checkpoint.source,
            advice="`zckpt convert --to dcp` writes it as torch.save does, and `zckpt strip` takes it from there",
        )
    folders = [_Folder(name, path, read_metadata(path)) for name, path in directory.folders.items()]
    if request.slots:
        _choose(checkpoint, folders, request)
    own = [file for folder in folders for file in _files(folder, request)]
    if directory.own is not None and any(MASTER in folder.dropped.values() for folder in folders):
        own.append(rewrite(directory.own, OWN_NAME, _without_masters, unreferenced=False))
    return completed(source, directory.path, own, request)


def _without_masters(file: TorchFile) -> Edited:
    """Take from `zckpt.pt` that a weight without a master is one: the masters have gone."""
    if isinstance(file.root, dict):
        file.root["masters"] = False
    return Edited(file.root, changed=True)


def _choose(checkpoint: Checkpoint, folders: Iterable[_Folder], request: Request) -> None:
    """Note the items that go in each folder."""
    masters = any(MASTER in p.slots and WEIGHT not in p.slots for p in checkpoint.parameters.values())
    names = frozenset(checkpoint.wrapped.get(name, name) for name in checkpoint.parameters) | {*checkpoint.parameters}
    for folder in folders:
        metadata = folder.metadata
        items = read_items(metadata)
        root = build({**items.tensors, **items.objects}, metadata.paths, metadata.path)
        for part in find_optimizers(root):
            slots: dict[str, dict[str, list[str]]] = {}
            for parameter, slot, node in _state(part, names | part.names):
                keys = [leaf.key for leaf in leaves(node) if leaf.key in metadata.paths]
                slots.setdefault(parameter, {}).setdefault(slot, []).extend(keys)
            folder.dropped |= _dropped(slots, metadata, request, masters=masters)


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


def _dropped(
    slots: Mapping[str, Mapping[str, Sequence[str]]], metadata: Metadata, request: Request, *, masters: bool
) -> Dropped:
    """Return the items that go, given those of the state by parameter and slot."""
    tensors = metadata.tensors
    shaped = {
        slot
        for its in slots.values()
        for slot, keys in its.items()
        if any(k in tensors and tensors[k].shape for k in keys)
    }
    found: Dropped = {}
    for its in slots.values():
        present = {slot for slot, keys in its.items() if slot in shaped and any(key in tensors for key in keys)}
        gone = {slot for slot in present if request.drops(slot)}
        if request.optimizer or (gone and gone == present - {MASTER}):
            gone = its.keys() - ({MASTER} if masters or not request.optimizer else set())
        found |= {key: slot for slot in gone for key in its[slot]}
    return found


@dataclass(frozen=True, slots=True)
class _Item:
    """An item, or a chunk of one: where it lies, and the node that says so; the slot that it is of, if it goes."""

    info: Object
    file: str
    offset: int
    nbytes: int
    slot: str | None

    @property
    def range(self) -> tuple[int, int]:
        """First byte, and the byte after the last."""
        return self.offset, self.offset + self.nbytes


def _files(folder: _Folder, request: Request) -> Iterator[Rewritten]:
    """Yield what becomes of a folder's files."""
    within = f"{folder.name}/" if folder.name else ""
    about = Path(folder.metadata.path)
    root = read_pickle(about).root
    by_file: dict[str, list[_Item]] = {}
    for item in _items(root, folder.dropped):
        by_file.setdefault(item.file, []).append(item)
    shorter = False
    for name, items in by_file.items():
        path = folder.path / name
        nbytes = path.stat().st_size
        stay = [item for item in items if item.slot is None]
        gone = [(*item.range, item.slot) for item in items if item.slot is not None]
        alignment = ALIGNMENT if all(item.offset % ALIGNMENT == 0 for item in items) else 1
        used = [item.range for item in stay]
        if not request.unreferenced:
            used = without([(0, nbytes)], merge((low, min(high + -high % alignment, nbytes)) for low, high, _ in gone))
        kept = kept_ranges(used, nbytes, alignment)
        if kept.nbytes == nbytes:
            yield as_it_is(path, within + name)
            continue
        shorter = True
        kinds = shares(without([(0, nbytes)], kept.ranges), gone)
        rest = nbytes - kept.nbytes - sum(kinds.values())
        kinds |= {UNREFERENCED: rest} if rest and request.unreferenced else {}
        if not stay:
            yield Rewritten(within + name, nbytes, None, {**kinds, **_left(nbytes, kinds)})
            continue
        for item in stay:
            _place(item, kept.place(item.offset))
        yield replaced(within + name, nbytes, _cut(path, within + name, kept), kinds)
    if not shorter:
        yield as_it_is(about, within + about.name)
        return
    data = _without(root, folder.dropped)
    yield replaced(
        within + about.name, about.stat().st_size, TargetFile(within + about.name, len(data), [Literal(0, data)]), {}
    )


def _left(nbytes: int, kinds: dict[str, int]) -> dict[str, int]:
    """Return what of a file that goes is of no kind yet."""
    rest = nbytes - sum(kinds.values())
    return {STRUCTURE: rest} if rest else {}


def _mapping(root: object, name: str) -> dict[object, object]:
    found = root.get(name) if isinstance(root, Object) else None
    return found if isinstance(found, dict) else {}


def _items(root: object, dropped: Dropped) -> Iterator[_Item]:
    """Yield the items, which `read_metadata` has found to be well-formed."""
    for index, info in _mapping(root, "storage_data").items():
        if isinstance(index, Object) and isinstance(info, Object):
            file, offset, length = (info.get(name) for name in ("relative_path", "offset", "length"))
            if isinstance(file, str) and isinstance(offset, int) and isinstance(length, int):
                yield _Item(info, file, offset, length, dropped.get(str(index.get("fqn"))))


def _place(item: _Item, offset: int) -> None:
    """Say where an item lies now."""
    parts = item.info.state if isinstance(item.info.state, tuple) else (item.info.state,)
    next(part for part in parts if isinstance(part, dict) and "offset" in part)["offset"] = offset


def _without(root: object, dropped: Dropped) -> bytes:
    """Return the pickle without the items that go."""
    for name in ("state_dict_metadata", "planner_data"):
        content = _mapping(root, name)
        for key in [key for key in content if key in dropped]:
            del content[key]
    places = _mapping(root, "storage_data")
    for index in [one for one in places if isinstance(one, Object) and one.get("fqn") in dropped]:
        del places[index]
    return dump(root).data


def _cut(path: Path, name: str, kept: Kept) -> TargetFile:
    """Return a file of some ranges of another."""
    file = TargetFile(name, kept.nbytes)
    for (low, high), start in zip(kept.ranges, kept.starts, strict=True):
        extent = Extent.whole((high - low,))
        slot = Slot("file", "uint8", extent.sizes, (Span(extent, str(path), low, "uint8"),))
        file.holes.append(Hole(start, name, slot, extent, "uint8"))
    return file
