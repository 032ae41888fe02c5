"""The optimizer: its options, the step, and state: whole tensors by name, state dicts, and weights made of masters.

Weights lead: what somebody has written into them since the last step is copied into the masters before these are
stepped, saved or compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.flat_parameters import Called
from zckpt.optim.ranks import all_gather_flat, broadcast, wait_for
from zckpt.optim.zero import stepping
from zckpt.optim.zero.backward import BackwardOptimizer, WindowFailedError
from zckpt.optim.zero.deepspeed_state import MASTERS, STATE, STEP, VERSION, DeepSpeedState, ShareAddress, States
from zckpt.optim.zero.flat import FlatGroup
from zckpt.optim.zero.stepping import ModelParallel, Scaler, read_scaler, scaler_like
from zckpt.state import first_of

MASTER = "master"
GRADIENT = "gradient"

REDUCE_BUCKET_SIZE = 1 << 23
ALLGATHER_BUCKET_SIZE = 1 << 27


class ZeroOptimizer(BackwardOptimizer):
    """ZeRO-1 and ZeRO-2: each rank keeps masters and state for an equal slice of all parameters, and steps it.

    Parameters
    ----------
    params : iterable
        Tensors, (name, tensor) pairs, or dicts of param groups, as in `torch.optim`; in the same order on all ranks.
        The parameters become views of one flat buffer per group; those that require no gradient are left out.
    optimizer_class : type
        A `torch.optim.Optimizer` that steps each element by itself; it gets one flat master per group.
    stage : {1, 2}
        1 keeps whole gradients until the last backward before a step; 2 reduces and frees them as they arrive.
    process_group : ProcessGroup, optional
        The data-parallel ranks. Default: the whole world.
    expert_data_parallel_groups : mapping, optional
        The process group of each param group with `moe` true, by the group's `name`: the ranks that hold the same
        experts.
    model_parallel : object, optional
        An object with Megatron's `get_model_parallel_group`, `..._world_size` and `..._rank`: norms and overflows then
        cover the whole model. Parameters that are slices have a true attribute `model_parallel`; the others are counted
        once.
    round_robin_gradients : bool
        Assign parameters to ranks in turn, so that each bucket has elements of every rank.
    parameter_alignment : bool
        Start each parameter at a multiple of 16 bytes.
    fp16_master_weights_and_gradients : bool
        Keep masters in the model's 16-bit type, not in float32.
    reduce_bucket_size, allgather_bucket_size : int, elements
        Number of gradients reduced, and weights gathered, at once.
    reduce_scatter : bool
        Reduce each gradient only to its owner: less is sent; the order of sums differs from all-reduce.
    overlap_comm : bool
        Reduce during backward, with two buffers; otherwise wait for each reduction.
    communication_data_type : torch.dtype, optional
        Type in which gradients are sent. Default: the model's.
    gradient_predivide_factor : float, optional
        Divide gradients by this before the sum, and by the rest of the world size after it. Default: the world size.
    ignore_unused_parameters : bool
        Treat missing gradients as zero; otherwise, raise RuntimeError on all ranks.
    gradient_accumulation_steps : int
        Number of `backward` calls per step. `step` and `zero_grad` do nothing in between.
    gradient_accumulation_dtype : torch.dtype, optional
        Type in which gradients are accumulated. Default: the model's.
    loss_scale : float, LossScaler or DynamicLossScaler
    clip_grad : float
        Limit for the norm of all gradients; 0: none.
    norm_type : float
        2.0, or infinity for the largest magnitude.
    offload : bool
        Keep masters, state and accumulated gradients in host memory, and step there.
    elastic_checkpoint : bool
        Make `state_dict` elastic: without padding, for any number of ranks.
    broadcast_weights : bool
        Give all ranks the first rank's weights, as DeepSpeed's engine does. False: they are already equal.
    allow_per_tensor : bool
        Accept an `optimizer_class` that is known to look at whole tensors (LAMB, Adafactor, Muon). It sees a rank's
        slice of a param group as one tensor, and trains differently than unsharded.
    **defaults
        Passed to `optimizer_class`.

    Raises
    ------
    TypeError, ValueError
        As `torch.optim.Optimizer`; ValueError for options out of range, for a param group with several element types,
        and for an `optimizer_class` that is known to look at whole tensors.

    Notes
    -----
    The partition is that of DeepSpeed's ZeRO-1/2 (see `zckpt.state.partition`), and so are the numbers, if sums are
    taken in the same order. `param_groups` hold the model's parameters; `optim` is the local optimizer, for masters.
    All ranks must call the constructor, backward, `step`, `add_param_group`, `full_state` and `load_state_dict` in the
    same order. `Tensor.backward` works as well as `backward`, unless it runs others inside (reentrant checkpointing).
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        stage: int = 2,
        process_group: dist.ProcessGroup | None = None,
        expert_data_parallel_groups: Mapping[str, dist.ProcessGroup] | None = None,
        model_parallel: ModelParallel = None,
        round_robin_gradients: bool = False,
        parameter_alignment: bool = False,
        fp16_master_weights_and_gradients: bool = False,
        reduce_bucket_size: int = REDUCE_BUCKET_SIZE,
        allgather_bucket_size: int = ALLGATHER_BUCKET_SIZE,
        reduce_scatter: bool = True,
        overlap_comm: bool = True,
        communication_data_type: torch.dtype | None = None,
        gradient_predivide_factor: float | None = None,
        ignore_unused_parameters: bool = True,
        gradient_accumulation_steps: int = 1,
        gradient_accumulation_dtype: torch.dtype | None = None,
        loss_scale: float | Scaler = 1.0,
        clip_grad: float = 0.0,
        norm_type: float = 2.0,
        offload: bool = False,
        elastic_checkpoint: bool = False,
        broadcast_weights: bool = True,
        allow_per_tensor: bool = False,
        **defaults: Any,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage must be 1 or 2, not {stage!r}")
        if norm_type not in (2.0, math.inf):
            raise ValueError(f"norm_type must be 2.0 or infinity, not {norm_type!r}")
        if gradient_predivide_factor is not None and not gradient_predivide_factor > 0:
            raise ValueError(f"gradient_predivide_factor must be above 0, not {gradient_predivide_factor!r}")
        for what, least, number in (
            ("reduce_bucket_size", 1, reduce_bucket_size),
            ("allgather_bucket_size", 1, allgather_bucket_size),
            ("gradient_accumulation_steps", 1, gradient_accumulation_steps),
            ("clip_grad", 0, clip_grad),
        ):
            if not number >= least:
                raise ValueError(f"{what} must be at least {least}, not {number!r}")
        self.stage = stage
        self.expert_data_parallel_groups = dict(expert_data_parallel_groups or {})
        self.model_parallel = model_parallel
        self.round_robin_gradients = round_robin_gradients
        self.parameter_alignment = parameter_alignment
        self.fp16_master_weights_and_gradients = fp16_master_weights_and_gradients
        self.reduce_bucket_size = int(reduce_bucket_size)
        self.allgather_bucket_size = allgather_bucket_size
        self.reduce_scatter = reduce_scatter
        self.overlap_comm = overlap_comm
        self.communication_data_type = communication_data_type
        self.gradient_predivide_factor = gradient_predivide_factor
        self.ignore_unused_parameters = ignore_unused_parameters
        self.gradient_accumulation_steps = int(gradient_accumulation_steps)
        self.gradient_accumulation_dtype = gradient_accumulation_dtype
        self.loss_scaler = read_scaler(loss_scale)
        self.clip_grad = clip_grad
        self.norm_type = float(norm_type)
        self.offload = offload
        self.elastic_checkpoint = elastic_checkpoint
        self.broadcast_weights = broadcast_weights
        self.allow_per_tensor = allow_per_tensor
        self.overflow = False
        self.last_grad_norm: float | None = None
        super().__init__(params, optimizer_class, process_group, defaults)

    # --- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's masters, then give their weights to all ranks and receive theirs.

        It does nothing before the last `backward` of a window. If gradients overflow on any rank, nothing is stepped
        (`overflow` is true), and the loss scale falls. Gradients put into `grad` by hand are used. Weights that were
        set since the last step are stepped with their new values.

        Parameters
        ----------
        closure : callable, optional
            Runs backward and returns the loss.

        Returns
        -------
        object
            What the closure returns.

        Raises
        ------
        RuntimeError
            Backward, or the closure, failed on some rank; no rank has stepped, and the next window can begin.
        Exception
            What the closure raises.
        FloatingPointError
            An overflow at the minimum loss scale.
        """
        loss = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except Exception:
                if not self.is_attached:  # otherwise DDP makes the other ranks wait
                    self._failed = True
                    self._settle()
                raise
        if self._failed or (self._pass is not None and self._pass >= 0):
            self._settle()
            self._end_failed_window()
            raise WindowFailedError("backward failed on this rank: no rank has stepped")
        self._is_fresh = False
        if not self._is_due():
            return loss
        self._complete_window()
        self._step_or_fail()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # as torch
        """Discard the gradients of this window, unless more of its backwards follow."""
        self._settle()
        if not self._passes or self._is_complete:
            self._end_window()
        for parameter in param_groups.parameters_of(self.param_groups):
            if parameter not in self._place:
                parameter.grad = None

    def _step_or_fail(self) -> None:
        norm = stepping.global_norm(self, failed=self._failed)
        scale = self.loss_scale
        size = float(norm)
        self.overflow = not math.isfinite(size)
        self.last_grad_norm = size / scale
        try:
            if self.overflow and self.is_any(self._failed):
                raise WindowFailedError("backward failed on another rank: no rank has stepped")
            self.loss_scaler.update(self.overflow)
            if not self.overflow:
                self._step_groups(stepping.divisor(norm, scale, self.clip_grad))
        finally:
            self._end_window()

    def is_any(self, mine: bool) -> bool:
        """Return whether it is true on any rank, also on those with other slices of the model. All call it together."""
        flag = torch.tensor([mine], dtype=torch.int32, device=self.groups[0].flat.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.process_group)
        if self.is_model_parallel:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.model_parallel.get_model_parallel_group())
        return bool(flag.item())

    def _step_groups(self, divisor: float) -> None:
        self._to_local()
        every = self.optim.param_groups
        handles: list[dist.Work] = []
        try:
            for local, group in zip(every, self.groups, strict=True):
                self.optim.param_groups = [local]
                group.take_weights()
                stepping.step(self.optim, group, divisor)
                handles += publish(group, self.allgather_bucket_size)
        finally:
            self.optim.param_groups = every
        wait_for(handles)
        self._from_local()

    # --- state

    def full_state(self, name: str, slot: str) -> Any:
        """Return one slot of one parameter, whole. All ranks that share its param group call it together.

        Parameters
        ----------
        name : str
        slot : str
            "master"; "gradient" (averaged, scaled by the loss scale, between backward and step); or a key of the
            optimizer's state.

        Returns
        -------
        Tensor or object
            A copy with the parameter's shape, on its device; or what the optimizer keeps once per param group.

        Raises
        ------
        ValueError
            No such parameter or slot.
        """
        group, position = self.find(name)
        if slot == MASTER:
            group.take_weights(position)
        held = self._slot(group, name, slot)
        if not _is_flat(held, group):
            return held.clone() if isinstance(held, torch.Tensor) else held
        whole = torch.empty(group.numels[position], dtype=held.dtype, device=group.flat.device)
        handles = []
        for rank, share in group.extents[position]:
            into = whole[share.of_parameter]
            if rank == group.rank:
                into.copy_(held[share.of_partition])
            if group.world_size > 1:
                handles.append(broadcast(into, rank, group.process_group))
        wait_for(handles)
        return whole.view(group.shapes[position])

    @torch.no_grad()
    def set_full_state(self, name: str, slot: str, value: torch.Tensor) -> None:
        """Set one slot of one parameter; setting a master also sets its weight. All ranks give the same value.

        Raises
        ------
        ValueError
            No such parameter or slot, another shape, or a slot that is one value for a whole param group.
        """
        group, position = self.find(name)
        held = self._slot(group, name, slot)
        if not _is_flat(held, group):
            raise ValueError(
                f"{slot} of {name} is one value for its whole param group, and cannot be set for one parameter"
            )
        if value.shape != group.shapes[position]:
            raise ValueError(f"{name} has the shape {tuple(group.shapes[position])}, not {tuple(value.shape)}")
        flat = value.detach().reshape(-1)
        for share in group.own:
            if share.index == position:
                held[share.of_partition].copy_(flat[share.of_parameter])
        if slot == MASTER:
            start = group.starts[position]
            group.point(position)
            group.flat[start : start + flat.numel()].copy_(flat.to(group.master.dtype))

    def _slot(self, group: FlatGroup, name: str, slot: str) -> Any:
        """Return what this rank holds of a group's masters, gradients or state of the local optimizer."""
        held: dict[str, Any] = {MASTER: group.master.detach(), **self.optim.state.get(group.master, {})}
        if group.gradient is not None:
            held[GRADIENT] = group.gradient
        if slot not in held:
            raise ValueError(f"{name} has no {slot}, only {', '.join(held)}")
        return held[slot]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Set all masters from the weights, including those that round to their weights."""
        for group in self.groups:
            group.point()
            group.master.copy_(group.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state in DeepSpeed's form; see `elastic_checkpoint`. Its tensors are live, not copies.

        Raises
        ------
        ValueError
            The parameters have no names.
        """
        self._through(self._optimizer_state_dict_pre_hooks)
        made = self.make_state_dict({parameter: name for name, parameter in self.names().items()})
        whole: dict[str, Any] = self._through(self._optimizer_state_dict_post_hooks, DeepSpeedState(made))
        return whole

    def make_state_dict(self, names: Called) -> dict[str, Any]:
        """Return `state_dict()` with other parameter names."""
        self._to_local()  # a scheduler's rates, set since the last step
        self.adopt_weights()
        groups, state = self.groups, self.optim.state
        lean = [group.partition - group.padding for group in groups]
        held: dict[str, Any] = {}
        if self.elastic_checkpoint:
            held[STATE] = [
                {
                    key: value[:numel] if _is_flat(value, group) else value
                    for key, value in state.get(group.master, {}).items()
                }
                for group, numel in zip(groups, lean, strict=True)
            ]
            # DeepSpeed expects one step of any optimizer, and puts it into all param groups.
            steps = (
                its.get("step", state.get(group.master, {}).get("step"))
                for its, group in zip(self.optim.param_groups, groups, strict=True)
            )
            held[STEP] = int(first_of(steps) or 0)
        else:
            held[STATE] = self.optim.state_dict()
        return {
            **self.settings(),
            **held,
            MASTERS: [group.master.detach()[:numel] for group, numel in zip(groups, lean, strict=True)],
            "zero_stage": self.stage,
            "group_paddings": [group.padding for group in groups],
            "param_alignment_paddings": [list(group.pads) for group in groups],
            "partition_count": [group.world_size for group in groups],
            "ds_version": VERSION,
            "param_slice_mappings": [
                {names[group.parameters[one.index]]: ShareAddress(one.numel, one.position) for one in group.own}
                for group in groups
            ],
        }

    def settings(self) -> dict[str, Any]:
        """Return what DeepSpeed keeps in addition to the state."""
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": bool(getattr(self.loss_scaler, "dynamic", False)),
            "overflow": self.overflow,
            "clip_grad": self.clip_grad,
        }

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Load state from DeepSpeed or this class, and set the weights from the masters.

        Parameters
        ----------
        state_dict : mapping or sequence of mapping
            What `state_dict` returned: this rank's, or every rank's in order; also as in DeepSpeed's files. Elastic
            states can be from any number of ranks, and must then be complete.
        load_optimizer_states : bool
            False: only masters.
        load_from_fp32_weights : bool
            Load masters; otherwise set them from the model's rounded weights.

        Raises
        ------
        TypeError, ValueError
            It is not such a state; it has other param groups, sizes or alignment; or it is rigid and from another
            number of ranks. Nothing has changed.
        """
        states = States(self._through(self._optimizer_load_state_dict_pre_hooks, state_dict), self)
        states.check()
        own = states.own
        scaler = scaler_like(self.loss_scaler, own.get("loss_scaler"))
        if load_optimizer_states:
            state, groups = states.local()
            self.optim.load_state_dict({"state": state, "param_groups": groups})
            self._from_local()
        self.loss_scaler = scaler
        self.clip_grad = own.get("clip_grad", self.clip_grad)
        self.overflow = bool(own.get("overflow", False))
        if load_from_fp32_weights:
            for index, group in enumerate(self.groups):
                lean = [state[MASTERS][index] for state in states.having(group)]
                states.fill(group.master.data, lean, group)
            self.publish_masters()
        else:
            self.refresh_masters()
        self._through(self._optimizer_load_state_dict_post_hooks)

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Set the weights from the masters, on all ranks, after masters were set."""
        handles: list[dist.Work] = []
        for group in self.groups:
            group.point()
            handles += publish(group, self.allgather_bucket_size)
        wait_for(handles)


