"""A pickle machine that builds inert nodes: it imports nothing and calls nothing that a pickle names.

A pickle is a program for a stack machine. Its opcodes are one byte each, followed by their argument:

    80 02           PROTO 2
    63 a 0a b 0a    GLOBAL "a b"     -> Global("a", "b")
    58 n32 text     BINUNICODE       -> str
    71 i            BINPUT i         memo[i] = top of the stack
    28 ... 74       MARK ... TUPLE   everything since the mark, as a tuple
    52              REDUCE           known function -> plain data or a node; any other -> Object
    2e              STOP             the result is the one thing on the stack

The opcodes that the pickle of a large checkpoint consists of are run here, in one loop; all others are in `opcodes`.
Protocols 0 to 5. Time and memory are linear in the size of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from zckpt.errors import PickleError, ZckptError
from zckpt.torchfile.nodes import Object
from zckpt.torchfile.opcodes import OPCODES, TruncatedPickleError, arguments, callee
from zckpt.torchfile.rebuild import Context, Guard
from zckpt.torchfile.rebuild_torch import Globals

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
    path, record : str
        File and record named in errors.
    byteorder : str
        Of the tensors' data.
    persistent : callable or None
        From a persistent id to an object; None where none may occur.
    """

    __slots__ = ("at", "builders", "context", "data", "globals", "marks", "memo", "path", "persistent", "pos",
                 "protocol", "record", "stack")  # fmt: skip

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
        self.memo: Memo = Memo()
        self.globals = Globals()
        self.builders = self.globals.builders

    @property
    def names(self) -> tuple[str, ...]:
        """Every global the pickle mentions, `module.name`, sorted."""
        return self.globals.names

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.pos
        end = start + count
        if end > len(self.data):
            raise TruncatedPickleError("the pickle is cut off", expected=f"{count} bytes more")
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
        self.at = self.pos
        try:
            self._run()
            if self.marks or len(self.stack) != 1:
                raise PickleError("something is left on the stack at STOP", expected="one object")
        except IndexError:  # from `data` at its end, or from an empty stack
            if self.pos >= len(self.data):
                raise self._located(TruncatedPickleError("the pickle ends without STOP")) from None
            raise self._located(PickleError("an opcode finds too little on the stack")) from None
        except struct.error:
            raise self._located(TruncatedPickleError("the pickle is cut off", expected="a number")) from None
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
                elif opcode == 0x58:  # BINUNICODE
                    start = pos + 4
                    pos = start + _uint4(data, pos)[0]
                    if pos > len(data):
                        raise TruncatedPickleError("the pickle is cut off", expected="the end of a string")
                    push(str(data[start:pos], "utf-8", "surrogatepass"))
                elif opcode == 0x52:  # REDUCE
                    args = stack.pop()
                    builder = builders.get(id(stack[-1]))
                    if builder is None or type(args) is not tuple:
                        stack[-1] = Object(callee(stack[-1]), arguments(args))
                    else:
                        stack[-1] = builder(args, context)
                elif opcode == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                elif opcode == 0x4D:  # BININT2
                    push(_uint2(data, pos)[0])
                    pos += 2
                elif opcode == 0x2E:  # STOP
                    return
                else:
                    self.pos, self.stack = pos, stack
                    OPCODES[opcode](self)
                    pos, stack = self.pos, self.stack
                    push = stack.append
        finally:
            self.at, self.pos, self.stack = at, max(pos, self.pos), stack

    def _located(self, error: ZckptError) -> ZckptError:
        """Return the error with file, record and byte of the opcode."""
        if error.path is not None:
            return error
        return type(error)(
            f"{self.record}: {error.message} (at byte {self.at})",
            path=self.path,
            expected=error.expected,
            found=error.found,
            advice=error.advice,
        )
