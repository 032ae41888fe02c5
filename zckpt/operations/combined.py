"""One checkpoint of several of one model: each slot is a function of theirs, what is no number is as they all have it.

name       as in the first; wrappers' prefixes aside, every source must have it, under this name or one it is tied to
values     of each source its masters if it has them, else its weights
type       float32 where some source has a master, else the weights' own; float32 where these differ
others     integers, bools, complex numbers, 8-bit floats: the same in all, or named as the last one's
the rest   of the last source: param groups, steps, single values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from zckpt.engine.computed import Computed, Function
from zckpt.engine.scan import SlotSet, refuse_endless
from zckpt.errors import UsageError, listed
from zckpt.operations.open import named
from zckpt.operations.rank_values import refuse_beside, refuse_rank_values
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.names import like_model

NUMBERS = ("float64", "float32", "float16", "bfloat16")
"""Types whose elements are numbers by themselves; 8-bit ones mean nothing without their scales."""

Rule = Callable[[tuple[Slot, ...], str], Function]
"""Gets slots of one shape, one of each source, and the type to compute in."""


@dataclass(slots=True)
class Combined:
    """What several checkpoints are together.

    Parameters
    ----------
    checkpoint : Checkpoint
        Without files of its own.
    computed, last : set of str
        Names of the model's tensors that are computed, and that are the last source's.
    equal : list of (SlotSet, int)
        What must be the same in the first source and another, and in which.
    """

    checkpoint: Checkpoint
    computed: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)
    equal: list[tuple[SlotSet, int]] = field(default_factory=list)

    def counts(self) -> tuple[int, int, int]:
        """Return how many tensors are computed, the same in all, and the last one's; tied ones count once."""
        names = {one.name for one in self.checkpoint.tensors() if one.tied_to is None}
        return len(names & self.computed), len(names - self.computed - self.last), len(names & self.last)


def combined(
    sources: Sequence[Checkpoint], rule: Rule, *, slots: str | Sequence[str], from_last: Sequence[str]
) -> Combined:
    """Return one checkpoint of several.

    Parameters
    ----------
    sources : sequence of Checkpoint
        They get the first one's names.
    rule : callable
    slots : "all" or sequence of str
        Of the optimizer.
    from_last : sequence of str
        Shell patterns of names of tensors that are the last source's.

    Raises
    ------
    UsageError
        The sources are not of one model, or a pattern names nothing.
    """
    first, *others = sources
    for one in others:
        like_model(one, [tensor.name for tensor in first.tensors()])
    return _Combining(sources, rule, [slots] if isinstance(slots, str) else list(slots), from_last).combined()


