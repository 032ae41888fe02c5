"""The legacy files of Megatron-LM and Megatron-Core as a Checkpoint: the model as one rank has it, with its optimizer.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT/model_optim_rng.pt   rank TT: {"model": ..., "optimizer": ..., "args": ..., ...}
                            distrib_optim.pt     what the distributed optimizer has of this rank's parameters
                 mp_rank_TT_PPP/                 with pipeline stage PPP, or expert rank where there is one stage
                 mp_rank_TT_PPP_EEE/             with both

model, or model0, model1, ... of a virtual pipeline, is the state dict of the module on the rank. Layers are numbered
from 0 in each, experts on each expert-parallel rank. Chunk v of stage p has the layers behind those of all stages'
chunks before v, and of chunks v of the stages before p.

Slices of tensor-parallel ranks are spans of the whole. What several ranks have whole (norms, what is no expert on
expert-parallel ranks, an embedding that the last stage keeps as its output layer) is read from the first, and the rest
are copies of it.

local    a rank's optimizer
cut      how ranks' slices make up a parameter

Source: megatron-core 0.16, Megatron-LM's `checkpointing.py`, `LanguageModule.setup_embeddings_and_output_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, about, listed
from zckpt.formats.megatron.buckets import bucket_numels
from zckpt.formats.megatron.cut import CURRENT, KEPT, SPLITS, Shapes, cut_of, reordered
from zckpt.formats.megatron.directory import FILE, FOLDER, FORMAT, LEGACY, OPTIMIZER_FILE, Place, folders, missing
from zckpt.formats.megatron.fused import apart, expert_count, is_fused, name_of_one
from zckpt.formats.megatron.local import attach_distributed, attach_plain
from zckpt.formats.megatron.names import BLOCK, BUFFERS, LOCAL, TIED, Name, filed_names, in_order, is_expert
from zckpt.formats.megatron.objects import (
    OPTIMIZER,
    VERSION,
    Arguments,
    Common,
    Own,
    read_own,
    restore_own,
    settle,
    topology_of,
)
from zckpt.formats.megatron.optimizer import GROUPS, MASTERS, Held, attach, keep_common, keep_rest, optimizers
from zckpt.formats.megatron.stages import FURTHER
from zckpt.formats.torch_files.tensors import arguments_of, as_mapping, carried, describe, slot_of
from zckpt.immutable import mutable
from zckpt.state import (
    WEIGHT,
    Checkpoint,
    Parameter,
    ParamGroup,
    Slot,
    SourceFile,
    dict_of,
    first_of,
    is_floating,
    positions,
    size_of,
    without,
)
from zckpt.state.inventory import COPY, IMPLIED, REST, STATE, Rule
from zckpt.storage.files import is_file
from zckpt.storage.nodes import ADVICE
from zckpt.torchfile import Digests, Tensor, TorchFile, has_tensors, read_torchfile

UNTIED = "untie_embeddings_and_output_weights"

CHUNKS, BOUNDS, EXPERTS, LAYERS = "virtual stages", "stage bounds", "experts", "layers"
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


_CHUNK = re.compile(r"model([0-9]{0,18})")

TENSOR_RANKS, STAGE_RANKS, EXPERT_RANKS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
)  # fmt: skip


@mutable
class Rank:
    """What a rank's files hold: its model and optimizer, by its own names."""

    tp: int  # its numbers
    pp: int
    ep: int
    folder: Path  # its directory
    file: TorchFile
    content: Mapping[object, object]  # the root of that
    chunks: tuple[dict[str, object], ...]  # the state dict of each chunk of the model, by the names that it has there
    keys: tuple[str, ...]  # under which they are
    checkpoint: Checkpoint
    names: list[dict[str, str]] = field(default_factory=list)
    """Of each chunk, those in the whole model by those in the file."""
    optimizers: list[Held] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)  # of the file
    more: list[SourceFile] = field(default_factory=list)  # its other files
    said: dict[str, int] = field(default_factory=dict)  # along which dimension masters say that a parameter is cut

    @property
    def arguments(self) -> Arguments:
        """The program's arguments; empty where the file has none."""
        return arguments_of(self.content.get("args"))

    @property
    def is_plain(self) -> bool:
        """Whether its optimizers have their state by number."""
        return bool(self.optimizers) and all(isinstance(one.node.get("state"), dict) for one in self.optimizers)


