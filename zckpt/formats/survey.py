"""What is wrong with the files of a source that cannot be opened: of each file by itself, and of ranks together.

Opening stops at the first error. This goes on: every file that can be read is read, and what is wrong with the others
is told of each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import ShardError, SourceError, UnknownFormatError
from zckpt.formats import OWN_DOCUMENT, deepspeed
from zckpt.formats.tensors import describe
from zckpt.formats.universal.names import FOLDER
from zckpt.state import SourceFile
from zckpt.torchfile import read_torchfile

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"
DCP_SUFFIX = ".distcp"

MAXIMUM_DEPTH = 4
"""Folders below a source that are looked into: a universal checkpoint has two."""


@dataclass(slots=True)
class Survey:
    """Files that can be read, and errors about the others."""

    files: list[SourceFile] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)


def survey(source: Path, *, roots: Sequence[Path] = (), tag: str | None = None) -> Survey:
    """Read every file of a source by itself, and hold ranks against each other as far as they can be read.

    Parameters
    ----------
    source : Path
        A file or a directory that `open_checkpoint` could not open.
    roots : sequence of Path
    tag : str, optional
        As for `open_checkpoint`.
    """
    found = Survey()
    try:
        directory = _directory(source, tag)
        if source.is_file():
            _read_plain(found, [source])
        elif directory is not None:
            _read_own(found, directory)
        elif (tagged := deepspeed.find(source, roots=roots, tag=tag)) is not None and not _is_universal(source, tag):
            files, errors = deepspeed.survey(tagged)
            found.files += files
            found.errors += errors
        else:
            _read_others(found, source)
    except SourceError as error:
        found.errors.append(error)
    return found


def _directory(source: Path, tag: str | None) -> Path | None:
    """Return a directory of zckpt's own format that a source is or names."""
    from zckpt.formats import native

    if not source.is_dir():
        return None
    name = tag or deepspeed.latest_name(source) or ""
    inside = source / name if name not in ("", ".", "..") and Path(name).name == name else source
    return next((one for one in (inside, source) if os.path.isdir(one) and native.is_native(one)), None)  # noqa: PTH112  # pathlib raises where a name is too long


def _is_universal(source: Path, tag: str | None) -> bool:
    from zckpt.formats import universal

    return universal.find(source, tag=tag) is not None


def _read_plain(found: Survey, paths: Sequence[Path]) -> None:
    """Read torch and safetensors files; of others it is not said that they are none."""
    from zckpt.formats.safetensors_file import read_header

    for path in paths:
        try:
            if path.suffix == SAFETENSORS_SUFFIX:
                slots, _, nbytes = read_header(path)
                used = sum(slot.nbytes for slot in slots.values())
                found.files.append(SourceFile(str(path), nbytes, "model", tensor_nbytes=used))
            else:
                found.files.append(describe(read_torchfile(path), "file"))
        except UnknownFormatError:
            continue
        except SourceError as error:
            if path.parent.parent.name == FOLDER:  # of a universal checkpoint: the folder of a parameter
                error.parameters = (path.parent.name,)
            found.errors.append(error)


def _read_own(found: Survey, directory: Path) -> None:
    """Read a directory of zckpt's own format: the document, then each file that it lists."""
    from zckpt.formats.native.document import read_document
    from zckpt.formats.native.rank_file import open_rank_file

    document, nbytes = read_document(directory)
    found.files.append(SourceFile(str(directory / OWN_DOCUMENT), nbytes, "document"))
    listed = document.get("files")
    for rank, one in enumerate(listed if isinstance(listed, list) else []):
        name, size = (one.get("name"), one.get("nbytes")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(size, int) or Path(name).name != name:
            continue
        try:
            file = open_rank_file(directory / name, identity=str(document.get("id")), nbytes=size)
            found.files.append(SourceFile(file.path, file.nbytes, "rank", rank))
        except SourceError as error:
            error.ranks = error.ranks or (rank,)
            found.errors.append(error)


def _read_others(found: Survey, source: Path) -> None:
    """Read the files of a directory of any other format."""
    from zckpt.formats import dcp
    from zckpt.formats.dcp.items import faults
    from zckpt.formats.dcp.metadata import read_metadata

    paths = list(_below(source, MAXIMUM_DEPTH))
    _read_plain(found, [path for path in paths if path.suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)])
    directory = dcp.find(source)
    if directory is not None:
        for folder in directory.folders.values():
            found.errors += faults(folder, read_metadata(folder))
    elif any(path.suffix == DCP_SUFFIX for path in paths):
        found.errors.append(
            ShardError(
                "the file that says what is where is missing",
                path=source,
                expected=".metadata",
                advice="the save did not finish, or the file was not copied: its name begins with a dot",
                code=MISSING_FILE,
            )
        )


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
