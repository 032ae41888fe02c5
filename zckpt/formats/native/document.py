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
import zlib
from base64 import b64decode
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zckpt.codes import CHECKSUM, MISSING_FILE
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.files import DOCUMENT_NAME, rank_files
from zckpt.state.dtypes import DTYPES
from zckpt.storage.files import each_once, read_whole
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

Json = Any
"""What `json.loads` makes of a document, or of a part of one."""

_END = b',\n"crc32":"%08x"}\n'
_MARK = b',\n"crc32":"'


def encode(members: Mapping[str, object]) -> bytes:
    """Return the text of a document. Raises UnsupportedError: a name that UTF-8 does not have."""
    lines = []
    for key, value in members.items():
        if isinstance(value, list) and value:
            said = "[\n" + ",\n".join(map(_compact, value)) + "\n]"
        else:
            said = _compact(value)
        lines.append(f"{json.dumps(key)}:{said}")
    try:
        text = ("{\n" + ",\n".join(lines)).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError("a name has a lone surrogate", found=ascii(error.object[error.start])) from None
    return text + _END % zlib.crc32(text)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def read_document(directory: Path) -> tuple[dict[str, Json], int]:
    """Return the members of a directory's document, and its size in bytes.

    Raises DamagedFileError: it is missing, malformed, or not as it was written; UnsupportedError: it is of a later
    version.
    """
    path = directory / DOCUMENT_NAME
    if not os.path.lexists(path):
        raise DamagedFileError(
            "the save that made this directory did not finish",
            path=directory,
            expected=f"{DOCUMENT_NAME}, which is written last",
            found=f"only rank files, such as {next(iter(rank_files(directory)), 'none')}",
            advice="use an earlier checkpoint",
            code=MISSING_FILE,
        )
    text = read_whole(str(path), most=MAXIMUM_NBYTES)
    try:
        document = json.loads(
            text, object_pairs_hook=each_once, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
    except (ValueError, RecursionError) as error:
        found = "too deep" if isinstance(error, RecursionError) else str(error)
        raise DamagedFileError("unreadable", path=path, expected="a JSON document", found=found) from error
    if type(document) is not dict or document.get("format") != FORMAT:
        raise DamagedFileError("not a zckpt checkpoint", path=path, expected=f'"format": "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise DamagedFileError("unreadable version", path=path, expected=VERSION, found=repr(version)[:40])
    if version > VERSION:
        raise UnsupportedError(
            "written in a newer version of the format",
            path=path,
            expected=f"version {VERSION}",
            found=version,
            advice="use a newer zckpt",
        )
    body, _, _ = text.rpartition(_MARK)
    if "crc32" in document and text != body + _END % zlib.crc32(body):
        raise DamagedFileError(
            "changed since it was written",
            path=path,
            expected=f"the crc32 {zlib.crc32(body):08x} at the end",
            found=repr(document["crc32"])[:40],
            advice="copy it again; if you changed it on purpose, remove the crc32",
            code=CHECKSUM,
        )
    return document, len(text)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a JSON number")
    return value


def is_text(value: str) -> bool:
    """Tell whether UTF-8 has a string: whether it is without lone surrogates."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def wrong(what: str, expected: str, found: object) -> DamagedFileError:
    """Return the error for a piece of a document that is something else."""
    return DamagedFileError(f"unreadable {what}", expected=expected, found=brief(found, SHOWN))


class Form(Enum):
    """How a value is in JSON, and what that is called.

    VALUES and LIST are arrays of values (in memory a tuple and a list), PAIRS one of [key, value]. STORAGE is a number
    of `storages`. JSON is whatever there is, for whoever knows better.
    """

    VALUE = "a value"
    VALUES = "an array"
    LIST = "a list"
    PAIRS = "[key, value] pairs"
    TEXT = "text"
    FLAG = "true or false"
    INTEGER = "an integer from 0 to 2**63-1"
    POSITIVE = "an integer from 1 to 2**63-1"
    SIZES = f"at most {MAX_DIMENSIONS} integers from 0 to 2**63-1"
    DTYPE = "an element type"
    BYTES = "base64"
    STORAGE = "a number"
    JSON = "anything"


def _is_size(found: Json) -> bool:
    return type(found) is int and 0 <= found <= MAX_ELEMENTS


_FORMS: dict[Form, tuple[type, Callable[[Any], object]]] = {
    Form.TEXT: (str, is_text),
    Form.DTYPE: (str, DTYPES.get),
    Form.FLAG: (bool, lambda _: True),
    Form.INTEGER: (int, _is_size),
    Form.POSITIVE: (int, lambda found: found and _is_size(found)),
    Form.SIZES: (list, lambda found: len(found) <= MAX_DIMENSIONS and all(map(_is_size, found))),
    Form.BYTES: (str, lambda _: True),
    Form.STORAGE: (int, lambda _: True),
    **dict.fromkeys((Form.VALUES, Form.LIST, Form.PAIRS), (list, lambda _: True)),
}
"""The type of JSON that a form has, and whether it is one; of others it may be any."""


def formed(form: Form, found: Json, what: str) -> Json:
    """Return what has a form: sizes as a tuple, bytes decoded, the rest as it is, arrays with whatever elements.

    Raises DamagedFileError: it has another. As all errors here it names no file: the caller does.
    """
    kind, is_one = _FORMS.get(form, (type(found), lambda _: True))
    fits = type(found) is kind and bool(is_one(found))
    try:
        if fits:
            return (
                tuple(found) if form is Form.SIZES else b64decode(found, validate=True) if form is Form.BYTES else found
            )
    except ValueError:  # no base64
        pass
    raise wrong(what, form.value, found)


def record(
    found: Json, what: str, needed: Mapping[str, Form], optional: Mapping[str, Form] = MappingProxyType({})
) -> dict[str, Json]:
    """Return the members of an object, which has no others; None for an optional one that is absent or null."""
    every = {**needed, **optional}
    if type(found) is not dict or not found.keys() <= every.keys():
        raise wrong(what, f"members {', '.join(every)}", sorted(found) if type(found) is dict else found)
    for name in needed:
        if name not in found:
            raise wrong(what, f"a member {name}", sorted(found))
    return {
        name: None if name in optional and found.get(name) is None else formed(form, found[name], f"{name} of {what}")
        for name, form in every.items()
    }
