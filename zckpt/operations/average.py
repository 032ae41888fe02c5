"""The mean of several checkpoints of one model: a model soup, the last checkpoints of a run, an exponential average.

First they become one checkpoint, each slot of which is a function of theirs:

name       as in the first; wrappers' prefixes aside, every source must have it, under this name or one it is tied to
values     of each source its masters if it has them, else its weights
type       float32 where some source has a master, else the weights' own; float32 where these differ
others     integers, bools, complex numbers, 8-bit floats: the same in all, or named as the last one's
the rest   of the last source: param groups, steps, single values
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zckpt.compare.slots import differences, pair
from zckpt.engine.computed import Computed, Function
from zckpt.engine.scan import SlotSet, refuse_endless
from zckpt.engine.sums import Decayed, Mean
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.assets import ADAPTER_CONFIG, find_assets
from zckpt.formats.floats import dequantized
from zckpt.formats.low_bit import codes_in
from zckpt.immutable import immutable, mutable
from zckpt.operations.consolidate import NUMBERS, Chosen, Consolidated, as_beside, write_computed
from zckpt.operations.losses import check_nothing_lost, refuse_beside, refuse_rank_values
from zckpt.operations.open import Source, opened, several
from zckpt.operations.options import Averaging, Place, Unpack, naming_of, shares
from zckpt.operations.target import How, summary
from zckpt.state import MASTER, WEIGHT, Checkpoint, Document, Parameter, Slot, by_key
from zckpt.state.names import is_added, like_model
from zckpt.storage.files import by_name, read_json

SCALED_BY = ("peft_type", "lora_alpha", "r", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of a LoRA adapter that say what its factors are multiplied with."""

LEAST_SUM = 1e-6
"""Of weights of which the largest is 1: they are divided by it, and it must be more than what is left of some that
cancel out."""


@immutable(kw_only=True)
class Averaged(Consolidated):
    """What `average` wrote.

    Parameters
    ----------
    sources : tuple of dict
        For each source what it is, and its `weight` in the mean; weights add up to 1.
    num_averaged, num_equal, num_from_last : int
        Tensors of the model that are means, that are equal in all sources, and that are the last source's.
    """

    sources: tuple[Document, ...] = ()
    num_averaged: int
    num_equal: int
    num_from_last: int


@shares(Averaging)
def average(
    sources: Sequence[Source],
    target: Place,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    from_last: Sequence[str] = (),
    verify: bool = False,
    **shared: Unpack[Averaging],
) -> Averaged:
    """Average checkpoints of one model, of any formats, world sizes and types, into one model.

    Uses each source's masters if it has them, otherwise its weights. The mean is computed in float32 (float64 if a
    source has float64) and rounded once, to the target's type, by default float32 where those of the sources differ.
    Slots of the optimizer that are written are means, too, of which every source must have them; param groups, steps
    and hyperparameters are the last source's. Names that are one parameter in every source stay tied. With several
    sources, each root is a directory of another node that holds all of them. Names are changed in every source that has
    them, and a map goes in the direction that fits the first.

    Parameters
    ----------
    sources : sequence of path-like or Checkpoint
        Two or more.
    target : path-like
        As for `consolidate`.
    weights : sequence of float, optional
        One per source, in any unit: they are divided by their sum. Negative ones subtract. Default: equal weights.
    ema : float, optional
        Instead of weights: an exponential average over the sources, oldest first: `ema` x the average so far + (1 -
        `ema`) x the next source.
    from_last : sequence of str
        Shell patterns of names: these tensors are taken from the last source. Tensors of integers, bools, complex
        numbers and 8-bit floats must be equal in all sources, or be named here.
    verify : bool
        After writing, compute everything again and compare every byte.
    **shared

    Returns
    -------
    Averaged

    Raises
    ------
    UsageError
        An option cannot be used, or the sources are not of one model.
    SourceError
        A source cannot be read or contradicts itself.
    TargetError
        The target exists or cannot be written.
    """
    sources = several(sources)
    if len(sources) < 2:
        from zckpt.operations.pack import units_of_place

        alone = [Path(one) for one in sources if not isinstance(one, Checkpoint)]
        inside = [shlex.quote(str(one.path)) for run in alone for one in units_of_place(run) if one.path != run]
        raise UsageError(
            "averaging needs several checkpoints", expected="two or more", found=len(sources),
            advice=f"name each one: `zckpt average {listed(inside, by=' ')} TARGET`" if len(inside) > 1 else None,
        )  # fmt: skip
    weights = None if weights is None else _numbers("--weights", weights)
    [ema] = [None] if ema is None else _numbers("--ema", [ema])
    rule, shares = _rule(len(sources), weights, ema)
    chosen = Chosen.of(target, How.of("average", shared, weights=weights, ema=ema, from_last=from_last), shared)
    found: Sequence[Checkpoint] = _opened(sources, **shared)
    dropped = check_nothing_lost(found, shared["drop"], of_model=not shared["slots"])
    scales = [_scale(one) for one in found]
    for one, scale in zip(found, scales, strict=True):
        if scale != scales[0]:  # a mean has one configuration
            raise UsageError(
                f"the adapter's scale differs from {found[0].named}",
                path=one.named,
                expected=f"the same {', '.join(SCALED_BY)}",
                found=f"no {ADAPTER_CONFIG} with one of them" if None in (scale, scales[0]) else None,
                advice="merge each one with `zckpt merge-adapter`, and average the models",
            )
    found, left_out = dequantized(found, chosen.dequantize)
    for one in found:
        if codes := codes_in(one):
            raise UnsupportedError(f"{listed(codes)}: low-bit codes have no mean", path=one.named,
                                   advice="--dequantize averages the floats that they stand for")  # fmt: skip
    alike, notes = naming_of(shared).of_all(found)
    alike, told = as_beside(alike, chosen)
    mean = combined(alike, rule, slots=chosen.slots, from_last=from_last)
    mean.check_equal(shared["memory"])
    names = {one.name for one in mean.checkpoint.tensors() if one.tied_to is None}
    num_averaged, num_from_last = len(names & mean.computed), len(names & mean.last)
    num_equal = len(names - mean.computed - mean.last)
    done = write_computed(
        Averaged, mean.checkpoint, found, chosen, verify=verify, dropped=dropped,
        num_averaged=num_averaged, num_equal=num_equal, num_from_last=num_from_last,
    )  # fmt: skip
    weighted = "equal weights" if len(set(shares)) == 1 else "weights " + ", ".join(f"{share:.6g}" for share in shares)
    said = [f"the mean of {len(shares)} checkpoints, with {weighted}"]
    if num_equal:
        said.append(f"not averaged, because they are not floats and equal in all: {num_equal}")
    if num_from_last:
        said.append(f"not averaged, but taken from the last checkpoint: {num_from_last}")
    described = tuple({**summary(one), "weight": share} for one, share in zip(found, shares, strict=True))
    return replace(done, sources=described, notes=(*notes, *told, *done.notes, *left_out, *said))


