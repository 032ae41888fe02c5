"""Nothing is lost without a word: what no one has read, or has a place for, is refused unless the user names it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from os.path import commonprefix

from zckpt.errors import LeftOutError, UnsupportedError, UsageError, listed
from zckpt.formats.account import take_inventory
from zckpt.formats.torch_files.optimizer import BESIDE, OPTIMIZERS
from zckpt.state import Checkpoint, by_key, without
from zckpt.state.checkpoint import how_to_drop, keys_listed
from zckpt.state.inventory import FILE, UNNAMED_STATE
from zckpt.torchfile import node_of, pieces

SHOWN = 3
"""More things than this are counted in a message."""


def check_nothing_lost(
    sources: Sequence[Checkpoint],
    drop: Sequence[str],
    *,
    copied: Collection[str] = (),
    kept: Collection[str] = (),
    salvages: bool = False,
    of_model: bool = False,
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
    salvages : bool
        What nobody can read any more, for other files are lost, goes, too.
    of_model : bool
        Only the model is wanted: an optimizer that no one could read as a whole is none that is lost.

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
        inventory = take_inventory(one)
        more = ["*"] if one.lost and inventory.left_out and salvages else []
        dropped, lost, unused = inventory.without([*drop, *more])
        others = [
            item
            for item in lost
            if not (of_model and item.about == UNNAMED_STATE)
            and (item.error is not None or (item.file not in copied and (item.kind != FILE or item.file not in kept)))
        ]
        if others:
            names, said = [item.name for item in others], [f"{item.name} ({item.about})" for item in others]
            what = f"{len(others)} {'thing' if len(others) == 1 else 'things'}"
            shared = f"{escape(commonprefix(names))}*"  # noqa: RUF071  # of characters, not of paths
            unnamed = any("--names FILE" in warning for warning in one.warnings)
            raise LeftOutError(
                f"{what} in it would be lost: {listed(said, most=SHOWN)}",
                path=one.named,
                advice=f"{('--names FILE may identify them (see the warnings); ' if unnamed else '')}to write "
                f"without this, give --drop '{(escape(names[0]) if len(names) == 1 else shared)}'; `zckpt inspect "
                "--files` shows everything",
                names=names,
            )
        found += (f"{item.name} ({item.about})" for item in dropped)
        idle = [pattern for pattern in idle if pattern in unused]
    if idle:
        raise UsageError(
            f"--drop {idle[0]!r} names nothing that would be lost",
            path=sources[0].named,
            expected="FILE or FILE:PLACE of something that is left out, as `zckpt inspect --files` shows it",
        )
    return tuple(found)


def without_rank_values(
    checkpoint: Checkpoint, drop: Sequence[str]
) -> tuple[Checkpoint, tuple[str, ...], tuple[str, ...]]:
    """Return a checkpoint without the state that patterns name by its keys, what that is, and other patterns.

    That is what each rank has of its own, and what lies in pieces beside the model, an average say.

    Raises UnsupportedError: it is more than single values; without its moments, an optimizer that has a step stops.
    """
    beside = [key for key in _named(checkpoint.metadata, drop) if any(pieces(checkpoint.metadata[key]))]
    gone = [value for value in checkpoint.per_rank if _named([value.key], drop)]
    if not gone and not beside:
        return checkpoint, (), tuple(drop)
    moments = [value for value in gone if not value.is_single or value.in_group]
    if moments:
        raise UnsupportedError(
            f"{keys_listed(moments)}: is the optimizer's state itself, and cannot be dropped separately",
            path=checkpoint.source,
            advice="`zckpt consolidate` writes the model without the optimizer",
        )
    kept = [value for value in checkpoint.per_rank if value not in gone]
    others = tuple(pattern for pattern in drop if not _named([*beside, *(value.key for value in gone)], [pattern]))
    ranks = by_key((value.key, (value.mp_rank, value.rank)) for value in gone)
    named = tuple(f"{key} (a different value on each of {len({*found})} ranks)" for key, found in ranks.items())
    named += tuple(f"{key} (beside the model)" for key in beside)
    return replace(checkpoint, per_rank=kept, metadata=without(checkpoint.metadata, *beside)), named, others


def _named(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)]


def refuse_rank_values(checkpoint: Checkpoint, *, expected: str | None = None, advice: str | None = None) -> None:
    """Raise UnsupportedError if ranks have state of their own, which would have to go into one optimizer."""
    if checkpoint.per_rank:
        raise UnsupportedError(
            f"{keys_listed(checkpoint.per_rank)}: each rank has its own, for the elements that it holds, which no "
            "other format can hold",
            path=checkpoint.source,
            expected=expected,
            advice=advice
            or how_to_drop(checkpoint.per_rank)
            or "--dequantize turns quantised state into floats; `zckpt consolidate` writes only the model",
        )


def refuse_beside(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError if an optimizer kept more than state of parameters, which a file of all slots has not."""
    if keeps_beside(checkpoint):
        raise UnsupportedError(
            "its optimizer kept more than parameter state, which the optimizer file cannot hold",
            path=checkpoint.source,
            advice="select slots, such as --slots=exp_avg,exp_avg_sq; or keep it for zckpt.load with `zckpt convert "
            "--to zckpt`",
        )


def keeps_beside(checkpoint: Checkpoint) -> bool:
    """Tell whether an optimizer kept more than state of parameters, or one of several did."""
    found = checkpoint.optimizer_metadata
    node = node_of(found.get(OPTIMIZERS))
    return BESIDE in found or (isinstance(node, dict) and any(BESIDE in its for its in node.values()))
