"""A checkpoint as one tree, directories, archives, pickles and documents alike, that a few bytes edit.

What is written of an edited tree is whole but for the edit: an archive has its checksums and its directory, a header
its length. So an edit reaches whoever reads what it is about.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from zckpt.storage.packed.index import MAGIC

NUMBERS = (0, 1, -1, 2, 255, 256, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
           1 << 64, -(1 << 63), 1 << 100, 10**400, 0.0, -0.0, 1.5, 1e308, math.nan, math.inf)  # fmt: skip
TEXTS = ("", "a", "0", "-1", "../x", "/etc/passwd", ".", "a/b", "\0", "\n", "\ud800", "é", "x" * 5000, "{", "weight",
         "cpu", "cuda:0", "float32", "bfloat16", "torch.float16", "F8_E8M0", "U8", "inf", "1e999", "[[[", "٣",
         "\x1b[31m")  # fmt: skip
PLAIN = (None, True, False, *NUMBERS, *TEXTS, b"", b"\0", b"PK\3\4", b"\x80\x02N.", b"\xff" * 9)
GLOBALS = (("torch", "float32"), ("torch", "Size"), ("torch", "FloatStorage"), ("torch.storage", "UntypedStorage"),
           ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("os", "system"), ("numpy", "dtype"),
           ("torch._utils", "_rebuild_parameter"), ("torch", "device"), ("builtins", "set"), ("argparse", "Namespace"),
           ("torch._tensor", "_rebuild_from_type_v2"), ("builtins", "slice"), ("a", "b"))  # fmt: skip

MOST_PLACES, MOST_NBYTES = 1 << 15, 1 << 22

EDIT = struct.Struct("<HBH")
"""Of which node, what is done, and how."""


class Node:
    """A value (`leaf`), a name of a pickle (`global`), or what has others in it; never changed once it is made."""

    __slots__ = ("below", "kind", "value", "written")

    def __init__(self, kind: str, below: tuple[Node, ...] = (), value: Any = None) -> None:
        self.kind, self.below, self.value = kind, below, value
        self.written: dict[str, bytes] = {}


def leaf(value: object) -> Node:
    return Node("leaf", (), value)


EMPTY = tuple(Node(kind) for kind in ("list", "tuple", "dict"))
NEW = (*map(leaf, PLAIN), *(Node("global", (), one) for one in GLOBALS), *EMPTY)
PAIRED = {"dict": 0, "zip": 0, "folder": 0, "mapping": 1}
"""What has names and values by turns, behind so many others: a mapping what makes it."""


# --- from bytes


def of_json(value: Any) -> Node:
    if isinstance(value, dict):
        return Node("dict", tuple(node for pair in value.items() for node in map(of_json, pair)))
    return Node("list", tuple(map(of_json, value))) if isinstance(value, list) else leaf(value)


def of_pickles(data: bytes) -> tuple[list[Node], int]:
    """Return the roots of pickles that follow each other, and where they end. What is shared is there as often."""
    roots, at = list[Node](), 0
    while at < len(data) and data[at : at + 1] == b"\x80":
        root, at = _of_pickle(data, at)
        roots.append(root)
    return roots, at


def _of_pickle(data: bytes, at: int) -> tuple[Node, int]:
    stack, marks, memo = list[Any](), list[list[Any]](), dict[int, Any]()
    file = io.BytesIO(data)
    file.seek(at)
    for code, arg, _ in pickletools.genops(file):
        name, items = code.name, list[Any]()
        if any(kind.name == "mark" for kind in code.stack_before):
            items, stack = stack, marks.pop()
        if name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("GLOBAL", "INST"):
            stack.append(Node("global", (), tuple(arg.split(" "))))
        elif name == "STACK_GLOBAL":
            second, first = stack.pop(), stack.pop()
            stack.append(Node("global", (), (first.value, second.value)))
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE"):
            stack.append(Node(name[6:].lower()))
        elif name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            stack.append(Node(name.lower(), tuple(items)))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [Node("tuple", tuple(stack[-count:]))]
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            if not name.endswith("S"):
                count = 2 if name == "SETITEM" else 1
                stack, items = stack[:-count], stack[-count:]
            filled = stack[-1]  # which is in the memo, too
            if filled.kind == "reduce":
                filled.kind, filled.below = "mapping", (Node("reduce", filled.below),)
            filled.below += tuple(items)
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            second, first = stack.pop(), stack.pop()
            stack.append(Node(name.lower(), (first, second)))
        elif name == "BINPERSID":
            stack.append(Node("persid", (stack.pop(),)))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "STOP":
            break
        elif name == "NEWTRUE" or name == "NEWFALSE" or name == "NONE":
            stack.append(leaf({"NEWTRUE": True, "NEWFALSE": False}.get(name)))
        elif name not in ("PROTO", "FRAME"):
            stack.append(leaf(arg))
    return Node("pickle", (stack[-1],)), file.tell()


def of_file(data: bytes, name: str) -> Node:
    """Return the tree of a file by what it begins with; of one that is not known, its bytes."""
    try:
        if data[:4] == b"PK\3\4" and not name.endswith(".distcp"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                some = [(one, archive.read(one)) for one in archive.namelist()]
            pairs = [(leaf(one), of_pickles(it)[0][0] if one.endswith("data.pkl") else leaf(it)) for one, it in some]
            return Node("zip", tuple(node for pair in pairs for node in pair))
        if data.startswith(MAGIC):
            return of_index(data)
        if data[:1] == b"\x80" and not name.endswith(".distcp"):
            roots, at = of_pickles(data)
            return Node("file", (*roots, leaf(data[at:])))
        if name.endswith(".safetensors"):
            size = int.from_bytes(data[:8], "little")
            return Node("safetensors", (of_json(json.loads(data[8 : 8 + size])), leaf(data[8 + size :])))
        if data[:1] in (b"{", b"["):
            found = json.loads(data)
            found.pop("crc32", None) if isinstance(found, dict) else None
            return Node("json", (of_json(found),))
        return Node("file", (leaf(data.decode()),))
    except (ValueError, IndexError, AttributeError, zipfile.BadZipFile):
        return Node("file", (leaf(data),))


def of_folder(folder: Path) -> Node:
    """Return the tree of all files below a folder."""
    paths = sorted(one for one in folder.rglob("*") if one.is_file())
    pairs = [(leaf(one.relative_to(folder).as_posix()), of_file(one.read_bytes(), one.name)) for one in paths]
    return Node("folder", tuple(node for pair in pairs for node in pair))


# --- to bytes


def written(node: Node, form: str) -> bytes:
    """Return a node as the bytes of a `pickle`, of `json`, or of a `file`; what was written before is remembered."""
    found = node.written.get(form)
    if found is None:
        found = node.written[form] = _WRITERS[form](node)
        if len(found) > MOST_NBYTES:  # what is shared is written as often
            raise OverflowError
    return found


def _pickled(node: Node) -> bytes:
    below = [written(one, "pickle") for one in node.below]
    match node.kind:
        case "leaf":
            return pickle.dumps(node.value, 2)[2:-1] if not isinstance(node.value, (str, bytes)) else _text(node.value)
        case "global":
            return b"c" + "\n".join((*node.value, "")).encode("utf-8", "surrogatepass")
        case "list":
            return b"](" + b"".join(below) + b"e"
        case "dict":
            return b"}(" + b"".join(below[: len(below) // 2 * 2]) + b"u"
        case "mapping" if below:
            return below[0] + b"(" + b"".join(below[1 : len(below) // 2 * 2 + 1 - 2 * (len(below) % 2 == 0)]) + b"u"
        case "set" | "frozenset":
            return b"\x8f(" + b"".join(below) + b"\x90"
        case "reduce" | "newobj" | "build" if len(below) == 2:
            return b"".join(below) + {"reduce": b"R", "newobj": b"\x81", "build": b"b"}[node.kind]
        case "persid" if len(below) == 1:
            return below[0] + b"Q"
        case "pickle" if below:
            return below[0]
    return b"(" + b"".join(below) + b"t"


def _text(value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return (b"X" if isinstance(value, str) else b"B") + struct.pack("<I", len(data)) + data


def _as_json(node: Node) -> bytes:
    match node.kind:
        case "leaf":
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(value, int) and abs(value) >> 1024:
                return b"1" + b"0" * 400
            return json.dumps(value).encode()
        case "dict":
            pairs = zip(node.below[::2], node.below[1::2], strict=False)
            return b"{%b}" % b",".join(b"%b:%b" % (_key(one), written(other, "json")) for one, other in pairs)
        case "global":
            return json.dumps(".".join(node.value)).encode()
    return b"[%b]" % b",".join(written(one, "json") for one in node.below)


def _key(node: Node) -> bytes:
    text = written(node, "json")
    return text if text[:1] == b'"' else json.dumps(text.decode()).encode()


def _as_file(node: Node) -> bytes:
    match node.kind:
        case "leaf":
            value = node.value
            return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        case "zip":
            return archive([(_name(one), written(two, "file")) for one, two in zip(*_halves(node), strict=False)])
        case "safetensors" if node.below:
            header, data = written(node.below[0], "json"), b"".join(written(one, "file") for one in node.below[1:])
            return len(header).to_bytes(8, "little") + header + data
        case "padded" if node.below:
            return written(node.below[0], "json").ljust(node.value or 0)
        case "json" if node.below:
            return written(node.below[0], "json")
        case "lines":
            return b"".join(line_of_text(written(one, "json")) for one in node.below)
        case "index" if len(node.below) == 3:
            return packed_index([written(node.below[0], "json"), *(written(one, "file") for one in node.below[1:])])
        case "file" | "folder":
            return b"".join(written(one, "file") for one in node.below)
    return b"\x80\x02" + written(node, "pickle") + b"."


def line_of_text(text: bytes) -> bytes:
    """Return a line of a journal."""
    return b"\n%08x %b\n" % (zlib.crc32(text), text)


def packed_index(parts: list[bytes]) -> bytes:
    """Return the index of a checkpoint in a store: its header, rows and ranges."""
    packed = [zstandard.ZstdCompressor(level=1).compress(one) for one in parts]
    rest = struct.pack("<6Q", *map(len, packed), *map(len, parts)) + b"".join(packed)
    return MAGIC + xxhash.xxh3_128_digest(rest) + rest


def of_index(data: bytes) -> Node:
    """Return the tree of such an index."""
    begin = len(MAGIC) + 16
    sizes, at, parts = struct.unpack_from("<3Q", data, begin), begin + 48, []
    for size in sizes:
        parts.append(zstandard.ZstdDecompressor().decompress(data[at : at + size]))
        at += size
    return Node("index", (of_json(json.loads(parts[0])), *map(leaf, parts[1:])))


_WRITERS = {"pickle": _pickled, "json": _as_json, "file": _as_file}


def _halves(node: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    return node.below[::2], node.below[1::2]


def _name(node: Node) -> str:
    value = node.value
    return value if isinstance(value, str) else repr(value)[:200]


def archive(records: list[tuple[str, bytes]]) -> bytes:
    """Return a zip archive of records as they are, with checksums and directory."""
    out, directory = bytearray(), bytearray()
    for name, data in records:
        raw = name.encode("utf-8", "surrogatepass")[:60_000]
        about = (zlib.crc32(data), len(data), len(data), len(raw))
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0x800, 0, 0, 33, *about, 0, 0, 0, 0, 0, len(out))
        directory += raw
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0x800, 0, 0, 33, *about, 0) + raw + data
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(out), 0)
    return bytes(out + directory + end)


def files_of(node: Node) -> dict[str, bytes]:
    """Return the files of a folder by name; of several of one name, or with names that can be no files', the first."""
    found: dict[str, bytes] = {}
    if node.kind != "folder":
        return {"file": written(node, "file")}
    for one, two in zip(*_halves(node), strict=False):
        name = _name(one).encode("utf-8", "replace").decode()
        if 0 < len(name) < 200 and "\0" not in name and not {"", ".", ".."} & {*name.split("/")}:
            found.setdefault(name, written(two, "file"))
    return found


