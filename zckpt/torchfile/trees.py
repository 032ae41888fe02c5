"""Ways through an object tree, and questions about it that are answered by looking at each object once.

Trees share objects and contain cycles. Two kilobytes of a pickle make lists that contain each other in 2**60 ways, or a
list that contains itself: whoever goes down every path, as `==`, `repr` and any plain recursion do, never comes back.
Answers are remembered by object; who recurses goes as deep as `check_depth` allows, and no deeper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from zckpt.errors import PickleError
from zckpt.state.mappings import dict_of, inside
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.torch_file import FromFile, node_of

MAX_DEPTH = 200
"""Levels of containers: a whole pickled model has some 60, and every reader of the tree may recurse."""

LEAVES = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, range, slice}
    | {*nodes.NAMES, nodes.Size, nodes.Storage, NumpyScalar}
)

PARTS: dict[type, tuple[str, ...]] = {
    nodes.Tensor: ("attributes", "state", "metadata", "hooks"),
    nodes.MetaTensor: ("attributes", "state"),
    nodes.SparseTensor: ("parts",),
    nodes.QuantizedTensor: ("tensor", "quantizer"),
    nodes.NestedTensor: ("buffer", "sizes", "strides", "offsets"),
    nodes.DeviceTensor: ("data",),
    NumpyArray: ("items", "dtype_node"),
    NumpyDType: ("flags", "state"),
    nodes.Object: ("cls", "args", "kwargs", "state", "items", "entries"),
    nodes.OrderedMapping: ("state",),
    nodes.DefaultMapping: ("factory", "state"),
}
"""The fields of each node that may hold other nodes."""


Place = tuple[object, ...]
"""Keys, indices and names of fields that lead to a node."""

Below = Iterator[tuple[object, object]]
"""What is directly below a node, each with its key, index or name of a field."""


def children(node: object) -> Below:
    """Yield the objects directly below one, each with its key, index or field name.

    Leaves may be among them. A dict key that is no leaf comes under ("key", its number).
    """
    kind = type(node)
    if kind is list or kind is tuple:
        return enumerate(node)  # type: ignore[arg-type]
    if kind is dict and LEAVES.issuperset(map(type, node)):  # type: ignore[call-overload]
        return iter(node.items())  # type: ignore[attr-defined]
    return _children(node)


def _children(node: object) -> Below:
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


def value_at(root: object, place: Place) -> object:
    """Return what lists, tuples and dicts have at a place; None where they have nothing there."""
    for key in place:
        root = inside(root).get(key)
    return root


def with_value(root: object, place: Place, value: object) -> object:
    """Return a tree that has a value at a place; dicts on the way there are copies, tuples and lists new lists."""
    if not place:
        return value
    inner = with_value(value_at(root, place[:1]), place[1:], value)
    if isinstance(root, (list, tuple)):
        return [inner if number == place[0] else one for number, one in enumerate(root)]
    return {**dict_of(root), place[0]: inner}


_REBUILT = frozenset({
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2",
})  # fmt: skip


def is_tensor(node: object) -> bool:
    """Tell a tensor of any kind: dense, sparse, quantised, nested, without data, or of a class of its own.

    A tuple with a quantised one is, too: that is how modules of `torch.ao` keep a weight and its bias.
    """
    if isinstance(node, tuple):
        return any(type(one) is nodes.QuantizedTensor for one in node)
    return type(node) in nodes.TENSORS or (isinstance(node, nodes.Object) and node.qualified in _REBUILT)


def unwrapped(node: object) -> object:
    """Return the tensor whose elements a wrapper's are: the only one in it, of its type and shape; others as they are.

    So torchao's training in 8 bits wraps weights, with how they are to be cast. Not of a DTensor's: it is a share.
    """
    if isinstance(node, nodes.MetaTensor) and node.subclass is not None and node.subclass.name != "DTensor":
        held = [one for one in (node.attributes or {}).values() if is_tensor(one)]
        if len(held) == 1 and isinstance(one := held[0], nodes.Tensor):
            return one if (one.dtype, one.shape) == (node.dtype, node.shape) else node
    return node


def oddity(node: object) -> str | None:
    """Say what makes a tensor something else than elements in a storage; None if it is one, or a class's wrapper."""
    match node:
        case nodes.SparseTensor():
            return f"of layout {node.layout.name}"
        case nodes.QuantizedTensor():
            return f"quantized by torch to {node.tensor.dtype}"
        case nodes.NestedTensor():
            return "nested"
        case nodes.DeviceTensor():
            return f"of device {node.device}"
        case nodes.MetaTensor(subclass=None):
            return "of the meta device"
    return None


def is_leaf(node: object) -> bool:
    """Tell whether nothing can be below a node."""
    return type(node) in LEAVES or (
        type(node) is nodes.Tensor
        and node.attributes is None
        and node.state is None
        and node.metadata is None
        and node.hooks is None
    )


def has_tensors(root: object) -> bool:
    """Tell whether a dense tensor is below `root`, or is it."""
    return next(walk_tensors(root), None) is not None


def walk_tensors(root: object) -> Iterator[tuple[Place, nodes.Tensor]]:
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
    if isinstance(root, nodes.Tensor):
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
            if type(child) is nodes.Tensor:
                yield (*path, step), child
            if not is_leaf(child):
                path.append(step)
                levels.append(children(child))
                break
        else:
            levels.pop()
            if path:
                path.pop()


