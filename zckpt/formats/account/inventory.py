"""The inventory of a checkpoint that was opened: all files, and of each that was read all records and leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from zckpt.formats.account.files import file_items
from zckpt.formats.account.ranges import MANY, Coverage, Known, shares
from zckpt.formats.account.trees import FileAccount, Taken, taken
from zckpt.state import Checkpoint, SourceFile
from zckpt.state.inventory import FILE, FOREIGN, LEFT_OUT, STATE, Claim, Inventory, Item
from zckpt.storage.files import collector_paused

_Account = tuple[list[Item], dict[str, int]]
"""What a file holds, and how many of its bytes have each fate."""


@collector_paused()
def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Return what became of everything that a checkpoint's files hold. Reads no tensor.

    Parameters
    ----------
    checkpoint : Checkpoint
        As `open_checkpoint` returned it: not one whose slots were changed.

    Returns
    -------
    Inventory
        What is left out comes last.
    """
    found = Inventory()
    known, values = Coverage(checkpoint), taken(checkpoint)
    root = os.path.realpath(checkpoint.opened or checkpoint.source)
    places = [os.path.realpath(file.path) for file in checkpoint.files]
    read = {real: shown(file.path, real, root) for file, real in zip(checkpoint.files, places, strict=True)}
    before: dict[object, _Account] = {}
    for file, real in zip(checkpoint.files, places, strict=True):
        name = read[real]
        if file.path in checkpoint.leftovers:
            found.items.append(Item(name, "", FILE, FOREIGN, checkpoint.leftovers[file.path], file.nbytes))
            continue
        if file.tree is None:
            claim = checkpoint.claims.get(file.path, Claim(STATE, "read whole: what it does not know is an error"))
            found.items.append(Item(name, "", FILE, claim.fate, claim.about, file.nbytes))
            found.nbytes[name] = {claim.fate: file.nbytes}
            continue
        items, found.nbytes[name] = _account(file, name, known.of(file.path), values, before)
        found.items += items
    found.items += file_items(checkpoint, read)
    found.items.sort(key=lambda item: item.fate == LEFT_OUT)  # which keeps the order of the others
    return found


def _account(
    file: SourceFile, name: str, known: Mapping[str, Known], values: Taken, before: dict[object, _Account]
) -> _Account:
    """Return the items of a file that was read, and its bytes by fate; those of one that is alike if there is any."""
    key = None
    if file.path not in values.paths and sum(len(one.ranges) + len(one.merged) for one in known.values()) < MANY:
        bytes_of = tuple((fate, tuple(one.ranges), *_digests(one)) for fate, one in sorted(known.items()))
        key = id(file.tree), id(file.records), file.nbytes, file.role, file.rules, bytes_of
        if key in before:
            items, nbytes = before[key]
            return [replace(item, file=name) for item in items], dict(nbytes)
    account = FileAccount(file, name, known, values)
    found = account.items(), shares(file.nbytes, account.ranges)
    if key is not None:
        before[key] = found
    return found


def _digests(known: Known) -> Iterator[tuple[str, bytes]]:
    """Yield each slot whose ranges are columns, and what tells them from others: the columns may be long."""
    for slot, ranges in known.cut:
        yield slot, blake2b(ranges.tobytes(), digest_size=16).digest()


def shown(path: str, real: str, root: str) -> str:
    """Return a file's name within the directory that was opened; of others the path. `real` and `root` are resolved."""
    inside = os.path.relpath(real, root)
    return Path(path).name if inside == "." else path if inside.startswith("..") else Path(inside).as_posix()
