"""What state an optimizer has by parameter and slot, and the way back into it: torch's own, on DTensors too.

And all optimizers with their interface.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.compare.logical import parameter_values
from zckpt.engine.tensors import TensorRead, check_tensors, read_tensors
from zckpt.errors import UnsupportedError, UsageError, about, listed
from zckpt.formats.torch_files.optimizer import BESIDE
from zckpt.formats.torch_files.quantised import NESTED
from zckpt.immutable import immutable, mutable
from zckpt.naming import AS_IT_IS, Naming
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.flat_parameters import Called
from zckpt.optim.param_groups import (
    SHOWN,
    Group,
    Names,
    by_tensor,
    group_names,
    hyperparameters,
    numbers_of,
    parameters_of,
)
from zckpt.optim.ranks import Place
from zckpt.optim.states.beside import Beside, Declared, declared, is_of_save
from zckpt.optim.states.expected import (
    STEP,
    check_keys,
    keep_types,
    makes_state,
    rehearse,
    single_numbers,
    wanted,
)
from zckpt.optim.tensors import Share, room_like, share_of
from zckpt.optim.values import are_tensors, as_stored, as_torch, is_made, like, value_of
from zckpt.state import Checkpoint, Parameter, ParamGroup, Slot
from zckpt.torchfile import Object, brief, node_of

NamedShare = tuple[str, str, Share]
"""A parameter, a slot, and what this rank has of it."""


@mutable
class Snapshot:
    """What this rank has of one optimizer, or of all, at one moment; tensors are theirs, not copies."""

    groups: list[ParamGroup] = field(default_factory=list)
    shares: list[NamedShare] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State that is no tensor of elements, by parameter and key."""
    metadata: dict[str, Any] = field(default_factory=dict)  # what is kept besides state, such as a loss scaler
    classes: dict[str, str] = field(default_factory=dict)  # the class of each optimizer
    zero_stage: int | None = None  # where all have the same
    loss_scale: float | None = None


@immutable
class Target:
    """A directory to be written in another program's format, and what goes there; see `zckpt.optim.files.save`."""

    path: Place
    model: torch.nn.Module | None
    step: int | None
    beside: Mapping[str, Any]
    overwrite: bool


@immutable
class Asked:
    """What the user says with the path of a checkpoint that is loaded."""

    tag: str | None = None  # which checkpoint of a run's directory
    names: Sequence[str] | None = None  # of numbered parameters, in the order of the optimizer that was saved
    strict: bool = True  # whether all parameters must be there, and numbers have certain names
    naming: Naming = AS_IT_IS  # what the tensors are called here
    dequantize: bool = False  # have quantised state as floats


@immutable
class Source:
    """What of a checkpoint one optimizer takes."""

    checkpoint: OpenedCheckpoint
    path: str  # as the user gave it
    param_groups: Sequence[ParamGroup]  # the checkpoint's groups of this optimizer, in its order
    metadata: Mapping[str, object]  # what the checkpoint's optimizer kept besides its state
    asked: Asked = Asked()
    elsewhere: frozenset[str] = frozenset()
    """Parameters of its groups that are not this optimizer's, but another part's or rank's."""

    @classmethod
    def of(cls, checkpoint: OpenedCheckpoint, path: str, asked: Asked, elsewhere: Iterable[str] = ()) -> Source:
        """Return all that a checkpoint has of optimizers."""
        groups, metadata = checkpoint.param_groups, checkpoint.optimizer_metadata
        return cls(checkpoint, path, groups, metadata, asked, frozenset(elsewhere))


