"""The checksums that files hold of their own bytes: the CRC-32 of each record of a torch archive, or a format's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zckpt.engine.checking import Checks, Sum
from zckpt.engine.plan import Plan
from zckpt.errors import SourceError
from zckpt.formats.format import Format
from zckpt.formats.registry import find_format
from zckpt.state import Checkpoint, SourceFile
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import has_checksums, open_range, read_archive

ZIP = b"PK\3\4"

ALWAYS_NBYTES = 1 << 12
"""A record of at most this is always checked: it may be a step count, or say how the others are to be read."""


def checksums(file: SourceFile, owner: Format | None) -> list[Sum]:
    """Return the checksums of a file, by offset; none for one that has none (safetensors, JSON, legacy files).

    Parameters
    ----------
    file : SourceFile
    owner : Format or None
        Whose file it is, if that is known.

    Raises
    ------
    SourceError
        The file cannot be read, or the structure that states them is damaged.
    """
    return sorted(archive_sums(file) if owner is None else owner.checks(file), key=lambda one: one.offset)


def archive_sums(file: SourceFile) -> Iterator[Sum]:
    """Yield the checksum of each record of the torch archives in a file, or that it is."""
    for offset, nbytes in file.archives or _whole(file):
        with open_range(file.path, offset, nbytes) as source:
            records = list(read_archive(source).values())
        if has_checksums(records):
            for record in records:
                yield Sum(record.name, file.path, record.offset, record.nbytes, record.crc32)


def _whole(file: SourceFile) -> list[tuple[int, int]]:
    if file.nbytes < len(ZIP):
        return []
    with opened(file.path) as descriptor:
        return [(0, file.nbytes)] if read_at(descriptor, 0, len(ZIP), path=file.path) == ZIP else []


def source_checks(checkpoint: Checkpoint, plan: Plan | None = None) -> Checks:
    """Return the checks of all that a plan reads.

    Parameters
    ----------
    checkpoint : Checkpoint
        The small records of its files are checked whether or not the plan reads them.
    plan : Plan, optional
        Reads its files, and others that are copied as they are. None: only these are read.

    Raises
    ------
    SourceError
        A file of the checkpoint cannot be read, or the structure that states its checksums is damaged.
    """
    known = {file.path: file for file in checkpoint.files}
    owner = find_format(checkpoint.format)
    every = (one for file in known.values() for one in checksums(file, owner))
    found = [replace(one, always=one.nbytes <= ALWAYS_NBYTES) for one in every]
    read = plan.sources if plan else frozenset[str]()
    for path in sorted(read - known.keys()):
        found += _of_other(path)
    return Checks(found)


def _of_other(path: str) -> list[Sum]:
    """Return the checksums of a file that is no part of a checkpoint; none of one that cannot be read as its kind."""
    try:
        return checksums(SourceFile(path, Path(path).stat().st_size, "other"), None)
    except (SourceError, OSError):
        return []
