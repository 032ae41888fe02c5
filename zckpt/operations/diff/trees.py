"""Any value that a checkpoint holds beside its parameters, as a list of leaves that can be compared one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import Scalar, Slot
from zckpt.torchfile import LEAVES, PARTS, Digests, FromFile, NumpyArray, Object, Tensor, children, each, plain

MAXIMUM_LEAVES = 1 << 14
"""Of one value: a file may refer to its parts so often that no one could look at each of them."""

SHOWN_CHARACTERS = 200
"""A longer value is shown by its beginning and a digest, by which it is compared."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value with nothing below it.

    Parameters
    ----------
    value : JSON-able
        What it is compared by, and shown as.
    slot : Slot or None
        The elements of a tensor, which are compared too.
    """

    value: object
    slot: Slot | None = None


def leaves(value: object, path: str = "") -> dict[str, Leaf]:
    """Return the leaves below a value by their path, `client.args[0].name`.

    Lists and tuples are alike, and a single value is what it is however it is stored; tensors are compared by their
    elements wherever they lie.
    """
    collector = _Collector()
    collector.collect(value, path, "", MAXIMUM_LEAVES)
    return collector.found


class _Meaning(Digests):
    """Digests of what values mean, and how many leaves they have when every path is gone down."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def value(self, node: object) -> str | None:
        leaf = _leaf(node)
        return None if leaf is None else repr(leaf.value)

    def kind(self, node: object) -> str:
        if isinstance(node, Object):
            return node.qualified
        return "dict" if isinstance(node, dict) else type(node).__name__ if type(node) in PARTS else "list"

    def below(self, node: object) -> Iterator[tuple[object, object]]:
        return iter(_below(node))

    def count(self, node: object) -> int:
        """Return the number of leaves below a node; one that is not finished, for it leads back to itself, has one."""
        if _leaf(node) is not None:
            return 1
        self.of(node)
        return self.counts.get(id(node), 1)

    def _digest(self, node: object, parts: list[tuple[str, bytes]]) -> bytes:
        below = (self.counts.get(id(child), 1) for _, child in _below(node))
        self.counts[id(node)] = max(sum(below), 1)
        return super()._digest(node, parts)


class _Collector:
    """Collects leaves; of a tree that has too many, its largest parts are one leaf each."""

    def __init__(self) -> None:
        self.found: dict[str, Leaf] = {}
        self._inside: set[int] = set()
        self._summed: set[int] = set()
        self._meaning = _Meaning()

    def collect(self, node: object, path: str, file: str, most: int) -> None:
        """Add the leaves below a node, at most `most`."""
        if isinstance(node, FromFile):
            self.collect(node.node, path, node.path, most)
            return
        leaf = _leaf(node)
        if leaf is not None:
            slot = slot_of(path, node, file) if file and isinstance(node, Tensor) else None
            self.found[path] = Leaf(leaf.value, slot)
        elif id(node) in self._inside:
            self.found[path] = Leaf("<cycle>")
        else:
            self._inside.add(id(node))
            self._open(node, path, file, most)
            self._inside.remove(id(node))

    def _open(self, node: object, path: str, file: str, most: int) -> None:
        below = _below(node)
        counts = [self._meaning.count(child) for _, child in below]
        if len(counts) > most:
            self._sum_up(node, path, file)
            return
        if isinstance(node, Object):
            self.found[f"{path}.class"] = Leaf(_shown(node.cls))
        elif not below:
            self.found[path] = Leaf("{}" if isinstance(node, dict) else "[]")
        for (step, child), share in zip(below, _shares(counts, most), strict=True):
            self.collect(child, _step(path, step, node), file, share)

    def _sum_up(self, node: object, path: str, file: str) -> None:
        """Add one leaf for all values below a node, and each tensor, whose elements are compared, once."""
        digest = self._meaning.of(node).hex()
        self.found[path] = Leaf(f"{self._meaning.count(node)} values, digest {digest[:16]}")
        parts = each(node, lambda one: (child for _, child in children(one)), self._summed)
        for number, part in enumerate(part for part in parts if isinstance(part, (Tensor, FromFile))):
            if isinstance(part, FromFile):
                self._sum_up(part.node, f"{path}[{number}]", part.path)
            else:
                self.collect(part, f"{path}[{number}]", file, 1)


def _shares(counts: Sequence[int], most: int) -> list[int]:
    """Return how many of `most` leaves each part may have: small ones all of theirs, large ones the rest alike."""
    shares = [0] * len(counts)
    left = len(counts)
    for index in sorted(range(len(counts)), key=counts.__getitem__):
        shares[index] = min(counts[index], most // left)
        most -= shares[index]
        left -= 1
    return shares


def _leaf(node: object) -> Leaf | None:
    """Return what a value with nothing below it is compared by; None for any other."""
    if isinstance(node, Scalar):
        node = node.value
    if isinstance(node, Tensor):
        return Leaf(f"tensor of {node.dtype} {list(node.shape)}")
    is_one = type(node) in LEAVES or (isinstance(node, NumpyArray) and node.items is None)
    return Leaf(_shown(node)) if is_one else None


def _below(node: object) -> list[tuple[object, object]]:
    if isinstance(node, FromFile):
        return [("", node.node)]
    below = list(children(node))
    if isinstance(node, Object):
        return [(step, child) for step, child in below if step != "cls" and child not in ((), [], None)]
    return below


def _step(path: str, step: object, node: object) -> str:
    if isinstance(node, dict) or isinstance(step, str):
        return f"{path}.{step}" if path else str(step)
    return f"{path}[{step}]"


def _shown(node: object) -> object:
    if isinstance(node, NumpyArray):
        return f"array of {node.dtype} {list(node.shape)}, sha256 {hashlib.sha256(node.data).hexdigest()[:16]}"
    if isinstance(node, (bytes, bytearray)):
        return f"{len(node)} bytes, sha256 {hashlib.sha256(node).hexdigest()[:16]}"
    value = plain(node)
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}..., sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return value