def read_ranks(directory: Path, known: Mapping[str, int]) -> list[Rank]:
    """Read the structure of all ranks' files, in the order of tensor, expert, and pipeline ranks.

    `known`: how many ranks of each kind there are, `tp`, `pp` and `ep`, where that is known otherwise than by the
    files. Raises ShardError: a rank's file is missing, or of another step; SourceError: a file is damaged, or what its
    directory's name means is not certain.
    """
    paths = folders(directory)
    numbers = {name: [int(n) for n in match.groups() if n is not None]
               for name in paths if (match := FOLDER.fullmatch(name))}  # fmt: skip
    lengths = {len(one) for one in numbers.values()}
    if len(lengths) > 1:
        raise ShardError("has rank directories of more than one kind", found=listed(list(paths)))
    files = {name: read_torchfile(path / FILE) for name, path in paths.items()}
    first = next(iter(files.values()))
    content = as_mapping(first.root, first.path)
    arguments = arguments_of(content.get("args"))
    tp, own = size_of(arguments, TENSOR_RANKS), size_of(arguments, "expert_tensor_parallel_size")
    states = (dict_of(its) for key, its in content.items() if isinstance(key, str) and _CHUNK.fullmatch(key))
    has_experts = any(is_expert(str(name)) for its in states for name in its)
    if has_experts and tp is not None and own not in (None, tp):  # which ranks have them, no file says
        raise UnsupportedError("experts are cut for another number of tensor-parallel ranks than the rest",
                               expected=f"expert_tensor_parallel_size {tp}", found=own,
                               advice="save it as torch_dist with the program that wrote it")  # fmt: skip
    is_second_expert = lengths == {2} and (
        known["ep"] > 1 if {"ep", "pp"} <= known.keys() else _is_second_expert(arguments, list(paths))
    )
    found = []
    for name, (rank, *rest) in numbers.items():
        stages, experts = ([], rest) if is_second_expert else (rest[:1], rest[1:])
        file, path = files[name], files[name].path
        content = as_mapping(file.root, path)
        texts = [key for key in content if isinstance(key, str)]
        chunks = sorted((int(match[1] or 0), key) for key in texts if (match := _CHUNK.fullmatch(key)))
        if not chunks or [number for number, _ in chunks] != list(range(len(chunks))):
            raise DamagedFileError("unexpected content", path=path, expected="the rank's model under `model`",
                                   found=listed(list(content)))  # fmt: skip
        keys = tuple(key for _, key in chunks)
        model = tuple(_flat(content[key], path) for key in keys)
        numbered = rank, sum(stages), sum(experts)
        found.append(Rank(*numbered, paths[name], file, content, model, keys, Checkpoint(path, FORMAT)))
    _check_all(found, arguments)
    return sorted(found, key=lambda one: (one.pp, one.ep, one.tp))


def _is_second_expert(arguments: Arguments, names: list[str]) -> bool:
    """Tell whether the second number of directories is that of expert parallelism."""
    stages, experts = size_of(arguments, STAGE_RANKS), size_of({EXPERT_RANKS: 1, **arguments}, EXPERT_RANKS)
    if stages is not None and experts is not None and (stages > 1) != (experts > 1):
        return experts > 1
    if stages is not None and stages > 1:
        raise ShardError("the names of its directories lack the number of the expert-parallel rank",
                         expected=f"{stages} stages of {experts} ranks", found=listed(names))  # fmt: skip
    raise UnsupportedError("it is unknown whether its ranks are pipeline- or expert-parallel",
                           expected=f"{STAGE_RANKS} in the saved arguments",
                           found=listed(names))  # fmt: skip


