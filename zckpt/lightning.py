"""Lightning saves and resumes through zckpt: its own strategies, whose checkpoints are zckpt's.

    from zckpt.lightning import DDPStrategy

    trainer = Trainer(strategy=DDPStrategy(async_=True))     # or FSDPStrategy, ModelParallelStrategy, ...
    trainer.fit(module, data, ckpt_path="last.ckpt")

A strategy, and no CheckpointIO, which is called by the first rank alone with everything in one dict: here each rank
writes and reads its own part. With DeepSpeed, what the engine saves stays DeepSpeed's.

    x.ckpt/     zckpt's format: model and optimizers by name; the rest of Lightning's dict is LIGHTNING in `extra`

Source: Lightning 2.6, `Strategy` and `_CheckpointConnector`.
"""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from zckpt.errors import MissingPackageError, UsageError, require_torch
from zckpt.state import without

require_torch("zckpt.lightning")

from zckpt.deepspeed import any_world_size, durable_saves
from zckpt.formats.native.files import OWNED
from zckpt.operations.places import place_of
from zckpt.storage.durable import remove_leftovers
from zckpt.training.loading import load
from zckpt.training.saving import Saving, save

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"]

LIGHTNING = "lightning"
"""The key of `extra` that has the rest of Lightning's dict."""

MODEL = "zckpt_model"
"""The key of that rest which names the keys under which a hook left the model: the callback that averages moves it."""

OWN = ("pytorch-lightning_version", "loops")
"""What Lightning's dict has, whoever wrote it."""

Path = str | os.PathLike[str]


def _package() -> Any:
    """Return Lightning under the name that the program knows it by, of which the classes are others."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if names[1] in sys.modules and names[0] not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise MissingPackageError("zckpt.lightning needs Lightning, which is not installed", advice="pip install lightning")


_lightning = _package()
_strategies = _lightning.strategies


class _Removing:
    """What a strategy has that saves while training goes on: checkpoints that wait to be removed, or for an error."""

    def __init__(self, *given: Any, async_: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        self.async_ = async_
        self._to_remove: list[Path] = []
        self._has_failed = False

    def setup(self, trainer: Any) -> None:
        """Begin to train, or to do what Lightning does besides."""
        self._has_failed = False
        super().setup(trainer)  # type: ignore[misc]  # Strategy's

    def remove_checkpoint(self, filepath: Path) -> None:
        """Remove a checkpoint; if another is being written, when that is there: a kill must not leave neither."""
        if self.async_:
            self._to_remove.append(filepath)
        else:
            super().remove_checkpoint(filepath)  # type: ignore[misc]  # Strategy's

    def on_exception(self, exception: BaseException) -> None:
        """Remember that other ranks may be gone."""
        self._has_failed = True
        super().on_exception(exception)  # type: ignore[misc]  # Strategy's

    def _make_way(self: Any, place: Path) -> None:
        """Replace a link (`save_last="link"`), not what it leads to, and have a directory where Lightning puts one."""
        target = pathlib.Path(place)
        if self.is_global_zero:
            with suppress(OSError):  # which the save says, on all ranks
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.is_symlink():
                    target.unlink()

    def _remove(self) -> None:
        while self._to_remove:
            super().remove_checkpoint(self._to_remove.pop(0))  # type: ignore[misc]  # Strategy's


class _Sharded(_Removing):
    """A strategy whose checkpoints each rank saves and loads its part of, in zckpt's format.

    It loads what any strategy of Lightning saved, and everything else that zckpt reads: of another program the model
    and the optimizers; then Lightning counts from 0.

    Parameters
    ----------
    async_ : bool
        Save while training goes on; at most one save is going on, and the next one and the end of `fit` wait for it.
    given, named
        Arguments of Lightning's strategy.
    """

    _saving: Saving | None = None
    _stand_in: Mapping[str, Any] = {}

    restore_checkpoint_after_setup = True
    """Checkpoints are loaded when model and optimizers are there."""

    lightning_restore_optimizer = False
    """Lightning does not give optimizers their state."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the model is saved from where it is. What is there at the end, hooks have put there."""
        made: dict[str, Any] = {}
        self._stand_in = made
        return made

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: optimizers are saved from where they are."""
        del optimizer
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: it is loaded."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: it is loaded."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None) -> None:
        """Save; all ranks call it together.

        Raises
        ------
        UsageError
            Options for a CheckpointIO, which is not used.
        UnsupportedError
            Something in Lightning's dict that only a pickle could hold.
        TargetError
            It cannot be written, or something else is there: on all ranks, if on one.
        """
        if storage_options is not None:
            raise UsageError("storage_options are for a CheckpointIO, which this strategy does not use")
        strategy: Any = self
        self._finish()
        has_optimizers = "optimizer_states" in checkpoint
        place = place_of(strategy.broadcast(filepath))
        if not isinstance(place, str):
            self._make_way(place)
            if strategy.is_global_zero:
                remove_leftovers(place.parent, OWNED)
        model = [key for key, value in checkpoint.items() if value is self._stand_in and not value]
        rest = {**without(checkpoint, "optimizer_states", *model), MODEL: model}
        self._saving = save(
            place,
            model=strategy.model,
            optimizer=strategy.optimizers if has_optimizers else None,
            step=checkpoint["global_step"],
            extra={LIGHTNING: rest},
            async_=self.async_,
            overwrite=True,
        )

    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any format, and return the rest of Lightning's dict; all ranks call it together.

        Raises
        ------
        SourceError
            It cannot be read.
        UsageError
            It is of another model.
        """
        del weights_only  # nothing is unpickled
        self._finish()
        strategy: Any = self
        module = strategy.lightning_module
        fits = module.trainer.state.fn == "fit"
        restored = load(
            strategy.broadcast(checkpoint_path),
            model=strategy.model,
            optimizer=strategy.optimizers if fits else None,
            strict=module.strict_loading,
            random_states=fits,
        )
        extra = restored.extra.get(LIGHTNING, restored.extra)
        if not isinstance(extra, Mapping) or not all(key in extra for key in OWN):
            extra = {
                "pytorch-lightning_version": _lightning.__version__, "epoch": 0, "global_step": 0, "lr_schedulers": [],
            }  # fmt: skip
            if strategy.is_global_zero:
                warnings.warn(
                    f"{restored.path}: written by another program ({restored.format}), so Lightning counts from 0",
                    stacklevel=2,
                )
        gathers = isinstance(strategy, _strategies.FSDPStrategy)
        model = {} if gathers else module.state_dict()
        return {**dict.fromkeys(extra.get(MODEL, ["state_dict"]), model), **without(extra, MODEL)}

    def teardown(self) -> None:
        """Wait for a running save."""
        try:
            self._finish()
        finally:
            super().teardown()  # type: ignore[misc]  # Strategy's

    def _finish(self) -> None:
        """Wait for a save that is going on, and remove what Lightning no longer wants beside it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            waiting, self._to_remove = self._to_remove, []  # which stay, if what was to follow them is not there
            error = saving.unseen_error()
            if self._has_failed:  # other ranks may not come to agree on it
                if error is not None:
                    warnings.warn(f"{saving.path} was not saved: {error}", stacklevel=3)
                    return
            else:
                saving.ranks.agree(error)
            self._to_remove = waiting
        self._remove()


class SingleDeviceStrategy(_Sharded, _strategies.SingleDeviceStrategy):  # type: ignore[misc,name-defined]
    """Lightning's SingleDeviceStrategy, with `async_`; checkpoints are as `_Sharded` says."""


