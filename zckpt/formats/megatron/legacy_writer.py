"""Lay out a run's directory with one checkpoint in Megatron's legacy files, for any number of ranks.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   the rank's model by its own names, its optimizer, the rest
                                        distrib_optim.pt     of the distributed optimizer: flat, with zeros in the gaps
                 zckpt.pt                                    what these have no place for: see `own`

legacy_target  how many ranks, and what the module on them is like
stages         which layers and experts a rank has, what of a parameter, and what it calls them

buckets        where the distributed optimizer has a parameter

Source: Megatron-LM's `checkpointing.py`, `get_checkpoint_name`; megatron-core 0.16,
`Float16OptimizerWithFloat16Params.state_dict`, `DistributedOptimizer.state_dict`, `get_parameter_state_dp_zero`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.buckets import JOINED, PARAM, UNPADDED, Member
from zckpt.formats.megatron.buckets import lay_out as lay_out_buckets
from zckpt.formats.megatron.cut import VOCABULARY, cuts_of
from zckpt.formats.megatron.directory import FILE, FOLDER, OPTIMIZER_FILE
from zckpt.formats.megatron.legacy import BOUNDS, FUSED, NUMBERED, ORDER, UNTIED
from zckpt.formats.megatron.legacy_target import Target, sizes_of, target_of
from zckpt.formats.megatron.local import GRADIENTS
from zckpt.formats.megatron.names import TIED
from zckpt.formats.megatron.norms import live_names
from zckpt.formats.megatron.objects import ARGUMENTS, EXTRA_STATE, OPTIMIZER, states_by
from zckpt.formats.megatron.optimizer import GROUPS, MASTERS, STATES, STEP
from zckpt.formats.megatron.order import order_of
from zckpt.formats.megatron.stages import Dealt, Sliced, dealt, expert_counts, on_expert_rank
from zckpt.formats.megatron.write_common import PLAIN, Group, Source, shards_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import arguments_of, arguments_with
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, new_storage, view
from zckpt.immutable import immutable
from zckpt.state import MASTER, Checkpoint, Slot, by_key
from zckpt.torchfile import DType

RNG = "rng_state"

_MODULE = re.compile(r"((?:.*\.)?(?:linear_\w+|output_layer|eh_proj|query_key_value|dense\w*))\.weight[0-9]*")
_CHUNK = re.compile(r"model([0-9]+)\.(.+)")
_OF_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))")


@immutable
class Model:
    """The whole model by the names of its module, in its order.

    Parameters
    ----------
    source : Source
    given : dict of str to str
        The source's own names.
    sliced : Sliced
    target : Target
    gradients : dict of str to str
        Their types by the weights', where they are not float32.
    tied : dict of str to str
        What the last stage calls its copy of an embedding.
    """

    source: Source
    given: Mapping[str, str]
    sliced: Sliced
    target: Target
    gradients: Mapping[str, str]
    tied: Mapping[str, str]

    def dtype(self, one: Dealt) -> str:
        """Return the type that a weight is to have."""
        return self.source.tensors[self.given[one.name]][1]

    def weight(self, one: Dealt, rank: int) -> SlotTensor:
        """Return what a rank has of a weight."""
        slots = [self.source.tensors[self.given[name]][0] for name in one.names]
        return SlotTensor(self.sliced.part(one, rank, slots), self.dtype(one), one.name)

    def states(self, one: Dealt, rank: int) -> Iterator[tuple[str, Slot, str, str]]:
        """Yield key, slot, type and label of all that the optimizer has of what a rank has, the master first.

        Raises UnsupportedError: it does not have the same of each expert.
        """
        names = [self.given[name] for name in one.names]
        every = [list(self.source.states(name)) for name in names]
        kinds = {tuple((key, dtype) for key, _, dtype in its) for its in every}
        owners = [one for one in self.source.groups if len(names) > 1 and not set(names).isdisjoint(one.members)]
        if len(kinds) > 1 or len(owners) > 1 or len({self.source.tensors[name][1] for name in names}) > 1:
            raise UnsupportedError("experts that are one parameter have the same optimizer slots",
                                   found=f"others of {one.name}")  # fmt: skip
        for at, (key, _, dtype) in enumerate(every[0]):
            part = self.sliced.part(one, rank, [its[at][1] for its in every])
            yield key, part, dtype, f"{key}/{one.name}"

    def members(self, group: Group, chunks: Sequence[Sequence[Dealt]]) -> Iterator[Dealt]:
        """Yield what a rank has of a group's parameters."""
        own = set(group.members)
        yield from (one for chunk in chunks for one in chunk if self.given[one.name] in own)


