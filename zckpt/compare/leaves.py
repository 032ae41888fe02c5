"""Digests of what a checkpoint means, the same for every format, stage and world size, and a fingerprint of them.

What is digested, for each parameter and buffer by its canonical name:

    weight     element type, shape, and elements; where a format leaves it out, the master, rounded
    master     unless it is the weight itself: a format may keep one of them
    KEY        each slot of the optimizer, and each single value as a number, however it is stored

Elements are digested in leaves of `LEAF_NUMEL` elements of the flattened tensor, little-endian, each NaN as the same
one: XXH3-128 of each leaf, and of the leaves' digests one after the other. The fingerprint is that of all lines
[NAME, ENTRY, VALUE], JSON each, sorted. Names tied to others are left out. `docs/diff.md` specifies it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from zckpt.compare.digests import LEAF_NUMEL, Entries, Fingerprint, root
from zckpt.compare.logical import named, own_weight, single
from zckpt.compare.optimizer_values import parameter_values
from zckpt.compare.rounding import one_nan
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.cast import Array, cast
from zckpt.engine.scan import SlotSet, scan
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot

LEAVES_PER_BLOCK = 2
"""Read at once."""


def digest_part(
    checkpoint: Checkpoint,
    *,
    part: tuple[int, int] = (0, 1),
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
) -> Entries:
    """Return the entries of some of the slots, and all single values: several can share the work.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : (int, int)
        Which of how many parts.
    memory : int, bytes
        Upper bound of what buffers take together; a few leaves for each thread are needed in any case.
    reporter : Reporter, optional
        Told of progress.

    Raises
    ------
    UnsupportedError
        Optimizer state that belongs to no parameter.
    SourceError
        A file cannot be read.
    """
    entries: Entries = {}
    chosen: list[Digested] = []
    for name, parameter in named(checkpoint).items():
        if parameter.tied_to is None:
            entries[name] = {}
            chosen += _slots(name, checkpoint, parameter, entries[name])
    _digest(chosen[part[0] :: part[1]], entries, memory, reporter)
    return entries


def put_together(parts: Iterable[Entries]) -> Fingerprint:
    """Return the fingerprint of which there are the entries of all parts."""
    entries: Entries = {}
    for one in parts:
        for name, found in one.items():
            entries.setdefault(name, {}).update(found)
    for found in entries.values():
        if found.get(MASTER) == found.get(WEIGHT):  # a format may keep one of them
            found.pop(MASTER, None)
    return Fingerprint(root(entries), {name: dict(sorted(entries[name].items())) for name in sorted(entries)})


@dataclass(frozen=True, slots=True)
class Digested:
    """A slot that is read, and the entry that it becomes.

    Parameters
    ----------
    name, entry : str
    slots : SlotSet
    rounded : str or None
        Type of the weight that is not there: it is the master, rounded, and becomes the entry `weight`.
    """

    name: str
    entry: str
    slots: SlotSet
    rounded: str | None = None


def _slots(name: str, checkpoint: Checkpoint, parameter: Parameter, found: dict[str, str]) -> Iterator[Digested]:
    """Yield what is to be read of a parameter; single values go to `found` at once."""
    weight, master = own_weight(parameter), parameter.slots.get(MASTER)
    if weight is not None:
        yield Digested(name, WEIGHT, _set(name, weight))
    if master is not None:
        yield Digested(name, MASTER, _set(name, master), parameter.dtype if weight is None else None)
    for key, value in parameter_values(checkpoint, parameter).items():
        if isinstance(value, Slot) and value.shape:
            yield Digested(name, key, _set(name, value))
        else:
            found[key] = _number(single(value))


def _set(name: str, slot: Slot) -> SlotSet:
    return SlotSet(f"{slot.name}/{name}", (slot,), (slot.dtype,))


def _number(value: object) -> str:
    """Return a single value as text that does not depend on how it was stored: 5 and 5.0 are one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _digest(chosen: Sequence[Digested], entries: Entries, memory: int, reporter: Reporter | None) -> None:
    """Digest slots, the parallel part, and add what was found to the entries."""
    trees = [[xxhash.xxh3_128(), xxhash.xxh3_128()] for _ in chosen]
    sets = [one.slots for one in chosen]
    look = partial(digest_block, [one.rounded for one in chosen])
    numel = LEAF_NUMEL * LEAVES_PER_BLOCK
    for index, digests in scan(sets, look, numel=numel, memory=memory, reporter=reporter):
        for number, digest in enumerate(digests):
            trees[index][number].update(digest)
    for one, tree in zip(chosen, trees, strict=True):
        slot = one.slots.slots[0]
        entries[one.name][one.entry] = _described(slot.dtype, slot, tree[0].hexdigest())
        if one.rounded is not None:
            entries[one.name][WEIGHT] = _described(one.rounded, slot, tree[1].hexdigest())


def _described(dtype: str, slot: Slot, digest: str) -> str:
    return f"{dtype} {list(slot.shape)} {digest}"


def digest_block(rounded: Sequence[str | None], index: int, _start: int, arrays: Sequence[Array]) -> list[bytes]:
    """Return the digests of the leaves of a block, and of its elements as they round where a weight is wanted."""
    (array,) = arrays
    dtype = rounded[index]
    return [_leaves(array)] if dtype is None else [_leaves(array), _leaves(cast(array, dtype))]


def _leaves(array: Array) -> bytes:
    data = one_nan(array)
    leaves = (data[start : start + LEAF_NUMEL] for start in range(0, len(data), LEAF_NUMEL))
    return b"".join(xxhash.xxh3_128_digest(leaf.view(np.uint8).data) for leaf in leaves)
