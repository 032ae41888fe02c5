"""The optimizer's state, given to the parameters whose it is: whole, in pieces, or out of flat parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.evidence import keep_number, note_numbers, shown_shape
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held
from zckpt.formats.fsdp_rank_files.model import Model
from zckpt.formats.fsdp_rank_files.optimizer import MEMBERS, Key, Optimizer
from zckpt.formats.fsdp_rank_files.readings import ADVICE, FLAT, PIECES, Reading, readings
from zckpt.formats.fsdp_rank_files.ties import tie
from zckpt.formats.torch_files.state_dicts import shared_values
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import Checkpoint, Duplicate, PaddingSpan, Parameter, ParamGroup, Slot
from zckpt.state.dtypes import itemsize
from zckpt.state.spans import CutSpans
from zckpt.state.views import concat, reshape

Slots = dict[str, Slot]


def attach(
    checkpoint: Checkpoint, model: Model, optimizer: Optimizer, names: Sequence[str] | None, *, ties_are_known: bool
) -> None:
    """Give a checkpoint's parameters the optimizer's slots, and the checkpoint its param groups.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has the model's parameters.
    model : Model
    optimizer : Optimizer
    names : sequence of str or None
        In the optimizer's order.
    ties_are_known : bool
        Whether a file says which names are of one parameter: then equal bytes do not.

    Raises
    ------
    SourceError, UsageError
        As `readings`; or the files do not hold every element once.
    """
    copies = shard_groups(model, len(optimizer.files.paths))
    reading = readings(checkpoint, model, optimizer, copies[0], names)
    for alias, owner in () if ties_are_known else reading.ties:
        tie(checkpoint, alias, owner)
    checkpoint.is_numbered = names is None and all(isinstance(key, int) for group in optimizer.keys for key in group)
    checkpoint.details["optimizer_state"] = reading.kind
    unnamed: list[Key] = []
    order = {name: at for at, name in enumerate(model.held)}
    for index, group in enumerate(optimizer.groups):
        members: list[str] = []
        for key in group["params"]:
            owned = reading.names.get(key, ())
            members += owned or (str(key),)
            if not owned and optimizer.has_state(key):
                unnamed.append(key)
            _give(checkpoint, optimizer, key, _taken(checkpoint, optimizer, owned, key, index), reading, copies)
        if reading.kind == FLAT:  # which has no order of parameters but the model's
            members.sort(key=lambda name: order.get(name, len(order)))
        hyperparameters = {key: value for key, value in group.items() if key not in MEMBERS}
        common = shared_values([optimizer.values.get(key, {}) for key in group["params"] if optimizer.has_state(key)])
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common))
    note_numbers(checkpoint, unnamed, advice=ADVICE)


def shard_groups(model: Model, world_size: int) -> list[list[int]]:
    """Return the groups of ranks that have everything once, each in the order of its shards; the first is read from.

    The last dimension of FSDP's mesh is the one that cuts, one before it copies. Where tensors have meshes of several
    forms, as under tensor parallelism, all ranks are one group, in which no flat parameter will fit.
    """
    sharded = [held for held in model.held.values() if held[0].kind != PLAIN]
    if not sharded:
        return [[rank] for rank in range(world_size)]
    meshes = [one.mesh for one in sharded[0]]
    groups: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, mesh in enumerate(meshes):
        if mesh is not None:
            groups.setdefault(mesh.coordinate[:-1], {})[mesh.coordinate[-1]] = rank
    size = max((mesh.sizes[-1] for mesh in meshes if mesh is not None), default=0)
    alike = {held[0].mesh.sizes for held in sharded if held[0].mesh is not None}
    if len(alike) != 1 or {len(shards) for shards in groups.values()} != {size} or size * len(groups) != world_size:
        return [list(range(world_size))]
    return [[shards[at] for at in range(size)] for _, shards in sorted(groups.items())]


def _taken(checkpoint: Checkpoint, optimizer: Optimizer, names: Sequence[str], key: Key, group: int) -> list[Parameter]:
    """Return the parameters that a number's state is given to; one under the number where no name is certain."""
    found = []
    for name in names:
        if name in checkpoint.buffers:
            checkpoint.parameters[name] = checkpoint.buffers.pop(name)
            checkpoint.duplicates = [
                Duplicate("parameter", one.name, one.of, one.slot, one.original, one.rank) if one.name == name else one
                for one in checkpoint.duplicates
            ]
        found.append(checkpoint.parameters.get(name) or keep_number(checkpoint, name, _shape(optimizer, key)))
    if not names and optimizer.has_state(key):
        found.append(keep_number(checkpoint, str(key), _shape(optimizer, key)))
    for one in found:
        one.group = group
    return found


def _shape(optimizer: Optimizer, key: Key) -> tuple[int, ...] | None:
    return shown_shape({slot: [held[0][1].shape] for slot, held in optimizer.cut(key).items()})


