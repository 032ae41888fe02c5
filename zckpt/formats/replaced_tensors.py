"""A tree of a torch file with other tensors in it; whatever shared an object or went in a circle still does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zckpt.torchfile import PARTS, Tensor, children, is_leaf


def replace_tensors(root: object, new: Mapping[int, Tensor]) -> object:
    """Return a tree with some of its tensors replaced. Containers are changed where they are; tuples are made anew.

    Parameters
    ----------
    root : object
        A tree that was read for this purpose.
    new : mapping of int to Tensor
        By the id of the tensor that each stands for; it has that one's attributes.

    Returns
    -------
    object
        The root, or what stands for it now.
    """
    swapped: dict[int, object] = dict(new)
    kept: list[object] = [root]  # an id is that of one object only as long as the object is there
    seen = {id(root)}
    nodes: list[object] = [root]
    levels: list[Iterator[tuple[object, object]]] = [_below(root)]
    while nodes:
        for _, child in levels[-1]:
            if id(child) in seen or (is_leaf(child) and id(child) not in new):
                continue
            seen.add(id(child))
            kept.append(child)
            nodes.append(child)
            levels.append(_below(child))
            break
        else:
            levels.pop()
            _swap_below(nodes.pop(), swapped)
    return swapped.get(id(root), root)


def _below(node: object) -> Iterator[tuple[object, object]]:
    return iter(list(children(node)))


def _swap_below(node: object, swapped: dict[int, object]) -> None:
    """Put what stands for the children of a node in their place; all of these have been seen to."""
    if isinstance(node, dict):
        for key, value in list(node.items()):
            if id(value) in swapped:
                node[key] = swapped[id(value)]
    elif isinstance(node, list):
        node[:] = [swapped.get(id(one), one) for one in node]
    elif isinstance(node, (tuple, set, frozenset)) and any(id(one) in swapped for one in node):
        swapped[id(node)] = type(node)(swapped.get(id(one), one) for one in node)
    fields = {name: getattr(node, name) for name in PARTS.get(type(node), ())}
    changed = {name: swapped[id(value)] for name, value in fields.items() if id(value) in swapped}
    if changed and type(node) is Tensor:
        current = swapped.get(id(node), node)
        swapped[id(node)] = replace(current, **changed)  # type: ignore[type-var]
    else:
        for name, value in changed.items():
            setattr(node, name, value)
