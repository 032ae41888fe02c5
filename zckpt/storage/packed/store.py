"""A store on a disk, as who reads it sees it: which checkpoints it has, and the bytes of their files.

Every chunk is held against its checksum whenever it is read. What is damaged is an error that names it.

Its checkpoints have local paths, as those of remote stores have, with names and sizes, and their bytes in the store.

TEMPORARY/zckpt-remote-XXXX/7/packed/%2Fruns%2Fstore.zckpt/step500/...
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import xxhash
import zstandard

from zckpt.codes import CHECKSUM
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError, UsageError, show_as_stored
from zckpt.storage.files import is_file, json_object, opened
from zckpt.storage.packed import DOCUMENT, STORE, is_store
from zckpt.storage.packed.chunks import AS_IT_IS, Bytes, Way, decode
from zckpt.storage.packed.index import Index, damaged_index, read_index
from zckpt.storage.recent import Recent
from zckpt.storage.remote.mount import PACKED as SCHEME
from zckpt.storage.stand_ins import DAMAGED, FILES, Distant, InMemory, forget_all, stand_in, tree

VERSION = 1

BESIDE_NBYTES = 4096

KEPT_NBYTES = 32 << 20
"""Of chunks that were read last: who reads in small steps, or in another order, has them again."""

GIVEN = 0
"""The number of what a patch is predicted from: tensors of a checkpoint that is somewhere else."""

Given = Callable[[int, int, int], Bytes]
"""Returns bytes of what a patch is predicted from: number of the tensor, offset, number of bytes."""


def document(kind: str) -> bytes:
    """Return what `DOCUMENT` holds."""
    return json.dumps({"zckpt": kind, "version": VERSION}).encode() + b"\n"


class PackedStore:
    """A store, or a patch.

    Parameters
    ----------
    path : path-like
    kind : str
    given : callable, optional
        What a patch is predicted from.

    Raises
    ------
    SourceError
        There is none, of a version that is known.
    """

    def __init__(self, path: str | os.PathLike[str], *, kind: str = STORE, given: Given | None = None) -> None:
        self.path = Path(path)
        if not is_store(path, kind):
            raise SourceError(f"is not a {kind}", path=path, expected=f"a directory with {DOCUMENT}")
        version = json_object(self.path / DOCUMENT, "store", most=1 << 16).get("version")
        if version != VERSION:
            raise UnsupportedError("has another version", path=path, expected=VERSION, found=version)
        self.given = given
        self.originals: dict[int, Path] = {}
        """Where files may still lie as they were packed, by the number of their checkpoint."""
        self._indexes: dict[int, Index] = {}
        self._kept: Recent[tuple[int, int], Bytes] = Recent(KEPT_NBYTES)

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, in the order in which they were packed."""
        return sorted(int(one.stem) for one in self.path.glob("*.index") if one.stem.isdecimal())

    def names(self) -> tuple[dict[str, int], dict[int, SourceError]]:
        """Return the checkpoints' numbers by their names; and what is wrong with those whose index is damaged."""
        found, wrong = dict[str, int](), dict[int, SourceError]()
        for number in self.numbers():
            try:
                found[self.index(number).name] = number
            except SourceError as error:
                wrong[number] = error
        return found, wrong

    def beside(self) -> list[tuple[str, bytes]]:
        """Return small files that lie in the store and are not its own, `latest` and the like: names and bytes."""
        own = (".index", ".chunks", ".json")
        every = [one for one in self.path.iterdir() if one.suffix not in own and one.name[0] != "."]
        return [(one.name, one.read_bytes()) for one in every if is_file(one) and one.stat().st_size <= BESIDE_NBYTES]

    def index(self, number: int) -> Index:
        """Return the index of a checkpoint. Raises SourceError: it cannot be read, or is damaged."""
        if number not in self._indexes:
            self._indexes[number] = read_index(self.index_path(number))
        return self._indexes[number]

    def index_path(self, number: int) -> Path:
        """Return where the index of a checkpoint is."""
        return self.path / f"{number:06d}.index"

    def chunks_path(self, number: int) -> Path:
        """Return where the chunks are that came with a checkpoint."""
        return self.path / f"{number:06d}.chunks"

    def read_into(self, number: int, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a file, or of what a patch is predicted from.

        Raises DamagedFileError: some chunk that they are made of is damaged.
        """
        if number == GIVEN and self.given is not None:
            buffer[:] = self.given(file, offset, len(buffer)).data
            return
        done = 0
        for row, begin in self.index(number).rows_of(file, offset, len(buffer)):
            chunk = self.chunk(number, row, begin)
            part = chunk[max(offset - begin, 0) : offset + len(buffer) - begin]
            buffer[done : done + len(part)] = part.data
            done += len(part)
        if done != len(buffer):
            raise DamagedFileError(
                "the file ends too early", path=self.named(number, file), expected=offset + len(buffer), found=done
            )

    def chunk(self, number: int, row: int, begin: int) -> Bytes:
        """Return the bytes of a chunk that begins at byte `begin` of its file."""
        found = self._kept.get((number, row))
        if found is not None:
            return found
        index, place = self.index(number), self.originals.get(number)
        about = index.row(row)
        if place is not None:  # from where it was packed, if it is there as it was
            path = place if index.is_file else place / index.files[about["file"]].name
            with suppress(SourceError), opened(path) as file:
                found = np.frombuffer(file.read(begin, about["nbytes"]), np.uint8)
        if found is None or not _is_right(found, about):
            try:
                found = self._decoded(index, about)
            except (ValueError, OverflowError, IndexError, MemoryError, zstandard.ZstdError) as error:
                raise self.damaged(number, row, begin, str(error)) from error
            if not _is_right(found, about):
                raise self.damaged(number, row, begin, "another checksum")
        self._kept.put((number, row), found, len(found))
        return found

    def _decoded(self, index: Index, about: Mapping[str, int]) -> Bytes:
        way = Way(about["op"], about["width"], about["cast"])
        nbytes, stored = about["nbytes"], b""
        if about["stored"]:
            with opened(self.chunks_path(about["data"])) as chunks:
                stored = chunks.read(about["offset"], about["stored"])
        if not about["count"]:
            return decode(stored, way, nbytes, None)
        ranges = index.ranges[about["first"] :][: about["count"]]
        total = int(ranges["nbytes"].sum())
        if total != nbytes * (1 if way.cast == AS_IT_IS else 2):
            raise ValueError("a prediction of another size")
        prediction, at = np.empty(total, np.uint8), 0
        for other, file, offset, count in ranges.tolist():
            is_given = other == GIVEN and self.given is not None
            if not is_given and self.index(other).depth(file, offset, count) >= about["depth"]:
                raise ValueError("predicted from data that does not precede it")
            self.read_into(other, file, offset, prediction[at : at + count].data)
            at += count
        return decode(stored, way, nbytes, prediction)

    def named(self, number: int, file: int) -> Path:
        """Return by what path a file of a checkpoint is called."""
        index = self.index(number)
        return self.path / index.name / ("" if index.is_file else index.files[file].name)

    def damaged(self, number: int, row: int, begin: int, why: str) -> DamagedFileError:
        """Return the error about a chunk that is not as it was written."""
        about = self.index(number).row(row)
        return DamagedFileError(
            f"bytes {begin} to {begin + about['nbytes']} are damaged",
            path=self.named(number, about["file"]),
            expected=f"what was packed, from {self.chunks_path(about['data']).name} at {about['offset']}",
            found=why,
            advice="copy that file again from the store's origin; `zckpt verify` tells what else needs it",
            code=CHECKSUM,
        )

    def check_index(self, number: int) -> None:
        """Raise SourceError if the ranges of an index lead to what is not there."""
        index = self.index(number)
        for other in np.unique(index.ranges["checkpoint"]).tolist():
            if other == GIVEN and self.given is not None:
                continue
            if other > number:
                raise damaged_index(self.index_path(number))


def _is_right(data: Bytes, about: Mapping[str, int]) -> bool:
    digest = xxhash.xxh3_128_intdigest(data.data)
    return len(data) == about["nbytes"] and (digest >> 64, digest & (1 << 64) - 1) == (about["high"], about["low"])


MOST_NAME_BYTES = 255
"""Of a file system."""


def place_in(value: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """Return the store that a path is of, or leads into, and the rest of the path; None: it is another."""
    path = Path(os.path.abspath(value))  # noqa: PTH100  # without links, of what may not exist
    try:
        above = next((one for one in (path, *path.parents) if one.exists()), None)
    except (OSError, ValueError):
        return None
    if above is None or not is_store(above):
        return None
    return above, "" if above == path else path.relative_to(above).as_posix()


class PackedFile:
    """A file of a checkpoint of a store."""

    def __init__(self, store: PackedStore, number: int, file: int) -> None:
        self.identity = f"{store.path}:{number}:{file}"
        self._where = store, number, file

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`, which the file has."""
        store, number, file = self._where
        store.read_into(number, file, offset, buffer)


class PackedMount:
    """A checkpoint of a store, or what is in it, or all checkpoints, under a local path.

    Parameters
    ----------
    store : PackedStore
    within : str
        Of the store: a name, or what lies below it; empty: all.

    Raises
    ------
    SourceError
        It has no such checkpoint, or the index of that is damaged.
    """

    is_target = False

    def __init__(self, store: PackedStore, within: str) -> None:
        host = quote(str(store.path.absolute()), safe="")
        if len(host) > MOST_NAME_BYTES:
            raise UsageError("this store's path is too long", path=store.path, advice="mount or link it elsewhere")
        self.store = store
        self.files: dict[str, Distant] = {}
        names, wrong = store.names()
        wanted = [n for n in names if not within or f"{within}/".startswith(f"{n}/")]
        wanted = wanted or [n for n in names if n.startswith(f"{within}/")]
        if not wanted:
            broken = next(iter(wrong.values()), None)
            if broken is not None:
                raise broken
            what = "the store has no such checkpoint" if within else "the store has no checkpoint yet"
            raise SourceError(what, path=store.path / within, expected=", ".join(list(names)[:20]) or None)
        self._tree, base = tree()
        show_as_stored(str(base), SCHEME)
        root = self._tree / SCHEME / host
        self.path = root / within if within else root
        try:
            for name in wanted:
                try:
                    self._add(root, name, names[name])
                except DamagedFileError as error:
                    if within:
                        raise
                    wrong[names[name]] = error
            for name, data in () if within else store.beside():
                stand_in(root / name, len(data))
                self.files[str(root / name)] = FILES[str(root / name)] = InMemory(data)
        except OSError as error:
            self.close()
            why = error.strerror
            raise SourceError("this machine's files have no such names", path=store.path, found=why) from error
        except BaseException:
            self.close()
            raise
        if not os.path.lexists(self.path):
            self.close()
            if within:
                raise SourceError("the store has no such file", path=store.path / within)
            raise next(iter(wrong.values()))
        DAMAGED[self.path] = [] if within else [*wrong.values()]

    def _add(self, root: Path, name: str, number: int) -> None:
        self.store.check_index(number)
        index = self.store.index(number)
        folder = (root / name).parent if index.is_file else root / name
        folder.mkdir(parents=True, exist_ok=True)
        links = []
        for count, one in enumerate(index.files):
            path = root / name if index.is_file else folder / one.name  # a file has the name that it was given here
            if one.kind == "folder":
                path.mkdir(parents=True, exist_ok=True)
            elif one.kind == "link":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(one.target)
                links.append(path)
            else:
                stand_in(path, one.nbytes, one.modified_ns / 1e9)
                self.files[str(path)] = FILES[str(path)] = PackedFile(self.store, number, count)
        for path in links:
            if not Path(os.path.realpath(path)).is_relative_to(folder):  # out of this checkpoint, perhaps by others
                path.unlink()

    def check_unchanged(self) -> None:
        """Do nothing: every chunk that was read was held against its checksum."""

    def close(self) -> None:
        """Remove the tree; nothing of it can be read any more."""
        DAMAGED.pop(self.path, None)
        forget_all(self._tree, list(self.files))
        self.files.clear()


def mounted_place(value: str | os.PathLike[str]) -> PackedMount | None:
    """Mount what a path is, if that is of a store; errors are those of `PackedMount`."""
    found = place_in(value)
    return None if found is None else PackedMount(PackedStore(found[0]), found[1])


_adopted = lru_cache(maxsize=1 << 10)(PackedStore)
"""Returns the store at a path, which was opened before, or is now."""


def adopt(path: str, host: str, parts: list[str]) -> Distant:
    """Return a file by a path that another process has made up for it.

    Raises SourceError: there is no such file in the store.
    """
    where = unquote(host)
    store = _adopted(where)
    names, _ = store.names()
    for name, number in names.items():
        index, inside = store.index(number), "/".join(parts)
        within = index.files[0].name if index.is_file and inside == name else inside.removeprefix(f"{name}/")
        if f"{inside}/".startswith(f"{name}/") and within in index.numbers:
            count = index.numbers[within]
            if not os.path.lexists(path):  # on another machine
                stand_in(Path(path), index.files[count].nbytes)
            file = FILES[path] = PackedFile(store, number, count)
            return file
    raise SourceError("the store has no such file", path=Path(where, *parts))
