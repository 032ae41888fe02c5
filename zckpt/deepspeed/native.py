"""What stock DeepSpeed saves, as a checkpoint of zckpt's own format. Nothing of DeepSpeed's form is written.

    every rank      keeps what its engine gives away, as files in its memory
    every rank      sends the first all of them but long tensors
    first rank      opens that as it opens a directory of DeepSpeed's, and tells each what it writes
    every rank      writes its file from its memory, and says to the first what is in it
    first rank      writes `checkpoint.json`

What the reader has to look at besides, such as tensors in client states, it is sent when it asks. Readers find files
that no disk has by name: a folder has a name and a size for each, as for what is in a store (`storage.stand_ins`).
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from zckpt.deepspeed.engine import in_memory, kind_that_keeps, training_of
from zckpt.deepspeed.loading import load_plain
from zckpt.engine.targets import Literal, TargetFile
from zckpt.engine.virtual import VirtualFile
from zckpt.errors import SourceError, TargetError, UnsupportedError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED
from zckpt.formats.native.rank_file import Entry
from zckpt.formats.native.writer import ByRank, by_rank
from zckpt.formats.registry import get
from zckpt.formats.torch_files.writer import lay_out
from zckpt.operations.convert import as_converted
from zckpt.optim.ranks import Ranks, written_together
from zckpt.state import ZEROS, Slot
from zckpt.storage.stand_ins import FILES, forget_all, new_base, stand_in
from zckpt.training.directory import new_identity, write_laid_out, write_rank


@dataclass(frozen=True, slots=True)
class Sketch:
    """A file as another process is told of it.

    `literals`: all but long ones, and what the file begins with, its pickle, however long; `absent`: where the long
    ones are, and how long.
    """

    nbytes: int
    literals: list[Literal]
    absent: list[tuple[int, int]]


def sketch(file: TargetFile, longest: int) -> Sketch:
    """Return a file of literals, for another process, without those of tensors of more than `longest` bytes."""
    absent = [(one.offset, len(one.data)) for one in file.literals if one.offset and len(one.data) > longest]
    without = {offset for offset, _ in absent}
    sent = [Literal(one.offset, bytes(one.data)) for one in file.literals if one.offset not in without]
    return Sketch(file.nbytes, sent, absent)


class Held:
    """A file of which some bytes are here.

    What begins with bytes that are here is read, with zeros for others: what reads an archive's headers passes over
    data. What begins with others is refused, and noted.
    """

    identity = ""

    def __init__(self, path: str, literals: Iterable[Literal]) -> None:
        self.path = path
        self.missed: list[int] = []
        self.take(literals)

    def take(self, literals: Iterable[Literal]) -> None:
        """Take bytes instead of those that are here."""
        self._literals = sorted((one for one in literals if len(one.data)), key=lambda one: one.offset)
        self._starts = [one.offset for one in self._literals]

    def has(self, offset: int) -> bool:
        """Tell whether a byte is here."""
        return self._first(offset) is not None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`. Raises SourceError: the first is not here."""
        first, end = self._first(offset), offset + len(buffer)
        if first is None:
            if not len(buffer):
                return
            self.missed.append(offset)
            raise SourceError("has bytes that another rank has", path=self.path)
        done = offset
        for one in self._literals[first:]:
            if one.offset >= end:
                break
            low, high = max(one.offset, offset), min(one.offset + len(one.data), end)
            buffer[done - offset : low - offset] = bytes(low - done)
            buffer[low - offset : high - offset] = memoryview(one.data)[low - one.offset : high - one.offset]
            done = high
        buffer[done - offset :] = bytes(end - done)

    def _first(self, offset: int) -> int | None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        one = self._literals[index]
        return index if offset < one.offset + len(one.data) else None


class HeldFiles:
    """A folder of such files, below which `tag` is; to be closed. Raises TargetError: names cannot be made."""

    def __init__(self, tag: str) -> None:
        with _named():
            self._base = new_base(in_memory())
            self.directory = self._base / "files" / tag
            self.directory.mkdir(parents=True)
        self.files: dict[str, Held] = {}

    def add(self, name: str, nbytes: int, literals: Sequence[Literal]) -> None:
        """Add a file; its directories are made. Raises as the folder itself."""
        path = self.directory / name
        with _named():
            stand_in(path, nbytes)
        FILES[str(path)] = self.files[name] = Held(str(path), literals)

    def close(self) -> None:
        """Remove the folder."""
        forget_all(self._base, [one.path for one in self.files.values()])


