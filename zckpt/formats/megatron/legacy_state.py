"""A rank's part of a model, and its optimizer as the legacy files have it: by number, or in flat buffers.

What `local` reads. `buckets` says where the distributed optimizer has a parameter, `stages` what a rank has of it.

Source: megatron-core 0.16, `Float16OptimizerWithFloat16Params.state_dict`, `DistributedOptimizer.state_dict` and
`get_parameter_state_dp_zero`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zckpt.errors import UnsupportedError
from zckpt.formats.megatron.buckets import JOINED, PARAM, UNPADDED, Member
from zckpt.formats.megatron.buckets import lay_out as lay_out_buckets
from zckpt.formats.megatron.objects import OPTIMIZER
from zckpt.formats.megatron.optimizer import GROUPS, MASTERS, STATES, STEP
from zckpt.formats.megatron.stages import Dealt, Sliced
from zckpt.formats.megatron.write_common import PLAIN, Source
from zckpt.formats.megatron.write_groups import Group
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, new_storage, view
from zckpt.state import MASTER, Slot
from zckpt.torchfile import DType


@dataclass(frozen=True, slots=True)
class Model:
    """The whole model by the names of its module, in its order.

    Parameters
    ----------
    source : Source
    given : dict of str to str
        The source's own names.
    sliced : Sliced
    bucket_numel : int or None, elements
    gradients : dict of str to str
        Their types by the weights', where they are not float32.
    tied : dict of str to str
        What the last stage calls its copy of an embedding.
    """

    source: Source
    given: Mapping[str, str]
    sliced: Sliced
    bucket_numel: int | None
    gradients: Mapping[str, str]
    tied: Mapping[str, str]

    def dtype(self, one: Dealt) -> str:
        """Return the type that a weight is to have."""
        return self.source.tensors[self.given[one.name]][1]

    def weight(self, one: Dealt, rank: int) -> SlotTensor:
        """Return what a rank has of a weight."""
        slots = [self.source.tensors[self.given[name]][0] for name in one.names]
        return SlotTensor(self.sliced.part(one, rank, slots), self.dtype(one), one.name)

    def states(self, one: Dealt, rank: int) -> Iterator[tuple[str, Slot, str, str]]:
        """Yield key, slot, type and label of all that the optimizer has of what a rank has, the master first.

        Raises UnsupportedError: it does not have the same of each expert.
        """
        names = [self.given[name] for name in one.names]
        every = [list(self.source.states(name)) for name in names]
        kinds = {tuple((key, dtype) for key, _, dtype in its) for its in every}
        owners = {at for name in names for at, group in enumerate(self.source.groups) if name in group.members}
        if len(kinds) > 1 or len(owners) > 1 or len({self.source.tensors[name][1] for name in names}) > 1:
            raise UnsupportedError("experts that are one parameter have one optimizer state",
                                   found=f"others of {one.name}")  # fmt: skip
        for at, (key, _, dtype) in enumerate(every[0]):
            part = self.sliced.part(one, rank, [its[at][1] for its in every])
            yield key, part, dtype, f"{key}/{one.name}"

    def members(self, group: Group, chunks: Sequence[Sequence[Dealt]]) -> Iterator[Dealt]:
        """Yield what a rank has of a group's parameters."""
        own = set(group.members)
        yield from (one for chunk in chunks for one in chunk if self.given[one.name] in own)


@dataclass(frozen=True, slots=True)
class Rank:
    """One model-parallel rank: its numbers, its directory's name, and what each chunk of its model has."""

    tp: int
    pp: int
    ep: int
    folder: str
    chunks: list[list[Dealt]]


