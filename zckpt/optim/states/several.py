"""The optimizers that are saved or loaded together: one, or several over disjoint parameters, each under a name.

A list's optimizers are called by their positions, "0" and "1"; one that is given alone has no name. In a checkpoint the
param groups of all follow each other, optimizer after optimizer, and each says of which it is.

Of a model in parts, as ranks of a pipeline have them, a list's optimizers are one, of which each steps a part: their
first groups are one group, and so on, on all ranks. Those that are given by name are several here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.torch_files.optimizer import OPTIMIZERS
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.flat_parameters import Called, Members
from zckpt.optim.param_groups import Names
from zckpt.optim.ranks import Place
from zckpt.optim.states import state_class, state_of, unwrapped
from zckpt.optim.states.by_parameter import OptimizerState, Snapshot, Source
from zckpt.state import ParamGroup, by_key
from zckpt.torchfile import FromFile, alike, node_of

if TYPE_CHECKING:
    from zckpt.optim.distributed import DistributedOptimizer

Given = Optimizer | list[Optimizer] | tuple[Optimizer, ...] | Mapping[str, Optimizer] | None
"""What `save` and `load` take as `optimizer`."""

NONE = Members()

ALONE = ""
"""Stands for the name of one optimizer that is given without any."""


class Optimizers:
    """The optimizers that are saved or loaded together.

    Parameters
    ----------
    given : Optimizer, sequence or mapping, optional
    known : mapping
        Names of the model's parameters.
    members : Members, optional
        Those that FullyShardedDataParallel has.
    in_parts : bool
        Whether the model is in parts.
    is_sliced : bool
        Whether ranks have tensor-parallel slices of parameters, which are cut from a checkpoint before it is given.

    Raises
    ------
    UsageError
        A parameter is in two optimizers, or has no name.
    UnsupportedError
        An optimizer that is not for a model in parts.
    """

    def __init__(
        self, given: Given, known: Called, members: Members = NONE, *,
        in_parts: bool = False, is_sliced: bool = False,
    ) -> None:  # fmt: skip
        self.states = {name: state_of(one, known, members) for name, one in named(given).items()}
        self.is_one = in_parts and isinstance(given, (list, tuple)) and bool(given)
        for state in self.states.values():
            state.is_sliced = is_sliced
            if in_parts and type(state) is not OptimizerState:  # it divides its state among ranks itself
                raise UnsupportedError(
                    f"{type(state.optimizer).__name__} for a model in parts",
                    advice="use an optimizer from torch.optim, or fully_shard",
                )
        self.notes: list[str] = []
        """What `restore` has not found."""
        owners: dict[int, str] = {}
        called: dict[str, str] = {}
        for name, state in self.states.items():
            for its, parameter in state.members():
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise UsageError(f"{its} is in two optimizers", found=_listed([other, name]))
                other = called.setdefault(its, name)
                if other != name:
                    raise UsageError(
                        f"parameters of two optimizers are named {its}",
                        found=_listed([other, name]),
                        advice="give the model that has both, or distinct names",
                    )

    def renamed(self, name: str) -> str:
        """Return the name in a checkpoint of a tensor that the model has here."""
        for state in self.states.values():
            name = name if state.renamed is None else state.renamed(name)
        return name

    @property
    def order(self) -> Names:
        """The names of all parameters, by param group."""
        return [names for state in self.states.values() for names in state.names()]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters by name."""
        return {name: parameter for state in self.states.values() for name, parameter in state.members()}

    def snapshot(self) -> Snapshot:
        """Return what this rank has of all. All ranks call it together."""
        self._check_kept()
        found, every = Snapshot(), []
        for key, state in self.states.items():
            name, its = ALONE if self.is_one else key, state.snapshot()
            every.append(its)
            for group in its.groups:
                group.optimizer = name or None
            found.shares += its.shares
            found.values |= its.values
            found.classes |= one_class(found.classes, {name: type(state.optimizer).__name__})
            if len(self.states) == 1:
                found.metadata = its.metadata
            elif its.metadata:
                found.metadata.setdefault(OPTIMIZERS, {})[name] = its.metadata
        found.groups = merged_groups(its.groups for its in every)
        for same in ("zero_stage", "loss_scale"):
            said = {getattr(its, same) for its in every}
            setattr(found, same, said.pop() if len(said) == 1 else None)
        return found

    def restore(self, whole: Source, called: Sequence[str] = ()) -> list[OptimizerState]:
        """Let each optimizer find out what it needs of a checkpoint; return those that need something of it.

        Arguments and errors are those of `sources`; UnsupportedError: state that an optimizer has no way to keep.
        """
        self._check_kept()
        every = self.sources(whole, called)
        for state, source in every:
            state.restore(source)
        return [state for state, _ in every]

    def _check_kept(self) -> None:
        """Refuse optimizers that another program saves and loads."""
        for state in self.states.values():
            if state.is_only_compared:
                raise UsageError(
                    f"{type(state.optimizer).__name__} must be saved and loaded by its engine",
                    advice="call its save_checkpoint, and its load_checkpoint in zckpt.deepspeed.any_world_size",
                )

    @property
    def called(self) -> list[str]:
        """The names of the optimizers, those that are parts of one without a name."""
        return [ALONE] if self.is_one else list(self.states)

    def sources(self, whole: Source, called: Sequence[str]) -> list[tuple[OptimizerState, Source]]:
        """Return what of a checkpoint each optimizer takes, of those that it has something of.

        `whole`: what all take; `elsewhere` in it: of a model in parts, all parameters that some rank's optimizers have;
        `called`: names of optimizers that some rank has. Raises UsageError: the checkpoint has another number of
        optimizers, other names of them, or other parameters.
        """
        found = []
        for name, (theirs, metadata) in self._divided(whole, called).items():
            state = self.states[name]
            groups: Sequence[ParamGroup] = theirs
            elsewhere = whole.elsewhere.difference(*state.names())
            known, frozen = whole.checkpoint.parameters, state.untrained()
            ours = [any(one not in frozen for one in names) for names in state.names()]
            trained = [
                its for its in theirs if any(one not in known or not known[one].frozen for one in its.parameters)
            ]
            if len(ours) != len(theirs) and sum(ours) == len(trained):  # DeepSpeed files none where nothing is trained
                left = iter(trained)
                groups = [next(left) if is_trained else ParamGroup({}, []) for is_trained in ours]
            found.append((state, replace(whole, param_groups=groups, metadata=metadata, elsewhere=elsewhere)))
        return found

    def _divided(
        self, whole: Source, called: Sequence[str]
    ) -> dict[str, tuple[Sequence[ParamGroup], Mapping[str, object]]]:
        """Return each optimizer's param groups of a checkpoint, and what it kept besides its state."""
        if not self.states:
            return {}
        checkpoint, path = whole.checkpoint, whole.path
        ours = list(dict.fromkeys([*self.called, *called]))
        theirs = by_key((group.optimizer or ALONE, group) for group in checkpoint.param_groups)
        metadata = _metadata(checkpoint)
        if len(ours) == 1 and len(theirs) <= 1:
            kept = metadata.get(ours[0], checkpoint.optimizer_metadata)
            return dict.fromkeys(self.states, (checkpoint.param_groups, kept))
        had_one = isinstance(checkpoint.converted_from.get("optimizer"), str)  # without a name
        in_turn = theirs.keys() <= {ALONE} and not had_one
        if (self.is_one or (whole.asked.strict and not in_turn)) and sorted(ours) != sorted(theirs):
            what = "the checkpoint has optimizers of other names"
            advice = "give a mapping with the names that were saved, or a list if they are numbers"
            if len(ours) != len(theirs):
                what = (
                    f"the checkpoint has {len(theirs)} optimizer{('' if len(theirs) == 1 else 's')}, but {len(ours)} "
                    f"{('was' if len(ours) == 1 else 'were')} given"
                )
                advice = "give as many as were saved, or strict=False"
            raise UsageError(what, path=path, expected=_listed(theirs), found=_listed(ours), advice=advice)
        if in_turn:  # the checkpoint does not say of which optimizer each group is
            counts = {name: len(state.names()) for name, state in self.states.items()}
            if sum(counts.values()) != len(checkpoint.param_groups):
                raise UsageError(
                    "other param groups than the optimizers'",
                    path=path,
                    expected=", ".join(f"{count} of {name}" for name, count in counts.items()),
                    found=len(checkpoint.param_groups),
                )
            groups = iter(checkpoint.param_groups)
            each = {name: [next(groups) for _ in range(count)] for name, count in counts.items()}
            return {name: (its, checkpoint.optimizer_metadata) for name, its in each.items()}
        self.notes += [
            f"no state of {f'the optimizer {name}' if name else 'the optimizer'}: the checkpoint has {_listed(theirs)}"
            for name in self.states
            if name not in theirs
        ]
        return {name: (theirs[name], metadata.get(name, {})) for name in self.states if name in theirs}


