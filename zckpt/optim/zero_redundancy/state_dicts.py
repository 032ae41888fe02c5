"""State dicts of an optimizer in parts: a rank's own, the whole, and what `torch.distributed.checkpoint` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from zckpt.optim import param_groups
from zckpt.optim.zero_redundancy import consolidation, groups, sharded, state
from zckpt.optim.zero_redundancy.overlap import OverlapStatus
from zckpt.optim.zero_redundancy.partitioned import PartitionedOptimizer


class StateDictOptimizer(PartitionedOptimizer):
    """What gives state away and takes it in."""

    _consolidated: dict[str, Any] | None = None

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
        param_groups.sync(self.param_groups, self.optim.param_groups)
        about, holders = self._about_groups(to)
        collected = consolidation.collect(self._local_part(), about, self.process_group, to)
        if collected is not None:
            whole, told = collected
            made = groups.packed(self.param_groups)
            for index, holder in enumerate(holders):
                made[index].update(told[holder][index])
            self._consolidated = {"state": whole, "param_groups": made}

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
                "param_groups": [state.GroupOfPart(group) for group in groups.packed(self.param_groups)],
                state.PARTITION: state.part_of(self.rank, self.world_size, ranks),
            }
        for change in self._optimizer_state_dict_post_hooks.values():
            made = change(self, made) or made
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
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            given = change(self, given) or given
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
        param_groups.sync(self.optim.param_groups, self.param_groups)
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
        param_groups.sync(self.param_groups, self.optim.param_groups)
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
