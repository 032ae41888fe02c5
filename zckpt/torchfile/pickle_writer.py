"""The pickle of a torch file, opcode by opcode: any tree that was read from one, or built of the same nodes.

Classes are named, never imported: `torch._utils._rebuild_tensor_v2`, `collections.OrderedDict`, `torch.Size`. An
object that occurs several times in the tree is written once and is one object again after loading, cycles included.

plain tensor             _rebuild_tensor_v2(storage, offset, size, stride, gradient, hooks[, flags])
newer element types      _rebuild_tensor_v3(..., hooks, dtype[, flags])
class or attributes      _rebuild_from_type_v2(function, class, arguments of the function, attributes)
parameter                _rebuild_parameter(plain, gradient, hooks)
  with attributes        _rebuild_parameter_with_state(plain, gradient, hooks, attributes)

The protocol is 2, as torch's own. What is written for each type of node is a function for a leaf, a generator for a
node with others below it. The generator writes the opcodes around its parts and yields the parts themselves, so that
nothing here recurses, however deep a tree is.

    list    ] PUT ( <yield item> ... e        a cycle may lead back into it: it is in the memo before its items are
    tuple   ( <yield item> ... t PUT          where a cycle has written it meanwhile: POP GET instead of PUT
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.state.dtypes import itemsize
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import Args, NumpyArray, NumpyDType, NumpyScalar, Storage
from zckpt.torchfile.rebuild import NAMESPACE, TENSOR
from zckpt.torchfile.torch_file import NUMPY, FromFile, Mentioned, class_of

PROTOCOL = b"\x80\x02"
STOP = b"."
MAX_STRING = (1 << 32) - 1
"""Bytes of a string in protocol 2."""

Parts = Iterator[object]
Entries = Iterable[tuple[object, object]]
StandFor = Callable[[object], object]
"""From a node that the writer does not know to one that it does; None where there is none."""

Call = tuple[str, str, Args]
"""Module, function and arguments of what an unpickler calls for a node."""

LEAVES: dict[type, Callable[[Writer, Any], None]] = {}
"""What writes each type with nothing below it; these three tables are filled below and by `pickle_writer`."""

CALLS: dict[type, Callable[[Any], Call]] = {}
"""The call that each type is written as, where that says all."""

NESTED: dict[type, Callable[[Writer, Any], Parts]] = {}
"""What writes each other type and yields the nodes below it."""

N = TypeVar("N", bound=Callable[..., Parts])


def nested(*kinds: type) -> Callable[[N], N]:
    """Register a generator that writes nodes and yields those below them."""

    def register(function: N) -> N:
        NESTED.update(dict.fromkeys(kinds, function))
        return function

    return register


class Writer:
    """Writes one pickle.

    Attributes
    ----------
    out : bytearray
        The pickle so far.
    storages : dict
        What was mentioned, in order of first mention; a storage's key in the new file is its number there.
    source : FromFile or None
        The part of a file that is being written.
    """

    __slots__ = ("count", "globals", "memo", "out", "roots", "source", "stand_for", "storages", "texts")

    def __init__(self, stand_for: StandFor) -> None:
        self.stand_for = stand_for
        self.out = bytearray(PROTOCOL)
        self.count = 0
        self.memo: dict[int, tuple[int, object]] = {}  # keeps the nodes, so that their ids stay their own
        self.roots: dict[int, str] = {}  # the files of the parts that were written, by their nodes
        self.texts: dict[str, int] = {}
        self.globals: dict[tuple[str, str], int] = {}
        self.storages: dict[object, tuple[str, Mentioned]] = {}
        self.source: FromFile | None = None

    def run(self, root: object) -> bytes:
        """Return the pickle of a tree.

        Raises
        ------
        UnsupportedError
            The tree holds something that a pickle of protocol 2 cannot.
        """
        levels: list[Iterator[object]] = [iter((root,))]
        while levels:
            for node in levels[-1]:
                below = self.begin(node)
                if below is not None:
                    levels.append(below)
                    break
            else:
                levels.pop()
        self.out += STOP
        return bytes(self.out)

    def begin(self, node: object) -> Parts | None:
        """Write a leaf, or one that was written before; return the parts of any other node."""
        write = LEAVES.get(type(node))
        if write is not None:
            write(self, node)
            return None
        known = self.memo.get(id(node))
        if known is not None:
            self.get(known[0])
            return None
        call = CALLS.get(type(node))
        if call is not None:
            return self.reduce(node, *call(node))
        write_nested = NESTED.get(type(node))
        if write_nested is not None:
            return write_nested(self, node)
        if isinstance(node, Storage):
            self.mention(node, self.source.byteorder if self.source else "little", None)
            return None
        other = self.stand_for(node)
        if other is None:
            raise UnsupportedError(f"a value of type {type(node).__name__} cannot be written to a torch file")
        return iter((other,))

    def put(self) -> int:
        """Put what is on top of the stack in the memo; return its number there."""
        number = self.count
        self.count += 1
        self.out += bytes((0x71, number)) if number < 256 else b"r" + struct.pack("<I", number)
        return number

    def get(self, number: int) -> None:
        """Push what is in the memo."""
        self.out += bytes((0x68, number)) if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, value: str) -> None:
        """Write a string; the same one again is one of the memo."""
        known = self.texts.get(value)
        if known is not None:
            self.get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        if len(data) > MAX_STRING:
            raise UnsupportedError("a string or bytes of 4 GiB cannot be written to a torch file")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self.texts[value] = self.put()

    def integer(self, value: int) -> None:
        """Write an integer of any size."""
        if 0 <= value < 1 << 8:
            self.out += bytes((0x4B, value))
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            short = len(data) < 256
            self.out += (bytes((0x8A, len(data))) if short else b"\x8b" + struct.pack("<i", len(data))) + data

    def shape(self, sizes: Iterable[int]) -> None:
        """Write a tuple of integers."""
        self.out += b"("
        for size in sizes:
            self.integer(size)
        self.out += b"t"

    def function(self, module: str, name: str) -> None:
        """Write a global; the same one again is one of the memo."""
        known = self.globals.get((module, name))
        if known is not None:
            self.get(known)
            return
        outer, _, inner = name.rpartition(".")
        if outer:  # protocol 2 has no dotted names
            self.function("__builtin__", "getattr")
            self.function(module, outer)
            self.text(inner)
            self.out += b"\x86R"
        else:
            if "\n" in module + name:
                raise UnsupportedError("a class whose name has a line break cannot be written to a torch file")
            self.out += b"c" + f"{module}\n{name}\n".encode("utf-8", "surrogatepass")
        self.globals[module, name] = self.put()

    def reduce(self, node: object, module: str, name: str, args: Iterable[object], state: object = None) -> Parts:
        """Write a call that returns `node`, and the state that is given to it then."""
        self.function(module, name)
        yield from self.call(args)
        yield from self.made(node, state=state)

    def call(self, args: Iterable[object]) -> Parts:
        """Write the arguments of what is on top of the stack, and the call."""
        self.out += b"("
        yield from args
        self.out += b"tR"

    def made(
        self, node: object, *, items: Iterable[object] = (), entries: Entries | None = None, state: object = None,
        is_set: bool | None = None,
    ) -> Parts:  # fmt: skip
        """Put what is on top of the stack in the memo as a node, and write what it gets; nothing of what it has got.

        That is what is appended to it, what is set in it, and its state, by default if it is not None. Empty `entries`
        are written, as of an empty dict; None are not. Where a cycle has written the node meanwhile, that takes the
        place of what is on top of the stack.
        """
        known = self.memo.get(id(node))
        if known is not None:
            self.out += b"0"
            self.get(known[0])
            return
        self.memo[id(node)] = (self.put(), node)
        if items:
            self.out += b"("
            yield from items
            self.out += b"e"
        if entries is not None:
            yield from self.entered(entries)
        if state is not None if is_set is None else is_set:
            yield state
            self.out += b"b"

    def entered(self, entries: Entries) -> Parts:
        """Write what is set in the dict on top of the stack."""
        self.out += b"("
        for key, value in entries:
            yield key
            yield value
        self.out += b"u"

    def mention(self, storage: Storage, byteorder: str, dtype: str | None) -> None:
        """Write a storage's persistent id.

        Parameters
        ----------
        storage : Storage
        byteorder : str
            Of its bytes in the file that it is in.
        dtype : str or None
            Of the tensor that is a view of it.
        """
        plain = type(storage) is Storage
        path = self.source.path if plain and self.source else None
        name: object = (path, storage) if plain else id(storage)
        key, mentioned = self.storages.setdefault(
            name, (str(len(self.storages)), Mentioned(storage, path, byteorder if plain else "little"))
        )
        if dtype is not None:
            mentioned.dtypes.add(dtype)
            mentioned.byteorder = byteorder if plain else "little"
        typed = class_of(storage, dtype)
        self.out += b"("
        self.text("storage")
        self.function(*(("torch", typed) if typed else ("torch.storage", "UntypedStorage")))
        self.text(key)
        self.text(storage.location)
        self.integer(storage.nbytes // itemsize(storage.dtype) if typed else storage.nbytes)
        self.out += b"tQ"


BUILTINS = "__builtin__"
"""The name of `builtins` in protocol 2."""

_ORDERED = frozenset({str, int, float, bool, type(None), bytes})
"""Members of a set that are written in the order of their text: what a set gives differs from run to run."""


LEAVES |= {
    type(None): lambda writer, _: writer.out.extend(b"N"),
    bool: lambda writer, value: writer.out.extend(b"\x88" if value else b"\x89"),
    int: Writer.integer,
    float: lambda writer, value: writer.out.extend(b"G" + struct.pack(">d", value)),
    str: Writer.text,
}


@nested(FromFile)
def from_file(writer: Writer, part: FromFile) -> Parts:
    """Write a part of a file's tree."""
    before = writer.source, writer.memo
    writer.source = part
    if writer.roots.setdefault(id(part.node), part.path) != part.path:
        writer.memo = {}  # files that say the same share nodes, but not what tensors hold
    yield part.node
    writer.source, writer.memo = before


