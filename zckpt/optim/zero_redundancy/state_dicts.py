"""State dicts of a sharded optimizer: a rank's own part, the whole, and what one that is loaded must be.

{"state": {number: {key: value}}, "param_groups": [{..., "params": [number]}]}     as torch.optim has it
{..., "partition": {"rank": r, "world_size": n, "ranks": [rank]}}                  one rank's own part

Numbers are positions over all groups. `ranks` has the rank of each parameter. Whatever is wrong with a dict, it is a
ValueError, as in torch.optim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from zckpt.errors import UnsupportedError
from zckpt.optim import param_groups
from zckpt.optim.memory import copied_like
from zckpt.optim.param_groups import Group, copied, hyperparameters
from zckpt.optim.zero_redundancy import consolidation, sharded
from zckpt.optim.zero_redundancy.overlap import OverlapStatus
from zckpt.optim.zero_redundancy.partitioned import PartitionedOptimizer, packed
from zckpt.optim.zero_redundancy.sharded import SHOWN

PARTITION = "partition"
"""Key that only a rank's own part has."""


class GroupOfPart(Group):
    """A param group of one rank's own part, which nobody may take for that of the whole. Copies and pickles are free.

    `get_state_dict` of torch.distributed.checkpoint gives each group's parameters their names, and forgets of what the
    state is a part.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise UnsupportedError(
                "state_dict() is this rank's own part of a ZeroRedundancyOptimizer's state, and would be taken for the "
                "whole, as by get_state_dict of torch.distributed.checkpoint",
                advice="call consolidate_state_dict(to=rank) first, and get the state on that rank; or save "
                "sharded_state_dict() with torch.distributed.checkpoint, or all with zckpt.save",
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[type[Group], tuple[()], None, None, Iterator[tuple[str, Any]]]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load reads with weights_only, too


def check(state_dict: Mapping[str, Any], groups: Sequence[Group]) -> dict[torch.Tensor, int]:
    """Return the number that a dict has for each parameter of an optimizer.

    Where both have names, parameters of a group are matched by them.

    Raises
    ------
    ValueError
        The dict is another optimizer's; the message names what differs.
    """
    saved, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(state, Mapping) or not isinstance(saved, (list, tuple)):
        raise ValueError("not the state dict of an optimizer: it has no 'state' and 'param_groups'")  # noqa: TRY004
    if len(saved) != len(groups):
        raise ValueError(f"the state dict has {len(saved)} param groups, the optimizer has {len(groups)}")
    numbers: dict[torch.Tensor, int] = {}
    for index, (its, mine) in enumerate(zip(saved, groups, strict=True)):
        numbers.update(zip(mine["params"], _numbers(index, its, mine), strict=True))
    parameters = {number: parameter for parameter, number in numbers.items()}
    if len(parameters) != len(numbers):
        raise ValueError("the state dict has a parameter in its param groups twice")
    for number, values in state.items():
        if number not in parameters:
            raise ValueError(f"the state dict has state of parameter {number!r}, which is in none of its param groups")
        check_shapes(number, values, parameters[number])
    return numbers


def _numbers(index: int, saved: object, group: Group) -> list[int]:
    """Return what a saved group calls each of a group's parameters."""
    listed = saved.get("params") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or not isinstance(listed, (list, tuple)):
        raise ValueError(f"param group {index} of the state dict has no list 'params'")  # noqa: TRY004
    if len(listed) != len(group["params"]):
        raise ValueError(
            f"param group {index} has {len(listed)} parameters in the state dict and {len(group['params'])} here"
        )
    theirs, ours = saved.get("param_names"), group.get("param_names")
    if not theirs or not ours or list(theirs) == list(ours):
        return list(listed)
    if sorted(theirs) != sorted(ours):
        only = sorted(set(theirs) ^ set(ours)) or sorted(theirs)
        raise ValueError(f"param group {index} has other parameters in the state dict: {', '.join(only[:SHOWN])}")
    by_name = dict(zip(theirs, listed, strict=True))
    return [by_name[name] for name in ours]


