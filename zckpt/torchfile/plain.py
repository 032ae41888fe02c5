"""Turns an object tree into what JSON can hold: dicts with string keys, lists, strings and numbers.

An object that occurs twice is shown twice; a limit on the number of values bounds the result, however
often a hostile file refers to its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.torch_file import node_of
from zckpt.torchfile.trees import MAX_DEPTH

LIMIT = 100_000
"""Values in the result, unless the caller says otherwise."""

CUT = "..."
"""Stands for everything that the limit leaves out."""

CYCLE = "<cycle>"

SHOWN_BYTES = 64
"""Bytes of a bytes object that are shown."""

SHOWN_ELEMENTS = 64
"""Elements of a numpy array that are shown."""

SCALARS = (str, int, float, bool, type(None), bytes, complex)


def plain(node: object, *, limit: int = LIMIT) -> object:
    """Return a node and what is below it as JSON-able data.

    Parameters
    ----------
    node : object
        Any part of an object tree.
    limit : int, values
        How many values the result may have; `...` stands for the rest.

    Returns
    -------
    object
        An enum member (an unknown class called with one scalar) becomes that scalar, another unknown
        object {"class", "args", "state", ...}, a tensor {"tensor": dtype, "shape": [...]}.
    """
    return Renderer(limit).render(node)


def brief(node: object, width: int = 80) -> str:
    """Return the beginning of what a node looks like, for a message; what is cut off is not looked at."""
    if isinstance(node, str):
        node = node[:width]
    return repr(plain(node, limit=width))[:width]


class Renderer:
    """Renders one tree: counts values and knows which containers it is inside of."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.inside: set[int] = set()

    def render(self, node: object) -> object:
        """Return one node as JSON-able data."""
        self.left -= 1
        if self.left < 0:
            return CUT
        node = node_of(node)
        kinds: dict[type, Callable[[Any], object]]
        kinds = {nodes.Object: self.render_object, NumpyArray: self.render_array, nodes.Tensor: self.render_tensor}
        if isinstance(node, dict):
            render: Callable[[Any], object] = self.render_dict
        elif isinstance(node, (set, frozenset)):
            render = self.render_set
        elif isinstance(node, (list, tuple)):
            render = self.render_list
        elif type(node) in kinds or type(node) in PARTS:
            render = kinds.get(type(node), self.render_parts)
        else:
            return render_scalar(node)
        if id(node) in self.inside:
            return CYCLE
        if len(self.inside) > MAX_DEPTH:
            return CUT
        self.inside.add(id(node))
        try:
            return render(node)
        finally:
            self.inside.discard(id(node))

    def render_parts(self, node: object) -> object:
        """Return some fields of a node under its name."""
        name, fields = PARTS[type(node)]
        return {name: self.render_dict({field: getattr(node, field) for field in fields})}

    def render_list(self, members: Iterable[object]) -> list[object]:
        """Return elements as a list, cut where the limit is reached."""
        result: list[object] = []
        for node in members:
            result.append(self.render(node))
            if self.left < 0:
                break
        return result

    def render_dict(self, mapping: dict[object, object]) -> object:
        """Return a dict with string keys, or its pairs where two keys would become one string."""
        result: dict[str, object] = {}
        pairs: list[object] = []
        for key, value in mapping.items():
            shown = self.render(value)
            text = key if isinstance(key, str) else str(self.render(key))
            result[text] = shown
            pairs.append([text, shown])
            if self.left < 0:
                break
        return result if len(result) == len(pairs) else {"pairs": pairs}

    def render_set(self, members: Iterable[object]) -> object:
        """Return the members of a set, in an order that is the same in every run."""
        return sorted(self.render_list(members), key=lambda one: (type(one).__name__, str(one)))

    def render_object(self, node: nodes.Object) -> object:
        """Return an object of an unknown class."""
        is_scalar = len(node.args) == 1 and isinstance(node.args[0], SCALARS) and isinstance(node.cls, nodes.Global)
        if is_scalar and not (node.has_state or node.kwargs or node.items or node.entries):  # a member of an enum
            return self.render(node.args[0])
        name = node.qualified
        if name == "collections.Counter" and len(node.args) == 1 and isinstance(node.args[0], dict):
            return self.render(node.args[0])
        if name == "collections.deque" and not node.has_state:
            first = node.args[0] if node.args else ()
            return self.render_list(node.items or (first if isinstance(first, (list, tuple)) else ()))
        result: dict[str, object] = {"class": name}
        if isinstance(node.cls, nodes.Object):
            result["callable"] = self.render(node.cls)
        for field in ("args", "kwargs", "state", "items"):
            value = getattr(node, field)
            if value or (field == "state" and node.has_state and value is not None):
                result[field] = self.render(value)
        if node.entries:
            result["entries"] = [[self.render(key), self.render(value)] for key, value in node.entries]
        return result

    def render_array(self, node: NumpyArray) -> object:
        """Return a numpy array: its elements where they are few, nested no deeper than one list."""
        result: dict[str, object] = {"array": node.dtype, "shape": list(node.shape)}
        if len(node.items or ()) <= SHOWN_ELEMENTS and len(node.data) <= SHOWN_ELEMENTS * 8:
            result["values"] = self.render_list(node.values())
        return result

    def render_tensor(self, node: nodes.Tensor) -> object:
        """Return a dense tensor: dtype, shape, and what is unusual about it."""
        result: dict[str, object] = {"tensor": node.dtype, "shape": list(node.shape)}
        if node.subclass is not None:
            result["class"] = node.subclass.qualified
        for field in ("attributes", "state", "metadata"):
            value = getattr(node, field)
            if value is not None:
                result[field] = self.render(value)
        return result


PARTS: dict[type, tuple[str, tuple[str, ...]]] = {
    nodes.MetaTensor: ("tensor without data", ("dtype", "shape", "subclass", "attributes", "state")),
    nodes.SparseTensor: ("sparse tensor", ("layout", "shape", "parts")),
    nodes.QuantizedTensor: ("quantized tensor", ("tensor", "quantizer")),
    nodes.NestedTensor: ("nested tensor", ("buffer", "sizes", "strides", "offsets")),
    nodes.DeviceTensor: ("device tensor", ("data", "dtype", "device")),
}
"""How nodes with parts are shown: a name, and the fields shown under it."""


def render_scalar(node: object) -> object:
    """Return a value that has nothing below it as JSON-able data."""
    if isinstance(node, NumpyScalar):
        node = node.value
    if node is None or isinstance(node, (str, bool, int)):
        return node
    if isinstance(node, float):
        return node if isfinite(node) else str(node)
    if isinstance(node, (bytes, bytearray)):
        return {"bytes": len(node), "hex": bytes(node[:SHOWN_BYTES]).hex()}
    if isinstance(node, nodes.Storage):
        return {"storage": node.dtype, "nbytes": node.nbytes}  # its key is its file's own
    text = f"<{type(node).__name__}>"
    if isinstance(node, NumpyDType):
        text = node.text
    elif isinstance(node, (nodes.DType, nodes.MemoryFormat)):
        text = f"torch.{node.name}"
    elif isinstance(node, nodes.Layout):
        text = node.name
    elif isinstance(node, (nodes.Global, nodes.Device, complex, range, slice)):
        text = str(node)
    return text
