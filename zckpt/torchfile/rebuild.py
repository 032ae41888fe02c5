"""Globals of the standard library, numpy and torch that become plain data or a node, and what it may cost.

A builder takes the arguments that a pickle passes to a function and returns what stands for the result: None refuses
them, and of NotImplemented the call is kept, as that of any function that is in no table: an inert `Object`.

A few bytes of a pickle can copy or hash something large again and again; so everything that costs more
than its opcode is counted, and the sum must stay within a small multiple of the pickle's size.

Hashing is the one thing done with objects of the file: tuples could nest so deep or share so much that
it never ends, or thousands of keys could have one hash. Strings and bytes hash with a secret of the
process, and nodes by identity or by such strings.

Every dense tensor is checked against its storage here, so that no byte range outside of it is ever
reported. Source of all signatures: `torch/_utils.py` and `torch/_tensor.py` of torch 1.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from zckpt.errors import PickleError, UnsupportedError
from zckpt.state.dtypes import DTYPES
from zckpt.state.spans import Shape, reach_of
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import Args, NumpyArray, NumpyDType, NumpyScalar

FREE_WORK = 1 << 16
WORK_PER_BYTE = 2
"""An honest pickle copies or hashes each of its bytes about once."""

MAX_KEY_DEPTH = 8
"""Levels of tuples in a key: real ones have one or two."""

MAX_KEY_NODES = 1000
"""Elements of a key with every level expanded: bounds the time to hash it, and its length as text."""

TEXT_PER_NODE = 64
"""Characters of a text in a nested key that count as one more element: the same text may be there again and again."""

MAX_COLLISIONS = 64
"""Keys of one container with one hash: real data has one or two (-1 and -2), a chain of n costs n^2."""

SMALL = 1 << 60
"""Integers below hash to themselves, so that no two collide."""

SAFE = frozenset(
    {str, bytes, bool, type(None), nodes.Object, nodes.Storage, NumpyScalar, NumpyDType, NumpyArray}
    | nodes.NAMES
    | nodes.TENSORS
)
NUMBERS = frozenset({int, float, complex})
NESTS = frozenset({tuple, nodes.Size, frozenset})


class Context:
    """What builders may know of the file; counts the work of one pickle and checks its keys.

    Parameters
    ----------
    nbytes : int, bytes
        Size of the pickle.
    byteorder : str
        Of tensor data: `little` or `big`.
    """

    __slots__ = ("budget", "byteorder", "counts")

    def __init__(self, nbytes: int = 0, byteorder: str = "little") -> None:
        self.budget = FREE_WORK + WORK_PER_BYTE * nbytes
        self.byteorder = byteorder
        self.counts: dict[int, tuple[object, dict[int, int]]] = {}  # keeps containers, so that ids stay their own

    def spend(self, work: int) -> None:
        """Count the elements or bytes that are about to be copied or hashed.

        Raises PickleError: the pickle asks for more work than an honest one of its size.
        """
        self.budget -= work
        if self.budget < 0:
            raise PickleError(
                "it copies or hashes far more than it contains", advice="the file was built to exhaust its reader"
            )

    def check_key(self, container: object, key: object) -> None:
        """Refuse a key that cannot be hashed, or that was made to be slow.

        Raises PickleError: with the reason.
        """
        if type(key) in SAFE or (type(key) is int and -SMALL < key < SMALL):
            return
        left = measure(key, MAX_KEY_NODES, MAX_KEY_DEPTH)
        if type(key) in NESTS:
            self.spend(MAX_KEY_NODES - left)
        _, counts = self.counts.setdefault(id(container), (container, {}))
        value = hash(key)
        counts[value] = count = counts.get(value, 0) + 1
        if count > MAX_COLLISIONS:
            raise PickleError("too many keys with one hash", advice="the file was built to exhaust its reader")


def measure(key: object, nodes: int, depth: int) -> int:
    """Return what is left of a budget of `nodes` after walking a key."""
    kind = type(key)
    if kind not in NESTS:
        if kind not in SAFE and kind not in NUMBERS:
            raise PickleError(f"a {kind.__name__} is used as a key", expected="something hashable")
        return nodes - 1 - (len(key) // TEXT_PER_NODE if isinstance(key, (str, bytes)) else 0)
    if depth == 0:
        raise PickleError("a key is nested too deeply", expected=f"at most {MAX_KEY_DEPTH} levels")
    for element in key:  # type: ignore[attr-defined]  # one of NESTS
        nodes = measure(element, nodes, depth - 1)
        if nodes < 0:
            raise PickleError("a key is too large", expected=f"at most {MAX_KEY_NODES} elements")
    return nodes - 1


Builder = Callable[[Args, Context], object]

MAX_DIMENSIONS = 64
"""Dimensions of a tensor or array: numpy and torch stop at 64."""

MAX_ELEMENTS = (1 << 63) - 1
"""Elements of a tensor: torch counts in int64."""

HASHED = 2
"""Work for a member of a new set or mapping: at least the bytes that it takes in a pickle."""


def integers(value: object, what: str) -> Shape:
    """Return a shape or strides as a tuple of non-negative integers that fit int64."""
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMENSIONS:
        raise PickleError(f"{what} of a tensor", expected="a tuple of integers", found=type(value).__name__)
    for number in value:
        if type(number) is not int or not 0 <= number <= MAX_ELEMENTS:
            raise PickleError(f"{what} of a tensor", expected="integers from 0 to 2**63-1", found=f"{number!r:.40}")
    return tuple(value)


def ordered_dict(args: Args, context: Context) -> object:
    """Build `OrderedDict()` or, as Python 2 wrote it, `OrderedDict([[key, value], ...])`."""
    mapping, pairs = nodes.OrderedMapping(), args[0] if args else ()
    if len(args) > 1 or not isinstance(pairs, (list, tuple)):
        return None
    context.spend(HASHED * len(pairs))
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return None
        context.check_key(mapping, pair[0])
        mapping[pair[0]] = pair[1]
    return mapping


def default_dict(args: Args, _: Context) -> object:
    """Build `defaultdict(factory)`."""
    match args:
        case () | (nodes.Global() | nodes.Object() | None,):
            return nodes.DefaultMapping(*args)
    return None


def make_set(args: Args, context: Context) -> set[object] | None:
    """Build a `set`."""
    found: set[object] = set()
    elements = args[0] if args else ()
    if len(args) > 1 or not isinstance(elements, (list, tuple, set, frozenset)):
        return None
    context.spend(HASHED * len(elements))
    for element in elements:
        context.check_key(found, element)
        found.add(element)
    return found


def make_bytes(args: Args, context: Context) -> bytes | None:
    """Build `bytes()` or `bytes(data)`; a length is refused, for it could be any.

    In protocols 0 to 2 they are `_codecs.encode(text, "latin1")`.
    """
    match args:
        case ():
            return b""
        case (str(text), "latin1" | "latin-1"):
            context.spend(len(text))
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                raise PickleError("bytes are written as text that is not latin-1") from None
        case (bytes() | bytearray() as data,):
            context.spend(len(data))
            return bytes(data)
        case (list() as values,):
            context.spend(len(values))
            if not all(isinstance(value, int) and 0 <= value <= 255 for value in values):
                raise PickleError("bytes written as a list", expected="integers from 0 to 255")
            return bytes(values)
    return None


def as_kind(kind: Callable[[Any], object], builder: Builder) -> Builder:
    """Return the builder of what another builds, as another kind."""

    def build(args: Args, context: Context) -> object:
        found = builder(args, context)
        return None if found is None else kind(found)

    return build


def make_complex(args: Args, _: Context) -> object:
    """Build a `complex` from two floats."""
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return None


def make_slice(args: Args, _: Context) -> object:
    """Build a `slice` of integers."""
    return slice(*args) if len(args) == 3 and all(arg is None or type(arg) is int for arg in args) else NotImplemented


def make_range(args: Args, _: Context) -> object:
    """Build a `range`."""
    match args:
        case (int(start), int(stop), int(step)) if step:
            return range(start, stop, step)
    return None


def reconstructor(args: Args, _: Context) -> object:
    """Build what `copyreg._reconstructor(cls, base, state)` would: an instance in protocols 0 and 1."""
    match args:
        case (nodes.Global() | nodes.Object() as cls, _, _):
            return nodes.Namespace() if cls == NAMESPACE else nodes.Object(cls, args[1:], how="reconstructor")
    return None


def numpy_dtype(args: Args, _: Context) -> object:
    """Build `numpy.dtype(code, align, copy)`."""
    match args:
        case ():
            return None
        case (str(code), *flags) if code:
            return NumpyDType(code, tuple(flags))
    return NotImplemented


def numpy_scalar(args: Args, context: Context) -> object:
    """Build `numpy.core.multiarray.scalar(dtype, data)`."""
    match args:
        case (NumpyDType() as dtype, value):
            data, state = raw(value, context), dtype.state or ()
            if not isinstance(data, bytes) or len(state) > 8 or any(part is not None for part in state[2:5]):
                return NotImplemented
            if dtype.itemsize is not None and len(data) != dtype.itemsize:
                raise PickleError("numpy scalar", expected=f"{dtype.itemsize} bytes", found=len(data))
            return NumpyScalar(dtype.text, data)
    return NotImplemented


def numpy_array(args: Args, _: Context) -> object:
    """Build the empty array that `numpy.core.multiarray._reconstruct` makes; its state fills it."""
    match args:
        case (nodes.Global(name="recarray"), _, _):
            return NotImplemented  # its dtype is of numpy's class `record`
        case (nodes.Global() as cls, _, _):
            return NumpyArray(cls=cls)
    return None


def numpy_buffer(args: Args, context: Context) -> object:
    """Build the array of `numpy._core.numeric._frombuffer(buffer, dtype, shape, order)`, protocol 5."""
    match args:
        case (data, NumpyDType() as dtype, shape, "C" | "F" as order, *others) if not any(others):
            array = NumpyArray(cls=nodes.Global("numpy", "ndarray"))
            sizes = integers((shape,) if type(shape) is int else shape, "shape")
            array.fill(sizes, dtype, raw(data, context), fortran_order=order == "F")
            return array
    return NotImplemented


def raw(data: object, context: Context) -> object:
    """Return the data of an array or scalar as bytes; a list of objects as it is."""
    if isinstance(data, (str, bytearray)):
        context.spend(len(data))
        # Python 2 strings were read as UTF-8
        return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    return data


NAMESPACE = nodes.Global("argparse", "Namespace")

BUILDERS: dict[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("collections", "defaultdict"): default_dict,
    ("builtins", "set"): make_set,
    ("builtins", "frozenset"): as_kind(frozenset, make_set),
    ("builtins", "bytes"): make_bytes,
    ("builtins", "bytearray"): as_kind(bytearray, make_bytes),
    ("builtins", "complex"): make_complex,
    ("builtins", "slice"): make_slice,
    ("builtins", "range"): make_range,
    ("builtins", "xrange"): make_range,
    ("_codecs", "encode"): lambda args, context: make_bytes(args, context) if len(args) == 2 else None,
    ("copyreg", "_reconstructor"): reconstructor,
    ("numpy", "dtype"): numpy_dtype,
    ("numpy._core.multiarray", "scalar"): numpy_scalar,
    ("numpy._core.multiarray", "_reconstruct"): numpy_array,
    ("numpy._core.numeric", "_frombuffer"): numpy_buffer,
}

MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "torch.tensor": "torch._tensor",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
"""Modules that have another name today, by the name older files use."""


TENSOR = nodes.Global("torch", "Tensor")


def dense(args: Args, dtype: object, byteorder: str, rebuild: str) -> nodes.Tensor:
    """Build a dense tensor from (storage, storage offset, shape, strides, ...).

    Raises PickleError: the tensor does not lie within its storage; UnsupportedError: its dtype is unknown.
    """
    storage, start = args[0], args[1]
    if not isinstance(storage, nodes.Storage) or type(start) is not int or not 0 <= start <= MAX_ELEMENTS:
        raise wrong(rebuild, args)
    name = dtype.name if isinstance(dtype, (nodes.DType, nodes.Global)) else dtype
    info = DTYPES.get(name) if isinstance(name, str) else None
    if info is None:
        raise UnsupportedError(f"{rebuild}: unknown element type", found=f"{name!s:.60}")
    shape, strides = integers(args[2], "shape"), integers(args[3], "strides")
    if len(shape) != len(strides):
        raise PickleError("a tensor", expected=f"{len(shape)} strides", found=len(strides))
    numel = prod(shape)
    if numel > MAX_ELEMENTS:
        raise PickleError("a tensor", expected="fewer than 2**63 elements", found=f"shape {shape}")
    if numel:
        needed = (start + reach_of(shape, strides)) * info.itemsize
        if needed > storage.nbytes:
            raise PickleError(
                f"a tensor of shape {shape}, strides {strides} at {start} exceeds storage {storage.key!r}",
                expected=f"at least {needed} bytes",
                found=storage.nbytes,
            )
    return nodes.Tensor(storage, info.name, shape, strides, start, byteorder, rebuild=rebuild)


def wrong(function: object, args: Args) -> PickleError:
    """Return the error for a known function called with arguments it does not take."""
    kinds = ", ".join(type(arg).__name__ for arg in args[:12])
    return PickleError(f"{function} is called with arguments it does not take", found=f"({kinds})")


def hooks_of(value: object) -> object | None:
    """Return backward hooks, or None for the empty mapping that torch writes."""
    return None if isinstance(value, nodes.OrderedMapping) and not value and value.state is None else value


def plain_tensor(rebuild: str, fewest: int, most: int) -> Builder:
    """Return the builder of a dense tensor, of a function that takes so many arguments.

    _rebuild_tensor(storage, offset, size, stride)
    _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])
    _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])
    """

    def build(args: Args, context: Context) -> object:
        if not fewest <= len(args) <= most or not isinstance(args[0], nodes.Storage):
            return None
        dtype: object = args[0].dtype if fewest < 7 else args[6]
        if fewest == 7 and not isinstance(dtype, (nodes.DType, nodes.Global)):
            return None
        tensor = dense(args, dtype, context.byteorder, rebuild)
        if fewest == 4:
            return tensor
        metadata = args[fewest] if len(args) > fewest else None
        if metadata is not None and type(metadata) is not dict:
            raise PickleError("tensor metadata", expected="a dict", found=type(metadata).__name__)
        return with_gradient(tensor, args[4], args[5], metadata or None)

    return build


def with_gradient(
    tensor: nodes.Tensor, requires_grad: object, hooks: object, metadata: dict[object, object] | None = None
) -> nodes.Tensor:
    """Return the tensor with what the later arguments say; the same one where they say nothing."""
    hooks = hooks_of(hooks)
    if requires_grad or hooks is not None or metadata is not None:
        return replace(tensor, requires_grad=bool(requires_grad), hooks=hooks, metadata=metadata)
    return tensor


def parameter(args: Args, _: Context) -> object:
    """Build `_rebuild_parameter(data, requires_grad, hooks)`, or `_rebuild_parameter_with_state(..., state)`."""
    match args:
        case (nodes.Tensor() as data, gradient, hooks, *state) if len(state) <= 1:
            made = replace(data, is_parameter=True, requires_grad=bool(gradient), hooks=hooks_of(hooks))
            return with_state(made, state[0]) if state else made
    return NotImplemented if 3 <= len(args) <= 4 else None  # a parameter of another kind of tensor


def with_state(node: nodes.Tensor | nodes.MetaTensor, state: object) -> nodes.Tensor | nodes.MetaTensor:
    """Return the tensor with the state of its Python object: a dict of attributes, or anything else."""
    if type(state) is dict:
        return replace(node, attributes=state)
    return replace(node, state=state)


def from_type_v2(args: Args, context: Context) -> object:
    """Build `_rebuild_from_type_v2(function, class, arguments, state)`; version 1 has the same form.

    The function is not called either: it is looked up among those known here. What it makes is kept
    as an inert call unless it is a tensor that can carry class and state.
    """
    match args:
        case (nodes.Global() as function, nodes.Global() as cls, tuple(inner), state):
            builder = TENSOR_BUILDERS.get((MODULES.get(function.module, function.module), function.name))
            node = None if builder is None else builder(inner, context)
            if builder is not None and node is None:
                raise wrong(function, inner)
            if isinstance(node, (nodes.Tensor, nodes.MetaTensor)):
                return with_state(replace(node, subclass=cls) if cls != TENSOR else node, state)
            return NotImplemented
        case (_, _, tuple(), _):
            return NotImplemented
    return None


def sparse(args: Args, _: Context) -> object:
    """Build `_rebuild_sparse_tensor(layout, (indices, values, size[, coalesced]))` or a compressed one."""
    match args:
        case (nodes.Layout("torch.sparse_coo") as layout, (indices, values, shape)):
            return nodes.SparseTensor(layout, (indices, values), integers(shape, "shape"))
        case (nodes.Layout("torch.sparse_coo") as layout, (indices, values, shape, bool(coalesced))):
            return nodes.SparseTensor(layout, (indices, values), integers(shape, "shape"), coalesced)
        case (nodes.Layout() as layout, (compressed, plain, values, shape)):
            return nodes.SparseTensor(layout, (compressed, plain, values), integers(shape, "shape"))
    return None


def sparse_csr(args: Args, _: Context) -> object:
    """Build `_rebuild_sparse_csr_tensor(layout, (rows, columns, values, size))` of torch 1.9 to 1.12."""
    match args:
        case (nodes.Layout() as layout, (rows, columns, values, shape)):
            parts = (rows, columns, values)
            return nodes.SparseTensor(layout, parts, integers(shape, "shape"), rebuild="_rebuild_sparse_csr_tensor")
    return None


def quantized(args: Args, context: Context) -> object:
    """Build `_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)`."""
    match args:
        case (nodes.Storage() as storage, _, _, _, tuple(quantizer), gradient, hooks):
            tensor = dense(args, storage.dtype, context.byteorder, "_rebuild_qtensor")
            return nodes.QuantizedTensor(with_gradient(tensor, gradient, hooks), quantizer)
    return None


def meta(args: Args, _: Context) -> object:
    """Build `_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    match args:
        case (nodes.DType(dtype), size, stride, gradient):
            shape, strides = integers(size, "shape"), integers(stride, "strides")
            return nodes.MetaTensor(dtype, shape, strides, bool(gradient), device=nodes.Device("meta"))
    return None


def wrapper(args: Args, _: Context) -> object:
    """Build `_rebuild_wrapper_subclass(class, dtype, size, stride, offset, layout, device, gradient)`."""
    match args:
        case (
            nodes.Global() as cls,
            nodes.DType(dtype),
            size,
            stride,
            int(offset),
            nodes.Layout() as layout,
            nodes.Device() | str() as device,
            bool(gradient),
        ):
            shape, strides = integers(size, "shape"), integers(stride, "strides")
            return nodes.MetaTensor(dtype, shape, strides, gradient, cls, offset, layout, device)
    return None


def on_device(name: str) -> Builder:
    """Return the builder of `_rebuild_device_tensor_from_...(data, dtype, device, requires_grad)`."""

    def build(args: Args, _: Context) -> object:
        match args:
            case (
                nodes.Tensor() | NumpyArray() as data,
                nodes.DType() as dtype,
                nodes.Device() | str() as device,
                grad,
            ):
                return nodes.DeviceTensor(data, dtype, device, bool(grad), name)
        return None

    return build


def device(args: Args, _: Context) -> object:
    """Build `torch.device(type[, index])`, or of one string, `cuda:1`."""
    match args:
        case (str(kind), int(index)):
            return nodes.Device(kind, index)
        case (str(kind),) | (str(kind), None):
            name, colon, digits = kind.partition(":")
            if not colon or (digits.isascii() and digits.isdigit() and len(digits) < 6):
                return nodes.Device(name, int(digits) if colon else None)
    return None


_ON_DEVICE = ("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor")

TENSOR_BUILDERS: dict[tuple[str, str], Builder] = {
    ("torch._utils", name): builder
    for name, builder in {
        "_rebuild_tensor": plain_tensor("_rebuild_tensor", 4, 4),
        "_rebuild_tensor_v2": plain_tensor("_rebuild_tensor_v2", 6, 7),
        "_rebuild_tensor_v3": plain_tensor("_rebuild_tensor_v3", 7, 8),
        "_rebuild_parameter": parameter,
        "_rebuild_parameter_with_state": parameter,
        "_rebuild_sparse_tensor": sparse,
        "_rebuild_sparse_csr_tensor": sparse_csr,
        "_rebuild_qtensor": quantized,
        "_rebuild_nested_tensor": lambda args, _: nodes.NestedTensor(*args) if len(args) == 4 else None,
        "_rebuild_meta_tensor_no_storage": meta,
        "_rebuild_wrapper_subclass": wrapper,
        **{name: on_device(name) for name in _ON_DEVICE},
    }.items()
}

ALL_BUILDERS: dict[tuple[str, str], Builder] = {
    **BUILDERS,
    **TENSOR_BUILDERS,
    ("torch._tensor", "_rebuild_from_type"): from_type_v2,
    ("torch._tensor", "_rebuild_from_type_v2"): from_type_v2,
    ("torch", "Size"): lambda args, _: nodes.Size(integers(args[0], "torch.Size") if args else ()),
    ("torch", "device"): device,
    ("torch.serialization", "_get_layout"): lambda args, _: (
        nodes.Layout(args[0]) if len(args) == 1 and isinstance(args[0], str) else None
    ),
}


def kept_call(function: object, args: Args) -> nodes.Object:
    """Return the inert call of a known function, under the name that it has today."""
    if isinstance(function, nodes.Global):
        function = nodes.Global(MODULES.get(function.module, function.module), function.name)
    return nodes.Object(function, args)  # type: ignore[arg-type]  # what a builder was found for is a global


MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

MAX_GLOBALS = 4096
"""Distinct globals of one pickle: the largest seen mention a few dozen."""

MAX_NAME = 1024
"""Characters of a module and a name together."""


class Globals:
    """The globals that one pickle mentions: a node for each, and what builds its result where it is known.

    Attributes
    ----------
    builders : dict
        By the identity of the global's node.
    """

    __slots__ = ("_nodes", "builders")

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], object] = {}
        self.builders: dict[int, Builder] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every one, `module.name`, sorted."""
        return tuple(sorted(f"{module}.{name}" for module, name in self._nodes))

    def find(self, module: str, name: str) -> object:
        """Return the node for a global: always the same one, never the thing itself."""
        node = self._nodes.get((module, name))
        if node is not None:
            return node
        if len(self._nodes) >= MAX_GLOBALS or len(module) + len(name) > MAX_NAME:
            raise PickleError(
                "too many globals, or too long a name",
                expected=f"at most {MAX_GLOBALS} globals of {MAX_NAME} characters",
            )
        if module == "torch" and name in DTYPES:
            node = nodes.DType(name)
        elif module == "torch" and name in MEMORY_FORMATS:
            node = nodes.MemoryFormat(name)
        else:
            node = nodes.Global(module, name)
            builder = ALL_BUILDERS.get((MODULES.get(module, module), name))
            if builder is not None:
                self.builders[id(node)] = builder  # the node is kept here, so its id stays its own
        self._nodes[module, name] = node
        return node
