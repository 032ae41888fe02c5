"""safetensors: one file, or a directory of them with an index as Hugging Face lays it out.

8 bytes  length of the header, little-endian
header   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}
data     tensors end to end, without holes, in row-major order, little-endian

DIR/model-00001-of-0000N.safetensors ...
DIR/model.safetensors.index.json       {"metadata": {"total_size"}, "weight_map": {name: file}}
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from zckpt.codes import TRUNCATED
from zckpt.engine.targets import Hole, Literal, TargetFile
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.safetensors import unindexed
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Slot, SourceFile, Span
from zckpt.state.dtypes import DTYPES, FROM_SAFETENSORS, is_floating, itemsize
from zckpt.state.inventory import CARRIED, IMPLIED, Claim, Rule
from zckpt.storage.clone import BLOCK_NBYTES
from zckpt.storage.files import collector_paused, is_file, opened, read_at, read_whole

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
"""Of a model that is one file."""

OWN_NAMES = re.compile(
    r"(?:diffusion_pytorch_)?model(?:(?:-\d{5}-of-\d{5})?\.safetensors|\.safetensors\.index\.json)"
    r"|(?:optimizer|adapter_model)\.safetensors"
)
"""Names of the files of a directory that `consolidate` writes."""

METADATA_KEY = "__metadata__"

FOR_TORCH = {"format": "pt"}
"""What Hugging Face's programs look for in a header."""

RULES = (Rule((METADATA_KEY, "format"), IMPLIED, "which library the tensors are for"),)
"""Of the texts in a header."""


def aliases_in(texts: Mapping[str, str], slots: Mapping[str, Slot]) -> dict[str, str]:
    """Return the names of tied tensors that `safetensors.torch.save_model` left out, and those that it kept."""
    return {alias: owner for alias, owner in texts.items() if owner in slots and alias not in slots}


def rules_of(texts: Mapping[str, str], slots: Mapping[str, Slot]) -> tuple[Rule, ...]:
    """Return what is known of the texts in a header."""
    about = "another name of a tensor"
    return (*RULES, *(Rule((METADATA_KEY, alias), IMPLIED, about) for alias in aliases_in(texts, slots)))


MAXIMUM_HEADER_NBYTES = 100_000_000
"""The format's own bound."""

MAXIMUM_DIMENSIONS = 64
"""Of a tensor: torch stops there, and a shape of millions would be multiplied out again and again."""

MAXIMUM_INDEX_NBYTES = 1 << 30
"""Of an index: one of a million tensors has a tenth of it."""

ALIGNMENT = 8
"""The header is padded with spaces so that the data starts on a multiple of this."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is to be written: its name, what fills it, and its element type in the file."""

    name: str
    slot: Slot
    dtype: str
    label: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.slot.numel * itemsize(self.dtype)


