"""What a run has done of a target: kept beside it, so that another run goes on where a killed one ended.

    .NAME.zckpt-journal     lines of a CRC-32 and JSON, each by itself
        purpose     what is to be written, of what: version, verb, options, files, sources
        work        a batch: its key, what of the target was written and of the sources read, each range with its CRC-32
        work ...

A line is written as soon as a batch is, and nothing waits for the disk: a kill loses no bytes that were written, and
after a loss of power the CRC-32s tell which ones are there. So what is recorded is read again before anything is built
on it. A line that is not whole is none. The journal belongs to the run that holds the lock on the temporary name.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, field, replace
from hashlib import blake2b
from operator import index
from pathlib import Path
from threading import Lock

from zckpt.errors import Interrupted, SourceError, TargetError, WorkerError, shown
from zckpt.immutable import immutable
from zckpt.state import are_texts, nbytes_of
from zckpt.storage import stand_ins
from zckpt.storage.crc32 import content_of, line_of
from zckpt.storage.files import unreadable
from zckpt.storage.ownership import claimed, kind_of, partial_name
from zckpt.storage.room import NOTHING_LEFT, Room
from zckpt.version import __version__

LEAST_NBYTES = 1 << 24
"""Of tensors: less is written again sooner than anybody has decided how to go on."""

BLOCK_NBYTES = 512
"""Of `st_blocks`, whatever the file system's own are."""

Range = tuple[int, int, int | None]
"""Offset, bytes and CRC-32 of a range of a file; None: nobody summed it."""

SAID_CHARACTERS = 60
"""Of an option's value; of a longer one, a digest says that it is another."""

Identity = tuple["int | str", ...]
"""Of a source file: bytes, nanoseconds of its last change, inode; or what its store says of it, an etag."""


@immutable
class Purpose:
    """What a run is to write, and of what: one run can go on with the work of another that has the same."""

    version: str  # of zckpt
    verb: str
    options: dict[str, str]  # those that are not the default, as they are shown
    files: str  # a digest of the names and sizes of what is written
    nbytes: int  # of tensors that are written
    sources: dict[str, Identity]  # by absolute path, or URL
    beside: list[str] = field(default_factory=list)
    """Names of files that are written into the target's directory, each of which has a temporary name."""

    @staticmethod
    def of(
        verb: str,
        options: Mapping[str, object],
        files: Iterable[str],
        sizes: Iterable[int],
        sources: Iterable[str],
        beside: Iterable[str],
    ) -> Purpose:
        """Return what a run is about.

        `options`: those that decide what is written; `sizes` (bytes): of the tensors that are written, then any other
        number that would be another for other files; `sources`: paths of files that are read. Raises SourceError: one
        is gone.
        """
        nbytes, *others = sizes
        digest = blake2b(json.dumps([list(files), nbytes, *others]).encode("utf-8", "surrogatepass"), digest_size=16)
        said: dict[str, str] = {}
        for key, value in options.items():
            if value in (None, False, "", (), [], {}):
                continue
            text = said[key] = shown(str(value))
            if len(text) > SAID_CHARACTERS:
                its = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
                said[key] = f"{text[: SAID_CHARACTERS // 2]}... ({its})"
        identities = {shown(os.path.abspath(path)): identity(path) for path in sorted(sources)}  # noqa: PTH100  # links stay
        return Purpose(__version__, verb, said, digest.hexdigest(), nbytes, identities, list(beside))

    def other(self, begun: Purpose) -> str | None:
        """Return in what a run that was begun is another than this one; None: in nothing."""
        if begun.version != self.version:
            return f"by zckpt {begun.version}, but this is {self.version}"
        if begun.verb != self.verb:
            return f"by `zckpt {begun.verb}`"
        for key in sorted(begun.options.keys() | self.options.keys()):
            was, now = (one.options.get(key, "not given") for one in (begun, self))
            if was != now:
                return f"with other options: {key} was {was} and is {now}"
        return self._other_file(begun)

    def _other_file(self, begun: Purpose) -> str | None:
        for path in sorted(begun.sources.keys() | self.sources.keys()):
            if path not in self.sources or path not in begun.sources:
                return f"from other files: {path} {'is new' if path in self.sources else 'is not read now'}"
            if self.sources[path] != begun.sources[path]:
                return f"from a file that has changed since: {path}"
        same = (begun.files, begun.nbytes) == (self.files, self.nbytes)
        return None if same else "to other files, or files of other sizes"


def identity(path: str) -> Identity:
    """Return what tells a file from what it was, or from another under its name. Raises SourceError: it is gone."""
    elsewhere = stand_ins.found(path)
    if elsewhere is not None:
        return (elsewhere.identity,)
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise unreadable(path, error) from error
    return found.st_size, found.st_mtime_ns, found.st_ino


