"""From the files of a universal checkpoint to a Checkpoint. Structure and single values only; no tensor is read.

The model files of a universal checkpoint, whoever wrote them: names, kinds, and the weights that they hold whole.

zckpt            mp_rank_00 with whole weights (and one for ZeRO-3, which says nothing more)
DeepSpeed        those of the source as they were: one for each model-parallel rank; of ZeRO-3 one for each rank,
                 in which parameters are empty, and frozen ones cut

Param groups have their hyperparameters from the optimizer's file, and their names from these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zckpt.codes import MISSING_FILE, SLOT_MISSING
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, listed
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.deepspeed.auto_ep import KEY as LAYERS_KEY
from zckpt.formats.deepspeed.auto_ep import common, router_names, with_layers
from zckpt.formats.deepspeed.directory import MODEL, Shard, classify
from zckpt.formats.deepspeed.groups import complete_aliases, optimizer_order, tied_names
from zckpt.formats.deepspeed.per_parameter import FrozenPadding, frozen_weight
from zckpt.formats.deepspeed.ranks import missing_files, missing_ranks
from zckpt.formats.deepspeed.reader import keep_extra
from zckpt.formats.deepspeed.shards import MODEL_KEYS, ModelShard, Shapes, read_model, section
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.formats.deepspeed.values import MODEL_RULES, copies_of, keep_others, weight_in
from zckpt.formats.remainder import KEY, remainder_rules, restore
from zckpt.formats.torch_files.state_dicts import optimizer_rules
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe, slot_of, span_of, with_scalars
from zckpt.formats.universal.directory import FOLDER, MASTER_STEM, OPTIMIZER_NAME, STEP_STEM, SUFFIX
from zckpt.formats.universal.folders import StoredFolder, read_folder
from zckpt.formats.universal.writer import OWN_KEYS, STRUCTURE
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    Extent,
    Parameter,
    ParamGroup,
    Shape,
    Slot,
    Topology,
    as_float,
)
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.inventory import IMPLIED, STATE, Rule
from zckpt.torchfile import Digests, Object, Tensor, TorchFile, alike, plain, read_torchfile

CUT_KEYS = OWN_KEYS | {
    "group_paddings", "param_alignment_paddings", "partition_count", "fp32_flat_groups", "ds_zero_partition_groups",
}  # fmt: skip
"""Keys of DeepSpeed's optimizer file that say how the source was cut."""

OPTIMIZER_RULES = (
    *optimizer_rules(),
    *optimizer_rules("optimizer_state_dict")[1:],
    *remainder_rules(KEY),
    *(Rule((KEY, key, "**"), IMPLIED, "what is said of parameters and of the source")
      for key in ("groups", "filled_in", "made", "without_master")),
    Rule((KEY, "values", "*", "*"), STATE, "single values of a parameter"),
    *(Rule((*where, "**"), IMPLIED, "the first rank's share of what the folders hold", tensors=True)
      for where in (("fp32_flat_groups",), ("optimizer_state_dict", "state"))),
    *(Rule((key, "**"), IMPLIED, "how the state is cut") for key in sorted(CUT_KEYS - OWN_KEYS)),
    *(Rule((key, "**"), IMPLIED, "ranks and version of the run") for key in ("zero_stage", "ds_version")),
)  # fmt: skip
"""Of the values in `optimizer_state.pt`."""

OF_A_GROUP = frozenset({"lr", "initial_lr", "weight_decay", "name", "param_group_name"})
"""Hyperparameters in which groups of one form of state differ."""


