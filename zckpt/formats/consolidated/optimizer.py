"""The optimizer of a checkpoint as one file; read where it lies in a directory with the model's.

x.optimizer.safetensors     `<slot>/<parameter>` -> tensor; param groups, steps and other single values in the metadata
x.optimizer.pt              {state: {number: {slot: tensor}}, param_groups}, for `Optimizer.load_state_dict`

That is next to a model `x.safetensors` or `x.pt`. In a model's directory it is `optimizer.safetensors`, as it once was
next to a file, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.compare.logical import parameter_values
from zckpt.engine.targets import TargetFile
from zckpt.errors import DamagedFileError, UnsupportedError, about, listed
from zckpt.evidence import keep_number, refuse_ungrouped
from zckpt.formats.remainder import MAXIMUM_VALUES, jsonables
from zckpt.formats.safetensors import file as safetensors_file
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.optimizer import BESIDE, OPTIMIZERS
from zckpt.formats.torch_files.optimizer import OPTIMIZER as OF
from zckpt.formats.torch_files.tensors import description, refuse_trees
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, ParamGroup, Slot, are_texts, dict_of, stated, without
from zckpt.state.inventory import STATE, Rule
from zckpt.state.names import is_number
from zckpt.torchfile import Renderer, node_of, put_back

GROUPS = "param_groups"
"""Under which the header's metadata have the param groups, as JSON."""

_RULES = (
    *safetensors_file.RULES,
    *(
        Rule((safetensors_file.METADATA_KEY, key), STATE, "param groups and single values")
        for key in (GROUPS, "state", "step")
    ),
)


def _owners(checkpoint: Checkpoint) -> dict[str, Parameter]:
    """Return every parameter that an optimizer owns, by the name or number its group has for it.

    Raises UnsupportedError: it is unknown which group has one that has state.
    """
    refuse_ungrouped(checkpoint)
    owned = {**checkpoint.unnamed, **checkpoint.parameters}
    return {name: owned[name] for name in checkpoint.grouped if name in owned}


def optimizer_safetensors(checkpoint: Checkpoint, name: str, slots: Sequence[str]) -> TargetFile:
    """Return a safetensors file of some slots of all parameters.

    Raises UnsupportedError: state that is more than plain tensors, numbers and texts.
    """
    refuse_trees(
        checkpoint, "safetensors files", "--dequantize writes floats; or give the target a name that ends in .pt"
    )
    owners = _owners(checkpoint)
    entries = [
        safetensors_layout.Entry(f"{slot}/{parameter}", one.slots[slot], one.slots[slot].dtype)
        for slot in slots
        for parameter, one in owners.items()
        if slot in one.slots
    ]
    renderer = Renderer(MAXIMUM_VALUES)
    hyperparameters = jsonables((group.hyperparameters for group in checkpoint.param_groups), renderer)
    states = jsonables((group.state for group in checkpoint.param_groups), renderer)
    groups = [
        {
            **values,
            "state": state,
            "parameters": group.parameters,
            **stated({OF: group.optimizer}),
        }
        for group, values, state in zip(checkpoint.param_groups, hyperparameters, states, strict=True)
    ]
    own = {parameter: one.state for parameter, one in owners.items() if one.state}
    state = dict(zip(own, jsonables(own.values(), renderer), strict=True))
    if renderer.left < 0:
        raise UnsupportedError(
            "there are too many values for a safetensors file, in addition to its tensors",
            path=checkpoint.source,
            expected=f"at most {MAXIMUM_VALUES}",
            advice="give the target a name that ends in .pt",
        )
    metadata = {
        GROUPS: json.dumps(groups),
        "state": json.dumps(state),
        "step": json.dumps(checkpoint.step),
    }
    return safetensors_layout.lay_out(name, entries, metadata)


def attach_optimizer(checkpoint: Checkpoint, path: Path) -> None:
    """Give a model that was read from a directory the optimizer in the `optimizer.safetensors` there.

    A file of that name which does not say what its param groups are is none of ours, and is not read. Raises
    DamagedFileError: it is malformed, or belongs to another model.
    """
    tensors, texts, nbytes = safetensors_file.read_header(path)
    if GROUPS not in texts:
        return
    with about(path):
        groups, state = _parsed(texts, GROUPS, list), _parsed(texts, "state", dict)
        owners: dict[str, Parameter] = {}
        for index, group in enumerate(groups):
            names = dict_of(group).get("parameters")
            if not isinstance(names, list) or not are_texts(names):
                raise DamagedFileError("unreadable param group", expected="a list of names in `parameters`")
            if not isinstance(group.get("state", {}), dict):
                raise DamagedFileError("unreadable param group", expected="values by name in `state`")
            if group.get(OF) is not None and not isinstance(group[OF], str):
                raise DamagedFileError("unreadable param group", expected=f"a name in `{OF}`")
            for name in names:
                owner = owners[name] = checkpoint.parameters.get(name) or keep_number(checkpoint, name, None)
                owner.group = index
                owner.state |= dict_of(state.get(name))
        for key, slot in tensors.items():
            kind, _, name = key.partition("/")
            parameter = owners.get(name)
            if parameter is None or kind in ("", WEIGHT):
                raise DamagedFileError(f"{key} is no slot of an optimizer", expected="SLOT/NAME of its param groups")
            if name in checkpoint.unnamed:
                parameter.shape = max(parameter.shape, slot.shape, key=lambda shape: (len(shape), shape))
            elif kind == MASTER and slot.shape != parameter.shape:
                raise DamagedFileError(f"{key} has another shape", expected=parameter.shape, found=slot.shape)
            parameter.slots[kind] = replace(slot, name=kind)
        checkpoint.unnamed = {name: one for name, one in checkpoint.unnamed.items() if one.slots or one.state}
        checkpoint.param_groups = [
            ParamGroup(without(group, "parameters", "state", OF), list(group["parameters"]),
                       dict(group.get("state", {})), group.get(OF))
            for group in groups
        ]  # fmt: skip
        step = _parsed(texts, "step", object)
        checkpoint.step = step if type(step) is int else checkpoint.step
    checkpoint.files.append(safetensors_file.source_file(path, tensors, texts, nbytes, _RULES, "optimizer"))


