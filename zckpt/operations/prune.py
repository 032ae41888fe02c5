"""Which checkpoints of a run may go by a rule of the user's; and their removal, of which a kill leaves no half.

Checkpoints whose names differ in numbers only, in one directory, are a series. Of a series stay the last sound ones,
those of some steps, and the best by a metric; and whatever is not certain: see `_kept`.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from zckpt.compare.digests import digests_path_of_file
from zckpt.errors import SourceError, UsageError, listed
from zckpt.formats.account import take_inventory
from zckpt.formats.account.inventory import is_stranger
from zckpt.formats.companions import trainer_account
from zckpt.formats.units import Unit, is_of_training
from zckpt.immutable import immutable
from zckpt.operations.history import SETTLE_S, Around, Recorded, files_of, look, units_of
from zckpt.operations.options import Place
from zckpt.operations.places import on_disk
from zckpt.state import Checkpoint, Document, Result, as_float, by_key
from zckpt.storage.durable import finish_removals, remove
from zckpt.storage.files import is_file
from zckpt.storage.ownership import REMOVED
from zckpt.storage.packed import is_store

SHOWN = 3


@immutable
class Judged:
    """A checkpoint, whether it goes (or is gone), and why it stays, or what it is not."""

    checkpoint: Recorded
    goes: bool
    why: str

    def as_dict(self) -> Document:
        """Return it as JSON-able data."""
        return {**self.checkpoint.as_dict(), "goes": self.goes, "because": self.why}


@immutable
class Pruned(Result):
    """What is removed from a run, and what stays.

    Parameters
    ----------
    run : str
    deleted : bool
        Whether it was removed.
    freed_nbytes : int
        Bytes that are freed.
    checkpoints : list of Judged
    failed : list of str
        What could not be removed, and why.
    leftovers : list of str
        Leftovers of interrupted writes, which stay, and of removals, which `delete` removes.
    """

    run: str
    deleted: bool
    freed_nbytes: int
    checkpoints: list[Judged]
    failed: list[str]
    leftovers: list[str]


@immutable
class _Seen:
    """A checkpoint as it was found, and what formats find in it."""

    unit: Unit
    record: Recorded
    states: list[Checkpoint]

    @property
    def number(self) -> int:
        return self.unit.number or 0


def prune(
    run: Place,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: str | None = None,
    also: Sequence[str] = (),
    unsound: bool = False,
    deep: bool = False,
    settle: float = SETTLE_S,
    delete: bool = False,
) -> Pruned:
    """Return which checkpoints of a run can be removed, and remove them if requested.

    Parameters
    ----------
    run : path-like
        A directory as for `history`, on a file system.
    keep_last : int
        Number of sound ones to keep, with the highest steps; at least 1.
    keep_every : int, optional
        Keep those whose step is a multiple of it.
    keep_best : str, optional
        Keep the sound one with the best value of a metric: `NAME:min` or `NAME:max`; for a loss, the lowest.
    also : sequence of str
        File names, with wildcards, that can be removed with a checkpoint although no known program writes them there.
    unsound : bool
        Also remove checkpoints that are not sound, if their files are named like those of a sound one next to it.
    deep : bool
        Read every byte of each to check that it is sound.
    settle : float, seconds
        Keep what was written to in this time.
    delete : bool
        Remove them. Without this, nothing changes.

    Returns
    -------
    Pruned

    Raises
    ------
    UsageError
        An unusable number, a metric that no checkpoint has, or a store.
    SourceError
        There is no such directory, or no checkpoint in it.
    """
    for option, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise UsageError(f"{option} must be at least 1", found=value)
    top = on_disk(run)
    if is_store(top):
        raise UsageError(
            "a store of checkpoints cannot be pruned, because later ones need earlier ones",
            path=run,
            advice="unpack what you want to keep, and pack that",
        )
    every = units_of(top)
    around = Around.of(top, every)
    for path in sorted(around.inside):
        with suppress(SourceError):  # of which looking at it will tell
            inner = (link for link, about in files_of(path, around.inside) if stat.S_ISLNK(about.st_mode))
            around.links.update((link, Path(os.path.realpath(link))) for link in inner)
    looked = ((one, look(one, around, deep=deep)) for one in every)
    seen = [_Seen(one, record, states) for one, (record, _, states) in looked]
    sound = [one for one in seen if one.record.sound and one.unit.number is not None]
    stays = _by_rule(sound, keep_last, keep_every)
    stays |= _best(sound, keep_best) if keep_best is not None else {}
    for one in sorted(sound, key=lambda one: one.number):
        _, named = trainer_account(one.unit.path)
        if named is not None:  # the Trainer loads it at the end
            best = one.unit.path.parent / Path(named).name
            stays[best] = f"the best, by what the Trainer wrote into {one.record.name}"
    stays |= {above: "other checkpoints are in it" for one in every for above in one.path.parents}
    judged = []
    for one in seen:
        why = _kept(one, top, settle) or stays.get(one.unit.path)
        if why is None and not one.record.sound:
            beside = [other for other in sound if other.unit.series == one.unit.series]
            why = _as_others(one, beside) if unsound else f"not sound, and --unsound is not given: {one.record.why}"
        elif why is None:
            why = _strange(one, also)
        judged.append(Judged(one.record, why is None, why or ("not sound" if not one.record.sound else "")))
    removals = [one for one in around.left if one.name == REMOVED]
    failed: list[str] = []
    if delete:
        for hidden in removals:
            if hidden.is_dir() and not hidden.is_symlink():
                finish_removals(hidden)
        judged = [_removed(one, top, every, failed) if one.goes else one for one in judged]
    left = [str(one) for one in around.left if os.path.lexists(one)]
    freed = sum(one.checkpoint.nbytes for one in judged if one.goes)
    return Pruned(str(top), delete, freed, judged, failed, left)


def _by_rule(sound: Sequence[_Seen], keep_last: int, keep_every: int | None) -> dict[Path, str]:
    """Return the last of each series, or all of one that names order otherwise than steps do, and those of steps."""
    found: dict[Path, str] = {}
    for series in by_key((one.unit.series, one) for one in sound).values():
        members = sorted(series, key=lambda one: one.number)
        steps = [one.record.step for one in members if one.record.step is not None]
        numbers = sorted({one.number for one in members})
        stay, said = numbers[-keep_last:], f"one of the last {keep_last}" if keep_last > 1 else "the last"
        if steps != sorted(steps):
            stay, said = numbers, "its series is in one order by names, in another by files"
        found |= {one.unit.path: said for one in members if one.number in stay}
    if keep_every:
        found |= {one.unit.path: f"step of every {keep_every}" for one in sound if not one.number % keep_every}
    return found


def _best(sound: Sequence[_Seen], metric: str) -> dict[Path, str]:
    """Return the best of each series by a metric."""
    name, _, way = metric.partition(":")
    way = way or ("min" if name.endswith("loss") else "")
    if way not in ("min", "max"):
        raise UsageError(
            "it is unknown whether higher or lower is better", expected=f"{name}:min or {name}:max", found=metric
        )
    values = {one.unit.path: value for one in sound if not math.isnan(value := _metrics(one).get(name, math.nan))}
    if not values:
        known = sorted({key for one in sound for key in _metrics(one)})
        raise UsageError(f"no checkpoint has a value of {name} for its step", expected=listed(known) or "some metric")
    sign, found = 1 if way == "min" else -1, dict[Path, str]()
    for members in by_key((one.unit.series, one) for one in sound if one.unit.path in values).values():
        best = min(members, key=lambda one: (sign * values[one.unit.path], -one.number))
        found[best.unit.path] = f"the best by {name}: {values[best.unit.path]:g}"
    return found


def _metrics(one: _Seen) -> dict[str, float]:
    """Return what a Trainer has logged at a checkpoint's step, and numbers in the metadata of any program."""
    metadata = [state.metadata for state in one.states]
    metadata += [inner for outer in metadata if isinstance(inner := outer.get("metrics"), dict)]
    entries = [trainer_account(one.unit.path)[0], *metadata]
    pairs = ((str(key), as_float(value)) for entry in entries for key, value in entry.items())
    return {key: value for key, value in pairs if value is not None}


