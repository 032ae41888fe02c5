"""The model files of a universal checkpoint, whoever wrote them: names, kinds, and the weights that they hold whole.

zckpt            mp_rank_00 with whole weights (and one for ZeRO-3, which says nothing more)
DeepSpeed        those of the source as they were: one for each model-parallel rank; of ZeRO-3 one for each rank,
                 in which parameters are empty, and frozen ones cut

Param groups have their hyperparameters from the optimizer's file, and their names from these.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError
from zckpt.formats.deepspeed.auto_ep import KEY
from zckpt.formats.deepspeed.auto_ep_shards import router_names
from zckpt.formats.deepspeed.directory import MODEL, Shard, classify
from zckpt.formats.deepspeed.groups import optimizer_order, tied_names
from zckpt.formats.deepspeed.per_parameter import frozen_weight
from zckpt.formats.deepspeed.ranks import missing_ranks, ranks_text
from zckpt.formats.deepspeed.shards import ModelShard, Shapes, read_model
from zckpt.formats.torch_files.tensors import slot_of, span_of, with_scalars
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, ParamGroup, Slot
from zckpt.torchfile import Tensor, alike


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model files.

    Parameters
    ----------
    ranks : list of list of ModelShard
        By model-parallel rank those of all data-parallel ranks; of ZeRO-1 and 2 one each.
    parameterwise : bool
        Whether they are of ZeRO-3: without whole weights.
    unused : list of ModelShard
        Those of ZeRO-3 that say nothing more, where there are also files with whole weights.
    """

    ranks: list[list[ModelShard]]
    parameterwise: bool
    unused: list[ModelShard]

    @property
    def firsts(self) -> list[ModelShard]:
        """The first file of each model-parallel rank."""
        return [models[0] for models in self.ranks]

    @property
    def first(self) -> ModelShard:
        """The file that stands for all in what they have in common."""
        return self.ranks[0][0]

    def names(self) -> list[str]:
        """Return all names of the module, in its order."""
        return list(dict.fromkeys(name for model in self.firsts for name in model.module))

    def is_buffer(self, name: str) -> bool:
        """Tell whether a name is a buffer's."""
        return any(name in model.buffer_names for model in self.firsts)

    def tensor(self, name: str) -> tuple[ModelShard, Tensor] | None:
        """Return the file and tensor of a name, where no other model-parallel rank has one; else None."""
        holders = [model for model in self.firsts if name in model.module]
        return (holders[0], holders[0].module[name]) if len(holders) == 1 else None

    def buffer(self, name: str) -> Parameter:
        """Return a buffer; every rank has the same."""
        model = next(model for model in self.firsts if name in model.module)
        tensor = model.module[name]
        return Parameter(name, tensor.shape, tensor.dtype, {WEIGHT: slot_of(WEIGHT, tensor, model.path)})

    def dtype(self, name: str) -> str:
        """Return the element type of a parameter's weight."""
        found = next((model.module[name].dtype for model in self.firsts if name in model.module), None)
        return self.first.dtype if found is None else found

    def weight(self, name: str, shape: tuple[int, ...], *, padded: bool) -> Slot | None:
        """Return the weight of a trained parameter, where a file has it whole.

        Parameters
        ----------
        shape : tuple of int
            Of the parameter.
        padded : bool
            Whether the model may have more rows than the parameter: those that pad a vocabulary.

        Raises
        ------
        LayoutError
            The weight has another shape.
        """
        held = None if self.parameterwise else self.tensor(name)
        if held is None:
            return None
        model, tensor = held
        path = model.path
        if tensor.shape == shape:
            return slot_of(WEIGHT, tensor, path)
        if len(self.ranks) > 1:
            return None
        if padded and tensor.shape[1:] == shape[1:] and shape[0] <= tensor.shape[0]:
            span = span_of(tensor, path, Extent.whole(shape))
            return Slot(WEIGHT, tensor.dtype, shape, (span,))
        raise LayoutError(f"{name} has two shapes", path=path, expected=shape, found=tensor.shape)

    def frozen(self, name: str) -> Slot | None:
        """Return the weight of a parameter that is not trained; None if no file has it whole."""
        held = self.tensor(name)
        if held is None:
            return None
        model, tensor = held
        if not self.parameterwise:
            return slot_of(WEIGHT, tensor, model.path)
        shape = (model.frozen_shapes or {}).get(name)
        if shape is None:
            return None
        if 0 in shape:
            return Slot(WEIGHT, tensor.dtype, shape, ())
        return frozen_weight(name, shape, next(models for models in self.ranks if models[0] is model))

    def aliases(self, trained: Collection[str]) -> dict[str, str]:
        """Return alias to owner."""
        listed: dict[str, str] = {}
        for model in (model for models in self.ranks for model in models):
            listed |= model.shared or {}
        found: dict[str, str] = {}
        for models in self.ranks:
            known = tied_names(models, trained, listed, parameterwise=self.parameterwise)
            if models[0].content.get(KEY):
                known = {**router_names(models[0], parameterwise=self.parameterwise), **known}
            found |= {alias: owner for alias, owner in known.items() if alias in models[0].module}
        return found

    def group_shapes(self) -> list[Shapes]:
        """Return shapes by name for each param group (of ZeRO-3: sub-group), in the order of the flat buffers.

        With several model-parallel ranks they are those of slices.

        Raises
        ------
        LayoutError
            The files do not say.
        """
        groups: list[Shapes] = []
        for model in self.firsts:
            if model.param_shapes is None:
                raise LayoutError("no param_shapes", path=model.path,
                                  advice="without it nothing says which parameters a group has")  # fmt: skip
            groups += [{} for _ in range(len(model.param_shapes) - len(groups))]
            for group, shapes in zip(groups, model.param_shapes, strict=False):
                group.update(shapes)
        return groups


