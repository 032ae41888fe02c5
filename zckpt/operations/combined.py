"""One checkpoint of several of one model: each slot is a function of theirs, what is no number is as they all have it.

name       as in the first; wrappers' prefixes aside, every source must have it, under this name or one it is tied to
values     of each source its masters if it has them, else its weights
type       float32 where some source has a master, else the weights' own; float32 where these differ
others     integers, bools, complex numbers, 8-bit floats: the same in all, or named as the last one's
the rest   of the last source: param groups, steps, single values

A model whose tensors are computed is written as `consolidate` writes one, and proven: it is opened again before it has
its name, and every tensor of the model is there, of its shape and type. And every byte, if that is asked for, is what
the same functions compute once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zckpt.compare.slots import pair
from zckpt.engine.computed import Computed, Function
from zckpt.engine.scan import SlotSet, refuse_endless
from zckpt.errors import UsageError, listed
from zckpt.formats import open_checkpoint
from zckpt.operations.consolidate import OWNED, Chosen, lay_out
from zckpt.operations.losses import refuse_beside, refuse_rank_values
from zckpt.operations.proof import check_arrived, check_same
from zckpt.operations.target import How, Made, Proof, write_from
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot, Span
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
    sources : sequence of Checkpoint
    rule : Rule
    last : set of str
        Names of the model's tensors that are the last source's.
    computed : set of str
        Names of those that are computed.
    equal : list of (SlotSet, int)
        What must be the same in the first source and another, and in which.
    """

    checkpoint: Checkpoint
    sources: Sequence[Checkpoint]
    rule: Rule
    last: set[str]
    computed: set[str] = field(default_factory=set)
    equal: list[tuple[SlotSet, int]] = field(default_factory=list)

    def parameter(self, name: str, ones: Sequence[Parameter]) -> Parameter:
        """Return a tensor of the model, `ones` in the sources, with its weight, and a master where one has that."""
        last, there = ones[-1], list[Slot]()
        for one, source in zip(ones, self.sources, strict=True):
            slot = one.slots.get(MASTER) or one.slots.get(WEIGHT)
            if one.shape != ones[0].shape:
                raise UsageError(
                    f"{name} has another shape than in {self.sources[0].named}",
                    path=source.named,
                    expected=ones[0].shape,
                    found=one.shape,
                    advice="only checkpoints of one model can be averaged",
                )
            if slot is None:
                raise UsageError(f"{name} has no values", path=source.named, expected="a weight or a master")
            there.append(slot)
        owned = any(one.group is not None or MASTER in one.slots for one in ones)
        frozen = any(one.frozen for one in ones) and not owned
        result = replace(last, name=name, slots={}, tied_to=None, frozen=frozen)
        if name in self.last:
            result.slots = {key: slot for key, slot in last.slots.items() if key in (WEIGHT, MASTER)}
        elif all(slot.dtype in NUMBERS for slot in there):
            self.computed.add(name)
            result.dtype = _common([one.dtype for one in ones])
            result.slots[WEIGHT] = replace(self._computed(name, WEIGHT, there), dtype=result.dtype)
            if any(MASTER in one.slots for one in ones):
                result.slots[MASTER] = self._computed(name, MASTER, there)
        else:
            result.dtype = ones[0].dtype
            result.slots[WEIGHT] = self._same(name, WEIGHT, there)
        return result

    def slot(self, name: str, ones: Sequence[Parameter], key: str) -> Slot:
        """Return a slot of the optimizer."""
        slots = [one.slots[key] for one in ones if key in one.slots]
        lacks = [key not in one.slots or one.slots[key].shape != slots[0].shape for one in ones]
        if any(lacks):
            raise UsageError(
                f"{key} of {name} is missing, or has another shape",
                path=self.sources[lacks.index(True)].named,
                expected=f"{slots[0].shape}, as in the others",
                advice="omit it from --slots",
            )
        if name in self.last:
            return slots[-1]
        if all(slot.dtype in NUMBERS for slot in slots):
            return replace(self._computed(name, key, slots), dtype=_common([slot.dtype for slot in slots]))
        return self._same(name, key, slots)

    def _computed(self, name: str, key: str, slots: Sequence[Slot]) -> Computed:
        for slot in slots:
            refuse_endless(slot, f"{key}/{name}")
        dtype = "float64" if any(slot.dtype == "float64" for slot in slots) else "float32"
        return Computed(key, dtype, slots[0].shape, (), function=self.rule(tuple(slots), dtype))

    def _same(self, name: str, key: str, slots: Sequence[Slot]) -> Slot:
        """Return a slot that all have; that it is the same is for the caller to see."""
        first, *others = slots
        for at, slot in enumerate(others, 1):
            self.equal.append((pair(f"{key}/{name}", first, slot), at))
        return first


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
            path=next(one for one in sources if one.unnamed).named,
            advice="give --names, or average without --slots",
        )
    if chosen == ["all"]:
        for one in sources:
            refuse_rank_values(one, advice="name the slots with one value per element, such as --slots=master,exp_avg")
            refuse_beside(one)
    every = _by_name(sources)
    for pattern in from_last:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise UsageError(f"no tensor is called {pattern!r}", path=last.named, expected="a name, or a pattern")
    result = Checkpoint(
        first.source, first.format, param_groups=list(last.param_groups), step=last.step, opened=first.opened
    )
    found = Combined(result, sources, rule, {n for n in every if any(fnmatchcase(n, one) for one in from_last)})
    single = {"step"} | {  # slots that are one number: they go with the last source's hyperparameters
        key for ones in every.values() for one in ones if one.shape
        for key, slot in one.slots.items() if not slot.shape
    }  # fmt: skip
    for name, ones in every.items():
        made = found.parameter(name, ones)
        is_buffer = any(name in source.buffers for source in sources)
        (result.buffers if is_buffer else result.parameters)[name] = made
        for key in dict.fromkeys(key for each in ones for key in each.optimizer_slots):
            if chosen != ["all"] and key not in chosen:
                continue
            if key not in single:
                made.slots[key] = found.slot(name, ones, key)
            elif key in ones[-1].slots:  # else a group of the last source has it
                made.slots[key] = ones[-1].slots[key]
    _tie(result, every)
    return found