def _give(
    checkpoint: Checkpoint, optimizer: Optimizer, key: Key, owners: Sequence[Parameter], reading: Reading,
    copies: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    """Give parameters the slots and single values of one number."""
    values = optimizer.values.get(key, {})
    for slot, held in optimizer.tensors.get(key, {}).items():
        if held[0][1].shape == () and held[0][1].kind == PLAIN:
            rank, one = held[0]
            for owner in owners:
                owner.slots[slot] = slot_of(slot, one.boxes[0].tensor, optimizer.files.paths[rank])
        elif reading.kind == FLAT:
            _give_flat(checkpoint, optimizer, slot, held, owners, copies)
        elif reading.kind == PIECES:
            _give_pieces(checkpoint, optimizer, slot, held, owners[0], copies)
        else:
            joined = optimizer.files.joined(slot, f"{owners[0].name} ({slot})", held)
            _add(checkpoint, owners[0], slot, [joined.slot, *(copy for _, copy in joined.copies)],
                 [rank for rank, _ in joined.copies])  # fmt: skip
    for slot, value in values.items():
        if slot not in optimizer.tensors.get(key, {}):
            for owner in owners:
                owner.state[slot] = value


def _add(checkpoint: Checkpoint, owner: Parameter, slot: str, slots: Sequence[Slot], ranks: Sequence[int]) -> None:
    """Give a parameter a slot; others of it are copies, each of which begins on one of some ranks."""
    owner.slots[slot] = slots[0]
    checkpoint.duplicates += [
        Duplicate("parameter", owner.name, owner.name, copy, slots[0], rank)
        for copy, rank in zip(slots[1:], ranks, strict=True)
    ]


def _give_pieces(
    checkpoint: Checkpoint, optimizer: Optimizer, slot: str, held: Sequence[tuple[int, Held]], owner: Parameter,
    copies: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    """Give a parameter the pieces that ranks have of it, which follow each other in the order of the shards."""
    by_rank = dict(held)
    shape = owner.shape if owner.name in checkpoint.parameters else (_total(by_rank, copies[0]),)
    slots = []
    for ranks in copies:
        parts = [slot_of(slot, box.tensor, optimizer.files.paths[rank])
                 for rank in ranks if rank in by_rank for box in by_rank[rank].boxes]  # fmt: skip
        if sum(one.numel for one in parts) != math.prod(shape):
            raise _incomplete(optimizer, slot, owner, math.prod(shape), sum(one.numel for one in parts))
        whole = (
            concat([reshape(one, (one.numel,)) for one in parts], 0)
            if parts
            else Slot(slot, held[0][1].dtype, (0,), ())
        )
        slots.append(reshape(whole, shape))
    _add(checkpoint, owner, slot, slots, [ranks[0] for ranks in copies[1:]])


def _total(by_rank: Mapping[int, Held], ranks: Sequence[int]) -> int:
    return sum(by_rank[rank].shape[0] for rank in ranks if rank in by_rank)


def _give_flat(
    checkpoint: Checkpoint, optimizer: Optimizer, slot: str, held: Sequence[tuple[int, Held]],
    owners: Sequence[Parameter], copies: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    """Give the parameters of a unit their elements of its flat parameter; what is behind them is padding."""
    by_rank = dict(held)
    numel = sum(owner.numel for owner in owners)
    slots: dict[str, list[Slot]] = {owner.name: [] for owner in owners}
    for ranks in copies:
        boxes = [by_rank[rank].boxes for rank in ranks if rank in by_rank]
        tensors = [one[0].tensor for one in boxes if len(one) == 1]
        width = tensors[0].numel if tensors else 0
        if len(tensors) != len(ranks) or {one.numel for one in tensors} != {width} or width * len(ranks) < numel:
            raise _incomplete(optimizer, slot, owners[0], numel, sum(one.numel for one in tensors))
        files = optimizer.files.cut(tuple(ranks), tensors)
        if files is None:
            raise UnsupportedError(
                "a flat parameter whose shards are not stored end to end", path=optimizer.files.paths[ranks[0]]
            )
        start = 0
        for owner in owners:
            spans = CutSpans(files, owner.shape, start, width)
            slots[owner.name].append(Slot(slot, files.dtype, owner.shape, spans))
            start += owner.numel
        rest = CutSpans(files, (width * len(ranks) - numel,), numel, width)
        size = itemsize(files.dtype)
        checkpoint.padding_spans.append([PaddingSpan(slot, x.path, x.offset, x.extent.numel * size) for x in rest])
    for owner in owners:
        _add(checkpoint, owner, slot, slots[owner.name], [ranks[0] for ranks in copies[1:]])


def _incomplete(optimizer: Optimizer, slot: str, owner: Parameter, numel: int, found: int) -> LayoutError:
    return LayoutError(
        f"ranks' files do not have every element of {slot} of {owner.name} once",
        path=optimizer.files.paths[0],
        expected=f"{numel} elements",
        found=found,
        parameters=[owner.name],
    )
