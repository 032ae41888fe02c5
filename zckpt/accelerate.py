"""Accelerate's `save_state` and `load_state` through zckpt.

    from zckpt.accelerate import Accelerator

    accelerator = Accelerator(async_=True)
    ...
    accelerator.save_state("state")
    accelerator.load_state("state")

An Accelerator, and no hooks: one that is registered with `register_save_state_pre_hook` can take the place of the model
alone. With DeepSpeed, what the engine saves stays DeepSpeed's.

    state/      zckpt's format: model, optimizers, scheduler, scaler; all else is ACCELERATE in `extra`

Source: Accelerate 1.15, `Accelerator.save_state` and `load_state`.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zckpt.errors import (
    MissingPackageError,
    SourceError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    require_torch,
)

require_torch("zckpt.accelerate")

try:
    import accelerate
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise MissingPackageError(
        "zckpt.accelerate needs Accelerate, which is not installed", advice="pip install accelerate"
    ) from error

from zckpt.deepspeed import any_world_size, durable_saves
from zckpt.formats.native.files import OWNED
from zckpt.storage.durable import remove_leftovers
from zckpt.storage.files import numbered_in
from zckpt.training.loading import Restored, load
from zckpt.training.saving import Saving, save

__all__ = ["Accelerator"]

ACCELERATE = "accelerate"
"""The key of `extra` that has what Accelerate keeps besides."""

_REST = frozenset({"step", "schedulers", "loaders", "objects"})
"""What is there."""

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # which has no types
    """Accelerate's Accelerator with zckpt's checkpoints: each rank has its part, and a state is whole or absent.

    `load_state` loads what was saved at any number of processes, with or without FSDP, by Accelerate itself or any
    other program; `zckpt.load` restores the model, its optimizers and schedulers.

    Parameters
    ----------
    async_ : bool
        `save_state` returns when everything is copied. Only one save runs at a time: the next one, `load_state`,
        `end_training` and `wait_for_save` wait for it. With DeepSpeed, saves are not asynchronous.
    given, named
        Accelerate's own arguments.
    """

    def __init__(self, *given: Any, async_: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        self.async_ = async_
        self._saving: Saving | None = None

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **named: Any
    ) -> str:
        """Save; all ranks call it together. Returns the directory.

        Raises
        ------
        UsageError
            No directory is given or generated; or arguments do not apply.
        UnsupportedError
            Several models, hooks that write their own files, or something that only a pickle could hold.
        TargetError
            It cannot be written, or something else exists there; raised on all ranks, if on one.
        """
        if self._engine_saves():
            with durable_saves():
                return str(super().save_state(output_dir, safe_serialization, **named))
        self._check(self._save_model_state_pre_hook, named)
        self.wait_for_save()
        if output_dir is not None:
            path = Path(output_dir).expanduser()
        elif (path := self._folder() / f"checkpoint_{self.save_iteration}").exists():
            raise TargetExistsError("already exists", path=path, advice="set project_configuration.iteration")
        if self.is_main_process:
            remove_leftovers(path.parent, OWNED)
        self._saving = save(
            path,
            **self._what(),
            extra={
                ACCELERATE: {
                    "step": self.step,
                    **{key: [one.state_dict() for one in objects] for key, objects in self._others().items()},
                }
            },
            async_=self.async_,
            overwrite=output_dir is not None,
        )
        self.project_configuration.iteration += 1
        if not self.async_:
            self._prune()
        return str(path)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **named: Any
    ) -> Restored | None:
        """Load; all ranks call it together. Returns the result of `zckpt.load`, or None with DeepSpeed.

        Raises
        ------
        SourceError
            It does not exist or cannot be read, or has another number of registered objects.
        UsageError
            It is for another model.
        """
        if self._engine_saves():
            with any_world_size():
                super().load_state(input_dir, load_kwargs, **named)
            return None
        self._check(self._load_model_state_pre_hook, named | (load_kwargs or {}))
        self.wait_for_save()
        if input_dir is not None:
            path = Path(input_dir).expanduser()
        elif every := self._every():
            path = every[-1]
        else:
            raise SourceError("no state has been saved", path=self._folder())
        restored = load(path, **self._what())
        rest = restored.extra.get(ACCELERATE)
        if not isinstance(rest, Mapping) or not rest.keys() >= _REST:
            if self._custom_objects:
                restored.notes.append("registered objects are not restored: another program wrote the checkpoint")
            return restored
        del restored.extra[ACCELERATE]
        for what, objects in self._others().items():
            states = rest[what]
            if len(states) != len(objects):
                raise SourceError(
                    f"the saved {what} are not those of this program", path=restored.path, expected=len(objects),
                    found=len(states),
                    advice="model and optimizer are already restored; register the same objects as when it was saved",
                )  # fmt: skip
            for one, state in zip(objects, states, strict=True):
                one.load_state_dict(state)
        self.step = rest["step"]
        return restored

    def wait_for_save(self) -> None:
        """Wait until the running save is finished; all ranks call it together.

        Raises
        ------
        ZckptError
            On all ranks: it could not be written, and does not exist.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.ranks.agree(saving.unseen_error())
            self._prune()

    def end_training(self) -> None:
        """Wait for a save, and end trackers."""
        self.wait_for_save()
        super().end_training()

    # --- what is saved

    def _engine_saves(self) -> bool:
        kind = self.distributed_type.value
        if kind in ("MEGATRON_LM", "XLA"):
            raise UnsupportedError(f"Accelerate's {kind} is not saved or loaded", advice="use accelerate.Accelerator")
        return bool(kind == "DEEPSPEED")

    def _check(self, hooks: Any, named: dict[str, Any]) -> None:
        if named:
            raise UsageError("these arguments only apply to Accelerate's own save and load", found=", ".join(named))
        if hooks:
            raise UnsupportedError(
                "registered hooks write and read their own files, but zckpt's state is a directory that appears whole",
                advice="use register_for_checkpointing for objects with a state_dict",
            )
        if len(self._models) != 1:
            raise UnsupportedError(
                "a state can have only one model", found=f"{len(self._models)} prepared models",
                advice="call zckpt.save for each, with a separate directory",
            )  # fmt: skip

    def _what(self) -> dict[str, Any]:
        """Return what `save` and `load` have arguments for."""
        schedulers = self._schedulers
        return {
            "model": self._models[0],
            "optimizer": self._optimizers,
            "scheduler": schedulers[0] if len(schedulers) == 1 else None,
            "grad_scaler": self.scaler,
        }

    def _others(self) -> dict[str, list[Any]]:
        """Return what else has a state of its own: several schedulers, loaders, registered objects."""
        return {
            "schedulers": self._schedulers if len(self._schedulers) > 1 else [],
            "loaders": [one for one in self._dataloaders if getattr(one, "use_stateful_dataloader", False)],
            "objects": self._custom_objects,
        }

    # --- where, if Accelerate makes the names

    def _folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming or self.project_dir is None:
            raise UsageError(
                "no directory given", advice="give one, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(self.project_dir, "checkpoints")

    def _every(self) -> list[Path]:
        """Return the numbered states, the first first."""
        return [path for _, path in numbered_in(self._folder(), _NUMBERED)]

    def _prune(self) -> None:
        """Remove the first states beyond the limit, when the last one is there."""
        limit = self.project_configuration.total_limit
        if limit is not None and self.project_configuration.automatic_checkpoint_naming and self.is_main_process:
            for path in self._every()[:-limit]:
                try:
                    shutil.rmtree(path)
                except OSError as error:  # the other processes go on: what was to be saved is there
                    warnings.warn(f"{path} exceeds total_limit but could not be removed: {error}", stacklevel=3)
