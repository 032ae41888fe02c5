"""Where tensors go in the safetensors files of a target: headers, and shards with an index. `file` says the form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from zckpt.engine.targets import Hole, Literal, TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.safetensors.file import MAXIMUM_HEADER_NBYTES, METADATA_KEY, PAIRS
from zckpt.immutable import immutable
from zckpt.state import Slot, nbytes_of
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.storage.disk import BLOCK_NBYTES

ALIGNMENT = 8
"""The header is padded with spaces so that the data starts on a multiple of this."""


@immutable
class Entry:
    """A tensor that is to be written: its name, what fills it, and its element type in the file."""

    name: str
    slot: Slot
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.slot.numel * itemsize(self.dtype)


def lay_out(name: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> TargetFile:
    """Return a safetensors file that holds the entries, in their order.

    `name`: file name within the target. Raises UnsupportedError: an element type that the format has no code for.
    """
    from zckpt.engine.congruence import residue

    starts = accumulate((entry.nbytes for entry in entries), initial=0)
    holes = [
        Hole(start, entry.name, entry.slot, entry.slot.whole, entry.dtype)
        for start, entry in zip(starts, entries, strict=False)
    ]
    tensors = [(entry.name, entry.dtype, entry.slot.shape) for entry in entries]
    header = header_of(tensors, metadata, start=residue(holes, ALIGNMENT))
    nbytes = nbytes_of(entries)
    holes = [replace(hole, offset=len(header) + hole.offset) for hole in holes]
    return TargetFile(name, len(header) + nbytes, [Literal(0, header)], holes)


def check_names(names: Sequence[str]) -> None:
    """Raise unless a file can hold tensors of these names.

    Raises UnsupportedError: a name is that of the format's own metadata, there twice, or not to be had in UTF-8.
    """
    seen: set[str] = set()
    for name in names:
        if name == METADATA_KEY:
            raise UnsupportedError(
                f"a tensor in a safetensors file cannot be called {METADATA_KEY}, as one in the source is",
                advice="write a .pt file, or convert to dcp",
            )
        if name in seen:
            raise UnsupportedError(f"two tensors in the safetensors file would be called {name[:80]!r}")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedError(
                f"the name {ascii(name)[:80]} has a lone surrogate, which a safetensors file cannot hold",
                advice="write a .pt file, or convert to dcp",
            ) from error
        seen.add(name)


def header_of(
    tensors: Sequence[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None,
    *,
    start: int | None = None,
    nbytes: int = 0,
) -> bytes:
    """Return what a file begins with that holds tensors (name, dtype, shape) end to end: the header and its length.

    It is padded with spaces, so that the tensors begin at a multiple of `ALIGNMENT`, or at `start` modulo a block; or
    at `nbytes`, as far as a header that was padded so may have as many. Raises UnsupportedError: an element type that
    the format has no code for, too many tensors, or a name that it cannot hold.
    """
    check_names([name for name, _, _ in tensors])
    header: dict[str, object] = {METADATA_KEY: {"format": "pt", **(metadata or {})}}  # which Hugging Face looks for
    at = 0
    for name, dtype, shape in tensors:
        code = DTYPES[dtype].safetensors
        if code is None:
            raise UnsupportedError(
                f"safetensors has no element type {dtype}, which {name} has", advice="write a .pt file"
            )
        end = at + math.prod(shape) * itemsize(dtype)
        sizes = [*shape[:-1], 2 * shape[-1]] if code == PAIRS and shape else list(shape)
        header[name] = {"dtype": code, "shape": sizes, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT if start is None else (start - 8 - len(text)) % BLOCK_NBYTES)
    if 0 < nbytes - 8 - len(text) < BLOCK_NBYTES:
        text += b" " * (nbytes - 8 - len(text))
    if len(text) > MAXIMUM_HEADER_NBYTES:
        raise UnsupportedError("too many tensors for one safetensors file", found=f"a header of {len(text)} bytes")
    return len(text).to_bytes(8, "little") + text


def lay_out_directory(
    entries: Sequence[Entry],
    maximum: int,
    *,
    indexed: bool = False,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
    folders: Mapping[str, str] = MappingProxyType({}),
) -> list[TargetFile]:
    """Return the files of a directory in Hugging Face's layout: one, or shards of at most `maximum` bytes and an index.

    A tensor larger than that has a shard to itself. Errors are those of `lay_out`.

    `maximum`: bytes; `indexed`: whether one file is a shard, too, and has an index; `stem`: what the files' names begin
    with; `metadata`: texts that each file's header has; `folders`: those in which a model of their own is made of the
    tensors whose names begin so, without that.
    """
    check_names([entry.name for entry in entries])
    own: list[TargetFile] = []
    for front, folder in folders.items():
        if part := [replace(one, name=one.name[len(front) :]) for one in entries if one.name.startswith(front)]:
            own.append(lay_out(f"{folder}/{stem}.safetensors", part, metadata))
    entries = [one for one in entries if not one.name.startswith(tuple(folders))]
    shards: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if shards[-1] and nbytes + entry.nbytes > maximum:
            shards.append([])
            nbytes = 0
        shards[-1].append(entry)
        nbytes += entry.nbytes
    if len(shards) == 1 and not indexed:
        return [lay_out(f"{stem}.safetensors", shards[0], metadata), *own]
    names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": nbytes_of(entries)},
        "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
    }
    text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    files = [lay_out(name, shard, metadata) for name, shard in zip(names, shards, strict=True)]
    return [*files, TargetFile.of(f"{stem}.safetensors.index.json", text), *own]
