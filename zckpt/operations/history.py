"""Which checkpoints a run has: of which step, when they were saved, how large, whether they are sound, which is latest.

`zckpt.formats.units` tells what is one checkpoint. Whether one is sound, `verify` says; its fingerprint is the one that
was recorded with it, or is computed where that is asked for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zckpt.compare.digests import FILE_NAME, digests_path, read_digests
from zckpt.errors import SourceError, UsageError
from zckpt.formats.units import Unit, is_named, latest_of, units
from zckpt.immutable import immutable
from zckpt.operations.fingerprint import fingerprint as fingerprint_of
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.operations.verify import Finding, Verification, verify
from zckpt.state import Checkpoint, Document, Result, nbytes_of
from zckpt.storage.stand_ins import DAMAGED

SETTLE_S = 60.0
"""Seconds without a write after which a checkpoint is taken for finished, unless said otherwise."""

LEFT = re.compile(r"\..*\.zckpt-[a-z]+|\.zckpt-removed")
"""Names of what is being written or removed, or was when that was interrupted."""


@immutable(repr=True)
class Recorded(Result):
    """A checkpoint of a run.

    Parameters
    ----------
    path : str
    name : str
        Its path within the run.
    step : int or None
        From its files, or else from its name.
    saved : float, seconds
        Time of the last write to one of its files, since 1970.
    nbytes : int, bytes
        Of all files in it.
    format : str or None
    world_size : int or None
    sound : bool
        As `verify` says: without `deep`, by its structure and a sample.
    why : str or None
        What is wrong with it.
    latest : bool
        Whether a file of the run, or a link called `latest`, names it.
    named_by : tuple of str
        These files, and all links in the run that lead to it or into it.
    fingerprint : str or None
        Recorded with it, or computed.
    equal : tuple of str
        Names of other checkpoints with the same fingerprint.
    """

    path: str
    name: str
    step: int | None
    saved: float
    nbytes: int
    format: str | None
    world_size: int | None
    sound: bool
    why: str | None
    latest: bool = False
    named_by: tuple[str, ...] = ()
    fingerprint: str | None = None
    equal: tuple[str, ...] = ()

    def as_dict(self) -> Document:
        """Return it as JSON-able data; `saved` is a date of ISO 8601, in UTC."""
        saved = datetime.fromtimestamp(self.saved, timezone.utc).isoformat(timespec="seconds")
        return {**Result.as_dict(self), "saved": saved}


@immutable
class History(Result):
    """The checkpoints of a run; those in one directory are ordered by step.

    Parameters
    ----------
    run : str
    checkpoints : list of Recorded
    nbytes : int
        Of all of them.
    leftovers : list of str
        Leftovers of interrupted writes and removals.
    """

    run: str
    checkpoints: list[Recorded]
    nbytes: int
    leftovers: list[str]


@shares(Copying)
def history(source: Place, *, deep: bool = False, fingerprint: bool = False, **shared: Unpack[Copying]) -> History:
    """List every checkpoint in or below a run directory, of any format. Changes nothing.

    Parameters
    ----------
    source : path-like
        A run directory, or a directory of several runs.
    deep : bool
        Read every byte of each to check that it is sound.
    fingerprint : bool
        Compute fingerprints that were not recorded.
    **shared

    Raises
    ------
    UsageError
        Options contradict each other.
    SourceError
        There is no such directory, or no checkpoint in it.
    """
    run = Path(source)
    if shared["direct"] and not (deep or fingerprint):
        raise UsageError("--direct does not apply to a sample", expected="--deep or --fingerprint with it")
    every = units_of(run)
    around = Around.of(run, every)
    found = [look(one, around, deep=deep, fingerprint=fingerprint, **shared)[0] for one in every]
    for error in DAMAGED.get(run, ()):
        index = Path(str(error.path))
        about = index.lstat()
        found.append(
            Recorded(str(index), index.name, None, about.st_mtime, about.st_size, None, None, False, str(error))
        )
    known = [one for one in found if one.fingerprint]
    found = [
        replace(one, equal=tuple(it.name for it in known if it is not one and it.fingerprint == one.fingerprint))
        for one in found
    ]
    return History(str(run), found, nbytes_of(found), list(map(str, around.left)))


def units_of(run: Path) -> list[Unit]:
    """Return the checkpoints of a run. Raises SourceError: there are none."""
    if not run.is_dir():
        what = None if os.path.lexists(run) else "nothing"
        raise SourceError("is not a directory", path=run, found=what, advice="give a run directory")
    found = list(units(run))
    if not found:
        raise SourceError("holds no checkpoint of a format that zckpt reads", path=run)
    return found


def look(
    unit: Unit,
    around: Around,
    *,
    deep: bool = False,
    fingerprint: bool = False,
    **shared: Any,  # noqa: ANN401  # of Copying
) -> tuple[Recorded, list[Finding], list[Checkpoint]]:
    """Return what is to be known of a checkpoint, the errors in its states, and those of them that can be opened."""
    verified: list[Verification] = []
    why = text = None
    for state in unit.states or (unit.path,):
        try:
            verified.append(verify(state, deep=deep, **{**shared, "direct": shared.get("direct", False) and deep}))
        except SourceError as error:
            why = why or str(error)
    errors = [one for found in verified for one in found.errors]
    if errors and why is None:
        why = f"{errors[0].code}: {errors[0].message}" + (f", and {len(errors) - 1} more" if len(errors) > 1 else "")
    checkpoints = [one.checkpoint for one in verified if one.checkpoint is not None]
    first = checkpoints[0] if checkpoints else None
    if first is not None and len(unit.states) == 1:
        for place in (digests_path(first), unit.path / FILE_NAME):
            with suppress(SourceError):
                text = text or read_digests(place).text
        if text is None and fingerprint and why is None:
            text = fingerprint_of(first, **shared).text
    files: list[os.stat_result] = []
    try:
        files.extend(about for _, about in files_of(unit.path, around.inside))
    except SourceError as error:
        why = why or str(error)
    trackers, links = around.naming(unit.path)
    return (
        Recorded(
            str(unit.path),
            unit.path.relative_to(around.run).as_posix(),
            unit.number if first is None or first.step is None else first.step,
            max((one.st_mtime for one in files), default=0.0),
            sum(one.st_size for one in files),
            None if first is None else first.format,
            None if first is None else first.world_size,
            why is None,
            why,
            bool(trackers) or any(re.search("latest|last", one.name) for one in links),
            tuple(one.relative_to(around.run).as_posix() for one in (*trackers, *links)),
            text,
        ),
        errors,
        checkpoints,
    )


def files_of(path: Path, apart: Collection[Path] = ()) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a file, or all files below a directory, with what the system says of each; of links, of themselves.

    `apart`: what lies below and is none of it.
    Raises SourceError: one cannot be looked at. What has gone meanwhile is left out.
    """
    waiting = [path]
    while waiting:
        one = waiting.pop()
        try:
            about = one.lstat()
            if stat.S_ISDIR(about.st_mode):
                names = os.listdir(one)  # noqa: PTH208  # names are all that is needed
                waiting += [below for name in names if (below := one / name) not in apart]
            else:
                yield one, about
        except FileNotFoundError:
            continue
        except OSError as error:
            raise SourceError("cannot be read", path=one, found=error.strerror) from error


