"""How numpy's dtypes, scalars and arrays are written. See `pickle_stream_writer`; `arrays` says what numpy pickles."""

from __future__ import annotations

from zckpt.errors import UnsupportedError
from zckpt.torchfile.arrays import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.objects import Global
from zckpt.torchfile.pickle_storage_writer import NUMPY
from zckpt.torchfile.pickle_stream_writer import Parts, Writer, nested

DTYPE = Global("numpy", "dtype")
NDARRAY = Global("numpy", "ndarray")

STATE_VERSION = 3
"""First part of a dtype's state."""

ARRAY_VERSION = 1
"""First part of an array's state."""


def numpy_function(writer: Writer, name: str) -> None:
    """Write one of numpy's own functions, under the name that the file it is from has for them."""
    writer.function(f"{writer.source.numpy if writer.source else NUMPY[0]}.multiarray", name)


@nested(NumpyDType)
def dtype(writer: Writer, node: NumpyDType) -> Parts:
    """Write a dtype and its state."""
    writer.function(DTYPE.module, DTYPE.name)
    yield from writer.call((node.code, *node.flags))
    if writer.made(node) and node.state is not None:
        yield node.state
        writer.out += b"b"


@nested(NumpyScalar)
def scalar(writer: Writer, node: NumpyScalar) -> Parts:
    """Write a scalar."""
    numpy_function(writer, "scalar")
    yield from writer.call((dtype_of(node.dtype), node.data))
    writer.made(node)


def dtype_of(text: str) -> NumpyDType:
    """Return the dtype of a scalar, with the state that numpy gives it.

    Raises
    ------
    UnsupportedError
        Its size is not known.

    Notes
    -----
    Source: `dtype.__reduce__` of numpy 1.24 to 2.4: (version, order, subarray, names, fields, itemsize, alignment,
    flags); sizes are given for strings and bytes only.
    """
    order, code = text[:1], text[1:]
    node = NumpyDType(code, (False, True))
    size = node.itemsize
    if size is None:
        raise UnsupportedError("a numpy scalar of this type is not written to a torch file", found=text)
    sizes = {"U": (size, 4), "S": (size, 1), "V": (size, 1)}.get(code[0], (-1, -1))
    if order != "|" or size == 1 or code[0] in "SV":
        node.state = (STATE_VERSION, "<" if code[0] == "U" and order == "|" else order, None, None, None, *sizes, 0)
    return node


@nested(NumpyArray)
def array(writer: Writer, node: NumpyArray) -> Parts:
    """Write an array: an empty one, and then its shape, dtype and data as its state."""
    numpy_function(writer, "_reconstruct")
    yield from writer.call((node.cls or NDARRAY, (0,), b"b"))
    if writer.made(node) and node.dtype_node is not None:
        contents = node.data if node.items is None else node.items
        yield (ARRAY_VERSION, node.shape, node.dtype_node, node.fortran_order, contents)
        writer.out += b"b"
