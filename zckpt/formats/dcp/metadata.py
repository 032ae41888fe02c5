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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.dcp.directory import NAME
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import DType, Layout, Object, brief, read_pickle

MAXIMUM_DEPTH = 64
"""Keys and indices in a path: real ones have five."""

MAXIMUM_NUMEL = (1 << 63) - 1
"""Elements of a tensor: torch counts in int64."""

Keys = tuple[str | int, ...]
"""Keys of dicts and indices of lists that lead to a value."""

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that is stored by itself, in elements."""

    offsets: Offsets
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its element type, whole shape, and the chunks that have any elements."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of a chunk or an object: a file of the directory, byte offset and length."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a `.metadata` says.

    Parameters
    ----------
    path : str
    tensors : dict of str to TensorEntry
        By key.
    objects : dict of str to Place
        Everything that is no tensor, by key.
    chunks : dict of (str, offsets) to Place
        Chunks by key and first index.
    paths : dict of str to tuple
        Of every key, in the order of the dict that was saved.
    unsaved : tuple of str
        Keys of that dict of which the directory has nothing.
    version : str or None
    globals : tuple of str
        That the pickle mentions.
    """

    path: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, Place]
    chunks: dict[tuple[str, Offsets], Place]
    paths: dict[str, Keys]
    unsaved: tuple[str, ...]
    version: str | None
    globals: tuple[str, ...]


def read_metadata(directory: Path) -> Metadata:
    """Read the `.metadata` of a directory.

    Raises
    ------
    DamagedFileError
        It is malformed, or does not say where something is.
    UnsupportedError
        Tensors that are not dense, of an unknown element type, or compressed.
    """
    path = str(directory / NAME)
    file = read_pickle(path)
    root = _object(file.root, "Metadata", path)
    entries = _mapping(root.get("state_dict_metadata"), "state_dict_metadata", path)
    places, chunks = _places(_mapping(root.get("storage_data"), "storage_data", path), path)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Place] = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not isinstance(entry, Object):
            raise _unexpected(path, "a tensor or an object by its key", key)
        if entry.qualified.endswith(".BytesStorageMetadata"):
            if key not in places:
                raise DamagedFileError(f"it does not say where {key} is", path=path)
            objects[key] = places[key]
        else:
            tensors[key] = _tensor(key, _object(entry, "TensorStorageMetadata", path), path)
    paths, unsaved = _paths(root.get("planner_data"), [str(key) for key in entries], path)
    version = root.get("version")
    return Metadata(
        path, tensors, objects, chunks, paths, unsaved, version if isinstance(version, str) else None, file.globals
    )


def _unexpected(path: str, expected: str, found: object) -> DamagedFileError:
    return DamagedFileError("unexpected content", path=path, expected=expected, found=brief(found))


def _object(node: object, name: str, path: str) -> Object:
    if not isinstance(node, Object) or not node.qualified.startswith("torch.distributed."):
        raise _unexpected(path, f"torch.distributed.checkpoint's {name}", node)
    if not node.qualified.endswith(f".{name}"):
        raise _unexpected(path, name, node)
    return node


def _mapping(node: object, name: str, path: str) -> Mapping[object, object]:
    if not isinstance(node, dict):
        raise _unexpected(path, f"a dict in {name}", node)
    return node


def _integers(node: object, what: str, path: str) -> tuple[int, ...]:
    if not isinstance(node, (tuple, list)) or not all(type(n) is int and 0 <= n <= MAXIMUM_NUMEL for n in node):
        raise _unexpected(path, f"the {what}, non-negative numbers", node)
    return tuple(node)


