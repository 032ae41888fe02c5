"""The pickle of a torch file: any tree that was read from one, or built of the same nodes.

Classes are named, never imported: `torch._utils._rebuild_tensor_v2`, `collections.OrderedDict`, `torch.Size`. An
object that occurs several times in the tree is written once and is one object again after loading, cycles included.

plain tensor             _rebuild_tensor_v2(storage, offset, size, stride, gradient, hooks[, flags])
newer element types      _rebuild_tensor_v3(..., hooks, dtype[, flags])
class or attributes      _rebuild_from_type_v2(function, class, arguments of the function, attributes)
parameter                _rebuild_parameter(plain, gradient, hooks)
  with attributes        _rebuild_parameter_with_state(plain, gradient, hooks, attributes)
"""

from __future__ import annotations

from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import Args, NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.pickle_stream import CALLS, LEAVES, Parts, StandFor, Writer, appended, entered, nested
from zckpt.torchfile.rebuild import NAMESPACE
from zckpt.torchfile.rebuild_torch import TENSOR
from zckpt.torchfile.torch_file import NUMPY, Mentioned, class_of

COPYREG = "copy_reg"
"""The name of `copyreg` in protocol 2."""


def global_of(writer: Writer, node: nodes.Global) -> None:
    """Write a class or function that is named: numpy's own under the name that the file it is from has for them."""
    module = node.module
    if module == f"{NUMPY[1]}.multiarray" and writer.source is not None:
        module = f"{writer.source.numpy}.multiarray"  # the reader has one name for both
    writer.function(module, node.name)


@nested(nodes.OrderedMapping, nodes.DefaultMapping)
def mapping(writer: Writer, node: nodes.OrderedMapping | nodes.DefaultMapping) -> Parts:
    """Write an `OrderedDict` or a `defaultdict` and what is set on it."""
    factory = node.factory if isinstance(node, nodes.DefaultMapping) else None
    writer.function("collections", "OrderedDict" if isinstance(node, nodes.OrderedMapping) else "defaultdict")
    yield from writer.call(() if factory is None else (factory,))
    if writer.keep(node):
        if node:
            yield from entered(writer, node.items())
        yield from writer.built(node.state)


@nested(nodes.Namespace)
def namespace(writer: Writer, node: nodes.Namespace) -> Parts:
    """Write an `argparse.Namespace`, whose attributes are its state."""
    yield NAMESPACE
    writer.out += b")\x81"
    writer.keep(node)
    writer.out += b"}"
    yield from entered(writer, node.items())
    writer.out += b"b"


@nested(nodes.Object)
def object_of(writer: Writer, node: nodes.Object) -> Parts:
    """Write the call that a pickle makes an object with, and then what it sets in it."""
    if node.how == "newobj_ex":  # its opcode came with protocol 4
        writer.function(COPYREG, "__newobj_ex__")
        yield from writer.call((node.cls, node.args, node.kwargs or {}))
    elif node.how == "reconstructor":
        writer.function(COPYREG, "_reconstructor")
        yield from writer.call((node.cls, *node.args))
    elif node.how in ("inst", "obj"):
        writer.out += b"("
        yield node.cls
        yield from node.args
        writer.out += b"o"
    else:
        yield node.cls
        writer.out += b"("
        yield from node.args
        writer.out += b"t\x81" if node.how == "newobj" else b"tR"
    if writer.keep(node):
        yield from appended(writer, node.items)
        if node.entries:
            yield from entered(writer, node.entries)
        yield from writer.built(node.state, is_set=node.has_state)


DTYPE = nodes.Global("numpy", "dtype")
NDARRAY = nodes.Global("numpy", "ndarray")

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
    yield DTYPE
    yield from writer.call((node.code, *node.flags))
    if writer.keep(node):
        yield from writer.built(node.state)


@nested(NumpyScalar)
def scalar(writer: Writer, node: NumpyScalar) -> Parts:
    """Write a scalar, whose dtype has the state that numpy gives it.

    Notes
    -----
    Source: `dtype.__reduce__` of numpy 1.24 to 2.4: (version, order, subarray, names, fields, itemsize, alignment,
    flags); sizes are given for strings and bytes only.
    """
    order, code = node.dtype[:1], node.dtype[1:]
    dtype = NumpyDType(code, (False, True))
    size = dtype.itemsize
    if size is None:
        raise UnsupportedError("a numpy scalar of this type cannot be written to a torch file", found=node.dtype)
    if order != "|" or size == 1 or code[0] in "SV":
        sizes = {"U": (size, 4), "S": (size, 1), "V": (size, 1)}.get(code[0], (-1, -1))
        dtype.state = (STATE_VERSION, "<" if code[0] == "U" and order == "|" else order, None, None, None, *sizes, 0)
    numpy_function(writer, "scalar")
    yield from writer.call((dtype, node.data))
    writer.keep(node)


@nested(NumpyArray)
def array(writer: Writer, node: NumpyArray) -> Parts:
    """Write an array: an empty one, and then its shape, dtype and data as its state."""
    numpy_function(writer, "_reconstruct")
    yield from writer.call((node.cls or NDARRAY, (0,), b"b"))
    contents = node.data if node.items is None else node.items
    state = (ARRAY_VERSION, node.shape, node.dtype_node, node.fortran_order, contents)
    if writer.keep(node):
        yield from writer.built(state, is_set=node.dtype_node is not None)


UTILS = "torch._utils"
NEW = "_rebuild_tensor_v3"


