"""What a value is in `checkpoint.json`: the one table that values are written by and read by.

null, true, "text", 7, 0.5, [values]     themselves; a float always has a point or an exponent
{"key": value}                           a dict whose keys are all text, none of them "$"
{"$": "int", "hex": "-0x20000000000000"}         an integer beyond 2**53 - 1
{"$": "float", "bits": "7ff0000000000000"}       a float that is infinite or no number: its bits, most significant first
{"$": "text", "utf8": BASE64}                    text with lone surrogates, each encoded by itself
{"$": "bytes", "data": BASE64}                   and "bytearray"
{"$": "complex", "real": 0.5, "imag": 1.0}
{"$": "range", "start": 0, "stop": 9, "step": 2}         and "slice", whose three may be null
{"$": "size", "sizes": [2, 3]}                   a `torch.Size`
{"$": kind, field: value, ...}           everything else; a field that has its default is left out
{"$": "ref", "id": 3}                    number 3 of `objects`: one object however often it occurs

Immutable kinds are built of their parts. Mutable ones begin empty and filled when everything is there, which is how
a cycle closes; so an immutable object of `objects` refers to immutable ones before it only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zckpt.formats.native.document import Form
from zckpt.immutable import immutable
from zckpt.state import Scalar
from zckpt.torchfile import (
    NUMPY,
    DefaultMapping,
    Device,
    DeviceTensor,
    DType,
    FromFile,
    Global,
    Layout,
    MemoryFormat,
    MetaTensor,
    Namespace,
    NestedTensor,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Object,
    OrderedMapping,
    QuantizedTensor,
    Size,
    SparseTensor,
    Tensor,
)

TAG = "$"

Node = Any
"""A value of a checkpoint, of any kind."""

SAFE_INTEGER = (1 << 53) - 1
"""Integers beyond this are written as text: many JSON libraries have doubles only."""

REQUIRED: Any = object()


@immutable
class Field:
    """A field of a kind."""

    name: str  # in JSON, and of the node's attribute
    form: Form = Form.VALUE
    default: Any = REQUIRED  # not written; REQUIRED: there is none
    kinds: tuple[type, ...] = ()  # of a VALUE; empty: any
    texts: frozenset[str] = frozenset()  # that a TEXT may be; empty: any
    own: bool = False  # it is the object itself, as a container is its items

    def of(self, node: Node) -> Any:  # noqa: ANN401  # of any type
        """Return what a node has there."""
        return node if self.own else getattr(node, self.name)


@immutable
class Kind:
    """A kind of object: its name in JSON, its class here, its fields, and whether it begins empty, to be filled."""

    tag: str
    cls: type
    fields: tuple[Field, ...]
    mutable: bool = False


def _optional(name: str, *kinds: type) -> Field:
    return Field(name, default=None, kinds=(*kinds, type(None)) if kinds else ())


_NAME = Field("name", Form.TEXT)
_DTYPE = Field("dtype", Form.TEXT)
_TORCH_DTYPE = Field("dtype", Form.DTYPE)
_SHAPE = Field("shape", Form.SIZES)
_STRIDES = Field("strides", Form.SIZES)
_GRADIENT = Field("requires_grad", Form.FLAG, default=False)
_SUBCLASS = _optional("subclass", Global)
_ATTRIBUTES = _optional("attributes", dict)
_STATE = _optional("state")
_MEMBERS = Field("items", Form.LIST, own=True)
_ENTRIES = Field("items", Form.PAIRS, own=True)
_DATA = Field("data", Form.BYTES, own=True)

BOUNDS = ("start", "stop", "step")
DENSE = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"})
SPARSE = frozenset({"_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"})
ON_DEVICE = frozenset(
    {"_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor"}
)
HOW = frozenset({"reduce", "newobj", "newobj_ex", "inst", "obj", "reconstructor"})

_Mutable = partial(Kind, mutable=True)

IMMUTABLE = (
    Kind("bytes", bytes, (_DATA,)),
    Kind("bytearray", bytearray, (_DATA,)),
    Kind("complex", complex, (Field("real", kinds=(float,)), Field("imag", kinds=(float,)))),
    Kind("range", range, tuple(Field(name, kinds=(int,)) for name in BOUNDS)),
    Kind("slice", slice, tuple(Field(name, kinds=(int, type(None))) for name in BOUNDS)),
    Kind("size", Size, (Field("sizes", Form.SIZES, own=True),)),
    Kind("tuple", tuple, (_MEMBERS,)),
    Kind("frozenset", frozenset, (_MEMBERS,)),
    Kind("scalar", Scalar, (Field("value", kinds=(int, float, bool)), _TORCH_DTYPE)),
    Kind("global", Global, (Field("module", Form.TEXT), _NAME)),
    Kind("dtype", DType, (_NAME,)),
    Kind("layout", Layout, (_NAME,)),
    Kind("memory_format", MemoryFormat, (_NAME,)),
    Kind("device", Device, (Field("type", Form.TEXT), _optional("index", int))),
    Kind("numpy_scalar", NumpyScalar, (_DTYPE, Field("data", Form.BYTES))),
    Kind("carried", FromFile, (Field("node"), Field("numpy", Form.TEXT, NUMPY[0], texts=frozenset(NUMPY)))),
    Kind(
        "tensor",
        Tensor,
        (
            Field("storage", Form.STORAGE),
            _TORCH_DTYPE,
            _SHAPE,
            _STRIDES,
            Field("storage_offset", Form.INTEGER, default=0),
            _GRADIENT,
            Field("is_parameter", Form.FLAG, default=False),
            _SUBCLASS,
            _ATTRIBUTES,
            _optional("metadata", dict),
            _STATE,
            _optional("hooks"),
            Field("rebuild", Form.TEXT, "_rebuild_tensor_v2", texts=DENSE),
        ),
    ),
)

MUTABLE = (
    _Mutable("dict", dict, (_ENTRIES,)),
    _Mutable("ordered_dict", OrderedMapping, (_ENTRIES, _STATE)),
    _Mutable("default_dict", DefaultMapping, (_optional("factory", Global, Object), _ENTRIES, _STATE)),
    _Mutable("namespace", Namespace, (_ENTRIES,)),
    _Mutable("set", set, (_MEMBERS,)),
    _Mutable(
        "object",
        Object,
        (
            Field("cls", kinds=(Global, Object)),
            Field("args", Form.VALUES, default=()),
            _optional("kwargs", dict),
            _STATE,
            Field("items", Form.LIST, default=()),
            Field("entries", Form.PAIRS, default=()),
            Field("how", Form.TEXT, "reduce", texts=HOW),
            Field("has_state", Form.FLAG, default=False),
        ),
    ),
    _Mutable(
        "numpy_dtype",
        NumpyDType,
        (Field("code", Form.TEXT), Field("flags", Form.VALUES, ()), _optional("state", tuple)),
    ),
    _Mutable(
        "numpy_array",
        NumpyArray,
        (
            _DTYPE,
            _SHAPE,
            Field("fortran_order", Form.FLAG, default=False),
            Field("data", Form.BYTES, default=b""),
            _optional("items", list),
            _optional("dtype_node", NumpyDType),
            _optional("cls", Global),
        ),
    ),
    _Mutable(
        "sparse_tensor",
        SparseTensor,
        (
            Field("layout", kinds=(Layout,)),
            Field("parts", Form.VALUES),
            _SHAPE,
            _optional("is_coalesced", bool),
            Field("rebuild", Form.TEXT, "_rebuild_sparse_tensor", texts=SPARSE),
        ),
    ),
    _Mutable(
        "quantized_tensor", QuantizedTensor, (Field("tensor", kinds=(Tensor,)), Field("quantizer", kinds=(tuple,)))
    ),
    _Mutable("nested_tensor", NestedTensor, (Field("buffer"), Field("sizes"), Field("strides"), Field("offsets"))),
    _Mutable(
        "meta_tensor",
        MetaTensor,
        (
            _DTYPE,
            _SHAPE,
            _STRIDES,
            _GRADIENT,
            _SUBCLASS,
            Field("storage_offset", Form.INTEGER, default=0),
            _optional("layout", Layout),
            _optional("device", Device, str),
            _ATTRIBUTES,
            _STATE,
        ),
    ),
    _Mutable(
        "device_tensor",
        DeviceTensor,
        (
            Field("data", kinds=(Tensor, NumpyArray)),
            Field("dtype", kinds=(DType,)),
            Field("device", kinds=(Device, str)),
            _GRADIENT,
            Field("rebuild", Form.TEXT, texts=ON_DEVICE),
        ),
    ),
)

BY_TAG = {kind.tag: kind for kind in (*IMMUTABLE, *MUTABLE)}
BY_CLASS = {kind.cls: kind for kind in (*IMMUTABLE, *MUTABLE)}

LEAVES = frozenset({bytes, bytearray, complex, range, slice, Size})
"""Kinds with nothing below them that are written where they are, however deep that is."""
