"""The optimizer: which rank steps which parameter, its local optimizer, and the step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zckpt.optim.zero_redundancy import arguments, consolidation, exchange, state
from zckpt.optim.zero_redundancy.overlap import BucketAssignment, OverlapInfo, OverlapStatus, assign, flatten
from zckpt.partition import greedy_partition

logger = logging.getLogger(__name__)

Group = dict[str, Any]

_OWN_KEYS = ("params", "param_names")
"""What a param group says of its parameters, which each rank's local groups have a part of."""


class _StepHook(JoinHook):
    """Steps along with ranks that still have inputs."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Step this rank's share and take part in the exchange."""
        self.optimizer.step()


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose state is spread over ranks, each of which steps some of the parameters for all.

    Parameters
    ----------
    params : iterable
        Tensors, (name, tensor) pairs, or dicts of param groups, as `torch.optim` takes them; in the same order on all
        ranks.
    optimizer_class : type
        A `torch.optim.Optimizer`: what each rank steps its share with.
    process_group : ProcessGroup, optional
        By default the whole world.
    parameters_as_bucket_view : bool
        Let parameters be views of flat buckets, one for each rank, which are then sent without packing.
    overlap_with_ddp : bool
        Step in a communication hook of DistributedDataParallel (see `hook_with_zero_step`), not in `step`.
    **defaults
        Passed to `optimizer_class`.

    Raises
    ------
    TypeError, ValueError
        As `torch.optim.Optimizer`; ValueError for sparse tensors.

    Notes
    -----
    The partition is that of torch's class of this name: see `zckpt.partition.greedy_partition`. Parameters may be of
    several devices and element types. What is sent after a step are the parameters that require a gradient or have
    one, now or at an earlier step. Constructor, `step`, `add_param_group`, `consolidate_state_dict` and `load_state_dict` of all
    ranks must come in the same order.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        groups = arguments.read_groups(params)
        self.initialized = False
        self._all_params: list[torch.Tensor] = []
        self._local_state: Any = {}
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = process_group or _world()
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = OverlapInfo(self.world_size)
        self._bucket_assignments: list[dict[int, BucketAssignment]] = []
        self._step_lock = threading.Lock()
        self._optim_constructor = optimizer_class
        self._optim_defaults = defaults
        self._consolidated: dict[str, Any] | None = None
        self._forget()
        Optimizer.__init__(self, groups, dict(defaults))
        self._default_device = self._all_params[0].device
        self._trained: set[torch.Tensor] = set()
        self._note_trained()
        self._init_local_optimizer()
        self.initialized = True

    # --- which rank has what

    def _forget(self) -> None:
        """Forget what follows from the param groups."""
        self._partition: list[list[Group]] | None = None
        self._ranks: dict[torch.Tensor, int] | None = None
        self._exchange: exchange.Exchange | None = None

    def _partition_parameters(self) -> list[list[Group]]:
        """Return the param groups of each rank."""
        if self._partition is None:
            numels = [[p.numel() for p in group["params"]] for group in self.param_groups]
            self._partition = [
                [_part(group, chosen) for group, chosen in zip(self.param_groups, indices, strict=True)]
                for indices in greedy_partition(numels, self.world_size)
            ]
        return self._partition

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """The rank that steps each parameter."""
        if self._ranks is None:
            self._ranks = {
                parameter: rank
                for rank, groups in enumerate(self._partition_parameters())
                for group in groups
                for parameter in group["params"]
            }
        return self._ranks

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        """Parameters by number: position over all groups, in order."""
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        """The number of each parameter."""
        return {parameter: index for index, parameter in enumerate(self._index_to_param)}

    @property
    def shares(self) -> list[int]:
        """Elements that each rank steps; a step takes as long as the largest share."""
        return [sum(p.numel() for group in groups for p in group["params"]) for groups in self._partition_parameters()]

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its parameters are dealt to the ranks, and those of earlier groups stay where they are.

        All ranks must add the same.

        Raises
        ------
        RuntimeError
            DDP reduces buckets that have been dealt to the ranks already.
        """
        if self.initialized and self._overlap_info.status != OverlapStatus.UNINITIALIZED:
            raise RuntimeError("a param group cannot be added once the buckets of DDP belong to ranks")
        super().add_param_group(arguments.read_group(param_group))
        self._all_params.extend(self.param_groups[-1]["params"])
        if self.initialized:
            self._forget()
            self._note_trained()
            self.optim.add_param_group(self._partition_parameters()[self.rank][-1])
            _sync(self.optim.param_groups, self.param_groups)

    def _init_local_optimizer(self) -> None:
        self.optim = self._optim_constructor(self._partition_parameters()[self.rank], **self._optim_defaults)
        self.defaults = {**self.optim.defaults, **self.defaults}
        _sync(self.optim.param_groups, self.param_groups)

    @property
    def state(self) -> Any:
        """This rank's state: that of its local optimizer."""
        optimizer = self.__dict__.get("optim")
        return self._local_state if optimizer is None else optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if "optim" in self.__dict__:
            self.optim.state = value
        else:
            self._local_state = value

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's share, then give it to all others and receive theirs.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss.
        **kwargs
            Passed to the local optimizer's `step`.

        Returns
        -------
        object
            What the local optimizer's `step` returns.
        """
        if self._overlap_with_ddp:
            logger.warning("step() does nothing with overlap_with_ddp=True: the communication hook has stepped already")
            return None
        loss = self._local_step(closure=closure, **kwargs)
        self._sync_params()
        return loss

    def _local_step(
        self,
        gradients: Sequence[torch.Tensor | None] | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step this rank's share and tell nobody.

        With `gradients`, one for each of its parameters in order, those are used and parameters without one left alone.
        """
        if gradients is not None:
            mine = [p for group in self.optim.param_groups for p in group["params"]]
            self._step_gradients({p: g for p, g in zip(mine, gradients, strict=True) if g is not None})
            return None
        Join.notify_join_context(self)
        self._note_trained()
        _sync(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        _sync(self.optim.param_groups, self.param_groups)
        return loss

    def _step_gradients(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step those of this rank's parameters that have one of these gradients; `grad` of none is changed."""
        with self._step_lock:
            _sync(self.param_groups, self.optim.param_groups)
            kept = [group["params"] for group in self.optim.param_groups]
            before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            try:
                for group in self.optim.param_groups:
                    group["params"] = [p for p in group["params"] if p in gradients]
                    before += [(p, p.grad) for p in group["params"]]
                for parameter, _ in before:
                    parameter.grad = gradients[parameter]
                self.optim.step()
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient
                for group, parameters in zip(self.optim.param_groups, kept, strict=True):
                    group["params"] = parameters
            _sync(self.optim.param_groups, self.param_groups)

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, BucketAssignment]]:
        """Which rank steps which part of which bucket of DDP; empty until that is known."""
        return self._bucket_assignments

    def _init_zero_for_overlap(self) -> None:
        """Deal the buckets of DDP to the ranks, and move state to where it is needed from now on."""
        info = self._overlap_info
        info.status = OverlapStatus.INITIALIZED
        self._bucket_assignments = assign(info, self.rank)
        for assignments in self._bucket_assignments:
            for assignment in assignments.values():
                flatten(assignment)
        before = dict(self._param_to_rank)
        held = {parameter: dict(values) for parameter, values in self.optim.state.items()}
        self._forget()
        self._partition = self._partition_by(info.params_per_rank)
        self._init_local_optimizer()
        parameters = self._index_to_param
        moved = consolidation.move(
            {number: held.get(p, {}) for number, p in enumerate(parameters) if before[p] == self.rank},
            [before[p] for p in parameters],
            [self._param_to_rank[p] for p in parameters],
            self.process_group,
        )
        for number, values in moved.items():
            if values:
                self.optim.state[parameters[number]] = values

    def _partition_by(self, shares: Sequence[Sequence[torch.Tensor]]) -> list[list[Group]]:
        """Return the param groups of each rank for given shares; parameters in none of them stay with rank 0."""
        rank_of = {parameter: rank for rank, share in enumerate(shares) for parameter in share}
        order = {parameter: number for share in shares for number, parameter in enumerate(share)}
        return [
            [
                _part(
                    group,
                    sorted(
                        (i for i, p in enumerate(group["params"]) if rank_of.get(p, 0) == rank),
                        key=lambda i, group=group: order.get(group["params"][i], len(order)),
                    ),
                )
                for group in self.param_groups
            ]
            for rank in range(self.world_size)
        ]

    def _note_trained(self) -> None:
        """Take parameters that are trained, or have a gradient all the same, into what is exchanged."""
        new = {p for p in self._all_params if p not in self._trained and (p.requires_grad or p.grad is not None)}
        if new:
            self._trained |= new
            self._exchange = None

    def _sync_params(self) -> None:
        if self._exchange is None:
            shares = [
                [p for group in groups for p in group["params"] if p in self._trained]
                for groups in self._partition_parameters()
            ]
            make = exchange.bucket_view_exchange if self.parameters_as_bucket_view else exchange.plain_exchange
            self._exchange = make(shares)
        exchange.run(self._exchange, self.process_group, self.rank, self.world_size)

    # --- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs does while others still step: it steps too, with the gradients it has."""
        return _StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the first parameter."""
        return self._default_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group

    # --- state dicts

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all ranks to one, which then has it in `state_dict()`. Called on all ranks.

        Parameters
        ----------
        to : int
            Rank in the process group.

        Raises
        ------
        ValueError
            There is no such rank.
        """
        if not 0 <= to < self.world_size:
            raise ValueError(f"no rank {to}: the process group has {self.world_size} ranks")
        _sync(self.param_groups, self.optim.param_groups)
        collected = consolidation.collect(self._local_part(), self.process_group, to)
        self._consolidated = None
        if collected is not None:
            self._consolidated = {"state": collected, "param_groups": state.packed_groups(self.param_groups)}

    def release_state_dict(self) -> None:
        """Let go of the consolidated copy; `state_dict()` is then this rank's own part again."""
        self._consolidated = None

    def _local_part(self) -> dict[int, dict[str, Any]]:
        """Return this rank's state by global parameter number."""
        numbers = self._param_to_index
        return {numbers[p]: dict(values) for p, values in self.optim.state.items() if p in numbers}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as of the last `consolidate_state_dict` to this rank, else this rank's own part.

        Both are numbered over all parameters. The part has the key `partition`; the same rank of as many loads it.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._consolidated is not None:
            whole = self._consolidated["state"]
            made = {
                "state": {number: dict(values) for number, values in whole.items()},
                "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
            }
        else:
            made = {
                "state": dict(sorted(self._local_part().items())),
                "param_groups": state.packed_groups(self.param_groups),
                state.PARTITION: {"rank": self.rank, "world_size": self.world_size},
            }
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, made)
            made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the part of this rank from the state dict of any optimizer of the same parameters.

        Parameters
        ----------
        state_dict : mapping
            Of this class, of torch's, or of the unsharded optimizer, whole; or this rank's own part. It is not
            written to, and nothing of it is kept. State that it does not have is cleared.

        Raises
        ------
        ValueError
            It is that of another optimizer; the message names what differs, and nothing has changed.
        """
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        numbers = state.check(given, self.param_groups, self.rank, self.world_size)
        self.optim.load_state_dict(self._local_dict(given, numbers))
        _sync(self.optim.param_groups, self.param_groups)
        self._consolidated = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _local_dict(self, given: Mapping[str, Any], numbers: list[list[int]]) -> dict[str, Any]:
        """Return what the local optimizer loads: this rank's parameters, numbered as it numbers them."""
        number_of = {
            parameter: number
            for group, ours in zip(self.param_groups, numbers, strict=True)
            for parameter, number in zip(group["params"], ours, strict=True)
        }
        local: dict[int, dict[str, Any]] = {}
        groups = []
        at = 0
        for saved, group in zip(given["param_groups"], self.optim.param_groups, strict=True):
            for position, parameter in enumerate(group["params"], at):
                values = given["state"].get(number_of[parameter])
                if values:
                    local[position] = {key: _copied(value) for key, value in values.items()}
            mine = {key: value for key, value in saved.items() if key not in _OWN_KEYS}
            names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
            groups.append({**mine, **names, "params": list(range(at, at + len(group["params"])))})
            at += len(group["params"])
        return {"state": local, "param_groups": groups}

    # --- what cannot be

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_BOUND)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_BOUND)


_BOUND = (
    "a ZeroRedundancyOptimizer is bound to its process group and cannot be copied or pickled: make a new one of the "
    "copied parameters and give it this one's state_dict()"
)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    return group


def _part(group: Group, chosen: list[int]) -> Group:
    """Return a param group with some of its parameters."""
    made = {key: value for key, value in group.items() if key not in _OWN_KEYS}
    made["params"] = [group["params"][index] for index in chosen]
    if "param_names" in group:
        made["param_names"] = [group["param_names"][index] for index in chosen]
    return made


def _sync(source: list[Group], target: list[Group]) -> None:
    """Give groups the hyperparameters of others."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update({key: value for key, value in theirs.items() if key not in _OWN_KEYS})


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
