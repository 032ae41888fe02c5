"""Single numbers that a torch file holds as one-element tensors: a step count, a scale. Reads only their bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from zckpt.errors import UnsupportedError
from zckpt.formats.tensors import unresolved
from zckpt.state import Scalar
from zckpt.state.dtypes import is_floating
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import Tensor

_FORMATS = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "?",
}


def read_scalars(path: str, tensors: list[Tensor]) -> list[Scalar]:
    """Read one-element tensors of one file.

    Raises
    ------
    UnsupportedError
        An element type that is no number.
    DamagedFileError
        The file ends too early.
    """
    if not tensors:
        return []
    with opened(path) as descriptor:
        return [
            Scalar(_decode(read_at(descriptor, t.offset, t.itemsize, path=path), t, path), t.dtype) for t in tensors
        ]


def encode(scalar: Scalar) -> bytes:
    """Return the bytes of a 0-d tensor that holds a single value, little-endian.

    Raises
    ------
    UnsupportedError
        An element type that is no number.
    """
    if scalar.dtype == "bfloat16":
        return struct.pack("<f", scalar.value)[2:]
    code = _FORMATS.get(scalar.dtype)
    if code is None:
        raise UnsupportedError(f"a single value of type {scalar.dtype}")
    return struct.pack("<" + code, scalar.value)


def with_scalars(values: Mapping[object, object], path: str) -> dict[str, object]:
    """Return a dict of a torch file with its 0-d tensors read (a learning rate may be one) and its keys as text."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor) and value.shape == ()}
    scalars = dict(zip(tensors, read_scalars(path, list(tensors.values())), strict=True))
    return {str(key): scalars.get(key, value) for key, value in values.items()}


def _decode(data: bytes, tensor: Tensor, path: str) -> float | int | bool:
    number = _number(data, tensor, path)
    if "neg" not in unresolved(tensor, path):
        return number
    if not is_floating(tensor.dtype):
        raise UnsupportedError(f"a single value of type {tensor.dtype} that is still to be negated", path=path)
    return -number


def _number(data: bytes, tensor: Tensor, path: str) -> float | int | bool:
    order = "<" if tensor.byteorder == "little" else ">"
    if tensor.dtype == "bfloat16":
        high = int.from_bytes(data, "little" if order == "<" else "big")
        value: float = struct.unpack("<f", struct.pack("<I", high << 16))[0]
        return value
    code = _FORMATS.get(tensor.dtype)
    if code is None:
        raise UnsupportedError(f"a single value of type {tensor.dtype}", path=path)
    number: float | int | bool = struct.unpack(order + code, data)[0]
    return number
