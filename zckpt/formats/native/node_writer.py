"""Values of a checkpoint as JSON: plain data as it is, every other object by its kind. See `node_kinds`.

Storages that tensors below lie in are collected: their bytes go into a file of a rank, and JSON has their numbers.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator

from zckpt.errors import PickleError, UnsupportedError
from zckpt.formats.native.document import is_text
from zckpt.formats.native.node_kinds import BY_CLASS, LEAVES, REQUIRED, SAFE_INTEGER, TAG, Field, Form, Json, Kind, Node
from zckpt.torchfile import (
    Context,
    DType,
    FromFile,
    Global,
    MemoryFormat,
    Mentioned,
    Size,
    Storage,
    Tensor,
    check_depth,
    in_order,
)

INLINE_LEVELS = 8
"""Values nested deeper are numbered objects, so that a JSON parser never meets many levels."""

WORK = 1 << 62
"""Whose state it is may spend what time they like; only kinds of keys are checked."""

PLAIN = frozenset({type(None), bool, int, float, str})
UNNUMBERED = PLAIN | {Global, DType, MemoryFormat, Storage}
"""Kinds of which two equal ones are always one and the same, to whoever loads them."""

NESTED = frozenset({list}) | (BY_CLASS.keys() - UNNUMBERED)


class NodeWriter:
    """Writes the values of one document.

    `roots`: all values that will be written: what several of them share is numbered. `objects`: JSON of the numbered
    objects; `storages`: the storages that tensors lie in, by number.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.objects: list[object] = []
        self.storages: list[Mentioned] = []
        self._roots = list(roots)  # keeps them, so that ids stay their own
        self._shared = _shared(self._roots)
        self._numbers: dict[int, int] = {}
        self._storage_numbers: dict[tuple[str, Storage], int] = {}
        self._context = Context(WORK)
        self._waiting: deque[tuple[Node, Json, int, FromFile | None]] = deque()

    def write(self, root: object) -> Json:
        """Return the JSON of one of the roots, or of a value that shares nothing with others.

        Raises UnsupportedError: it holds something that the format has no kind for, or is nested too deep.
        """
        self._roots.append(root)
        found = self._value(root, 0, None)
        while self._waiting:
            self._fill(*self._waiting.popleft())
        return found

    def _value(self, node: Node, level: int, source: FromFile | None) -> object:
        kind = type(node)
        if kind in PLAIN:
            return write_plain(node)
        if kind is Storage:
            return {TAG: "storage", "id": self._storage(node, source, None)}
        number = self._numbers.get(id(node))
        if number is not None:
            return {TAG: "ref", "id": number}
        numbered = id(node) in self._shared or (level >= INLINE_LEVELS and kind in NESTED)
        found = self._object(node, 0 if numbered else level, source)
        if not numbered:
            return found
        self._numbers[id(node)] = number = len(self.objects)
        self.objects.append(found)
        return {TAG: "ref", "id": number}

    def _object(self, node: Node, level: int, source: FromFile | None) -> object:
        """Return an object's JSON: of an immutable one whole, of a mutable one to be filled later."""
        cls = type(node)
        if cls in LEAVES:
            return write_leaf(node)
        kind = BY_CLASS.get(cls)
        found: Json = [] if cls is list else {}
        if kind is not None and not (cls is dict and _has_plain_keys(node)):
            found[TAG] = kind.tag
        elif cls is not list and cls is not dict:
            raise UnsupportedError(f"a value of type {cls.__name__} is not written to a zckpt checkpoint")
        if kind is None or kind.mutable:
            self._waiting.append((node, found, level, source))
        else:
            self._fields(found, kind, node, level, node if cls is FromFile else source)
        return found

    def _fill(self, node: Node, found: Json, level: int, source: FromFile | None) -> None:
        if type(found) is list:
            found.extend(self._values(node, level, source))
        elif TAG in found:
            self._fields(found, BY_CLASS[type(node)], node, level, source)
        else:
            found.update((key, self._value(value, level + 1, source)) for key, value in node.items())

    def _values(self, nodes: Iterable[object], level: int, source: FromFile | None) -> list[object]:
        return [self._value(node, level + 1, source) for node in nodes]

    def _fields(self, found: dict[str, object], kind: Kind, node: Node, level: int, source: FromFile | None) -> None:
        for field in kind.fields:
            if field.form in (Form.MEMBERS, Form.ENTRIES):
                value = node
            else:
                value = getattr(node, field.name)
                if _is_default(field, value):
                    continue
            found[field.name] = self._field(field, value, node, level, source)

    def _field(self, field: Field, value: Node, node: object, level: int, source: FromFile | None) -> object:
        form = field.form
        if form == Form.VALUE:
            return self._value(value, level + 1, source)
        if form in (Form.MEMBERS, Form.ENTRIES) and type(value) is not tuple:
            self._check_keys(value)
        if form in (Form.VALUES, Form.LIST, Form.MEMBERS):
            return self._values(_members(value) if form == Form.MEMBERS else value, level, source)
        if form in (Form.PAIRS, Form.ENTRIES):
            return [self._values(pair, level, source) for pair in (value.items() if form == Form.ENTRIES else value)]
        if form == Form.STORAGE:
            return self._storage(value, source, node)
        return write_bytes(value) if form == Form.BYTES else list(value) if form == Form.SIZES else value

    def _check_keys(self, container: Iterable[object]) -> None:
        """Refuse keys that the reader refuses."""
        try:
            for key in container:
                self._context.check_key(container, key)
        except PickleError as error:
            raise UnsupportedError(f"a value is not written: {error.message}", expected=error.expected) from None

    def _storage(self, storage: Storage, source: FromFile | None, tensor: object) -> int:
        """Return the number of a storage that a tensor, or the tree itself, mentions."""
        if source is None or type(storage) is not Storage:
            raise UnsupportedError(f"a tensor of a file that is not named cannot be written: storage {storage.key!r}")
        order = tensor.byteorder if isinstance(tensor, Tensor) else source.byteorder
        number = self._storage_numbers.setdefault((source.path, storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(Mentioned(storage, source.path, order))
        if isinstance(tensor, Tensor):
            self.storages[number].dtypes.add(tensor.dtype)
            self.storages[number].byteorder = order
        return number


def _shared(roots: list[object]) -> set[int]:
    """Return the ids of the objects that occur several times below the roots.

    Numbers and text in a tuple, such as AdamW's betas, are as good twice, but for a tree that a file is written from.
    """
    seen: set[int] = set()
    shared: set[int] = set()
    waiting: list[tuple[object, bool]] = [(root, False) for root in roots]
    heights: dict[int, int] = {}
    for root in roots:
        _check_depth(root, heights)
    while waiting:
        node, carried = waiting.pop()
        if type(node) in UNNUMBERED or (type(node) is tuple and _is_plain_tuple(node, carried)):
            continue
        if id(node) in seen:
            shared.add(id(node))
            continue
        seen.add(id(node))
        if isinstance(node, FromFile):
            _check_depth(node.node, heights)
        waiting.extend((child, carried or isinstance(node, FromFile)) for child in _below(node))
    return shared


def _is_plain_tuple(node: tuple[object, ...], carried: bool) -> bool:
    return not node or (not carried and all(type(part) in PLAIN for part in node))


def _below(node: Node) -> Iterator[object]:
    """Yield the values that are written within the JSON of an object."""
    if isinstance(node, dict):
        for pair in node.items():
            yield from pair
    elif isinstance(node, (list, tuple, set, frozenset)):
        yield from node
    kind = BY_CLASS.get(type(node))
    for field in kind.fields if kind is not None else ():
        if field.form == Form.VALUE:
            yield getattr(node, field.name)
        elif field.form in (Form.VALUES, Form.LIST):
            yield from getattr(node, field.name)
        elif field.form == Form.PAIRS:
            for pair in getattr(node, field.name):
                yield from pair


def _check_depth(root: object, heights: dict[int, int]) -> None:
    try:
        check_depth(root, heights)
    except PickleError as error:
        raise UnsupportedError(f"a value is not written: {error.message}", expected=error.expected) from None


def _has_plain_keys(node: dict[object, object]) -> bool:
    return TAG not in node and all(type(key) is str and is_text(key) for key in node)


def _is_default(field: Field, value: object) -> bool:
    if field.default is REQUIRED:
        return False
    if field.form in (Form.VALUES, Form.LIST, Form.PAIRS, Form.BYTES):
        return not value
    return value is field.default or (type(value) is type(field.default) and value == field.default)


def _members(node: Iterable[object]) -> list[object]:
    """Return the members of a container; of a set in an order that is the same in every run, where they have one."""
    return in_order(node) if isinstance(node, (set, frozenset)) else list(node)


def write_plain(node: Node) -> object:
    """Return the JSON of None, a bool, a number or text."""
    if type(node) is int and abs(node) > SAFE_INTEGER:
        return {TAG: "int", "hex": hex(node)}
    if type(node) is float and not math.isfinite(node):
        return {TAG: "float", "bits": struct.pack(">d", node).hex()}
    if type(node) is str and not is_text(node):
        return {TAG: "text", "utf8": write_bytes(node.encode("utf-8", "surrogatepass"))}
    return node


def write_leaf(node: Node) -> dict[str, object]:
    """Return the JSON of bytes, a bytearray, a complex number, a range, a slice or a `torch.Size`."""
    tag = type(node).__name__.lower()
    if isinstance(node, (bytes, bytearray)):
        return {TAG: tag, "data": write_bytes(node)}
    if isinstance(node, complex):
        return {TAG: tag, "real": write_plain(node.real), "imag": write_plain(node.imag)}
    if isinstance(node, Size):
        return {TAG: tag, "sizes": list(node)}
    bounds = {name: getattr(node, name) for name in ("start", "stop", "step")}
    if not all(bound is None or type(bound) is int for bound in bounds.values()):
        raise UnsupportedError("a slice of other than integers is not written to a zckpt checkpoint")
    return {TAG: tag, **{name: write_plain(bound) for name, bound in bounds.items()}}


def write_bytes(data: bytes | bytearray) -> str:
    """Return bytes as base64."""
    return b64encode(data).decode()