def _tensor(key: str, node: Object, path: str) -> TensorEntry:
    properties = _object(node.get("properties"), "TensorProperties", path)
    values = properties.state if isinstance(properties.state, (tuple, list)) else ()
    dtype, layout = (
        values[:2] if len(values) > 1 else (properties.get("dtype"), properties.get("layout", Layout("torch.strided")))
    )
    if not isinstance(dtype, DType) or dtype.name not in DTYPES:
        raise UnsupportedError(f"{key} has an unknown element type", path=path, found=brief(dtype))
    if isinstance(layout, Layout) and layout.name != "torch.strided":
        raise UnsupportedError(f"{key} is no dense tensor", path=path, found=layout.name)
    shape = _integers(node.get("size"), f"size of {key}", path)
    chunks = node.get("chunks")
    if math.prod(shape) > MAXIMUM_NUMEL or not isinstance(chunks, list):
        raise _unexpected(path, f"a tensor's size and chunks of {key}", (shape, chunks))
    found = {_chunk(key, one, shape, path) for one in chunks}  # replicas may be there twice
    return TensorEntry(dtype.name, shape, tuple(sorted((c for c in found if c.numel), key=lambda c: c.offsets)))


def _chunk(key: str, node: object, shape: tuple[int, ...], path: str) -> Chunk:
    one = _object(node, "ChunkStorageMetadata", path)
    offsets = _integers(one.get("offsets"), f"offsets of {key}", path)
    sizes = _integers(one.get("sizes"), f"sizes of {key}", path)
    inside = len(offsets) == len(sizes) == len(shape) and all(
        o + n <= whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise DamagedFileError(
            f"a chunk of {key} lies outside of it", path=path, expected=f"within {shape}", found=f"{sizes} at {offsets}"
        )
    return Chunk(offsets, sizes)


def _places(
    storage_data: Mapping[object, object], path: str
) -> tuple[dict[str, Place], dict[tuple[str, Offsets], Place]]:
    """Return where objects are, by key, and where chunks are, by key and offsets."""
    objects: dict[str, Place] = {}
    chunks: dict[tuple[str, Offsets], Place] = {}
    for index, info in storage_data.items():
        which = _object(index, "MetadataIndex", path)
        key, offsets = which.get("fqn"), which.get("offset")
        if not isinstance(key, str):
            raise _unexpected(path, "a key", key)
        place = _place(key, _object(info, "_StorageInfo", path), path)
        if offsets is None:
            objects[key] = place
        else:
            chunks[key, _integers(offsets, f"offsets of {key}", path)] = place
    return objects, chunks


def _place(key: str, info: Object, path: str) -> Place:
    transforms = info.get("transform_descriptors")
    if transforms:
        raise UnsupportedError(
            f"{key} was transformed when it was written, such as compressed",
            path=path,
            expected="bytes as they are",
            found=brief(transforms),
            advice="save it again without extensions",
        )
    file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(file, str) or not _stays_inside(file):
        raise DamagedFileError(f"{key} lies outside of the directory", path=path, found=brief(file))
    start, length = _integers((offset, nbytes), f"offset and length of {key}", path)
    return Place(file, start, length)


def _stays_inside(name: str) -> bool:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in name and ":" not in parts[0]


def _paths(planner_data: object, keys: list[str], path: str) -> tuple[dict[str, Keys], tuple[str, ...]]:
    """Return the path of every key, in the order of the saved dict, and the keys of which nothing was saved.

    `planner_data` has the whole dict in its order, while entries come rank by rank. A planner that does not flatten
    leaves it empty: keys are those of a flat dict then.
    """
    known = planner_data if isinstance(planner_data, dict) else {}
    needed = dict.fromkeys(keys)
    found: dict[str, Keys] = {}
    unsaved = []
    for key, value in known.items():
        if key not in needed:
            unsaved.append(str(key))
        elif _is_path(value):
            found[key] = value
        else:
            raise _unexpected(path, f"the path of {key}, keys and indices", value)
    for key in keys:
        found.setdefault(key, (key,))
    return found, tuple(unsaved)


def _is_path(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and 0 < len(value) <= MAXIMUM_DEPTH
        and all(type(step) is str or (type(step) is int and step >= 0) for step in value)
    )