def _common(dtypes: Sequence[str]) -> str:
    """Return the type in which values of several types are kept."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float64" if "float64" in dtypes else "float32"


def _by_name(sources: Sequence[Checkpoint]) -> dict[str, list[Parameter]]:
    """Return what each source has under every name; a name that is tied in one may be missing in another."""
    tied = {alias: owner for source in sources for alias, owner in source.aliases.items()}
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
            f"lacks {len(names)} of the tensors of {has.named}: {listed(names)}",
            path=sources[at].named,
            advice="only checkpoints of one model can be averaged",
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


# --- written


def write_computed(
    kind: type[Made],
    checkpoint: Checkpoint,
    sources: Sequence[Checkpoint],
    target: Path,
    chosen: Chosen,
    how: How,
    *,
    verify: bool,
    dropped: tuple[str, ...],
    without: Collection[str] = (),
    settings: Mapping[str, object] | None = None,
    **more: Any,  # noqa: ANN401  # of the result
) -> Made:
    """Write a model whose slots are computed from those of sources, or are theirs.

    `verify`: compute all elements once more after writing, and compare; `without`: names of files next to the sources
    that do not go with what is written; `settings`: what config.json says otherwise.
    """
    laid, num_tensors = lay_out(checkpoint, target, chosen, how, settings)
    kept = [one for one in laid.files if one.name not in without]
    laid = replace(laid, files=kept, copied=frozenset(laid.copied) - frozenset(without))

    def look(written: Path, files: Sequence[Path], _record: Path | None) -> int:
        holes = {hole.label: hole for one in laid.files for hole in one.holes}
        tensors = [one.name for one in checkpoint.tensors() if one.name in holes]
        found = like_model(open_checkpoint(written), tensors)
        for name in tensors:
            there = name in found.parameters or name in found.buffers
            copy = found.owner(name).slots.get(WEIGHT) if there else None
            check_arrived(name, copy, holes[name].slot.shape, holes[name].dtype)
        if not verify:
            return 0
        sets = [
            SlotSet(hole.label, (hole.slot, Slot(hole.label, hole.dtype, hole.slot.shape, spans)), (hole.dtype,) * 2)
            for path, one in zip(files, laid.files, strict=True)
            for hole in one.holes
            for spans in [(Span(hole.extent, str(path), hole.offset, hole.dtype),)]
        ]
        return check_same(sets, "differ from the computed values", how)

    return write_from(
        kind, checkpoint, laid, target, how, owns=OWNED, proof=Proof(look), dropped=dropped, sources=sources,
        num_tensors=num_tensors, **more,
    )  # fmt: skip
