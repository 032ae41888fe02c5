"""What differs between the files of ranks whose pickles are otherwise one: read with blanks in its place.

A DTensor is pickled with its mesh, and that with the rank that has saved it and the names of that rank's groups:

    "_dim_group_names": ["3", "5"], "_rank": 7, "_coordinate_on_dim": (0, 7)

In such a place the tree has a `Blank`, and the file keeps the number. A pickle moves values about and computes with
none, and nothing takes a blank for one: a tree that is made, with each blank once in a mesh and nowhere else, is what
the pickle makes of any numbers. Where one comes to lie anywhere else, or is looked at, files share nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, NoReturn

from zckpt.errors import PickleError, ZckptError
from zckpt.torchfile.nodes import Global, Object
from zckpt.torchfile.trees import LEAVES, check_depth, children, each
from zckpt.torchfile.unpickle import OPCODES, Machine, Persistent, pushing

RANK, COORDINATE, GROUPS = "_rank", "_coordinate_on_dim", "_dim_group_names"

_PUT = re.compile(rb"(?:q.|r....|\x94)?", re.DOTALL)
_KEYS = [
    (key, opcode + bytes((len(key),)) + zeros + key.encode())
    for opcode, zeros in ((b"X", bytes(3)), (b"\x8c", b""))
    for key in (RANK, COORDINATE, GROUPS)
]
"""What each key's string is in a pickle; in a second mesh it is only referred to."""

_HEADS = {0x4B: (1, 1), 0x4D: (1, 2), 0x4A: (1, 4), 0x58: (5, 0), 0x8C: (2, 0)}
"""Opcodes of numbers and of texts: bytes of their heads, and of what follows; of texts, the head says that."""

BLANK = 0xFF
"""Stands for a blank in a pickle, in which it is no opcode."""

_CONTAINERS = tuple, list, dict

Places = list[tuple[int, int, int]]
"""Of numbers and texts in a pickle: first byte, that after the opcode and a length, and the one after the last."""


