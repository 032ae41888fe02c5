"""A checkpoint as the files of zckpt's own format. Lays out; writes nothing. The document comes last."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.native.document import FORMAT, VERSION, encode
from zckpt.formats.native.files import DOCUMENT_NAME, SECTIONS, rank_name
from zckpt.formats.native.nodes import NodeWriter
from zckpt.formats.native.rank_file import Cut, Entry, Listed, listed, slot_entry, storage_key
from zckpt.formats.native.rank_file import lay_out as lay_out_rank
from zckpt.formats.remainder import origin
from zckpt.formats.torch_files.tensors import slot_of_storage
from zckpt.immutable import immutable
from zckpt.state import ZEROS, Checkpoint, Extent, Slot, Span, itemsize, nbytes_of, positions, stated, values_of
from zckpt.state.partition import check_world_size, even_extents
from zckpt.torchfile import MAX_ELEMENTS, Mentioned

IDENTITY_NBYTES = 16

Layout = tuple[tuple[tuple[str, object], ...], ...]
"""The pieces of a slot as members of JSON objects."""

Part = tuple[int, Extent, Slot]
"""Which file has some elements of a slot, which they are, and the slot that has them."""


def lay_out(checkpoint: Checkpoint, *, world_size: int = 1) -> list[TargetFile]:
    """Return the files of a checkpoint.

    `world_size`: files to spread the tensors over; any number of ranks loads them. With one, every tensor is whole.
    Raises UsageError: the world size is not positive; UnsupportedError: something that the format has no way to say.
    """
    check_world_size(world_size)

    def evenly(slots: Sequence[Slot], before: int) -> Iterator[Sequence[Part]]:
        sizes = [(slot.numel, itemsize(slot.dtype)) for slot in slots]
        for slot, extents in zip(slots, even_extents(sizes, world_size, before=before), strict=True):
            yield [(one.file, slot.flat(one.start, one.numel), slot) for one in extents]

    return _lay_out(_cut(checkpoint, world_size, evenly))


def lay_out_as_cut(checkpoint: Checkpoint, paths: Sequence[str]) -> list[TargetFile]:
    """Return the files of a checkpoint of this format, with every slot cut as it is.

    `checkpoint`: slots may have been taken from it; `paths`: its ranks' files, in order.
    """
    return _lay_out(by_rank(checkpoint, positions(paths).__getitem__, len(paths)))


@immutable
class ByRank:
    """What ranks write who have the files of a checkpoint among them.

    `members`: of the document, without those that tell the files; `entries`: what each rank has in its file, in no
    order.
    """

    members: dict[str, object]
    entries: list[list[Entry]]


def by_rank(checkpoint: Checkpoint, rank_of: Callable[[str], int], world_size: int) -> ByRank:
    """Return what each rank writes of a checkpoint, which is what it has.

    `rank_of`: which rank has a file; storages of inert objects are for the first, whoever has them; `world_size`:
    ranks, each of which writes one file. Raises UnsupportedError: a rank has elements of a slot that do not follow each
    other, or values are means over ranks; or something that the format has no way to say.
    """
    return _cut(checkpoint, world_size, lambda slots, _: (_parts_of_ranks(slot, rank_of) for slot in slots))


def _parts_of_ranks(slot: Slot, rank_of: Callable[[str], int]) -> list[Part]:
    """Return which elements of a slot each rank has; a file has one tensor of a slot."""
    if slot.replicas:
        raise UnsupportedError(f"{slot.name}: each rank has its own values, and their mean is read")
    held: dict[int, list[Span]] = {}
    rank = 0
    for span in slot.spans:
        rank = rank if span.path == ZEROS else rank_of(span.path)
        held.setdefault(rank, []).append(span)
    found: list[Part] = []
    for rank, spans in held.items():
        extents = [span.extent for span in spans]
        whole = replace(extents[0], numel=sum(one.numel for one in extents))
        starts = accumulate((one.numel for one in extents), initial=whole.start)
        if any(one != replace(whole, start=at, numel=one.numel) for at, one in zip(starts, extents, strict=False)):
            raise UnsupportedError(f"{slot.name}: a rank's elements of it are not contiguous")
        found.append((rank, whole, replace(slot, spans=tuple(spans))))
    return found


def _cut(
    checkpoint: Checkpoint, world_size: int, cut: Callable[[Sequence[Slot], int], Iterable[Sequence[Part]]]
) -> ByRank:
    """Return what is in each file; `cut` says of all slots, and the bytes before them, which has what."""
    members, storages = describe(checkpoint)
    stored = []
    for number, one in enumerate(storages):  # all the bytes of each, little-endian
        whole = slot_of_storage(one)
        stored.append(Entry(storage_key(number), whole, whole.whole, "uint8", (one.storage.nbytes,)))
    used = {entry.key for entry in stored}
    slots = [(name, p.name, slot) for p in checkpoint.holders() for name, slot in p.slots.items()]
    assigned = cut([slot for *_, slot in slots], nbytes_of(stored))
    placed = []
    entries = [stored, *([] for _ in range(world_size - 1))]
    for (name, parameter, slot), parts in zip(slots, assigned, strict=True):
        key = f"{name}/{parameter}"
        while key in used:  # no two tensors of the files have the same name
            key += "'"
        used.add(key)
        placed.append(Cut(name, key, slot.dtype, slot.shape, [(file, extent) for file, extent, _ in parts]))
        for file, extent, part in parts:
            entries[file].append(slot_entry(key, part, extent))
    return ByRank(place(checkpoint, members, placed), entries)


def _lay_out(laid: ByRank) -> list[TargetFile]:
    count, identity = len(laid.entries), hashlib.blake2b(encode(laid.members), digest_size=IDENTITY_NBYTES).hexdigest()
    files = [lay_out_rank(rank_name(n, count), entries, identity) for n, entries in enumerate(laid.entries)]
    return [*files, lay_out_document(laid.members, identity, [listed(file) for file in files])]


def describe(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[Mentioned]]:
    """Return the members of a document, without where elements are and those that tell the files; and the storages."""
    nodes = NodeWriter(
        [
            *(value for group in checkpoint.param_groups for value in (group.hyperparameters, group.state)),
            checkpoint.metadata,
            checkpoint.optimizer_metadata,
            *(parameter.state for parameter in checkpoint.holders() if parameter.state),
        ]
    )
    step = checkpoint.step
    members: dict[str, Any] = {
        "step": None if step is None or not 0 <= step <= MAX_ELEMENTS else step,  # -1: before the first
        "loss_scale": nodes.write(checkpoint.loss_scale),
        "zero_stage": checkpoint.zero_stage,
        "world_size": checkpoint.world_size,
        "topology": asdict(checkpoint.topology),
        "origin": nodes.write(origin(checkpoint)),
        "param_groups": [
            {
                "parameters": group.parameters,
                "hyperparameters": nodes.write(group.hyperparameters),
                "state": nodes.write(group.state),
                **stated({"optimizer": group.optimizer}),
            }
            for group in checkpoint.param_groups
        ],
    }
    inert = {name: nodes.write(getattr(checkpoint, name)) for name in ("metadata", "optimizer_metadata")}
    for section in SECTIONS:
        members[section] = []
        for one in getattr(checkpoint, section).values():
            about = {
                "group": one.group,
                "frozen": one.frozen or None,
                "tied_to": one.tied_to,
                "state": nodes.write(one.state) if one.state else None,
            }
            said = {"name": one.name, "shape": list(one.shape), "dtype": one.dtype, "slots": [], **stated(about)}
            members[section].append(said)
    storages = [values_of(one.storage, ("dtype", "nbytes", "location")) for one in nodes.storages]
    return members | {"layouts": [], **inert, "objects": nodes.objects, "storages": storages}, nodes.storages


def place(checkpoint: Checkpoint, members: dict[str, Any], placed: Iterable[Cut]) -> dict[str, Any]:
    """Say in the members of a document, which are returned, where all slots are, given in their order."""
    layouts: dict[Layout, int] = {}
    every = iter(placed)
    described = (one for section in SECTIONS for one in members[section])
    for one, parameter in zip(described, checkpoint.holders(), strict=True):
        for _ in parameter.slots:
            at = next(every)
            said: dict[str, object] = {"name": at.name, "dtype": at.dtype}
            if at.shape != parameter.shape:
                said["shape"] = list(at.shape)
            if at.key != f"{at.name}/{parameter.name}":
                said["key"] = at.key
            layout: list[tuple[tuple[str, object], ...]] = []  # slots of any shape that are cut alike have one
            for file, extent in at.pieces:
                piece: list[tuple[str, object]] = [("file", file)]
                if extent.sizes != at.shape:
                    piece += [("offsets", extent.offsets), ("sizes", extent.sizes)]
                if extent.numel != math.prod(extent.sizes):
                    piece += [("start", extent.start), ("numel", extent.numel)]
                layout.append(tuple(piece))
            one["slots"].append(said | {"layout": layouts.setdefault(tuple(layout), len(layouts))})
    members["layouts"] = [[dict(piece) for piece in layout] for layout in layouts]
    return members


def lay_out_document(members: Mapping[str, object], identity: str, files: Sequence[Listed]) -> TargetFile:
    """Return the document; the files of the ranks have the same identity."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "id": identity,
        "files": [{**asdict(one), "header_crc32": f"{one.header_crc32:08x}"} for one in files],
    }
    return TargetFile.of(DOCUMENT_NAME, encode({**head, **members}))
