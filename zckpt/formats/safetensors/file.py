"""safetensors: one file, a directory of them as Hugging Face lays it out, or shards that torch leaves.

8 bytes  length of the header, little-endian
header   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}
data     tensors end to end, without holes, in row-major order, little-endian

DIR/model-00001-of-0000N.safetensors ...
DIR/model.safetensors.index.json       {"metadata": {"total_size"}, "weight_map": {name: file}}

Where the index was left behind, the names of shards tell which they are, and that all are there.

torch's HuggingFaceStorageWriter leaves pieces of tensors, and no index:

DIR/shard-00001-model-00001-of-00001.safetensors        rank 0's pieces
DIR/shard-00002-model-00001-of-00001.safetensors ...    a model may have several files for each rank

The header's metadata has under DCP_SHARDING_INFO, as JSON, where in its whole tensor each piece begins:
{name: {"saved_offsets": [int]}}. No file has the whole shape, nor how many shards there are: a tensor reaches as far as
its pieces do. Where torch has put them together, they are in `sharded/` below whole files with an index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from zckpt.codes import MISSING_FILE, TRUNCATED
from zckpt.errors import DamagedFileError, LayoutError, ShardError, about
from zckpt.evidence import is_trainable
from zckpt.formats.lost import stand_in
from zckpt.immutable import mutable
from zckpt.state import WEIGHT, Checkpoint, Extent, Shape, Slot, SourceFile, Span, are_sizes, are_texts, nbytes_of
from zckpt.state.dtypes import FROM_SAFETENSORS, itemsize
from zckpt.state.inventory import CARRIED, IMPLIED, Claim, Rule
from zckpt.storage.files import (
    FileRange,
    collector_paused,
    each_once,
    files_in,
    is_file,
    json_object,
    opened,
    read_head,
)

INDEX_NAME = "model.safetensors.index.json"
PAIRS = "F4"
"""The type of numbers of which torch's element is two, side by side."""

WHOLE_NAME = "model.safetensors"
"""Of a model that is one file."""

METADATA_KEY = "__metadata__"

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

DELTA, DELTA_NBYTES = b'"delta_encoding"', 4096
"""What the index of a change begins with, within so many bytes, whoever sorts its keys."""

MAXIMUM_INDEX_NBYTES = 1 << 30
"""Of an index: one of a million tensors has a tenth of it."""


def read(source: Path) -> Checkpoint:
    """Read the structure of a safetensors file, or of a directory with an index.

    Raises DamagedFileError: a header or the index is malformed, or sizes disagree.
    """
    checkpoint = Checkpoint(str(source), "safetensors")
    index = source / INDEX_NAME
    if source.is_file():
        paths = [source]
    elif index.is_file():
        paths = indexed_files(index)
    else:
        paths = [source / WHOLE_NAME] if is_file(source / WHOLE_NAME) else shards_in(source)
    where: dict[str, str] = {}
    for path in paths:
        slots, metadata = add_file(checkpoint, path)
        if "param_groups" in metadata:
            checkpoint.metadata["param_groups"] = metadata["param_groups"]
        for name, slot in slots.items():
            checkpoint.place(name, slot, trained=is_trainable(slot.dtype))
            where[name] = path.name
    if source.is_dir() and index.is_file():
        take_index(checkpoint, index, where)
    return checkpoint


def add_file(checkpoint: Checkpoint, path: Path, more: Sequence[Rule] = ()) -> tuple[dict[str, Slot], dict[str, str]]:
    """Add a file of a model to those of a checkpoint, which has none of its tensors yet; return tensors and texts.

    `more`: what texts are in files of this kind.
    """
    slots, texts, nbytes = read_header(path)
    rules = [*rules_of(texts, slots), *more]
    known = {rule.pattern[1] for rule in rules}
    for key, text in texts.items() if "param_groups" not in texts else ():  # not those of an optimizer
        if key not in known:  # what a program has put there
            kept = key if checkpoint.metadata.get(key, text) == text else f"{path.stem}.{key}"
            checkpoint.metadata[kept] = text
            rules.append(Rule((METADATA_KEY, key), CARRIED, kept))
    checkpoint.files.append(source_file(path, slots, texts, nbytes, rules))
    refuse_twice(checkpoint, slots, path)
    return slots, texts


