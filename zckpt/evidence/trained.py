"""Which tensors of a state dict an optimizer could own, where nothing says which of them are buffers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.state.dtypes import is_complex, is_floating


def is_trainable(dtype: str) -> bool:
    """Tell whether elements of a type can be trained; integers and bools are buffers."""
    return is_floating(dtype) or is_complex(dtype)


def may_be_trained(name: str, dtypes: Mapping[str, str]) -> bool:
    """Tell whether a tensor may be a parameter: not a batch norm's running statistic, beside which is an integer count.

    Parameters
    ----------
    name : str
    dtypes : mapping of str to str
        Of all tensors of the state dict.
    """
    module, dot, last = name.rpartition(".")
    count = dtypes.get(f"{module}{dot}num_batches_tracked") if last in ("running_mean", "running_var") else None
    return is_trainable(dtypes[name]) and (count is None or is_trainable(count))
