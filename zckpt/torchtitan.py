"""torchtitan's CheckpointManager over zckpt: saves whole or not at all, in zckpt's format; loads every format.

    from zckpt.torchtitan import CheckpointManager

    def my_config():
        config = llama3_debugmodel()
        config.checkpoint = CheckpointManager.Config(enable=True, interval=500, async_mode="async")
        return config

Its own, but for what `dcp.save` and `dcp.load` are given. What `last_save_in_hf` writes stays Hugging Face's.

Source: torchtitan 0.3, `components/checkpointer/dcp.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zckpt.errors import MissingPackageError, UnsupportedError, require_torch

require_torch("zckpt.torchtitan")

try:
    from torchtitan.components.checkpointer import MODEL, AsyncMode
    from torchtitan.components.checkpointer import CheckpointManager as _CheckpointManager
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("torchtitan"):
        raise
    raise MissingPackageError(
        "zckpt.torchtitan needs torchtitan, 0.3 or newer, which is not installed", advice="pip install torchtitan"
    ) from error

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from zckpt.dcp import Reader, Writer
from zckpt.formats.native.files import OWNED, is_native
from zckpt.operations.places import place_of
from zckpt.storage.durable import remove_leftovers
from zckpt.storage.files import numbered_in

__all__ = ["CheckpointManager"]

_STEP = re.compile(r"step-(\d+)")

_LAST_FILES = (".metadata", "model.safetensors.index.json", "model.safetensors")
"""What others write last, or at once."""


class CheckpointManager(_CheckpointManager):  # type: ignore[misc]  # which is not there for mypy
    """torchtitan's, whose `step-N` are zckpt's: each is whole or not there, and loaded at any number of ranks.

    It goes on with the last one in its folder, be it DCP's or zckpt's; `initial_load_path` may be of any format.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's, without "async_with_pinned_mem"."""

    def __init__(self, config: Config, **named: Any) -> None:
        if config.enable and config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM.value:
            raise UnsupportedError(
                "in this mode torchtitan stages in a separate process, which zckpt does not support",
                found=config.async_mode,
                advice='async_mode="async" saves while training goes on',
            )
        super().__init__(config, **named)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save; parameters and what is returned are torchtitan's.

        Raises
        ------
        ZckptError
            It cannot be written, or the format has no place for something: on all ranks; asynchronously, from what is
            returned.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        place = place_of(checkpoint_id)
        if torch.distributed.get_rank() == 0 and isinstance(place, Path):
            remove_leftovers(place.parent, OWNED)
        writer = Writer(checkpoint_id, overwrite=True)
        with torch.no_grad():
            if async_mode == AsyncMode.DISABLED:
                return save(state_dict, storage_writer=writer)
            return async_save(state_dict, storage_writer=writer, process_group=self.pg)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load; parameters are torchtitan's.

        Raises
        ------
        SourceError
            It cannot be read.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=Reader(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    def _purge_stale_checkpoints(self) -> None:
        """Remove what is older than the last `keep_latest_k` that are whole.

        torchtitan counts all whose names have `step-N` in them: what a save is writing, and what killed ones have left.
        """
        place = place_of(self.folder)
        if not isinstance(place, Path):
            super()._purge_stale_checkpoints()
            return
        if not self._should_purge():
            return
        found = numbered_in(place, _STEP)
        whole = [  # zckpt's, DCP's, or Hugging Face's, which has an index or one file
            step for step, path in found if is_native(path) or any((path / one).is_file() for one in _LAST_FILES)
        ]
        if len(whole) > self.keep_latest_k:
            for _, path in (one for one in found if one[0] < whole[-self.keep_latest_k]):
                self.purge_queue.put(str(path))

    def _find_load_step(self, folder: str = "") -> int:
        """Return the last step that is there, -1 for none."""
        own = -1
        place = place_of(folder or self.folder)
        if isinstance(place, Path):
            own = max((step for step, path in numbered_in(place, _STEP) if is_native(path)), default=-1)
        return max(own, int(super()._find_load_step(folder)))
