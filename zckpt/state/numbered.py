"""Sequences whose items are computed when they are asked for, of which there may be too many to keep. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class Numbered(Sequence[Item]):
    """A sequence that says how many items it has, and returns the one of a number."""

    __slots__ = ()

    @abstractmethod
    def numbered(self, index: int) -> Item:
        """Return one of them, counted from the first."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """Return an item, or some, in their order."""
        every = range(len(self))
        return tuple(map(self.numbered, every[index])) if isinstance(index, slice) else self.numbered(every[index])

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in their order."""
        return map(self.numbered, range(len(self)))
