"""torch's functions that rebuild tensors, and the nodes that stand for their results.

Every dense tensor is checked against its storage here, so that no byte range outside of it is ever
reported. Source of all signatures: `torch/_utils.py` and `torch/_tensor.py` of torch 1.0 to 2.13.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from zckpt.errors import PickleError, UnsupportedError
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import NumpyArray
from zckpt.torchfile.rebuild import BUILDERS, MAX_ELEMENTS, MODULES, Builder, Context, integers, wrong

TENSOR = nodes.Global("torch", "Tensor")


def dense(args: tuple[object, ...], dtype: object, context: Context, rebuild: str) -> nodes.Tensor:
    """Build a dense tensor from (storage, storage offset, shape, strides, ...).

    Raises
    ------
    PickleError
        The tensor does not lie within its storage.
    UnsupportedError
        Its dtype is unknown.
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
        last = start
        for size, stride in zip(shape, strides, strict=True):
            last += (size - 1) * stride
        if (last + 1) * info.itemsize > storage.nbytes:
            raise PickleError(
                f"a tensor of shape {shape}, strides {strides} at {start} leaves storage {storage.key!r}",
                expected=f"at least {(last + 1) * info.itemsize} bytes",
                found=storage.nbytes,
            )
    return nodes.Tensor(storage, info.name, shape, strides, start, context.byteorder, rebuild=rebuild)


def storage_dtype(args: tuple[object, ...]) -> object:
    """Return the dtype of the storage that is the first argument."""
    return args[0].dtype if args and isinstance(args[0], nodes.Storage) else None


def hooks_of(value: object) -> object | None:
    """Return backward hooks, or None for the empty mapping that torch writes."""
    return None if isinstance(value, nodes.OrderedMapping) and not value and value.state is None else value


def flags(value: object) -> dict[object, object] | None:
    """Return the conj and neg flags of a tensor; None where there are none."""
    if value is not None and type(value) is not dict:
        raise PickleError("tensor metadata", expected="a dict", found=type(value).__name__)
    return value or None


def rebuild_v1(args: tuple[object, ...], context: Context) -> object:
    """Build `_rebuild_tensor(storage, offset, size, stride)`."""
    if len(args) != 4 or not isinstance(args[0], nodes.Storage):
        raise wrong("_rebuild_tensor", args)
    return dense(args, args[0].dtype, context, "_rebuild_tensor")


def rebuild_v2(args: tuple[object, ...], context: Context) -> object:
    """Build `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    if not 6 <= len(args) <= 7 or not isinstance(args[0], nodes.Storage):
        raise wrong("_rebuild_tensor_v2", args)
    tensor = dense(args, args[0].dtype, context, "_rebuild_tensor_v2")
    return with_gradient(tensor, args[4], args[5], flags(args[6]) if len(args) == 7 else None)


def rebuild_v3(args: tuple[object, ...], context: Context) -> object:
    """Build `_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`."""
    if not 7 <= len(args) <= 8 or not isinstance(args[6], (nodes.DType, nodes.Global)):
        raise wrong("_rebuild_tensor_v3", args)
    tensor = dense(args, args[6], context, "_rebuild_tensor_v3")
    return with_gradient(tensor, args[4], args[5], flags(args[7]) if len(args) == 8 else None)


def with_gradient(
    tensor: nodes.Tensor, requires_grad: object, hooks: object, metadata: dict[object, object] | None
) -> nodes.Tensor:
    """Return the tensor with what the later arguments say; the same one where they say nothing."""
    hooks = hooks_of(hooks)
    if requires_grad or hooks is not None or metadata is not None:
        return replace(tensor, requires_grad=bool(requires_grad), hooks=hooks, metadata=metadata)
    return tensor


def parameter(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_parameter(data, requires_grad, hooks)`."""
    if len(args) != 3:
        raise wrong("_rebuild_parameter", args)
    if not isinstance(args[0], nodes.Tensor):  # a parameter of another kind of tensor: keep the call
        return nodes.Object(nodes.Global("torch._utils", "_rebuild_parameter"), args)
    return replace(args[0], is_parameter=True, requires_grad=bool(args[1]), hooks=hooks_of(args[2]))


