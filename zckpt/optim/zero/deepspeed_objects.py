"""The objects of a ZeroOptimizer's state dict as DeepSpeed's files name them; DeepSpeed itself need not be there.

DeepSpeed puts what it finds in a file in the place of its own: a loss scaler must be one of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.optim.zero.loss_scale import LossScaler, Scaler
from zckpt.optim.zero.state_dicts import FragmentAddress
from zckpt.torchfile import DType, Global, Object

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")


def with_objects(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that can be written, and that DeepSpeed takes for its own."""
    made = dict(state_dict)
    made["loss_scaler"] = scaler_object(made["loss_scaler"])
    made["zero_stage"] = Object(_STAGE, args=(made["zero_stage"],))
    made["param_slice_mappings"] = [
        {name: _fragment(address) for name, address in mapping.items()} for mapping in made["param_slice_mappings"]
    ]
    return made


def scaler_object(scaler: Scaler) -> Object:
    """Return a loss scaler as an object of DeepSpeed's class."""
    if isinstance(scaler, LossScaler):
        return _new(Global(_SCALERS, "LossScaler"), {"cur_scale": scaler.cur_scale, "dynamic": False})
    state: dict[object, object] = {"dynamic": True, "dtype": DType("float16")}
    state.update(vars(scaler))
    return _new(Global(_SCALERS, "DynamicLossScaler"), state)


def _fragment(address: FragmentAddress) -> Object:
    return _new(_FRAGMENT, {"numel": address.numel, "start": address.start})


def _new(cls: Global, state: dict[object, object]) -> Object:
    return Object(cls, how="newobj", state=state, has_state=True)
