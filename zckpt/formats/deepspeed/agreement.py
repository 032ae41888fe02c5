"""What model-parallel ranks have to say alike, for a checkpoint keeps it once: steps, and hyperparameters of slices.

tensor-parallel ranks   have slices of the same groups: all but what is each rank's own, see `values`, is one for all
stages of a pipeline    have groups of their own, with hyperparameters of their own; but all have taken the same steps
model files             say how many steps the run has taken

Data-parallel ranks are held against each other in `ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.codes import HYPERPARAMETERS_DIFFER, STEPS_DIFFER
from zckpt.errors import ShardError, listed
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.values import FOLLOWS_FROM_STEPS
from zckpt.formats.remainder import jsonables
from zckpt.state import ParamGroup, as_float, number_of
from zckpt.torchfile import plain


def check_models_alike(firsts: Sequence[ModelShard]) -> None:
    """Raise ShardError where model files of model-parallel ranks are of different steps.

    Parameters
    ----------
    firsts : sequence of ModelShard
        Of each model-parallel rank the first.
    """
    steps = [plain(model.content.get("global_steps")) for model in firsts]
    for model, step in zip(firsts, steps, strict=True):
        if type(step) is int and type(steps[0]) is int and step != steps[0]:
            raise ShardError(
                f"model file of mp_rank {model.mp_rank} is from another step than that of mp_rank 0",
                path=model.path,
                expected=f"step {steps[0]}",
                found=step,
                advice="replace it by the file of this step",
                code=STEPS_DIFFER,
            )


def check_slices_alike(states: Sequence[RankState]) -> None:
    """Raise ShardError where tensor-parallel ranks have other steps or other hyperparameters of a group."""
    for other in states[1:]:
        for index, (mine, its) in enumerate(zip(states[0].groups, other.groups, strict=False)):
            _check_steps(mine, its, index, other.mp_rank)
            first, second = jsonables([mine.hyperparameters, its.hyperparameters])
            for key, one, another in _differing(first, second):
                raise ShardError(
                    f"mp_rank {other.mp_rank} is from another step or run: {key} of its param group {index} differs "
                    f"from that of mp_rank {states[0].mp_rank}, which has slices of the same parameters",
                    expected=repr(one),
                    found=repr(another),
                    advice="replace its files by those of this step",
                    code=HYPERPARAMETERS_DIFFER,
                )
        for name, parameter in states[0].parameters.items():  # without ZeRO, each has its own
            a, b = parameter.state, other.parameters[name].state if name in other.parameters else {}
            for key in FOLLOWS_FROM_STEPS & a.keys() & b.keys() if a and b else ():
                if _number(a[key]) != _number(b[key]):
                    raise _other_step(f"{key} of {name}", other.mp_rank, a[key], b[key])


def check_stages_alike(stages: Sequence[RankState], rows: Sequence[Sequence[ParamGroup | None]]) -> None:
    """Raise ShardError where stages have taken other steps with what they have of a group, or with all that they have.

    Parameters
    ----------
    rows : sequence of sequence of ParamGroup or None
        For each group of the training what each stage has of it.
    """
    for index, row in enumerate(rows):
        known = [(stage, group) for stage, group in zip(stages, row, strict=True) if group is not None]
        for stage, group in known[1:]:
            _check_steps(known[0][1], group, index, stage.mp_rank)
    taken = [(stage, {_number(g.state["step"]) for g in stage.groups if "step" in g.state}) for stage in stages]
    taken = [(stage, steps) for stage, steps in taken if steps]
    for stage, steps in taken[1:]:
        if steps.isdisjoint(taken[0][1]):
            expected, found = (listed(sorted(map(str, one))) for one in (taken[0][1], steps))
            raise _other_step("step of its param groups", stage.mp_rank, expected, found)


def _check_steps(mine: ParamGroup, its: ParamGroup, index: int, mp_rank: int) -> None:
    for key in sorted(FOLLOWS_FROM_STEPS & mine.state.keys() & its.state.keys()):
        if _number(mine.state[key]) != _number(its.state[key]):
            raise _other_step(f"{key} of its param group {index}", mp_rank, mine.state[key], its.state[key])


def _other_step(what: str, mp_rank: int, expected: object, found: object) -> ShardError:
    return ShardError(
        f"mp_rank {mp_rank} is from another step or run: {what} differs",
        expected=_number(expected),
        found=_number(found),
        advice="replace its files by those of this step",
        code=STEPS_DIFFER,
    )


def _number(value: object) -> object:
    """Return a single value without how it was stored."""
    found = number_of(value)
    number = as_float(found)
    return number if number is not None else found if isinstance(found, str) else repr(plain(found))


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    for key in dict.fromkeys([*one, *other]):
        if repr(one.get(key)) != repr(other.get(key)):
            yield key, one.get(key), other.get(key)