def check_shapes(number: object, values: object, parameter: torch.Tensor) -> None:
    """Refuse state that is per element and of another shape than the parameter."""
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of parameter {number} is {type(values).__name__}, not a dict")  # noqa: TRY004
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dim() != parameter.dim() or value.shape == parameter.shape:
            continue
        if value.numel() == 1 or set(value.shape) <= {1, *parameter.shape}:
            continue  # a factor of a matrix: [rows, 1], [1, columns] or [rows, rows]
        raise ValueError(
            f"{key} of parameter {number} has shape {tuple(value.shape)} in the state dict; "
            f"the parameter has {tuple(parameter.shape)}"
        )


def part_of(rank: int, world_size: int, ranks: Sequence[int]) -> dict[str, object]:
    """Return what a rank's own part says of itself."""
    return {"rank": rank, "world_size": world_size, "ranks": list(ranks)}


def saved_ranks(
    state_dict: Mapping[str, Any], numbers: Mapping[torch.Tensor, int], rank: int, world_size: int
) -> dict[torch.Tensor, int] | None:
    """Return which rank had each parameter when a part was made; None for a whole dict.

    Raises
    ------
    ValueError
        It is another rank's part, or one of another number of ranks.
    """
    saved = state_dict.get(PARTITION)
    if saved is None:
        return None
    ranks = saved.get("ranks") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or not isinstance(ranks, (list, tuple)) or len(ranks) != len(numbers):
        raise ValueError(f"the state dict has no usable {PARTITION!r}: {str(saved)[:80]}")
    if (saved.get("rank"), saved.get("world_size")) != (rank, world_size):
        raise ValueError(
            f"the state dict is the part of rank {saved.get('rank')} of {saved.get('world_size')}, and this is rank "
            f"{rank} of {world_size}: consolidate it first, or save with sharded_state_dict()"
        )
    found = {parameter: ranks[number] for parameter, number in numbers.items() if number in range(len(ranks))}
    if len(found) != len(numbers) or any(one not in range(world_size) for one in found.values()):
        raise ValueError(f"the {PARTITION!r} of the state dict has parameters or ranks that are not there")
    return found


def local_dict(
    state_dict: Mapping[str, Any], numbers: Mapping[torch.Tensor, int], groups: Sequence[Group]
) -> dict[str, Any]:
    """Return what a rank's local optimizer loads; nothing of it is the given dict's.

    Parameters
    ----------
    state_dict : mapping
    numbers : mapping
        What it calls each parameter.
    groups : sequence of Group
        The local optimizer's.
    """
    local: dict[int, dict[str, object]] = {}
    made: list[Group] = []
    at = 0
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for position, parameter in enumerate(group["params"], at):
            values = state_dict["state"].get(numbers[parameter])
            if values:
                local[position] = {
                    key: copied_like(value, parameter) if isinstance(value, torch.Tensor) else copied(value)
                    for key, value in values.items()
                }
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        made.append({**hyperparameters(saved), **names, "params": list(range(at, at + len(group["params"])))})
        at += len(group["params"])
    return {"state": local, "param_groups": made}


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
            whole, gathered = collected
            made = packed(self.param_groups)
            for index, holder in enumerate(holders):
                made[index].update(gathered[holder][index])
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
                "param_groups": [GroupOfPart(group) for group in packed(self.param_groups)],
                PARTITION: part_of(self.rank, self.world_size, ranks),
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
        numbers = check(given, self.param_groups)
        ranks = saved_ranks(given, numbers, self.rank, self.world_size)
        if ranks is not None and ranks != self._param_to_rank:
            if self._overlap_info.status != OverlapStatus.UNINITIALIZED:
                raise ValueError(
                    "the part was saved when ranks had other parameters than the buckets of DDP give them now: load "
                    "it before the first iteration, or save with sharded_state_dict()"
                )
            self._repartition([[p for p in ranks if ranks[p] == rank] for rank in range(self.world_size)])
        self.optim.load_state_dict(local_dict(given, numbers, self.optim.param_groups))
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
