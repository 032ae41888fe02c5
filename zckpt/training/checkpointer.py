"""`Checkpointer`: a directory of checkpoints of one run, which is saved to, pruned, and resumed from.

run/step-00000500/      a checkpoint
run/step-00001000/
run/latest              the name of the one that was saved last, for those who open `run`
run/checkpointer.json   which ones the Checkpointer wrote, in which order
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zckpt.codes import CHECKSUM
from zckpt.errors import DamagedFileError, SourceError, UsageError
from zckpt.formats.native.reader import check_digests
from zckpt.operations.places import at_path, lasting_place_of, on_disk
from zckpt.optim.ranks import Place, Ranks
from zckpt.optim.states.several import Given
from zckpt.optim.tensors import Model, Stateful
from zckpt.optim.values import number_of_steps
from zckpt.state import first_of
from zckpt.training.directory import new_identity
from zckpt.training.ending import Ending, Sigterm
from zckpt.training.live import TpRules
from zckpt.training.loading import SPOILED, Restored, load
from zckpt.training.run_directory import RunPlace, Written, unsound
from zckpt.training.saving import Saving, save_given
from zckpt.training.spare import Spare


class Checkpointer:
    """Save every so many steps and before the job ends, keep the last saves, and resume from them.

        checkpointer = zckpt.Checkpointer("run", keep=3, every=500)
        restored = checkpointer.resume(model=model, optimizer=optimizer)
        for step in range(restored.step if restored else 0, steps):
            ...
            checkpointer.step(step + 1, model=model, optimizer=optimizer)
            if checkpointer.is_ending:
                break
        checkpointer.close()

    All ranks create one and call its methods together; `with` closes it, too. If there is nothing to save, `step` sends
    nothing and waits for no other rank. A thread removes what is no longer kept.

    Checkpoints are ordered by time of saving, not by step: after going back to step 300 of 500 and saving step 400,
    step 400 is the last. Only what a Checkpointer wrote into the directory, as its record shows by name and id, is ever
    replaced or removed.

    Parameters
    ----------
    directory : path-like
        Created if it does not exist; or a URL in a store.
    keep : int or None
        Number of sound checkpoints to keep, at least 1, saved last; None: all.
    every : int or None
        Steps between saves; None: save only on `save` and at the end of the job.
    async_ : bool
        Save while training goes on.
    on_sigterm : bool
        If any rank gets SIGTERM, save on all ranks after the current step or the next one. An existing handler is
        called at once; an exception that it raises, such as SystemExit, is raised after that save. If no save follows,
        SIGTERM has its former effect from `close` on. The handler can only be set in the main thread.
    fingerprint : bool
        Store each checkpoint's fingerprint with it.
    history : path-like, optional
        A store, as from `zckpt pack`. A thread of the first rank adds each checkpoint after its save, before any is
        removed. While that fails, a warning says so, and none is removed. A step that is saved again has another name
        there, with the checkpoint's id.
    replicate : bool
        After each step that is not saved, keep in memory what a save would write, so that killed workers lose no step:
        in /dev/shm, which outlives them, and with several nodes also in the next node's. `resume` makes a checkpoint
        from it. Each node needs memory for what its ranks and those of the node before it save, twice while a step is
        kept and sent; `close` frees it, unless there is an error.
    replicate_every : int
        Steps between these copies.
    replicate_in : path-like, optional
        A directory on each node that outlives the workers, instead of /dev/shm.
    tp_rules : path-like or mapping, optional
        As for `zckpt.save`, for all saves and `resume`.
    process_group : ProcessGroup, optional
        The ranks. Default: the whole world.

    Raises
    ------
    UsageError
        `keep`, `every` or `replicate_every` is below 1, there is no directory for copies in memory, or `history` is a
        URL.
    TargetExistsError
        The directory belongs to another program, whose `latest` would be replaced.
    SourceError
        Its record cannot be read.
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
        history: str | os.PathLike[str] | None = None,
        replicate: bool = False,
        replicate_every: int = 1,
        replicate_in: str | os.PathLike[str] | None = None,
        tp_rules: TpRules = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for what, number in (("keep", keep), ("every", every), ("replicate_every", replicate_every)):
            if number is not None and number < 1:
                raise UsageError(f"{what} must be at least 1", found=number)
        self.directory = lasting_place_of(directory)
        self._place = RunPlace(self.directory)
        self.keep = keep
        self.every = every
        self.async_ = async_
        self.fingerprint = fingerprint
        self.history = None if history is None else on_disk(history).absolute()
        self._tp_rules = tp_rules
        self.is_ending = False
        self._process_group = process_group
        self._ranks = Ranks(process_group)
        self._ranks.of_first(self._place.check)
        self._saving: Saving | None = None
        self._pruning: threading.Thread | None = None
        self._told_of: list[str] = []
        within = None if replicate_in is None else Path(replicate_in)
        self._spare = Spare(self._ranks, self._place, within) if replicate else None
        self._spare_every = replicate_every
        self._follows = self._ranks.of_first(lambda: [self._place.latest()]) if replicate else []
        self._sigterm = Sigterm()
        self._ending: Ending | None = None
        if on_sigterm:
            self._ending = Ending(self._ranks, self._sigterm)
            self._sigterm.listen()

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    # --- saving

    def step(
        self,
        step: int,
        *,
        model: Model = None,
        optimizer: Given = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save if it is time to, or if any rank was asked to end; return whether it saved.

        Parameters and errors are those of `zckpt.save`.
        """
        ending = self._ending is not None and self._ending.is_due()
        is_due = ending or (self.every is not None and not step % self.every)
        is_kept = (
            self._spare is not None and not ending and not step % self._spare_every and (self.async_ or not is_due)
        )
        if is_due or is_kept:
            given = self._given(step, model, optimizer, scheduler, grad_scaler, extra)
        if is_due:
            self._save(given)
        if self._spare is not None and is_kept:
            self._spare.keep(given, self._follows)
        if ending:
            self._finish()
            self.is_ending = True
            self._sigterm.answer()
        return is_due

    def save(
        self,
        step: int,
        *,
        model: Model = None,
        optimizer: Given = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save now. A checkpoint of the same step is replaced if a Checkpointer wrote it.

        Parameters and errors are those of `zckpt.save`.
        """
        self._save(self._given(step, model, optimizer, scheduler, grad_scaler, extra))

    def _given(self, step: int, *trained: object) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "grad_scaler", "extra")
        return {**dict(zip(names, trained, strict=True)), "step": number_of_steps(step), "tp_rules": self._tp_rules}

    def _save(self, given: Mapping[str, Any]) -> None:
        self._finish()
        checkpoint = Written(f"step-{given['step']:08d}", new_identity())  # the first rank's counts
        overwrite = self._ranks.of_first(lambda: self._begin(checkpoint))
        self._saving = save_given(
            self._place.checkpoint(checkpoint.name), given, self._process_group,
            async_=self.async_, overwrite=overwrite, fingerprint=self.fingerprint, identity=checkpoint.identity,
            then=lambda: self._name_and_prune(checkpoint),
        )  # fmt: skip

    def _begin(self, checkpoint: Written) -> bool:
        """Note what is going to be saved; return whether it replaces something."""
        replaces = self._place.begin(checkpoint)
        self._follows = [*self._follows[-1:], checkpoint.shown]  # whichever of the two `latest` will name
        return replaces

    def close(self) -> None:
        """Wait for saves, removals and copies to the next node, and stop handling SIGTERM.

        Also call it when an error is being raised, before the process group is destroyed.

        Raises
        ------
        ZckptError
            A save has failed.
        """
        try:
            self._finish()
        finally:
            if self._ending is not None:
                self._ending.close()
            self._sigterm.close()
            if self._spare is not None:  # before the process group is destroyed
                self._spare.close(keep=sys.exc_info()[1] is not None)

    def _finish(self) -> None:
        """Wait for what is going on in other threads."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()
        finally:
            if self._pruning is not None:
                self._pruning.join()
            while self._told_of:
                warnings.warn(self._told_of.pop(0), stacklevel=3)

    def _name_and_prune(self, checkpoint: Written) -> None:
        """Name what has been saved as the latest, and let a thread remove what is no longer kept."""
        record = self._place.name(checkpoint)
        self._follows = [checkpoint.shown]

        def prune() -> None:  # a failure has spoiled nothing, and the next save tries again
            try:
                self._pack(record.saved)
                self._place.prune(record, self.keep, self._told_of)
            except Exception as error:  # noqa: BLE001  # told by the thread that trains
                self._told_of.append(
                    f"{self._place.shown}: could not remove checkpoints that are no longer kept: {error}"
                )

        self._pruning = threading.Thread(target=prune, name="zckpt-prune")
        self._pruning.start()

    def _pack(self, saved: Iterable[Written]) -> None:
        """Add to the store of the run's history what it has not."""
        if self.history is None:
            return
        from zckpt.operations.pack import pack

        for one in saved:
            path = self._place.checkpoint(one.name)
            if unsound(path) is not None:
                continue
            try:
                pack(path, self.history)
            except UsageError:  # the store has what was saved of this step before
                pack(path, self.history, name=f"{one.name}-{one.identity}")

    # --- resuming

    def resume(
        self,
        *,
        model: Model = None,
        optimizer: Given = None,
        scheduler: Stateful | None = None,
        grad_scaler: Stateful | None = None,
        strict: bool = True,
        verify: bool | None = None,
    ) -> Restored | None:
        """Load the checkpoint that `latest` names if it is sound, or else the one saved before it, and so on.

        Warns about each one that it skips.

        Parameters
        ----------
        model, optimizer, scheduler, grad_scaler, strict
            As for `zckpt.load`.
        verify : bool, optional
            Default: compare what is read with its checksums while reading, as in `zckpt.load`. True: check every byte
            first, with the files divided among the ranks. False: check nothing. If `strict` is false, other weights may
            be read in the end, so damage to weights is raised then.

        Returns
        -------
        Restored or None
            None if there is no checkpoint.

        Raises
        ------
        SourceError
            There are checkpoints, but none is sound; the message says whether weights must not be used.
        UsageError
            The checkpoint is for another model.
        """
        self._finish()
        passed: list[str] = []
        if self._spare is not None:
            self._spare.finish()
            self._save_spare(self._spare)
        for name in self._ranks.of_first(self._place.candidates):
            path = self._place.checkpoint(name)
            why = self._ranks.of_first(partial(unsound, path)) or (self._damage(path) if verify else None)
            if why is None:
                try:
                    restored = load(
                        path, model=model, optimizer=optimizer, scheduler=scheduler, grad_scaler=grad_scaler,
                        strict=strict, tp_rules=self._tp_rules, verify=verify is not False,
                        process_group=self._process_group,
                    )  # fmt: skip
                except DamagedFileError as error:
                    if error.code != CHECKSUM or (not strict and SPOILED in str(error)):
                        raise
                    why = str(error)
                else:
                    restored.notes += [f"skipped {one}" for one in passed]
                    return restored
            passed.append(f"{name}: {why}")
            if self._ranks.rank == 0:
                warnings.warn(f"skipped {name}, which is not sound: {why}", stacklevel=2)
        if passed:
            raise SourceError("none of the checkpoints is sound", path=self._place.shown, found="; ".join(passed))
        return None

    def _save_spare(self, spare: Spare) -> None:
        """Make a checkpoint of what was kept in memory, if that is of later than the latest one."""

        def settled() -> str:
            self._place.candidates()
            return self._place.latest()

        latest = self._ranks.of_first(settled)
        found = spare.find(latest)
        if found is not None:
            checkpoint = Written(f"step-{found.about.step:08d}", found.about.id)
            if checkpoint.name != latest.partition(" ")[0]:
                overwrite = self._ranks.of_first(lambda: self._begin(checkpoint))
                path = self._place.checkpoint(checkpoint.name)
                spare.copy(found, path, overwrite=overwrite, fingerprint=self.fingerprint)
                self._ranks.of_first(lambda: self._name_and_prune(checkpoint))
        spare.forget()

    def _damage(self, place: Place) -> str | None:
        """Return what is damaged of a checkpoint; each rank reads some of its files."""
        try:
            with at_path(place) as path:
                every = check_digests(path, rank=self._ranks.rank, world_size=self._ranks.world_size)
                found = str(every[0]) if every else None
        except SourceError as error:
            found = str(error)
        return first_of(self._ranks.gather_all(found))
