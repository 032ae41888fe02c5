"""What each model-parallel rank of the target has: the source's own ranks, or the whole parameters cut anew by rule.

At an unchanged tensor-parallel degree nothing is put together: every rank's values stay what they are, also those
that drift apart and the padding rows of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.origin import Origin, RankFiles
from zckpt.formats.deepspeed.rank_state import RankState
from zckpt.formats.deepspeed.rules_file import INFO_KEY, REPLICATED_KEY, info_for
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard
from zckpt.formats.deepspeed.tensor_parallel import complete_aliases, cut, merge, without_rules
from zckpt.formats.deepspeed.tp_rules import Rules
from zckpt.state import Checkpoint, Parameter, ParamGroup, Slot


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one model-parallel rank of the target has, and the source's files that the rest is carried from."""

    mp_rank: int
    models: Sequence[ModelShard]
    members: Sequence[OptimizerShard]
    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    groups: list[ParamGroup]


def local_states(checkpoint: Checkpoint, origin: Origin, degree: int, rows: int | None) -> list[LocalState]:
    """Return the state of each model-parallel rank of the target.

    Parameters
    ----------
    checkpoint : Checkpoint
    origin : Origin
    degree : int
        Tensor-parallel ranks of the target.
    rows : int or None
        Rows of vocabulary parameters in the target, padding included; by default as many as the source has, or the
        next number that divides by `degree`.

    Raises
    ------
    UnsupportedError
        There are no rules that tell how to cut.
    UsageError
        `rows` cannot be.
    LayoutError
        A parameter does not divide among the ranks.
    """
    ranks = origin.ranks or [_whole(checkpoint, origin)]
    if degree == len(ranks) and rows is None:
        return [_same(files, mp_rank) for mp_rank, files in enumerate(ranks)]
    path = origin.rules_path or origin.model.shard.path
    largest = max((p.numel for p in checkpoint.parameters.values()), default=1)
    if degree > largest:
        raise UsageError("unusable tensor-parallel size", expected=f"at most {largest}, elements of the largest "
                         f"parameter", found=degree)  # fmt: skip
    rules = _rules(origin, ranks, degree, path)
    if rows is not None and not any(rules.is_vocabulary(name) for name in checkpoint.parameters):
        raise UsageError("no rule names a vocabulary, so a padded size does not apply", path=path)
    merged = merge([files.state for files in ranks], rules, path, padded=True)
    made = [LocalState(mp_rank, files.models, files.members, {}, files.state.buffers, files.state.groups)
            for mp_rank, files in enumerate(_templates(ranks, degree))]  # fmt: skip
    for name, parameter in merged.parameters.items():
        if degree == len(ranks) and not rules.is_vocabulary(name):
            for state, files in zip(made, ranks, strict=True):
                state.parameters[name] = replace(files.state.parameters[name])
            continue
        for state, one in zip(made, _cut(parameter, rules, degree, rows), strict=True):
            state.parameters[name] = one
    for state in made:
        complete_aliases(state.parameters)
    return made


def _whole(checkpoint: Checkpoint, origin: Origin) -> RankFiles:
    """Return the checkpoint itself as the state of the only rank."""
    state = RankState(0, checkpoint.parameters, checkpoint.buffers, checkpoint.param_groups)
    return RankFiles([origin.model], origin.members, state)


def _same(files: RankFiles, mp_rank: int) -> LocalState:
    state = files.state
    return LocalState(mp_rank, files.models, files.members, state.parameters, state.buffers, state.groups)


def _templates(ranks: Sequence[RankFiles], degree: int) -> list[RankFiles]:
    """Return the files that each rank of the target carries the rest from: its own, or the first rank's."""
    return list(ranks) if degree == len(ranks) else [ranks[0]] * degree


def _rules(origin: Origin, ranks: Sequence[RankFiles], degree: int, path: str) -> Rules:
    """Return the rules to cut by.

    A checkpoint that is not sliced may carry rules that nobody ever needed. To cut by them, they must at least say
    what is not to be cut.
    """
    names = list(ranks[0].state.parameters)
    if origin.rules is None:
        raise without_rules(names, path, "how to cut them")
    if len(ranks) == 1 < degree and REPLICATED_KEY not in origin.rules:
        raise UnsupportedError(
            "the tensor-parallel rules do not say which parameters every rank has whole",
            path=path,
            expected=f"{REPLICATED_KEY}, be it empty",
            advice="give rules with --tp-rules FILE",
        )
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
    wanted = -(-present // degree) * degree if rows is None else rows
    least = min(rules.vocabulary_size or 0, present)
    if wanted < least or wanted % degree:
        raise UsageError(
            f"unusable padded size of vocabulary {parameter.name}",
            expected=f"at least {least} rows and a multiple of {degree}",
            found=wanted,
        )
    kept = min(wanted, present)
    slots = {key: _first_rows(slot, kept) for key, slot in parameter.slots.items()}
    return replace(parameter, shape=(wanted, *parameter.shape[1:]), slots=slots)


def _first_rows(slot: Slot, rows: int) -> Slot:
    """Return a slot without its last rows; spans may reach over the end, and what is not there is not asked for."""
    return replace(slot, shape=(rows, *slot.shape[1:]))


def written_rules(origin: Origin, states: Sequence[LocalState]) -> Mapping[str, object] | None:
    """Return the rules that the target's files are to carry; None where they are those of the source's, unchanged."""
    degree = len(states)
    given = origin.rules_path is not None
    if origin.rules is None or (not given and degree == max(len(origin.ranks), 1) and not _resized(origin, states)):
        return None
    own = origin.model.content.get(INFO_KEY)
    node = origin.rules if given or not isinstance(own, dict) else own
    return info_for(node, _rows(origin, states), degree)


def _resized(origin: Origin, states: Sequence[LocalState]) -> bool:
    """Tell whether some parameter of the first rank has another shape than in the source."""
    old = origin.ranks[0].state.parameters if origin.ranks else {}
    return any(name in old and p.shape != old[name].shape for name, p in states[0].parameters.items())


def _rows(origin: Origin, states: Sequence[LocalState]) -> int | None:
    """Return the padded size of the vocabularies; None where they do not have the same."""
    keys = ("vocabulary_parameter_patterns", "original_vocab_size")
    rules = Rules({key: origin.rules[key] for key in keys if key in origin.rules}, "") if origin.rules else None
    found = {
        sum(state.parameters[name].shape[0] for state in states)
        for name, p in states[0].parameters.items()
        if rules is not None and rules.is_vocabulary(name) and p.shape
    }
    return found.pop() if len(found) == 1 else None
