"""One directory that all ranks, or all RPC workers, write together; it appears whole or not at all.

Of what several ranks have, each writes about as much. A worker of a DistributedOptimizer writes the parameters that
live there, and their state.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zckpt.compare.digests import FILE_NAME, Entries, bytes_of
from zckpt.engine.plan import check_covered, plan
from zckpt.engine.tensors import dtype_name, memory_of
from zckpt.errors import UnsupportedError
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, headers_shared, rank_name
from zckpt.formats.native.rank_file import UNWRITTEN, Cut, Entry, Listed, listed, slot_entry, storage_key
from zckpt.formats.native.rank_file import lay_out as lay_out_rank
from zckpt.formats.native.reader import read
from zckpt.formats.native.writer import IDENTITY_NBYTES, describe, lay_out_document, place
from zckpt.formats.remainder import RANDOM
from zckpt.formats.torch_files.optimizer import BESIDE
from zckpt.immutable import immutable, mutable
from zckpt.operations.shared_target import SHARED
from zckpt.operations.target import write_target
from zckpt.optim.ranks import Place, Ranks, read_together, written_together
from zckpt.optim.states.beside import declared
from zckpt.optim.states.by_parameter import Snapshot
from zckpt.optim.states.several import ALONE, Optimizers
from zckpt.optim.tensors import ModelState, Share
from zckpt.optim.values import Values
from zckpt.state import Checkpoint, Extent, Parameter, Shape, Slot, Span, Topology, by_key
from zckpt.state.partition import even_extents
from zckpt.storage.durable import written
from zckpt.training.live import Part
from zckpt.training.other_state import SAVED_BY, SELF, other_values

if TYPE_CHECKING:
    from zckpt.optim.distributed import DistributedOptimizer, LocalOptimizer


ALIGNMENT = 64
"""Bytes at multiples of which tensors start in staging memory."""


@immutable
class Piece:
    """Elements of a slot that one rank writes. `shape`: of the whole slot."""

    name: str
    slot: str
    dtype: str
    shape: Shape
    extent: Extent

    @property
    def key(self) -> str:
        """What the piece is called in its file; `storage/` is for what is no slot."""
        return f"{self.slot}/{self.name}" if self.slot != "storage" else f"{self.slot}/{self.name}'"


@mutable
class RankState:
    """What a rank writes, as the first rank has to know it."""

    pieces: list[Piece] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # state of its parameters that is no tensor
    random_states: dict[str, Any] = field(default_factory=dict)
    file: Listed = UNWRITTEN  # its file as a whole
    part: Part | None = None  # of what ranks have in parts


Held = tuple[Piece, torch.Tensor]
"""A piece, and its elements, flat."""


def divide(shares: Iterable[tuple[str, str, Share]], rank: int, members: Sequence[int]) -> list[Held]:
    """Return what this rank writes of what it has.

    Parameters
    ----------
    shares : iterable of (str, str, Share)
        Parameter, slot and share; those that several ranks have, in the same order on all of them.
    rank : int
        In the world.
    members : sequence of int
        The ranks, in the world, that save together.
    """

    def those_with(share: Share) -> tuple[int, ...]:
        return tuple(one for one in (members if share.ranks is None else share.ranks) if one in members)

    held: list[Held] = []
    for having, equal in by_key((those_with(one[2]), one) for one in shares).items():
        if rank not in having:
            continue
        sizes = [(share.extent.numel, share.tensor.element_size()) for _, _, share in equal]
        divided = even_extents(sizes, len(having))
        for (name, slot, share), ranges in zip(equal, divided, strict=True):
            whole, elements = share.extent, share.tensor
            for r in ranges:
                if having[r.file] == rank:
                    extent = Extent(whole.offsets, whole.sizes, whole.start + r.start, r.numel)
                    piece = Piece(name, slot, dtype_name(elements.dtype), share.shape, extent)
                    held.append((piece, elements.reshape(-1)[r.start : r.start + r.numel]))
    return held


def entries(held: Iterable[Held], staging: Staging | None) -> list[Entry]:
    """Return what this rank's file is to have; its bytes are those of the tensors, or copies in staging memory."""
    pairs = list(held)
    if staging is None:
        views = [memory_of(tensor.cpu().contiguous()) for _, tensor in pairs]
    else:
        views = staging.copy([tensor for _, tensor in pairs])
    return [
        slot_entry(piece.key, Slot(piece.slot, piece.dtype, piece.shape, ()), piece.extent, view)
        for (piece, _), view in zip(pairs, views, strict=True)
    ]


