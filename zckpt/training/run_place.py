"""Where a Checkpointer's directory is: on a file system, or in a store; what it does there besides saving."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from zckpt.errors import DamagedFileError, SourceError, TargetError
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, identity_of
from zckpt.operations.open import open as open_checkpoint
from zckpt.operations.places import at_path
from zckpt.operations.small_file import write_text
from zckpt.optim.ranks import Place
from zckpt.storage.durable import recover, target_of_old
from zckpt.storage.leftovers import remove_leftovers
from zckpt.storage.ownership import check_replaceable, check_unfinished
from zckpt.training import run_record
from zckpt.training.run_record import LATEST, NAME, RECORD, Record, Saved


class RunPlace:
    """A directory on a file system that all ranks share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def shown(self) -> str:
        """What it is called in messages."""
        return str(self.directory)

    def checkpoint(self, name: str) -> Place:
        """Return where a checkpoint of this name is."""
        return self.directory / name

    def seen(self) -> AbstractContextManager[Path]:
        """Return a context that yields a directory in which everything has its name and can be read."""
        return nullcontext(self.directory)

    def make(self) -> None:
        """Make it, if it does not exist."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def write_record(self, record: Record) -> None:
        """Write the record, whole or not at all; errors are TargetErrors."""
        write_text(self.checkpoint(RECORD), run_record.text_of(record))

    def write_latest(self, name: str) -> None:
        """Write which checkpoint is the latest; errors are TargetErrors."""
        write_text(self.checkpoint(LATEST), name)

    def latest(self) -> str:
        """Return what a run resumes from, and its id; nothing where there is no such checkpoint."""
        with self.seen() as directory:
            name = next(iter(run_record.candidates(directory)), None)
            identity = identity_of(directory / name) if name else None
            return Saved(name, identity).shown if name and identity else ""

    def settle(self, saving: Saved) -> None:
        """Put right what a save has left that was killed."""
        recover(self.directory / saving.name, OWNED)

    def settle_all(self) -> None:
        """Give checkpoints their names back that a kill has left without, and remove what it has left unfinished."""
        for left in self.directory.iterdir():
            target = target_of_old(left)
            if target is not None and NAME.fullmatch(target.name):
                recover(target, OWNED)
        remove_leftovers(self.directory, OWNED)

    def sweep(self) -> None:
        """Remove what a removal has left that was killed."""
        for left in self.directory.iterdir():
            if run_record.REMOVED.fullmatch(left.name):
                with suppress(TargetError):
                    check_unfinished(left, OWNED)
                    shutil.rmtree(left, ignore_errors=True)  # which follows no link

    def remove(self, checkpoint: Saved) -> str | None:
        """Remove a checkpoint, unless something else is in its place or in it: then return what."""
        if not checkpoint.is_in(self.directory):
            return None
        path = self.directory / checkpoint.name
        try:
            check_replaceable(path, OWNED)
        except TargetError as error:
            return f"{path.name} is not removed: {error}"
        hidden = path.with_name(f".{path.name}.zckpt-removed")  # half removed, it must not look like a checkpoint
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        return None


class StoredRun(RunPlace):
    """A directory in a store. It is listed for each of these, which all are done once for each save."""

    def __init__(self, url: str) -> None:
        from zckpt.storage.remote.addresses import address_of

        self._url = url.rstrip("/")
        self._shown = address_of(url).shown

    @property
    def shown(self) -> str:
        """The URL, without secrets."""
        return self._shown

    def checkpoint(self, name: str) -> str:
        """Return the URL of a checkpoint of this name."""
        return f"{self._url}/{name}"

    def seen(self) -> AbstractContextManager[Path]:
        """Return a context that yields a directory with the names in the store as they are now."""
        return at_path(self._url, missing=True)

    def make(self) -> None:
        """Do nothing: what is written has a directory."""

    def settle(self, saving: Saved) -> None:
        """Abort uploads, and remove objects among which no document has come."""
        from zckpt.storage.remote.mount import mount_of

        with self.seen() as directory:
            path = directory / saving.name
            mount_of(directory).uploads(path, is_directory=True).begin()
            if saving.is_in(directory) and not os.path.lexists(path / DOCUMENT_NAME):
                self._remove(path)

    def settle_all(self) -> None:
        """Do nothing: what is replaced has no other name meanwhile."""

    def sweep(self) -> None:
        """Do nothing: what is removed keeps its name up to the last file."""

    def remove(self, checkpoint: Saved) -> str | None:
        """Remove a checkpoint, unless something else is in its place or in it: then return what."""
        with self.seen() as directory:
            path = directory / checkpoint.name
            if not checkpoint.is_in(directory):
                return None
            try:
                check_replaceable(path, OWNED)
            except TargetError as error:
                return f"{path.name} is not removed: {error}"
            self._remove(path)
        return None

    def _remove(self, path: Path) -> None:
        """Remove what is below a directory, its document last: it tells whose the rest is."""
        from zckpt.storage.remote.mount import mount_of

        mount = mount_of(path)
        document = mount.key_of(path / DOCUMENT_NAME)
        for key in sorted(mount.keys_below(path), key=lambda key: key == document):
            mount.store.remove(key)
        mount.store.remove_folder(mount.key_of(path))


def run_place(place: Place) -> RunPlace:
    """Return where a Checkpointer's directory is; a string is a URL."""
    return RunPlace(place) if isinstance(place, Path) else StoredRun(place)


def unsound(path: Place) -> str | None:
    """Return why a checkpoint cannot be loaded; None if its document and files are there and fit together."""
    try:
        opened = open_checkpoint(path)
        if opened.format != "zckpt":
            raise DamagedFileError("not a checkpoint of zckpt", path=path, found=opened.format)
    except SourceError as error:
        return str(error)
    return None
