"""Which files make a row of the map: those of one rank, those of one role, or one file where there are no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.state import SourceFile

MOST_FILE_ROWS = 4096
"""Files without a rank have a row each up to this number; more are added up by role."""


class Rows:
    """The rows of the map, numbered as they are met; `order` says in which order they are shown."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._by_path: dict[str, int] = {}
        self.files: list[list[SourceFile]] = []
        self._keys: dict[tuple[object, ...], int] = {}
        self._ranked = any(file.dp_rank is not None for file in files)
        plain = [Path(file.path).name for file in files]
        self._each_file = not self._ranked and len(set(plain)) == len(plain) <= MOST_FILE_ROWS
        self._used: set[int] = set()
        for file in files:
            row = self._row(self._key(file))
            self.files[row].append(file)
            self._by_path[file.path] = row
            if file.dp_rank is not None:
                self._used.add(row)
        self._slices = len({file.mp_rank for file in files if file.dp_rank is not None}) > 1

    def _key(self, file: SourceFile) -> tuple[object, ...]:
        if file.dp_rank is not None:
            return ("rank", file.dp_rank, file.mp_rank)
        return ("file", file.path) if self._each_file else ("role", file.role, file.mp_rank)

    def _row(self, key: tuple[object, ...]) -> int:
        if key not in self._keys:
            self._keys[key] = len(self.files)
            self.files.append([])
        return self._keys[key]

    def of(self, path: str) -> int:
        """Return the row of a file in which elements lie."""
        row = self._by_path.get(path)
        if row is None:  # an adapter that does not list all it reads
            row = self._by_path[path] = self._row(("file", path))
            self.files[row].append(SourceFile(path, 0, "file"))
        self._used.add(row)
        return row

    def of_rank(self, dp_rank: int) -> list[int]:
        """Return the rows of a data-parallel rank, one for each of its model-parallel slices."""
        found = [row for row, files in enumerate(self.files) if files and files[0].dp_rank == dp_rank]
        return sorted(found, key=lambda row: self.files[row][0].mp_rank or 0)

    def order(self) -> list[int]:
        """Return the rows that hold something or belong to a rank: files of no rank first, then slice by slice."""

        def key(row: int) -> tuple[int, int, int]:
            file = self.files[row][0]
            return (file.dp_rank is not None, file.mp_rank or 0, file.dp_rank or 0)

        return sorted(self._used, key=key)

    def label(self, row: int) -> str:
        """Return what a person calls the row."""
        files = self.files[row]
        first = files[0]
        if first.dp_rank is not None:
            return f"dp {first.dp_rank} mp {first.mp_rank or 0}" if self._slices else f"rank {first.dp_rank}"
        if self._each_file or first.role == "file":
            return Path(first.path).name
        label = f"{first.role} file" if len(files) == 1 else f"{first.role} files ({len(files)})"
        return f"{label} mp {first.mp_rank}" if first.mp_rank is not None and self._slices else label
