"""Cut a checkpoint for another number of ranks, in the format it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.errors import UsageError
from zckpt.execute import DEFAULT_MEMORY_NBYTES, Reporter, execute_directory
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.carried import notes
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.names import is_own
from zckpt.formats.deepspeed.other_files import is_trainers, is_trainers_own, trainer_files
from zckpt.formats.deepspeed.target import Options, Target
from zckpt.formats.deepspeed.writer import target_files
from zckpt.operations.proof import Proof, check_apart
from zckpt.plan import TargetFile, plan
from zckpt.renaming import as_filed


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was written, or under `dry_run` would be.

    Parameters
    ----------
    files : tuple of Path
    read_nbytes, write_nbytes : int, bytes
    memory : int, bytes
        Upper bound of the copy buffers.
    compared : int
        Elements of masters that were held against their weights, and against those of other tensor-parallel ranks.
    verified : int, bytes
        What was compared with the source after writing.
    notes : tuple of str
        What was carried over and may not mean anything at another number of ranks, and what could not be.
    warnings : tuple of str
    """

    files: tuple[Path, ...]
    read_nbytes: int
    write_nbytes: int
    memory: int
    compared: int
    verified: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def reshard(
    source: str | os.PathLike[str],
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
    verify: bool = False,
    fingerprint: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
) -> Resharded:
    """Cut a DeepSpeed checkpoint for another number of data-parallel ranks; stock DeepSpeed loads the result.

    Parameters
    ----------
    source : path-like
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
    weight_check, overwrite, dry_run, memory, reporter, roots, tag
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
    checkpoint = as_filed(open_checkpoint(source, roots=roots, tag=tag, tp_rules=tp_rules))
    path = Path(target)
    for place in (source, *roots):
        if Path(place).resolve() in path.resolve().parents:
            raise UsageError("the target is inside the source", path=path, found=os.fspath(place))
    run_directory = checkpoint.files != [] and Path(source).resolve() != Path(checkpoint.source).resolve()
    options = Options(world_size, stage, elastic, round_robin, parameter_alignment, expert_parallel_size,
                      tensor_parallel_size, padded_vocab_size)  # fmt: skip
    wanted = decide(checkpoint, options)
    beside, told = _beside(source, roots, wanted) if run_directory else ([], [])
    copied = {one.name for one in beside}
    check_apart(
        checkpoint,
        path,
        overwrite=overwrite,
        is_own=lambda name: is_own(Path(name).name) or name in copied or (bool(copied) and is_trainers_own(name)),
    )
    made = plan([*target_files(wanted, run_directory=run_directory), *beside])
    told = [*notes(wanted), *told]
    compared = 0
    if weight_check:
        from zckpt.formats.deepspeed.slice_check import check_slices
        from zckpt.weight_check import check_weights

        compared = check_weights(checkpoint) + check_slices(wanted)
    proof = Proof(checkpoint, path, verify, fingerprint, memory, reporter)
    if not dry_run:
        execute_directory(made, path, overwrite=overwrite, memory=memory, reporter=reporter, check=proof.of)
    files = tuple(path / one.file.name for one in made.files)
    return Resharded(
        files,
        made.read_nbytes,
        made.write_nbytes,
        memory,
        compared,
        proof.verified,
        tuple(told),
        tuple(checkpoint.warnings),
    )


def _beside(
    source: str | os.PathLike[str], roots: Sequence[str | os.PathLike[str]], target: Target
) -> tuple[list[TargetFile], list[str]]:
    """Return what goes with a checkpoint that lies in a directory of Hugging Face's Trainer."""
    if not is_trainers(Path(source)):
        return [], []
    processes = target.world_size * len(target.ranks)
    directory = target.origin.directory.path
    return trainer_files(Path(source), directory, processes=processes, roots=[Path(root) for root in roots])
