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

from zckpt.compare.slots import pair
from zckpt.engine.computed import Computed, Function
from zckpt.engine.scan import SlotSet, refuse_endless
from zckpt.errors import UsageError, listed
from zckpt.operations.losses import refuse_beside, refuse_rank_values
from zckpt.operations.open import named
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
    """Return one checkpoint of several, which get the first one's names; `slots`: of the optimizer, or "all".

    `from_last`: shell patterns of tensors that are the last source's. Raises UsageError: the sources are not of one
    model, or a pattern names nothing.
    """
    first, last = sources[0], sources[-1]
    for one in sources[1:]:
        like_model(one, [tensor.name for tensor in first.tensors()])
    chosen = [slots] if isinstance(slots, str) else list(slots)
    if chosen and any(one.unnamed for one in sources):
        raise UsageError(
            "its optimizer's parameters have no names",
            path=named(next(one for one in sources if one.unnamed)),
            advice="give them with --names, or average without --slots",
        )
    if chosen == ["all"]:
        for one in sources:
            refuse_rank_values(one, advice="name those that are for each element, as --slots master,exp_avg does")
            refuse_beside(one)
    every = _by_name(sources)
    idle = [one for one in from_last if not any(fnmatchcase(name, one) for name in every)]
    if idle:
        raise UsageError(f"no tensor is called {idle[0]!r}", path=named(last), expected="a name, or a pattern")
    found = Combined(
        Checkpoint(
            first.source, first.format, param_groups=list(last.param_groups), step=last.step, opened=first.opened
        )
    )
    single = {"step"} | {  # slots that are one number: they go with the last source's hyperparameters
        key for ones in every.values() for one in ones if one.shape
        for key, slot in one.slots.items() if not slot.shape
    }  # fmt: skip
    for name, ones in every.items():
        work = _Combining(found, sources, rule, name, ones, any(fnmatchcase(name, pattern) for pattern in from_last))
        made = work.parameter()
        is_buffer = any(name in source.buffers for source in sources)
        (found.checkpoint.buffers if is_buffer else found.checkpoint.parameters)[name] = made
        for key in dict.fromkeys(key for each in ones for key in each.slots if key not in (WEIGHT, MASTER)):
            if chosen != ["all"] and key not in chosen:
                continue
            if key not in single:
                made.slots[key] = work.slot(key)
            elif key in ones[-1].slots:  # else a group of the last source has it
                made.slots[key] = ones[-1].slots[key]
    _tie(found.checkpoint, every)
    return found


@dataclass(frozen=True, slots=True)
class _Combining:
    """A tensor of the model, as each source has it."""

    found: Combined
    sources: Sequence[Checkpoint]
    rule: Rule
    name: str
    ones: Sequence[Parameter]
    is_last: bool

    def parameter(self) -> Parameter:
        """Return it with its weight, and a master where some source has one."""
        name, ones, last = self.name, self.ones, self.ones[-1]
        for one, source in zip(ones, self.sources, strict=True):
            if one.shape != ones[0].shape:
                raise UsageError(
                    f"{name} has another shape than in {named(self.sources[0])}",
                    path=named(source),
                    expected=ones[0].shape,
                    found=one.shape,
                    advice="only checkpoints of one model are averaged",
                )
        owned = any(one.group is not None or MASTER in one.slots for one in ones)
        frozen = any(one.frozen for one in ones) and not owned
        result = replace(last, name=name, slots={}, tied_to=None, frozen=frozen)
        there = []
        for one, source in zip(ones, self.sources, strict=True):
            slot = one.slots.get(MASTER) or one.slots.get(WEIGHT)
            if slot is None:
                raise UsageError(f"{name} has no values", path=named(source), expected="a weight or a master")
            there.append(slot)
        if self.is_last:
            self.found.last.add(name)
            result.slots = {key: slot for key, slot in last.slots.items() if key in (WEIGHT, MASTER)}
        elif all(slot.dtype in NUMBERS for slot in there):
            self.found.computed.add(name)
            result.dtype = _common([one.dtype for one in ones])
            result.slots[WEIGHT] = replace(self._computed(WEIGHT, there), dtype=result.dtype)
            if any(MASTER in one.slots for one in ones):
                result.slots[MASTER] = self._computed(MASTER, there)
        else:
            result.dtype = ones[0].dtype
            result.slots[WEIGHT] = self._same(WEIGHT, there)
        return result

    def slot(self, key: str) -> Slot:
        """Return a slot of the optimizer."""
        slots = [one.slots[key] for one in self.ones if key in one.slots]
        lacks = [key not in one.slots or one.slots[key].shape != slots[0].shape for one in self.ones]
        if any(lacks):
            raise UsageError(
                f"{key} of {self.name} is not there, or has another shape",
                path=named(self.sources[lacks.index(True)]),
                expected=f"{slots[0].shape}, as in the others",
                advice="leave it out of --slots",
            )
        if self.is_last:
            return slots[-1]
        if all(slot.dtype in NUMBERS for slot in slots):
            return replace(self._computed(key, slots), dtype=_common([slot.dtype for slot in slots]))
        return self._same(key, slots)

    def _computed(self, key: str, slots: Sequence[Slot]) -> Computed:
        for slot in slots:
            refuse_endless(slot, f"{key}/{self.name}")
        dtype = "float64" if any(slot.dtype == "float64" for slot in slots) else "float32"
        return Computed(key, dtype, slots[0].shape, (), function=self.rule(tuple(slots), dtype))

    def _same(self, key: str, slots: Sequence[Slot]) -> Slot:
        """Return a slot that all have; that it is the same is for the caller to see."""
        first, *others = slots
        for at, slot in enumerate(others, 1):
            self.found.equal.append((pair(f"{key}/{self.name}", first, slot), at))
        return first


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
        every[name] = []
        for at, source in enumerate(sources):
            its = next((one for one in others if one in source.parameters or one in source.buffers), None)
            if its is None:
                missing.setdefault(at, []).append(name)
            else:
                every[name].append(source.owner(its))
    for at, names in missing.items():
        has = next(source for source in sources if any(one.name == names[0] for one in source.tensors()))
        raise UsageError(
            f"{len(names)} of the tensors of {named(has)} not in it: {listed(names)}",
            path=named(sources[at]),
            advice="only checkpoints of one model are averaged",
        )
    return every


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
