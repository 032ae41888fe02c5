"""How tensors are written: calls of torch's functions that rebuild them. See `pickle_stream_writer`.

plain                    _rebuild_tensor_v2(storage, offset, size, stride, gradient, hooks[, flags])
newer element types      _rebuild_tensor_v3(..., hooks, dtype[, flags])
class or attributes      _rebuild_from_type_v2(function, class, arguments of the function, attributes)
parameter                _rebuild_parameter(plain, gradient, hooks)
  with attributes        _rebuild_parameter_with_state(plain, gradient, hooks, attributes)
"""

from __future__ import annotations

from zckpt.torchfile.objects import DType, Global, Layout, Size
from zckpt.torchfile.pickle_storage_writer import class_of
from zckpt.torchfile.pickle_stream_writer import Parts, Writer, nested
from zckpt.torchfile.rebuild_torch import TENSOR
from zckpt.torchfile.tensors import DeviceTensor, MetaTensor, NestedTensor, QuantizedTensor, SparseTensor, Tensor

UTILS = "torch._utils"
NEW = "_rebuild_tensor_v3"


@nested(Tensor)
def tensor(writer: Writer, node: Tensor) -> Parts:
    """Write a dense tensor, within its class, its attributes or a parameter where it has them."""
    wrapped = node.subclass is not None or node.attributes is not None or is_slots(node.state)
    state = node.state if node.attributes is None else node.attributes
    if node.is_parameter:
        yield from parameter(writer, node, state, wrapped=wrapped)
    elif wrapped:
        yield from from_type(writer, node, state)
    else:
        writer.function(UTILS, function_of(node))
        yield from arguments(writer, node)
        writer.out += b"R"
    later = node.state if not wrapped or node.attributes is not None else None
    if writer.made(node) and later is not None:
        yield later
        writer.out += b"b"


def is_slots(state: object) -> bool:
    """Tell whether a state is (attributes, slots), as `_rebuild_from_type_v2` takes it; any other was set by itself."""
    return isinstance(state, tuple) and len(state) == 2


def function_of(node: Tensor) -> str:
    """Return the function that rebuilds a dense tensor: the newest that does."""
    return NEW if class_of(node.storage, node.dtype) is None or node.rebuild == NEW else "_rebuild_tensor_v2"


def parameter(writer: Writer, node: Tensor, state: object, *, wrapped: bool) -> Parts:
    """Write a parameter: its class, where it has one, is that of its data."""
    with_state = wrapped and node.subclass is None
    writer.function(UTILS, "_rebuild_parameter_with_state" if with_state else "_rebuild_parameter")
    writer.out += b"("
    if node.subclass is not None:
        yield from from_type(writer, node, state)
    else:
        writer.function(UTILS, function_of(node))
        yield from arguments(writer, node)
        writer.out += b"R"
    yield node.requires_grad
    yield from hooks(writer, node.hooks)
    if with_state:
        yield state
    writer.out += b"tR"


def from_type(writer: Writer, node: Tensor, state: object) -> Parts:
    """Write a tensor of a class, or one with attributes."""
    writer.function("torch._tensor", "_rebuild_from_type_v2")
    writer.out += b"("
    writer.function(UTILS, function_of(node))
    yield node.subclass or TENSOR
    yield from arguments(writer, node)
    yield state
    writer.out += b"tR"


def arguments(writer: Writer, node: Tensor) -> Parts:
    """Write the arguments that rebuild a dense tensor. What is within a parameter has no gradient itself."""
    writer.out += b"("
    view(writer, node)
    yield node.requires_grad and not node.is_parameter
    yield from hooks(writer, None if node.is_parameter else node.hooks)
    if function_of(node) == NEW:
        yield DType(node.dtype)
    if node.metadata is not None:
        yield node.metadata
    writer.out += b"t"


def view(writer: Writer, node: Tensor) -> None:
    """Write storage, offset, size and stride."""
    writer.mention(node.storage, node.byteorder, node.dtype)
    writer.integer(node.storage_offset)
    writer.shape(node.shape)
    writer.shape(node.strides)


def hooks(writer: Writer, node: object) -> Parts:
    """Write backward hooks: an empty mapping where there are none."""
    if node is None:
        writer.function("collections", "OrderedDict")
        writer.out += b")R"
    else:
        yield node


@nested(SparseTensor)
def sparse(writer: Writer, node: SparseTensor) -> Parts:
    """Write a sparse tensor."""
    known = () if node.is_coalesced is None else (node.is_coalesced,)
    args = (node.layout, (*node.parts, Size(node.shape), *known))
    yield from writer.reduce(node, Global(UTILS, node.rebuild), args)


@nested(QuantizedTensor)
def quantized(writer: Writer, node: QuantizedTensor) -> Parts:
    """Write a quantized tensor."""
    writer.function(UTILS, "_rebuild_qtensor")
    writer.out += b"("
    view(writer, node.tensor)
    yield node.quantizer
    yield node.tensor.requires_grad
    yield from hooks(writer, node.tensor.hooks)
    writer.out += b"tR"
    writer.made(node)


@nested(NestedTensor)
def ragged(writer: Writer, node: NestedTensor) -> Parts:
    """Write a nested tensor."""
    args = (node.buffer, node.sizes, node.strides, node.offsets)
    yield from writer.reduce(node, Global(UTILS, "_rebuild_nested_tensor"), args)


@nested(MetaTensor)
def meta(writer: Writer, node: MetaTensor) -> Parts:
    """Write a tensor of the meta device, or the shell of a wrapper subclass."""
    gradient, has_state = node.requires_grad, node.attributes is not None or node.state is not None
    if isinstance(node.layout, Layout):
        function = Global(UTILS, "_rebuild_wrapper_subclass")
        place = (node.storage_offset, node.layout, node.device, gradient)
        args: tuple[object, ...] = (node.subclass, DType(node.dtype), node.shape, node.strides, *place)
        wrapped = has_state
    else:
        function = Global(UTILS, "_rebuild_meta_tensor_no_storage")
        args = (DType(node.dtype), node.shape, node.strides, gradient)
        wrapped = node.subclass is not None or node.attributes is not None or is_slots(node.state)
    if wrapped:
        state = node.state if node.attributes is None else node.attributes
        args = (function, node.subclass or TENSOR, args, state)
        function = Global("torch._tensor", "_rebuild_from_type_v2")
    writer.function(function.module, function.name)
    yield from writer.call(args)
    if writer.made(node) and not wrapped and node.state is not None:
        yield node.state
        writer.out += b"b"


@nested(DeviceTensor)
def on_device(writer: Writer, node: DeviceTensor) -> Parts:
    """Write a tensor of a device without storages."""
    args = (node.data, node.dtype, node.device, node.requires_grad)
    yield from writer.reduce(node, Global(UTILS, node.rebuild), args)