def _flat(node: object, path: str) -> dict[str, object]:
    """Return a state dict whose dicts may hold dicts as one, names joined by dots."""
    found: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", as_mapping(node, path, "a state dict"))]
    while waiting:
        front, value = waiting.pop()
        if isinstance(value, dict) and (value or not front):
            waiting += [(f"{front}.{key}" if front else str(key), below) for key, below in reversed(value.items())]
        elif front in found:
            raise DamagedFileError(f"has {front} twice")
        else:
            found[front] = value
    return found


def _check_all(ranks: Sequence[Rank], arguments: Arguments) -> None:
    """Raise ShardError where ranks are missing, are of different steps, or have other numbers of chunks."""
    there = {(one.pp, one.ep, one.tp) for one in ranks}
    kinds = zip(zip(*there, strict=True), (STAGE_RANKS, EXPERT_RANKS, TENSOR_RANKS), strict=True)
    pp, ep, tp = (max(1 + max(numbers), size_of(arguments, key) or 0) for numbers, key in kinds)
    for p, e, t in ((p, e, t) for p in range(pp) for e in range(ep) for t in range(tp)):  # files say how many
        if (p, e, t) not in there:
            raise ShardError(
                "rank files are missing",
                expected=f"{tp} tensor-parallel ranks, {pp} stages, {ep} expert-parallel ranks",
                found=f"none of rank {t} of stage {p}" + (f" and experts {e}" if ep > 1 else ""),
                advice=ADVICE,
                code=MISSING_FILE,
            )
    first = ranks[0]
    for one in ranks[1:]:
        for key in ("iteration", VERSION):
            if one.content.get(key) != first.content.get(key):
                raise ShardError(f"has another {key} than {first.folder.name}", path=one.file.path,
                                 expected=first.content.get(key), found=one.content.get(key))  # fmt: skip
        if one.keys != first.keys:
            raise LayoutError(f"has other chunks of the model than {first.folder.name}", path=one.file.path,
                              expected=", ".join(first.keys), found=", ".join(one.keys))  # fmt: skip


def is_weight(name: str, value: object) -> bool:
    """Tell whether a value of a state dict is of the model, and not what a module keeps for itself (FP8's scales)."""
    return isinstance(value, Tensor) and "_extra_state" not in name


