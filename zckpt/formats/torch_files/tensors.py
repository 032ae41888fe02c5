"""Tensors of a torch file as slots and spans, and one-element tensors as numbers.

Knows which tensors have values that their bytes alone do not give. No adapter makes a span of a tensor by itself: the
bytes of a lazy view would come out as if they were its values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zckpt.errors import DamagedFileError, UnsupportedError, about, listed
from zckpt.immutable import immutable
from zckpt.state import (
    WEIGHT,
    Checkpoint,
    Extent,
    Scalar,
    Shape,
    Slot,
    SourceFile,
    Span,
    are_texts,
    by_key,
    dict_of,
    nbytes_of,
)
from zckpt.state.boxes import merge, total
from zckpt.state.dtypes import is_floating, is_negatable, itemsize
from zckpt.state.inventory import Rule
from zckpt.state.views import reshape
from zckpt.storage.files import opened
from zckpt.torchfile import (
    FromFile,
    InPieces,
    Mentioned,
    Namespace,
    Object,
    PlainParts,
    Tensor,
    TorchFile,
    has_tensors,
    node_of,
    put_back,
    walk_tensors,
)

Value = TypeVar("Value")
Key = TypeVar("Key")

PLAIN_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
"""Classes of tensors of which the elements are the values. What another class makes of its elements only it knows."""

QUANTISED = frozenset({"quint8", "qint8", "qint32", "quint4x2", "quint2x4"})
"""Element types that mean something with a scale and a zero point only."""

TORCHAO = "torchao"
"""The key by which what `zckpt.save` says of a slot that torchao has quantised is told from other values."""

BITS = ("conj", "neg")
"""Of torch's lazy views, in a tensor's metadata."""


def slot_of(name: str, tensor: Tensor, path: str) -> Slot:
    """Return a slot that one tensor holds as a whole, in whatever order its elements are stored.

    Raises UnsupportedError: its bytes alone do not give its values.
    """
    if isinstance(tensor.storage, InPieces):
        return replace(tensor.storage.slot, name=name)
    return Slot(name, tensor.dtype, tensor.shape, (span_of(tensor, path),) if tensor.numel else ())


def refuse_taken(keys: Iterable[object], *taken: str) -> None:
    """Raise UnsupportedError if an optimizer's state has a key under which slots are of the model."""
    for key in keys:
        if key in (WEIGHT, *taken):
            raise UnsupportedError(f"a slot is named {key!r}, which has another meaning")


def span_of(tensor: Tensor, path: str, extent: Extent | None = None, *, first: int = 0) -> Span:
    """Return where elements of a tensor are.

    `extent`: what the elements are, beginning with `first` in the tensor's order. By default those of the whole tensor;
    `first`: only of a contiguous tensor. Raises UnsupportedError: its bytes alone do not give its values.
    """
    strides = None if tensor.is_contiguous else tensor.strides
    if strides is not None and extent is not None and (first or len(extent.sizes) != len(strides)):
        raise UnsupportedError("holds a flat tensor that is not contiguous", path=path, found=f"strides {strides}")
    offset = tensor.offset + first * tensor.itemsize
    return Span(
        extent or Extent.whole(tensor.shape),
        path,
        offset,
        tensor.dtype,
        strides,
        tensor.byteorder,
        unresolved(tensor, path),
    )


