"""`Checkpointer`: a directory of checkpoints of one run, which is saved to, pruned, and resumed from.

run/step-00000500/      a checkpoint
run/step-00001000/
run/latest              the name of the newest one, for those who open `run`
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.durable import written_files
from zckpt.errors import DamagedFileError, SourceError, UsageError
from zckpt.formats.native import check_digests
from zckpt.opened import open as open_checkpoint
from zckpt.optim.ranks import Ranks
from zckpt.training.loading import Restored, load
from zckpt.training.model_state import Stateful
from zckpt.training.saving import Saving, save

LATEST = "latest"

_NAME = re.compile(r"step-(\d{8,})")
_REMOVED = re.compile(r"\.step-\d{8,}\.zckpt-removed")


class Checkpointer:
    """Saves every so many steps and before the job is ended, keeps the newest, and resumes from the newest sound one.

        checkpointer = zckpt.Checkpointer("run", keep=3, every=500)
        restored = checkpointer.resume(model=model, optimizer=optimizer)
        for step in range(restored.step if restored else 0, steps):
            ...
            checkpointer.step(step + 1, model=model, optimizer=optimizer)
            if checkpointer.is_ending:
                break
        checkpointer.close()

    All ranks make one and call its methods together.

    Parameters
    ----------
    directory : path-like
        Made if it does not exist.
    keep : int or None
        How many sound checkpoints to keep, at least 1; None: all.
    every : int or None
        Steps between saves; None: only `save` and the end of the job save.
    async_ : bool
        Save while training goes on.
    on_sigterm : bool
        Let SIGTERM, on any rank, be answered by a save after the next step. Its handler can be set in the main thread
        only.
    fingerprint : bool
        Record the fingerprint of each checkpoint with it.
    process_group : ProcessGroup, optional
        The ranks; by default the whole world.

    Raises
    ------
    UsageError
        `keep` or `every` is below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        async_: bool = False,
        on_sigterm: bool = True,
        fingerprint: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for what, number in (("keep", keep), ("every", every)):
            if number is not None and number < 1:
                raise UsageError(f"{what} must be at least 1", found=number)
        self.directory = Path(directory)
        self.keep = keep
        self.every = every
        self.async_ = async_
        self.fingerprint = fingerprint
        self.is_ending = False
        self._process_group = process_group
        self._ranks = Ranks(process_group)
        self._is_told_to_end = False
        self._listens = on_sigterm
        self._before: Any = None
        self._saving: tuple[Saving, str] | None = None
        if on_sigterm and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_told_to_end = True

    # --- saving

    def step(
        self,
        step: int,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save if it is time to, or if some rank has been told to end; return whether it was.

        Parameters are those of `zckpt.save`, and so are errors.
        """
        self._publish(wait=False)
        ending = self._listens and self._ranks.any(self._is_told_to_end)
        if not ending and (self.every is None or step % self.every):
            return False
        self.save(step, model=model, optimizer=optimizer, scheduler=scheduler, grad_scaler=grad_scaler, extra=extra)
        if ending:
            self._publish(wait=True)
            self.is_ending = True
        return True

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save now; a checkpoint of the same step is replaced. Parameters and errors are those of `zckpt.save`."""
        self._publish(wait=True)
        name = f"step-{step:08d}"
        saving = save(
            self.directory / name,
            model=model,
            optimizer=optimizer,
            step=step,
            scheduler=scheduler,
            grad_scaler=grad_scaler,
            extra=extra,
            async_=self.async_,
            overwrite=True,
            fingerprint=self.fingerprint,
            process_group=self._process_group,
        )
        if saving is None:
            self._name_and_prune(name)
        else:
            self._saving = (saving, name)

    def close(self) -> None:
        """Wait for a save that is going on, and no longer answer SIGTERM.

        Raises
        ------
        ZckptError
            The save has failed.
        """
        try:
            self._publish(wait=True)
        finally:
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)
                self._before = None

    def _publish(self, *, wait: bool) -> None:
        """Name what has been saved in the meantime as the latest, if all ranks have it."""
        if self._saving is None:
            return
        saving, name = self._saving
        if not wait and not self._ranks.all(saving.done()):
            return
        self._saving = None
        saving.result()
        self._name_and_prune(name)

    def _name_and_prune(self, name: str) -> None:
        error: Exception | None = None
        if self._ranks.rank == 0:
            try:
                with written_files([self.directory / LATEST], overwrite=True) as [latest]:
                    latest.write_text(name)
                self._prune()
            except Exception as failure:  # noqa: BLE001  # told to all ranks
                error = failure
        self._ranks.agree(error)

    def _prune(self) -> None:
        """Remove sound checkpoints beyond those to keep, and what is unsound and older than they."""
        for left in self.directory.iterdir():
            if _REMOVED.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        kept = 0
        for path in self._newest_first():
            if self.keep is not None and kept >= self.keep:
                hidden = path.with_name(
                    f".{path.name}.zckpt-removed"
                )  # half removed, it must not look like a checkpoint
                path.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)
            elif _unsound(path) is None:
                kept += 1

    def _newest_first(self) -> list[Path]:
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    # --- resuming

    def resume(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        strict: bool = True,
        verify: bool = False,
    ) -> Restored | None:
        """Load the newest sound checkpoint; those that are passed over are warned of.

        Parameters
        ----------
        model, optimizer, scheduler, grad_scaler, strict
            As for `zckpt.load`.
        verify : bool
            Hold every byte against its checksum first, each rank some of the files.

        Returns
        -------
        Restored or None
            None: there is no checkpoint.

        Raises
        ------
        SourceError
            There are checkpoints, and none is sound.
        UsageError
            The checkpoint is of another model.
        """
        passed: list[str] = []
        for path in self._ranks.told(self._newest_first() if self._ranks.rank == 0 and self.directory.is_dir() else []):
            why = self._ranks.told(_unsound(path) if self._ranks.rank == 0 else None)
            why = why or (self._damage(path) if verify else None)
            if why is not None:
                passed.append(f"{path.name}: {why}")
                if self._ranks.rank == 0:
                    warnings.warn(f"passed over {path.name}, which is not sound: {why}", stacklevel=2)
                continue
            restored = load(
                path,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                grad_scaler=grad_scaler,
                strict=strict,
                process_group=self._process_group,
            )
            restored.notes += [f"passed over {one}" for one in passed]
            return restored
        if passed:
            raise SourceError("none of the checkpoints is sound", path=self.directory, found="; ".join(passed))
        return None

    def _damage(self, path: Path) -> str | None:
        """Return what is damaged of a checkpoint; each rank reads some of its files."""
        try:
            every = check_digests(path, part=(self._ranks.rank, self._ranks.world_size))
            found = [str(one) for one in every[:1]]
        except SourceError as error:
            found = [str(error)]
        told = self._ranks.gather(found[0] if found else None)
        return self._ranks.told(next((one for one in told if one is not None), None))


def _unsound(path: Path) -> str | None:
    """Return why a checkpoint cannot be loaded; None if its document and files are there and fit together."""
    try:
        opened = open_checkpoint(path)
        if opened.format != "zckpt":
            raise DamagedFileError("not a checkpoint of zckpt", path=path, found=opened.format)
    except SourceError as error:
        return str(error)
    return None
