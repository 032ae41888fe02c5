"""What tells a batch from any other: a digest of which bytes come from where, and of what is done to them. Pure.

Two batches with the same key write the same bytes to the same place, as long as the source files are what they were. So
what another run recorded under a key is done, whatever else is different about that run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from zckpt.engine.copy import ComputedPiece
from zckpt.engine.low_rank import Kept
from zckpt.engine.packs import Pack, PackedSlot
from zckpt.engine.plan import Copy
from zckpt.engine.targets import Literal
from zckpt.engine.together import CutPiece
from zckpt.errors import shown
from zckpt.state import CutFiles, Slot

if TYPE_CHECKING:
    from zckpt.engine.computed import Function
    from zckpt.engine.write import AnyPiece, Batch

KEY_NBYTES = 16
"""Of a digest: no two of the batches of any number of runs share one."""

PLAIN = (str, int, float, bool, type(None))


def key_of(batch: Batch, name: str) -> str | None:
    """Return the key of a batch; None if what computes its bytes cannot be told from something else.

    `name`: of the target file within the target.
    """
    digest = blake2b(digest_size=KEY_NBYTES)
    digest.update(repr((name, batch.checksummed, bool(batch.watched))).encode("utf-8", "surrogatepass"))
    try:
        for piece in batch.pieces:
            for one in _of(piece):
                data = one if isinstance(one, (bytes, memoryview)) else repr(one).encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
    except _UnknownError:
        return None
    return digest.hexdigest()


class _UnknownError(Exception):
    """A function has a value of which nobody knows what it means."""


def _of(piece: AnyPiece) -> Iterator[object]:
    if isinstance(piece, Literal):
        yield "literal", piece.offset
        yield memoryview(piece.data)
    elif isinstance(piece, Pack):
        yield "pack", piece.rank, piece.start, piece.low, piece.high
        yield _of_row(piece.row)
    elif isinstance(piece, CutPiece):
        rule = piece.cut.spans
        yield "cut", piece.offset, piece.dtype, piece.cut.start, piece.cut.numel
        yield rule.shape, rule.origin, rule.width, rule.at
        yield _of_files(rule.files)
    elif isinstance(piece, ComputedPiece):
        block = piece.block
        yield "computed", piece.offset, piece.nbytes, piece.dtype, block.start, block.numel, block.skipped, block.kept
        yield _of_function(piece.function)
        for each in block.inputs:
            yield each.extent, each.dtype, _of_slot(each.slot)
    else:
        yield piece.offset, piece.nbytes, [_of_copy(copy) for copy in piece.copies]


def _of_copy(one: Copy) -> tuple[object, ...]:
    sources = [(whole(source.path), source.offset, source.strides) for source in one.sources]
    dtypes = one.source_dtype, one.target_dtype, one.byteorder, one.unresolved
    return (one.shape, sources, *dtypes, one.offset, one.strides)


def _of_slot(slot: Slot) -> tuple[object, ...]:
    return slot.shape, slot.dtype, slot.factors, [_of_spans(spans) for spans in (slot.spans, *slot.replicas)]


def _of_spans(spans: object) -> list[tuple[object, ...]]:
    return [
        (one.extent, whole(one.path), one.offset, one.dtype, one.byteorder, one.strides, one.unresolved)
        for one in spans  # type: ignore[attr-defined]  # a sequence of spans, or a rule that gives them
    ]


def _of_function(function: Function) -> tuple[object, ...]:
    """Return what a function computes, but for the slots, which are the inputs of its blocks."""
    kind = type(function)
    if not is_dataclass(function):
        raise _UnknownError
    values = []
    for one in fields(function):
        value = getattr(function, one.name)
        every = value if isinstance(value, tuple) else (value,)
        if all(isinstance(each, PLAIN) for each in every):
            values.append((one.name, value))
        elif not all(isinstance(each, (Slot, Kept)) for each in every):
            raise _UnknownError
    return kind.__module__, kind.__qualname__, values


@lru_cache(maxsize=16)
def _of_row(row: PackedSlot) -> bytes:
    """Return a digest of a row, whose pieces come one after the other."""
    cuts = row.cuts
    digest = blake2b(_of_files(row.files), digest_size=KEY_NBYTES)
    for column in (row.position, row.share, cuts.origin, cuts.width, cuts.at, cuts.numel):
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(column.tobytes())
    return digest.digest()


@lru_cache(maxsize=16)
def _of_files(files: CutFiles) -> bytes:
    numbers = [whole(path) for path in files.paths], files.offsets, files.dtype, files.byteorder
    return blake2b(repr(numbers).encode("utf-8", "surrogatepass"), digest_size=KEY_NBYTES).digest()


@lru_cache(maxsize=1 << 14)
def whole(path: str) -> str:
    """Return a path that means the same wherever a run is started, or the URL that it stands for."""
    return path and shown(os.path.abspath(path))  # noqa: PTH100  # links stay; no path: zeros


def names_of(paths: frozenset[str]) -> Mapping[str, str]:
    """Return the paths of a plan's sources by what they are called in a journal; none, if two would be called alike."""
    found = {whole(path): path for path in paths}
    return found if len(found) == len(paths) else {}
