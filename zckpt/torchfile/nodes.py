"""The inert nodes that stand for what a pickle would have made of Python objects, tensors among them.

A pickle names classes and says what to call with what. Nothing here is ever called: each node keeps
what the pickle said, so that it can be shown and written back. Plain data (numbers, strings, lists,
dicts, tuples, sets, bytes) needs no node and is itself.

A tensor is a view of a storage, and a storage is a byte range of the file; a node has neither's bytes:

    file     |.......[ storage: nbytes at offset ]......|
    tensor            ^storage_offset, then shape and strides, all in elements

Nodes are compared by identity unless they are plain values (`Global`, `DType`, `Device`, ...).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from math import prod
from struct import unpack
from typing import Any

from zckpt.errors import PickleError
from zckpt.immutable import immutable, mutable
from zckpt.state.boxes import is_row_major
from zckpt.state.dtypes import itemsize as itemsize_of
from zckpt.state.spans import Shape, Slot, reach_of

Args = tuple[object, ...]
"""What a call passes."""


@immutable
class Global:
    """A class or function that a pickle names; it is never imported."""

    module: str  # as the pickle spells them; `name` may be dotted
    name: str

    @property
    def qualified(self) -> str:
        """Both names, joined with a dot."""
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        return self.qualified


def _attribute(name: str, *states: object, default: object = None) -> object:
    """Return an attribute from states, each of which is `__dict__`, or that and `__slots__`."""
    parts = [part for state in states for part in (state if isinstance(state, tuple) else (state,))]
    return next((part[name] for part in parts if isinstance(part, dict) and name in part), default)


NOTHING: list[Any] = []
"""What objects have that nothing is appended to or set in, as hardly anything is: one list for all, never changed,
in whatever process an object comes to."""


@mutable(eq=False)
class Object:
    """An object of a class this package knows nothing about."""

    cls: Global | Object  # what the pickle would call: a class, a function, or the inert result of another such call
    args: Args = ()  # positional arguments of that call
    kwargs: dict[object, object] | None = None  # keyword arguments; only `how == "newobj_ex"` has any
    state: object | None = None  # what the pickle sets afterwards: usually a dict of attributes
    items: list[object] = field(default_factory=lambda: NOTHING)  # what the pickle appends to it, as to a list
    entries: list[tuple[object, object]] = field(default_factory=lambda: NOTHING)
    """What the pickle sets in it, as in a dict."""
    how: str = "reduce"
    """The kind of call: `reduce`, `newobj`, `newobj_ex`, `obj` or `reconstructor`; `inst` in older files of zckpt's."""
    has_state: bool = False  # whether `state` was set: a pickle may set it to None

    @property
    def qualified(self) -> str:
        """Dotted name of the class, or of the innermost callable that the pickle names."""
        callee = self.cls
        while isinstance(callee, Object):
            callee = callee.cls
        return callee.qualified

    def get(self, name: str, default: object = None) -> object:
        """Return an attribute that the pickle set, whether from `__dict__` or from `__slots__`."""
        state = self.state
        return state.get(name, default) if type(state) is dict else _attribute(name, state, default=default)

    def extend(self, items: Iterable[object]) -> None:
        """Append to it, as to a list."""
        self.items = self.items or []
        self.items.extend(items)

    def update(self, entries: Iterable[tuple[object, object]]) -> None:
        """Set keys in it, as in a dict."""
        self.entries = self.entries or []
        self.entries.extend(entries)

    def __repr__(self) -> str:
        return f"Object({self.qualified}, how={self.how!r})"


@immutable
class DType:
    """A torch dtype, `torch.float32`, by its name without `torch.`."""

    name: str


@immutable
class Layout:
    """A torch layout by its full name, `torch.sparse_coo`."""

    name: str


@immutable
class MemoryFormat:
    """A torch memory format by its name without `torch.`, `channels_last`."""

    name: str


