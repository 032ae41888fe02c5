"""One directory that all ranks, or all RPC workers, write together; it appears whole or not at all.

A rank writes its pieces of what several ranks have. A worker of a DistributedOptimizer writes the parameters that live
there, and their state.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zckpt.compare.digests import FILE_NAME, Entries, write_digests
from zckpt.engine.plan import plan
from zckpt.formats.native import OWNED, rank_name
from zckpt.formats.native.rank_file import Entry, Listed, listed
from zckpt.formats.native.rank_file import lay_out as lay_out_rank
from zckpt.formats.native.reader import headers_shared, read
from zckpt.formats.native.writer import IDENTITY_NBYTES
from zckpt.operations.target import write_target
from zckpt.optim import DistributedOptimizer
from zckpt.optim.distributed import LocalOptimizer
from zckpt.optim.ranks import Ranks, written_together
from zckpt.optim.states.several import Optimizers
from zckpt.optim.tensors import ModelState, Share, share_of
from zckpt.state import WEIGHT, Extent, Slot
from zckpt.storage.durable import written_directory
from zckpt.training import whole
from zckpt.training.parts import Part, divide, entries
from zckpt.training.values import Values


@dataclass(frozen=True, slots=True)
class Prepared:
    """What this rank writes, and what the first knows of all."""

    part: Part
    entries: list[Entry]
    state: whole.Whole


def write(
    ranks: Ranks,
    path: Path,
    prepared: Prepared | Exception,
    *,
    overwrite: bool,
    fingerprint: bool,
    identity: str | None = None,
) -> None:
    """Write a checkpoint together with the other ranks.

    Parameters
    ----------
    ranks : Ranks
    path : Path
    prepared : Prepared or Exception
        An exception: this rank has failed before.
    overwrite, fingerprint : bool
        As for `save`.
    identity : str, optional
        The id that ties the files together, the first rank's; by default a new one.

    Raises
    ------
    ZckptError
        A rank has failed; nothing has been written.
    """
    with written_together(path, ranks, overwrite=overwrite, owned=OWNED) as partial:
        agreed = ranks.from_first(identity or new_identity())
        part, state = ranks.do(lambda: _write_part(ranks, partial, agreed, prepared))
        parts = ranks.gather(part)
        ranks.of_first(lambda: whole.write_document(state, parts, agreed, partial))
        if fingerprint:
            _record_fingerprint(ranks, partial)


def new_identity() -> str:
    """Return an id for the files of one checkpoint."""
    return secrets.token_hex(IDENTITY_NBYTES)


def _write_part(
    ranks: Ranks, directory: Path, identity: str, prepared: Prepared | Exception
) -> tuple[Part, whole.Whole]:
    """Write this rank's file; raise what has kept it from being prepared."""
    if isinstance(prepared, Exception):
        raise prepared
    prepared.part.file = write_rank(directory, ranks.rank, ranks.world_size, prepared.entries, identity)
    return prepared.part, prepared.state


def write_rank(directory: Path, rank: int, count: int, entries: Sequence[Entry], identity: str) -> Listed:
    """Write a file of `count` into a directory that is being written; return what the document says of it."""
    file = lay_out_rank(rank_name(rank, count), entries, identity)
    write_target(plan([file]), directory / file.name)
    return listed(file)


def _record_fingerprint(ranks: Ranks, directory: Path) -> None:
    """Digest what has been written, each rank a part of it; the first writes it down."""
    from zckpt.compare.leaves import digest_part, put_together

    def digested() -> Entries:
        with headers_shared(*share):
            written = read(directory)
        return digest_part(written, part=share)

    share = (ranks.rank, ranks.world_size)
    mine = ranks.do(digested)
    parts = ranks.gather(mine)
    if ranks.rank == 0:
        write_digests(put_together(parts), directory / FILE_NAME)


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
