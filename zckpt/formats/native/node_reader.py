"""Values of `checkpoint.json` as objects again. See `node_kinds`.

The document may be anyone's, so nothing is taken for granted: kinds, fields, types, numbers, and that a tensor lies
within its storage.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.formats.native.document import Form, Json, formed, record, wrong
from zckpt.formats.native.node_kinds import BY_TAG, REQUIRED, TAG, Field, Kind, Node
from zckpt.torchfile import Context, FromFile, NumpyArray, NumpyDType, NumpyScalar, Storage, Tensor, check_depth, dense

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
