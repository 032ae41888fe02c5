"""A fingerprint and the digests it is made of, as they are stored and compared; see `fingerprint`. Reads no tensor."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.state import Checkpoint
from zckpt.storage.durable import written_files
from zckpt.storage.files import read_whole
from zckpt.storage.ownership import FINGERPRINT_NAME

VERSION = "zckpt1"
"""What a fingerprint begins with; another rule would have another."""

LEAF_NUMEL = 1 << 18
"""Elements of a leaf: of 32 bits, a mebibyte, which a cache holds."""

FILE_NAME = FINGERPRINT_NAME

MAXIMUM_NBYTES = 1 << 30
"""A larger file of digests is none."""

Entries = dict[str, dict[str, str]]
"""For each name its entries: digests with type and shape, and single values as text."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A fingerprint and what it is of.

    Parameters
    ----------
    text : str
        `zckpt1:` and 32 hexadecimal digits.
    entries : dict
        For each name its entries; two checkpoints with one fingerprint have the same.
    """

    text: str
    entries: Entries

    def as_dict(self) -> dict[str, object]:
        """Return the fingerprint as JSON-able data, the document of `--json`, and what a file of digests holds."""
        return {"fingerprint": self.text, "leaf_numel": LEAF_NUMEL, "entries": self.entries}


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that two fingerprints have differently; None where one has none. Entry None: the whole name."""

    name: str
    entry: str | None
    expected: str | None
    found: str | None


def root(entries: Entries) -> str:
    """Return the text of the fingerprint of entries."""
    lines = sorted(json.dumps([name, entry, text]) for name, found in entries.items() for entry, text in found.items())
    return f"{VERSION}:{xxhash.xxh3_128_hexdigest(chr(10).join(lines).encode())}"


def digests_path(checkpoint: Checkpoint) -> Path:
    """Return where the digests of a checkpoint are stored: in its directory, or beside its file."""
    source = Path(checkpoint.source)
    return source / FILE_NAME if source.is_dir() else digests_path_of_file(source)


def digests_path_of_file(file: Path) -> Path:
    """Return where the digests of a checkpoint are stored that is one file."""
    return file.with_name(f"{file.name}.{FILE_NAME}")


def write_digests(found: Fingerprint, target: Path, *, overwrite: bool = False) -> None:
    """Write a file of digests, whole or not at all.

    Raises
    ------
    TargetError
        The file exists, or cannot be written.
    """
    with written_files([target], overwrite=overwrite) as (partial,):
        partial.write_bytes(bytes_of(found))


def bytes_of(found: Fingerprint) -> bytes:
    """Return what a file of digests holds; half a character of a name is written as JSON's escape of it."""
    text = json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def read_digests(path: str | os.PathLike[str]) -> Fingerprint:
    """Return the fingerprint that a file holds.

    Raises
    ------
    SourceError
        The file cannot be read, or holds none.
    """
    file = Path(path)
    data = read_whole(str(file), most=MAXIMUM_NBYTES)
    try:
        stored = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError("unreadable", path=file, expected="digests that zckpt wrote", found=error) from error
    text = stored.get("fingerprint") if isinstance(stored, dict) else None
    entries = stored.get("entries") if isinstance(stored, dict) else None
    if not isinstance(text, str) or not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise DamagedFileError("holds no digests", path=file, expected="what `zckpt fingerprint --write` writes")
    if not text.startswith(f"{VERSION}:"):
        raise UnsupportedError(
            "of another version", path=file, expected=VERSION, found=text[:20], advice="use a newer zckpt"
        )
    if text != root(entries):
        raise DamagedFileError("not as it was written", path=file, expected=text, found=root(entries))
    return Fingerprint(text, entries)


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def changes(expected: Fingerprint, found: Fingerprint) -> list[Change]:
    """Return what differs between two fingerprints, by name and entry."""
    if expected.text == found.text:
        return []
    different = []
    for name in dict.fromkeys([*expected.entries, *found.entries]):
        ours, theirs = expected.entries.get(name), found.entries.get(name)
        if ours is None or theirs is None:
            different.append(Change(name, None, None if ours is None else "there", None if theirs is None else "there"))
            continue
        for entry in dict.fromkeys([*ours, *theirs]):
            if ours.get(entry) != theirs.get(entry):
                different.append(Change(name, entry, ours.get(entry), theirs.get(entry)))
    return different