@dataclass(slots=True)
class _Combining:
    sources: Sequence[Checkpoint]
    rule: Rule
    slots: Sequence[str]
    from_last: Sequence[str]
    single: set[str] = field(default_factory=set)
    """Slots that are one number, such as a step: they go with the last source's hyperparameters."""

    def combined(self) -> Combined:
        first, last = self.sources[0], self.sources[-1]
        if self.slots and any(one.unnamed for one in self.sources):
            raise UsageError(
                "its optimizer's parameters have no names",
                path=named(next(one for one in self.sources if one.unnamed)),
                advice="give them with --names, or average without --slots",
            )
        if self.slots == ["all"]:
            for one in self.sources:
                refuse_rank_values(one, advice="name those that are for each element, as --slots master,exp_avg does")
                refuse_beside(one)
        found = Combined(
            Checkpoint(
                first.source, first.format, param_groups=list(last.param_groups), step=last.step, opened=first.opened
            )
        )
        every = _by_name(self.sources)
        idle = [one for one in self.from_last if not any(fnmatchcase(name, one) for name in every)]
        if idle:
            raise UsageError(f"no tensor is called {idle[0]!r}", path=named(last), expected="a name, or a pattern")
        self.single = {"step"} | {
            key for ones in every.values() for one in ones if one.shape
            for key, slot in one.slots.items() if not slot.shape
        }  # fmt: skip
        for name, ones in every.items():
            self._add(found, name, ones)
        _tie(found.checkpoint, every)
        return found

    def _add(self, found: Combined, name: str, ones: Sequence[Parameter]) -> None:
        shapes = [one.shape for one in ones]
        if len(set(shapes)) > 1:
            at = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise UsageError(
                f"{name} has another shape than in {named(self.sources[0])}",
                path=named(self.sources[at]),
                expected=shapes[0],
                found=shapes[at],
                advice="only checkpoints of one model are averaged",
            )
        one = self._parameter(found, name, ones)
        is_buffer = any(name in source.buffers for source in self.sources)
        (found.checkpoint.buffers if is_buffer else found.checkpoint.parameters)[name] = one
        keys = dict.fromkeys(key for each in ones for key in each.slots if key not in (WEIGHT, MASTER))
        for key in keys:
            if self.slots != ["all"] and key not in self.slots:
                continue
            if key not in self.single:
                one.slots[key] = self._slot(found, key, name, ones)
            elif key in ones[-1].slots:  # else a group of the last source has it
                one.slots[key] = ones[-1].slots[key]

    def _parameter(self, found: Combined, name: str, ones: Sequence[Parameter]) -> Parameter:
        """Return a tensor of the model, with its weight, and a master where some source has one."""
        last = ones[-1]
        owned = any(one.group is not None or MASTER in one.slots for one in ones)
        frozen = any(one.frozen for one in ones) and not owned
        result = replace(last, name=name, slots={}, tied_to=None, frozen=frozen)
        best = [one.slots.get(MASTER) or one.slots.get(WEIGHT) for one in ones]
        there = [slot for slot in best if slot is not None]
        if len(there) < len(best):
            without = [named(source) for source, slot in zip(self.sources, best, strict=True) if slot is None]
            raise UsageError(f"{name} has no values", path=without[0], expected="a weight or a master")
        if any(fnmatchcase(name, pattern) for pattern in self.from_last):
            found.last.add(name)
            result.slots = {key: slot for key, slot in last.slots.items() if key in (WEIGHT, MASTER)}
        elif all(slot.dtype in NUMBERS for slot in there):
            found.computed.add(name)
            own = _common([one.dtype for one in ones])
            result.dtype = own
            keys = [WEIGHT, *([MASTER] if any(MASTER in one.slots for one in ones) else [])]
            for key in keys:
                computed = self._computed(key, name, there)
                result.slots[key] = replace(computed, dtype=own) if key == WEIGHT else computed
        else:
            result.dtype = ones[0].dtype
            result.slots[WEIGHT] = self._same(found, WEIGHT, name, there)
        return result

    def _slot(self, found: Combined, key: str, name: str, ones: Sequence[Parameter]) -> Slot:
        """Return a slot of the optimizer."""
        slots = [one.slots[key] for one in ones if key in one.slots]
        if len(slots) < len(ones) or len({slot.shape for slot in slots}) > 1:
            lacks = [key not in one.slots or one.slots[key].shape != slots[0].shape for one in ones]
            raise UsageError(
                f"{key} of {name} is not there, or has another shape",
                path=named(self.sources[lacks.index(True)]),
                expected=f"{slots[0].shape}, as in the others",
                advice="leave it out of --slots",
            )
        if any(fnmatchcase(name, pattern) for pattern in self.from_last):
            return slots[-1]
        if all(slot.dtype in NUMBERS for slot in slots):
            return replace(self._computed(key, name, slots), dtype=_common([slot.dtype for slot in slots]))
        return self._same(found, key, name, slots)

    def _computed(self, key: str, name: str, slots: Sequence[Slot]) -> Computed:
        for slot in slots:
            refuse_endless(slot, f"{key}/{name}")
        dtype = "float64" if any(slot.dtype == "float64" for slot in slots) else "float32"
        return Computed(key, dtype, slots[0].shape, (), function=self.rule(tuple(slots), dtype))

    def _same(self, found: Combined, key: str, name: str, slots: Sequence[Slot]) -> Slot:
        """Return a slot that all have; that it is the same is for the caller to see."""
        label = f"{key}/{name}"
        for at, slot in enumerate(slots[1:], 1):
            found.equal.append((SlotSet(label, (slots[0], slot), (slots[0].dtype, slot.dtype)), at))
        return slots[0]


def _common(dtypes: Sequence[str]) -> str:
    """Return the type in which values of several types are kept."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def _by_name(sources: Sequence[Checkpoint]) -> dict[str, list[Parameter]]:
    """Return what each source has under every name; a name that is tied in one may be missing in another."""
    tied = {one.name: one.tied_to for source in sources for one in source.parameters.values() if one.tied_to}
    every: dict[str, list[Parameter]] = {}
    missing: dict[int, list[str]] = {}
    for name in dict.fromkeys(tensor.name for source in sources for tensor in source.tensors()):
        others = [name, tied.get(name), *(alias for alias, owner in tied.items() if owner == name)]
        found = [_first(source, others) for source in sources]
        for at, one in enumerate(found):
            if one is None:
                missing.setdefault(at, []).append(name)
        every[name] = [one for one in found if one is not None]
    for at, names in missing.items():
        has = next(source for source in sources if any(one.name == names[0] for one in source.tensors()))
        raise UsageError(
            f"{len(names)} of the tensors of {named(has)} not in it: {listed(names)}",
            path=named(sources[at]),
            advice="only checkpoints of one model are averaged",
        )
    return every


def _first(source: Checkpoint, names: Sequence[str | None]) -> Parameter | None:
    """Return what a source has under the first of some names that it has."""
    there = (name for name in names if name in source.parameters or name in source.buffers)
    name = next(there, None)
    return None if name is None else source.owner(name)


def _tie(checkpoint: Checkpoint, every: dict[str, list[Parameter]]) -> None:
    """Make one parameter with two names of those that are one in every source; it is called as in the last."""
    owners: dict[tuple[int, ...], str] = {}
    for name, ones in every.items():
        key = tuple(map(id, ones))
        if ones[-1].name == name or key not in owners:
            owners[key] = name
    for name, ones in every.items():
        owner = owners[tuple(map(id, ones))]
        if owner != name and name in checkpoint.parameters:
            checkpoint.parameters[name] = replace(checkpoint.parameters[name], slots={}, tied_to=owner)
