"""What a pickle would import and call: the machine of `unpickle`, which notes names and keeps no values.

It goes on wherever Python's own unpickler would, whatever that makes of values: nothing may hide behind an opcode that
only a reader of checkpoints refuses. What Python would do otherwise than a scanner expects is told of as a trick.
"""

from __future__ import annotations

import struct
from collections import Counter
from functools import partial
from typing import ClassVar, NoReturn

from zckpt.errors import PickleError
from zckpt.torchfile.nodes import Args, Global, Object
from zckpt.torchfile.rebuild import Context, Globals
from zckpt.torchfile.unpickle import (
    OPCODES,
    Machine,
    Opcode,
    TruncatedPickleError,
    bytestring,
    callee,
    global_line,
    pushing,
    string_line,
)

Name = tuple[str, str]
"""Module and name of a global, as the pickle spells them."""

BOX = Object(Global("builtins", "object"))
"""Stands for every value that no name, class or bytes can be of."""

GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}


class Named(Globals):
    """The globals of one pickle, and how often each is named and called.

    An attribute of a global is a global itself, as protocols before 4 write a class within a class.
    """

    __slots__ = ("blobs", "called", "named", "tricks")

    def __init__(self) -> None:
        super().__init__()
        self.named: Counter[Name] = Counter()
        self.called: Counter[Name] = Counter()
        self.blobs: list[bytes] = []
        self.tricks: list[str] = []

    def find(self, module: str, name: str) -> object:
        """Return the node for a global."""
        self.named[module, name] += 1
        node = super().find(module, name)
        self.builders[id(node)] = partial(self._call, (module, name))
        return node

    def _call(self, name: Name, args: Args, _: Context) -> object:
        match args:
            case (Global(module, outer), str(inner)) if name in GETATTR:
                return self.find(module, f"{outer}.{inner}")
            case (str(text), str()) if name == ("_codecs", "encode"):
                self.blobs.append(text.encode("latin-1", "replace"))
        self.called[name] += 1
        return NotImplemented

    def call(self, cls: object) -> Object:
        """Note that a class is called, whose instance the result stands for."""
        if isinstance(cls, Global):
            self.called[cls.module, cls.name] += 1
        return Object(callee(cls))

    def mentions(self) -> dict[Name, tuple[int, int]]:
        """Return how often each global is named and called; that `getattr` led to others says nothing of itself."""
        idle = {name for name in GETATTR & self.named.keys() if not self.called[name] and len(self.named) > 1}
        return {name: (count, self.called[name]) for name, count in self.named.items() if name not in idle}


def _bytes(machine: Witness, data: object) -> object:
    if isinstance(data, bytes) and data:
        machine.globals.blobs.append(data)
    return data


def _sized(width: int, is_text: bool = False) -> Opcode:
    def push(machine: Witness) -> object:
        data = machine.take(machine.unsigned(width))
        return _bytes(machine, bytestring(data) if is_text else data)

    return pushing(push)


def _change(machine: Witness) -> None:
    """Note that what all of Python has is appended to, set in or given a state; of values, anything is allowed."""
    if isinstance(machine.stack[-1], Global):
        machine.globals.tricks.append(f"it changes {machine.stack[-1]} itself")


def _since_mark(machine: Witness) -> object:
    machine.since_mark()
    return BOX


def _set(machine: Witness, count: int) -> None:
    for _ in range(count):
        machine.stack.pop()
    _change(machine)


def _set_all(machine: Witness) -> None:
    if machine.since_mark():  # of nothing, nothing is asked
        _change(machine)


def _newobj(machine: Witness, count: int) -> None:
    for _ in range(count):
        machine.stack.pop()
    machine.stack[-1] = machine.globals.call(machine.stack[-1])


def _inst(machine: Witness) -> object:
    cls = global_line(machine)
    machine.since_mark()
    return machine.globals.call(cls)


def _obj(machine: Witness) -> object:
    return machine.globals.call((machine.since_mark() or [None])[0])


def _number(machine: Machine) -> object:
    """Read a number as C does, in any base; what is none, Python refuses, too."""
    text = machine.line(0).strip().removesuffix(b"L")
    try:
        return int(text, 0)
    except ValueError:
        if text.lstrip(b"+-0_").isdigit():  # octal, or of more digits than Python converts
            return BOX
        raise PickleError("a number written as text", found=f"{text[:20]!r}") from None


def _index(machine: Machine) -> int:
    try:
        return int(machine.line(0))
    except ValueError:
        raise PickleError("a number written as text") from None


def _long(machine: Machine, width: int) -> object:
    data = machine.take(machine.unsigned(width))
    return int.from_bytes(data, "little", signed=True) if len(data) < 64 else BOX


