"""The sharded backend `zarr` of megatron-core up to 0.9: a directory for each tensor, which is an array.

DIR/metadata.json, common.pt      as beside `torch_dist`
DIR/<key>/.zarray                 {"shape", "chunks", "dtype": "<f4", "compressor": null, "order": "C", ...}
DIR/<key>/1.0.0                   chunk 1 along the first axis: its elements end to end, of the size of all others, too
                                  where the array ends within it
DIR/<key>.sync/                   locks of ranks that wrote parts of one chunk
DIR/<key>/shard_<i>_<n>.pt        an object

Keys are those of `torch_dist`; the distributed optimizer's flattened state has the shape of the weights here.

Source: megatron-core 0.8, `strategies/zarr.py`; zarr's specification, version 2.
"""

from __future__ import annotations

import math
from itertools import product
from operator import mul
from pathlib import Path

from zckpt.codes import MISSING_FILE, TRUNCATED
from zckpt.errors import DamagedFileError, ShardError, UnsupportedError
from zckpt.formats.dcp.items import Items, ObjectItem
from zckpt.formats.megatron import torch_dist
from zckpt.formats.megatron.directory import Place, missing
from zckpt.formats.torch_files.tensors import TensorItem, describe
from zckpt.state import Checkpoint, Extent, Slot, SourceFile, Span, itemsize
from zckpt.state.boxes import row_major
from zckpt.state.inventory import IMPLIED, Claim
from zckpt.storage.files import folders_in, is_file, json_object
from zckpt.torchfile import read_torchfile

ARRAY, LOCKS, OBJECTS = ".zarray", ".sync", "shard_*.pt"

HEAD_NBYTES = 1 << 20

DTYPES = {
    "bfloat16": "bfloat16", "<f2": "float16", "<f4": "float32", "<f8": "float64", "|u1": "uint8", "|i1": "int8",
    "<i2": "int16", "<i4": "int32", "<i8": "int64", "|b1": "bool",
}  # fmt: skip

PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}
"""What Megatron-Core's arrays are, so that a chunk's elements are in its file as they are."""


def read(place: Place) -> Checkpoint:
    """Read the structure of a directory."""
    return torch_dist.read(place, _items)


def _items(checkpoint: Checkpoint, path: Path) -> Items:
    """Return the tensors and the objects of a directory by key, and add its files to a checkpoint's.

    Raises ShardError: a chunk is missing; DamagedFileError: an array's description is malformed, or a chunk is of
    another size; UnsupportedError: chunks are compressed, or otherwise not as they are in memory.
    """
    tensors: dict[str, TensorItem] = {}
    objects: dict[str, ObjectItem] = {}
    for folder in folders_in(path):
        if folder.name.endswith(LOCKS):
            for one in folder.iterdir():
                checkpoint.claims[str(one)] = Claim(IMPLIED, "a lock of ranks that wrote parts of one chunk")
            continue
        if is_file(folder / ARRAY):
            tensors[folder.name] = _array(checkpoint, folder)
        for one in sorted(folder.glob(OBJECTS)):
            file = read_torchfile(one)
            key = f"{folder.name}/{one.stem}"
            objects[key] = ObjectItem(key, file, file.root)
            checkpoint.files.append(describe(file, "object"))
    return Items(tensors, objects, [])


def _array(checkpoint: Checkpoint, folder: Path) -> TensorItem:
    shape, chunks, dtype = _described(folder / ARRAY)
    checkpoint.claims[str(folder / ARRAY)] = Claim(IMPLIED, "how an array is cut")
    grid = [-(-n // size) for n, size in zip(shape, chunks, strict=True)]
    there = {one.name for one in folder.iterdir()} - {ARRAY}
    nbytes, count = math.prod(chunks) * itemsize(dtype), math.prod(grid)
    if count > len(there):
        raise ShardError("chunks of an array are missing", path=folder, expected=f"{count:,} files",
                         found=f"{len(there):,}", code=MISSING_FILE)  # fmt: skip
    spans = []
    for index in product(*map(range, grid)):
        name = ".".join(map(str, index)) or "0"
        if name not in there:
            raise missing(f"file {name} is missing", folder, f"{count} chunks of an array")
        file = folder / name
        if file.stat().st_size != nbytes:
            raise DamagedFileError("does not have the size of a chunk", path=file, expected=f"{nbytes:,} bytes",
                                   found=f"{file.stat().st_size:,}", code=TRUNCATED)  # fmt: skip
        whole = Slot.at(str(file), 0, dtype, chunks, name)
        offsets = tuple(map(mul, index, chunks))
        sizes = tuple(min(size, n - at) for at, size, n in zip(offsets, chunks, shape, strict=True))
        used = math.prod(sizes)
        strides = None if sizes == chunks else row_major(chunks)
        spans.append(Span(Extent(offsets, sizes, 0, used), str(file), 0, dtype, strides))
        used *= itemsize(dtype)
        checkpoint.files.append(
            SourceFile(str(file), nbytes, "chunk", tensor_nbytes=used, unreferenced_nbytes=nbytes - used,
                       tree={folder.name: whole})
        )  # fmt: skip
    return TensorItem(folder.name, dtype, shape, tuple(spans), None, str(folder))


def _described(path: Path) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return shape, chunks and type of an array."""
    node = json_object(path, "description of an array", most=HEAD_NBYTES)
    both = [node.get(key) for key in ("shape", "chunks")]
    shape, chunks = (tuple(its) if isinstance(its, list) else ("",) for its in both)
    is_known = len(shape) == len(chunks) and all(type(n) is int for n in (*shape, *chunks))
    if not is_known or min(shape, default=0) < 0 or min(chunks, default=1) < 1:
        raise DamagedFileError("does not describe an array", path=path, expected="shape and chunks",
                               found=f"{both[0]} and {both[1]}"[:80])  # fmt: skip
    for key, value in PLAIN.items():
        if (given := node.get(key)) != value:
            told = given.get("id", given) if isinstance(given, dict) else given
            raise UnsupportedError(f"is a zarr array with {key} {str(told)[:40]}", path=path,
                                   expected=f"{key} {value}, as in Megatron-Core",
                                   advice="save it as torch_dist with the program that wrote it")  # fmt: skip
    dtype = DTYPES.get(str(node.get("dtype")))
    if dtype is None:
        raise UnsupportedError("is an array of an unknown type", path=path, expected=", ".join(DTYPES),
                               found=str(node.get("dtype"))[:40])  # fmt: skip
    return shape, chunks, dtype
