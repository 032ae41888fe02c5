"""What holds of every target: what was written is all there, once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.engine.plan import check_covered
from zckpt.errors import LayoutError
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.format import TargetFiles
from zckpt.formats.remainder import of_modules
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.operations.target import How, Proof
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, RankValue, Shape, Slot, itemsize, without
from zckpt.state.names import like_model
from zckpt.torchfile import FromFile, walk_tensors

if TYPE_CHECKING:
    from zckpt.engine.scan import SlotSet


def slots_proof(
    checkpoint: Checkpoint, laid: TargetFiles, how: How, drop: Sequence[str], *, verify: bool, records: bool
) -> Proof:
    """Return the proof that all of a source is in a target, but for what may be lost; `verify`: to the last byte."""

    def look(written: Path, _files: Sequence[Path], record: Path | None) -> int:
        if isinstance(laid.files, list):
            laid.files.clear()  # they are written, and what was may be as large
        found = like_model(open_checkpoint(written, names=laid.names), checkpoint.names)
        source, target = checkpoint, found
        if laid.in_floats:  # what each rank's codes stand for, as slots
            from zckpt.formats.deepspeed.rare.quantised import with_float_slots

            source, target = (with_float_slots(one, keeps_files=True) for one in (source, target))
        prove(source, target)
        _, lost, _ = take_inventory(found).without(drop)
        others = [item for item in lost if item.file not in laid.copied]
        if others:
            raise broken(f"{others[0].place or others[0].file} was written and is not read back: {others[0].about}")
        pairs = (checkpoint.metadata, found.metadata), (checkpoint.optimizer_metadata, found.optimizer_metadata)
        gone = [key for before, after in pairs for key in before if key not in after]
        modules, of_modules_alone = of_modules(checkpoint)
        if modules.keys() <= of_modules(found)[0].keys():  # in the model, whatever metadata had them before
            gone = [key for key in gone if key not in of_modules_alone]
        missing = [] if laid.restated is None else [key for key in gone if key not in laid.restated]
        if missing:
            raise broken(f"{missing[0]} did not arrive")
        verified = 0
        if verify:
            source, target = (_without(one, laid.rounded) for one in (source, target))
            sets = [
                one
                for key, name, slot, copy, is_implied in _copies(source, target)
                if copy is not None and copy is not slot and not is_implied
                for one in _pairs(f"{key}/{name}", key, slot, copy)
            ]
            verified = check_same([*sets, *_rank_pairs(source, target)], "differ from the source", how)
        if record is not None:
            from zckpt.compare.digests import bytes_of
            from zckpt.operations.fingerprint import fingerprint

            data = bytes_of(fingerprint(found, memory=how.memory, reporter=how.reporter, direct=how.direct))
            record.write_bytes(data)
        return verified

    return Proof(look, records)


def _without(checkpoint: Checkpoint, rounded: Mapping[str, Collection[str]]) -> Checkpoint:
    """Return a checkpoint without some slots of some parameters."""
    if not rounded:
        return checkpoint
    kept = {
        name: replace(one, slots=without(one.slots, *rounded.get(name, ())))
        for name, one in checkpoint.parameters.items()
    }
    return replace(checkpoint, parameters=kept)


def prove(checkpoint: Checkpoint, written: Checkpoint) -> None:
    """Plan a read of all that was written: every element of every slot of the source must be there once.

    A weight may be missing where its master is there, and a master where a weight of its own type is.
    """
    for key, name, slot, copy, _ in _copies(checkpoint, written):
        check_arrived(f"{key} of {name}", copy, slot.shape)
    arrived = {_identity(value) for value in written.per_rank}
    for value in checkpoint.per_rank:
        if _identity(value) not in arrived:
            raise broken(f"{value.key} of rank {value.rank} did not arrive")


def _copies(checkpoint: Checkpoint, written: Checkpoint) -> Iterator[tuple[str, str, Slot, Slot | None, bool]]:
    """Yield each slot of the source, what was written of it, and whether that only implies it, as a master its weight.

    Of a single value, which its group has now, that is itself.
    """
    for parameter in checkpoint.holders():
        found = written.find(parameter.name)
        values: dict[str, object] = {}
        if found is not None:
            group = written.param_groups[found.group].state if found.group is not None else {}
            values = {**group, **found.state, **found.slots}
        for key, slot in parameter.slots.items():
            if not parameter.numel and key != WEIGHT:
                continue  # what has no elements needs no state
            copy = values.get(key)
            if copy is None and key in (WEIGHT, MASTER):
                other = values.get(MASTER if key == WEIGHT else WEIGHT)
                copy = other if key == WEIGHT or (isinstance(other, Slot) and other.dtype == slot.dtype) else None
            single = slot if copy is not None and not slot.shape else None
            is_implied = key == WEIGHT and key not in values
            yield key, parameter.name, slot, copy if isinstance(copy, Slot) else single, is_implied


def check_arrived(what: str, copy: Slot | None, shape: Shape, dtype: str | None = None) -> None:
    """Raise LayoutError unless a slot was written in some shape, and of a type if one is given, each element once."""
    if copy is None:
        raise broken(f"{what} did not arrive")
    if copy.shape != shape or dtype not in (None, copy.dtype):
        expected, found = f"{dtype or copy.dtype} of shape {shape}", f"{copy.dtype} of shape {copy.shape}"
        raise broken(f"{what} arrived in another form", expected, found)
    check_covered(copy, what)


def check_all_arrived(
    checkpoint: Checkpoint, written: Checkpoint, needs: Callable[[str, Parameter], bool] = lambda *_: True
) -> None:
    """Raise LayoutError unless every slot that is needed was written as it is; `needs`: of a slot's name."""
    for parameter in checkpoint.holders():
        found = written.find(parameter.name)
        for key, slot in parameter.slots.items():
            if needs(key, parameter):
                copy = None if found is None else found.slots.get(key)
                check_arrived(f"{key} of {parameter.name}", copy, slot.shape, slot.dtype)


