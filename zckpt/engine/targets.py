"""What is to be written: literals (headers, pickles, JSON), and holes for extents of slots. Data only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import field
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from zckpt.immutable import immutable, mutable
from zckpt.state import Extent, Shape, Slot, itemsize
from zckpt.state.mappings import Sized

if TYPE_CHECKING:
    from zckpt.engine.together import Pack

Item = TypeVar("Item")


class Bytes(Sized, Protocol):
    """Bytes of a file, read or written."""

    @property
    def offset(self) -> int:
        """Of the first one."""


start_of: Callable[[Bytes], int] = attrgetter("offset")
"""Returns the offset of the first of some bytes of a file."""


def end_of(one: Bytes) -> int:
    """Return the offset behind some bytes of a file."""
    return one.offset + one.nbytes


@immutable
class Literal:
    """Bytes known before any tensor is read, at byte `offset` of a target file."""

    offset: int
    data: bytes | memoryview

    moved_nbytes: ClassVar[int] = 0
    """Bytes of tensors in it."""

    @property
    def nbytes(self) -> int:
        """Size of it in bytes."""
        return len(self.data)

    def paths(self) -> Iterable[str]:
        """Return the files that it comes from: none."""
        return ()


@immutable
class Hole:
    """Bytes of a target file for an extent of a slot.

    `label`: what is to be written here, `exp_avg/wte.weight`, for messages; `dtype`: element type in the target.
    """

    offset: int
    label: str
    slot: Slot
    extent: Extent
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the hole in bytes."""
        return self.extent.numel * itemsize(self.dtype)


@immutable
class Checksum:
    """A CRC-32 of bytes [start, end) that is to be written, little-endian, at each of `offsets` once they are there."""

    start: int
    end: int
    offsets: Shape


@mutable
class TargetFile:
    """A file that is to be written: its name within the target, its size, and what fills it."""

    name: str
    nbytes: int
    literals: list[Literal] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, data: bytes) -> TargetFile:
        """Return a file of bytes that are known."""
        return cls(name, len(data), [Literal(0, data)])


class Lazily(Collection[Item]):
    """Items that are computed one after the other, again in every iteration.

    `make`: returns a new iterator over them.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], count: int) -> None:
        self._make = make
        self._count = count

    def __iter__(self) -> Iterator[Item]:
        """Compute them."""
        return self._make()

    def __len__(self) -> int:
        """Return how many there are."""
        return self._count

    def __contains__(self, item: object) -> bool:
        """Tell whether one of them is this."""
        return any(item == one for one in self)
