"""Stage 0 for other ranks. All data-parallel ranks load the same files, which stay what they are.

What changes is what the model files say of the ranks: `dp_world_size`, and in DeepSpeed's configuration the batch of
one rank. The optimizer lies in the model files (of experts, in `expp_rank_E` for each expert rank) under the numbers of
its parameters, so that neither their names nor their order need be known.

For other stages of a pipeline and tensor-parallel ranks they have to be: each of those numbers its own parameters.

Stage 0 for other stages of a pipeline and other tensor-parallel ranks: each gets an optimizer of its own.

The form stays: parameters by number, with masters or without, or flat masters. What an optimizer keeps besides (the
loss scale, how it changes) is one for all ranks, and the first one's is carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import NAMES_BY_STAGE_ADVICE
from zckpt.formats.companions import METADATA_ROLE, copy_of
from zckpt.formats.deepspeed.axes.auto_ep import listed_layers
from zckpt.formats.deepspeed.axes.experts import SLICED_EXPERTS, is_expert, named_degree
from zckpt.formats.deepspeed.axes.pipeline import layer_names
from zckpt.formats.deepspeed.axes.stages import parse_layers, uses_of
from zckpt.formats.deepspeed.decide import with_ranks
from zckpt.formats.deepspeed.directory import name_to_load
from zckpt.formats.deepspeed.layouts.stage0 import STATE_KEYS, Numbered
from zckpt.formats.deepspeed.layouts.stage0_ranks import with_tied_names
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Origin, Rank
from zckpt.formats.deepspeed.other_files import in_run, is_run
from zckpt.formats.deepspeed.target import Target, Unpartitioned
from zckpt.formats.deepspeed.trees import batch_of, form_of, restated
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.state import Checkpoint, dict_of
from zckpt.state.partition import check_world_size
from zckpt.torchfile import FromFile

COPIED_RANKS = (
    "at stage 0 every rank loads the same files: they now state {} data-parallel ranks, and are otherwise "
    "unchanged, including what zckpt leaves out elsewhere"
)


AS_ZERO = "`zckpt convert --to deepspeed --stage` writes it for ZeRO, which `zckpt reshard` can cut"


def copied(job: Job, origin: Origin) -> TargetFiles:
    """Return a run or a tag directory, as the source is one, for other data-parallel ranks alone."""
    tag, ranks = origin.directory.tag, job.options.world_size
    folder = f"{tag}/" if is_run(job) else ""
    models = {one.model.path: one.model for one in origin.ranks}
    paths = [file.path for file in job.checkpoint.files if file.role != METADATA_ROLE]  # not another program's
    files = []
    for path in paths:
        name, model = f"{folder}{name_to_load(path)}", models.get(path)
        if model is None:
            files.append(copy_of(Path(path), name))
            continue
        config = model.content.get("ds_config")
        if isinstance(config, dict):
            config = {**config, **batch_of(config, ranks)}
        said: dict[str, object] = {"dp_world_size": ranks, "ds_config": FromFile.of(model.file, config)}
        said |= listed_layers(model, {}, ranks)
        files.append(torch_writer.lay_out(name, restated(model.file, dict_of(model.file.root), said)))
    written = TargetFiles(files, notes=[COPIED_RANKS.format(ranks)], restated=None, copied={one.name for one in files})
    return in_run(written, job, tag, ranks * len(origin.ranks))


_OF_MODEL_PARALLEL = (
    "tensor_parallel_size", "pipeline_parallel_size", "partition_method", "stage_bounds", "pipeline_layers",
    "padded_vocab_size",
)  # fmt: skip
"""Options for which each rank's optimizer has to be put together anew."""


