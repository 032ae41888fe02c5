"""The dict that was saved, put together again from the paths of its items.

A branch is a dict: by text where the saved dict had one, by number where it had a list. A leaf is an item. torch
before 2.4 kept dicts and lists without tensors as one item; `branch` shows such an item as the branch it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeGuard

from zckpt.errors import DamagedFileError
from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.torch_files.tensors import carried
from zckpt.torchfile import FromFile, each, walk_tensors

Leaf = TensorItem | ObjectItem
Node = object
"""A leaf, or a dict of nodes by text or number."""

Branch = Mapping[str | int, Node]

SPARE = 64
"""Elements that a list may lack for each that it has, and then these: empty dicts and lists are not saved."""


def build(items: Mapping[str, Leaf], paths: Mapping[str, Keys], path: str) -> dict[str | int, Node]:
    """Return the tree of items.

    Parameters
    ----------
    items : mapping of str to item
        By key.
    paths : mapping of str to tuple
        Of each key, in order.
    path : str
        The file that says so.

    Raises
    ------
    DamagedFileError
        Two items have one path, or one lies within another.
    """
    root: dict[str | int, Node] = {}
    for key, steps in paths.items():
        if key not in items:
            continue
        at = root
        for step in steps[:-1]:
            child = at.setdefault(step, {})
            if not isinstance(child, dict):
                raise DamagedFileError(f"{key} lies within another item", path=path)
            at = child
        if steps[-1] in at:
            raise DamagedFileError(f"{key} has the path of another item", path=path)
        at[steps[-1]] = items[key]
    return root


def is_list(node: Node) -> TypeGuard[Branch]:
    """Tell whether a branch was a list."""
    return isinstance(node, dict) and bool(node) and all(type(step) is int for step in node)


def branch(node: Node) -> Branch | None:
    """Return a node as a branch; None if it is none."""
    if isinstance(node, dict):
        return node
    if isinstance(node, ObjectItem):
        key, file, value = node.key, node.file, node.node
        if isinstance(value, dict):
            return {str(k): ObjectItem(f"{key}.{k}", file, v) for k, v in value.items()}
        if isinstance(value, list):
            return {i: ObjectItem(f"{key}.{i}", file, v) for i, v in enumerate(value)}
    return None


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield the items below a node."""
    if isinstance(node, dict):
        for child in node.values():
            yield from leaves(child)
    elif isinstance(node, (TensorItem, ObjectItem)):
        yield node


def raw(item: ObjectItem) -> object:
    """Return an object as a torch file's reader gives it, with its file only where tensors are below it."""
    held = next(walk_tensors(item.node), None)
    return item.node if held is None else FromFile.of(item.file, item.node)


def carry(node: Node, lost: list[str]) -> object:
    """Return a node as `Checkpoint.metadata` keeps it; keys of tensors in several pieces are added to `lost`.

    Raises
    ------
    DamagedFileError
        A list with an index far beyond its length.
    """
    if isinstance(node, ObjectItem):
        return carried(node.file, node.node)
    if isinstance(node, TensorItem):
        return _tensor(node, lost)
    if not isinstance(node, dict):
        raise TypeError(f"{type(node).__name__} is no part of a tree")
    if not is_list(node):
        found = {str(step): carry(child, lost) for step, child in node.items() if not _is_lost(child, lost)}
        return _of_one_file(found, list(found.values()), lambda values: dict(zip(found, values, strict=True)))
    length = max(int(step) for step in node) + 1
    if length > 2 * len(node) + SPARE:
        raise DamagedFileError("a list lacks most of its elements", expected=f"{length} elements", found=len(node))
    listed = [carry(node[i], lost) if i in node and not _is_lost(node[i], lost) else None for i in range(length)]
    return _of_one_file(listed, listed, list)


def _of_one_file(whole: object, values: list[object], join: Callable[[list[object]], object]) -> object:
    """Return a dict or list as one part of a file, where all that is not plain in it lies in the same one."""
    parts = [value for value in values if isinstance(value, FromFile)]
    about = {(part.path, part.byteorder, part.numpy) for part in parts}
    if len(about) != 1 or not all(isinstance(value, FromFile) or _is_plain(value) for value in values):
        return whole
    return replace(parts[0], node=join([value.node if isinstance(value, FromFile) else value for value in values]))


def _is_plain(value: object) -> bool:
    """Tell whether a carried value is plain data, of no file."""
    return not any(isinstance(part, FromFile) for part in each(value, _below))


def _below(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _is_lost(node: Node, lost: list[str]) -> bool:
    if isinstance(node, TensorItem) and node.whole is None:
        lost.append(node.key)
        return True
    return False


def _tensor(item: TensorItem, lost: list[str]) -> object:
    if item.whole is None:
        lost.append(item.key)
        return None
    return FromFile(item.whole, item.path, item.whole.byteorder)
