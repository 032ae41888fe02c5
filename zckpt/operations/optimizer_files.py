"""The optimizer of a checkpoint as one file.

optimizer.safetensors   `<slot>/<parameter>` -> tensor; param groups, steps and other single values in the metadata
optimizer.pt            {state: {number: {slot: tensor}}, param_groups}, for `torch.optim.Optimizer.load_state_dict`
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from zckpt.errors import UnsupportedError
from zckpt.formats import safetensors_file, torch_archive
from zckpt.formats.jsonable import jsonable
from zckpt.formats.scalars import encode
from zckpt.plan import TargetFile
from zckpt.state import Checkpoint, Parameter, ParamGroup, Scalar
from zckpt.torchfile import Tensor


def optimizer_names(*, torch: bool) -> str:
    """Return the name of the optimizer's file."""
    return "optimizer.pt" if torch else "optimizer.safetensors"


def _owners(checkpoint: Checkpoint) -> dict[str, Parameter]:
    """Return every parameter that an optimizer owns, by the name or number its group has for it."""
    owned = {**checkpoint.unnamed, **checkpoint.parameters}
    return {name: owned[name] for group in checkpoint.param_groups for name in group.parameters if name in owned}


def optimizer_safetensors(checkpoint: Checkpoint, name: str, slots: Sequence[str]) -> TargetFile:
    """Return a safetensors file of some slots of all parameters."""
    entries = [
        safetensors_file.Entry(f"{slot}/{parameter}", one.slots[slot], one.slots[slot].dtype, f"{slot}/{parameter}")
        for slot in slots
        for parameter, one in _owners(checkpoint).items()
        if slot in one.slots
    ]
    groups = [
        {
            **{key: jsonable(value) for key, value in group.hyperparameters.items()},
            "state": {key: jsonable(value) for key, value in group.state.items()},
            "parameters": group.parameters,
        }
        for group in checkpoint.param_groups
    ]
    state = {
        parameter: {key: jsonable(value) for key, value in one.state.items()}
        for parameter, one in _owners(checkpoint).items()
        if one.state
    }
    metadata = {
        "param_groups": json.dumps(groups),
        "state": json.dumps(state),
        "step": json.dumps(checkpoint.step),
    }
    return safetensors_file.lay_out(name, entries, metadata)


def optimizer_torch(checkpoint: Checkpoint, name: str, slots: Sequence[str]) -> TargetFile:
    """Return a torch file of an optimizer's state dict with some slots of all parameters."""
    state: dict[object, object] = {}
    groups: list[object] = []
    number = 0
    owners = _owners(checkpoint)
    for group in checkpoint.param_groups:
        first = number
        for parameter in group.parameters:
            found = _state(group, owners.get(parameter), parameter, slots)
            if found:
                state[number] = found
            number += 1
        named = {"param_names": list(group.parameters)} if not set(group.parameters) & set(checkpoint.unnamed) else {}
        numbers = list(range(first, number))
        groups.append({**{k: _value(v, k) for k, v in group.hyperparameters.items()}, **named, "params": numbers})
    return torch_archive.lay_out(name, {"state": state, "param_groups": groups})


def _state(group: ParamGroup, parameter: Parameter | None, name: str, slots: Sequence[str]) -> dict[object, object]:
    """Return one parameter's state: single values of its group, its own, and its tensors."""
    if parameter is None:
        return {}
    found: dict[object, object] = {}
    own = {**group.state, **parameter.state} if parameter.slots or parameter.state else {}
    for key, value in own.items():
        if key not in parameter.slots:
            found[key] = _value(value, key)
    for slot in slots:
        if slot in parameter.slots:
            one = parameter.slots[slot]
            found[slot] = torch_archive.SlotTensor(one, one.dtype, f"{slot}/{name}")
    return found


def _value(value: object, key: str) -> object:
    """Return a single value as a torch file has it: a 0-d tensor stays one."""
    if isinstance(value, Tensor):
        raise UnsupportedError(f"{key} is a tensor for a whole param group, which no single parameter's state can hold")
    if not isinstance(value, Scalar):
        return value
    return torch_archive.ValueTensor(encode(value), value.dtype, ())
