"""What a pickle machine works on: the pickle, its stack, marks and memo, and the globals that it mentions."""

from __future__ import annotations

from collections.abc import Callable

from zckpt.errors import PickleError
from zckpt.torchfile.rebuild import Context, Guard
from zckpt.torchfile.rebuild_torch import Globals

Persistent = Callable[[object], object]


class TruncatedPickleError(PickleError):
    """A pickle that goes on after the bytes at hand."""


class Memo(dict[int, object]):
    """What a pickle has put aside, by number."""

    def __missing__(self, index: int) -> object:
        raise PickleError("the memo has no such entry", found=index)


class State:
    """What a pickle machine works on.

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

    __slots__ = ("builders", "context", "data", "globals", "marks", "memo", "path", "persistent", "pos", "protocol",
                 "record", "stack")  # fmt: skip

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
        self.memo = Memo()
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
