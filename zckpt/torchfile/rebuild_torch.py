"""torch's functions that rebuild tensors, and the nodes that stand for their results.

Every dense tensor is checked against its storage here, so that no byte range outside of it is ever
reported. Source of all signatures: `torch/_utils.py` and `torch/_tensor.py` of torch 1.0 to 2.13.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from zckpt.errors import PickleError, UnsupportedError
from zckpt.state.dtypes import DTYPES
from zckpt.state.spans import reach_of
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import Args, NumpyArray
from zckpt.torchfile.rebuild import BUILDERS, MAX_ELEMENTS, MODULES, Builder, Context, integers

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