def merged_groups(every: Iterable[Sequence[ParamGroup]]) -> list[ParamGroup]:
    """Return the param groups of optimizers that are several, or parts of one: of each name, group by group.

    `every`: of each part or rank. Raises UsageError: parts of an optimizer have other numbers of groups, or other
    hyperparameters.
    """
    found: dict[str | None, list[ParamGroup]] = {}
    for groups in every:
        for name, ours in by_key((group.optimizer, group) for group in groups).items():
            before = found.setdefault(name, [replace(one, parameters=[]) for one in ours])
            advice = "make the optimizers of all parts alike, or give them by name"
            if len(before) != len(ours):
                raise UsageError(
                    "parts of an optimizer have different numbers of param groups",
                    expected=len(before), found=len(ours), advice=advice,
                )  # fmt: skip
            for index, (group, one) in enumerate(zip(before, ours, strict=True)):
                its, theirs = group.hyperparameters, one.hyperparameters
                other = sorted(key for key in its.keys() | theirs.keys() if _differ(its.get(key), theirs.get(key)))
                if other or _differ(group.state, one.state):
                    raise UsageError(
                        f"param group {index} differs between parts of an optimizer: {', '.join(other) or 'state'}",
                        advice=advice,
                    )
                group.parameters = list(dict.fromkeys([*group.parameters, *one.parameters]))
    return [group for groups in found.values() for group in groups]


