"""The optimizer of a checkpoint as one file.

optimizer.safetensors   `<slot>/<parameter>` -> tensor; param groups, steps and other single values in the metadata
optimizer.pt            {state: {number: {slot: tensor}}, param_groups}, for `torch.optim.Optimizer.load_state_dict`
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from zckpt.errors import UnsupportedError
from zckpt.formats import safetensors_file, torch_archive
from zckpt.formats.jsonable import MAXIMUM_VALUES, jsonables
from zckpt.formats.optimizer_values import parameter_values
from zckpt.formats.scalars import encode
from zckpt.plan import TargetFile
from zckpt.state import MASTER, Checkpoint, Parameter, Scalar, Slot
from zckpt.torchfile.plain import Renderer


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
    renderer = Renderer(MAXIMUM_VALUES)
    hyperparameters = jsonables((group.hyperparameters for group in checkpoint.param_groups), renderer)
    states = jsonables((group.state for group in checkpoint.param_groups), renderer)
    groups = [
        {**values, "state": state, "parameters": group.parameters}
        for group, values, state in zip(checkpoint.param_groups, hyperparameters, states, strict=True)
    ]
    own = {parameter: one.state for parameter, one in _owners(checkpoint).items() if one.state}
    state = dict(zip(own, jsonables(own.values(), renderer), strict=True))
    if renderer.left < 0:
        raise UnsupportedError(
            "the values beside the tensors are too many for a safetensors file",
            path=checkpoint.source,
            expected=f"at most {MAXIMUM_VALUES}",
            advice="write a .pt file",
        )
    metadata = {
        "param_groups": json.dumps(groups),
        "state": json.dumps(state),
        "step": json.dumps(checkpoint.step),
    }
    return safetensors_file.lay_out(name, entries, metadata)


def optimizer_torch(checkpoint: Checkpoint, name: str, slots: Sequence[str]) -> TargetFile:
    """Return a torch file of an optimizer's state dict with some slots of all parameters."""
    return torch_archive.lay_out(name, optimizer_tree(checkpoint, slots))


def optimizer_tree(checkpoint: Checkpoint, slots: Sequence[str]) -> dict[object, object]:
    """Return an optimizer's state dict with some slots of all parameters, as a tree for `torch_archive`.

    Raises
    ------
    UnsupportedError
        State that no single parameter can hold.
    """
    state: dict[object, object] = {}
    groups: list[object] = []
    number = 0
    owners = _owners(checkpoint)
    for group in checkpoint.param_groups:
        first = number
        for parameter in group.parameters:
            found = _state(checkpoint, owners[parameter], slots) if parameter in owners else {}
            if found:
                state[number] = found
            number += 1
        named = {"param_names": list(group.parameters)} if not set(group.parameters) & set(checkpoint.unnamed) else {}
        hyperparameters = {key: value_node(value) for key, value in group.hyperparameters.items()}
        groups.append({**hyperparameters, **named, "params": list(range(first, number))})
    return {"state": state, "param_groups": groups}


def _state(checkpoint: Checkpoint, parameter: Parameter, slots: Sequence[str]) -> dict[object, object]:
    """Return one parameter's state: single values, and the tensors that are wanted."""
    values = parameter_values(checkpoint, parameter)
    if MASTER in slots and MASTER in parameter.slots:
        values[MASTER] = parameter.slots[MASTER]
    found: dict[object, object] = {}
    for key, value in values.items():
        if not isinstance(value, Slot):
            found[key] = value_node(value)
        elif key in slots:
            found[key] = torch_archive.SlotTensor(value, value.dtype, f"{key}/{parameter.name}")
    return found


def value_node(value: object) -> object:
    """Return a single value as a torch file has it: a 0-d tensor stays one."""
    return torch_archive.ValueTensor(encode(value), value.dtype, ()) if isinstance(value, Scalar) else value
