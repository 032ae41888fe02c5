"""The optimizer of a checkpoint as one file.

x.optimizer.safetensors     `<slot>/<parameter>` -> tensor; param groups, steps and other single values in the metadata
x.optimizer.pt              {state: {number: {slot: tensor}}, param_groups}, for `Optimizer.load_state_dict`

That is beside a model `x.safetensors` or `x.pt`. In a model's directory it is `optimizer.safetensors`, as it once was
beside a file, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zckpt.formats import safetensors_file, torch_archive
from zckpt.formats.jsonable import jsonable
from zckpt.formats.optimizer_values import parameter_values
from zckpt.formats.scalars import encode
from zckpt.plan import TargetFile
from zckpt.state import MASTER, Checkpoint, Parameter, Scalar, Slot

IN_DIRECTORY = "optimizer.safetensors"
"""The name of the optimizer's file in a model's directory."""


def beside_model(model: Path) -> Path:
    """Return where the optimizer's file of a model goes that is one file."""
    return model.with_name(f"{model.stem}.optimizer{model.suffix}")


def is_optimizers(name: str) -> bool:
    """Tell the name of a file of `<slot>/<parameter>` tensors in a directory that holds a model."""
    return name == IN_DIRECTORY or name.endswith(f".{IN_DIRECTORY}")


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