def _kept(one: _Seen, run: Path, settle: float) -> str | None:
    """Return why a checkpoint stays whatever the rule: it is in use, or nobody can know."""
    if one.unit.number is None or one.unit.path == run:
        return "its name has no step"
    if one.record.named_by:
        return f"named by {listed(one.record.named_by, most=SHOWN)}"
    if time.time() - max(one.record.saved, one.unit.path.stat().st_mtime) < settle:
        return f"changed less than {settle:g} s ago (--settle)"
    try:
        for path, about in files_of(one.unit.path):
            if path.is_symlink() or about.st_nlink > 1:
                return f"{path.name} is {'a link' if path.is_symlink() else 'linked'}"
    except SourceError as error:
        return f"not sound: {error}"
    return None


def _strange(one: _Seen, also: Sequence[str]) -> str | None:
    """Return which files of a sound checkpoint may be somebody's own; None: there are none."""
    unit, known = one.unit, set[Path]()
    if unit.path.is_file():
        return None
    for state in one.states:
        items, root = take_inventory(state).items, Path(state.named)
        root = root if root.is_dir() else root.parent
        known |= {root / item.file for item in items if not is_stranger(item, root)}
    others = []
    for path, _ in files_of(unit.path):
        name = path.relative_to(unit.path).as_posix()
        beside = len(unit.states) > 1 and is_of_training(name)
        if not (path in known or beside or any(fnmatchcase(one, p) for one in (name, path.name) for p in also)):
            others.append(name)
    return f"holds {listed(sorted(others), most=SHOWN)}, which may be yours: --also removes it" if others else None


def _as_others(one: _Seen, beside: Sequence[_Seen]) -> str | None:
    """Return which files of one that is not sound are called as none of sound ones of its series."""

    def names(unit: Unit) -> set[str]:
        inside = {path.relative_to(unit.path).as_posix() for path, _ in files_of(unit.path)}
        return {re.sub("[0-9]+", "#", name) for name in inside}

    others = names(one.unit) - {name for other in beside for name in names(other.unit)}
    if not beside:
        return "not sound, and no sound one is beside it to tell which files it has"
    return f"not sound, and holds {listed(sorted(others), most=SHOWN)}, as no sound one does" if others else None


def _removed(one: Judged, run: Path, every: Sequence[Unit], failed: list[str]) -> Judged:
    """Remove a checkpoint, unless it has come into use since it was looked at."""
    path = Path(one.checkpoint.path)
    trackers, links = Around.of(run, every).naming(path)
    try:
        newest = max((about.st_mtime for _, about in files_of(path)), default=0.0)
        if trackers or links or newest != one.checkpoint.saved:
            return replace(one, goes=False, why="it has come into use")
        if is_file(path):
            digests_path_of_file(path).unlink(missing_ok=True)
        remove(path)
    except (OSError, SourceError) as error:
        why = error.strerror if isinstance(error, OSError) else error.found
        failed.append(f"{path}: {why}")
        return replace(one, goes=False, why=f"cannot be removed: {why}")
    return one
