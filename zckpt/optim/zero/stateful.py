"""State of an optimizer over flat buffers: whole tensors by name, state dicts, and weights made of masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zckpt.optim import param_groups
from zckpt.optim.ranks import all_gather_flat
from zckpt.optim.zero import deepspeed_state
from zckpt.optim.zero.ddp import DdpOptimizer
from zckpt.optim.zero.flat import FlatGroup
from zckpt.optim.zero.stepping import scaler_like

MASTER = "master"
GRADIENT = "gradient"


class StatefulOptimizer(DdpOptimizer):
    """Gives and loads state.

    Weights lead: what somebody has written into them since the last step is copied into the masters before these are
    stepped, saved or compared.
    """

    allgather_bucket_size: int
    elastic_checkpoint: bool
    clip_grad: float
    overflow: bool

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
            A copy, of the parameter's shape, on its device; or what the optimizer keeps once for a param group.

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
        for rank in range(group.world_size):
            for share in group.shares_of(rank):
                if share.index != position:
                    continue
                into = whole[share.start : share.start + share.numel]
                if rank == group.rank:
                    into.copy_(held[share.position : share.position + share.numel])
                if group.world_size > 1:
                    source = dist.get_global_rank(group.process_group, rank)
                    handles.append(dist.broadcast(into, src=source, group=group.process_group, async_op=True))
        wait_for(handles)
        return whole.view(group.shapes[position])

    @torch.no_grad()
    def set_full_state(self, name: str, slot: str, value: torch.Tensor) -> None:
        """Set one slot of one parameter; with its master its weight, too. All ranks give the same value.

        Raises
        ------
        ValueError
            No such parameter or slot, another shape, or a slot that is one value for a whole param group.
        """
        group, position = self.find(name)
        held = self._slot(group, name, slot)
        if not _is_flat(held, group):
            raise ValueError(
                f"{slot} of {name} is one value for all of its param group, and cannot be set for a parameter"
            )
        if value.shape != group.shapes[position]:
            raise ValueError(f"{name} has the shape {tuple(group.shapes[position])}, not {tuple(value.shape)}")
        flat = value.detach().reshape(-1)
        for share in group.own:
            if share.index == position:
                elements = flat[share.start : share.start + share.numel]
                held[share.position : share.position + share.numel].copy_(elements)
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
            raise ValueError(f"{name} has no {slot}: there are {', '.join(held)}")
        return held[slot]

    def adopt_weights(self) -> None:
        """Copy weights that were set since the last step into the masters, as the next step does; others stay."""
        for group in self.groups:
            group.take_weights()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Make all masters of the weights, those that round to their weights too."""
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
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        made: dict[str, Any] = deepspeed_state.DeepSpeedState(
            self.make_state_dict({parameter: name for name, parameter in self.names().items()})
        )
        for after in self._optimizer_state_dict_post_hooks.values():
            made = after(self, made) or made
        return made

    def make_state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """Return `state_dict()` with other names of the parameters."""
        param_groups.sync(self.param_groups, self.optim.param_groups)  # a scheduler's rates, set since the last step
        self.adopt_weights()
        return deepspeed_state.make_state_dict(self, names)

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Load state that DeepSpeed or this class has made, and make the weights of the masters.

        Parameters
        ----------
        state_dict : mapping or sequence of mapping
            What `state_dict` returned: this rank's, or that of every rank in order; also as DeepSpeed's files hold it.
            Elastic states may be of any number of ranks, and must then be those of all.
        load_optimizer_states : bool
            Otherwise masters only.
        load_from_fp32_weights : bool
            Load masters; otherwise make them of the model's weights, which are rounded.

        Raises
        ------
        TypeError, ValueError
            It is no such state; of other param groups, sizes or alignment; or rigid, of another number of ranks.
            Nothing has changed.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)  # type: ignore[arg-type]  # or a list of them
            state_dict = state_dict if changed is None else changed
        states = deepspeed_state.States(state_dict, self)
        states.check()
        own = states.own
        scaler = scaler_like(self.loss_scaler, own.get("loss_scaler"))
        if load_optimizer_states:
            self.load_local(*states.local())
        self.loss_scaler = scaler
        self.clip_grad = own.get("clip_grad", self.clip_grad)
        self.overflow = bool(own.get("overflow", False))
        if load_from_fp32_weights:
            states.load_masters()
            self.publish_masters()
        else:
            self.refresh_masters()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def load_local(self, state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the local optimizer's state, by param group, and everyone's hyperparameters."""
        self.optim.load_state_dict({"state": dict(state), "param_groups": list(groups)})
        self.state = self.optim.state
        param_groups.sync(self.optim.param_groups, self.param_groups)

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Make the weights of the masters, on all ranks, after masters were set."""
        for group in self.groups:
            group.point()
        handles: list[dist.Work] = []
        for group in self.groups:
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
        rounded = torch.empty(master.shape, dtype=group.flat.dtype, pin_memory=True)
        group.weights.copy_(rounded.copy_(master), non_blocking=True)
    return _gather(group, max(bucket_size // group.world_size, 1))


def _gather(group: FlatGroup, piece: int) -> list[dist.Work]:
    """Begin to complete a group's flat buffer from the ranks' partitions, so many elements of each at once.

    Gloo's all-gather copies all that it receives twice; a broadcast by each rank takes a fraction of its time.
    """
    if group.world_size == 1 or not group.partition:
        return []
    by_broadcast = group.flat.device.type == "cpu"
    if not by_broadcast and piece >= group.partition:
        return [all_gather_flat(group.flat, group.weights, group=group.process_group, async_op=True)]
    handles = []
    for start in range(0, group.partition, piece):
        views = [group.weights_of(rank)[start : start + piece] for rank in range(group.world_size)]
        if by_broadcast:
            sources = [dist.get_global_rank(group.process_group, rank) for rank in range(group.world_size)]
            handles += [
                dist.broadcast(view, source, group.process_group, async_op=True)
                for view, source in zip(views, sources, strict=True)
            ]
        else:
            handles.append(dist.all_gather(views, views[group.rank], group=group.process_group, async_op=True))
    return handles


def wait_for(handles: list[dist.Work]) -> None:
    """Wait for what was begun."""
    for handle in handles:
        handle.wait()
