"""Where mutated checkpoints lie: real files in memory's file system."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from tests.fuzz.trees import Node, Tree, files_of, of_folder
from zckpt.storage.files import FileRange, too_short
from zckpt.storage.stand_ins import FILES, MARK

_MEMORY = Path("/dev/shm")  # where there is one, nothing waits for a disk
_above = [_MEMORY if os.access(_MEMORY, os.W_OK) else None]
_NAME = f"/{MARK}fuzz/0/m/h/file"


def new_folder() -> Path:
    """Make a folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_above[-1]))
    pid = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == pid else None)
    return folder


@contextmanager
def gathered() -> Iterator[None]:
    """Remove the folders of processes that begin in this context, which libFuzzer ends, when it ends."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_above[-1], ignore_cleanup_errors=True) as folder:
        _above.append(Path(folder))
        try:
            yield
        finally:
            _above.pop()


class Bytes:
    """A file whose bytes are in memory."""

    identity = ""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > len(self.data):
            raise too_short("file", offset + len(buffer), len(self.data))
        buffer[:] = self.data[offset : offset + len(buffer)]


def in_memory(data: bytes) -> FileRange:
    """Return a file that is nowhere else, as readers of an open file take it."""
    FILES[_NAME] = Bytes(data)
    return FileRange(-1, _NAME, 0, len(data))


class Base:
    """A checkpoint that is mutated, and written anew for each mutation.

    Parameters
    ----------
    source : Path or Node
        A folder, or the tree of one.
    inside : str
        What of it is opened.
    """

    def __init__(self, source: Path | Node, inside: str = "") -> None:
        self._source, self._inside = source, inside

    @cached_property
    def tree(self) -> Tree:
        return Tree(self._source if isinstance(self._source, Node) else of_folder(self._source))

    @cached_property
    def folder(self) -> Path:
        return new_folder()

    def put(self, script: bytes) -> Path:
        """Write what a script makes of it; return where it is."""
        files = files_of(self.tree.edited(script))
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, data in files.items():
            path = self.folder / name
            with suppress(OSError):  # below a file, or in the place of a folder
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        return self.folder / self._inside
