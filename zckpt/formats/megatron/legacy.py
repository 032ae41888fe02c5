"""The legacy files of Megatron-LM and Megatron-Core as a Checkpoint: the model as one rank has it, with its optimizer.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     {"model": ..., "optimizer": ..., "args": ..., ...}
                                        distrib_optim.pt       of the distributed optimizer

Slices of tensor-parallel ranks are spans of the whole. What several ranks have whole (norms, what is no expert on
expert-parallel ranks, an embedding that the last stage keeps as its output layer) is read from the first, and the rest
are copies of it.

ranks    which ranks there are, and names
local    a rank's optimizer
cut      how ranks' slices make up a parameter

Source: megatron-core 0.16, Megatron-LM's `checkpointing.py`, `LanguageModule.setup_embeddings_and_output_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zckpt.errors import LayoutError, ShardError, UnsupportedError, about
from zckpt.formats.megatron.buckets import bucket_numels
from zckpt.formats.megatron.cut import CURRENT, KEPT, SPLITS, Shapes, check_alike, cut_of, reordered
from zckpt.formats.megatron.directory import FORMAT, LEGACY, OPTIMIZER_FILE, Place, missing
from zckpt.formats.megatron.fused import apart, expert_count, is_fused, name_of_one
from zckpt.formats.megatron.local import GRADIENTS, attach_distributed, attach_plain, optimizers_of
from zckpt.formats.megatron.names import BUFFERS, TIED, in_order
from zckpt.formats.megatron.objects import OPTIMIZER, Common, size_of, topology_of
from zckpt.formats.megatron.optimizer import GROUPS, MASTERS, Held, attach, keep_common, keep_rest
from zckpt.formats.megatron.own import read_own, restore_own
from zckpt.formats.megatron.ranks import Numbering, RankFile, is_weight, read_ranks
from zckpt.formats.megatron.stages import FURTHER
from zckpt.formats.torch_files.tensors import carried, describe, slot_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, ParamGroup, Slot, SourceFile
from zckpt.state.dtypes import is_floating
from zckpt.state.inventory import COPY, IMPLIED, REST, STATE, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import Digests, Tensor, read_torchfile, walk_tensors

UNTIED = "untie_embeddings_and_output_weights"

VERSION = "checkpoint_version"

CHUNKS, BOUNDS, EXPERTS = "virtual stages", "stage bounds", "experts"
"""Under which `Checkpoint.details` have them."""

ORDER = "order of parameters"
"""Under which they say that it is not known."""

FUSED = "one parameter of all of a rank (GroupedMLP)"
NUMBERED = "a parameter of each in one module (TEGroupedMLP)"
APART = "a module each (SequentialMLP)"
"""What the module is like that experts are in."""

SAME = "as in the first rank's file"


Copies = dict[tuple[int, int, int], dict[int, Parameter]]
"""What ranks have of a parameter: by stage, chunk and expert-parallel rank, for each tensor-parallel rank."""


@dataclass(slots=True)
class Model:
    """What all ranks have, by the names of the whole model's module.

    Parameters
    ----------
    given : dict of str to str
        Names in the checkpoint, where they are others.
    ranks : int
        Tensor-parallel ones.
    first : RankFile
    copies : dict of str to Copies
    said : dict of str to int
        Along which dimension masters say that a parameter is cut.
    """

    given: Mapping[str, str]
    ranks: int
    first: RankFile
    copies: dict[str, Copies] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)

    def gather(self, local: Local, expert_ranks: int, *, tied: bool) -> None:
        """Add what a rank has; `tied`: its output layer is a copy of the embedding."""
        rank, every = local.file, {**local.checkpoint.buffers, **local.checkpoint.parameters}
        for chunk, names in enumerate(local.names):
            own = {name: every[label] for name in names if (label := _label_of(chunk, name)) in every}
            shapes = {name: parameter.shape for name, parameter in own.items()}
            for name, parameter in own.items():
                whole, said = names[name], local.said.get(parameter.name)
                parts = {TIED.get(whole, whole) if tied else whole: parameter}
                if is_fused(name):
                    count = expert_count(name, shapes, expert_ranks)
                    parts = _experts(whole, parameter, rank.ep * count, count)
                    said = None if said is None else 1 - said
                for part_name, part in parts.items():
                    self.said |= {} if said is None else {part_name: said}
                    copies = self.copies.setdefault(part_name, {})
                    copies.setdefault((rank.pp, chunk, rank.ep), {})[rank.tp] = part

    def add_to(self, checkpoint: Checkpoint) -> None:
        """Give a checkpoint the whole parameters and buffers."""
        firsts = {name: next(iter(next(iter(its.values())).values())) for name, its in self.copies.items()}
        shapes = {name: one.shape for name, one in firsts.items()}
        is_trained = any(len(p.slots) > 1 for its in self.copies.values() for one in its.values() for p in one.values())
        for name in in_order(self.copies):
            is_buffer, spans = _is_buffer(name, firsts[name]), firsts[name].slots[WEIGHT].spans
            with about(spans[0].path if spans else self.first.file.path):
                whole = self._whole(checkpoint, name, shapes, "buffer" if is_buffer else "parameter")
            whole.frozen = is_trained and not is_buffer and len(whole.slots) == 1
            (checkpoint.buffers if is_buffer else checkpoint.parameters)[whole.name] = whole

    def _whole(self, checkpoint: Checkpoint, name: str, shapes: Shapes, kind: str) -> Parameter:
        """Return a parameter from the slices and copies that ranks have of it; copies are noted."""
        shape, rule, given = shapes[name], KEPT, self.given.get(name, name)
        for copy in self.copies[name].values():
            if len(copy) != self.ranks:
                raise LayoutError(f"{name} is not on all tensor-parallel ranks", expected=f"{self.ranks} ranks",
                                  found=len(copy))  # fmt: skip
        if self.ranks > 1 and kind == "parameter":
            rule = cut_of(name, shapes, said=self.first.arguments.get("swiglu"))
            if self.said.get(name, rule.dimension) != rule.dimension:
                raise LayoutError(f"the masters of {name} say that it is cut differently",
                                  expected=f"dimension {rule.dimension}", found=self.said[name])  # fmt: skip
        every = [[copy[rank] for rank in range(self.ranks)] for copy in self.copies[name].values()]
        found: dict[str, Slot] = {}
        for key, own in [(key, [its.slots.get(key) for its in parameters])
                         for parameters in every for key in parameters[0].slots]:  # fmt: skip
            slots = [slot for slot in own if slot is not None]
            if len(slots) != self.ranks:
                raise LayoutError(f"{key} of {name} is not on all tensor-parallel ranks")
            if slots[0].shape != shape and slots[0].numel != 1 and self.ranks > 1:
                raise UnsupportedError(f"{key} of {name} is cut, but does not have the shape of its weight",
                                       expected=shape, found=slots[0].shape)  # fmt: skip
            cut = rule if slots[0].shape == shape else KEPT
            whole = self._in_current_order(name, slots) or cut.joined(name, slots)
            original = found.setdefault(key, whole)
            copies: list[tuple[Slot, Slot, int | None]] = [] if original is whole else [(whole, original, None)]
            if cut.dimension is None:
                copies += [(slot, whole, rank) for rank, slot in enumerate(slots[1:], 1)]
            for copy_slot, of, at in copies:
                check_alike(copy_slot, of, f"ranks have copies of {given} that differ")
                if copy_slot.numel:
                    checkpoint.duplicates.append(Duplicate(kind, given, given, copy_slot, of, at))
        group = next((its[0].group for its in every if its[0].group is not None), None)
        state = next((its[0].state for its in every if its[0].state), {})
        return Parameter(given, found[WEIGHT].shape, found[WEIGHT].dtype, found, group, state=state)

    def _in_current_order(self, name: str, slots: Sequence[Slot]) -> Slot | None:
        """Return a parameter whose rows an old version has in another order; None: they are as they shall be."""
        version, splits = self.first.content.get(VERSION, 0), SPLITS.get(name.split(".")[-2:][0])
        if splits is None or not isinstance(version, (int, float)) or version >= CURRENT or not slots[0].shape:
            return None
        heads = size_of(self.first.arguments, "num_attention_heads")
        if heads is None:
            raise UnsupportedError(f"the order of the rows of {name} is unknown",
                                   expected="num_attention_heads in the arguments")  # fmt: skip
        return reordered(name, slots, splits, heads, float(version))


@dataclass(slots=True)
class Local:
    """A rank's own model and optimizer, by its own names.

    Parameters
    ----------
    file : RankFile
    names : list of dict of str to str
        Of each chunk, those in the whole model by those in the file.
    checkpoint : Checkpoint
    optimizers : list of Held
    rules : list of Rule
        Of the rank's file.
    more : list of SourceFile
        Its other files.
    said : dict of str to int
        Along which dimension masters say that a parameter is cut.
    """

    file: RankFile
    names: list[dict[str, str]]
    checkpoint: Checkpoint
    optimizers: list[Held] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    more: list[SourceFile] = field(default_factory=list)
    said: dict[str, int] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether its optimizers have their state by number."""
        return bool(self.optimizers) and all(isinstance(one.node.get("state"), dict) for one in self.optimizers)


