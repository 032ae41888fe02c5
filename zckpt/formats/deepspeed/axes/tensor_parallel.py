"""Put tensor-parallel slices together by rule, and slice whole parameters again.

A `Share` says where consecutive indexes of a slice lie in the whole, along the dimension that is sliced:

    whole:    | q q q q | k k | v v |
    rank 0:   | q q | k | v |                a share for each of q, k and v

What each tensor-parallel rank of the target has of the parameters: all of them whole, or its slices.

At an unchanged degree nothing is put together: every rank's values stay what they are, also those that drift apart and
the padding rows of a vocabulary.

The rules for slices in a DeepSpeed checkpoint that is to be written: true of its own ranks. See `tp_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, UsageError, WeightMismatchError, listed
from zckpt.formats.deepspeed.axes.experts import expert_degrees, is_expert
from zckpt.formats.deepspeed.axes.gpt_model import check_degree
from zckpt.formats.deepspeed.axes.tp_rules import (
    AFFINE_KEY,
    AVERAGED,
    INFO_KEY,
    REPLICATED,
    REPLICATED_KEY,
    SLICED,
    Info,
    Rule,
    Rules,
)
from zckpt.formats.deepspeed.layouts.layout import complete_aliases
from zckpt.formats.deepspeed.origin import Origin, Rank, by_stage, gathered
from zckpt.formats.deepspeed.ranks import check_slices_alike
from zckpt.formats.deepspeed.rare.quantised import of_slices
from zckpt.formats.deepspeed.values import copies_of, viewed
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Duplicate, PaddingSpan, Parameter, Slot, list_of, stated
from zckpt.state.views import concat, narrow, placed
from zckpt.torchfile import plain

if TYPE_CHECKING:
    from zckpt.engine.targets import Hole
    from zckpt.formats.deepspeed.target import Target


SHOWN_NAMES = 8
"""More names than this are counted, not listed."""


def merge(states: Sequence[Rank], rules: Rules | None, *, padded: bool = False) -> Rank:
    """Return one state for all tensor-parallel ranks.

    `states`: by tensor-parallel rank; `rules`: None if the checkpoint has none; `padded`: whether vocabularies keep
    their padding rows, which depend on the tensor-parallel degree. Raises UnsupportedError: there are slices and no
    rules; LayoutError: the ranks do not fit together; ShardError: they have taken other steps, or have other
    hyperparameters.
    """
    first = states[0]
    if rules is None:
        raise without_rules(list(first.parameters), "how to put them together")
    for other in states[1:]:
        if (
            other.parameters.keys() != first.parameters.keys()
            or other.whole != first.whole
            or [g.parameters for g in other.param_groups] != [g.parameters for g in first.param_groups]
        ):
            raise LayoutError(f"mp_rank {other.mp_rank} has other parameters than mp_rank 0")
    check_slices_alike(states)
    groups = [replace(group) for group in first.param_groups]
    merged = gathered(states, buffers=first.buffers, param_groups=groups, degrees=first.degrees, lanes=first.lanes,
                      whole=first.whole, tied=first.tied)  # fmt: skip
    apart: list[str] = []
    for name, own in first.parameters.items():
        merged.parameters[name] = replace(own)
        is_cut = len(states) > 1 or (not padded and rules.is_vocabulary(name))
        if name not in first.whole and own.tied_to is None and is_cut:
            slices = [state.parameters[name] for state in states]
            rule = rules.rule(name, [one.shape for one in slices], padded=padded)
            slots = {key: _merge_slot(key, slices, rule) for key in own.slots}
            merged.parameters[name] = replace(own, shape=rule.shape, slots=stated(slots))
            apart += [f"{key} of {name}" for key, slot in slots.items() if slot is None]
    if not padded:
        merged.padding_spans.insert(0, VocabularyPadding(states, rules))
    complete_aliases(merged.parameters)
    if apart:
        merged.warnings.append(f"{listed(apart)}: left out, for it does not have one value per element: what each "
                               "tensor-parallel rank has is of its slice alone")  # fmt: skip
    merged.warnings = list(dict.fromkeys(merged.warnings))
    merged.duplicates += _copies(states, merged, rules)
    return merged


@immutable
class VocabularyPadding:
    """Where the rows are that pad a vocabulary to a multiple of the ranks: in the slices, and not in the whole."""

    states: Sequence[Rank]  # by tensor-parallel rank
    rules: Rules

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield where the rows lie that no share has, for each slot of each rank."""
        for name, first in self.states[0].parameters.items():
            if first.tied_to is not None or name in self.states[0].whole or not self.rules.is_vocabulary(name):
                continue
            rule = self.rules.rule(name, [state.parameters[name].shape for state in self.states], padded=False)
            for state, shares in zip(self.states, rule.shares, strict=False):
                size = sum(share.size for share in shares)  # of a vocabulary's slice the first rows
                own = state.parameters[name]
                for key, slot in own.slots.items():
                    if not slot.shape or slot.shape != own.shape:
                        continue
                    for span in narrow(slot, 0, size, own.shape[0] - size).spans:
                        low, high = span.reach
                        yield PaddingSpan(key, span.path, low, high - low)