@immutable
class Rank:
    """One model-parallel rank: its numbers, its directory's name, and what each chunk of its model has."""

    tp: int
    pp: int
    ep: int
    folder: str
    chunks: list[list[Dealt]]


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a run's directory.

    Raises UsageError: a size that does not divide what it cuts; UnsupportedError: it is no model of Megatron's, or has
    what these files have no known place for.
    """
    checkpoint = job.checkpoint
    target = target_of(checkpoint, job.options)
    top = target.topology
    source = Source.of(checkpoint, job.options, top.ep)
    model = _model(source, target)
    ranks = list(_ranks(model))
    tree = source.common_tree({key for key, value in checkpoint.metadata.items() if shards_of(value)})
    if ARGUMENTS in tree:
        tree[ARGUMENTS] = arguments_with(tree[ARGUMENTS], sizes_of(target, arguments_of(tree[ARGUMENTS])))
    its_own = _of_ranks(checkpoint, ranks, target)
    if RNG in checkpoint.metadata and its_own is None:
        source.notes.append("random states belong to other ranks, and are kept in zckpt.pt: start Megatron-LM with "
            "--no-load-rng")  # fmt: skip
        tree.pop(RNG, None)
    held = {str(key) for key in tree}
    files = []
    for rank in ranks:
        content = {**tree, **_states(model, rank)}
        held |= _give(content, (its_own or {}).get(rank.folder, {}), rank.folder)
        if source.groups:
            content[OPTIMIZER] = _optimizers(model, rank)
        folder = f"{source.folder}/{rank.folder}"
        files.append(torch_writer.lay_out(f"{folder}/{FILE}", content))
        if source.groups and source.kind != PLAIN:
            files.append(torch_writer.lay_out(f"{folder}/{OPTIMIZER_FILE}", _all_buffers(model, rank)))
    sizes = {"tp": top.tp, "pp": top.pp, "ep": top.ep, "tied": bool(model.tied)}
    if model.sliced.rows:  # what a vocabulary has, of which the target's has more
        sizes["rows"] = model.sliced.shapes[next(iter(model.sliced.rows))][0]
    return source.finished(files, held, model.given, sizes)


def _model(source: Source, target: Target) -> Model:
    """Return the whole model by the names of its module, in its order."""
    top, checkpoint = target.topology, source.checkpoint
    names = live_names(source.tensors, engine=target.engine)
    if target.experts == NUMBERED:
        names = {name: _OF_EXPERT.sub(r"\1\3\2", live) for name, live in names.items()}
    given = {live: name for name, live in names.items()}
    parameters = [names[name] for name in checkpoint.parameters if name in names]
    # As the files had them where they are the module's own, or by its layers.
    own = checkpoint.format_version == "legacy" and all(name == live for name, live in names.items())
    order = parameters if own and ORDER not in checkpoint.details else order_of(parameters, engine=target.engine)
    if order is None and source.trained:
        raise UnsupportedError("the order of a module's parameters is unknown",
                               found=listed(parameters, most=3),
                               expected="the layers of Megatron-Core's GPTModel")  # fmt: skip
    others = set(parameters)
    ordered = [*(order or parameters), *(name for name in given if name not in others)]
    shapes = {name: source.tensors[given[name]][0].shape for name in ordered}
    rows = {} if target.rows is None else {name: target.rows for name in ordered if name.endswith(VOCABULARY)}
    arguments = arguments_of(checkpoint.metadata.get(ARGUMENTS))
    is_tied = top.pp > 1 and arguments.get(UNTIED) is not True
    is_tied = is_tied and not any(name.endswith("output_layer.weight") for name in ordered)
    known = checkpoint.details.get(GRADIENTS)
    gradients = {str(key): str(value) for key, value in known.items()} if isinstance(known, Mapping) else {}
    if arguments.get("accumulate_allreduce_grads_in_fp32") is False and arguments.get("bf16") is not True:
        gradients = {"float16": "float16"}
    return Model(
        source=source,
        given={name: given[name] for name in ordered},
        sliced=Sliced(shapes, cuts_of(shapes, top.tp, target.rows), top.tp, rows),
        target=target,
        gradients=gradients,
        tied={name: copy for copy, name in TIED.items() if is_tied and name in shapes and copy not in shapes},
    )


def _ranks(model: Model) -> Iterator[Rank]:
    """Yield every rank, with what each chunk of its model has."""
    target, names = model.target, list(model.given)
    top = target.topology
    counts = expert_counts(names, top.ep)
    for stage, chunks in enumerate(dealt(names, target.bounds, stages=top.pp, tied=model.tied)):
        for expert in range(top.ep):
            own = [on_expert_rank(chunk, counts, expert, top.ep, fused=target.experts == FUSED) for chunk in chunks]
            for rank in range(top.tp):
                pipeline = f"_{stage:03d}" if top.pp > 1 else ""
                folder = f"mp_rank_{rank:02d}{pipeline}" + (f"_{expert:03d}" if top.ep > 1 else "")
                yield Rank(rank, stage, expert, folder, own)


def _states(model: Model, rank: Rank) -> dict[object, object]:
    """Return the state dicts of a rank's chunks; modules that ask for a state of their own have an empty one."""
    found: dict[object, object] = {}
    for number, chunk in enumerate(rank.chunks):
        its: dict[str, object] = {}
        for one in chunk:
            its[one.local] = model.weight(one, rank.tp)
            its |= dict.fromkeys(states_by(one.local, _MODULE, attention=model.target.engine))
        found["model" if len(rank.chunks) == 1 else f"model{number}"] = its
    return found


