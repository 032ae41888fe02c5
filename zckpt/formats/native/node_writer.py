"""Values of a checkpoint as JSON: plain data as it is, every other object by its kind. See `node_kinds`.

Storages that tensors below lie in are collected: their bytes go into a file of a rank, and JSON has their numbers.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from zckpt.errors import PickleError, UnsupportedError
from zckpt.formats.native.document import Form, Json, is_text
from zckpt.formats.native.node_kinds import BY_CLASS, LEAVES, SAFE_INTEGER, TAG, Field, Kind, Node
from zckpt.torchfile import (
    Context,
    DType,
    FromFile,
    Global,
    InPieces,
    MemoryFormat,
    Mentioned,
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

NESTED = frozenset({list}) | (BY_CLASS.keys() - UNNUMBERED - LEAVES)


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
            node, shell, level, source = self._waiting.popleft()
            if type(shell) is list:
                shell.extend(self._values(node, level, source))
            elif TAG in shell:
                self._fields(shell, BY_CLASS[type(node)], node, level, source)
            else:
                shell.update((key, self._value(value, level + 1, source)) for key, value in node.items())
        return found

    def _value(self, node: Node, level: int, source: FromFile | None) -> object:
        cls = type(node)
        if cls in PLAIN:
            return write_plain(node)
        if cls is Storage:
            return {TAG: "storage", "id": self._storage(node, source, None)}
        number = self._numbers.get(id(node))
        if number is not None:
            return {TAG: "ref", "id": number}
        numbered = id(node) in self._shared or (level >= INLINE_LEVELS and cls in NESTED)
        level = 0 if numbered else level
        if cls is slice and not all(type(one) in (int, type(None)) for one in (node.start, node.stop, node.step)):
            raise UnsupportedError("a slice that does not consist of integers cannot be written to a zckpt checkpoint")
        kind = BY_CLASS.get(cls)
        found: Json = [] if cls is list else {}
        is_plain = cls is dict and TAG not in node and all(type(key) is str and is_text(key) for key in node)
        if kind is not None and not is_plain:
            found[TAG] = kind.tag
        elif cls is not list and cls is not dict:
            raise UnsupportedError(f"a value of type {cls.__name__} cannot be written to a zckpt checkpoint")
        if kind is None or kind.mutable:  # which is filled later
            self._waiting.append((node, found, level, source))
        else:
            self._fields(found, kind, node, level, node if cls is FromFile else source)
        if not numbered:
            return found
        self._numbers[id(node)] = number = len(self.objects)
        self.objects.append(found)
        return {TAG: "ref", "id": number}

    def _values(self, nodes: Iterable[object], level: int, source: FromFile | None) -> list[object]:
        return [self._value(node, level + 1, source) for node in nodes]

    def _fields(self, found: dict[str, object], kind: Kind, node: Node, level: int, source: FromFile | None) -> None:
        for field in kind.fields:
            value = field.of(node)
            if field.default in ((), b""):
                is_default = not value
            else:
                is_default = type(value) is type(field.default) and value == field.default
            if not is_default:
                found[field.name] = self._field(field, value, node, level, source)

    def _field(self, field: Field, value: Node, node: object, level: int, source: FromFile | None) -> object:
        form = field.form
        if form is Form.VALUE:
            return self._value(value, level + 1, source)
        if field.own and form in (Form.LIST, Form.PAIRS) and type(value) is not tuple:
            with _refusing():  # keys that the reader refuses
                for key in value:
                    self._context.check_key(value, key)
        if form in (
            Form.VALUES,
            Form.LIST,
        ):  # members of a set in an order that is the same in every run, if they have one
            return self._values(in_order(value) if isinstance(value, (set, frozenset)) else value, level, source)
        if form is Form.PAIRS:
            return [self._values(pair, level, source) for pair in (value.items() if field.own else value)]
        if form is Form.STORAGE:
            return self._storage(value, source, node)
        return write_bytes(value) if form is Form.BYTES else list(value) if form is Form.SIZES else value

    def _storage(self, storage: Storage, source: FromFile | None, tensor: object) -> int:
        """Return the number of a storage that a tensor, or the tree itself, mentions."""
        if source is None or type(storage) not in (Storage, InPieces):
            raise UnsupportedError(f"a tensor of an unnamed file cannot be written: storage {storage.key!r}")
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
    with _refusing():
        for root in roots:
            check_depth(root, heights)
    while waiting:
        node, carried = waiting.pop()
        if type(node) in UNNUMBERED:
            continue
        if type(node) is tuple and (not node or (not carried and all(type(part) in PLAIN for part in node))):
            continue
        if id(node) in seen:
            shared.add(id(node))
            continue
        seen.add(id(node))
        if isinstance(node, FromFile):
            with _refusing():
                check_depth(node.node, heights)
        waiting.extend((child, carried or isinstance(node, FromFile)) for child in _below(node))
    return shared


def _below(node: Node) -> Iterator[object]:
    """Yield the values that are written within the JSON of an object."""
    if type(node) is list:
        yield from node
    kind = BY_CLASS.get(type(node))
    for field in kind.fields if kind is not None else ():
        value = field.of(node)
        if field.form is Form.VALUE:
            yield value
        elif field.form in (Form.VALUES, Form.LIST):
            yield from value
        elif field.form is Form.PAIRS:
            for pair in value.items() if field.own else value:
                yield from pair


@contextmanager
def _refusing() -> Iterator[None]:
    """Say of what cannot be in a pickle that it is not written either."""
    try:
        yield
    except PickleError as error:
        raise UnsupportedError(f"a value cannot be written: {error.message}", expected=error.expected) from None


def write_plain(node: Node) -> object:
    """Return the JSON of None, a bool, a number or text."""
    if type(node) is int and abs(node) > SAFE_INTEGER:
        return {TAG: "int", "hex": hex(node)}
    if type(node) is float and not math.isfinite(node):
        return {TAG: "float", "bits": struct.pack(">d", node).hex()}
    if type(node) is str and not is_text(node):
        return {TAG: "text", "utf8": write_bytes(node.encode("utf-8", "surrogatepass"))}
    return node


def write_bytes(data: bytes | bytearray) -> str:
    """Return bytes as base64."""
    return b64encode(data).decode()
