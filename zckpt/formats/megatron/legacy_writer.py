"""Lay out a run's directory with one checkpoint in Megatron's legacy files, for any number of ranks.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   the rank's model by its own names, its optimizer, the rest
                                        distrib_optim.pt     of the distributed optimizer: flat, with zeros in the gaps
                 zckpt.pt                                    what these have no place for: see `objects`

stages         which layers and experts a rank has, what of a parameter, and what it calls them
buckets        where the distributed optimizer has a parameter

Whatever the user does not say of ranks, and of the module on them, is as in SOURCE where that has it: in its own files,
or in the arguments of Megatron-LM that came with it.

Source: Megatron-LM's `checkpointing.py`, `get_checkpoint_name`; megatron-core 0.16,
`Float16OptimizerWithFloat16Params.state_dict`, `DistributedOptimizer.state_dict`, `get_parameter_state_dp_zero`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.buckets import JOINED, PARAM, UNPADDED, Member, default_bucket_numel
from zckpt.formats.megatron.buckets import lay_out as lay_out_buckets
from zckpt.formats.megatron.cut import VOCABULARY, cuts_of
from zckpt.formats.megatron.directory import FILE, FOLDER, OPTIMIZER_FILE
from zckpt.formats.megatron.fused import ONE
from zckpt.formats.megatron.legacy import APART, BOUNDS, CHUNKS, EXPERTS, FUSED, LAYERS, NUMBERED, ORDER, UNTIED
from zckpt.formats.megatron.local import GRADIENTS
from zckpt.formats.megatron.names import BLOCK, LOCAL, TIED, Name, filed_names, is_expert, live_names
from zckpt.formats.megatron.objects import ARGUMENTS, EXTRA_STATE, OPTIMIZER, ROWS, Arguments, states_by
from zckpt.formats.megatron.optimizer import GROUPS, MASTERS, STATES, STEP
from zckpt.formats.megatron.stages import (
    Bounds,
    Dealt,
    Sliced,
    bounds_of,
    dealt,
    expert_counts,
    on_expert_rank,
    order_of,
)
from zckpt.formats.megatron.writer import PLAIN, Content, Group, Source, shards_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import arguments_of, arguments_with
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, new_storage, view
from zckpt.immutable import immutable
from zckpt.state import MASTER, Checkpoint, Slot, Topology, by_key, dict_of, size_of, stated
from zckpt.torchfile import DType

RNG, EXPERT_CUT = "rng_state", "expert_tensor_parallel_size"

_MODULE = re.compile(r"((?:.*\.)?(?:linear_\w+|output_layer|eh_proj|query_key_value|dense\w*))\.weight[0-9]*")
_CHUNK = re.compile(r"model([0-9]+)\.(.+)")
_OF_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))")


@immutable
class Target:
    """What the ranks are."""

    topology: Topology
    chunks: int  # of the model on each stage
    bounds: Bounds  # first layer of each chunk, and the number of layers
    rows: int | None  # of the vocabulary; None: SOURCE's
    engine: bool  # whether layers are Transformer Engine's
    bucket_numel: int | None  # after which a bucket of gradients ends; None: nowhere
    experts: str = APART  # {FUSED, NUMBERED, APART}; how experts are in it, where their names do not say so


def target_of(checkpoint: Checkpoint, options: object) -> Target:
    """Return what the target is to be, by the options of `convert` or `reshard`. Raises UsageError: an odd size."""

    def said(name: str) -> Any:  # noqa: ANN401  # of any type that an option may have
        return getattr(options, name, None)

    arguments, own = arguments_of(checkpoint.metadata.get(ARGUMENTS)), checkpoint.topology
    given = {"dp": said("world_size"), "tp": said("tensor_parallel_size"), "pp": said("pipeline_parallel_size"),
             "ep": said("expert_parallel_size")}  # fmt: skip
    chunks, size = said("virtual_pipeline_parallel_size"), said("ddp_bucket_size")
    for value in (*given.values(), chunks):
        if value is not None and value < 1:
            raise UsageError("unusable number of ranks", expected="at least 1", found=value)
    if size is not None and size < 0:
        raise UsageError("unusable --ddp-bucket-size", expected="at least 0", found=size)
    topology = replace(own, **stated(given))
    known = checkpoint.details.get(CHUNKS, 1)
    chunks = chunks or (known if isinstance(known, int) and topology.pp == own.pp else 1)
    if chunks > 1 and topology.pp == 1:
        raise UsageError("a virtual pipeline needs several stages", expected="--pipeline-parallel-size P",
                         found=topology.pp)  # fmt: skip
    bounds = said("stage_bounds")
    if bounds is None and (topology.pp, chunks) == (own.pp, known) and isinstance(checkpoint.details.get(BOUNDS), str):
        bounds = str(checkpoint.details[BOUNDS])
    names = checkpoint.names
    layers = [one.layer for one in map(Name.of, names) if one.layer is not None and BLOCK.fullmatch(one.block)]
    if size is None:
        size = default_bucket_numel(arguments, topology.dp) if arguments.get("overlap_grad_reduce") is True else None
    implementation = said("transformer_impl")
    if implementation is None:
        is_local = checkpoint.details.get(LAYERS) == LOCAL or filed_names(names) != {name: name for name in names}
        implementation = LOCAL if is_local else arguments.get("transformer_impl")
    engine = implementation != LOCAL
    return Target(
        topology=topology,
        chunks=chunks,
        bounds=bounds_of(bounds, 1 + max(layers, default=-1), topology.pp * chunks),
        rows=_rows(checkpoint, said("padded_vocab_size")),
        engine=engine,
        bucket_numel=size or None,
        experts=_experts(checkpoint, names, arguments, engine=engine),
    )


def _rows(checkpoint: Checkpoint, rows: int | None) -> int | None:
    """Return the rows of the vocabulary: those that the user says, or SOURCE's model had; None: those that it has."""
    vocabularies = [one for one in checkpoint.tensors() if one.name.endswith(VOCABULARY)]
    for one in vocabularies:
        if not one.shape:
            raise UnsupportedError(f"{one.name} has no rows, which a vocabulary has", found=one.shape)
    present = max((one.shape[0] for one in vocabularies), default=0)
    known = checkpoint.details.get(ROWS)
    rows = known if rows is None and isinstance(known, int) else rows
    if rows is not None and rows < present:
        raise UsageError(
            "unusable --padded-vocab-size",
            expected=f"at least SOURCE's {present} rows, which are all trained",
            found=rows,
        )
    return rows if rows != present else None


