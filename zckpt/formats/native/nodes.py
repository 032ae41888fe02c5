"""What a value is in `checkpoint.json`: one table, by which values are written, and read.

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

The document may be anyone's, so nothing is taken for granted: kinds, fields, types, numbers, and that a tensor lies
within its storage.

Storages that tensors lie in are collected: their bytes go into a file of a rank, and JSON has their numbers.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from zckpt.errors import DamagedFileError, PickleError, UnsupportedError
from zckpt.formats.native.document import Form, Json, formed, is_text, record, wrong
from zckpt.immutable import immutable
from zckpt.state import Scalar
from zckpt.torchfile import (
    NUMPY,
    Context,
    DefaultMapping,
    Device,
    DeviceTensor,
    DType,
    FromFile,
    Global,
    InPieces,
    Layout,
    MemoryFormat,
    Mentioned,
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
    Storage,
    Tensor,
    check_depth,
    dense,
    in_order,
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


PENDING: Node = object()
"""An immutable object of `objects` whose turn has not come."""

MAX_HEX = 4096
"""Characters of a large integer: those that torch files may have take half as many."""


class NodeReader:
    """Makes the objects of one document.

    Parameters
    ----------
    objects : list
        JSON of the numbered objects.
    storages : sequence of Storage
    storage_path : str
        The file that they lie in.
    nbytes : int, bytes
        Size of the document, which bounds the work.

    Raises
    ------
    DamagedFileError
        Something is malformed. As all errors here it names no file: the caller does.
    """

    def __init__(self, objects: list[object], storages: Sequence[Storage], storage_path: str, nbytes: int) -> None:
        self._storages = storages
        self._storage_path = storage_path
        self._context = Context(nbytes)
        self._waiting: deque[tuple[Json, Node]] = deque()
        self._trees: list[object] = []
        self._checked: list[object] = []  # keeps what was read, so that ids stay their own
        self._heights: dict[int, int] = {}
        self._numbered: list[object] = [self._value(one) if _is_mutable(one) else PENDING for one in objects]
        for number, one in enumerate(objects):
            if self._numbered[number] is PENDING:
                self._numbered[number] = self._value(one)
        self._fill_all()

    def read(self, found: object) -> object:
        """Return the value of a piece of JSON; errors are those of the class."""
        node = self._value(found)
        self._fill_all()
        self._check(node)
        return node

    def _check(self, node: object) -> None:
        self._checked.append(node)
        check_depth(node, self._heights)

    def mapping(self, found: object) -> dict[str, Node]:
        """Return a dict whose keys are text; errors are those of the class."""
        node = self.read(found)
        if type(node) is not dict or not all(type(key) is str for key in node):
            raise wrong("value", "a dict with text for keys", node)
        return node

    def _fill_all(self) -> None:
        while self._waiting:
            found, shell = self._waiting.popleft()
            if type(found) is list:
                shell.extend(map(self._value, found))
            elif TAG in found:
                self._fill(BY_TAG[found[TAG]], found, shell)
            else:
                shell.update((key, self._value(value)) for key, value in found.items())
        for tree in self._trees:
            self._check(tree)
        self._trees.clear()

    def _value(self, found: Json) -> Node:
        if found is None or type(found) in (bool, int, float, str):
            return found
        if type(found) is list or TAG not in found:
            return self._shell(found, [] if type(found) is list else {})
        tag = found[TAG] if type(found[TAG]) is str else ""
        if tag in READERS:
            member, read = READERS[tag]
            return read(record(found, tag, {TAG: Form.TEXT, member: Form.TEXT})[member])
        if tag in ("ref", "storage"):
            number = record(found, tag, {TAG: Form.TEXT, "id": Form.STORAGE})["id"]
            return self._ref(number) if tag == "ref" else self._storage(number)
        kind = BY_TAG.get(tag)
        if kind is None:
            raise wrong("value", "a known kind", found[TAG])
        names = {field.name for field in kind.fields}
        if not found.keys() <= names | {TAG}:
            raise wrong(tag, f"members {', '.join(sorted(names))}", sorted(found))
        if kind.mutable:
            return self._shell(found, kind.cls.__new__(kind.cls))  # type: ignore[call-overload]  # of any class
        return self._immutable(kind, found)

    def _shell(self, found: object, shell: object) -> object:
        self._waiting.append((found, shell))
        return shell

    def _fill(self, kind: Kind, found: dict[str, Json], shell: Node) -> None:
        for field in kind.fields:
            value = self._field(kind, field, found)
            if not field.own:
                setattr(shell, field.name, value)
                continue
            for one in value:
                key = one[0] if field.form is Form.PAIRS else one
                self._context.check_key(shell, key)
                if field.form is Form.PAIRS and key in shell:
                    raise wrong("dict", "every key once", key)
                shell.update([one])
        if isinstance(shell, NumpyArray) and shell.items is None:
            _check_numpy(shell.dtype, shell.data, math.prod(shell.shape))

    def _immutable(self, kind: Kind, found: dict[str, Json]) -> object:
        values = {field.name: self._field(kind, field, found) for field in kind.fields}
        if kind.cls is FromFile:
            self._trees.append(values["node"])
            return FromFile(path=self._storage_path, **values)
        if kind.cls is Tensor:
            args = tuple(values.pop(name) for name in ("storage", "storage_offset", "shape", "strides"))
            return replace(dense(args, values.pop("dtype"), "little", values.pop("rebuild")), **values)
        if kind.cls is frozenset:
            for member in values["items"]:
                self._context.check_key(found, member)
        if kind.cls is NumpyScalar:
            _check_numpy(values["dtype"], values["data"], 1)
        if kind.cls is range and values["step"] == 0:
            raise wrong("step of a range", "another number", 0)
        return kind.cls(*values.values())

    def _field(self, kind: Kind, field: Field, found: dict[str, Json]) -> Node:
        where = f"{field.name} of a {kind.tag}"
        if field.name not in found:
            if field.default is REQUIRED:
                raise DamagedFileError(f"{where} is missing")
            return [] if field.form in (Form.LIST, Form.PAIRS) else field.default
        value = formed(field.form, found[field.name], where)
        if field.form is Form.VALUE:
            value = self._value(value)
            kinds = field.kinds
            if kinds and (not isinstance(value, kinds) or (type(value) is bool and bool not in kinds)):
                raise wrong(where, " or ".join(one.__name__ for one in kinds), type(value).__name__)
        elif field.form in (Form.VALUES, Form.LIST):
            nodes = [self._value(one) for one in value]
            return tuple(nodes) if field.form is Form.VALUES else nodes
        elif field.form is Form.PAIRS:
            if not all(type(pair) is list and len(pair) == 2 for pair in value):
                raise wrong(where, Form.PAIRS.value, value)
            return [(self._value(key), self._value(one)) for key, one in value]
        elif field.form is Form.STORAGE:
            return self._storage(value)
        elif field.texts and value not in field.texts:
            raise wrong(where, "one of a few names", value)
        return value

    def _storage(self, number: int) -> Storage:
        if not 0 <= number < len(self._storages):
            raise wrong("storage of a tensor", f"a number below {len(self._storages)}", number)
        return self._storages[number]

    def _ref(self, number: int) -> object:
        if not 0 <= number < len(self._numbered):
            raise wrong("id of a ref", f"a number below {len(self._numbered)}", number)
        node = self._numbered[number]
        if node is PENDING:
            raise wrong("ref of an immutable object", "an object before it", number)
        return node


def _is_mutable(found: object) -> bool:
    if not isinstance(found, dict) or TAG not in found:
        return isinstance(found, (list, dict))
    tag = found[TAG]
    return type(tag) is str and tag in BY_TAG and BY_TAG[tag].mutable


def _check_numpy(dtype: str, data: bytes, count: int) -> None:
    """Refuse data of another size than the element type says, where it says one."""
    size = NumpyDType(dtype[1:]).itemsize
    if size is not None and len(data) != size * count:
        raise wrong(f"data of numpy's {dtype:.20}", f"{size * count} bytes", len(data))


def _integer(text: str) -> object:
    try:
        if len(text) <= MAX_HEX and text.removeprefix("-").startswith("0x"):
            return int(text, 16)
    except ValueError:
        pass
    raise wrong("hex of an int", "0x and digits", text)


def _float(text: str) -> object:
    try:
        return struct.unpack(">d", bytes.fromhex(text))[0]
    except (ValueError, struct.error):
        raise wrong("bits of a float", "16 hexadecimal digits", text) from None


def _text(data: str) -> object:
    try:
        return formed(Form.BYTES, data, "utf8 of a text").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise wrong("utf8 of a text", "UTF-8", data) from None


READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "int": ("hex", _integer),
    "float": ("bits", _float),
    "text": ("utf8", _text),
}
"""What JSON has no way to say of a number or a text: the member that says it, and what it is."""


INLINE_LEVELS = 8
"""Values nested deeper are numbered objects, so that a JSON parser never meets many levels."""

WORK = 1 << 62
"""Whose state it is may spend what time they like; only kinds of keys are checked."""

PLAIN = frozenset({type(None), bool, int, float, str})
UNNUMBERED = PLAIN | {Global, DType, MemoryFormat, Storage}
"""Kinds of which two equal ones are always one and the same, to whoever loads them."""

NESTED = frozenset({list}) | (BY_CLASS.keys() - UNNUMBERED - LEAVES)


Key = tuple[str | None, int]
"""The file of an object and its id: files that say the same share objects, but not what tensors in them hold."""


class NodeWriter:
    """Writes the values of one document.

    `roots`: all values that will be written: what several of them share is numbered. `objects`: JSON of the numbered
    objects; `storages`: the storages that tensors lie in, by number.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.objects: list[object] = []
        self.storages: list[Mentioned] = []
        self._roots = list(roots)  # keeps them, so that ids stay their own
        self._shared = _shared(self._roots)
        self._numbers: dict[Key, int] = {}
        self._storage_numbers: dict[tuple[str, Storage], int] = {}
        self._context = Context(WORK)
        self._waiting: deque[tuple[Node, Json, int, FromFile | None]] = deque()

    def write(self, root: object) -> Json:
        """Return the JSON of one of the roots, or of a value that shares nothing with others.

        Raises UnsupportedError: it holds something that the format has no kind for, or is nested too deep.
        """
        self._roots.append(root)
        found = self._value(root, 0, None)
        while self._waiting:
            node, shell, level, source = self._waiting.popleft()
            if type(shell) is list:
                shell.extend(self._values(node, level, source))
            elif TAG in shell:
                self._fields(shell, BY_CLASS[type(node)], node, level, source)
            else:
                shell.update((key, self._value(value, level + 1, source)) for key, value in node.items())
        return found

    def _value(self, node: Node, level: int, source: FromFile | None) -> object:
        cls = type(node)
        if cls in PLAIN:
            return write_plain(node)
        if cls is Storage:
            return {TAG: "storage", "id": self._storage(node, source, None)}
        key = None if source is None else source.path, id(node)
        number = self._numbers.get(key)
        if number is not None:
            return {TAG: "ref", "id": number}
        numbered = key in self._shared or (level >= INLINE_LEVELS and cls in NESTED)
        level = 0 if numbered else level
        if cls is slice and not all(type(one) in (int, type(None)) for one in (node.start, node.stop, node.step)):
            raise UnsupportedError("a slice that does not consist of integers cannot be written to a zckpt checkpoint")
        kind = BY_CLASS.get(cls)
        found: Json = [] if cls is list else {}
        is_plain = cls is dict and TAG not in node and all(type(key) is str and is_text(key) for key in node)
        if kind is not None and not is_plain:
            found[TAG] = kind.tag
        elif cls is not list and cls is not dict:
            raise UnsupportedError(f"a value of type {cls.__name__} cannot be written to a zckpt checkpoint")
        if kind is None or kind.mutable:  # which is filled later
            self._waiting.append((node, found, level, source))
        else:
            self._fields(found, kind, node, level, node if cls is FromFile else source)
        if not numbered:
            return found
        self._numbers[key] = number = len(self.objects)
        self.objects.append(found)
        return {TAG: "ref", "id": number}

    def _values(self, nodes: Iterable[object], level: int, source: FromFile | None) -> list[object]:
        return [self._value(node, level + 1, source) for node in nodes]

    def _fields(self, found: dict[str, object], kind: Kind, node: Node, level: int, source: FromFile | None) -> None:
        for field in kind.fields:
            value = field.of(node)
            if field.default in ((), b""):
                is_default = not value
            else:
                is_default = type(value) is type(field.default) and value == field.default
            if not is_default:
                found[field.name] = self._field(field, value, node, level, source)

    def _field(self, field: Field, value: Node, node: object, level: int, source: FromFile | None) -> object:
        form = field.form
        if form is Form.VALUE:
            return self._value(value, level + 1, source)
        if field.own and form in (Form.LIST, Form.PAIRS) and type(value) is not tuple:
            with _refusing():  # keys that the reader refuses
                for key in value:
                    self._context.check_key(value, key)
        if form in (
            Form.VALUES,
            Form.LIST,
        ):  # members of a set in an order that is the same in every run, if they have one
            return self._values(in_order(value) if isinstance(value, (set, frozenset)) else value, level, source)
        if form is Form.PAIRS:
            return [self._values(pair, level, source) for pair in (value.items() if field.own else value)]
        if form is Form.STORAGE:
            return self._storage(value, source, node)
        return write_bytes(value) if form is Form.BYTES else list(value) if form is Form.SIZES else value

    def _storage(self, storage: Storage, source: FromFile | None, tensor: object) -> int:
        """Return the number of a storage that a tensor, or the tree itself, mentions."""
        if source is None or type(storage) not in (Storage, InPieces):
            raise UnsupportedError(f"a tensor of an unnamed file cannot be written: storage {storage.key!r}")
        order = tensor.byteorder if isinstance(tensor, Tensor) else source.byteorder
        number = self._storage_numbers.setdefault((source.path, storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(Mentioned(storage, source.path, order))
        if isinstance(tensor, Tensor):
            self.storages[number].dtypes.add(tensor.dtype)
            self.storages[number].byteorder = order
        return number


def _shared(roots: list[object]) -> set[Key]:
    """Return the keys of the objects that occur several times below the roots.

    Numbers and text in a tuple, such as AdamW's betas, are as good twice, but for a tree that a file is written from.
    """
    seen: set[Key] = set()
    shared: set[Key] = set()
    waiting: list[tuple[object, str | None]] = [(root, None) for root in roots]
    heights: dict[int, int] = {}
    with _refusing():
        for root in roots:
            check_depth(root, heights)
    while waiting:
        node, path = waiting.pop()
        if type(node) in UNNUMBERED:
            continue
        if type(node) is tuple and (not node or (path is None and all(type(part) in PLAIN for part in node))):
            continue
        if (path, id(node)) in seen:
            shared.add((path, id(node)))
            continue
        seen.add((path, id(node)))
        if isinstance(node, FromFile):
            with _refusing():
                check_depth(node.node, heights)
        path = node.path if isinstance(node, FromFile) else path
        waiting.extend((child, path) for child in _below(node))
    return shared


def _below(node: Node) -> Iterator[object]:
    """Yield the values that are written within the JSON of an object."""
    if type(node) is list:
        yield from node
    kind = BY_CLASS.get(type(node))
    for field in kind.fields if kind is not None else ():
        value = field.of(node)
        if field.form is Form.VALUE:
            yield value
        elif field.form in (Form.VALUES, Form.LIST):
            yield from value
        elif field.form is Form.PAIRS:
            for pair in value.items() if field.own else value:
                yield from pair


@contextmanager
def _refusing() -> Iterator[None]:
    """Say of what cannot be in a pickle that it is not written either."""
    try:
        yield
    except PickleError as error:
        raise UnsupportedError(f"a value cannot be written: {error.message}", expected=error.expected) from None


def write_plain(node: Node) -> object:
    """Return the JSON of None, a bool, a number or text."""
    if type(node) is int and abs(node) > SAFE_INTEGER:
        return {TAG: "int", "hex": hex(node)}
    if type(node) is float and not math.isfinite(node):
        return {TAG: "float", "bits": struct.pack(">d", node).hex()}
    if type(node) is str and not is_text(node):
        return {TAG: "text", "utf8": write_bytes(node.encode("utf-8", "surrogatepass"))}
    return node


def write_bytes(data: bytes | bytearray) -> str:
    """Return bytes as base64."""
    return b64encode(data).decode()
