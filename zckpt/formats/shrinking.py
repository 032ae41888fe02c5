"""A torch file without some of its tensors: its tree with others in their place, and the bytes that its storages keep.

storage     |aaaa....bbbb|cc..........|
shrunk      |aaaabbbb|cc|                 a tensor's reach, first to last element, stays in one piece

In the tree whatever shared an object or went in a circle still does. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.state.ranges import Range, merge
from zckpt.torchfile import PARTS, Tensor, children, is_leaf


def replace_tensors(root: object, new: Mapping[int, Tensor]) -> object:
    """Return a tree with some of its tensors replaced. Containers are changed where they are; tuples are replaced.

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


@dataclass(frozen=True, slots=True)
class Kept:
    """The bytes of a storage that are kept.

    Parameters
    ----------
    ranges : tuple of (int, int), bytes
        Apart from each other, in order.
    starts : tuple of int, bytes
        Where each goes.
    """

    ranges: tuple[Range, ...]
    starts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return self.starts[-1] + self.ranges[-1][1] - self.ranges[-1][0] if self.ranges else 0

    def place(self, offset: int) -> int:
        """Return where a byte goes that is kept."""
        index = bisect_right(self.ranges, offset, key=lambda one: one[0]) - 1
        return self.starts[index] + offset - self.ranges[index][0]


def kept_ranges(used: Iterable[Range], nbytes: int, alignment: int) -> Kept:
    """Return what a storage keeps, so that the ranges used are in it.

    Parameters
    ----------
    used : iterable of (int, int), bytes
        In any order; they may overlap.
    nbytes : int, bytes
        Of the storage.
    alignment : int, bytes
        Every byte keeps its place relative to multiples of this.
    """
    ranges: list[Range] = []
    for low, high in merge((a - a % alignment, min(b + -b % alignment, nbytes)) for a, b in used if a < b):
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    starts, at = [], 0
    for low, high in ranges:
        starts.append(at)
        at += high - low
    return Kept(tuple(ranges), tuple(starts))


def shares(ranges: Sequence[Range], owned: Iterable[tuple[int, int, str]]) -> dict[str, int]:
    """Return how many bytes of some ranges are each owner's; of what several own, the first one's.

    Parameters
    ----------
    ranges : sequence of (int, int), bytes
        Apart from each other and in order.
    owned : iterable of (int, int, str)
        Ranges and who owns them, in any order.
    """
    pieces: list[tuple[int, int, str]] = []
    for low, high, owner in sorted(owned):
        start = max(low, pieces[-1][1]) if pieces else low
        if start < high:
            pieces.append((start, high, owner))
    found: dict[str, int] = {}
    first = 0
    for low, high in ranges:
        while first < len(pieces) and pieces[first][1] <= low:
            first += 1
        at = first
        while at < len(pieces) and pieces[at][0] < high:
            start, end, owner = pieces[at]
            found[owner] = found.get(owner, 0) + min(high, end) - max(low, start)
            at += 1
    return found