CALLS |= {  # protocol 2 has no bytes, but text that is to be encoded; and makes a set of a list
    bytes: lambda value: (
        ("_codecs", "encode", (value.decode("latin-1"), "latin1")) if value else (BUILTINS, "bytes", ())
    ),
    bytearray: lambda value: (BUILTINS, "bytearray", (value.decode("latin-1"), "latin-1") if value else ()),
    complex: lambda value: (BUILTINS, "complex", (value.real, value.imag)),
    slice: lambda value: (BUILTINS, "slice", (value.start, value.stop, value.step)),
    range: lambda value: (BUILTINS, "xrange", (value.start, value.stop, value.step)),
    set: lambda value: (BUILTINS, "set", (in_order(value),)),
    frozenset: lambda value: (BUILTINS, "frozenset", (in_order(value),)),
}


@nested(tuple)
def tuple_of(writer: Writer, value: tuple[object, ...]) -> Parts:
    """Write a tuple."""
    if not value:
        writer.out += b")"
        return
    writer.out += b"(" if len(value) > 3 else b""
    yield from value
    writer.out += (b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4) - 1]
    yield from writer.made(value)


@nested(list)
def list_of(writer: Writer, value: list[object]) -> Parts:
    """Write a list."""
    writer.out += b"]"
    return writer.made(value, items=value)


