"""Write a checkpoint for another number of ranks, in the format it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.errors import UnsupportedError, UsageError, about
from zckpt.formats.floats import with_floats
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.options import choose
from zckpt.formats.registry import get
from zckpt.operations.convert import round_means, under_names
from zckpt.operations.losses import check_nothing_lost, without_rank_values
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Place, Renamed, Resharded, Unpack, naming_of, others, shares
from zckpt.operations.proof import slots_proof
from zckpt.operations.target import How, Written, write_from
from zckpt.state import Checkpoint
from zckpt.state.names import as_filed


@shares(Renamed, more=True)
def reshard(
    source: Source,
    target: Place,
    *,
    world_size: int,
    verify: bool = False,
    fingerprint: bool = False,
    **given: Unpack[Resharded],
) -> Written:
    """Reshard DeepSpeed's or nanochat's checkpoints, or Megatron's legacy files; their programs load the result.

    Names do not change, except that renaming turns a DeepSpeed pipeline into one model; `convert` changes names.

    Parameters
    ----------
    source : path-like or Checkpoint
        A run directory, which becomes a run directory, or a tag directory, which becomes a tag directory. For Hugging
        Face's Trainer, `checkpoint-N`: everything in it is copied.
    target : path-like
        A directory that does not exist.
    world_size : int
        Data-parallel ranks of the target; with tensor parallelism, for each slice.
    verify : bool
        After writing, compare every byte with the source.
    fingerprint : bool
        Store the target's fingerprint with it.
    **shared
    **options
        Options of the format, by default as in the source; None means not given. DeepSpeed: `stage`, the ZeRO stage, 1,
        2 or 3; `elastic`, `round_robin` and `parameter_alignment`, as configured in the target's training;
        `expert_parallel_size` and `tensor_parallel_size`, the ranks over which experts are spread and parameters are
        sliced; `padded_vocab_size`, the rows of the target model's vocabulary. Megatron's legacy files: these sizes,
        `pipeline_parallel_size`, `virtual_pipeline_parallel_size`, `stage_bounds` and `ddp_bucket_size`.

    Raises
    ------
    UsageError
        An option cannot be used.
    SourceError
        The source cannot be read, contradicts itself, or cannot be resharded.
    TargetError
        The target exists or cannot be written.
    """
    options = others(given)
    how = How.of("reshard", given, world_size=world_size, **options)
    naming = naming_of(given)
    if given["dequantize"] and options.get("requantize"):
        raise UsageError("--dequantize and --requantize exclude each other", expected="one of them")
    whole = opened(source, **given)
    own, path = get(whole.format), Path(target)
    if not naming.changes:
        whole = as_filed(whole)
    elif not own.renames(whole):
        raise UnsupportedError(
            "`reshard` does not rename parameters, unless a pipeline becomes one model",
            path=whole.named,
            advice="`zckpt convert --to deepspeed --world-size N --stage S` writes it with other names, for N "
            "ranks; with --pipeline-layers as a pipeline",
        )
    checkpoint, values, drop = without_rank_values(whole, given["drop"])
    if given["dequantize"]:
        [checkpoint] = with_floats(checkpoint, keeps_files=not naming.changes)
    notes: tuple[str, ...] = ()
    if naming.changes:
        dropped = (*values, *check_nothing_lost([whole], drop))
        round_means(checkpoint)
        checkpoint, notes = under_names(checkpoint, naming)
    laid = recut(checkpoint, path, {"world_size": world_size, **options})
    if not naming.changes:
        dropped = (*values, *check_nothing_lost([whole], drop, copied=laid.copied))
    laid = replace(laid, notes=(*notes, *laid.notes))
    proof = slots_proof(checkpoint, laid, how, drop, verify=verify, records=fingerprint)
    inside = [checkpoint.source, str(Path(checkpoint.named)), *checkpoint.roots]
    return write_from(Written, checkpoint, laid, path, how, owns=own.owns, inside=inside, proof=proof, dropped=dropped)


def recut(checkpoint: Checkpoint, target: Path, options: Mapping[str, Any]) -> TargetFiles:
    """Return the files of a checkpoint for other ranks, as its own format lays them out.

    Raises UsageError: an option cannot be used; SourceError: it cannot be resharded.
    """
    own = get(checkpoint.format)
    chosen = choose(own.recut_options, options, own.name) if own.recut_options is not None else None
    with about(checkpoint.source):
        return own.recut(Job(checkpoint, Path(checkpoint.named), target, chosen, tuple(map(Path, checkpoint.roots))))
