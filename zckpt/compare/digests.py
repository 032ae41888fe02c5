"""A fingerprint, the digests that it consists of, and the file that holds them: the same for every format and cut.

What is digested, for each parameter and buffer by its canonical name:

    weight     element type, shape, and elements; where a format leaves it out, the master, rounded
    master     unless it is the weight itself: a format may keep one of them
    KEY        each slot of the optimizer, and each single value as a number, however it is stored

Elements are digested in leaves of `LEAF_NUMEL` elements of the flattened tensor, little-endian, each NaN as the same
one: XXH3-128 of each leaf, and of the leaves' digests one after the other. The fingerprint is that of all lines
[NAME, ENTRY, VALUE], JSON each, sorted. Names tied to others are left out, and so is state that is each rank's own,
which is of one number of ranks only. `docs/diff.md` specifies it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from zckpt.compare.logical import named, own_weight, parameter_values, single
from zckpt.compare.weights import one_nan
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.cast import Array, cast
from zckpt.engine.scan import SlotSet, scan
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import MASTER, WEIGHT, Brief, Checkpoint, Slot, are_texts
from zckpt.storage.files import read_whole
from zckpt.storage.ownership import FINGERPRINT_NAME

VERSION = "zckpt1"
"""What a fingerprint begins with; another rule would have another."""

LEAF_NUMEL = 1 << 18
"""Elements of a leaf: of 32 bits, a mebibyte, which a cache holds."""

LEAVES_PER_BLOCK = 2
"""Read at once."""

FILE_NAME = FINGERPRINT_NAME

MAXIMUM_NBYTES = 1 << 30
"""A larger file of digests is none."""

Entries = dict[str, dict[str, str]]
"""For each name its entries: digests with type and shape, and single values as text."""


@immutable
class Fingerprint(Brief):
    """A fingerprint and what it is of.

    `text`: `zckpt1:` and 32 hexadecimal digits; `entries`: for each name its entries; two checkpoints with one
    fingerprint have the same.
    """

    text: str
    entries: Entries

    def as_dict(self) -> dict[str, object]:
        """Return the fingerprint as JSON-able data, the document of `--json`, and what a file of digests holds."""
        return {"fingerprint": self.text, "leaf_numel": LEAF_NUMEL, "entries": self.entries}


@immutable
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
    """Return where the digests of a checkpoint are stored: in its directory, or next to its file."""
    source = Path(checkpoint.source)
    return source / FILE_NAME if source.is_dir() else digests_path_of_file(source)


def digests_path_of_file(file: Path) -> Path:
    """Return where the digests of a checkpoint are stored that is one file."""
    return file.with_name(f"{file.name}.{FILE_NAME}")


def bytes_of(found: Fingerprint) -> bytes:
    """Return what a file of digests holds; half a character of a name is written as JSON's escape of it."""
    text = json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def read_digests(path: str | os.PathLike[str]) -> Fingerprint:
    """Return the fingerprint that a file, or a checkpoint's directory, holds. Raises SourceError: there is none."""
    file = Path(path)
    if file.is_dir():
        file /= FILE_NAME
        if not file.is_file():
            raise SourceError("holds no digests", path=path, advice="record them with `zckpt fingerprint --write`")
    data = read_whole(str(file), most=MAXIMUM_NBYTES)
    try:
        stored = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError("unreadable", path=file, expected="digests that zckpt wrote", found=error) from error
    match stored:
        case {"fingerprint": str(text), "entries": dict(entries)} if all(map(_are_entries, entries.values())):
            pass
        case _:
            raise DamagedFileError("holds no digests", path=file, expected="what `zckpt fingerprint --write` writes")
    if not text.startswith(f"{VERSION}:"):
        raise UnsupportedError(
            "has another version",
            path=file,
            expected=VERSION,
            found=text[:20],
            advice="use a newer zckpt, or record it again with `zckpt fingerprint --write`",
        )
    if text != root(entries):
        raise DamagedFileError("changed since it was written", path=file, expected=text, found=root(entries))
    return Fingerprint(text, entries)


def _are_entries(found: object) -> bool:
    return isinstance(found, dict) and are_texts(found.values())


