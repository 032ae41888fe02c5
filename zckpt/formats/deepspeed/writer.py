"""A checkpoint as the files of a DeepSpeed run directory: of any format, or of DeepSpeed and resharded.

Under ZeRO-3 every rank has a model file with client state of its own (a random generator, a sampler's position);
under tensor parallelism every model-parallel rank has. A rank that exists in source and target keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats import remainder
from zckpt.formats.deepspeed import foreign, loss_scaling, zenflow
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.documents import target_files
from zckpt.formats.deepspeed.hyperparameters import read_hyperparameters, with_hyperparameters
from zckpt.formats.deepspeed.options import STAGES, Options, RecutOptions
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.other_files import in_run, is_run, with_latest
from zckpt.formats.deepspeed.pipeline import TIED, is_of_layer
from zckpt.formats.deepspeed.restage import stages_asked, with_tied_keys
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.tensor_parallel import check_slices
from zckpt.formats.deepspeed.tp_rules import AFFINE_KEY, INFO_KEY, read_rules
from zckpt.formats.deepspeed.values import is_same
from zckpt.formats.format import Job, TargetFiles
from zckpt.state import Checkpoint
from zckpt.torchfile import FromFile

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
        tag, written = _from_elsewhere(job)
        return replace(written, files=with_latest(written.files, tag))
    world_size = checkpoint.topology.dp if options.world_size is None else options.world_size
    stage = origin.members[0].stage if options.stage is None else options.stage
    written = recut(replace(job, options=_recut(options, world_size, stage)))
    stems = tuple(f"{Path(file.path).stem}." for file in checkpoint.files)
    restated = {key for key in (*checkpoint.metadata, *checkpoint.optimizer_metadata) if key.startswith(stems)}
    return _without_clipping(replace(written, restated=restated), checkpoint, stage)


def _from_elsewhere(job: Job, *, whole: bool = True, bf16: bool = False) -> tuple[str, TargetFiles]:
    """Return the tag and files of a checkpoint of any other format, as those of BF16_Optimizer on demand."""
    checkpoint, options = job.checkpoint, job.options
    known = checkpoint.zero_stage or remainder.origin(checkpoint).get("zero_stage")
    stage = options.stage if options.stage is not None else known if type(known) is int and known in STAGES else None
    if options.world_size is None or stage is None:
        raise UsageError(
            f"{'--world-size' if options.world_size is None else '--stage'} is needed to write a DeepSpeed checkpoint "
            f"from this source",
            expected="a number of ranks" if options.world_size is None else "1, 2 or 3",
            found=f"{checkpoint.format}, {'of no stage of ZeRO' if stage is None else f'ZeRO stage {stage}'}",
        )
    if stage not in STAGES:
        raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
    if options.hyperparameters is not None and not any(group.hyperparameters for group in checkpoint.param_groups):
        groups, elastic = checkpoint.param_groups, bool(options.elastic) and stage != 3
        given = read_hyperparameters(options.hyperparameters, len(groups), elastic=elastic)
        checkpoint = replace(checkpoint, param_groups=with_hyperparameters(groups, given))
        options = replace(options, hyperparameters=None)
    keys = with_tied_keys(checkpoint, options)
    converted = foreign.as_deepspeed(checkpoint, stage=stage, staged=bool(stages_asked(options)), bf16=bf16)
    strange = sorted(checkpoint.optimizer_metadata.keys() - loss_scaling.HANDLED)
    if strange:
        raise UnsupportedError(
            f"DeepSpeed's files have no place for {', '.join(strange[:4])}, which the optimizer has next to its state",
            advice="`zckpt convert --to zckpt` or `--to dcp` keeps it",
        )
    made = origin_of(converted)
    if options.slice_rules is not None and made is not None:
        converted.origin = replace(made, rules=read_rules(Path(options.slice_rules)), rules_path=options.slice_rules)
    target = _decide(converted, _recut(options, options.world_size, stage))
    notes = [*foreign.notes(checkpoint, stage=stage), *keys, *stage_notes(target),
             *zenflow.notes(target.origin.model.config, stage)]  # fmt: skip
    if target.ranks[0].lanes > 1:
        notes.append(
            f"experts are spread over {target.tp} tensor-parallel ranks, as DeepSpeed has them without "
            f"enable_expert_tensor_parallelism; --sliced-experts writes them as with it"
        )
    none = {key for key in foreign.NONE_IF_ABSENT if checkpoint.metadata.get(key) is None}
    restated = loss_scaling.HANDLED | none | set(filter(foreign.is_counted, checkpoint.metadata))
    tag = target.origin.directory.tag
    written = TargetFiles(target_files(target, f"{tag}/" if whole else ""), notes=notes, restated=restated)
    return tag, _without_clipping(written, checkpoint, stage)


def _without_clipping(written: TargetFiles, checkpoint: Checkpoint, stage: int) -> TargetFiles:
    """Add to the notes that ZeRO-3 does not keep `clip_grad`, where the source has one."""
    if stage != 3 or "clip_grad" not in checkpoint.optimizer_metadata:
        return written
    note = "clip_grad is not kept by ZeRO-3, which clips as the training's configuration says"
    return replace(written, notes=[*written.notes, note], restated={*(written.restated or ()), "clip_grad"})


def _recut(options: Options, world_size: int, stage: int | None) -> RecutOptions:
    same = {one.name: getattr(options, one.name) for one in fields(Options)}
    return RecutOptions(**{**same, "world_size": world_size, "stage": stage})


def recut(job: Job) -> TargetFiles:
    """Return the files of a DeepSpeed checkpoint, cut for other ranks; errors are those of `decide`."""
    checkpoint = job.checkpoint
    origin = origin_of(checkpoint)
    if origin is None:
        return _one_model(job)
    if job.options.slice_rules is not None:
        raise UsageError("the slices that SOURCE has are put together, and cut, by --tp-rules FILE",
                         found="--slice-rules")  # fmt: skip
    if not origin.members and origin.ranks and checkpoint.zero_stage == 0:
        from zckpt.formats.deepspeed import without_zero

        return without_zero.recut(job, origin)
    target = _decide(checkpoint, job.options)
    frozen = alone_among_frozen(target)
    if frozen:
        raise UnsupportedError(
            f"{listed(frozen)}: ZeRO-3's files have all frozen parameters or none, and others were left out when this "
            f"was saved",
            expected="--stage 1 or 2",
            advice="an engine of ZeRO-3 loads it within `zckpt.deepspeed.any_world_size`",
        )
    tag = target.origin.directory.tag
    written = TargetFiles(
        target_files(target, f"{tag}/" if is_run(job) else ""),
        notes=rank_notes(target),
        restated=None,
        check=lambda: check_slices(target.origin, checkpoint.topology.tp, target.tp),
        in_floats=bool(target.coded),
    )
    if target.coded:
        from zckpt.formats.deepspeed.requantised import with_notes

        written = with_notes(written, target)
    return in_run(written, job, tag, target.world_size * len(target.ranks))


def _one_model(job: Job) -> TargetFiles:
    """Return the files of a pipeline as those of one model, whose names it has now."""
    checkpoint, options = job.checkpoint, job.options
    asked = stages_asked(options)
    if asked:
        raise UsageError(
            f"layers under other names make one model, without stages, so {asked[0]} does not apply",
            advice="`zckpt convert --to deepspeed` deals layers under other names to stages",
        )
    left = [one.name for one in checkpoint.tensors() if is_of_layer(one.name)]
    if left:
        raise UnsupportedError(
            f"{listed(left, most=4)}: such names only a pipeline has",
            expected="for each layer the name that it has in the one model: --rename, --map",
        )
    if checkpoint.topology.tp > 1 and options.tensor_parallel_size != 1 and options.slice_rules is None:
        raise UnsupportedError(
            "the rules for slices name what a pipeline has, and not what one model has",
            expected="--tensor-parallel-size 1, or --slice-rules FILE",
        )
    elastic = checkpoint.details.get("optimizer_form") == "elastic" if options.elastic is None else options.elastic
    options = replace(options, elastic=elastic and options.stage != 3)
    bf16 = bool(checkpoint.details.get("bf16_optimizer")) and options.stage in (None, 1)
    tag, written = _from_elsewhere(replace(job, options=options), whole=is_run(job), bf16=bf16)
    return in_run(replace(written, notes=[*written.notes, ONE_ORDER]), job, tag, options.world_size)


def _decide(checkpoint: Checkpoint, options: RecutOptions) -> Target:
    """Return what `decide` returns; its errors name the verb that does it instead."""
    try:
        if not options.requantize:
            return decide(checkpoint, options)
        from zckpt.formats.deepspeed.requantised import decide_requantised

        return decide_requantised(checkpoint, options)
    except UnsupportedError as error:
        if not checkpoint.per_rank:  # or no other verb could do it, either
            error.advice = error.advice or ELSEWHERE
        raise


_WRITTEN = frozenset({
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "num_experts",
    "ds_autoep_layers", INFO_KEY,
})  # fmt: skip
"""Keys of a model file that are not carried."""

_OF_THE_RANKS = ("data_sampler", "random_ltd")
"""DeepSpeed's own keys that belong to the number of ranks even where all ranks have the same."""