@contextmanager
def _named() -> Iterator[None]:
    """Turn an error of the file system that has the names into one that says so."""
    try:
        yield
    except OSError as error:
        raise TargetError(
            "names of files, which have no bytes there, cannot be made",
            path=in_memory() or tempfile.gettempdir(),
            found=error.strerror,
            advice="make room there, or leave format out",
        ) from error


SENT_NBYTES = 1 << 10
"""Of a tensor that is sent with its file: steps and other single values."""

ASKED_NBYTES = 1 << 20
"""Of a tensor that is sent when it is asked for; more would be looking at the state itself."""

GROWTH = 4
"""By how much more is sent each time: what one tensor of a size is asked for, others are."""

SCRIPT = ".py"
"""Of what DeepSpeed puts beside its checkpoints to read its own files with; it lies beside those only."""


def names_of(engine: Any) -> list[str]:
    """Return the names of the parameters in the order of the optimizer, which may only number them in its files.

    Raises UnsupportedError: what the engine saves as zckpt's format could not be loaded into one like it.
    """
    kind = kind_that_keeps(engine)
    if getattr(engine, "pipeline_parallelism", False):
        kind = "a pipeline"
    elif kind is None and int(engine.mp_world_size) > 1:
        kind = "tensor parallelism"
    if kind is not None:
        raise UnsupportedError(
            f"an engine with {kind} loads DeepSpeed's own format only",
            advice="leave format out, and let `zckpt convert --to zckpt` write it",
        )
    return [name for names in training_of(engine).numbered for name in names]


def write(ranks: Ranks, path: Path, files: Sequence[TargetFile], others: Sequence[str], names: Sequence[str]) -> None:
    """Write a checkpoint together with the other ranks.

    Parameters
    ----------
    ranks : Ranks
    path : Path
    files : sequence of TargetFile
        Those of this rank, of literals only, named from the checkpoint's directory.
    others : sequence of str
        What DeepSpeed has written by itself, named from the run's directory.
    names : sequence of str
        As `names_of` returns them.

    Raises
    ------
    UnsupportedError
        It holds what the format cannot, or what only those who look at tensors can tell.
    TargetError
        It cannot be written.
    """
    with (
        written_together(path, ranks, overwrite=True, owned=OWNED, last=[DOCUMENT_NAME]) as target,
        ExitStack() as stack,
    ):
        held = ranks.do(lambda: _held(files, path.name, others, stack))
        laid = _laid_out(ranks, held, files, path, names)
        mine: list[Entry] = ranks.scatter([] if laid is None else laid.entries)
        identity = ranks.from_first(new_identity())
        here = [replace(one, slot=_with_paths(one.slot, lambda path: held.directory / path)) for one in mine]
        every = ranks.gather(ranks.do(lambda: write_rank(target, ranks.rank, ranks.world_size, here, identity)))
        ranks.do(lambda: None if laid is None else write_laid_out(laid.members, identity, every, target))


def _held(files: Sequence[TargetFile], tag: str, others: Sequence[str], stack: ExitStack) -> HeldFiles:
    """Return this rank's files, to be read by name; they are closed with the stack."""
    unknown = [name for name in others if Path(name).name != name or Path(name).suffix != SCRIPT]
    if unknown:
        raise UnsupportedError("the engine saves files of which zckpt's format has nothing", found=", ".join(unknown))
    held = HeldFiles(tag)
    stack.callback(held.close)
    for file in files:
        held.add(file.name, file.nbytes, file.literals)
    return held


def _laid_out(
    ranks: Ranks, held: HeldFiles, files: Sequence[TargetFile], path: Path, names: Sequence[str]
) -> ByRank | None:
    """Return what each rank writes, its slots in files by their names, on the first rank; None on others."""
    told: list[dict[str, Sketch]] = ranks.gather({file.name: sketch(file, SENT_NBYTES) for file in files})
    reading = _Reading(ranks, held, told, path, names) if ranks.rank == 0 else None
    ranks.do(lambda: None if reading is None else reading.begin())
    while True:
        laid = ranks.do(lambda: None if reading is None else reading.attempt())
        asked: set[tuple[str, int]] | None = ranks.from_first(None if reading is None else reading.asked)
        if not asked:
            return laid
        own = [(file.name, one) for file in files for one in file.literals]
        sent = ranks.gather({(name, one.offset): bytes(one.data) for name, one in own if (name, one.offset) in asked})
        if reading is not None:
            reading.take(sent)


