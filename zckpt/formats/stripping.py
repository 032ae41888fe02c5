"""A torch file without some of its bytes, and what was saved, by kind; and what becomes of the directory that it is in.

An edit takes tensors out of a file's tree or narrows them; what follows for the file's storages is decided here:

    a storage that no tensor is left of                     goes
    one that the edit trimmed, or any under `unreferenced`  keeps the bytes within reach of its tensors
    every other one                                         stays as it is

storage     |aaaa....bbbb|cc..........|
shrunk      |aaaabbbb|cc|                 a tensor's reach, first to last element, stays in one piece

In the tree tensors get other storages where they are, so that whatever shared an object or went in a circle still does.
A file of which nothing goes is copied, byte for byte. Knows no program's keys.

DIR/...                     whatever the format does not know is copied; a fingerprint goes if anything does
RUN/latest, RUN/DIR/...     given the run's directory, the target is one, too: of this checkpoint alone
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field, replace
from itertools import accumulate
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.formats.companions import copy_of, files_below
from zckpt.formats.torch_files.writer import FromFile, SlotContent, lay_out, new_storage
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Slot, by_key
from zckpt.state.boxes import Range, merge, total, without
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import is_file
from zckpt.storage.ownership import FINGERPRINT_NAME
from zckpt.torchfile import Storage, Tensor, TorchFile, children, each, is_leaf, read_torchfile, walk_tensors


@immutable
class Kept:
    """The bytes of a storage that are kept."""

    ranges: tuple[Range, ...]  # bytes; apart from each other, in order
    starts: tuple[int, ...]  # bytes; where each goes

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return self.starts[-1] + self.ranges[-1][1] - self.ranges[-1][0] if self.ranges else 0

    def place(self, offset: int) -> int:
        """Return where a byte goes that is kept."""
        index = bisect_right(self.ranges, offset, key=lambda one: one[0]) - 1
        return self.starts[index] + offset - self.ranges[index][0]


def kept_ranges(used: Iterable[Range], nbytes: int, alignment: int) -> Kept:
    """Return what a storage keeps, so that the ranges used are in it.

    Parameters
    ----------
    used : iterable of (int, int), bytes
        In any order; they may overlap.
    nbytes : int, bytes
        Of the storage.
    alignment : int, bytes
        Every byte keeps its place relative to multiples of this.
    """
    ranges = merge((a - a % alignment, min(b + -b % alignment, nbytes)) for a, b in used if a < b)
    starts = accumulate((high - low for low, high in ranges[:-1]), initial=0)
    return Kept(tuple(ranges), tuple(starts) if ranges else ())


def shares(ranges: Sequence[Range], owned: Iterable[tuple[int, int, str]]) -> Counter[str]:
    """Return how many bytes of some ranges are each owner's; of what several own, the first one's.

    `ranges` (bytes): apart from each other and in order; `owned`: ranges and who owns them, in any order.
    """
    pieces: list[tuple[int, int, str]] = []
    for low, high, owner in sorted(owned):
        start = max(low, pieces[-1][1]) if pieces else low
        if start < high:
            pieces.append((start, high, owner))
    found: Counter[str] = Counter()
    first = 0
    for low, high in ranges:
        while first < len(pieces) and pieces[first][1] <= low:
            first += 1
        at = first
        while at < len(pieces) and pieces[at][0] < high:
            start, end, owner = pieces[at]
            found[owner] += min(high, end) - max(low, start)
            at += 1
    return found


PADDING = "padding"
UNREFERENCED = "unreferenced"
STRUCTURE = "structure"
"""The kind of all bytes that are no tensor's: pickles, headers, alignment within a file. May be negative."""

PACKED = ("quint4x2", "quint2x4")
"""Types with several elements in a byte: their reach is not a multiple of an element."""