class Staging:
    """Memory of the host that tensors are copied to, so that they may change while they are written; used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Return the bytes of copies of tensors, good until the next call."""
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if self._memory.numel() < starts[-1] or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # before there is another
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        views = []
        for tensor, start in zip(tensors, starts[:-1], strict=True):
            here = self._memory[start : start + tensor.nbytes]
            if tensor.numel():
                here.view(tensor.dtype).copy_(tensor, non_blocking=True)
            views.append(memory_of(here))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return views


@immutable
class Prepared:
    """What this rank writes; `part`: of the first, all but what other ranks tell it."""

    own: RankState
    entries: list[Entry]
    part: Part


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
        write_all(ranks, partial, ranks.from_first(identity or new_identity()), prepared)
        if fingerprint:
            record_fingerprint(ranks, partial)


def new_identity() -> str:
    """Return an id for the files of one checkpoint."""
    return secrets.token_hex(IDENTITY_NBYTES)


def write_all(ranks: Ranks, directory: Path, identity: str, prepared: Prepared | Exception) -> None:
    """Write this rank's file, and on the first the document; raise what has kept a rank from being prepared."""

    def written() -> Prepared:
        if isinstance(prepared, Exception):
            raise prepared
        prepared.own.file = write_rank(directory, ranks.rank, ranks.world_size, prepared.entries, identity)
        return prepared

    done = ranks.do(written)
    every = ranks.gather(done.own)
    ranks.of_first(lambda: write_whole(done.part, every, identity, directory))


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


def save_workers(
    path: Path,
    optimizer: DistributedOptimizer,
    given: Mapping[str, Any],
    *,
    overwrite: bool,
    identity: str | None,
) -> None:
    """Write a checkpoint of an optimizer whose parameters live on RPC workers.

    Raises Exception: what a worker raised; nothing has been written.
    """
    values, count = Values(), optimizer.num_workers
    part, storages = of_first(ModelState(), Optimizers(optimizer, {}).snapshot(), given, count, values)
    stored = [replace(one, data=bytes(one.data or b"")) for one in storages]  # which RPC can send
    with written([path], overwrite=overwrite, owned=OWNED) as [partial]:
        identity = identity or new_identity()
        every: list[RankState] = optimizer.call_each(
            _save_worker,
            [(str(partial.resolve()), rank, count, identity, [] if rank else stored) for rank in range(count)],
        )
        write_whole(part, every, identity, partial)


def _save_worker(
    local: LocalOptimizer, directory: str, rank: int, count: int, identity: str, stored: Sequence[Entry]
) -> RankState:
    """Write a worker's file; return what is in it."""
    with local.lock:
        model = ModelState.of_parameters(local.named())
        state = Optimizers(local.optimizer, model.names()).snapshot()
        if BESIDE in state.metadata:
            declared(local.optimizer).refuse("a DistributedOptimizer has no place for it")
        held = divide([*model.shares(), *state.shares], 0, [0])
        written = write_rank(Path(directory), rank, count, [*stored, *entries(held, None)], identity)
        return RankState([piece for piece, _ in held], state.values, {}, written)