def refuse_twice(checkpoint: Checkpoint, names: Iterable[str], path: Path) -> None:
    """Raise DamagedFileError if a file has tensors that another one has, too."""
    twice = next((name for name in names if name in checkpoint.parameters or name in checkpoint.buffers), None)
    if twice is not None:
        raise DamagedFileError(f"{twice} is in two files", path=path)


def take_index(checkpoint: Checkpoint, index: Path, where: Mapping[str, str]) -> None:
    """Note an index, which has to say where the files are in which tensors were found."""
    checkpoint.claims[str(index)] = Claim(IMPLIED, "which file each tensor is in")
    for name, file in weight_map(index).items():
        if where.get(name) != file and is_file(index.parent / file):
            raise DamagedFileError(
                f"{name} is not in the file that the index names", path=index, expected=file, found=where.get(name)
            )


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index names, which are beside it, without lost ones."""
    where = weight_map(index)
    paths = [index.parent / name for name in sorted(set(where.values()))]
    if any(path.parent != index.parent for path in paths):
        raise DamagedFileError("the index names a file outside its directory", path=index)
    for path in (path for path in paths if not is_file(path)):
        error = ShardError("is missing, but the index names it", path=path, code=MISSING_FILE)
        stand_in(error, path, (name for name, file in where.items() if file == path.name))
    return list(filter(is_file, paths))


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index has it."""
    found = json_object(index, "index", most=MAXIMUM_INDEX_NBYTES).get("weight_map")
    if not isinstance(found, dict) or not are_texts(found.values()):
        raise DamagedFileError("unreadable index", path=index, expected="a weight_map of file names")
    return found


def is_safetensors(path: Path) -> bool:
    """Tell whether a file or directory is this format, by its names and first bytes."""
    if path.is_dir():
        return (
            is_file(path / INDEX_NAME)
            or is_file(path / WHOLE_NAME)
            or any(one.suffix == ".safetensors" and SHARD.fullmatch(one.name) for one in path.iterdir())
        )
    with opened(path) as file:
        head = file.at(0, min(9, file.nbytes))
    return len(head) == 9 and head[8:] == b"{" and 8 + int.from_bytes(head[:8], "little") <= file.nbytes


def is_delta(path: Path) -> bool:
    """Tell a directory that has what changed in a model, and no model; `deltas` says the form."""
    index = path / INDEX_NAME
    return is_file(index) and DELTA in read_head(str(index), DELTA_NBYTES)


def source_file(
    path: Path, slots: Mapping[str, Slot], texts: Mapping[str, str], nbytes: int, rules: Sequence[Rule],
    role: str = "model",
) -> SourceFile:  # fmt: skip
    """Return a file as the inventory takes it, given what `read_header` returns."""
    used = nbytes_of(slots.values())
    tree = {METADATA_KEY: texts, **slots}
    return SourceFile(str(path), nbytes, role, tensor_nbytes=used, tree=tree, rules=tuple(rules))


def read_header(path: Path) -> tuple[dict[str, Slot], dict[str, str], int]:
    """Return the tensors of a file as slots, its metadata, and its size in bytes; errors are those of `header_in`."""
    with opened(path) as source:
        return (*header_in(source), source.nbytes)


