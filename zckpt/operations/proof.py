"""What holds of every target: it is apart from its source, and what was written is all there, once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.engine.plan import check_covered
from zckpt.engine.targets import Hole
from zckpt.errors import LayoutError, TargetExistsError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.consolidated.optimizer import optimizer_path
from zckpt.formats.suffixes import check_directory
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot
from zckpt.state.checkpoint import RankValue
from zckpt.state.dtypes import itemsize
from zckpt.state.names import like_model
from zckpt.storage.ownership import FINGERPRINT_NAME, Owned, check_replaceable
from zckpt.storage.stand_ins import place
from zckpt.torchfile import FromFile, walk_tensors

if TYPE_CHECKING:
    from zckpt.engine import Reporter
    from zckpt.engine.scan import SlotSet


def check_apart(checkpoint: Checkpoint, target: Path, *, overwrite: bool, owned: Owned) -> None:
    """Raise unless a directory can be created or replaced without losing the source or anything that is no checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
        The source.
    target : Path
        A directory.
    overwrite : bool
    owned : Owned
        Which directories may be replaced.

    Raises
    ------
    UsageError
        The target is, contains, or is inside the source; its name is a file's.
    TargetExistsError
        It holds files that replacing it would remove, or is no directory.
    """
    check_directory(target)
    check_sources(checkpoint, [target])
    if place(checkpoint.source) in place(target).parents:
        raise UsageError("the target is inside the source", path=target, found=checkpoint.source)
    if overwrite:
        check_replaceable(target, owned)


def check_sources(checkpoint: Checkpoint, targets: Sequence[Path]) -> None:
    """Raise UsageError if a target is, or contains, a file of the source."""
    sources = {place(file.path) for file in checkpoint.files}
    around = {parent for source in sources for parent in source.parents} | sources
    for target in targets:
        if (whole := place(target)) in around:
            found = next(source for source in sorted(sources) if whole in (source, *source.parents))
            raise UsageError("the target is, or contains, the source", path=target, found=str(found))


def check_companions(target: Path, written: Sequence[Path]) -> None:
    """Raise TargetExistsError unless a file can be replaced, and no file next to it would then belong to another.

    Parameters
    ----------
    target : Path
        A file.
    written : sequence of Path
        It and what is written next to it.
    """
    for one in written:
        check_replaceable(one)
    if not target.is_file():
        return
    for one in (_digests_path(target), optimizer_path(target)):
        if one not in written and os.path.lexists(one):
            raise TargetExistsError(
                "belongs to the file that is to be replaced, and would be taken for the new one's",
                path=one,
                advice="remove it, or have it written again",
            )


def _digests_path(file: Path) -> Path:
    from zckpt.compare.digests import digests_path_of_file

    return digests_path_of_file(file)


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
        Record the fingerprint with it; of one file, next to it.
    memory : int, bytes
    reporter : Reporter or None
    drop : sequence of str
        What may be lost.
    restated : collection of str, or None
        Keys of metadata that need not arrive under their names. None: none of them has to, for ranks that are not there
        any more have some of their own.
    copied : collection of str
        Files that arrive as they are, whatever is in them, by their names within the source.
    names : sequence of str or None
        Of the parameters that the target's optimizer numbers.
    in_floats : bool
        Whether what the codes of quantised state stand for is to be compared, which ranks have otherwise.
    direct : bool
        Read past the page cache.
    rounded : mapping of str to collection of str
        Slots of parameters that have to be there, and whose values are not compared.
    verified : int, bytes
        What was compared.
    """

    checkpoint: Checkpoint
    target: Path
    verify: bool
    fingerprint: bool
    memory: int
    reporter: Reporter | None
    drop: Sequence[str] = ()
    restated: Collection[str] | None = ()
    copied: Collection[str] = ()
    names: Sequence[str] | None = None
    in_floats: bool = False
    direct: bool = False
    rounded: Mapping[str, Collection[str]] = field(default_factory=dict)
    verified: int = 0

    @property
    def companions(self) -> list[Path]:
        """Files that are written next to a target that is one file: its fingerprint, if it is recorded."""
        return [_digests_path(self.target)] if self.fingerprint else []

    def of(self, written: Path, more: Sequence[Path]) -> None:
        """Open what was written under a temporary name; raise LayoutError unless all is there.

        Parameters
        ----------
        written : Path
        more : sequence of Path
            Temporary names of the `companions` of a target that is one file; a directory has its fingerprint in it.
        """
        found = like_model(open_checkpoint(written, names=self.names), [one.name for one in self.checkpoint.tensors()])
        source, target = (self.checkpoint, found) if not self.in_floats else _in_floats(self.checkpoint, found)
        prove(source, target, self.target)
        prove_rest(self.checkpoint, found, self.target, drop=self.drop, restated=self.restated, copied=self.copied)
        how: dict[str, Any] = {"memory": self.memory, "reporter": self.reporter, "direct": self.direct}
        if self.verify:
            source, target = (_without(one, self.rounded) for one in (source, target))
            self.verified = verify_bytes(source, target, self.target, **how)
        if self.fingerprint:
            from zckpt.compare.digests import bytes_of
            from zckpt.operations.fingerprint import fingerprint

            data = bytes_of(fingerprint(found, **how))
            (more[0] if more else written / FINGERPRINT_NAME).write_bytes(data)


