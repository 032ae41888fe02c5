"""What is left of a checkpoint whose files are lost in part, and what of the rest another checkpoint has.

Nothing is made up: a slot of which an element is missing is left out, and so is a parameter without its weight. What
is missing and what was filled is listed: {name, slot, shape, ranges: [{offsets, sizes, start, numel}]}.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace

from zckpt.errors import ShardError, UnsupportedError, UsageError, listed
from zckpt.formats import open_checkpoint
from zckpt.formats.low_bit import codes_in
from zckpt.immutable import mutable
from zckpt.operations.losses import refuse_rank_values
from zckpt.state import MASTER, WEIGHT, Checkpoint, Document, Parameter, Slot, Span, is_floating, without
from zckpt.state.boxes import boxes_of
from zckpt.state.checkpoint import HAS_FROZEN
from zckpt.state.names import aligned
from zckpt.state.spans import LOST
from zckpt.state.views import narrow, plain
from zckpt.torchfile import pieces


@mutable
class Left:
    """What is left of a checkpoint: `missing` is what it has not, and `filled` what it has from `base`."""

    checkpoint: Checkpoint
    missing: tuple[Document, ...] = ()
    filled: tuple[Document, ...] = ()
    base: Checkpoint | None = None

    def sources(self, checkpoint: Checkpoint) -> Sequence[Checkpoint]:
        """Return the checkpoints that a target comes from, if they are more than one."""
        return () if self.base is None else (checkpoint, self.base)

    def refuse(self) -> None:
        """Raise ShardError if anything is missing: a training that goes on has everything."""
        if self.missing:
            shown = [f"{one['slot']} of {one['name']}" for one in self.missing]
            raise ShardError(
                f"is incomplete: {listed(shown, most=3)}",
                path=self.checkpoint.source,
                advice="--fill-from BASE takes it from another checkpoint, --fill-masters takes masters from "
                "weights; `zckpt consolidate --salvage` writes what is left of the model",
            )


def missing_from(checkpoint: Checkpoint) -> Iterator[Document]:
    """Yield what lost files held of each slot, and the names of which nothing else is known."""
    if checkpoint.lost:
        for one in checkpoint.holders():
            yield from (_said(one.name, slot, slot.lost) for slot in one.slots.values() if slot.lost)
    for path, names in checkpoint.lost.items():
        yield from (
            Document({"name": name, "slot": WEIGHT, "shape": None, "ranges": [], "file": path}) for name in names
        )


def _said(name: str, slot: Slot, spans: Sequence[Span]) -> Document:
    return {"name": name, "slot": slot.name, "shape": list(slot.shape), "ranges": [asdict(x.extent) for x in spans]}


def salvage(checkpoint: Checkpoint, given: Mapping[str, object], *, of_optimizer: bool) -> Left:
    """Return a checkpoint without what is missing in it, filled as the options say.

    `of_optimizer`: whether its slots are wanted, too. Raises UsageError: BASE is another model, or nothing is to be
    filled; UnsupportedError: what would be filled are codes, or has no single value.
    """
    place, masters = given["fill_from"], bool(given["fill_masters"])
    if masters and not checkpoint.lost:
        raise UsageError("--fill-masters does not apply: nothing is lost", path=checkpoint.named)
    if place is None and not checkpoint.lost:
        return Left(checkpoint)
    if of_optimizer and any(checkpoint.lost.values()) and checkpoint.is_numbered and checkpoint.given_names is None:
        raise UnsupportedError(
            "because tensors are lost, it is uncertain which parameters the optimizer's numbers stand for",
            path=checkpoint.named,
            advice="give --names FILE; or write only the model with `zckpt consolidate`",
        )
    if of_optimizer and checkpoint.lost:
        refuse_rank_values(checkpoint)
    base = None if place is None else open_checkpoint(place)  # type: ignore[arg-type]
    filling = _Filling(checkpoint, base, masters=masters, of_optimizer=of_optimizer)
    parameters, buffers, unnamed = (
        dict(filter(None, map(filling.filled, some.values())))
        for some in (checkpoint.parameters, checkpoint.buffers, checkpoint.unnamed)
    )
    gone = checkpoint.parameters.keys() - parameters.keys()
    parameters = {name: one for name, one in parameters.items() if one.tied_to not in gone}
    if base is not None:
        for name, one in filling.others(base).items():
            (parameters if one.name in base.parameters else buffers)[name] = replace(one, name=name)
    names = {*parameters, *unnamed}
    groups = [replace(one, parameters=[n for n in one.parameters if n in names]) for one in checkpoint.param_groups]
    whole = [one for one in checkpoint.duplicates if not (one.slot.lost or one.original.lost)]
    origin = None if checkpoint.lost else checkpoint.origin
    away = [key for key, value in checkpoint.metadata.items() if any(one.slot.lost for one in pieces(value))]
    warnings = [*checkpoint.warnings, *(f"{key} is incomplete, and left out" for key in away)]
    details, was = checkpoint.details, checkpoint.converted_from
    if base is not None and was:  # what was frozen, and left out, is filled in
        details = details | {"origin": without(was, HAS_FROZEN)}
    found = replace(checkpoint, parameters=parameters, buffers=buffers, unnamed=unnamed, param_groups=groups,
                    duplicates=whole, origin=origin, warnings=warnings, details=details,
                    metadata=without(checkpoint.metadata, *away))  # fmt: skip
    if not any(one.slots for section in (parameters, buffers, unnamed) for one in section.values()):
        raise ShardError(
            "no tensor is complete",
            path=checkpoint.named,
            advice="--fill-from BASE takes the elements from another checkpoint",
        )
    added = {one["name"] for one in filling.done}
    nameless = (one for one in missing_from(replace(checkpoint, parameters={}, buffers={}, unnamed={}))
                if one["name"] not in added)  # fmt: skip
    return Left(found, (*filling.missing, *nameless), tuple(filling.done), base)


@mutable
class _Filling:
    """Fills slots of a checkpoint from others, and says what it has and has not filled."""

    checkpoint: Checkpoint
    base: Checkpoint | None
    masters: bool
    of_optimizer: bool
    missing: list[Document] = field(default_factory=list)
    done: list[Document] = field(default_factory=list)
    codes: Collection[str] = ()
    theirs: Mapping[str, str] = field(default_factory=dict)
    """Names of BASE by ours."""

    def __post_init__(self) -> None:
        if self.base is None:
            return
        ours = self.checkpoint.names
        ours += [name for names in self.checkpoint.lost.values() for name in names]
        self.codes = codes_in(self.base)
        self.theirs = {our: its for its, our in aligned(ours, self.base.names).items()}
        if not self.theirs:
            raise UsageError(
                "shares no tensor name with the source, so it fills nothing", path=self.base.named,
                advice="give --fill-from a checkpoint of the same model; `zckpt convert --map` changes its names",
            )  # fmt: skip

    def filled(self, one: Parameter) -> tuple[str, Parameter] | None:
        """Return a parameter without what is missing; None of one of which no weight is left."""
        if not any(slot.lost for slot in one.slots.values()):
            return one.name, one
        slots = dict(one.slots)
        master = slots.get(MASTER)
        if master is not None and master.lost and WEIGHT not in slots:
            weight = self._of_base(one, WEIGHT)
            if weight is not None and not (self.masters or self._of_base(one, MASTER)):
                slots = {WEIGHT: replace(master, name=WEIGHT, dtype=weight.dtype), **slots}
        for key, slot in list(slots.items()):
            if not slot.lost:
                continue
            source = self._of_base(one, key)
            if source is None and key == MASTER and self.masters:
                own = one.weight
                source = self._of_base(one, WEIGHT) or (None if own is None or own.lost else own)
            if source is None and key == WEIGHT:
                source = self._of_base(one, MASTER)
            if source is None:
                if self.of_optimizer or key in (WEIGHT, MASTER):
                    self.missing.append(_said(one.name, slot, slot.lost))
                del slots[key]
                continue
            self.done.append(_said(one.name, slot, slot.lost))
            slots[key] = _patched(slot, source)
        if not slots.keys() & {WEIGHT, MASTER} and one.slots.keys() & {WEIGHT, MASTER}:
            return None
        return one.name, replace(one, slots=slots)

    def others(self, base: Checkpoint) -> dict[str, Parameter]:
        """Return what BASE has and the checkpoint has not, by our names: no optimizer owns it."""
        found = dict[str, Parameter]()
        known = {its: our for our, its in self.theirs.items()}
        there = {*self.checkpoint.names}
        for one in base.tensors():
            name, owner = known.get(one.name, one.name), base.owner(one.name)
            best = owner.weight or owner.master
            tied = known.get(owner.name, owner.name)
            if name in there or best is None or (one.tied_to is not None and tied in there):
                continue
            slot = replace(best, name=WEIGHT)
            self.done.append(_said(name, slot, [Span(slot.whole, "", 0, slot.dtype)]))
            frozen = bool(self.checkpoint.param_groups) and one.name in base.parameters
            found[name] = replace(Parameter.of(one.name, slot), frozen=frozen)
        return found

    def _of_base(self, one: Parameter, key: str) -> Slot | None:
        its = self.theirs.get(one.name)
        if its is None or self.base is None:
            return None
        found, place = self.base.owner(its).slots.get(key), self.base.named
        if found is None:
            return None
        if found.shape != (shape := one.slots[key].shape if key in one.slots else one.shape):
            raise UsageError(f"{key} of {its} differs from the source's", path=place,
                             expected=f"shape {shape}", found=found.shape)  # fmt: skip
        if its in self.codes or found.replicas or is_floating(found.dtype) != is_floating(one.dtype):
            raise UnsupportedError(
                f"{key} of {its} is not a tensor of plain values, so its elements cannot be filled",
                path=place,
                found=found.dtype,
            )
        return found


def _patched(slot: Slot, source: Slot) -> Slot:
    """Return a slot whose lost spans are those that another has of the same elements."""
    slot = plain(slot)
    if slot.replicas:
        raise UnsupportedError(f"{slot.name} is the mean of several ranks, so it cannot be filled in part")
    spans: list[Span] = []
    for span in slot.spans:
        if not span.path.startswith(LOST):
            spans.append(span)
            continue
        for low, sizes in boxes_of(span.extent):
            part = source
            for axis, (start, size) in enumerate(zip(low, sizes, strict=True)):
                part = narrow(part, axis, start, size)
            for one in plain(part).spans:
                offsets = tuple(a + b for a, b in zip(one.extent.offsets, low, strict=True))
                spans.append(replace(one, extent=replace(one.extent, offsets=offsets)))
    return replace(slot, spans=tuple(spans))
