"""Lay out a run's directory with one checkpoint in Megatron's legacy files, for any number of ranks.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   the rank's model by its own names, its optimizer, the rest
                                        distrib_optim.pt     of the distributed optimizer: flat, with zeros in the gaps
                 zckpt.pt                                    what these have no place for: see `own`

legacy_target  how many ranks, and what the module on them is like
legacy_state   what is a rank's optimizer
stages         which layers and experts a rank has, what of a parameter, and what it calls them

Source: Megatron-LM's `checkpointing.py`, `get_checkpoint_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.cut import VOCABULARY, cuts_of
from zckpt.formats.megatron.directory import FILE, FOLDER, OPTIMIZER_FILE
from zckpt.formats.megatron.legacy import UNTIED
from zckpt.formats.megatron.legacy_state import Model, Rank, buffers_node, optimizer_node
from zckpt.formats.megatron.legacy_target import BOUNDS, FUSED, NUMBERED, ORDER, Target, target_of, with_sizes
from zckpt.formats.megatron.names import TIED
from zckpt.formats.megatron.norms import live_names
from zckpt.formats.megatron.objects import ARGUMENTS, EXTRA_STATE, OPTIMIZER, arguments_of
from zckpt.formats.megatron.order import order_of
from zckpt.formats.megatron.stages import Sliced, dealt, expert_counts, on_expert_rank
from zckpt.formats.megatron.write_common import PLAIN, Source, shards_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.state import Checkpoint

RNG = "rng_state"

_MODULE = re.compile(r"((?:.*\.)?(?:linear_\w+|output_layer|eh_proj|query_key_value|dense\w*))\.weight[0-9]*")
_ATTENTION = re.compile(r"(.+attention)\.linear_proj\.weight")
_CHUNK = re.compile(r"model([0-9]+)\.(.+)")
_OF_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))")


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
    ranks = list(_ranks(model, target))
    tree = source.common_tree({key for key, value in checkpoint.metadata.items() if shards_of(value)})
    if ARGUMENTS in tree:
        tree[ARGUMENTS] = with_sizes(tree[ARGUMENTS], target)
    its_own = _of_ranks(checkpoint, ranks, target)
    if RNG in checkpoint.metadata and its_own is None:
        source.notes.append("random states are those of other ranks, and kept beside: Megatron-LM starts with "
                            "--no-load-rng")  # fmt: skip
        tree.pop(RNG, None)
    held = {str(key) for key in tree}
    files = []
    for rank in ranks:
        content = {**tree, **_states(model, rank, target)}
        held |= _give(content, (its_own or {}).get(rank.folder, {}), rank.folder)
        if source.groups:
            content[OPTIMIZER] = optimizer_node(model, rank)
        folder = f"{source.folder}/{rank.folder}"
        files.append(torch_writer.lay_out(f"{folder}/{FILE}", content))
        if source.groups and source.kind != PLAIN:
            files.append(torch_writer.lay_out(f"{folder}/{OPTIMIZER_FILE}", buffers_node(model, rank)))
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
        raise UnsupportedError("in which order a module has its parameters is not known",
                               found=listed(parameters, most=3),
                               expected="the layers of Megatron-Core's GPTModel")  # fmt: skip
    others = set(parameters)
    ordered = [*(order or parameters), *(name for name in given if name not in others)]
    shapes = {name: source.tensors[given[name]][0].shape for name in ordered}
    rows = {} if target.rows is None else {name: target.rows for name in ordered if name.endswith(VOCABULARY)}
    arguments = arguments_of(checkpoint.metadata.get(ARGUMENTS))
    is_tied = top.pp > 1 and arguments.get(UNTIED) is not True
    is_tied = is_tied and not any(name.endswith("output_layer.weight") for name in ordered)
    known = checkpoint.details.get("gradients")
    gradients = {str(key): str(value) for key, value in known.items()} if isinstance(known, Mapping) else {}
    if arguments.get("accumulate_allreduce_grads_in_fp32") is False and arguments.get("bf16") is not True:
        gradients = {"float16": "float16"}
    return Model(
        source=source,
        given={name: given[name] for name in ordered},
        sliced=Sliced(shapes, cuts_of(shapes, top.tp, target.rows), top.tp, rows),
        bucket_numel=target.bucket_numel,
        gradients=gradients,
        tied={name: copy for copy, name in TIED.items() if is_tied and name in shapes and copy not in shapes},
    )


def _ranks(model: Model, target: Target) -> Iterator[Rank]:
    """Yield every rank, with what each chunk of its model has."""
    top, names = target.topology, list(model.given)
    counts = expert_counts(names, top.ep)
    for stage, chunks in enumerate(dealt(names, target.bounds, stages=top.pp, tied=model.tied)):
        for expert in range(top.ep):
            own = [on_expert_rank(chunk, counts, expert, top.ep, fused=target.experts == FUSED) for chunk in chunks]
            for rank in range(top.tp):
                pipeline = f"_{stage:03d}" if top.pp > 1 else ""
                folder = f"mp_rank_{rank:02d}{pipeline}" + (f"_{expert:03d}" if top.ep > 1 else "")
                yield Rank(rank, stage, expert, folder, own)


def _states(model: Model, rank: Rank, target: Target) -> dict[object, object]:
    """Return the state dicts of a rank's chunks; modules that ask for a state of their own have an empty one."""
    found: dict[object, object] = {}
    for number, chunk in enumerate(rank.chunks):
        its: dict[str, object] = {}
        for one in chunk:
            its[one.local] = model.weight(one, rank.tp)
            module, attention = _MODULE.fullmatch(one.local), _ATTENTION.fullmatch(one.local)
            if module is not None:
                its[f"{module[1]}.{EXTRA_STATE}"] = None
            if attention is not None and target.engine:
                its[f"{attention[1]}.core_attention.{EXTRA_STATE}"] = None
        found["model" if len(rank.chunks) == 1 else f"model{number}"] = its
    return found


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
