"""A checkpoint's param groups as `common.pt` has them: Megatron-Core's own, told by their factors, without parameters.

Megatron-Core takes hyperparameters from the group with the same `wd_mult`, `lr_mult`, `is_expert_parallel` and
`is_decoupled_lr`. A source of another program has none of these: its groups are parted and joined by Megatron's default
rule (`optimizer`), where all that come to be in one have the same hyperparameters.

Experts are a second optimizer's where they are spread over ranks. That has one step for all parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zckpt.compare.logical import parameter_values, single
from zckpt.errors import UnsupportedError
from zckpt.formats.megatron.optimizer import (
    COMMON_STEP,
    EXPERTS,
    GROUPS,
    SCALER,
    SHARDING,
    STATES,
    STEP,
    WEIGHT_DECAY,
    by_rule_decays,
    is_expert,
)
from zckpt.formats.torch_files.writer import ValueTensor, value_node
from zckpt.state import Checkpoint, Parameter, Slot

FACTORS = {WEIGHT_DECAY: 1.0, "lr_mult": 1.0, EXPERTS: False, "is_decoupled_lr": False}
"""By what Megatron-Core tells groups, and what each is in a group that says nothing of it."""


@dataclass(slots=True)
class Group:
    """A group that is to be written: its hyperparameters, and the names of its parameters."""

    values: dict[str, object]
    members: list[str] = field(default_factory=list)


def groups_of(checkpoint: Checkpoint, *, chained: bool, notes: list[str]) -> list[Group]:
    """Return the groups that Megatron-Core has, those of experts last where they are an optimizer of their own.

    `chained`: whether experts are an optimizer of their own; `notes`: gets what was done. Raises UnsupportedError:
    groups that Megatron has as one differ.
    """
    found: dict[tuple[object, ...], Group] = {}
    own = all(_factor(group.hyperparameters, WEIGHT_DECAY) is not None for group in checkpoint.param_groups)
    for group in checkpoint.param_groups:
        for name in group.parameters or ([""] if own else []):  # a group of nothing is one, too
            values = dict(group.hyperparameters)
            factors = {key: _factor(values, key) for key in FACTORS}
            factors = {key: default if factors[key] is None else factors[key] for key, default in FACTORS.items()}
            if name:
                factors[EXPERTS] = chained and is_expert(name)
            if not own:
                factors[WEIGHT_DECAY] = 1.0 if by_rule_decays(checkpoint.parameters[name]) else 0.0
            for key, value in factors.items():
                values[f"pre_{key}" if f"pre_{key}" in values else key] = value
            one = found.setdefault(tuple(factors.values()), Group(values))
            _check_alike(one.values, values)
            one.members += [name] if name else []
    made = sorted(found.values(), key=lambda one: (is_of_experts(one), not own and not _decays(one)))
    if not own:
        count = (
            f"{len(checkpoint.param_groups)} param groups were"
            if len(checkpoint.param_groups) > 1
            else ("the param group was")
        )
        notes.append(f"{count} made Megatron's {len(made)}: tensors of one axis and biases have no weight decay there, "
                     "and learning rates and weight decay are what its own arguments say")  # fmt: skip
    return made


def _factor(values: Mapping[str, object], key: str) -> object:
    return values.get(key, values.get(f"pre_{key}"))


def is_of_experts(group: Group) -> bool:
    """Tell whether a group is of an optimizer that experts have for themselves."""
    return bool(_factor(group.values, EXPERTS))


def _decays(group: Group) -> bool:
    return group.values[WEIGHT_DECAY] != 0.0


def _check_alike(first: Mapping[str, object], other: Mapping[str, object]) -> None:
    unlike = next((key for key in {**first, **other} if first.get(key) != other.get(key)), None)
    if unlike is not None:
        raise UnsupportedError(
            "param groups that Megatron has as one differ",
            expected="the same hyperparameters for all parameters that decay, and for all of one axis and biases",
            found=f"{unlike} {first.get(unlike)} and {other.get(unlike)}",
        )


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


def optimizer_node(
    groups: Sequence[Group], step: float | None, *, sharding: str | None, scalers: Sequence[object]
) -> dict[object, Any]:
    """Return `common.pt`'s optimizer.

    Parameters
    ----------
    groups : sequence of Group
    step : number or None
        Of all parameters.
    sharding : str or None
        How the distributed optimizer cuts its state; None: the optimizer is none of these.
    scalers : sequence of object or None
        The loss scaler's state, and that of experts where it is another.
    """
    chain = [[one for one in groups if not is_of_experts(one)],
             [one for one in groups if is_of_experts(one)]]  # fmt: skip
    own = (scalers[0], scalers[1] if scalers[1] is not None else scalers[0])
    every = [_one(its, step, sharding, scaler) for its, scaler in zip(chain, own, strict=True) if its]
    return every[0] if len(every) == 1 else dict(enumerate(every))


def _one(groups: Sequence[Group], step: float | None, sharding: str | None, scaler: object) -> dict[object, Any]:
    in_group: dict[str, object] = {} if step is None or (sharding is None and type(step) is float) else {STEP: step}
    listed = [{**{key: value_node(value) for key, value in one.values.items()}, **in_group} for one in groups]
    inner: dict[object, Any] = {GROUPS: listed}
    if step is not None and not in_group:
        inner[STATES] = {COMMON_STEP: ValueTensor(struct.pack("<f", step), "float32", ())}
    outer: dict[object, Any] = {"optimizer": inner}
    if sharding is not None:
        outer[SHARDING] = sharding
    return {**outer, SCALER: scaler} if scaler is not None else outer
