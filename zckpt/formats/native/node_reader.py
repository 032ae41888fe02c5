"""Values of `checkpoint.json` as objects again. See `node_kinds`.

The document may be anyone's, so nothing is taken for granted: kinds, fields, types, numbers, and that a tensor lies
within its storage.
"""

from __future__ import annotations

import binascii
import math
import struct
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.formats.native.document import read_sizes, wrong
from zckpt.formats.native.node_kinds import BY_TAG, REQUIRED, TAG, Field, Form, Json, Kind, Node
from zckpt.torchfile import (
    MAX_ELEMENTS,
    Context,
    FromFile,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Size,
    Storage,
    Tensor,
    check_depth,
    dense,
)

PENDING: Node = object()
"""An immutable object of `objects` whose turn has not come."""

JSON_TYPES = {Form.TEXT: str, Form.FLAG: bool, Form.INTEGER: int, Form.BYTES: str, Form.STORAGE: int}
"""What a field's JSON is; of the other forms a list."""


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
            return READERS[tag](found)
        if tag in ("ref", "storage"):
            number = only_part(found, "id")
            return self._ref(number) if tag == "ref" else self._storage(number)
        return self._object(tag, found)

    def _object(self, tag: str, found: dict[str, Json]) -> Node:
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
            if field.form == Form.ENTRIES:
                self._enter(shell, value)
            elif field.form == Form.MEMBERS:
                shell.update(self._hashable(value, shell))
            else:
                setattr(shell, field.name, value)
        if isinstance(shell, NumpyArray) and shell.items is None:
            _check_numpy(shell.dtype, shell.data, math.prod(shell.shape))

    def _enter(self, shell: dict[object, object], pairs: Iterable[tuple[object, object]]) -> None:
        for key, value in pairs:
            self._context.check_key(shell, key)
            if key in shell:
                raise wrong("dict", "every key once", key)
            shell[key] = value

    def _hashable(self, members: list[object], owner: object) -> list[object]:
        for member in members:
            self._context.check_key(owner, member)
        return members

    def _immutable(self, kind: Kind, found: dict[str, Json]) -> object:
        values = {field.name: self._field(kind, field, found) for field in kind.fields}
        if kind.cls is tuple:
            return tuple(values["items"])
        if kind.cls is frozenset:
            return frozenset(self._hashable(values["items"], found))
        if kind.cls is FromFile:
            self._trees.append(values["node"])
            return FromFile(path=self._storage_path, **values)
        if kind.cls is Tensor:
            return self._tensor(values)
        if kind.cls is NumpyScalar:
            _check_numpy(values["dtype"], values["data"], 1)
        return kind.cls(**values)

    def _tensor(self, values: dict[str, Node]) -> Tensor:
        args = tuple(values.pop(name) for name in ("storage", "storage_offset", "shape", "strides"))
        node = dense(args, values.pop("dtype"), "little", values.pop("rebuild"))
        return replace(node, **values)

    def _field(self, kind: Kind, field: Field, found: dict[str, Json]) -> Node:
        value = found.get(field.name, PENDING)
        where = f"{field.name} of a {kind.tag}"
        if value is PENDING:
            if field.default is REQUIRED:
                raise DamagedFileError(f"{where} is missing")
            return [] if field.form in (Form.LIST, Form.PAIRS) else field.default
        if field.form == Form.VALUE:
            node = self._value(value)
            if field.kinds and not isinstance(node, field.kinds):
                raise wrong(where, " or ".join(one.__name__ for one in field.kinds), type(node).__name__)
            return node
        if type(value) is not JSON_TYPES.get(field.form, list):
            raise wrong(where, field.form.value, value)
        if field.texts and value not in field.texts:
            raise wrong(where, "one of a few names", value)
        return self._formed(field.form, value, where)

    def _formed(self, form: Form, value: Json, where: str) -> Node:
        if form in (Form.VALUES, Form.LIST, Form.MEMBERS):
            nodes = [self._value(one) for one in value]
            return tuple(nodes) if form == Form.VALUES else nodes
        if form in (Form.PAIRS, Form.ENTRIES):
            if not all(type(pair) is list and len(pair) == 2 for pair in value):
                raise wrong(where, "[key, value] pairs", value)
            return [(self._value(key), self._value(one)) for key, one in value]
        if form == Form.SIZES:
            return read_sizes(value, where)
        if form == Form.BYTES:
            return read_bytes(value, where)
        if form == Form.STORAGE:
            return self._storage(value)
        if form == Form.INTEGER and not 0 <= value <= MAX_ELEMENTS:
            raise wrong(where, "an integer from 0 to 2**63-1", value)
        return value

    def _storage(self, number: object) -> Storage:
        if type(number) is not int or not 0 <= number < len(self._storages):
            raise wrong("storage of a tensor", f"a number below {len(self._storages)}", number)
        return self._storages[number]

    def _ref(self, number: object) -> object:
        if type(number) is not int or not 0 <= number < len(self._numbered):
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


