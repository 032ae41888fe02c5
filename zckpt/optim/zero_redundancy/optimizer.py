"""The optimizer: which rank has which parameters, the step, after backward or along with it, and state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group, numbered, parameters_of, selected
from zckpt.optim.sharded import ShardedOptimizer
from zckpt.optim.tensors import with_gradients
from zckpt.optim.zero_redundancy import exchange, state_dicts
from zckpt.optim.zero_redundancy.exchange import BucketAssignment, OverlapInfo, OverlapStatus, assign
from zckpt.optim.zero_redundancy.state_dicts import PARTITION, GroupOfPart
from zckpt.state import positions
from zckpt.state.partition import greedy_partition

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(ShardedOptimizer):
    """An optimizer whose state is sharded over ranks; each rank steps some of the parameters for all.

    Parameters
    ----------
    params : iterable
        Tensors, (name, tensor) pairs, or dicts of param groups, as in `torch.optim`; in the same order on all ranks.
    optimizer_class : type
        A `torch.optim.Optimizer` that steps each rank's share.
    process_group : ProcessGroup, optional
        Default: the whole world.
    parameters_as_bucket_view : bool
        Make parameters views of flat buckets, one per rank, which are then sent without packing.
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
    The partition is that of torch's class of this name: see `zckpt.state.partition.greedy_partition`. Parameters can
    have several devices and element types. After a step, ranks send the parameters that require or have a gradient, now
    or at an earlier step, so trainability must change at the same step on all ranks. All ranks must call the
    constructor, `step`, `add_param_group`, `consolidate_state_dict` and `load_state_dict` in the same order. An
    `optimizer_class` whose step looks at all parameters together, such as LBFGS, only sees its rank's share.
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
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._overlap_with_ddp = overlap_with_ddp
        self._bucket_assignments_per_rank: list[dict[int, BucketAssignment]] = []
        """Which rank steps which share of which bucket of DDP; empty until that is known."""
        self._trained: set[torch.Tensor] = set()
        self._stepped: dict[int, Group] = {}
        self._step_lock = threading.Lock()
        self._consolidated: dict[str, Any] | None = None
        self._forget()
        super().__init__(params, optimizer_class, process_group, defaults)
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self._overlap_info = OverlapInfo(self.world_size)
        self._note_trained()
        self._settle()
        self._is_made = True

    # --- which rank has what

    def _forget(self) -> None:
        """Forget what follows from the param groups."""
        self._partition: list[list[Group]] | None = None
        self._is_greedy = True
        self._exchange: exchange.Exchange | None = None
        for cached in ("_param_to_rank", "_param_to_index"):
            self.__dict__.pop(cached, None)

    def _partition_parameters(self) -> list[list[Group]]:
        """Return the param groups of each rank."""
        if self._partition is None:
            numels = [[p.numel() for p in group["params"]] for group in self.param_groups]
            self._partition = self._groups_of(greedy_partition(numels, self.world_size))
        return self._partition

    def _groups_of(self, chosen: Iterable[Sequence[Sequence[int]]]) -> list[list[Group]]:
        """Return the groups of each rank, which has these parameters of each."""
        return [list(map(selected, self.param_groups, indices)) for indices in chosen]

    def _repartition(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        """Assign all parameters to ranks again, those in none of the shares to the first; state is forgotten."""
        self._forget()
        self._is_greedy = False
        taken = {parameter for share in shares for parameter in share}
        rest = [parameter for parameter in self._all_params if parameter not in taken]
        where = [positions(group["params"]) for group in self.param_groups]
        self._partition = self._groups_of(
            [[at[p] for p in share if p in at] for at in where]  # DDP may have others
            for share in ([*shares[0], *rest], *shares[1:])
        )
        self._settle()

    def _settle(self) -> None:
        """Make a local optimizer, without state, of what this rank has, and buckets, if parameters are views."""
        self._make_local([dict(group) for group in self._partition_parameters()[self.rank]])
        if self.parameters_as_bucket_view:
            self._exchange = self._make_exchange()

    @cached_property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """The rank that steps each parameter."""
        return {p: rank for rank, groups in enumerate(self._partition_parameters()) for p in parameters_of(groups)}

    @property
    def _all_params(self) -> list[torch.Tensor]:
        """Parameters by number: position over all groups, in order."""
        return parameters_of(self.param_groups)

    _index_to_param = _all_params

    @cached_property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        """The number of each parameter."""
        return positions(self._all_params)

    @property
    def shares(self) -> list[int]:
        """Number of elements that each rank steps; a step takes as long as the largest share."""
        return [sum(p.numel() for p in parameters_of(groups)) for groups in self._partition_parameters()]

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group and assign its parameters to ranks; earlier groups stay where they are.

        All ranks must add the same.

        Raises
        ------
        RuntimeError
            DDP's buckets, or loaded state, have reassigned parameters.
        """
        if self._is_made and (self._overlap_info.status != OverlapStatus.UNINITIALIZED or not self._is_greedy):
            raise RuntimeError(
                "a param group cannot be added after DDP's buckets, or loaded state, have assigned parameters to ranks"
            )
        super().add_param_group(param_groups.read_group(param_group))
        if self._is_made:
            self._forget()
            self.optim.add_param_group(dict(self._partition_parameters()[self.rank][-1]))
            self._from_local()
            self._note_trained()
            if self.parameters_as_bucket_view:
                self._exchange = self._make_exchange()

    def _moved(
        self, after: Sequence[int], preferred: int = 0, devices: Sequence[torch.device] | None = None
    ) -> tuple[exchange.State, list[Group]]:
        """Send state to where it is to be; return what this rank gets, and each group's hyperparameters.

        Some optimizers count steps in a group and pass over empty ones: a rank that has parameters of it says them.
        """
        partition, ranks = self._partition_parameters(), (preferred, *range(self.world_size))
        every = list(enumerate(self.param_groups))
        holders = [next((r for r in ranks if partition[r][index]["params"]), preferred) for index, _ in every]
        about = {index: param_groups.plain(group) for index, group in every if holders[index] == self.rank}
        before = [self._param_to_rank[parameter] for parameter in self._index_to_param]
        moved, told = exchange.move(self._local_part(), about, before, after, self.process_group, devices)
        return moved, [told[holder][index] for index, holder in enumerate(holders)]

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
        """Step this rank's share and send nothing.

        With `gradients`, one for each of its parameters in order, those are used and parameters without one left alone.
        """
        Join.notify_join_context(self)
        if gradients is not None:
            mine = parameters_of(self.optim.param_groups)
            self._step_gradients({p: g for p, g in zip(mine, gradients, strict=True) if g is not None})
            self._end_step()
            return None
        if not self._join_config.enable:
            return self._step_share(closure, **kwargs)
        loss = None  # ranks that have run out of inputs need the gradients of their shares
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_gradients(has_inputs=True)
        returned = self._step_share(**kwargs)
        return returned if closure is None else loss

    def _step_share(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        self._note_trained()
        self._to_local()
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        self._from_local()
        return loss

    def _step_gradients(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step those of this rank's parameters that have one of these gradients; `grad` of none is changed.

        Each call for one step begins with the hyperparameters that the step began with: an optimizer that counts its
        steps in its param groups counts one. `_end_step` makes what has become of them known.
        """
        with self._step_lock:
            self._to_local()
            every = self.optim.param_groups
            kept = [group["params"] for group in every]
            mine = {p: gradients[p] for its in kept for p in its if p in gradients}
            try:
                for group in every:
                    group["params"] = [p for p in group["params"] if p in mine]
                self.optim.param_groups = [group for group in every if group["params"]]
                if mine:
                    with with_gradients(mine):
                        self.optim.step()
                self._stepped |= {
                    i: param_groups.hyperparameters(group) for i, group in enumerate(every) if group["params"]
                }
            finally:
                self.optim.param_groups = every
                for group, parameters in zip(every, kept, strict=True):
                    group["params"] = parameters

    def _end_step(self) -> None:
        """Take the hyperparameters that the local optimizer has left after all calls of a step."""
        for index, values in self._stepped.items():
            self.param_groups[index].update(values)
        self._stepped.clear()

    # --- what is exchanged

    def _note_trained(self) -> None:
        """Take parameters that are trained, or have a gradient all the same, into what is exchanged."""
        new = {p for p in self._all_params if p not in self._trained and (p.requires_grad or p.grad is not None)}
        if new:
            self._trained |= new
            self._exchange = None

    def _make_exchange(self) -> exchange.Exchange:
        shares = [[p for p in parameters_of(its) if p in self._trained] for its in self._partition_parameters()]
        if not self.parameters_as_bucket_view:
            return exchange.plain_exchange(shares)
        gather = exchange.wire_device(self.process_group).type != "cpu"
        return exchange.bucket_view_exchange(shares, gather=gather)

    def _sync_params(self) -> None:
        if self._exchange is None or not self._exchange.is_intact():
            self._exchange = self._make_exchange()
        exchange.run(self._exchange, self.process_group, self.rank, self.world_size)

    # --- overlap with DDP

    def _init_zero_for_overlap(self) -> None:
        """Assign the buckets of DDP to ranks, and move state to where it is needed from now on."""
        info = self._overlap_info
        self._bucket_assignments_per_rank = assign(info, self.rank)
        for assignments in self._bucket_assignments_per_rank:
            for assignment in assignments.values():
                assignment.flattened()
        after = {parameter: rank for rank, its in enumerate(info.params_per_rank) for parameter in its}
        parameters = self._index_to_param
        moved, settings = self._moved([after.get(p, 0) for p in parameters], devices=[p.device for p in parameters])
        self._repartition(info.params_per_rank)
        param_groups.sync(settings, self.param_groups)
        for number, values in moved.items():
            self.optim.state[parameters[number]] = values
        info.status = OverlapStatus.INITIALIZED

    # --- uneven inputs

    def main_hook(self) -> None:
        """Step without inputs; if the step overlaps, DDP's own join hook does it."""
        if not self._overlap_with_ddp:
            self._give_gradients(has_inputs=False)
            self._step_share()
            self._sync_params()

    def _give_gradients(self, *, has_inputs: bool) -> None:
        """Let the first rank that has inputs give the others, which have old gradients, those of their shares."""
        device = exchange.wire_device(self.process_group)
        gathered = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(self.world_size)]
        mine = torch.tensor([int(has_inputs)], dtype=torch.int32, device=device)
        dist.all_gather(gathered, mine, group=self.process_group)
        active = {rank for rank, one in enumerate(gathered) if one.item()}
        if len(active) == self.world_size:
            return
        parameters, first = self._index_to_param, min(active)
        after = [self._param_to_rank[parameter] for parameter in parameters]
        given = {
            number: {"grad": parameter.grad}
            for number, parameter in enumerate(parameters)
            if self.rank == first and after[number] not in active and parameter.grad is not None
        }
        devices = [parameter.device for parameter in parameters]
        moved, _ = exchange.move(given, None, [first] * len(after), after, self.process_group, devices)
        for number, parameter in enumerate(parameters):
            if self.rank in active or after[number] != self.rank:
                continue
            if parameter.grad is None or number not in moved:
                parameter.grad = moved.get(number, {}).get("grad")
            else:  # it may be a view of a bucket
                parameter.grad.copy_(moved[number]["grad"])

    # --- state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on one rank, whose `state_dict()` then returns it. Called on all ranks.

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
        self._to_local()
        whole, settings = self._moved([to] * len(self._index_to_param), to)
        if self.rank == to:
            made = numbered(self.param_groups)
            param_groups.sync(settings, made)
            self._consolidated = {"state": whole, "param_groups": made}

    def release_state_dict(self) -> None:
        """Release the consolidated copy; `state_dict()` is then this rank's own part again."""
        self._consolidated = None

    def _local_part(self) -> dict[int, dict[str, Any]]:
        """Return this rank's state by global parameter number."""
        numbers = self._param_to_index
        held = {numbers[p]: dict(values) for p, values in self.optim.state.items() if p in numbers}
        return {number: held[number] for number in sorted(held)}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state from the last `consolidate_state_dict` to this rank, or else this rank's own part.

        Both are numbered over all parameters. The part has the key `partition`; only the same rank of the same number
        can load it.
        """
        self._through(self._optimizer_state_dict_pre_hooks)
        if self._consolidated is not None:
            made = {
                "state": {number: dict(values) for number, values in self._consolidated["state"].items()},
                "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
            }
        else:
            ranks = [self._param_to_rank[parameter] for parameter in self._index_to_param]
            made = {
                "state": self._local_part(),
                "param_groups": [GroupOfPart(group) for group in numbered(self.param_groups)],
                PARTITION: {"rank": self.rank, "world_size": self.world_size, "ranks": ranks},
            }
        whole: dict[str, Any] = self._through(self._optimizer_state_dict_post_hooks, made)
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part from the state dict of any optimizer with the same parameters.

        Parameters
        ----------
        state_dict : mapping
            The whole state from this class, torch's, or the unsharded optimizer; or this rank's own part, which also
            restores which rank has which parameter. It is not modified, and nothing of it is kept. State that it lacks
            is cleared.

        Raises
        ------
        ValueError
            It belongs to another optimizer; the message names what differs, and nothing has changed.
        """
        given = self._through(self._optimizer_load_state_dict_pre_hooks, dict(state_dict))
        numbers = state_dicts.check(given, self.param_groups)
        ranks = state_dicts.saved_ranks(given, numbers, self.rank, self.world_size)
        if ranks is not None and ranks != self._param_to_rank:
            if self._overlap_info.status != OverlapStatus.UNINITIALIZED:
                raise ValueError(
                    "when this part was saved, ranks had other parameters than DDP's buckets assign now: load it "
                    "before the first iteration, or save with sharded_state_dict()"
                )
            self._repartition([[p for p in ranks if ranks[p] == rank] for rank in range(self.world_size)])
        self.optim.load_state_dict(param_groups.local_dict(given, numbers, self.optim.param_groups))
        self._from_local()
        self._consolidated = None
        self._through(self._optimizer_load_state_dict_post_hooks)

    def sharded_state_dict(self, metadata: Metadata | None = None, *, within: Sequence[str] = ()) -> dict[str, Any]:
        """Return this rank's state for `torch.distributed.checkpoint`; every rank saves its own.

        Parameters
        ----------
        metadata : Metadata, optional
            Metadata of a DCP checkpoint: the dict then has room for exactly its state for this rank's parameters.
            Without it, the dict holds what this rank has: an optimizer that has not stepped has no state to read into.
        within : sequence of str
            The keys under which the checkpoint has the optimizer: ("optimizer",) for {"optimizer": {...}}.

        Raises
        ------
        ValueError
            The checkpoint has no optimizer there.
        """
        self._to_local()
        own = {number: p for p, number in self._param_to_index.items() if self._param_to_rank[p] == self.rank}
        if metadata is not None:
            return state_dicts.room(metadata, within, self.param_groups, own)
        held = self._local_part()
        return state_dicts.sharded(self.param_groups, {number: held.get(number, {}) for number in own})

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `torch.distributed.checkpoint` has read into `sharded_state_dict()`, at any world size.

        Raises
        ------
        ValueError
            It is for other parameters, or lacks saved state; the message names what differs.
        """
        own = [number for p, number in self._param_to_index.items() if self._param_to_rank[p] == self.rank]
        self.load_state_dict(state_dicts.numbered(state_dict, self.param_groups, own))