def read_models(directory: Path) -> ModelFiles:
    """Read the model files of a directory.

    Raises
    ------
    ShardError
        There is none, or one is missing.
    """
    try:
        found = [classify(entry.name, entry.path) for entry in os.scandir(directory) if entry.is_file()]
    except OSError as error:
        raise SourceError("cannot be read", path=directory, found=error.strerror) from error
    shards = sorted((s for s in found if s is not None and s.role == MODEL), key=lambda s: s.order)
    whole = [s for s in shards if s.dp_rank is None]
    if not shards:
        raise ShardError("no model file", path=directory, expected="mp_rank_00_model_states.pt", code=MISSING_FILE)
    by_rank: dict[int, list[Shard]] = {}
    for shard in whole or shards:
        by_rank.setdefault(shard.mp_rank or 0, []).append(shard)
    _check(directory, by_rank)
    ranks = [[read_model(shard) for shard in one] for one in by_rank.values()]
    if not whole:
        _check_complete(ranks)
    return ModelFiles(ranks, not whole, [read_model(s) for s in shards if s.dp_rank is not None] if whole else [])


def _check(directory: Path, by_rank: Mapping[int, list[Shard]]) -> None:
    absent = missing_ranks(len(by_rank), by_rank)
    if absent or len({len(one) for one in by_rank.values()}) > 1:
        raise ShardError("model files of some ranks are missing", path=directory,
                         found=f"model-parallel ranks {sorted(by_rank)[:16]}", code=MISSING_FILE)  # fmt: skip


def _check_complete(ranks: list[list[ModelShard]]) -> None:
    """Raise unless every data-parallel rank's file is there; only ranks with cut frozen parameters are needed."""
    for models in ranks:
        world = models[0].content.get("dp_world_size")
        numbers = [model.rank for model in models]
        missing = missing_ranks(world if type(world) is int else len(models), numbers)
        if missing and models[0].frozen_fragments:
            raise ShardError(f"model files are missing for {ranks_text(missing)}", path=models[0].path,
                             expected=f"{world} ranks", code=MISSING_FILE)  # fmt: skip


def read_groups(
    content: Mapping[object, object], models: ModelFiles, recorded: object, path: str
) -> tuple[list[ParamGroup], Shapes]:
    """Return the groups with their names in the optimizer's order, and the shapes of all trained parameters.

    Parameters
    ----------
    content : mapping
        Of the optimizer's file.
    recorded : object
        Names by group as zckpt keeps them; None in DeepSpeed's files.
    path : str
        The optimizer's file.

    Raises
    ------
    DamagedFileError, LayoutError
        The files do not say, or disagree.
    """
    groups = [with_scalars(group, path) for group in _hyperparameters(content)]
    shapes = models.group_shapes()
    if len(shapes) != len(groups):
        shapes = _by_sub_group(groups, shapes)
    merged: Shapes = {}
    for group in shapes:
        merged.update(group)
    if len(merged) != sum(map(len, shapes)):
        raise LayoutError("a parameter is in two param groups", path=models.first.path)
    world = models.first.content.get("dp_world_size")
    ranks = world if type(world) is int and world > 0 else 1
    names = [optimizer_order(list(group), models.first, ranks) for group in shapes]
    if recorded is not None:
        names = _recorded(recorded, names)
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


def _hyperparameters(content: Mapping[object, object]) -> list[Mapping[object, object]]:
    groups = content.get("param_groups")
    nested = content.get("optimizer_state_dict")
    if groups is None and isinstance(nested, dict):
        groups = nested.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DamagedFileError("unreadable param_groups", expected="a list of dicts",
                               found=type(groups).__name__)  # fmt: skip
    return groups


def _by_sub_group(groups: Sequence[Mapping[str, object]], shapes: Sequence[Shapes]) -> list[Shapes]:
    """Put ZeRO-3's sub-groups together: a group's `params` are their numbers."""
    numbered = [_members(group) for group in groups]
    numbers = [number for members in numbered for number in members]
    if sorted(numbers) != list(range(len(shapes))):
        raise LayoutError(
            "param_shapes and the optimizer have different numbers of groups",
            expected=len(groups),
            found=len(shapes),
        )
    found: list[Shapes] = []
    for members in numbered:
        merged: Shapes = {}
        for number in members:
            merged.update(shapes[number])
        found.append(merged)
    return found


def _recorded(recorded: object, names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names as recorded, if they are those of the model's file in another order."""
    groups = recorded if isinstance(recorded, list) else []
    if len(groups) != len(names) or any(
        not isinstance(group, list) or not all(isinstance(n, str) for n in group) or sorted(group) != sorted(its)
        for group, its in zip(groups, names, strict=True)
    ):
        raise DamagedFileError("groups and param_shapes disagree", expected="the same names in each")
    return groups