def _optimizers(model: Model, rank: Rank) -> object:
    """Return what a rank's file has of its optimizers: one, or a list of that of experts and that of the rest."""
    source = model.source
    every = []
    for groups, values, around in source.optimizers():
        if source.kind != PLAIN:
            every.append({OPTIMIZER: {GROUPS: values}, **around})
            continue
        states, masters = _numbered(model, rank, groups, values)
        inner: dict[object, object] = {STATES: states, GROUPS: values}
        kinds = {source.tensors[name][1] == "float32" for group in groups for name in group.members}
        if len(kinds) > 1:
            raise UnsupportedError("trains both 16-bit and 32-bit weights, which these files number differently",
                                   advice="give --ckpt-format=torch_dist")  # fmt: skip
        every.append(inner if kinds == {True} else {OPTIMIZER: inner, MASTERS: masters, **around})
    return every[0] if len(every) == 1 else every


def _numbered(
    model: Model, rank: Rank, groups: Sequence[Group], values: Sequence[dict[object, object]]
) -> tuple[dict[object, object], list[list[object]]]:
    """Return the state of parameters by number, and the masters of each group, whose values get the numbers."""
    states: dict[object, object] = {}
    masters: list[list[object]] = []
    number = 0
    for group, its in zip(groups, values, strict=True):
        first = number
        masters.append([])
        for one in model.members(group, rank.chunks):
            step = model.source.own_step
            node: dict[object, object] = {} if step is None else {STEP: step}
            for key, slot, dtype, label in model.states(one, rank.tp):
                tensor = SlotTensor(slot, dtype, label)
                if key == MASTER:
                    masters[-1].append(tensor)
                else:
                    node[key] = tensor
            if node:
                states[number] = node
            number += 1
        its["params"] = list(range(first, number))
    return states, masters


