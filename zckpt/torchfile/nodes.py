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
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from zckpt.state.dtypes import itemsize as itemsize_of

if TYPE_CHECKING:
    from zckpt.torchfile.arrays import NumpyArray


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names; it is never imported.

    Parameters
    ----------
    module, name : str
        As the pickle spells them; `name` may be dotted.
    """

    module: str
    name: str

    @property
    def qualified(self) -> str:
        """Both names, joined with a dot."""
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        return self.qualified


_NOTHING: list[Any] = []
"""What objects have that nothing is appended to or set in, as hardly anything is: one list for all, never changed,
in whatever process an object comes to."""


@dataclass(slots=True, eq=False)
class Object:
    """An object of a class this package knows nothing about.

    Parameters
    ----------
    cls : Global or Object
        What the pickle would call: a class, a function, or the inert result of another such call.
    args : tuple
        Positional arguments of that call.
    kwargs : dict or None
        Keyword arguments; only `how == "newobj_ex"` has any.
    state : object or None
        What the pickle sets afterwards: usually a dict of attributes.
    items : list
        What the pickle appends to it, as to a list.
    entries : list of (key, value)
        What the pickle sets in it, as in a dict.
    how : str
        The kind of call: `reduce`, `newobj`, `newobj_ex`, `inst`, `obj` or `reconstructor`.
    has_state : bool
        Whether `state` was set: a pickle may set it to None.
    """

    cls: Global | Object
    args: tuple[object, ...] = ()
    kwargs: dict[object, object] | None = None
    state: object | None = None
    items: list[object] = field(default_factory=lambda: _NOTHING)
    entries: list[tuple[object, object]] = field(default_factory=lambda: _NOTHING)
    how: str = "reduce"
    has_state: bool = False

    @property
    def qualified(self) -> str:
        """Dotted name of the class, or of the innermost callable that the pickle names."""
        callee = self.cls
        while isinstance(callee, Object):
            callee = callee.cls
        return callee.qualified

    def get(self, name: str, default: object = None) -> object:
        """Return an attribute that the pickle set, whether from `__dict__` or from `__slots__`."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        for part in parts:
            if isinstance(part, dict) and name in part:
                return part[name]
        return default

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


@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype, `torch.float32`, by its name without `torch.`."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch layout by its full name, `torch.sparse_coo`."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """A torch memory format by its name without `torch.`, `channels_last`."""

    name: str


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Storage:
    """A byte range of the file that tensors are views of.

    Parameters
    ----------
    key : str
        Name of the storage within its file.
    dtype : str
        Element type of torch's typed storage; "uint8" for an untyped one.
    nbytes : int, bytes
    location : str
        Device tag: `cpu`, `cuda:0`.
    offset : int, bytes
        From the start of the file.
    """

    key: str
    dtype: str
    nbytes: int
    location: str
    offset: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A dense tensor in a file.

    Parameters
    ----------
    storage : Storage
    dtype : str
        Name in torch, without `torch.`.
    shape, strides : tuple of int, elements
    storage_offset : int, elements
        Of the first element, from the start of the storage.
    byteorder : str
        `little` or `big`.
    requires_grad, is_parameter : bool
    subclass : Global or None
        Class that the file names for the tensor, where it names another than `torch.Tensor`.
    attributes : dict or None
        Python attributes of the tensor, as in `_rebuild_from_type_v2` and `_rebuild_parameter_with_state`.
    metadata : dict or None
        Flags of a lazy view: `conj`, `neg`. The bytes are those before conjugation or negation.
    state : object or None
        The state of a subclass where it is not a dict: (attributes, slots), or its own.
    hooks : object or None
        Backward hooks; None where there are none, as is usual.
    rebuild : str
        Name of torch's function that rebuilds the dense tensor, `_rebuild_tensor_v2`.
    """

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    byteorder: str
    requires_grad: bool = False
    is_parameter: bool = False
    subclass: Global | None = None
    attributes: dict[object, object] | None = None
    metadata: dict[object, object] | None = None
    state: object | None = None
    hooks: object | None = None
    rebuild: str = "_rebuild_tensor_v2"

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
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in row-major order without gaps.

        Source: torch 2.13: a tensor without elements is contiguous, and the stride of a dimension of
        size one does not matter.
        """
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


@dataclass(slots=True, eq=False)
class SparseTensor:
    """A sparse tensor and the dense ones that hold it.

    Parameters
    ----------
    layout : Layout
        `torch.sparse_coo`: parts are (indices, values); the compressed ones: (compressed indices,
        plain indices, values).
    parts : tuple of nodes
    shape : tuple of int, elements
    is_coalesced : bool or None
        None where the file does not say.
    rebuild : str
        Name of torch's function that rebuilds it.
    """

    layout: Layout
    parts: tuple[object, ...]
    shape: Size | tuple[int, ...]
    is_coalesced: bool | None = None
    rebuild: str = "_rebuild_sparse_tensor"


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A quantized tensor: integers, and `quantizer`, (scheme, scales, zero points, axis) or shorter."""

    tensor: Tensor
    quantizer: tuple[object, ...]


@dataclass(slots=True, eq=False)
class NestedTensor:
    """A nested (ragged) tensor: one buffer, and three tensors of sizes, strides and offsets."""

    buffer: object
    sizes: object
    strides: object
    offsets: object


@dataclass(slots=True, eq=False)
class MetaTensor:
    """A tensor without data: of the meta device, or the shell of a wrapper subclass.

    A wrapper subclass keeps its data in `attributes` or `state`. The other fields are those of `Tensor`.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    subclass: Global | None = None
    storage_offset: int = 0
    layout: Layout | None = None
    device: Device | str | None = None
    attributes: dict[object, object] | None = None
    state: object | None = None


@dataclass(slots=True, eq=False)
class DeviceTensor:
    """A tensor of a device without storages (xla, ...), kept as host data with another dtype.

    Parameters
    ----------
    data : Tensor or NumpyArray
        The values on the host.
    dtype : DType
        What they are cast to on the device.
    device : Device or str
    requires_grad : bool
    rebuild : str
        Name of torch's function that rebuilds it.
    """

    data: Tensor | NumpyArray
    dtype: DType
    device: Device | str
    requires_grad: bool
    rebuild: str


NAMES = frozenset({Global, DType, Layout, MemoryFormat, Device})
"""Nodes that are a name and nothing else: two equal ones are as good as one."""

TENSORS = frozenset({Tensor, SparseTensor, QuantizedTensor, NestedTensor, MetaTensor, DeviceTensor})