def header_in(source: FileRange) -> tuple[dict[str, Slot], dict[str, str]]:
    """Return the tensors of a range of a file that is such a file as slots, and its metadata.

    Raises DamagedFileError: the header is malformed, or tensors leave holes, overlap or reach beyond the range.
    """
    size = source.nbytes
    length = int.from_bytes(source.at(0, 8), "little")
    most = min(size - 8, MAXIMUM_HEADER_NBYTES)
    if length > most:
        code = TRUNCATED if most < length <= MAXIMUM_HEADER_NBYTES else None
        raise DamagedFileError("unreadable header", expected=f"at most {most} bytes", found=length, code=code)
    text = source.at(8, length)
    try:
        with collector_paused():
            header = json.loads(text, object_pairs_hook=each_once)
        del text
        metadata = {} if (said := header.pop(METADATA_KEY, None)) is None else said  # mlx writes null where it has none
        if not isinstance(metadata, dict) or not are_texts(metadata.values()):
            raise DamagedFileError("unreadable metadata", expected="strings by name")
        slots: dict[str, Any] = dict.fromkeys(header)  # in the order of the header
        extents: dict[Shape, Extent] = {}
        at, start = 0, source.base + 8 + length
        with collector_paused():
            for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
                slots[name], at = _slot(source.path, name, header.pop(name), start, at, extents)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError("unreadable header", found=f"{type(error).__name__}: {error}") from error
    if 8 + length + at != size:
        raise DamagedFileError(
            "the tensors do not fill the file",
            expected=f"{8 + length + at} bytes",
            found=size,
            code=TRUNCATED if size < 8 + length + at else None,
        )
    return slots, metadata


def _slot(
    path: str, name: str, one: Mapping[str, Any], start: int, at: int, extents: dict[Shape, Extent]
) -> tuple[Slot, int]:
    """Return a tensor and the byte after it; tensors of one shape share an extent."""
    if len(one["shape"]) > MAXIMUM_DIMENSIONS:
        raise DamagedFileError(
            f"{name} has too many dimensions", expected=f"at most {MAXIMUM_DIMENSIONS}", found=len(one["shape"])
        )
    dtype = FROM_SAFETENSORS.get(str(one["dtype"]))
    begin, end = one["data_offsets"]
    shape = tuple(one["shape"])
    if dtype is None or not are_sizes(shape):
        raise DamagedFileError(f"unreadable entry {name}", found=f"{one['dtype']} {shape}")
    if one["dtype"] == PAIRS and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = math.prod(shape) * itemsize(dtype)
    if (begin, end) != (at, at + nbytes) or type(begin) is not int or type(end) is not int:
        raise DamagedFileError(
            f"{name} has the wrong offsets", expected=f"bytes {at} to {at + nbytes}", found=f"{begin} to {end}"
        )
    extent = extents.get(shape) or extents.setdefault(shape, Extent.whole(shape))
    shape = extent.sizes
    span = Span(extent, path, start + at, dtype)
    return Slot(WEIGHT, dtype, shape, (span,) if nbytes else ()), end


SHARD = re.compile(r"((?:ft-|(?:diffusion_)?pytorch_)?model)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")


def shards_in(source: Path, suffix: str = "safetensors") -> list[Path]:
    """Return the shards in a directory, in their order. Raises ShardError: they are not all that their names count."""
    every = [(match, one) for one in sorted(source.iterdir()) if (match := SHARD.fullmatch(one.name))]
    found = {match.groups()[:3]: one for match, one in every if match[4] == suffix}
    kinds = sorted({(stem, count) for stem, _, count in found})
    if len(kinds) != 1:
        several = ", ".join(f"{stem}-*-of-{count}" for stem, count in kinds)
        raise ShardError(
            "there are shards of several models, but no index",
            path=source,
            expected="shards of one model",
            found=several,
        )
    [(stem, count)] = kinds
    wanted = [f"{number:05d}" for number in range(1, int(count) + 1)]
    missing = [number for number in wanted if (stem, number, count) not in found]
    if missing or len(found) != len(wanted):
        raise ShardError(
            "without an index, exactly all shards must exist",
            path=source,
            expected=f"{len(wanted)} files {stem}-*-of-{count}.{suffix}",
            found=f"{len(found)}" + (f", without {stem}-{missing[0]}-of-{count}.{suffix}" if missing else ""),
        )
    return list(found.values())


SHARDING_KEY, OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"
PIECE_RULES = (
    Rule((METADATA_KEY, SHARDING_KEY), IMPLIED, "where each piece begins"),
    Rule((METADATA_KEY, "DCP_VERSION"), IMPLIED, "which version of the writer"),
)
"""Of the texts in a shard's header."""

