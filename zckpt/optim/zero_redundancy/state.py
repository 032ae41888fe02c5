"""State dicts of a sharded optimizer: a rank's own part, the whole, and what one that is loaded must be.

{"state": {number: {key: value}}, "param_groups": [{..., "params": [number]}]}     as torch.optim has it
{..., "partition": {"rank": r, "world_size": n}}                                   one rank's own part
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PARTITION = "partition"
"""Key that only a rank's own part has."""

SHOWN = 4

Group = dict[str, Any]


def packed_groups(groups: Sequence[Group]) -> list[Group]:
    """Return param groups with numbers for parameters; tensors among the hyperparameters are copied."""
    packed = []
    first = 0
    for group in groups:
        made = {key: _own(value) for key, value in group.items() if key != "params"}
        packed.append({**made, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return packed


def _own(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def check(state_dict: Mapping[str, Any], groups: Sequence[Group], rank: int, world_size: int) -> list[list[int]]:
    """Return for each group the number that the dict has for each of its parameters.

    Where both have names, parameters are matched by them.

    Raises
    ------
    ValueError
        The dict is another optimizer's, or another rank's part; the message names what differs.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(
        state_dict.get("param_groups"), (list, tuple)
    ):
        raise ValueError("not the state dict of an optimizer: it has no 'state' and 'param_groups'")
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"the state dict has {len(saved)} param groups, the optimizer has {len(groups)}")
    numbers = [_numbers(index, its, mine) for index, (its, mine) in enumerate(zip(saved, groups, strict=True))]
    known = {number for one in numbers for number in one}
    strange = [number for number in state_dict["state"] if number not in known]
    if strange:
        raise ValueError(f"the state dict has state of parameters that are in none of its groups: {strange[:SHOWN]}")
    by_number = {
        number: parameter
        for one, group in zip(numbers, groups, strict=True)
        for number, parameter in zip(one, group["params"], strict=True)
    }
    for number, values in state_dict["state"].items():
        check_shapes(number, values, by_number[number])
    _check_partition(state_dict.get(PARTITION), rank, world_size)
    return numbers


def _numbers(index: int, saved: Mapping[str, Any], group: Group) -> list[int]:
    numbers = list(saved["params"])
    if len(numbers) != len(group["params"]):
        raise ValueError(
            f"param group {index} has {len(numbers)} parameters in the state dict and {len(group['params'])} here"
        )
    theirs, ours = saved.get("param_names"), group.get("param_names")
    if not theirs or not ours or list(theirs) == list(ours):
        return numbers
    if sorted(theirs) != sorted(ours):
        only = sorted(set(theirs) ^ set(ours))
        raise ValueError(f"param group {index} has other parameters in the state dict: {', '.join(only[:SHOWN])}")
    by_name = dict(zip(theirs, numbers, strict=True))
    return [by_name[name] for name in ours]


def check_shapes(number: int, values: object, parameter: torch.Tensor) -> None:
    """Refuse state that is per element and of another shape than the parameter."""
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of parameter {number} is {type(values).__name__}, not a dict")
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() > 0 and value.shape != parameter.shape:
            if value.numel() == 1 or set(value.shape) <= {1, *parameter.shape}:
                continue  # factored
            raise ValueError(
                f"{key} of parameter {number} has shape {tuple(value.shape)} in the state dict; "
                f"the parameter has {tuple(parameter.shape)}"
            )


def _check_partition(partition: object, rank: int, world_size: int) -> None:
    if partition is None:
        return
    mine = {"rank": rank, "world_size": world_size}
    if partition != mine:
        raise ValueError(
            f"the state dict is the part of {partition}, and this is {mine}: "
            f"consolidate it first, or save with sharded_state_dict()"
        )
