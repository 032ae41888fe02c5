"""Byte ranges of files. Knows how to open and read them and nothing of what they mean.

Every file of a checkpoint is opened here. Only regular files are: a pipe would wait for a writer that never comes, and
a device has no end. What is in a remote store has a name and a size here, and is read from there (`stand_ins`).

A `FileRange` is a range that is read by itself: offsets count from its start, and what its reader reports is absolute:
`base` + offset.
"""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar

from zckpt.codes import TRUNCATED
from zckpt.errors import DamagedFileError, SourceError, UsageError, about
from zckpt.immutable import mutable
from zckpt.storage import stand_ins
from zckpt.storage.stand_ins import FLAGS as STAND_IN_FLAGS

if TYPE_CHECKING:
    from typing_extensions import Self

Json = TypeVar("Json")

OPEN_SOURCES = 32
"""Source files kept open at once by each worker; a checkpoint may have more files than a process may open."""

PAGE_NBYTES = 1 << 12
"""Of memory, and of the page cache: what is read past it begins and ends at one, on disk and in memory."""

FLAGS = os.O_RDONLY | os.O_NONBLOCK
"""Opening does not wait, whatever has taken the place of a file since it was looked at."""


MAPPED_NBYTES = 1 << 24
"""Kept mapped by a worker."""

NEXT_NBYTES = 1 << 16
"""Mapped beyond what is asked for, where what is next ends."""

LEAST_DIRECT_NBYTES = 1 << 16
"""Of what is read or written directly: each waits for the device, and takes whole blocks of it."""

NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What is said where nothing is read or written directly, when a file is opened, read or written."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


def open_file(path: str) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises SourceError: it cannot be opened, or is no regular file.
    """
    try:
        flags = FLAGS if stand_ins.found(path) is None else STAND_IN_FLAGS
        if S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # first: a device may act on being opened
            descriptor = os.open(path, flags)
            if S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            close_read(descriptor)
    except (OSError, ValueError) as error:
        raise SourceError("cannot be opened", path=path, found=getattr(error, "strerror", str(error))) from error
    raise SourceError("is not a regular file", path=path)


def close_read(descriptor: int) -> None:
    """Close what was read: what a close can say is of writes, and the descriptor is gone all the same."""
    with suppress(OSError):
        os.close(descriptor)


def unreadable(path: str | os.PathLike[str], error: OSError) -> SourceError:
    """Return the error about what the system does not read."""
    return SourceError("cannot be read", path=path, found=error.strerror)


def read_head(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file: `nbytes`, or all where it has fewer.

    Raises SourceError: it cannot be read, or is no regular file.
    """
    with opened(path) as file:
        return file.at(0, min(nbytes, file.nbytes))


def read_whole(path: str, *, most: int) -> bytes:
    """Return all bytes of a file that has at most `most`.

    Raises DamagedFileError: it has more; SourceError: it cannot be read, or is no regular file.
    """
    data = read_head(path, most + 1)
    if len(data) > most:
        raise DamagedFileError("too large", path=path, expected=f"at most {most} bytes")
    return data


def read_json(path: str | os.PathLike[str], *, most: int = 1 << 24) -> dict[str, Any] | None:
    """Return an object in a file of JSON of at most so many bytes; None where there is none, or something else."""
    try:
        return json_object(path, "content", most=most) if is_file(path) else None
    except SourceError:
        return None


def json_object(path: str | os.PathLike[str], what: str, *, most: int) -> dict[str, Any]:
    """Return an object in a file of JSON of at most so many bytes. Raises SourceError: it has none; `what` it is."""
    return json_of(path, what, dict, most=most)


