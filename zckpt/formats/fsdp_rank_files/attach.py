"""The optimizer's state, given to the parameters whose it is: whole, in pieces, or out of flat parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.evidence import keep_number, note_numbers, shown_shape
from zckpt.formats.fsdp_rank_files.contents import MEMBERS, Key, Model, Optimizer, tie
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held, add
from zckpt.formats.fsdp_rank_files.readings import ADVICE, FLAT, PIECES, Reading, readings
from zckpt.formats.torch_files.state_dicts import shared_values
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import Checkpoint, PaddingSpan, Parameter, ParamGroup, Slot
from zckpt.state.dtypes import itemsize
from zckpt.state.spans import CutSpans
from zckpt.state.views import concat, reshape


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
    giving = _Giving(checkpoint, optimizer, reading, copies)
    order = {name: at for at, name in enumerate(model.held)}
    for index, (group, keys) in enumerate(zip(optimizer.groups, optimizer.keys, strict=True)):
        for key in keys:
            giving.give(key, index)
        members = [name for key in keys for name in reading.names.get(key) or (str(key),)]
        if reading.kind == FLAT:  # which has no order of parameters but the model's
            members.sort(key=lambda name: order.get(name, len(order)))
        hyperparameters = {key: value for key, value in group.items() if key not in MEMBERS}
        common = shared_values([optimizer.values.get(key, {}) for key in keys if optimizer.has_state(key)])
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common))
    unnamed = [
        key for keys in optimizer.keys for key in keys if not reading.names.get(key) and optimizer.has_state(key)
    ]
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


@dataclass(frozen=True, slots=True)
class _Giving:
    """Gives parameters what ranks have under the optimizer's numbers."""

    checkpoint: Checkpoint
    optimizer: Optimizer
    reading: Reading
    copies: Sequence[Sequence[int]]

    def give(self, key: Key, group: int) -> None:
        """Give parameters the slots and single values of one number; one under it where no name is certain."""
        files, tensors = self.optimizer.files, self.optimizer.tensors.get(key, {})
        owners = self._owners(key)
        for owner in owners:
            owner.group = group
        for slot, held in tensors.items():
            rank, first = held[0]
            if first.shape == () and first.kind == PLAIN:
                for owner in owners:
                    owner.slots[slot] = slot_of(slot, first.boxes[0].tensor, files.paths[rank])
            elif self.reading.kind in (FLAT, PIECES):
                self._give_line(slot, dict(held), owners)
            else:
                add(self.checkpoint, owners[0], slot, files.joined(slot, f"{owners[0].name} ({slot})", held))
        for slot, value in self.optimizer.values.get(key, {}).items():
            for owner in owners if slot not in tensors else ():
                owner.state[slot] = value

    def _owners(self, key: Key) -> list[Parameter]:
        checkpoint, names = self.checkpoint, self.reading.names.get(key, ())
        for name in names:
            if name in checkpoint.buffers:
                checkpoint.parameters[name] = checkpoint.buffers.pop(name)
                checkpoint.duplicates = [
                    replace(one, kind="parameter") if one.name == name else one for one in checkpoint.duplicates
                ]
        if not names and not self.optimizer.has_state(key):
            return []
        shape = shown_shape({slot: [held[0][1].shape] for slot, held in self.optimizer.cut(key).items()})
        return [
            checkpoint.parameters.get(name) or keep_number(checkpoint, name, shape) for name in names or (str(key),)
        ]

    def _give_line(self, slot: str, held: Mapping[int, Held], owners: Sequence[Parameter]) -> None:
        """Give parameters their elements of what ranks have end to end; behind those of a flat one is padding.

        Pieces of one parameter are as long as it is; of one without a name, it is as long as they are.
        """
        checkpoint, files, is_flat = self.checkpoint, self.optimizer.files, self.reading.kind == FLAT
        shapes = [owner.shape for owner in owners]
        if not is_flat and owners[0].name not in checkpoint.parameters:
            shapes = [(sum(held[rank].shape[0] for rank in self.copies[0] if rank in held),)]
        numel = sum(map(math.prod, shapes))
        found: list[list[tuple[int, Slot]]] = [[] for _ in owners]
        for ranks in self.copies:
            tensors = [(rank, box.tensor) for rank in ranks if rank in held for box in held[rank].boxes]
            sizes = [one.numel for _, one in tensors]
            is_cut = [rank for rank, _ in tensors] == list(ranks) and len(set(sizes)) == 1 and sum(sizes) >= numel
            if not is_cut if is_flat else sum(sizes) != numel:
                raise LayoutError(
                    f"ranks' files do not have every element of {slot} of {owners[0].name} once",
                    path=files.paths[0],
                    expected=f"{numel} elements",
                    found=sum(sizes),
                    parameters=[owners[0].name],
                )
            if not is_flat:
                parts = [reshape(slot_of(slot, one, files.paths[rank]), (one.numel,)) for rank, one in tensors]
                whole = concat(parts, 0) if parts else Slot(slot, next(iter(held.values())).dtype, (0,), ())
                found[0].append((ranks[0], reshape(whole, shapes[0])))
                continue
            cut, start = files.cut(tuple(ranks), [one for _, one in tensors]), 0
            if cut is None:
                raise UnsupportedError("a flat parameter whose shards are not stored end to end",
                                       path=files.paths[ranks[0]])  # fmt: skip
            for shape, its in zip(shapes, found, strict=True):
                its.append((ranks[0], Slot(slot, cut.dtype, shape, CutSpans(cut, shape, start, sizes[0]))))
                start += math.prod(shape)
            rest, size = CutSpans(cut, (sum(sizes) - numel,), numel, sizes[0]), itemsize(cut.dtype)
            checkpoint.padding_spans.append([PaddingSpan(slot, x.path, x.offset, x.extent.numel * size) for x in rest])
        for owner, its in zip(owners, found, strict=True):
            add(checkpoint, owner, slot, its)
