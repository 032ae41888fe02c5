"""Modules and optimizers that a file holds as objects (`torch.save(model)`), as the state dicts that they would have.

A pickled `torch.nn.Module` keeps its tensors in `_parameters` and `_buffers`, other modules in `_modules`, and which
buffers `state_dict` leaves out in `_non_persistent_buffers_set`. A pickled optimizer has its parameters themselves
where its state dict has numbers. Source: `__getstate__` of `Module` and `Optimizer` of torch 1.0 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.state import dict_of
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import MAX_DEPTH, Object, Tensor

KINDS = ("_parameters", "_buffers")

MAXIMUM_MODULES = 1_000_000
"""Of one file: modules may hold others, or themselves, without end."""


def with_state_dicts(root: object) -> tuple[object, list[Rule]]:
    """Return what a file holds with a state dict in the place of each such object; and what all else of these is.

    Raises UnsupportedError: modules hold each other without end.
    """
    if _is_module(root):
        return _of_module(root), [_rule()]
    if not isinstance(root, dict):
        return root, []
    models = {key: _of_module(one) for key, one in root.items() if _is_module(one)}
    tensors = [(name, one) for model in models.values() for name, one in model.items() if isinstance(one, Tensor)]
    names = {id(one): name for name, one in reversed(tensors)}
    optimizers = {key: _of_optimizer(one.state, names) for key, one in root.items() if _is_optimizer(one)}
    found = models | optimizers
    return {**root, **found} if found else root, [_rule(str(key)) for key in found]


def _rule(*place: str) -> Rule:
    return Rule((*place, "**"), IMPLIED, "what an object has besides its state dict", tensors=True)


def _is_module(node: object) -> bool:
    state = node.state if isinstance(node, Object) else None
    return isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in (*KINDS, "_modules"))


def _of_module(module: object) -> dict[str, object]:
    found: dict[str, object] = {}
    waiting: list[tuple[str, Any, int]] = [("", module, 0)]
    for _ in range(MAXIMUM_MODULES):
        if not waiting:
            return found
        prefix, one, depth = waiting.pop()
        if depth > MAX_DEPTH:
            break
        named = one.state.get("_non_persistent_buffers_set")
        gone = named if isinstance(named, (set, frozenset)) else ()
        for kind in KINDS:
            for name, value in one.state[kind].items():
                if value is not None and (kind != "_buffers" or name not in gone):
                    found[f"{prefix}{name}"] = value
        inside = [(name, its) for name, its in one.state["_modules"].items() if _is_module(its)]
        waiting += [(f"{prefix}{name}.", its, depth + 1) for name, its in reversed(inside)]
    raise UnsupportedError("holds modules that hold each other without end", advice="save model.state_dict()")


def _is_optimizer(node: object) -> bool:
    state = node.state if isinstance(node, Object) else None
    groups = state.get("param_groups") if isinstance(state, dict) and isinstance(state.get("state"), dict) else None
    return isinstance(groups, list) and all(isinstance(dict_of(one).get("params"), list) for one in groups)


def _of_optimizer(state: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, object]:
    """Return an optimizer's state dict; `names`: of the model's tensors, by the identity of each."""
    every = [id(one) for group in state["param_groups"] for one in group["params"]]
    numbers = {one: number for number, one in enumerate(dict.fromkeys(every))}
    groups = []
    for group in state["param_groups"]:
        own = [id(one) for one in group["params"]]
        named = {"param_names": [names[one] for one in own]} if numbers.keys() <= names.keys() else {}
        groups.append({**group, **named, "params": [numbers[one] for one in own]})
    return {"state": {numbers.get(id(key), key): its for key, its in state["state"].items()}, "param_groups": groups}
