"""Put tensor-parallel slices together by rule, and slice whole parameters again.

A `Run` says where consecutive indexes of a slice lie in the whole, along the dimension that is sliced:

    whole:    | q q q q | k k | v v |        of rank 0's slice: q, k, v
    rank 0:   | q q | k | v |                each `Run` is where it is here, where there, and how long
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zckpt.engine.boxes import boxes_of, row_major
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.account.ranges import reach
from zckpt.formats.deepspeed.rank_state import RankState
from zckpt.formats.deepspeed.tp_rules import AVERAGED, SLICED, Rule, Rules, Segment
from zckpt.state import WEIGHT, Duplicate, Extent, PaddingSpan, Parameter, ParamGroup, Slot, Span
from zckpt.state.dtypes import itemsize

SHOWN_NAMES = 8
"""More names than this are counted, not listed."""


def merge(states: Sequence[RankState], rules: Rules | None, path: str, *, padded: bool = False) -> RankState:
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
    """
    first = states[0]
    names = list(first.parameters)
    if rules is None:
        if len(states) > 1:
            raise without_rules(names, path, "how to put them together")
        return first
    for other in states[1:]:
        if set(other.parameters) != set(names) or [g.parameters for g in other.groups] != [
            g.parameters for g in first.groups
        ]:
            raise LayoutError(f"mp_rank {other.mp_rank} has other parameters than mp_rank 0", path=path)
    merged = RankState(0, buffers=first.buffers, expert_parallel=first.expert_parallel)
    for name in names:
        merged.parameters[name] = _merge_parameter([s.parameters[name] for s in states], rules, padded=padded)
    if not padded:
        merged.padding_spans.append(VocabularyPadding(states, rules))
    complete_aliases(merged.parameters)
    merged.groups = [ParamGroup(g.hyperparameters, g.parameters, g.state) for g in first.groups]
    merged.duplicates = [one for state in states for one in state.duplicates]
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
    rules : Rules
    """

    states: Sequence[RankState]
    rules: Rules

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield a run for the rows that no segment of the rule has, for each slot of each rank."""
        for name, first in self.states[0].parameters.items():
            if first.tied_to is not None or not self.rules.is_vocabulary(name):
                continue
            rule = self.rules.rule(name, [state.parameters[name].shape for state in self.states], padded=False)
            for state, segments in zip(self.states, rule.segments, strict=False):
                parameter = state.parameters[name]
                rows = _outside(segments, parameter.shape[rule.dim])
                for key, slot in parameter.slots.items():
                    for span in moved(slot.spans, rule.dim, rows):
                        low, high = reach(span)
                        yield PaddingSpan(key, span.path, low, high - low)


def _outside(segments: Sequence[Segment], size: int) -> list[Run]:
    """Return the indices of a slice that no segment has, as runs from where they are to there."""
    found, at = [], 0
    for low, high in [*sorted((s.local, s.local + s.size) for s in segments), (size, size)]:
        if low > at:
            found.append(Run(at, at, low - at))
        at = max(at, high)
    return found


def _kept_by(state: RankState, first: RankState, merged: RankState) -> Iterator[Duplicate]:
    """Yield the copies that one rank keeps of what the first rank's is read of."""
    for name, parameter in state.parameters.items():
        for key, slot in parameter.slots.items():
            own, used = first.parameters[name].slots.get(key), merged.parameters[name].slots.get(key)
            if own is not None and used is not None and used.spans == own.spans != slot.spans and not used.replicas:
                yield Duplicate("parameter", name, name, slot, own, state.mp_rank)
    for name, buffer in state.buffers.items():
        kept = first.buffers.get(name)
        if kept is not None and kept.shape == buffer.shape:
            yield Duplicate("buffer", name, name, buffer.slots[WEIGHT], kept.slots[WEIGHT], state.mp_rank)


def without_rules(names: Sequence[str], path: str, what: str) -> UnsupportedError:
    """Return the error for slices that no rule places."""
    shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    return UnsupportedError(
        f"tensor-parallel slices of {len(names)} parameters ({shown}) and no rules {what}",
        path=path,
        expected="universal_checkpoint_info in the model file",
        advice="`zckpt reshard` takes them from a file: --tp-rules FILE",
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
    if rule.kind == AVERAGED:
        return Slot(first.name, first.dtype, rule.shape, first.spans, tuple(s.spans for s in slots[1:]))
    if rule.kind != SLICED:
        return Slot(first.name, first.dtype, rule.shape, first.spans)
    runs = [[Run(s.local, s.whole, s.size) for s in segments] for segments in rule.segments]
    spans = [span for slot, own in zip(slots, runs, strict=True) for span in moved(slot.spans, rule.dim, own)]
    return Slot(first.name, first.dtype, rule.shape, tuple(spans))


def cut(parameter: Parameter, rule: Rule, rank: int) -> Parameter:
    """Return what one tensor-parallel rank has of a whole parameter.

    A vocabulary's slots may have fewer rows than the parameter: the rest is padding.
    """
    if rule.kind != SLICED:
        return parameter
    segments = rule.segments[rank]
    shape = _resized(rule.shape, rule.dim, sum(s.size for s in segments))
    slots = {key: _cut_slot(slot, rule.dim, segments) for key, slot in parameter.slots.items()}
    return replace(parameter, shape=shape, slots=slots)


def _cut_slot(slot: Slot, dim: int, segments: Sequence[Segment]) -> Slot:
    present = slot.shape[dim]
    runs = [Run(s.whole, s.local, max(min(s.size, present - s.whole), 0)) for s in segments]
    shape = _resized(slot.shape, dim, sum(run.size for run in runs))
    replicas = tuple(moved(spans, dim, runs) for spans in slot.replicas)
    return Slot(slot.name, slot.dtype, shape, moved(slot.spans, dim, runs), replicas)


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Run:
    """Indices along the sliced dimension: [source, source + size) of one tensor are [target, target + size) there."""

    source: int
    target: int
    size: int


def moved(spans: Iterable[Span], dim: int, runs: Sequence[Run]) -> tuple[Span, ...]:
    """Return the spans of a tensor as spans of another one that has the same elements in some runs.

    Elements that no run has are left out. A span whose box is within one run stays one span.

    Parameters
    ----------
    spans : iterable of Span
    dim : int
        The dimension along which the runs are; the tensors agree in all others.
    runs : sequence of Run
        In order, apart from each other.
    """
    return tuple(found for span in spans if span.extent.numel for found in _moved(span, dim, runs))


def _moved(span: Span, dim: int, runs: Sequence[Run]) -> Iterator[Span]:
    extent = span.extent
    low, high = extent.offsets[dim], extent.offsets[dim] + extent.sizes[dim]
    for run in runs:
        if run.source <= low and high <= run.source + run.size:
            offsets = _with(extent.offsets, dim, low - run.source + run.target)
            yield replace(span, extent=Extent(offsets, extent.sizes, extent.start, extent.numel))
            return
    steps = span.strides or row_major(extent.sizes)
    begin = 0 if span.strides else extent.start
    size = itemsize(span.dtype)
    for offsets, sizes in boxes_of(extent):
        for run in runs:
            low = max(offsets[dim], run.source)
            high = min(offsets[dim] + sizes[dim], run.source + run.size)
            if low >= high:
                continue
            box = _with(sizes, dim, high - low)
            at = _with(offsets, dim, low)
            first = sum((o - e) * s for o, e, s in zip(at, extent.offsets, steps, strict=True)) - begin
            place = Extent(_with(offsets, dim, low - run.source + run.target), box, 0, math.prod(box))
            yield replace(span, extent=place, offset=span.offset + first * size, strides=steps)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