class DDPStrategy(_Sharded, _strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Lightning's DDPStrategy, with `async_`; checkpoints are as `_Sharded` says."""


class FSDPStrategy(_Sharded, _strategies.FSDPStrategy):  # type: ignore[misc,name-defined]
    """Lightning's FSDPStrategy, with `async_`; checkpoints are as `_Sharded` says."""


class ModelParallelStrategy(_Sharded, _strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """Lightning's ModelParallelStrategy, with `async_`; checkpoints are as `_Sharded` says."""


class DeepSpeedStrategy(_Removing, _strategies.DeepSpeedStrategy):  # type: ignore[misc,name-defined]
    """Lightning's DeepSpeedStrategy, in `zckpt.deepspeed.durable_saves` and `any_world_size`.

    Checkpoints are DeepSpeed's, and each is whole or absent. It resumes at any number of ranks and any stage, from any
    format with optimizer state.

    Parameters
    ----------
    async_ : bool
        As for `durable_saves`.
    given, named
        Arguments of Lightning's strategy.
    """

    _contexts = ExitStack()

    def setup(self, trainer: Any) -> None:
        """Create the engine, which then saves and loads through zckpt."""
        super().setup(trainer)
        self._contexts = ExitStack()
        self._saves = self._contexts.enter_context(durable_saves(self.deepspeed_engine, async_=self.async_))
        self._contexts.enter_context(any_world_size(self.deepspeed_engine))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None) -> None:
        """Save; all ranks call it together. Errors are those of `durable_saves`."""
        waiting, self._to_remove = self._to_remove, []  # which stay, if what was to follow them is not there
        self._saves.wait()
        self._to_remove = waiting
        self._remove()
        self._make_way(self.broadcast(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Wait for a running save."""
        contexts, self._contexts = self._contexts, ExitStack()
        try:
            if self._has_failed:  # other ranks may not come to agree on how the save went
                error = InterruptedError("training has failed")
                contexts.__exit__(type(error), error, None)
            else:
                contexts.close()
                self._remove()
        finally:
            super().teardown()
