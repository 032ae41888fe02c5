"""A run's directory, on a file system or in a store: which checkpoints a Checkpointer wrote there, and in which order.

checkpointer.json says so:

{
 "format": "zckpt checkpointer", "version": 1,
 "saved": [["step-00000500", "<id>"], ...],             the last one was saved last
 "saving": ["step-00001000", "<id>", "step-00000500"]   begun; what `latest` said then; null: nothing
}

The id is that of the checkpoint's document. A directory is the Checkpointer's if both its name and its id are here.
What somebody copied there, made there, or put in the place of one is not, and is neither replaced nor removed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, SourceError, TargetError, TargetExistsError, shown
from zckpt.formats.latest import is_name, latest_name
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, identity_of, is_native
from zckpt.immutable import immutable
from zckpt.operations.open import open as open_checkpoint
from zckpt.operations.places import at_path
from zckpt.operations.small_file import write_text
from zckpt.optim.ranks import Place
from zckpt.storage.disk import sync
from zckpt.storage.durable import recover, remove_leftovers, target_of_old
from zckpt.storage.files import is_directory, is_there, numbered_in, read_whole
from zckpt.storage.ownership import check_replaceable, check_unfinished, directories_above
from zckpt.storage.room import write_errors

RECORD = "checkpointer.json"
LATEST = "latest"

FORMAT = "zckpt checkpointer"
VERSION = 1
"""Of this document, and of a spare's."""

MAXIMUM_NBYTES = 1 << 24
"""Of a record; some hundred thousand checkpoints."""

NAME = re.compile(r"step-(\d{8,})")

REMOVED = re.compile(r"\.step-\d{8,}\.zckpt-removed")
"""A checkpoint that is being removed from a file system."""


@immutable
class Written:
    """A checkpoint that was written: the name of its directory, and the id in its document."""

    name: str
    identity: str

    @property
    def shown(self) -> str:
        """Its name and its id, as `RunPlace.latest` says them."""
        return f"{self.name} {self.identity}"

    def is_in(self, directory: Path) -> bool:
        """Tell whether it is there, and neither another nor a link."""
        path = directory / self.name
        return path.is_dir() and not path.is_symlink() and identity_of(path) == self.identity


@immutable
class Record:
    """What a Checkpointer has written."""

    saved: tuple[Written, ...] = ()  # in the order of saving
    saving: Written | None = None  # what a save was begun of, after which the record has not been written again
    before: str | None = None  # what `latest` said when that began

    def with_saved(self, checkpoint: Written) -> Record:
        """Return the record with a checkpoint as the last one; it may have replaced one of its name."""
        return Record((*(one for one in self.saved if one.name != checkpoint.name), checkpoint))


UNREADABLE = (ValueError, TypeError, KeyError, IndexError, RecursionError)
"""What a document raises that is none."""


@contextmanager
def document(path: Path, form: str, wrong: str, advice: str) -> Iterator[dict[str, Any]]:
    """Yield a small JSON document of a form. Raises DamagedFileError: it is none, or who looks at it finds that."""
    try:
        found = json.loads(read_whole(str(path), most=MAXIMUM_NBYTES))
        if (found["format"], found["version"]) != (form, VERSION):
            raise ValueError(f"{found['format']}, version {found['version']}")
        yield found
    except UNREADABLE as error:
        raise DamagedFileError(
            wrong,
            path=path,
            expected=f"{form}, version {VERSION}",
            found=f"{type(error).__name__}: {error}",
            advice=advice,
        ) from error


def document_text(form: str, about: Mapping[str, object]) -> str:
    """Return the text of one."""
    return json.dumps({"format": form, "version": VERSION, **about}, indent=1) + "\n"


def read_record(directory: Path) -> Record:
    """Return the record of a directory; an empty one where there is none.

    Raises SourceError: what has its name is none, or of a later version.
    """
    path = directory / RECORD

    def written(name: object, identity: object) -> Written:
        if not isinstance(name, str) or not isinstance(identity, str) or not NAME.fullmatch(name):
            raise ValueError(f"a checkpoint called {name!r}")
        return Written(name, identity)

    if not is_there(path):
        return Record()
    with document(path, FORMAT, "is not a Checkpointer's record", "use a separate directory for the run") as found:
        saved, saving = tuple(written(*row) for row in found["saved"]), found["saving"]
        return Record(saved) if saving is None else Record(saved, written(*saving[:2]), str(saving[2]))