class Numbering:
    """The numbers that layers and experts of ranks have in the whole model."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._stages, self._chunks = 1 + max(one.pp for one in ranks), len(ranks[0].chunks)
        self._parallel = any(one.ep for one in ranks)
        counts: dict[tuple[int, int, str], int] = {}
        for one in ranks:
            for chunk, names in enumerate(one.chunks):
                for name in map(Name.of, names):
                    if name.layer is not None:
                        key = (chunk, one.pp, name.block)
                        counts[key] = max(counts.get(key, 0), name.layer + 1)
        self._first: dict[tuple[int, int, str], int] = {}
        self._ends: dict[str, int] = {}
        for key in sorted(counts):
            self._first[key] = self._ends.get(key[2], 0)
            self._ends[key[2]] = self._first[key] + counts[key]

    def bounds(self) -> list[int] | None:
        """Return the first layer of each chunk, in the model's order, and how many layers there are.

        A chunk without any begins where the next one does. None: there is not one block of layers.
        """
        blocks = [block for block in self._ends if BLOCK.fullmatch(block)]
        if len(blocks) != 1:
            return None
        found = [self._ends[blocks[0]]]
        for chunk in reversed(range(self._chunks)):
            for stage in reversed(range(self._stages)):
                found.insert(0, self._first.get((chunk, stage, blocks[0]), found[0]))
        return found

    def names(self, one: Rank, chunk: int) -> dict[str, str]:
        """Return the names of what is in a chunk in the whole model, by those in the file.

        Raises UnsupportedError: experts of several ranks that are not told apart.
        """
        own = {text: Name.of(text) for text in one.chunks[chunk]}
        count = 1 + max((name.expert for name in own.values() if name.expert is not None), default=-1)
        found = {}
        for text, name in own.items():
            is_odd = name.expert is None and is_expert(text) and not is_fused(text)
            if is_odd and self._parallel and is_weight(text, one.chunks[chunk][text]):
                raise UnsupportedError(f"it is unknown which experts {text} has", expected="a tensor for each expert")
            expert = None if name.expert is None else one.ep * count + name.expert
            layer = None if name.layer is None else name.layer + self._first[chunk, one.pp, name.block]
            found[text] = str(replace(name, expert=expert, layer=layer))
        return found


@mutable
class Model:
    """What all ranks have, by the names of the whole model's module."""

    given: Mapping[str, str]  # names in the checkpoint, where they are others
    ranks: int  # tensor-parallel ones
    first: Rank
    copies: dict[str, Copies] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)  # along which dimension masters say that a parameter is cut

    def gather(self, rank: Rank, expert_ranks: int, *, tied: bool) -> None:
        """Add what a rank has; `tied`: its output layer is a copy of the embedding."""
        every = {**rank.checkpoint.buffers, **rank.checkpoint.parameters}
        for chunk, names in enumerate(rank.names):
            own = {name: every[label] for name in names if (label := _label_of(chunk, name)) in every}
            shapes = {name: parameter.shape for name, parameter in own.items()}
            for name, parameter in own.items():
                whole, said = names[name], rank.said.get(parameter.name)
                parts = {TIED.get(whole, whole) if tied else whole: parameter}
                if is_fused(name):
                    count = expert_count(name, shapes, expert_ranks)
                    parts = _experts(whole, parameter, rank.ep * count, count)
                    said = None if said is None else 1 - said
                for part_name, part in parts.items():
                    self.said |= {} if said is None else {part_name: said}
                    copies = self.copies.setdefault(part_name, {})
                    copies.setdefault((rank.pp, chunk, rank.ep), {})[rank.tp] = part

    def add_to(self, checkpoint: Checkpoint, sequences: Sequence[Mapping[str, str]]) -> None:
        """Give a checkpoint the whole parameters and buffers, in the order of the module where that is known.

        That of GPT's layers is known; another model has the order that its file has, where one file has all of it.
        `sequences`: the names that each chunk of a rank has, in its order.
        """
        firsts = {name: next(iter(next(iter(its.values())).values())) for name, its in self.copies.items()}
        shapes = {name: one.shape for name, one in firsts.items()}
        for name in in_order(self.copies):
            is_buffer, spans = _is_buffer(name, firsts[name]), firsts[name].slots[WEIGHT].spans
            with about(spans[0].path if spans else self.first.file.path):
                whole = self._whole(checkpoint, name, shapes, "buffer" if is_buffer else "parameter")
            (checkpoint.buffers if is_buffer else checkpoint.parameters)[whole.name] = whole
        settle(checkpoint)
        named = [[name_of_one(name, 0) for name in its.values()] for its in sequences]
        known = [[one for name in its if (one := self.given.get(name, name)) in checkpoint.parameters] for its in named]
        places = positions(checkpoint.parameters)
        if all(its == sorted(its, key=places.__getitem__) for its in known):
            return
        complete = next((its for its in known if set(its) == checkpoint.parameters.keys()), None)
        if complete is None:
            checkpoint.details[ORDER] = "not known: that of each rank is not the one of GPT's layers"
        else:
            checkpoint.parameters = {name: checkpoint.parameters[name] for name in complete}

    def _whole(self, checkpoint: Checkpoint, name: str, shapes: Shapes, kind: str) -> Parameter:
        """Return a parameter from the slices and copies that ranks have of it; copies are noted."""
        shape, rule, given = shapes[name], KEPT, self.given.get(name, name)
        for copy in self.copies[name].values():
            if len(copy) != self.ranks:
                raise LayoutError(f"{name} is not on all tensor-parallel ranks", expected=f"{self.ranks} ranks",
                                  found=len(copy))  # fmt: skip
        if self.ranks > 1 and kind == "parameter":
            rule = cut_of(name, shapes, said=self.first.arguments.get("swiglu"), of_slices=True)
            if self.said.get(name, rule.dimension) != rule.dimension:
                raise LayoutError(f"the masters of {name} say that it is cut differently",
                                  expected=f"dimension {rule.dimension}", found=self.said[name])  # fmt: skip
        every = [[copy[rank] for rank in range(self.ranks)] for copy in self.copies[name].values()]
        found: dict[str, Slot] = {}
        for key, slots in [(key, [its.slots[key] for its in parameters if key in its.slots])
                           for parameters in every for key in parameters[0].slots]:  # fmt: skip
            if len(slots) != self.ranks:
                raise LayoutError(f"{key} of {name} is not on all tensor-parallel ranks")
            if slots[0].shape != shape and slots[0].numel != 1 and self.ranks > 1:
                raise UnsupportedError(f"{key} of {name} is cut, but does not have the shape of its weight",
                                       expected=shape, found=slots[0].shape)  # fmt: skip
            cut = rule if slots[0].shape == shape else KEPT
            whole = self._in_current_order(name, slots) or cut.joined(name, slots)
            original = found.setdefault(key, whole)
            checkpoint.duplicates += cut.copies(kind, given, whole, slots, original)
        group = first_of(its[0].group for its in every)
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