def parts(found: Mapping[str, Json], *names: str) -> list[Json]:
    """Return the members of an object that has these and its kind, and no others."""
    if found.keys() - {TAG} != set(names):
        raise wrong(str(found.get(TAG)), f"members {', '.join(names)}", sorted(found))
    return [found[name] for name in names]


def only_part(found: Mapping[str, Json], name: str) -> Json:
    """Return the one member of an object; errors are those of `parts`."""
    return parts(found, name)[0]


def read_bytes(found: object, what: str) -> bytes:
    """Return bytes from base64."""
    try:
        return b64decode(found, validate=True)  # type: ignore[arg-type]  # TypeError is caught
    except (binascii.Error, ValueError, TypeError):
        raise wrong(what, "base64", found) from None


def _number(found: object, *kinds: type) -> Node:
    if isinstance(found, dict) and found.get(TAG) in ("int", "float"):
        found = READERS[found[TAG]](found)
    if type(found) not in kinds:
        raise wrong("number", " or ".join(kind.__name__ for kind in kinds), found)
    return found


def _integer(found: Mapping[str, Json]) -> object:
    text = only_part(found, "hex")
    if type(text) is not str or len(text) > MAX_HEX or not text.removeprefix("-").startswith("0x"):
        raise wrong("hex of an int", "0x and digits", text)
    try:
        return int(text, 16)
    except ValueError:
        raise wrong("hex of an int", "0x and digits", text) from None


def _float(found: Mapping[str, Json]) -> object:
    text = only_part(found, "bits")
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(text))
    except (ValueError, TypeError, struct.error):
        raise wrong("bits of a float", "16 hexadecimal digits", text) from None
    return value


def _text(found: Mapping[str, Json]) -> object:
    data = only_part(found, "utf8")
    try:
        return read_bytes(data, "utf8 of a text").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise wrong("utf8 of a text", "UTF-8", data) from None


def _bytes(found: Mapping[str, Json]) -> object:
    return read_bytes(only_part(found, "data"), "data of bytes")


def _bytearray(found: Mapping[str, Json]) -> object:
    return bytearray(read_bytes(only_part(found, "data"), "data of a bytearray"))


def _complex(found: Mapping[str, Json]) -> object:
    return complex(*(_number(part, float) for part in parts(found, "real", "imag")))


def _range(found: Mapping[str, Json]) -> object:
    start, stop, step = (_number(part, int) for part in parts(found, "start", "stop", "step"))
    if step == 0:
        raise wrong("step of a range", "another number", step)
    return range(start, stop, step)


def _slice(found: Mapping[str, Json]) -> object:
    return slice(*(_number(part, int, type(None)) for part in parts(found, "start", "stop", "step")))


def _size(found: Mapping[str, Json]) -> object:
    return Size(read_sizes(only_part(found, "sizes"), "sizes of a size"))


READERS: dict[str, Callable[[Mapping[str, Json]], object]] = {
    "int": _integer,
    "float": _float,
    "text": _text,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
    "range": _range,
    "slice": _slice,
    "size": _size,
}