@nested(dict)
def dict_of(writer: Writer, value: dict[object, object]) -> Parts:
    """Write a dict."""
    writer.out += b"}"
    return writer.made(value, entries=value.items())


def in_order(members: Iterable[object]) -> list[object]:
    """Return the members of a set in an order that is the same in every run, where their types allow it."""
    found = list(members)
    return sorted(found, key=_sort_key) if all(_has_order(member) for member in found) else found


def _has_order(member: object, depth: int = 4) -> bool:
    if type(member) is tuple and depth:
        return all(_has_order(one, depth - 1) for one in member)
    return type(member) in _ORDERED


def _sort_key(member: object) -> tuple[str, str]:
    if isinstance(member, tuple):
        return "tuple", repr([_sort_key(one) for one in member])
    return type(member).__name__, hex(member) if isinstance(member, int) else repr(member)


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
    yield from writer.made(node, entries=node.items() or None, state=node.state)


@nested(nodes.Namespace)
def namespace(writer: Writer, node: nodes.Namespace) -> Parts:
    """Write an `argparse.Namespace`, whose attributes are its state."""
    yield NAMESPACE
    writer.out += b")\x81"
    yield from writer.made(node)
    writer.out += b"}"
    yield from writer.entered(node.items())
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
    yield from writer.made(
        node, items=node.items, entries=node.entries or None, state=node.state, is_set=node.has_state
    )


