"""A rank's optimizer as the legacy files have it: by number, or in flat buffers. What `local` reads.

buckets   where the distributed optimizer has a parameter
slices    what of it the rank has

Source: megatron-core 0.16, `Float16OptimizerWithFloat16Params.state_dict`, `DistributedOptimizer.state_dict` and
`get_parameter_state_dp_zero`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zckpt.errors import UnsupportedError
from zckpt.formats.megatron.buckets import Member
from zckpt.formats.megatron.buckets import lay_out as lay_out_buckets
from zckpt.formats.megatron.cut import Cut, Shape
from zckpt.formats.megatron.fused import shape_of_all, together
from zckpt.formats.megatron.local import JOINED, MASTERS, PARAM, UNPADDED
from zckpt.formats.megatron.objects import OPTIMIZER
from zckpt.formats.megatron.optimizer import GROUPS, SCALER, STATES, STEP
from zckpt.formats.megatron.slices import VOCABULARY, Slice, slice_of
from zckpt.formats.megatron.stages import Dealt
from zckpt.formats.megatron.write_common import master_type, state_of
from zckpt.formats.megatron.write_groups import Group, is_of_experts
from zckpt.formats.torch_files.writer import SlotContent, ValueTensor, new_storage, value_node, view
from zckpt.state import MASTER, Checkpoint, Parameter, Slot
from zckpt.torchfile import DType, Tensor


@dataclass(frozen=True, slots=True)
class Model:
    """The whole model by the names of its module, in its order, with its optimizer.

    Parameters
    ----------
    checkpoint : Checkpoint
    tensors : dict of str to (Slot, str)
        With the types that they are to have.
    parameters, trained : dict of str to Parameter
        All of them, and those that the optimizer has, in the module's order.
    given : dict of str to str
        The checkpoint's own names.
    cuts : dict of str to Cut
    ranks : int
        Tensor-parallel ones.
    rows : int or None
        That vocabularies shall have.
    groups : list of Group
    plain : bool
        Whether the optimizer is another than the distributed one.
    step : float or None
    scalers : list
        The loss scaler's state and that of experts, or None.
    bucket_numel : int or None, elements
    gradients : dict of str to str
        Their types by the weights', where they are not float32.
    tied : dict of str to str
        What the last stage calls its copy of an embedding.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, tuple[Slot, str]]
    parameters: Mapping[str, Parameter]
    given: Mapping[str, str]
    trained: Mapping[str, Parameter]
    cuts: Mapping[str, Cut]
    ranks: int
    rows: int | None
    groups: Sequence[Group]
    plain: bool
    step: float | None
    scalers: Sequence[object]
    bucket_numel: int | None
    gradients: Mapping[str, str]
    tied: Mapping[str, str]

    def slice(self, name: str, rank: int) -> Slice:
        """Return a tensor-parallel rank's slice of a tensor."""
        rows = self.rows if name.endswith(VOCABULARY) else None
        return slice_of(self.tensors[name][0].shape, self.cuts[name], rank, self.ranks, rows)

    def shape(self, one: Dealt, rank: int) -> Shape:
        """Return the shape of what a tensor-parallel rank has."""
        own = self.slice(one.name, rank).shape
        return shape_of_all(one.local, len(one.experts), own) if one.experts else own

    def contents(self, one: Dealt, rank: int, slots: Sequence[Slot], label: str, start: int = 0) -> list[SlotContent]:
        """Return the contents of a storage that has what a rank has of slots, one of each expert."""
        own = self.slice(one.name, rank)
        if not one.experts:
            return own.contents(slots[0], label, start)
        whole = together(slots, own)
        return [SlotContent(start, whole, label)] if whole.numel else []

    def tensor(self, one: Dealt, rank: int, slots: Sequence[Slot], dtype: str, label: str) -> Tensor:
        """Return what a rank has of slots as a tensor of its own."""
        shape = self.shape(one, rank)
        return view(new_storage(dtype, prod(shape), self.contents(one, rank, slots, label)), shape)

    def states(self, one: Dealt) -> list[tuple[str, list[Slot], str]]:
        """Return key, slots and type of all that the optimizer has of what a rank has.

        Raises UnsupportedError: it does not have the same of each expert.
        """
        every = [self.state(name) for name in one.experts or (one.name,)]
        kinds = {tuple((key, dtype) for key, _, dtype in its) for its in every}
        owners = {next((at for at, group in enumerate(self.groups) if name in group.members), None)
                  for name in one.experts}  # fmt: skip
        if len(kinds) > 1 or len(owners) > 1 or len({self.tensors[name][1] for name in one.experts}) > 1:
            raise UnsupportedError("experts that are one parameter have one optimizer state",
                                   found=f"others of {one.name}")  # fmt: skip
        return [(key, [its[at][1] for its in every], dtype) for at, (key, _, dtype) in enumerate(every[0])]

    def state(self, name: str) -> list[tuple[str, Slot, str]]:
        """Return key, slot and type of all that the optimizer has of a parameter, the master first."""
        one = self.trained[name]
        every = state_of(one, self.tensors[name], plain=self.plain)
        return [(key, slot, master_type(one) if key == MASTER else slot.dtype) for key, slot in every]


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
    chain = _chain(model)
    scalers = (model.scalers[0], model.scalers[1] if model.scalers[1] is not None else model.scalers[0])
    every = [_one(model, rank, groups, scaler) for groups, scaler in zip(chain, scalers, strict=False)]
    return every[0] if len(every) == 1 else every


