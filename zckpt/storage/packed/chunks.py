"""How the bytes of a chunk become few: the difference to a prediction, the planes of its elements' bytes, and zstd."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import zstandard

from zckpt.immutable import immutable

Bytes = npt.NDArray[np.uint8]

ZEROS, LITERAL, XOR, DIFFERENCE = range(4)
"""What is stored: nothing; the bytes; their exclusive-or, or their difference as integers, with the prediction's."""

AS_IT_IS, TO_BFLOAT16, TO_FLOAT16 = range(3)
"""What becomes of a prediction first: float32, rounded to nearest even."""

CHUNK_NBYTES = 1 << 20
"""What is read at once where any of it is: a tensor's elements of a few megabytes cost little more than they are."""

MOST_NBYTES = 1 << 24
"""Of a chunk; one that says that it is larger is damaged."""

LEVEL = 1
"""Of zstd: planes of floats are noise, or runs of few values, and higher levels gain a hundredth for twice the time."""

SAMPLE_NBYTES = 1 << 14
"""By so much of a chunk it is told which of several ways makes it smallest."""

_LOCAL = threading.local()


@immutable
class Way:
    """How a chunk is stored: against what, and elements of how many bytes."""

    op: int
    width: int
    cast: int = AS_IT_IS


def is_zero(data: Bytes) -> bool:
    """Tell whether all bytes are zero."""
    return not data[:64].any() and not data.any()


def encode(data: Bytes, width: int, predictions: Iterable[tuple[int, Bytes]]) -> tuple[Way, int, bytes]:
    """Return the way that makes a chunk smallest, which prediction it takes, and what is stored.

    `width`: bytes of an element, of which the chunk has a whole number; `predictions`: what is done to each first, and
    its bytes, as many as that makes of the chunk. After one that is right no more are asked for.
    """
    cast_ones, ways = list[Bytes](), [(Way(LITERAL, width), 0)]
    for number, (cast, prediction) in enumerate(predictions):
        cast_ones.append(one := _casted(prediction, cast))
        if np.array_equal(one, data):
            return Way(XOR, width, cast), number, _compressor().compress(bytes(len(data)))
        ways += [(Way(op, width, cast), number) for op in ((XOR, DIFFERENCE) if width > 1 else (XOR,))]
    if len(ways) > 1 or width > 1:
        ways += [(Way(LITERAL, 1), 0)] if width > 1 else []
        first = 0 if len(data) <= SAMPLE_NBYTES else (len(data) - SAMPLE_NBYTES) // 2 // 8 * 8
        part = slice(first, first + SAMPLE_NBYTES)
        sizes = [len(_stored(data[part], way, cast_ones[n][part] if cast_ones else None)) for way, n in ways]
        best, number = ways[sizes.index(min(sizes))]
    else:
        best, number = ways[0]
    return best, number, _stored(data, best, cast_ones[number] if cast_ones else None)


def decode(stored: bytes, way: Way, nbytes: int, prediction: Bytes | None) -> Bytes:
    """Return the bytes of a chunk. Raises ValueError: what is stored is no such chunk."""
    if way.op == ZEROS:
        return np.zeros(nbytes, np.uint8)
    if zstandard.frame_content_size(stored) != nbytes:
        raise ValueError("another size")
    if not hasattr(_LOCAL, "decompressor"):
        _LOCAL.decompressor = zstandard.ZstdDecompressor()
    plain = np.frombuffer(_LOCAL.decompressor.decompress(stored, max_output_size=nbytes), np.uint8)
    if len(plain) != nbytes or nbytes % way.width:
        raise ValueError("another size")
    found = np.ascontiguousarray(plain.reshape(way.width, -1).T).reshape(-1) if way.width > 1 else plain
    if way.op == LITERAL:
        return found
    if prediction is None:
        raise ValueError("no prediction")
    base = _casted(prediction, way.cast)
    if len(base) != nbytes:
        raise ValueError("a prediction of another size")
    if way.op == XOR:
        both: Bytes = np.bitwise_xor(found, base)
        return both
    unsigned = np.dtype(f"u{way.width}")
    folded = found.view(unsigned)
    one = unsigned.type(1)
    difference = (folded >> one) ^ (~(folded & one) + one)
    whole: Bytes = np.add(base.view(unsigned), difference, dtype=unsigned).view(np.uint8)
    return whole


def _stored(data: Bytes, way: Way, prediction: Bytes | None) -> bytes:
    if way.op != LITERAL and prediction is not None:
        if way.op == XOR:
            data = data ^ prediction
        else:
            unsigned = np.dtype(f"u{way.width}")
            difference = data.view(unsigned) - prediction.view(unsigned)
            signs = difference >> unsigned.type(8 * way.width - 1)
            data = ((difference << unsigned.type(1)) ^ (~signs + unsigned.type(1))).view(np.uint8)
    if way.width > 1:
        data = np.ascontiguousarray(data.reshape(-1, way.width).T)
    return _compressor().compress(data.data)


def _casted(data: Bytes, cast: int) -> Bytes:
    if cast == AS_IT_IS:
        return data
    if len(data) % 4:
        raise ValueError("a prediction of another size")
    if cast == TO_FLOAT16:
        with np.errstate(all="ignore"):
            return data.view(np.float32).astype(np.float16).view(np.uint8)
    bits = data.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.asarray(rounded, np.uint16).view(np.uint8)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_LOCAL, "compressor"):
        _LOCAL.compressor = zstandard.ZstdCompressor(level=LEVEL)
    found: zstandard.ZstdCompressor = _LOCAL.compressor
    return found
