"""A checkpoint becomes part of a store: its files are cut, predicted, encoded by threads, and named in one step.

What a kill leaves is chunks without an index, which nothing reads; who packs next removes them.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from zckpt.errors import DamagedFileError, SourceError, TargetError, TargetExistsError
from zckpt.immutable import immutable
from zckpt.storage.ahead import ahead
from zckpt.storage.disk import sync
from zckpt.storage.durable import written
from zckpt.storage.files import entries_of, opened, unreadable
from zckpt.storage.packed import DOCUMENT, STORE
from zckpt.storage.packed.chunks import AS_IT_IS, CHUNK_NBYTES, XOR, ZEROS, Bytes, Way, encode, is_zero
from zckpt.storage.packed.index import RANGE, ROW, Filed, Index
from zckpt.storage.packed.store import GIVEN, PackedStore, document
from zckpt.storage.room import write_errors

LEAST_PREDICTED = 64
"""Bytes; what is smaller is stored as it is."""

DEEPEST = 9
"""Chunks before a chunk that it is predicted from, one from the other, unless said otherwise: to read the last of ten
takes as long as to read all of them."""

Range = tuple[int, int, int, int]
"""Number of a checkpoint, of its file, offset, number of bytes."""

Chunk = tuple[npt.NDArray[np.void], tuple[Range, ...]]
"""A row, and the ranges of its prediction."""


@immutable
class Prediction:
    """What is done to bytes, and the ranges that these are, in order."""

    cast: int
    ranges: tuple[Range, ...]

    def part(self, low: int, high: int) -> tuple[Range, ...]:
        """Return what predicts bytes [low, high) of what this predicts."""
        factor = 1 if self.cast == AS_IT_IS else 2
        low, high, at, found = low * factor, high * factor, 0, []
        for number, file, offset, nbytes in self.ranges:
            begin, end = max(low, at), min(high, at + nbytes)
            if begin < end:
                found.append((number, file, offset + begin - at, end - begin))
            at += nbytes
            if at >= high:
                break
        return tuple(found)


@immutable
class Cut:
    """Bytes [start, end) of a file that are elements of `width` bytes each, and what may predict them, by kind."""

    start: int
    end: int
    width: int
    predictions: Mapping[str, Prediction] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[int, dict[str, int]]:
        """What neighbours have in common that are predicted together."""
        return self.width, {kind: one.cast for kind, one in self.predictions.items()}


@immutable
class _Job:
    """A chunk that is to be."""

    file: int
    start: int
    nbytes: int
    width: int
    predictions: tuple[Prediction, ...]


@immutable
class _Made:
    """A chunk: its row, the ranges of its prediction, and what is stored; None: it is stored already."""

    row: npt.NDArray[np.void]
    ranges: tuple[Range, ...]
    stored: bytes | None


def files_of(path: Path, apart: Iterable[Path] = ()) -> tuple[Filed, ...]:
    """Return all that a checkpoint is: the files, links and directories at or below a path; not other checkpoints.

    `apart`: these, by paths without links. A link to a file elsewhere, or in one of these, is that file: Hugging Face's
    cache has nothing but such links, whose bytes would not be in the store. Raises SourceError: it cannot be read, or
    something is neither.
    """
    if path.is_file():
        return (_filed(path.resolve(), path.name),)  # of a link, what it leads to, whose bytes are read
    root = path.resolve()
    others = {one for one in apart if root in one.parents}
    above = {up for one in others for up in one.parents}

    def below(folder: Path, front: str) -> Iterator[Filed]:
        for entry in entries_of(folder):
            at, here = Path(entry.path), root / front / entry.name
            if here in others:
                continue
            there = at.resolve() if at.is_symlink() and at.is_file() else here
            is_elsewhere = not there.is_relative_to(root) or not others.isdisjoint((there, *there.parents))
            one = _filed(there if is_elsewhere else at, f"{front}{entry.name}")
            inner = [*below(at, f"{one.name}/")] if one.kind == "folder" else []
            if inner or here not in above:  # what only leads to others is none of its
                yield one
                yield from inner

    return tuple(below(path, ""))


def _filed(path: Path, name: str) -> Filed:
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            return Filed(name, "link", 0o777, about.st_mtime_ns, 0, str(path.readlink()))
    except OSError as error:
        raise unreadable(path, error) from error
    mode = stat.S_IMODE(about.st_mode) or 0o644  # of what only stands in for a file: none
    if stat.S_ISDIR(about.st_mode):
        return Filed(name, "folder", mode, about.st_mtime_ns)
    if not stat.S_ISREG(about.st_mode):
        raise SourceError("is not a regular file, and cannot be packed", path=path)
    return Filed(name, "file", mode, about.st_mtime_ns, about.st_size)


@contextmanager
def writing(path: Path, *, kind: str = STORE) -> Iterator[PackedStore]:
    """Make a store where there is none, and hold it: no other run packs into it meanwhile.

    What runs that were killed have left in it is removed.

    Raises TargetError: it cannot be written, something else is there, or another run is packing into it.
    """
    with write_errors(path):
        if not os.path.lexists(path / DOCUMENT):
            if path.is_dir() and any(not one.name.startswith(f".{DOCUMENT}") for one in path.iterdir()):
                raise TargetError(
                    "is a directory that holds something else", path=path, expected="a store, or an empty directory"
                )
            with suppress(TargetExistsError), written([path / DOCUMENT], overwrite=False) as [new]:
                new.write_bytes(document(kind))
        store = PackedStore(path, kind=kind)
        with (path / DOCUMENT).open("rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TargetError(
                    "another run is writing to it", path=path, advice="wait until it has finished"
                ) from error
            except OSError:  # a file system without locks
                pass
            for one in path.iterdir():
                unnamed = one.suffix == ".chunks" and not one.with_suffix(".index").exists()
                if unnamed or (one.name.startswith(".") and one.suffix == ".index"):
                    one.unlink()
            yield store


class Known:
    """The chunks that a store has, by their checksums."""

    def __init__(self, store: PackedStore) -> None:
        self._store = store
        self._high: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._where: npt.NDArray[np.uint32] = np.empty((0, 2), np.uint32)
        self._new: dict[tuple[int, int, int], Chunk] = {}
        for number in store.names()[0].values():
            self._add(number)

    def _add(self, number: int) -> None:
        rows = self._store.index(number).rows
        where = np.stack([np.full(len(rows), number, np.uint32), np.arange(len(rows), dtype=np.uint32)], 1)
        high = np.concatenate([self._high, rows["high"]])
        order = np.argsort(high, kind="stable")
        self._high, self._where = high[order], np.concatenate([self._where, where])[order]

    def named(self, number: int) -> None:
        """Note that a checkpoint has its name now."""
        self._new.clear()
        self._add(number)

    def note(self, made: _Made) -> None:
        """Note a chunk of the checkpoint that is being packed."""
        high, low, nbytes = (int(made.row[name]) for name in ("high", "low", "nbytes"))
        self._new[high, low, nbytes] = made.row, made.ranges

    def find(self, high: int, low: int, nbytes: int) -> Chunk | None:
        """Return a chunk of the same bytes, and its ranges."""
        if (high, low, nbytes) in self._new:
            return self._new[high, low, nbytes]
        at = int(np.searchsorted(self._high, np.uint64(high)))
        while at < len(self._high) and self._high[at] == high:
            number, row = self._where[at].tolist()
            index = self._store.index(number)
            found = index.rows[row]
            if found["low"] == low and found["nbytes"] == nbytes:
                some = index.ranges[int(found["first"]) : int(found["first"]) + int(found["count"])]
                return index.rows[row : row + 1].copy()[0], tuple(map(tuple, some.tolist()))
            at += 1
        return None


@dataclass
class Packing:
    """What a checkpoint is packed with."""

    store: PackedStore
    known: Known | None  # None: no chunk is looked for that is stored already, as in a patch
    number: int  # of the checkpoint
    path: Path  # the checkpoint
    files: tuple[Filed, ...]
    deepest: int  # how deep a chunk may be that is predicted from another checkpoint
    advance: Callable[[int], None]  # hears of bytes that are done
    apart: Collection[Path] = ()  # other checkpoints, which may lie in it

    def write(self, name: str, cuts: Callable[[str], Sequence[Cut]], details: dict[str, object]) -> int:
        """Pack a checkpoint; return what its chunks and its index take, in bytes.

        `cuts`: returns how a file is cut, in order. Raises SourceError: a file cannot be read, or changes meanwhile;
        TargetError: the store cannot be written.
        """
        chunks, rows, ranges = self.store.chunks_path(self.number), list[npt.NDArray[np.void]](), list[Range]()
        jobs = (job for number, one in enumerate(self.files) for job in self._jobs(number, one, cuts))
        try:
            with (
                write_errors(self.store.path),
                chunks.open("xb") as out,
                closing(ahead(self._make, jobs)) as made_ones,
            ):
                for made in made_ones:
                    rows.append(self._placed(made, out, ranges))
                out.flush()
                os.fsync(out.fileno())
                self._check_same()
                table = np.array(rows, ROW) if rows else np.empty(0, ROW)
                index = Index(name, self.path.is_file(), self.files, table, np.array(ranges, RANGE), details)
                data, new = index.to_bytes(), self.store.path / f".{self.number:06d}.index"
                new.write_bytes(data)
                sync(new)
                new.replace(self.store.index_path(self.number))
                sync(self.store.path)
                return len(data) + out.tell()
        except BaseException:
            if not self.store.index_path(self.number).exists():
                chunks.unlink(missing_ok=True)
            raise

    def _jobs(self, number: int, file: Filed, cuts: Callable[[str], Sequence[Cut]]) -> Iterator[_Job]:
        """Yield the chunks of a file: neighbours of a kind together, what is between them, what is large in several."""
        group: list[Cut] = []
        at = 0
        for cut in (*cuts(file.name), Cut(file.nbytes, file.nbytes, 1)):
            if cut.start < at or (cut.end > file.nbytes):
                continue
            if group and (cut.start != at or cut.kind != group[0].kind or cut.end - group[0].start > CHUNK_NBYTES):
                yield from _joined(number, group)
                group = []
            yield from _joined(number, [Cut(at, cut.start, 1)])
            if cut.end > cut.start:
                group.append(cut)
            at = cut.end
        if group:
            yield from _joined(number, group)

    def _make(self, job: _Job) -> _Made:
        data = self._read(job.file, job.start, job.nbytes)
        digest = xxhash.xxh3_128_intdigest(data.data)
        high, low = digest >> 64, digest & (1 << 64) - 1
        found = self.known.find(high, low, job.nbytes) if self.known is not None else None
        if found is not None and found[0]["depth"] <= self.deepest + 1:
            return _again(found, job.file)
        way, stored, ranges, depth = Way(ZEROS, 1), b"", tuple[Range, ...](), 0
        if not is_zero(data):
            some = [one for one in job.predictions if job.nbytes >= LEAST_PREDICTED and self._depth(one) is not None]
            way, which, stored = encode(data, job.width, ((one.cast, self._predicted(one)) for one in some))
            if way.op >= XOR:
                ranges, depth = some[which].ranges, (self._depth(some[which]) or 0) + 1
        row = np.zeros((), ROW)
        for name, value in (
            ("file", job.file), ("nbytes", job.nbytes), ("op", way.op), ("width", way.width), ("cast", way.cast),
            ("depth", depth), ("data", self.number), ("stored", len(stored)), ("high", high), ("low", low),
        ):  # fmt: skip
            row[name] = value
        return _Made(row, ranges, stored)

    def _placed(self, made: _Made, out: BinaryIO, ranges: list[Range]) -> npt.NDArray[np.void]:
        """Write what is stored of a chunk, and return its row."""
        row = made.row
        if made.stored is not None and self.known is not None:
            found = self.known.find(int(row["high"]), int(row["low"]), int(row["nbytes"]))
            if found is not None and found[0]["data"] == self.number:  # of another chunk that was made meanwhile
                made = _again(found, int(row["file"]))
                row = made.row
        if made.stored is not None:
            row["offset"] = out.tell()
            out.write(made.stored)
            if self.known is not None and not any(one[0] == self.number for one in made.ranges):
                self.known.note(made)  # what this checkpoint predicts itself could be predicted from it
        row["first"], row["count"] = len(ranges), len(made.ranges)
        ranges.extend(made.ranges)
        self.advance(int(row["nbytes"]))
        return row

    def _depth(self, prediction: Prediction) -> int | None:
        """Return how deep a prediction is; None: too deep, or there is none."""
        if not prediction.ranges:
            return None
        deepest = 0
        for number, file, offset, nbytes in prediction.ranges:
            if number == self.number:
                deepest = max(deepest, self.deepest)  # of what is not packed yet, what it may be
            elif number != GIVEN:
                deepest = max(deepest, self.store.index(number).depth(file, offset, nbytes))
                if deepest >= self.deepest:
                    return None
        return deepest

    def _predicted(self, prediction: Prediction) -> Bytes:
        data, at = np.empty(sum(one[3] for one in prediction.ranges), np.uint8), 0
        for number, file, offset, nbytes in prediction.ranges:
            part = data[at : at + nbytes]
            if number == self.number:
                part[:] = self._read(file, offset, nbytes)
            else:
                self.store.read_into(number, file, offset, part.data)
            at += nbytes
        return data

    def _read(self, file: int, offset: int, nbytes: int) -> Bytes:
        path = self.path if self.path.is_file() else self.path / self.files[file].name
        try:
            with opened(path) as found:
                return np.frombuffer(found.read(offset, nbytes), np.uint8)
        except DamagedFileError as error:
            raise _changing(self.path) from error

    def _check_same(self) -> None:
        if files_of(self.path, self.apart) != self.files:
            raise _changing(self.path)


def _joined(number: int, group: Sequence[Cut]) -> Iterator[_Job]:
    """Yield the chunks of neighbours of a kind in a file of this number."""
    first, end = group[0].start, group[-1].end
    merged = {
        kind: Prediction(one.cast, tuple(r for cut in group for r in cut.predictions[kind].ranges))
        for kind, one in group[0].predictions.items()
    }
    for low in range(0, end - first, CHUNK_NBYTES):
        high = min(low + CHUNK_NBYTES, end - first)
        some = tuple(Prediction(one.cast, one.part(low, high)) for one in merged.values())
        yield _Job(number, first + low, high - low, group[0].width, some)


def _again(found: Chunk, file: int) -> _Made:
    """Return a chunk that is stored, as one of another file."""
    row = found[0].copy()
    row["file"] = file
    return _Made(row, found[1], None)


def _changing(path: Path) -> SourceError:
    return SourceError("changed while it was packed", path=path, advice="pack it when it is complete")
