"""The files of checkpoints in a store, or of what a patch makes, bit for bit as they were packed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from zckpt.engine import Reporter, reporting
from zckpt.errors import SourceError, UnsupportedError
from zckpt.formats.units import TRACKERS
from zckpt.immutable import immutable
from zckpt.operations.options import Place
from zckpt.state import Result, nbytes_of
from zckpt.storage.ahead import ahead
from zckpt.storage.durable import written
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.packed.chunks import CHUNK_NBYTES
from zckpt.storage.packed.mount import place_in
from zckpt.storage.packed.store import PackedStore

AT_ONCE_NBYTES = 8 * CHUNK_NBYTES


@immutable(repr=True)
class Unpacked(Result):
    """What `unpack` wrote, or with `dry_run` would write: target, checkpoints, number of files, bytes."""

    target: str
    checkpoints: list[str]
    files: int
    nbytes: int
    dry_run: bool


def unpack(
    store: Place,
    target: Place,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    reporter: Reporter | None = None,
) -> Unpacked:
    """Restore the files of one checkpoint in a store, or of all: bytes, modes, times and links.

    Parameters
    ----------
    store : path-like
        `STORE/NAME`, or the store; then `target` gets a directory for each checkpoint.
    target : path-like
        A directory (or a file, if the checkpoint is one) that does not exist. It appears whole or not at all.
    overwrite : bool
        Replace a file, or a directory that has no other files.
    dry_run : bool
        Show what would be written; write nothing.
    reporter : Reporter, optional

    Raises
    ------
    SourceError
        There is no such checkpoint, or its data is damaged.
    TargetError
        The target exists or cannot be written.
    """
    found = place_in(store)
    if found is None:
        raise SourceError(
            "is not a store of checkpoints", path=store, expected="a store that `zckpt pack` wrote, or a name in it"
        )
    packed, path = PackedStore(found[0]), Path(target)
    names, wrong = packed.names()
    wanted = [found[1]] if found[1] in names else [n for n in names if not found[1] or n.startswith(f"{found[1]}/")]
    for error in () if found[1] and wanted else wrong.values():
        raise error
    if not wanted:
        raise SourceError("the store has no such checkpoint", path=store, expected=", ".join(names) or "none")
    alone = wanted == [found[1]]
    numbers = {"" if alone else name.removeprefix(f"{found[1]}/"): names[name] for name in wanted}
    every = [one for number in numbers.values() for one in packed.index(number).files]
    nbytes, files = nbytes_of(every), sum(one.kind == "file" for one in every)
    done = Unpacked(str(path), wanted, files, nbytes, dry_run)
    if not dry_run:
        latest = {} if found[1] else {name: data for name, data in packed.beside() if name in TRACKERS}
        write_files(packed, numbers, path, overwrite=overwrite, reporter=reporter, beside=latest)
    return done


def write_files(
    store: PackedStore,
    numbers: dict[str, int],
    path: Path,
    *,
    overwrite: bool,
    reporter: Reporter | None,
    prove: Callable[[Path], None] | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write checkpoints, by where they go in the target, and files `beside` them.

    `prove`: sees what has no name yet; what it raises leaves none.

    Raises SourceError: what they are made of is damaged, or some would lie in one place; TargetError: the target exists
    or cannot be written.
    """
    indexes = {front: store.index(number) for front, number in numbers.items()}
    every = [
        (front if index.is_file else os.path.join(front, one.name), one, (numbers[front], count))  # noqa: PTH118
        for front, index in indexes.items()
        for count, one in enumerate(index.files)
    ]
    names = Counter([*beside, *(at for at, one, _ in every if one.kind != "folder")])
    folders = {at for at, one, _ in every if one.kind == "folder"}
    folders |= {front for front, index in indexes.items() if not index.is_file}
    for name in (*names, *folders):  # a link in the place of a folder would lead out of the target
        if names[name] + (name in folders) > 1 or any(str(above) in names for above in PurePosixPath(name).parents):
            raise UnsupportedError(
                "two checkpoints of the store have files in one place", path=store.path, found=name,
                advice="give `zckpt unpack` STORE/NAME, to restore each one by itself",
            )  # fmt: skip
    owned = None if [*names] == [""] else Owned(lambda name: name in names)
    check_target(path, overwrite=overwrite, owned=owned)

    def copy(job: tuple[Path, int, int, int, int]) -> int:
        at, number, file, offset, nbytes = job
        data = bytearray(nbytes)
        store.read_into(number, file, offset, memoryview(data))
        with at.open("r+b") as out:
            out.seek(offset)
            out.write(data)
        return nbytes

    with (
        written([path], overwrite=overwrite, owned=owned) as [partial],
        reporting(reporter, nbytes_of(one for _, one, _ in every)) as progress,
    ):
        for front in numbers:
            (partial / front if front in folders else (partial / front).parent).mkdir(parents=True, exist_ok=True)
        for name, one, _ in every:
            at = partial / name
            if one.kind == "folder":
                at.mkdir(exist_ok=True)
            elif one.kind == "link":
                at.symlink_to(one.target)
            else:
                with at.open("wb") as out:
                    os.truncate(out.fileno(), one.nbytes)
        jobs = (
            (partial / at, *where, offset, min(AT_ONCE_NBYTES, one.nbytes - offset))
            for at, one, where in every
            for offset in range(0, one.nbytes, AT_ONCE_NBYTES)
        )
        with closing(ahead(copy, jobs)) as copies:
            for done in copies:
                progress.advance(done)
        for name, data in beside.items():
            (partial / name).write_bytes(data)
        if prove is not None:
            prove(partial)
        for name, one, _ in sorted(every, key=lambda each: (each[1].kind == "folder", -each[0].count("/"))):
            if one.kind != "link":
                (partial / name).chmod(one.mode & (0o7777 if one.kind == "folder" else 0o777))  # none runs as its owner
            os.utime(partial / name, ns=(one.modified_ns, one.modified_ns), follow_symlinks=False)
