"""Questions about a tree that are answered by looking at each object once, however often it is referred to.

Two kilobytes of a pickle make lists that contain each other in 2**60 ways, or a list that contains itself. Whoever asks
by going down every path, as `==`, `repr` and any plain recursion do, never comes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from zckpt.torchfile.pickle_storage_writer import FromFile
from zckpt.torchfile.tensors import Tensor
from zckpt.torchfile.walk import PARTS, children


class Digests:
    """Digests of what trees say: equal for equal ones, whether or not they share parts. Answers are remembered.

    The order of a dict and of a set says nothing. A tensor is what it is in its file: its elements are not looked at.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, bytes]] = {}

    def of(self, root: object) -> bytes:
        """Return the digest of a tree."""
        known = self._known(root)
        if known is not None:
            return known
        nodes: list[object] = []
        levels: list[Iterator[tuple[object, object]]] = []
        parts: list[list[tuple[str, bytes]]] = []
        self._enter(root, nodes, levels, parts)
        while nodes:
            for step, child in levels[-1]:
                found = self._known(child)
                parts[-1].append((_step(nodes[-1], step), found or b""))
                if found is None:
                    self._enter(child, nodes, levels, parts)
                    break
            else:
                levels.pop()
                known = self._digest(nodes.pop(), parts.pop())
                if parts:
                    parts[-1][-1] = parts[-1][-1][0], known
        return self._found[id(root)][1]

    def value(self, node: object) -> str | None:
        """Return what says all about a node that has nothing below it; None for any other."""
        if type(node) is Tensor:
            return f"Tensor {node.dtype} {node.shape} {node.strides} {node.storage_offset} {node.storage}"
        return None if is_container(node) else f"{type(node).__name__} {node!r}"

    def kind(self, node: object) -> str:
        """Return what says all about a node beside what is below it."""
        own = [name for name in getattr(node, "__dataclass_fields__", ()) if name not in PARTS.get(type(node), ())]
        return f"{type(node).__name__} {[getattr(node, name) for name in own if name != 'node']}"

    def below(self, node: object) -> Iterator[tuple[object, object]]:
        """Yield what is directly below a node, each with its key, index or field name."""
        return children(node) if not isinstance(node, FromFile) else iter([("node", node.node)])

    def _enter(
        self,
        node: object,
        nodes: list[object],
        levels: list[Iterator[tuple[object, object]]],
        parts: list[list[tuple[str, bytes]]],
    ) -> None:
        self._found[id(node)] = node, b"itself"  # what leads back to it while it is open
        nodes.append(node)
        levels.append(self.below(node))
        parts.append([])

    def _known(self, node: object) -> bytes | None:
        value = self.value(node)
        if value is not None:
            return _hash(value)
        found = self._found.get(id(node))
        return None if found is None else found[1]

    def _digest(self, node: object, parts: list[tuple[str, bytes]]) -> bytes:
        said = sorted(parts) if isinstance(node, (dict, set, frozenset)) else parts
        found = _hash(f"{self.kind(node)} {said}")
        self._found[id(node)] = node, found
        return found


def is_container(node: object) -> bool:
    """Tell whether others can be below a node."""
    return isinstance(node, (dict, list, tuple, set, frozenset, FromFile)) or type(node) in PARTS


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _step(node: object, step: object) -> str:
    return "" if isinstance(node, (list, tuple, set, frozenset)) else repr(step)


def alike(one: object, other: object) -> bool:
    """Tell whether two trees say the same, whatever parts they share."""
    digests = Digests()
    return digests.of(one) == digests.of(other)


def each(root: object, below: Callable[[object], Iterable[object]], seen: set[int] | None = None) -> Iterator[object]:
    """Yield an object and everything below it, each once.

    Parameters
    ----------
    root : object
    below : callable
        Returns what is directly below an object.
    seen : set of int, optional
        Identities of objects that were looked at before, to which those are added that are now.
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