def latest_of(directory: Path) -> str | None:
    """Return which checkpoint is the latest, as `latest` says; None where it says no name."""
    name = latest_name(directory) or ""
    return name if is_name(name) else None


def check_directory(directory: Path) -> None:
    """Raise unless a Checkpointer may write here.

    Raises SourceError: what has the name of its record is none; TargetExistsError: `latest` belongs to another program,
    which would be lost without it.
    """
    latest = directory / LATEST
    check_replaceable(latest)
    check_replaceable(directory / RECORD)
    named = latest_of(directory)
    if (
        read_record(directory) == Record()
        and named
        and is_directory(directory / named)
        and not is_native(directory / named)
    ):
        raise TargetExistsError(
            "was not written by a Checkpointer, and would be replaced",
            path=latest,
            found=f"{named}, which is not a zckpt checkpoint",
            advice="use a separate directory for the run; zckpt.load takes the state that another program saved",
        )


def candidates(directory: Path) -> list[str]:
    """Return the names of what may be resumed from, the best first.

    That is what `latest` says; then what was saved before it, and after it, from the last on; then what no Checkpointer
    wrote and is a checkpoint, whole or not, from the highest step on. A save that was whole, but was killed before it
    could say so, goes before all.
    """
    try:
        record = read_record(directory)
    except SourceError:
        record = Record()
    latest = latest_of(directory)
    order = [one.name for one in record.saved]
    at = order.index(latest) if latest in order else len(order)
    found = [*([latest] if latest else []), *reversed(order[:at]), *reversed(order[at:])]
    if record.saving is not None and record.before == (latest or "") and record.saving.is_in(directory):
        found.insert(0, record.saving.name)
    found += [path.name for _, path in reversed(numbered_in(directory, NAME)) if is_native(path)]
    return [name for name in dict.fromkeys(found) if name == latest or (directory / name).is_dir()]