def lay_out(name: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> TargetFile:
    """Return a safetensors file that holds the entries, in their order.

    Parameters
    ----------
    name : str
        File name within the target.
    entries : sequence of Entry
    metadata : mapping of str to str, optional

    Raises
    ------
    UnsupportedError
        An element type that the format has no code for.
    """
    from zckpt.engine.congruence import residue

    starts = accumulate((entry.nbytes for entry in entries), initial=0)
    holes = [
        Hole(start, entry.label, entry.slot, Extent.whole(entry.slot.shape), entry.dtype)
        for start, entry in zip(starts, entries, strict=False)
    ]
    tensors = [(entry.name, entry.dtype, entry.slot.shape) for entry in entries]
    header = header_of(tensors, metadata, start=residue(holes, ALIGNMENT))
    nbytes = sum(entry.nbytes for entry in entries)
    holes = [replace(hole, offset=len(header) + hole.offset) for hole in holes]
    return TargetFile(name, len(header) + nbytes, [Literal(0, header)], holes)


def check_names(names: Sequence[str]) -> None:
    """Raise unless a file can hold tensors of these names.

    Raises
    ------
    UnsupportedError
        A name is that of the format's own metadata, there twice, or not to be had in UTF-8.
    """
    seen: set[str] = set()
    for name in names:
        if name == METADATA_KEY:
            raise UnsupportedError(
                f"no tensor of a safetensors file can be called {METADATA_KEY}, as one of the source is",
                advice="write a .pt file, or to dcp",
            )
        if name in seen:
            raise UnsupportedError(f"two tensors of a safetensors file would be called {name[:80]!r}")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedError(
                f"the name {ascii(name)[:80]} holds a lone surrogate, which a safetensors file cannot",
                advice="write a .pt file, or to dcp",
            ) from error
        seen.add(name)


def header_of(
    tensors: Sequence[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    start: int | None = None,
    nbytes: int = 0,
) -> bytes:
    """Return what a file begins with that holds tensors (name, dtype, shape) end to end: the header and its length.

    It is padded with spaces, so that the tensors begin at a multiple of `ALIGNMENT`, or at `start` modulo a block; or
    at `nbytes`, as far as a header that was padded so may have as many.

    Raises
    ------
    UnsupportedError
        An element type that the format has no code for, too many tensors, or a name that it cannot hold.
    """
    check_names([name for name, _, _ in tensors])
    header: dict[str, object] = {METADATA_KEY: {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape in tensors:
        code = DTYPES[dtype].safetensors
        if code is None:
            raise UnsupportedError(
                f"safetensors has no element type {dtype}, which {name} has", advice="write a .pt file"
            )
        end = at + math.prod(shape) * itemsize(dtype)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
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
) -> list[TargetFile]:
    """Return the files of a directory in Hugging Face's layout: one, or shards of at most `maximum` bytes and an index.

    A tensor larger than that has a shard to itself. Errors are those of `lay_out`.

    Parameters
    ----------
    entries : sequence of Entry
    maximum : int, bytes
    indexed : bool
        Whether one file is a shard, too, and has an index.
    stem : str
        What the files' names begin with.
    metadata : mapping of str to str, optional
        Texts of every file's header.
    """
    check_names([entry.name for entry in entries])
    shards: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if shards[-1] and nbytes + entry.nbytes > maximum:
            shards.append([])
            nbytes = 0
        shards[-1].append(entry)
        nbytes += entry.nbytes
    if len(shards) == 1 and not indexed:
        return [lay_out(f"{stem}.safetensors", shards[0], metadata)]
    names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
    }
    text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    files = [lay_out(name, shard, metadata) for name, shard in zip(names, shards, strict=True)]
    return [*files, TargetFile(f"{stem}.safetensors.index.json", len(text), [Literal(0, text)])]


def read(source: Path) -> Checkpoint:
    """Read the structure of a safetensors file, or of a directory with an index.

    Raises
    ------
    DamagedFileError
        A header or the index is malformed, or sizes disagree.
    """
    checkpoint = Checkpoint(str(source), "safetensors")
    where: dict[str, str] = {}
    for path in _files(source):
        slots, metadata, nbytes = read_header(path)
        if "param_groups" in metadata:
            checkpoint.metadata["param_groups"] = metadata["param_groups"]
        checkpoint.files.append(
            SourceFile(
                str(path),
                nbytes,
                "model",
                tensor_nbytes=sum(slot.nbytes for slot in slots.values()),
                tree={METADATA_KEY: metadata, **slots},
                rules=(*rules_of(metadata, slots), *carry_texts(checkpoint, path, metadata, slots)),
            )
        )
        for name, slot in slots.items():
            if name in checkpoint.parameters or name in checkpoint.buffers:
                raise DamagedFileError(f"{name} is in two files", path=path)
            target = checkpoint.parameters if is_floating(slot.dtype) else checkpoint.buffers
            target[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot})
            where[name] = path.name
    if source.is_dir() and (source / INDEX_NAME).is_file():
        checkpoint.claims[str(source / INDEX_NAME)] = Claim(IMPLIED, "which file each tensor is in")
        for name, file in weight_map(source / INDEX_NAME).items():
            if where.get(name) != file:
                raise DamagedFileError(
                    f"{name} is not where the index says",
                    path=source / INDEX_NAME,
                    expected=file,
                    found=where.get(name),
                )
    return checkpoint


def carry_texts(
    checkpoint: Checkpoint, path: Path, texts: Mapping[str, str], slots: Mapping[str, Slot]
) -> Iterator[Rule]:
    """Keep the texts that a program has put into a header, and yield rules that say so; not those of an optimizer."""
    if "param_groups" in texts:
        return
    known = {"format", *aliases_in(texts, slots)}
    for key, text in texts.items():
        if key not in known:
            kept = key if checkpoint.metadata.get(key, text) == text else f"{path.stem}.{key}"
            checkpoint.metadata[kept] = text
            yield Rule((METADATA_KEY, key), CARRIED, kept)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / INDEX_NAME
    if not index.is_file():
        return [source / WHOLE_NAME] if is_file(source / WHOLE_NAME) else unindexed.shards(source)
    names = sorted(set(weight_map(index).values()))
    if any(Path(name).name != name for name in names):
        raise DamagedFileError("the index names a file outside its directory", path=index)
    return [source / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index has it."""
    text = read_whole(str(index), most=MAXIMUM_INDEX_NBYTES)
    try:
        found = json.loads(text)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError("unreadable index", path=index, expected="a weight_map", found=str(error)) from error
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise DamagedFileError("unreadable index", path=index, expected="a weight_map of file names")
    return found


def is_safetensors(path: Path) -> bool:
    """Tell whether a file or directory is this format, by its names and first bytes."""
    if path.is_dir():
        return is_file(path / INDEX_NAME) or is_file(path / WHOLE_NAME) or unindexed.is_there(path)
    with opened(str(path)) as descriptor:
        size = os.fstat(descriptor).st_size
        head = read_at(descriptor, 0, min(9, size), path=str(path))
    return len(head) == 9 and head[8:] == b"{" and 8 + int.from_bytes(head[:8], "little") <= size


def read_header(path: Path) -> tuple[dict[str, Slot], dict[str, str], int]:
    """Return the tensors of a file as slots, its metadata, and its size in bytes.

    Raises
    ------
    DamagedFileError
        The header is malformed, or tensors leave holes, overlap or reach beyond the file.
    """
    with opened(str(path)) as descriptor:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(read_at(descriptor, 0, 8, path=str(path)), "little")
        most = min(size - 8, MAXIMUM_HEADER_NBYTES)
        if length > most:
            code = TRUNCATED if most < length <= MAXIMUM_HEADER_NBYTES else None
            raise DamagedFileError(
                "unreadable header", path=path, expected=f"at most {most} bytes", found=length, code=code
            )
        text = read_at(descriptor, 8, length, path=str(path))
    try:
        with collector_paused():
            header = json.loads(text, object_pairs_hook=_without_duplicates)
        del text
        metadata = header.pop(METADATA_KEY, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise DamagedFileError("unreadable metadata", path=path, expected="texts by name")
        slots: dict[str, Any] = dict.fromkeys(header)  # in the order of the header
        extents: dict[tuple[int, ...], Extent] = {}
        at, file = 0, str(path)
        with collector_paused():
            for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
                slots[name], at = _slot(file, name, header.pop(name), 8 + length, at, extents)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError("unreadable header", path=path, found=f"{type(error).__name__}: {error}") from error
    if 8 + length + at != size:
        raise DamagedFileError(
            "the tensors do not fill the file",
            path=path,
            expected=f"{8 + length + at} bytes",
            found=size,
            code=TRUNCATED if size < 8 + length + at else None,
        )
    return slots, metadata, size


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _slot(
    path: str, name: str, one: Mapping[str, Any], start: int, at: int, extents: dict[tuple[int, ...], Extent]
) -> tuple[Slot, int]:
    """Return a tensor and the byte after it; tensors of one shape share an extent."""
    if len(one["shape"]) > MAXIMUM_DIMENSIONS:
        raise DamagedFileError(
            f"{name} has too many dimensions",
            path=path,
            expected=f"at most {MAXIMUM_DIMENSIONS}",
            found=len(one["shape"]),
        )
    dtype = FROM_SAFETENSORS.get(str(one["dtype"]))
    begin, end = one["data_offsets"]
    shape = tuple(one["shape"])
    if dtype is None or not all(type(n) is int and n >= 0 for n in shape):
        raise DamagedFileError(f"unreadable entry {name}", path=path, found=f"{one['dtype']} {shape}")
    nbytes = math.prod(shape) * itemsize(dtype)
    if (begin, end) != (at, at + nbytes) or type(begin) is not int or type(end) is not int:
        raise DamagedFileError(
            f"{name} is not where it should be",
            path=path,
            expected=f"bytes {at} to {at + nbytes}",
            found=f"{begin} to {end}",
        )
    extent = extents.get(shape) or extents.setdefault(shape, Extent.whole(shape))
    shape = extent.sizes
    span = Span(extent, path, start + at, dtype)
    return Slot(WEIGHT, dtype, shape, (span,) if nbytes else ()), end
