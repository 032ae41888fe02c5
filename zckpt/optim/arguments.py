"""What a sharded optimizer is made of: parameters, named or not, in groups or not; checked as torch checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from zckpt.optim.param_groups import Group


def read_groups(params: object) -> list[Group]:
    """Return param groups that own their lists, names under `param_names` where tensors were given as pairs.

    Parameters
    ----------
    params : iterable
        Of tensors, of (name, tensor) pairs, or of dicts whose `params` is one of these.

    Raises
    ------
    TypeError
        A tensor, no iterable, or an iterable of anything else or of several kinds.
    ValueError
        Nothing, a group without `params`, a sparse tensor, a tensor twice, or names for some tensors only.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be an iterable of tensors or dicts, not one {torch.typename(params)}")
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of tensors or dicts, not {torch.typename(params)}")
    given = list(params)
    if not given:
        raise ValueError("an empty parameter list")
    if all(isinstance(one, dict) for one in given):
        groups = [read_group(one) for one in given]
    elif any(isinstance(one, dict) for one in given):
        raise TypeError("params must be an iterable of tensors or of dicts, not of both")
    else:
        groups = [read_group({"params": given})]
    if len({"param_names" in group for group in groups}) > 1:
        raise ValueError("either all param groups have names for their parameters or none has")
    _check_types([tensor for group in groups for tensor in group["params"]])
    return groups


def read_group(group: Group) -> Group:
    """Return a param group with its tensors in a list of its own. Raises as `read_groups`."""
    if "params" not in group:
        raise ValueError("a param group without the key 'params'")
    members = group["params"]
    if isinstance(members, torch.Tensor):
        members = [members]
    if isinstance(members, (set, frozenset)):
        raise TypeError("parameters must have an order, which those of a set do not")
    members = list(members)
    named = [one for one in members if _is_pair(one)]
    if named and len(named) != len(members):
        raise ValueError("either all parameters of a group have names or none has")
    made = {**group, "params": [one[1] for one in members] if named else members}
    if named:
        made["param_names"] = [one[0] for one in named]
    for tensor in made["params"]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"parameters must be tensors, not {torch.typename(tensor)}")
        if tensor.layout != torch.strided:
            raise ValueError(f"parameters must be dense tensors, not {tensor.layout}")
    if len(set(made["params"])) != len(members):
        raise ValueError("a param group has a parameter twice, which two ranks would step")
    if len(made.get("param_names", members)) != len(members):
        raise ValueError(f"a param group has {len(made['param_names'])} names for {len(members)} parameters")
    return made


def read_process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a process group, by default the world. Raises ValueError where this process is not in it."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    if dist.get_rank(found) < 0:
        raise ValueError("this process is not in the process group")
    return found


def _is_pair(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)


def _check_types(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse several element types where nothing is trained: no model is like that, as torch's class says too."""
    types = {torch.typename(tensor) for tensor in tensors}
    if len(types) > 1 and not any(tensor.requires_grad for tensor in tensors):
        raise ValueError(f"tensors of several types, none of which requires a gradient: {', '.join(sorted(types))}")
