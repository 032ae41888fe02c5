"""ZeroOptimizer: this rank has its partition of each param group's masters and slots, and the loss scaler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from zckpt.engine.tensors import TensorRead
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.loss_scaling import of_stage0
from zckpt.optim.param_groups import by_tensor, sync
from zckpt.optim.ranks import answering
from zckpt.optim.states import OptimizerState, Snapshot, Target, is_trained, stored_groups
from zckpt.optim.states.beside import Beside
from zckpt.optim.states.by_parameter import ByParameter
from zckpt.optim.states.expected import begins_anew, makes_state
from zckpt.optim.tensors import Share, world_rank
from zckpt.optim.values import as_stored
from zckpt.optim.zero import files
from zckpt.optim.zero.deepspeed_state import scaler_object
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import DynamicLossScaler, Scaler, scaler_like
from zckpt.state import MASTER, WEIGHT, Extent, ParamGroup
from zckpt.torchfile import Object, node_of, plain


class ZeroState(ByParameter):
    """The state of an optimizer over flat groups. Its names are also those of frozen parameters, which are in none.

    Experts, which have local numbers in a rank's model, have their global ones in these names.
    """

    writes = "deepspeed"
    optimizer: ZeroOptimizer

    def __init__(self, optimizer: ZeroOptimizer, known: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, known)
        self._own_names = self.called
        if any(group.is_expert for group in optimizer.groups):
            experts = files.experts_of(optimizer, self.called, list(known.values()) or None)
            self.renamed = experts.named
            self._names = [[experts.named(name) for name in names] for names in self._names]
            self.called = by_tensor(optimizer.param_groups, self._names)

    @property
    def local(self) -> Optimizer:
        """The optimizer of this rank's partitions, which is given what is loaded."""
        return self.optimizer.optim

    _loads = holder = local

    # --- saving

    def groups(self) -> list[ParamGroup]:
        """Return the param groups with the names of the parameters that were trained when a group was made."""
        optimizer = self.optimizer
        if not self.is_sliced:
            files.refuse_parts(optimizer)
        trained = [
            [self.called[p] for p in group["params"] if p in optimizer._place] for group in optimizer.param_groups
        ]
        self._declared.refuse("a ZeroOptimizer has no place for that")
        found = stored_groups(optimizer, trained)
        for group, flat in zip(found, optimizer.groups, strict=True):
            values = optimizer.optim.state.get(flat.master, {}).items()
            group.state = {key: as_stored(v) for key, v in values if not isinstance(v, torch.Tensor) or not v.dim()}
        return found

    def snapshot(self) -> Snapshot:
        """Return what this rank has, the loss scaler, and what else DeepSpeed keeps besides the state.

        Masters are only in it where they say more than weights.
        """
        optimizer, found = self.optimizer, OptimizerState.snapshot(self)
        optimizer.adopt_weights()
        same = all(  # on all ranks: then masters say nothing that the weights do not
            flat.master.dtype == flat.flat.dtype
            and flat.master.device == flat.flat.device
            and torch.equal(flat.master.detach().view(torch.uint8), flat.weights.view(torch.uint8))
            for flat in optimizer.groups
        )
        with answering():
            leaves_masters = not optimizer.is_any(not same)
        for flat in optimizer.groups:
            slots = {} if leaves_masters else {MASTER: flat.master.detach()}
            for key, value in optimizer.optim.state.get(flat.master, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == flat.master.shape:
                    slots[key] = value.detach()
                elif isinstance(value, torch.Tensor) and value.dim():
                    raise UnsupportedError(
                        f"{key} is a tensor for a whole param group, which no parameter has a part of"
                    )
            for own in flat.own:
                name, shape = self.called[flat.parameters[own.index]], tuple(flat.shapes[own.index])
                extent = Extent.flat(shape, own.start, own.numel)
                for key, tensor in slots.items():
                    share = Share(shape, extent, tensor[own.of_partition], (world_rank(),))
                    found.shares.append((name, key, share))
        found.metadata = {**optimizer.settings(), "loss_scaler": scaler_object(optimizer.loss_scaler)}
        found.zero_stage, found.loss_scale = optimizer.stage, float(optimizer.loss_scale)
        return found

    def write(self, target: Target) -> None:
        """Write a tag's directory that DeepSpeed loads; all ranks call it together."""
        files.save(self.optimizer, self._own_names, target)

    # --- loading

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {self.called[parameter] for group in self.optimizer.groups for parameter in group.parameters}

    def prepare(self) -> None:
        """Make room for masters and state."""
        optimizer = self.optimizer
        if optimizer.is_model_parallel and not self.is_sliced:
            raise UnsupportedError(
                "a model whose parts lie on several ranks is not loaded by name: "
                "which part of a tensor is this rank's, no name says",
                advice="give zckpt.load tp_rules=, which say how parts are cut; or load_state_dict() what this rank's "
                "file holds, at the same degrees",
            )
        self.beside, self.masters = Beside(), list[torch.Tensor]()
        hyperparameters = self.hyperparameters([self._group_names(index) for index in range(len(optimizer.groups))])
        self.settings = [
            {**ours, **its, "params": [index]}
            for index, (ours, its) in enumerate(
                zip(self.local.state_dict()["param_groups"], hyperparameters, strict=True)
            )
        ]
        self.called = {**self.called, **{one.master: f"param group {at}" for at, one in enumerate(optimizer.groups)}}
        without: list[str] = []
        for index, group in enumerate(optimizer.groups):
            named = [(self.called[p], p) for p in group.parameters]
            owners = {name: self.owner(name, tuple(p.shape), optional=not is_trained(p)) for name, p in named}
            every, master = list(owners.values()), group.master.detach().clone()
            parts = []
            for own in group.own:
                owner, into = every[own.index], master[own.of_partition]
                slot = None if owner is None else owner.slots.get(MASTER) or owner.slots.get(WEIGHT)
                if slot is not None:
                    self.reads.append(TensorRead(slot, Extent.flat(slot.shape, own.start, own.numel), into))
                extent = Extent.flat(tuple(group.shapes[own.index]), own.start, own.numel)
                parts.append((own.index, extent, own.position))
            self.masters.append(master)
            values, _ = self.flat_state(self.settings[index], owners, parts, master)
            if values:
                self.loaded[index] = values
            elif makes_state(self.holder, self.settings[index], 1):
                without += owners
        if without and self.source.checkpoint.step:
            self.notes.append(begins_anew(self.holder, without))
        self.scaler = self._scaler()

    def _group_names(self, index: int) -> list[str]:
        """Return the names of a param group's trained parameters; of experts, also those that other ranks have."""
        optimizer, every = self.optimizer, self.source.param_groups
        names = [self.called[p] for p in optimizer.param_groups[index]["params"] if p in optimizer._place]
        if optimizer.groups[index].is_expert and index < len(every):
            names += [name for name in every[index].parameters if is_expert(name) and name not in names]
        return names

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
            self.notes.append(f"loss scale {scale} is not taken: how it changes, the checkpoint does not say")
        try:
            return scaler_like(own, values)
        except ValueError as error:
            raise DamagedFileError(f"unusable loss scaler: {error}") from error

    @torch.no_grad()
    def take(self) -> None:
        """Give the optimizer masters and state."""
        super().take()
        optimizer = self.optimizer
        sync(self.local.param_groups, optimizer.param_groups)
        for group, master in zip(optimizer.groups, self.masters, strict=True):
            group.master.copy_(master)
        optimizer.loss_scaler = self.scaler

    def share(self) -> None:
        """Give all ranks the weights that the masters stand for."""
        self.optimizer.publish_masters()
