"""How each slot moved from one checkpoint of a run to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zckpt.compare.logical import named
from zckpt.compare.slots import EXACT, Figures, measure, pair
from zckpt.engine import reporting
from zckpt.errors import UsageError
from zckpt.executors.using import using
from zckpt.immutable import immutable
from zckpt.operations.diff.match import Filter
from zckpt.operations.open import Source, opened, several
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.operations.target import summary
from zckpt.state import Checkpoint, Document, Result, Slot, document, nbytes_of


@immutable
class Moved:
    """One slot over the checkpoints; None where a checkpoint does not have it, or has it in another shape."""

    name: str
    slot: str
    norm: list[float | None]  # L2 norm of the finite elements in each checkpoint
    change: list[float | None]
    """L2 norm of the change since the checkpoint before, relative to the norm there; the first is None."""


@immutable
class Series(Result):
    """Several checkpoints of one run, and how their slots moved, in the order of the first."""

    checkpoints: list[Checkpoint]
    moved: list[Moved]

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "sources": [summary(one) for one in self.checkpoints],
            "steps": [one.step for one in self.checkpoints],
            "series": document(self.moved),
        }


@shares(Copying)
def series(
    sources: Sequence[Source],
    *,
    slots: Sequence[str] = (),
    parameters: Sequence[str] = (),
    names: Sequence[str] | None = None,
    tp_rules: Place | None = None,
    **shared: Unpack[Copying],
) -> Series:
    """Measure how far each slot moved between several checkpoints of a run, in the order given.

    Parameters
    ----------
    sources : sequence of path-like or Checkpoint
        At least two.
    slots, parameters : sequence of str
        As for `diff`.
    names, tp_rules
        As for `open`, for each path. If a checkpoint needs other options, open it with `open`.
    **shared

    Raises
    ------
    UsageError
        Fewer than two checkpoints, or nothing to compare.
    SourceError
        A checkpoint cannot be read.
    """
    sources = several(sources)
    if len(sources) < 2:
        raise UsageError("a series needs two checkpoints or more", found=f"{len(sources)} given")
    checkpoints = [opened(one, names=names, tp_rules=tp_rules) for one in sources]
    chosen = Filter(slots, parameters)
    chosen.check(*checkpoints)
    held = [slots_of(one, chosen) for one in checkpoints]
    keys = list(dict.fromkeys(key for one in held for key in one))
    if not keys:
        raise UsageError("nothing to compare: no slot is selected", found=[*slots, *parameters])
    found = {key: Moved(*key, norm=[None] * len(held), change=[None] * len(held)) for key in keys}
    nbytes = sum(slot.nbytes for one in held[1:] for slot in one.values())
    with reporting(shared["reporter"], nbytes) as progress, using(shared["executor"]):
        for index, (before, after) in enumerate(pairwise(held), 1):
            for key, one in measured(before, after, memory=shared["memory"], direct=shared["direct"]).items():
                found[key].norm[index - 1 : index + 1] = [one.norm_a, one.norm_b]
                found[key].change[index] = one.rel_l2 if one.squares_a or one.squares else 0.0
            progress.advance(nbytes_of(after.values()))
    return Series(checkpoints, list(found.values()))


Slots = dict[tuple[str, str], Slot]
"""By canonical name of the parameter and key of the slot."""


def slots_of(checkpoint: Checkpoint, chosen: Filter) -> Slots:
    """Return the slots of a checkpoint that are chosen."""
    return {
        (name, key): slot
        for name, parameter in named(checkpoint).items()
        if chosen.takes(name)
        for key, slot in parameter.slots.items()
        if chosen.takes_slot(key)
    }


def measured(before: Slots, after: Slots, *, memory: int, direct: bool) -> dict[tuple[str, str], Figures]:
    """Return what differs in the slots that two checkpoints have in one shape."""
    both = [key for key in after if key in before and before[key].shape == after[key].shape]
    sets = [pair(f"{slot}/{name}", before[name, slot], after[name, slot]) for name, slot in both]
    return dict(zip(both, measure(sets, EXACT, memory=memory, direct=direct), strict=True))
