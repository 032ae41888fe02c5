"""Modules that a file holds as objects (`torch.save(model)`), as the state dicts that they would have.

A pickled `torch.nn.Module` keeps its tensors in `_parameters` and `_buffers`, other modules in `_modules`, and which
buffers `state_dict` leaves out in `_non_persistent_buffers_set`. Source: `Module.__getstate__` of torch 1.0 to 2.15.
"""

from __future__ import annotations

from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import MAX_DEPTH, Object

KINDS = ("_parameters", "_buffers")

MAXIMUM_MODULES = 1_000_000
"""Of one file: modules may hold others, or themselves, without end."""


def with_state_dicts(root: object) -> tuple[object, list[Rule]]:
    """Return what a file holds with a state dict in the place of each module; and what all else of the modules is.

    Raises UnsupportedError: modules hold each other without end.
    """
    if _is_module(root):
        return _state_dict(root), [_rule()]
    if not isinstance(root, dict):
        return root, []
    found = {key: _state_dict(one) for key, one in root.items() if _is_module(one)}
    return {**root, **found} if found else root, [_rule(str(key)) for key in found]


def _rule(*place: str) -> Rule:
    return Rule((*place, "**"), IMPLIED, "attributes of a module, which no state dict has", tensors=True)


def _is_module(node: object) -> bool:
    state = node.state if isinstance(node, Object) else None
    return isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in (*KINDS, "_modules"))


def _state_dict(module: object) -> dict[str, object]:
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
