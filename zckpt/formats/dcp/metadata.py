"""`.metadata`: which tensors and objects a directory of torch's DCP holds, in which pieces, and where each lies.

Metadata
|-- state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata
|-- planner_data          key -> path, the keys and indices that lead to it in the dict that was saved
|-- storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
`-- version               since torch 2.7

A pickle, of which nothing is executed. Keys are paths joined with dots, and names have dots themselves: only
`planner_data` tells one from the other. Strides in it are local ones and chunks come in any order; neither is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about
from zckpt.formats.dcp.chunks import NOWHERE, OBJECT, UNUSED, Chunks, Entry
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.torch_files.tensors import as_mapping
from zckpt.immutable import immutable
from zckpt.state import Shape, dict_of, list_of
from zckpt.state.boxes import Box, is_within
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import DType, Layout, Object, brief, read_pickle

MAXIMUM_DEPTH = 64
"""Keys and indices in a path: real ones have five."""

MAXIMUM_NUMEL = (1 << 63) - 1
"""Elements of a tensor: torch counts in int64."""

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
"""Where Megatron-Core 0.15 has a class derived from `Metadata`, MCoreMetadata."""

OLMO = "olmo_core.distributed.checkpoint."
"""Where OLMo-core 3.0 has a `_StorageInfo` of its own, with the same fields."""

Keys = tuple[str | int, ...]
"""Keys of dicts and indices of lists that lead to a value."""

Offsets = Shape


@immutable
class Metadata:
    """What a `.metadata` says."""

    path: str
    tensors: dict[str, Entry]  # by key
    chunks: Chunks  # of all of them, and of all that is no tensor
    paths: dict[str, Keys]  # of every key, in the order of the dict that was saved
    unsaved: tuple[str, ...]  # keys of that dict of which the directory has nothing
    version: str | None


def read_metadata(directory: Path) -> Metadata:
    """Read the `.metadata` of a directory.

    Raises DamagedFileError: it is malformed, or does not say where something is; LayoutError: chunks of a tensor begin
    at the same place; UnsupportedError: tensors that are not dense, of an unknown element type, or compressed.
    """
    path = str(directory / NAME)
    file = read_pickle(path)
    with about(path):
        root = _object(file.root, "Metadata")
        entries = as_mapping(root.get("state_dict_metadata"), expected="a dict in state_dict_metadata")
        chunks, keys = Chunks(directory), list(entries)
        tensors: dict[str, Entry] = {}

        numbers: dict[str, dict[Offsets | None, int]] = {}  # of items by key and first index
        for key, entry in _drained(entries):
            if not isinstance(key, str) or not isinstance(entry, Object):
                raise _unexpected("a tensor or an object by its key", key)
            if entry.qualified.endswith(".BytesStorageMetadata"):
                numbers[key] = {None: chunks.add(key, OBJECT).first}
            else:
                tensors[key] = _tensor(key, _object(entry, "TensorStorageMetadata"), chunks)
                firsts = [chunks.box(number)[0] for number in tensors[key].numbers]
                if (twice := next((one for one, after in pairwise(firsts) if one == after), None)) is not None:
                    raise LayoutError(f"two chunks of {key} begin at {twice}")
                numbers[key] = dict(zip(firsts, tensors[key].numbers, strict=True))
        _place(as_mapping(root.get("storage_data"), expected="a dict in storage_data"), chunks, numbers)
        for key, its in numbers.items():
            if None in its and chunks.file[its[None]] == NOWHERE:
                raise DamagedFileError(f"does not say where {key} is")
        paths, unsaved = _paths(root.get("planner_data"), list(map(str, keys)))
        version = root.get("version")
        said = version if isinstance(version, str) else None
        return Metadata(path, tensors, chunks, paths, unsaved, said)


def _unexpected(expected: str, found: object) -> DamagedFileError:
    return DamagedFileError("unexpected content", expected=expected, found=brief(found))


def _object(node: object, name: str) -> Object:
    if not isinstance(node, Object) or not node.qualified.startswith(("torch.distributed.", MEGATRON, OLMO)):
        raise _unexpected(f"torch.distributed.checkpoint's {name}", node)
    if not node.qualified.endswith((f".{name}", f".MCore{name}")):
        raise _unexpected(name, node)
    return node


def _drained(entries: dict[object, object]) -> Iterator[tuple[object, object]]:
    """Yield what a dict has, which then has it no more: of many items, what is made of them takes the tree's memory."""
    keys = list(entries)[::-1]
    while keys:
        key = keys.pop()
        yield key, entries.pop(key)