def changes(expected: Fingerprint, found: Fingerprint) -> list[Change]:
    """Return what differs between two fingerprints, by name and entry."""
    if expected.text == found.text:
        return []
    different = []
    for name in dict.fromkeys([*expected.entries, *found.entries]):
        ours, theirs = expected.entries.get(name), found.entries.get(name)
        if ours is None or theirs is None:
            different.append(Change(name, None, *("there" if one is not None else None for one in (ours, theirs))))
            continue
        entries = ((entry, ours.get(entry), theirs.get(entry)) for entry in dict.fromkeys([*ours, *theirs]))
        different += [Change(name, entry, was, now) for entry, was, now in entries if was != now]
    return different


def digest_share(
    checkpoint: Checkpoint,
    *,
    share: tuple[int, int] = (0, 1),
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    direct: bool = False,
) -> Entries:
    """Return the entries of some of the slots, and all single values: several can share the work.

    Parameters
    ----------
    checkpoint : Checkpoint
    share : (int, int)
        Which of how many.
    memory : int, bytes
        Upper bound of what the buffers of all workers take together; those of one are needed in any case.
    reporter : Reporter, optional
    direct : bool
        Read past the page cache, where the file systems can.

    Raises
    ------
    UnsupportedError
        Optimizer state that belongs to no parameter.
    SourceError
        A file cannot be read.
    """
    entries: Entries = {}
    chosen: list[tuple[str, str, Slot, str | None]] = []  # and the type of a weight that is the master, rounded
    for name, parameter in named(checkpoint).items():
        if parameter.tied_to is not None:
            continue
        entries[name] = {}
        weight, master = own_weight(parameter), parameter.master
        if weight is not None:
            chosen.append((name, WEIGHT, weight, None))
        if master is not None:
            chosen.append((name, MASTER, master, parameter.dtype if weight is None else None))
        for key, value in parameter_values(checkpoint, parameter).items():
            if isinstance(value, Slot) and (value.shape or value.dtype.startswith("complex")):
                chosen.append((name, key, value, None))
                continue
            number = single(value)  # as text that does not depend on how it was stored: 5 and 5.0 are one
            whole = int(number) if isinstance(number, float) and number.is_integer() else number
            entries[name][key] = json.dumps(whole, sort_keys=True)
    chosen = chosen[share[0] :: share[1]]
    trees = [[xxhash.xxh3_128(), xxhash.xxh3_128()] for _ in chosen]
    sets = [SlotSet(f"{slot.name}/{name}", (slot,), (slot.dtype,)) for name, _, slot, _ in chosen]
    look = partial(digest_block, [rounded for *_, rounded in chosen])
    numel = LEAF_NUMEL * LEAVES_PER_BLOCK
    for index, digests in scan(sets, look, numel=numel, memory=memory, reporter=reporter, direct=direct):
        for number, digest in enumerate(digests):
            trees[index][number].update(digest)
    for (name, entry, slot, rounded), tree in zip(chosen, trees, strict=True):
        shape = list(slot.shape)
        entries[name][entry] = f"{slot.dtype} {shape} {tree[0].hexdigest()}"
        if rounded is not None:
            entries[name][WEIGHT] = f"{rounded} {shape} {tree[1].hexdigest()}"
    return entries


def put_together(shares: Iterable[Entries]) -> Fingerprint:
    """Return the fingerprint of which there are the entries of all shares."""
    entries: Entries = {}
    for one in shares:
        for name, found in one.items():
            entries.setdefault(name, {}).update(found)
    for found in entries.values():
        if found.get(MASTER) == found.get(WEIGHT):  # a format may keep one of them
            found.pop(MASTER, None)
    return Fingerprint(root(entries), {name: dict(sorted(entries[name].items())) for name in sorted(entries)})


def digest_block(rounded: Sequence[str | None], index: int, _start: int, arrays: Sequence[Array]) -> list[bytes]:
    """Return the digests of the leaves of a block, and of its elements as they round where the weight is not there."""
    (array,) = arrays
    dtype = rounded[index]
    return [_leaves(array)] if dtype is None else [_leaves(array), _leaves(cast(array, dtype))]


def _leaves(array: Array) -> bytes:
    data = one_nan(array)
    leaves = (data[start : start + LEAF_NUMEL] for start in range(0, len(data), LEAF_NUMEL))
    return b"".join(xxhash.xxh3_128_digest(leaf.view(np.uint8).data) for leaf in leaves)