def _degrees(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the ranks of the source, by the option that changes them."""
    topology = checkpoint.topology
    return {
        "tensor_parallel_size": topology.tp,
        "expert_parallel_size": topology.ep,
        "pipeline_parallel_size": topology.pp,
    }


def _check(checkpoint: Checkpoint, options: RecutOptions) -> None:
    check_world_size(options.world_size)
    topology, same = checkpoint.topology, _degrees(checkpoint)
    names = [one.name for one in fields(options) if one.name not in ("world_size", SLICED_EXPERTS, *_OF_MODEL_PARALLEL)]
    asked = [name for name in names if getattr(options, name) not in (None, False, same.get(name))]
    if options.sliced_experts not in (None, checkpoint.details.get(SLICED_EXPERTS)):
        asked.append(SLICED_EXPERTS)
    if asked:
        raise UnsupportedError(
            "stage 0 can be resharded for other data-, tensor- and pipeline-parallel ranks, but not with "
            f"--{asked[0].replace('_', '-')}",
            advice=AS_ZERO,
        )
    degrees = sorted(
        {named_degree(group) for group in checkpoint.param_groups if any(map(is_expert, group.parameters))}
    )
    if any(topology.ep % degree for degree in degrees):
        raise UnsupportedError(
            f"experts over {listed(degrees)} ranks, which DeepSpeed loads wrongly "
            f"without ZeRO: each rank takes the file of its number among {topology.ep}, which has other experts",
            advice="`zckpt convert --to deepspeed --stage` writes it for ZeRO, with a file for each rank",
        )
    if options.world_size % topology.ep:
        raise UsageError(
            f"experts spread over {topology.ep} ranks do not fit {options.world_size} data-parallel ranks",
            expected=f"a multiple of {topology.ep}",
        )


def regrouped(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> Target | None:
    """Return the target, of which each rank numbers its own parameters; None where only data-parallel ranks change.

    Raises UsageError: the options cannot be; UnsupportedError: the names of the source's optimizers are not known, or
    their state cannot be cut; or something else than ranks is to change.
    """
    _check(checkpoint, options)
    if all(getattr(options, one) in (None, _degrees(checkpoint).get(one)) for one in _OF_MODEL_PARALLEL):
        return None
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    if origin.experts or origin.expert_optimizers or any(map(is_expert, checkpoint.parameters)):
        raise UnsupportedError(
            "at stage 0, each expert rank's optimizer numbers the experts of one tensor-parallel rank and stage: "
            "other numberings are unknown",
            expected="SOURCE's tensor-parallel ranks and stages",
            advice=AS_ZERO,
        )
    ranks = _ranks(checkpoint, origin, options)
    for parameter in (p for files in ranks for p in files.parameters.values() if degree != checkpoint.topology.tp):
        odd = [key for key, slot in parameter.slots.items() if slot.shape not in (parameter.shape, ())]
        odd += [key for key, value in parameter.state.items() if holds_tensors(value)]
        if odd:
            raise UnsupportedError(
                f"{odd[0]} of {parameter.name} does not have one value per element, so it cannot be cut for other "
                "tensor-parallel ranks",
            )
    model = origin.model
    target = with_ranks(
        Target(
            checkpoint, replace(origin, ranks=ranks), options.world_size, 0, model.zero_option("elastic_checkpoint"),
            model.zero_option("round_robin_gradients"), model.zero_option("parameter_alignment"), False, tp=degree,
        ),
        options,
    )  # fmt: skip
    for rank in target.ranks:
        rank.members, rank.unpartitioned, held = (), None, rank.model.optimizer
        if held is not None:  # its state is written in the form in which the source has it
            file = rank.model.file
            kept = {str(key): FromFile.of(file, value) for key, value in held.items() if key not in STATE_KEYS}
            names = [[p.name for p in group.experts[0]] for group in rank.groups]
            named = Numbered(file).recorded_names is not None
            rank.unpartitioned = Unpartitioned(form_of(held), names, kept, own_state=True, named=named)
    return target


def _ranks(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> Sequence[Rank]:
    """Return the source's ranks with the names that their optimizers' numbers stand for."""
    held = any(files.model.optimizer is not None for files in origin.ranks)
    if held and (checkpoint.unnamed or not checkpoint.param_groups):
        raise UnsupportedError(
            "it is uncertain which parameters each rank's optimizer numbers, so they cannot be regrouped",
            advice=NAMES_BY_STAGE_ADVICE,
        )
    keys = {number: key for key, its in uses_of(parse_layers(options.pipeline_layers)).items() for number in its}
    if len(origin.ranks) == 1:
        own = replace(origin.ranks[0], parameters=checkpoint.parameters, param_groups=checkpoint.param_groups)
        return with_tied_names([own], keys)
    return with_tied_names(origin.ranks, keys)


def names_in(target: Target) -> list[str]:
    """Return the names of what the optimizers number, stage by stage, as reading the target's files gives them."""
    first = {
        int(shard.layer or 0): layer_names(shard, file, [files.model for files in target.origin.ranks])
        for shard, file in target.origin.layers
    }
    filed = {
        name: f"{layer}.{key}"
        for layer, names in first.items()
        for key, name in names.items()
        if name not in target.checkpoint.parameters
    }
    ranks = target.ranks[:: target.tp]
    return [filed.get(p.name, p.name) for mp in ranks for group in mp.groups for p in group.experts[0]]
