"""A pickle machine that builds inert nodes: it imports nothing and calls nothing that a pickle names.

A pickle is a program for a stack machine. Its opcodes are one byte each, followed by their argument:

    80 02           PROTO 2
    63 a 0a b 0a    GLOBAL "a b"     -> Global("a", "b")
    58 n32 text     BINUNICODE       -> str
    71 i            BINPUT i         memo[i] = top of the stack
    28 ... 74       MARK ... TUPLE   everything since the mark, as a tuple
    52              REDUCE           known function -> plain data or a node; any other -> Object
    2e              STOP             the result is the one thing on the stack

The opcodes that the pickle of a large checkpoint consists of are run in one loop; each other one is a function.
Protocols 0 to 5. Time and memory are linear in the size of the pickle.
"""

from __future__ import annotations

import struct
from codecs import escape_decode
from collections.abc import Callable
from struct import unpack
from typing import Any, ClassVar

from zckpt.errors import PickleError, UnsupportedError, ZckptError
from zckpt.torchfile.nodes import (
    Args,
    DefaultMapping,
    Global,
    MetaTensor,
    Namespace,
    NumpyArray,
    NumpyDType,
    Object,
    OrderedMapping,
    Tensor,
)
from zckpt.torchfile.rebuild import NAMESPACE, Context, Globals, integers, kept_call, raw, wrong

MAX_INTEGER_BYTES = 1024
"""Of a LONG: Python prints integers of at most 4300 digits, and real ones (random states) have 16 bytes."""

MAX_INTEGER_DIGITS = 2400
"""Of an integer written as text, about as many: converting takes the square of its length."""

MAX_NAME_LINE = 4096
"""Bytes of a module or class name in a line of text."""

MAX_LINE = 1 << 30
"""Bytes of any other line of text: no limit of its own."""

_TEXT = frozenset({str})


class TruncatedPickleError(PickleError):
    """A pickle that goes on after the bytes at hand."""


def utf8(data: bytes) -> str:
    """Decode a string as pickle does: lone surrogates are allowed."""
    return data.decode("utf-8", "surrogatepass")