NDARRAY = nodes.Global("numpy", "ndarray")

STATE_VERSION = 3
"""First part of a dtype's state."""

ARRAY_VERSION = 1
"""First part of an array's state."""


def multiarray(writer: Writer) -> str:
    """Return the module of numpy's own functions, under the name that the file that is written from has for it."""
    return f"{writer.source.numpy if writer.source else NUMPY[0]}.multiarray"


@nested(NumpyDType)
def dtype(writer: Writer, node: NumpyDType) -> Parts:
    """Write a dtype and its state."""
    return writer.reduce(node, "numpy", "dtype", (node.code, *node.flags), node.state)


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
    return writer.reduce(node, multiarray(writer), "scalar", (dtype, node.data))


@nested(NumpyArray)
def array(writer: Writer, node: NumpyArray) -> Parts:
    """Write an array: an empty one, and then its shape, dtype and data as its state."""
    contents = node.data if node.items is None else node.items
    state = (ARRAY_VERSION, node.shape, node.dtype_node, node.fortran_order, contents)
    args = (node.cls or NDARRAY, (0,), b"b")
    return writer.reduce(node, multiarray(writer), "_reconstruct", args, None if node.dtype_node is None else state)


UTILS = "torch._utils"
NEW = "_rebuild_tensor_v3"


@nested(nodes.Tensor)
def tensor(writer: Writer, node: nodes.Tensor) -> Parts:
    """Write a dense tensor, within its class, its attributes or a parameter where it has them.

    It is rebuilt by the newest function that does. What is within a parameter has no gradient itself.
    """
    wrapped, state = wrapping(node)
    with_state = node.is_parameter and wrapped and node.subclass is None
    is_typed = wrapped and not with_state
    is_new = class_of(node.storage, node.dtype) is None or node.rebuild == NEW
    if node.is_parameter:  # its class, where it has one, is that of its data
        writer.function(UTILS, "_rebuild_parameter_with_state" if with_state else "_rebuild_parameter")
        writer.out += b"("
    if is_typed:
        writer.function("torch._tensor", "_rebuild_from_type_v2")
        writer.out += b"("
    writer.function(UTILS, NEW if is_new else "_rebuild_tensor_v2")
    if is_typed:
        yield node.subclass or TENSOR
    writer.out += b"("
    view(writer, node)
    yield node.requires_grad and not node.is_parameter
    yield from hooks(writer, None if node.is_parameter else node.hooks)
    if is_new:
        yield nodes.DType(node.dtype)
    if node.metadata is not None:
        yield node.metadata
    writer.out += b"t"
    if is_typed:
        yield state
        writer.out += b"t"
    writer.out += b"R"
    if node.is_parameter:
        yield node.requires_grad
        yield from hooks(writer, node.hooks)
        if with_state:
            yield state
        writer.out += b"tR"
    yield from writer.made(node, state=node.state if not wrapped or node.attributes is not None else None)


def wrapping(node: nodes.Tensor | nodes.MetaTensor) -> tuple[bool, object]:
    """Return whether a tensor is written with its class or its attributes, and the state that is written then.

    `_rebuild_from_type_v2` takes attributes, or a state that is (attributes, slots); any other was set by itself.
    """
    is_slots = isinstance(node.state, tuple) and len(node.state) == 2
    state = node.state if node.attributes is None else node.attributes
    return node.subclass is not None or node.attributes is not None or is_slots, state


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
    yield from writer.made(node)


@nested(nodes.MetaTensor)
def meta(writer: Writer, node: nodes.MetaTensor) -> Parts:
    """Write a tensor of the meta device, or the shell of a wrapper subclass."""
    gradient, (wrapped, state) = node.requires_grad, wrapping(node)
    args: Args
    name, args = "_rebuild_meta_tensor_no_storage", (nodes.DType(node.dtype), node.shape, node.strides)
    if isinstance(node.layout, nodes.Layout):
        name, wrapped = "_rebuild_wrapper_subclass", state is not None
        args = (node.subclass, *args, node.storage_offset, node.layout, node.device)
    args = (*args, gradient)
    if not wrapped:
        return writer.reduce(node, UTILS, name, args, node.state)
    args = (nodes.Global(UTILS, name), node.subclass or TENSOR, args, state)
    return writer.reduce(node, "torch._tensor", "_rebuild_from_type_v2", args)


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
