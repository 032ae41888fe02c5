"""Files on their way into a store, none of which is seen under its name before all of them are there.

    S3          each file is an upload in parts, which is completed when all parts of all files have come
    others      each goes under a temporary name, `.NAME.zckpt-partial`, from its beginning to its end, and is renamed

Both, `s3.S3Uploads` and `named_uploads.NamedUploads`, have these methods:

    begin       removes what a run that was killed has left, or goes on with it; `keep`: another may go on with this one
    sink        where a file goes: an `engine.upload.Sink`
    left        bytes that were sent and can be gone on with; of this run what is known to be kept
    finish      lets files that have come be read from where `url` says, in this order; `old`: keys of what is replaced
    put         sends a small file, which makes others recognisable; on S3 it is there at once
    name        gives files their names, in this order, and removes those of a target that is replaced
    abort       removes what has come; or what this process has sent, and another removes all

Where several processes send the files of one target, each says what it has `sent`, and one of them `adopt`s that and
finishes all. What they have to tell each other, or the next run, through the store is a `note`: of what it lists, the
next run has those `completed` that have their names already, or `discard`s them.
"""

from __future__ import annotations

from typing import Any

from zckpt.storage.remote.stores import Store

Sent = dict[str, Any]
"""Of files by their names: plain data."""


class UploadsBase:
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
        self.kept_note = f"{self.partial}/note"

    def shown(self, name: str) -> str:
        """Return a file's URL, for messages."""
        top = self.store.address.shown
        return "/".join([top if self.is_directory else top.rpartition("/")[0], name])

    def at(self, name: str) -> str:
        """Return the key of a file by its name below the target, or beside it."""
        return f"{self.root}/{name}"

    def completed(self, sent: Sent) -> list[str]:
        """Return which files of a note have their names already."""
        raise NotImplementedError

    def discard(self, sent: Sent) -> list[str]:
        """Remove those, before all else of theirs is; return their names."""
        found = self.completed(sent)
        for name in found:
            self.store.remove(self.at(name))
        return found

    def note(self, data: bytes) -> None:
        """Leave a small note beside the target, until it is named or aborted."""
        self.store.put(self.kept_note, data)

    def noted(self) -> bytes | None:
        """Return the note beside the target; None: there is none."""
        return self.store.read(self.kept_note)

    def remains(self) -> bytes | None:
        """Return the note of a run that was killed after all had come and before all was named; None: of none."""
        return self.noted()
