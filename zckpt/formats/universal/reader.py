"""From the files of a universal checkpoint to a Checkpoint. Structure and single values only; no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zckpt.codes import MISSING_FILE, SLOT_MISSING
from zckpt.errors import DamagedFileError, LayoutError, ShardError, listed
from zckpt.formats.deepspeed.auto_ep import KEY as LAYERS_KEY
from zckpt.formats.deepspeed.auto_ep import common, with_layers
from zckpt.formats.deepspeed.groups import complete_aliases
from zckpt.formats.deepspeed.per_parameter import FrozenPadding
from zckpt.formats.deepspeed.reader import keep_extra
from zckpt.formats.deepspeed.shards import MODEL_KEYS, Shapes
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.formats.deepspeed.values import MODEL_RULES, copies_of, keep_others, weight_in
from zckpt.formats.remainder import KEY, remainder_rules, restore
from zckpt.formats.torch_files.state_dicts import optimizer_rules
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe
from zckpt.formats.universal.directory import FOLDER, MASTER_STEM, OPTIMIZER_NAME, STEP_STEM, SUFFIX
from zckpt.formats.universal.folders import StoredFolder, read_folder
from zckpt.formats.universal.model_files import ModelFiles, give_state, read_groups, read_models
from zckpt.formats.universal.writer import OWN_KEYS, STRUCTURE
from zckpt.state import MASTER, WEIGHT, Checkpoint, Duplicate, Parameter, Topology, as_float
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.inventory import IMPLIED, STATE, Rule
from zckpt.torchfile import Digests, Object, TorchFile, plain, read_torchfile

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
    values = _place_trained(checkpoint, directory / FOLDER, models, shapes, rest, file)
    names = dict.fromkeys([*models.names(), *checkpoint.parameters])
    checkpoint.parameters = {name: checkpoint.parameters[name] for name in names if name in checkpoint.parameters}
    complete_aliases(checkpoint.parameters)
    _note_duplicates(checkpoint, models)
    _note_folders(checkpoint, directory / FOLDER)
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
    models: ModelFiles,
    shapes: Shapes,
    rest: Mapping[object, object],
    file: TorchFile,
) -> dict[str, dict[str, object]]:
    """Place trained parameters with their slots; return the single values of each."""
    values: dict[str, dict[str, object]] = {}
    held: dict[str, StoredFolder] = {}
    filled, extra = as_mapping(rest.get("made", {}), file.path), as_mapping(rest.get("values", {}), file.path)
    without_master = set(as_names(rest.get("without_master", []), file.path))
    for index, group in enumerate(checkpoint.param_groups):
        for name in group.parameters:
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise DamagedFileError("a parameter's name leads elsewhere", path=file.path, found=repr(name[:80]))
            stored = held[name] = read_folder(folder / name)
            checkpoint.files += stored.files
            parameter = _trained(name, stored, models, shapes[name])
            parameter.group = index
            own = {str(k): carried(file, v) for k, v in as_mapping(extra.get(name, {}), file.path).items()}
            own = {**stored.values, **own}
            for key in [*as_names(filled.get(name, []), file.path), *((MASTER,) if name in without_master else ())]:
                parameter.slots.pop(key, None)
                own.pop(key, None)
                _mark_filled(stored, key)
            checkpoint.parameters[name], values[name] = parameter, own
    _check_complete(checkpoint, folder, held, values)
    return values


def _check_complete(
    checkpoint: Checkpoint,
    folder: Path,
    held: Mapping[str, StoredFolder],
    values: Mapping[str, Mapping[str, object]],
) -> None:
    """Raise if a parameter has some of the files of another: of one in its group, or in a group of the same form.

    DeepSpeed's loaders need the same ones for all of a group; zckpt gives them what is no value for each element apart.
    """
    digests = Digests()
    forms = [
        digests.of({key: value for key, value in group.hyperparameters.items() if key not in OF_A_GROUP})
        for group in checkpoint.param_groups
    ]
    kept: list[tuple[int, str, frozenset[str], frozenset[str]]] = []
    for number, group in enumerate(checkpoint.param_groups):
        for name in group.parameters:
            tensors, numel = held[name].tensors, checkpoint.parameters[name].numel
            own = frozenset([*tensors, *held[name].values, *values[name]])
            each = {key for key, one in tensors.items() if 1 < one.tensor.numel == numel}
            if numel:
                kept.append((number, name, own, own & {*each, STEP_STEM}))
    states = {(number, own): (name, needed) for number, name, own, needed in kept}
    for number, name, own, _ in kept:
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


def _trained(name: str, stored: StoredFolder, models: ModelFiles, shape: tuple[int, ...]) -> Parameter:
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


def _note_folders(checkpoint: Checkpoint, folder: Path) -> None:
    """Note the copies of what is not trained, in folders, as float32: of a weight, or of the master that it rounds."""
    for name in [*checkpoint.parameters, *checkpoint.buffers]:
        one = checkpoint.parameters.get(name) or checkpoint.buffers[name]
        if one.group is not None or "/" in name or "\0" in name or name in ("", ".", ".."):
            continue
        path = folder / name / f"{MASTER_STEM}{SUFFIX}"
        if not path.is_file():
            continue
        stored = read_folder(folder / name)
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
    zero = model.config.get("zero_optimization")
    stage = plain(content.get("zero_stage", zero.get("stage") if isinstance(zero, dict) else None))
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
