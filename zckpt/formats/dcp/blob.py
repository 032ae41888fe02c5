"""The safetensors blob in which a DCP writer that uses safetensors puts all tensors of a file, after its objects.

objects | 8 bytes length | header, JSON | data to the end of the file

The header's metadata says under DCP_SHARDING_INFO, as JSON once more, which chunk of its tensor each one is. The
places in `.metadata` all say where the blob begins, and nothing of where a tensor is in it (torch 2.15).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zckpt.engine.boxes import row_major
from zckpt.errors import DamagedFileError
from zckpt.formats.safetensors.file import MAXIMUM_HEADER_NBYTES
from zckpt.state.dtypes import FROM_SAFETENSORS, itemsize
from zckpt.storage.files import read_at
from zckpt.torchfile import Storage, Tensor

SHARDING_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"


@dataclass(frozen=True, slots=True)
class Blob:
    """A chunk: its node, and its first index in its tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]


def is_blob(descriptor: int, offset: int, nbytes: int, path: str) -> bool:
    """Tell whether a safetensors blob begins at `offset` of a file of `nbytes` bytes; an archive has a zero there."""
    return offset + 9 <= nbytes and read_at(descriptor, offset + 8, 1, path=path) == b"{"


def read_blob(descriptor: int, offset: int, nbytes: int, path: str) -> dict[str, Blob]:
    """Read the header of a blob that begins at `offset` and ends with the file.

    Raises
    ------
    DamagedFileError
        It is malformed, or its tensors leave holes, overlap or reach beyond the file.
    """
    length = int.from_bytes(read_at(descriptor, offset, 8, path=path), "little")
    start = offset + 8 + length
    if length > MAXIMUM_HEADER_NBYTES or start > nbytes:
        raise DamagedFileError("unreadable header", path=path, found=f"{length} bytes")
    try:
        header = json.loads(read_at(descriptor, offset + 8, length, path=path))
        about = sharding(header.pop("__metadata__", {}))
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        found, at = {}, start
        for name, one in ordered:
            found[name] = Blob(_node(name, one, at, at - start), offsets_of(name, about, len(one["shape"])))
            at += found[name].tensor.nbytes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError("unreadable header", path=path, found=f"{type(error).__name__}: {error}") from error
    if at != nbytes:
        raise DamagedFileError("the tensors do not fill the file", path=path, expected=f"{at} bytes", found=nbytes)
    return found


def sharding(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a header's metadata says of chunks.

    Raises
    ------
    ValueError, KeyError, TypeError
        It says nothing, or is malformed.
    """
    found = json.loads(metadata[SHARDING_KEY])
    if not isinstance(found, dict):
        raise TypeError(f"{SHARDING_KEY} is no dict")
    return found


def offsets_of(name: str, about: Mapping[str, Any], dimensions: int) -> tuple[int, ...]:
    """Return the first index of a tensor of a safetensors file in the whole tensor.

    Raises
    ------
    ValueError, KeyError, TypeError
        It is malformed.
    """
    offsets = about[name][OFFSETS_KEY]
    if len(offsets) != dimensions or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"the offsets of {name} are {offsets}")
    return tuple(offsets)


def _node(name: str, one: Mapping[str, Any], offset: int, begin: int) -> Tensor:
    dtype, shape = FROM_SAFETENSORS[one["dtype"]], tuple(one["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape of {name} is {shape}")
    size = math.prod(shape) * itemsize(dtype)
    if list(one["data_offsets"]) != [begin, begin + size]:
        raise ValueError(f"{name} is at {one['data_offsets']}, not {[begin, begin + size]}")
    return Tensor(Storage(name, dtype, size, "cpu", offset), dtype, shape, row_major(shape), 0, "little")
