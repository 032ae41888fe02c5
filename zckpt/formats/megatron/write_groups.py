"""A checkpoint's param groups as `common.pt` has them: Megatron-Core's own, told by their factors, without parameters.

Megatron-Core takes hyperparameters from the group with the same `wd_mult`, `lr_mult`, `is_expert_parallel` and
`is_decoupled_lr`. A source of another program has none of these: its groups are parted and joined by Megatron's default
rule (`optimizer`), where all that come to be in one have the same hyperparameters.

Experts are a second optimizer's where they are spread over ranks. That has one step for all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.compare.logical import parameter_values, single
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.megatron.names import is_expert
from zckpt.formats.megatron.optimizer import EXPERTS, STEP, WEIGHT_DECAY, by_rule_decays
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot

FACTORS = {WEIGHT_DECAY: 1.0, "lr_mult": 1.0, EXPERTS: False, "is_decoupled_lr": False}
"""By what Megatron-Core tells groups, and what each is in a group that says nothing of it."""


@dataclass(slots=True)
class Group:
    """A group that is to be written: its hyperparameters, and the names of its parameters."""

    values: dict[str, object]
    members: list[str] = field(default_factory=list)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of an optimizer that experts have for themselves."""
        return bool(_factor(self.values, EXPERTS))


def _factor(values: Mapping[str, object], key: str) -> object:
    return values.get(key, values.get(f"pre_{key}"))


def groups_for(checkpoint: Checkpoint, expert_parallel_size: int | None, notes: list[str]) -> list[Group]:
    """Return the groups to write, those of experts last where they are an optimizer of their own.

    `notes`: gets what was done. Raises UsageError: a size that cannot be; UnsupportedError: which group a parameter is
    in is not known, some lack state that others have, or groups that Megatron has as one differ.
    """
    if expert_parallel_size is not None and expert_parallel_size < 1:
        raise UsageError("unusable expert-parallel-size", expected="at least 1", found=expert_parallel_size)
    groups = checkpoint.param_groups
    grouped = {name for group in groups for name in group.parameters}
    lost = [one.name for one in checkpoint.parameters.values()
            if set(one.slots) - {WEIGHT} and one.name not in grouped]  # fmt: skip
    if lost:
        raise UnsupportedError("which parameters each param group has is not known", found=listed(lost),
                               advice="`zckpt consolidate` writes the model")  # fmt: skip
    trained = [checkpoint.parameters[name] for name in grouped]
    most = {key for one in trained for key in one.slots if key not in (WEIGHT, MASTER)}
    lacking = next(((one.name, key) for one in trained for key in sorted(most) if key not in one.slots), None)
    if lacking is not None:
        raise UnsupportedError(f"{lacking[0]} has no {lacking[1]}, which others have",
                               expected="state of all trained parameters")  # fmt: skip
    as_source = checkpoint.topology.ep > 1 or any(one.hyperparameters.get(EXPERTS) is True for one in groups)
    chained = as_source if expert_parallel_size is None else expert_parallel_size > 1
    own = all(_factor(group.hyperparameters, WEIGHT_DECAY) is not None for group in groups)
    found: dict[tuple[object, ...], Group] = {}
    for group in groups:
        for name in group.parameters or ([""] if own else []):  # a group of nothing is one, too
            values = dict(group.hyperparameters)
            factors = {key: _factor(values, key) for key in FACTORS}
            factors = {key: default if factors[key] is None else factors[key] for key, default in FACTORS.items()}
            if name:
                factors[EXPERTS] = chained and is_expert(name)
            if not own:
                factors[WEIGHT_DECAY] = 1.0 if by_rule_decays(checkpoint.parameters[name]) else 0.0
            values |= {f"pre_{key}" if f"pre_{key}" in values else key: value for key, value in factors.items()}
            one = found.setdefault(tuple(factors.values()), Group(values))
            unlike = next((key for key in {**one.values, **values} if one.values.get(key) != values.get(key)), None)
            if unlike is not None:
                raise UnsupportedError(
                    "param groups that Megatron has as one differ",
                    expected="the same hyperparameters for all parameters that decay, and for all of one axis and "
                    "biases",
                    found=f"{unlike} {one.values.get(unlike)} and {values.get(unlike)}",
                )
            one.members += [name] if name else []
    made = sorted(found.values(), key=lambda one: (one.is_of_experts, not own and one.values[WEIGHT_DECAY] == 0.0))
    if not own:
        count = f"{len(groups)} param groups were" if len(groups) > 1 else "the param group was"
        notes.append(f"{count} made Megatron's {len(made)}: tensors of one axis and biases have no weight decay there, "
                     "and learning rates and weight decay are what its own arguments say")  # fmt: skip
    return made


def step_of(checkpoint: Checkpoint, trained: Sequence[Parameter]) -> float | None:
    """Return the step that the optimizer has for all parameters; None where it counts none.

    Raises UnsupportedError: parameters have different ones, or other single values.
    """
    found: dict[float, float] = {}
    for one in trained:
        for key, value in parameter_values(checkpoint, one).items():
            if isinstance(value, Slot) and (value.shape or key != STEP):
                continue
            number = single(value)
            if key != STEP or not isinstance(number, (int, float)):
                raise UnsupportedError(
                    f"Megatron has no place for {key} of {one.name}",
                    expected="tensors of its shape, and a step",
                )
            found[float(number)] = number
    if len(found) > 1:
        raise UnsupportedError("Megatron has one step for all parameters",
                               found=" and ".join(f"{step:g}" for step in sorted(found)[:2]))  # fmt: skip
    return next(iter(found.values()), None)
