"""`checkpointer.json`: what a Checkpointer has written into a run's directory, in the order in which it did.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, SourceError, TargetExistsError
from zckpt.formats.latest import latest_name
from zckpt.formats.native.files import identity_of, is_native
from zckpt.storage.files import read_whole
from zckpt.storage.ownership import check_replaceable

RECORD = "checkpointer.json"
LATEST = "latest"

FORMAT = "zckpt checkpointer"
VERSION = 1

MAXIMUM_NBYTES = 1 << 24
"""Of a record; some hundred thousand checkpoints."""

NAME = re.compile(r"step-\d{8,}")

REMOVED = re.compile(r"\.step-\d{8,}\.zckpt-removed")
"""A checkpoint that is being removed from a file system."""

NAME_MAX = 255
"""Bytes of a file's name."""


@dataclass(frozen=True, slots=True)
class Saved:
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


@dataclass(frozen=True, slots=True)
class Record:
    """What a Checkpointer has written.

    Parameters
    ----------
    saved : tuple of Saved
        In the order of saving.
    saving : Saved or None
        What a save was begun of, after which the record has not been written again.
    before : str or None
        What `latest` said when that began.
    """

    saved: tuple[Saved, ...] = ()
    saving: Saved | None = None
    before: str | None = None

    def settled(self, directory: Path) -> Record:
        """Return the record with what was being saved among what was, if it is there."""
        if self.saving is None or not self.saving.is_in(directory):
            return Record(self.saved)
        return self.with_saved(self.saving)

    def with_saved(self, checkpoint: Saved) -> Record:
        """Return the record with a checkpoint as the last one; it may have replaced one of its name."""
        return Record((*(one for one in self.saved if one.name != checkpoint.name), checkpoint))

    def has(self, directory: Path, name: str) -> bool:
        """Tell whether what has this name in the directory was written by a Checkpointer."""
        every = (*self.saved, *([self.saving] if self.saving else []))
        return any(one.name == name and one.is_in(directory) for one in every)


def read_record(directory: Path) -> Record:
    """Return the record of a directory; an empty one where there is none.

    Raises SourceError: what has its name is none, or of a later version.
    """
    path = directory / RECORD
    try:
        if path.lstat().st_size > MAXIMUM_NBYTES or not path.is_file():
            raise DamagedFileError("is no record of a Checkpointer", path=path)
        found = json.loads(read_whole(str(path), most=MAXIMUM_NBYTES))
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise SourceError("cannot be read", path=path, found=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise DamagedFileError("is no record of a Checkpointer", path=path, found=str(error)) from error
    try:
        return _parsed(found)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise DamagedFileError(
            "is no record of a Checkpointer",
            path=path,
            expected=f"{FORMAT}, version {VERSION}",
            found=f"{type(error).__name__}: {error}",
            advice="use a directory of its own for the run",
        ) from error


def _parsed(found: Any) -> Record:  # noqa: ANN401  # what JSON holds
    if (found["format"], found["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{found['format']}, version {found['version']}")
    saved = tuple(_saved(*row) for row in found["saved"])
    saving = found["saving"]
    return Record(saved) if saving is None else Record(saved, _saved(*saving[:2]), str(saving[2]))


def _saved(name: object, identity: object) -> Saved:
    if not isinstance(name, str) or not isinstance(identity, str) or not NAME.fullmatch(name):
        raise ValueError(f"a checkpoint called {name!r}")
    return Saved(name, identity)


def text_of(record: Record) -> str:
    """Return what the file of a record holds."""
    saving = record.saving and [record.saving.name, record.saving.identity, record.before or ""]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "saved": [[one.name, one.identity] for one in record.saved],
        "saving": saving,
    }
    return json.dumps(document, indent=1) + "\n"


def latest_of(directory: Path) -> str | None:
    """Return which checkpoint is the latest, as `latest` says; None where it says no name."""
    name = latest_name(directory) or ""
    is_name = Path(name).name == name and name not in ("", "..") and "\0" not in name and len(name.encode()) <= NAME_MAX
    return name if is_name else None


def check_directory(directory: Path) -> None:
    """Raise unless a Checkpointer may write here.

    Raises SourceError: what has the name of its record is none; TargetExistsError: `latest` belongs to another program,
    which would be lost without it.
    """
    latest = directory / LATEST
    if directory.is_dir():
        check_replaceable(latest)
        check_replaceable(directory / RECORD)
    named = latest_of(directory)
    if (
        read_record(directory) == Record()
        and named
        and (directory / named).is_dir()
        and not is_native(directory / named)
    ):
        raise TargetExistsError(
            "is not a Checkpointer's, and would be replaced",
            path=latest,
            found=f"{named}, which is no checkpoint of zckpt",
            advice="use a directory of its own for the run",
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
    every = directory.iterdir() if directory.is_dir() else ()
    others = {path.name for path in every if NAME.fullmatch(path.name) and is_native(path)}
    found += sorted(others, key=lambda name: int(name.removeprefix("step-")), reverse=True)
    return [name for name in dict.fromkeys(found) if name == latest or (directory / name).is_dir()]