@immutable
class Request:
    """What is to go."""

    padding: bool = False
    optimizer: bool = False  # the whole state of the optimizer
    unreferenced: bool = False  # bytes of storages that no tensor uses
    keep_slots: frozenset[str] | None = None
    """The optimizer's slots that stay, besides masters; None: all, unless `optimizer` is set."""

    @property
    def slots(self) -> bool:
        """Whether any slot may have to go."""
        return self.optimizer or self.keep_slots is not None

    def drops(self, slot: str) -> bool:
        """Tell whether a slot of the optimizer goes."""
        return self.optimizer or (self.keep_slots is not None and slot not in self.keep_slots and slot != MASTER)

    def of(self, present: Collection[str]) -> tuple[set[str], bool]:
        """Return which of a parameter's slots go, and whether what the optimizer has of it besides goes with them.

        That is a step, say: it goes with the last slot.
        """
        gone = {slot for slot in present if self.drops(slot)}
        return gone, self.optimizer or (bool(gone) and len(gone) == len(present))

    @property
    def notes(self) -> tuple[str, ...]:
        """What of it a format without partitions has no use for."""
        return ("this format has no padding",) if self.padding else ()

    def needs(self, slot: str) -> bool:
        """Tell whether a slot must be there afterwards; the model always is."""
        if slot == MASTER:
            return not self.optimizer
        return slot == WEIGHT or not self.slots or (self.keep_slots is not None and slot in self.keep_slots)


@mutable
class Edited:
    """What is left of a file after an edit."""

    root: object  # its tree; None where the whole file goes
    dropped: list[tuple[str, Tensor]] = field(default_factory=list)
    """Tensors that are no longer in the tree, and of which kind they are."""
    trimmed: set[str] = field(default_factory=set)  # keys of storages of which padding is to go
    changed: bool = False  # whether the tree differs from the file's even where no tensor was dropped


Edit = Callable[[TorchFile], Edited]


@immutable
class Rewritten:
    """A file of the source and what becomes of it."""

    name: str  # within the target
    nbytes: int  # of the source's file
    file: TargetFile | None  # None where it goes
    saved: dict[str, int]  # bytes; by kind; they add up to the difference of the two files


@immutable
class Stripping:
    """What becomes of a checkpoint."""

    files: list[Rewritten]
    notes: tuple[str, ...] = ()  # what to know of the target


def as_it_is(path: Path, name: str) -> Rewritten:
    """Return a file that is copied, byte for byte."""
    copy = copy_of(path, name)
    return Rewritten(name, copy.nbytes, copy, {})


def replaced(name: str, nbytes: int, file: TargetFile, kinds: dict[str, int]) -> Rewritten:
    """Return a file in place of one of `nbytes` bytes, given the bytes of the tensors that went, by kind."""
    return Rewritten(name, nbytes, file, _complete(kinds, nbytes - file.nbytes))


def gone(path: Path, name: str, kinds: dict[str, int]) -> Rewritten:
    """Return a file that goes, given the bytes of its tensors by kind."""
    nbytes = path.stat().st_size
    return Rewritten(name, nbytes, None, _complete(kinds, nbytes))


def rewrite(path: Path, name: str, edit: Edit, *, unreferenced: bool) -> Rewritten:
    """Return a torch file after an edit.

    `name`: within the target; `edit`: gets the file, whose tree is its own to change; `unreferenced`: whether bytes go
    that no tensor uses. Raises SourceError: the file cannot be read, or holds what cannot be written.
    """
    file = read_torchfile(path)
    edited = edit(file)
    saved = _narrow(file, edited, unreferenced=unreferenced)
    if edited.root is None:
        return gone(path, name, saved)
    if not edited.changed and not edited.dropped and not saved:
        return as_it_is(path, name)
    target = lay_out(name, FromFile.of(file, edited.root))
    return replaced(name, file.nbytes, target, saved)


