"""A checkpoint as the files of a DeepSpeed run directory: of any format, or of DeepSpeed and resharded.

Under ZeRO-3 every rank has a model file with client state of its own (a random generator, a sampler's position);
under tensor parallelism every model-parallel rank has. A rank that exists in source and target keeps its own.

Each file has a name, and content that is made when it is come to.

Experts: `expert_ranks` says who looks for which of their files. What a source's file holds goes along as it is, under
the mp_rank of every rank that looks for it, unless experts are sliced and cut anew; from another format files are made.

Layers of a pipeline: one has the same number in any number of stages, so that its file stays what it is until it is
sliced otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zckpt.engine.targets import Lazily, TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence.order import order_notes
from zckpt.formats import remainder
from zckpt.formats.deepspeed import foreign, loss_scaling
from zckpt.formats.deepspeed.axes.auto_ep import alone, auto_experts, auto_layers
from zckpt.formats.deepspeed.axes.experts import by_layer, experts_per_rank, layer_of
from zckpt.formats.deepspeed.axes.pipeline import is_of_layer, layer_names, tied_key, within
from zckpt.formats.deepspeed.axes.pipeline import layer_of as layer_number
from zckpt.formats.deepspeed.axes.restage import stages_asked, with_tied_keys
from zckpt.formats.deepspeed.axes.tensor_parallel import check_slices
from zckpt.formats.deepspeed.axes.tp_rules import read_rules
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.hyperparameters import read_hyperparameters, with_hyperparameters
from zckpt.formats.deepspeed.nested import ordered, unwrapped
from zckpt.formats.deepspeed.options import STAGES, Options, RecutOptions
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.other_files import (
    in_run,
    is_run,
    is_trainers,
    random_states,
    with_latest,
    with_others,
)
from zckpt.formats.deepspeed.rare import zenflow
from zckpt.formats.deepspeed.target import Target, TargetGroup, alone_among_frozen, rank_notes, stage_notes
from zckpt.formats.deepspeed.trees import carried_from, is_filed, model_tree, optimizer_tree, restated, single
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.attach import further_keys
from zckpt.state import Checkpoint, Parameter, dict_of, without
from zckpt.state.names import natural_order
from zckpt.torchfile import FromFile, TorchFile


class Document(NamedTuple):
    """A file: its name, how its content is made, and what files of the same content have in common, if known."""

    name: str
    tree: Callable[[], object]
    kind: object = None


def documents(target: Target) -> list[Document]:
    """Return the files of a target in the order in which they are written.

    Under ZeRO-3 each data-parallel rank has a model file, with all names and shapes, and no elements but its own of
    frozen parameters and buffers.
    """
    found: list[Document] = []
    for mp in target.ranks:
        alike = target.stage == 3 and not mp.buffers and not any(p.frozen for p in mp.parameters.values())
        for rank in range(target.world_size if target.stage == 3 else 1):
            source, before = carried_from(mp, rank), f"zero_pp_rank_{rank}_" if target.stage == 3 else ""
            same = alike and not auto_experts(source)  # else each rank says which experts it has
            kind = mp.mp_rank, id(source.file.root), rank == 0, source is mp.model
            name, tree = f"{before}mp_rank_{mp.mp_rank:02d}_model_states.pt", partial(model_tree, target, mp, rank)
            found.append(Document(name, tree, kind if same else None))
    found += [*_experts(target), *_layers(target)]
    empty = target.origin.expert_optimizers
    if empty:  # DeepSpeed before 0.19 looks for these files of experts, which hold nothing
        widest = max((group for mp in target.ranks for group in mp.groups), key=lambda group: len(group.experts))
        for rank in range(len(widest.experts)):
            _, file = empty[min(rank, len(empty) - 1)]
            for first in range(0, len(target.ranks), target.tp):
                for lane in _lanes_of_rank(target, rank, widest):
                    name = f"expp_rank_{rank}_mp_rank_{first + lane:02d}_optim_states.pt"
                    found.append(Document(name, partial(FromFile.of, file, file.root)))
    if target.stage != 0:
        prefix = Path(target.origin.members[0].path).name.partition("zero_pp_rank")[0]  # `bf16_` for bf16 models
        for mp in target.ranks:
            for rank in range(target.world_size):
                name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp.mp_rank:02d}_optim_states.pt"
                found.append(Document(name, partial(optimizer_tree, target, mp, rank)))
    return found


def target_files(target: Target, folder: str) -> Lazily[TargetFile]:
    """Return the files laid out, one after the other; `folder` is what their names begin with."""
    found = documents(target)

    def laid_out() -> Iterator[TargetFile]:
        known: dict[object, torch_writer.Stencil] = {}
        for one in found:
            name = f"{folder}{one.name}"
            file = known[one.kind].named(name) if one.kind in known else None
            if file is None:
                file = torch_writer.lay_out(name, one.tree())
                if one.kind is not None and torch_writer.Stencil.fits(file):
                    known[one.kind] = torch_writer.Stencil(file)  # of the names of this length
            yield file

    return Lazily(laid_out, len(found))


def _experts(target: Target) -> Iterator[Document]:
    """Yield the files of all experts, in the order of stages, layers, experts and tensor-parallel ranks."""
    origin, same = target.origin, target.tp == target.checkpoint.topology.tp
    files: dict[str, dict[int, tuple[Shard, TorchFile]]] = {}  # by the name of a parameter in it, and its lane
    for shard, file in origin.experts:
        lane = (shard.mp_rank or 0) % target.checkpoint.topology.tp
        for key in dict_of(file.root):
            files.setdefault(str(key), {})[lane] = shard, file
    whole = target.ranks[0].lanes > 1 or any(one.lanes > 1 for one in origin.ranks)
    for stage in range(target.pp if target.stage != 3 else 0):  # where AutoEP's are sub-groups
        for layer, expert, names in _expert_names(target, stage):
            held = files.get(names[0], {})
            if origin.experts and not held:
                continue
            for lane in _lanes(target, stage, layer_of(names[0]), expert):
                mp_rank, number, is_own = stage * target.tp + lane, layer, same and lane in held
                tree: Callable[[], object] = partial(_expert_tree, target, mp_rank, names)
                if held:
                    shard, file = held[lane if is_own else min(held)]
                    number = shard.layer if target.stages is None else layer
                    tree = partial(_expert_tree, target, mp_rank, names, file)
                    if whole or is_own:
                        tree = partial(FromFile.of, file, file.root)
                before = "" if number is None else f"layer_{number}_"
                yield Document(f"{before}expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt", tree)


def _expert_tree(target: Target, mp_rank: int, names: Sequence[str], file: TorchFile | None = None) -> object:
    """Return the content of an expert's file: parameters of a model-parallel rank, and what else the source's has."""
    own = target.ranks[mp_rank].parameters
    auto = auto_experts(target.origin.model)
    found: dict[object, object] = {}
    for name in names:
        whole, _, number = name.rpartition(".")
        one = alone(own[whole], auto[whole], int(number)) if whole in auto else own[name]
        found[name] = single(target, one)
    if file is not None:
        found |= {key: FromFile.of(file, value) for key, value in dict_of(file.root).items() if key not in found}
    return found


def _expert_names(target: Target, stage: int) -> Iterator[tuple[int | None, int, list[str]]]:
    """Yield layer, expert and names of its parameters, of a stage.

    DeepSpeed numbers layers in the model's order. Of names alone that is not known, and does not matter: every file
    says whose weights it has, and all of them are loaded. Those of AutoEP are looked up by the number that is listed.
    """
    own = target.ranks[stage * target.tp].parameters
    for auto in auto_layers(target.origin.model):
        held = [name for name in auto.names if name in own]  # without frozen ones that were left out
        for expert in range(auto.experts) if held else ():
            yield auto.number, expert, [f"{name}.{expert}" for name in held]
    layers = by_layer(own)
    for index, layer in enumerate(sorted(layers, key=natural_order)):
        for expert in sorted(layers[layer]):
            yield index, expert, layers[layer][expert]


def _lanes(target: Target, stage: int, layer: str, expert: int) -> list[int]:
    """Return the tensor-parallel ranks of a stage that look for the files of an expert under their number."""
    for group in target.ranks[stage * target.tp].groups:
        count = experts_per_rank(p.name for p in group.experts[0]).get(layer)
        if count:
            return _lanes_of_rank(target, expert // count, group)
    return list(range(target.tp))


def _lanes_of_rank(target: Target, expert_rank: int, group: TargetGroup) -> list[int]:
    if group.lanes == 1:
        return list(range(target.tp))
    place, degree = group.placement.rank, len(group.experts)
    return sorted({place(expert_rank, position, degree) % group.lanes for position in range(group.shared_by)})


def _layers(target: Target) -> Iterator[Document]:
    """Yield the files of a pipeline's layers.

    Of another format's, a tied layer has a file for each of its uses: DeepSpeed reads one where no function wraps the
    layer, and elsewhere does not look for it.
    """
    tp, source = target.checkpoint.topology.tp, target.origin.layers
    if is_filed(target) and not source:
        uses = target.stages.uses if target.stages is not None else {}
        for rank in range(target.tp):
            found: dict[int, dict[str, Parameter]] = {}
            for one in (one for mp in target.ranks[rank :: target.tp] for one in mp.tensors()):
                key = tied_key(one.name)
                for number in (layer_number(one.name),) if key is None else uses[key]:
                    found.setdefault(number, {}).setdefault(unwrapped(within(one.name)), one)
            for number, its in sorted(found.items()):
                yield Document(_layer_name(number, rank, sliced=target.tp > 1), partial(_made_tree, target, its))
    elif target.tp == tp and target.rules is None:
        yield from (Document(shard.name, partial(FromFile.of, file, file.root)) for shard, file in source)
    else:
        sliced = target.tp > 1 or any("-model_" in shard.name.partition("-model_states")[0] for shard, _ in source)
        for rank in range(target.tp):
            own = {one.name: one for mp in reversed(target.ranks[rank :: target.tp]) for one in mp.tensors()}
            for shard, file in source:
                if (shard.mp_rank or 0) == (rank if target.tp == tp else 0):
                    name = _layer_name(shard.layer or 0, rank, sliced=sliced)
                    yield Document(name, partial(_layer_tree, target, shard, file, own))


def _layer_name(number: int, rank: int, *, sliced: bool) -> str:
    return f"layer_{number:02d}{f'-model_{rank:02d}' if sliced else ''}-model_states.pt"


def _made_tree(target: Target, its: Mapping[str, Parameter]) -> object:
    return ordered((key, single(target, one)) for key, one in its.items())


def _layer_tree(target: Target, shard: Shard, file: TorchFile, own: Mapping[str, Parameter]) -> object:
    """Return a layer's content with the slices of one tensor-parallel rank."""
    if not isinstance(file.root, dict):
        return FromFile.of(file, file.root)
    root, tp = file.root, target.checkpoint.topology.tp
    models = [files.model for files in target.origin.ranks[shard.mp_rank or 0 :: tp]]
    names = layer_names(shard, file, models)
    cut = {key: single(target, own[name]) for key in root if (name := names.get(str(key), "")) in own}
    return ordered(restated(file, root, cut).items(), root)