def _integers(node: object, what: str) -> Shape:
    if not isinstance(node, (tuple, list)) or not all(type(n) is int and 0 <= n <= MAXIMUM_NUMEL for n in node):
        raise _unexpected(f"the {what}, non-negative numbers", node)
    return tuple(node)


def _tensor(key: str, node: Object, chunks: Chunks) -> Entry:
    properties = _object(node.get("properties"), "TensorProperties")
    values = list_of(properties.state)
    dtype, layout = (
        values[:2] if len(values) > 1 else (properties.get("dtype"), properties.get("layout", Layout("torch.strided")))
    )
    if not isinstance(dtype, DType) or dtype.name not in DTYPES:
        raise UnsupportedError(f"{key} has an unknown element type", found=brief(dtype))
    if isinstance(layout, Layout) and layout.name != "torch.strided":
        raise UnsupportedError(f"{key} is not a dense tensor", found=layout.name)
    shape = _integers(node.get("size"), f"size of {key}")
    listed = node.get("chunks")
    if math.prod(shape) > MAXIMUM_NUMEL or not isinstance(listed, list):
        raise _unexpected(f"a tensor's size and chunks of {key}", (shape, listed))
    found = set[Box]()  # replicas may be there twice
    for chunk in listed:
        one = _object(chunk, "ChunkStorageMetadata")
        offsets = _integers(one.get("offsets"), f"offsets of {key}")
        sizes = _integers(one.get("sizes"), f"sizes of {key}")
        if not is_within((offsets, sizes), shape):
            raise DamagedFileError(
                f"a chunk of {key} lies outside the tensor", expected=f"within {shape}", found=f"{sizes} at {offsets}"
            )
        if math.prod(sizes):
            found.add((offsets, sizes))
    return chunks.add(key, dtype.name, shape, sorted(found))


def _place(storage_data: dict[object, object], chunks: Chunks, numbers: dict[str, dict[Offsets | None, int]]) -> None:
    """Say where items are, of which `numbers` has those that are needed; chunks besides these are added."""
    for index, info in _drained(storage_data):
        which, where = _object(index, "MetadataIndex"), _object(info, "_StorageInfo")
        key, first = which.get("fqn"), which.get("offset")
        if not isinstance(key, str):
            raise _unexpected("a key", key)
        if transforms := where.get("transform_descriptors"):
            raise UnsupportedError(
                f"{key} was transformed (for example compressed) when it was written",
                expected="untransformed bytes",
                found=brief(transforms),
                advice="save it again without extensions",
            )
        file, offset, nbytes = where.get("relative_path"), where.get("offset"), where.get("length")
        parts = PurePosixPath(file.replace("\\", "/")).parts if isinstance(file, str) else ()
        leaves = not parts or parts[0] == "/" or ":" in parts[0] or ".." in parts
        if not isinstance(file, str) or leaves or "\0" in file:
            raise DamagedFileError(f"{key} lies outside of the directory", found=brief(file))
        start, length = _integers((offset, nbytes), f"offset and length of {key}")
        offsets = None if first is None else _integers(first, f"offsets of {key}")
        its = numbers.setdefault(key, {})
        if offsets is not None and offsets not in its:
            its[offsets] = chunks.add(key, UNUSED).first
        if offsets in its:
            chunks.put(its[offsets], file, start, length)


def _paths(planner_data: object, keys: list[str]) -> tuple[dict[str, Keys], tuple[str, ...]]:
    """Return the path of every key, in the order of the saved dict, and the keys of which nothing was saved.

    `planner_data` has the whole dict in its order, while entries come rank by rank. A planner that does not flatten
    leaves it empty: keys are those of a flat dict then.
    """
    known = dict_of(planner_data)
    needed = dict.fromkeys(keys)
    found: dict[str, Keys] = {}
    unsaved = []
    for key, value in known.items():
        if key not in needed:
            unsaved.append(str(key))
        elif (
            isinstance(value, tuple)
            and 0 < len(value) <= MAXIMUM_DEPTH
            and all(type(step) is str or (type(step) is int and step >= 0) for step in value)
        ):
            found[key] = value
        else:
            raise _unexpected(f"the path of {key}, keys and indices", value)
    for key in keys:
        found.setdefault(key, (key,))
    return found, tuple(unsaved)
