"""Records of a file that is like another, of which only what differs is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from zckpt.torchfile import Record


class AlikeRecords(Sequence[Record]):
    """The records of a file that is like another, of which only what differs is kept.

    Parameters
    ----------
    records : sequence of Record
        The other's.
    filled : sequence of int
        Which are not empty.
    skip : int
        Characters of the archive's name there.
    archive : str
    changed : mapping of int to int
        CRC-32 of those that have another.
    """

    __slots__ = ("_archive", "_changed", "_filled", "_records", "_skip")

    def __init__(
        self, records: Sequence[Record], filled: Sequence[int], skip: int, archive: str, changed: dict[int, int]
    ) -> None:
        self._records, self._filled, self._skip = records, filled, skip
        self._archive, self._changed = archive, changed

    def filled(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, offset, bytes and CRC-32 of those that are not empty, or are said not to be."""
        for index in sorted({*self._filled, *self._changed}):
            one = self[index]
            yield one.name, one.offset, one.nbytes, one.crc32

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...

    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        """Return a record, or some."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        one = self._records[index]
        crc = self._changed.get(index % len(self._records), one.crc32)
        return Record(self._archive + one.name[self._skip :], one.offset, one.nbytes, crc)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in the order of the directory."""
        return (self[index] for index in range(len(self)))