def check_depth(root: object, heights: dict[int, int] | None = None, record: str = "") -> None:
    """Refuse a tree that is nested too deep; a cycle does not make it deeper.

    Parameters
    ----------
    root : object
    heights : dict of int to int, levels
        Of objects that were checked before, by identity, and are still there; those checked now are added.
    record : str
        Named in the error.

    Raises
    ------
    PickleError
        Some path from the root is longer than `MAX_DEPTH`.
    """
    if heights is None and _is_shallow(root):
        return
    known = {} if heights is None else heights

    def height(node: object, depth: int) -> int:
        found = known.get(id(node))
        if found is None and depth < MAX_DEPTH:
            known[id(node)] = highest = 0  # while it is looked at: a way back to it is a cycle
            for child in inner(node):
                highest = max(highest, height(child, depth + 1))
            known[id(node)] = found = highest + 1
        if found is None or depth + found > MAX_DEPTH:
            what = f"{record}: " if record else ""
            raise PickleError(f"{what}it is nested too deeply", expected=f"at most {MAX_DEPTH} levels")
        return found

    if not is_leaf(root):
        height(root, 0)


_EMPTY = {id(()), id(nodes.NOTHING)}
"""What is in many places, as one object for all of them, and has nothing inside."""


def _is_shallow(root: object) -> bool:
    """Tell whether a tree is not too deep, of which each part is at one distance from the root: of others it is false.

    Nearly all are such, and to go level by level takes half of the time.
    """
    seen: set[int] = set()
    level = [root]
    for _ in range(MAX_DEPTH - 1):
        below = {id(child): child for node in level for child in inner(node) if id(child) not in _EMPTY}
        if not below or not seen.isdisjoint(below):
            return not below
        seen.update(below)
        level = [*below.values()]
    return False


_of_object = attrgetter(*PARTS[nodes.Object])


def inner(node: object) -> list[object]:
    """Return the objects directly below one that may have others below them."""
    kind = type(node)
    below: Iterable[object]
    if kind is list or kind is tuple:
        below = node  # type: ignore[assignment]
    elif kind is dict and LEAVES.issuperset(map(type, node)):  # type: ignore[call-overload]
        below = node.values()  # type: ignore[attr-defined]
    elif kind is nodes.Object:  # of which DCP has a few for each chunk
        below = _of_object(node)
    else:
        below = [child for _, child in _children(node)]
    return [child for child in below if type(child) not in LEAVES and not is_leaf(child)]


class Digests:
    """Digests of what trees say: equal for equal ones, whether or not they share parts; and how many values they have.

    Answers are remembered.

    The order of a dict and of a set says nothing. A tensor is what it is in its file: its elements are not looked at.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, bytes, int]] = {}

    def of(self, node: object) -> bytes:
        """Return the digest of a tree."""
        return self.and_count(node)[0]

    def and_count(self, node: object) -> tuple[bytes, int]:
        """Return the digest of a tree, and how many values it has when every path is gone down; back to itself one."""
        value = self.value(node)
        if value is not None:
            return _hash(value), 1
        if id(node) not in self._found:
            self._found[id(node)] = node, b"itself", 1  # what leads back to it while it is open
            parts, total = [], 0
            for step, child in children(node) if not isinstance(node, FromFile) else [("node", node.node)]:
                name = "" if isinstance(node, (list, tuple, set, frozenset)) else repr(step)
                digest, count = self.and_count(child)
                parts.append((name, digest))
                total += count
            said = sorted(parts) if isinstance(node, (dict, set, frozenset)) else parts
            self._found[id(node)] = node, _hash(f"{self.kind(node)} {said}"), max(total, 1)
        return self._found[id(node)][1:]

    def value(self, node: object) -> str | None:
        """Return all there is to say about a node that has nothing below it; None for any other."""
        if type(node) is nodes.Tensor:
            return f"Tensor {node.dtype} {node.shape} {node.strides} {node.storage_offset} {node.storage}"
        is_container = isinstance(node, (dict, list, tuple, set, frozenset, FromFile)) or type(node) in PARTS
        return None if is_container else f"{type(node).__name__} {node!r}"

    def kind(self, node: object) -> str:
        """Return all there is to say about a node but what is below it."""
        own = [name for name in getattr(node, "__dataclass_fields__", ()) if name not in PARTS.get(type(node), ())]
        return f"{type(node).__name__} {[getattr(node, name) for name in own if name != 'node']}"


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def pieces(value: object) -> Iterator[nodes.InPieces]:
    """Yield the storages of tensors below a value, whatever files it is of, that lie in several places."""
    for node in each(node_of(value), lambda node: (node_of(child) for _, child in children(node))):
        if isinstance(node, nodes.Tensor) and isinstance(node.storage, nodes.InPieces):
            yield node.storage


def alike(one: object, other: object) -> bool:
    """Tell whether two trees say the same, whatever parts they share."""
    digests = Digests()
    return digests.of(one) == digests.of(other)


def each(root: object, below: Callable[[object], Iterable[object]], seen: set[int] | None = None) -> Iterator[object]:
    """Yield an object and everything below it, each once.

    `below`: returns what is directly below an object; `seen`: identities of objects that were looked at before, to
    which those are added that are now.
    """
    seen = set() if seen is None else seen
    waiting = [root] if id(root) not in seen else []
    seen.add(id(root))
    while waiting:
        node = waiting.pop()
        yield node
        for child in below(node):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
