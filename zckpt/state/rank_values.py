"""State of an optimizer that belongs to what one rank holds, as a whole. Data only, no I/O.

Under ZeRO an optimizer sees each rank's partition of a param group as one parameter. What it computes over "the
parameter" - a norm, a trust ratio, the codes of a quantised moment by blocks - is then neither one value for each
element nor one for the group: it means something for these very elements only, and cannot be cut for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN_KEYS = 6


@dataclass(frozen=True, slots=True)
class RankValue:
    """One such value.

    Parameters
    ----------
    key : str
        The optimizer's own.
    group : int
        The param group.
    part : int
        Which part of the group it is of, where a rank's share of the group is in several.
    rank, mp_rank : int
        The data- and the model-parallel rank.
    value : object
        A number, a Scalar, or a `torchfile.FromFile`: a tree and the file in which its tensors lie.
    """

    key: str
    group: int
    part: int
    rank: int
    mp_rank: int
    value: object


def keys_of(values: Iterable[RankValue]) -> list[str]:
    """Return the optimizer's keys of such values, each once."""
    return list(dict.fromkeys(value.key for value in values))


def listed(values: Iterable[RankValue]) -> str:
    """Return these keys as a person reads them."""
    keys = keys_of(values)
    return ", ".join(keys[:SHOWN_KEYS]) + (f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else "")
