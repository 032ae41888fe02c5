"""What was used last, of so many bytes together, for who asks for it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Values by their keys, for any thread; those that were not used for longest are dropped, and `dropped` hears it.

    `most` (bytes): of all together, but the last one is kept in any case. Another process begins with none.
    """

    def __init__(self, most: int, dropped: Callable[[Key, Value], object] = lambda *_: None) -> None:
        self._most, self._dropped = most, dropped
        self._found: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Recent[Key, Value]], tuple[int]]:
        """Return how to make another one."""
        return Recent, (self._most,)

    def get(self, key: Key) -> Value | None:
        """Return a value; None: it is not there, or not any more."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep a value, of so many bytes."""
        with self._lock:
            self._nbytes += nbytes - self._found.pop(key, (value, 0))[1]
            self._found[key] = value, nbytes
            while self._nbytes > self._most and len(self._found) > 1:
                first, (other, size) = self._found.popitem(last=False)
                self._nbytes -= size
                self._dropped(first, other)

    def pop(self, key: Key) -> None:
        """Keep a value no longer, if it is there."""
        with self._lock:
            _, nbytes = self._found.pop(key, (None, 0))
            self._nbytes -= nbytes
