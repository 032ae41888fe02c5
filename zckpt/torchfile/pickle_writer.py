"""The pickle of a torch file, written opcode by opcode: plain data and tensors, protocol 2 as torch writes it.

Classes are named, never imported: `torch._utils._rebuild_tensor_v2`, `collections.OrderedDict`, `torch.Size`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from zckpt.dtypes import DTYPES, itemsize
from zckpt.errors import UnsupportedError
from zckpt.torchfile.objects import Device, DType, OrderedMapping, Size

_PROTOCOL = b"\x80\x02"
_STOP = b"."


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A contiguous tensor that is to be written, by the key of its storage.

    Parameters
    ----------
    key : str
        Storage key; tensors with the same key share memory when loaded.
    dtype : str
    shape : tuple of int
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    numel: int


def dump(root: object) -> bytes:
    """Return the pickle of a tree of plain data and NewTensors.

    Raises
    ------
    UnsupportedError
        The tree holds something else.
    """
    out = bytearray(_PROTOCOL)
    _write(root, out)
    out += _STOP
    return bytes(out)


def _write(node: object, out: bytearray) -> None:
    writer = _WRITERS.get(type(node))
    if writer is None:
        raise UnsupportedError(f"a value of type {type(node).__name__} is not written to a torch file")
    writer(node, out)


def _write_none(_: None, out: bytearray) -> None:
    out += b"N"


def _write_bool(value: bool, out: bytearray) -> None:
    out += b"\x88" if value else b"\x89"


def _write_int(value: int, out: bytearray) -> None:
    if 0 <= value < 256:
        out += b"K" + bytes([value])
    elif -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _write_float(value: float, out: bytearray) -> None:
    out += b"G" + struct.pack(">d", value)


def _write_str(value: str, out: bytearray) -> None:
    data = value.encode("utf-8", "surrogatepass")
    out += b"X" + struct.pack("<I", len(data)) + data


def _write_list(value: list[object], out: bytearray) -> None:
    out += b"]("
    for item in value:
        _write(item, out)
    out += b"e"


def _write_tuple(value: tuple[object, ...], out: bytearray) -> None:
    out += b"("
    for item in value:
        _write(item, out)
    out += b"t"


def _write_items(value: dict[object, object], out: bytearray) -> None:
    out += b"("
    for key, item in value.items():
        _write(key, out)
        _write(item, out)
    out += b"u"


def _write_dict(value: dict[object, object], out: bytearray) -> None:
    out += b"}"
    _write_items(value, out)


def _write_global(module: str, name: str, out: bytearray) -> None:
    out += f"c{module}\n{name}\n".encode()


def _write_ordered(value: OrderedMapping, out: bytearray) -> None:
    _write_global("collections", "OrderedDict", out)
    out += b")R"
    _write_items(value, out)


def _write_size(value: Size, out: bytearray) -> None:
    _write_global("torch", "Size", out)
    _write_tuple(tuple(value), out)
    out += b"\x85R"


def _write_dtype(value: DType, out: bytearray) -> None:
    _write_global("torch", value.name, out)


def _write_device(value: Device, out: bytearray) -> None:
    _write_global("torch", "device", out)
    _write_tuple((value.type,) if value.index is None else (value.type, value.index), out)
    out += b"R"


def _write_tensor(value: NewTensor, out: bytearray) -> None:
    """Write a tensor; element types newer than torch's typed storages use an untyped one and name themselves."""
    typed = DTYPES[value.dtype].storage
    _write_global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3", out)
    out += b"(("
    _write_str("storage", out)
    _write_global(*(("torch", typed) if typed else ("torch.storage", "UntypedStorage")), out)
    _write_str(value.key, out)
    _write_str("cpu", out)
    _write_int(value.numel if typed else value.numel * itemsize(value.dtype), out)
    out += b"tQ"
    _write_int(0, out)
    _write_tuple(value.shape, out)
    _write_tuple(_row_major(value.shape), out)
    _write_bool(False, out)
    _write_ordered(OrderedMapping(), out)
    if not typed:
        _write_dtype(DType(value.dtype), out)
    out += b"tR"


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_WRITERS: dict[type, Callable[..., None]] = {
    type(None): _write_none,
    bool: _write_bool,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    list: _write_list,
    tuple: _write_tuple,
    dict: _write_dict,
    OrderedMapping: _write_ordered,
    Size: _write_size,
    DType: _write_dtype,
    Device: _write_device,
    NewTensor: _write_tensor,
}
