"""Element types: their torch names, sizes, and names in other formats.

A dtype is everywhere in zckpt the string that torch prints after `torch.`: "float32", "bfloat16".
This table needs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable

from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable


@immutable
class DTypeInfo:
    """What is known about one element type."""

    name: str  # name in torch, without `torch.`
    itemsize: int
    safetensors: str | None  # code in a safetensors header; None where that format has none
    storage: str | None  # name of torch's typed storage class, `FloatStorage`; None for dtypes newer than those classes
    floating: bool = False  # whether values are real floating-point numbers


DTYPES: dict[str, DTypeInfo] = {
    info.name: info
    for info in (
        DTypeInfo("float64", 8, "F64", "DoubleStorage", floating=True),
        DTypeInfo("float32", 4, "F32", "FloatStorage", floating=True),
        DTypeInfo("float16", 2, "F16", "HalfStorage", floating=True),
        DTypeInfo("bfloat16", 2, "BF16", "BFloat16Storage", floating=True),
        DTypeInfo("float8_e4m3fn", 1, "F8_E4M3", None, floating=True),
        DTypeInfo("float8_e5m2", 1, "F8_E5M2", None, floating=True),
        DTypeInfo("float8_e4m3fnuz", 1, None, None, floating=True),
        DTypeInfo("float8_e5m2fnuz", 1, None, None, floating=True),
        DTypeInfo("float8_e8m0fnu", 1, "F8_E8M0", None, floating=True),
        DTypeInfo("float4_e2m1fn_x2", 1, "F4", None),  # two numbers, which safetensors counts
        DTypeInfo("complex32", 4, None, None),
        DTypeInfo("bcomplex32", 4, None, None),
        DTypeInfo("complex64", 8, "C64", "ComplexFloatStorage"),
        DTypeInfo("complex128", 16, None, "ComplexDoubleStorage"),
        DTypeInfo("int64", 8, "I64", "LongStorage"),
        DTypeInfo("int32", 4, "I32", "IntStorage"),
        DTypeInfo("int16", 2, "I16", "ShortStorage"),
        DTypeInfo("int8", 1, "I8", "CharStorage"),
        DTypeInfo("uint8", 1, "U8", "ByteStorage"),
        DTypeInfo("uint16", 2, "U16", None),
        DTypeInfo("uint32", 4, "U32", None),
        DTypeInfo("uint64", 8, "U64", None),
        DTypeInfo("bool", 1, "BOOL", "BoolStorage"),
        DTypeInfo("quint8", 1, None, "QUInt8Storage"),
        DTypeInfo("qint8", 1, None, "QInt8Storage"),
        DTypeInfo("qint32", 4, None, "QInt32Storage"),
        DTypeInfo("quint4x2", 1, None, "QUInt4x2Storage"),
        DTypeInfo("quint2x4", 1, None, "QUInt2x4Storage"),
    )
}

FROM_STORAGE = {info.storage: info.name for info in DTYPES.values() if info.storage}
FROM_SAFETENSORS = {info.safetensors: info.name for info in DTYPES.values() if info.safetensors}


def itemsize(dtype: str) -> int:
    """Return the size of one element in bytes.

    Raises UnsupportedError: the dtype is not one torch has.
    """
    info = DTYPES.get(dtype)
    if info is None:
        raise UnsupportedError(f"unknown element type {dtype!r}")
    return info.itemsize


def is_floating(dtype: str) -> bool:
    """Tell whether values of `dtype` are real floating-point numbers."""
    info = DTYPES.get(dtype)
    return info is not None and info.floating


def holding_all(dtypes: Iterable[str]) -> str | None:
    """Return the type in which values of all these keep every bit, such as float32 for float16 and bfloat16.

    None if there are none; of types that are not all floating, the first.
    """
    found = list(dict.fromkeys(dtypes))
    if not all(map(is_floating, found)):
        return found[0]
    most = max(map(itemsize, found), default=0)
    widest = [dtype for dtype in found if itemsize(dtype) == most]
    return next(iter(widest), None) if len(widest) < 2 else "float32"


def is_complex(dtype: str) -> bool:
    """Tell whether an element of `dtype` is two numbers, a real and an imaginary part."""
    return "complex" in dtype


def is_negatable(dtype: str) -> bool:
    """Tell whether torch negates elements of `dtype`: not bools, and neither packed nor 8-bit floating types."""
    integer = dtype.removeprefix("u").startswith("int")
    return integer or is_complex(dtype) or (is_floating(dtype) and itemsize(dtype) > 1)
