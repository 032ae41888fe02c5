"""ZeroOptimizer: this rank has its partition of each param group's masters and slots, and the loss scaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zckpt.compare.logical import parameter_values
from zckpt.engine.tensors import TensorRead
from zckpt.errors import DamagedFileError, UnsupportedError, about
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.loss_scaling import of_stage0
from zckpt.optim.param_groups import Group, by_tensor
from zckpt.optim.ranks import answering
from zckpt.optim.states import NamedShare, Restoring, Source, Target, Values, stored_groups
from zckpt.optim.states.beside import Beside, declared
from zckpt.optim.states.by_parameter import ByParameter
from zckpt.optim.states.expected import begins_anew, check_keys, keep_types, makes_state, rehearse
from zckpt.optim.states.values import as_stored, flat_state, read_numbers
from zckpt.optim.tensors import Share, world_rank
from zckpt.optim.zero import files
from zckpt.optim.zero.deepspeed_state import scaler_object, settings
from zckpt.optim.zero.files import experts_of
from zckpt.optim.zero.flat import FlatGroup
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import DynamicLossScaler, Scaler, scaler_like
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, ParamGroup
from zckpt.state.partition import FlatShare
from zckpt.torchfile import Object, node_of, plain


class ZeroState(ByParameter):
    """The state of an optimizer over flat groups. Its names are also those of frozen parameters, which are in none.

    Experts, which have local numbers in a rank's model, have their global ones in these names.
    """

    writes = "deepspeed"
    optimizer: ZeroOptimizer

    def __init__(self, optimizer: ZeroOptimizer, known: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, known)
        self._own_names = self._called
        if any(group.is_expert for group in optimizer.groups):
            experts = experts_of(optimizer, self._called, list(known.values()) or None)
            self.renamed = experts.named
            self._names = [[experts.named(name) for name in names] for names in self._names]
            self._called = by_tensor(optimizer.param_groups, self._names)
            self._parameters = {name: parameter for parameter, name in self._called.items()}

    def groups(self) -> list[ParamGroup]:
        """Return the param groups with the names of the parameters that were trained when a group was made."""
        optimizer = self.optimizer
        if not self.is_sliced:
            files.refuse_parts(optimizer)
        trained = [
            [self._called[p] for p in group["params"] if p in optimizer._place] for group in optimizer.param_groups
        ]
        declared(optimizer.optim).refuse("a ZeroOptimizer has no place for that")
        found = stored_groups(optimizer, trained)
        for group, flat in zip(found, optimizer.groups, strict=True):
            values = optimizer.optim.state.get(flat.master, {}).items()
            group.state = {key: as_stored(v) for key, v in values if not isinstance(v, torch.Tensor) or not v.dim()}
        return found

    def slots(self, name: str) -> dict[str, Share]:
        """Return this rank's extent of each slot of a parameter; of one that is another rank's, nothing."""
        parameter = self._parameters[name]
        if parameter not in self.optimizer._place:
            return {}
        flat, position = self.optimizer._place[parameter]
        own = [one for one in flat.own if one.index == position]
        return _shares(flat, own[0], self._flat_slots(flat)) if own else {}

    def shares(self) -> Iterator[NamedShare]:
        """Yield this rank's extents; of masters only where these say more than weights. All ranks call it together."""
        self.optimizer.adopt_weights()
        without = {MASTER} if self._masters_are_weights() else set()
        for flat in self.optimizer.groups:
            slots = {key: tensor for key, tensor in self._flat_slots(flat).items() if key not in without}
            for own in flat.own:
                name = self._called[flat.parameters[own.index]]
                for key, share in _shares(flat, own, slots).items():
                    yield name, key, share

    def _flat_slots(self, flat: FlatGroup) -> dict[str, torch.Tensor]:
        """Return this rank's partition of a group's masters and of the tensors of the local optimizer."""
        found = {MASTER: flat.master.detach()}
        for key, value in self.optimizer.optim.state.get(flat.master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == flat.master.shape:
                found[key] = value.detach()
            elif isinstance(value, torch.Tensor) and value.dim():
                raise UnsupportedError(f"{key} is a tensor for a whole param group, which no parameter has a part of")
        return found

    def _masters_are_weights(self) -> bool:
        """Tell whether the masters say nothing that the weights do not: on all ranks they have the same bits."""
        groups = self.optimizer.groups
        same = all(
            flat.master.dtype == flat.flat.dtype
            and flat.master.device == flat.flat.device
            and torch.equal(flat.master.detach().view(torch.uint8), flat.weights.view(torch.uint8))
            for flat in groups
        )
        with answering():
            return not self.optimizer.is_any(not same)

    def values(self) -> Values:
        """Return the loss scaler and what else DeepSpeed keeps besides the state."""
        optimizer = self.optimizer
        metadata = {**settings(optimizer), "loss_scaler": scaler_object(optimizer.loss_scaler)}
        return Values(metadata=metadata, zero_stage=optimizer.stage, loss_scale=float(optimizer.loss_scale))

    def restore(self, source: Source) -> Restoring:
        """Find out what the optimizer needs of a checkpoint."""
        return ZeroRestoring(source, self.optimizer, self._called)

    def write(self, target: Target) -> None:
        """Write a tag's directory that DeepSpeed loads; all ranks call it together."""
        files.save(self.optimizer, self._own_names, target)


def _shares(flat: FlatGroup, own: FlatShare, slots: Mapping[str, torch.Tensor]) -> dict[str, Share]:
    """Return the slots of one parameter's share in this rank's partition."""
    shape = tuple(flat.parameters[own.index].shape)
    extent = Extent.flat(shape, own.start, own.numel)
    end = own.position + own.numel
    mine = (world_rank(),)
    return {key: Share(shape, extent, tensor[own.position : end], mine) for key, tensor in slots.items()}


@dataclass(slots=True)
class ZeroRestoring(Restoring):
    """A checkpoint's state on its way into a ZeroOptimizer: this rank's partition of each group's masters and state."""

    optimizer: ZeroOptimizer
    masters: list[torch.Tensor] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scaler: Scaler | None = None

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {self.names[parameter] for group in self.optimizer.groups for parameter in group.parameters}

    def prepare(self) -> None:
        """Make room for masters and state."""
        optimizer = self.optimizer
        if optimizer.is_model_parallel and not self.source.is_sliced:
            raise UnsupportedError(
                "a model whose parts lie on several ranks is not loaded by name: "
                "which part of a tensor is this rank's, no name says",
                path=self.source.path,
                advice="give zckpt.load tp_rules=, which say how parts are cut; or load_state_dict() what this rank's "
                "file holds, at the same degrees",
            )
        names = [self._group_names(index) for index in range(len(optimizer.groups))]
        known = optimizer.optim.state_dict()["param_groups"]
        hyperparameters = self.hyperparameters(names, optimizer.param_groups)
        self.groups = [
            {**ours, **its, "params": [index]}
            for index, (ours, its) in enumerate(zip(known, hyperparameters, strict=True))
        ]
        without: list[str] = []
        for index, group in enumerate(optimizer.groups):
            owners = [self.owner(parameter) for parameter in group.parameters]
            self.masters.append(group.master.detach().clone())
            for own in group.own:
                owner, into = owners[own.index], self.masters[-1][own.position : own.position + own.numel]
                slot = None if owner is None else owner.slots.get(MASTER) or owner.slots.get(WEIGHT)
                if slot is not None:
                    self.reads.append(TensorRead(slot, Extent.flat(slot.shape, own.start, own.numel), into))
            values = self._state(group, owners, self.groups[index])
            if values:
                self.state[index] = values
            elif makes_state(optimizer.optim, self.groups[index], 1):
                without += [self.names[parameter] for parameter in group.parameters]
        if without and self.source.checkpoint.step:
            self.notes.append(begins_anew(optimizer.optim, without))
        self.scaler = self._scaler()

    def _group_names(self, index: int) -> list[str]:
        """Return the names of a param group's trained parameters; of experts, also those that other ranks have."""
        optimizer, every = self.optimizer, self.source.param_groups
        names = [self.names[p] for p in optimizer.param_groups[index]["params"] if p in optimizer._place]
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
            raise DamagedFileError(f"unusable loss scaler: {error}", path=self.source.path) from error

    def _state(self, group: FlatGroup, owners: Sequence[Parameter | None], settings: Group) -> dict[str, Any]:
        """Return the state of a flat master: room for this rank's share of each slot, and what is one value for all."""
        every = [{} if owner is None else parameter_values(self.source.checkpoint, owner) for owner in owners]
        read_numbers(every, owners)
        for parameter, values in zip(group.parameters, every, strict=True):
            check_keys(self.optimizer.optim, settings, self.names[parameter], 1, values, path=self.source.path)

        def room(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(group.partition, dtype=dtype, device=group.master.device)

        parts = [(f.index, Extent.flat(tuple(group.shapes[f.index]), f.start, f.numel), f.position) for f in group.own]
        with about(self.source.path):
            made, reads = flat_state(every, owners, parts, room)
        self.reads += reads
        return made

    def read(self) -> None:
        """Read masters and state, and find out whether the local optimizer takes it."""
        Restoring.read(self)
        optimizer = self.optimizer
        rehearse(
            optimizer.optim,
            self._by_master(),
            self.groups,
            [f"param group {min(self.state, default=0)}"],
            self.source.path,
            Beside(),
        )

    def _by_master(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {self.optimizer.groups[index].master: its for index, its in self.state.items()}

    @torch.no_grad()
    def take(self) -> None:
        """Give the optimizer masters and state."""
        optimizer = self.optimizer
        optimizer.load_local(self.state, self.groups)
        keep_types(optimizer.optim, self._by_master())
        for group, master in zip(optimizer.groups, self.masters, strict=True):
            group.master.copy_(master)
        optimizer.loss_scaler = self.scaler or optimizer.loss_scaler

    def share(self) -> None:
        """Give all ranks the weights that the masters stand for."""
        self.optimizer.publish_masters()