class RunPlace:
    """A run's directory, which all ranks share; in a store it is listed for each of these, once for each save."""

    def __init__(self, place: Place) -> None:
        self.place = place if isinstance(place, Path) else place.rstrip("/")
        self.shown = shown(str(self.place))
        """What it is called in messages."""

    def checkpoint(self, name: str) -> Place:
        """Return where a checkpoint of this name is."""
        return self.place / name if isinstance(self.place, Path) else f"{self.place}/{name}"

    def seen(self) -> AbstractContextManager[Path]:
        """Return a context that yields a directory with the names that are there now, in which all can be read."""
        return at_path(self.place, missing=True)

    def check(self) -> None:
        """Raise as `check_directory`."""
        with self.seen() as directory:
            check_directory(directory)

    def make(self) -> None:
        """Make it, if it does not exist; in a store, what is written has a directory."""
        if isinstance(self.place, Path):
            with write_errors(self.place), directories_above(self.place / RECORD):
                pass

    def latest(self) -> str:
        """Return what a run resumes from, and its id; nothing where there is no such checkpoint."""
        with self.seen() as directory:
            name = next(iter(candidates(directory)), None)
            identity = identity_of(directory / name) if name else None
            return Written(name, identity).shown if name and identity else ""

    def begin(self, checkpoint: Written) -> bool:
        """Note what is going to be saved; return whether it replaces something.

        What a save has left of another name that was killed is put right: it may be as large as any. Raises
        TargetExistsError: something is there that no Checkpointer wrote.
        """
        self.make()
        with self.seen() as directory:
            check_directory(directory)
            record, before, path = read_record(directory), latest_of(directory), directory / checkpoint.name
            left = record.saving
            if left is not None and left.name != checkpoint.name and isinstance(self.place, Path):
                recover(self.place / left.name, OWNED)
            elif left is not None and left.name != checkpoint.name:
                from zckpt.storage.remote.mount import mount_of

                mount_of(directory).uploads(directory / left.name, is_directory=True).begin()
                if left.is_in(directory) and not is_there(directory / left.name / DOCUMENT_NAME):
                    _remove_stored(directory / left.name)
            saved = record.with_saved(left).saved if left is not None and left.is_in(directory) else record.saved
            is_own = any(one.name == checkpoint.name and one.is_in(directory) for one in saved)
            if not is_own and is_there(path):
                raise TargetExistsError("exists, but no Checkpointer wrote it", path=path, advice="move it away")
        self._write(Record(saved, checkpoint, before))
        return is_own

    def name(self, checkpoint: Written) -> Record:
        """Name what has been saved as the latest; return what has been written by now."""
        write_text(self.checkpoint(LATEST), checkpoint.name)
        with self.seen() as directory:
            record = read_record(directory).with_saved(checkpoint)
        self._write(record)
        return record

    def _write(self, record: Record) -> None:
        """Write the record, whole or not at all; errors are TargetErrors."""
        saving = record.saving and [record.saving.name, record.saving.identity, record.before or ""]
        saved = [[one.name, one.identity] for one in record.saved]
        write_text(self.checkpoint(RECORD), document_text(FORMAT, {"saved": saved, "saving": saving}))

    def candidates(self) -> list[str]:
        """Return the names of what may be resumed from, the best first.

        Before that, checkpoints get their names back that a kill has left without, and what it has left unfinished is
        removed; in a store, what is replaced has no other name meanwhile.
        """
        with self.seen() as directory:
            if not directory.is_dir():
                return []
            if isinstance(self.place, Path):
                for left in directory.iterdir():
                    target = target_of_old(left)
                    if target is not None and NAME.fullmatch(target.name):
                        recover(target, OWNED)
                remove_leftovers(directory, OWNED)
            return candidates(directory)

    def prune(self, record: Record, keep: int | None, told: list[str]) -> None:
        """Remove sound checkpoints beyond those to keep, and what is unsound and was saved before them.

        What a removal has left that was killed goes, too; in a store it keeps its name up to the last file. `told`: of
        what stays.
        """
        for left in self.place.iterdir() if isinstance(self.place, Path) else ():
            if REMOVED.fullmatch(left.name):
                with suppress(TargetError):
                    check_unfinished(left, OWNED)
                    shutil.rmtree(left, ignore_errors=True)  # which follows no link
        if keep is None:
            return
        *before, last = record.saved
        kept = 1
        for checkpoint in reversed(before):
            if kept >= keep:
                told += self.remove(checkpoint)
                continue
            with self.seen() as directory:
                remains = checkpoint.is_in(directory)
            why = unsound(self.checkpoint(checkpoint.name)) if remains else None
            kept += remains and why is None
            told += [] if why is None else [f"{checkpoint.name} is not sound, and does not count: {why}"]
        with self.seen() as directory:
            remaining = Record((*(one for one in before if is_there(directory / one.name)), last))
        if remaining != record:
            self._write(remaining)

    def remove(self, checkpoint: Written) -> list[str]:
        """Remove a checkpoint, unless something else is in its place or in it: then return what."""
        with self.seen() as directory:
            path = directory / checkpoint.name
            if not checkpoint.is_in(directory):
                return []
            try:
                check_replaceable(path, OWNED)
            except TargetError as error:
                return [f"{path.name} is not removed: {error}"]
            if isinstance(self.place, Path):
                hidden = path.with_name(f".{path.name}.zckpt-removed")  # half removed, it must not look like one
                path.rename(hidden)
                sync(path.parent)
                shutil.rmtree(hidden, ignore_errors=True)
            else:
                _remove_stored(path)
        return []


def _remove_stored(path: Path) -> None:
    """Remove what is below a directory in a store, its document last: it tells whose the rest is."""
    from zckpt.storage.remote.mount import mount_of

    mount = mount_of(path)
    document = mount.key_of(path / DOCUMENT_NAME)
    for key in sorted(mount.keys_below(path), key=lambda key: key == document):
        mount.store.remove(key)
    mount.store.remove_folder(mount.key_of(path))


def unsound(path: Place) -> str | None:
    """Return why a checkpoint cannot be loaded; None if its document and files are there and fit together."""
    try:
        opened = open_checkpoint(path)
        if opened.format != "zckpt":
            raise DamagedFileError("not a checkpoint of zckpt", path=path, found=opened.format)
    except SourceError as error:
        return str(error)
    return None
