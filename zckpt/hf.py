"""Hugging Face's Trainer: save what it trains with a Checkpointer, resume at another number of processes.

    with zckpt.Checkpointer("run", every=500, async_=True) as checkpointer:
        trainer.add_callback(zckpt.hf.callback(checkpointer))
        trainer.train()

With DeepSpeed:

    trainer = Trainer(...)
    with zckpt.hf.any_world_size():
        trainer.train(resume_from_checkpoint=True)

The Trainer asks DeepSpeed to load `checkpoint-N`, which DeepSpeed does at the number of ranks that saved it only.
`any_world_size`, which is `zckpt.deepspeed`'s, lets it load in place. For those who want files, there is a copy for the
present number of ranks:

    trainer.train(resume_from_checkpoint=zckpt.hf.prepare_resume("out"))

It must be there before `train` begins: when callbacks are first called, the Trainer has loaded. What a Trainer without
DeepSpeed saves, any number of processes loads.

OUTPUT/checkpoint-N/                 as the Trainer saved it
OUTPUT/_resharded-P/checkpoint-N/    for P processes; `_`, so that it is not uploaded with the model
OUTPUT/_resharded-P/checkpoint-N.json    which files it was copied from
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zckpt.errors import MissingPackageError, SourceError, TargetError, UnsupportedError, UsageError, require_torch

require_torch("zckpt.hf")

import torch.distributed as dist

from zckpt.deepspeed import any_world_size
from zckpt.formats import open_checkpoint
from zckpt.formats.companions import files_below
from zckpt.formats.deepspeed.directory import find
from zckpt.formats.deepspeed.other_files import TRAINER_STATE, is_trainers
from zckpt.operations.reshard import reshard
from zckpt.optim.ranks import Ranks
from zckpt.state import Topology
from zckpt.storage.durable import written
from zckpt.storage.files import numbered_in, read_whole
from zckpt.training.checkpointer import Checkpointer
from zckpt.training.restored import assert_restored

__all__ = ["any_world_size", "callback", "prepare_resume"]

MAXIMUM_NBYTES = 1 << 26
"""Of the file that says what a copy was copied from: some hundred bytes for each file."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def callback(checkpointer: Checkpointer | None = None, *, check: bool | str | os.PathLike[str] = False) -> Any:
    """Return a callback for `Trainer.add_callback` that saves with a Checkpointer and checks what was resumed.

    After each step, it calls `checkpointer.step` with the step's number, the model, the optimizer and the scheduler:
    all ranks save every so many steps, and on SIGTERM, after which the training ends. `zckpt convert --to
    transformers-trainer` turns a save into a Trainer's checkpoint.

    Parameters
    ----------
    checkpointer : Checkpointer, optional
        For training without DeepSpeed.
    check : bool or path-like
        When a resumed training begins, call `zckpt.assert_restored` with the model, the optimizer and the scheduler
        (also DeepSpeed's). True compares with `checkpoint-N` in the output directory, where N is the Trainer's step; or
        give the path that it resumes from.

    Raises
    ------
    MissingPackageError
        Transformers is not installed.
    UsageError
        There is nothing to do.
    NotRestoredError
        When training begins: something differs from the checkpoint.
    UnsupportedError
        When training begins: it uses DeepSpeed; use `zckpt.deepspeed.durable_saves` instead.
    """
    if checkpointer is None and not check:
        raise UsageError("the callback has nothing to do", advice="give a Checkpointer, or check=True")
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError("zckpt.hf.callback needs Transformers", advice="pip install transformers") from error

    class Saves(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            del control
            if args.deepspeed and checkpointer is not None:
                raise UnsupportedError(
                    "a Checkpointer cannot save a DeepSpeed training",
                    advice="use zckpt.deepspeed.durable_saves() instead of this callback",
                )
            if check and state.global_step:
                path = Path(args.output_dir, f"checkpoint-{state.global_step}") if check is True else check
                whole = not hasattr(others["model"], "peft_config")  # of whose model a checkpoint has the adapter
                assert_restored(path, **_trained(others), strict=whole)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            del args
            if checkpointer is not None:
                checkpointer.step(state.global_step, **_trained(others))
                control.should_training_stop |= checkpointer.is_ending

    return Saves()


def _trained(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Trainer tells callbacks of what it trains, as zckpt calls it."""
    return {"model": given["model"], "optimizer": given["optimizer"], "scheduler": given["lr_scheduler"]}


def prepare_resume(checkpoint: str | os.PathLike[str], *, world_size: int | None = None) -> str | None:
    """Return a Trainer checkpoint that the current processes can resume from; all of them call it together.

    If DeepSpeed saved it at another number of ranks, the first process writes a copy for the current number, and the
    others wait. An earlier copy is reused if the original is unchanged. Copies stay until you remove them. Keep batch
    size per process x processes x accumulation unchanged, so that the Trainer continues with the next batch.

    Parameters
    ----------
    checkpoint : path-like
        `checkpoint-N`, or a Trainer's output directory, whose newest finished checkpoint is used; on a file system that
        all processes share.
    world_size : int, optional
        Processes that will resume. Default: the current ones.

    Returns
    -------
    str or None
        For `Trainer.train(resume_from_checkpoint=...)`. None if the output directory has no checkpoint.

    Raises
    ------
    UsageError
        There are several processes, but no process group yet: create the Trainer or its arguments first.
    SourceError
        There is no such checkpoint, or it cannot be resharded for this number; raised on all processes, if on one.
    TargetError
        The copy cannot be written; raised on all processes, if on one.
    """
    joined = dist.is_available() and dist.is_initialized()
    if not joined and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the process group is not initialised yet",
            advice="create the Trainer, or its TrainingArguments, before this call",
        )
    ranks = Ranks()
    processes = ranks.world_size if world_size is None else world_size

    def prepared() -> str | None:
        path = Path(checkpoint)
        source = path if is_trainers(path) or _CHECKPOINT.fullmatch(path.name) else _newest(path)
        if source is None:
            return None
        if not is_trainers(source):
            raise SourceError("no Trainer checkpoint", path=source, expected=f"a directory with {TRAINER_STATE}")
        topology = open_checkpoint(source).topology if find(source) is not None else None
        if topology is None or topology.dp * topology.tp * topology.pp == processes:
            return str(source)
        return str(_copy(source, topology, processes))

    return ranks.of_first(prepared)


def _newest(output: Path) -> Path | None:
    """Return the newest checkpoint of an output directory that the Trainer has finished; others are warned of."""
    for path in (path for _, path in reversed(numbered_in(output, _CHECKPOINT)) if path.is_dir()):
        if is_trainers(path):
            return path
        warnings.warn(f"skipped {path}, which has no {TRAINER_STATE}: it was not saved completely", stacklevel=4)
    return None


def _copy(source: Path, topology: Topology, processes: int) -> Path:
    """Return a copy for another number of processes, a new one unless it is there."""
    if processes < 1 or processes % topology.tp:
        raise UsageError(
            "the number of processes must be a multiple of the tensor-parallel ranks",
            expected=topology.tp,
            found=processes,
        )
    folder = source.resolve().parent / f"_resharded-{processes}"
    target, made_of = folder / source.name, folder / f"{source.name}.json"
    found = {name: path.stat() for name, path in files_below(source)}  # which tell it from another of the same name
    identity = json.dumps({name: [its.st_size, its.st_mtime_ns] for name, its in found.items()}, indent=1)
    with suppress(SourceError):
        if target.is_dir() and read_whole(str(made_of), most=MAXIMUM_NBYTES) == identity.encode():
            return target
    try:
        folder.mkdir(exist_ok=True)
        made_of.unlink(missing_ok=True)
    except OSError as error:
        raise TargetError("cannot be written", path=folder, found=error.strerror) from error
    reshard(source, target, world_size=processes // topology.tp, overwrite=True)
    with written([made_of], overwrite=True) as [file]:
        file.write_text(identity)
    return target