def _copies(states: Sequence[Rank], merged: Rank, rules: Rules) -> Iterator[Duplicate]:
    """Yield what ranks keep of what is read of a rank before them: whole, or a part of a slice."""
    first = states[0]
    for name, whole in merged.parameters.items() if len(states) > 1 else ():
        rule = None if name in first.whole else rules.mapped(name)
        if rule is None:
            continue
        for state, shares, firsts in zip(states, rule.shares, rule.read, strict=False):
            copies = [part for share in shares for part in share.without(firsts)]
            for key, slot in state.parameters[name].slots.items():
                for source, target, size in copies if key in whole.slots and slot.shape else ():
                    copy, part = narrow(slot, rule.dim, source, size), narrow(whole.slots[key], rule.dim, target, size)
                    yield from copies_of(name, {key: copy}, {key: part}, state.mp_rank)
    read = {
        name: {key: slot for key, slot in whole.slots.items()
               if slot.spans == first.parameters[name].slots[key].spans and not slot.replicas}
        for name, whole in merged.parameters.items()
        if name not in first.whole  # which is read from the files of all ranks, and the same everywhere
    }  # fmt: skip
    for state in states[1:]:
        for name, slots in read.items():
            yield from copies_of(name, state.parameters[name].slots, slots, state.mp_rank)
        for name, buffer in state.buffers.items():
            if name in first.buffers:
                yield from copies_of(name, buffer.slots, first.buffers[name].slots, state.mp_rank, kind="buffer")


def without_rules(names: Sequence[str], what: str, option: str = "--tp-rules") -> UnsupportedError:
    """Return the error for slices that no rule names."""
    return UnsupportedError(
        f"{len(names)} parameters have tensor-parallel slices ({listed(names, most=SHOWN_NAMES)}), but there are no "
        f"rules {what}",
        expected="universal_checkpoint_info in the model file",
        advice=f"give them with {option} FILE",
    )


