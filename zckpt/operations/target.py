"""The one way in which a target is written, whoever asks: an operation, a save in training, or DCP's writer.

own         what has the target's name may be replaced, or nothing is begun
plan        the files' holes have been met with spans, every element once, by who asks
write       the plan is run under a temporary name, and source bytes held against their checksums
prove       what was written is looked at by who asks, and still has no name
name        all is synced to disk and gets its name in one step

Nothing is lost without a word: a source with something that no one has read is refused, unless it is named.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from glob import escape
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan, plan
from zckpt.engine.write import write
from zckpt.errors import LeftOutError, TargetError, UsageError, shown, stands_for_urls
from zckpt.formats.account import take_inventory
from zckpt.formats.format import TargetFiles
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.state.inventory import FILE, Item
from zckpt.storage.distant import MARK
from zckpt.storage.durable import check_space, written_directory, written_files
from zckpt.storage.ownership import Owned, check_target

if TYPE_CHECKING:
    from zckpt.storage.remote.mount import Mount

Prove = Callable[[Path, Sequence[Path]], None]
"""Gets the temporary names of a target and of the files in `more`, which it writes. What it raises leaves no target."""

ProveFiles = Callable[[Sequence[Path]], None]
"""Gets the temporary names of all files of a plan, in its order."""


def write_target(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    owned: Owned | None = None,
    more: Sequence[Path] = (),
    overwrite: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    checks: Checks | None = None,
    prove: Prove | None = None,
    prove_files: ProveFiles | None = None,
) -> Checked:
    """Write the files of a plan; the target appears whole or not at all.

    Parameters
    ----------
    plan : Plan
    target : path-like
        A directory, which gets the files under their names. Or a file: the plan's only one; or that of its name, and
        the others go into its directory. All get their names when all are written, the target last, so that no new
        file is ever with an old one.
    owned : Owned, optional
        The target is a directory, and this tells which directories it may replace. None: it is a file.
    more : sequence of Path
        Further files that belong to a target that is a file; `prove` writes them.
    overwrite : bool
        Replace what may be replaced.
    memory : int, bytes
        Upper bound of what copy buffers take together.
    reporter : Reporter, optional
    checks : Checks, optional
        Hold what is copied against the checksums of the sources, before the target gets its name.
    prove, prove_files : callable, optional
        See `Prove` and `ProveFiles`.

    Returns
    -------
    Checked

    Raises
    ------
    TargetError
        The target exists, or cannot be written.
    DamagedFileError
        A source file ends before the bytes that the plan reads, or they are not those of its checksum.
    """
    path = Path(target)
    mount = None if MARK not in str(path) else _mount_of(path)
    if mount is not None:
        from zckpt.operations.remote_target import write_remote

        return write_remote(
            plan, path, mount, owned=owned, more=more, overwrite=overwrite, memory=memory, reporter=reporter,
            checks=checks, prove=prove, prove_files=prove_files,
        )  # fmt: skip
    partial = (
        _partial_files(plan, path, more, overwrite)
        if owned is None
        else _partial_directory(plan, path, owned, overwrite)
    )
    with _write_errors(path), partial as (names, whole, companions):
        checked = write(plan, names, memory=memory, reporter=reporter, checks=checks)
        if stands_for_urls():
            from zckpt.storage.remote.mount import check_sources

            check_sources()
        if prove is not None:
            prove(whole, companions)
        if prove_files is not None:
            prove_files(names)
    return checked


def _mount_of(path: Path) -> Mount | None:
    from zckpt.storage.remote.mount import mount_of

    return mount_of(path)


Partial = tuple[list[Path], Path, list[Path]]
"""The temporary names of a plan's files, of the target, and of what else belongs to it."""


@contextmanager
def _partial_files(plan: Plan, target: Path, more: Sequence[Path], overwrite: bool) -> Iterator[Partial]:
    names = _names(plan.names, target, None)
    every = [*more, *sorted(names, key=lambda name: name == target)]
    for name in every:
        check_target(name, overwrite=overwrite)
    check_space(target.parent, plan.write_nbytes)
    with written_files(every, overwrite=overwrite) as partials:
        partial = dict(zip(every, partials, strict=True))
        yield [partial[name] for name in names], partial[target], [partial[name] for name in more]


