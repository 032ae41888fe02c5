"""`checkpoint.json` as text: one member, and in lists one element, on a line; a checksum of all before it at the end.

{
"format":"zckpt",
...
"parameters":[
{"name":"wte.weight",...},
...
],
"crc32":"0123abcd"}

Reading it is strict JSON: no NaN, no member twice, no integer beyond 64 bits.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from zckpt.codes import CHECKSUM, MISSING_FILE
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.names import DOCUMENT_NAME, rank_files
from zckpt.formats.native.node_kinds import Json
from zckpt.storage.files import read_whole

FORMAT = "zckpt"
VERSION = 2
"""Of the documents that are written. Version 1, which is read, says less of the ranks' files: see docs/formats.md."""

MAXIMUM_NBYTES = 1 << 30
"""Of a document: some twenty times what ten thousand parameters on a thousand ranks need."""

MAX_DIGITS = 20
"""Of an integer: larger ones are written as text, and Python takes quadratic time for them."""

_END = b',\n"crc32":"%08x"}\n'
_MARK = b',\n"crc32":"'


def encode(members: Mapping[str, object]) -> bytes:
    """Return the text of a document.

    Raises
    ------
    UnsupportedError
        A name that UTF-8 does not have.
    """
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

    Raises
    ------
    DamagedFileError
        It is missing, malformed, or not as it was written.
    UnsupportedError
        It is of a later version.
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
