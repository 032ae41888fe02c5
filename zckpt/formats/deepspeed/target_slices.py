"""What each tensor-parallel rank of the target has of the parameters: all of them whole, or its slices.

At an unchanged degree nothing is put together: every rank's values stay what they are, also those that drift apart and
the padding rows of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.gpt_model import check_degree
from zckpt.formats.deepspeed.origin import Origin, RankFiles, RankState
from zckpt.formats.deepspeed.target_groups import expert_degrees
from zckpt.formats.deepspeed.tensor_parallel import complete_aliases, cut, merge, without_rules
from zckpt.formats.deepspeed.tp_rules import REPLICATED_KEY, Rules
from zckpt.formats.deepspeed.tp_shares import REPLICATED
from zckpt.state import Checkpoint, Parameter
from zckpt.state.views import narrow


def local_states(
    checkpoint: Checkpoint,
    origin: Origin,
    degree: int,
    rows: int | None,
    ranks: Sequence[RankFiles] = (),
    *,
    sliced_experts: bool | None = None,
) -> list[RankFiles]:
    """Return the state of each tensor-parallel rank of the target, with the source's files to carry the rest from.

    Parameters
    ----------
    degree : int
        Tensor-parallel ranks of the target.
    rows : int or None
        Rows of vocabulary parameters in the target, padding included; by default as many as the source has, or the
        next number that divides by `degree`.
    ranks : sequence of RankFiles
        Those of one stage of a pipeline; by default all.
    sliced_experts : bool, optional
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
    whole = RankState(0, checkpoint.parameters, checkpoint.buffers, checkpoint.param_groups)
    path = origin.rules_path or (origin.model.path if origin.model.file.path else checkpoint.source)
    ranks = ranks or origin.ranks or [RankFiles([origin.model], origin.members, whole)]
    if degree == len(ranks) and rows is None:
        return list(ranks)
    largest = max((p.numel for p in checkpoint.parameters.values()), default=1)
    if degree > largest:
        raise UsageError("unusable tensor-parallel size", expected=f"at most {largest}, elements of the largest "
                         f"parameter", found=degree)  # fmt: skip
    rules = _rules(origin, ranks, degree, path)
    if rows is not None and not any(rules.is_vocabulary(name) for name in checkpoint.parameters):
        raise UsageError("no rule names a vocabulary, so a padded size does not apply", path=path)
    merged = merge([files.state for files in ranks], rules, padded=True)
    experts = merged.whole
    if len(ranks) == 1 and not sliced_experts:  # DeepSpeed slices experts on demand only
        of_rules = () if sliced_experts is False else (None, REPLICATED)
        experts = frozenset(
            n for n in merged.parameters if is_expert(n) and (not of_rules or rules.matching(n) in of_rules)
        )
    lanes = degree if experts else 1
    like = list(ranks) if degree == len(ranks) else [ranks[0]] * degree
    states = [
        RankState(mp_rank, {}, files.state.buffers, files.state.groups, degrees=expert_degrees(merged), lanes=lanes,
                  whole=experts)
        for mp_rank, files in enumerate(like)
    ]  # fmt: skip
    for name, parameter in merged.parameters.items():
        if name in experts:
            slices = [replace(parameter) for _ in states]
        elif degree == len(ranks) and not rules.is_vocabulary(name):
            slices = [replace(files.state.parameters[name]) for files in ranks]
        else:
            slices = _cut(parameter, rules, degree, rows)
        for state, one in zip(states, slices, strict=True):
            state.parameters[name] = one
    for state in states:
        complete_aliases(state.parameters)
    return [replace(files, state=state) for files, state in zip(like, states, strict=True)]


def _rules(origin: Origin, ranks: Sequence[RankFiles], degree: int, path: str) -> Rules:
    """Return the rules to cut by.

    A checkpoint that is not sliced may carry rules that nobody ever needed. To cut by them, they must at least say
    what is not to be cut.
    """
    names = list(ranks[0].state.parameters)
    option = "--tp-rules" if origin.model.file.path else "--slice-rules"  # by which another format's are cut
    if origin.rules is None:
        raise without_rules(names, "how to cut them", option)
    if len(ranks) == 1 < degree and REPLICATED_KEY not in origin.rules:
        raise UnsupportedError(
            "the tensor-parallel rules do not say which parameters every rank has whole",
            path=path,
            expected=f"{REPLICATED_KEY}, be it empty",
            advice=f"give rules with {option} FILE",
        )
    if origin.rules_path is None and degree != len(ranks):
        check_degree(origin.model.content, origin.rules, names, degree, path)
    return Rules(origin.rules, path)


def _cut(parameter: Parameter, rules: Rules, degree: int, rows: int | None) -> list[Parameter]:
    """Return each rank's slice of a whole parameter."""
    if parameter.tied_to is not None:
        return [replace(parameter) for _ in range(degree)]
    if rules.is_vocabulary(parameter.name):
        parameter = _padded(parameter, rules, degree, rows)
    rule = rules.cut(parameter.name, parameter.shape, degree)
    return [cut(parameter, rule, rank) for rank in range(degree)]


def _padded(parameter: Parameter, rules: Rules, degree: int, rows: int | None) -> Parameter:
    """Return a vocabulary with as many rows as the target has; rows that the source does not have are in no slot."""
    present = parameter.shape[0] if parameter.shape else 0
    padded = -(-present // degree) * degree if rows is None else rows
    least = min(rules.vocabulary_size or 0, present)
    if padded < least or padded % degree:
        raise UsageError(
            f"unusable padded size of vocabulary {parameter.name}",
            expected=f"at least {least} rows and a multiple of {degree}",
            found=padded,
        )
    kept = min(padded, present)
    slots = {key: narrow(slot, 0, 0, kept) if slot.shape else slot for key, slot in parameter.slots.items()}
    return replace(parameter, shape=(padded, *parameter.shape[1:]), slots=slots)
