"""The step of flat groups: the norm of all gradients, what clips them to it, one group's master, and the loss scale.

Each element is counted once, whatever ranks hold it. Where gradients must be converted for the step, never are all
converted at once: the local optimizer sees one parameter, whose memory, gradient and state are those of one piece after
the other. What it counts (steps, in its state or in its param group) counts once.

The loss is multiplied with a loss scale, so that the gradients of 16-bit floats do not vanish. Source: the rule of
DeepSpeed's loss scalers (0.4 to 0.19), whose names the attributes have: they go into checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import copied
from zckpt.optim.ranks import wait_for
from zckpt.optim.zero.flat import PIECE, PIECE_OF_GPU, FlatGroup, FlatOptimizer

NORM_PIECE = 1 << 20  # elements, 8 MiB of float64


ModelParallel = Any
"""The ranks that hold the other slices of the model, as Megatron's `mpu` names them; None: the model is whole."""


def model_rank(model_parallel: ModelParallel) -> tuple[int, int]:
    """Return which slice of the model this rank has, and of how many."""
    if model_parallel is None:
        return 0, 1
    return model_parallel.get_model_parallel_rank(), model_parallel.get_model_parallel_world_size()


def is_counted(parameter: torch.Tensor, model_parallel: ModelParallel) -> bool:
    """Tell whether this rank counts a parameter: its own slice of one, or, on the first rank, one that all have.

    Source: the attributes `model_parallel` and `tensor_model_parallel` (Megatron), `ds_pipe_replicated` (DeepSpeed).
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False):
        return True
    return model_rank(model_parallel)[0] == 0


def global_norm(optimizer: FlatOptimizer, *, failed: bool) -> torch.Tensor:
    """Return the norm of all gradients, as they are (scaled by the loss scale). All ranks call it together.

    `failed`: this rank has no gradients to speak of: the norm is infinite.

    Returns
    -------
    Tensor, ()
        float32; not finite if any gradient is not.

    Notes
    -----
    Source: ZeRO-1/2 of DeepSpeed 0.19: per parameter in float64, per group in float32, experts averaged over the ranks
    that share them.
    """
    groups, norm_type, model_parallel = optimizer.groups, optimizer.norm_type, optimizer.model_parallel
    op, partial = combined(norm_type), list[torch.Tensor]()  # what this rank has of each group
    for group in groups:
        gradient, own = group.gradient, group.own
        counted = [] if gradient is None else [
            gradient[one.of_partition] for one in own if is_counted(group.parameters[one.index], model_parallel)
        ]  # fmt: skip
        found = powers(counted, norm_type).float().nan_to_num_(nan=math.inf, posinf=math.inf)  # a maximum may lose NaN
        partial.append(found.to(group.flat.device))
    if failed:
        partial = [torch.full_like(one, math.inf) for one in partial]
    wait_for([dist.all_reduce(one, op=op, group=optimizer.process_group, async_op=True) for one in partial])
    if model_rank(model_parallel)[1] > 1:
        for one in partial:
            dist.all_reduce(one, op=op, group=model_parallel.get_model_parallel_group())
    norms = partial if math.isinf(norm_type) else [one.pow(1.0 / norm_type) for one in partial]
    for index, group in enumerate(groups):
        if group.is_expert:
            shared = norms[index] * 1.0 / group.world_size
            dist.all_reduce(shared, group=group.process_group)
            norms[index] = shared
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), ord=norm_type)
    return total


def combined(norm_type: float) -> Any:
    """Return how ranks' `powers` become those of all."""
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def powers(every: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of the powers of all elements, or their largest magnitude, in float64; 0 if there are none."""
    if not every:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    each = torch.stack([_norm(one, norm_type) for one in every])
    return each.max() if math.isinf(norm_type) else each.pow(norm_type).sum()


def _norm(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm in float64; in pieces, because torch converts all that it gets at once."""
    pieces = torch.split(values, NORM_PIECE)
    norms = [torch.linalg.vector_norm(one, ord=norm_type, dtype=torch.float64) for one in pieces]
    found: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return found


def divisor(norm: torch.Tensor, loss_scale: float, clip_grad: float) -> float:
    """Return what gradients of a norm are divided by: the loss scale, and what makes their norm at most `clip_grad`."""
    if clip_grad <= 0.0:
        return loss_scale
    clip = ((norm / loss_scale) + 1e-6) / clip_grad
    return float(torch.clamp(clip, min=1.0) * loss_scale)


# --- the step of a master


def step(optimizer: Optimizer, group: FlatGroup, divisor: float) -> None:
    """Step a group's master with its gradients, divided by `divisor`; it is the optimizer's only one at present."""
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
            for key, value in optimizer.state.get(master, {}).items():  # what the first piece has first, is new
                is_new = start == 0 and key not in flat
                if is_new and isinstance(value, torch.Tensor) and value.shape == master.shape:
                    flat[key] = torch.zeros(whole.shape, dtype=value.dtype, device=value.device)
                if key in flat and value.data_ptr() != flat[key][where].data_ptr():
                    flat[key][where].copy_(value)
    except BaseException:  # never leave state of a piece for the whole master
        optimizer.state.pop(master, None)
        if known:
            optimizer.state[master] = {key: flat.get(key, before.get(key)) for key in known}
        raise
    else:
        if optimizer.state.get(master):
            optimizer.state[master].update(flat)
    finally:
        master.data = whole


# --- the loss scale


@dataclass
class LossScaler:
    """A constant loss scale."""

    cur_scale: float = 1.0
    dynamic: ClassVar[bool] = False

    def update(self, overflow: bool) -> None:
        """Record a step."""


@dataclass
class DynamicLossScaler:
    """A loss scale that falls when gradients overflow and rises when they have not for a while.

    Parameters
    ----------
    cur_scale : float
        The first scale.
    scale_factor : float
        Factor that it is multiplied or divided by.
    scale_window : int
        Steps without overflow after which it rises.
    min_scale : float
        Lower limit.
    delayed_shift : int
        Hysteresis: number of overflows after which the scale falls; earlier ones only use up patience.
    consecutive_hysteresis : bool
        Whether each step without overflow restores patience, not just a rise.
    raise_error_at_min_scale : bool
        Whether an overflow at the minimum scale is an error, not just a skipped step.
    """

    cur_scale: float = 2.0**16
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = field(default=0)
    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale_factor <= 1.0 or self.scale_window < 1 or self.delayed_shift < 1 or self.min_scale <= 0:
            raise ValueError(
                "a dynamic loss scale needs a factor above 1, a window and hysteresis of at least 1 "
                "and a minimum above 0"
            )
        self.cur_hysteresis = self.cur_hysteresis or self.delayed_shift

    def update(self, overflow: bool) -> None:
        """Record a step.

        Raises
        ------
        FloatingPointError
            An overflow at the minimum scale, if that is an error.
        """
        if overflow:
            if self.delayed_shift > 1 and self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                raise FloatingPointError(
                    f"gradients overflow at the minimum loss scale of {self.min_scale}: the training has diverged"
                )
            else:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            steps_since = self.cur_iter - self.last_overflow_iter - 1
            rises = steps_since > 0 and steps_since % self.scale_window == 0
            if self.consecutive_hysteresis or rises:
                self.cur_hysteresis = self.delayed_shift
            if rises:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


Scaler = LossScaler | DynamicLossScaler


def read_scaler(given: float | Scaler) -> Scaler:
    """Return a loss scaler; a number is a scale that stays. Raises ValueError unless it is above 0."""
    scaler = given if isinstance(given, (LossScaler, DynamicLossScaler)) else LossScaler(float(given))
    if not scaler.cur_scale > 0:
        raise ValueError(f"a loss scale must be above 0, not {scaler.cur_scale}")
    return scaler


def scaler_like(scaler: Scaler, found: object) -> Scaler:
    """Return the scaler that a checkpoint's object of any class describes by its attributes, or else the one given.

    Raises ValueError: it describes none that works: a scale that is not above 0, or an attribute of another type.
    """
    values = found if isinstance(found, dict) else getattr(found, "__dict__", None)
    if not isinstance(values, dict) or not _is_number(values.get("cur_scale")):
        return scaler
    if not values.get("dynamic", isinstance(found, DynamicLossScaler)):
        return read_scaler(float(values["cur_scale"]))
    known = {one.name: values[one.name] for one in fields(DynamicLossScaler) if one.name in values}
    wrong = next((key for key, value in known.items() if not isinstance(value, bool) and not _is_number(value)), None)
    if wrong is not None:
        raise ValueError(f"{wrong} of a loss scaler is not a number: {known[wrong]!r}"[:120])
    return read_scaler(DynamicLossScaler(**known))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