def json_of(path: str | os.PathLike[str], what: str, kind: type[Json], *, most: int) -> Json:
    """Return a list or an object in a file of JSON; errors are those of `json_object`."""
    text = read_whole(os.fspath(path), most=most)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"unreadable {what}", path=path, expected="JSON", found=str(error)[:80]) from error
    if not isinstance(found, kind):
        raise DamagedFileError(
            f"unreadable {what}", path=path, expected=f"a JSON {'list' if kind is list else 'object'}"
        )
    return found


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object as JSON is parsed. Raises ValueError: one is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def given_json(path: str | os.PathLike[str]) -> object:
    """Return what is in a file of JSON that a user gives; UsageError: it cannot be read, or is none."""
    try:
        return json.loads(read_whole(os.fspath(path), most=1 << 20))
    except SourceError as error:
        raise UsageError(error.message, path=path, expected=error.expected, found=error.found) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("is not a JSON document", path=path, found=str(error)[:80]) from error


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a regular file; not under a name that no file can have, either.

    Raises SourceError: that cannot be told, and what is there would be taken for nothing.
    """
    return S_ISREG(_mode(path))


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a directory; errors are those of `is_file`."""
    return S_ISDIR(_mode(path))


def is_there(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is anything, be it a link to nothing; errors are those of `is_file`."""
    return _mode(path, follow_symlinks=False) != 0


def _mode(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> int:
    try:
        return os.stat(path, follow_symlinks=follow_symlinks).st_mode  # noqa: PTH116  # pathlib hides some errors
    except ValueError:
        return 0
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return 0
        raise SourceError("cannot be looked at", path=path, found=error.strerror) from error


def entries_of(path: str | os.PathLike[str], *, lenient: bool = False) -> list[os.DirEntry[str]]:
    """Return what a directory holds, sorted by name.

    Raises SourceError: it cannot be read; if `lenient` it holds nothing then.
    """
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        if lenient:
            return []
        raise unreadable(path, error) from error


BESIDE_A_FILE = "._"
"""What macOS puts before a file's name where a file system has no place for the attributes that it keeps of it."""


def leads_to_file(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a regular file, or a link to one; errors are those of `is_file`."""
    return is_file(entry) if entry.is_symlink() else entry.is_file()


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a directory, or a link to one; errors are those of `is_file`."""
    return is_directory(entry) if entry.is_symlink() else entry.is_dir()


def files_in(path: str | os.PathLike[str], *, lenient: bool = False) -> list[str]:
    """Return the names of a directory's files, without what macOS leaves beside each; errors as of `entries_of`."""
    every = (one for one in entries_of(path, lenient=lenient) if not one.name.startswith(BESIDE_A_FILE))
    return [one.name for one in every if leads_to_file(one)]


def folders_in(path: str | os.PathLike[str], *, lenient: bool = False) -> list[Path]:
    """Return the directories in one; errors are those of `entries_of` and `is_file`."""
    return [Path(one.path) for one in entries_of(path, lenient=lenient) if leads_to_folder(one)]


def numbered_in(path: Path, names: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return what in a directory, if there is one, is called as a pattern says, in the order of its group, a number."""
    every = path.iterdir() if path.is_dir() else ()
    return sorted((int(match[1]), one) for one in every if (match := names.fullmatch(one.name)))


def by_name(path: str | os.PathLike[str]) -> Path:
    """Return a path that ends in its own name, which `.`, and what ends in `..`, do not say."""
    said = Path(path)
    return said if said.name not in ("", "..") else Path(os.path.realpath(said))


def real_path(path: str, folders: dict[str, str]) -> str:
    """Return a file's real path; that of its folder, which thousands of files lie in, is kept in `folders`."""
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.realpath(path) if os.path.islink(path) else os.path.join(folders[folder], name)  # noqa: PTH114,PTH118


def read_into(descriptor: int, offset: int, buffer: memoryview, *, path: str) -> None:
    """Fill `buffer` with the bytes at byte `offset`.

    Raises DamagedFileError: the file ends before the buffer is full; SourceError: the operating system cannot read it.
    """
    elsewhere = stand_ins.found(path)
    if elsewhere is not None:
        elsewhere.read_into(offset, buffer)
        return
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        except OSError as error:
            raise unreadable(path, error) from error
        if count == 0:
            raise too_short(path, offset + len(buffer), offset + filled)
        filled += count


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins at a page: so many bytes, up to a whole page."""
    return memoryview(mmap.mmap(-1, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def opened_directly(path: str, flags: int) -> int | None:
    """Open a file that was opened before, for reads or writes past the page cache; None: that cannot be."""
    if not _O_DIRECT or stand_ins.found(path) is not None:
        return None
    try:
        return os.open(path, flags | _O_DIRECT)
    except OSError:  # whatever else is wrong, the other descriptor of it says
        return None


class Sources:
    """Source files of one worker; the first opened is closed when there are many.

    `direct`: read so much at once past the page cache (`storage.disk`), where that can be; 0: through it.
    """

    def __init__(self, direct: int = 0) -> None:
        self._open: dict[str, tuple[int, int | None]] = {}
        self._direct = direct
        self._buffer: memoryview | None = None
        self._mapped: list[tuple[str, int, mmap.mmap]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self, path: str) -> int:
        """Return a descriptor of `path` for reading. Raises SourceError: it cannot be opened, or is no regular file."""
        return self._opened(path)[0]

    def _opened(self, path: str) -> tuple[int, int | None]:
        """Return descriptors of a file, the second for direct reads."""
        if path not in self._open:
            if len(self._open) >= OPEN_SOURCES:
                self.close(next(iter(self._open)))
            self._open[path] = open_file(path), opened_directly(path, FLAGS) if self._direct else None
        return self._open[path]

    def read(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset` of a file; errors are those of `read_into`."""
        if not self._direct:
            read_into(self.descriptor(path), offset, buffer, path=path)
            return
        for at in range(0, len(buffer), self._direct):
            into = buffer[at : at + self._direct]
            found, phase = self.window(path, offset + at, into)
            if phase is not None:
                into[:] = found

    def window(
        self, path: str, offset: int, buffer: memoryview, room: memoryview | None = None
    ) -> tuple[memoryview, int | None]:
        """Return the bytes at byte `offset` of a file, as many as `buffer` has: in it, or where they were read.

        The number is how far behind a page of memory they begin, where that is known. Without `room`, the
        next call may use that memory again.
        """
        descriptor, direct = self._opened(path)
        if direct is not None and len(buffer) >= LEAST_DIRECT_NBYTES:
            if room is None:
                self._buffer = room = self._buffer or aligned(self._direct + PAGE_NBYTES)
            view = self._read_blocks(path, direct, offset, len(buffer), room)
            if view is not None:
                return view, offset % PAGE_NBYTES
        read_into(descriptor, offset, buffer, path=path)
        return buffer, None

    def _read_blocks(self, path: str, direct: int, offset: int, nbytes: int, room: memoryview) -> memoryview | None:
        """Return bytes in `room`, as far behind a page as they are in the file; None: they are to be read otherwise."""
        skipped = offset % PAGE_NBYTES
        needed, filled = skipped + nbytes, 0
        view = room[: -(-needed // PAGE_NBYTES) * PAGE_NBYTES]
        while filled < needed:
            try:
                count = os.preadv(direct, [view[filled:]], offset - skipped + filled)
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise unreadable(path, error) from error
                close_read(direct)
                self._open[path] = self._open[path][0], None
                return None
            if filled + count < needed and (count == 0 or (filled + count) % PAGE_NBYTES):
                raise too_short(path, offset + nbytes, offset - skipped + filled + count)
            filled += count
        return view[skipped:needed]

    def room(self, nbytes: int) -> memoryview:
        """Return memory for windows of so many bytes, wherever they begin."""
        return aligned(nbytes + PAGE_NBYTES) if self._direct else memoryview(bytearray(nbytes + PAGE_NBYTES))

    def mapped(self, path: str, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a mapping that has some bytes of a file, and where in it they begin.

        The last ones are kept, as far as they have `MAPPED_NBYTES`: what lies next to these bytes is often read next,
        and pages that are mapped anew cost as much as what most functions do with them. Raises DamagedFileError: the
        file ends before.
        """
        for name, start, kept in self._mapped:
            if name == path and start <= offset and offset + nbytes <= start + len(kept):
                return kept, offset - start
        descriptor = self.descriptor(path)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        end = min(offset + nbytes + NEXT_NBYTES, os.fstat(descriptor).st_size)
        if end < offset + nbytes:
            raise too_short(path, offset + nbytes, end)
        while self._mapped and sum(len(kept) for *_, kept in self._mapped) + end - start > MAPPED_NBYTES:
            del self._mapped[0]
        self._mapped.append((path, start, mmap.mmap(descriptor, end - start, access=mmap.ACCESS_READ, offset=start)))
        return self._mapped[-1][2], offset - start

    def touch(self, path: str, offset: int, nbytes: int) -> None:
        """Note that some of these bytes are read otherwise."""

    def close(self, *paths: str) -> None:
        """Close some, by default all."""
        for path in paths or tuple(self._open):
            for descriptor in self._open.pop(path):
                if descriptor is not None:
                    close_read(descriptor)
        self._mapped.clear()


STEP_NBYTES = 1 << 20
"""Written at once. Linux takes memory for what is written at once in pages as large. Pages of 2 MiB that are free are
given back to the machine that a virtual one runs on (free page reporting), and take several times as long to get.
"""


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at a byte offset of an open file; what the system raises, this raises."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + STEP_NBYTES], offset + done)


def too_short(path: str, expected: int, found: int) -> DamagedFileError:
    """Return the error about a file that has fewer bytes than are read of it."""
    return DamagedFileError(
        "the file ends too early",
        path=path,
        expected=f"at least {expected} bytes",
        found=found,
        advice="copy it again from its origin",
        code=TRUNCATED,
    )


@mutable
class FileRange:
    """A range of an open file, which a reader takes for a file of its own."""

    descriptor: int
    path: str  # file named in errors
    base: int  # bytes; offset of the range in that file
    nbytes: int  # length of the range

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`, relative to the range; errors are those of `check` and `at`."""
        self.check(offset, nbytes)
        return self.at(offset, nbytes)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes from `offset` on, in the range or behind it; errors are those of `read_into`."""
        data = bytearray(nbytes)
        read_into(self.descriptor, self.base + offset, memoryview(data), path=self.path)
        return bytes(data)

    def check(self, offset: int, nbytes: int) -> None:
        """Raise DamagedFileError if some of these bytes are outside of the range."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise DamagedFileError(
                "it refers to bytes beyond its end",
                path=self.path,
                expected=f"at most {self.nbytes} bytes",
                found=f"bytes {offset} to {offset + nbytes}",
                advice="copy it again from its origin",
            )


@contextmanager
def opened(path: str | os.PathLike[str], offset: int = 0, nbytes: int | None = None) -> Iterator[FileRange]:
    """Open a file, or a part of it, for reading; errors that leave without a path name it.

    `nbytes`: None: up to the end of the file. Raises SourceError: it does not exist, cannot be opened, or is no regular
    file; DamagedFileError: the range is not within the file, or is empty.
    """
    name = os.fspath(path)
    descriptor = open_file(name)
    try:
        with about(name):
            try:
                size = os.fstat(descriptor).st_size
            except OSError as error:
                raise unreadable(name, error) from error
            length = size - offset if nbytes is None else nbytes
            if offset < 0 or length < 0 or offset + length > size:
                raise DamagedFileError(
                    "an embedded torch file lies beyond its end",
                    expected=f"at most {size} bytes",
                    found=f"bytes {offset} to {offset + length}",
                )
            yield FileRange(descriptor, name, offset, length)
    finally:
        close_read(descriptor)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python from looking for garbage: it would go through a million new objects again and again as they grow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