def _opened(
    sources: Sequence[Source],
    roots: Sequence[Place],
    **where: Any,  # noqa: ANN401  # options of `open`
) -> list[Checkpoint]:
    """Return the checkpoints; where they are to be found is said of those that are not open yet, if there are any."""
    paths = [one for one in sources if not isinstance(one, Checkpoint)]
    found = []
    for one in sources:
        if isinstance(one, Checkpoint):
            found.append(opened(one) if paths else opened(one, roots=roots, **where))
        else:
            same = roots if len(paths) == 1 else [Path(root) / by_name(one).name for root in roots]
            found.append(opened(one, roots=same, **where))
    return found


def _scale(checkpoint: Checkpoint) -> tuple[Any, ...] | None:
    """Return what says how an adapter's factors are scaled, also of one that lies beside a training's files."""
    told = checkpoint.details.get("adapter")
    if told is None and any(map(is_added, checkpoint.names)):
        told = read_json(find_assets(checkpoint).get(ADAPTER_CONFIG, ""))
    return tuple(told.get(key) or None for key in SCALED_BY) if isinstance(told, dict) else None


def _numbers(flag: str, given: Iterable[Any]) -> list[float]:
    """Return the numbers of a list, an array or a tensor."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if not isinstance(given, str | bytes | Mapping):
            return [float(one) for one in given]
    raise UsageError(f"unusable {flag}", expected="finite numbers", found=repr(given))


def _rule(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[Rule, list[float]]:
    """Return how a mean is computed, and the share of each source in it."""
    if ema is not None:
        if weights is not None:
            raise UsageError("--weights and --ema exclude each other", expected="one of them")
        if not 0 <= ema <= 1:
            raise UsageError("unusable --ema", expected="a number from 0 to 1", found=ema)
        shares = [ema ** (count - 1)] + [(1 - ema) * ema ** (count - 1 - i) for i in range(1, count)]
        return lambda slots, dtype: Decayed(slots, dtype, ema), shares
    used = [1.0] * count if weights is None else weights
    if len(used) != count:
        raise UsageError("--weights needs one number per checkpoint", expected=count, found=len(used))
    if not all(map(math.isfinite, used)):
        raise UsageError("unusable --weights", expected="finite numbers", found=", ".join(map(str, used)))
    most = max(map(abs, used))
    total = math.fsum(one / most for one in used) if most else 0.0  # of any unit: the sum itself may be too large
    if abs(total) <= LEAST_SUM:
        raise UsageError("the weights add up to zero", found=", ".join(map(str, used)))
    shares = [one / most / total for one in used]
    return lambda slots, dtype: Mean(slots, dtype, tuple(shares)), shares


# --- one checkpoint of several


Rule = Callable[[tuple[Slot, ...], str], Function]
"""Gets slots of one shape, one of each source, and the type to compute in."""


@mutable
class Combined:
    """What several checkpoints are together."""

    checkpoint: Checkpoint  # without files of its own
    sources: Sequence[Checkpoint]
    rule: Rule
    last: set[str]  # names of the model's tensors that are the last source's
    computed: set[str] = field(default_factory=set)  # names of those that are computed
    equal: list[tuple[SlotSet, int]] = field(default_factory=list)
    """What must be the same in the first source and another, and in which."""

    def parameter(self, name: str, ones: Sequence[Parameter]) -> Parameter:
        """Return a tensor of the model, `ones` in the sources, with its weight, and a master where one has that."""
        last, there = ones[-1], list[Slot]()
        for one, source in zip(ones, self.sources, strict=True):
            slot = one.master or one.weight
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
        owned = any(one.group is not None or one.master for one in ones)
        frozen = any(one.frozen for one in ones) and not owned
        result = replace(last, name=name, slots={}, tied_to=None, frozen=frozen)
        if name in self.last:
            result.slots = {key: slot for key, slot in last.slots.items() if key in (WEIGHT, MASTER)}
        elif all(slot.dtype in NUMBERS for slot in there):
            self.computed.add(name)
            result.dtype = _common([one.dtype for one in ones])
            result.slots[WEIGHT] = self._of_all(name, WEIGHT, there, result.dtype)
            if any(one.master for one in ones):
                result.slots[MASTER] = self._of_all(name, MASTER, there)
        else:
            result.dtype = ones[0].dtype
            result.slots[WEIGHT] = self._of_all(name, WEIGHT, there)
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
        return self._of_all(name, key, slots, _common([slot.dtype for slot in slots]))

    def check_equal(self, memory: int) -> None:
        """Raise UsageError if what is not averaged differs between sources."""
        different = differences([one for one, _ in self.equal], memory=memory)
        if not different:
            return
        first, at = self.equal[different[0].index]
        labels = list(dict.fromkeys(one.label.partition("/")[2] for one in different))
        raise UsageError(
            f"{listed(labels)}: differs from {self.sources[0].named}, and cannot be averaged",
            path=self.sources[at].named,
            expected=" and ".join(dict.fromkeys(first.dtypes)) + " values that are equal in all",
            advice=f"--from-last '{labels[0]}' takes the last source's",
        )

    def _of_all(self, name: str, key: str, slots: Sequence[Slot], dtype: str | None = None) -> Slot:
        """Return what is computed, kept in a type; or, of no numbers, what all have, which is for the caller to see."""
        if any(slot.dtype not in NUMBERS for slot in slots):
            self.equal += [(pair(f"{key}/{name}", slots[0], slot), at) for at, slot in enumerate(slots[1:], 1)]
            return slots[0]
        for slot in slots:
            refuse_endless(slot, f"{key}/{name}")
        wide = "float64" if any(slot.dtype == "float64" for slot in slots) else "float32"
        return Computed(key, dtype or wide, slots[0].shape, (), function=self.rule(tuple(slots), wide))


def combined(
    sources: Sequence[Checkpoint], rule: Rule, *, slots: str | Sequence[str], from_last: Sequence[str]
) -> Combined:
    """Return one checkpoint of several, which get the first one's names; `slots`: of the optimizer, or "all".

    `from_last`: shell patterns of tensors that are the last source's. Raises UsageError: the sources are not of one
    model, or a pattern names nothing.
    """
    first, last = sources[0], sources[-1]
    for one in sources[1:]:
        like_model(one, first.names)
    chosen = [slots] if isinstance(slots, str) else list(slots)
    for one in sources if chosen else ():
        if one.unnamed:
            raise UsageError(
                "its optimizer's parameters have no names",
                path=one.named,
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
    for name in dict.fromkeys(name for source in sources for name in source.names):
        others = [name, tied.get(name), *(alias for alias, owner in tied.items() if owner == name)]
        every[name] = []
        for at, source in enumerate(sources):
            its = next((one for one in others if one in source.parameters or one in source.buffers), None)
            if its is None:
                missing.setdefault(at, []).append(name)
            else:
                every[name].append(source.owner(its))
    for at, names in missing.items():
        has = next(source for source in sources if names[0] in source.names)
        raise UsageError(
            f"lacks {len(names)} of the tensors of {has.named}: {listed(names)}",
            path=sources[at].named,
            advice="only checkpoints of one model can be averaged",
        )
    return every


def _tie(checkpoint: Checkpoint, every: dict[str, list[Parameter]]) -> None:
    """Make one parameter with two names of those that are one in every source; it is called as in the last."""
    for names in by_key((tuple(map(id, ones)), name) for name, ones in every.items()).values():
        last = every[names[0]][-1].name
        owner = last if last in names else names[0]
        for name in names:
            if name != owner and name in checkpoint.parameters:
                checkpoint.parameters[name] = replace(checkpoint.parameters[name], slots={}, tied_to=owner)
