"""Whether tensor-parallel rules are true of the slices, as far as a bounded sample of the masters tells.

A rule that is missing cannot be seen in shapes: a norm that every rank has whole looks like slices of one twice as
long. But slices of a trained parameter are not all alike, and copies of one are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zckpt.engine.cast import Array
from zckpt.engine.read import read_extent
from zckpt.errors import WeightMismatchError
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.tp_rules import REPLICATED, Rules
from zckpt.state import MASTER, Extent, Slot
from zckpt.storage.files import Sources

RUNS = 4
"""Runs of elements that are sampled, spread evenly over a slice."""

RUN_NUMEL = 16


def check_slices(target: Target) -> int:
    """Compare a sample of each master over the ranks whose slices are put together; return how many elements.

    Raises
    ------
    WeightMismatchError
        Copies of a parameter differ, or what no rule names is the same on every rank.
    """
    ranks, given = target.origin.ranks, target.origin.rules
    if given is None or len(ranks) in (0, 1, len(target.ranks)):
        return 0
    path = target.origin.rules_path or target.origin.model.shard.path
    rules = Rules(given, path)
    compared = 0
    with Sources() as sources:
        for name in ranks[0].state.parameters:
            rule = rules.matching(name)
            slots = [files.state.parameters[name].slots.get(MASTER) for files in ranks]
            masters = [slot for slot in slots if slot is not None]
            if rule not in (None, REPLICATED) or len(masters) < len(ranks) or not masters[0].numel:
                continue
            if any(slot.shape != masters[0].shape for slot in masters):
                continue
            values = [_sample(slot, sources) for slot in masters]
            compared += sum(len(value) for value in values)
            _check(name, rule, values, path)
    return compared


def _sample(slot: Slot, sources: Sources) -> Array:
    last = max(slot.numel - RUN_NUMEL, 0)
    starts = sorted({round(i * last / (RUNS - 1)) for i in range(RUNS)})
    extents = [Extent.flat(slot.shape, start, min(RUN_NUMEL, slot.numel - start)) for start in starts]
    return np.concatenate([read_extent(slot, extent, sources) for extent in extents])


def _check(name: str, rule: str | None, values: Sequence[Array], path: str) -> None:
    same = all(np.array_equal(value.view(np.uint8), values[0].view(np.uint8)) for value in values[1:])
    if rule == REPLICATED and not same:
        raise WeightMismatchError(
            f"{name} differs between tensor-parallel ranks, though a rule says that each has the whole",
            path=path,
            advice="if it is to be averaged, say so with --tp-rules; --no-weight-check takes the first rank's",
        )
    constant = np.all(values[0] == values[0][0])  # as a bias that was never trained: it tells nothing
    if rule is None and same and not constant:
        raise WeightMismatchError(
            f"{name} is the same on all tensor-parallel ranks, though no rule says that each has the whole",
            path=path,
            advice="say so with --tp-rules; --no-weight-check takes it for slices",
        )
