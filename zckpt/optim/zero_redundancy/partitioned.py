"""Which rank has which parameters of each param group, and its local optimizer of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group, copied, selected
from zckpt.optim.zero_redundancy import exchange
from zckpt.optim.zero_redundancy.buckets import OverlapInfo, OverlapStatus
from zckpt.state.partition import greedy_partition


def packed(groups: Sequence[Group]) -> list[Group]:
    """Return groups with numbers for parameters, over all groups; values that could be written to are copied."""
    found = []
    first = 0
    for group in groups:
        made = {key: copied(value) for key, value in group.items() if key != "params"}
        found.append({**made, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return found


def groups_of_ranks(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    """Return the groups of each rank, as `zckpt.state.partition.greedy_partition` assigns parameters."""
    numels = [[p.numel() for p in group["params"]] for group in groups]
    return [
        [selected(group, chosen) for group, chosen in zip(groups, indices, strict=True)]
        for indices in greedy_partition(numels, world_size)
    ]


def groups_of_shares(groups: Sequence[Group], shares: Sequence[Sequence[torch.Tensor]]) -> list[list[Group]]:
    """Return the groups of each rank where the ranks' shares are given; parameters in none of them are rank 0's."""
    owner = {parameter: rank for rank, share in enumerate(shares) for parameter in share}
    order = {parameter: position for share in shares for position, parameter in enumerate(share)}
    found: list[list[Group]] = [[] for _ in shares]
    for group in groups:
        members = group["params"]
        indices = sorted(range(len(members)), key=lambda i, members=members: order.get(members[i], len(order)))  # type: ignore[misc]
        for rank, made in enumerate(found):
            made.append(selected(group, [i for i in indices if owner.get(members[i], 0) == rank]))
    return found


class PartitionedOptimizer(Optimizer, Joinable):
    """Param groups that all ranks know, and a local optimizer of this rank's share of their parameters."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None,
        parameters_as_bucket_view: bool,
        overlap_with_ddp: bool,
        defaults: dict[str, Any],
    ) -> None:
        given = param_groups.read_groups(params)
        self.initialized = False
        self._all_params: list[torch.Tensor] = []
        self._local_state: Any = {}
        Joinable.__init__(self)
        self.process_group = param_groups.read_process_group(process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = OverlapInfo(self.world_size)
        self._optim_constructor = optimizer_class
        self._optim_defaults = defaults
        self._is_greedy = True
        self._forget()
        Optimizer.__init__(self, given, dict(defaults))
        self._default_device = self._all_params[0].device
        self._trained: set[torch.Tensor] = set()
        self._init_local_optimizer()
        self._note_trained()
        self._build_buckets()
        self.initialized = True

    # --- which rank has what

    def _forget(self) -> None:
        """Forget what follows from the param groups."""
        self._partition: list[list[Group]] | None = None
        self._exchange: exchange.Exchange | None = None
        for cached in ("_param_to_rank", "_param_to_index"):
            self.__dict__.pop(cached, None)

    def _partition_parameters(self) -> list[list[Group]]:
        """Return the param groups of each rank."""
        if self._partition is None:
            self._partition = groups_of_ranks(self.param_groups, self.world_size)
        return self._partition

    @cached_property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """The rank that steps each parameter."""
        return {
            parameter: rank
            for rank, groups in enumerate(self._partition_parameters())
            for group in groups
            for parameter in group["params"]
        }

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        """Parameters by number: position over all groups, in order."""
        return list(self._param_to_index)

    @cached_property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        """The number of each parameter."""
        every = chain.from_iterable(group["params"] for group in self.param_groups)
        return {parameter: index for index, parameter in enumerate(every)}

    @property
    def shares(self) -> list[int]:
        """Elements that each rank steps; a step takes as long as the largest share."""
        return [sum(p.numel() for group in groups for p in group["params"]) for groups in self._partition_parameters()]

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its parameters are assigned to ranks, and those of earlier groups stay where they are.

        All ranks must add the same.

        Raises
        ------
        RuntimeError
            Parameters are not where they were assigned at first: DDP's buckets, or a part that was loaded, decided.
        """
        if self.initialized and (self._overlap_info.status != OverlapStatus.UNINITIALIZED or not self._is_greedy):
            raise RuntimeError(
                "a param group cannot be added once the buckets of DDP, or a part that was loaded, have decided which "
                "rank has which parameter"
            )
        super().add_param_group(param_groups.read_group(param_group))
        self._all_params.extend(self.param_groups[-1]["params"])
        if self.initialized:
            self._forget()
            self.optim.add_param_group(dict(self._partition_parameters()[self.rank][-1]))
            param_groups.sync(self.optim.param_groups, self.param_groups)
            self._note_trained()
            self._build_buckets()

    def _init_local_optimizer(self) -> None:
        own = [dict(group) for group in self._partition_parameters()[self.rank]]
        self.optim = self._optim_constructor(own, **self._optim_defaults)
        if not isinstance(self.optim, Optimizer):
            raise ValueError(  # noqa: TRY004  # as torch
                f"optimizer_class must make a torch.optim.Optimizer, not {torch.typename(self.optim)}; functional "
                f"optimizers are not needed to overlap"
            )
        self.defaults = {**self.optim.defaults, **self.defaults}
        param_groups.sync(self.optim.param_groups, self.param_groups)

    _sync_param_groups = staticmethod(param_groups.sync)

    @property
    def state(self) -> Any:
        """State of this rank's parameters: that of its local optimizer."""
        optimizer = self.__dict__.get("optim")
        return self._local_state if optimizer is None else optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if "optim" in self.__dict__:
            self.optim.state = value
        else:
            self._local_state = value

    def _repartition(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        """Assign all parameters to ranks again, and make a local optimizer without state."""
        self._forget()
        self._is_greedy = False
        self._partition = groups_of_shares(self.param_groups, shares)
        self._init_local_optimizer()
        self._build_buckets()

    def _about_groups(self, preferred: int = 0) -> tuple[dict[int, Group], list[int]]:
        """Return the hyperparameters that this rank sends to others, by group, and the rank that sends each group's.

        Some optimizers count steps in a group and pass over empty ones: a rank that has parameters of it knows.
        """
        partition = self._partition_parameters()
        ranks = (preferred, *range(self.world_size))
        holders = [
            next((rank for rank in ranks if partition[rank][index]["params"]), preferred)
            for index in range(len(self.param_groups))
        ]
        every = enumerate(zip(self.param_groups, holders, strict=True))
        return {i: param_groups.plain(group) for i, (group, holder) in every if holder == self.rank}, holders

    # --- what is exchanged

    def _note_trained(self) -> None:
        """Take parameters that are trained, or have a gradient all the same, into what is exchanged."""
        new = {p for p in self._all_params if p not in self._trained and (p.requires_grad or p.grad is not None)}
        if new:
            self._trained |= new
            self._exchange = None

    def _build_buckets(self) -> None:
        """Move parameters into buckets, if they are to be views of these."""
        if self.parameters_as_bucket_view:
            self._exchange = self._make_exchange()

    def _make_exchange(self) -> exchange.Exchange:
        shares = [
            [p for group in groups for p in group["params"] if p in self._trained]
            for groups in self._partition_parameters()
        ]
        if not self.parameters_as_bucket_view:
            return exchange.plain_exchange(shares)
        gather = exchange.wire_device(self.process_group).type != "cpu"
        return exchange.bucket_view_exchange(shares, gather=gather)

    # --- what joins with others

    @property
    def join_device(self) -> torch.device:
        """Device of the first parameter."""
        return self._default_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group

    # --- what cannot be

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_BOUND)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_BOUND)


_BOUND = (
    "a ZeroRedundancyOptimizer is bound to its process group and cannot be copied or pickled: make a new one of the "
    "copied parameters and give it this one's state_dict()"
)