def _chain(model: Model) -> list[list[Group]]:
    rest = [one for one in model.groups if not is_of_experts(one)]
    experts = [one for one in model.groups if is_of_experts(one)]
    return [its for its in (rest, experts) if its]


def _one(model: Model, rank: Rank, groups: Sequence[Group], scaler: object) -> dict[object, object]:
    """Return an optimizer with its loss scaler, if it has one: by number, or without parameters."""
    step = model.step
    in_group: dict[object, object] = {} if step is None or (model.plain and type(step) is float) else {STEP: step}
    values: list[dict[object, object]] = [
        {**{key: value_node(value) for key, value in one.values.items()}, **in_group} for one in groups
    ]
    around: dict[object, object] = {SCALER: scaler} if scaler is not None else {}
    if not model.plain:
        return {OPTIMIZER: {GROUPS: values}, **around}
    states: dict[object, object] = {}
    masters: list[list[object]] = []
    per_parameter = {} if step is None or in_group else {STEP: step}
    for group, its in zip(groups, values, strict=True):
        members = set(group.members)
        own = [one for chunk in rank.chunks for one in chunk if one.name in members]
        its["params"] = list(range(len(states), len(states) + len(own)))
        masters.append([])
        for one in own:
            node: dict[object, object] = {
                key: ValueTensor(struct.pack("<f", value), "float32", ()) for key, value in per_parameter.items()
            }
            for key, slots, dtype in model.states(one):
                tensor = model.tensor(one, rank.tp, slots, dtype, f"{key}/{one.name}")
                if key == MASTER:
                    masters[-1].append(tensor)
                else:
                    node[key] = tensor
            states[len(states)] = node
    numbers = sum(len(one) for one in masters)
    inner: dict[object, object] = {STATES: {at: one for at, one in states.items() if one}, GROUPS: values}
    kinds = {model.tensors[name][1] == "float32" for group in groups for name in group.members}
    if kinds == {True}:
        return inner
    if len(kinds) > 1 or numbers != len(states):
        raise UnsupportedError("trains weights of 16 and of 32 bits, which these files number otherwise",
                               advice="give --ckpt-format torch_dist")  # fmt: skip
    return {OPTIMIZER: inner, MASTERS: masters, **around}


def buffers_node(model: Model, rank: Rank) -> object:
    """Return what `distrib_optim.pt` has of a rank.

    Of several optimizers it is a list. What expert-parallel ranks have alike only the first one's file has.
    """
    chain = _chain(model)
    every = [
        None if rank.ep and not any(is_of_experts(one) for one in groups) else _buffers(model, rank, groups)
        for groups in chain
    ]
    return every[0] if len(every) == 1 else every


def _buffers(model: Model, rank: Rank, groups: Sequence[Group]) -> dict[object, object]:
    members = {name for group in groups for name in group.members}
    found: dict[object, object] = {JOINED: True}
    number = 0
    for at, chunk in enumerate(rank.chunks):
        kinds: dict[str, list[Dealt]] = {}
        for one in chunk:
            if one.name in members:
                kinds.setdefault(model.tensors[one.name][1], []).append(one)
        for kind, its in kinds.items():
            gradients = model.gradients.get(kind, "float32")
            numel = model.bucket_numel if rank.pp == 0 and at == 0 else None
            found[number] = {(DType(kind), DType(gradients)): _buffer(model, rank, its, numel)}
            number += 1
    return found


def _buffer(model: Model, rank: Rank, its: Sequence[Dealt], bucket_numel: int | None) -> dict[object, object]:
    """Return a buffer: a flat tensor for each slot, of all buckets end to end."""
    members = [Member(one.local, prod(model.shape(one, rank.tp)), one.shared) for one in its]
    layout = lay_out_buckets(members, bucket_numel)
    starts = layout.starts()
    contents: dict[str, list[SlotContent]] = {}
    types: dict[str, set[str]] = {}
    for one in its:
        for key, slots, dtype in model.states(one):
            filed = PARAM if key == MASTER else key
            label = f"{key}/{one.name}"
            contents.setdefault(filed, []).extend(model.contents(one, rank.tp, slots, label, starts[one.local]))
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
