"""How plain data is written: numbers, strings, bytes, tuples, lists, dicts, sets. See `pickle_stream_writer`."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from zckpt.torchfile.objects import Global
from zckpt.torchfile.pickle_stream_writer import Parts, Writer, leaf, nested

BUILTINS = "__builtin__"
"""The name of `builtins` in protocol 2."""

_ORDERED = frozenset({str, int, float, bool, type(None), bytes})
"""Members of a set that are written in the order of their text: what a set gives differs from run to run."""


@leaf(type(None))
def none(writer: Writer, _: None) -> None:
    """Write None."""
    writer.out += b"N"


@leaf(bool)
def boolean(writer: Writer, value: bool) -> None:
    """Write a bool."""
    writer.out += b"\x88" if value else b"\x89"


@leaf(int)
def integer(writer: Writer, value: int) -> None:
    """Write an integer."""
    writer.integer(value)


@leaf(float)
def number(writer: Writer, value: float) -> None:
    """Write a float."""
    writer.out += b"G" + struct.pack(">d", value)


@leaf(str)
def text(writer: Writer, value: str) -> None:
    """Write a string."""
    writer.text(value)


@nested(bytes)
def data(writer: Writer, value: bytes) -> Parts:
    """Write bytes: protocol 2 has none, so text that is to be encoded."""
    if value:
        yield from writer.reduce(value, Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
    else:
        yield from writer.reduce(value, Global(BUILTINS, "bytes"), ())


@nested(bytearray)
def buffer(writer: Writer, value: bytearray) -> Parts:
    """Write a bytearray."""
    args = (value.decode("latin-1"), "latin-1") if value else ()
    yield from writer.reduce(value, Global(BUILTINS, "bytearray"), args)


@nested(complex)
def complex_number(writer: Writer, value: complex) -> Parts:
    """Write a complex number."""
    yield from writer.reduce(value, Global(BUILTINS, "complex"), (value.real, value.imag))


@nested(slice)
def slice_of(writer: Writer, value: slice) -> Parts:
    """Write a slice."""
    yield from writer.reduce(value, Global(BUILTINS, "slice"), (value.start, value.stop, value.step))


@nested(range)
def range_of(writer: Writer, value: range) -> Parts:
    """Write a range."""
    yield from writer.reduce(value, Global(BUILTINS, "xrange"), (value.start, value.stop, value.step))


@nested(tuple)
def tuple_of(writer: Writer, value: tuple[object, ...]) -> Parts:
    """Write a tuple."""
    if not value:
        writer.out += b")"
    elif len(value) <= 3:
        yield from value
        writer.out += (b"\x85", b"\x86", b"\x87")[len(value) - 1]
        writer.made(value)
    else:
        writer.out += b"("
        yield from value
        writer.out += b"t"
        writer.made(value)


@nested(list)
def list_of(writer: Writer, value: list[object]) -> Parts:
    """Write a list."""
    writer.out += b"]"
    writer.made(value)
    yield from appended(writer, value)


@nested(dict)
def dict_of(writer: Writer, value: dict[object, object]) -> Parts:
    """Write a dict."""
    writer.out += b"}"
    writer.made(value)
    yield from entered(writer, value.items())


@nested(set, frozenset)
def set_of(writer: Writer, value: set[object] | frozenset[object]) -> Parts:
    """Write a set: protocol 2 makes it of a list."""
    yield from writer.reduce(value, Global(BUILTINS, type(value).__name__), (in_order(value),))


def in_order(members: Iterable[object]) -> list[object]:
    """Return the members of a set in an order that is the same in every run, where their types allow it."""
    found = list(members)
    return sorted(found, key=_sort_key) if all(_has_order(member) for member in found) else found


def _has_order(member: object, depth: int = 4) -> bool:
    if type(member) is tuple and depth:
        return all(_has_order(one, depth - 1) for one in member)
    return type(member) in _ORDERED


def _sort_key(member: object) -> tuple[str, str]:
    if isinstance(member, tuple):
        return "tuple", repr([_sort_key(one) for one in member])
    return type(member).__name__, hex(member) if isinstance(member, int) else repr(member)


def appended(writer: Writer, items: list[object]) -> Parts:
    """Write what is appended to the list on top of the stack."""
    if items:
        writer.out += b"("
        yield from items
        writer.out += b"e"


def entered(writer: Writer, entries: Iterable[tuple[object, object]]) -> Parts:
    """Write what is set in the dict on top of the stack."""
    writer.out += b"("
    for key, value in entries:
        yield key
        yield value
    writer.out += b"u"
