"""A small file of text that says something of its neighbours, such as `latest`; on a file system, or in a store.

It is written whole or not at all, and takes the place of what was there.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.engine.plan import plan
from zckpt.engine.targets import TargetFile
from zckpt.errors import UsageError
from zckpt.operations.places import at_path
from zckpt.operations.target import write_target
from zckpt.storage.ownership import check_replaceable
from zckpt.storage.remote.addresses import address_of


def name_of(place: Path | str) -> str:
    """Return the last name of a path or URL.

    Raises UsageError: a URL without one: of a whole bucket.
    """
    if isinstance(place, Path):
        return place.name
    address = address_of(place)
    if not address.parts:
        raise UsageError("is not a directory with a name", path=address.shown, expected="SCHEME://HOST/.../NAME")
    return address.parts[-1]


def beside_it(place: Path | str, name: str) -> Path | str:
    """Return the place of a file in the directory that a path or URL is in; errors are those of `name_of`."""
    name_of(place)
    if isinstance(place, Path):
        return place.parent / name
    return f"{place.rstrip('/').rpartition('/')[0]}/{name}"


def check_text(place: Path | str) -> None:
    """Raise TargetError if what is there is no file that could be replaced."""
    with at_path(place, missing=True) as path:
        check_replaceable(path)


def write_text(place: Path | str, text: str) -> None:
    """Write a text. Raises TargetError: it cannot be written, or what is there is no file."""
    data = text.encode()
    with at_path(place, missing=True) as path:
        write_target(plan([TargetFile.of(path.name, data)]), path, overwrite=True)
