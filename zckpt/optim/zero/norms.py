"""The norm of all gradients, each element counted once, whatever ranks hold it; and what clips them to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zckpt.optim.zero.flat_group import FlatGroup

PIECE = 1 << 20  # elements, 8 MiB of float64


class ModelParallel(Protocol):
    """The ranks that hold the other parts of the model, as Megatron's `mpu` names them."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the model together."""
        ...

    def get_model_parallel_world_size(self) -> int:
        """Return how many they are."""
        ...

    def get_model_parallel_rank(self) -> int:
        """Return which of them this is."""
        ...


def is_counted(parameter: torch.Tensor, model_parallel: ModelParallel | None) -> bool:
    """Tell whether this rank counts a parameter: its own part of one, or, on the first rank, one that all have.

    Notes
    -----
    Source: the attributes `model_parallel` and `tensor_model_parallel` (Megatron), `ds_pipe_replicated` (DeepSpeed).
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False):
        return True
    return model_parallel is None or model_parallel.get_model_parallel_rank() == 0


def global_norm(
    groups: Sequence[FlatGroup],
    process_group: dist.ProcessGroup,
    *,
    norm_type: float,
    model_parallel: ModelParallel | None,
    failed: bool = False,
) -> torch.Tensor:
    """Return the norm of all gradients, as they are (scaled by the loss scale). All ranks call it together.

    Parameters
    ----------
    groups : sequence of FlatGroup
        Their `gradient` is the average over ranks.
    process_group : ProcessGroup
        All data-parallel ranks.
    norm_type : float
        2.0 or infinity.
    model_parallel : ModelParallel, optional
    failed : bool
        This rank has no gradients to speak of: the norm is infinite.

    Returns
    -------
    Tensor, ()
        float32; not finite if any gradient is not.

    Notes
    -----
    Source: ZeRO-1/2 of DeepSpeed 0.19: per parameter in float64, per group in float32, experts averaged over the ranks
    that share them.
    """
    infinite = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    partial = [_partial(group, norm_type, model_parallel) for group in groups]
    if failed:
        partial = [torch.full_like(one, math.inf) for one in partial]
    handles = [dist.all_reduce(one, op=op, group=process_group, async_op=True) for one in partial]
    for handle in handles:
        handle.wait()
    if model_parallel is not None and model_parallel.get_model_parallel_world_size() > 1:
        for one in partial:
            dist.all_reduce(one, op=op, group=model_parallel.get_model_parallel_group())
    norms = partial if infinite else [one.pow(1.0 / norm_type) for one in partial]
    for index, group in enumerate(groups):
        if group.is_expert:
            shared = norms[index] * 1.0 / group.world_size
            dist.all_reduce(shared, group=group.process_group)
            norms[index] = shared
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), ord=norm_type)
    return total


def _partial(group: FlatGroup, norm_type: float, model_parallel: ModelParallel | None) -> torch.Tensor:
    """Return this rank's part of a group: the largest magnitude, or the sum of the powers of magnitudes."""
    device = group.flat.device
    gradient = group.gradient
    counted = [f for f in group.own if is_counted(group.parameters[f.index], model_parallel)]
    if gradient is None or not counted:
        return torch.zeros((), dtype=torch.float32, device=device)
    each = [_norm(gradient[f.position : f.position + f.numel], norm_type) for f in counted]
    found = torch.stack(each)
    found = found.max() if math.isinf(norm_type) else found.pow(norm_type).sum()
    made: torch.Tensor = found.float().nan_to_num_(nan=math.inf, posinf=math.inf).to(device)  # a maximum may lose a NaN
    return made


def _norm(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm in float64; in pieces, because torch converts all that it is given at once."""
    pieces = [torch.linalg.vector_norm(one, ord=norm_type, dtype=torch.float64) for one in torch.split(values, PIECE)]
    found: torch.Tensor = pieces[0] if len(pieces) == 1 else torch.linalg.vector_norm(torch.stack(pieces), norm_type)
    return found


def divisor(norm: torch.Tensor, loss_scale: float, clip_grad: float) -> float:
    """Return what gradients are divided by: the loss scale, and what makes their norm at most `clip_grad`.

    Parameters
    ----------
    norm : Tensor, ()
        Of gradients that are scaled.
    loss_scale : float
    clip_grad : float
        0 for no clipping.
    """
    if clip_grad <= 0.0:
        return loss_scale
    clip = ((norm / loss_scale) + 1e-6) / clip_grad
    return float(torch.clamp(clip, min=1.0) * loss_scale)