def _differ(one: object, other: object) -> bool:
    return one != other and not alike(one, other)  # NaN is not equal to itself


def one_class(found: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return classes of optimizers by name. Raises UsageError: parts of one are of several."""
    for name, cls in more.items():
        if found.get(name, cls) != cls:
            raise UsageError(
                "parts of an optimizer have different classes",
                found=f"{found[name]}, {cls}",
                advice="give optimizers by name: on all ranks, those with one name are parts of one optimizer",
            )
    return {**found, **more}


def named(given: Given) -> dict[str, Optimizer]:
    """Return optimizers by name. Raises UsageError: a name is no text, or empty."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str) or not name:
                raise UsageError("an optimizer's name must be a string", found=repr(name))
        found = dict(given)
    elif isinstance(given, (list, tuple)):
        found = {str(number): one for number, one in enumerate(given)} if len(given) != 1 else {ALONE: given[0]}
    else:
        found = {ALONE: given}
    return {name: unwrapped(one) for name, one in found.items()}


def workers_of(given: Given) -> DistributedOptimizer | None:
    """Return the optimizer whose parameters live on RPC workers, if that is what is given.

    Raises UsageError: it is given with others.
    """
    every = named(given)
    remote: list[Any] = [one for one in every.values() if state_class(one).is_remote]
    if remote and len(every) > 1:
        raise UsageError("a DistributedOptimizer must be saved and loaded alone", found=_listed(list(every)))
    return remote[0] if remote else None


def check_file_system(path: Place) -> Path:
    """Return where a DistributedOptimizer is saved. Raises UsageError: it is a store."""
    if isinstance(path, str):
        raise UsageError(
            "a DistributedOptimizer can only be saved to a file system",
            path=path,
            advice="save to a path, and write to the store with `zckpt convert`",
        )
    return path


def process_group_of(given: Given) -> dist.ProcessGroup | None:
    """Return the process group of all optimizers that have one; None: the world.

    Raises UsageError: they have several, of other ranks.
    """
    every = named(given).values()
    if any(getattr(each, "is_model_parallel", False) for each in every):  # whose slices are on all ranks
        return None
    groups = [one for one in (getattr(each, "process_group", None) for each in every) if one]
    if len({tuple(dist.get_process_group_ranks(group)) for group in groups}) > 1:
        raise UsageError("the optimizers have different process groups", advice="give process_group= with all ranks")
    return groups[0] if groups else None


def _metadata(checkpoint: OpenedCheckpoint) -> dict[str, Mapping[str, object]]:
    """Return what each of several optimizers kept besides its state."""
    found = checkpoint.optimizer_metadata.get(OPTIMIZERS)
    node = node_of(found)
    if not isinstance(node, Mapping):
        return {}
    file = found if isinstance(found, FromFile) else None
    return {
        str(name): {key: one if file is None else replace(file, node=one) for key, one in its.items()}
        for name, its in node.items()
        if isinstance(its, Mapping)
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "one without a name" for name in names)
