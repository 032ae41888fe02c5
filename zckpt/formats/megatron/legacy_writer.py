"""Lay out a run's directory with one checkpoint in Megatron's legacy files, for any number of ranks.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   the rank's model by its own names, its optimizer, the rest
                                        distrib_optim.pt     of the distributed optimizer: flat, with zeros in the gaps
                 zckpt.pt                                    what these have no place for: see `own`

legacy_target  how many ranks, and what the module on them is like
legacy_state   what is a rank's optimizer
stages         which layers and experts a rank has, and what it calls them
slices         what a tensor-parallel rank has of a parameter

Source: Megatron-LM's `checkpointing.py`, `get_checkpoint_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.directory import FILE, FOLDER, OPTIMIZER_FILE, OWN_NAME, RELEASE, TRACKER
from zckpt.formats.megatron.fused import numbered_name
from zckpt.formats.megatron.legacy import UNTIED
from zckpt.formats.megatron.legacy_state import Model, Rank, buffers_node, optimizer_node
from zckpt.formats.megatron.legacy_target import (
    BOUNDS,
    FUSED,
    NUMBERED,
    ORDER,
    Target,
    target_of,
    with_sizes,
)
from zckpt.formats.megatron.norms import live_names
from zckpt.formats.megatron.objects import EXTRA_STATE, OPTIMIZER, arguments_of
from zckpt.formats.megatron.order import order_of
from zckpt.formats.megatron.own import own_tree
from zckpt.formats.megatron.slices import VOCABULARY, cuts_of
from zckpt.formats.megatron.stages import dealt, expert_counts, on_expert_rank, with_fused
from zckpt.formats.megatron.wholes import TIED
from zckpt.formats.megatron.write_common import (
    PLAIN,
    RESTATED,
    SCALERS,
    common_tree,
    folder_for,
    groups_for,
    missing_notes,
    model_for,
    optimizer_for,
    shards_of,
    text_file,
)
from zckpt.formats.megatron.write_groups import Group, step_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.state import Checkpoint

RNG, ARGUMENTS = "rng_state", "args"

_MODULE = re.compile(r"((?:.*\.)?(?:linear_\w+|output_layer|eh_proj|query_key_value|dense\w*))\.weight[0-9]*")
_ATTENTION = re.compile(r"(.+attention)\.linear_proj\.weight")
_CHUNK = re.compile(r"model([0-9]+)\.(.+)")


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a run's directory.

    Raises UsageError: a size that does not divide what it cuts; UnsupportedError: it is no model of Megatron's, or has
    what these files have no known place for.
    """
    checkpoint, options = job.checkpoint, job.options
    target = target_of(checkpoint, options)
    notes: list[str] = []
    model = _model(checkpoint, options, target, notes)
    folder = folder_for(checkpoint, getattr(options, "iteration", None), trained=bool(model.trained))
    ranks = list(_ranks(model, target))
    held = {key for key, value in checkpoint.metadata.items() if shards_of(value)}
    tree = common_tree(checkpoint, folder, held)
    held -= {key for key, value in checkpoint.metadata.items() if shards_of(value)}
    if ARGUMENTS in tree:
        tree[ARGUMENTS] = with_sizes(tree[ARGUMENTS], target)
    its_own = _of_ranks(checkpoint, ranks, target)
    if RNG in checkpoint.metadata and its_own is None:
        notes.append("random states are those of other ranks, and kept beside: Megatron-LM starts with --no-load-rng")
        tree.pop(RNG, None)
        held.discard(RNG)
    held |= {key for key in SCALERS if key in checkpoint.optimizer_metadata and model.groups}
    files = []
    for rank in ranks:
        content = {**tree, **_states(model, rank, target)}
        held |= _give(content, (its_own or {}).get(rank.folder, {}), rank.folder)
        if model.groups:
            content[OPTIMIZER] = optimizer_node(model, rank)
        files.append(torch_writer.lay_out(f"{folder}/{rank.folder}/{FILE}", content))
        if model.groups and not model.plain:
            files.append(torch_writer.lay_out(f"{folder}/{rank.folder}/{OPTIMIZER_FILE}", buffers_node(model, rank)))
    top = target.topology
    own = own_tree(
        checkpoint,
        held=held,
        groups=[[model.given[name] for name in group.members] for group in model.groups],
        names=model.given,
        ranks={
            "tp": top.tp,
            "pp": top.pp,
            "ep": top.ep,
            "tied": bool(model.tied),
            **({} if target.rows is None else {"rows": _vocabulary(model)}),
        },
    )
    files += [
        torch_writer.lay_out(f"{folder}/{OWN_NAME}", own),
        text_file(TRACKER, folder if folder == RELEASE else str(int(folder.rpartition("_")[2]))),
    ]
    notes += missing_notes(checkpoint, folder, tree)
    return TargetFiles(files, notes=notes, restated=RESTATED | {ARGUMENTS})


