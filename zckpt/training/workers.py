"""A DistributedOptimizer's checkpoint: each worker writes the parameters that live there, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zckpt.formats.native.names import OWNED
from zckpt.formats.native.rank_file import Entry
from zckpt.optim import DistributedOptimizer
from zckpt.optim.distributed import LocalOptimizer
from zckpt.optim.model_state import ModelState
from zckpt.optim.shares import Share, share_of
from zckpt.optim.states.several import Optimizers
from zckpt.state import WEIGHT, Extent, Slot
from zckpt.storage.durable import written_directory
from zckpt.training import whole
from zckpt.training.parts import Part, divide, entries
from zckpt.training.values import Values
from zckpt.training.writing import new_identity, write_rank

Stored = list[tuple[str, bytes]]


def save_workers(
    path: Path,
    optimizer: DistributedOptimizer,
    given: Mapping[str, Any],
    *,
    overwrite: bool,
    identity: str | None = None,
) -> None:
    """Write a checkpoint of an optimizer whose parameters live on RPC workers.

    Raises
    ------
    Exception
        What a worker raised; nothing has been written.
    """
    values = Values()
    others = whole.other_values(given, ModelState(), values)
    stored = [(one.key, bytes(one.data or b"")) for one in whole.storage_entries(others, values)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_directory(path, overwrite=overwrite, owned=OWNED) as partial:
        identity = identity or new_identity()
        count = optimizer.num_workers
        parts: list[Part] = optimizer.call_each(
            _save_worker,
            [(str(partial.resolve()), rank, count, identity, [] if rank else stored) for rank in range(count)],
        )
        state = whole.Whole(ModelState(), Optimizers(optimizer, {}).snapshot(), given, values, count, others)
        whole.write_document(state, parts, identity, partial)


def _save_worker(local: LocalOptimizer, directory: str, rank: int, count: int, identity: str, stored: Stored) -> Part:
    """Write a worker's file; return what is in it."""
    with local.lock:
        names = {
            parameter: name
            for group in local.optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        state = Optimizers(local.optimizer, names).snapshot()
        shares: list[tuple[str, str, Share]] = []
        for parameter, name in names.items():
            share = share_of(parameter, name)
            if share is not None:
                shares.append((name, WEIGHT, share))
        held = divide([*shares, *state.shares], 0, [0])
        first = [_storage_entry(key, data) for key, data in stored]
        written = write_rank(Path(directory), rank, count, [*first, *entries(held, None)], identity)
        return Part([piece for piece, _ in held], state.values, {}, written)


def _storage_entry(key: str, data: bytes) -> Entry:
    slot = Slot("storage", "uint8", (len(data),), ())
    return Entry(key, slot, Extent.whole(slot.shape), "uint8", slot.shape, data=memoryview(data))