@nested(nodes.Tensor)
def tensor(writer: Writer, node: nodes.Tensor) -> Parts:
    """Write a dense tensor, within its class, its attributes or a parameter where it has them."""
    wrapped, state = wrapping(node)
    with_state = node.is_parameter and wrapped and node.subclass is None
    if node.is_parameter:  # its class, where it has one, is that of its data
        writer.function(UTILS, "_rebuild_parameter_with_state" if with_state else "_rebuild_parameter")
        writer.out += b"("
    if wrapped and not with_state:
        writer.function("torch._tensor", "_rebuild_from_type_v2")
        writer.out += b"("
        writer.function(UTILS, function_of(node))
        yield node.subclass or TENSOR
        yield from arguments(writer, node)
        yield state
        writer.out += b"tR"
    else:
        writer.function(UTILS, function_of(node))
        yield from arguments(writer, node)
        writer.out += b"R"
    if node.is_parameter:
        yield node.requires_grad
        yield from hooks(writer, node.hooks)
        if with_state:
            yield state
        writer.out += b"tR"
    if writer.keep(node):
        yield from writer.built(node.state if not wrapped or node.attributes is not None else None)


def wrapping(node: nodes.Tensor | nodes.MetaTensor) -> tuple[bool, object]:
    """Return whether a tensor is written with its class or its attributes, and the state that is written then.

    `_rebuild_from_type_v2` takes attributes, or a state that is (attributes, slots); any other was set by itself.
    """
    is_slots = isinstance(node.state, tuple) and len(node.state) == 2
    state = node.state if node.attributes is None else node.attributes
    return node.subclass is not None or node.attributes is not None or is_slots, state


def function_of(node: nodes.Tensor) -> str:
    """Return the function that rebuilds a dense tensor: the newest that does."""
    return NEW if class_of(node.storage, node.dtype) is None or node.rebuild == NEW else "_rebuild_tensor_v2"


def arguments(writer: Writer, node: nodes.Tensor) -> Parts:
    """Write the arguments that rebuild a dense tensor. What is within a parameter has no gradient itself."""
    writer.out += b"("
    view(writer, node)
    yield node.requires_grad and not node.is_parameter
    yield from hooks(writer, None if node.is_parameter else node.hooks)
    if function_of(node) == NEW:
        yield nodes.DType(node.dtype)
    if node.metadata is not None:
        yield node.metadata
    writer.out += b"t"


def view(writer: Writer, node: nodes.Tensor) -> None:
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


@nested(nodes.QuantizedTensor)
def quantized(writer: Writer, node: nodes.QuantizedTensor) -> Parts:
    """Write a quantized tensor."""
    writer.function(UTILS, "_rebuild_qtensor")
    writer.out += b"("
    view(writer, node.tensor)
    yield node.quantizer
    yield node.tensor.requires_grad
    yield from hooks(writer, node.tensor.hooks)
    writer.out += b"tR"
    writer.keep(node)


@nested(nodes.MetaTensor)
def meta(writer: Writer, node: nodes.MetaTensor) -> Parts:
    """Write a tensor of the meta device, or the shell of a wrapper subclass."""
    gradient, (wrapped, state) = node.requires_grad, wrapping(node)
    if isinstance(node.layout, nodes.Layout):
        function = nodes.Global(UTILS, "_rebuild_wrapper_subclass")
        rest = (node.storage_offset, node.layout, node.device, gradient)
        args: Args = (node.subclass, nodes.DType(node.dtype), node.shape, node.strides, *rest)
        wrapped = state is not None
    else:
        function = nodes.Global(UTILS, "_rebuild_meta_tensor_no_storage")
        args = (nodes.DType(node.dtype), node.shape, node.strides, gradient)
    if wrapped:
        args = (function, node.subclass or TENSOR, args, state)
        function = nodes.Global("torch._tensor", "_rebuild_from_type_v2")
    yield function
    yield from writer.call(args)
    if writer.keep(node):
        yield from writer.built(None if wrapped else node.state)


def sparse_parts(node: nodes.SparseTensor) -> Args:
    """Return the parts of a sparse tensor as its call takes them."""
    known = () if node.is_coalesced is None else (node.is_coalesced,)
    return (*node.parts, nodes.Size(node.shape), *known)


LEAVES |= {
    nodes.Global: global_of,
    nodes.DType: lambda writer, node: writer.function("torch", node.name),
    nodes.MemoryFormat: lambda writer, node: writer.function("torch", node.name),
}

CALLS |= {
    nodes.Layout: lambda node: ("torch.serialization", "_get_layout", (node.name,)),
    nodes.Device: lambda node: ("torch", "device", (node.type,) if node.index is None else (node.type, node.index)),
    nodes.Size: lambda node: ("torch", "Size", (tuple(node),)),
    nodes.NestedTensor: lambda node: (
        UTILS,
        "_rebuild_nested_tensor",
        (node.buffer, node.sizes, node.strides, node.offsets),
    ),
    nodes.SparseTensor: lambda node: (UTILS, node.rebuild, (node.layout, sparse_parts(node))),
    nodes.DeviceTensor: lambda node: (UTILS, node.rebuild, (node.data, node.dtype, node.device, node.requires_grad)),
}


@immutable
class Pickled:
    """A pickle and the storages it mentions."""

    data: bytes
    storages: tuple[Mentioned, ...]  # a storage's key is its number here, in decimal


def dump(root: object, stand_for: StandFor = lambda _: None) -> Pickled:
    """Return the pickle of a tree, in protocol 2.

    Parameters
    ----------
    root : object
        Plain data, nodes, and `FromFile` around those whose storages are in a file.
    stand_for : callable
        From a node of any other type to the node that is to be written for it; None: it cannot be.

    Raises
    ------
    UnsupportedError
        The tree holds something that cannot be written.
    """
    writer = Writer(stand_for)
    data = writer.run(root)
    return Pickled(data, tuple(mentioned for _, mentioned in writer.storages.values()))