def slot_of_storage(mentioned: Mentioned) -> Slot:
    """Return a slot that a whole storage of a file is, its bytes little-endian.

    Raises UnsupportedError: it is not known which file it is in, or which elements its bytes are.
    """
    storage, dtype = mentioned.storage, mentioned.dtype
    if isinstance(storage, InPieces):
        return reshape(storage.slot, (storage.slot.numel,))
    if mentioned.path is None:
        raise UnsupportedError(f"a tensor of an unnamed file cannot be written: storage {storage.key!r}")
    shape = (storage.nbytes // itemsize(dtype),)
    return Slot.at(mentioned.path, storage.offset, dtype, shape, "storage", mentioned.byteorder)


def unresolved(tensor: Tensor, path: str) -> tuple[str, ...]:
    """Return what is to be done to a tensor's elements to have its values.

    Raises UnsupportedError: it has values that cannot be had so.
    """
    if tensor.subclass is not None and tensor.subclass.qualified not in PLAIN_CLASSES:
        raise _not_plain(f"a tensor of class {tensor.subclass}", path)
    if tensor.dtype in QUANTISED:
        raise _not_plain(f"a tensor of {tensor.dtype} without its scale", path)
    if not tensor.metadata:
        return ()
    strange = [key for key in tensor.metadata if key not in BITS]
    if strange:
        raise _not_plain(f"a tensor with {', '.join(map(repr, strange))[:80]} in its metadata", path)
    bits = tuple(bit for bit in BITS if tensor.metadata.get(bit))
    if bits and not is_negatable(tensor.dtype):
        raise _not_plain(f"a tensor of {tensor.dtype} with {' and '.join(bits)} set", path)
    return bits


def _not_plain(what: str, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"holds {what}, whose bytes alone do not determine its values",
        path=path,
        expected="dense tensors of class torch.Tensor",
        advice="save its values as a plain tensor in the program that wrote it",
    )


@immutable
class TensorItem:
    """A tensor of the saved dict."""

    key: str
    dtype: str
    shape: Shape
    spans: Sequence[Span]  # one for each chunk
    whole: Tensor | None  # the node of the tensor, where one chunk is all of it
    path: str  # the file of that

    def slot(self, name: str) -> Slot:
        """Return the tensor as a slot."""
        return Slot(name, self.dtype, self.shape, self.spans)


def holds_tensors(value: object) -> bool:
    """Tell whether a value that an optimizer keeps of a parameter is several tensors, or one of a class of its own.

    Such are quantised states: codes and scales, which mean nothing one without the other, or what says of slots that
    they are such.
    """
    return isinstance(value, FromFile) or description(value) is not None or has_tensors(value)


def with_file(file: TorchFile, values: Mapping[Key, object]) -> dict[Key, object]:
    """Return values of a file's tree; those that hold tensors with the file that these are in."""
    return {key: FromFile.of(file, one) if holds_tensors(one) else one for key, one in values.items()}


def description(value: object) -> Mapping[str, Any] | None:
    """Return what `zckpt.save` says of a slot that torchao has quantised, if that is what a parameter's value is."""
    node = node_of(value)
    return node if isinstance(node, Mapping) and TORCHAO in node else None


def refuse_trees(checkpoint: Checkpoint, what: str, advice: str) -> None:
    """Raise UnsupportedError, naming some, if a checkpoint has states that a target has no place for."""
    every = checkpoint.all_parameters
    found = [f"{key} of {one.name}" for one in every for key, value in one.state.items() if holds_tensors(value)]
    if found:
        raise UnsupportedError(
            f"holds state that is not a plain tensor (for example quantised), which {what} cannot hold",
            path=checkpoint.source,
            found=listed(found),
            advice=advice,
        )


def identity_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what two names of a file have in common if they are one tensor: the same elements of the same bytes."""
    bits = tuple(bit for bit in BITS if (tensor.metadata or {}).get(bit))
    return (tensor.storage.key, tensor.dtype, tensor.storage_offset, tensor.shape, tensor.strides, bits)


def by_name(mapping: Mapping[object, Value], path: str | None = None) -> dict[str, Value]:
    """Return a dict of a file with its keys as text. Raises UnsupportedError: two keys are one name: 1 and "1"."""
    found: dict[str, Value] = {}
    for key, value in mapping.items():
        name = str(key)
        if name in found:
            raise UnsupportedError(
                f"two keys give the name {name[:80]!r}", path=path, expected="names that are strings"
            )
        found[name] = value
    return found


def as_mapping(node: object, path: str | None = None, expected: str = "a dict") -> dict[object, object]:
    """Return a node of a file that has to be a dict. Raises DamagedFileError: it is something else."""
    if not isinstance(node, dict):
        raise DamagedFileError("unexpected content", path=path, expected=expected, found=type(node).__name__)
    return node


def arguments_of(value: object) -> dict[object, object]:
    """Return the attributes of a program's arguments; of anything else none."""
    node = node_of(value)
    return dict_of(node.state if isinstance(node, Object) else node)


def arguments_with(value: object, others: Mapping[str, object]) -> object:
    """Return a program's arguments with other values of those that are among them."""
    node, known = node_of(value), arguments_of(value)
    changed = known | {key: value for key, value in others.items() if key in known}
    if changed == known:
        return value
    if isinstance(node, Object):
        return put_back(value, replace(node, state=changed))
    return put_back(value, Namespace(changed) if isinstance(node, Namespace) else changed)


def as_names(node: object) -> list[str]:
    """Return a node of a file that has to be a list of names. Raises DamagedFileError: it is something else."""
    if not isinstance(node, list) or not are_texts(node):
        raise DamagedFileError("unexpected content", expected="a list of names", found=type(node).__name__)
    return node


def describe(
    file: TorchFile,
    role: str,
    dp_rank: int | None = None,
    mp_rank: int | None = None,
    *,
    rules: Sequence[Rule] = (),
    known: dict[int, SourceFile] | None = None,
) -> SourceFile:
    """Return a file's size, its share of tensor bytes, the bytes of storages that no tensor uses, and its tree.

    `known`: what was said of files before, of which one that is alike need not be gone through again.
    """
    like = None if known is None else known.get(id(file.storages))
    if like is None:
        used = by_key((tensor.storage.key, tensor.reach) for _, tensor in walk_tensors(file.root) if tensor.numel)
        covered = sum(total(merge(ranges)) for ranges in used.values())
        like = SourceFile(
            file.path, file.nbytes, role, None, None, covered, nbytes_of(file.storages.values()) - covered,
            tree=file.root,
        )  # fmt: skip
        if known is not None:
            known[id(file.storages)] = like
    return replace(
        like, path=file.path, nbytes=file.nbytes, archive=file.archive, role=role, dp_rank=dp_rank, mp_rank=mp_rank,
        rules=tuple(rules), records=file.records,
    )  # fmt: skip


def carried(file: TorchFile, node: object) -> object:
    """Return a part of a file's tree as `Checkpoint.metadata` keeps it: plain data as it is, else with its file."""
    known = PlainParts() if file.plain is None else file.plain
    return node if node in known else FromFile.of(file, node)


_FORMATS = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "bfloat16": "f",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "?",
}