_SHARD = re.compile(r"shard-([0-9]{1,9})-model-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


@mutable
class Pieces:
    """A tensor whose pieces are being collected: its type, how far they reach, and spans by where they begin."""

    dtype: str
    reach: Shape
    spans: dict[Shape, Span] = field(default_factory=dict)


def is_sharded(path: Path) -> bool:
    """Tell whether a directory holds such shards; whole files beside them are the model once more.

    Where the first one's header is malformed, these are the model. Raises DamagedFileError: there are none.
    """
    try:
        return path.is_dir() and any(SHARDING_KEY in read_header(one)[1] for one in _files(path)[:1])
    except DamagedFileError:
        if is_safetensors(path):
            return False
        raise


def read_shards(path: Path) -> Checkpoint:
    """Read the structure of a directory of shards.

    Raises DamagedFileError: a header is malformed; ShardError: a shard is missing, as far as the others show it;
    LayoutError: two pieces begin at the same element of a tensor.
    """
    checkpoint = Checkpoint(str(path), "safetensors")
    tensors: dict[str, Pieces] = {}
    files = _files(path)
    for file in files:
        slots, metadata = add_file(checkpoint, file, PIECE_RULES)
        _collect(tensors, slots, metadata, file)
        if (rank := _SHARD.fullmatch(file.name)) is not None:
            checkpoint.files[-1] = replace(checkpoint.files[-1], dp_rank=int(rank[1]) - 1)
    numbers = sorted({int(found[1]) for file in files if (found := _SHARD.fullmatch(file.name))})
    for name, pieces in tensors.items():
        covered = sum(span.extent.numel for span in pieces.spans.values())
        if covered != math.prod(pieces.reach):
            missing = sorted(set(range(1, (numbers or [0])[-1])) - set(numbers))
            raise ShardError(
                f"the pieces of {name} do not cover it",
                path=path,
                expected=f"{math.prod(pieces.reach)} elements",
                found=covered,
                advice=f"shard {missing[0]} is missing" if missing else "a shard is missing",
            )
        spans = tuple(pieces.spans[offsets] for offsets in sorted(pieces.spans))
        checkpoint.place(name, Slot(WEIGHT, pieces.dtype, pieces.reach, spans), trained=is_trainable(pieces.dtype))
    checkpoint.world_size = max(len(numbers), 1)
    checkpoint.details["shards"] = numbers
    checkpoint.warnings.append(
        f"the files do not say how many shards there were: {len(numbers)} are read, and a missing last one would go "
        "unnoticed"
    )
    return checkpoint


def _files(path: Path) -> list[Path]:
    return [path / name for name in files_in(path) if _SHARD.fullmatch(name)]


def offsets_in(slots: Mapping[str, Slot], metadata: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the first index of each tensor of a file in its whole tensor; raise DamagedFileError: it does not say."""
    message = "it does not say which pieces of tensors it holds"
    try:
        said = json.loads(metadata[SHARDING_KEY])
        found = {name: tuple(said[name][OFFSETS_KEY]) for name in slots}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(message, found=f"{type(error).__name__}: {error}") from error
    for name, its in found.items():
        if len(its) != len(slots[name].shape) or not are_sizes(its):
            raise DamagedFileError(message, found=f"the offsets of {name} are {its}")
    return found


def _collect(tensors: dict[str, Pieces], slots: Mapping[str, Slot], metadata: Mapping[str, Any], file: Path) -> None:
    """Add the tensors of one file."""
    with about(file):
        offsets = offsets_in(slots, metadata)
    for name, slot in slots.items():
        pieces = tensors.setdefault(name, Pieces(slot.dtype, (0,) * len(slot.shape)))
        if (pieces.dtype, len(pieces.reach)) != (slot.dtype, len(slot.shape)):
            raise LayoutError(
                f"{name} has another type or number of dimensions than in another shard", path=file, found=slot.dtype
            )
        end = tuple(start + size for start, size in zip(offsets[name], slot.shape, strict=True))
        pieces.reach = tuple(map(max, pieces.reach, end))
        for span in slot.spans:  # none where it is empty
            if offsets[name] in pieces.spans:
                raise LayoutError(f"{name} has two pieces at {offsets[name]}", path=file)
            extent = Extent(offsets[name], slot.shape, 0, slot.numel)
            pieces.spans[offsets[name]] = Span(extent, span.path, span.offset, span.dtype)
