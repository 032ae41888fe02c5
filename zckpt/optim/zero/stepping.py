"""The step of one group's master, in pieces where gradients must be converted for it: never are all converted at once.

The local optimizer sees one parameter, whose memory, gradient and state are those of one piece after the other. What
it counts (steps, in its state or in its param group) counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import copied
from zckpt.optim.zero.flat_group import FlatGroup

PIECE = 1 << 20  # elements; a power of two, so that pieces begin where vector instructions do; fits caches
PIECE_OF_GPU = 1 << 25  # takes longer than its kernels' launches


def step(optimizer: Optimizer, group: FlatGroup, divisor: float) -> None:
    """Step a group's master with its gradients, without the loss scale and clipped.

    Parameters
    ----------
    optimizer : Optimizer
        The local one, whose only param group at present is that of the master.
    group : FlatGroup
    divisor : float
        Of the gradients.

    Raises
    ------
    RuntimeError
        No gradients.
    """
    if group.gradient is None:
        raise RuntimeError("no gradients to step with")
    master = group.master
    piece = PIECE_OF_GPU if master.is_cuda else PIECE
    try:
        if group.gradient.dtype == master.dtype or group.partition <= piece:
            master.grad = _unscaled(group.gradient, master.dtype, divisor)
            optimizer.step()
        else:
            _step_pieces(optimizer, master, group.gradient, piece, divisor)
    finally:
        master.grad = None


def _unscaled(gradient: torch.Tensor, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    converted = gradient.to(dtype)
    return converted if divisor == 1.0 else converted.mul_(1.0 / divisor)


def _step_pieces(
    optimizer: Optimizer, master: torch.nn.Parameter, gradient: torch.Tensor, piece: int, divisor: float
) -> None:
    whole = master.data
    local = optimizer.param_groups[0]
    keys, counted = set(local), param_groups.plain(local)
    known: dict[str, Any] = dict(optimizer.state.get(master, {}))
    flat = {
        key: value for key, value in known.items() if isinstance(value, torch.Tensor) and value.shape == whole.shape
    }
    before = {key: copied(value) for key, value in known.items() if key not in flat}
    try:
        for start in range(0, whole.numel(), piece):
            where = slice(start, start + piece)
            for key in set(local) - keys:  # what the first step of all adds
                del local[key]
            local.update(counted)
            optimizer.state.pop(master, None)
            if known:
                its = {key: flat[key][where] if key in flat else copied(before[key]) for key in known}
                optimizer.state[master] = its
            master.data = whole[where]
            master.grad = _unscaled(gradient[where], master.dtype, divisor)
            optimizer.step()
            master.grad = None
            _keep(optimizer.state.get(master, {}), flat, whole.shape, where)
    except BaseException:  # never is there state of a piece beside the whole master
        optimizer.state.pop(master, None)
        if known:
            optimizer.state[master] = {key: flat.get(key, before.get(key)) for key in known}
        raise
    else:
        if optimizer.state.get(master):
            optimizer.state[master].update(flat)
    finally:
        master.data = whole


def _keep(state: Mapping[str, Any], flat: dict[str, torch.Tensor], shape: torch.Size, where: slice) -> None:
    """Put the state of a piece where it belongs in the whole; what the first piece has first, is new."""
    numel = len(range(*where.indices(shape.numel())))
    for key, value in state.items():
        if where.start == 0 and key not in flat and isinstance(value, torch.Tensor) and value.shape == (numel,):
            flat[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
        if key in flat and value.data_ptr() != flat[key][where].data_ptr():
            flat[key][where].copy_(value)
