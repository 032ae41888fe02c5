"""Members of JSON objects by name and type, and values with nothing below them as JSON and back. See `node_kinds`.

7  0.5  "text"  null  true                      themselves; a float always has a point or an exponent
{"$": "int", "hex": "-0x20000000000000"}        an integer beyond 2**53 - 1
{"$": "float", "bits": "7ff0000000000000"}      a float that is infinite or no number: its bits, most significant first
{"$": "text", "utf8": BASE64}                   text with lone surrogates, each encoded by itself
{"$": "bytes", "data": BASE64}                  and "bytearray"
{"$": "complex", "real": 0.5, "imag": 1.0}
{"$": "range", "start": 0, "stop": 9, "step": 2}        and "slice", whose three may be null
{"$": "size", "sizes": [2, 3]}                  a `torch.Size`
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import TypeVar

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.node_kinds import SAFE_INTEGER, TAG, Json, Node
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import MAX_DIMENSIONS, MAX_ELEMENTS, Size, brief

MAX_HEX = 4096
"""Characters of a large integer: those that torch files may have take half as many."""

SHOWN = 60


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


def is_text(value: str) -> bool:
    """Tell whether UTF-8 has a string: whether it is without lone surrogates."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def wrong(what: str, expected: str, found: object) -> DamagedFileError:
    """Return the error for a piece of a document that is something else."""
    return DamagedFileError(f"unreadable {what}", expected=expected, found=brief(found, SHOWN))


def parts(found: Mapping[str, Json], *names: str) -> list[Json]:
    """Return the members of an object that has these and its kind, and no others.

    Raises
    ------
    DamagedFileError
        It has others.
    """
    if found.keys() - {TAG} != set(names):
        raise wrong(str(found.get(TAG)), f"members {', '.join(names)}", sorted(found))
    return [found[name] for name in names]


def only_part(found: Mapping[str, Json], name: str) -> Json:
    """Return the one member of an object; errors are those of `parts`."""
    return parts(found, name)[0]


def read_sizes(found: object, what: str) -> tuple[int, ...]:
    """Return a shape, strides or offsets.

    Raises
    ------
    DamagedFileError
        It is something else.
    """
    if type(found) is not list or len(found) > MAX_DIMENSIONS:
        raise wrong(what, f"at most {MAX_DIMENSIONS} integers", found)
    if not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in found):
        raise wrong(what, "integers from 0 to 2**63-1", found)
    return tuple(found)


def read_bytes(found: object, what: str) -> bytes:
    """Return bytes from base64.

    Raises
    ------
    DamagedFileError
        It is something else.
    """
    try:
        return b64decode(found, validate=True)  # type: ignore[arg-type]  # TypeError is caught
    except (binascii.Error, ValueError, TypeError):
        raise wrong(what, "base64", found) from None


def _number(found: object, *kinds: type) -> Node:
    if isinstance(found, dict) and found.get(TAG) in ("int", "float"):
        found = READERS[found[TAG]](found)
    if type(found) not in kinds:
        raise wrong("number", " or ".join(kind.__name__ for kind in kinds), found)
    return found


def _integer(found: Mapping[str, Json]) -> object:
    text = only_part(found, "hex")
    if type(text) is not str or len(text) > MAX_HEX or not text.removeprefix("-").startswith("0x"):
        raise wrong("hex of an int", "0x and digits", text)
    try:
        return int(text, 16)
    except ValueError:
        raise wrong("hex of an int", "0x and digits", text) from None


def _float(found: Mapping[str, Json]) -> object:
    text = only_part(found, "bits")
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(text))
    except (ValueError, TypeError, struct.error):
        raise wrong("bits of a float", "16 hexadecimal digits", text) from None
    return value


def _text(found: Mapping[str, Json]) -> object:
    data = only_part(found, "utf8")
    try:
        return read_bytes(data, "utf8 of a text").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise wrong("utf8 of a text", "UTF-8", data) from None