def read(directory: Path) -> Checkpoint:
    """Read the structure of a universal checkpoint, of zckpt or of DeepSpeed.

    Parameters
    ----------
    directory : Path
        As `find` returns it.

    Raises
    ------
    SourceError
        A file is missing or damaged, or the files contradict each other.
    """
    path = directory / FOLDER / OPTIMIZER_NAME
    if not path.is_file():
        raise ShardError("no optimizer_state.pt", path=path, expected="the file with the param groups",
                         code=MISSING_FILE)  # fmt: skip
    file = read_torchfile(path)
    content = as_mapping(file.root, file.path)
    rest = as_mapping(content.get(KEY, {}), file.path)
    models = read_models(directory)
    checkpoint = Checkpoint(str(directory), "universal")
    checkpoint.files = [
        describe(m.file, "model", m.shard.dp_rank, m.shard.mp_rank, rules=MODEL_RULES)
        for one in [*models.ranks, models.unused]
        for m in one
    ]
    checkpoint.files.append(describe(file, "optimizer", rules=OPTIMIZER_RULES))
    checkpoint.padding_spans = [FrozenPadding(one) for one in models.ranks if models.parameterwise]
    checkpoint.param_groups, shapes = read_groups(content, models, rest.get("groups"), file.path)
    _place_untrained(checkpoint, models, shapes)
    stored = partial(read_folder, reader=AlikeReader(), known={})
    values = _place_trained(checkpoint, directory / FOLDER, stored, models, shapes, rest, file)
    names = dict.fromkeys([*models.names(), *checkpoint.parameters])
    checkpoint.parameters = {name: checkpoint.parameters[name] for name in names if name in checkpoint.parameters}
    complete_aliases(checkpoint.parameters)
    _note_duplicates(checkpoint, models)
    _note_folders(checkpoint, directory / FOLDER, stored)
    _note_ranks(checkpoint, models)
    give_state(checkpoint, values)
    _describe(checkpoint, models, content)
    _carry(checkpoint, models, file, content, rest)
    _warn(checkpoint, models, directory / FOLDER, written_by_zckpt=bool(rest))
    return checkpoint


def _place_untrained(checkpoint: Checkpoint, models: ModelFiles, trained: Shapes) -> None:
    """Place buffers, aliases and frozen parameters, whose values are in the model's files.

    What is an alias of a parameter that was left out (`exclude_frozen_parameters`) is none, and has its own values.
    """
    known = {*models.names(), *trained}
    aliases = {alias: owner for alias, owner in models.aliases(trained).items() if owner in known}
    lost = []
    for name in models.names():
        if models.is_buffer(name):
            checkpoint.buffers[name] = models.buffer(name)
        elif name in trained:
            continue
        elif name in aliases:
            checkpoint.parameters[name] = Parameter(name, (), models.dtype(name), tied_to=aliases[name])
        elif (slot := models.frozen(name)) is not None:
            checkpoint.parameters[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot}, frozen=True)
        else:
            lost.append(name)
    if lost:
        checkpoint.warnings.append(f"no file holds the whole values of {listed(lost)}; left out")


def _place_trained(
    checkpoint: Checkpoint,
    folder: Path,
    read: Callable[[Path], StoredFolder],
    models: ModelFiles,
    shapes: Shapes,
    rest: Mapping[object, object],
    file: TorchFile,
) -> dict[str, dict[str, object]]:
    """Place trained parameters with their slots; return the single values of each."""
    values: dict[str, dict[str, object]] = {}
    held: list[Held] = []
    sets: dict[frozenset[str], frozenset[str]] = {}  # of thousands of parameters a few
    filled, extra = as_mapping(rest.get("made", {}), file.path), as_mapping(rest.get("values", {}), file.path)
    without_master = set(as_names(rest.get("without_master", []), file.path))
    for index, group in enumerate(checkpoint.param_groups):
        for name in group.parameters:
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise DamagedFileError("a parameter's name leads elsewhere", path=file.path, found=repr(name[:80]))
            stored = read(folder / name)
            checkpoint.files += stored.files
            parameter = _trained(name, stored, models, shapes[name])
            parameter.group = index
            own = {str(k): carried(file, v) for k, v in as_mapping(extra.get(name, {}), file.path).items()}
            own = {**stored.values, **own}
            if numel := parameter.numel:
                each = {key for key, one in stored.tensors.items() if 1 < one.tensor.numel == numel}
                keys = frozenset([*stored.tensors, *own])
                needed = keys & {*each, STEP_STEM}
                held.append((index, name, sets.setdefault(keys, keys), sets.setdefault(needed, needed)))
            for key in [*as_names(filled.get(name, []), file.path), *((MASTER,) if name in without_master else ())]:
                parameter.slots.pop(key, None)
                own.pop(key, None)
                _mark_filled(stored, key)
            checkpoint.parameters[name], values[name] = parameter, own
    _check_complete(checkpoint, folder, held)
    return values


Held = tuple[int, str, frozenset[str], frozenset[str]]
"""Of a parameter: its group, its name, the keys of what it has, and those of what has a value for each element."""


