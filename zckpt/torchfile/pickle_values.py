"""The opcodes that push a number, a string, bytes or a global."""

from __future__ import annotations

from codecs import escape_decode
from struct import unpack_from

from zckpt.errors import PickleError
from zckpt.torchfile.pickle_machine import Machine, TruncatedPickleError, opcode

MAX_INTEGER_BYTES = 1024
"""Of a LONG: Python prints integers of at most 4300 digits, and real ones (random states) have 16 bytes."""

MAX_INTEGER_DIGITS = 2400
"""Of an integer written as text, about as many: converting takes the square of its length."""

MAX_NAME_LINE = 4096
"""Bytes of a module or class name in a line of text."""

MAX_LINE = 1 << 30
"""Bytes of any other line of text: no limit of its own."""


def utf8(data: bytes) -> str:
    """Decode a string as pickle does: lone surrogates are allowed."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise PickleError("a string that is not UTF-8") from None


def bytestring(data: bytes) -> str | bytes:
    """Decode a Python 2 string: text where it is UTF-8, as torch reads it, and else the bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def unsigned(machine: Machine, size: int) -> int:
    """Return an unsigned little-endian integer of `size` bytes."""
    start = machine.pos
    machine.pos = end = start + size
    if end > len(machine.data):
        raise TruncatedPickleError("the pickle is cut off", expected=f"{size} bytes more")
    return int.from_bytes(machine.data[start:end], "little")


def digits(text: bytes) -> int:
    """Return a decimal integer written as text."""
    body = text[1:] if text[:1] in (b"-", b"+") else text
    if not body.isdigit() or len(body) > MAX_INTEGER_DIGITS:
        raise PickleError("an integer written as text", found=f"{text[:20]!r}")
    return int(text)


def long_integer(machine: Machine, size: int) -> int:
    """Return a signed little-endian integer of `size` bytes."""
    if size > MAX_INTEGER_BYTES:
        raise PickleError("an integer is too long", expected=f"at most {MAX_INTEGER_BYTES} bytes", found=size)
    return int.from_bytes(machine.take(size), "little", signed=True)


@opcode(b"N")
def none(machine: Machine) -> None:
    """Run NONE."""
    machine.stack.append(None)


@opcode(b"\x88")
def true(machine: Machine) -> None:
    """Run NEWTRUE."""
    machine.stack.append(True)


@opcode(b"\x89")
def false(machine: Machine) -> None:
    """Run NEWFALSE."""
    machine.stack.append(False)


@opcode(b"K")
def binint1(machine: Machine) -> None:
    """Run BININT1."""
    machine.stack.append(machine.data[machine.pos])
    machine.pos += 1


@opcode(b"M")
def binint2(machine: Machine) -> None:
    """Run BININT2."""
    machine.stack.append(unsigned(machine, 2))


@opcode(b"J")
def binint(machine: Machine) -> None:
    """Run BININT."""
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


@opcode(b"I")
def int_line(machine: Machine) -> None:
    """Run INT: decimal text; 00 and 01 are the booleans."""
    text = machine.line(MAX_INTEGER_DIGITS + 2)
    machine.stack.append(text == b"01" if text in (b"00", b"01") else digits(text))


@opcode(b"L")
def long_line(machine: Machine) -> None:
    """Run LONG: decimal text, with an L after it or not."""
    text = machine.line(MAX_INTEGER_DIGITS + 2)
    machine.stack.append(digits(text.removesuffix(b"L")))


@opcode(b"\x8a")
def long1(machine: Machine) -> None:
    """Run LONG1."""
    machine.stack.append(long_integer(machine, unsigned(machine, 1)))


@opcode(b"\x8b")
def long4(machine: Machine) -> None:
    """Run LONG4."""
    machine.stack.append(long_integer(machine, unsigned(machine, 4)))


