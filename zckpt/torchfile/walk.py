"""Ways through an object tree, which may share objects and contain cycles. Nothing here recurses."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt.errors import PickleError
from zckpt.torchfile.arrays import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.objects import (
    DefaultMapping,
    Device,
    DType,
    Global,
    Layout,
    MemoryFormat,
    Object,
    OrderedMapping,
    Size,
)
from zckpt.torchfile.tensors import (
    DeviceTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SparseTensor,
    Storage,
    Tensor,
)

MAX_DEPTH = 200
"""Levels of containers: a whole pickled model has some 60, and every reader of the tree may recurse."""

LEAVES = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, range, slice}
    | {Global, DType, Layout, MemoryFormat, Device, Size, Storage, NumpyScalar}
)

PARTS: dict[type, tuple[str, ...]] = {
    Tensor: ("attributes", "state", "metadata", "hooks"),
    MetaTensor: ("attributes", "state"),
    SparseTensor: ("parts",),
    QuantizedTensor: ("tensor", "quantizer"),
    NestedTensor: ("buffer", "sizes", "strides", "offsets"),
    DeviceTensor: ("data",),
    NumpyArray: ("items", "dtype_node"),
    NumpyDType: ("flags", "state"),
    Object: ("cls", "args", "kwargs", "state", "items", "entries"),
    OrderedMapping: ("state",),
    DefaultMapping: ("factory", "state"),
}
"""The fields of each node that may hold other nodes."""


def children(node: object) -> Iterator[tuple[object, object]]:
    """Yield the objects directly below one, each with its key, index or field name.

    Leaves may be among them. A dict key that is no leaf comes under ("key", its number).
    """
    if isinstance(node, dict):
        for number, (key, value) in enumerate(node.items()):
            if type(key) not in LEAVES:
                yield ("key", number), key
            yield key, value
    elif isinstance(node, (list, tuple, set, frozenset)):
        yield from enumerate(node)
    for name in PARTS.get(type(node), ()):
        part = getattr(node, name)
        if part is not None:
            yield name, part


def is_leaf(node: object) -> bool:
    """Tell whether nothing can be below a node."""
    return type(node) in LEAVES or (
        type(node) is Tensor
        and node.attributes is None
        and node.state is None
        and node.metadata is None
        and node.hooks is None
    )


def walk_tensors(root: object) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    """Yield every dense tensor below `root` with its path, each object once, in the order of the file.

    Parameters
    ----------
    root : object
        Any node or container of a `TorchFile`.

    Yields
    ------
    path : tuple
        Keys, indices and field names from the root; () for the root itself.
    tensor : Tensor
    """
    seen = {id(root)}
    if isinstance(root, Tensor):
        yield (), root
    if is_leaf(root):
        return
    path: list[object] = []
    levels = [children(root)]
    while levels:
        for step, child in levels[-1]:
            if type(child) in LEAVES or id(child) in seen:
                continue
            seen.add(id(child))
            if type(child) is Tensor:
                yield (*path, step), child
            if not is_leaf(child):
                path.append(step)
                levels.append(children(child))
                break
        else:
            levels.pop()
            if path:
                path.pop()


def check_depth(root: object, heights: dict[int, int] | None = None) -> None:
    """Refuse a tree that is nested too deep; a cycle does not make it deeper.

    Parameters
    ----------
    root : object
    heights : dict of int to int, levels
        Of objects that were checked before, by identity, and are still there; those checked now are added.

    Raises
    ------
    PickleError
        Some path from the root is longer than `MAX_DEPTH`.
    """
    heights = {} if heights is None else heights
    if is_leaf(root) or id(root) in heights:
        return
    heights[id(root)] = 0
    nodes, levels, highest = [root], [children(root)], [0]
    while nodes:
        for _, child in levels[-1]:
            if is_leaf(child):
                continue
            known = heights.setdefault(id(child), -1)
            if known < 0:
                heights[id(child)] = 0  # being visited: a way back to it is a cycle
                nodes.append(child)
                levels.append(children(child))
                highest.append(0)
                break
            highest[-1] = max(highest[-1], known)
        else:
            height = highest.pop() + 1
            heights[id(nodes.pop())] = height
            levels.pop()
            if highest:
                highest[-1] = max(highest[-1], height)
        if len(nodes) + (highest[-1] if highest else 0) > MAX_DEPTH:
            raise PickleError("it is nested too deep", expected=f"at most {MAX_DEPTH} levels")


def check_tree(root: object, path: str, record: str) -> None:
    """Refuse a tree that is nested too deep, naming file and record.

    Raises
    ------
    PickleError
        It is.
    """
    try:
        check_depth(root)
    except PickleError as error:
        raise PickleError(f"{record}: {error.message}", path=path, expected=error.expected) from None
