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

from zckpt.compare.digests import FILE_NAME, Entries, bytes_of
from zckpt.engine.plan import fill, plan
from zckpt.engine.targets import Hole
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, rank_name
from zckpt.formats.native.rank_file import Entry, Listed, listed, storage_key
from zckpt.formats.native.rank_file import lay_out as lay_out_rank
from zckpt.formats.native.reader import headers_shared, read
from zckpt.formats.native.writer import IDENTITY_NBYTES, Placed, describe, lay_out_document, members_of
from zckpt.formats.remainder import BESIDE
from zckpt.operations.shared_target import SHARED
from zckpt.operations.target import write_target
from zckpt.optim import DistributedOptimizer
from zckpt.optim.distributed import LocalOptimizer
from zckpt.optim.ranks import Place, Ranks, read_together, written_together
from zckpt.optim.states.beside import declared
from zckpt.optim.states.several import ALONE, Optimizers, Snapshot
from zckpt.optim.tensors import ModelState, Share, share_of
from zckpt.optim.values import Values
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Slot, Span, Topology
from zckpt.storage.durable import written_directory
from zckpt.torchfile import Mentioned
from zckpt.training.other_state import RANDOM, SAVED_BY, SELF, other_values
from zckpt.training.parts import Part, joined
from zckpt.training.pieces import RankState, divide, entries, key_of
from zckpt.version import __version__


@dataclass(frozen=True, slots=True)
class Prepared:
    """What this rank writes, and what the first knows of all."""

    own: RankState
    entries: list[Entry]
    state: Whole