def _merge_slot(key: str, slices: Sequence[Parameter], rule: Rule) -> Slot | None:
    """Return what slices have of a slot as one; None where it is no value for each element, of which there are more."""
    slots = [one.slots[key] for one in slices if key in one.slots]
    first, what = slots[0], f"{key} of {slices[0].name}"
    if len(slots) != len(slices):
        raise LayoutError(f"{what} is missing on some tensor-parallel ranks")
    if rule.kind not in (AVERAGED, SLICED) or (not first.shape and rule.shape):
        return first  # the same on all ranks; or a step that each parameter has by itself, without ZeRO
    if any(isinstance(slot, Computed) for slot in slots):
        raise of_slices(what)
    if rule.kind == AVERAGED:
        return replace(first, replicas=tuple(slot.spans for slot in slots[1:]))
    if any(slot.shape != one.shape for slot, one in zip(slots, slices, strict=True)):
        return None
    parts = [
        (tuple(target * (dim == rule.dim) for dim in range(len(rule.shape))), narrow(slot, rule.dim, source, size))
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
    for key, slot in parameter.slots.items():
        if isinstance(slot, Computed):
            raise of_slices(f"{key} of {parameter.name}")

    def of_rank(slot: Slot) -> Slot:
        present = slot.shape[rule.dim]
        shares = [(s.target, min(s.size, present - s.target)) for s in rule.shares[rank] if s.target < present]
        return concat([narrow(slot, rule.dim, *one) for one in shares or [(0, 0)]], rule.dim)

    return viewed(parameter, rule.local(rank), of_rank)


SAMPLED_EXTENTS = 4
"""Of each slice, spread evenly over it."""


def check_slices(target: Target) -> int:
    """Compare a sample of each master over the ranks whose slices are put together; return how many elements.

    A rule that is missing cannot be seen in shapes: a norm that every rank has whole looks like slices of one twice as
    long. But slices of a trained parameter are not all alike, and copies of one are. At the source's own degree nothing
    is put together.

    Raises WeightMismatchError: copies of a parameter differ, or what no rule names is the same on every rank.
    """
    origin, tp = target.origin, target.checkpoint.topology.tp
    if origin.rules is None or tp in (1, target.tp):
        return 0
    from zckpt.compare.copies import sampled
    from zckpt.engine.read import read_all

    rules, compared = origin.slicing, 0
    for ranks, name in ((one, name) for one in by_stage(origin.ranks, tp) for name in one[0].parameters):
        rule = rules.matching(name)
        masters = [one for files in ranks if (one := files.parameters[name].master) is not None]
        shapes = {slot.shape for slot in masters if slot.numel}
        if name in ranks[0].whole or rule not in (None, REPLICATED) or len(masters) < len(ranks) or len(shapes) != 1:
            continue
        reads: list[tuple[Hole, memoryview]] = []
        values = [sampled(slot, SAMPLED_EXTENTS, reads) for slot in masters]
        read_all(reads)
        compared += sum(map(len, values))
        same = len({sample.tobytes() for sample in values}) == 1
        if rule == REPLICATED and not same:
            raise WeightMismatchError(
                f"{name} differs between tensor-parallel ranks, although a rule says that each has the whole",
                advice="if it should be averaged, say so with --tp-rules; --no-weight-check uses the first rank's",
            )
        if rule is None and same and (values[0] != values[0][0]).any():  # else a bias that was never trained
            raise WeightMismatchError(
                f"{name} is the same on all tensor-parallel ranks, although no rule says that each has the whole",
                advice="say so with --tp-rules; --no-weight-check treats it as slices",
            )
    return compared


def local_states(
    checkpoint: Checkpoint,
    origin: Origin,
    degree: int,
    rows: int | None,
    ranks: Sequence[Rank],
    *,
    sliced_experts: bool | None,
) -> list[Rank]:
    """Return the state of each tensor-parallel rank of the target, with the source's files to carry the rest from.

    Parameters
    ----------
    degree : int
        Tensor-parallel ranks of the target.
    rows : int or None
        Rows of vocabulary parameters in the target, padding included; by default as many as the source has, or the
        next number that divides by `degree`.
    ranks : sequence of Rank
        Those of one stage of a pipeline.
    sliced_experts : bool or None
        Whether experts are cut as all else, or spread over tensor-parallel ranks as over others; of a source that is
        sliced it stays as it is, of others the rules tell by default.

    Raises
    ------
    UnsupportedError
        There are no rules that tell how to cut.
    UsageError
        `rows` cannot be.
    LayoutError
        A parameter does not divide among the ranks.
    """
    if degree == len(ranks) and rows is None:
        return list(ranks)
    largest = max((p.numel for p in checkpoint.parameters.values()), default=1)
    if degree > largest:
        raise UsageError("unusable --tensor-parallel-size", expected=f"at most {largest}, the elements of the "
            "largest parameter", found=degree)  # fmt: skip
    rules = _rules(origin, ranks, degree)
    if rows is not None and not any(rules.is_vocabulary(name) for name in checkpoint.parameters):
        raise UsageError("no rule names a vocabulary, so --padded-vocab-size does not apply", path=rules.path)
    merged = merge(ranks, rules, padded=True)
    experts = merged.whole
    if len(ranks) == 1 and not sliced_experts:  # DeepSpeed slices experts on demand only
        of_rules = () if sliced_experts is False else (None, REPLICATED)
        experts = frozenset(
            n for n in merged.parameters if is_expert(n) and (not of_rules or rules.matching(n) in of_rules)
        )
    lanes = degree if experts else 1
    like = list(ranks) if degree == len(ranks) else [ranks[0]] * degree
    states = [
        files.emptied(buffers=files.buffers, param_groups=files.param_groups, degrees=expert_degrees(merged),
                      lanes=lanes, whole=experts)
        for files in like
    ]  # fmt: skip
    for name, parameter in merged.parameters.items():
        if name in experts or parameter.tied_to is not None:
            slices = [replace(parameter) for _ in states]
        elif degree == len(ranks) and not rules.is_vocabulary(name):
            slices = [replace(files.parameters[name]) for files in ranks]
        else:
            slices = _cut(parameter, rules, degree, rows)
        for state, one in zip(states, slices, strict=True):
            state.parameters[name] = one
    for state in states:
        complete_aliases(state.parameters)
    return states


def _rules(origin: Origin, ranks: Sequence[Rank], degree: int) -> Rules:
    """Return the rules to cut by.

    A checkpoint that is not sliced may carry rules that nobody ever needed. To cut by them, they must at least say
    what is not to be cut.
    """
    names = list(ranks[0].parameters)
    option = "--slice-rules" if origin.is_foreign else "--tp-rules"  # by which another format's are cut
    if origin.rules is None:
        raise without_rules(names, "how to cut them", option)
    rules = origin.slicing
    if len(ranks) == 1 < degree and REPLICATED_KEY not in origin.rules:
        raise UnsupportedError(
            "the tensor-parallel rules do not say which parameters each rank has whole",
            path=rules.path,
            expected=f"{REPLICATED_KEY}, even if empty",
            advice=f"give rules with {option} FILE",
        )
    if origin.rules_path is None and degree != len(ranks):
        check_degree(origin.model.content, origin.rules, names, degree, rules.path)
    return rules


def _cut(parameter: Parameter, rules: Rules, degree: int, rows: int | None) -> list[Parameter]:
    """Return each rank's slice of a whole parameter."""
    if rules.is_vocabulary(parameter.name):
        present = parameter.shape[0] if parameter.shape else 0
        padded = -(-present // degree) * degree if rows is None else rows
        least = min(rules.vocabulary_size or 0, present)
        if padded < least or padded % degree:
            raise UsageError(
                f"unusable padded size for the vocabulary {parameter.name}",
                expected=f"at least {least} rows and a multiple of {degree}",
                found=padded,
            )
        # Rows that the source does not have are in no slot.
        shape = (padded, *parameter.shape[1:])
        parameter = viewed(parameter, shape, lambda slot: narrow(slot, 0, 0, min(padded, present)))
    rule = rules.cut(parameter.name, parameter.shape, degree)
    return [cut(parameter, rule, rank) for rank in range(degree)]


def written_rules(origin: Origin, stages: Sequence[Sequence[Rank]], checkpoint: Checkpoint) -> Info | None:
    """Return the rules that the target's files are to carry; None where they are those of the source's, unchanged.

    Parameters
    ----------
    stages : sequence of sequence of Rank
        By stage and tensor-parallel rank; where there is no pipeline, one stage.
    checkpoint : Checkpoint
        The source.
    """
    degree, tp = len(stages[0]), checkpoint.topology.tp
    given = origin.rules_path is not None
    old = {name: p.shape for files in origin.ranks[::tp] for name, p in files.parameters.items()}
    new = {name: p.shape for of_stage in stages for name, p in of_stage[0].parameters.items()}
    is_resized = any(shape != old.get(name, shape) for name, shape in new.items())
    if origin.rules is None or (not given and degree == tp and not is_resized):
        return None
    own = origin.model.content.get(INFO_KEY)
    node = own if not given and isinstance(own, dict) and plain(own) == origin.rules else origin.rules
    of_vocabulary = Rules.of_vocabulary(origin.rules, "")
    rows = {  # of the vocabularies, padding included
        sum(files.parameters[name].shape[0] for files in of_stage)
        for of_stage in stages
        for name, p in of_stage[0].parameters.items()
        if of_vocabulary.is_vocabulary(name) and p.shape
    }
    written = {**node}
    if len(rows) == 1 and "padded_vocab_size" in node:
        written["padded_vocab_size"] = rows.pop()
    if isinstance(widths := node.get("sub_param_shard_widths"), Mapping):  # an equal share for each rank
        written["sub_param_shard_widths"] = {
            pattern: [[sum(n for n in list_of(sub) if type(n) is int) // degree] * degree for sub in list_of(subs)]
            for pattern, subs in widths.items()
        }
    subs_of = node.get("parameter_with_sub_params")
    if isinstance(subs_of, (list, tuple)):  # DeepSpeed reads sizes that are tuples, which JSON does not have
        written["parameter_with_sub_params"] = [
            {**rule, "shape": tuple(tuple(n) if isinstance(n, list) else n for n in rule["shape"])}
            if isinstance(rule, Mapping) and isinstance(rule.get("shape"), (list, tuple))
            else rule
            for rule in subs_of
        ]
    if AFFINE_KEY in written:
        names = dict.fromkeys(name for of_stage in stages for name in of_stage[0].parameters)
        written[AFFINE_KEY] = origin.slicing.maps_for(list(names), degree)
    return written
