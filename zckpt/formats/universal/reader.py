"""From the files of a universal checkpoint to a Checkpoint. Structure and single values only; no tensor is read.

The model files of a universal checkpoint, whoever wrote them: names, kinds, and the weights that they hold whole.

zckpt            mp_rank_00 with whole weights (and one for ZeRO-3, which says nothing more)
DeepSpeed        those of the source as they were: one for each model-parallel rank; of ZeRO-3 one for each rank,
                 in which parameters are empty, and frozen ones cut

Param groups have their hyperparameters from the optimizer's file, and their names from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.codes import MISSING_FILE, SLOT_MISSING
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, about, listed
from zckpt.evidence import note_not_used
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.deepspeed.axes.auto_ep import KEY as LAYERS_KEY
from zckpt.formats.deepspeed.axes.auto_ep import router_names
from zckpt.formats.deepspeed.axes.gpt_model import known_rules
from zckpt.formats.deepspeed.axes.tensor_parallel import merge
from zckpt.formats.deepspeed.axes.tp_rules import INFO_KEY, SUB, TWO, Rules
from zckpt.formats.deepspeed.directory import MODEL, shards_in
from zckpt.formats.deepspeed.layouts.layout import complete_aliases, optimizer_order, tied_names
from zckpt.formats.deepspeed.layouts.per_parameter import FrozenPadding, frozen_weight
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.ranks import missing_files, missing_ranks
from zckpt.formats.deepspeed.reader import keep_models
from zckpt.formats.deepspeed.shards import MODEL_KEYS, ModelShard, Shapes, read_models, section
from zckpt.formats.deepspeed.values import (
    CUT_KEYS,
    MODEL_RULES,
    OF_THE_RUN,
    copies_of,
    copies_of_buffers,
    implied,
    weight_in,
)
from zckpt.formats.latest import is_name
from zckpt.formats.lost import stand_in, tensor_of
from zckpt.formats.remainder import KEY, remainder_rules, restore
from zckpt.formats.torch_files.optimizer import optimizer_rules
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe, slot_of, with_file, with_scalars
from zckpt.formats.universal.directory import FOLDER, MASTER_STEM, OPTIMIZER_NAME, STEP_STEM, SUFFIX
from zckpt.formats.universal.folders import PART_KEYS, StoredFolder, Values, read_folder
from zckpt.formats.universal.writer import OWN_KEYS, STRUCTURE, shared
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    GivenNames,
    Parameter,
    ParamGroup,
    Slot,
    SourceFile,
    Topology,
    as_float,
    by_key,
    dict_of,
    first_of,
    is_floating,
    itemsize,
    list_of,
    size_of,
    without,
)
from zckpt.state.inventory import IMPLIED, STATE, Rule
from zckpt.state.views import narrow
from zckpt.storage.files import folders_in
from zckpt.torchfile import Digests, Object, Tensor, TorchFile, plain, read_torchfile

OPTIMIZER_RULES = (
    *optimizer_rules(),
    *optimizer_rules("optimizer_state_dict")[1:],
    *remainder_rules(KEY),
    *implied("descriptions of parameters and of the source", "groups", "filled_in", "made", "without_master",
             where=[KEY]),
    Rule((KEY, "values", "*", "*"), STATE, "single values of a parameter"),
    *(Rule((*where, "**"), IMPLIED, "the first rank's share of the folders' contents", tensors=True)
      for where in (("fp32_flat_groups",), ("optimizer_state_dict", "state"))),
    *implied("how the state is cut", *(key for key in CUT_KEYS if key not in OWN_KEYS)),
    *implied(OF_THE_RUN, "zero_stage", "ds_version"),
)  # fmt: skip
"""Of the values in `optimizer_state.pt`."""

OF_A_GROUP = frozenset({"lr", "initial_lr", "weight_decay", "name", "param_group_name"})
"""Hyperparameters in which groups of one form of state differ."""

Held = tuple[int, str, frozenset[str], frozenset[str]]
"""Of a parameter: its group, its name, the keys of what it has, and those of what has a value for each element."""


def read(directory: Path, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a universal checkpoint, of zckpt or of DeepSpeed.

    `directory`: as `find` returns it; `names`: not used: it has all names. Raises SourceError: a file is missing or
    damaged, or the files contradict each other.
    """
    path = directory / FOLDER / OPTIMIZER_NAME
    if not path.is_file():
        raise ShardError("no optimizer_state.pt", path=path, expected="the file with the param groups",
                         code=MISSING_FILE)  # fmt: skip
    with about(path):
        reading = _Reading(directory, read_torchfile(path))
        reading.describe()
        reading.place_groups()
        reading.place_untrained()
        reading.place_trained()
        reading.join_weights()
        reading.note_copies()
        reading.give_state()
        reading.carry()
        reading.warn()
    note_not_used(reading.checkpoint, names)
    return reading.checkpoint


