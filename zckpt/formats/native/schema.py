"""Members of `checkpoint.json` by name and type. Whatever else is there is refused, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from zckpt.formats.native.leaves import is_text, read_sizes, wrong
from zckpt.formats.native.node_kinds import Json
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import MAX_ELEMENTS

T = TypeVar("T")

_MISSING: Json = object()

_CRC32 = re.compile("[0-9a-f]{8}")


class Members:
    """The members of one JSON object.

    Parameters
    ----------
    found : object
    where : str
        For messages.
    names : tuple of str
        All that it may have.

    Raises
    ------
    DamagedFileError
        It is no object, or has others. As all errors here it names no file: the caller does.
    """

    __slots__ = ("_found", "_where")

    def __init__(self, found: Json, where: str, names: tuple[str, ...]) -> None:
        if type(found) is not dict or not found.keys() <= set(names):
            raise wrong(where, f"members {', '.join(names)}", sorted(found) if type(found) is dict else found)
        self._found = found
        self._where = where

    def value(self, name: str, default: Json = _MISSING) -> Json:
        """Return a member as it is."""
        found = self._found.get(name, default)
        if found is _MISSING:
            raise wrong(self._where, f"a member {name}", sorted(self._found))
        return found

    def has(self, name: str) -> bool:
        """Tell whether there is such a member."""
        return name in self._found

    def integer(self, name: str, default: Json = _MISSING, *, least: int = 0, most: int = MAX_ELEMENTS) -> int:
        """Return an integer."""
        found = self.value(name, default)
        if type(found) is not int or not least <= found <= most:
            raise wrong(f"{name} of {self._where}", f"an integer from {least} to {most}", found)
        return found

    def optional_integer(self, name: str) -> int | None:
        """Return an integer; None where it is null or absent."""
        return None if self.value(name, None) is None else self.integer(name)

    def text(self, name: str) -> str:
        """Return text."""
        found = self.value(name)
        if type(found) is not str or not is_text(found):
            raise wrong(f"{name} of {self._where}", "text", found)
        return found

    def checksum(self, name: str) -> int:
        """Return a CRC-32 from eight hexadecimal digits."""
        found = self.value(name)
        if type(found) is not str or not _CRC32.fullmatch(found):
            raise wrong(f"{name} of {self._where}", "eight hexadecimal digits", found)
        return int(found, 16)

    def dtype(self, name: str) -> str:
        """Return an element type."""
        found = self.text(name)
        if found not in DTYPES:
            raise wrong(f"{name} of {self._where}", "an element type", found)
        return found

    def flag(self, name: str) -> bool:
        """Return true or false; absent: false."""
        found = self.value(name, default=False)
        if type(found) is not bool:
            raise wrong(f"{name} of {self._where}", "true or false", found)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return sizes or offsets."""
        return read_sizes(self.value(name), f"{name} of {self._where}")

    def list(self, name: str, read: Callable[[Json], T]) -> list[T]:
        """Return a list, each element read by a function."""
        found = self.value(name)
        if type(found) is not list:
            raise wrong(f"{name} of {self._where}", "a list", found)
        return [read(one) for one in found]