def broken(what: str, expected: object = None, found: object = None) -> LayoutError:
    """Return the error of a target that is not what was to be written."""
    return LayoutError(what, expected=expected, found=found, advice="please report this")


def _identity(value: RankValue) -> tuple[object, ...]:
    return value.key, value.group, value.part, value.rank, value.mp_rank


def check_same(sets: Sequence[SlotSet], wrong: str, how: How) -> int:
    """Raise LayoutError if what was written, the second of each set, differs from the first; return its bytes."""
    from zckpt.compare.slots import differences

    found = differences(sets, memory=how.memory, reporter=how.reporter, direct=how.direct)
    if found:
        first, figures = found[0].label, found[0].figures
        where = f"{first} in {figures.num_different} of {figures.numel} elements, first at {figures.first}"
        raise broken(f"{len(found)} tensors {wrong}: {where}")
    return sum(one.slots[1].nbytes for one in sets)


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


def _pairs(label: str, key: str, slot: Slot, copy: Slot) -> Iterator[SlotSet]:
    """Yield a slot with what was written of it; of averaged slots every replica, none of them averaged again."""
    from zckpt.compare.slots import pair

    if key == WEIGHT and slot.replicas:
        return  # a weight that is averaged is rounded from the mean of the masters, not the mean of the weights
    if key == WEIGHT and itemsize(copy.dtype) > itemsize(slot.dtype):
        slot, copy = copy, slot  # a model that was written in a wider type holds masters, which round to its weights
    ours, theirs = slot.sets, copy.sets
    is_each = len(ours) == len(theirs)
    for number, its in enumerate(theirs):
        mine = replace(slot, spans=ours[number], replicas=()) if is_each else slot
        yield pair(label, mine, replace(copy, spans=its, replicas=()), copy.dtype)
