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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.deepspeed.engine import in_memory, kind_that_keeps, training_of
from zckpt.deepspeed.loading import load_plain
from zckpt.engine.plan import check_covered
from zckpt.engine.read import VirtualFile
from zckpt.engine.targets import TargetFile
from zckpt.errors import TargetError, UnsupportedError, ZckptError
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

SENT_NBYTES = 1 << 10
"""Of a tensor that is sent with its file: steps and other single values."""

ASKED_NBYTES = 1 << 20
"""Of a tensor that is sent when it is looked at; more would be looking at the state itself."""

GROWTH = 4
"""By how much more is sent each time: what one tensor of a size is looked at, others are."""

SCRIPT = ".py"
"""Of what DeepSpeed puts beside its checkpoints to read its own files with; it lies beside those only."""

Pieces = dict[int, "bytes | memoryview | int"]
"""A file of literals by offset: their bytes or, of those that another rank has, how many they are."""


def sent(file: TargetFile, longest: int) -> Pieces:
    """Return a file for another process: the pickle that it begins with, and tensors of at most `longest` bytes."""
    return {
        one.offset: len(one.data) if one.offset and len(one.data) > longest else bytes(one.data)
        for one in file.literals
    }


class Held:
    """A file in memory. What is read of it before the first is asked for `ask`, given how many bytes are not here.

    What begins with bytes that are here is read, with zeros for others: what reads an archive's headers passes over
    data.
    """

    identity = ""

    def __init__(self, pieces: Pieces, ask: Callable[[int], None]) -> None:
        self.pieces = {at: pieces[at] for at in sorted(pieces)}
        self._starts, self._ask = list(self.pieces), ask

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`."""
        first = max(bisect_right(self._starts, offset) - 1, 0)
        at, done, end = self._starts[first], offset, offset + len(buffer)
        if isinstance(absent := self.pieces[at], int) and len(buffer) and offset < at + absent:
            self._ask(absent)
        for start in self._starts[first:]:
            if start >= end:
                break
            piece = self.pieces[start]
            low, high = max(start, offset), 0 if isinstance(piece, int) else min(start + len(piece), end)
            if low < high and not isinstance(piece, int):
                buffer[done - offset : low - offset] = bytes(low - done)
                buffer[low - offset : high - offset] = memoryview(piece)[low - start : high - start]
                done = high
        buffer[done - offset :] = bytes(end - done)


@contextmanager
def _named() -> Iterator[None]:
    """Turn an error of the file system that has the names into one that says so."""
    try:
        yield
    except OSError as error:
        raise TargetError(
            "the temporary directory cannot hold empty files",
            path=in_memory() or tempfile.gettempdir(),
            found=error.strerror,
            advice="free some space there, or omit format",
        ) from error


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
            f"an engine with {kind} only loads DeepSpeed's own format",
            advice="omit format, and use `zckpt convert --to zckpt` afterwards",
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
        held = ranks.do(lambda: _Files(ranks, path, files, others, stack))
        told = ranks.gather({file.name: (file.nbytes, sent(file, SENT_NBYTES)) for file in files})
        laid = ranks.do(lambda: held.serve() if ranks.rank else held.laid_out(told, names))
        mine: list[Entry] = ranks.scatter([] if laid is None else laid.entries)
        identity = ranks.from_first(new_identity())
        here = [replace(one, slot=_with_paths(one.slot, lambda path: held.directory / path)) for one in mine]
        every = ranks.gather(ranks.do(lambda: write_rank(target, ranks.rank, ranks.world_size, here, identity)))
        ranks.do(lambda: None if laid is None else write_laid_out(laid.members, identity, every, target))


class _Files:
    """Files of this rank and, on the first, those of all, by name below a folder that goes with the stack."""

    def __init__(
        self, ranks: Ranks, path: Path, files: Sequence[TargetFile], others: Sequence[str], stack: ExitStack
    ) -> None:
        unknown = [name for name in others if Path(name).name != name or Path(name).suffix != SCRIPT]
        if unknown:
            raise UnsupportedError(
                "the engine saves files that zckpt's format has no place for", found=", ".join(unknown)
            )
        self._ranks, self._path = ranks, path
        self._held: dict[str, Held] = {}
        self._rank_of: dict[str, int] = {}
        self._refused: UnsupportedError | None = None
        with _named():
            base = new_base(in_memory())
        stack.callback(lambda: forget_all(base, [str(self.directory / name) for name in self._held]))
        self.directory = base / "files" / path.name
        for file in files:
            self._add(ranks.rank, file.name, file.nbytes, {one.offset: one.data for one in file.literals})

    def _add(self, rank: int, name: str, nbytes: int, pieces: Pieces) -> None:
        if name in self._held:
            raise UnsupportedError("two ranks save files with the same name", path=self._path / name)
        with _named():
            stand_in(self.directory / name, nbytes)
        self._rank_of[name] = rank
        FILES[str(self.directory / name)] = self._held[name] = Held(pieces, self._look_at)

    def serve(self) -> None:
        """Send the first rank what it asks for, until it asks for nothing more."""
        while asked := self._ranks.from_first(set[tuple[str, int]]()):
            own = [(name, at) for name, at in asked if name in self._held]
            self._ranks.gather({(name, at): bytes(self._held[name].pieces[at]) for name, at in own})

    def laid_out(self, told: Sequence[Mapping[str, tuple[int, Pieces]]], names: Sequence[str]) -> ByRank:
        """Open what all ranks have, and return what each writes, its slots in files by their names."""
        try:
            for rank, files in enumerate(told):
                for name, (nbytes, pieces) in files.items() if rank else ():
                    self._add(rank, name, nbytes, pieces)
            laid = self._read(names)
            stored = [(self._name(span.path), span.offset) for entry in laid.entries[0] for span in entry.slot.spans
                      if span.path != ZEROS]  # fmt: skip
            self._ask({(name, at) for name, at in stored if isinstance(self._held[name].pieces.get(at), int)})
        finally:
            self._ranks.from_first(set())
        for entries in laid.entries:
            entries[:] = [replace(one, slot=_with_paths(one.slot, self._name)) for one in entries]
        return laid

    def _read(self, names: Sequence[str]) -> ByRank:
        try:
            checkpoint = open_checkpoint(self.directory)
            if checkpoint.is_numbered or checkpoint.unnamed:
                checkpoint = open_checkpoint(self.directory, names=names)
            checkpoint = as_converted(checkpoint, get("zckpt"))
            for slot in (slot for one in checkpoint.holders() for slot in one.slots.values()):
                check_covered(slot)
            laid = by_rank(checkpoint, lambda path: self._rank_of[self._name(path)], self._ranks.world_size)
            if self._refused is not None:  # the reader has gone on without
                raise self._refused
        except ZckptError as error:
            error.path = str(self._path / self._name(error.path) if error.path else self._path)
            raise
        # Client state must hold nothing that only unpickling would make again.
        tree = {**checkpoint.metadata, "optimizer": dict(checkpoint.optimizer_metadata)}
        load_plain(VirtualFile(lay_out("others.pt", tree), threads=False), source=str(self._path))
        return laid

    def _look_at(self, nbytes: int) -> None:
        """Get a tensor of so many bytes that is read, and all that are not much larger: one is looked at as others."""
        if nbytes > ASKED_NBYTES:
            self._refused = UnsupportedError(
                "the first rank needs a large tensor that another rank holds, for example in its client state",
                expected=f"at most {ASKED_NBYTES} bytes",
                found=f"{nbytes} bytes",
                advice="omit format, and use `zckpt convert --to zckpt` afterwards",
            )
            raise self._refused
        most = min(nbytes * GROWTH, ASKED_NBYTES)
        every = [(name, *one) for name, held in self._held.items() for one in held.pieces.items()]
        self._ask({(name, at) for name, at, one in every if isinstance(one, int) and one <= most})

    def _ask(self, places: set[tuple[str, int]]) -> None:
        """Get what ranks have at offsets of their files."""
        if not places:  # which would end it
            return
        self._ranks.from_first(places)
        for found in self._ranks.gather(dict[tuple[str, int], bytes]()):
            for (name, at), data in found.items():
                self._held[name].pieces[at] = data

    def _name(self, path: str) -> str:
        found = Path(path)
        return found.relative_to(self.directory).as_posix() if found.is_relative_to(self.directory) else found.name


def _with_paths(slot: Slot, path_of: Callable[[str], object]) -> Slot:
    spans = (one if one.path == ZEROS else replace(one, path=str(path_of(one.path))) for one in slot.spans)
    return replace(slot, spans=tuple(spans))