def _bytes(found: Mapping[str, Json]) -> object:
    return read_bytes(only_part(found, "data"), "data of bytes")


def _bytearray(found: Mapping[str, Json]) -> object:
    return bytearray(read_bytes(only_part(found, "data"), "data of a bytearray"))


def _complex(found: Mapping[str, Json]) -> object:
    return complex(*(_number(part, float) for part in parts(found, "real", "imag")))


def _range(found: Mapping[str, Json]) -> object:
    start, stop, step = (_number(part, int) for part in parts(found, "start", "stop", "step"))
    if step == 0:
        raise wrong("step of a range", "another number", step)
    return range(start, stop, step)


def _slice(found: Mapping[str, Json]) -> object:
    return slice(*(_number(part, int, type(None)) for part in parts(found, "start", "stop", "step")))


def _size(found: Mapping[str, Json]) -> object:
    return Size(read_sizes(only_part(found, "sizes"), "sizes of a size"))


READERS: dict[str, Callable[[Mapping[str, Json]], object]] = {
    "int": _integer,
    "float": _float,
    "text": _text,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
    "range": _range,
    "slice": _slice,
    "size": _size,
}


T = TypeVar("T")

_MISSING: Json = object()

_CRC32 = re.compile("[0-9a-f]{8}")


class Members:
    """The members of one JSON object.

    Parameters
    ----------
    found : object
    where : str
        For messages.
    names : tuple of str
        All that it may have.

    Raises
    ------
    DamagedFileError
        It is no object, or has others. As all errors here it names no file: the caller does.
    """

    __slots__ = ("_found", "_where")

    def __init__(self, found: Json, where: str, names: tuple[str, ...]) -> None:
        if type(found) is not dict or not found.keys() <= set(names):
            raise wrong(where, f"members {', '.join(names)}", sorted(found) if type(found) is dict else found)
        self._found = found
        self._where = where

    def value(self, name: str, default: Json = _MISSING) -> Json:
        """Return a member as it is."""
        found = self._found.get(name, default)
        if found is _MISSING:
            raise wrong(self._where, f"a member {name}", sorted(self._found))
        return found

    def has(self, name: str) -> bool:
        """Tell whether there is such a member."""
        return name in self._found

    def integer(self, name: str, default: Json = _MISSING, *, least: int = 0, most: int = MAX_ELEMENTS) -> int:
        """Return an integer."""
        found = self.value(name, default)
        if type(found) is not int or not least <= found <= most:
            raise wrong(f"{name} of {self._where}", f"an integer from {least} to {most}", found)
        return found

    def optional_integer(self, name: str) -> int | None:
        """Return an integer; None where it is null or absent."""
        return None if self.value(name, None) is None else self.integer(name)

    def text(self, name: str) -> str:
        """Return text."""
        found = self.value(name)
        if type(found) is not str or not is_text(found):
            raise wrong(f"{name} of {self._where}", "text", found)
        return found

    def checksum(self, name: str) -> int:
        """Return a CRC-32 from eight hexadecimal digits."""
        found = self.value(name)
        if type(found) is not str or not _CRC32.fullmatch(found):
            raise wrong(f"{name} of {self._where}", "eight hexadecimal digits", found)
        return int(found, 16)

    def dtype(self, name: str) -> str:
        """Return an element type."""
        found = self.text(name)
        if found not in DTYPES:
            raise wrong(f"{name} of {self._where}", "an element type", found)
        return found

    def flag(self, name: str) -> bool:
        """Return true or false; absent: false."""
        found = self.value(name, default=False)
        if type(found) is not bool:
            raise wrong(f"{name} of {self._where}", "true or false", found)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return sizes or offsets."""
        return read_sizes(self.value(name), f"{name} of {self._where}")

    def list(self, name: str, read: Callable[[Json], T]) -> list[T]:
        """Return a list, each element read by a function."""
        found = self.value(name)
        if type(found) is not list:
            raise wrong(f"{name} of {self._where}", "a list", found)
        return [read(one) for one in found]
