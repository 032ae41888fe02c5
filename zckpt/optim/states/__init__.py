"""What state a live optimizer has, and how it takes state back, whichever optimizer it is.

by_parameter     torch's optimizers, and all with their interface
flat_parameters  the same, of parameters in FullyShardedDataParallel
zero             ZeroOptimizer
torchao          torchao's, whose state is codes
zero_redundancy  ZeroRedundancyOptimizer, zckpt's and torch's; DistributedOptimizer
beside           what an optimizer's state_dict() has beside all that
expected         which state a class of optimizers wants, known before anything is changed
several          optimizers that are saved or loaded together

OptimizerState, below, says who calls what, in which order, on which ranks.

Another optimizer is a module here, and a line in `STATES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.engine.tensors import TensorRead, check_tensors, read_tensors
from zckpt.errors import UnsupportedError, UsageError, about
from zckpt.formats.remainder import BESIDE
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.flat_parameters import Members, check_named
from zckpt.optim.param_groups import SHOWN, Group, Names, hyperparameters
from zckpt.optim.ranks import Place
from zckpt.optim.tensors import Share
from zckpt.optim.values import as_stored, like
from zckpt.state import Parameter, ParamGroup, number_of

NamedShare = tuple[str, str, Share]
"""A parameter, a slot, and what this rank has of it."""


@dataclass(slots=True)
class Snapshot:
    """What this rank has of one optimizer, or of all, at one moment; tensors are theirs, not copies.

    Parameters
    ----------
    values : dict
        State that is no tensor of elements, by parameter and key.
    metadata : dict
        What is kept besides state, such as a loss scaler.
    classes : dict of str to str
        The class of each optimizer.
    zero_stage, loss_scale : optional
        Where all have the same.
    """

    groups: list[ParamGroup] = field(default_factory=list)
    shares: list[NamedShare] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    zero_stage: int | None = None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A directory to be written in another program's format, and what goes there; see `zckpt.optim.files.save`."""

    path: Place
    model: torch.nn.Module | None
    step: int | None
    beside: Mapping[str, Any]
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What of a checkpoint one optimizer takes.

    Parameters
    ----------
    path : str
        As the user gave it.
    param_groups : sequence of ParamGroup
        The checkpoint's groups of this optimizer, in its order.
    metadata : mapping
        What the checkpoint's optimizer kept besides its state.
    tag, listed : optional
        What the user said with the path: which checkpoint of a directory, and the names of numbered parameters.
    strict : bool
        Whether all parameters must be there.
    elsewhere : frozenset of str
        Parameters of its groups that are not this optimizer's, but another part's or rank's.
    """

    checkpoint: OpenedCheckpoint
    path: str
    param_groups: Sequence[ParamGroup]
    metadata: Mapping[str, object]
    tag: str | None = None
    listed: Sequence[str] | None = None
    strict: bool = True
    elsewhere: frozenset[str] = frozenset()


class OptimizerState(ABC):
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

    source: Source
    settings: list[Group]
    reads: list[TensorRead]
    notes: list[str]

    @abstractmethod
    def names(self) -> Names:
        """Return the names of all parameters of each param group, in the optimizer's order."""

    def members(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter's name, with what the optimizer has of it in its param groups."""
        for its, group in zip(self.names(), self.optimizer.param_groups, strict=True):
            yield from zip(its, group["params"], strict=True)

    # --- saving

    def groups(self) -> list[ParamGroup]:
        """Return the param groups as a checkpoint has them, with the names of the parameters that may have state.

        Raises
        ------
        UnsupportedError
            State of the optimizer that belongs to no parameter, or a hyperparameter that no file can hold.
        """
        return stored_groups(self.optimizer, self.names())

    def snapshot(self) -> Snapshot:
        """Return what this rank has. All ranks call it together; what several have comes in the same order on them."""
        return Snapshot(self.groups())

    @property
    def keeps_beside(self) -> bool:
        """Whether the optimizer may keep more than state by parameter and key."""
        return False

    def write(self, target: Target) -> None:
        """Write another program's format; errors are those of `zckpt.optim.files.save`."""
        raise UsageError(
            f"{type(self.optimizer).__name__} is not written in another program's format",
            path=target.path,
            advice="save as zckpt, and use zckpt convert",
        )

    # --- loading

    def restore(self, source: Source) -> None:
        """Find out what the optimizer needs of a checkpoint; nothing is read or changed yet.

        Raises
        ------
        UsageError
            The checkpoint has other parameters or param groups than the optimizer.
        UnsupportedError
            State that the optimizer has no way to keep.
        """
        self.source, self.settings, self.reads, self.notes = source, [], [], []
        with about(source.path):
            if BESIDE in source.metadata and not self.keeps_beside:
                cls = type(self.optimizer).__name__
                self.leave_out(
                    UsageError(
                        f"{cls} has no place for what was saved besides an optimizer's state",
                        advice="give the optimizer that was saved, or strict=False",
                    )
                )
            self.prepare()

    def leave_out(self, error: UsageError) -> None:
        """Raise why something is not loaded, or note it where less than everything was asked for."""
        if self.source.strict:
            raise error
        self.notes.append(f"left out: {error.message}")

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters whose weights `share` makes of masters."""
        return set()

    @abstractmethod
    def prepare(self) -> None:
        """Find out what is to be read, and make room for it."""

    def check(self) -> None:
        """Raise SourceError unless all that is to be read is there, as far as can be known before."""
        check_tensors(self.reads)

    def read(self) -> None:
        """Read state into memory of its own. Raises SourceError if it cannot be read."""
        read_tensors(self.reads)

    @abstractmethod
    def take(self) -> None:
        """Give the optimizer what was read, on this rank."""

    def share(self) -> None:  # noqa: B027  # most optimizers have nothing to send
        """Bring what follows from it to all ranks."""

    def owner(self, name: str, shape: tuple[int, ...], *, optional: bool) -> Parameter | None:
        """Return the checkpoint's parameter for one of the optimizer's; None if there is none and need not be.

        `optional`: the optimizer has nothing of it. Raises UsageError: there is none, or it has another shape.
        """
        checkpoint = self.source.checkpoint
        there = name in checkpoint.parameters or name in checkpoint.buffers
        found = checkpoint.owner(name) if there else checkpoint.unnamed.get(name)
        if found is not None and found.shape == shape:
            return found
        listed = any(name in group.parameters for group in self.source.param_groups)  # no step had reached it
        if not self.source.strict or (found is None and (listed or optional)):
            return None
        if found is None:
            raise UsageError(f"the checkpoint has no parameter {name}")
        raise UsageError(f"{name} has another shape", expected=shape, found=found.shape)

    def untrained(self) -> set[str]:
        """Return the names of the parameters that the optimizer has nothing of."""
        return {name for parameter, name in self.called.items() if not is_trained(parameter)}

    def hyperparameters(self, names: Names) -> list[Group]:
        """Return the hyperparameters of each param group: the checkpoint's, or those that it is not to change.

        `names`: of the parameters that are trained. Raises UsageError: the checkpoint has other param groups.
        """
        try:
            self._check_groups(names)
        except UsageError as error:
            if self.source.strict:
                raise
            self.notes.append(f"hyperparameters stay as they are: {error}")
            return [{} for _ in names]
        return [
            {key: like(number_of(value), ours.get(key)) for key, value in its.hyperparameters.items()}
            for its, ours in zip(self.source.param_groups, self.optimizer.param_groups, strict=True)
        ]

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


def stored_groups(
    optimizer: Optimizer, names: Names, apart: Sequence[Collection[str]] | None = None
) -> list[ParamGroup]:
    """Return an optimizer's param groups as a file can hold them, with these names, without hyperparameters apart."""
    return [
        ParamGroup({key: as_stored(v, key) for key, v in hyperparameters(group).items() if key not in left}, list(its))
        for group, its, left in zip(optimizer.param_groups, names, apart or [()] * len(names), strict=True)
    ]


STATES = {
    "zckpt.optim.zero.optimizer.ZeroOptimizer": "zero.ZeroState",
    "zckpt.optim.zero_redundancy.optimizer.ZeroRedundancyOptimizer": "zero_redundancy.ZeroRedundancyState",
    "zckpt.optim.distributed.DistributedOptimizer": "zero_redundancy.WorkersState",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "zero_redundancy.TorchState",
    "torchao.optim.adam._AdamBase": "torchao.TorchaoState",
    "torch.optim.optimizer.Optimizer": "by_parameter.ByParameter",
}
"""The module and class of the state of each class of optimizers, and of those derived from it."""

WRAPPERS = {"accelerate.optimizer.AcceleratedOptimizer": "optimizer"}
"""Classes that only hold an optimizer, and the attribute that has it."""


def state_class(optimizer: Optimizer) -> Any:
    """Return the class of an optimizer's state; its class, or else the nearest that it is derived from, decides.

    Raises UsageError: it is no optimizer.
    """
    for base in type(optimizer).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in STATES:
            module, _, cls = STATES[name].partition(".")
            return getattr(import_module(f"{__name__}.{module}"), cls)
    raise UsageError("not an optimizer", expected="a torch.optim.Optimizer", found=torch.typename(optimizer))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper holds; itself, if it is none."""
    for base in type(optimizer).__mro__:
        held = WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if held is not None:
            return unwrapped(getattr(optimizer, held))
    return optimizer


def state_of(optimizer: Optimizer, known: Mapping[torch.Tensor, str], members: Members) -> OptimizerState:
    """Return the state of an optimizer.

    `known`: names of the model's parameters; `members`: those that FullyShardedDataParallel has. Raises UsageError: a
    parameter has no name, or it is no optimizer; UnsupportedError: the optimizer is not one for
    FullyShardedDataParallel.
    """
    cls = state_class(optimizer)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    made: OptimizerState
    if not any(isinstance(one, torch.Tensor) and one in members.held for one in parameters):
        for one in parameters:
            check_named(one)
        made = cls(optimizer, known)
        return made
    flat = import_module(f"{__name__}.flat_parameters")
    if cls is not flat.ByParameter:
        raise UnsupportedError(
            f"{type(optimizer).__name__} of parameters in FullyShardedDataParallel", advice="use one of torch.optim"
        )
    made = flat.FlatState(optimizer, known, members)
    return made