def _model(checkpoint: Checkpoint, options: object, target: Target, notes: list[str]) -> Model:
    """Return the whole model by the names of its module, in its order, with its optimizer."""
    top = target.topology
    found = model_for(checkpoint, getattr(options, "dtype", "keep"))
    names = live_names(found, engine=target.engine)
    if target.experts == NUMBERED:
        names = {name: numbered_name(live) for name, live in names.items()}
    given = {live: name for name, live in names.items()}
    parameters = {names[one.name]: one for one in checkpoint.parameters.values() if one.name in names}
    trained = {name: one for name, one in parameters.items() if one.group is not None}
    order = _order(checkpoint, names, list(parameters), target)
    if order is None and trained:
        raise UnsupportedError("in which order a module has its parameters is not known",
                               found=listed(list(parameters), most=3),
                               expected="the layers of Megatron-Core's GPTModel")  # fmt: skip
    ordered = [*(order or parameters), *(name for name in given if name not in parameters)]
    tensors = {name: found[given[name]] for name in ordered}
    rows = {name: tensors[name][0].shape for name in ordered}
    kind = getattr(options, "optimizer", None) or optimizer_for(checkpoint)
    groups = groups_for(checkpoint, top.ep, notes)
    step = step_of(checkpoint, list(trained.values()))
    scalers = [checkpoint.optimizer_metadata.get(key) for key in SCALERS]
    return Model(
        checkpoint=checkpoint,
        tensors=tensors,
        parameters=parameters,
        given=given,
        trained={name: trained[name] for name in ordered if name in trained},
        cuts=cuts_of(rows, top.tp, target.rows),
        ranks=top.tp,
        rows=target.rows,
        groups=[Group(one.values, [names[name] for name in one.members]) for one in groups],
        plain=kind == PLAIN,
        step=step,
        scalers=scalers,
        bucket_numel=target.bucket_numel,
        gradients=_gradients(checkpoint),
        tied=_tied(checkpoint, tensors, top.pp),
    )


def _order(
    checkpoint: Checkpoint, names: Mapping[str, str], parameters: Sequence[str], target: Target
) -> list[str] | None:
    """Return the parameters in the module's order: as the files had them where they are its own, or by its layers."""
    own = checkpoint.format_version == "legacy" and all(name == live for name, live in names.items())
    return list(parameters) if own and ORDER not in checkpoint.details else order_of(parameters, engine=target.engine)


def _tied(checkpoint: Checkpoint, tensors: Mapping[str, object], stages: int) -> dict[str, str]:
    """Return what the last of several stages calls its copy of an embedding that is the output layer, by its name."""
    if stages == 1 or arguments_of(checkpoint.metadata.get(ARGUMENTS)).get(UNTIED) is True:
        return {}
    return {name: copy for copy, name in TIED.items() if name in tensors and copy not in tensors
            and not any(one.endswith("output_layer.weight") for one in tensors)}  # fmt: skip


def _vocabulary(model: Model) -> int:
    """Return how many rows a vocabulary has, which the target's has more of."""
    return next(slot.shape[0] for name, (slot, _) in model.tensors.items() if name.endswith(VOCABULARY))


def _gradients(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the type of gradients that are added up, by that of the weights."""
    arguments = arguments_of(checkpoint.metadata.get(ARGUMENTS))
    if arguments.get("accumulate_allreduce_grads_in_fp32") is False and arguments.get("bf16") is not True:
        return {"float16": "float16"}
    known = checkpoint.details.get("gradients")
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, Mapping) else {}


def _ranks(model: Model, target: Target) -> Iterator[Rank]:
    """Yield every rank, with what each chunk of its model has."""
    top = target.topology
    stages = dealt(list(model.tensors), target.bounds, stages=top.pp, tied=model.tied)
    counts = expert_counts(model.tensors, top.ep)
    for stage, chunks in enumerate(stages):
        for expert in range(top.ep):
            own = [on_expert_rank(chunk, counts, expert, top.ep) for chunk in chunks]
            if target.experts == FUSED:
                own = [with_fused(chunk) for chunk in own]
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
            slots = [model.tensors[name][0] for name in one.experts or (one.name,)]
            its[one.local] = model.tensor(one, rank.tp, slots, model.tensors[one.name][1], one.name)
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
