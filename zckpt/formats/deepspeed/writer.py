"""A checkpoint as the files of a DeepSpeed run directory: of any format, or of DeepSpeed and resharded.

Under ZeRO-3 every rank has a model file with client state of its own (a random generator, a sampler's position);
under tensor parallelism every model-parallel rank has. A rank that exists in source and target keeps its own.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats import remainder
from zckpt.formats.deepspeed import foreign, loss_scaling
from zckpt.formats.deepspeed.axes.pipeline import is_of_layer
from zckpt.formats.deepspeed.axes.restage import stages_asked, with_tied_keys
from zckpt.formats.deepspeed.axes.tensor_parallel import check_slices
from zckpt.formats.deepspeed.axes.tp_rules import read_rules
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.documents import target_files
from zckpt.formats.deepspeed.hyperparameters import read_hyperparameters, with_hyperparameters
from zckpt.formats.deepspeed.notes import alone_among_frozen, rank_notes, stage_notes
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
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.torch_files.attach import further_keys
from zckpt.state import Checkpoint, without

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
        tag, written, made = _from_elsewhere(job)
        if is_trainers(job.source):
            written = with_others(written, replace(job, checkpoint=made), tag, options.world_size)
            return replace(written, restated={*(written.restated or ()), *random_states(checkpoint)})
        return replace(written, files=with_latest(written.files, tag))
    world_size = checkpoint.topology.dp if options.world_size is None else options.world_size
    stage = origin.members[0].stage if options.stage is None else options.stage
    written = recut(replace(job, options=_recut(options, world_size, stage)))
    stems = tuple(f"{Path(file.path).stem}." for file in checkpoint.files)
    restated = {key for key in (*checkpoint.metadata, *checkpoint.optimizer_metadata) if key.startswith(stems)}
    lost = _lost_clipping(checkpoint, stage)
    restated |= random_states(checkpoint).union(["clip_grad"] if lost else ())
    return replace(written, notes=[*written.notes, *lost], restated=restated)


def _from_elsewhere(job: Job, *, whole: bool = True, bf16: bool = False) -> tuple[str, TargetFiles, Checkpoint]:
    """Return the tag and files of a checkpoint of any other format, as those of BF16_Optimizer on demand.

    And the checkpoint with the param groups that are in them.
    """
    checkpoint, options = job.checkpoint, job.options
    known = checkpoint.zero_stage or remainder.origin(checkpoint).get("zero_stage")
    stage = options.stage if options.stage is not None else known if type(known) is int and known in STAGES else None
    if options.world_size is None or stage is None:
        raise UsageError(
            f"{('--world-size' if options.world_size is None else '--stage')} is required to write a DeepSpeed "
            "checkpoint from this source",
            expected="a number of ranks" if options.world_size is None else "1, 2 or 3",
            found=f"{checkpoint.format}, {('without a ZeRO stage' if stage is None else f'ZeRO stage {stage}')}",
        )
    checkpoint = foreign.as_engines_group(job.checkpoint, stage, known)
    left_out = foreign.groups_left_out(job.checkpoint, checkpoint)
    if options.hyperparameters is not None and not any(group.hyperparameters for group in checkpoint.param_groups):
        groups, elastic = checkpoint.param_groups, bool(options.elastic) and stage != 3
        given = read_hyperparameters(options.hyperparameters, len(groups), elastic=elastic)
        checkpoint = replace(checkpoint, param_groups=with_hyperparameters(groups, given))
        options = replace(options, hyperparameters=None)
    keys = with_tied_keys(checkpoint, options)
    converted = foreign.as_deepspeed(checkpoint, stage=stage, staged=bool(stages_asked(options)), bf16=bf16)
    if checkpoint.optimizer_metadata.keys() - loss_scaling.HANDLED:
        strange = further_keys(without(checkpoint.optimizer_metadata, *loss_scaling.HANDLED))
        raise UnsupportedError(
            f"DeepSpeed's files cannot hold {listed(strange)}, which the optimizer keeps in addition to its state",
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps it",
        )
    made = origin_of(converted)
    if options.slice_rules is not None and made is not None:
        converted.origin = replace(made, rules=read_rules(Path(options.slice_rules)), rules_path=options.slice_rules)
    target = _decide(converted, _recut(options, options.world_size, stage))
    notes = [*left_out, *foreign.notes(checkpoint, stage=stage), *keys, *stage_notes(target),
             *zenflow.notes(target.origin.model.config, stage)]  # fmt: skip
    if target.ranks[0].lanes > 1:
        notes.append(
            f"experts are spread over {target.tp} tensor-parallel ranks, as in DeepSpeed without "
            "enable_expert_tensor_parallelism; --sliced-experts slices them, as with it"
        )
    none = {key for key in foreign.NONE_IF_ABSENT if checkpoint.metadata.get(key) is None}
    restated = loss_scaling.HANDLED | none | set(filter(foreign.is_counted, checkpoint.metadata))
    tag = target.origin.directory.tag
    notes += _lost_clipping(checkpoint, stage)
    files = target_files(target, f"{tag}/" if whole else "")
    return tag, TargetFiles(files, notes=notes, restated=restated), checkpoint


def _lost_clipping(checkpoint: Checkpoint, stage: int) -> list[str]:
    """Say that ZeRO-3 does not keep `clip_grad`, where the source has one."""
    if stage != 3 or "clip_grad" not in checkpoint.optimizer_metadata:
        return []
    return ["ZeRO-3 does not keep clip_grad; it clips as the training's configuration says"]


def _recut(options: Options, world_size: int, stage: int | None) -> RecutOptions:
    return RecutOptions(**{**asdict(options), "world_size": world_size, "stage": stage})


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
    frozen = alone_among_frozen(target)
    if frozen:
        raise UnsupportedError(
            f"{listed(frozen)}: ZeRO-3's files have either all frozen parameters or none, but others were left out "
            "when this was saved",
            expected="--stage 1 or 2",
            advice="a ZeRO-3 engine can load it within `zckpt.deepspeed.any_world_size`",
        )
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
        if not options.requantize:
            return decide(checkpoint, options)
        from zckpt.formats.deepspeed.rare.requantised import decide_requantised

        return decide_requantised(checkpoint, options)
    except UnsupportedError as error:
        if not checkpoint.per_rank:  # or no other verb could do it, either
            error.advice = error.advice or ELSEWHERE
        raise