@opcode(b"F")
def float_line(machine: Machine) -> None:
    """Run FLOAT: decimal text."""
    text = machine.line(64)
    try:
        machine.stack.append(float(text))
    except ValueError:
        raise PickleError("a number written as text", found=f"{text[:20]!r}") from None


@opcode(b"G")
def binfloat(machine: Machine) -> None:
    """Run BINFLOAT: eight bytes, big-endian."""
    machine.stack.append(unpack_from(">d", machine.take(8))[0])


@opcode(b"X")
def binunicode(machine: Machine) -> None:
    """Run BINUNICODE."""
    machine.stack.append(utf8(machine.take(unsigned(machine, 4))))


@opcode(b"\x8c")
def short_binunicode(machine: Machine) -> None:
    """Run SHORT_BINUNICODE."""
    machine.stack.append(utf8(machine.take(unsigned(machine, 1))))


@opcode(b"\x8d")
def binunicode8(machine: Machine) -> None:
    """Run BINUNICODE8."""
    machine.stack.append(utf8(machine.take(unsigned(machine, 8))))


@opcode(b"V")
def unicode_line(machine: Machine) -> None:
    """Run UNICODE: a line of escaped text."""
    try:
        machine.stack.append(machine.line(MAX_LINE).decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise PickleError("a string with a malformed escape") from None


@opcode(b"S")
def string_line(machine: Machine) -> None:
    """Run STRING: a line of quoted and escaped text."""
    text = machine.line(MAX_LINE)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise PickleError("a string without its quotes", found=f"{text[:20]!r}")
    try:
        machine.stack.append(bytestring(escape_decode(text[1:-1])[0]))
    except ValueError:
        raise PickleError("a string with a malformed escape") from None


@opcode(b"T")
def binstring(machine: Machine) -> None:
    """Run BINSTRING."""
    machine.stack.append(bytestring(machine.take(unsigned(machine, 4))))


@opcode(b"U")
def short_binstring(machine: Machine) -> None:
    """Run SHORT_BINSTRING."""
    machine.stack.append(bytestring(machine.take(unsigned(machine, 1))))


@opcode(b"B")
def binbytes(machine: Machine) -> None:
    """Run BINBYTES."""
    machine.stack.append(machine.take(unsigned(machine, 4)))


@opcode(b"C")
def short_binbytes(machine: Machine) -> None:
    """Run SHORT_BINBYTES."""
    machine.stack.append(machine.take(unsigned(machine, 1)))


@opcode(b"\x8e")
def binbytes8(machine: Machine) -> None:
    """Run BINBYTES8."""
    machine.stack.append(machine.take(unsigned(machine, 8)))


@opcode(b"\x96")
def bytearray8(machine: Machine) -> None:
    """Run BYTEARRAY8."""
    machine.stack.append(bytearray(machine.take(unsigned(machine, 8))))


@opcode(b"c")
def global_line(machine: Machine) -> None:
    """Run GLOBAL: module and name, a line each."""
    module = utf8(machine.line(MAX_NAME_LINE))
    machine.stack.append(machine.find_global(module, utf8(machine.line(MAX_NAME_LINE))))


@opcode(b"\x93")
def stack_global(machine: Machine) -> None:
    """Run STACK_GLOBAL: module and name from the stack."""
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a global", expected="two strings", found=f"{type(module).__name__}")
    machine.stack.append(machine.find_global(module, name))


@opcode(b"\x80")
def proto(machine: Machine) -> None:
    """Run PROTO."""
    version = unsigned(machine, 1)
    if version > 5:
        raise PickleError("pickle protocol", expected="0 to 5", found=version)
    machine.protocol = max(machine.protocol, version)


@opcode(b"\x95")
def frame(machine: Machine) -> None:
    """Run FRAME: the length of what follows, which must be there."""
    length = unsigned(machine, 8)
    if machine.pos + length > len(machine.data):
        raise TruncatedPickleError("the pickle is cut off", expected=f"a frame of {length} bytes")