def _check_complete(checkpoint: Checkpoint, folder: Path, held: Sequence[Held]) -> None:
    """Raise if a parameter has some of the files of another: of one in its group, or in a group of the same form.

    DeepSpeed's loaders need the same ones for all of a group; zckpt gives them what is no value for each element apart.
    """
    digests = Digests()
    forms = [
        digests.of({key: value for key, value in group.hyperparameters.items() if key not in OF_A_GROUP})
        for group in checkpoint.param_groups
    ]
    states = {(number, own): (name, needed) for number, name, own, needed in held}
    for number, name, own, _ in held:
        for (its, others), (other, needed) in states.items():
            is_alike = its == number or (forms[its] == forms[number] and own > {MASTER})
            if is_alike and own < others and (lost := sorted(needed - own)):
                raise LayoutError(
                    f"no {lost[0]} of this parameter",
                    path=folder / name / f"{lost[0]}{SUFFIX}",
                    expected=f"a file, as {other} has one",
                    code=SLOT_MISSING,
                    parameters=[name],
                )


def _mark_filled(stored: StoredFolder, key: str) -> None:
    """Say of a file that DeepSpeed's loaders need and the source did not have that it means nothing."""
    name = f"{MASTER_STEM if key == MASTER else key}{SUFFIX}"
    rules = tuple(Rule(where, IMPLIED, "filled in for DeepSpeed's loaders", tensors=True) for where in ((), ("param",)))
    for file in stored.files:
        if Path(file.path).name == name:
            file.rules = (*rules, *file.rules)


def _trained(name: str, stored: StoredFolder, models: ModelFiles, shape: Shape) -> Parameter:
    """Return a trained parameter. Its shape is that of the model's file, unless that has a slice, or padding.

    Of AutoEP's experts that has a rank's.
    """
    master = stored.tensors[MASTER]
    if master.experts is not None:
        whole = master.tensor.shape
        if len(shape) != 3 or shape[1:] != whole[1:] or shape[0] < 1 or master.experts % shape[0]:
            raise LayoutError(
                f"{name} is not of the experts that the model file lists", path=master.path,
                expected=f"{shape} on each rank", found=whole,
            )  # fmt: skip
        shape = whole
    elif not master.flat and (len(models.ranks) > 1 or master.padding_stripped):
        shape = master.tensor.shape
    slots = {}
    weight = models.weight(name, shape, padded=master.padding_stripped)
    if weight is not None:
        slots[WEIGHT] = weight
    for key in (MASTER, *(key for key in stored.tensors if key != MASTER)):
        slots[key] = stored.tensors[key].slot(key, shape)
    return Parameter(name, shape, models.dtype(name), slots)


def _note_duplicates(checkpoint: Checkpoint, models: ModelFiles) -> None:
    """Note the tensors that the model files have under other names of tied weights."""
    for name, parameter in checkpoint.parameters.items():
        held = None if parameter.tied_to is None or models.parameterwise else models.tensor(name)
        if held is not None:
            copy, owner = weight_in(held[1], held[0].path), checkpoint.owner(name)
            checkpoint.duplicates += copies_of(name, copy, owner.slots, kind="tied", of=owner.name)


def _note_folders(checkpoint: Checkpoint, folder: Path, read: Callable[[Path], StoredFolder]) -> None:
    """Note the copies of what is not trained, in folders, as float32: of a weight, or of the master that it rounds."""
    for name in [*checkpoint.parameters, *checkpoint.buffers]:
        one = checkpoint.parameters.get(name) or checkpoint.buffers[name]
        if one.group is not None or "/" in name or "\0" in name or name in ("", ".", ".."):
            continue
        path = folder / name / f"{MASTER_STEM}{SUFFIX}"
        if not path.is_file():
            continue
        stored = read(folder / name)
        checkpoint.files += stored.files
        slots, copy = checkpoint.owner(name).slots, stored.tensors[MASTER]
        owner = slots.get(WEIGHT) or slots.get(MASTER)
        if owner is not None and copy.tensor.numel == owner.numel and (copy.flat or copy.tensor.shape == owner.shape):
            slot = replace(copy.slot(MASTER, owner.shape), name=owner.name)
            if is_floating(owner.dtype) and itemsize(owner.dtype) < itemsize(slot.dtype):
                slot = replace(slot, dtype=owner.dtype)  # others were made float32 themselves
            kind = "tied" if one.tied_to else "parameter"
            checkpoint.duplicates.append(Duplicate(kind, name, one.tied_to or name, slot, owner))


