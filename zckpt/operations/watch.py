"""A run as it goes on: each checkpoint that appears is verified, fingerprinted, and held against the one before.

One is finished when `latest` or the like names it, or when its files have not changed for some time. The one before is
that of the highest step below its own, of those in the same directory whose names differ in numbers only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.codes import FROZEN_MOVED, JUMPED, LOST, NOT_ADVANCED, NOT_FINITE, OTHER_KIND, UNMOVED
from zckpt.compare.digests import FILE_NAME
from zckpt.compare.logical import named
from zckpt.errors import SourceError, UsageError, listed
from zckpt.formats.units import Unit, units
from zckpt.immutable import immutable
from zckpt.operations.diff.match import Filter
from zckpt.operations.fingerprint import fingerprint
from zckpt.operations.history import SETTLE_S, Around, Recorded, files_of, look
from zckpt.operations.open import open as opened
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.operations.places import on_disk
from zckpt.operations.series import measured, slots_of
from zckpt.operations.verify import Finding
from zckpt.state import MASTER, WEIGHT, Checkpoint, Document, by_key, document

POLL_S = 5.0
"""Between looks at the directory; a settling time that is shorter is the longest."""

LEAST_POLL_S = 0.2

FACTOR = 10.0
"""By which a norm may change from one checkpoint to the next, unless said otherwise."""

SHARE = 0.01
"""Of the norm of all parameters, which that of one has to have if it is to count: what began near zero grows fast."""

SHOWN = 4


@immutable
class Appeared:
    """A checkpoint that appeared in a run.

    Parameters
    ----------
    checkpoint : Recorded
    findings : list of Finding
        Errors that `verify` finds, and anomalies compared with the checkpoint before.
    before : str or None
        Path of the checkpoint before; None if it is the first, or if none before can still be read.
    """

    checkpoint: Recorded
    findings: list[Finding]
    before: str | None

    def as_dict(self) -> Document:
        """Return it as JSON-able data: a line of what `verify --watch` prints."""
        return {**self.checkpoint.as_dict(), "before": self.before, "findings": document(self.findings)}


@shares(Copying)
def watch(
    run: Place,
    *,
    deep: bool = False,
    settle: float = SETTLE_S,
    idle: float | None = None,
    factor: float = FACTOR,
    **shared: Unpack[Copying],
) -> Iterator[Appeared]:
    """Yield a run's last checkpoint, then each one that appears or is rewritten.

    Parameters
    ----------
    run : path-like
        A run's directory, on a file system; it need not exist yet.
    deep : bool
        Read every byte of each, as `verify` does. Without it, checksums are not compared, and NaN is only found if
        there is a checkpoint before.
    settle : float, seconds
        A checkpoint that nothing names is finished when its files have not changed for this time.
    idle : float, seconds, optional
        End when nothing has changed for this time. Default: never.
    factor : float
        Factor by which the norm of weights may change; for optimizer state, its square.
    **shared

    Raises
    ------
    UsageError
        An unusable factor or time; or a store.
    """
    path = on_disk(run)
    if not factor > 1 or not settle >= 0 or (idle is not None and not idle >= 0):
        raise UsageError(
            "--factor must be above 1, --settle and --idle at least 0", found=f"{factor}, {settle}, {idle}"
        )
    if shared["direct"] and not deep:
        raise UsageError("--direct does not apply to a sample", expected="--deep with it")
    return _appearing(_Run(path, settle), deep, idle, factor, {**shared})


class _Run:
    """What of a run's checkpoints has changed since when, and which have been looked at as they are."""

    def __init__(self, path: Path, settle: float) -> None:
        self.path, self.settle = path, settle
        self.changed = time.monotonic()
        self._seen: dict[Path, tuple[object, float]] = {}
        self._done: dict[Path, tuple[Unit, object]] = {}

    def finished(self) -> tuple[list[Unit], Around]:
        """Return what is finished and has not been looked at, as it was saved."""
        every = list(units(self.path)) if self.path.is_dir() else []
        around, found = Around.of(self.path, every), []
        now, clock = time.time(), time.monotonic()
        for one in every:
            files = []
            with suppress(SourceError):  # of which looking at it will tell
                files = [about for path, about in files_of(one.path, around.inside) if path.name != FILE_NAME]
            state = (len(files), sum(f.st_size for f in files), max((f.st_mtime_ns for f in files), default=0))
            known, since = self._seen.get(one.path, (None, 0.0))
            if known != state:
                since = clock if known is not None else clock - max(now - state[2] / 1e9, 0.0)
                self._seen[one.path], self.changed = (state, since), clock
            ended = clock - since >= self.settle or bool(around.naming(one.path)[0])
            if ended and (one.path not in self._done or self._done[one.path][1] != state):
                found.append(one)
        return found, around

    def look_at(self, unit: Unit) -> list[Unit]:
        """Note that a checkpoint is looked at, as it was found; return those before it, the nearest first."""
        self._done[unit.path] = unit, self._seen[unit.path][0]
        alike = [one for one, _ in self._done.values() if one.series == unit.series and one.path.exists()]
        below = [one for one in alike if (one.number or 0) < (unit.number or 0)]
        return sorted(below, key=lambda one: -(one.number or 0))


