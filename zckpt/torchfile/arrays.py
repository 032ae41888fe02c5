"""The nodes that stand for numpy dtypes, scalars and arrays. Knows numpy's codes, not numpy.

numpy pickles an array as an empty one and then sets (version, shape, dtype, fortran order, bytes) in
it, and a dtype as its code and then (version, byte order, ...). So these nodes fill up in two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from struct import unpack

from zckpt.errors import PickleError
from zckpt.torchfile.nodes import Global

ITEM_CODES = {"b": 1, "i": 8, "u": 8, "f": 16, "c": 32, "S": 1 << 31, "U": 1 << 31, "V": 1 << 31}
"""The kinds of dtype whose code carries a size, and the largest size each may have, in bytes."""

FLOATS = {2: "e", 4: "f", 8: "d"}


@dataclass(slots=True, eq=False)
class NumpyDType:
    """A numpy dtype.

    Parameters
    ----------
    code : str
        As numpy pickles it, without byte order: `f4`, `U3`, `V12`, `O8`.
    flags : tuple of object
        The remaining arguments of the call: (align, copy).
    state : tuple or None
        (version, byte order, subarray, names, fields, itemsize, alignment, flags, ...).
    """

    code: str
    flags: tuple[object, ...] = ()
    state: tuple[object, ...] | None = None

    @property
    def byteorder(self) -> str:
        """`<`, `>`, `=` or `|`."""
        order = self.state[1] if self.state and len(self.state) > 1 else "|"
        if isinstance(order, bytes):
            order = order.decode("latin-1")
        return order if isinstance(order, str) and order in ("<", ">", "=") else "|"

    @property
    def text(self) -> str:
        """Code with its byte order, as in numpy's `dtype.str`: `<f4`."""
        order = "|" if self.itemsize == 1 or self.code[:1] in "SVO" else self.byteorder
        return order + self.code

    @property
    def itemsize(self) -> int | None:
        """Bytes of one element; None where only numpy could tell."""
        kind, digits = self.code[:1], self.code[1:]
        if kind in "mM" and len(kind) == 1:
            return 8
        if kind not in ITEM_CODES or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
            return None
        size = int(digits) * (4 if kind == "U" else 1)
        return size if size <= ITEM_CODES[kind] else None


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A numpy scalar.

    Parameters
    ----------
    dtype : str
        With byte order: `<f4`.
    data : bytes
    """

    dtype: str
    data: bytes

    @property
    def value(self) -> object:
        """The scalar as a Python number, string or bytes; `data` itself for types Python lacks."""
        return decode(self.dtype, self.data)


@dataclass(slots=True, eq=False)
class NumpyArray:
    """A numpy array.

    Parameters
    ----------
    dtype : str
        With byte order: `<f4`; structured arrays are `|V12`, arrays of objects `|O8`.
    shape : tuple of int, elements
    fortran_order : bool
        Whether `data` is column-major.
    data : bytes
        Empty for an array of objects.
    items : list or None
        The elements of an array of objects.
    dtype_node : NumpyDType or None
        The whole dtype, with fields and metadata.
    cls : Global or None
        The array's class: usually `numpy.ndarray`.
    """

    dtype: str = "|V0"
    shape: tuple[int, ...] = ()
    fortran_order: bool = False
    data: bytes = b""
    items: list[object] | None = None
    dtype_node: NumpyDType | None = None
    cls: Global | None = None

    def fill(self, shape: tuple[int, ...], dtype: NumpyDType, data: object, *, fortran_order: bool = False) -> None:
        """Give the array its contents.

        Raises
        ------
        PickleError
            The contents do not agree with shape and dtype.
        """
        count = prod(shape)
        self.dtype, self.dtype_node, self.shape, self.fortran_order = dtype.text, dtype, shape, fortran_order
        if isinstance(data, list):
            if len(data) != count:
                raise PickleError("numpy array of objects", expected=f"{count} elements", found=len(data))
            self.items = data
            return
        if not isinstance(data, bytes):
            raise PickleError("numpy array", expected="bytes", found=type(data).__name__)
        if dtype.itemsize is not None and len(data) != count * dtype.itemsize:
            raise PickleError("numpy array", expected=f"{count * dtype.itemsize} bytes", found=len(data))
        self.data = data

    def values(self) -> list[object]:
        """Return the elements as Python values, in the order of `data`."""
        if self.items is not None:
            return self.items
        size = len(self.data) // max(prod(self.shape), 1)
        if size == 0:
            return []
        return [decode(self.dtype, self.data[at : at + size]) for at in range(0, len(self.data), size)]


def decode(dtype: str, data: bytes) -> object:
    """Return one element of a numpy dtype as a Python value, or `data` where Python has no such type.

    Parameters
    ----------
    dtype : str
        With byte order: `<f4`.
    data : bytes
        Exactly one element.
    """
    order, kind = dtype[:1], dtype[1:2]
    size = len(data)
    sign = ">" if order == ">" else "<"
    value: object = data
    if kind == "b":
        value = data != b"\0" * size
    elif kind in ("i", "u"):
        value = int.from_bytes(data, "big" if order == ">" else "little", signed=kind == "i")
    elif kind == "f" and size in FLOATS:
        value = unpack(sign + FLOATS[size], data)[0]
    elif kind == "c" and size // 2 in FLOATS:
        value = complex(*unpack(sign + FLOATS[size // 2] * 2, data))
    elif kind == "S":
        value = data.rstrip(b"\0")
    elif kind == "U":
        value = data.decode("utf-32-be" if order == ">" else "utf-32-le", "replace").rstrip("\0")
    return value
