"""Modules that a file holds as objects (`torch.save(model)`), as the state dicts that they would have.

A pickled `torch.nn.Module` keeps its tensors in `_parameters` and `_buffers`, other modules in `_modules`, and which
buffers `state_dict` leaves out in `_non_persistent_buffers_set`. Source: `Module.__getstate__` of torch 1.0 to 2.15.
"""

from __future__ import annotations

from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import Object, Place

KINDS = ("_parameters", "_buffers")

MAXIMUM_MODULES, MAXIMUM_STEPS = 1_000_000, 600
"""Of one file, and to one of them: modules may hold others, or themselves, without end."""


def with_state_dicts(root: object) -> tuple[object, list[Rule]]:
    """Return what a file holds with a state dict in the place of each module; and what the module's attributes are.

    Raises UnsupportedError: modules hold each other without end.
    """
    if _is_module(root):
        return _state_dict(root, ())
    if not isinstance(root, dict) or not any(map(_is_module, root.values())):
        return root, []
    found = {key: _state_dict(one, (key,)) if _is_module(one) else (one, []) for key, one in root.items()}
    return {key: tree for key, (tree, _) in found.items()}, [rule for _, rules in found.values() for rule in rules]


def _is_module(node: object) -> bool:
    state = node.state if isinstance(node, Object) else None
    return isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in (*KINDS, "_modules"))


def _state_dict(module: object, place: Place) -> tuple[dict[str, object], list[Rule]]:
    found: dict[str, object] = {}
    rules: list[Rule] = []
    waiting: list[tuple[str, Any, Place]] = [("", module, place)]
    for _ in range(MAXIMUM_MODULES):
        if not waiting:
            return found, [*rules, Rule((*map(str, place), "**"), IMPLIED, "attributes of a module")]
        prefix, one, at = waiting.pop()
        if len(at) > MAXIMUM_STEPS:
            break
        named = one.state.get("_non_persistent_buffers_set")
        gone = named if isinstance(named, (set, frozenset)) else ()
        for kind in KINDS:
            for name, value in one.state[kind].items():
                if kind == "_buffers" and name in gone:
                    steps = (*map(str, at), "state", kind, str(name))
                    rules.append(Rule(steps, IMPLIED, "a buffer that is not persistent", tensors=True))
                elif value is not None:
                    found[f"{prefix}{name}"] = value
        inside = [(name, its) for name, its in one.state["_modules"].items() if _is_module(its)]
        waiting += [(f"{prefix}{name}.", its, (*at, "state", "_modules", name)) for name, its in reversed(inside)]
    raise UnsupportedError("holds modules that hold each other without end", advice="save model.state_dict()")
