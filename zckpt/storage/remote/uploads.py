"""Files on their way into a store, none of which is seen under its name before all of them are there.

    S3          each file is an upload in parts, which is completed when all parts of all files have come
    others      each goes under a temporary name, `.NAME.zckpt-partial`, from its beginning to its end, and is renamed

`Uploads` is what both have in common: `sink` for each file, `finish` when all have come, so that they can be read back
from where `url` says; `put` for small files that make others recognisable; `name` at the very end; `abort` removes all.
Where several processes send the files of one target, each says what it has `sent`, and one of them `adopt`s that and
finishes all. What they have to tell each other through the store is a `note`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from zckpt.storage.remote.stores import Store

NOTE = "note"

Sent = dict[str, Any]
"""Of files by their names: plain data."""


class Uploads(ABC):
    """Files of one target.

    Parameters
    ----------
    store : Store
    key : str
        The target's, as the store's library calls it.
    is_directory : bool
        Whether files go below the target, else beside it.
    """

    kept_in: str
    """Where what has been sent stays until it is gone on with, for messages."""

    is_folder = True
    """Whether `url` is of a directory that has the files, else they are beside it."""

    def __init__(self, store: Store, key: str, *, is_directory: bool) -> None:
        self.store = store
        self.key = key
        self.is_directory = is_directory
        self.root = key if is_directory else key.rpartition("/")[0]
        parent, _, name = key.rpartition("/")
        self.partial = f"{parent}/.{name}.zckpt-partial"

    def shown(self, name: str) -> str:
        """Return a file's URL, for messages."""
        top = self.store.address.shown
        return "/".join([top if self.is_directory else top.rpartition("/")[0], name])

    def at(self, name: str) -> str:
        """Return the key of a file by its name below the target, or beside it."""
        return f"{self.root}/{name}"

    @abstractmethod
    def begin(self, *, resume: bool = False, keep: bool = False) -> None:
        """Remove what a run that was killed has left, or go on with it.

        Parameters
        ----------
        resume : bool
        keep : bool
            Let another run go on with this one, if it is killed.
        """

    @abstractmethod
    def left(self) -> int:
        """Return how many bytes a run that was killed has sent, or this one, of those that can be gone on with.

        Of this one that is what is known to be kept, whatever the store refuses by now.
        """

    @abstractmethod
    def sent(self) -> Sent:
        """Return what this process has sent and not finished, by name: whatever `adopt` needs of it."""

    @abstractmethod
    def adopt(self, sent: Sent) -> None:
        """Take over what another process has sent."""

    @abstractmethod
    def completed(self, sent: Sent) -> list[str]:
        """Return which files of a note have their names already."""

    @abstractmethod
    def discard(self, sent: Sent) -> list[str]:
        """Remove those that have, and the note; return their names."""

    @abstractmethod
    def note(self, data: bytes) -> None:
        """Leave a small note beside the target, until it is named or aborted."""

    @abstractmethod
    def noted(self) -> bytes | None:
        """Return the note beside the target; None: there is none."""

    def remains(self) -> bytes | None:
        """Return the note of a run that was killed after all had come and before all was named; None: of none."""
        return self.noted()

    @abstractmethod
    def sink(self, name: str) -> Any:  # noqa: ANN401  # an engine.upload.Sink
        """Return where a file goes."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Send a small file; where files get their names one by one, this one is there at once."""

    @abstractmethod
    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Let files that have come be read, in this order; `old` are keys of a target that is replaced."""

    @abstractmethod
    def url(self) -> str:
        """Return where files that are finished can be read: of a directory that has them, or of the target."""

    @abstractmethod
    def name(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Give files their names, in this order; remove those of a target that is replaced, which have `old` keys."""

    @abstractmethod
    def abort(self, *, everything: bool = True) -> None:
        """Remove what has come; or what this process has sent, and another removes all."""
