"""What of a run's spare is on a node: a directory in memory, which of it is whole, and which run it is of."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, TargetError, UsageError
from zckpt.formats.native.files import is_own
from zckpt.operations.small_file import write_text
from zckpt.storage.files import read_whole
from zckpt.training.run_place import RunPlace

SPARE = "spare.json"
"""Of the run's directory, and of a spare's."""

NODE = "node"

FORMAT = "zckpt spare"
VERSION = 1

MEMORY = Path("/dev/shm")  # noqa: S108  # what is made there is this user's alone
"""Where Linux has a file system in memory."""

MAXIMUM_NBYTES = 1 << 16
"""Of a `spare.json`."""

IDENTITY = re.compile(r"[0-9a-f]{1,64}")

UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
"""What a document raises that is none."""


@dataclass(frozen=True, slots=True)
class About:
    """What a `spare.json` says of a spare.

    `follows`: what `latest` may name, as `RunPlace.latest` says it: the save before it, and one that was going on then;
    `made`: when, by the clock of the first rank.
    """

    identity: str
    step: int
    world_size: int
    follows: tuple[str, ...]
    made: int


def unwritten(path: Path, error: OSError) -> TargetError:
    """Return an error of a file system in memory as one that says what a spare needs."""
    told = error
    if not isinstance(told, TargetError):
        told = TargetError("cannot be written", path=path, found=error.strerror)
    told.advice = "a spare takes twice what the ranks of this node and of the one before it save, or see replicate_in="
    return told


def made_directory(within: Path, run: str) -> Path:
    """Return the directory of a run's spares, which this user alone can read."""
    if not within.is_dir():
        raise UsageError(
            "there is no such directory for spares",
            path=within,
            advice="give replicate_in=, a directory that outlives the workers",
        )
    mine = within / f"zckpt-{os.getuid()}"
    try:
        mine.mkdir(mode=0o700, exist_ok=True)
        found = mine.lstat()
        is_alone = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if is_alone:
            (mine / run).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise unwritten(mine, error) from error
    if not is_alone:
        raise TargetError("is not a directory of this user alone", path=mine, advice="remove it")
    return mine / run


def node_of(directory: Path) -> str:
    """Return what tells this node from others: all who see this directory get the same."""
    path = directory / NODE
    own = directory / f".{NODE}-{secrets.token_hex(8)}"
    try:
        write_text(own, secrets.token_hex(16))
        with suppress(FileExistsError):
            os.link(own, path)
        return path.read_text()
    finally:
        own.unlink(missing_ok=True)


def spares(directory: Path) -> list[Path]:
    """Return the directories of spares, whole or not."""
    try:
        return sorted(path for path in directory.iterdir() if IDENTITY.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []


def files_of(directory: Path) -> list[str]:
    """Return the names of the files of a checkpoint that a spare has here."""
    return sorted(path.name for path in directory.iterdir() if is_own(path.name))


def text_of(about: About) -> str:
    """Return what the `spare.json` of a spare holds."""
    document = {
        "format": FORMAT, "version": VERSION, "id": about.identity, "step": about.step,
        "world_size": about.world_size, "follows": list(about.follows), "made": about.made,
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def read_about(directory: Path) -> About | None:
    """Return what is said of a spare that is whole; None: it is not, or this version does not know."""
    try:
        found = _document(directory / SPARE)
        follows = tuple(str(one) for one in found["follows"])
        return About(directory.name, int(found["step"]), int(found["world_size"]), follows, int(found["made"]))
    except (OSError, DamagedFileError, *UNREADABLE):
        return None


def _document(path: Path) -> dict[str, Any]:
    """Return a `spare.json`. Raises DamagedFileError, or one of `UNREADABLE`: it is none."""
    found = json.loads(read_whole(str(path), most=MAXIMUM_NBYTES))
    if (found["format"], found["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{found['format']}, version {found['version']}")
    return dict(found)


def identity_of_run(place: RunPlace) -> str:
    """Return the run that a directory is of, which it gets when it is asked first."""
    place.make()
    with place.seen() as directory:
        path = directory / SPARE
        if os.path.lexists(path):
            try:
                if IDENTITY.fullmatch(run := _document(path)["run"]):
                    return str(run)
                raise ValueError(run)
            except UNREADABLE as error:
                raise DamagedFileError(
                    "does not name a run",
                    path=path,
                    expected=f"{FORMAT}, version {VERSION}",
                    found=str(error),
                    advice="remove it",
                ) from error
    run = secrets.token_hex(16)
    write_text(place.checkpoint(SPARE), json.dumps({"format": FORMAT, "version": VERSION, "run": run}) + "\n")
    return run
