"""How globals, objects of any class and torch's plain values are written. See `pickle_stream_writer`."""

from __future__ import annotations

from zckpt.torchfile.objects import (
    DefaultMapping,
    Device,
    DType,
    Global,
    Layout,
    MemoryFormat,
    Namespace,
    Object,
    OrderedMapping,
    Size,
)
from zckpt.torchfile.pickle_plain_writer import appended, entered
from zckpt.torchfile.pickle_storage_writer import NUMPY
from zckpt.torchfile.pickle_stream_writer import Parts, Writer, leaf, nested
from zckpt.torchfile.rebuild import NAMESPACE

COPYREG = "copy_reg"
"""The name of `copyreg` in protocol 2."""


@leaf(Global)
def global_of(writer: Writer, node: Global) -> None:
    """Write a class or function that is named: numpy's own under the name that the file it is from has for them."""
    module = node.module
    if module == f"{NUMPY[1]}.multiarray" and writer.source is not None:
        module = f"{writer.source.numpy}.multiarray"  # the reader has one name for both
    writer.function(module, node.name)


@leaf(DType, MemoryFormat)
def torch_name(writer: Writer, node: DType | MemoryFormat) -> None:
    """Write a dtype or memory format, which torch names."""
    writer.function("torch", node.name)


@nested(Layout)
def layout(writer: Writer, node: Layout) -> Parts:
    """Write a layout."""
    yield from writer.reduce(node, Global("torch.serialization", "_get_layout"), (node.name,))


@nested(Device)
def device(writer: Writer, node: Device) -> Parts:
    """Write a device."""
    args = (node.type,) if node.index is None else (node.type, node.index)
    yield from writer.reduce(node, Global("torch", "device"), args)


@nested(Size)
def size(writer: Writer, node: Size) -> Parts:
    """Write a `torch.Size`."""
    yield from writer.reduce(node, Global("torch", "Size"), (tuple(node),))


@nested(OrderedMapping)
def ordered_mapping(writer: Writer, node: OrderedMapping) -> Parts:
    """Write an `OrderedDict` and what is set on it."""
    yield from writer.reduce(node, Global("collections", "OrderedDict"), ())
    yield from filled(writer, node)


@nested(DefaultMapping)
def default_mapping(writer: Writer, node: DefaultMapping) -> Parts:
    """Write a `defaultdict` and what is set on it."""
    writer.function("collections", "defaultdict")
    yield from writer.call(() if node.factory is None else (node.factory,))
    if writer.made(node):
        yield from filled(writer, node)


def filled(writer: Writer, node: OrderedMapping | DefaultMapping) -> Parts:
    """Write the entries and the state of the mapping on top of the stack."""
    if node:
        yield from entered(writer, node.items())
    if node.state is not None:
        yield node.state
        writer.out += b"b"


@nested(Namespace)
def namespace(writer: Writer, node: Namespace) -> Parts:
    """Write an `argparse.Namespace`, whose attributes are its state."""
    writer.function(NAMESPACE.module, NAMESPACE.name)
    writer.out += b")\x81"
    writer.made(node)
    writer.out += b"}"
    yield from entered(writer, node.items())
    writer.out += b"b"


@nested(Object)
def object_of(writer: Writer, node: Object) -> Parts:
    """Write the call that a pickle makes an object with, and then what it sets in it."""
    yield from created(writer, node)
    if not writer.made(node):
        return
    yield from appended(writer, node.items)
    if node.entries:
        yield from entered(writer, node.entries)
    if node.has_state:
        yield node.state
        writer.out += b"b"


def created(writer: Writer, node: Object) -> Parts:
    """Write the call that makes an object.

    NEWOBJ_EX came with protocol 4; the function of `copyreg` does the same.
    """
    if node.how == "newobj_ex":
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
