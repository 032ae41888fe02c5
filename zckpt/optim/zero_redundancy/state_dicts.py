"""State dicts of a sharded optimizer: a rank's own part, the whole, and what one that is loaded must be.

{"state": {number: {key: value}}, "param_groups": [{..., "params": [number]}]}     as torch.optim has it
{..., "partition": {"rank": r, "world_size": n, "ranks": [rank]}}                  one rank's own part

Numbers are positions over all groups. `ranks` has the rank of each parameter. Whatever is wrong with a dict, it is a
ValueError, as in torch.optim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zckpt.errors import UnsupportedError
from zckpt.optim.param_groups import SHOWN, Group, check_shapes, hyperparameters, matched, parameters_of
from zckpt.optim.param_groups import numbered as numbered_groups

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
                "state_dict() is only this rank's part of a ZeroRedundancyOptimizer's state, and get_state_dict of "
                "torch.distributed.checkpoint, for example, would take it for the whole",
                advice="call consolidate_state_dict(to=rank) first, and get the state on that rank; or save "
                "sharded_state_dict() with torch.distributed.checkpoint, or everything with zckpt.save",
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[type[Group], tuple[()], None, None, Iterator[tuple[str, Any]]]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load reads with weights_only, too


def check(state_dict: Mapping[str, Any], groups: Sequence[Group]) -> dict[torch.Tensor, int]:
    """Return the number that a dict has for each parameter of an optimizer. Raises ValueError: it is another's."""
    numbers = matched(state_dict, groups, by_name=True)
    found = dict(zip(parameters_of(groups), numbers, strict=True))
    check_shapes(state_dict["state"], found)
    return found


def saved_ranks(
    state_dict: Mapping[str, Any], numbers: Mapping[torch.Tensor, int], rank: int, world_size: int
) -> dict[torch.Tensor, int] | None:
    """Return which rank had each parameter when a part was saved; None for a whole dict.

    Raises ValueError: it is another rank's part, or one of another number of ranks.
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
        raise ValueError(f"the {PARTITION!r} of the state dict has parameters or ranks that do not exist")
    return found


# --- for torch.distributed.checkpoint

STATE, GROUPS, SLOTS = "state", "param_groups", "slots"

Label = str | int


def labels(groups: Sequence[Group]) -> list[Label]:
    """Return what each parameter is called: its name if all have different ones, else its number."""
    names = [name for group in groups for name in group.get("param_names", ())]
    count = len(parameters_of(groups))
    return list(names) if len(set(names)) == count else list(range(count))


def sharded(groups: Sequence[Group], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the dict of a rank.

    `groups`: all; `state`: by number, of this rank's parameters, those without state included.
    """
    called = labels(groups)
    made = numbered_groups(groups)
    for group in made:
        group["params"] = [called[number] for number in group["params"]]
    return {
        STATE: {str(called[number]): dict(values) for number, values in state.items() if values},
        GROUPS: made,
        SLOTS: {str(called[number]): sorted(values) for number, values in state.items()},
    }


def room(
    metadata: Metadata, within: Sequence[str], groups: Sequence[Group], own: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Return a dict with room for what a DCP checkpoint has of a rank's parameters.

    Parameters
    ----------
    metadata : Metadata
        Of the checkpoint.
    within : sequence of str
        The keys under which the checkpoint has the optimizer.
    groups : sequence of Group
    own : mapping
        This rank's parameters by number.

    Raises
    ------
    ValueError
        The checkpoint has no optimizer there.
    """
    called = labels(groups)
    mine = {str(called[number]): parameter for number, parameter in own.items()}
    found: dict[str, Any] = {STATE: {}, GROUPS: []}
    for key, path in (metadata.planner_data or {}).items():
        inner = tuple(path[len(within) :])
        if tuple(path[: len(within)]) != tuple(within) or len(inner) < 2:
            continue
        if inner[0] != GROUPS and inner[1] not in mine:
            continue
        about, parameter = metadata.state_dict_metadata[key], mine.get(inner[1])
        value = None
        if isinstance(about, TensorStorageMetadata):
            device = parameter.device if parameter is not None and len(about.size) else "cpu"
            value = torch.empty(about.size, dtype=about.properties.dtype, device=device)
        set_element(found, inner, value)
    if not found[GROUPS]:
        raise ValueError(f"the checkpoint has no optimizer with param groups at {'.'.join(within) or 'its root'}")
    return found


def numbered(state_dict: Mapping[str, Any], groups: Sequence[Group], own: Iterable[int]) -> dict[str, Any]:
    """Return a dict of a rank as `torch.optim` has it, by number.

    Raises ValueError: it is of other parameters, or lacks state that was saved; the message names some.
    """
    if not all(isinstance(state_dict.get(key), kind) for key, kind in ((STATE, Mapping), (GROUPS, (list, tuple)))):
        raise ValueError("not the dict of sharded_state_dict(): it has no 'state' and 'param_groups'")
    called = labels(groups)
    number_of = {str(label): number for number, label in enumerate(called)}
    saved = [list(group.get("params") or ()) for group in state_dict[GROUPS]]
    strange = [str(label) for one in saved for label in one if str(label) not in number_of]
    strange += [label for label in state_dict[STATE] if label not in number_of]
    if strange:
        raise ValueError(f"the state dict has parameters that the optimizer lacks: {', '.join(strange[:SHOWN])}")
    for label in (str(called[number]) for number in own):
        saved_keys, there = state_dict.get(SLOTS, {}).get(label), state_dict[STATE].get(label, {})
        if saved_keys is not None and set(saved_keys) != set(there):
            differing = sorted(set(saved_keys) ^ set(there))
            raise ValueError(
                f"the checkpoint's state of {label} differs from what was read: {', '.join(differing[:SHOWN])}; "
                "read into sharded_state_dict(metadata), which has room for the checkpoint's state"
            )
    return {
        STATE: {number_of[label]: values for label, values in state_dict[STATE].items()},
        GROUPS: [
            {**hyperparameters(group), "params": [number_of[str(label)] for label in one]}
            for group, one in zip(state_dict[GROUPS], saved, strict=True)
        ],
    }
