"""The 1-bit optimizers: OneBitAdam, ZeroOneAdam, OneBitLamb, which DeepSpeed has up to 0.18 and runs at stage 0 only.

They send signs instead of numbers, and keep what is lost by that, to add it next time:

    worker_error    of the rank that saved it, one value for each element and for padding behind them
    server_error    of its share of the sum over all ranks
    tensor_size, corrected_tensor_size, server_chunk_size    their sizes, from the parameter's and the number of ranks

DeepSpeed drops the errors whenever it loads, and makes them and the sizes anew before it uses them, so that nothing of
it is state of a checkpoint. What else they keep is of parameters: moments, intervals and factors.

Source: DeepSpeed 0.14.5 to 0.18.9, `runtime/fp16/onebit/`.
"""

from __future__ import annotations

from dataclasses import replace

from zckpt.formats.torch_files.optimizer import OptimizerState
from zckpt.state import dict_of, without
from zckpt.state.inventory import IMPLIED, Rule

_SIZES = frozenset({"tensor_size", "corrected_tensor_size", "server_chunk_size"})
_KEYS = _SIZES | {"worker_error", "server_error"}

_ABOUT = "errors of compression, which DeepSpeed drops when it loads"

ONE_BIT_RULES = tuple(
    Rule((*where, "state", "*", key), IMPLIED, _ABOUT, tensors=True)
    for where in (("optimizer",), ("optimizer", "optimizer_state_dict"))
    for key in sorted(_KEYS)
)
"""Of a model file that holds such an optimizer."""


def compresses(content: object) -> bool:
    """Tell whether what a model file has under `optimizer` is one of these: no other keeps such sizes."""
    held = dict_of(content).get("optimizer_state_dict", content)
    return any(dict_of(one).keys() >= _SIZES for one in dict_of(dict_of(held).get("state")).values())


def without_errors(optimizer: OptimizerState) -> OptimizerState:
    """Return an optimizer without the errors of compression and their sizes, if it has any."""
    if not any(state.keys() >= _SIZES for state in optimizer.state.values()):
        return optimizer
    kept = {number: without(state, *_KEYS) for number, state in optimizer.state.items()}
    return replace(optimizer, state=kept)
