"""Put the states of all model-parallel ranks together: slices by rule, disjoint parts of a pipeline side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from zckpt.boxes import boxes_of, row_major
from zckpt.dtypes import itemsize
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.rank_state import RankState
from zckpt.formats.deepspeed.tp_rules import AVERAGED, SLICED, Rule, Rules
from zckpt.state import Extent, Parameter, ParamGroup, Slot, Span

SHOWN_NAMES = 8
"""More names than this are counted, not listed."""


def merge(states: Sequence[RankState], info: Mapping[str, object] | None, path: str) -> RankState:
    """Return one state for all tensor-parallel ranks.

    Parameters
    ----------
    states : sequence of RankState
        By tensor-parallel rank.
    info : mapping or None
        `universal_checkpoint_info`; None if the checkpoint has none.
    path : str
        The file that has it, or should.

    Raises
    ------
    UnsupportedError
        There are slices and no rules.
    LayoutError
        The ranks do not fit together.
    """
    if len(states) == 1:
        return _without_vocabulary_padding(states[0], info or {}, path)
    names = list(states[0].parameters)
    if info is None:
        raise UnsupportedError(
            f"tensor-parallel slices of {len(names)} parameters ({', '.join(names[:SHOWN_NAMES])}, ...) and no rules "
            f"how to put them together",
            path=path,
            expected="universal_checkpoint_info in the model file",
        )
    for other in states[1:]:
        if set(other.parameters) != set(names) or [g.parameters for g in other.groups] != [
            g.parameters for g in states[0].groups
        ]:
            raise LayoutError(f"mp_rank {other.mp_rank} has other parameters than mp_rank 0", path=path)
    rules = Rules(info, path)
    merged = RankState(0, buffers=states[0].buffers, expert_parallel=states[0].expert_parallel)
    for name in names:
        merged.parameters[name] = _merge_parameter([s.parameters[name] for s in states], rules)
    for parameter in merged.parameters.values():
        if parameter.tied_to is not None:
            parameter.shape = merged.parameters[parameter.tied_to].shape
    merged.groups = [ParamGroup(g.hyperparameters, g.parameters, g.state) for g in states[0].groups]
    for state in states:
        merged.padding += state.padding
        merged.warnings += [w for w in state.warnings if w not in merged.warnings]
    return merged


def _without_vocabulary_padding(state: RankState, info: Mapping[str, object], path: str) -> RankState:
    """Leave out the padding rows of a vocabulary, so that the state does not depend on the tensor-parallel degree."""
    keys = ("vocabulary_parameter_patterns", "original_vocab_size")
    rules = Rules({key: info[key] for key in keys if key in info}, path)
    for name, parameter in state.parameters.items():
        if parameter.tied_to is None and rules.is_vocabulary(name):
            state.parameters[name] = _merge_parameter([parameter], rules)
    for parameter in state.parameters.values():
        if parameter.tied_to is not None:
            parameter.shape = state.parameters[parameter.tied_to].shape
    return state


def _merge_parameter(slices: Sequence[Parameter], rules: Rules) -> Parameter:
    first = slices[0]
    if first.tied_to is not None:
        return Parameter(first.name, first.shape, first.dtype, tied_to=first.tied_to)
    rule = rules.rule(first.name, [p.shape for p in slices])
    slots = {
        key: _merge_slot([p.slots[key] for p in slices if key in p.slots], rule, first.name, len(slices))
        for key in first.slots
    }
    return Parameter(first.name, rule.shape, first.dtype, slots, first.group, first.frozen, state=first.state)


def _merge_slot(slots: Sequence[Slot], rule: Rule, name: str, ranks: int) -> Slot:
    first = slots[0]
    if len(slots) != ranks:
        raise LayoutError(f"{first.name} of {name} is missing on some tensor-parallel ranks")
    if rule.kind == AVERAGED:
        return Slot(first.name, first.dtype, rule.shape, first.spans, tuple(s.spans for s in slots[1:]))
    if rule.kind != SLICED:
        return Slot(first.name, first.dtype, rule.shape, first.spans)
    spans = tuple(
        span for rank, slot in enumerate(slots) for one in slot.spans for span in _place(one, slot.shape, rule, rank)
    )
    return Slot(first.name, first.dtype, rule.shape, spans)


def _place(span: Span, local: tuple[int, ...], rule: Rule, rank: int) -> Iterator[Span]:
    """Yield the span of a slice as spans of the whole parameter."""
    segments = rule.segments[rank]
    if len(segments) == 1 and segments[0].size == local[rule.dim] and span.strides is None:
        offsets = _shifted((0,) * len(local), rule.dim, segments[0].whole)
        extent = Extent(offsets, local, span.extent.start, span.extent.numel)
        yield Span(extent, span.path, span.offset, span.dtype, None, span.byteorder)
        return
    steps = span.strides or row_major(local)
    begin = 0 if span.strides else span.extent.start
    size = itemsize(span.dtype)
    for offsets, sizes in boxes_of(span.extent):
        for segment in segments:
            low = max(offsets[rule.dim], segment.local)
            high = min(offsets[rule.dim] + sizes[rule.dim], segment.local + segment.size)
            if low >= high:
                continue
            at = _shifted(offsets, rule.dim, low)
            box = _shifted(sizes, rule.dim, high - low)
            first = sum(o * s for o, s in zip(at, steps, strict=True)) - begin
            whole = _shifted(offsets, rule.dim, low - segment.local + segment.whole)
            extent = Extent(whole, box, 0, math.prod(box))
            yield Span(extent, span.path, span.offset + first * size, span.dtype, steps, span.byteorder)


def _shifted(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