def read_scalars(path: str, tensors: list[Tensor]) -> list[Scalar]:
    """Read one-element tensors of one file.

    Raises UnsupportedError: an element type that is no number; DamagedFileError: the file ends too early.
    """
    if not tensors:
        return []
    found = []
    with opened(path) as file:
        for one in tensors:
            data, is_little = file.at(one.offset, one.itemsize), one.byteorder == "little"
            if one.dtype == "bfloat16":
                data = bytes(2) + data if is_little else data + bytes(2)
            with about(path):
                number: float | int | bool = struct.unpack(("<" if is_little else ">") + _format(one.dtype), data)[0]
                is_negated = "neg" in unresolved(one, path)
                if is_negated and not is_floating(one.dtype):
                    raise UnsupportedError(f"a single value of type {one.dtype} that is lazily negated")
            found.append(Scalar(-number if is_negated else number, one.dtype))
    return found


def encode(scalar: Scalar) -> bytes:
    """Return the bytes of a 0-d tensor that holds a single value, little-endian.

    Raises UnsupportedError: an element type that is no number.
    """
    data = struct.pack(f"<{_format(scalar.dtype)}", scalar.value)
    return data[2:] if scalar.dtype == "bfloat16" else data


def _format(dtype: str) -> str:
    """Return the format of a type's numbers; that of bfloat16 is of the float32 whose upper half it is."""
    if dtype not in _FORMATS:
        raise UnsupportedError(f"a single value of type {dtype}")
    return _FORMATS[dtype]


def scalars_in(values: Mapping[Key, object], path: str) -> dict[Key, Scalar]:
    """Return those that are 0-d tensors of a file, read file by file. `path`: of those that do not say theirs."""
    by_file: dict[str, dict[Key, Tensor]] = {}
    for key, value in values.items():
        one, file = (value.whole, value.path) if isinstance(value, TensorItem) else (value, path)
        if isinstance(one, Tensor) and one.shape == () and file:
            by_file.setdefault(file, {})[key] = one
    found: dict[Key, Scalar] = {}
    for file, its in by_file.items():
        found.update(zip(its, read_scalars(file, list(its.values())), strict=True))
    return found


def with_scalars(values: Mapping[Any, object], path: str) -> dict[str, object]:
    """Return a dict of a torch file with its 0-d tensors read (a learning rate may be one) and its keys as text."""
    scalars = scalars_in(values, path)
    return {str(key): scalars.get(key, value) for key, value in values.items()}