@contextmanager
def _partial_directory(plan: Plan, target: Path, owned: Owned, overwrite: bool) -> Iterator[Partial]:
    check_target(target, overwrite=overwrite, owned=owned)
    check_space(target.parent, plan.write_nbytes)
    with written_directory(target, overwrite=overwrite, owned=owned) as partial:
        names = _names(plan.names, partial, owned)
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
        yield names, partial, []


def _names(files: Sequence[str], target: Path, owned: Owned | None) -> list[Path]:
    """Return where files go: into a directory, or the only one to the target and several into its directory."""
    if owned is not None:
        return [target / name for name in files]
    return [target] if len(files) == 1 else [target.parent / name for name in files]


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into a TargetError."""
    try:
        yield
    except TargetError:
        raise
    except OSError as error:
        raise TargetError(
            "cannot be written",
            path=path,
            found=error.strerror or str(error),
            advice="nothing was left behind",
        ) from error


# --- from a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What every verb that writes a checkpoint leaves to choose.

    Parameters
    ----------
    weight_check : bool
        Hold a sample of every master against its weight before anything is written.
    checksums : bool
        Hold what is copied against the checksums of the source's files; what is damaged is not written.
    overwrite : bool
        Replace what may be replaced.
    dry_run : bool
        Plan everything, write nothing.
    memory : int, bytes
        Upper bound of what copy buffers take together.
    reporter : Reporter or None
    """

    weight_check: bool
    checksums: bool
    overwrite: bool
    dry_run: bool
    memory: int
    reporter: Reporter | None

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise UsageError("sizes must be positive", found=self.memory)


def write_from(
    checkpoint: Checkpoint,
    laid: TargetFiles,
    target: Path,
    how: How,
    *,
    owned: Owned | None,
    more: Sequence[Path] = (),
    prove: Prove | None = None,
    prove_files: ProveFiles | None = None,
    dropped: tuple[str, ...] = (),
    sources: Sequence[Checkpoint] = (),
) -> Written:
    """Plan the files that were laid out for a target, check the source, write the target and what points to it.

    Parameters
    ----------
    checkpoint : Checkpoint
        The source, which the caller has found to be apart from the target.
    laid : TargetFiles
    target : Path
    how : How
    owned, more, prove, prove_files
        As for `write_target`.
    dropped : tuple of str
        What of the source may be lost.
    sources : sequence of Checkpoint
        Where the elements come from, if the checkpoint is computed from others: these are checked in its stead.

    Raises
    ------
    SourceError
        It contradicts itself, or a file is damaged.
    TargetError
        The target exists or cannot be written.
    """
    planned = plan(laid.files)
    origins = sources or [checkpoint]
    compared = _compared(origins, laid) if how.weight_check else 0
    checked = Checked()
    if not how.dry_run:
        from zckpt.formats.survey import source_checks

        checks = source_checks(origins, planned) if how.checksums else None
        checked = write_target(
            planned,
            target,
            owned=owned,
            more=more,
            overwrite=how.overwrite,
            memory=how.memory,
            reporter=how.reporter,
            checks=checks,
            prove=prove,
            prove_files=prove_files,
        )
        for one in laid.outside:
            write_target(plan([one]), target.parent / one.name, overwrite=True)
    return Written(
        dry_run=how.dry_run,
        files=tuple(_names(planned.names, target, owned) + [target.parent / one.name for one in laid.outside]),
        read_nbytes=planned.read_nbytes,
        write_nbytes=planned.write_nbytes,
        memory=how.memory,
        compared=compared,
        checksummed=checked.nbytes,
        notes=tuple(laid.notes),
        dropped=dropped,
        warnings=tuple(dict.fromkeys(warning for one in origins for warning in one.warnings)),
    )


def _compared(origins: Sequence[Checkpoint], laid: TargetFiles) -> int:
    """Hold masters against weights, and what else the format can compare; return how many elements."""
    compared = 0 if laid.check is None else laid.check()
    for one in origins:
        if any(MASTER in p.slots and WEIGHT in p.slots for p in one.parameters.values()):
            from zckpt.compare.weights import check_weights

            compared += check_weights(one)
    return compared


