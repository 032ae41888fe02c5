"""Cut a checkpoint for another number of ranks, in the format it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.errors import LayoutError, TargetExistsError, UsageError
from zckpt.execute import DEFAULT_MEMORY_NBYTES, Reporter, execute_directory
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.names import is_own
from zckpt.formats.deepspeed.target import Options
from zckpt.formats.deepspeed.writer import lay_out
from zckpt.plan import Hole, fill, plan
from zckpt.state import Checkpoint, Extent


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
        Elements of masters that were held against their weights.
    notes : tuple of str
        What was carried over and may not mean anything at another world size.
    warnings : tuple of str
    """

    files: tuple[Path, ...]
    read_nbytes: int
    write_nbytes: int
    memory: int
    compared: int
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
    weight_check: bool = True,
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
        A run directory, which comes out as a run directory, or a tag directory, which comes out as one.
    target : path-like
        A directory that does not exist.
    world_size : int
        Data-parallel ranks of the target.
    stage : {1, 2, 3}, optional
        ZeRO stage of the target; by default the source's.
    elastic, round_robin, parameter_alignment : bool, optional
        As the target's training is configured; by default as the source's was.
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
    checkpoint = open_checkpoint(source, roots=roots, tag=tag)
    path = Path(target)
    run_directory = checkpoint.files != [] and Path(source).resolve() != Path(checkpoint.source).resolve()
    options = Options(world_size, stage, elastic, round_robin, parameter_alignment)
    made = plan(lay_out(checkpoint, options, run_directory=run_directory))
    _check_apart(checkpoint, path, overwrite=overwrite)
    compared = 0
    if weight_check:
        from zckpt.weight_check import check_weights

        compared = check_weights(checkpoint)
    if not dry_run:
        execute_directory(made, path, overwrite=overwrite, memory=memory, reporter=reporter)
        _prove(checkpoint, path)
    files = tuple(path / one.file.name for one in made.files)
    return Resharded(
        files, made.read_nbytes, made.write_nbytes, memory, compared, _notes(checkpoint), tuple(checkpoint.warnings)
    )


def _check_apart(checkpoint: Checkpoint, path: Path, *, overwrite: bool) -> None:
    """Raise unless the target can be replaced without losing the source or anything that is no checkpoint."""
    whole = path.resolve()
    for file in checkpoint.files:
        if whole in Path(file.path).resolve().parents:
            raise UsageError("the target is, or contains, the source", path=path, found=file.path)
    if overwrite and path.is_dir():
        others = [p.name for p in path.rglob("*") if not p.is_dir() and not is_own(p.name)]
        if others:
            raise TargetExistsError(
                "holds other files, which replacing it would remove",
                path=path,
                found=", ".join(sorted(others)[:4]),
                advice="choose a new directory",
            )


def _prove(checkpoint: Checkpoint, path: Path) -> None:
    """Open what was written and plan a read of all of it: every element of every slot must be there once."""
    written = open_checkpoint(path)
    for name, parameter in checkpoint.parameters.items():
        found = written.parameters.get(name)
        for key, slot in parameter.slots.items():
            if found is None or (key not in found.slots and key != "weight"):
                raise LayoutError(f"{key} of {name} did not arrive", path=path, advice="please report this")
            if key in found.slots:
                copy = found.slots[key]
                if copy.shape != slot.shape:
                    raise LayoutError(f"{key} of {name} has another shape", path=path, expected=slot.shape,
                                      found=copy.shape, advice="please report this")  # fmt: skip
                fill(Hole(0, f"{key}/{name}", copy, Extent.whole(copy.shape), copy.dtype))


def _notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Name what is carried over as it was and belongs to the old number of ranks."""
    names = [key for key in ("data_sampler", "random_ltd") if checkpoint.metadata.get(key) is not None]
    client = [key for key in checkpoint.metadata if "rng" in key.lower() or "random" in key.lower()]
    return tuple(f"{key} is carried over as it was saved at another number of ranks"
                 for key in dict.fromkeys([*names, *client]))  # fmt: skip