def optimizer_node(model: Model, rank: Rank) -> object:
    """Return what a rank's file has of its optimizers: one, or a list of that of experts and that of the rest."""
    source = model.source
    every = []
    for groups, values, around in source.optimizers():
        if source.kind != PLAIN:
            every.append({OPTIMIZER: {GROUPS: values}, **around})
            continue
        states, masters = _numbered(model, rank, groups, values)
        inner: dict[object, object] = {STATES: states, GROUPS: values}
        kinds = {source.tensors[name][1] == "float32" for group in groups for name in group.members}
        if len(kinds) > 1:
            raise UnsupportedError("trains weights of 16 and of 32 bits, which these files number otherwise",
                                   advice="give --ckpt-format torch_dist")  # fmt: skip
        every.append(inner if kinds == {True} else {OPTIMIZER: inner, MASTERS: masters, **around})
    return every[0] if len(every) == 1 else every


def _numbered(
    model: Model, rank: Rank, groups: Sequence[Group], values: Sequence[dict[object, object]]
) -> tuple[dict[object, object], list[list[object]]]:
    """Return the state of parameters by number, and the masters of each group, whose values get the numbers."""
    states: dict[object, object] = {}
    masters: list[list[object]] = []
    number = 0
    for group, its in zip(groups, values, strict=True):
        first = number
        masters.append([])
        for one in model.members(group, rank.chunks):
            step = model.source.own_step
            node: dict[object, object] = {} if step is None else {STEP: step}
            for key, slot, dtype, label in model.states(one, rank.tp):
                tensor = SlotTensor(slot, dtype, label)
                if key == MASTER:
                    masters[-1].append(tensor)
                else:
                    node[key] = tensor
            if node:
                states[number] = node
            number += 1
        its["params"] = list(range(first, number))
    return states, masters


def buffers_node(model: Model, rank: Rank) -> object:
    """Return what `distrib_optim.pt` has of a rank.

    Of several optimizers it is a list. What expert-parallel ranks have alike only the first one's file has.
    """
    every = [
        None if rank.ep and not any(one.is_of_experts for one in groups) else _buffers(model, rank, groups)
        for groups, _, _ in model.source.optimizers()
    ]
    return every[0] if len(every) == 1 else every


def _buffers(model: Model, rank: Rank, groups: Sequence[Group]) -> dict[object, object]:
    members = {name for group in groups for name in group.members}
    found: dict[object, object] = {JOINED: True}
    for at, chunk in enumerate(rank.chunks):
        kinds: dict[str, list[Dealt]] = {}
        for one in chunk:
            if model.given[one.name] in members:
                kinds.setdefault(model.dtype(one), []).append(one)
        for kind, its in kinds.items():
            gradients = model.gradients.get(kind, "float32")
            numel = model.bucket_numel if rank.pp == 0 and at == 0 else None
            found[len(found) - 1] = {(DType(kind), DType(gradients)): _buffer(model, rank, its, numel)}
    return found


def _buffer(model: Model, rank: Rank, its: Sequence[Dealt], bucket_numel: int | None) -> dict[object, object]:
    """Return a buffer: a flat tensor for each slot, of all buckets end to end."""
    members = [Member(one.local, prod(model.sliced.shape(one)), one.shared) for one in its]
    layout = lay_out_buckets(members, bucket_numel)
    starts = layout.starts()
    contents: dict[str, list[SlotContent]] = {}
    types: dict[str, set[str]] = {}
    for one in its:
        for key, slot, dtype, label in model.states(one, rank.tp):
            filed = PARAM if key == MASTER else key
            contents.setdefault(filed, []).append(SlotContent(starts[one.local], slot, label))
            types.setdefault(filed, set()).add(dtype)
    mixed = next((key for key, kinds in types.items() if len(kinds) > 1), None)
    if mixed is not None:
        raise UnsupportedError(f"{mixed} is of several types, and a buffer has one",
                               found=sorted(types[mixed]))  # fmt: skip
    tensors: dict[object, object] = {
        key: view(new_storage(next(iter(types[key])), layout.numel, parts), (layout.numel,))
        for key, parts in contents.items()
    }
    return {**tensors, UNPADDED: layout.numel}