def _all_buffers(model: Model, rank: Rank) -> object:
    """Return what `distrib_optim.pt` has of a rank.

    Of several optimizers it is a list. What expert-parallel ranks have alike only the first one's file has.
    """
    every = [
        None if rank.ep and not any(one.is_of_experts for one in groups) else _buffers(model, rank, groups)
        for groups, _, _ in model.source.optimizers()
    ]
    return every[0] if len(every) == 1 else every


def _buffers(model: Model, rank: Rank, groups: Sequence[Group]) -> dict[object, object]:
    members = {name for group in groups for name in group.members}
    found: dict[object, object] = {JOINED: True}
    for at, chunk in enumerate(rank.chunks):
        kinds = by_key((model.dtype(one), one) for one in chunk if model.given[one.name] in members)
        for kind, its in kinds.items():
            gradients = model.gradients.get(kind, "float32")
            numel = model.target.bucket_numel if rank.pp == 0 and at == 0 else None
            found[len(found) - 1] = {(DType(kind), DType(gradients)): _buffer(model, rank, its, numel)}
    return found


def _buffer(model: Model, rank: Rank, its: Sequence[Dealt], bucket_numel: int | None) -> dict[object, object]:
    """Return a buffer: a flat tensor for each slot, of all buckets end to end."""
    members = [Member(one.local, prod(model.sliced.shape(one)), one.shared) for one in its]
    layout = lay_out_buckets(members, bucket_numel)
    starts = layout.starts()
    parts = by_key(
        (PARAM if key == MASTER else key, (dtype, SlotContent(starts[one.local], slot, label)))
        for one in its
        for key, slot, dtype, label in model.states(one, rank.tp)
    )
    tensors: dict[object, object] = {}
    for key, its_parts in parts.items():
        dtypes = sorted({dtype for dtype, _ in its_parts})
        if len(dtypes) > 1:
            raise UnsupportedError(f"{key} has several types, but a buffer has one", found=dtypes)
        storage = new_storage(dtypes[0], layout.numel, [content for _, content in its_parts])
        tensors[key] = view(storage, (layout.numel,))
    return {**tensors, UNPADDED: layout.numel}


def _of_ranks(checkpoint: Checkpoint, ranks: Sequence[Rank], target: Target) -> dict[str, dict[str, object]] | None:
    """Return what each rank's file had for itself, where the target's ranks are the same; None where they are not."""
    folders = {Path(file.path).parent.name for file in checkpoint.files if Path(file.path).name == FILE}
    bounds = ",".join(map(str, target.bounds))
    if folders != {rank.folder for rank in ranks} or checkpoint.details.get(BOUNDS, bounds) != bounds:
        return None
    found: dict[str, dict[str, object]] = {}
    for key, value in checkpoint.metadata.items():
        folder, _, rest = key.partition(".")
        if FOLDER.fullmatch(folder):
            found.setdefault(folder, {})[rest] = value
    return found


def _give(content: dict[object, object], values: Mapping[str, object], folder: str) -> set[str]:
    """Put what a rank has for itself in its file; return the keys of metadata that it is."""
    for key, value in values.items():
        if not key.endswith(EXTRA_STATE):
            content[key] = value
            continue
        chunk = _CHUNK.fullmatch(key)
        several = "model" not in content
        name = f"model{chunk[1] if chunk else 0}" if several else "model"
        states = content[name]
        if isinstance(states, dict):
            states[chunk[2] if chunk and several else key] = value
    return {f"{folder}.{key}" for key in values}