SHOWN = 3
"""More things than this are counted in a message."""


def check_nothing_lost(checkpoint: Checkpoint, drop: Sequence[str], *, copied: Collection[str] = ()) -> tuple[str, ...]:
    """Raise unless everything in a source arrives, or is to be dropped; return what is dropped, and why it is not read.

    Parameters
    ----------
    checkpoint : Checkpoint
    drop : sequence of str
        Patterns of what may be lost: `FILE`, `FILE:PLACE` or `PLACE` as the inventory has them, with shell wildcards.
    copied : collection of str
        Files that arrive as they are, whatever is in them, by their names within the source.

    Raises
    ------
    LeftOutError
        Something is left out, and no pattern names it.
    UsageError
        A pattern names nothing that is left out.
    """
    dropped, lost, idle = take_inventory(checkpoint).without(drop)
    others = [item for item in lost if item.kind != FILE or item.file not in copied]
    if others:
        raise LeftOutError(
            f"{len(others)} {'thing' if len(others) == 1 else 'things'} in it would be lost: {_listed(others)}",
            path=checkpoint.opened or checkpoint.source,
            advice=f"to write without, give --drop '{_pattern(others)}'; `zckpt inspect --files` shows everything",
            names=[item.name for item in others],
        )
    if idle:
        raise UsageError(
            f"--drop {idle[0]!r} names nothing that would be lost",
            path=checkpoint.opened or checkpoint.source,
            expected="FILE or FILE:PLACE of something that is left out, as `zckpt inspect --files` shows it",
        )
    return tuple(f"{item.name} ({item.about})" for item in dropped)


def _listed(items: Sequence[Item]) -> str:
    shown = [f"{item.name} ({item.about})" for item in items[:SHOWN]]
    return ", ".join(shown) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _pattern(items: Sequence[Item]) -> str:
    """Return one pattern that names all of them."""
    if len(items) == 1:
        return escape(items[0].name)
    return escape(commonprefix([item.name for item in items])) + "*"  # noqa: RUF071  # of characters, not of paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A target that was written, or under `dry_run` would be.

    Parameters
    ----------
    dry_run : bool
        Whether nothing was written.
    files : tuple of Path
    read_nbytes, write_nbytes : int, bytes
    memory : int, bytes
        Upper bound of the copy buffers.
    compared : int
        Elements of masters that were held against their weights, and of slices against those of other ranks.
    checksummed : int, bytes
        Of the source that were held against the checksums in it as they were copied.
    verified : int, bytes
        Of the target that were compared with the source after writing.
    notes : tuple of str
        What to know about the target.
    dropped : tuple of str
        What the source holds and nothing has read, which `drop` named.
    warnings : tuple of str
        What to know about the source.
    """

    dry_run: bool
    files: tuple[Path, ...]
    read_nbytes: int
    write_nbytes: int
    memory: int
    compared: int = 0
    checksummed: int = 0
    verified: int = 0
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return all parameters, for a result that has more."""
        return {one.name: getattr(self, one.name) for one in fields(Written)}

    def as_dict(self) -> dict[str, object]:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "dry_run": self.dry_run,
            "files": [str(path) for path in self.files],
            "read_nbytes": self.read_nbytes,
            "write_nbytes": self.write_nbytes,
            "memory_nbytes": self.memory,
            "checked_elements": self.compared,
            "checksummed_nbytes": self.checksummed,
            "verified_nbytes": self.verified,
            "notes": list(self.notes),
            "dropped": list(self.dropped),
            "warnings": list(self.warnings),
        }


def about(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what a document says of one of several checkpoints."""
    keys = ("source", "format", "step", "world_size", "zero_stage")
    found = {key: getattr(checkpoint, key) for key in keys}
    return {**found, "source": shown(checkpoint.source)}


def number(value: float | None) -> float | str | None:
    """Return a float as JSON can say it."""
    return str(value) if value is not None and not math.isfinite(value) else value
