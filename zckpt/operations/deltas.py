"""Versions of a model's weights as slime publishes them: made of two checkpoints, and applied to a model.

Memory holds a few tensors, of both sides. `zckpt.formats.safetensors.deltas` says the form.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np

from zckpt.engine import Reporter, reporting
from zckpt.errors import SourceError, UnsupportedError, UsageError, listed
from zckpt.formats.safetensors.deltas import (
    NAME,
    Bytes,
    Delta,
    chain,
    checksum,
    encode,
)
from zckpt.formats.safetensors.file import INDEX_NAME
from zckpt.formats.safetensors.layout import header_of
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Slot, Span
from zckpt.storage.ahead import ahead
from zckpt.storage.durable import written
from zckpt.storage.files import opened
from zckpt.storage.ownership import Owned, called, check_target

Item = TypeVar("Item")
Made = TypeVar("Made")

ALGORITHM = "xxh3-128"

SHARD_NBYTES = 1 << 29
"""Of what changed, in one file: engines read it whole."""

_OWNED = Owned(called(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json"))


@immutable
class _Change:
    """What is stored of a tensor, and the checksum of what it becomes."""

    name: str
    stored: bytes
    sum: str


def publish(
    tensors: Sequence[tuple[str, Slot, Slot]],
    read_slot: Callable[[Slot], Bytes],
    target: Path,
    encoding: str,
    *,
    overwrite: bool,
    dry_run: bool,
    reporter: Reporter | None,
) -> tuple[list[str], int]:
    """Write what changed in tensors (name, before, after); return the names of those that did, and bytes written.

    Raises UsageError: the target is not called as a version; UnsupportedError: a tensor is too large for the encoding.
    """
    match = NAME.fullmatch(target.name)
    if match is None or int(match[1]) == 0:
        raise UsageError("is not named like a version", path=target, expected="weight_v000001, or a later one")
    check_target(target, overwrite=overwrite, owned=_OWNED)

    def change(one: tuple[str, Slot, Slot]) -> tuple[_Change | None, int]:
        name, before, after = one
        new = read_slot(after)
        stored = encode(read_slot(before), new, encoding)
        return None if stored is None else _Change(name, stored, checksum(ALGORITHM)(new)), len(new)

    every = _made(change, tensors, sum(after.nbytes for _, _, after in tensors), reporter)
    changes = (one for one in every if one is not None)
    if dry_run:
        return sorted(one.name for one in changes), 0
    with written([target], overwrite=overwrite, owned=_OWNED) as [made], closing(every):
        shards, where, total = list[list[str]](), dict[str, str](), 0
        while True:
            some, nbytes = list[_Change](), 0
            for one in changes:
                some.append(one)
                nbytes += len(one.stored)
                if nbytes >= SHARD_NBYTES:
                    break
            if not some:
                break
            sums = {one.name: one.sum for one in some}
            head = header_of([(one.name, "uint8", (len(one.stored),)) for one in some], sums)
            with (made / str(len(shards))).open("xb") as out:
                total += sum(out.write(part) for part in (head, *(one.stored for one in some)))
            shards.append([*sums])
        for number, names in enumerate(shards):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            (made / str(number)).rename(made / file)
            where |= dict.fromkeys(names, file)
        about = {
            "version": f"{int(match[1]):06d}",
            "base_version": f"{int(match[1]) - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": ALGORITHM,
        }
        index = {"metadata": about, "weight_map": where}
        return sorted(where), total + (made / INDEX_NAME).write_bytes(json.dumps(index).encode())


def _made(
    make: Callable[[Item], tuple[Made, int]], items: Iterable[Item], total: int, reporter: Reporter | None
) -> Generator[Made, None, None]:
    """Yield what is made of each item, some ahead, and report how many bytes that was of."""
    with reporting(reporter, total) as progress, closing(ahead(make, items)) as every:
        for one, nbytes in every:
            progress.advance(nbytes)
            yield one


def pairs(base: Checkpoint, result: Checkpoint) -> list[tuple[str, Slot, Slot]]:
    """Return the weights of two checkpoints by name.

    Raises UnsupportedError: one has masters alone, as ZeRO-3 files them, or they are not of the same tensors.
    """
    for side in (base, result):
        masters = [one.name for one in side.owners if one.master and not one.weight]
        if masters:
            raise UnsupportedError(
                f"holds no weights of {listed(masters)}, but masters", path=side.named,
                advice="`zckpt consolidate --dtype keep` writes the weights; give its directory",
            )  # fmt: skip
    before, after = _weights(base), _weights(result)
    about = [{name: (slot.dtype, slot.shape) for name, slot in side.items()} for side in (before, after)]
    if about[0] != about[1]:
        name = min(name for name in about[0].keys() | about[1].keys() if about[0].get(name) != about[1].get(name))
        raise UnsupportedError(
            f"{name} differs in shape or type, so its changed bytes cannot be published", path=result.named,
            expected=about[0].get(name, "nothing"), found=about[1].get(name, "nothing"),
        )  # fmt: skip
    return [(name, slot, after[name]) for name, slot in before.items()]


def _weights(checkpoint: Checkpoint) -> dict[str, Slot]:
    return {one.name: one.weight for one in checkpoint.holders() if one.weight}


def apply_published(
    model: Checkpoint, last: Path, target: Path, *, overwrite: bool, dry_run: bool, reporter: Reporter | None
) -> tuple[list[str], int, int]:
    """Write a model's files as they are at a version; return the versions applied, how many files, and their bytes.

    Each tensor is held against the checksums of each version that changed it, with `dry_run`, too.

    Raises SourceError: the model is no directory of safetensors, a version is missing or damaged, or made of another
    model; TargetError: the target exists or cannot be written.
    """
    folder, slots = Path(model.source), _weights(model)
    if model.format != "safetensors" or not folder.is_dir():
        raise SourceError(
            "is not a model that a version can be applied to", path=folder, expected="a directory of safetensors"
        )
    by_name: dict[str, list[Delta]] = {}
    versions = chain(folder, last)
    for version in versions:
        for name in version.changed:
            if name not in slots or len(slots[name].spans) != 1 or Path(slots[name].spans[0].path).parent != folder:
                raise SourceError(f"has no tensor {name}, which version {version.version} changes", path=folder)
            by_name.setdefault(name, []).append(version)
    files = sorted(one for one in folder.iterdir() if one.is_file())
    names = {one.name for one in files}
    owned = Owned(lambda name: name in names)

    def change(name: str) -> tuple[tuple[Span, Bytes], int]:
        [span] = slots[name].spans
        with opened(span.path) as file:
            data = np.frombuffer(file.read(span.offset, slots[name].nbytes), np.uint8).copy()
        for version in by_name[name]:
            version.apply(name, data)
        return (span, data), len(data)

    check_target(target, overwrite=overwrite, owned=owned)
    changes = _made(change, by_name, sum(slots[name].nbytes for name in by_name), reporter)
    if dry_run:
        deque(changes, maxlen=0)
    else:
        with written([target], overwrite=overwrite, owned=owned) as [made], closing(changes):
            for one in files:
                shutil.copyfile(one, made / one.name)
            for span, data in changes:
                with (made / Path(span.path).name).open("r+b") as out:
                    out.seek(span.offset)
                    out.write(data.data)
    return [version.path.name for version in versions], len(files), sum(one.stat().st_size for one in files)