def _in_floats(*checkpoints: Checkpoint) -> list[Checkpoint]:
    """Return checkpoints with what each rank's codes stand for as slots."""
    from zckpt.formats.deepspeed.quantised import with_float_slots

    return [with_float_slots(one, keeps_files=True) for one in checkpoints]


def _without(checkpoint: Checkpoint, rounded: Mapping[str, Collection[str]]) -> Checkpoint:
    """Return a checkpoint without some slots of some parameters."""
    if not rounded:
        return checkpoint
    kept = {
        name: replace(one, slots={key: slot for key, slot in one.slots.items() if key not in rounded.get(name, ())})
        for name, one in checkpoint.parameters.items()
    }
    return replace(checkpoint, parameters=kept)


def prove(checkpoint: Checkpoint, written: Checkpoint, target: Path) -> None:
    """Plan a read of all that was written: every element of every slot of the source must be there once.

    A weight may be missing where its master is there, and a master where a weight of its own type is.

    Raises
    ------
    LayoutError
        Something did not arrive.
    """
    for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
        found = _values(parameter, written)
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
            check_covered(Hole(0, f"{key}/{parameter.name}", copy, Extent.whole(copy.shape), copy.dtype))
    arrived = {_identity(value) for value in written.per_rank}
    for value in checkpoint.per_rank:
        if _identity(value) not in arrived:
            raise LayoutError(f"{value.key} of rank {value.rank} did not arrive", path=target,
                              advice="please report this")  # fmt: skip


def _identity(value: RankValue) -> tuple[object, ...]:
    return value.key, value.group, value.part, value.rank, value.mp_rank


def prove_rest(
    checkpoint: Checkpoint,
    written: Checkpoint,
    target: Path,
    *,
    drop: Sequence[str],
    restated: Collection[str] | None,
    copied: Collection[str] = (),
) -> None:
    """Hold what was written besides slots against the source: all of it can be read again, and no key is missing."""
    _, lost, _ = take_inventory(written).without(drop)
    others = [item for item in lost if item.file not in copied]
    if others:
        raise LayoutError(
            f"{others[0].place or others[0].file} was written and is not read back: {others[0].about}",
            path=target,
            advice="please report this",
        )
    pairs = (
        (checkpoint.metadata, written.metadata),
        (checkpoint.optimizer_metadata, written.optimizer_metadata),
    )
    gone = [key for source, found in pairs for key in source if key not in found]
    missing = [] if restated is None else [key for key in gone if key not in restated]
    if missing:
        raise LayoutError(f"{missing[0]} did not arrive", path=target, advice="please report this")


def same_parameter(parameter: Parameter, written: Checkpoint) -> Parameter | None:
    """Return the parameter or buffer that has the same name in what was written."""
    name = parameter.name
    return written.parameters.get(name) or written.buffers.get(name) or written.unnamed.get(name)


def _values(parameter: Parameter, written: Checkpoint) -> dict[str, object]:
    """Return the slots of the parameter of the same name, and the single values of it and its group."""
    found = same_parameter(parameter, written)
    if found is None:
        return {}
    group = written.param_groups[found.group].state if found.group is not None else {}
    return {**group, **found.state, **found.slots}


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
    checkpoint: Checkpoint,
    written: Checkpoint,
    target: Path,
    *,
    memory: int,
    reporter: Reporter | None = None,
    direct: bool = False,
) -> int:
    """Compare every byte of every slot that was written with the source; return how many bytes were compared."""
    from zckpt.compare.slots import differences

    pairs = [
        one
        for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]
        for key, slot in parameter.slots.items()
        for one in _pairs(f"{key}/{parameter.name}", key, slot, _values(parameter, written))
    ]
    pairs += _rank_pairs(checkpoint, written)
    different = differences(pairs, memory=memory, reporter=reporter, direct=direct)
    if different:
        first = different[0]
        raise LayoutError(
            f"{len(different)} tensors differ from the source: {first.label} in {first.figures.num_different} of "
            f"{first.figures.numel} elements, first at {first.figures.first}",
            path=target,
            advice="please report this",
        )
    return sum(one.slots[1].nbytes for one in pairs)


def _rank_pairs(checkpoint: Checkpoint, written: Checkpoint) -> Iterator[SlotSet]:
    """Yield the tensors of state that is each rank's own, each with what was written of it."""
    from zckpt.compare.slots import pair

    copies = {_identity(value): value.value for value in written.per_rank}
    for value in checkpoint.per_rank:
        copy = copies[_identity(value)]
        if not isinstance(value.value, FromFile) or not isinstance(copy, FromFile):
            continue
        mine, its = ([(where, slot_of(value.key, tensor, one.path)) for where, tensor in walk_tensors(one.node)]
                     for one in (value.value, copy))  # fmt: skip
        for (where, slot), (_, other) in zip(mine, its, strict=True):
            label = "/".join(map(str, (value.key, *where)))
            yield pair(f"{label} of rank {value.rank}", slot, other, slot.dtype)


def _pairs(label: str, key: str, slot: Slot, found: dict[str, object]) -> Iterator[SlotSet]:
    """Yield a slot with what was written of it; of averaged slots every replica, none of them averaged again."""
    from zckpt.compare.slots import pair

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
            yield pair(label, replace(slot, spans=mine, replicas=()), replace(copy, spans=its, replicas=()), copy.dtype)
    else:
        for its in theirs:
            yield pair(label, slot, replace(copy, spans=its, replicas=()), copy.dtype)
