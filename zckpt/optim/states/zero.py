"""ZeroOptimizer: this rank has its partition of each param group's masters and slots, and the loss scaler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.engine.tensors import TensorRead
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.deepspeed.axes.experts import is_expert
from zckpt.formats.deepspeed.loss_scaling import of_stage0
from zckpt.optim.flat_parameters import Called, Member
from zckpt.optim.param_groups import Names, by_tensor
from zckpt.optim.ranks import answering
from zckpt.optim.states.by_parameter import Snapshot, Target, stored_groups
from zckpt.optim.states.flat_parameters import OfMembers
from zckpt.optim.tensors import world_rank
from zckpt.optim.values import as_stored
from zckpt.optim.zero import files
from zckpt.optim.zero.deepspeed_state import scaler_object
from zckpt.optim.zero.flat import FlatGroup
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import DynamicLossScaler, Scaler, scaler_like
from zckpt.state import MASTER, Extent, ParamGroup
from zckpt.torchfile import Object, node_of, plain


class ZeroState(OfMembers):
    """The state of an optimizer over flat groups. Its names are also those of frozen parameters, which are in none.

    Experts, which have local numbers in a rank's model, have their global ones in these names.
    """

    writes = "deepspeed"
    optimizer: ZeroOptimizer

    def __init__(self, optimizer: ZeroOptimizer, known: Called) -> None:
        super().__init__(optimizer, known)
        self._own_names = self.called
        if any(group.is_expert for group in optimizer.groups):
            experts = files.experts_of(optimizer, self.called, list(known.values()) or None)
            self.renamed = experts.named
            self._names = [[experts.named(name) for name in names] for names in self._names]
            self.called = by_tensor(optimizer.param_groups, self._names)
        self.held = {group.master: self._members(group) for group in optimizer.groups}

    def _members(self, group: FlatGroup) -> list[tuple[str, Member]]:
        """Return the parameters of a group, with what this rank has of their masters."""
        found, own = [], {one.index: one for one in group.own}
        for index, (parameter, shape) in enumerate(zip(group.parameters, group.shapes, strict=True)):
            extent, offset = None, 0
            if index in own:
                extent, offset = Extent.flat(tuple(shape), own[index].start, own[index].numel), own[index].position
            member = Member(shape, extent, group.master, offset, (world_rank(),), parameter.requires_grad)
            found.append((self.called[parameter], member))
        return found

    @property
    def local(self) -> Optimizer:
        """The optimizer of this rank's partitions, which is given what is loaded."""
        return self.optimizer.optim

    _loads = local

    def _trained(self) -> Names:
        """Return the names of parameters that were trained when a group was made."""
        optimizer = self.optimizer
        return [[self.called[p] for p in group["params"] if p in optimizer._place] for group in optimizer.param_groups]

    # --- saving

    def groups(self) -> list[ParamGroup]:
        """Return the param groups, with what the optimizer keeps once for each."""
        if not self.is_sliced:
            files.refuse_parts(self.optimizer)
        self._declared.refuse("a ZeroOptimizer has no place for it")
        found = stored_groups(self.optimizer, self._trained())
        for group, flat in zip(found, self.optimizer.groups, strict=True):
            values = self._declared.state.get(flat.master, {}).items()
            group.state = {
                key: as_stored(v, key) for key, v in values if not isinstance(v, torch.Tensor) or not v.dim()
            }
        return found

    def values_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return masters, where they are saved, and what there is for each element."""
        state = {MASTER: parameter} | self._declared.state.get(parameter, {})
        return {
            key: one for key, one in state.items()
            if isinstance(one, torch.Tensor) and one.dim() and (key != MASTER or not self._leaves_masters)
        }  # fmt: skip

    def snapshot(self) -> Snapshot:
        """Return what this rank has, the loss scaler, and what else DeepSpeed keeps besides the state.

        Masters are only in it where they say more than weights.
        """
        optimizer = self.optimizer
        optimizer.adopt_weights()
        same = all(  # on all ranks: then masters say nothing that the weights do not
            flat.master.dtype == flat.flat.dtype
            and flat.master.device == flat.flat.device
            and torch.equal(flat.master.detach().view(torch.uint8), flat.weights.view(torch.uint8))
            for flat in optimizer.groups
        )
        with answering():
            self._leaves_masters = not optimizer.is_any(not same)
        found = super().snapshot()
        found.metadata = {**optimizer.settings(), "loss_scaler": scaler_object(optimizer.loss_scaler)}
        found.zero_stage, found.loss_scale = optimizer.stage, float(optimizer.loss_scale)
        return found

    def kept_apart(self, found: Snapshot) -> Iterator[tuple[str, object, object]]:
        """Yield the loss scaler."""
        del found
        yield "loss scaler", vars(self._scaler()), vars(self.optimizer.loss_scaler)

    def write(self, target: Target) -> None:
        """Write a tag's directory that DeepSpeed loads; all ranks call it together."""
        files.save(self.optimizer, self._own_names, target)

    # --- loading

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for members in self.held.values() for name, _ in members}

    def stateful(self) -> Names:
        """Return the names of parameters that are trained; of experts, also those that other ranks have."""
        names = self._trained()
        for its, flat, theirs in zip(names, self.optimizer.groups, self.source.param_groups, strict=False):
            if flat.is_expert:
                its += [name for name in theirs.parameters if is_expert(name) and name not in its]
        return names

    def prepare(self) -> None:
        """Make room for masters and state."""
        optimizer = self.optimizer
        if optimizer.is_model_parallel and not self.is_sliced:
            raise UnsupportedError(
                "a model-parallel model cannot be loaded by name: names do not say which part of a tensor this rank "
                "has",
                advice="give zckpt.load tp_rules=, which say how tensors are cut; or at the same degrees call "
                "load_state_dict() with this rank's file",
            )
        self.called = {**self.called, **{one.master: f"param group {at}" for at, one in enumerate(optimizer.groups)}}
        self.masters = [one.master.detach().clone() for one in optimizer.groups]
        super().prepare()
        for flat, master in zip(optimizer.groups, self.masters, strict=True):
            for name, one in self.held[flat.master]:
                owner = self.owner(name, tuple(one.shape), optional=not one.is_trained)
                slot = None if owner is None else owner.master or owner.weight
                if slot is not None and one.extent is not None:
                    self.reads.append(TensorRead(slot, one.extent, one.within(master)))
        self.scaler = self._scaler()

    def _scaler(self) -> Scaler:
        """Return the loss scaler that the checkpoint has, or else the optimizer's.

        Raises DamagedFileError: it has one that cannot be.
        """
        own, known = self.optimizer.loss_scaler, self.source.metadata
        found = known.get("loss_scaler")
        node = node_of(found)
        values = plain(node)
        if isinstance(node, Object) and isinstance(node.state, dict):
            values = {"dynamic": node.qualified.endswith(".DynamicLossScaler"), **node.state}
        elif found is None and (values := of_stage0(known)) is not None:
            if values["dynamic"] and isinstance(own, DynamicLossScaler):  # of what stage 0 does not have
                values = {**vars(own), "cur_hysteresis": own.delayed_shift, **values}
        elif found is None and self.source.checkpoint.loss_scale not in (None, 1.0):
            scale = f"{self.source.checkpoint.loss_scale:g}"
            self.notes.append(f"loss scale {scale} is ignored: the checkpoint does not say how it changes")
        try:
            return scaler_like(own, values)
        except ValueError as error:
            raise DamagedFileError(f"unusable loss scaler: {error}") from error

    @torch.no_grad()
    def take(self) -> None:
        """Give the optimizer masters and state."""
        super().take()
        optimizer = self.optimizer
        optimizer._from_local()
        for group, master in zip(optimizer.groups, self.masters, strict=True):
            group.master.copy_(master)
        optimizer.loss_scaler = self.scaler

    def share(self) -> None:
        """Give all ranks the weights that the masters stand for."""
        self.optimizer.publish_masters()