def _trick(text: str, width: int) -> Opcode:
    def push(machine: Witness) -> object:
        machine.take(width)
        machine.globals.tricks.append(text)
        return BOX

    return pushing(push)


def _proto(machine: Witness) -> None:
    if machine.is_framed or machine.pos != 1:
        machine.globals.tricks.append("PROTO is not its first opcode")
    OPCODES[0x80](machine)


class _Frame(Exception):  # noqa: N818  # no error
    """Leaves the machine's loop where a frame of so many bytes begins."""


def _frame(machine: Witness) -> NoReturn:
    raise _Frame(machine.unsigned(8))


_REGISTRY = "it uses the extension registry of whoever loads it"

_TABLE: dict[bytes, Opcode] = {
    **dict.fromkeys((b"}", b"]", b"\x8f", b"\x97"), pushing(lambda _: BOX)),
    **dict.fromkeys((b"l", b"d", b"\x91"), pushing(_since_mark)),
    **dict.fromkeys((b"e", b"u", b"\x90"), _set_all),
    b"a": lambda machine: _set(machine, 1),
    b"s": lambda machine: _set(machine, 2),
    b"b": lambda machine: _set(machine, 1),
    b"\x81": lambda machine: _newobj(machine, 1),
    b"\x92": lambda machine: _newobj(machine, 2),
    b"i": pushing(_inst),
    b"o": pushing(_obj),
    b"Q": lambda machine: machine.stack.__setitem__(-1, BOX),
    b"P": pushing(lambda machine: (machine.line(0), BOX)[1]),
    b"I": pushing(_number),
    b"L": pushing(_number),
    b"\x8a": pushing(lambda machine: _long(machine, 1)),
    b"\x8b": pushing(lambda machine: _long(machine, 4)),
    b"g": pushing(lambda machine: machine.memo[_index(machine)]),
    b"p": lambda machine: machine.memo.__setitem__(_index(machine), machine.stack[-1]),
    b"S": pushing(lambda machine: _bytes(machine, string_line(machine))),
    b"T": _sized(4, is_text=True),
    b"U": _sized(1, is_text=True),
    b"B": _sized(4),
    b"C": _sized(1),
    b"\x8e": _sized(8),
    b"\x96": _sized(8),
    b"\x98": lambda _: None,
    b"\x82": _trick(_REGISTRY, 1),
    b"\x83": _trick(_REGISTRY, 2),
    b"\x84": _trick(_REGISTRY, 4),
    b"\x80": _proto,
    b"\x95": _frame,
}


class Witness(Machine):
    """Runs one pickle for its names alone.

    Attributes
    ----------
    is_whole : bool
        Whether nothing lies behind `data`.
    is_framed : bool
        Whether `data` is a frame now.
    """

    __slots__ = ("is_framed", "is_whole")

    opcodes: ClassVar = [_TABLE.get(bytes((code,)), OPCODES[code]) for code in range(256)]
    globals: Named

    def __init__(self, data: bytes, *, is_whole: bool = True) -> None:
        super().__init__(data, record="the pickle")
        self.globals = Named()
        self.builders = self.globals.builders
        self.is_whole, self.is_framed = is_whole, False

    def line(self, limit: int) -> bytes:  # noqa: ARG002  # lines have any length for Python
        """Return the bytes up to the next newline; of a last line without one, Python takes the last byte off."""
        try:
            return super().line(len(self.data))
        except TruncatedPickleError:
            if not self.is_whole or self.is_framed:
                raise
        text, self.pos = self.data[self.pos : -1], len(self.data)
        return text

    def _run(self) -> None:
        """Run all opcodes, frame by frame: what Python reads from a file ends with a frame, or reads on elsewhere."""
        whole, begin = self.data, 0
        while True:
            try:
                super()._run()
            except _Frame as frame:
                begin += self.pos
                if self.is_framed:
                    self.globals.tricks.append("a frame begins within another")
                if begin + frame.args[0] > len(whole):
                    if not self.is_whole:
                        raise TruncatedPickleError("the pickle is cut off", expected="the rest of a frame") from None
                    self.globals.tricks.append("a frame is longer than its file")
                self.data, self.pos, self.is_framed = whole[begin : begin + frame.args[0]], 0, True
            except (IndexError, struct.error, TruncatedPickleError):
                if not self.is_framed:
                    raise
                if self.at < len(self.data):
                    self.globals.tricks.append("an opcode reaches beyond its frame")
                self.data, self.pos, begin, self.is_framed = whole, begin + self.at, 0, False
            else:
                self.data, self.pos = whole, begin + self.pos
                self.stack, self.marks = [self.stack[-1] if self.stack else BOX], []  # Python leaves the rest alone
                return
