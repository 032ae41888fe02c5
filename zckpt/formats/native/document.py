"""`checkpoint.json` as text: one member, and in lists one element, on a line; a checksum of all before it at the end.

{
"format":"zckpt",
...
"parameters":[
{"name":"wte.weight",...},
...
],
"crc32":"0123abcd"}

Reading it is strict JSON: no NaN, no member twice, no integer beyond 64 bits; and an object has no members but those
that whoever reads it knows.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from zckpt.codes import CHECKSUM, MISSING_FILE
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.files import DOCUMENT_NAME, rank_files
from zckpt.formats.native.node_kinds import Json
from zckpt.state.dtypes import DTYPES
from zckpt.storage.files import read_whole
from zckpt.torchfile import MAX_DIMENSIONS, MAX_ELEMENTS, brief

FORMAT = "zckpt"
VERSION = 2
"""Of the documents that are written. Version 1, which is read, says less of the ranks' files: see docs/formats.md."""

MAXIMUM_NBYTES = 1 << 30
"""Of a document: some twenty times what ten thousand parameters on a thousand ranks need."""

MAX_DIGITS = 20
"""Of an integer: larger ones are written as text, and Python takes quadratic time for them."""

SHOWN = 60
"""Characters of what is found in a member, in a message."""

T = TypeVar("T")

_MISSING: Json = object()
_CRC32 = re.compile("[0-9a-f]{8}")
_END = b',\n"crc32":"%08x"}\n'
_MARK = b',\n"crc32":"'


def encode(members: Mapping[str, object]) -> bytes:
    """Return the text of a document. Raises UnsupportedError: a name that UTF-8 does not have."""
    lines = ",\n".join(f"{json.dumps(key)}:{_lines(value)}" for key, value in members.items())
    try:
        text = f"{{\n{lines}".encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError("a name holds a lone surrogate", found=ascii(error.object[error.start])) from None
    return text + _END % zlib.crc32(text)


def _lines(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def read_document(directory: Path) -> tuple[dict[str, Json], int]:
    """Return the members of a directory's document, and its size in bytes.

    Raises DamagedFileError: it is missing, malformed, or not as it was written; UnsupportedError: it is of a later
    version.
    """
    path = directory / DOCUMENT_NAME
    text = _read(path)
    try:
        document = json.loads(
            text, object_pairs_hook=_once, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
    except (ValueError, RecursionError) as error:
        found = "too deep" if isinstance(error, RecursionError) else str(error)
        raise DamagedFileError("unreadable", path=path, expected="a JSON document", found=found) from error
    if type(document) is not dict or document.get("format") != FORMAT:
        raise DamagedFileError("no zckpt checkpoint", path=path, expected=f'"format": "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise DamagedFileError("unreadable version", path=path, expected=VERSION, found=repr(version)[:40])
    if version > VERSION:
        raise UnsupportedError(
            "written in a later version of the format",
            path=path,
            expected=f"version {VERSION}",
            found=version,
            advice="use a newer zckpt",
        )
    _check_sum(path, text, document)
    return document, len(text)


def _read(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise DamagedFileError(
            "the save that made this directory did not finish",
            path=path.parent,
            expected=f"{DOCUMENT_NAME}, which is written last",
            found=f"only files of ranks, such as {next(iter(rank_files(path.parent)), 'none')}",
            advice="use an earlier checkpoint",
            code=MISSING_FILE,
        )
    return read_whole(str(path), most=MAXIMUM_NBYTES)


def _check_sum(path: Path, text: bytes, document: dict[str, Json]) -> None:
    if "crc32" not in document:
        return
    body, _, _ = text.rpartition(_MARK)
    if text != body + _END % zlib.crc32(body):
        raise DamagedFileError(
            "not as it was written",
            path=path,
            expected=f"a crc32 of {zlib.crc32(body):08x} at the end",
            found=repr(document["crc32"])[:40],
            advice="copy it again; if you changed it on purpose, take the crc32 out",
            code=CHECKSUM,
        )


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member is there twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def is_text(value: str) -> bool:
    """Tell whether UTF-8 has a string: whether it is without lone surrogates."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def wrong(what: str, expected: str, found: object) -> DamagedFileError:
    """Return the error for a piece of a document that is something else."""
    return DamagedFileError(f"unreadable {what}", expected=expected, found=brief(found, SHOWN))


def read_sizes(found: object, what: str) -> tuple[int, ...]:
    """Return a shape, strides or offsets. Raises DamagedFileError: it is something else."""
    if type(found) is not list or len(found) > MAX_DIMENSIONS:
        raise wrong(what, f"at most {MAX_DIMENSIONS} integers", found)
    if not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in found):
        raise wrong(what, "integers from 0 to 2**63-1", found)
    return tuple(found)


class Members:
    """The members of one JSON object.

    `where`: for messages; `names`: all that it may have. Raises DamagedFileError: it is no object, or has others. As
    all errors here it names no file: the caller does.
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
