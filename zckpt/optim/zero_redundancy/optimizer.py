"""The optimizer: which rank steps which parameter, its local optimizer, the step, and state dicts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zckpt.optim.zero_redundancy import arguments, consolidation, exchange, groups, sharded, state
from zckpt.optim.zero_redundancy.groups import Group
from zckpt.optim.zero_redundancy.overlap import BucketAssignment, OverlapInfo, OverlapStatus, assign, flatten

logger = logging.getLogger(__name__)


class _StepHook(JoinHook):
    """Steps along with ranks that still have inputs."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Step this rank's share and take part in the exchange; DDP's own join hook does where it overlaps."""
        if not self.optimizer._overlap_with_ddp:
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
    one, now or at an earlier step: trainability must change at the same step on all ranks. Constructor, `step`,
    `add_param_group`, `consolidate_state_dict` and `load_state_dict` of all ranks must come in the same order.
    An `optimizer_class` whose step looks at all parameters together, as LBFGS does, sees its rank's share only.
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
        given = arguments.read_groups(params)
        self.initialized = False
        self._all_params: list[torch.Tensor] = []
        self._local_state: Any = {}
        Joinable.__init__(self)
        self.process_group = arguments.read_process_group(process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = OverlapInfo(self.world_size)
        self._bucket_assignments: list[dict[int, BucketAssignment]] = []
        self._stepped: dict[int, Group] = {}
        self._step_lock = threading.Lock()
        self._optim_constructor = optimizer_class
        self._optim_defaults = defaults
        self._consolidated: dict[str, Any] | None = None
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
        self._ranks: dict[torch.Tensor, int] | None = None
        self._indices: dict[torch.Tensor, int] | None = None
        self._exchange: exchange.Exchange | None = None

    def _partition_parameters(self) -> list[list[Group]]:
        """Return the param groups of each rank."""
        if self._partition is None:
            self._partition = groups.deal(self.param_groups, self.world_size)
        return self._partition

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """The rank that steps each parameter."""
        if self._ranks is None:
            self._ranks = {
                parameter: rank
                for rank, dealt in enumerate(self._partition_parameters())
                for group in dealt
                for parameter in group["params"]
            }
        return self._ranks

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        """Parameters by number: position over all groups, in order."""
        return list(self._param_to_index)

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        """The number of each parameter."""
        if self._indices is None:
            every = chain.from_iterable(group["params"] for group in self.param_groups)
            self._indices = {parameter: index for index, parameter in enumerate(every)}
        return self._indices

    @property
    def shares(self) -> list[int]:
        """Elements that each rank steps; a step takes as long as the largest share."""
        return [sum(p.numel() for group in dealt for p in group["params"]) for dealt in self._partition_parameters()]

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its parameters are dealt to the ranks, and those of earlier groups stay where they are.

        All ranks must add the same.

        Raises
        ------
        RuntimeError
            Parameters are not where they were dealt at first: DDP's buckets, or a part that was loaded, decided.
        """
        if self.initialized and (self._overlap_info.status != OverlapStatus.UNINITIALIZED or not self._is_greedy):
            raise RuntimeError(
                "a param group cannot be added once the buckets of DDP, or a part that was loaded, have decided which "
                "rank has which parameter"
            )
        super().add_param_group(arguments.read_group(param_group))
        self._all_params.extend(self.param_groups[-1]["params"])
        if self.initialized:
            self._forget()
            self.optim.add_param_group(dict(self._partition_parameters()[self.rank][-1]))
            groups.sync(self.optim.param_groups, self.param_groups)
            self._note_trained()
            self._build_buckets()

    def _init_local_optimizer(self) -> None:
        dealt = [dict(group) for group in self._partition_parameters()[self.rank]]
        self.optim = self._optim_constructor(dealt, **self._optim_defaults)
        if not isinstance(self.optim, Optimizer):
            raise ValueError(
                f"optimizer_class must make a torch.optim.Optimizer, not {torch.typename(self.optim)}; functional "
                f"optimizers are not needed to overlap"
            )
        self.defaults = {**self.optim.defaults, **self.defaults}
        groups.sync(self.optim.param_groups, self.param_groups)

    _sync_param_groups = staticmethod(groups.sync)

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
        Join.notify_join_context(self)
        if gradients is not None:
            mine = [p for group in self.optim.param_groups for p in group["params"]]
            self._step_gradients({p: g for p, g in zip(mine, gradients, strict=True) if g is not None})
            self._end_step()
            return None
        self._note_trained()
        groups.sync(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        groups.sync(self.optim.param_groups, self.param_groups)
        return loss

    def _step_gradients(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step those of this rank's parameters that have one of these gradients; `grad` of none is changed.

        Every such part of a step begins with the hyperparameters that the step began with: an optimizer that counts
        its steps in its param groups counts one. `_end_step` makes what has become of them known.
        """
        with self._step_lock:
            groups.sync(self.param_groups, self.optim.param_groups)
            every = self.optim.param_groups
            kept = [group["params"] for group in every]
            before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            try:
                for group in every:
                    group["params"] = [p for p in group["params"] if p in gradients]
                    before += [(p, p.grad) for p in group["params"]]
                for parameter, _ in before:
                    parameter.grad = gradients[parameter]
                self.optim.param_groups = [group for group in every if group["params"]]
                if before:
                    self.optim.step()
                self._stepped |= {i: groups.hyperparameters(group) for i, group in enumerate(every) if group["params"]}
            finally:
                self.optim.param_groups = every
                for parameter, gradient in before:
                    parameter.grad = gradient
                for group, parameters in zip(every, kept, strict=True):
                    group["params"] = parameters

    def _end_step(self) -> None:
        """Take over what the local optimizer has made of hyperparameters in the parts of a step."""
        for index, values in self._stepped.items():
            self.param_groups[index].update(values)
        self._stepped.clear()

    def _note_trained(self) -> None:
        """Take parameters that are trained, or have a gradient all the same, into what is exchanged."""
        new = {p for p in self._all_params if p not in self._trained and (p.requires_grad or p.grad is not None)}
        if new:
            self._trained |= new
            self._exchange = None

    def _build_buckets(self) -> None:
        """Move parameters into buckets, if that is wanted."""
        if self.parameters_as_bucket_view:
            self._exchange = self._make_exchange()

    def _make_exchange(self) -> exchange.Exchange:
        shares = [
            [p for group in dealt for p in group["params"] if p in self._trained]
            for dealt in self._partition_parameters()
        ]
        return (exchange.bucket_view_exchange if self.parameters_as_bucket_view else exchange.plain_exchange)(shares)

    def _sync_params(self) -> None:
        if self._exchange is None or not self._exchange.is_intact():
            self._exchange = self._make_exchange()
        exchange.run(self._exchange, self.process_group, self.rank, self.world_size)

    # --- overlap with DDP

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, BucketAssignment]]:
        """Which rank steps which part of which bucket of DDP; empty until that is known."""
        return self._bucket_assignments

    def _init_zero_for_overlap(self) -> None:
        """Deal the buckets of DDP to the ranks, and move state to where it is needed from now on."""
        info = self._overlap_info
        self._bucket_assignments = assign(info, self.rank)
        for assignments in self._bucket_assignments:
            for assignment in assignments.values():
                flatten(assignment)
        before = self._param_to_rank
        held = self._local_part()
        self._repartition(info.params_per_rank)
        parameters, after = self._index_to_param, self._param_to_rank
        moved = consolidation.move(
            held, parameters, [before[p] for p in parameters], [after[p] for p in parameters], self.process_group
        )
        for number, values in moved.items():
            self.optim.state[parameters[number]] = values
        info.status = OverlapStatus.INITIALIZED

    def _repartition(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        """Deal all parameters anew, and make the local optimizer anew, without state."""
        self._forget()
        self._is_greedy = False
        self._partition = groups.deal_to(self.param_groups, shares)
        self._init_local_optimizer()
        self._build_buckets()

    # --- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002  # for all that join together
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
        self._consolidated = None
        groups.sync(self.param_groups, self.optim.param_groups)
        holder = [self._holder(index, to) for index in range(len(self.param_groups))]
        about = {i: self._values(group) for i, group in enumerate(self.param_groups) if holder[i] == self.rank}
        collected = consolidation.collect(self._local_part(), about, self.process_group, to)
        if collected is not None:
            whole, told = collected
            made = groups.packed(self.param_groups)
            for index, group in enumerate(made):
                group.update(told[holder[index]][index])
            self._consolidated = {"state": whole, "param_groups": made}

    def _holder(self, index: int, to: int) -> int:
        """Return the rank that knows a group's hyperparameters: `to`, or where that has no parameters one that has.

        Some optimizers count steps in a group, and pass over empty ones.
        """
        dealt = self._partition_parameters()
        return next((rank for rank in (to, *range(self.world_size)) if dealt[rank][index]["params"]), to)

    @staticmethod
    def _values(group: Group) -> Group:
        """Return those hyperparameters that are no tensors; tensors are given by the user, on all ranks."""
        return {k: v for k, v in groups.hyperparameters(group).items() if not isinstance(v, torch.Tensor)}

    def release_state_dict(self) -> None:
        """Let go of the consolidated copy; `state_dict()` is then this rank's own part again."""
        self._consolidated = None

    def _local_part(self) -> dict[int, dict[str, Any]]:
        """Return this rank's state by global parameter number."""
        numbers = self._param_to_index
        held = {numbers[p]: dict(values) for p, values in self.optim.state.items() if p in numbers}
        return {number: held[number] for number in sorted(held)}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as of the last `consolidate_state_dict` to this rank, else this rank's own part.

        Both are numbered over all parameters. The part has the key `partition`; the same rank of as many loads it.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._consolidated is not None:
            made = {
                "state": {number: dict(values) for number, values in self._consolidated["state"].items()},
                "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
            }
        else:
            ranks = [self._param_to_rank[parameter] for parameter in self._index_to_param]
            made = {
                "state": self._local_part(),
                "param_groups": groups.packed(self.param_groups),
                state.PARTITION: state.part_of(self.rank, self.world_size, ranks),
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
            Of this class, of torch's, or of the unsharded optimizer, whole; or this rank's own part, with which all
            ranks take over which of them has which parameter. It is not written to, and nothing of it is kept. State
            that it does not have is cleared.

        Raises
        ------
        ValueError
            It is that of another optimizer; the message names what differs, and nothing has changed.
        """
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        numbers = state.check(given, self.param_groups)
        ranks = state.saved_ranks(given, numbers, self.rank, self.world_size)
        if ranks is not None and ranks != self._param_to_rank:
            if self._overlap_info.status != OverlapStatus.UNINITIALIZED:
                raise ValueError(
                    "the part was saved when ranks had other parameters than the buckets of DDP give them now: load "
                    "it before the first iteration, or save with sharded_state_dict()"
                )
            self._repartition([[p for p in ranks if ranks[p] == rank] for rank in range(self.world_size)])
        self.optim.load_state_dict(state.local_dict(given, numbers, self.optim.param_groups))
        groups.sync(self.optim.param_groups, self.param_groups)
        self._consolidated = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def sharded_state_dict(self, metadata: Metadata | None = None, *, within: Sequence[str] = ()) -> dict[str, Any]:
        """Return this rank's state for `torch.distributed.checkpoint`, which every rank saves its own of.

        Parameters
        ----------
        metadata : Metadata, optional
            Of a DCP checkpoint: the dict then has room for what that has of this rank's parameters, and nothing else.
            Without it, what this rank has: an optimizer that has not stepped has no state to read into.
        within : sequence of str
            The keys under which the checkpoint has the optimizer: ("optimizer",) for {"optimizer": {...}}.

        Raises
        ------
        ValueError
            The checkpoint has no optimizer there.
        """
        groups.sync(self.param_groups, self.optim.param_groups)
        own = {number: p for p, number in self._param_to_index.items() if self._param_to_rank[p] == self.rank}
        if metadata is not None:
            return sharded.room(metadata, within, self.param_groups, own)
        held = self._local_part()
        return sharded.sharded(self.param_groups, {number: held.get(number, {}) for number in own})

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `torch.distributed.checkpoint` has read into `sharded_state_dict()`, at any world size.

        Raises
        ------
        ValueError
            It is of other parameters, or lacks state that was saved; the message names what differs.
        """
        own = [number for p, number in self._param_to_index.items() if self._param_to_rank[p] == self.rank]
        self.load_state_dict(sharded.numbered(state_dict, self.param_groups, own))

    # --- what cannot be

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_BOUND)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_BOUND)


_BOUND = (
    "a ZeroRedundancyOptimizer is bound to its process group and cannot be copied or pickled: make a new one of the "
    "copied parameters and give it this one's state_dict()"
)