def parameter_with_state(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_parameter_with_state(data, requires_grad, hooks, state)`."""
    if len(args) != 4:
        raise wrong("_rebuild_parameter_with_state", args)
    if not isinstance(args[0], nodes.Tensor):
        return nodes.Object(nodes.Global("torch._utils", "_rebuild_parameter_with_state"), args)
    tensor = replace(args[0], is_parameter=True, requires_grad=bool(args[1]), hooks=hooks_of(args[2]))
    return with_state(tensor, args[3])


def with_state(node: nodes.Tensor | nodes.MetaTensor, state: object) -> nodes.Tensor | nodes.MetaTensor:
    """Return the tensor with the state of its Python object: a dict of attributes, or anything else."""
    if type(state) is dict:
        return replace(node, attributes=state)
    return replace(node, state=state)


def from_type_v2(args: tuple[object, ...], context: Context) -> object:
    """Build `_rebuild_from_type_v2(function, class, arguments, state)`; version 1 has the same form.

    The function is not called either: it is looked up among those known here. What it makes is kept
    as an inert call unless it is a tensor that can carry class and state.
    """
    match args:
        case (function, cls, tuple(inner), state):
            pass
        case _:
            raise wrong("_rebuild_from_type_v2", args)
    if isinstance(function, nodes.Global) and isinstance(cls, nodes.Global):
        builder = TENSOR_BUILDERS.get((MODULES.get(function.module, function.module), function.name))
        node = None if builder is None else builder(inner, context)
        if isinstance(node, (nodes.Tensor, nodes.MetaTensor)):
            if cls != TENSOR:
                node = replace(node, subclass=cls)
            return with_state(node, state)
    return nodes.Object(nodes.Global("torch._tensor", "_rebuild_from_type_v2"), args)


def sparse(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_sparse_tensor(layout, (indices, values, size[, coalesced]))` or a compressed one."""
    match args:
        case (nodes.Layout("torch.sparse_coo") as layout, (indices, values, shape)):
            return nodes.SparseTensor(layout, (indices, values), integers(shape, "shape"))
        case (nodes.Layout("torch.sparse_coo") as layout, (indices, values, shape, bool(coalesced))):
            return nodes.SparseTensor(layout, (indices, values), integers(shape, "shape"), coalesced)
        case (nodes.Layout() as layout, (compressed, plain, values, shape)):
            return nodes.SparseTensor(layout, (compressed, plain, values), integers(shape, "shape"))
    raise wrong("_rebuild_sparse_tensor", args)


def sparse_csr(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_sparse_csr_tensor(layout, (rows, columns, values, size))` of torch 1.9 to 1.12."""
    match args:
        case (nodes.Layout() as layout, (rows, columns, values, shape)):
            parts = (rows, columns, values)
            return nodes.SparseTensor(layout, parts, integers(shape, "shape"), rebuild="_rebuild_sparse_csr_tensor")
    raise wrong("_rebuild_sparse_csr_tensor", args)


def quantized(args: tuple[object, ...], context: Context) -> object:
    """Build `_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)`."""
    if len(args) != 7 or not isinstance(args[4], tuple):
        raise wrong("_rebuild_qtensor", args)
    tensor = dense(args, storage_dtype(args), context, "_rebuild_qtensor")
    return nodes.QuantizedTensor(with_gradient(tensor, args[5], args[6], None), args[4])


def nested(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_nested_tensor(buffer, sizes, strides, offsets)`."""
    if len(args) != 4:
        raise wrong("_rebuild_nested_tensor", args)
    return nodes.NestedTensor(*args)


def meta(args: tuple[object, ...], _: Context) -> object:
    """Build `_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    if len(args) != 4 or not isinstance(args[0], nodes.DType):
        raise wrong("_rebuild_meta_tensor_no_storage", args)
    shape, strides = integers(args[1], "shape"), integers(args[2], "strides")
    return nodes.MetaTensor(args[0].name, shape, strides, bool(args[3]), device=nodes.Device("meta"))


def wrapper(args: tuple[object, ...], _: Context) -> object:
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
    raise wrong("_rebuild_wrapper_subclass", args)


def on_device(name: str) -> Builder:
    """Return the builder of `_rebuild_device_tensor_from_...(data, dtype, device, requires_grad)`."""

    def build(args: tuple[object, ...], _: Context) -> object:
        match args:
            case (
                nodes.Tensor() | NumpyArray() as data,
                nodes.DType() as dtype,
                nodes.Device() | str() as device,
                grad,
            ):
                return nodes.DeviceTensor(data, dtype, device, bool(grad), name)
        raise wrong(name, args)

    return build


def size(args: tuple[object, ...], _: Context) -> object:
    """Build `torch.Size(tuple)`."""
    return nodes.Size(integers(args[0], "torch.Size") if args else ())


def device(args: tuple[object, ...], _: Context) -> object:
    """Build `torch.device(type[, index])`, or of one string, `cuda:1`."""
    if not 1 <= len(args) <= 2 or not isinstance(args[0], str):
        raise wrong("torch.device", args)
    kind, index = args[0], args[1] if len(args) == 2 else None
    if index is None and ":" in kind:
        kind, _colon, digits = kind.partition(":")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 6):
            raise wrong("torch.device", args)
        index = int(digits)
    if index is not None and type(index) is not int:
        raise wrong("torch.device", args)
    return nodes.Device(kind, index)


def get_layout(args: tuple[object, ...], _: Context) -> object:
    """Build `torch.serialization._get_layout(name)`."""
    if len(args) != 1 or not isinstance(args[0], str):
        raise wrong("_get_layout", args)
    return nodes.Layout(args[0])


TENSOR_BUILDERS: dict[tuple[str, str], Builder] = {
    ("torch._utils", "_rebuild_tensor"): rebuild_v1,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): parameter_with_state,
    ("torch._utils", "_rebuild_sparse_tensor"): sparse,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): sparse_csr,
    ("torch._utils", "_rebuild_qtensor"): quantized,
    ("torch._utils", "_rebuild_nested_tensor"): nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): meta,
    ("torch._utils", "_rebuild_wrapper_subclass"): wrapper,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): on_device("_rebuild_device_tensor_from_numpy"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): on_device("_rebuild_device_tensor_from_cpu_tensor"),
    ("torch._utils", "_rebuild_xla_tensor"): on_device("_rebuild_xla_tensor"),
}

ALL_BUILDERS: dict[tuple[str, str], Builder] = {
    **BUILDERS,
    **TENSOR_BUILDERS,
    ("torch._tensor", "_rebuild_from_type"): from_type_v2,
    ("torch._tensor", "_rebuild_from_type_v2"): from_type_v2,
    ("torch", "Size"): size,
    ("torch", "device"): device,
    ("torch.serialization", "_get_layout"): get_layout,
}


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
        if node is None:
            node = self._nodes[module, name] = self._new(module, name)
        return node

    def _new(self, module: str, name: str) -> object:
        if len(self._nodes) >= MAX_GLOBALS or len(module) + len(name) > MAX_NAME:
            raise PickleError(
                "too many globals, or too long a name",
                expected=f"at most {MAX_GLOBALS} globals of {MAX_NAME} characters",
            )
        if module == "torch" and name in DTYPES:
            return nodes.DType(name)
        if module == "torch" and name in MEMORY_FORMATS:
            return nodes.MemoryFormat(name)
        node = nodes.Global(module, name)
        builder = ALL_BUILDERS.get((MODULES.get(module, module), name))
        if builder is not None:
            self.builders[id(node)] = builder  # the node is kept here, so its id stays its own
        return node
