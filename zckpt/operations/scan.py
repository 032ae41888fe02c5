"""What every pickle in a directory or file would import and call, graded. Opens no checkpoint, and runs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from zckpt.errors import SourceError, ZckptError
from zckpt.formats.companions import unreadable
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.metadata import NOWHERE, read_metadata
from zckpt.immutable import immutable
from zckpt.operations.options import Place, Scanning, Unpack, shares
from zckpt.state import Document, Result, by_key
from zckpt.state.boxes import merge, without
from zckpt.storage.files import FileRange, is_file, opened
from zckpt.torchfile.grades import UNKNOWN, worst
from zckpt.torchfile.scanning import HEADER, Scanner

ITEMS = ".distcp"
"""The suffix of files of items, which only a `.metadata` tells apart."""

Items = Mapping[str, Sequence[tuple[int, int, str]]]
"""Where items lie, by the path of their file: offset, length, key."""


@immutable(kw_only=True)
class Scanned(Result):
    """What pickles name.

    Parameters
    ----------
    source : str
    grade : str
        The worst of all findings: `data`, `known`, `unknown` or `dangerous`.
    files, pickles : int
        That were looked at.
    findings : list of dict
        One for each global of a pickle: `file`, `record` (where in it), `grade`, `global`, which `program` needs it,
        how often it is `named` and `called`. Where something is odd about a file there is a `message`, and no global.
    """

    source: str
    grade: str
    files: int
    pickles: int
    findings: list[Document]


@shares(Scanning)
def scan(source: Place, **_shared: Unpack[Scanning]) -> Scanned:
    """Tell what each pickle would import and call, in every file whatever it is called, and how far that is trusted.

    Parameters
    ----------
    source : path-like
        A file, or a directory, which is looked at with all that is below it.
    **shared

    Raises
    ------
    SourceError
        There is nothing, or a file cannot be read.
    """
    root = Path(source)
    findings: list[Document] = []
    files = pickles = 0
    for path, found in scan_files(_files(root)):
        files, pickles = files + 1, pickles + len(found.pickles)
        file = path.relative_to(root).as_posix() if path != root else path.name
        for odd in found.oddities:
            findings.append({"file": file, **asdict(odd), "global": None, "program": None, "named": 0, "called": 0})
        for one in found.mentions:
            values = asdict(one)
            values["global"] = f"{values.pop('module')}.{values.pop('name')}"
            findings.append({"file": file, **values, "message": None})
    return Scanned(
        source=str(source),
        grade=worst(str(one["grade"]) for one in findings),
        files=files,
        pickles=pickles,
        findings=findings,
    )


def scan_files(paths: Iterable[Path]) -> Iterator[tuple[Path, Scanner]]:
    """Look at all of each file: at its items, where it has some, and at whatever lies between them."""
    items: dict[Path, Items] = {}
    for path in paths:
        if path.parent not in items:
            items = {path.parent: items_of(path.parent)}
        scanner = Scanner()
        if not is_file(path):
            scanner.odd("", UNKNOWN, "is no regular file, or a link to a directory, and is not looked at")
            yield path, scanner
            continue
        its = items[path.parent].get(str(path), ())
        with opened(path) as whole:
            if its or (path.suffix == ITEMS and whole.read(0, min(4, whole.nbytes)) == HEADER):
                ranges = [(low, high, key) for low, high, key in its if high <= whole.nbytes]
                for low, high, key in ranges:
                    scanner.look(FileRange(whole.descriptor, whole.path, low, high - low), key)
                if not its:
                    scanner.odd("", UNKNOWN, f"no {NAME} says where its items are")
                for low, high in without([(0, whole.nbytes)], merge((low, high) for low, high, _ in ranges)):
                    between = FileRange(whole.descriptor, whole.path, low, high - low)
                    scanner.physical(between, f"bytes {low} to {high}", 0)
            else:
                scanner.look(whole)
        yield path, scanner


def _files(root: Path) -> Iterator[Path]:
    """Yield the files below a directory, and links to directories, which are not followed."""
    if not root.is_dir():
        if not root.exists():
            raise SourceError("does not exist", path=root)
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        folders.sort()
        yield from (here / name for name in sorted([*names, *(one for one in folders if (here / one).is_symlink())]))


def items_of(directory: Path) -> Items:
    """Return where the items of a directory of DCP lie; of one that is none, or damaged, nothing."""
    if not is_file(directory / NAME):
        return {}
    try:
        chunks = read_metadata(directory).chunks
    except ZckptError:
        return {}
    return by_key(
        (chunks.paths[file], (offset, offset + nbytes, chunks.entry(number).key))
        for number, file in enumerate(chunks.file)
        if file != NOWHERE
        for offset, nbytes in [chunks.range(number)]
    )