def _read_models(directory: Path) -> tuple[list[list[ModelShard]], list[ModelShard]]:
    """Read the model files: by model-parallel rank those of all data-parallel ranks, of ZeRO-1 and 2 one each.

    Apart from these, those of ZeRO-3 that say nothing more, where there are also files with whole weights. Raises
    ShardError: there is none, or one is missing.
    """
    shards = sorted((s for s in shards_in(directory) if s.role == MODEL), key=lambda s: s.order)
    whole = [s for s in shards if s.dp_rank is None]
    if not shards:
        raise ShardError("no model file", path=directory, expected="mp_rank_00_model_states.pt", code=MISSING_FILE)
    by_rank = by_key((shard.mp_rank or 0, shard) for shard in whole or shards)
    if missing_ranks(len(by_rank), by_rank) or len({len(one) for one in by_rank.values()}) > 1:
        raise ShardError("model files of some ranks are missing", path=directory,
                         found=f"model-parallel ranks {sorted(by_rank)[:16]}", code=MISSING_FILE)  # fmt: skip
    ranks = list(map(read_models, by_rank.values()))
    for models in ranks if not whole else ():
        size = size_of(models[0].content, "dp_world_size") or len(models)
        missing = missing_files("model files", size, [model.rank for model in models], models[0].path)
        if missing and models[0].frozen_fragments:  # only ranks with cut frozen parameters are needed
            raise missing
    return ranks, read_models([s for s in shards if s.dp_rank is not None]) if whole else []


