"""Write a checkpoint for another number of ranks, in the format it has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError, UsageError, about
from zckpt.formats.floats import with_floats
from zckpt.formats.format import Format, Job
from zckpt.formats.options import choose
from zckpt.formats.registry import get
from zckpt.naming import Naming
from zckpt.naming.inside import follow_names
from zckpt.operations.convert import round_means
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import Source, named, opened
from zckpt.operations.options import Reading, Renamed, Renaming, Resharded, only, shares
from zckpt.operations.places import takes_urls
from zckpt.operations.proof import SlotsProof
from zckpt.operations.rank_values import without_rank_values
from zckpt.operations.target import How, Written, write_from
from zckpt.state import Checkpoint
from zckpt.state.names import as_filed

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_urls
@shares(Renamed, more=True)
def reshard(
    source: Source,
    target: str | os.PathLike[str],
    *,
    world_size: int,
    verify: bool = False,
    fingerprint: bool = False,
    dequantize: bool = False,
    **given: Unpack[Resharded],
) -> Written:
    """Cut a DeepSpeed checkpoint, or Megatron's legacy files, for other ranks; stock programs load the result.

    Names stay as they are, but of a pipeline of DeepSpeed, of which others make one model; `convert` writes new ones.

    Parameters
    ----------
    source : path-like or Checkpoint
        A run directory, which comes out as a run directory, or a tag directory, which comes out as one. Of Hugging
        Face's Trainer, `checkpoint-N`: all that it keeps there comes along.
    target : path-like
        A directory that does not exist.
    world_size : int
        Data-parallel ranks of the target; under tensor parallelism there are that many of each slice.
    verify : bool
        Compare all that was written with the source, before it gets its name.
    fingerprint : bool
        Record the fingerprint of what was written with it.
    dequantize : bool
        Write quantised state of bitsandbytes and torchao as float32, under torch's names. Without it, codes are cut
        where each partition begins with a block of them.
    **shared
    **options
        What the format leaves to choose, by default as in the source; None is as if it were not given. DeepSpeed's:
        `stage`, the ZeRO stage, 1, 2 or 3; `elastic`, `round_robin` and `parameter_alignment`, as the target's training
        is configured; `expert_parallel_size` and `tensor_parallel_size`, the ranks over which experts are spread and
        parameters are sliced; `padded_vocab_size`, the rows of the target model's vocabulary.
        Of Megatron's legacy files: these sizes, `pipeline_parallel_size`, `virtual_pipeline_parallel_size`,
        `stage_bounds` and `ddp_bucket_size`.

    Raises
    ------
    UsageError
        An option that cannot be used.
    SourceError
        The source cannot be read, contradicts itself, or is of a kind that is not resharded.
    TargetError
        The target exists or cannot be written.
    """
    options = {name: value for name, value in given.items() if name not in Renamed.__annotations__}
    how = How.of("reshard", given, world_size=world_size, dequantize=dequantize, **options)
    naming = Naming(**only(Renaming, given))
    if dequantize and options.get("requantize"):
        raise UsageError("quantised state is made floats or codes, not both", expected="--dequantize or --requantize")
    checkpoint = opened(source, **only(Reading, given))
    own = get(checkpoint.format)
    _check_names(checkpoint, naming, own)
    checkpoint = checkpoint if naming.changes else as_filed(checkpoint)
    path, origin = Path(target), named(checkpoint)
    whole = checkpoint
    checkpoint, values, drop = without_rank_values(checkpoint, given["drop"])
    if dequantize:
        [checkpoint] = with_floats(checkpoint, keeps_files=not naming.changes)
    notes: tuple[str, ...] = ()
    if naming.changes:
        dropped = (*values, *check_nothing_lost([whole], drop))
        round_means(checkpoint)
        before = checkpoint
        checkpoint, notes, followed = naming.traced(before)
        notes += follow_names(checkpoint, before, followed)
    asked = {"world_size": world_size, **options}
    chosen = choose(own.recut_options, asked, own.name) if own.recut_options is not None else None
    with about(checkpoint.source):
        laid = own.recut(Job(checkpoint, origin, path, chosen, tuple(Path(root) for root in checkpoint.roots)))
    if not naming.changes:
        dropped = (*values, *check_nothing_lost([whole], drop, copied=laid.copied))
    proof = SlotsProof(checkpoint, path, laid, how, drop, verify, fingerprint)
    inside = [checkpoint.source, str(origin), *checkpoint.roots]
    done = write_from(checkpoint, laid, path, how, owns=own.owns, inside=inside, proof=proof, dropped=dropped)
    return replace(done, notes=(*notes, *done.notes))


def _check_names(checkpoint: Checkpoint, naming: Naming, own: Format) -> None:
    """Raise UnsupportedError where other names are asked for and the format's ranks keep theirs."""
    if naming.changes and not own.renames(checkpoint):
        raise UnsupportedError(
            "reshard leaves the names in a checkpoint as they are, but of a pipeline that becomes one model",
            path=checkpoint.opened or checkpoint.source,
            advice="`zckpt convert --to deepspeed --world-size N --stage S` writes it under other names, for N ranks, "
            "with --pipeline-layers as a pipeline",
        )