class Blank:
    """Stands for a number or a text of a file, by its index in `TorchFile.numbers`; nothing can be done with it."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def _refuse(self, *_: object) -> NoReturn:
        raise PickleError("a number that is not known")

    __bool__ = __eq__ = __hash__ = __lt__ = __int__ = __index__ = __reduce_ex__ = _refuse


def find_blanks(data: bytes) -> Places:
    """Return where a pickle seems to have what a mesh has of its rank."""
    found: Places = []
    for key, text in _KEYS if COORDINATE.encode() in data else ():
        at = data.find(text)
        while at >= 0:
            found += _literals(data, at + len(text), key)
            at = data.find(text, at + 1)
    try:
        numbers_at(data, found)
    except UnicodeDecodeError:  # which is to be said of the pickle as it is
        return []
    return sorted(found)


def _literals(data: bytes, at: int, key: str) -> Places:
    """Return where the numbers or texts are that follow a key: one, or those of a list or tuple."""
    found: Places = []
    at, is_list = _after(data, at), False
    if key != RANK and data[at : at + 1] == b"]":
        at, is_list = _after(data, at + 1), True
    is_marked = key != RANK and data[at : at + 1] == b"("
    at += is_marked
    while at < len(data) and data[at] in _HEADS and (data[at] in b"X\x8c") == (key == GROUPS):
        head, width = _HEADS[data[at]]
        end = at + head + (width or int.from_bytes(data[at + 1 : at + head], "little"))
        found.append((at, at + head, end))
        at = _after(data, end) if key == GROUPS else end
        if key == RANK or (is_list and not is_marked):
            break
    return found if not is_list or data[at : at + 1] == (b"e" if is_marked else b"a") else []


def _after(data: bytes, at: int) -> int:
    """Return the byte after an opcode that puts something aside, if there is one."""
    match = _PUT.match(data, at)
    return at if match is None else match.end()


def numbers_at(data: bytes | bytearray, places: Places) -> tuple[int | str, ...]:
    """Return the numbers and texts in their places. Raises UnicodeDecodeError: a text is none."""
    return tuple(
        int.from_bytes(data[begin:end], "little", signed=data[at] == 0x4A)
        if begin == at + 1
        else str(data[begin:end], "utf-8", "surrogatepass")
        for at, begin, end in places
    )


def cut_out(data: bytes, places: Places) -> bytes:
    """Return a pickle with the opcode `BLANK` in these places."""
    ends = [0, *(end for *_, end in places)]
    starts = [*(at for at, *_ in places), len(data)]
    return bytes((BLANK,)).join(data[end:start] for end, start in zip(ends, starts, strict=True))


class _Wary(dict[int, Any]):
    """Functions that make nodes of arguments, each of which refuses blanks among them."""

    def __init__(self, builders: dict[int, Any]) -> None:
        self._builders = builders

    def get(self, key: int, default: Any = None) -> Any:  # noqa: ANN401
        builder = self._builders.get(key)
        return default if builder is None else partial(_build, builder)


def _build(builder: Callable[..., object], args: object, context: object) -> object:
    for one in args if isinstance(args, tuple) else ():
        is_flat = type(one) is tuple and LEAVES.issuperset(map(type, one))  # a shape: what most arguments are
        if type(one) is Blank or (not is_flat and has_blanks(one, _plainly_below)):
            raise PickleError("a number that is not known")
    return builder(args, context)


class BlankMachine(Machine):
    """Runs a pickle that numbers are cut out of."""

    __slots__ = ("numbers",)

    opcodes: ClassVar = [*OPCODES[:BLANK], pushing(lambda machine: Blank(next(machine.numbers)))]

    def __init__(self, data: bytes, *, record: str, byteorder: str, persistent: Persistent | None) -> None:
        super().__init__(data, record=record, byteorder=byteorder, persistent=persistent)
        self.builders = _Wary(self.globals.builders)
        self.numbers = count()


def run_with_blanks(
    data: bytes, places: Places, byteorder: str, persistent: Persistent
) -> tuple[Machine, object] | None:
    """Run a pickle with blanks in some places; None unless each has come to lie in a mesh once, and nowhere else."""
    left, found = cut_out(data, places), Counter[int]()
    machine = BlankMachine(left, record="data.pkl", byteorder=byteorder, persistent=persistent)
    try:
        root = machine.run()
        check_depth(root)
    except ZckptError:  # which the pickle itself may raise, too, and in its own words
        return None
    is_whole = machine.pos == len(left) and not has_blanks(root, partial(_outside_meshes, found))
    return (machine, root) if is_whole and found == Counter(range(len(places))) else None


def has_blanks(root: object, below: Callable[[object], Iterator[object]] | None = None) -> bool:
    """Tell whether a blank is anywhere in a tree, given what is below a node: by default everything."""
    return any(type(node) is Blank for node in each(root, below or _below))


def _below(node: object) -> Iterator[object]:
    return (child for _, child in children(node) if type(child) not in LEAVES)


def _plainly_below(node: object) -> Iterator[object]:
    return _below(node) if isinstance(node, _CONTAINERS) else iter(())


def _outside_meshes(found: Counter[int], node: object) -> Iterator[object]:
    """Yield what is below a node, but for what a mesh has of its rank; the blanks among that are counted."""
    state = node.state if type(node) is Object and type(node.cls) is Global and node.cls.name == "DeviceMesh" else None
    if type(state) is not dict or type(node) is not Object or node.args or node.items or node.entries:
        yield from _below(node)
        return
    for key, value in state.items():
        own = (value,) if key == RANK else value if key in (COORDINATE, GROUPS) else ()
        if type(own) in (tuple, list) and own and all(type(one) in (int, str, Blank) for one in own):
            found.update(one.index for one in own if type(one) is Blank)
        else:
            yield value


def filled(value: object, numbers: Sequence[int | str]) -> object:
    """Return a number or a text of a mesh, or several, with those of a file in place of blanks."""
    if type(value) is Blank:
        return numbers[value.index]
    if isinstance(value, (tuple, list)):
        return tuple(filled(one, numbers) for one in value)
    return value