def _is_flat(held: object, group: FlatGroup) -> bool:
    return isinstance(held, torch.Tensor) and held.shape == group.master.shape and held.dim() > 0


# --- weights to all ranks


def publish(group: FlatGroup, bucket_size: int) -> list[dist.Work]:
    """Make this rank's weights of its masters, and begin to send them to all ranks. They all call it together.

    So many elements of the buffer go at once, over all ranks. What is returned is to be waited for before the weights
    are used.
    """
    master = group.master.detach()
    if master.device == group.flat.device or not group.flat.is_cuda:
        group.weights.copy_(master)
    else:
        rounded = torch.empty(master.shape, dtype=group.flat.dtype, device="cpu", pin_memory=True)
        group.weights.copy_(rounded.copy_(master), non_blocking=True)
    if group.world_size == 1 or not group.partition:
        return []
    # Gloo's all-gather copies all that it receives twice; a broadcast by each rank takes a fraction of its time.
    by_broadcast, piece = group.flat.device.type == "cpu", max(bucket_size // group.world_size, 1)
    if not by_broadcast and piece >= group.partition:
        return [all_gather_flat(group.flat, group.weights, group=group.process_group, async_op=True)]
    handles = []
    for start in range(0, group.partition, piece):
        views = [group.weights_of(rank)[start : start + piece] for rank in range(group.world_size)]
        if by_broadcast:
            handles += [broadcast(view, rank, group.process_group) for rank, view in enumerate(views)]
        else:
            handles.append(dist.all_gather(views, views[group.rank], group=group.process_group, async_op=True))
    return handles