def _experts(checkpoint: Checkpoint, names: Sequence[str], arguments: Arguments, *, engine: bool) -> str:
    """Return how the module has experts: as in SOURCE's legacy files, or as its program's arguments say."""
    if checkpoint.format_version == "legacy":
        return str(checkpoint.details.get(EXPERTS, APART))
    if arguments.get("moe_grouped_gemm") is not True or not any(map(ONE.fullmatch, names)):
        return APART
    if not engine or arguments.get("moe_use_legacy_grouped_gemm") is True:
        return FUSED
    if arguments.get("moe_use_legacy_grouped_gemm") is False:
        return NUMBERED
    raise UnsupportedError(
        "its experts are grouped in the module, and their names there are unknown",
        expected="moe_use_legacy_grouped_gemm as well as moe_grouped_gemm in the arguments",
        advice="write torch_dist, which any kind of experts can load",
    )


def sizes_of(target: Target, arguments: Arguments) -> dict[str, object]:
    """Return what Megatron-LM's arguments say of the target's sizes, by those of SOURCE."""
    top = target.topology
    return {
        "tensor_model_parallel_size": top.tp,
        "pipeline_model_parallel_size": top.pp,
        "transformer_pipeline_model_parallel_size": top.pp,
        "virtual_pipeline_model_parallel_size": target.chunks if target.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": target.bounds[1] - target.bounds[0] if target.chunks > 1 else None,
        "expert_model_parallel_size": top.ep,
        EXPERT_CUT: top.tp,
        "data_parallel_size": top.dp,
        "world_size": top.dp * top.tp * top.pp * (size_of(arguments, "context_parallel_size") or 1),
        **stated({"padded_vocab_size": target.rows}),
    }


