"""Param groups: what they are made of, what they say besides their parameters, and what these are called.

Parameters are given named or not, in groups or not, and are checked as torch checks them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch

from zckpt.errors import UsageError
from zckpt.optim.flat_parameters import Called
from zckpt.optim.tensors import copied_like
from zckpt.state import without
from zckpt.state.names import bare_names

SHOWN = 4
"""How many names a message lists."""

Group = dict[str, Any]

Key = TypeVar("Key")

OWN_KEYS = ("params", "param_names")
"""What a param group says of its parameters, of which each rank's groups have some."""


def hyperparameters(group: Mapping[str, Any]) -> Group:
    """Return what a group says besides its parameters."""
    return without(group, *OWN_KEYS)


def selected(group: Group, chosen: Sequence[int]) -> Group:
    """Return a group with some of its parameters, given by position."""
    kept = {key: [group[key][index] for index in chosen] for key in OWN_KEYS if key in group}
    return {**hyperparameters(group), **kept}


def plain(group: Mapping[str, Any]) -> Group:
    """Return those hyperparameters that are no tensors; tensors are given by the user, on all ranks."""
    return {key: value for key, value in hyperparameters(group).items() if not isinstance(value, torch.Tensor)}


def sync(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Give groups the hyperparameters of others."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(hyperparameters(theirs))


def copied(value: object) -> object:
    """Return a value that shares nothing with the one given."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all groups, in order: their positions here are their numbers."""
    return [parameter for group in groups for parameter in group["params"]]


def numbers_of(groups: Iterable[Mapping[str, Any]]) -> list[range]:
    """Return the numbers of each group's parameters."""
    bounds = accumulate((len(group["params"]) for group in groups), initial=0)
    return [range(first, end) for first, end in pairwise(bounds)]


def copied_to_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return state of a parameter that shares nothing with the one given, its tensors on the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copied(value)
        for key, value in values.items()
    }


def numbered(groups: Sequence[Group]) -> list[Group]:
    """Return groups with numbers for parameters, over all groups; values that could be written to are copied."""
    return [
        {**{key: copied(value) for key, value in group.items() if key != "params"}, "params": list(numbers)}
        for group, numbers in zip(groups, numbers_of(groups), strict=True)
    ]


def with_names(group: Group) -> Group:
    """Return a group with its parameters in a list of its own, and names apart. Raises ValueError: some have none."""
    members = list(group["params"])
    named = [one for one in members if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)]
    if not named:
        return {**group, "params": members}
    if len(named) != len(members):
        raise ValueError("either all parameters of a group must have names, or none")
    return {**group, "params": [one[1] for one in named], "param_names": [one[0] for one in named]}


def read_group(group: Group) -> Group:
    """Return a param group with its tensors in a list of its own, names under `param_names` if they are given as pairs.

    Raises TypeError: something else than tensors, or in no order; ValueError: no `params`, a sparse tensor, a tensor
    twice, or names for some only.
    """
    if not isinstance(group, dict):
        raise TypeError(f"params must be an iterable of tensors or of dicts, not both: {torch.typename(group)}")
    if "params" not in group:
        raise ValueError("a param group without the key 'params'")
    members = group["params"]
    if isinstance(members, torch.Tensor):
        members = [members]
    if isinstance(members, (set, frozenset)):
        raise TypeError("parameters must have an order, which a set does not have")
    made = with_names({**group, "params": members})
    count = len(made["params"])
    for tensor in made["params"]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"parameters must be tensors, not {torch.typename(tensor)}")
        if tensor.layout != torch.strided:
            raise ValueError(f"parameters must be dense tensors, not {tensor.layout}")
    if len(set(made["params"])) != count:
        raise ValueError("a param group lists a parameter twice, so two ranks would step it")
    if "param_names" in made and len(made["param_names"]) != count:
        raise ValueError(f"a param group has {len(made['param_names'])} names for {count} parameters")
    return made


def check_shapes(state: Mapping[Any, object], numbers: Mapping[torch.Tensor, int]) -> None:
    """Refuse state by number that is per element and of another shape than its parameter."""
    for parameter, number in numbers.items():
        values = state.get(number, {})
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


