"""What holds of every target: it is apart from its source, and what was written is all there, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.digests import FILE_NAME, digests_path, write_digests
from zckpt.dtypes import itemsize
from zckpt.errors import LayoutError, TargetExistsError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.plan import Hole, fill
from zckpt.renaming import like_model
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot

if TYPE_CHECKING:
    from zckpt.compare import Pair
    from zckpt.execute import Reporter

SHOWN_NAMES = 4


def check_apart(checkpoint: Checkpoint, target: Path, *, overwrite: bool, is_own: Callable[[str], bool]) -> None:
    """Raise unless a directory can be made or replaced without losing the source or anything that is no checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
        The source.
    target : Path
        A directory.
    overwrite : bool
    is_own : callable
        Tells a file of the target's format by its name within the target.

    Raises
    ------
    UsageError
        The target is, contains, or is inside the source.
    TargetExistsError
        It holds files that replacing it would remove.
    """
    whole = target.resolve()
    for file in checkpoint.files:
        if whole in (Path(file.path).resolve(), *Path(file.path).resolve().parents):
            raise UsageError("the target is, or contains, the source", path=target, found=file.path)
    if Path(checkpoint.source).resolve() in whole.parents:
        raise UsageError("the target is inside the source", path=target, found=checkpoint.source)
    if not overwrite or not target.is_dir():
        return
    others = sorted(
        name
        for path in target.rglob("*")
        if not path.is_dir() and path.name != FILE_NAME and not is_own(name := path.relative_to(target).as_posix())
    )
    if others:
        raise TargetExistsError(
            "holds other files, which replacing it would remove",
            path=target,
            found=", ".join(others[:SHOWN_NAMES]),
            advice="choose a new directory",
        )


@dataclass(slots=True)
class Proof:
    """What is done with a target before it gets its name.

    Parameters
    ----------
    checkpoint : Checkpoint
        The source.
    target : Path
        What it will be called, for messages.
    verify : bool
        Compare every byte with the source.
    fingerprint : bool
        Record the fingerprint with it; of one file, beside it.
    memory : int, bytes
    reporter : Reporter or None
    verified : int, bytes
        What was compared.
    """

    checkpoint: Checkpoint
    target: Path
    verify: bool
    fingerprint: bool
    memory: int
    reporter: Reporter | None
    verified: int = 0

    def of(self, written: Path) -> None:
        """Open what was written under a temporary name; raise LayoutError unless all is there."""
        found = like_model(open_checkpoint(written), [one.name for one in self.checkpoint.tensors()])
        prove(self.checkpoint, found, self.target)
        if self.verify:
            self.verified = verify_bytes(
                self.checkpoint, found, self.target, memory=self.memory, reporter=self.reporter
            )
        if self.fingerprint:
            from zckpt.operations.fingerprint import fingerprint

            place = digests_path(found if written.is_dir() else replace(found, source=str(self.target)))
            write_digests(fingerprint(found, memory=self.memory, reporter=self.reporter), place, overwrite=True)


def prove(checkpoint: Checkpoint, written: Checkpoint, target: Path) -> None:
    """Plan a read of all that was written: every element of every slot of the source must be there once.

    A weight may be missing where its master is there, and a master where a weight of its own type is.

    Raises
    ------
    LayoutError
        Something did not arrive.
    """
    for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
        found = _same(parameter, written)
        for key, slot in parameter.slots.items():
            copy = _copy(key, slot, found)
            if copy is None:
                raise LayoutError(f"{key} of {parameter.name} did not arrive", path=target, advice="please report this")
            if copy.shape != slot.shape:
                raise LayoutError(
                    f"{key} of {parameter.name} has another shape",
                    path=target,
                    expected=slot.shape,
                    found=copy.shape,
                    advice="please report this",
                )
            fill(Hole(0, f"{key}/{parameter.name}", copy, Extent.whole(copy.shape), copy.dtype))


def _same(parameter: Parameter, written: Checkpoint) -> dict[str, object]:
    """Return the slots and group-wide values of the parameter of the same name."""
    name = parameter.name
    found = written.parameters.get(name) or written.buffers.get(name) or written.unnamed.get(name)
    if found is None:
        return {}
    group = written.param_groups[found.group].state if found.group is not None else {}
    return {**group, **found.slots}


def _copy(key: str, slot: Slot, found: dict[str, object]) -> Slot | None:
    copy = found.get(key)
    if copy is None and key in (WEIGHT, MASTER):
        copy = found.get(MASTER if key == WEIGHT else WEIGHT)
        if key == MASTER and isinstance(copy, Slot) and copy.dtype != slot.dtype:
            return None
    if copy is None or isinstance(copy, Slot):
        return copy
    return slot if not slot.shape else None  # one value, which its group has now


def verify_bytes(
    checkpoint: Checkpoint, written: Checkpoint, target: Path, *, memory: int, reporter: Reporter | None = None
) -> int:
    """Compare every byte of every slot that was written with the source; return how many bytes were compared.

    Raises
    ------
    LayoutError
        Some element is another one than the source's.
    """
    from zckpt.compare import differences

    pairs = [
        pair
        for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]
        for key, slot in parameter.slots.items()
        for pair in _pairs(f"{key}/{parameter.name}", key, slot, _same(parameter, written))
    ]
    different = differences(pairs, memory=memory, reporter=reporter)
    if different:
        first = different[0]
        raise LayoutError(
            f"{len(different)} tensors differ from the source: {first.label} in {first.figures.num_different} of "
            f"{first.figures.numel} elements, first at {first.figures.first}",
            path=target,
            advice="please report this",
        )
    return sum(pair.b.nbytes for pair in pairs)


def _pairs(label: str, key: str, slot: Slot, found: dict[str, object]) -> Iterator[Pair]:
    """Yield a slot beside what was written of it; of averaged slots every replica, none of them averaged again."""
    from zckpt.compare import Pair

    copy = found.get(key)
    if copy is None and key == MASTER:
        copy = found.get(WEIGHT)
    if not isinstance(copy, Slot) or (key == WEIGHT and slot.replicas):
        return  # a weight that is averaged is rounded from the mean of the masters, not the mean of the weights
    if key == WEIGHT and itemsize(copy.dtype) > itemsize(slot.dtype):
        slot, copy = copy, slot  # a model that was written in a wider type holds masters, which round to its weights
    ours, theirs = (slot.spans, *slot.replicas), (copy.spans, *copy.replicas)
    if len(ours) == len(theirs):
        for mine, its in zip(ours, theirs, strict=True):
            yield Pair(label, replace(slot, spans=mine, replicas=()), replace(copy, spans=its, replicas=()), copy.dtype)
    else:
        for its in theirs:
            yield Pair(label, slot, replace(copy, spans=its, replicas=()), copy.dtype)
