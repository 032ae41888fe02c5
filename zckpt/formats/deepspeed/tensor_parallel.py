"""Put tensor-parallel slices together by rule, and slice whole parameters again.

A `Share` says where consecutive indexes of a slice lie in the whole, along the dimension that is sliced:

    whole:    | q q q q | k k | v v |
    rank 0:   | q q | k | v |                a share for each of q, k and v
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, WeightMismatchError, listed
from zckpt.formats.account.ranges import reach
from zckpt.formats.deepspeed.agreement import check_slices_alike
from zckpt.formats.deepspeed.origin import Origin, RankState
from zckpt.formats.deepspeed.quantised import of_slices
from zckpt.formats.deepspeed.tp_rules import Rules
from zckpt.formats.deepspeed.tp_shares import AVERAGED, REPLICATED, SLICED, Rule, Share
from zckpt.state import MASTER, WEIGHT, Duplicate, Extent, PaddingSpan, Parameter, ParamGroup, Slot
from zckpt.state.views import concat, narrow, placed
from zckpt.storage.files import Sources

if TYPE_CHECKING:
    from zckpt.engine.cast import Array


SHOWN_NAMES = 8
"""More names than this are counted, not listed."""


def merge(states: Sequence[RankState], rules: Rules | None, *, padded: bool = False) -> RankState:
    """Return one state for all tensor-parallel ranks.

    Parameters
    ----------
    states : sequence of RankState
        By tensor-parallel rank.
    rules : Rules or None
        None if the checkpoint has none.
    path : str
        The file that has them, or should.
    padded : bool
        Whether vocabularies keep their padding rows, which depend on the tensor-parallel degree.

    Raises
    ------
    UnsupportedError
        There are slices and no rules.
    LayoutError
        The ranks do not fit together.
    ShardError
        They have taken other steps, or have other hyperparameters.
    """
    first = states[0]
    names = list(first.parameters)
    if rules is None:
        if len(states) > 1:
            raise without_rules(names, "how to put them together")
        return first
    for other in states[1:]:
        if (
            set(other.parameters) != set(names)
            or other.whole != first.whole
            or [g.parameters for g in other.groups] != [g.parameters for g in first.groups]
        ):
            raise LayoutError(f"mp_rank {other.mp_rank} has other parameters than mp_rank 0")
    check_slices_alike(states)
    merged = RankState(0, buffers=first.buffers, expert_parallel=first.expert_parallel, degrees=first.degrees,
                       lanes=first.lanes, whole=first.whole, tied=first.tied)  # fmt: skip
    for name in names:
        slices = [s.parameters[name] for s in states]
        if name in first.whole:
            merged.parameters[name] = replace(slices[0])
            continue
        merged.parameters[name] = _merge_parameter(slices, rules, padded=padded)
        if len(states) > 1:
            merged.duplicates += _parts_kept_by(states, merged.parameters[name], rules.maps.rule(name))
    if not padded:
        merged.padding_spans.append(VocabularyPadding(states, rules))
    complete_aliases(merged.parameters)
    merged.groups = [ParamGroup(g.hyperparameters, g.parameters, g.state) for g in first.groups]
    merged.duplicates += [one for state in states for one in state.duplicates]
    merged.per_rank = [one for state in states for one in state.per_rank]
    for state in states[1:]:
        merged.duplicates += _kept_by(state, first, merged)
    for state in states:
        merged.padding += state.padding
        merged.padding_spans += state.padding_spans
        merged.warnings += [w for w in state.warnings if w not in merged.warnings]
    return merged


@dataclass(frozen=True, slots=True)
class VocabularyPadding:
    """Where the rows are that pad a vocabulary to a multiple of the ranks: in the slices, and not in the whole.

    Parameters
    ----------
    states : sequence of RankState
        By tensor-parallel rank.
    """

    states: Sequence[RankState]
    rules: Rules

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield where the rows lie that no share has, for each slot of each rank."""
        for name, first in self.states[0].parameters.items():
            if first.tied_to is not None or name in self.states[0].whole or not self.rules.is_vocabulary(name):
                continue
            rule = self.rules.rule(name, [state.parameters[name].shape for state in self.states], padded=False)
            for state, shares in zip(self.states, rule.shares, strict=False):
                parameter = state.parameters[name]
                rows = _outside(shares, parameter.shape[rule.dim])
                held = [(key, slot) for key, slot in parameter.slots.items() if slot.shape]
                for key, span in (
                    (key, s) for key, slot in held for one in rows for s in narrow(slot, rule.dim, *one).spans
                ):
                    low, high = reach(span)
                    yield PaddingSpan(key, span.path, low, high - low)