def read(place: Place) -> Checkpoint:
    """Read the structure of a directory; of a distributed optimizer, also its masters and the weights.

    Raises SourceError: files are missing or damaged, contradict each other, or hold what is not known for certain.
    """
    own = read_own(place.path)
    ranks = read_ranks(place.path, own.ranks)
    first, numbering = ranks[0], Numbering(ranks)
    checkpoint = Checkpoint(str(place.path), FORMAT, LEGACY)
    sizes = {kind: 1 + max(getattr(one, kind) for one in ranks) for kind in ("tp", "pp", "ep")}
    model = Model(own.names, sizes["tp"], first)
    for one in ranks:
        with about(one.file.path):
            one.names = [numbering.names(one, chunk) for chunk in range(len(one.chunks))]
            _read_rank(one, own)
            tied = one.arguments.get(UNTIED) is False or own.ranks.get("tied") == 1
            model.gather(one, sizes["ep"], tied=tied)
    _check_groups(ranks)
    model.add_to(checkpoint, [its for one in ranks for its in one.names])
    common = Common(first.file, {str(key): value for key, value in without(first.content, *first.keys).items()})
    if first.is_plain:
        for number, group in enumerate(first.checkpoint.param_groups):
            members = [one.name for one in checkpoint.parameters.values() if one.group == number]
            checkpoint.param_groups.append(ParamGroup(group.hyperparameters, members, group.state))
        keep_rest(checkpoint, common, first.optimizers, (GROUPS, MASTERS))
    else:
        attach(checkpoint, common, own.groups)
    keep_common(checkpoint, common)
    _carry(checkpoint, ranks)
    if any(one.more for one in ranks):
        checkpoint.details |= {"optimizer sharding": OPTIMIZER_FILE, **first.checkpoint.details}
    checkpoint.padding_spans += [spans for one in ranks for spans in one.checkpoint.padding_spans]
    topology, checkpoint.world_size = topology_of(common.arguments, checkpoint)
    checkpoint.topology = replace(topology, **sizes)
    bounds = numbering.bounds()
    if sizes["pp"] > 1 and bounds is not None:
        checkpoint.details[BOUNDS] = ",".join(map(str, bounds))
    if len(first.chunks) > 1:
        checkpoint.details[CHUNKS] = len(first.chunks)
    filed = [name for one in ranks for its in one.chunks for name in its]
    if any(map(is_fused, filed)):
        checkpoint.details[EXPERTS] = FUSED
    if own.names and filed_names(filed) != {name: name for name in filed}:  # which the names here do not tell
        checkpoint.details[LAYERS] = LOCAL
    checkpoint.step = common.step
    restore_own(checkpoint, own)
    return checkpoint


def _label_of(chunk: int, name: str) -> str:
    """Return the name that a parameter of a chunk has on its rank, where names of chunks may be the same."""
    return name if chunk == 0 else f"model{chunk}.{name}"


def _is_buffer(name: str, one: Tensor | Parameter) -> bool:
    return not is_floating(one.dtype) or BUFFERS.fullmatch(name) is not None