@immutable
class Device:
    """A torch device, `cuda:1`."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Size(tuple[int, ...]):
    """A `torch.Size`: a shape, in elements."""

    __slots__ = ()


class OrderedMapping(dict[object, object]):
    """A `collections.OrderedDict`; `state` is what the pickle set on it (torch: `_metadata`)."""

    __slots__ = ("state",)
    state: object | None

    def __init__(self) -> None:
        super().__init__()
        self.state = None


class DefaultMapping(dict[object, object]):
    """A `collections.defaultdict`; `factory` names its default factory."""

    __slots__ = ("factory", "state")
    factory: object | None
    state: object | None

    def __init__(self, factory: object | None = None) -> None:
        super().__init__()
        self.factory = factory
        self.state = None


class Namespace(dict[object, object]):
    """An `argparse.Namespace`: its attributes by name."""

    __slots__ = ()


@immutable
class Storage:
    """A byte range of the file that tensors are views of."""

    key: str  # name of the storage within its file
    dtype: str  # element type of torch's typed storage; "uint8" for an untyped one
    nbytes: int
    location: str  # device tag: `cpu`, `cuda:0`
    offset: int  # bytes; from the start of the file


@immutable(eq=False)
class InPieces(Storage):
    """The storage of a tensor that lies in several places, as a slot says: the tensor is all of it, in its order.

    Its offset is -1: what does not ask the slot reads nothing.
    """

    slot: Slot


@mutable(eq=False)
class Tensor:
    """A dense tensor in a file."""

    storage: Storage
    dtype: str  # name in torch, without `torch.`
    shape: Shape  # elements
    strides: Shape  # elements
    storage_offset: int  # elements; of the first element, from the start of the storage
    byteorder: str  # `little` or `big`
    requires_grad: bool = False
    is_parameter: bool = False
    subclass: Global | None = None
    """Class that the file names for the tensor, where it names another than `torch.Tensor`."""
    attributes: dict[object, object] | None = None
    """Python attributes of the tensor, as in `_rebuild_from_type_v2` and `_rebuild_parameter_with_state`."""
    metadata: dict[object, object] | None = None
    """Flags of a lazy view: `conj`, `neg`. The bytes are those before conjugation or negation."""
    state: object | None = None  # the state of a subclass where it is not a dict: (attributes, slots), or its own
    hooks: object | None = None  # backward hooks; None where there are none, as is usual
    rebuild: str = "_rebuild_tensor_v2"  # name of torch's function that rebuilds the dense tensor, `_rebuild_tensor_v2`

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once; an expanded tensor occupies fewer in the file."""
        return self.numel * self.itemsize

    @property
    def offset(self) -> int:
        """Byte of the first element, from the start of the file."""
        return self.storage.offset + self.storage_offset * self.itemsize

    @property
    def reach(self) -> tuple[int, int]:
        """Bytes of its storage from the first element to the last."""
        size = self.itemsize
        start = self.storage_offset * size
        return start, start + (reach_of(self.shape, self.strides) * size if self.numel else 0)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in row-major order without gaps.

        Source: torch 2.13: a tensor without elements is contiguous, and the stride of a dimension of
        size one does not matter.
        """
        return 0 in self.shape or is_row_major(self.shape, self.strides)


@mutable(eq=False)
class SparseTensor:
    """A sparse tensor and the dense ones that hold it."""

    layout: Layout
    """`torch.sparse_coo`: parts are (indices, values); the compressed ones: (compressed indices, plain indices,
    values).
    """
    parts: tuple[object, ...]
    shape: Size | Shape  # elements
    is_coalesced: bool | None = None  # None where the file does not say
    rebuild: str = "_rebuild_sparse_tensor"  # name of torch's function that rebuilds it


@mutable(eq=False)
class QuantizedTensor:
    """A quantized tensor: integers, and `quantizer`, (scheme, scales, zero points, axis) or shorter."""

    tensor: Tensor
    quantizer: tuple[object, ...]


@mutable(eq=False)
class NestedTensor:
    """A nested (ragged) tensor: one buffer, and three tensors of sizes, strides and offsets."""

    buffer: object
    sizes: object
    strides: object
    offsets: object


@mutable(eq=False)
class MetaTensor:
    """A tensor without data: of the meta device, or the shell of a wrapper subclass.

    A wrapper subclass keeps its data in `attributes` or `state`. The other fields are those of `Tensor`.
    """

    dtype: str
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    subclass: Global | None = None
    storage_offset: int = 0
    layout: Layout | None = None
    device: Device | str | None = None
    attributes: dict[object, object] | None = None
    state: object | None = None

    def get(self, name: str) -> object:
        """Return an attribute that the pickle set, whether from `__dict__` or from `__slots__`."""
        return _attribute(name, self.attributes, self.state)


# --- numpy's: an array is pickled as an empty one, in which (version, shape, dtype, fortran order, bytes) are set then,
# and a dtype as its code, with (version, byte order, ...). So these nodes fill up in two steps.

ITEM_CODES = {"b": 1, "i": 8, "u": 8, "f": 16, "c": 32, "S": 1 << 31, "U": 1 << 31, "V": 1 << 31}
"""The kinds of dtype whose code carries a size, and the largest size each may have, in bytes."""

FLOATS = {2: "e", 4: "f", 8: "d"}


@mutable(eq=False)
class NumpyDType:
    """A numpy dtype."""

    code: str  # as numpy pickles it, without byte order: `f4`, `U3`, `V12`, `O8`
    flags: Args = ()  # the remaining arguments of the call: (align, copy)
    state: tuple[object, ...] | None = None
    """(version, byte order, subarray, names, fields, itemsize, alignment, flags, ...)."""

    @property
    def byteorder(self) -> str:
        """`<`, `>`, `=` or `|`."""
        order = self.state[1] if self.state and len(self.state) > 1 else "|"
        order = order.decode("latin-1") if isinstance(order, bytes) else order
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


@immutable
class NumpyScalar:
    """A numpy scalar."""

    dtype: str  # with byte order: `<f4`
    data: bytes

    @property
    def value(self) -> object:
        """The scalar as a Python number, string or bytes; `data` itself for types Python lacks."""
        return decode(self.dtype, self.data)


@mutable(eq=False)
class NumpyArray:
    """A numpy array."""

    dtype: str = "|V0"  # with byte order: `<f4`; structured arrays are `|V12`, arrays of objects `|O8`
    shape: Shape = ()  # elements
    fortran_order: bool = False  # whether `data` is column-major
    data: bytes = b""  # empty for an array of objects
    items: list[object] | None = None  # the elements of an array of objects
    dtype_node: NumpyDType | None = None  # the whole dtype, with fields and metadata
    cls: Global | None = None  # the array's class: usually `numpy.ndarray`

    def fill(self, shape: Shape, dtype: NumpyDType, data: object, *, fortran_order: bool = False) -> None:
        """Give the array its contents.

        Raises PickleError: the contents do not agree with shape and dtype.
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
        return [
            decode(self.dtype, self.data[at : at + size]) for at in range(0, len(self.data) if size else 0, size or 1)
        ]


