"""At which step two runs part, and where: their checkpoints of the same steps, held against each other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from zckpt.compare.digests import changes
from zckpt.errors import SourceError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.units import Unit, units
from zckpt.immutable import immutable
from zckpt.operations.diff import diff
from zckpt.operations.diff.match import Filter
from zckpt.operations.fingerprint import fingerprint
from zckpt.operations.history import units_of
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.state import Document, Result, number
from zckpt.storage.packed.store import mounted_place
from zckpt.storage.remote import is_url


@immutable
class Parting(Result):
    """Where two runs diverge.

    Parameters
    ----------
    a, b : str
        The runs.
    steps : list of int
        Steps for which both have a checkpoint.
    only_in_a, only_in_b : list of int
    equal : int or None
        The last step at which they are equal; None if there is none.
    different : int or None
        The first step at which they differ; None if they are equal at all.
    changed : list of dict
        What differs then: `name`, `entry` (`weight`, `master`, an optimizer slot or value; None: all of it), and
        `max_abs`, the largest difference, if `diff` finds one.
    """

    a: str
    b: str
    steps: list[int]
    only_in_a: list[int]
    only_in_b: list[int]
    equal: int | None
    different: int | None
    changed: list[Document]


def is_run(path: Place) -> bool:
    """Tell a directory, or a store, with several checkpoints that are called by steps."""
    mount = None if is_url(path) else mounted_place(path)
    there = Path(path) if mount is None else mount.path
    with nullcontext() if mount is None else closing(mount):
        return there.is_dir() and sum(one.number is not None for one in units(there)) > 1


@shares(Copying)
def parting(
    a: Place, b: Place, *, slots: Sequence[str] = (), parameters: Sequence[str] = (), **shared: Unpack[Copying]
) -> Parting:
    """Find the step at which two runs diverge, whatever their formats and world sizes.

    Uses bisection, since runs that have diverged do not meet again: of n common steps, about log2(n) are read,
    and the one found once more, for how much differs.

    Parameters
    ----------
    a, b : path-like
        Run directories.
    slots, parameters : sequence of str
        As for `diff`.
    **shared

    Raises
    ------
    UsageError
        They have no step in common.
    SourceError
        There is no run, a run has several checkpoints of one step, or one cannot be read.
    """
    ours, theirs = (_by_step(Path(run)) for run in (a, b))
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise UsageError("the runs have no step in common", path=b, expected=_listed(ours), found=_listed(theirs))
    chosen = Filter(slots, parameters)

    def differences(step: int) -> list[Document]:
        mine, other = _states(ours[step]), _states(theirs[step])
        found: list[Document] = [{"name": model, "entry": None} for model in mine.keys() ^ other.keys()]
        for model in mine.keys() & other.keys():
            prints = (fingerprint(open_checkpoint(one[model]), **shared) for one in (mine, other))
            found += [
                {"name": _called(model, one.name), "entry": one.entry}
                for one in changes(*prints)
                if chosen.takes(one.name) and (one.entry is None or chosen.takes_slot(one.entry))
            ]
        return sorted(found, key=lambda one: str(one["name"]))

    found: dict[int, list[Document]] = {}

    def differ(step: int) -> bool:
        found[step] = differences(step)
        return bool(found[step])

    first = bisect_left(steps, True, key=differ)
    equal, different = steps[first - 1] if first else None, steps[first] if first < len(steps) else None
    changed = [] if different is None else found[different]
    if different is not None:
        _measure(changed, _states(ours[different]), _states(theirs[different]), parameters, shared)
    alone = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    return Parting(str(a), str(b), steps, *alone, equal, different, changed)


def _measure(
    changed: list[Document], ours: dict[str, Path], theirs: dict[str, Path], parameters: Sequence[str], how: Copying
) -> None:
    """Add to what changed in some models the largest difference of each slot."""
    found: dict[tuple[object, object], float | None] = {}
    entries = {one["entry"] for one in changed}
    for model in ours.keys() & theirs.keys():
        both = open_checkpoint(ours[model]), open_checkpoint(theirs[model])
        slots = [key for key in dict.fromkeys(key for one in both for key in one.slot_names()) if key in entries]
        some = diff(*both, slots=slots, parameters=parameters, ignore_metadata=True, **how).changed if slots else []
        found |= {
            (_called(model, one.match.name), one.match.slot): one.difference.figures.max_abs
            for one in some
            if one.difference is not None
        }
    for one in changed:
        one["max_abs"] = number(found.get((one["name"], one["entry"])))


def _called(model: str, name: str) -> str:
    return f"{model}: {name}" if model else name


def _by_step(run: Path) -> dict[int, Unit]:
    """Return the checkpoints of a run by the steps that their names say."""
    found: dict[int, Unit] = {}
    for one in units_of(run):
        step = one.number
        if step is None or not one.states:
            continue
        if step in found:
            raise SourceError(
                f"two checkpoints of step {step}", path=run, found=f"{found[step].path} and {one.path}",
                advice="give a directory with one series",
            )  # fmt: skip
        found[step] = one
    return found


def _states(unit: Unit) -> dict[str, Path]:
    """Return the models of a checkpoint, by where they are in it."""
    if len(unit.states) == 1:
        return {"": unit.states[0]}
    return {one.relative_to(unit.path).as_posix(): one for one in unit.states}


def _listed(found: dict[int, Unit]) -> str:
    return ", ".join(map(str, sorted(found))) or "no steps"