def of_first(
    model: ModelState, state: Snapshot, given: Mapping[str, Any], world_size: int, values: Values
) -> tuple[Part, list[Entry]]:
    """Return what the first rank knows, and the bytes of tensors in metadata, as its file has them.

    `given`: what the program gave besides the model and the optimizer.
    """
    part = Part.of(model, state)
    checkpoint = part.checkpoint
    checkpoint.zero_stage, checkpoint.loss_scale, checkpoint.step = state.zero_stage, state.loss_scale, given["step"]
    checkpoint.topology, checkpoint.world_size = Topology(dp=world_size), world_size
    checkpoint.details[SAVED_BY] = SELF
    checkpoint.metadata, checkpoint.optimizer_metadata = other_values(given, model, state.metadata, values)
    return part, storage_entries(checkpoint, values)


def storage_entries(checkpoint: Checkpoint, values: Values) -> list[Entry]:
    """Return the bytes of the storages that a checkpoint's metadata, which are nodes of these values, mention."""
    found = []
    for number, one in enumerate(describe(checkpoint)[1]):
        data = values.memory[one.storage]
        slot = Slot("storage", "uint8", (data.nbytes,), ())
        found.append(slot_entry(storage_key(number), slot, slot.whole, data))
    return found


Where = dict[str, list[tuple[int, Piece]]]
"""Which file has which piece of a slot, by the path of its only span, which stands for all of them."""


def write_whole(first: Part, every: Sequence[RankState], identity: str, directory: Path) -> None:
    """Write the document of a directory in which all ranks have written their files.

    Raises LayoutError: some element has been written by none, or by several.
    """
    first.join([one.part for one in every if one.part is not None])
    checkpoint = first.checkpoint
    if first.classes:
        checkpoint.details["optimizer"] = first.classes.get(ALONE) or first.classes
    checkpoint.metadata[RANDOM] = [one.random_states for one in every]
    where: Where = {}
    for rank, one in enumerate(every):
        for piece in one.pieces:
            section = checkpoint.buffers if piece.name in checkpoint.buffers else checkpoint.parameters
            slots = section.setdefault(piece.name, Parameter(piece.name, piece.shape, piece.dtype)).slots
            span = Span(Extent.whole(piece.shape), piece.key, 0, piece.dtype)
            slots.setdefault(piece.slot, Slot(piece.slot, piece.dtype, piece.shape, (span,)))
            where.setdefault(piece.key, []).append((rank, piece))
        for name, values in one.values.items():
            if name in checkpoint.parameters:
                checkpoint.parameters[name].state.update(values)
    groups = {name: index for index, group in enumerate(checkpoint.param_groups) for name in group.parameters}
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is None:
            parameter.group = groups.get(parameter.name)
            has_state = bool(parameter.state or parameter.optimizer_slots)  # of before it was frozen, or of its unit
            parameter.frozen = bool(first.classes) and (parameter.group is None or (parameter.frozen and not has_state))
    write_document(checkpoint, where, identity, [one.file for one in every], directory)


def write_document(
    checkpoint: Checkpoint, where: Where, identity: str, files: Sequence[Listed], directory: Path
) -> None:
    """Write a document, and which files that have been written have which elements: each is in one piece."""
    placed = []
    for parameter in checkpoint.holders():
        for slot in parameter.slots.values():
            pieces = where.get(slot.spans[0].path, [])
            spans = tuple(Span(one.extent, str(file), 0, slot.dtype) for file, one in pieces if one.extent.numel)
            label = f"{slot.name} of {parameter.name}"
            check_covered(replace(slot, spans=spans), label)
            names = {one.key for _, one in pieces}
            if len(names) != 1:
                raise UnsupportedError(f"ranks have several names for one tensor: {', '.join(sorted(names))}")
            placed.append(
                Cut(slot.name, names.pop(), slot.dtype, slot.shape, [(file, one.extent) for file, one in pieces])
            )
    members, _ = describe(checkpoint)
    write_laid_out(place(checkpoint, members, placed), identity, files, directory)


def write_laid_out(members: Mapping[str, object], identity: str, files: Sequence[Listed], directory: Path) -> None:
    """Write a document of these members, and files that have been written."""
    document = lay_out_document(members, identity, files)
    write_target(plan([document]), directory / document.name)
