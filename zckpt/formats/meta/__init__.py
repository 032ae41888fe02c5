"""Meta's files of Llama: one torch file for each tensor-parallel rank, and the model's sizes.

DIR/consolidated.00.pth, consolidated.01.pth, ...     a flat dict of this rank's slices, by Meta's names
DIR/params.json                                       dim, n_layers, n_heads, n_kv_heads, vocab_size, ...

reader   from the files to a Checkpoint; which dimension of a tensor is cut, told by its name and proved by its shapes
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zckpt.formats.format import Format, Found, NearMiss, Search
from zckpt.storage.files import is_file

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.state import Checkpoint

FILE = re.compile(r"consolidated\.([0-9]{2,})\.pth")


class Meta(Format):
    """Meta's files of Llama."""

    name = "meta"
    title = "Meta's consolidated.00.pth"
    reads = (
        ("Meta's `consolidated.00.pth`, ...", "Llama's files and `params.json`; tensor-parallel slices are merged"),
    )

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the files by their names."""
        path = search.path
        if path.is_file():
            several = FILE.fullmatch(path.name) is not None and len(files_of(path.parent)) > 1
            return Found(path) if several else None
        return Found(path) if files_of(path) else None

    def read(self, found: Found, search: Search) -> Checkpoint:  # noqa: ARG002
        """Read the structure of all files."""
        from zckpt.errors import ShardError
        from zckpt.formats.meta.reader import read

        if found.place.is_file():
            raise ShardError(
                f"is one of {len(files_of(found.place.parent))} files of a tensor-parallel model",
                path=found.place,
                advice=f"give its directory, {found.place.parent}",
            )
        return read(found.place, files_of(found.place))


def files_of(directory: Path) -> dict[int, Path]:
    """Return the files of a directory by their numbers, in order."""
    if not directory.is_dir():
        return {}
    found = {
        int(name[1]): path for path in directory.iterdir() if (name := FILE.fullmatch(path.name)) and is_file(path)
    }
    return dict(sorted(found.items()))


FORMATS = (Meta(),)
