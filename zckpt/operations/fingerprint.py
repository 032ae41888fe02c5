"""A digest of a checkpoint's logical state, the same for every format, stage and world size.

What is digested, for each parameter and buffer by its canonical name:

    dtype      of the model's weight
    value      the master, or the weight where there is no master: element type, shape, and elements
    weight     only where there is a master that does not round to it: a weight that is implied may be left out
    KEY        each slot of the optimizer, and each single value as a number, however it is stored

Elements are digested in leaves of `LEAF_NUMEL` elements of the flattened tensor, in little-endian order: XXH3-128 of
each leaf, and of the leaves' digests one after the other. The fingerprint is that of all lines [NAME, ENTRY, VALUE],
JSON each, sorted. Names tied to others are left out: some formats do not say so. `docs/diff.md` specifies it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
import xxhash

from zckpt.blocks import Row, visit_rows
from zckpt.cast import Array
from zckpt.dtypes import is_floating
from zckpt.execute import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.formats import open_checkpoint
from zckpt.formats.optimizer_values import parameter_values
from zckpt.operations.diff.match import named, single
from zckpt.operations.diff.values import own_weight
from zckpt.operations.digests import LEAF_NUMEL, Entries, Fingerprint, root
from zckpt.rounding import not_rounded
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot

VALUE = "value"


def fingerprint(
    source: str | os.PathLike[str] | Checkpoint,
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
) -> Fingerprint:
    """Return the fingerprint of a checkpoint; every element is read once, in parallel and in bounded memory.

    Parameters
    ----------
    source : path-like or Checkpoint
    memory : int, bytes
        Upper bound of what buffers take together; one leaf for each thread is needed in any case.
    reporter : Reporter, optional
        Told of progress.

    Raises
    ------
    UnsupportedError
        Optimizer state that belongs to no parameter.
    SourceError
        The checkpoint cannot be read.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    entries: Entries = {}
    rows: list[tuple[str, str, Row]] = []
    for name, parameter in named(checkpoint).items():
        if parameter.tied_to is None:
            entries[name] = {"dtype": parameter.dtype}
            rows += _rows(name, checkpoint, parameter, entries[name])
    _digest(rows, entries, memory, reporter)
    return Fingerprint(root(entries), {name: dict(sorted(entries[name].items())) for name in sorted(entries)})


def _rows(name: str, checkpoint: Checkpoint, parameter: Parameter, found: dict[str, str]) -> list[tuple[str, str, Row]]:
    """Return what is to be read of a parameter; single values go to `found` at once."""
    weight, master = own_weight(parameter), parameter.slots.get(MASTER)
    rows = []
    if master is not None:
        beside = weight is not None and is_floating(weight.dtype) and is_floating(master.dtype)
        rows.append((name, VALUE, _row(name, master, *([weight] if beside and weight is not None else []))))
        if weight is not None and not beside:
            rows.append((name, WEIGHT, _row(name, weight)))
    elif weight is not None:
        rows.append((name, VALUE, _row(name, weight)))
    for key, value in parameter_values(checkpoint, parameter).items():
        if isinstance(value, Slot) and value.shape:
            rows.append((name, key, _row(name, value)))
        else:
            found[key] = _number(single(value))
    return rows


def _row(name: str, *slots: Slot) -> Row:
    return Row(f"{slots[0].name}/{name}", slots, tuple(slot.dtype for slot in slots))


def _number(value: object) -> str:
    """Return a single value as text that does not depend on how it was stored: 5 and 5.0 are one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _digest(rows: Sequence[tuple[str, str, Row]], entries: Entries, memory: int, reporter: Reporter | None) -> None:
    """Digest rows, the parallel part, and add what was found to the entries."""
    trees = [[xxhash.xxh3_128() for _ in row.slots] for _, _, row in rows]
    implied = [True] * len(rows)
    visited = visit_rows([row for _, _, row in rows], digest_leaf, numel=LEAF_NUMEL, memory=memory, reporter=reporter)
    for index, (digests, rounds) in visited:
        for number, digest in enumerate(digests):
            trees[index][number].update(digest)
        implied[index] &= rounds
    for (name, entry, row), tree, rounds in zip(rows, trees, implied, strict=True):
        entries[name][entry] = _described(row.slots[0], tree[0].hexdigest())
        if not rounds:
            entries[name][WEIGHT] = _described(row.slots[1], tree[1].hexdigest())


def _described(slot: Slot, digest: str) -> str:
    return f"{slot.dtype} {list(slot.shape)} {digest}"


def digest_leaf(_index: int, _start: int, arrays: Sequence[Array]) -> tuple[list[bytes], bool]:
    """Return the digest of a leaf of each slot of a row, and whether the first, rounded, is the second."""
    digests = [xxhash.xxh3_128_digest(array.view(np.uint8).data) for array in arrays]
    return digests, len(arrays) == 1 or not len(not_rounded(arrays[0], arrays[1]))
