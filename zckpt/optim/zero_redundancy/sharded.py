"""State for `torch.distributed.checkpoint`: every rank writes what it has and reads what it needs, at any world size.

{"state": {label: {slot: value}}, "param_groups": [{..., "params": [label]}], "slots": {label: [slot]}}

A label is a parameter's name, or its number where parameters have no names of their own. State and `slots` are of
this rank's parameters only. `slots` says what was saved, so that none of it can go missing unnoticed: DCP reads into
what is there, and an optimizer that has not stepped has no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zckpt.optim.param_groups import Group
from zckpt.optim.zero_redundancy.partitioned import packed

SHOWN = 4

STATE, GROUPS, SLOTS = "state", "param_groups", "slots"

Label = str | int


def labels(groups: Sequence[Group]) -> list[Label]:
    """Return what each parameter is called: its name if all have different ones, else its number."""
    names = [name for group in groups for name in group.get("param_names", ())]
    count = sum(len(group["params"]) for group in groups)
    return list(names) if len(set(names)) == count else list(range(count))


def sharded(groups: Sequence[Group], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the dict of a rank.

    Parameters
    ----------
    groups : sequence of Group
        All.
    state : mapping
        By number, of this rank's parameters, those without state included.
    """
    called = labels(groups)
    made = packed(groups)
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
        _put(found, inner, _blank(metadata.state_dict_metadata[key], mine.get(inner[1])))
    if not found[GROUPS]:
        raise ValueError(f"the checkpoint has no optimizer with param groups at {'.'.join(within) or 'its root'}")
    return found


def _blank(about: object, parameter: torch.Tensor | None) -> object:
    """Return what a value is read into."""
    if not isinstance(about, TensorStorageMetadata):
        return None
    device = parameter.device if parameter is not None and len(about.size) else "cpu"
    return torch.empty(about.size, dtype=about.properties.dtype, device=device)


def _put(tree: dict[str, Any], path: Sequence[str | int], value: object) -> None:
    """Put a value into a tree of dicts and lists; a number in a path is an index of a list."""
    node: Any = tree
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(node, list):
            node.extend([None] * (int(key) + 1 - len(node)))
            before = node[int(key)]
        else:
            before = node.get(key)
        if following is None:
            node[key] = value
        elif before is None:
            node[key] = before = [] if isinstance(following, int) else {}
        node = before


def numbered(state_dict: Mapping[str, Any], groups: Sequence[Group], own: Iterable[int]) -> dict[str, Any]:
    """Return a dict of a rank as `torch.optim` has it, by number.

    Raises
    ------
    ValueError
        It is of other parameters, or lacks state that was saved; the message names some.
    """
    if not all(isinstance(state_dict.get(key), kind) for key, kind in ((STATE, Mapping), (GROUPS, (list, tuple)))):
        raise ValueError("not the dict of sharded_state_dict(): it has no 'state' and 'param_groups'")
    called = labels(groups)
    number_of = {str(label): number for number, label in enumerate(called)}
    saved = [list(group.get("params") or ()) for group in state_dict[GROUPS]]
    strange = [str(label) for one in saved for label in one if str(label) not in number_of]
    strange += [label for label in state_dict[STATE] if label not in number_of]
    if strange:
        raise ValueError(f"the state dict has parameters that the optimizer has not: {', '.join(strange[:SHOWN])}")
    for label in (str(called[number]) for number in own):
        wanted, there = state_dict.get(SLOTS, {}).get(label), state_dict[STATE].get(label, {})
        if wanted is not None and set(wanted) != set(there):
            differing = sorted(set(wanted) ^ set(there))
            raise ValueError(
                f"the checkpoint has other state of {label} than was read: {', '.join(differing[:SHOWN])}; "
                f"read into sharded_state_dict(metadata), which has room for what the checkpoint has"
            )
    return {
        STATE: {number_of[label]: values for label, values in state_dict[STATE].items()},
        GROUPS: [
            {**_plain(group), "params": [number_of[str(label)] for label in one]}
            for group, one in zip(state_dict[GROUPS], saved, strict=True)
        ],
    }


def _plain(group: Mapping[str, Any]) -> Group:
    """Return a group without names: its labels have found the parameters already."""
    return {key: value for key, value in group.items() if key != "param_names"}