class _Reading:
    """The first rank's, which opens what all have sent; what is still to be sent, by file and offset, is `asked`."""

    def __init__(
        self, ranks: Ranks, held: HeldFiles, told: Sequence[dict[str, Sketch]], path: Path, names: Sequence[str]
    ) -> None:
        self.asked: set[tuple[str, int]] = set()
        self._ranks, self._held, self._told, self._path, self._names = ranks, held, told, path, names
        self._most = SENT_NBYTES
        self._rank_of: dict[str, int] = {}

    def begin(self) -> None:
        """Give other ranks' files their names here, too."""
        for rank, files in enumerate(self._told):
            for name, one in files.items():
                if name in self._rank_of:
                    raise UnsupportedError("two ranks save a file of the same name", path=self._path / name)
                self._rank_of[name] = rank
                if rank:
                    self._held.add(name, one.nbytes, one.literals)

    def attempt(self) -> ByRank | None:
        """Return what each rank writes; None where more is to be sent before."""
        self.asked = set()
        directory = self._held.directory
        try:
            checkpoint = open_checkpoint(directory)
            if checkpoint.is_numbered or checkpoint.unnamed:
                checkpoint = open_checkpoint(directory, names=self._names)
            checkpoint = as_converted(checkpoint, get("zckpt"))
            laid = by_rank(checkpoint, lambda path: self._rank_of[self._name(path)], self._ranks.world_size)
        except ZckptError as error:
            if not self._wants_more():
                error.path = str(self._path / self._name(error.path) if error.path else self._path)
                raise
            return None
        if self._wants_more():  # the reader has gone on without
            return None
        for entry in laid.entries[0]:
            for span in entry.slot.spans:
                name = self._name(span.path) if span.path != ZEROS else None
                if name is not None and not self._held.files[name].has(span.offset):
                    self.asked.add((name, span.offset))
        if self.asked:
            return None
        # Client state must hold nothing that only unpickling would make again.
        tree = {**checkpoint.metadata, "optimizer": dict(checkpoint.optimizer_metadata)}
        load_plain(VirtualFile(lay_out("others.pt", tree), threads=False), source=str(self._path))
        for entries in laid.entries:
            entries[:] = [
                replace(one, slot=_with_paths(one.slot, lambda path: Path(path).relative_to(directory)))
                for one in entries
            ]
        return laid

    def take(self, every: Sequence[Mapping[tuple[str, int], bytes]]) -> None:
        """Take what ranks have sent."""
        for (name, offset), data in chain.from_iterable(sent.items() for sent in every):
            known = self._told[self._rank_of[name]][name].literals
            known.append(Literal(offset, data))
            self._held.files[name].take(known)

    def _wants_more(self) -> bool:
        """Tell whether bytes were asked for that are not here; then all of that size are to be sent."""
        held = self._held.files
        absent = [(name, *one) for files in self._told[1:] for name, its in files.items() for one in its.absent]
        sizes = [
            nbytes
            for name, offset, nbytes in absent
            if any(offset <= missed < offset + nbytes for missed in held[name].missed)
        ]
        for one in held.values():
            one.missed.clear()
        if not sizes:
            return False
        if max(sizes) > ASKED_NBYTES:
            raise UnsupportedError(
                "the first rank has to look at a tensor that another has, such as one in its client state",
                path=self._path,
                expected=f"at most {ASKED_NBYTES} bytes",
                found=f"{max(sizes)} bytes",
                advice="leave format out, and let `zckpt convert --to zckpt` write it",
            )
        while self._most < max(sizes):
            self._most *= GROWTH
        self.asked = {(name, at) for name, at, nbytes in absent if nbytes <= self._most and not held[name].has(at)}
        return True

    def _name(self, path: str) -> str:
        found = Path(path)
        directory = self._held.directory
        return found.relative_to(directory).as_posix() if found.is_relative_to(directory) else found.name


def _with_paths(slot: Slot, path_of: Callable[[str], object]) -> Slot:
    spans = (one if one.path == ZEROS else replace(one, path=str(path_of(one.path))) for one in slot.spans)
    return replace(slot, spans=tuple(spans))
