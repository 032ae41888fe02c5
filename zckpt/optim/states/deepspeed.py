"""DeepSpeed's optimizers, which are only held against a checkpoint: masters, slots, the loss scaler.

It alone knows which elements of which parameter lie where in the tensors that they step. DeepSpeed saves and loads.

Source: DeepSpeed 0.14.5 to 0.19.8: the attributes of its optimizers; `zckpt.state.partition` has the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.loss_scaling import LOSS_SCALER, of_stage0
from zckpt.optim.flat_parameters import Called, Member
from zckpt.optim.states.beside import Declared
from zckpt.optim.states.by_parameter import Snapshot, stored_groups
from zckpt.optim.states.flat_parameters import OfMembers
from zckpt.optim.tensors import ModelState
from zckpt.state import MASTER, Extent, ParamGroup
from zckpt.state.partition import flat_shares, flat_starts, shard_numel, shard_share
from zckpt.torchfile import Object, node_of, plain

Held = Iterator[tuple[int, torch.Tensor, Sequence[tuple[Any, torch.Size, int, int, int]]]]
"""Param groups, tensors that are stepped, parameters in them: shape, first element, number, and where they lie."""


class DeepSpeedState(OfMembers):
    """The state of an optimizer of DeepSpeed's engine of any stage."""

    is_only_compared = True

    def __init__(self, optimizer: Any, known: Called) -> None:
        unknown = type(optimizer).__name__.startswith(("ZenFlow", "MiCS")) or getattr(
            optimizer, "swap_optimizer", False
        )
        if unknown or any(group.get("moe") for group in optimizer.param_groups):
            raise UnsupportedError(
                "optimizers with experts, ZenFlow, MiCS or NVMe are not supported here",
                found=type(optimizer).__name__,
                advice="give only the model",
            )
        self.optimizer, self.held = optimizer, {}
        self._names = [[] for _ in optimizer.param_groups]
        for group, tensor, parameters in _held(optimizer):
            members: list[tuple[str, Member]] = []
            for p, shape, start, numel, position in parameters:
                if p not in known:
                    raise UsageError("a parameter of the optimizer has no name", advice="also give the model")
                extent = Extent.flat(tuple(shape), start, numel) if numel else None
                members.append((known[p], Member(shape, extent, tensor, position, None, True)))
            self.held[tensor] = members
            self._names[group] += [name for name, _ in members]

    @property
    def local(self) -> Optimizer:
        """The optimizer that the engine was given, or made."""
        base: Optimizer = self.optimizer.optimizer
        return base

    @property
    def _declared(self) -> Declared:
        return Declared(self.optimizer, self.local, dict(self.local.state))

    def groups(self) -> list[ParamGroup]:
        """Return the param groups."""
        return stored_groups(self.local, self._names)

    def holding(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has its master."""
        for tensor, members in self.held.items():
            yield from ((name, tensor) for name, _ in members)

    members = holding

    def values_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the master and the state of a tensor."""
        return {MASTER: parameter, **self.local.state.get(parameter, {})}

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters whose weights are made of masters."""
        return {name for name, _ in self.holding()}

    def kept_apart(self, found: Snapshot) -> Iterator[tuple[str, object, object]]:
        """Yield the loss scaler, where both change theirs: one that does not is the training's configuration."""
        del found
        node, own = node_of(self.source.metadata.get(LOSS_SCALER)), getattr(self.optimizer, LOSS_SCALER, None)
        theirs = plain(node.state) if isinstance(node, Object) else of_stage0(self.source.metadata)
        ours = self.optimizer.state_dict() if own is None else vars(own)  # stage 0 keeps no object
        if isinstance(theirs, Mapping) and theirs.get("dynamic") and "last_overflow_iter" in ours:
            ours = {**ours, "dynamic": True}
            known = {
                key: value
                for key, value in theirs.items()
                if isinstance(value, (int, float)) and (own is not None or key in ours)
            }
            yield "loss scaler", known, ours


def _held(optimizer: Any) -> Held:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        of = optimizer.dp_process_group
        ranks, rank = dist.get_world_size(of), dist.get_rank(of)
        stored = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        for number, (tensor, its) in enumerate(stored):
            positions = itertools.accumulate((shard_numel(p.ds_numel, ranks) for p in its), initial=0)
            yield (
                optimizer.sub_group_to_group_id[number],
                tensor,
                [
                    (p, p.ds_shape, *shard_share(p.ds_numel, ranks, rank), at)
                    for p, at in zip(its, positions, strict=False)
                ],
            )
        return
    pads = getattr(optimizer, "round_robin_bit16_padding", None)
    for group, tensor, its, of in _flat_groups(optimizer):
        starts = flat_starts([p.numel() for p in its], pads[group] if pads else ())
        shares = flat_shares([p.numel() for p in its], starts, tensor.numel(), 0 if of is None else dist.get_rank(of))
        found = {one.index: (one.start, one.numel, one.position) for one in shares}
        yield group, tensor, [(p, p.shape, *found.get(at, (0, 0, 0))) for at, p in enumerate(its)]


def _flat_groups(optimizer: Any) -> Iterator[tuple[int, torch.Tensor, Sequence[torch.Tensor], Any]]:
    """Yield param groups, what is stepped, its parameters end to end, and the ranks that have parts; None: whole."""
    for flats, groups, ranks in (
        ("single_partition_of_fp32_groups", "round_robin_bit16_groups", "real_dp_process_group"),  # ZeRO-1 and 2
        ("fp32_groups_flat_partition", "bf16_groups", "real_dp_process_group"),
        ("fp32_groups_flat", "fp16_groups", None),  # without ZeRO
    ):
        if hasattr(optimizer, flats):
            of = getattr(optimizer, ranks) if ranks else itertools.repeat(None)
            yield from zip(itertools.count(), getattr(optimizer, flats), getattr(optimizer, groups), of)
            return
    for at, group in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)):
        yield from ((at, one, [p], None) for one, p in zip(*group, strict=True))


def unpartition(model: ModelState) -> None:
    """Put what this rank has in the place of parameters that ZeRO-3 has taken away."""
    for name, one in model.tensors.items():
        its: Any = one
        if hasattr(its, "ds_tensor") and its.ds_tensor is not None and its.shape != its.ds_shape:
            group = its.ds_process_group
            start, numel = shard_share(its.ds_numel, dist.get_world_size(group), dist.get_rank(group))
            shape = torch.Size(its.ds_shape)
            extent = Extent.flat(tuple(shape), start, numel) if numel else None
            mine = its.ds_tensor.detach().reshape(-1)[:numel]
            model.tensors[name] = Member(shape, extent, mine, 0, None, its.requires_grad)
