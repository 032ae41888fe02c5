"""Stage 0 for other ranks. All data-parallel ranks load the same files, which stay what they are.

What changes is what the model files say of the ranks: `dp_world_size`, and in DeepSpeed's configuration the batch of
one rank. The optimizer lies in the model files (of experts, in `expp_rank_E` for each expert rank) under the numbers of
its parameters, so that neither their names nor their order need be known.

For other stages of a pipeline and tensor-parallel ranks they have to be: each of those numbers its own parameters.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.companions import METADATA_ROLE, copy_of
from zckpt.formats.deepspeed.auto_ep_lists import listed_layers
from zckpt.formats.deepspeed.directory import name_to_load
from zckpt.formats.deepspeed.experts import SLICED_EXPERTS, is_expert, named_degree
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.other_files import in_run, is_run
from zckpt.formats.deepspeed.regroup_stage0 import names_in, regroup, regrouped_files
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.tensor_parallel import check_slices
from zckpt.formats.deepspeed.write_optimizer import batch_of
from zckpt.formats.deepspeed.writer import rank_notes
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.state import Checkpoint
from zckpt.state.partition import check_world_size
from zckpt.torchfile import FromFile

COPIED_RANKS = (
    "every rank loads the same files at stage 0: they say {} data-parallel ranks now, and else are what they were, "
    "also in what zckpt leaves out elsewhere"
)


def is_without_zero(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint is DeepSpeed's of stage 0."""
    origin = origin_of(checkpoint)
    return origin is not None and not origin.members and bool(origin.ranks) and checkpoint.zero_stage == 0


def recut(job: Job) -> TargetFiles:
    """Return a run or a tag directory, as the source is one.

    Raises
    ------
    UsageError
        The experts' ranks do not divide the number of ranks.
    UnsupportedError
        More than the number of data-parallel ranks is to change.
    """
    checkpoint, options = job.checkpoint, job.options
    origin = origin_of(checkpoint)
    if origin is None or not isinstance(options, RecutOptions):
        raise UnsupportedError("is no checkpoint of DeepSpeed")
    _check(checkpoint, options)
    regrouped = [
        one for one in _OF_MODEL_PARALLEL if getattr(options, one) not in (None, _degrees(checkpoint).get(one))
    ]
    tag = origin.directory.tag
    folder = f"{tag}/" if is_run(job) else ""
    models = {files.models[0].path: files.models[0] for files in origin.ranks}
    target = regroup(checkpoint, origin, options) if regrouped else None
    if target is None:
        files = [_file(folder, path, models.get(path), options) for path in _paths(checkpoint)]
        notes = [COPIED_RANKS.format(options.world_size)]
    else:
        files = list(regrouped_files(target, folder))
        notes = rank_notes(target)
    written = TargetFiles(
        files,
        notes=notes,
        restated=None,
        copied=set() if target is not None else {one.name for one in files},
        check=None if target is None else partial(check_slices, origin, checkpoint.topology.tp, target.tp),
        names=None if target is None or not checkpoint.param_groups else names_in(target),
    )
    return in_run(written, job, tag, options.world_size * len(origin.ranks if target is None else target.ranks))


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
    if options.slice_rules is not None:
        raise UsageError("the slices that SOURCE has are put together, and cut, by --tp-rules FILE",
                         found="--slice-rules")  # fmt: skip
    names = [one.name for one in fields(options) if one.name not in ("world_size", SLICED_EXPERTS, *_OF_MODEL_PARALLEL)]
    asked = [name for name in names if getattr(options, name) not in (None, False, same.get(name))]
    if options.sliced_experts not in (None, checkpoint.details.get(SLICED_EXPERTS)):
        asked.append(SLICED_EXPERTS)
    if asked:
        raise UnsupportedError(
            f"stage 0 is resharded for other data-, tensor- and pipeline-parallel ranks, not for another {asked[0]}",
            advice="`zckpt convert --to deepspeed --stage` makes one of ZeRO of it, which `zckpt reshard` cuts",
        )
    degrees = sorted(
        {named_degree(group) for group in checkpoint.param_groups if any(map(is_expert, group.parameters))}
    )
    if any(topology.ep % degree for degree in degrees):
        raise UnsupportedError(
            f"experts over {listed([str(degree) for degree in degrees])} ranks, which DeepSpeed does not load right "
            f"without ZeRO: each rank takes the file of its number among {topology.ep}, and that has others' experts",
            advice="`zckpt convert --to deepspeed --stage` makes one of ZeRO of it, which has a file for each rank",
        )
    if options.world_size % topology.ep:
        raise UsageError(
            f"experts spread over {topology.ep} ranks cannot be those of {options.world_size} data-parallel ranks",
            expected=f"a multiple of {topology.ep}",
        )


def _paths(checkpoint: Checkpoint) -> list[str]:
    """Return the files of the ranks; what other programs put next to them is not among them."""
    return [file.path for file in checkpoint.files if file.role != METADATA_ROLE]


def _file(folder: str, path: str, model: ModelShard | None, options: RecutOptions) -> TargetFile:
    name = f"{folder}{name_to_load(path)}"
    if model is None:
        return copy_of(Path(path), name)
    ranks = {"dp_world_size": options.world_size, "ds_config": _config(model, options.world_size)}
    ranks |= listed_layers(model, {}, options.world_size)
    content = {
        key: ranks[key] if key in ranks else FromFile.of(model.file, value) for key, value in model.content.items()
    }
    return torch_writer.lay_out(name, content)


def _config(model: ModelShard, world_size: int) -> object:
    config = model.content.get("ds_config")
    if not isinstance(config, dict):
        return FromFile.of(model.file, config)
    return FromFile.of(model.file, {**config, **batch_of(config, world_size)})
