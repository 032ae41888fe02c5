"""State that each rank has of its own, left out where a user says so: no other number of ranks has a place for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zckpt.errors import UnsupportedError
from zckpt.formats.remainder import BESIDE, OPTIMIZERS
from zckpt.state import Checkpoint
from zckpt.state.checkpoint import how_to_drop, keys_listed
from zckpt.torchfile import node_of


def without_rank_values(
    checkpoint: Checkpoint, drop: Sequence[str]
) -> tuple[Checkpoint, tuple[str, ...], tuple[str, ...]]:
    """Return a checkpoint without the state that patterns name by its keys, what that is, and other patterns.

    Raises UnsupportedError: it is more than single values; without its moments, an optimizer that has a step stops.
    """
    gone = [value for value in checkpoint.per_rank if any(fnmatchcase(value.key, pattern) for pattern in drop)]
    if not gone:
        return checkpoint, (), tuple(drop)
    moments = [value for value in gone if not value.is_single or value.in_group]
    if moments:
        raise UnsupportedError(
            f"{keys_listed(moments)}: is the optimizer's state itself, and not dropped by itself",
            path=checkpoint.source,
            advice="`zckpt consolidate` writes the model without the optimizer",
        )
    kept = [value for value in checkpoint.per_rank if value not in gone]
    others = tuple(p for p in drop if not any(fnmatchcase(value.key, p) for value in gone))
    ranks: dict[str, set[tuple[int, int]]] = {}
    for value in gone:
        ranks.setdefault(value.key, set()).add((value.mp_rank, value.rank))
    named = tuple(f"{key} (a value of its own on each of {len(found)} ranks)" for key, found in ranks.items())
    return replace(checkpoint, per_rank=kept), named, others


def refuse_rank_values(checkpoint: Checkpoint, *, expected: str | None = None, advice: str | None = None) -> None:
    """Raise UnsupportedError if ranks have state of their own, which would have to go into one optimizer."""
    if checkpoint.per_rank:
        raise UnsupportedError(
            f"{keys_listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, and no other "
            f"format has a place for that",
            path=checkpoint.source,
            expected=expected,
            advice=advice
            or how_to_drop(checkpoint.per_rank)
            or "--dequantize makes floats of quantised state; `zckpt consolidate` without --slots writes the model",
        )


def refuse_beside(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError if an optimizer kept more than state of parameters, which a file of all slots has not."""
    if keeps_beside(checkpoint):
        raise UnsupportedError(
            "its optimizer kept more than the state of parameters, for which the optimizer's file has no place",
            path=checkpoint.source,
            advice="name slots, as --slots exp_avg,exp_avg_sq does; `zckpt convert --to zckpt` keeps it for zckpt.load",
        )


def keeps_beside(checkpoint: Checkpoint) -> bool:
    """Tell whether an optimizer kept more than state of parameters, or one of several did."""
    found = checkpoint.optimizer_metadata
    node = node_of(found.get(OPTIMIZERS))
    return BESIDE in found or (isinstance(node, dict) and any(BESIDE in its for its in node.values()))
