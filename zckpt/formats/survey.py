"""What is wrong with the files of a source that cannot be opened: of each file by itself, and of ranks together.

Opening stops at the first error. This goes on: every file that can be read is read, and what is wrong with the others
is said of each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.errors import SourceError, UnknownFormatError
from zckpt.formats.format import Format, Found, NearMiss, Search
from zckpt.formats.registry import formats
from zckpt.formats.suffixes import READ_SUFFIXES
from zckpt.formats.torch_files.tensors import describe
from zckpt.state import SourceFile
from zckpt.torchfile import read_torchfile

SAFETENSORS_SUFFIX = ".safetensors"

MAXIMUM_DEPTH = 4
"""Folders below a source that are looked into: a universal checkpoint has two."""


@dataclass(slots=True)
class Survey:
    """Files that can be read, errors about the others, and whose files they are, if that can be told."""

    files: list[SourceFile] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    format: Format | None = None


def survey(search: Search) -> Survey:
    """Read every file of a source by itself, and hold ranks against each other as far as they can be read.

    Parameters
    ----------
    search : Search
        For what `open_checkpoint` could not open.
    """
    asked: list[SourceError] = []
    for one in formats():
        if not search.given <= one.takes:
            continue
        try:
            found = one.find(search)
        except SourceError as error:
            found = None
            asked.append(error)
        if not asked and not (isinstance(found, Found) and found.sure):
            continue
        try:
            surveyed = one.survey(search, found if isinstance(found, Found) else None)
        except SourceError as error:
            surveyed = Survey(errors=[error])
        surveyed.errors += asked
        surveyed.format = one
        return surveyed
    return survey_files(search.path)


def survey_files(source: Path) -> Survey:
    """Read all torch and safetensors files of a source; of others it is not said that they are none."""
    surveyed = Survey()
    paths = [source] if source.is_file() else list(_below(source, MAXIMUM_DEPTH))
    for path in paths:
        try:
            if path.suffix == SAFETENSORS_SUFFIX:
                surveyed.files.append(_safetensors(path))
            elif path.suffix in READ_SUFFIXES or path == source:
                surveyed.files.append(describe(read_torchfile(path), "file"))
        except UnknownFormatError:
            continue
        except SourceError as error:
            surveyed.errors.append(error)
    surveyed.errors += _defects(source, sorted({path.parent for path in paths} if source.is_dir() else ()))
    return surveyed


def _safetensors(path: Path) -> SourceFile:
    from zckpt.formats.safetensors.file import read_header

    slots, _, nbytes = read_header(path)
    return SourceFile(str(path), nbytes, "model", tensor_nbytes=sum(slot.nbytes for slot in slots.values()))


def _defects(source: Path, directories: Sequence[Path]) -> Iterator[SourceError]:
    """Yield what formats see that is wrong with directories which none of them recognises; each thing once."""
    known: set[str] = set()
    for directory in directories:
        for one in formats():
            try:
                found = one.find(Search(directory))
            except SourceError:
                continue
            if isinstance(found, NearMiss) and found.code is not None and found.message not in known:
                known.add(found.message)
                yield found.error(source)


def _below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_file():
            yield Path(entry.path)
        elif depth and entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), depth - 1)