def _read_rank(one: Rank, said: Own) -> None:
    """Find what a rank has. Names of chunks begin with the number of the chunk, where there are several.

    `said`: by zckpt's own file, which lists what is trained.
    """
    path, own = one.file.path, one.checkpoint
    chunks: list[list[str]] = []
    shared: list[str] = []
    trained = {name for group in said.groups or () for name in group}
    # The copy of an embedding for further tokens has its own name; the output layer beside it is shared with none.
    further = any(FURTHER.fullmatch(name) for chunk in one.chunks for name in chunk)
    for at, chunk in enumerate(one.chunks):
        chunks.append([])
        for name, value in chunk.items():
            if not isinstance(value, Tensor) or not is_weight(name, value):
                continue
            label, is_buffer = _label_of(at, name), _is_buffer(name, value)
            own.place(label, slot_of(WEIGHT, value, path), trained=not is_buffer)
            whole = one.names[at][name]
            first = name_of_one(TIED.get(whole, whole) if said.ranks.get("tied") else whole, 0)
            if is_buffer or (trained and said.names.get(first, first) not in trained):
                continue
            chunks[-1].append(label)
            if whole in TIED.values() or (whole in TIED and not further):
                shared.append(label)
        one.rules.append(Rule((one.keys[at], REST), IMPLIED, "modules without their own state"))
    held = one.content.get(OPTIMIZER)
    one.optimizers = list(optimizers(held, (OPTIMIZER,))) if held else []
    if (held and not one.optimizers) or any(GROUPS not in its.node for its in one.optimizers):
        raise UnsupportedError("holds an unknown kind of optimizer",
                               expected="one with param_groups, or several")  # fmt: skip
    flat = one.folder / OPTIMIZER_FILE
    if one.is_plain:
        rules, one.said = attach_plain(own, one.optimizers, path)
        one.rules += rules
    elif one.optimizers and is_file(flat):
        file = read_torchfile(flat)
        found = attach_distributed(own, chunks, file, shared, bucket_numels(one.arguments))
        one.more.append(describe(file, "optimizer", mp_rank=one.tp, rules=found))
    elif one.optimizers:
        raise missing("has no file of the distributed optimizer's state", one.folder, OPTIMIZER_FILE)


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


def _check_groups(every: Sequence[Rank]) -> None:
    """Raise ShardError where ranks' optimizers differ in anything but their parameters."""
    first, *rest = ([repr(group.hyperparameters) for group in one.checkpoint.param_groups] for one in every)
    for rank, groups in zip(every[1:], rest, strict=True):
        if groups != first:
            raise ShardError(f"has other param groups than {every[0].folder.name}", path=rank.file.path,
                             advice="the files may be from two steps or runs")  # fmt: skip


def _carry(checkpoint: Checkpoint, every: Sequence[Rank]) -> None:
    """Describe the files, and keep what only some rank's file says, under the name of its directory."""
    first, digests = every[0], Digests()
    for one in every:
        rules = list(one.rules)
        for chunk, names in enumerate(one.chunks):
            for name, value in names.items():
                if not is_weight(name, value) and value is not None:
                    checkpoint.metadata[f"{one.folder.name}.{_label_of(chunk, name)}"] = carried(one.file, value)
        for held in one.optimizers:
            rules.append(Rule((*held.steps, GROUPS, REST), STATE if one is first else COPY, "hyperparameters"))
            others = [] if one is first else [str(key) for key in held.outer if key not in (OPTIMIZER, MASTERS)]
            rules += [Rule((*held.outer_steps, key, REST), COPY, SAME, tensors=True) for key in others]
        for key, value in without(one.content, *one.keys, OPTIMIZER).items() if one is not first else ():
            if digests.of(first.content.get(key)) == digests.of(value) and not has_tensors(value):
                rules.append(Rule((str(key), REST), COPY, SAME))
            else:
                checkpoint.metadata[f"{one.folder.name}.{key}"] = carried(one.file, value)
        checkpoint.files += [describe(one.file, "model", mp_rank=one.tp, rules=rules), *one.more]