def bytestring(data: bytes) -> str | bytes:
    """Decode a Python 2 string: text where it is UTF-8, as torch reads it, and else the bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def digits(text: bytes) -> int:
    """Return a decimal integer written as text."""
    body = text[1:] if text[:1] in (b"-", b"+") else text
    if not body.isdigit() or len(body) > MAX_INTEGER_DIGITS:
        raise PickleError("an integer written as text", found=f"{text[:20]!r}")
    return int(text)


def int_line(machine: Machine) -> object:
    """Run INT: decimal text; 00 and 01 are the booleans."""
    text = machine.line(MAX_INTEGER_DIGITS + 2)
    return text == b"01" if text in (b"00", b"01") else digits(text)


def float_line(machine: Machine) -> object:
    """Run FLOAT: decimal text."""
    text = machine.line(64)
    try:
        return float(text)
    except ValueError:
        raise PickleError("a number written as text", found=f"{text[:20]!r}") from None


def long_integer(machine: Machine, width: int) -> object:
    """Run LONG1 and LONG4: a signed little-endian integer whose size comes first, in `width` bytes."""
    size = machine.unsigned(width)
    if size > MAX_INTEGER_BYTES:
        raise PickleError("an integer is too long", expected=f"at most {MAX_INTEGER_BYTES} bytes", found=size)
    return int.from_bytes(machine.take(size), "little", signed=True)


def unicode_line(machine: Machine) -> object:
    """Run UNICODE: a line of escaped text."""
    try:
        return machine.line(MAX_LINE).decode("raw-unicode-escape")
    except UnicodeDecodeError:
        raise PickleError("a string with a malformed escape") from None


def string_line(machine: Machine) -> object:
    """Run STRING, a line of quoted and escaped text."""
    text = machine.line(MAX_LINE)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise PickleError("a string without its quotes", found=f"{text[:20]!r}")
    try:
        return bytestring(escape_decode(text[1:-1])[0])
    except ValueError:
        raise PickleError("a string with a malformed escape") from None


def global_line(machine: Machine) -> object:
    """Run GLOBAL: module and name, a line each."""
    module = utf8(machine.line(MAX_NAME_LINE))
    return machine.globals.find(module, utf8(machine.line(MAX_NAME_LINE)))


def stack_global(machine: Machine) -> object:
    """Run STACK_GLOBAL: module and name from the stack."""
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a global", expected="two strings", found=f"{type(module).__name__}")
    return machine.globals.find(module, name)


def proto(machine: Machine) -> None:
    """Run PROTO."""
    version = machine.unsigned(1)
    if version > 5:
        raise PickleError("pickle protocol", expected="0 to 5", found=version)
    machine.protocol = max(machine.protocol, version)


def frame(machine: Machine) -> None:
    """Run FRAME: the length of what follows, which must be there."""
    length = machine.unsigned(8)
    if machine.pos + length > len(machine.data):
        raise TruncatedPickleError("the pickle is truncated", expected=f"a frame of {length} bytes")


def pop(machine: Machine) -> None:
    """Run POP: the top of the stack, or a mark that has nothing after it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def tuple_of(count: int) -> Opcode:
    """Run TUPLE1 and TUPLE3: of so many from the stack."""

    def push(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    return push


def extend(machine: Machine, items: list[object]) -> None:
    """Run APPEND and APPENDS: to the list on top of the stack, or to an object that behaves as one."""
    target = machine.stack[-1]
    if type(target) is list or type(target) is Object:
        target.extend(items)
    else:
        raise cannot(target, "appended to")


def set_items(machine: Machine, items: list[object]) -> None:
    """Run SETITEM and SETITEMS: keys and values, which alternate, in the mapping on top of the stack."""
    target = machine.stack[-1]
    if len(items) % 2:
        raise PickleError("a dict with a key and no value")
    keys, values = items[::2], items[1::2]
    if type(target) is Object:
        target.update(zip(keys, values, strict=True))
        return
    if not isinstance(target, dict) or type(target) is Namespace:
        raise cannot(target, "indexed")
    if not _TEXT.issuperset(map(type, keys)):
        check = machine.context.check_key
        for key, value in zip(keys, values, strict=True):
            check(target, key)
            target[key] = value
        return
    target.update(zip(keys, values, strict=True))


def add_members(machine: Machine, items: list[object]) -> None:
    """Run ADDITEMS: to the set on top of the stack, or to an object that behaves as one."""
    target = machine.stack[-1]
    if type(target) is Object:
        target.extend(items)
        return
    if type(target) is not set:
        raise cannot(target, "added to")
    for item in items:
        machine.context.check_key(target, item)
        target.add(item)


def filled(machine: Machine, empty: object, fill: Callable[[Machine, list[object]], None]) -> object:
    """Return a new container with what was pushed since the mark."""
    items = machine.since_mark()
    machine.stack.append(empty)
    fill(machine, items)
    return machine.stack.pop()


def cannot(target: object, what: str) -> PickleError:
    """Return the error for an opcode that does not fit the object it changes."""
    return PickleError(f"a {type(target).__name__} cannot be {what}")


def callee(function: object) -> Global | Object:
    """Return what is to be called, if it could be a class or function."""
    if not isinstance(function, (Global, Object)):
        raise cannot(function, "called")
    return function


def arguments(args: object) -> Args:
    """Return the arguments of a call, if they are a tuple."""
    if type(args) is not tuple:
        raise PickleError("a call", expected="a tuple of arguments", found=type(args).__name__)
    return args


def new(cls: object, args: object, how: str) -> object:
    """Return what stands for the result of `cls.__new__`."""
    values = arguments(args)
    if not values and cls == NAMESPACE:
        return Namespace()
    return Object(callee(cls), values, how=how)


def newobj(machine: Machine) -> None:
    """Run NEWOBJ."""
    args = machine.stack.pop()
    machine.stack[-1] = new(machine.stack[-1], args, "newobj")


def newobj_ex(machine: Machine) -> None:
    """Run NEWOBJ_EX."""
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict:
        raise PickleError("a call", expected="a tuple and a dict of arguments")
    machine.stack[-1] = Object(callee(machine.stack[-1]), arguments(args), kwargs, how="newobj_ex")


def obj(machine: Machine) -> object:
    """Run OBJ: class and arguments since the mark."""
    cls, *args = machine.since_mark() or [None]
    return new(cls, tuple(args), "obj")


def binpersid(machine: Machine) -> None:
    """Run BINPERSID."""
    if machine.persistent is None:
        raise PickleError("a persistent id in the wrong place")
    machine.stack[-1] = machine.persistent(machine.stack[-1])


def build(machine: Machine) -> None:
    """Run BUILD: give the object below the state on top; an object may be given one state only."""
    given, target = machine.stack.pop(), machine.stack[-1]
    if type(target) is Object and not target.has_state:
        target.state, target.has_state = given, True
    elif type(target) is NumpyArray and target.dtype_node is None:
        if not isinstance(given, tuple) or len(given) != 5 or not isinstance(given[2], NumpyDType):
            raise PickleError("numpy array", expected="its state of five parts", found=type(given).__name__)
        data = raw(given[4], machine.context)
        target.fill(integers(given[1], "shape"), given[2], data, fortran_order=bool(given[3]))
    elif type(target) is NumpyDType and target.state is None and isinstance(given, tuple):
        target.state = given
    elif type(target) is Namespace and type(given) is dict and not target:
        target.update(given)
    elif isinstance(target, (OrderedMapping, DefaultMapping, Tensor, MetaTensor)) and target.state is None:
        target.state = given
    else:
        raise cannot(target, "given a state, or a second one")


def unknown(machine: Machine) -> None:
    """Refuse a byte that is no opcode."""
    raise PickleError("not a pickle opcode", found=f"byte 0x{machine.data[machine.pos - 1]:02x}")


Opcode = Callable[[Any], object]
"""Runs on a `Machine`, or on one of its kind."""


def refusing(error: ZckptError) -> Opcode:
    """Return an opcode that no file can have."""

    def refuse(_: Machine) -> None:
        raise type(error)(error.message, found=error.found, advice=error.advice)

    return refuse


extension = refusing(UnsupportedError("the pickle uses the extension registry", advice="save it again with torch.save"))
"""EXT1, EXT2 and EXT4: their meaning is in a registry of the process that wrote the file."""

out_of_band = refusing(
    UnsupportedError("the pickle refers to buffers outside the file", advice="save it again with torch.save")
)
"""NEXT_BUFFER and READONLY_BUFFER: those buffers travel outside of the pickle."""


def pushing(value: Opcode) -> Opcode:
    """Return the opcode that pushes what a function of the machine returns."""

    def push(machine: Machine) -> None:
        found = value(machine)  # may give the machine another stack
        machine.stack.append(found)

    return push


def sized(width: int, decode: Callable[[bytes], object]) -> Opcode:
    """Return the opcode that pushes data whose size comes first, in `width` bytes."""
    return pushing(lambda machine: decode(machine.take(machine.unsigned(width))))


_TABLE: dict[bytes, Opcode] = {
    b"M": pushing(lambda machine: machine.unsigned(2)),
    b"J": pushing(lambda machine: int.from_bytes(machine.take(4), "little", signed=True)),
    b"I": pushing(int_line),
    b"L": pushing(lambda machine: digits(machine.line(MAX_INTEGER_DIGITS + 2).removesuffix(b"L"))),
    b"\x8a": pushing(lambda machine: long_integer(machine, 1)),
    b"\x8b": pushing(lambda machine: long_integer(machine, 4)),
    b"F": pushing(float_line),
    b"G": pushing(lambda machine: unpack(">d", machine.take(8))[0]),
    b"\x8c": sized(1, utf8),
    b"\x8d": sized(8, utf8),
    b"V": pushing(unicode_line),
    b"S": pushing(string_line),
    b"T": sized(4, bytestring),
    b"U": sized(1, bytestring),
    b"B": sized(4, bytes),
    b"C": sized(1, bytes),
    b"\x8e": sized(8, bytes),
    b"\x96": sized(8, bytearray),
    b"c": pushing(global_line),
    b"\x93": pushing(stack_global),
    b"\x80": proto,
    b"\x95": frame,
    b"0": pop,
    b"1": lambda machine: machine.since_mark(),
    b"2": pushing(lambda machine: machine.stack[-1]),
    b"g": pushing(lambda machine: machine.memo[digits(machine.line(20))]),
    b"p": lambda machine: machine.memo.__setitem__(digits(machine.line(20)), machine.stack[-1]),
    b"\x94": lambda machine: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    b"]": pushing(lambda _: []),
    b"}": pushing(lambda _: {}),
    b"\x8f": pushing(lambda _: set()),
    b"l": pushing(lambda machine: machine.since_mark()),
    b"t": pushing(lambda machine: tuple(machine.since_mark())),
    b"\x85": tuple_of(1),
    b"\x87": tuple_of(3),
    b"d": pushing(lambda machine: filled(machine, {}, set_items)),
    b"\x91": pushing(lambda machine: frozenset(filled(machine, set(), add_members))),  # type: ignore[call-overload]
    b"a": lambda machine: extend(machine, [machine.stack.pop()]),
    b"e": lambda machine: extend(machine, machine.since_mark()),
    b"s": lambda machine: set_items(machine, [machine.stack.pop(), machine.stack.pop()][::-1]),
    b"u": lambda machine: set_items(machine, machine.since_mark()),
    b"\x90": lambda machine: add_members(machine, machine.since_mark()),
    b"\x81": newobj,
    b"\x92": newobj_ex,
    b"i": pushing(lambda machine: new(global_line(machine), tuple(machine.since_mark()), "obj")),
    b"o": pushing(obj),
    b"P": refusing(PickleError("a persistent id that torch does not write", found="text")),
    b"Q": binpersid,
    b"b": build,
    b"\x82": extension,
    b"\x83": extension,
    b"\x84": extension,
    b"\x97": out_of_band,
    b"\x98": out_of_band,
}

OPCODES = [_TABLE.get(bytes((code,)), unknown) for code in range(256)]
"""What each byte does, but for those that the machine's own loop runs."""


CONSTANTS: dict[int, object] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
"""What opcodes push that say no more."""

_uint2, _uint4 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from


Persistent = Callable[[object], object]


class Memo(dict[int, object]):
    """What a pickle has put aside, by number."""

    def __missing__(self, index: int) -> object:
        raise PickleError("the memo has no such entry", found=index)


class Machine:
    """Runs one pickle.

    Parameters
    ----------
    data : bytes
        Holds the pickle, perhaps with other data after it.
    start : int, bytes
        Where in `data` the pickle begins.
    record : str
        Named in errors.
    byteorder : str
        Of the tensors' data.
    persistent : callable or None
        From a persistent id to an object; None where none may occur.
    """

    __slots__ = ("at", "builders", "context", "data", "globals", "marks", "memo", "persistent", "pos",
                 "protocol", "record", "stack")  # fmt: skip

    opcodes: ClassVar = OPCODES

    def __init__(
        self,
        data: bytes,
        *,
        start: int = 0,
        record: str,
        byteorder: str = "little",
        persistent: Persistent | None = None,
    ) -> None:
        self.data = data
        self.pos = start
        self.record = record
        self.context = Context(len(data) - start, byteorder)
        self.persistent = persistent
        self.protocol = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: Memo = Memo()
        self.globals = Globals()
        self.builders = self.globals.builders

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.pos
        end = start + count
        if end > len(self.data):
            raise TruncatedPickleError("the pickle is truncated", expected=f"{count} bytes more")
        self.pos = end
        return self.data[start:end]

    def unsigned(self, nbytes: int) -> int:
        """Return an unsigned little-endian integer."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self, limit: int) -> bytes:
        """Return the bytes up to the next newline, which must come within `limit` bytes."""
        end = self.data.find(b"\n", self.pos, self.pos + limit + 1)
        if end < 0:
            if self.pos + limit < len(self.data):
                raise PickleError("a line of text is too long", expected=f"at most {limit} bytes")
            raise TruncatedPickleError("the pickle is truncated", expected="the end of a line")
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def since_mark(self) -> list[object]:
        """Return what was pushed since the last mark and remove the mark."""
        if not self.marks:
            raise PickleError("an opcode needs a mark on the stack")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def run(self) -> object:
        """Return the object that the pickle describes; `pos` is then the byte after it.

        Raises PickleError: the pickle is malformed or hostile; TruncatedPickleError: it goes on after the end of
        `data`; UnsupportedError: it uses something that a file cannot contain.
        """
        self.at = self.pos
        try:
            self._run()
            if self.marks or len(self.stack) != 1:
                raise PickleError("something is left on the stack at STOP", expected="one object")
        except IndexError:  # from `data` at its end, or from an empty stack
            if self.pos >= len(self.data):
                raise self._located(TruncatedPickleError("the pickle ends without STOP")) from None
            raise self._located(PickleError("an opcode needs more on the stack")) from None
        except struct.error:
            raise self._located(TruncatedPickleError("the pickle is truncated", expected="a number")) from None
        except UnicodeDecodeError:
            raise self._located(PickleError("a string that is not UTF-8")) from None
        except ZckptError as error:
            raise self._located(error) from None
        return self.stack[0]

    def _run(self) -> None:  # noqa: PLR0912, PLR0915  # a call for each of millions of opcodes takes longer than they do
        """Run all opcodes, with the state in local variables; the most frequent ones come first."""
        data, memo, marks, context, builders = self.data, self.memo, self.marks, self.context, self.builders
        at, pos, stack = self.pos, self.pos, self.stack
        push = stack.append
        try:
            while True:
                at = pos
                opcode = data[pos]
                pos += 1
                if opcode == 0x72:  # LONG_BINPUT
                    memo[_uint4(data, pos)[0]] = stack[-1]
                    pos += 4
                elif opcode == 0x6A:  # LONG_BINGET
                    push(memo[_uint4(data, pos)[0]])
                    pos += 4
                elif opcode == 0x68:  # BINGET
                    push(memo[data[pos]])
                    pos += 1
                elif opcode == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                elif opcode == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif opcode == 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    push = stack.append
                elif opcode == 0x74 and marks:  # TUPLE
                    items = tuple(stack)
                    stack = marks.pop()
                    push = stack.append
                    push(items)
                elif opcode in CONSTANTS:
                    push(CONSTANTS[opcode])
                elif opcode == 0x86:  # TUPLE2
                    stack[-2:] = [(stack[-2], stack[-1])]
                elif opcode == 0x58:  # BINUNICODE
                    start = pos + 4
                    pos = start + _uint4(data, pos)[0]
                    if pos > len(data):
                        raise TruncatedPickleError("the pickle is truncated", expected="the end of a string")
                    push(str(data[start:pos], "utf-8", "surrogatepass"))
                elif opcode == 0x52:  # REDUCE
                    args = stack.pop()
                    builder = builders.get(id(stack[-1]))
                    if builder is None or type(args) is not tuple:
                        stack[-1] = Object(callee(stack[-1]), arguments(args))
                    else:
                        made = builder(args, context)
                        if made is None:
                            raise wrong(stack[-1], args)
                        stack[-1] = kept_call(stack[-1], args) if made is NotImplemented else made
                elif opcode == 0x4D:  # BININT2
                    push(_uint2(data, pos)[0])
                    pos += 2
                elif opcode == 0x2E:  # STOP
                    return
                else:
                    self.pos, self.stack = pos, stack
                    self.opcodes[opcode](self)
                    pos, stack = self.pos, self.stack
                    push = stack.append
        finally:
            self.at, self.pos, self.stack = at, max(pos, self.pos), stack

    def _located(self, error: ZckptError) -> ZckptError:
        """Return the error with record and byte of the opcode."""
        if error.path is not None:
            return error
        return type(error)(
            f"{self.record}: {error.message} (at byte {self.at})",
            expected=error.expected,
            found=error.found,
            advice=error.advice,
        )