@immutable
class Work:
    """A batch that was written.

    `written`: of the target file; `read`: of source files whose checksums are looked at, by absolute path.
    """

    written: tuple[Range, ...]
    read: dict[str, tuple[Range, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes that were written."""
        return sum(nbytes for _, nbytes, _ in self.written)


def left_by(targets: Iterable[Path]) -> Room:
    """Return what a killed run's remains take, which are gone on with, or go before anything is written."""
    left = [partial_name(target) for target in targets]
    found = [one.lstat() for path in left for one in (path, *path.rglob("*")) if os.path.lexists(one)]
    return Room(sum(one.st_blocks for one in found) * BLOCK_NBYTES, len(found))


def journal_name(target: Path) -> Path:
    """Return the name of a target's journal."""
    return target.parent / f".{target.name}.zckpt-journal"


def forget(target: Path) -> None:
    """Remove the journal of a target, of which nothing else is left, or whose remains go as well."""
    name = journal_name(target)
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISREG(name.lstat().st_mode):
            name.unlink()


def settle(target: Path) -> None:
    """Remove a journal without remains: its run was killed when the target had its name, or somebody removed them."""
    if target.name and not os.path.lexists(partial_name(target)):
        forget(target)


class Journal:
    """The journal of one run. `durable` calls all but `record`, `check_sources` and `found`, which are the writer's.

    Parameters
    ----------
    target : Path
        The file that is named last, or the directory.
    purpose : Purpose
    resume : bool
        Go on with what a killed run has left.
    restart : bool
        Remove what a killed run has left.
    """

    def __init__(self, target: Path, purpose: Purpose, *, resume: bool = False, restart: bool = False) -> None:
        self.found: dict[str, Work] = {}
        """What an earlier run has done, by the keys of batches."""
        self.resumes = False
        """Whether there is something to go on with."""
        self.kept = False
        """Whether a run that failed has left something to go on with."""
        self._target, self.purpose = target, purpose
        self._name = journal_name(target)
        self.resume, self.restart = resume, restart
        self._looked = self._begun = False
        self._trusted = True
        self._beside: list[str] = []
        self._nbytes = 0
        self._file: int | None = None
        self._lock = Lock()

    @property
    def is_worth_it(self) -> bool:
        """Whether there is so much to do that it is recorded."""
        return self.purpose.nbytes >= LEAST_NBYTES

    def left(self, descriptor: int) -> bool:
        """Tell whether to go on with what a killed run has left; called with the lock on it.

        Raises TargetError: it is neither to be gone on with nor to be removed, or it cannot be gone on with.
        """
        if not self._looked:
            self._look()
            self._looked = True
        if self.resumes:
            _check_alone(os.fstat(descriptor), partial_name(self._target))
        return self.resumes

    def _look(self) -> None:
        begun, found = None, dict[str, Work]()
        with suppress(TargetError) if self.restart else nullcontext():
            begun, found = _read(self._name)
        self._beside = begun.beside if begun is not None else []
        if self.restart or begun is None or not found:
            return
        nbytes = nbytes_of(found.values())
        if not self.resume:
            raise TargetError(
                "an earlier run to it did not finish",
                path=self._target,
                found=f"{nbytes} of {begun.nbytes} bytes written, in {partial_name(self._target).name}",
                advice="--resume continues it, --restart starts over",
            )
        other = self.purpose.other(begun)
        if other is not None:
            raise TargetError(
                f"the run to resume was started {other}",
                path=self._target,
                advice="--restart starts over",
            )
        self.found, self.resumes, self._nbytes = found, True, nbytes

    def begin(self) -> None:
        """Begin to record; the temporary names are this run's."""
        for name in set(self._beside) - set(self.purpose.beside):
            partial = partial_name(self._target.with_name(Path(name).name))
            if os.path.lexists(partial):
                with suppress(TargetError), claimed(partial, directory=False):
                    partial.unlink()
        if not self.resumes:
            forget(self._target)
            if self.is_worth_it and os.path.lexists(self._name):
                found = kind_of(self._name.lstat().st_mode)
                raise TargetError(
                    "cannot be created", path=self._name, found=f"{found} in its place", advice="remove it"
                )
        self._begun = True

    def record(self, key: str, work: Work) -> None:
        """Note that a batch is written; in any thread. Raises OSError: the journal cannot be written."""
        if any(crc is None for _, _, crc in work.written):
            return
        with self._lock:
            if self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
                self._file = os.open(self._name, flags | (0 if self.resumes else os.O_CREAT | os.O_EXCL), 0o666)
                if self.resumes:
                    _check_alone(os.fstat(self._file), self._name)
                else:
                    _append(self._file, asdict(self.purpose))
            _append(self._file, [key, work.written, work.read])
            self._nbytes += 0 if key in self.found else work.nbytes

    def check_sources(self) -> None:
        """Raise SourceError if a source file is no longer what it was when the run began."""
        for path, was in self.purpose.sources.items():
            if len(was) > 1 and identity(path) != was:  # a store's files are looked at as they are read
                self.distrust()
                raise SourceError(
                    "changed while it was read",
                    path=path,
                    expected="a file that nothing writes to",
                    advice="nothing was left behind: run it again when the file is complete",
                )

    def distrust(self) -> None:
        """Let nothing be gone on with: the disk has failed, or what was read was not one state of the sources."""
        self._trusted = False

    def keeps(self, error: BaseException) -> bool:
        """Tell whether a run that ends with an error leaves what it has done; if it does not, remove the journal."""
        if not self._begun:
            return self.resumes
        wrong = isinstance(error, SourceError) and type(error) is not SourceError  # damaged, or contradicts itself
        self.kept = self._trusted and not wrong and self._nbytes > 0
        self._close()
        if not self.kept:
            forget(self._target)
        return self.kept

    def end(self) -> None:
        """Remove the journal of a target that has its name."""
        self._close()
        forget(self._target)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let errors that leave a run say what it has left."""
        try:
            yield
        except (TargetError, SourceError, WorkerError) as error:
            if self.kept:
                advice = (error.advice or NOTHING_LEFT).replace(NOTHING_LEFT, self.said())
                error.advice = advice if self.said() in advice else f"{advice}; {self.said()}"
            raise
        except KeyboardInterrupt as error:
            if self.kept:
                raise Interrupted.of(error, self.said()) from error
            raise

    def said(self) -> str:
        """Return what a failed run has left, and what to do with it."""
        return (
            f"{self._nbytes} of {self.purpose.nbytes} bytes are written and kept in "
            f"{partial_name(self._target).name}: --resume continues with them, --restart starts over"
        )


def check_remains(directory: Path, names: Collection[Path]) -> None:
    """Remove what is below a directory that a killed run left and is none of `names`.

    Raises TargetError: it holds what no run leaves there, and what could be a name for something else.
    """
    for at, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(at, name)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                _check_alone(found, path)
                if path not in names:
                    path.unlink()


def _check_alone(found: os.stat_result, path: Path) -> None:
    """Raise TargetError if what a run has left is no file of this user's under one name: something else is changed."""
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
        raise TargetError(
            "was changed since a run left it: a link, a file with several names, or another user's file",
            path=path,
            advice="--restart starts over",
        )


def _append(file: int, content: object) -> None:
    """Write a line; one that a kill cuts off is ended by the next, which begins with an end of line."""
    line = memoryview(b"\n" + line_of(content))
    while line:
        line = line[os.write(file, line) :]


def _read(name: Path) -> tuple[Purpose | None, dict[str, Work]]:
    """Return what a journal says: nothing, if there is none or no line of it is whole."""
    begun, found = None, dict[str, Work]()
    try:
        _check_alone(name.lstat(), name)
        lines = name.open("rb")
    except FileNotFoundError:
        return None, {}
    with lines:
        for line in lines:
            content = content_of(line)
            if isinstance(content, dict) and begun is None:
                begun = purpose_of(content)
            elif isinstance(content, list) and len(content) == 3:
                with suppress(TypeError, ValueError, AttributeError):  # no run wrote it
                    key, written, read = content
                    found[str(key)] = Work(_ranges(written), {path: _ranges(some) for path, some in read.items()})
    return begun, found


def _ranges(some: Iterable[tuple[int, int, int | None]]) -> tuple[Range, ...]:
    """Return ranges as a line has them. Raises TypeError, ValueError: it has something else."""
    return tuple((index(at), index(nbytes), None if crc is None else index(crc)) for at, nbytes, crc in some)


_KINDS = {"version": str, "verb": str, "options": dict, "files": str, "nbytes": int, "sources": dict, "beside": list}


def purpose_of(content: Mapping[str, object]) -> Purpose:
    """Return the purpose in a line; of a version whose lines are others, one that is no run's of this version."""
    with suppress(TypeError):
        found = Purpose(**content)  # type: ignore[arg-type]
        if all(isinstance(getattr(found, name), kind) for name, kind in _KINDS.items()) and are_texts(found.beside):
            return replace(found, sources={path: tuple(one) for path, one in found.sources.items()})
    return Purpose(f"{content.get('version')} (another)", "", {}, "", 0, {})