def decode(dtype: str, data: bytes) -> object:
    """Return one element of a numpy dtype as a Python value, or `data` where Python has no such type."""
    order, kind, size = "big" if dtype[:1] == ">" else "little", dtype[1:2], len(data)
    sign = ">" if order == "big" else "<"
    value: object = data
    if kind == "b":
        value = any(data)
    elif kind in ("i", "u"):
        value = int.from_bytes(data, order, signed=kind == "i")  # type: ignore[arg-type]  # one of the two
    elif kind == "f" and size in FLOATS:
        value = unpack(sign + FLOATS[size], data)[0]
    elif kind == "c" and size // 2 in FLOATS:
        value = complex(*unpack(sign + FLOATS[size // 2] * 2, data))
    elif kind == "S":
        value = data.rstrip(b"\0")
    elif kind == "U":
        value = data.decode(f"utf-32-{order[0]}e", "replace").rstrip("\0")
    return value


@mutable(eq=False)
class DeviceTensor:
    """A tensor of a device without storages (xla, ...), kept as host data with another dtype."""

    data: Tensor | NumpyArray  # the values on the host
    dtype: DType  # what they are cast to on the device
    device: Device | str
    requires_grad: bool
    rebuild: str  # name of torch's function that rebuilds it


NAMES = frozenset({Global, DType, Layout, MemoryFormat, Device})
"""Nodes that are a name and nothing else: two equal ones are as good as one."""

TENSORS = frozenset({Tensor, SparseTensor, QuantizedTensor, NestedTensor, MetaTensor, DeviceTensor})
