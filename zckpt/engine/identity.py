"""Batches, and what tells one from any other: a digest of which bytes come from where, and what is done to them. Pure.

Two batches with the same key write the same bytes to the same place, as long as the source files are what they were. So
what another run recorded under a key is done, whatever else is different about that run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

from zckpt.engine.checking import Seen
from zckpt.engine.copy import ComputedPiece
from zckpt.engine.packs import Pack, PackedSlot
from zckpt.engine.plan import Piece
from zckpt.engine.targets import Literal
from zckpt.engine.together import CutPiece
from zckpt.errors import shown
from zckpt.immutable import immutable
from zckpt.state import CutFiles, Slot

KEY_NBYTES = 16
"""Of a digest: no two of the batches of any number of runs share one."""

PLAIN = (str, int, float, type(None))

AnyPiece = Piece | Pack | CutPiece | Literal

Ranges = tuple[list[Seen], list[Seen]]
"""What was written, and read."""


@immutable
class Batch:
    """Pieces of one file, of this name within the target, that one worker writes in order; the size of its buffer.

    What it writes is summed if it is `checksummed`, and what it reads of the source files in `watched`; if it is
    `recorded`, all that is not cloned. It is moved past the page cache if it is `direct`. With others, `most` bytes are
    read together. Of a journal: its key there, and what an earlier run wrote and read of it.
    """

    path: str
    name: str
    checksummed: bool
    pieces: tuple[AnyPiece, ...]
    buffer_nbytes: int = 0
    most: int = 0
    watched: frozenset[str] = frozenset()
    recorded: bool = False
    direct: bool = False
    key: str | None = None
    done: Ranges | None = None


def key_of(batch: Batch) -> str | None:
    """Return the key of a batch; None if what computes its bytes cannot be told from something else."""
    digest = blake2b(repr((batch.name, batch.checksummed, bool(batch.watched))).encode("utf-8", "surrogatepass"),
                     digest_size=KEY_NBYTES)  # fmt: skip
    try:
        for one in chain.from_iterable(map(_of, batch.pieces)):
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
        rule = piece.spans
        yield "cut", piece.offset, piece.dtype, piece.start, piece.numel
        yield rule.shape, rule.origin, rule.width, rule.at
        yield _of_files(rule.files)
    elif isinstance(piece, ComputedPiece):
        block = piece.block
        yield "computed", piece.offset, piece.nbytes, piece.dtype, block.start, block.numel, block.skipped, block.kept
        yield _of_value(piece.function)
        for each in block.inputs:
            slot, spans = each.slot, each.slot.sets
            yield each.extent, each.dtype, slot.shape, slot.dtype, slot.factors
            yield [[replace(one, path=whole(one.path)) for one in some] for some in spans]
    else:
        for copy in piece.copies:
            yield replace(copy, sources=tuple(replace(one, path=whole(one.path)) for one in copy.sources))


def _of_value(value: object) -> object:
    """Return what a function is made of, but for slots, which are the inputs of its blocks, and what it only keeps."""
    if isinstance(value, Slot):
        return None
    if isinstance(value, tuple):
        return list(map(_of_value, value))
    if isinstance(value, PLAIN):
        return value
    if not is_dataclass(value):
        raise _UnknownError
    kind = type(value)
    return (
        kind.__module__,
        kind.__qualname__,
        [_of_value(getattr(value, one.name)) for one in fields(value) if one.repr],
    )


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
    numbers = [whole(path) for path in files.paths], tuple(files.offsets), files.dtype, files.byteorder
    return blake2b(repr(numbers).encode("utf-8", "surrogatepass"), digest_size=KEY_NBYTES).digest()


@lru_cache(maxsize=1 << 14)
def whole(path: str) -> str:
    """Return a path that means the same wherever a run is started, or the URL that it stands for."""
    return path and shown(os.path.abspath(path))  # noqa: PTH100  # links stay; no path: zeros


def names_of(paths: frozenset[str]) -> Mapping[str, str]:
    """Return the paths of a plan's sources by what they are called in a journal; none, if two would be called alike."""
    found = {whole(path): path for path in paths}
    return found if len(found) == len(paths) else {}