def read(place: Place) -> Checkpoint:
    """Read the structure of a directory; of a distributed optimizer, also its masters and the weights.

    Raises
    ------
    SourceError
        Files are missing or damaged, contradict each other, or hold what is not known for certain.
    """
    own = read_own(place.path)
    ranks = read_ranks(place.path, own.ranks)
    first, numbering = ranks[0], Numbering(ranks)
    checkpoint = Checkpoint(str(place.path), FORMAT, LEGACY)
    sizes = {kind: 1 + max(getattr(one, kind) for one in ranks) for kind in ("tp", "pp", "ep")}
    model = Model(own.names, sizes["tp"], first)
    every = []
    for one in ranks:
        with about(one.file.path):
            local = _local(one, [numbering.names(one, chunk) for chunk in range(len(one.chunks))])
            every.append(local)
            tied = one.arguments.get(UNTIED) is False or own.ranks.get("tied") == 1
            model.gather(local, sizes["ep"], tied=tied)
    _check_groups(every)
    model.add_to(checkpoint)
    _settle_order(checkpoint, own.names, [its for local in every for its in local.names])
    common = Common(first.file, {str(key): value for key, value in first.content.items() if key not in first.keys})
    if every[0].is_plain:
        for number, group in enumerate(every[0].checkpoint.param_groups):
            members = [one.name for one in checkpoint.parameters.values() if one.group == number]
            checkpoint.param_groups.append(ParamGroup(group.hyperparameters, members, group.state))
        keep_rest(checkpoint, common, every[0].optimizers, (GROUPS, MASTERS))
    else:
        attach(checkpoint, common, own.groups)
    keep_common(checkpoint, common)
    _carry(checkpoint, every)
    if any(local.more for local in every):
        checkpoint.details["optimizer sharding"] = OPTIMIZER_FILE
        if GRADIENTS in every[0].checkpoint.details:
            checkpoint.details[GRADIENTS] = every[0].checkpoint.details[GRADIENTS]
    checkpoint.padding_spans += [spans for local in every for spans in local.checkpoint.padding_spans]
    topology, checkpoint.world_size = topology_of(common.arguments, checkpoint)
    checkpoint.topology = replace(topology, **sizes)
    bounds = numbering.bounds()
    if sizes["pp"] > 1 and bounds is not None:
        checkpoint.details[BOUNDS] = ",".join(map(str, bounds))
    if len(first.chunks) > 1:
        checkpoint.details[CHUNKS] = len(first.chunks)
    if any(map(is_fused, (name for one in ranks for its in one.chunks for name in its))):
        checkpoint.details[EXPERTS] = FUSED
    checkpoint.step = common.step
    restore_own(checkpoint, own)
    return checkpoint


