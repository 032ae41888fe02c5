"""What the files of a source say of their own state: which can be read, and the checksums that they hold.

Opening stops at the first error. A survey goes on: every file that can be read is read, and what is wrong with the
others is said of each, and of ranks together. The checksums are the CRC-32 of each record of a torch archive, or a
format's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from zckpt.engine.checking import Checks, Sum
from zckpt.engine.plan import Plan
from zckpt.errors import SourceError, UnknownFormatError
from zckpt.formats.format import Format, Found, NearMiss, Search, Survey
from zckpt.formats.registry import find_format, formats
from zckpt.formats.suffixes import READ_SUFFIXES
from zckpt.formats.torch_files.tensors import describe
from zckpt.state import Checkpoint, SourceFile
from zckpt.storage.files import entries_of, leads_to_file, opened, read_head
from zckpt.torchfile import AlikeRecords, Record, read_archive, read_torchfile

SAFETENSORS_SUFFIX = ".safetensors"

MAXIMUM_DEPTH = 4
"""Folders below a source that are looked into: a universal checkpoint has two."""


def survey(search: Search) -> Survey:
    """Read every file of a source by itself, and hold ranks against each other as far as they can be read.

    `search`: for what `open_checkpoint` could not open.
    """
    asked: list[SourceError] = []
    unsure: list[tuple[Format, Found]] = []
    for one in formats():
        if not search.given <= one.takes:
            continue
        try:
            found = one.find(search)
        except SourceError as error:
            found = None
            asked.append(error)
        if not asked and not (isinstance(found, Found) and found.sure):
            unsure += [(one, found)] if isinstance(found, Found) else []
            continue
        surveyed = _of_format(one, search, found if isinstance(found, Found) else None) or survey_files(search.path)
        surveyed.errors += asked
        surveyed.format = one
        return surveyed
    for one, found in unsure:
        if (its := _of_format(one, search, found)) is not None:
            its.format = one
            return its
    return survey_files(search.path)


def _of_format(one: Format, search: Search, found: Found | None) -> Survey | None:
    try:
        return one.survey(search, found)
    except SourceError as error:
        return Survey(errors=[error])


def survey_files(source: Path) -> Survey:
    """Read all torch and safetensors files of a source; of others it is not said that they are none."""
    surveyed = Survey()
    paths = [source] if source.is_file() else list(_below(source, MAXIMUM_DEPTH))
    for path in paths:
        try:
            if path.suffix == SAFETENSORS_SUFFIX:
                from zckpt.formats.safetensors.file import read_header, source_file

                surveyed.files.append(source_file(path, *read_header(path), ()))
            elif path.suffix in READ_SUFFIXES or path == source:
                surveyed.files.append(describe(read_torchfile(path), "file"))
        except UnknownFormatError:
            continue
        except SourceError as error:
            surveyed.errors.append(error)
    # What formats see that is wrong with directories which none of them recognises; each thing once.
    known: set[str] = set()
    for directory in sorted({path.parent for path in paths} if source.is_dir() else ()):
        for one in formats():
            try:
                found = one.find(Search(directory))
            except SourceError:
                continue
            if isinstance(found, NearMiss) and found.code is not None and found.message not in known:
                known.add(found.message)
                surveyed.errors.append(found.error(source))
    return surveyed


def _below(directory: Path, depth: int) -> Iterator[Path]:
    for entry in entries_of(directory, lenient=True):
        if leads_to_file(entry):
            yield Path(entry.path)
        elif depth and entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), depth - 1)


ZIP = b"PK\3\4"

ALWAYS_NBYTES = 1 << 12
"""A record of at most this is always checked: it may be a step count, which was read when the source was opened."""


def checksums(file: SourceFile, owner: Format | None) -> list[Sum]:
    """Return the checksums of a file, by offset; none for one that has none (safetensors, JSON, legacy files).

    `owner`: whose file it is, if that is known. Raises SourceError: the file cannot be read, or the structure that
    states them is damaged.
    """
    found = None if owner is None else owner.checks(file)
    if found is None:  # that of each record of the torch archives in it, or that it is
        found = []
        for records in [file.records] if file.records else _records(file):
            filled = list(records.filled()) if isinstance(records, AlikeRecords) else records
            if any(crc for *_, crc in filled):  # `torch.serialization.skip_data` leaves room for data, and states 0
                found += [
                    Sum(name, file.path, offset, nbytes, crc, nbytes <= ALWAYS_NBYTES)
                    for name, offset, nbytes, crc in filled
                    if crc or not nbytes
                ]
    return sorted(found, key=lambda one: one.offset)


def _records(file: SourceFile) -> Iterator[Sequence[Record]]:
    is_archive = not file.archives and read_head(file.path, len(ZIP)) == ZIP
    for offset, nbytes in [(0, file.nbytes)] if is_archive else file.archives:
        with opened(file.path, offset, nbytes) as source:
            yield list(read_archive(source).values())


def source_checks(checkpoints: Checkpoint | Sequence[Checkpoint], plan: Plan | None = None) -> Checks:
    """Return the checks of all that a plan reads.

    `checkpoints`: the small records of their files are checked whether or not the plan reads them; `plan`: reads its
    files, and others that are copied as they are. None: only these are read. Raises SourceError: a file of the
    checkpoint cannot be read, or the structure that states its checksums is damaged.
    """
    several = [checkpoints] if isinstance(checkpoints, Checkpoint) else checkpoints
    every = dict.fromkeys(file.path for one in several for file in one.files)
    every |= dict.fromkeys(sorted(plan.sources if plan else ()))
    find = checksums_by_path(several)
    return Checks(one for path in every for one in find(path))


def checksums_by_path(checkpoints: Sequence[Checkpoint]) -> Callable[[str], list[Sum]]:
    """Return what finds the checksums of a file: one of these checkpoints, or another that is read with them.

    It raises SourceError where a file of a checkpoint cannot be read, or the structure that states its checksums is
    damaged; another file that cannot be read as its kind has none.
    """
    known = {file.path: (file, find_format(one.format)) for one in checkpoints for file in one.files}
    return partial(_checksums_of, known)


def _checksums_of(known: Mapping[str, tuple[SourceFile, Format | None]], path: str) -> list[Sum]:
    if path in known:
        return checksums(*known[path])
    try:
        return checksums(SourceFile(path, Path(path).stat().st_size, "other"), None)
    except (SourceError, OSError):
        return []