ONE_ORDER = (
    "each param group keeps the pipeline's order, stage by stage: flat partitions have no names, so that the one model "
    "has to list its parameters alike"
)

ELSEWHERE = "`zckpt convert --to universal`, dcp or zckpt writes it for any number of ranks"


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a checkpoint as a run directory.

    Raises
    ------
    UsageError
        The source does not say for how many ranks, or at which stage.
    UnsupportedError
        DeepSpeed's files cannot hold something in the checkpoint.
    """
    checkpoint, options = job.checkpoint, job.options
    origin = origin_of(checkpoint)
    if origin is None or not origin.members:
        tag, written, made = _from_elsewhere(job, dtype=options.dtype)
        if is_trainers(job.source):
            written = with_others(written, replace(job, checkpoint=made), tag, options.world_size)
            return replace(written, restated={*(written.restated or ()), *random_states(checkpoint)})
        return replace(written, files=with_latest(written.files, tag))
    if options.dtype != "keep":
        raise UsageError("--dtype does not apply to a source that is DeepSpeed's", advice="go by way of --to=dcp")
    world_size = checkpoint.topology.dp if options.world_size is None else options.world_size
    stage = origin.members[0].stage if options.stage is None else options.stage
    written = recut(replace(job, options=_recut(options, world_size, stage)))
    stems = tuple(f"{Path(file.path).stem}." for file in checkpoint.files)
    restated = {key for key in (*checkpoint.metadata, *checkpoint.optimizer_metadata) if key.startswith(stems)}
    lost = _lost_clipping(checkpoint, stage)
    restated |= random_states(checkpoint).union(["clip_grad"] if lost else ())
    return replace(written, notes=[*written.notes, *lost], restated=restated)


FOR_FLOAT32 = (
    "weights are float32: a DeepSpeed engine with bf16 looks for files of another name, which --dtype bfloat16 writes"
)


def _from_elsewhere(
    job: Job, *, whole: bool = True, bf16: bool = False, dtype: str = "keep"
) -> tuple[str, TargetFiles, Checkpoint]:
    """Return the tag and files of a checkpoint of any other format, as those of BF16_Optimizer on demand.

    And the checkpoint with the param groups that are in them.
    """
    checkpoint, options = job.checkpoint, job.options
    known = checkpoint.zero_stage or remainder.origin(checkpoint).get("zero_stage")
    stage = options.stage if options.stage is not None else known if type(known) is int and known in STAGES else None
    if options.world_size is None or stage is None:
        needs = {"--world-size N": options.world_size, "--stage 1, 2 or 3": stage}
        raise UsageError(
            "a DeepSpeed checkpoint from this source needs further options",
            expected=" and ".join(name for name, value in needs.items() if value is None),
            found=f"{checkpoint.format}, {('without a ZeRO stage' if known is None else f'ZeRO stage {known}')}",
        )  # fmt: skip
    checkpoint = foreign.as_engines_group(job.checkpoint, stage, known)
    left_out = foreign.groups_left_out(job.checkpoint, checkpoint)
    if dtype != "keep":
        checkpoint = foreign.with_weights_as(checkpoint, dtype)
    if options.hyperparameters is not None and not any(group.hyperparameters for group in checkpoint.param_groups):
        groups, elastic = checkpoint.param_groups, bool(options.elastic) and stage != 3
        given = read_hyperparameters(options.hyperparameters, len(groups), elastic=elastic)
        checkpoint = replace(checkpoint, param_groups=with_hyperparameters(groups, given))
        options = replace(options, hyperparameters=None)
    keys = with_tied_keys(checkpoint, options)
    converted = foreign.as_deepspeed(
        checkpoint, stage=stage, staged=bool(stages_asked(options)), bf16=bf16, dtype=dtype
    )
    strange = without(checkpoint.optimizer_metadata, *loss_scaling.HANDLED)
    if strange:
        raise UnsupportedError(
            f"DeepSpeed's files cannot hold {listed(further_keys(strange))}, which the optimizer keeps in addition to "
            "its state",
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps it",
        )
    made = origin_of(converted)
    if options.slice_rules is not None and made is not None:
        converted.origin = replace(made, rules=read_rules(Path(options.slice_rules)), rules_path=options.slice_rules)
    target = _decide(converted, _recut(options, options.world_size, stage))
    foreign.give_own(target)
    notes = [*left_out, *foreign.notes(checkpoint, stage=stage), *keys, *stage_notes(target),
             *zenflow.notes(target.origin.model.config, stage)]  # fmt: skip
    if target.ranks[0].lanes > 1:
        notes.append(
            f"experts are spread over {target.tp} tensor-parallel ranks, as in DeepSpeed without "
            "enable_expert_tensor_parallelism; --sliced-experts slices them, as with it"
        )
    if (
        dtype == "keep"
        and whole
        and "ds_config" not in checkpoint.metadata
        and foreign.dtype_of(checkpoint) == "float32"
    ):
        notes.append(FOR_FLOAT32)
    none = {key for key in foreign.NONE_IF_ABSENT if checkpoint.metadata.get(key) is None}
    restated = loss_scaling.HANDLED | none | set(filter(foreign.is_counted, checkpoint.metadata))
    tag = target.origin.directory.tag
    notes += [*_lost_clipping(checkpoint, stage), *order_notes(checkpoint)]
    files = target_files(target, f"{tag}/" if whole else "")
    return tag, TargetFiles(files, notes=notes, restated=restated), checkpoint


def _lost_clipping(checkpoint: Checkpoint, stage: int) -> list[str]:
    """Say that ZeRO-3 does not keep `clip_grad`, where the source has one."""
    if stage != 3 or "clip_grad" not in checkpoint.optimizer_metadata:
        return []
    return ["ZeRO-3 does not keep clip_grad; it clips as the training's configuration says"]


def _recut(options: Options, world_size: int, stage: int | None) -> RecutOptions:
    return RecutOptions(**{**without(asdict(options), "dtype"), "world_size": world_size, "stage": stage})


def recut(job: Job) -> TargetFiles:
    """Return the files of a DeepSpeed checkpoint, cut for other ranks; errors are those of `decide`."""
    checkpoint = job.checkpoint
    origin = origin_of(checkpoint)
    if origin is None:
        return _one_model(job)
    if job.options.slice_rules is not None:
        raise UsageError("SOURCE's slices are joined and cut by --tp-rules FILE, not by --slice-rules",
                         found="--slice-rules")  # fmt: skip
    if not origin.members and checkpoint.zero_stage == 0:
        from zckpt.formats.deepspeed.layouts import without_zero

        stage0 = without_zero.regrouped(checkpoint, origin, job.options)
        if stage0 is None:
            return without_zero.copied(job, origin)
        target, names = stage0, without_zero.names_in(stage0) or None
    else:
        target, names = _decide(checkpoint, job.options), None
    tag = target.origin.directory.tag
    written = TargetFiles(
        target_files(target, f"{tag}/" if is_run(job) else ""),
        notes=rank_notes(target),
        restated=None,
        check=lambda: check_slices(target),
        names=names,
        in_floats=bool(target.coded),
    )
    if target.coded:
        from zckpt.formats.deepspeed.rare.requantised import with_notes

        written = with_notes(written, target)
    return in_run(written, job, tag, target.world_size * len(target.ranks))


def _one_model(job: Job) -> TargetFiles:
    """Return the files of a pipeline as those of one model, whose names it has now."""
    checkpoint, options = job.checkpoint, job.options
    asked = stages_asked(options)
    if asked:
        raise UsageError(
            f"renamed layers become one model without stages, so --{asked[0].replace('_', '-')} does not apply",
            advice="`zckpt convert --to deepspeed` distributes renamed layers over stages",
        )
    left = [*filter(is_of_layer, checkpoint.names)]
    if left:
        raise UnsupportedError(
            f"{listed(left, most=4)}: only a pipeline has such names",
            expected="--rename or --map, to give each layer its name in the one model",
        )
    if checkpoint.topology.tp > 1 and options.tensor_parallel_size != 1 and options.slice_rules is None:
        raise UnsupportedError(
            "the rules for slices use a pipeline's names, not those of one model",
            expected="--tensor-parallel-size 1, or --slice-rules FILE",
        )
    elastic = checkpoint.details.get("optimizer_form") == "elastic" if options.elastic is None else options.elastic
    options = replace(options, elastic=elastic and options.stage != 3)
    bf16 = bool(checkpoint.details.get("bf16_optimizer")) and options.stage in (None, 1)
    tag, written, _ = _from_elsewhere(replace(job, options=options), whole=is_run(job), bf16=bf16)
    return in_run(replace(written, notes=[*written.notes, ONE_ORDER]), job, tag, options.world_size)


def _decide(checkpoint: Checkpoint, options: RecutOptions) -> Target:
    """Return what `decide` returns; its errors name the verb that does it instead."""
    try:
        if options.requantize:
            from zckpt.formats.deepspeed.rare.requantised import decide_requantised

            target = decide_requantised(checkpoint, options)
        else:
            target = decide(checkpoint, options)
    except UnsupportedError as error:
        if not checkpoint.per_rank:  # or no other verb could do it, either
            error.advice = error.advice or ELSEWHERE
        raise
    frozen = alone_among_frozen(target)
    if frozen:
        raise UnsupportedError(
            f"{listed(frozen)}: ZeRO-3's files have either all frozen parameters or none, but others were left out "
            "when this was saved",
            expected="--stage 1 or 2",
            advice="a ZeRO-3 engine can load it within `zckpt.deepspeed.any_world_size`",
        )
    return target