def _outside(shares: Sequence[Share], size: int) -> list[tuple[int, int]]:
    """Return the indexes of a slice that no share has: where they begin, and how many they are."""
    found, at = [], 0
    for low, high in [*sorted((s.source, s.source + s.size) for s in shares), (size, size)]:
        if low > at:
            found.append((at, low - at))
        at = max(at, high)
    return found


def _kept_by(state: RankState, first: RankState, merged: RankState) -> Iterator[Duplicate]:
    """Yield the copies that one rank keeps of what the first rank's is read of."""
    for name, parameter in state.parameters.items():
        if name in state.whole:  # it is read from the files of all ranks, and the same everywhere
            continue
        for key, slot in parameter.slots.items():
            own, used = first.parameters[name].slots.get(key), merged.parameters[name].slots.get(key)
            if own is not None and used is not None and used.spans == own.spans != slot.spans and not used.replicas:
                yield Duplicate("parameter", name, name, slot, own, state.mp_rank)
    for name, buffer in state.buffers.items():
        kept = first.buffers.get(name)
        if kept is not None and kept.shape == buffer.shape:
            yield Duplicate("buffer", name, name, buffer.slots[WEIGHT], kept.slots[WEIGHT], state.mp_rank)


def _parts_kept_by(states: Sequence[RankState], merged: Parameter, rule: Rule | None) -> Iterator[Duplicate]:
    """Yield the copies that ranks keep of parts of a parameter that a rank before them is read of."""
    if rule is None:
        return
    for state, copies in zip(states, rule.copies, strict=False):
        parameter = state.parameters[merged.name]
        for key, slot in parameter.slots.items():
            for source, target, size in copies if key in merged.slots and slot.shape else ():
                copy = narrow(slot, rule.dim, source, size)
                yield Duplicate("parameter", merged.name, merged.name, copy,
                                narrow(merged.slots[key], rule.dim, target, size), state.mp_rank)  # fmt: skip


def without_rules(names: Sequence[str], what: str, option: str = "--tp-rules") -> UnsupportedError:
    """Return the error for slices that no rule names."""
    return UnsupportedError(
        f"tensor-parallel slices of {len(names)} parameters ({listed(names, most=SHOWN_NAMES)}) and no rules {what}",
        expected="universal_checkpoint_info in the model file",
        advice=f"give them with {option} FILE",
    )


def complete_aliases(parameters: dict[str, Parameter]) -> None:
    """Give tied parameters the shapes of their owners."""
    for name, parameter in parameters.items():
        if parameter.tied_to is not None:
            parameters[name] = replace(parameter, shape=parameters[parameter.tied_to].shape)


def _merge_parameter(slices: Sequence[Parameter], rules: Rules, *, padded: bool) -> Parameter:
    first = slices[0]
    if first.tied_to is not None or (len(slices) == 1 and (padded or not rules.is_vocabulary(first.name))):
        return replace(first)
    rule = rules.rule(first.name, [p.shape for p in slices], padded=padded)
    slots = {
        key: _merge_slot([p.slots[key] for p in slices if key in p.slots], rule, first.name, len(slices))
        for key in first.slots
    }
    return replace(first, shape=rule.shape, slots=slots)


def _merge_slot(slots: Sequence[Slot], rule: Rule, name: str, ranks: int) -> Slot:
    first = slots[0]
    if len(slots) != ranks:
        raise LayoutError(f"{first.name} of {name} is missing on some tensor-parallel ranks")
    if not first.shape and rule.shape:  # a step that each parameter has by itself, without ZeRO
        return first
    if any(isinstance(slot, Computed) for slot in slots):
        if rule.kind in (AVERAGED, SLICED):
            raise of_slices(f"{first.name} of {name}")
        return first
    if rule.kind == AVERAGED:
        return Slot(first.name, first.dtype, rule.shape, first.spans, tuple(s.spans for s in slots[1:]))
    if rule.kind != SLICED:
        return Slot(first.name, first.dtype, rule.shape, first.spans)
    parts = [
        (_with((0,) * len(rule.shape), rule.dim, target), narrow(slot, rule.dim, source, size))
        for slot, own in zip(slots, rule.read, strict=True)
        for source, target, size in own
        if size
    ]
    return placed(parts) if math.prod(rule.shape) else Slot(first.name, first.dtype, rule.shape, ())