def alone_among_frozen(target: Target) -> list[str]:
    """Return frozen parameters for which a target of ZeRO-3 has no place, for others of the model are not there."""
    if target.stage != 3 or target.lists_frozen:
        return []
    return [p.name for mp in target.ranks for p in mp.parameters.values() if p.frozen and p.slots and p.numel]


def rank_notes(target: Target) -> list[str]:
    """Return what became of each key that differs between ranks, or means something at the old number of ranks only."""
    ranks = target.origin.ranks
    old = len(ranks[0].models) if ranks else 1
    found: dict[str, str] = {}
    if target.bf16_optimizer and target.checkpoint.zero_stage == 0:
        found["zero_stage"] = (
            "BF16_Optimizer's state is written as that of ZeRO-1, with which the same training goes on as stage 1 with "
            "grad_accum_dtype fp32: at stage 0, DeepSpeed 0.19 loads no masters, and raises on what it saved itself"
        )
    if target.regrouped and len(ranks) > 1:
        for key in _differing([files.models[0] for files in ranks]):
            found[key] = f"{key} differs between model-parallel ranks: mp_rank 0's is carried to all"
    if target.origin.rules is not None and AFFINE_KEY in target.origin.rules and max(len(ranks), 1) % len(target.ranks):
        found[AFFINE_KEY] = (
            "slices are equal shares; AutoTP cuts attention by key and value heads, and DeepSpeed will not load this "
            f"if the number of ranks, {len(target.ranks)}, does not divide that of them"
        )
    if old > 1 and not (target.stage == 3 and target.world_size == old):
        kept = 1 if target.regrouped else len(ranks)
        for key in dict.fromkeys(key for files in ranks[:kept] for key in _differing(files.models)):
            fate = f"ranks below {target.world_size} keep theirs, the others' are left out"
            if target.stage != 3:
                fate = "rank 0's is carried, the others' are left out, for there is one model file"
            elif target.world_size > old:
                fate = f"ranks below {old} keep theirs, the new ones get rank 0's"
            found[key] = f"{key} differs between ranks: {fate}"
    if target.world_size != target.checkpoint.topology.dp or target.regrouped:
        content = target.origin.model.content
        named = [key for key in content if "rng" in key.lower() or "random" in key.lower()]
        for key in dict.fromkeys([*_OF_THE_RANKS, *named]):
            if content.get(key) is not None and key not in found:
                found[key] = f"{key} is carried over as it was saved at another number of ranks"
    frozen = alone_among_frozen(target)
    if frozen:
        found["frozen"] = f"{listed(frozen)}: as in the engine, for not all frozen parameters are there to be loaded"
    return [*stage_notes(target), *found.values()]


