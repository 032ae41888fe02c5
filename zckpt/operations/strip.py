"""Write a checkpoint again, in the format it has, without the bytes that are not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.format import TargetFiles
from zckpt.formats.registry import get
from zckpt.formats.stripping import Request, Stripping
from zckpt.immutable import immutable
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Place, ReadWritten, Unpack, shares
from zckpt.operations.proof import check_all_arrived
from zckpt.operations.target import How, Proof, Written, write_from
from zckpt.state import MASTER, WEIGHT

CHOICES = {
    "padding": Request(padding=True),
    "optimizer": Request(optimizer=True),
    "unreferenced": Request(unreferenced=True),
}


@immutable(kw_only=True)
class Stripped(Written):
    """What `strip` wrote.

    Parameters
    ----------
    saved : dict of str to int, bytes
        By kind: `padding`, `unreferenced`, the name of each removed slot, and `structure` for pickles and headers
        (which may also grow in a rewritten file). They add up to the difference of source and target.
    """

    saved: dict[str, int]


@shares(ReadWritten)
def strip(
    source: Source,
    target: Place,
    *,
    padding: bool = False,
    optimizer: bool = False,
    unreferenced: bool = False,
    keep_slots: Sequence[str] | None = None,
    **shared: Unpack[ReadWritten],
) -> Stripped:
    """Write a smaller copy of a checkpoint, without padding, optimizer state or unused bytes, for the same program.

    What remains in a file is bit-equal, and files that lose nothing are copied.

    Parameters
    ----------
    source : path-like or Checkpoint
        A file, or a directory of DeepSpeed, of ZeroRedundancyOptimizer, or of a consolidated model. From a run
        directory with several checkpoints, one is written.
    target : path-like
        A file if the source is one, otherwise a directory, that does not exist.
    padding : bool
        Remove the padding at the end of each rank's partition (DeepSpeed, ZeRO-1 and 2): from the masters, and from the
        slots if DeepSpeed can load what is left; otherwise a note says so.
    optimizer : bool
        Remove the optimizer's state: all slots, and masters that also have a weight. Hyperparameters stay if their file
        stays. For DeepSpeed ZeRO-1 and 2, the optimizer files are removed.
    unreferenced : bool
        Remove bytes that no tensor uses.
    keep_slots : sequence of str, optional
        Remove all optimizer slots except these. Weights and masters always stay, so `["master"]` keeps nothing else.
    **shared

    Raises
    ------
    UsageError
        There is nothing to remove, or no slot of that name.
    SourceError
        The source cannot be read, contradicts itself, or is in a format that cannot be stripped.
    TargetError
        The target exists or cannot be written.
    """
    how = How.of(
        "strip", shared, padding=padding, optimizer=optimizer, unreferenced=unreferenced, keep_slots=keep_slots
    )
    if optimizer and keep_slots is not None:
        raise UsageError("--optimizer removes every slot, --keep-slots only some", advice="give one of them")
    checkpoint = opened(source, **shared)
    request = Request(padding, optimizer, unreferenced, None if keep_slots is None else frozenset(keep_slots))
    origin, path = Path(checkpoint.named), Path(target)
    format_ = get(checkpoint.format)
    slots = [name for name in format_.slot_names(checkpoint, origin) if name != WEIGHT]
    unknown = sorted((request.keep_slots or frozenset()) - {*slots, WEIGHT, MASTER})
    if unknown:
        raise UsageError(
            f"no slot {', '.join(unknown)}",
            path=checkpoint.source,
            expected=", ".join(slots) or "a checkpoint that has an optimizer",
        )
    if request == Request():
        gains = {name: sum(_saved(format_.strip(checkpoint, origin, one)).values()) for name, one in CHOICES.items()}
        choices = ", ".join(f"--{name} ({gain:,} bytes)" for name, gain in gains.items())
        kept = f"--keep-slots ({', '.join(slots)})" if slots else "--keep-slots"
        raise UsageError("there is nothing to remove", path=origin, expected=f"{choices} or {kept}")
    stripping = format_.strip(checkpoint, origin, request)
    dropped = check_nothing_lost([checkpoint], shared["drop"], kept={one.name for one in stripping.files})
    laid = TargetFiles(
        [one.file for one in stripping.files if one.file is not None],
        is_file=not origin.is_dir(),
        notes=stripping.notes,
        copied=frozenset(one.name for one in stripping.files),
    )

    def look(written: Path, *_: object) -> int:  # every element of every slot that was to stay is there once
        done = open_checkpoint(written, names=checkpoint.given_names)
        check_all_arrived(checkpoint, done, lambda key, one: request.needs(key) or (key == MASTER and not one.weight))
        return 0

    return write_from(
        Stripped, checkpoint, laid, path, how, inside=[origin], proof=Proof(look), dropped=dropped,
        saved=_saved(stripping),
    )  # fmt: skip


def _saved(stripping: Stripping) -> dict[str, int]:
    saved: Counter[str] = Counter()
    for one in stripping.files:
        saved.update(one.saved)
    return dict(saved)