def _label_of(chunk: int, name: str) -> str:
    """Return the name that a parameter of a chunk has on its rank, where names of chunks may be the same."""
    return name if chunk == 0 else f"model{chunk}.{name}"


def _is_buffer(name: str, one: Tensor | Parameter) -> bool:
    return not is_floating(one.dtype) or BUFFERS.fullmatch(name) is not None


def _local(one: RankFile, names: list[dict[str, str]]) -> Local:
    """Return what a rank has. Names of chunks begin with the number of the chunk, where there are several."""
    path = one.file.path
    own = Checkpoint(path, FORMAT)
    local = Local(one, names, own)
    chunks: list[list[str]] = []
    shared: list[str] = []
    # The copy of an embedding for further tokens has its own name; the output layer beside it is shared with none.
    further = any(FURTHER.fullmatch(name) for chunk in one.chunks for name in chunk)
    for at, chunk in enumerate(one.chunks):
        chunks.append([])
        for name, value in chunk.items():
            if not isinstance(value, Tensor) or not is_weight(name, value):
                continue
            label, is_buffer = _label_of(at, name), _is_buffer(name, value)
            parameter = Parameter.of(label, slot_of(WEIGHT, value, path))
            (own.buffers if is_buffer else own.parameters)[label] = parameter
            if is_buffer:
                continue
            chunks[-1].append(label)
            whole = names[at][name]
            if whole in TIED.values() or (whole in TIED and not further):
                shared.append(label)
        local.rules.append(Rule((one.keys[at], REST), IMPLIED, "modules without their own state"))
    local.optimizers = optimizers_of(one.content.get(OPTIMIZER), (OPTIMIZER,))
    flat = one.folder / OPTIMIZER_FILE
    if local.is_plain:
        rules, local.said = attach_plain(own, local.optimizers, path)
        local.rules += rules
    elif local.optimizers and is_file(flat):
        file = read_torchfile(flat)
        found = attach_distributed(own, chunks, file, shared, bucket_numels(one.arguments))
        local.more.append(describe(file, "optimizer", mp_rank=one.tp, rules=found))
    elif local.optimizers:
        raise missing("has no file of the distributed optimizer's state", one.folder, OPTIMIZER_FILE)
    return local


