"""Nothing is lost without a word: a source with something that no one has read is refused, unless it is named."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from glob import escape
from os.path import commonprefix

from zckpt.errors import LeftOutError, UsageError, listed
from zckpt.formats.account import take_inventory
from zckpt.state import Checkpoint
from zckpt.state.inventory import FILE

SHOWN = 3
"""More things than this are counted in a message."""


def check_nothing_lost(
    sources: Sequence[Checkpoint], drop: Sequence[str], *, copied: Collection[str] = (), kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Raise unless everything in sources arrives, or is to be dropped; return what is dropped, and why it is not read.

    Parameters
    ----------
    sources : sequence of Checkpoint
    drop : sequence of str
        Patterns of what may be lost: `FILE`, `FILE:PLACE` or `PLACE` as the inventory has them, with shell wildcards.
    copied : collection of str
        Files that arrive as they are, whatever is in them, by their names within the source, but for what is damaged.
    kept : collection of str
        Files that arrive or are known to go; what is in them may still be lost.

    Raises
    ------
    LeftOutError
        Something is left out, and no pattern names it.
    UsageError
        A pattern names nothing that is left out of any.
    """
    found: list[str] = []
    idle = list(drop)
    for one in sources:
        dropped, lost, unused = take_inventory(one).without(drop)
        others = [
            item
            for item in lost
            if item.error is not None or (item.file not in copied and (item.kind != FILE or item.file not in kept))
        ]
        if others:
            names, said = [item.name for item in others], [f"{item.name} ({item.about})" for item in others]
            what = f"{len(others)} {'thing' if len(others) == 1 else 'things'}"
            shared = f"{escape(commonprefix(names))}*"  # noqa: RUF071  # of characters, not of paths
            unnamed = any("--names FILE" in warning for warning in one.warnings)
            raise LeftOutError(
                f"{what} in it would be lost: {listed(said, most=SHOWN)}",
                path=one.opened or one.source,
                advice=f"{'--names FILE may tell what they are (see the warnings); ' if unnamed else ''}"
                f"to write without, give --drop '{escape(names[0]) if len(names) == 1 else shared}'; "
                "`zckpt inspect --files` shows everything",
                names=names,
            )
        found += (f"{item.name} ({item.about})" for item in dropped)
        idle = [pattern for pattern in idle if pattern in unused]
    if idle:
        raise UsageError(
            f"--drop {idle[0]!r} names nothing that would be lost",
            path=sources[0].opened or sources[0].source,
            expected="FILE or FILE:PLACE of something that is left out, as `zckpt inspect --files` shows it",
        )
    return tuple(found)
