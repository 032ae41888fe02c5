"""Param groups of a universal checkpoint: hyperparameters from the optimizer's file, names from the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.errors import DamagedFileError, LayoutError
from zckpt.formats.deepspeed.groups import optimizer_order
from zckpt.formats.deepspeed.shards import Shapes
from zckpt.formats.torch_files.tensors import with_scalars
from zckpt.formats.universal.model_files import ModelFiles
from zckpt.state import MASTER, WEIGHT, Checkpoint, ParamGroup
from zckpt.torchfile import Tensor, alike


def read_groups(
    content: Mapping[object, object], models: ModelFiles, recorded: object, path: str
) -> tuple[list[ParamGroup], Shapes]:
    """Return the groups with their names in the optimizer's order, and the shapes of all trained parameters.

    Parameters
    ----------
    content : mapping
        Of the optimizer's file.
    models : ModelFiles
    recorded : object
        Names by group as zckpt keeps them; None in DeepSpeed's files.
    path : str
        The optimizer's file.

    Raises
    ------
    DamagedFileError, LayoutError
        The files do not say, or disagree.
    """
    groups = [with_scalars(group, path) for group in _hyperparameters(content, path)]
    shapes = models.group_shapes()
    if len(shapes) != len(groups):
        shapes = _by_sub_group(groups, shapes, path)
    merged: Shapes = {}
    for group in shapes:
        merged.update(group)
    if len(merged) != sum(map(len, shapes)):
        raise LayoutError("a parameter is in two param groups", path=models.first.shard.path)
    world = models.first.content.get("dp_world_size")
    ranks = world if type(world) is int and world > 0 else 1
    names = [optimizer_order(list(group), models.first, ranks) for group in shapes]
    if recorded is not None:
        names = _recorded(recorded, names, path)
    states = [{} for _ in groups] if recorded is not None else _states(content, groups, path)
    found = [
        ParamGroup({key: value for key, value in group.items() if key != "params"}, its, state)
        for group, its, state in zip(groups, names, states, strict=True)
    ]
    return found, merged


def _states(
    content: Mapping[object, object], groups: Sequence[Mapping[str, object]], path: str
) -> list[dict[str, object]]:
    """Return the single values of each group: in DeepSpeed's ZeRO-3 files the step is nowhere but here."""
    nested = content.get("optimizer_state_dict")
    stored = nested.get("state") if isinstance(nested, dict) else None
    found: list[dict[str, object]] = []
    for group in groups:
        values: dict[str, object] = {}
        for number in _members(group):
            state = stored.get(number) if isinstance(stored, dict) else None
            if isinstance(state, dict):
                single = {key: v for key, v in state.items() if not isinstance(v, Tensor) or v.shape == ()}
                values = {**with_scalars(single, path), **values}
        found.append(values)
    return found


def _members(group: Mapping[str, object]) -> list[int]:
    """Return the numbers of the flat buffers of a group."""
    members = group.get("params")
    return [n for n in members if type(n) is int] if isinstance(members, list) else []


def give_state(checkpoint: Checkpoint, values: Mapping[str, Mapping[str, object]]) -> None:
    """Give groups the single values that all their parameters share, and parameters those that they do not.

    A parameter without any state has none of its group's values either, as long as others have slots to show it.
    """
    for group in checkpoint.param_groups:
        members = [checkpoint.parameters[name] for name in group.parameters]
        slotted = [p for p in members if p.slots.keys() - {WEIGHT, MASTER}]
        present = [p for p in members if values.get(p.name) or p.slots.keys() - {WEIGHT, MASTER}]
        common: dict[str, object] = {}
        if present and (slotted or len(present) == len(members)):
            first, *others = (values.get(p.name, {}) for p in present)
            common = {k: v for k, v in first.items() if all(k in one and alike(one[k], v) for one in others)}
        group.state |= common
        for parameter in present:
            own = values.get(parameter.name, {})
            parameter.state |= {key: value for key, value in own.items() if key not in common}


def _hyperparameters(content: Mapping[object, object], path: str) -> list[Mapping[object, object]]:
    groups = content.get("param_groups")
    nested = content.get("optimizer_state_dict")
    if groups is None and isinstance(nested, dict):
        groups = nested.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DamagedFileError("unreadable param_groups", path=path, expected="a list of dicts",
                               found=type(groups).__name__)  # fmt: skip
    return groups


def _by_sub_group(groups: Sequence[Mapping[str, object]], shapes: Sequence[Shapes], path: str) -> list[Shapes]:
    """Put ZeRO-3's sub-groups together: a group's `params` are their numbers."""
    parts = [_members(group) for group in groups]
    numbers = [number for members in parts for number in members]
    if sorted(numbers) != list(range(len(shapes))):
        raise LayoutError(
            "param_shapes and the optimizer have different numbers of groups",
            path=path,
            expected=len(groups),
            found=len(shapes),
        )
    found: list[Shapes] = []
    for members in parts:
        merged: Shapes = {}
        for number in members:
            merged.update(shapes[number])
        found.append(merged)
    return found


def _recorded(recorded: object, names: Sequence[Sequence[str]], path: str) -> list[list[str]]:
    """Return the names as recorded, if they are those of the model's file in another order."""
    groups = recorded if isinstance(recorded, list) else []
    if len(groups) != len(names) or any(
        not isinstance(group, list) or not all(isinstance(n, str) for n in group) or sorted(group) != sorted(its)
        for group, its in zip(groups, names, strict=True)
    ):
        raise DamagedFileError("groups and param_shapes disagree", path=path, expected="the same names in each")
    return groups
