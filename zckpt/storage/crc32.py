"""CRC-32, and that of a file from the CRC-32s of its pieces, so that these can be written in parallel, in any order."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """Return x^(8 nbytes) modulo P."""
    result, factor = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, factor)
        factor = _multiply(factor, factor)
        nbytes >>= 1
    return result


def combined(first: int, second: int, second_nbytes: int, /) -> int:
    """Return the CRC-32 of two pieces put end to end.

    A CRC is a polynomial over GF(2) modulo P; appending n bytes multiplies it by x^(8n). Polynomials are held
    bit-reversed, as in zip files: bit 31 is the coefficient of x^0.

    `first`, `second`: CRC-32 of each piece; `second_nbytes` (bytes): length of the second piece.
    """
    return _multiply(first, _shift(second_nbytes)) ^ second


try:
    from isal.isal_zlib import crc32
    from isal.isal_zlib import crc32_combine as combine
except ImportError:  # a machine that isal has no wheel for: the same sums, which take several times as long
    from zlib import crc32

    combine = combined


def line_of(content: object) -> bytes:
    """Return a line of JSON, after the CRC-32 of it: one that is not whole can be told."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def content_of(line: bytes) -> Any:  # noqa: ANN401  # whatever JSON has
    """Return what a line of JSON says; None of one that is not whole, or says nothing."""
    crc, _, text = line.rstrip(b"\n").partition(b" ")
    try:
        return json.loads(text) if b"%08x" % crc32(text) == crc else None
    except (ValueError, RecursionError):
        return None


__all__ = ["combine", "content_of", "crc32", "line_of"]
