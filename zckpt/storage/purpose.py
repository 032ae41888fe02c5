"""What a run is to write, and of what: whether another run's work is part of this one's, and in what it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from zckpt.errors import SourceError, shown
from zckpt.storage import distant
from zckpt.version import __version__

SAID_CHARACTERS = 60
"""Of an option's value; of a longer one, a digest says that it is another."""

Identity = tuple["int | str", ...]
"""Of a source file: bytes, nanoseconds of its last change, inode; or what its store says of it, an etag."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a run is to write, and of what: one run can go on with the work of another that has the same.

    Parameters
    ----------
    version : str
        Of zckpt.
    verb : str
    options : dict of str to str
        Those that are not the default, as they are shown.
    files : str
        A digest of the names and sizes of what is written.
    nbytes : int, bytes
        Of tensors that are written.
    sources : dict of str to Identity
        By absolute path, or URL.
    beside : list of str
        Names of files that are written into the target's directory, each of which has a temporary name.
    """

    version: str
    verb: str
    options: dict[str, str]
    files: str
    nbytes: int
    sources: dict[str, Identity]
    beside: list[str] = field(default_factory=list)

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

        Parameters
        ----------
        verb : str
        options : mapping of str to object
            Those that decide what is written.
        files : iterable of str
        sizes : iterable of int, bytes
            Of the tensors that are written, then any other number that would be another for other files.
        sources : iterable of str
            Paths of files that are read.
        beside : iterable of str

        Raises
        ------
        SourceError
            One is gone.
        """
        nbytes, *others = sizes
        digest = blake2b(json.dumps([list(files), nbytes, *others]).encode("utf-8", "surrogatepass"), digest_size=16)
        said = {key: _said(value) for key, value in options.items() if value not in (None, False, "", (), [], {})}
        identities = {shown(os.path.abspath(path)): identity(path) for path in sorted(sources)}  # noqa: PTH100  # links stay
        return Purpose(__version__, verb, said, digest.hexdigest(), nbytes, identities, list(beside))

    def other(self, begun: Purpose) -> str | None:
        """Return in what a run that was begun is another than this one; None: in nothing."""
        if begun.version != self.version:
            return f"by zckpt {begun.version}, and this is {self.version}"
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
    elsewhere = distant.found(path)
    if elsewhere is not None:
        return (elsewhere.identity,)
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise SourceError("cannot be read", path=path, found=error.strerror) from error
    return found.st_size, found.st_mtime_ns, found.st_ino


def _said(value: object) -> str:
    text = shown(str(value))
    if len(text) <= SAID_CHARACTERS:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{text[: SAID_CHARACTERS // 2]}... ({digest})"
