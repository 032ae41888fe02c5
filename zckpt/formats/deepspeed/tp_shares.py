"""How one tensor-parallel parameter is put together of slices. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REPLICATED = "replicated"
AVERAGED = "averaged"
SLICED = "sliced"


class Share(NamedTuple):
    """Consecutive indexes along the sliced dimension: where they are in one tensor, where in another, and how many.

    In a `Rule`, `source` is in a rank's slice and `target` in the whole parameter.
    """

    source: int
    target: int
    size: int


Shares = tuple[tuple[Share, ...], ...]
"""By rank."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one parameter is put together.

    Parameters
    ----------
    kind : str
        REPLICATED, AVERAGED or SLICED.
    shape : tuple of int
        Of the whole parameter.
    dim : int
        Along which it is sliced.
    shares : tuple of tuple of Share
        What each rank's slice has of the whole.
    copies : tuple of tuple of Share
        What of that a rank before it has, too; empty where no part is on several ranks.
    """

    kind: str
    shape: tuple[int, ...]
    dim: int = 0
    shares: Shares = ()
    copies: Shares = ()

    @property
    def read(self) -> Shares:
        """What is read of each rank's slice: its shares without the copies."""
        if not self.copies:
            return self.shares
        return tuple(
            tuple(part for share in shares for part in without(share, copies))
            for shares, copies in zip(self.shares, self.copies, strict=True)
        )


def without(share: Share, others: tuple[Share, ...]) -> list[Share]:
    """Return what is left of a share without what others have of the whole."""
    left = [share]
    for _, low, size in others:
        rest = []
        for source, target, count in left:
            before, after = min(low - target, count), min(target + count - (low + size), count)
            if before > 0:
                rest.append(Share(source, target, before))
            if after > 0:
                rest.append(Share(source + count - after, target + count - after, after))
        left = rest
    return left