class _Reading:
    """A checkpoint that is read, step by step.

    `firsts`: the first model file of each model-parallel rank; `module`: those that have a name, each with its tensor;
    `parameterwise`: whether they are of ZeRO-3, without whole weights; `trained`: shapes of what each rank
    trains; `rules`: how slices of several ranks make it up; `shapes`: of trained parameters.
    """

    def __init__(self, directory: Path, file: TorchFile) -> None:
        self.folder, self.file = directory / FOLDER, file
        self.content = as_mapping(file.root)
        self.rest = as_mapping(self.content.get(KEY, {}))
        self.ranks, unused = _read_models(directory)
        self.models = [model for one in [*self.ranks, unused] for model in one]
        self.firsts = [models[0] for models in self.ranks]
        self.first = self.models[0]
        self.parameterwise = self.first.shard.dp_rank is not None
        self.module = by_key((n, (model, tensor)) for model in self.firsts for n, tensor in model.module.items())
        self.shapes: Shapes = {}
        self.values: dict[str, Values] = {}
        self.trained = [one.trained for one in self.firsts]
        shapes = {name: shape for one in self.trained for name, shape in one.items()}
        info = known_rules(self.first.content, shapes, self.first.path) if len(self.ranks) > 1 else None
        self.rules = None if info is None else Rules(info, self.first.path)
        self.checkpoint = Checkpoint(str(directory), "universal")
        self._reader, self._known = AlikeReader(), dict[int, SourceFile]()

    def describe(self) -> None:
        """Fill in what is true of the checkpoint as a whole; ranks are those of the run that it is from."""
        checkpoint, content, model = self.checkpoint, self.content, self.first
        checkpoint.files = [
            describe(m.file, "model", m.shard.dp_rank, m.shard.mp_rank, rules=MODEL_RULES) for m in self.models
        ]
        checkpoint.files.append(describe(self.file, "optimizer", rules=OPTIMIZER_RULES))
        checkpoint.padding_spans = [FrozenPadding(one) for one in self.ranks if self.parameterwise]
        checkpoint.world_size = size_of(model.content, "dp_world_size") or 1
        checkpoint.topology = Topology(dp=checkpoint.world_size)
        version = content.get("ds_version", model.content.get("ds_version"))
        checkpoint.format_version = version if isinstance(version, str) else None
        step = model.content.get("global_steps")
        checkpoint.step = step if type(step) is int else None
        stage = plain(content.get("zero_stage", model.zero.get("stage")))
        checkpoint.zero_stage = stage if isinstance(stage, int) else None
        scaler = content.get("loss_scaler")
        checkpoint.loss_scale = as_float(scaler.get("cur_scale") if isinstance(scaler, Object) else None)
        checkpoint.details["tag"] = Path(checkpoint.source).name

    def place_groups(self) -> None:
        """Place the param groups, with their names in the optimizer's order; their shapes may be those of slices.

        In DeepSpeed's ZeRO-3 files the single values of a group are nowhere but here.
        """
        path, inner = self.file.path, section(self.content, "optimizer_state_dict")
        stored = first_of(one.get("param_groups") for one in (self.content, inner))
        shapes: list[Shapes] = []  # of each group (of ZeRO-3: sub-group), in the order of the flat buffers
        for model in self.firsts:
            if model.param_shapes is None:
                raise LayoutError("no param_shapes", path=model.path,
                                  advice="without them, the parameters of a group are unknown")  # fmt: skip
            shapes += [{} for _ in model.param_shapes[len(shapes) :]]
            for its, own in zip(shapes, model.param_shapes, strict=False):
                its.update(own)
        if stored is None and "group_paddings" in self.content:
            stored = [{} for _ in shapes]
            self.checkpoint.warnings.append(f"{path}: no hyperparameters and no steps, as from DeepSpeed up to 0.14.0")
        if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
            raise DamagedFileError("unreadable param_groups", expected="a list of dicts",
                                   found=type(stored).__name__)  # fmt: skip
        groups = [with_file(self.file, with_scalars(group, path)) for group in stored]
        members = [[n for n in list_of(group.pop("params", None)) if type(n) is int] for group in groups]
        if len(shapes) != len(groups):  # ZeRO-3's sub-groups: a group's `params` are their numbers
            if sorted(number for numbers in members for number in numbers) != list(range(len(shapes))):
                raise LayoutError("param_shapes and the optimizer have different numbers of groups",
                                  expected=len(groups), found=len(shapes))  # fmt: skip
            shapes = [{name: shape for n in numbers for name, shape in shapes[n].items()} for numbers in members]
        for its in shapes:
            self.shapes |= its
        if len(self.shapes) != sum(map(len, shapes)):
            raise LayoutError("a parameter is in two param groups", path=self.first.path)
        names = [optimizer_order(list(group), self.first, self.checkpoint.world_size) for group in shapes]
        recorded = self.rest.get("groups")
        if recorded is not None:  # by zckpt: the same in another order
            known = list(map(as_names, list_of(recorded)))
            if list(map(sorted, known)) != list(map(sorted, names)):
                raise DamagedFileError("groups and param_shapes disagree", expected="the same names in each")
            names = known
        states = inner.get("state") if recorded is None else None
        for group, listed_names, numbers in zip(groups, names, members, strict=True):
            values: Values = {}
            for state in map(dict_of, map(dict_of(states).get, numbers)):
                single = {key: v for key, v in state.items() if not isinstance(v, Tensor) or v.shape == ()}
                values = {**with_file(self.file, with_scalars(single, path)), **values}
            self.checkpoint.param_groups.append(ParamGroup(group, listed_names, values))

    def place_untrained(self) -> None:
        """Place buffers, aliases and frozen parameters, whose values are in the model's files.

        What is an alias of a parameter that was left out (`exclude_frozen_parameters`) is none, and has its own values.
        """
        checkpoint, trained = self.checkpoint, self.shapes
        shared = {alias: owner for models in self.ranks for model in models for alias, owner in model.shared.items()}
        aliases: dict[str, str] = {}
        for models in self.ranks:
            known = {**router_names(models[0], parameterwise=self.parameterwise),
                     **tied_names(models, trained.keys(), shared, parameterwise=self.parameterwise)}  # fmt: skip
            aliases |= {alias: owner for alias, owner in known.items() if alias in models[0].module}
        lost = []
        for name, ((model, tensor), *others) in self.module.items():
            if any(name in one.buffer_names for one in self.firsts):  # every rank has the same
                checkpoint.buffers[name] = Parameter.of(name, slot_of(WEIGHT, tensor, model.path))
            elif name in trained:
                continue
            elif name in aliases and (aliases[name] in self.module or aliases[name] in trained):
                checkpoint.parameters[name] = Parameter(name, (), tensor.dtype, tied_to=aliases[name])
            else:
                slot = None
                if not others and self.parameterwise:
                    slot = frozen_weight(name, tensor.dtype, next(its for its in self.ranks if its[0] is model))
                elif not others:
                    slot = slot_of(WEIGHT, tensor, model.path)
                if slot is None:
                    lost.append(name)
                else:
                    checkpoint.parameters[name] = replace(Parameter.of(name, slot), frozen=True)
        if lost:
            checkpoint.warnings.append(f"no file holds the whole values of {listed(lost)}; they are left out")

    def place_trained(self) -> None:
        """Place trained parameters with their slots, and note the single values of each."""
        checkpoint, rest, file = self.checkpoint, self.rest, self.file
        held: list[Held] = []
        sets: dict[frozenset[str], frozenset[str]] = {}  # of thousands of parameters a few
        made, extra = (as_mapping(rest.get(key, {})) for key in ("made", "values"))
        without_master = set(as_names(rest.get("without_master", [])))
        for index, name in ((i, name) for i, group in enumerate(checkpoint.param_groups) for name in group.parameters):
            if not is_name(name):
                raise DamagedFileError("a parameter's name leads elsewhere", found=repr(name[:80]))
            stored = self._stored(name)
            parameter = checkpoint.parameters[name] = self._trained(name, stored)
            parameter.group = index
            more = as_mapping(extra.get(name, {}))
            own = stored.values | {str(key): carried(file, value) for key, value in more.items()}
            if numel := parameter.numel:
                each = {key for key, one in stored.tensors.items() if 1 < one.tensor.numel == numel}
                keys = frozenset([*stored.tensors, *own])
                needed = keys & {*each, STEP_STEM}
                held.append((index, name, sets.setdefault(keys, keys), sets.setdefault(needed, needed)))
            filled = [*as_names(made.get(name, [])), *((MASTER,) if name in without_master else ())]
            stems = {f"{MASTER_STEM if key == MASTER else key}{SUFFIX}" for key in filled}
            for one in stored.files:
                one.rules = (*_FILLED, *one.rules) if one.name in stems else one.rules
            for key in filled:
                parameter.slots.pop(key, None)
                own.pop(key, None)
            self.values[name] = own
        self._check_complete(held)
        known = checkpoint.parameters
        checkpoint.parameters = {name: known[name] for name in self.module if name in known} | known
        complete_aliases(checkpoint.parameters)

    def _stored(self, name: str) -> StoredFolder:
        shape = self.shapes.get(name) if len(self.ranks) == 1 else None  # of several, that of a slice
        found = read_folder(self.folder / name, self._reader, self._known, shape)
        self.checkpoint.files += found.files
        return found

    def _trained(self, name: str, stored: StoredFolder) -> Parameter:
        """Return a trained parameter. Its shape is that of the model's file, unless that has a slice, or padding.

        Of AutoEP's experts that has a rank's. Its weight is that of the model's file where one has it whole, and of
        that what is not padding of a vocabulary.
        """
        shape, master, slots = self.shapes[name], stored.tensors[MASTER], dict[str, Slot]()
        if master.experts is not None:
            whole = master.tensor.shape
            if len(shape) != 3 or shape[1:] != whole[1:] or shape[0] < 1 or master.experts % shape[0]:
                raise LayoutError(
                    f"{name} does not have the experts that the model file lists", path=master.path,
                    expected=f"{shape} on each rank", found=whole,
                )  # fmt: skip
            shape = whole
        elif self._is_of_parts(name) and not (master.flat or master.has_parts):
            raise UnsupportedError(
                f"slices of {name} were put together without regard to its parts, of which this DeepSpeed did not know",
                path=master.path, expected=f"a file with {' or '.join(PART_KEYS)}",
                advice="convert the run again with a newer DeepSpeed, or with zckpt",
            )  # fmt: skip
        elif not master.flat and (len(self.ranks) > 1 or master.padding_stripped):
            shape = master.tensor.shape
        holders = self.module.get(name, ())
        if len(holders) == 1 and not self.parameterwise:
            ((model, tensor),) = holders
            if tensor.shape == shape:
                slots[WEIGHT] = slot_of(WEIGHT, tensor, model.path)
            elif len(self.ranks) == 1:
                has_rows = tensor.shape[1:] == shape[1:] and () < shape[:1] <= tensor.shape[:1]
                if not master.padding_stripped or not has_rows:
                    raise LayoutError(f"{name} has two shapes", path=model.path, expected=shape, found=tensor.shape)
                slots[WEIGHT] = narrow(slot_of(WEIGHT, tensor, model.path), 0, 0, shape[0])
        for key in (MASTER, *(key for key in stored.tensors if key != MASTER)):
            slots[key] = stored.tensors[key].slot(key, shape)
        return Parameter(name, shape, holders[0][1].dtype if holders else self.first.dtype, slots)

    def _is_of_parts(self, name: str) -> bool:
        """Tell whether several ranks have slices of a parameter, whose rule names parts, each sliced by itself."""
        rules = self.rules
        if rules is None or sum(name in one for one in self.trained) < 2:
            return False
        return rules.mapped(name) is None and rules.named(name).kind in (SUB, TWO)

    def join_weights(self) -> None:
        """Give trained parameters the weights of which each tensor-parallel rank's model file has a slice."""
        checkpoint, known, count = self.checkpoint, self.checkpoint.parameters, len(self.ranks)
        names = [name for name in self.shapes if len(self.module.get(name, ())) == count and not self.parameterwise]
        if self.rules is None or not names:
            return
        ranks = [Rank(one.path, checkpoint.format) for one in self.firsts]
        for one, rank in zip(self.firsts, ranks, strict=True):
            for name in names:
                rank.parameters[name] = Parameter.of(name, slot_of(WEIGHT, one.module[name], one.path))
        merged = merge(ranks, self.rules)
        for name, whole in merged.parameters.items():
            if whole.shape != known[name].shape:
                raise LayoutError(f"{name} has two shapes", path=self.first.path, expected=known[name].shape,
                                  found=f"slices of {whole.shape}")  # fmt: skip
            known[name].slots = {**whole.slots, **known[name].slots}
        checkpoint.duplicates += merged.duplicates
        checkpoint.padding_spans += merged.padding_spans

    def _check_complete(self, held: Sequence[Held]) -> None:
        """Raise if a parameter has some of the files of another: of one in its group, or in a group of the same form.

        DeepSpeed's loaders need the same ones for all of a group; zckpt gives them what is no value for each element
        apart.
        """
        digests = Digests()
        forms = [digests.of(without(group.hyperparameters, *OF_A_GROUP)) for group in self.checkpoint.param_groups]
        states = {(number, own): (name, needed) for number, name, own, needed in held}
        for number, name, own, _ in held:
            for (its, others), (other, needed) in states.items():
                is_alike = its == number or (forms[its] == forms[number] and own > {MASTER})
                for key in sorted(needed - own) if is_alike and own < others else ():
                    path = self.folder / name / f"{key}{SUFFIX}"
                    error = LayoutError(f"no {key} of this parameter", path=path,
                                        expected=f"a file, as {other} has one", code=SLOT_MISSING,
                                        parameters=[name])  # fmt: skip
                    if len(self.ranks) > 1:
                        raise error
                    lost, like = stand_in(error, path), self.checkpoint.parameters[other].slots.get(key)
                    if like is not None and like.shape:
                        one = self.checkpoint.parameters[name]
                        one.slots.setdefault(key, slot_of(key, tensor_of(like.dtype, one.shape), lost))
                    else:  # a single value is that of another of its group
                        self.values[name].setdefault(key, self.values[other].get(key))

    def note_copies(self) -> None:
        """Note what there is twice: tied weights and other ranks' values in the model files, folders of untrained ones.

        These are float32: copies of a weight, or of the master that it rounds.
        """
        checkpoint = self.checkpoint
        for name, one in [*checkpoint.parameters.items(), *checkpoint.buffers.items()]:
            owner, holders = checkpoint.owner(name), self.module.get(name, ())
            if one.tied_to is not None and len(holders) == 1 and not self.parameterwise:
                ((model, tensor),) = holders
                copy = weight_in(tensor, model.path)
                checkpoint.duplicates += copies_of(name, copy, owner.slots, kind="tied", of=owner.name)
            if one.group is not None or not is_name(name):
                continue
            if not (self.folder / name / f"{MASTER_STEM}{SUFFIX}").is_file():
                continue
            stored, held = self._stored(name).tensors[MASTER], owner.weight or owner.master
            if held and stored.tensor.numel == held.numel and (stored.flat or stored.tensor.shape == held.shape):
                slot = stored.slot(held.name, held.shape)
                if is_floating(held.dtype) and itemsize(held.dtype) < itemsize(slot.dtype):
                    slot = replace(slot, dtype=held.dtype)  # others were made float32 themselves
                kind = "tied" if one.tied_to else "parameter"
                checkpoint.duplicates.append(Duplicate(kind, name, one.tied_to or name, slot, held))
        others = self.models[1:]
        checkpoint.duplicates += copies_of_buffers(others, checkpoint.buffers)  # as DeepSpeed's converter copies them
        keys = (key for model in others for key in model.content if key not in STRUCTURE)
        found = keep_models(checkpoint, self.models, keys)
        for file in checkpoint.files:
            file.rules = (*file.rules, *(rule for rules in found for rule in rules.get(file.path, ())))

    def give_state(self) -> None:
        """Give groups the single values that all their parameters share, and parameters those that they do not.

        A parameter without any state has none of its group's values either, as long as others have slots to show it.
        """
        for group in self.checkpoint.param_groups:
            members = [self.checkpoint.parameters[name] for name in group.parameters]
            slotted = [p for p in members if p.optimizer_slots]
            present = [p for p in members if self.values[p.name] or p.optimizer_slots]
            whole = present and (slotted or len(present) == len(members))
            common = shared([self.values[p.name] for p in present]) if whole else {}
            group.state |= common
            for parameter in present:
                parameter.state |= without(self.values[parameter.name], *common)

    def carry(self) -> None:
        """Keep what the files hold besides parameters and groups, except what was only filled in for DeepSpeed."""
        checkpoint, rest, file, model = self.checkpoint, self.rest, self.file, self.first
        if rest:
            frozen = set(as_names(rest.get("frozen", [])))
            for parameter in checkpoint.parameters.values():
                parameter.frozen = parameter.name in frozen
            restore(checkpoint, rest, file)
        filled_in = set(as_names(rest.get("filled_in", [])))
        rules = implied("filled in for DeepSpeed's loaders", *sorted(filled_in))
        full, info, layers = model.content, model.content.get(INFO_KEY), model.content.get(LAYERS_KEY)
        if layers and isinstance(info, dict) and LAYERS_KEY in info:  # DeepSpeed's converter shortens the list within
            full = {**full, INFO_KEY: {**info, LAYERS_KEY: layers}}
        for one in checkpoint.files:
            one.rules = (*one.rules, *rules) if one.role == "model" else one.rules
            if full is not model.content and one.path == model.file.path:
                one.rules = (*one.rules, *implied("listed in full beside it", LAYERS_KEY, where=[INFO_KEY]))
        checkpoint.metadata |= {
            key: carried(model.file, value)
            for key, value in full.items()
            if key not in STRUCTURE and key not in filled_in and (rest or value is not None or key not in MODEL_KEYS)
        }
        checkpoint.optimizer_metadata |= {
            str(key): carried(file, value) for key, value in without(self.content, *OWN_KEYS, *CUT_KEYS).items()
        }

    def warn(self) -> None:
        known = {*self.checkpoint.parameters, *self.module}
        unknown = [one.name for one in folders_in(self.folder) if one.name not in known]
        if unknown:
            self.checkpoint.warnings.append(f"folders that the model files do not name are left out: {listed(unknown)}")
        zero = self.first.zero
        if zero.get("round_robin_gradients") and zero.get("stage") != 3 and not self.rest:
            self.checkpoint.warnings.append(
                "the run had round_robin_gradients, with which DeepSpeed's converter confuses parameters"
            )


_FILLED = tuple(Rule(where, IMPLIED, "filled in for DeepSpeed's loaders", tensors=True) for where in ((), ("param",)))
"""Of a file that DeepSpeed's loaders need and the source did not have: it means nothing."""