def matched(state_dict: Mapping[str, Any], groups: Sequence[Group], *, by_name: bool) -> list[Any]:
    """Return the number that a state dict has for each parameter of an optimizer, in order.

    `by_name`: where both have names, parameters of a group are matched by them. Raises ValueError: the dict is another
    optimizer's; the message names what differs.
    """
    saved, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(state, Mapping) or not isinstance(saved, (list, tuple)):
        raise ValueError("not the state dict of an optimizer: it has no 'state' and 'param_groups'")  # noqa: TRY004
    if len(saved) != len(groups):
        raise ValueError(f"the state dict has {len(saved)} param groups, the optimizer has {len(groups)}")
    numbers: list[Any] = []
    for index, (its, mine) in enumerate(zip(saved, groups, strict=True)):
        listed = its.get("params") if isinstance(its, Mapping) else None
        if not isinstance(its, Mapping) or not isinstance(listed, (list, tuple)):
            raise ValueError(f"param group {index} of the state dict has no list 'params'")  # noqa: TRY004
        if len(listed) != len(mine["params"]):
            raise ValueError(
                f"param group {index} has {len(listed)} parameters in the state dict and {len(mine['params'])} here"
            )
        theirs, ours = its.get("param_names"), mine.get("param_names")
        if not by_name or not theirs or not ours or list(theirs) == list(ours):
            numbers += listed
            continue
        if sorted(theirs) != sorted(ours):
            only = sorted(set(theirs) ^ set(ours)) or sorted(theirs)
            raise ValueError(f"param group {index} has other parameters in the state dict: {', '.join(only[:SHOWN])}")
        called = dict(zip(theirs, listed, strict=True))
        numbers += [called[name] for name in ours]
    known = set(numbers)
    if len(known) != len(numbers):
        raise ValueError("the state dict lists a parameter twice in its param groups")
    for number in state:
        if number not in known:
            raise ValueError(f"the state dict has state for parameter {number!r}, which is in none of its param groups")
    return numbers


def local_dict(
    state_dict: Mapping[str, Any], numbers: Mapping[torch.Tensor, int], groups: Sequence[Group]
) -> dict[str, Any]:
    """Return what a rank's local optimizer loads; nothing of it is the given dict's.

    `numbers`: what it calls each parameter; `groups`: the local optimizer's.
    """
    local = {
        position: {
            key: copied_like(value, parameter) if isinstance(value, torch.Tensor) else copied(value)
            for key, value in values.items()
        }
        for position, parameter in enumerate(parameters_of(groups))
        if (values := state_dict["state"].get(numbers[parameter]))
    }
    made: list[Group] = []
    for saved, group, own in zip(state_dict["param_groups"], groups, numbers_of(groups), strict=True):
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        made.append({**hyperparameters(saved), **names, "params": list(own)})
    return {"state": local, "param_groups": made}


# --- names

Names = list[list[str]]
"""The names of each param group's parameters, in the optimizer's order."""


def group_names(groups: Sequence[Mapping[str, Any]], known: Called) -> Names:
    """Return the names of all parameters, as the bare model has them: the model's, or else the optimizer's own.

    `known` are the names of the model's parameters. Raises UsageError: some have neither.
    """
    own: dict[torch.Tensor, str] = {}
    for group in groups:
        own |= zip(group["params"], map(str, group.get("param_names") or ()), strict=False)
    bare = bare_names(own.values())  # without what wrappers put there
    own = {parameter: bare[name] for parameter, name in own.items()}
    for parameter in parameters_of(groups):
        if parameter not in known and parameter not in own:
            raise UsageError(
                "a parameter of the optimizer has no name",
                found=f"shape {tuple(parameter.shape)}",
                advice="give its model, or create the optimizer from (name, parameter) pairs",
            )
    return [[known[p] if p in known else own[p] for p in group["params"]] for group in groups]


def by_tensor(groups: Sequence[Mapping[str, Any]], called: Iterable[Iterable[Key]]) -> dict[torch.Tensor, Key]:
    """Return the name, or the number, of each parameter of param groups, given those of each group."""
    return dict(zip(parameters_of(groups), chain(*called), strict=True))
