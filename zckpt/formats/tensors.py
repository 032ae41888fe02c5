"""Tensors of a torch file as slots and spans."""

from __future__ import annotations

from zckpt.state import Extent, Slot, SourceFile, Span
from zckpt.torchfile import FromFile, Tensor, TorchFile, walk_tensors
from zckpt.torchfile.plain_parts import PlainParts


def slot_of(name: str, tensor: Tensor, path: str) -> Slot:
    """Return a slot that one tensor holds as a whole, in whatever order its elements are stored."""
    return Slot(name, tensor.dtype, tensor.shape, (span_of(tensor, path),) if tensor.numel else ())


def span_of(tensor: Tensor, path: str) -> Span:
    """Return the place of all elements of a tensor."""
    strides = None if tensor.is_contiguous else tensor.strides
    return Span(Extent.whole(tensor.shape), path, tensor.offset, tensor.dtype, strides, tensor.byteorder)


def describe(file: TorchFile, role: str, dp_rank: int | None = None, mp_rank: int | None = None) -> SourceFile:
    """Return a file's size, its share of tensor bytes, and the bytes of storages that no tensor uses."""
    used: dict[str, list[tuple[int, int]]] = {}
    for _, tensor in walk_tensors(file.root):
        if tensor.numel:
            reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
            start = tensor.storage_offset * tensor.itemsize
            used.setdefault(tensor.storage.key, []).append((start, start + reach * tensor.itemsize))
    total = sum(storage.nbytes for storage in file.storages.values())
    covered = sum(_union(ranges) for ranges in used.values())
    return SourceFile(file.path, file.nbytes, role, dp_rank, mp_rank, covered, total - covered, file.globals)


def carried(file: TorchFile, node: object) -> object:
    """Return a part of a file's tree as `Checkpoint.metadata` keeps it: plain data as it is, else with its file."""
    known = PlainParts() if file.plain is None else file.plain
    return node if node in known else FromFile.of(file, node)


def _union(ranges: list[tuple[int, int]]) -> int:
    covered, end = 0, 0
    for low, high in sorted(ranges):
        covered += max(high - max(low, end), 0)
        end = max(end, high)
    return covered
