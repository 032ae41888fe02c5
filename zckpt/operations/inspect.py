"""What is in a checkpoint, as one JSON-able document. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zckpt.formats.account import take_inventory
from zckpt.formats.jsonable import jsonable, jsonables
from zckpt.state import Checkpoint, Padding, Parameter, ParamGroup, Slot
from zckpt.state.rank_values import RankValue
from zckpt.torchfile import FromFile, plain


def inspect(
    checkpoint: Checkpoint, *, include_globals: bool = False, include_inventory: bool = False
) -> dict[str, object]:
    """Describe a checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
    include_globals : bool
        Also list, for each pickle in each file, the globals that it mentions.
    include_inventory : bool
        Also list everything that the files hold, and what became of it; what is left out is listed in any case.

    Returns
    -------
    dict
        JSON-able. `num_parameters` and `num_elements` count each parameter once, tied names and buffers aside.
    """
    inventory = take_inventory(checkpoint)
    owners = [p for p in checkpoint.parameters.values() if p.tied_to is None]
    document: dict[str, object] = {
        "source": checkpoint.source,
        "format": checkpoint.format,
        "format_version": checkpoint.format_version,
        "zero_stage": checkpoint.zero_stage,
        "topology": {
            "dp": checkpoint.topology.dp,
            "tp": checkpoint.topology.tp,
            "pp": checkpoint.topology.pp,
            "ep": checkpoint.topology.ep,
        },
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "loss_scale": jsonable(checkpoint.loss_scale),
        "num_parameters": len(owners),
        "num_elements": sum(p.numel for p in owners),
        "num_frozen": sum(p.frozen for p in owners),
        "num_tied": len(checkpoint.parameters) - len(owners),
        "num_buffers": len(checkpoint.buffers),
        "slots": _slots(checkpoint),
        "param_groups": _groups(checkpoint.param_groups),
        "per_rank": [_rank_value(value) for value in checkpoint.per_rank],
        "parameters": [_parameter(p) for p in checkpoint.parameters.values()],
        "buffers": [_parameter(p) for p in checkpoint.buffers.values()],
        "unnamed": [_parameter(p) for p in checkpoint.unnamed.values()],
        "padding": _padding(checkpoint.padding),
        "files": [_file(checkpoint, index, include_globals) for index in range(len(checkpoint.files))],
        "nbytes": sum(file.nbytes for file in checkpoint.files),
        "unreferenced_nbytes": sum(file.unreferenced_nbytes for file in checkpoint.files),
        "details": jsonable(checkpoint.details),
        "metadata": sorted(checkpoint.metadata),
        "left_out": [item.as_dict() for item in inventory.left_out],
        "warnings": list(checkpoint.warnings),
    }
    if include_inventory:
        document["inventory"] = inventory.as_dict()
    return document


def _slots(checkpoint: Checkpoint) -> dict[str, object]:
    found: dict[str, list[Slot]] = {name: [] for name in checkpoint.slot_names()}
    for parameter in [*checkpoint.parameters.values(), *checkpoint.unnamed.values()]:
        for name, slot in parameter.slots.items():
            found[name].append(slot)
    return {
        name: {
            "dtypes": sorted({slot.dtype for slot in slots}),
            "num_parameters": len(slots),
            "num_elements": sum(slot.numel for slot in slots),
            "nbytes": sum(slot.nbytes for slot in slots),
        }
        for name, slots in found.items()
        if slots
    }


def _groups(groups: Sequence[ParamGroup]) -> list[dict[str, object]]:
    values = zip(jsonables([g.hyperparameters for g in groups]), jsonables([g.state for g in groups]), strict=True)
    return [
        {
            **hyperparameters,
            **({} if group.optimizer is None else {"optimizer": group.optimizer}),
            "state": state,
            "parameters": list(group.parameters),
        }
        for group, (hyperparameters, state) in zip(groups, values, strict=True)
    ]


def _rank_value(value: RankValue) -> dict[str, object]:
    found = {"key": value.key, "group": value.group, "part": value.part, "rank": value.rank, "mp_rank": value.mp_rank}
    node = value.value
    return {**found, "value": plain(node.node) if isinstance(node, FromFile) else jsonable(node)}


def _parameter(parameter: Parameter) -> dict[str, object]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "dtype": parameter.dtype,
        "slots": list(parameter.slots),
        "group": parameter.group,
        "frozen": parameter.frozen,
        "tied_to": parameter.tied_to,
    }


def _padding(paddings: Iterable[Padding]) -> dict[str, object]:
    ranks: dict[int, list[Padding]] = {}
    for one in paddings:
        ranks.setdefault(one.rank, []).append(one)
    every = [p for found in ranks.values() for p in found]
    return {
        "num_elements": sum(p.numel for p in every),
        "nbytes": sum(p.nbytes for p in every),
        "ranks": [
            {
                "rank": rank,
                "num_elements": sum(p.numel for p in found),
                "nbytes": sum(p.nbytes for p in found),
                "groups": [p.numel for p in sorted(found, key=lambda p: p.group)],
            }
            for rank, found in sorted(ranks.items())
        ],
    }


def _file(checkpoint: Checkpoint, index: int, include_globals: bool) -> dict[str, object]:
    file = checkpoint.files[index]
    found: dict[str, object] = {
        "path": file.path,
        "nbytes": file.nbytes,
        "role": file.role,
        "dp_rank": file.dp_rank,
        "mp_rank": file.mp_rank,
        "tensor_nbytes": file.tensor_nbytes,
        "unreferenced_nbytes": file.unreferenced_nbytes,
    }
    if include_globals:
        found["globals"] = {record: list(names) for record, names in file.globals.items()}
    return found