def write(
    ranks: Ranks,
    path: Place,
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
    path : Path or str
        A string is a URL.
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
    with written_together(path, ranks, overwrite=overwrite, owned=OWNED, last=[DOCUMENT_NAME]) as partial:
        agreed = ranks.from_first(identity or new_identity())
        done = ranks.do(lambda: _write_own(ranks, partial, agreed, prepared))
        every = ranks.gather(done.own)
        ranks.of_first(lambda: write_document(done.state, every, agreed, partial))
        if fingerprint:
            record_fingerprint(ranks, partial)


def new_identity() -> str:
    """Return an id for the files of one checkpoint."""
    return secrets.token_hex(IDENTITY_NBYTES)


def _write_own(ranks: Ranks, directory: Path, identity: str, prepared: Prepared | Exception) -> Prepared:
    """Write this rank's file; raise what has kept it from being prepared."""
    if isinstance(prepared, Exception):
        raise prepared
    prepared.own.file = write_rank(directory, ranks.rank, ranks.world_size, prepared.entries, identity)
    return prepared


def write_rank(directory: Path, rank: int, count: int, entries: Sequence[Entry], identity: str) -> Listed:
    """Write a file of `count` into a directory that is being written; return what the document says of it."""
    file = lay_out_rank(rank_name(rank, count), entries, identity)
    write_target(plan([file]), directory / file.name)
    return listed(file)


def record_fingerprint(ranks: Ranks, directory: Path) -> None:
    """Digest what has been written into a directory that has no name yet, each rank some of it; the first notes it."""
    from zckpt.compare.digests import digest_share, put_together

    def digested() -> Entries:
        with headers_shared(*share):
            written = read(there)
        return digest_share(written, share=share)

    share = (ranks.rank, ranks.world_size)
    with read_together(directory, ranks) as there:
        every = ranks.gather(ranks.do(digested))
    if ranks.rank == 0:
        SHARED[directory].add(FILE_NAME, bytes_of(put_together(every)))


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

    Raises Exception: what a worker raised; nothing has been written.
    """
    values = Values()
    others = other_values(given, ModelState(), values)
    stored = [(one.key, bytes(one.data or b"")) for one in storage_entries(others, values)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_directory(path, overwrite=overwrite, owned=OWNED) as partial:
        identity = identity or new_identity()
        count = optimizer.num_workers
        every: list[RankState] = optimizer.call_each(
            _save_worker,
            [(str(partial.resolve()), rank, count, identity, [] if rank else stored) for rank in range(count)],
        )
        state = Whole(ModelState(), Optimizers(optimizer, {}).snapshot(), given, count, others)
        write_document(state, every, identity, partial)


def _save_worker(
    local: LocalOptimizer, directory: str, rank: int, count: int, identity: str, stored: Stored
) -> RankState:
    """Write a worker's file; return what is in it."""
    with local.lock:
        names = {
            parameter: name
            for group in local.optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        state = Optimizers(local.optimizer, names).snapshot()
        if BESIDE in state.metadata:
            declared(local.optimizer).refuse("a DistributedOptimizer has no place for that")
        shares: list[tuple[str, str, Share]] = []
        for parameter, name in names.items():
            share = share_of(parameter, name)
            if share is not None:
                shares.append((name, WEIGHT, share))
        held = divide([*shares, *state.shares], 0, [0])
        first = [_storage_entry(key, memoryview(data)) for key, data in stored]
        written = write_rank(Path(directory), rank, count, [*first, *entries(held, None)], identity)
        return RankState([piece for piece, _ in held], state.values, {}, written)


@dataclass(slots=True)
class Whole:
    """What the first rank knows of all.

    Parameters
    ----------
    model : ModelState
    optimizers : Snapshot
        What the first rank has of them, for param groups and metadata.
    given : mapping
        What the program gave besides the model and the optimizer.
    world_size : int
    others : dict
        The metadata, as nodes.
    """

    model: ModelState
    optimizers: Snapshot
    given: Mapping[str, Any]
    world_size: int
    others: dict[str, object]


def storage_entries(
    metadata: Mapping[str, object], values: Values, of_optimizers: Mapping[str, object] | None = None
) -> list[Entry]:
    """Return the bytes of tensors in metadata, as the first rank's file has them."""
    having = Checkpoint("", "zckpt", metadata=dict(metadata), optimizer_metadata=dict(of_optimizers or {}))
    return entries_of(describe(having).storages, values)


def entries_of(storages: Sequence[Mentioned], values: Values) -> list[Entry]:
    """Return the bytes of storages that nodes of these values mention."""
    return [_storage_entry(storage_key(number), values.memory[one.storage]) for number, one in enumerate(storages)]


def _storage_entry(key: str, data: memoryview) -> Entry:
    slot = Slot("storage", "uint8", (data.nbytes,), ())
    return Entry(key, slot, Extent.whole(slot.shape), "uint8", slot.shape, data=data)


def write_document(state: Whole, every: Sequence[RankState], identity: str, directory: Path) -> None:
    """Write the document of a directory in which all ranks have written their files.

    Raises LayoutError: some element has been written by none, or by several.
    """
    checkpoint = _checkpoint(state, every)
    placed = _placed(checkpoint, every)
    members = members_of(checkpoint, describe(checkpoint), placed)
    write_laid_out(members, identity, [one.file for one in every], directory)


def write_laid_out(members: Mapping[str, object], identity: str, files: Sequence[Listed], directory: Path) -> None:
    """Write a document of these members, and files that have been written."""
    document = lay_out_document(members, identity, files)
    write_target(plan([document]), directory / document.name)


def _checkpoint(state: Whole, every: Sequence[RankState]) -> Checkpoint:
    """Return the logical state; its slots are without spans."""
    optimizers = state.optimizers
    parts = [one.part for one in every if one.part is not None]
    whole = joined(parts) if parts else Part.of(state.model, optimizers)
    has_optimizer = bool(whole.classes)
    checkpoint = Checkpoint(
        "",
        "zckpt",
        f"zckpt {__version__}",
        zero_stage=optimizers.zero_stage,
        topology=Topology(dp=state.world_size),
        world_size=state.world_size,
        step=state.given["step"],
        metadata=dict(state.others),
        optimizer_metadata=dict(optimizers.metadata),
        loss_scale=optimizers.loss_scale,
        param_groups=list(whole.groups),
    )
    checkpoint.details[SAVED_BY] = SELF
    if has_optimizer:
        checkpoint.details["optimizer"] = whole.classes.get(ALONE) or dict(whole.classes)
    checkpoint.metadata[RANDOM] = [one.random_states for one in every]
    groups = {name: index for index, group in enumerate(whole.groups) for name in group.parameters}
    for is_parameter, one in whole.tensors(with_optimizer=has_optimizer):
        (checkpoint.parameters if is_parameter else checkpoint.buffers)[one.name] = one
    for rank in every:
        _add(checkpoint, rank, groups)
    return checkpoint


def _add(checkpoint: Checkpoint, of_rank: RankState, groups: Mapping[str, int]) -> None:
    for piece in of_rank.pieces:
        section = checkpoint.buffers if piece.name in checkpoint.buffers else checkpoint.parameters
        unknown = Parameter(piece.name, piece.shape, piece.dtype, group=groups.get(piece.name))
        slots = section.setdefault(piece.name, unknown).slots
        slots.setdefault(piece.slot, Slot(piece.slot, piece.dtype, piece.shape, ()))
    for name, values in of_rank.values.items():
        if name in checkpoint.parameters:
            checkpoint.parameters[name].state.update(values)


def _placed(checkpoint: Checkpoint, every: Sequence[RankState]) -> list[Placed]:
    """Return which ranks have which elements of each slot; each element is in one piece."""
    where: dict[tuple[str, str], list[tuple[int, Extent]]] = {}
    for rank, one in enumerate(every):
        for piece in one.pieces:
            where.setdefault((piece.slot, piece.name), []).append((rank, piece.extent))
    found = []
    for parameter in checkpoint.tensors():
        for slot in parameter.slots.values():
            pieces = tuple(where[slot.name, parameter.name])
            check_pieces(slot, parameter.name, pieces)
            found.append(Placed(slot.name, key_of(slot.name, parameter.name), slot, pieces))
    return found


def check_pieces(slot: Slot, name: str, pieces: Sequence[tuple[int, Extent]]) -> None:
    """Raise LayoutError unless the pieces have every element once."""
    spans = tuple(Span(extent, str(rank), 0, slot.dtype) for rank, extent in pieces if extent.numel)
    whole = Slot(slot.name, slot.dtype, slot.shape, spans)
    label = f"{slot.name} of {name}"
    fill(Hole(0, label, whole, Extent.whole(slot.shape), slot.dtype))