def _parsed(texts: Mapping[str, str], key: str, kind: type) -> Any:  # noqa: ANN401  # it is JSON
    """Return what a text of the header says, as JSON."""
    try:
        found = json.loads(texts.get(key, "null"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"unreadable {key}", expected="JSON", found=str(error)) from error
    if not isinstance(found, kind):
        raise DamagedFileError(f"unreadable {key}", expected=kind.__name__, found=type(found).__name__)
    return found


def optimizer_torch(checkpoint: Checkpoint, name: str, slots: Sequence[str]) -> TargetFile:
    """Return a torch file of an optimizer's state dict with some slots of all parameters."""
    tree = optimizer_tree(checkpoint, slots)
    for node, group in zip(tree["param_groups"], checkpoint.param_groups, strict=True):
        node.update(stated({OF: group.optimizer}))
    return torch_writer.lay_out(name, tree)


def optimizer_tree(checkpoint: Checkpoint, slots: Sequence[str], *, in_pieces: bool = False) -> dict[object, Any]:
    """Return an optimizer's state dict with some slots of all parameters, as a tree for `torch_files.writer`.

    `in_pieces`: whether it may have pieces of torchao's slots as `zckpt.save` writes them, which no optimizer takes as
    such. Raises UnsupportedError: state that no single parameter can hold, or only in pieces.
    """
    owners = _owners(checkpoint)
    states = ((key, one, value) for one in owners.values() for key, value in one.state.items())
    pieces = [f"{key} of {one.name}" for key, one, value in states if description(value) is not None]
    if pieces and not in_pieces:
        raise UnsupportedError(
            "holds torchao's codes in pieces per rank, which torchao cannot load from such a file",
            path=checkpoint.source,
            found=listed(pieces),
            advice="--dequantize writes floats; or use zckpt.load and save the state dict with torch.save",
        )
    state: dict[object, object] = {}
    groups: list[object] = []
    first = 0
    for group in checkpoint.param_groups:
        for number, name in enumerate(group.parameters, first):
            owner = owners.get(name)
            if owner is None:
                continue
            values = parameter_values(checkpoint, owner)
            if MASTER in slots and owner.master:
                values[MASTER] = owner.master
            found: dict[object, object] = {}  # single values, and the tensors of the slots asked for
            for key, value in values.items():
                if not isinstance(value, Slot):
                    found[key] = torch_writer.value_node(value)
                elif key in slots:
                    found[key] = torch_writer.SlotTensor(value, value.dtype, f"{key}/{owner.name}")
            if found:
                state[number] = found
        numbered = any(n not in checkpoint.parameters and is_number(n.rpartition(".")[2]) for n in group.parameters)
        named = {} if numbered else {"param_names": list(group.parameters)}
        hyperparameters = {key: torch_writer.value_node(value) for key, value in group.hyperparameters.items()}
        groups.append({**hyperparameters, **named, "params": list(range(first, first + len(group.parameters)))})
        first += len(group.parameters)
    rest = {} if in_pieces else rest_at_top(checkpoint)
    return {"state": state | rest.get("state", {}), "param_groups": groups, **without(rest, "state")}


def rest_at_top(checkpoint: Checkpoint) -> dict[Any, Any]:
    """Return what the state dict of an optimizer has where state and param groups are, with what else `state` has.

    Of several optimizers only that of the one which has all groups. Empty: it has nothing else, or also elsewhere.
    """
    several, names = checkpoint.optimizer_metadata.get(OPTIMIZERS), {one.optimizer for one in checkpoint.param_groups}
    its = dict_of(dict_of(node_of(several)).get(names.pop() if len(names) == 1 else None))
    kept = checkpoint.optimizer_metadata.get(BESIDE, put_back(several, its.get(BESIDE)))
    found = dict_of(node_of(kept))
    groups = found.get("groups")
    is_elsewhere = found.get("at") != [] or found.get("parameters") or (isinstance(groups, list) and any(groups))
    if is_elsewhere:
        return {}

    def each(values: object) -> dict[Any, Any]:
        return {key: torch_writer.value_node(put_back(kept, one)) for key, one in dict_of(values).items()}

    rest = dict_of(found.get("rest"))
    return {**each(without(rest, "state")), "state": each(rest.get("state"))}