def _differing(models: Sequence[ModelShard]) -> list[str]:
    """Return the keys and buffers of which not all of these files have the same value."""
    first = models[0]
    keys = dict.fromkeys(key for model in models for key in model.content if key not in _WRITTEN)
    buffers = [name for name in first.module if name in first.buffer_names]

    def differs(one: Mapping[str, object], model: ModelShard, other: Mapping[str, object], key: str) -> bool:
        if key not in one or key not in other:
            return (key in one) != (key in other)
        return not is_same(FromFile.of(first.file, one[key]), FromFile.of(model.file, other[key]))

    found = [key for key in keys if any(differs(first.content, m, m.content, key) for m in models[1:])]
    return found + [f"buffer {n}" for n in buffers if any(differs(first.module, m, m.module, n) for m in models[1:])]


def stage_notes(target: Target) -> list[str]:
    """Return how layers were dealt anew."""
    stages = target.stages
    if stages is None:
        return []
    pairs = list(zip(stages.bounds, stages.bounds[1:], strict=False))
    notes = ["stages of layers " + "; ".join(f"{low} to {high - 1}" for low, high in pairs)]
    for key in stages.uses if target.pp > 1 else ():
        its = ", ".join(map(str, stages.of(f"{TIED}{key}.")))
        notes.append(f"tied layer {key} is taken to be used in stages {its}, which get its first stage's state")
    return [*notes, *stages.untold]