def _note_ranks(checkpoint: Checkpoint, models: ModelFiles) -> None:
    """Note what the model files of other ranks hold, as DeepSpeed's converter copies them."""
    first, *others = (model for one in [*models.ranks, models.unused] for model in one)
    for model in others:
        for name, buffer in checkpoint.buffers.items():
            if name in model.module:
                copy = weight_in(model.module[name], model.path)
                checkpoint.duplicates += copies_of(name, copy, buffer.slots, model.shard.dp_rank, kind="buffer")
    keys = dict.fromkeys(key for model in others for key in model.content if key not in STRUCTURE)
    own, rules = keep_others((first.file, common(first)), [(m.file, common(m)) for m in others], [*keys])
    checkpoint.metadata |= own
    of_modules = keep_extra(checkpoint, [first, *others])
    for file in checkpoint.files:
        file.rules = (*file.rules, *rules.get(file.path, ()), *of_modules.get(file.path, ()))


def _describe(checkpoint: Checkpoint, models: ModelFiles, content: Mapping[object, object]) -> None:
    """Fill in what is true of the checkpoint as a whole; ranks are those of the run that it is from."""
    model = models.first
    world = model.content.get("dp_world_size")
    checkpoint.world_size = world if type(world) is int and world > 0 else 1
    checkpoint.topology = Topology(dp=checkpoint.world_size)
    version = content.get("ds_version", model.content.get("ds_version"))
    checkpoint.format_version = version if isinstance(version, str) else None
    step = model.content.get("global_steps")
    checkpoint.step = step if type(step) is int else None
    stage = plain(content.get("zero_stage", section(model.config, "zero_optimization").get("stage")))
    checkpoint.zero_stage = stage if isinstance(stage, int) else None
    scaler = content.get("loss_scaler")
    scale = scaler.get("cur_scale") if isinstance(scaler, Object) else None
    checkpoint.loss_scale = as_float(scale)
    checkpoint.details["tag"] = Path(checkpoint.source).name


def _carry(
    checkpoint: Checkpoint,
    models: ModelFiles,
    file: TorchFile,
    content: Mapping[object, object],
    rest: Mapping[object, object],
) -> None:
    """Keep what the files hold besides parameters and groups, except what was only filled in for DeepSpeed."""
    if rest:
        frozen = set(as_names(rest.get("frozen", []), file.path))
        for parameter in checkpoint.parameters.values():
            parameter.frozen = parameter.name in frozen
        restore(checkpoint, rest, file)
    filled_in = set(as_names(rest.get("filled_in", []), file.path))
    rules = tuple(Rule((key, "**"), IMPLIED, "filled in for DeepSpeed's loaders") for key in sorted(filled_in))
    for one in checkpoint.files:
        one.rules = (*one.rules, *rules) if one.role == "model" else one.rules
    model = models.first
    full = with_layers(model)
    if full is not model.content:
        described = next(one for one in checkpoint.files if one.path == model.file.path)
        described.rules = (*described.rules, Rule((INFO_KEY, LAYERS_KEY, "**"), IMPLIED, "listed in full beside it"))
    checkpoint.metadata |= {
        key: carried(model.file, value)
        for key, value in full.items()
        if key not in STRUCTURE and key not in filled_in and (rest or value is not None or key not in MODEL_KEYS)
    }
    checkpoint.optimizer_metadata |= {
        str(key): carried(file, value) for key, value in content.items() if key not in CUT_KEYS
    }


def _warn(checkpoint: Checkpoint, models: ModelFiles, folder: Path, *, written_by_zckpt: bool) -> None:
    unknown = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir() and entry.name not in checkpoint.parameters and entry.name not in models.names()
    )
    if unknown:
        checkpoint.warnings.append(f"folders that no model file names are left out: {listed(unknown)}")
    if models.first.zero_option("round_robin_gradients") and not written_by_zckpt:
        checkpoint.warnings.append(
            "the run had round_robin_gradients, with which DeepSpeed's converter takes parameters for one another"
        )


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

    def weight(self, name: str, shape: Shape, *, padded: bool) -> Slot | None:
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
    if missing_ranks(len(by_rank), by_rank) or len({len(one) for one in by_rank.values()}) > 1:
        raise ShardError("model files of some ranks are missing", path=directory,
                         found=f"model-parallel ranks {sorted(by_rank)[:16]}", code=MISSING_FILE)  # fmt: skip
    ranks = [[read_model(shard) for shard in one] for one in by_rank.values()]
    for models in ranks if not whole else ():
        world = models[0].content.get("dp_world_size")
        size = world if type(world) is int else len(models)
        missing = missing_files("model files", size, [model.rank for model in models], models[0].path)
        if missing and models[0].frozen_fragments:  # only ranks with cut frozen parameters are needed
            raise missing
    return ModelFiles(ranks, not whole, [read_model(s) for s in shards if s.dp_rank is not None] if whole else [])


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