def _narrow(file: TorchFile, edited: Edited, *, unreferenced: bool) -> dict[str, int]:
    """Give tensors of an edited tree the storages that are left of theirs; return the bytes that go, by kind."""
    tensors = by_key((tensor.storage.key, tensor) for _, tensor in walk_tensors(edited.root))
    dropped = by_key((tensor.storage.key, (*tensor.reach, kind)) for kind, tensor in edited.dropped)
    nodes = each(edited.root, lambda node: [one for _, one in children(node) if not is_leaf(one)])
    whole = {one.key for node in nodes for _, one in children(node) if isinstance(one, Storage)}  # by themselves
    saved: Counter[str] = Counter()
    for key, storage in file.storages.items():
        views, trimmed = tensors.get(key, []), key in edited.trimmed
        cannot = any(  # one without a type in the other byte order is not cut up
            one.dtype in PACKED or not (one.dtype == storage.dtype or one.byteorder == "little" or one.itemsize == 1)
            for one in views
        )
        if key in whole or (views and (cannot or not (unreferenced or trimmed))):
            continue
        alignment = max([itemsize(storage.dtype), *(one.itemsize for one in views)])
        kept = kept_ranges((one.reach for one in views), storage.nbytes, alignment)
        if views and kept.nbytes < storage.nbytes:
            size, parts = itemsize(storage.dtype), []
            for (low, high), start in zip(kept.ranges, kept.starts, strict=True):
                shape, at = ((high - low) // size,), storage.offset + low
                slot = Slot.at(file.path, at, storage.dtype, shape, "storage", views[0].byteorder)
                parts.append(SlotContent(start // size, slot, f"storage {storage.key} of {file.path}"))
            shrunk = new_storage(storage.dtype, kept.nbytes // size, parts, location=storage.location)
            for one in views:
                one.storage_offset = kept.place(one.reach[0]) // one.itemsize if one.numel else 0
                one.storage, one.byteorder = shrunk, "little"
        removed = without([(0, storage.nbytes)], kept.ranges)
        of = shares(removed, dropped.get(key, ()))
        of[PADDING if trimmed else UNREFERENCED] = total(removed) - of.total()
        saved += of
    return saved


def _complete(saved: dict[str, int], nbytes: int) -> dict[str, int]:
    """Return bytes by kind that add up to `nbytes`."""
    rest = nbytes - sum(saved.values())
    return {**saved, **({STRUCTURE: rest} if rest else {})}


def completed(
    source: Path,
    directory: Path,
    own: Sequence[Rewritten],
    *,
    pointer: str | None = None,
    beside: Sequence[tuple[str, Path]] | None = None,
    notes: Sequence[str] = (),
) -> Stripping:
    """Return what becomes of all files, given what becomes of those that the format knows.

    Parameters
    ----------
    source : Path
        The directory as the user named it: this one, or one that it is in.
    directory : Path
    own : sequence of Rewritten
        By their names within `directory`.
    pointer : str, optional
        The name of the file of a run's directory that names one of its checkpoints.
    beside : sequence of (str, Path), optional
        What of a run's directory goes along, by name; by default nothing does.
    notes : sequence of str
        What the format has to say.

    Raises
    ------
    SourceError
        Something in it is neither a file nor a directory.
    """
    inner = Path(os.path.relpath(os.path.realpath(directory), os.path.realpath(source))).as_posix()
    folder = "" if inner == os.curdir or inner.startswith(os.pardir) else f"{inner}/"
    done = {one.name for one in own}
    changed = any(one.file is None or one.saved.keys() - {PADDING, UNREFERENCED, STRUCTURE} for one in own)
    files = [*own]
    for name, path in files_below(directory):
        if name == FINGERPRINT_NAME and changed:
            files.append(gone(path, name, {}))
        elif name not in done:
            files.append(as_it_is(path, name))
    said = [*notes]
    if folder:
        moved = ((one, folder + one.name) for one in files)
        files = [replace(one, name=name, file=one.file and replace(one.file, name=name)) for one, name in moved]
        files += [as_it_is(path, name) for name, path in beside or ()]
        if beside is None:
            said.append("of the run's directory only this checkpoint is written")
        if pointer is not None and is_file(source / pointer):
            data = inner.encode()
            files.append(Rewritten(pointer, len(data), TargetFile.of(pointer, data), {}))
    return Stripping(files, tuple(said))