# --- edits


class Tree:
    """A tree with its nodes in their order, by which a script names them."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.paths = [path for path, _ in islice(_walk(root), MOST_PLACES)]

    def edited(self, script: bytes) -> Node:
        """Return the tree after the edits of a script; a rest that is no whole edit is none."""
        root = self.root
        for place, action, value in EDIT.iter_unpack(script[: len(script) // EDIT.size * EDIT.size]):
            root = _at(root, self.paths[place % len(self.paths)], action, value, self)
        return root

    def node(self, number: int) -> Node:
        found = self.root
        for step in self.paths[number % len(self.paths)]:
            found = found.below[step]
        return found

    def like(self, node: Node, number: int) -> Node:
        """Return the next node of the same kind, of leaves of the same type."""
        for at in range(number, number + 60):
            other = self.node(at)
            if other.kind == node.kind and type(other.value) is type(node.value) and other.value != node.value:
                return other
        return node


def _walk(node: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    yield path, node
    for number, one in enumerate(node.below):
        if len(path) < 60:
            yield from _walk(one, (*path, number))


def _at(node: Node, path: tuple[int, ...], action: int, value: int, tree: Tree) -> Node:
    """Return a node of which the one at a path, or what is left of the way to it, is edited."""
    if not path or path[0] >= len(node.below):
        return _edited(node, action, value, tree)
    step, below = path[0], list(node.below)
    if len(path) == 1 and action % 16 in (2, 3):
        width, skip = (2, PAIRED[node.kind]) if node.kind in PAIRED else (1, 0)
        first = max((step - skip) // width * width + skip, 0)
        below[first : first + width] = below[first : first + width] * 2 if action % 16 == 3 else []
    else:
        below[step] = _at(below[step], path[1:], action, value, tree)
    return Node(node.kind, tuple(below), node.value)


def _edited(node: Node, action: int, value: int, tree: Tree) -> Node:
    below = node.below
    match action % 16:
        case 0:
            return NEW[value % len(NEW)]
        case 1:
            return tree.node(value)
        case 4 | 5 if node.kind == "leaf":
            return leaf(_tweaked(node.value, value))
        case 6:
            return Node(("list", "tuple", "dict", "persid")[value % 4], (node,) * (1 + value % 2))
        case 7 if below:
            return below[value % len(below)]
        case 8 if not below:
            return leaf(value - (1 << 16) * (value % 3 == 0))
        case 9 if node.kind == "global":
            return Node("global", (), GLOBALS[value % len(GLOBALS)])
        case 9 | 10 if node.kind == "leaf" and isinstance(node.value, (int, float)):
            return leaf(NUMBERS[value % len(NUMBERS)])
        case 9 | 10 if node.kind == "leaf" and isinstance(node.value, str):
            return leaf(TEXTS[value % len(TEXTS)])
        case 12:
            return Node(node.kind, (*below, *tree.node(value).below), node.value)
        case 13:
            width = 2 if node.kind in PAIRED else 1
            return Node(node.kind, (*below, *(NEW[(value + at) % len(NEW)] for at in range(width))), node.value)
        case 14 if below:
            return Node(node.kind, (*below[value % len(below) :], *below[: value % len(below)]), node.value)
        case 15 if below:
            return Node(node.kind, (), node.value)
    return tree.like(node, value)


def _tweaked(value: Any, how: int) -> Any:
    """Return a value that is nearly the same."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        near = (value + 1, value - 1, value * 2, -value, value // 2, value ^ 1 << how % 65, value + how, 7)
        return near[how // 97 % 8]
    if isinstance(value, float):
        return (value + 1, value * 2, -value, int(value) if math.isfinite(value) else 0, value / 3)[how % 5]
    if not value:
        return value
    at, new = how % len(value), how // 7 % 256
    match how % 5:
        case 0:
            return value[:at]
        case 1:
            return value + value[:at]
        case 2:
            return value[:at] + value[at + 1 :]
        case 3 if isinstance(value, bytes):
            return value[:at] + bytes((value[at] ^ 1 << how % 8,)) + value[at + 1 :]
    digits = [number for number, one in enumerate(value) if str(one).isdigit()] if isinstance(value, str) else []
    at, new = (digits[at % len(digits)], 48 + new % 10) if digits and how % 2 else (at, new)
    return value[:at] + (chr(new) if isinstance(value, str) else bytes((new,))) + value[at + 1 :]