def _appearing(run: _Run, deep: bool, idle: float | None, factor: float, shared: dict[str, Any]) -> Iterator[Appeared]:
    found, around = run.finished()
    last = {one.series: one for one in found}
    for one in found:
        if one is not last[one.series]:
            run.look_at(one)
    found = list(last.values())
    while True:
        for one in found:
            before = run.look_at(one)
            about = _examined(one, around, before, deep, factor, shared)
            if one.path.exists():
                yield about
        if idle is not None and time.monotonic() - run.changed >= idle:
            return
        time.sleep(min(POLL_S, max(run.settle, LEAST_POLL_S)))
        found, around = run.finished()


def _examined(
    unit: Unit, around: Around, below: Sequence[Unit], deep: bool, factor: float, shared: dict[str, Any]
) -> Appeared:
    record, findings, checkpoints = look(unit, around, deep=deep, **shared)
    if not record.sound:
        return Appeared(record, findings or [Finding(OTHER_KIND, str(record.why), record.path)], None)
    if len(checkpoints) == 1:
        with suppress(SourceError):  # of state that belongs to no parameter
            record = replace(record, fingerprint=fingerprint(checkpoints[0], **shared).text)
    for one in below:
        try:
            others = [opened(one.path / state.relative_to(unit.path)) for state in unit.states]
            for before, after in zip(others, checkpoints, strict=True):
                findings += [*_odd(before, after, factor, shared)]
        except SourceError:
            continue
        return Appeared(record, findings, str(one.path))
    return Appeared(record, findings, None)


def _odd(before: Checkpoint, after: Checkpoint, factor: float, shared: dict[str, Any]) -> Iterator[Finding]:
    """Yield what is odd of a checkpoint beside the one before."""
    if before.step is not None and after.step is not None and after.step <= before.step:
        said = f"its files say that it is of step {after.step}, and those of the one before of {before.step}"
        yield Finding(NOT_ADVANCED, said, after.source, (), f"beyond {before.step}", str(after.step))

    def by_slot(code: str, said: str, keys: Iterable[tuple[str, str]]) -> Iterator[Finding]:
        """Yield a finding for each slot of those in which something is wrong."""
        for slot, its in by_key((slot, name) for name, slot in keys).items():
            yield Finding(code, said.format(slot=slot, names=listed(its, most=SHOWN)), after.source, tuple(its))

    was, now = named(before), named(after)
    a, b = (
        {key: slot for key, slot in slots_of(one, Filter()).items() if slot.shape and key[0] not in set(one.buffers)}
        for one in (before, after)
    )
    lost = "{slot} of {names} is not there, or has another shape, and the one before has it"
    yield from by_slot(LOST, lost, (key for key, slot in a.items() if key not in b or b[key].shape != slot.shape))
    figures = measured(a, b, memory=shared["memory"], direct=shared["direct"])
    odd = (key for key, one in figures.items() if one.nan_b or one.inf_b)
    yield from by_slot(NOT_FINITE, "{slot} of {names} holds NaN or Inf", odd)
    values = {key: one for key, one in figures.items() if key[1] in (WEIGHT, MASTER) and one.numel}
    frozen = {key for key in values if now[key[0]].frozen and was[key[0]].frozen}
    moved = [key for key, one in values.items() if one.num_different]
    yield from by_slot(FROZEN_MOVED, "{slot} of {names} has moved, and is frozen", (k for k in moved if k in frozen))
    if not set(moved) - frozen and values.keys() - frozen:
        yield Finding(UNMOVED, "no weight or master that is trained has moved since the one before", after.source)
    for slot in dict.fromkeys(key for _, key in figures):  # norms that have changed by a factor
        its = {key: one for key, one in figures.items() if key[1] == slot}
        low, high = (math.sqrt(sum(getattr(one, side) for one in its.values())) for side in ("squares_a", "squares_b"))
        limit = factor if slot in (WEIGHT, MASTER) else factor**2
        if low > 0 and not low / limit <= high <= low * limit:
            said = f"the norm of {slot} of all parameters is {high:.3g}, and was {low:.3g}"
            yield Finding(JUMPED, said, after.source, (), f"{low / limit:.3g} to {low * limit:.3g}", f"{high:.3g}")
            continue
        grown = (k for k, one in its.items() if one.norm_b > max(one.norm_a * limit, high * SHARE) and one.norm_a > 0)
        yield from by_slot(JUMPED, f"the norm of {{slot}} of {{names}} has grown to more than {limit:g} times", grown)
