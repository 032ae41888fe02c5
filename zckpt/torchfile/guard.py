"""What keeps a pickle from exhausting its reader: a budget of work, and rules for keys.

A few bytes of a pickle can copy or hash something large again and again; so everything that costs more
than its opcode is counted, and the sum must stay within a small multiple of the pickle's size.

Hashing is the one thing done with objects of the file: tuples could nest so deep or share so much that
it never ends, or thousands of keys could have one hash. Strings and bytes hash with a secret of the
process, and nodes by identity or by such strings.
"""

from __future__ import annotations

from zckpt.errors import PickleError
from zckpt.torchfile.arrays import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.objects import Device, DType, Global, Layout, MemoryFormat, Object, Size
from zckpt.torchfile.tensors import (
    DeviceTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SparseTensor,
    Storage,
    Tensor,
)

FREE_WORK = 1 << 16
WORK_PER_BYTE = 2
"""An honest pickle copies or hashes each of its bytes about once."""

MAX_KEY_DEPTH = 8
"""Levels of tuples in a key: real ones have one or two."""

MAX_KEY_NODES = 1000
"""Elements of a key with every level expanded: bounds the time to hash it, and its length as text."""

TEXT_PER_NODE = 64
"""Characters of a text in a nested key that count as one more element: the same text may be there again and again."""

MAX_COLLISIONS = 64
"""Keys of one container with one hash: real data has one or two (-1 and -2), a chain of n costs n^2."""

SMALL = 1 << 60
"""Integers below hash to themselves, so that no two collide."""

SAFE = frozenset(
    {str, bytes, bool, type(None), Global, DType, Layout, MemoryFormat, Device, Object, Storage, Tensor}
    | {SparseTensor, QuantizedTensor, NestedTensor, MetaTensor, DeviceTensor}
    | {NumpyScalar, NumpyDType, NumpyArray}
)
NUMBERS = frozenset({int, float, complex})
NESTS = frozenset({tuple, Size, frozenset})


class Guard:
    """Counts the work of one pickle and checks its keys.

    Parameters
    ----------
    nbytes : int, bytes
        Size of the pickle.
    """

    __slots__ = ("budget", "counts")

    def __init__(self, nbytes: int = 0) -> None:
        self.budget = FREE_WORK + WORK_PER_BYTE * nbytes
        self.counts: dict[int, tuple[object, dict[int, int]]] = {}  # keeps containers, so that ids stay their own

    def spend(self, work: int) -> None:
        """Count the elements or bytes that are about to be copied or hashed.

        Raises
        ------
        PickleError
            The pickle asks for more work than an honest one of its size.
        """
        self.budget -= work
        if self.budget < 0:
            raise PickleError(
                "it copies or hashes far more than it holds", advice="the file was made to exhaust its reader"
            )

    def check_key(self, container: object, key: object) -> None:
        """Refuse a key that cannot be hashed, or that was made to be slow.

        Raises
        ------
        PickleError
            With the reason.
        """
        kind = type(key)
        if kind in SAFE or (type(key) is int and -SMALL < key < SMALL):
            return
        if kind in NESTS:
            self.spend(MAX_KEY_NODES - measure(key, MAX_KEY_NODES, MAX_KEY_DEPTH))
        elif kind not in NUMBERS:
            raise PickleError(f"a {kind.__name__} is used as a key", expected="something hashable")
        _, counts = self.counts.setdefault(id(container), (container, {}))
        value = hash(key)
        counts[value] = count = counts.get(value, 0) + 1
        if count > MAX_COLLISIONS:
            raise PickleError("too many keys with one hash", advice="the file was made to exhaust its reader")


def measure(key: object, nodes: int, depth: int) -> int:
    """Return what is left of a budget of `nodes` after walking a nested key.

    Raises
    ------
    PickleError
        The key is too large, too deep, or holds something that cannot be hashed.
    """
    kind = type(key)
    if kind not in NESTS:
        if kind not in SAFE and kind not in NUMBERS:
            raise PickleError(f"a {kind.__name__} is used as a key", expected="something hashable")
        return nodes - 1 - (len(key) // TEXT_PER_NODE if isinstance(key, (str, bytes)) else 0)
    if depth == 0:
        raise PickleError("a key is nested too deep", expected=f"at most {MAX_KEY_DEPTH} levels")
    for element in key:  # type: ignore[attr-defined]  # one of NESTS
        nodes = measure(element, nodes, depth - 1)
        if nodes < 0:
            raise PickleError("a key is too large", expected=f"at most {MAX_KEY_NODES} elements")
    return nodes - 1
