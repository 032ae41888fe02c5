"""Shards of safetensors that torch's HuggingFaceStorageWriter leaves: pieces of tensors, and no index.

DIR/shard-00001-model-00001-of-00001.safetensors        rank 0's pieces
DIR/shard-00002-model-00001-of-00001.safetensors ...    a model may have several files for each rank

The header's metadata has under DCP_SHARDING_INFO, as JSON, where in its whole tensor each piece begins:
{name: {"saved_offsets": [int]}}. No file has the whole shape, nor how many shards there are: a tensor reaches as far as
its pieces do. Where torch has put them together, they are in `sharded/` below whole files with an index, which
`file` reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, LayoutError, ShardError, about
from zckpt.evidence import is_trainable
from zckpt.formats.safetensors.file import INDEX_NAME, METADATA_KEY, add_file, read_header
from zckpt.immutable import mutable
from zckpt.state import WEIGHT, Checkpoint, Extent, Shape, Slot, Span, are_sizes
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.storage.files import files_in

SUFFIX = ".safetensors"
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
    """Tell whether a directory holds such shards and no index."""
    if not path.is_dir() or (path / INDEX_NAME).is_file():
        return False
    return any(_SHARD.fullmatch(one.name) and SHARDING_KEY in read_header(one)[1] for one in _files(path)[:1])


def read(path: Path) -> Checkpoint:
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
    return [path / name for name in files_in(path) if name.endswith(SUFFIX)]


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
