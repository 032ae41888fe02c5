"""A pickle machine that builds inert nodes: it imports nothing and calls nothing that a pickle names.

A pickle is a program for a stack machine. Its opcodes are one byte each, followed by their argument:

    80 02           PROTO 2
    63 a 0a b 0a    GLOBAL "a b"     -> Global("a", "b")
    58 n32 text     BINUNICODE       -> str
    71 i            BINPUT i         memo[i] = top of the stack
    28 ... 74       MARK ... TUPLE   everything since the mark, as a tuple
    52              REDUCE           known function -> plain data or a node; any other -> Object
    2e              STOP             the result is the one thing on the stack

This module holds the machine; its opcodes are in `pickle_values`, `pickle_structure` and `pickle_calls`.
Protocols 0 to 5. Time and memory are linear in the size of the pickle.
"""

from __future__ import annotations

from collections.abc import Callable

from zckpt.errors import PickleError, UnsupportedError, ZckptError
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile.guard import Guard
from zckpt.torchfile.objects import DType, Global, MemoryFormat
from zckpt.torchfile.rebuild import Builder, Context
from zckpt.torchfile.rebuild_torch import builder_of

STOP = 0x2E

MAX_GLOBALS = 4096
"""Distinct globals of one pickle: the largest seen mention a few dozen."""

MAX_NAME = 1024
"""Characters of a module and a name together."""

MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

Persistent = Callable[[object], object]


class TruncatedPickleError(PickleError):
    """A pickle that goes on after the bytes at hand."""


class Machine:
    """Runs one pickle.

    Parameters
    ----------
    data : bytes
        Holds the pickle, perhaps with other data after it.
    start : int, bytes
        Where in `data` the pickle begins.
    path, record : str
        File and record named in errors.
    byteorder : str
        Of the tensors' data.
    persistent : callable or None
        From a persistent id to an object; None where none may occur.
    """

    __slots__ = (
        "builders",
        "context",
        "data",
        "globals",
        "marks",
        "memo",
        "path",
        "persistent",
        "pos",
        "protocol",
        "record",
        "stack",
    )

    def __init__(
        self,
        data: bytes,
        *,
        start: int = 0,
        path: str,
        record: str,
        byteorder: str = "little",
        persistent: Persistent | None = None,
    ) -> None:
        self.data = data
        self.pos = start
        self.path = path
        self.record = record
        self.context = Context(byteorder, Guard(len(data) - start))
        self.persistent = persistent
        self.protocol = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.globals: dict[tuple[str, str], object] = {}
        self.builders: dict[int, Builder] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every global the pickle mentions, `module.name`, sorted."""
        return tuple(sorted(f"{module}.{name}" for module, name in self.globals))

    def run(self) -> object:
        """Return the object that the pickle describes; `pos` is then the byte after it.

        Raises
        ------
        PickleError
            The pickle is malformed or hostile.
        TruncatedPickleError
            It goes on after the end of `data`.
        UnsupportedError
            It uses something that a file cannot contain.
        """
        data = self.data
        at = self.pos
        try:
            while True:
                at = self.pos
                opcode = data[at]
                self.pos = at + 1
                if opcode == STOP:
                    return self._result()
                OPCODES[opcode](self)
        except IndexError:  # from `data` at its end, or from an empty stack
            if self.pos >= len(data):
                raise self._at(at, TruncatedPickleError("the pickle ends without STOP")) from None
            raise self._at(at, PickleError("an opcode finds too little on the stack")) from None
        except ZckptError as error:
            raise self._at(at, error) from None

    def _result(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise PickleError("something is left on the stack at STOP", expected="one object")
        return self.stack[0]

    def _at(self, position: int, error: ZckptError) -> ZckptError:
        """Return the error with file, record and byte of the opcode."""
        if error.path is not None:
            return error
        return type(error)(
            f"{self.record}: {error.message} (at byte {position})",
            path=self.path,
            expected=error.expected,
            found=error.found,
            advice=error.advice,
        )

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.pos
        end = start + count
        if end > len(self.data):
            raise TruncatedPickleError("the pickle is cut off", expected=f"{count} bytes more")
        self.pos = end
        return self.data[start:end]

    def line(self, limit: int) -> bytes:
        """Return the bytes up to the next newline, which must come within `limit` bytes."""
        end = self.data.find(b"\n", self.pos, self.pos + limit + 1)
        if end < 0:
            if self.pos + limit < len(self.data):
                raise PickleError("a line of text is too long", expected=f"at most {limit} bytes")
            raise TruncatedPickleError("the pickle is cut off", expected="the end of a line")
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def since_mark(self) -> list[object]:
        """Return what was pushed since the last mark and remove the mark."""
        if not self.marks:
            raise PickleError("an opcode finds no mark on the stack")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def find_global(self, module: str, name: str) -> object:
        """Return the node for a global: always the same one, never the thing itself."""
        node = self.globals.get((module, name))
        if node is None:
            node = self.globals[(module, name)] = self._new_global(module, name)
        return node

    def _new_global(self, module: str, name: str) -> object:
        if len(self.globals) >= MAX_GLOBALS or len(module) + len(name) > MAX_NAME:
            raise PickleError(
                "too many globals, or too long a name",
                expected=f"at most {MAX_GLOBALS} globals of {MAX_NAME} characters",
            )
        if module == "torch":
            if name in DTYPES:
                return DType(name)
            if name in MEMORY_FORMATS:
                return MemoryFormat(name)
        node = Global(module, name)
        builder = builder_of(node)
        if builder is not None:
            self.builders[id(node)] = builder  # `globals` keeps the node, so its id stays its own
        return node


def unknown(machine: Machine) -> None:
    """Refuse a byte that is no opcode."""
    opcode = machine.data[machine.pos - 1]
    raise PickleError("not a pickle opcode", found=f"byte 0x{opcode:02x}")


def extension(_: Machine) -> None:
    """Refuse EXT1, EXT2 and EXT4: their meaning is in a registry of the process that wrote the file."""
    raise UnsupportedError("the pickle uses the extension registry", advice="save it again with torch.save")


def out_of_band(_: Machine) -> None:
    """Refuse NEXT_BUFFER and READONLY_BUFFER: those buffers travel outside of the pickle."""
    raise UnsupportedError("the pickle refers to buffers outside of the file", advice="save it again with torch.save")


Opcode = Callable[[Machine], None]
OPCODES: list[Opcode] = [unknown] * 256
"""What each byte does; filled by `pickle_values`, `pickle_structure` and `pickle_calls`."""


def opcode(code: bytes) -> Callable[[Opcode], Opcode]:
    """Register a function for an opcode."""

    def register(function: Opcode) -> Opcode:
        OPCODES[code[0]] = function
        return function

    return register


for _code in b"\x82\x83\x84":
    OPCODES[_code] = extension
for _code in b"\x97\x98":
    OPCODES[_code] = out_of_band
