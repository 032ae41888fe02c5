"""What is in a run directory next to one of its checkpoints, and what Hugging Face's Trainer keeps there.

OUTPUT/checkpoint-N/
    global_stepN/         DeepSpeed's checkpoint, and `latest`, which names it
    trainer_state.json    where the training is; by it such a directory is known
    rng_state_R.pth       random states of rank R; of one process `rng_state.pth`
    scheduler.pt, model.safetensors, config.json, training_args.bin, tokenizer files, zero_to_fp32.py, ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from zckpt.engine.targets import Lazily, TargetFile
from zckpt.formats.companions import INDEXES, METADATA_ROLE, copy_of, files_below
from zckpt.formats.deepspeed.directory import shards_in
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.transformers_trainer.states import scheduler
from zckpt.state import Checkpoint, dict_of
from zckpt.torchfile import node_of

LATEST = "latest"
TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"

_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")


def beside_tag(source: Path, tag_directory: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return what is in a run directory besides a checkpoint and `latest`, by name and path, and the other tags.

    Those are left out. Errors are those of `files_below`.
    """
    own = tag_directory.relative_to(source)
    others = sorted(
        path.relative_to(source).as_posix()
        for level in range(1, len(own.parts) + 1)  # other tags of the run have as many slashes, or fewer
        for path in source.glob("/".join("*" * level))
        if path.is_dir() and path != tag_directory and shards_in(path)
    )
    gone = (LATEST, f"{LATEST}_universal") if others else (LATEST,)
    files = files_below(source, without=[*others, own.as_posix()])
    return [one for one in files if one[0] not in gone], others


def is_run(job: Job) -> bool:
    """Tell whether a source was named by its run's directory, and not by its tag's."""
    return job.checkpoint.files != [] and job.source.resolve() != Path(job.checkpoint.source).resolve()


def with_latest(files: Collection[TargetFile], tag: str, more: Sequence[TargetFile] = ()) -> Lazily[TargetFile]:
    """Return the files of a tag's directory and those of a run's: `latest`, which names it, and others."""
    rest = [TargetFile.of(LATEST, tag.encode()), *more]
    return Lazily(lambda: chain(files, rest), len(files) + len(rest))


def in_run(written: TargetFiles, job: Job, tag: str, processes: int) -> TargetFiles:
    """Return the files of a tag's directory, with what is carried from there, as those of a run, if the source is one.

    `processes`: how many will load it.

    Raises SourceError: what goes along with it cannot be read.
    """
    own, folder = os.path.realpath(job.checkpoint.source), f"{tag}/" if is_run(job) else ""
    copies = [
        copy_of(Path(file.path), folder + os.path.relpath(real, own))
        for file in job.checkpoint.files
        if file.role == METADATA_ROLE and (real := os.path.realpath(file.path)).startswith(own + os.sep)
    ]
    files = written.files
    if copies:
        every = Lazily(lambda: chain(files, copies), len(files) + len(copies))
        written = replace(written, files=every, copied={*written.copied, *(one.name for one in copies)})
    return with_others(written, job, tag, processes) if is_run(job) else written


def with_others(written: TargetFiles, job: Job, tag: str, processes: int) -> TargetFiles:
    """Return the files of a run with what other programs keep in the directory that was opened."""
    if is_trainers(job.source):
        copies, notes = _trainers(job, processes)
    else:
        own = os.path.realpath(job.source)
        carried = [Path(file.path) for file in job.checkpoint.files if file.role == METADATA_ROLE]
        paths = [path for path in carried if os.path.realpath(path.parent) == own]
        states = [path.name for path in paths if "rng" in path.name or "random" in path.name]
        told = f"{', '.join(states[:4])}: as saved by {len(states)} processes"
        copies = [copy_of(path, path.name) for path in paths]
        notes = [told] if len(states) not in (0, processes) else []
    return replace(
        written,
        files=with_latest(written.files, tag, copies),
        notes=[*written.notes, *notes],
        copied={*written.copied, *(one.name for one in copies)},
        replaceable=is_trainers_own if copies else written.replaceable,
    )


def is_trainers(source: Path) -> bool:
    """Tell whether Hugging Face's Trainer wrote a directory."""
    return (source / TRAINER_STATE).is_file()


def is_trainers_own(name: str) -> bool:
    """Tell a file that the Trainer may have for another number of ranks."""
    return _RANDOM.fullmatch(name) is not None


def random_states(checkpoint: Checkpoint) -> set[str]:
    """Return the keys of the Trainer's random states, which another number of ranks has in other files, or not."""
    return {key for key in checkpoint.metadata if is_trainers_own(f"{key}.pth")}


def _trainers(job: Job, processes: int) -> tuple[list[TargetFile], list[str]]:
    """Return copies of what the Trainer keeps next to a checkpoint, for another number of processes."""
    source = job.source
    others, left_out = beside_tag(source, Path(job.checkpoint.source))
    if not is_run(job):  # a Trainer's without DeepSpeed, which has its model and optimizer here, or in directories
        held = {file.path for file in job.checkpoint.files if file.role != METADATA_ROLE}
        others = [
            (name, path) for name, path in others if name == path.name and name not in INDEXES and str(path) not in held
        ]
    notes = [f"other checkpoints next to it are left out: {', '.join(left_out)}"] if left_out else []
    states: dict[int, Path] = {}
    for directory in (*job.roots, source):
        files_here = (path for path in sorted(directory.iterdir()) if path.is_file())
        states |= {int(match[1] or 0): path for path in files_here if (match := _RANDOM.fullmatch(path.name))}
    rates = dict_of(node_of(job.checkpoint.metadata.get("scheduler"))).get("base_lrs")
    regrouped = isinstance(rates, list) and len(rates) not in (0, len(job.checkpoint.param_groups))
    files = [
        torch_writer.lay_out(name, scheduler(job.checkpoint, notes))  # for the param groups that there are now
        if name == SCHEDULER and regrouped
        else copy_of(path, name)
        for name, path in others
        if not is_trainers_own(name)
    ]
    for rank, path in sorted(states.items()):
        if rank < processes:
            files.append(copy_of(path, "rng_state.pth" if processes == 1 else f"rng_state_{rank}.pth"))
        else:
            notes.append(f"{path.name} is left out: there is no rank {rank}")
    missing = [rank for rank in range(processes) if rank not in states] if states else []
    if missing:
        which = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks from {missing[0]} on"
        notes.append(f"no random states for {which}: the Trainer continues without them")
    return files, notes
