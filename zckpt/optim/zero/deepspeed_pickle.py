"""A pickle module for `torch.save` that writes our objects under the names of DeepSpeed's, which need not be there.

DeepSpeed puts what it finds in a file in the place of its own: a loss scaler must be its own class.
"""

from __future__ import annotations

import enum
import pickle
from typing import Any

import torch

from zckpt.optim.zero.loss_scale import DynamicLossScaler, LossScaler
from zckpt.optim.zero.state_dicts import FragmentAddress


class Stage(enum.IntEnum):
    """The stage of ZeRO, as DeepSpeed's files say it."""

    OPTIMIZER_STATES = 1
    GRADIENTS = 2


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"

_PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined,unused-ignore]
"""The one written in Python: it lets what is written be decided object by object."""


class Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes the objects of a ZeroOptimizer's state dict as DeepSpeed's, and everything else as pickle does."""

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        """Write one object."""
        known = self.memo.get(id(obj))
        if isinstance(obj, Stage):
            self._write("deepspeed.runtime.zero.config", "ZeroStageEnum", (int(obj),), pickle.REDUCE)
        elif known is not None:
            self.write(self.get(known[0]))
        elif isinstance(obj, LossScaler):
            self._write_new(obj, _SCALERS, "LossScaler", {"cur_scale": obj.cur_scale, "dynamic": False})
        elif isinstance(obj, DynamicLossScaler):
            self._write_new(obj, _SCALERS, "DynamicLossScaler", {**vars(obj), "dynamic": True, "dtype": torch.float16})
        elif isinstance(obj, FragmentAddress):
            self._write_new(obj, "deepspeed.utils.tensor_fragment", "fragment_address", dict(vars(obj)))
        else:
            super().save(obj, save_persistent_id)

    def _write(self, module: str, name: str, arguments: tuple[object, ...], opcode: bytes) -> None:
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.save(arguments)
        self.write(opcode)

    def _write_new(self, obj: object, module: str, name: str, state: dict[str, object]) -> None:
        self._write(module, name, (), pickle.NEWOBJ)
        self.memoize(obj)
        self.save(state)
        self.write(pickle.BUILD)


dump = pickle.dump
load = pickle.load
Unpickler = pickle.Unpickler
