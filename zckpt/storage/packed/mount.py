"""Checkpoints of a store under local paths, as files that have names and sizes, and their bytes in the store.

TEMPORARY/zckpt-remote-XXXX/7/packed/%2Fruns%2Fstore.zckpt/step500/...      a place as those of remote stores are
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

from zckpt.errors import SourceError, UsageError, show_as_stored
from zckpt.storage.packed.store import PackedStore, is_store
from zckpt.storage.remote.mount import PACKED as SCHEME
from zckpt.storage.stand_ins import FILES, Distant, InMemory, forget_all, stand_in, tree

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
            known = ", ".join(list(names)[:20]) or "none"
            raise SourceError("the store has no such checkpoint", path=store.path / within, expected=known)
        self._tree, base = tree()
        show_as_stored(str(base), SCHEME)
        root = self._tree / SCHEME / host
        self.path = root / within if within else root
        try:
            for name in wanted:
                self._add(root, name, names[name])
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
            raise SourceError("the store has no such file", path=store.path / within)

    def _add(self, root: Path, name: str, number: int) -> None:
        self.store.check_index(number)
        index = self.store.index(number)
        folder = (root / name).parent if index.is_file else root / name
        folder.mkdir(parents=True, exist_ok=True)
        links = []
        for count, one in enumerate(index.files):
            path = folder / one.name
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
