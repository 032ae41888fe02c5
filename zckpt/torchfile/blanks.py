"""Numbers that differ between the files of ranks whose pickles are otherwise one: read with blanks in their places.

A DTensor is pickled with its mesh, and that with the rank that has saved it, in a state dict of the mesh:

    "_rank": 7, "_coordinate_on_dim": (0, 7)

In such a place the tree has a `Blank`, and the file keeps the number. A pickle moves numbers about and computes with
none, and nothing takes a blank for one: a tree that is made, with each blank once in a mesh and nowhere else, is what
the pickle makes of any numbers. Where one comes to lie anywhere else, or is looked at, files share nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, NoReturn

from zckpt.errors import PickleError, ZckptError
from zckpt.torchfile.nodes import Global, Object
from zckpt.torchfile.trees import check_depth, children, each
from zckpt.torchfile.unpickle import OPCODES, Machine, Persistent, pushing, unknown

RANK, COORDINATE = "_rank", "_coordinate_on_dim"

_PUT = rb"(?:q.|r....|\x94)?"
_NUMBER = rb"(?:K.|M..|J....)"
_VALUES = {RANK: b"(" + _NUMBER + b")", COORDINATE: rb"(?:\]" + _PUT + rb")?\(?(" + _NUMBER + b"+)"}
_PATTERNS = [
    re.compile(re.escape(opcode + bytes((len(key),)) + zeros + key.encode()) + _PUT + value, re.DOTALL)
    for opcode, zeros in ((b"X", bytes(3)), (b"\x8c", b""))
    for key, value in _VALUES.items()
]
"""Each begins with bytes that are searched for at the speed of memory."""

DUP, BLANK = 0x32, 0xFF
"""What would make two of a blank, which no pickle of Python's has; and what stands for one, an opcode of none."""

Places = list[tuple[int, int]]
"""Of numbers, with their opcodes: first byte, and the one after the last."""


class Blank:
    """Stands for a number of a file, by its index in `TorchFile.numbers`; nothing can be done with it."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def _refuse(self, *_: object) -> NoReturn:
        raise PickleError("a number that is not known")

    __bool__ = __eq__ = __hash__ = __lt__ = __int__ = __index__ = _refuse  # type: ignore[assignment]


def find_blanks(data: bytes) -> Places:
    """Return where a pickle seems to have the numbers of a mesh."""
    found: Places = []
    for pattern in _PATTERNS if COORDINATE.encode() in data else ():
        for match in pattern.finditer(data):
            at, end = match.span(1)
            while at < end:
                width = {0x4B: 2, 0x4D: 3}.get(data[at], 5)
                found.append((at, at + width))
                at += width
    return sorted(found)


def numbers_at(data: bytes | bytearray, places: Places) -> tuple[int, ...]:
    """Return the numbers in their places."""
    return tuple(int.from_bytes(data[low + 1 : high], "little", signed=high - low == 5) for low, high in places)


def cut_out(data: bytes, places: Places) -> bytes:
    """Return a pickle with the opcode `BLANK` in place of its numbers."""
    ends = [0, *(high for _, high in places)]
    starts = [*(low for low, _ in places), len(data)]
    return bytes((BLANK,)).join(data[end:start] for end, start in zip(ends, starts, strict=True))


class BlankMachine(Machine):
    """Runs a pickle that numbers are cut out of."""

    __slots__ = ("count",)

    opcodes: ClassVar = [*OPCODES[:DUP], unknown, *OPCODES[DUP + 1 : BLANK], pushing(lambda machine: machine.blank())]

    def __init__(self, data: bytes, *, record: str, byteorder: str, persistent: Persistent | None) -> None:
        super().__init__(data, record=record, byteorder=byteorder, persistent=persistent)
        self.count = 0

    def blank(self) -> Blank:
        """Return the next one."""
        self.count += 1
        return Blank(self.count - 1)


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
    are_astray = has_blanks(root, partial(_outside_meshes, found)) or any(map(_is_blank, machine.memo.values()))
    is_whole = machine.pos == len(left) and machine.count == len(places)
    return (machine, root) if is_whole and not are_astray and found == Counter(range(len(places))) else None


def _is_blank(node: object) -> bool:
    return type(node) is Blank


def _below(node: object) -> Iterator[object]:
    return (child for _, child in children(node))


def has_blanks(root: object, below: Callable[[object], Iterator[object]] = _below) -> bool:
    """Tell whether a blank is anywhere in a tree."""
    return any(map(_is_blank, each(root, below)))


def _outside_meshes(found: Counter[int], node: object) -> Iterator[object]:
    """Yield what is below a node, but for the numbers of a mesh; the blanks among these are counted."""
    state = node.state if type(node) is Object and type(node.cls) is Global and node.cls.name == "DeviceMesh" else None
    if type(state) is not dict or type(node) is not Object or node.args or node.items or node.entries:
        yield from _below(node)
        return
    for key, value in state.items():
        own = (value,) if key == RANK else value if key == COORDINATE else ()
        if own and type(own) in (tuple, list) and all(type(one) in (int, Blank) for one in own):
            found.update(one.index for one in own if type(one) is Blank)
        else:
            yield value


def filled(value: object, numbers: Sequence[int]) -> object:
    """Return a number of a mesh, or several, with those of a file in place of blanks."""
    if type(value) is Blank:
        return numbers[value.index]
    if isinstance(value, (tuple, list)):
        return tuple(filled(one, numbers) for one in value)
    return value