@immutable
class Around:
    """What a run's directory has around its checkpoints: all links, and what interrupted writes and removals left."""

    run: Path
    links: dict[Path, Path]
    """And what they lead to."""
    left: list[Path]
    inside: Collection[Path]
    """The checkpoints below the run."""

    @classmethod
    def of(cls, run: Path, every: Iterable[Unit]) -> Around:
        """Look through a run, but not into its checkpoints."""
        inside = {one.path for one in every} - {run}
        found = cls(run, {}, [], inside)
        for at, folders, files in os.walk(run):
            for path in (Path(at, name) for name in sorted(folders + files)):
                if LEFT.fullmatch(path.name):
                    found.left.append(path)
                elif path.is_symlink():
                    found.links[path] = Path(os.path.realpath(path))
            folders[:] = [name for name in folders if not name.startswith(".") and Path(at, name) not in inside]
        return found

    def naming(self, path: Path) -> tuple[list[Path], list[Path]]:
        """Return the files that name a checkpoint as the latest, and the links that lead to it, or into it."""
        above = [one for one in path.parents if one == self.run or self.run in one.parents]
        trackers = [one / file for one in above for file, text in latest_of(one).items() if is_named(path, one, text)]
        real = Path(os.path.realpath(path))
        return trackers, [one for one, at in self.links.items() if real in (at, *at.parents)]
