"""What stock DeepSpeed saves, as a checkpoint of zckpt's own format. Nothing of DeepSpeed's form is written.

    every rank      keeps what its engine gives away, as files in its memory
    every rank      sends the first all of them but long tensors
    first rank      opens that as it opens a directory of DeepSpeed's, and tells each what it writes
    every rank      writes its file from its memory, and says to the first what is in it
    first rank      writes `checkpoint.json`

What the reader has to look at besides, such as tensors in client states, it is sent when it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zckpt.deepspeed.engine import kind_that_keeps, training_of
from zckpt.deepspeed.held import HeldFiles, Sketch, sketch
from zckpt.deepspeed.loading import load_plain
from zckpt.engine.targets import Literal, TargetFile
from zckpt.engine.virtual import VirtualFile
from zckpt.errors import UnsupportedError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED
from zckpt.formats.native.rank_file import Entry
from zckpt.formats.native.writer import ByRank, by_rank
from zckpt.formats.registry import get
from zckpt.formats.torch_files.writer import lay_out
from zckpt.operations.convert import as_converted
from zckpt.optim.ranks import Ranks, written_together
from zckpt.state import ZEROS, Slot
from zckpt.training.directory import new_identity, write_laid_out, write_rank

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


@dataclass(frozen=True, slots=True)
class _Sent:
    """Bytes of a file for the first rank."""

    name: str
    literal: Literal


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
        asked = ranks.from_first(None if reading is None else (reading.sizes, reading.single))
        if asked is None or not any(asked):
            return laid
        sent = ranks.gather(list(_answer(files, *asked)))
        if reading is not None:
            reading.take(sent)


def _answer(files: Sequence[TargetFile], sizes: int, single: set[tuple[str, int]]) -> list[_Sent]:
    """Return the bytes of this rank that the first asks for: up to a size, and some by their offsets."""
    return [
        _Sent(file.name, Literal(one.offset, bytes(one.data)))
        for file in files
        for one in file.literals
        if SENT_NBYTES < len(one.data) <= sizes or (file.name, one.offset) in single
    ]


class _Reading:
    """The first rank's, which opens what all have sent; what is still to be sent is in `sizes` and `single`."""

    def __init__(
        self, ranks: Ranks, held: HeldFiles, told: Sequence[dict[str, Sketch]], path: Path, names: Sequence[str]
    ) -> None:
        self.sizes = 0
        self.single: set[tuple[str, int]] = set()
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
        self.sizes, self.single = 0, set()
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
                    self.single.add((name, span.offset))
        if self.single:
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

    def take(self, every: Sequence[Sequence[_Sent]]) -> None:
        """Take what ranks have sent."""
        for rank, sent in enumerate(every):
            more: dict[str, list[Literal]] = {}
            for one in sent:
                more.setdefault(one.name, []).append(one.literal)
            for name, literals in more.items() if rank else ():
                known = self._told[rank][name]
                known.literals.extend(literals)
                self._held.files[name].take(known.literals)

    def _wants_more(self) -> bool:
        """Tell whether bytes were asked for that are not here; then all of that size are to be sent."""
        sizes = [
            nbytes
            for files in self._told
            for name, one in files.items()
            for offset, nbytes in one.absent
            if any(offset <= missed < offset + nbytes for missed in self._held.files[name].missed)
        ]
        for one in self._held.files.values():
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
        self.sizes = self._most
        return True

    def _name(self, path: str) -> str:
        found = Path(path)
        directory = self._held.directory
        return found.relative_to(directory).as_posix() if found.is_relative_to(directory) else found.name


def _with_paths(slot: Slot, path_of: Callable[[str], object]) -> Slot:
    spans = (one if one.path == ZEROS else replace(one, path=str(path_of(one.path))) for one in slot.spans)
    return replace(slot, spans=tuple(spans))