@immutable
class Model:
    """The whole model by the names of its module, in its order."""

    source: Source
    given: Mapping[str, str]  # the source's own names
    sliced: Sliced
    target: Target
    gradients: Mapping[str, str]  # their types by the weights', where they are not float32
    tied: Mapping[str, str]  # what the last stage calls its copy of an embedding

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
        said = arguments_of(tree[ARGUMENTS])
        if said.get(EXPERT_CUT) not in (None, top.tp) and any(map(is_expert, model.given)):
            source.notes.append(f"experts are cut for {top.tp} tensor-parallel ranks, as the rest, and SOURCE's for "
                f"{said[EXPERT_CUT]}: start Megatron-LM with --expert-tensor-parallel-size {top.tp}")  # fmt: skip
        tree[ARGUMENTS] = arguments_with(tree[ARGUMENTS], sizes_of(target, said))
    its_own = _of_ranks(checkpoint, ranks, target)
    if RNG in checkpoint.metadata and its_own is None:
        source.notes.append("random states belong to other ranks, and are kept in zckpt.pt: start Megatron-LM with "
            "--no-load-rng")  # fmt: skip
        tree.pop(RNG, None)
    held = {str(key) for key in tree}
    files = []
    for rank in ranks:
        content = {**tree, **_states(model, rank)}
        for key, value in (its_own or {}).get(rank.folder, {}).items():
            held.add(f"{rank.folder}.{key}")
            if not key.endswith(EXTRA_STATE):
                content[key] = value
                continue
            chunk, several = _CHUNK.fullmatch(key), "model" not in content
            states = content[f"model{chunk[1] if chunk else 0}" if several else "model"]
            if isinstance(states, dict):
                states[chunk[2] if chunk and several else key] = value
        if source.groups:
            content[OPTIMIZER] = _optimizers(model, rank)
        folder = f"{source.folder}/{rank.folder}"
        files.append(torch_writer.lay_out(f"{folder}/{FILE}", content))
        if source.groups and source.kind != PLAIN:
            buffers = [  # what expert-parallel ranks have alike only the first one's file has
                None if rank.ep and not any(one.is_of_experts for one in groups) else _buffers(model, rank, groups)
                for groups, _, _ in source.optimizers()
            ]
            held_flat = buffers[0] if len(buffers) == 1 else buffers
            files.append(torch_writer.lay_out(f"{folder}/{OPTIMIZER_FILE}", held_flat))
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
    gradients = {str(key): str(value) for key, value in dict_of(checkpoint.details.get(GRADIENTS)).items()}
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


def _states(model: Model, rank: Rank) -> Content:
    """Return the state dicts of a rank's chunks; modules that ask for a state of their own have an empty one."""
    found: Content = {}
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
        inner: Content = {STATES: states, GROUPS: values}
        kinds = {source.tensors[name][1] == "float32" for group in groups for name in group.members}
        if len(kinds) > 1:
            raise UnsupportedError("trains both 16-bit and 32-bit weights, which these files number differently",
                                   advice="give --ckpt-format=torch_dist")  # fmt: skip
        every.append(inner if kinds == {True} else {OPTIMIZER: inner, MASTERS: masters, **around})
    return every[0] if len(every) == 1 else every


def _numbered(
    model: Model, rank: Rank, groups: Sequence[Group], values: Sequence[Content]
) -> tuple[Content, list[list[object]]]:
    """Return the state of parameters by number, and the masters of each group, whose values get the numbers."""
    states: Content = {}
    masters: list[list[object]] = []
    number = 0
    for group, its in zip(groups, values, strict=True):
        first = number
        masters.append([])
        for one in model.members(group, rank.chunks):
            node: Content = {**stated({STEP: model.source.own_step})}
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


def _buffers(model: Model, rank: Rank, groups: Sequence[Group]) -> Content:
    """Return the buffers of an optimizer: each has a flat tensor for each slot, of all buckets end to end."""
    members = {name for group in groups for name in group.members}
    found: Content = {JOINED: True}
    for at, chunk in enumerate(rank.chunks):
        kinds = by_key((model.dtype(one), one) for one in chunk if model.given[one.name] in members)
        for kind, its in kinds.items():
            gradients = model.gradients.get(kind, "float32")
            numel = model.target.bucket_numel if rank.pp == 0 and at == 0 else None
            every = [Member(one.local, prod(model.sliced.shape(one)), one.shared) for one in its]
            layout = lay_out_buckets(every, numel)
            starts = layout.starts()
            parts = by_key(
                (PARAM if key == MASTER else key, (dtype, SlotContent(starts[one.local], slot, label)))
                for one in its
                for key, slot, dtype, label in model.states(one, rank.tp)
            )
            buffer: Content = {}
            for key, its_parts in parts.items():
                dtypes = sorted({dtype for dtype, _ in its_parts})
                if len(dtypes) > 1:
                    raise UnsupportedError(f"{key} has several types, but a buffer has one", found=dtypes)
                storage = new_storage(dtypes[0], layout.numel, [content for _, content in its_parts])
                buffer[key] = view(storage, (layout.numel,))
            found[len(found) - 1] = {(DType(kind), DType(gradients)): {**buffer, UNPADDED: layout.numel}}
    return found


def _of_ranks(checkpoint: Checkpoint, ranks: Sequence[Rank], target: Target) -> dict[str, dict[str, object]] | None:
    """Return what each rank's file had for itself, where the target's ranks are the same; None where they are not."""
    folders = {Path(file.path).parent.name for file in checkpoint.files if file.name == FILE}
    bounds = ",".join(map(str, target.bounds))
    if folders != {rank.folder for rank in ranks} or checkpoint.details.get(BOUNDS, bounds) != bounds:
        return None
    found: dict[str, dict[str, object]] = {}
    for key, value in checkpoint.metadata.items():
        folder, _, rest = key.partition(".")
        if FOLDER.fullmatch(folder):
            found.setdefault(folder, {})[rest] = value
    return found