def _experts(name: str, parameter: Parameter, first: int, count: int) -> dict[str, Parameter]:
    """Return each expert's own part of a parameter of several, as if it were one by itself."""
    every: list[dict[str, Slot]] = [{} for _ in range(count)]
    for key, slot in parameter.slots.items():
        if slot.shape != parameter.shape and slot.numel != 1:
            raise UnsupportedError(f"{key} of {name} does not consist of one part per expert",
                                   expected=parameter.shape, found=slot.shape)  # fmt: skip
        own = apart(slot, name, count) if slot.shape == parameter.shape else [slot] * count
        for slots, one in zip(every, own, strict=True):
            slots[key] = one
    return {
        one: Parameter(one, slots[WEIGHT].shape, parameter.dtype, slots, parameter.group, state=parameter.state)
        for at, slots in enumerate(every)
        for one in [name_of_one(name, first + at)]
    }


def _settle_order(checkpoint: Checkpoint, own: Mapping[str, str], sequences: Sequence[Mapping[str, str]]) -> None:
    """Have parameters in the order in which the module has them, or say that it is not known.

    That of GPT's layers is known; another model has the order that its file has, where one file has all of it.
    """
    named = [[name_of_one(name, 0) for name in its.values()] for its in sequences]
    given = [[given for name in its if (given := own.get(name, name)) in checkpoint.parameters] for its in named]
    places = {name: at for at, name in enumerate(checkpoint.parameters)}
    if all([places[name] for name in its] == sorted(places[name] for name in its) for its in given):
        return
    whole = next((its for its in given if set(its) == checkpoint.parameters.keys()), None)
    if whole is None:
        checkpoint.details[ORDER] = "not known: that of each rank is not the one of GPT's layers"
        return
    checkpoint.parameters = {name: checkpoint.parameters[name] for name in whole}


def _check_groups(every: Sequence[Local]) -> None:
    """Raise ShardError where ranks' optimizers differ in anything but their parameters."""
    first, *rest = ([repr(group.hyperparameters) for group in one.checkpoint.param_groups] for one in every)
    for local, groups in zip(every[1:], rest, strict=True):
        if groups != first:
            raise ShardError(f"has other param groups than {every[0].file.folder.name}", path=local.file.file.path,
                             advice="the files may be from two steps or runs")  # fmt: skip


def _carry(checkpoint: Checkpoint, every: Sequence[Local]) -> None:
    """Describe the files, and keep what only some rank's file says, under the name of its directory."""
    first, digests = every[0].file, Digests()
    for local in every:
        one, rules = local.file, list(local.rules)
        for chunk, names in enumerate(one.chunks):
            for name, value in names.items():
                if not is_weight(name, value) and value is not None:
                    checkpoint.metadata[f"{one.folder.name}.{_label_of(chunk, name)}"] = carried(one.file, value)
        for held in local.optimizers:
            rules.append(Rule((*held.steps, GROUPS, REST), STATE if one is first else COPY, "hyperparameters"))
            others = [] if one is first else [str(key) for key in held.outer if key not in (OPTIMIZER, MASTERS)]
            rules += [Rule((*held.outer_steps, key, REST), COPY, SAME, tensors=True) for key in others]
        for key, value in one.content.items():
            if one is first or key in (*one.keys, OPTIMIZER):
                continue
            if digests.of(first.content.get(key)) == digests.of(value) and not any(walk_tensors(value)):
                rules.append(Rule((str(key), REST), COPY, SAME))
            else:
                checkpoint.metadata[f"{one.folder.name}.{key}"] = carried(one.file, value)
        checkpoint.files += [describe(one.file, "model", mp_rank=one.tp, rules=rules), *local.more]
