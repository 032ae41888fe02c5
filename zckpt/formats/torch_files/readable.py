"""Values that Python and torch can load wherever they are: trees of plain data and plain tensors."""

from __future__ import annotations

from zckpt.torchfile import DefaultMapping, Device, DType, Layout, OrderedMapping, Size, Tensor, node_of

MAPPINGS = (dict, OrderedMapping, DefaultMapping)
VALUES = (type(None), bool, int, float, complex, str, bytes, DType, Device, Layout, Size)
"""What has no class that a reader may not have."""

MAXIMUM_DEPTH = 64
"""Of what is opened: a file may nest without end, or hold a list that contains itself."""

MAXIMUM_NODES = 100_000
"""Of one value besides the model and the optimizer: a file may repeat one part of a tree in itself without end."""


def is_readable(value: object) -> bool:
    """Tell whether torch by itself can read a value, and whether it is a tree of reasonable size."""
    waiting: list[tuple[int, object]] = [(0, value)]
    budget = MAXIMUM_NODES
    while waiting:
        depth, node = waiting.pop()
        node = node_of(node)  # each may be of another file
        budget -= 1
        if budget < 0 or depth > MAXIMUM_DEPTH - 2:
            return False
        if isinstance(node, MAPPINGS):
            if not all(isinstance(key, (str, int, float)) for key in node):
                return False
            below: list[object] = list(node.values())
        elif type(node) in (list, tuple):
            below = list(node)  # type: ignore[call-overload]
        elif type(node) in VALUES:
            continue
        elif type(node) is Tensor:
            if node.subclass is not None or node.metadata or node.state is not None or node.hooks:
                return False  # it is more than its elements
            continue
        else:
            return False
        if len(below) > budget:
            return False
        waiting.extend((depth + 1, one) for one in below)
    return True
