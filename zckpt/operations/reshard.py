"""Cut a checkpoint for another number of ranks, in the format it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.checking import Checked
from zckpt.engine.plan import plan
from zckpt.errors import UsageError
from zckpt.formats.checksums import source_checks
from zckpt.formats.deepspeed.carried import notes
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.names import is_own
from zckpt.formats.deepspeed.other_files import files_beside, is_trainers_own
from zckpt.formats.deepspeed.target import Options
from zckpt.formats.deepspeed.writer import target_files
from zckpt.operations.left_out import check_nothing_lost
from zckpt.operations.open import Source, named, opened
from zckpt.operations.proof import Proof, check_apart
from zckpt.operations.result import Written
from zckpt.operations.target import write_target
from zckpt.state.names import as_filed
from zckpt.storage.ownership import Owned


def reshard(
    source: Source,
    target: str | os.PathLike[str],
    *,
    world_size: int,
    stage: int | None = None,
    elastic: bool | None = None,
    round_robin: bool | None = None,
    parameter_alignment: bool | None = None,
    expert_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
    padded_vocab_size: int | None = None,
    weight_check: bool = True,
    checksums: bool = True,
    verify: bool = False,
    fingerprint: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    drop: Sequence[str] = (),
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
) -> Written:
    """Cut a DeepSpeed checkpoint for another number of data-parallel ranks; stock DeepSpeed loads the result.

    Parameters
    ----------
    source : path-like or Checkpoint
        A run directory, which comes out as a run directory, or a tag directory, which comes out as one. Of Hugging
        Face's Trainer, `checkpoint-N`: all that it keeps there comes along.
    target : path-like
        A directory that does not exist.
    world_size : int
        Data-parallel ranks of the target; under tensor parallelism there are that many of each slice.
    stage : {1, 2, 3}, optional
        ZeRO stage of the target; by default the source's.
    elastic, round_robin, parameter_alignment : bool, optional
        As the target's training is configured; by default as the source's was.
    expert_parallel_size : int, optional
        Ranks over which the experts are spread; by default as in the source.
    tensor_parallel_size : int, optional
        Ranks over which parameters are sliced; by default as in the source. Then no value is touched.
    tp_rules : path-like, optional
        A JSON file with the rules for slices, in the form of `universal_checkpoint_info`; by default the source's own.
    padded_vocab_size : int, optional
        Rows of the target model's vocabulary; by default the source's, or the next multiple of the slices.
    verify : bool
        Compare all that was written with the source, before it gets its name.
    fingerprint : bool
        Record the fingerprint of what was written with it.
    weight_check, checksums, overwrite, dry_run, memory, reporter, drop, roots, tag, names
        As for `consolidate`.

    Raises
    ------
    UsageError
        An option that cannot be used.
    SourceError
        The source cannot be read, contradicts itself, or is of a kind that is not cut anew.
    TargetError
        The target exists or cannot be written.
    """
    checkpoint = as_filed(opened(source, roots=roots, tag=tag, names=names, tp_rules=tp_rules))
    path, origin = Path(target), named(checkpoint)
    for place in (str(origin), *checkpoint.roots):
        if Path(place).resolve() in path.resolve().parents:
            raise UsageError("the target is inside the source", path=path, found=place)
    run_directory = checkpoint.files != [] and origin.resolve() != Path(checkpoint.source).resolve()
    options = Options(world_size, stage, elastic, round_robin, parameter_alignment, expert_parallel_size,
                      tensor_parallel_size, padded_vocab_size)  # fmt: skip
    wanted = decide(checkpoint, options)
    others = [Path(root) for root in checkpoint.roots]
    beside, told = files_beside(checkpoint, origin, wanted, roots=others) if run_directory else ([], [])
    copied = {one.name for one in beside}
    dropped = check_nothing_lost(checkpoint, drop, copied=copied)
    owned = Owned(lambda name: is_own(Path(name).name) or name in copied or (bool(copied) and is_trainers_own(name)))
    check_apart(checkpoint, path, overwrite=overwrite, owned=owned)
    made = plan([*target_files(wanted, run_directory=run_directory), *beside])
    told = [*notes(wanted), *told]
    compared = 0
    if weight_check:
        from zckpt.compare.weights import check_weights
        from zckpt.formats.deepspeed.slice_check import check_slices

        compared = check_weights(checkpoint) + check_slices(wanted)
    proof = Proof(checkpoint, path, verify, fingerprint, memory, reporter, drop, restated=None)
    checked = Checked()
    if not dry_run:
        checks = source_checks(checkpoint.files, made) if checksums else None
        checked = write_target(
            made,
            path,
            owned=owned,
            overwrite=overwrite,
            memory=memory,
            reporter=reporter,
            checks=checks,
            prove=proof.of,
        )
    files = tuple(path / one.file.name for one in made.files)
    return Written(
        dry_run=dry_run,
        files=files,
        read_nbytes=made.read_nbytes,
        write_nbytes=made.write_nbytes,
        memory=memory,
        compared=compared,
        checksummed=checked.nbytes,
        verified=proof.verified,
        notes=tuple(told),
        dropped=dropped,
        warnings=tuple(checkpoint.warnings),
    )