class OptimizerState:
    """The state of a live optimizer on this rank, by parameter and slot; and the way back into it.

    `state_of` makes one of an optimizer on each rank that saves or loads. Nothing is copied: tensors are the
    optimizer's own.

    To save, every rank calls `snapshot` together with the others, since an optimizer may have to ask other ranks, which
    calls `groups`. To load, every rank calls `names`, opens the checkpoint, and calls, in this order:

    restore  finds out what the optimizer needs of it, and makes room for that, in `prepare`
    check    what can be known before is checked
    read     elements are read into memory of their own: until here nothing has changed
    take     the optimizer gets them, on this rank
    share    ranks send each other what follows from it, when all have taken theirs

    Where the optimizer's parameters live on RPC workers (`is_remote`), only their caller does all this, and each worker
    has an OptimizerState of its own parameters.

    Parameters
    ----------
    is_remote : bool
        Whether parameters live on RPC workers.
    writes : str or None
        Another program's format that `write` writes.
    renamed : callable or None
        Ranks have different parameters under the same names, such as experts: returns the name in a checkpoint of one
        that the model has here.
    is_sliced : bool
        Whether who asks puts tensor-parallel slices together. Without that, an optimizer of slices refuses.
    is_only_compared : bool
        Whether another program saves and loads it.
    source : Source
        What is loaded, from `restore` on.
    settings : list of dict
        The param groups that the optimizer will have.
    reads : list of TensorRead
        What will be read.
    notes : list of str
        What the checkpoint has not.
    """

    optimizer: Any
    called: Mapping[torch.Tensor, str] = {}
    """The names of the parameters that are here."""

    is_remote = False
    writes: str | None = None
    renamed: Callable[[str], str] | None = None
    is_sliced = False
    is_only_compared = False

    source: Source
    settings: list[Group]
    reads: list[TensorRead]
    notes: list[str]
    beside: Beside
    """What is loaded besides state."""

    def __init__(self, optimizer: Optimizer, known: Called) -> None:
        if not isinstance(getattr(optimizer, "state", None), Mapping):  # torchao's CPUOffloadOptimizer has none
            raise UnsupportedError(
                f"{type(optimizer).__name__} has no `state` by parameter, as torch's optimizers have",
                advice="save only the model, and the optimizer's state_dict() with torch.save",
            )
        self.optimizer = optimizer
        self._names = group_names(optimizer.param_groups, known)
        self.called = by_tensor(optimizer.param_groups, self._names)
        self.loaded: dict[int, dict[str, Any]] = {}
        """State that is loaded, by the number of its parameter in `_loads`."""

    @property
    def local(self) -> Any:
        """The optimizer that steps this rank's parameters."""
        return self.optimizer

    @property
    def _loads(self) -> Any:
        """The optimizer whose `load_state_dict` gets what is loaded."""
        return self.optimizer

    @cached_property
    def _declared(self) -> Declared:
        return declared(self.local)

    @property
    def holder(self) -> Optimizer:
        """The optimizer that has the state: `local`, or one that it holds."""
        return self._declared.holder

    def is_here(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002  # for those that only have some
        """Tell whether this rank has the state of a parameter, or nobody has any."""
        return True

    def names(self) -> Names:
        """Return the names of all parameters of each param group, in the optimizer's order."""
        return self._names

    def stateful(self) -> Names:
        """Return the names of those that a checkpoint's param groups are to have."""
        return self.names()

    def members(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter's name, with what the optimizer has of it in its param groups."""
        yield from zip(chain(*self.names()), parameters_of(self.optimizer.param_groups), strict=True)

    # --- saving

    def groups(self) -> list[ParamGroup]:
        """Return the param groups as a checkpoint has them, with the names of the parameters that may have state.

        Raises UnsupportedError: state of the optimizer that belongs to no parameter, or a hyperparameter that no file
        can hold.
        """
        if not self.keeps_beside:
            self._declared.refuse(f"{type(self.optimizer).__name__} has no place for it")
        return stored_groups(self.optimizer, self._names, self._declared.beside.groups)

    @cached_property
    def _numbers(self) -> set[str]:
        """The keys of which a parameter has one number."""
        return {STEP} | single_numbers(self._declared.state)

    def _shares(
        self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor, found: Snapshot
    ) -> dict[str, Share]:
        """Return what this rank has of a slot, or of what that consists of; note what else is to be known of it."""
        del found  # for those that note something
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            raise UnsupportedError(f"{key} of {name} is a plain tensor, but the parameter is sharded")
        share = share_of(value, f"{key} of {name}")
        return {} if share is None else {key: share}

    def holding(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has its state."""
        return self.members()

    def values_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return what this rank has of a tensor's state."""
        return self._declared.state.get(parameter, {})

    @property
    def keeps_beside(self) -> bool:
        """Whether the optimizer may keep more: its state is not divided among ranks, or made of other things."""
        return type(self) is OptimizerState

    def snapshot(self) -> Snapshot:
        """Return what this rank has. All ranks call it together; what several have comes in the same order on them."""
        found = Snapshot(self.groups())
        for name, parameter in self.holding():
            for key, value in self.values_of(parameter).items():
                elementwise = not (parameter.dim() or key in self._numbers or isinstance(parameter, DTensor))
                elementwise |= isinstance(value, torch.Tensor) and value.is_complex()
                if isinstance(value, torch.Tensor) and (value.dim() > 0 or elementwise):
                    its = self._shares(name, parameter, key, value, found)
                    found.shares += [(name, slot, share) for slot, share in its.items()]
                elif self.is_here(parameter):
                    found.values.setdefault(name, {})[key] = as_stored(value, f"{key} of {name}")
        tree = self._declared.tree(self.called)
        found.metadata = {} if tree is None else {BESIDE: tree}
        return found

    def kept_apart(self, found: Snapshot) -> Iterator[tuple[str, object, object]]:
        """Yield what `source` has besides state and settings, with what is here: its name, theirs, ours."""
        ours, theirs = found.metadata.get(BESIDE, {}), value_of(self.source.metadata.get(BESIDE, {}))
        yield from ((f"{key} beside state", theirs[key], ours.get(key)) for key in ("rest", "parameters", "groups")
                    if isinstance(theirs, Mapping) and theirs.get(key))  # fmt: skip

    def write(self, target: Target) -> None:
        """Write another program's format; errors are those of `zckpt.optim.files.save`."""
        raise UsageError(
            f"{type(self.optimizer).__name__} cannot be written in another program's format",
            path=target.path,
            advice="save in zckpt's format, and use `zckpt convert`",
        )

    # --- loading

    def restore(self, source: Source) -> None:
        """Find out what the optimizer needs of a checkpoint; nothing is read or changed yet.

        Raises UsageError: the checkpoint has other parameters or param groups than the optimizer; UnsupportedError:
        state that the optimizer has no way to keep.
        """
        self.source, self.settings, self.reads, self.notes = source, [], [], []
        with about(source.path):
            if BESIDE in source.metadata and not self.keeps_beside and is_of_save(source.metadata[BESIDE]):
                cls = type(self.optimizer).__name__
                self.leave_out(
                    UsageError(
                        f"{cls} has no place for what was saved in addition to optimizer state",
                        advice="give the saved optimizer, or strict=False",
                    )
                )
            self.prepare()

    def leave_out(self, error: UsageError) -> None:
        """Raise why something is not loaded, or note it where less than everything was asked for."""
        if self.source.asked.strict:
            raise error
        self.notes.append(f"left out: {error.message}")

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters whose weights `share` makes of masters."""
        return set()

    def prepare(self) -> None:
        """Find out what is to be read, and make room for it."""
        self.without: list[str] = []
        own, node = self._declared, self.source.metadata.get(BESIDE)
        self.beside = Beside(own.beside.at)
        if node is not None and self.keeps_beside:
            checkpoint = self.source.checkpoint
            there = {key for one in checkpoint.parameters.values() for key in parameter_values(checkpoint, one)}
            try:
                kept = own.kept(node, self.names())
            except UsageError as error:
                self.leave_out(error)
            else:
                if kept.keys and there.isdisjoint(kept.keys):
                    self.notes.append(
                        "what the optimizer kept in addition to its state is left out, because its state was stripped"
                    )
                else:
                    self.beside = kept
                    kind = type(self.local)
                    ignored = [str(key) for key in kept.rest if key not in own.beside.rest and key != "state"]
                    if ignored and kind.load_state_dict is Optimizer.load_state_dict:
                        self.notes.append(f"left out: {listed(ignored)}, for which {kind.__name__} has no place")
        elif own.beside.rest:
            cls = type(self.local).__name__
            self.notes.append(f"the checkpoint has no {listed([str(key) for key in own.beside.rest])} of {cls}")
        groups, hyperparameters = self._loads.param_groups, self.hyperparameters()
        apart = self.beside.groups or [{} for _ in hyperparameters]
        for group, numbers, its, odd in zip(groups, numbers_of(groups), hyperparameters, apart, strict=True):
            made = {**group, **its, **{key: self._setting(key, one, group) for key, one in odd.items()}}
            for number, parameter in zip(numbers, group["params"], strict=True):
                if self.is_here(parameter):
                    self._add(number, parameter, made)
            self.settings.append({**made, "params": list(numbers)})
        source = self.source.checkpoint
        if self.without and source.step and source.converted_from.get("optimizer") != type(self.local).__name__:
            after = f"{type(self.holder).__name__} makes it in its next step"
            self.notes.append(f"no state of {listed(self.without)}: {after}")

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        name, holder = self.called[parameter], self.holder
        owner = self.owner(name, tuple(parameter.shape), optional=not is_trained(parameter))
        if owner is None:
            self.notes.append(f"no state of {name}")
            return
        values = self.values(owner) | self.beside.parameters.get(name, {})
        check_keys(holder, group, owner.name, parameter.dim(), values)
        if not values and is_trained(parameter) and makes_state(holder, group, parameter.dim()):
            self.without.append(owner.name)
        if values:
            self.loaded[number] = {key: self._value(key, value, parameter, owner) for key, value in values.items()}

    def values(self, owner: Parameter) -> dict[str, object]:
        """Return what the checkpoint has of a parameter's state."""
        return parameter_values(self.source.checkpoint, owner)

    def _value(self, key: str, value: object, parameter: torch.Tensor, owner: Parameter) -> object:
        if not isinstance(value, Slot):
            its = wanted(self.holder)
            may_be_list = key != NESTED and (its is None or key in its.lists.split())
            if may_be_list and are_tensors(value) and not isinstance(parameter, DTensor):
                return value_of(value)  # preconditioners, say; `rehearse` shows whether the class takes them
            return as_torch(value, f"{key} of {owner.name}")
        dtype = getattr(torch, value.dtype)
        if not isinstance(parameter, DTensor) or value.shape != owner.shape:
            if isinstance(parameter, DTensor) and value.shape:
                raise UnsupportedError(f"{key} of {owner.name} does not have one value per element")
            if value.shape and value.shape == tuple(parameter.shape):
                whole = room_like(parameter, dtype)
            else:
                device = parameter.device if value.shape else "cpu"  # where torch keeps single numbers
                whole = torch.empty(value.shape, dtype=dtype, device=device)
            self.reads.append(TensorRead(value, value.whole, whole))
            return whole
        local = room_like(parameter.to_local(), dtype)
        share = share_of(parameter, owner.name)
        if share is not None:
            self.reads.append(TensorRead(value, share.extent, local))
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _by_tensor(self) -> dict[torch.Tensor, dict[str, Any]]:
        every = parameters_of(self._loads.param_groups)
        return {every[number]: its for number, its in self.loaded.items()}

    def check(self) -> None:
        """Raise SourceError unless all that is to be read is there, as far as can be known before."""
        check_tensors(self.reads)

    def read(self) -> None:
        """Read state into memory of its own, and find out whether the optimizer takes it."""
        read_tensors(self.reads)
        with about(self.source.path):
            rehearse(self.local, self._by_tensor(), self.settings, self.called, self.beside)

    def take(self) -> None:
        """Give the optimizer what was read, on this rank."""
        self._loads.load_state_dict(self.beside.state_dict(self.loaded, self.settings))
        keep_types(self.holder, self._by_tensor())

    def share(self) -> None:
        """Bring what follows from it to all ranks; most optimizers have nothing to send."""

    def owner(self, name: str, shape: tuple[int, ...], *, optional: bool) -> Parameter | None:
        """Return the checkpoint's parameter for one of the optimizer's; None if there is none and need not be.

        `optional`: the optimizer has nothing of it. Raises UsageError: there is none, or it has another shape.
        """
        found = owner_of(self.source.checkpoint, name)
        if found is not None and found.shape == shape:
            return found
        listed = any(name in group.parameters for group in self.source.param_groups)  # no step had reached it
        if not self.source.asked.strict or (found is None and (listed or optional)):
            return None
        if found is None:
            raise UsageError(f"the checkpoint has no parameter {name}")
        raise UsageError(f"{name} has another shape", expected=shape, found=found.shape)

    def untrained(self) -> set[str]:
        """Return the names of the parameters that the optimizer has nothing of."""
        return {name for parameter, name in self.called.items() if not is_trained(parameter)}

    def hyperparameters(self) -> list[Group]:
        """Return the hyperparameters of each param group: the checkpoint's, or those that it is not to change.

        Raises UsageError: the checkpoint has other param groups.
        """
        names = self.stateful()
        try:
            self._check_groups(names)
        except UsageError as error:
            if self.source.asked.strict:
                raise
            self.notes.append(f"hyperparameters are not changed: {error}")
            return [{} for _ in names]
        return [
            {key: self._setting(key, one, ours) for key, one in hyperparameters(its.hyperparameters).items()}
            for its, ours in zip(self.source.param_groups, self.optimizer.param_groups, strict=True)
        ]

    def _setting(self, key: str, node: object, ours: Group) -> object:
        value = value_of(node)
        if is_made(value):
            return like(value, ours.get(key))
        cls, its = type(ours.get(key)), node_of(node)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if issubclass(cls, Enum) and isinstance(its, Object) and its.qualified == name:
            for one in cls:
                if [one.value] == list(its.args):
                    return one
        if key not in ours:
            raise UnsupportedError(
                f"{key} of a param group is an object that only a pickle can make",
                found=brief(node),
                advice="set it in the optimizer, or load only the model",
            )
        note = f"{key} of the param groups is left as it is here: the checkpoint has an object, {brief(node)}"
        self.notes += [] if note in self.notes else [note]
        return ours[key]

    def _check_groups(self, names: Names) -> None:
        """Refuse other param groups than the optimizer's; what has no state may be missing on either side."""
        source = self.source
        theirs, optional = source.param_groups, self._owners(self.untrained() | source.elsewhere)
        if len(theirs) != len(names):
            raise UsageError("other param groups than the optimizer's", expected=len(names), found=len(theirs))
        for index, (ours, its) in enumerate(zip(names, theirs, strict=True)):
            only = sorted((self._owners(ours) ^ set(its.parameters)) - optional)
            if only:
                raise UsageError(
                    f"param group {index} has other parameters than the optimizer's", found=", ".join(only[:SHOWN])
                )

    def _owners(self, names: Iterable[str]) -> set[str]:
        checkpoint = self.source.checkpoint
        return {checkpoint.owner(name).name if name in checkpoint.parameters else name for name in names}


def is_trained(parameter: torch.Tensor) -> bool:
    """Tell whether an optimizer has anything of a parameter."""
    return parameter.requires_grad and parameter.numel() > 0


def owner_of(checkpoint: Checkpoint, name: str) -> Parameter | None:
    """Return what has the slots of a name, be it one that an optimizer only numbers; None: there is nothing."""
    found = checkpoint.find(name)
    return found if found is None or found.tied_to is None else checkpoint.parameters[found.tied_to]


def stored_groups(
    optimizer: Optimizer, names: Names, apart: Sequence[Collection[str]] | None = None
) -> list[ParamGroup]:
    """Return an optimizer's param groups as a file can hold them, with these names, without hyperparameters apart."""
    return [
        ParamGroup({key: as_stored(v, key) for key, v in hyperparameters(group).items() if key not in left}, list(its))
        for group, its, left in zip(optimizer.param_groups, names, apart or [()] * len(names), strict=True)
    ]