def cut(parameter: Parameter, rule: Rule, rank: int) -> Parameter:
    """Return what one tensor-parallel rank has of a whole parameter.

    A vocabulary's slots may have fewer rows than the parameter: the rest is padding.
    """
    if rule.kind != SLICED:
        return parameter
    shares = rule.shares[rank]
    shape = _with(rule.shape, rule.dim, sum(s.size for s in shares))
    computed = [key for key, slot in parameter.slots.items() if isinstance(slot, Computed)]
    if computed:
        raise of_slices(f"{computed[0]} of {parameter.name}")
    slots = {
        key: _cut_slot(slot, rule.dim, shares) if slot.shape else slot  # a step that each parameter has by itself
        for key, slot in parameter.slots.items()
    }
    return replace(parameter, shape=shape, slots=slots)


def _cut_slot(slot: Slot, dim: int, shares: Sequence[Share]) -> Slot:
    present = slot.shape[dim]
    parts = [narrow(slot, dim, s.target, min(s.size, present - s.target)) for s in shares if s.target < present]
    return concat(parts or [narrow(slot, dim, 0, 0)], dim)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


SAMPLED_EXTENTS = 4
"""Of each slice, spread evenly over it."""

SAMPLED_NUMEL = 16


def check_slices(origin: Origin, tp: int, degree: int) -> int:
    """Compare a sample of each master over the ranks whose slices are put together; return how many elements.

    A rule that is missing cannot be seen in shapes: a norm that every rank has whole looks like slices of one twice as
    long. But slices of a trained parameter are not all alike, and copies of one are.

    Parameters
    ----------
    tp : int
        Tensor-parallel ranks of the source.
    degree : int
        Tensor-parallel ranks of the target; at the source's own nothing is put together.

    Raises
    ------
    WeightMismatchError
        Copies of a parameter differ, or what no rule names is the same on every rank.
    """
    if origin.rules is None or not origin.ranks or tp in (1, degree):
        return 0
    stages = [origin.ranks[first : first + tp] for first in range(0, len(origin.ranks), tp)]
    path = origin.rules_path or origin.model.path
    rules = Rules(origin.rules, path)
    compared = 0
    with Sources() as sources:
        for ranks, name in ((one, name) for one in stages for name in one[0].state.parameters):
            if name in ranks[0].state.whole:
                continue
            rule = rules.matching(name)
            slots = [files.state.parameters[name].slots.get(MASTER) for files in ranks]
            masters = [slot for slot in slots if slot is not None]
            if rule not in (None, REPLICATED) or len(masters) < len(ranks) or not masters[0].numel:
                continue
            if any(slot.shape != masters[0].shape for slot in masters):
                continue
            values = [_sample(slot, sources) for slot in masters]
            compared += sum(len(block) for sample in values for block in sample)
            _check_sample(name, rule, values)
    return compared


def _sample(slot: Slot, sources: Sources) -> list[Array]:
    from zckpt.engine.read import read_extent

    last = max(slot.numel - SAMPLED_NUMEL, 0)
    starts = sorted({round(i * last / (SAMPLED_EXTENTS - 1)) for i in range(SAMPLED_EXTENTS)})
    extents = [Extent.flat(slot.shape, start, min(SAMPLED_NUMEL, slot.numel - start)) for start in starts]
    return [read_extent(slot, extent, sources) for extent in extents]


def _check_sample(name: str, rule: str | None, values: Sequence[Sequence[Array]]) -> None:
    """Hold the sampled blocks of each rank against those of the others."""
    same = len({b"".join(block.tobytes() for block in sample) for sample in values}) == 1
    if rule == REPLICATED and not same:
        raise WeightMismatchError(
            f"{name} differs between tensor-parallel ranks, though a rule says that each has the whole",
            advice="if it is to be averaged, say so with --tp-rules; --no-weight-check takes the first rank's",
        )
    constant = all((block == values[0][0][0]).all() for block in values[0])  # as a bias that was never trained
    if rule is None and same and not constant:
        raise WeightMismatchError(
            f"{name} is the same on all tensor-parallel ranks, though no rule says that each has the whole",
            advice="say so with --tp-rules; --no-weight-check takes it for slices",
        )
