"""The state that the files of one model-parallel rank describe: every parameter of that rank with its slots.

What a name in `module` is: a buffer if `buffer_names` has it; an alias if `shared_params` does; trained if a
param group has it; frozen if it is listed as that or may be one; else what a module puts next to its parameters, which
is kept as a buffer is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, listed
from zckpt.formats.deepspeed.aliases import notes
from zckpt.formats.deepspeed.auto_ep import auto_experts, check_shapes, from_files
from zckpt.formats.deepspeed.auto_ep_shards import GROUPS_KEY, cut_experts, router_names
from zckpt.formats.deepspeed.expert_ranks import Spread, sharing
from zckpt.formats.deepspeed.experts import expert_number, experts_per_rank, global_name, is_expert
from zckpt.formats.deepspeed.flat import Case, Partitions, element_slots
from zckpt.formats.deepspeed.groups import complete_aliases, flat_groups, optimizer_order, tied_names
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.per_parameter import FrozenPadding, by_group, cut_parameters, frozen_weight
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.deepspeed.values import (
    Apart,
    copies_of,
    group_values,
    hyperparameter,
    own_hyperparameters,
    own_keys,
    quantised_keys,
    rank_values,
    weight_in,
)
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER, WEIGHT, Duplicate, Parameter, ParamGroup, Shape, Slot
from zckpt.state.views import concat
from zckpt.torchfile import Tensor

Weights = Mapping[str, tuple[str, Tensor]]
"""File and tensor of weights that lie outside of the model file: of experts, of pipeline layers."""


def read_rank(
    mp_rank: int,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    weights: Weights,
    shared: Mapping[str, str],
    *,
    spread: Spread[OptimizerShard],
    apart: Apart,
) -> RankState:
    """Put together what the files of one model-parallel rank say.

    Parameters
    ----------
    models : sequence of ModelShard
        One; for ZeRO-3 one for each data-parallel rank, in order.
    members : sequence of OptimizerShard
        One for each data-parallel rank, in order; empty for stage 0.
    weights : mapping of str to (path, Tensor)
    shared : mapping of str to str
        Tied parameters, alias to owner, that another model-parallel rank's file lists: DeepSpeed lets the first
        rank of all list them, and the others none.
    spread : Spread
        The ranks over which experts are spread.
    apart : Apart
        What other model-parallel ranks have otherwise.

    Raises
    ------
    LayoutError
        The files contradict each other.
    """
    layout = _Unpartitioned if not members else _Sharded if members[0].stage == 3 else _Flat
    rank = layout(RankState(mp_rank), models, members, weights, apart)
    rank.read(spread)
    if rank.state.transposed:
        from zckpt.formats.deepspeed.zenflow import transposed

        for name, (shape, slots, group) in rank.trained.items():
            its = transposed(Parameter(name, shape, "", slots))
            rank.trained[name] = its.shape, its.slots, group
    rank.place(shared)
    return rank.state


class _Unpartitioned:
    """A rank whose model file has the weights, and no other file an optimizer: what all layouts have in common."""

    parameterwise = False

    def __init__(
        self,
        state: RankState,
        models: Sequence[ModelShard],
        members: Sequence[OptimizerShard],
        weights: Weights,
        apart: Apart,
    ) -> None:
        self.state, self.models, self.members, self.weights, self.apart = state, models, members, weights, apart
        self.model, self.auto = models[0], auto_experts(models[0])
        self.own = own_keys(members) | apart.state if members else set()
        self.trained: dict[str, tuple[Shape, dict[str, Slot], int]] = {}

    def read(self, spread: Spread[OptimizerShard]) -> None:
        """Read the optimizer's files: groups, and shape, slots and group of each trained parameter."""

    def weight(self, name: str, shape: Shape, tensor: Tensor, path: str) -> dict[str, Slot]:
        """Return the weight of a trained parameter."""
        if tensor.shape != shape:
            raise LayoutError(
                f"{name} has two shapes", path=path, expected=f"{shape} as in param_shapes", found=tensor.shape
            )
        return weight_in(tensor, path)

    def frozen(self, name: str, tensor: Tensor, path: str) -> Slot | None:  # noqa: ARG002  # of the others
        """Return the weight of a parameter that is not trained; None where no file has it."""
        return slot_of(WEIGHT, tensor, path)

    def is_beside(self, name: str, tensor: Tensor) -> bool:  # noqa: ARG002
        """Tell whether a module has put a tensor into its state dict that is neither a parameter nor a buffer.

        A quantised weight has its scales and maps there (bitsandbytes: `weight.absmax`, `weight.quant_map`, ...), and
        without them its codes mean nothing. Every rank has them whole. They are known by what they are not: a trained
        parameter is in a group and a frozen one is listed. ZeRO-1 has no such list, and a file without its optimizer
        no groups; there, what lies below a tensor's name is no parameter of a module.
        """
        if self.model.frozen_shapes is not None and self.trained:
            return name not in self.model.frozen_shapes
        words = name.split(".")
        above = any(".".join(words[:end]) in self.model.module for end in range(1, len(words)))
        return name not in (self.model.frozen_shapes or {}) and (words[-1] == "_extra_state" or above)

    def place(self, shared: Mapping[str, str]) -> None:
        """Sort the names of the module, of other weight files and of the groups into parameters and buffers."""
        state, model, trained = self.state, self.model, self.trained
        aliases = tied_names(self.models, trained, shared, parameterwise=self.parameterwise)
        weights = self.weights
        whole: dict[str, Slot] = {}
        if self.auto:
            aliases = {**router_names(model, parameterwise=self.parameterwise), **aliases}
            layers = () if self.parameterwise else dict.fromkeys(self.auto.values())
            weights, whole = from_files(weights, layers, trained)
        lost, known = [], {*model.module, *trained, *weights}
        every = {name: (model.path, tensor) for name, tensor in model.module.items()}
        outside = {name: one for name, one in weights.items() if name not in every}
        for name, (path, tensor) in {**every, **outside}.items():
            if name in model.buffer_names:
                state.buffers[name] = Parameter(name, tensor.shape, tensor.dtype, weight_in(tensor, path))
            elif name in every and name in aliases and aliases[name] in known:
                state.parameters[name] = Parameter(name, (), tensor.dtype, tied_to=aliases[name])
            elif name in trained:
                shape, slots, group = trained[name]
                slots = {**self.weight(name, shape, tensor, path), **slots}
                state.parameters[name] = Parameter(name, shape, tensor.dtype, slots, group)
            elif name in every and self.is_beside(name, tensor):
                state.buffers[name] = Parameter(name, tensor.shape, tensor.dtype, weight_in(tensor, path))
            elif (slot := self.frozen(name, tensor, path)) is not None:
                state.parameters[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot}, frozen=True)
            else:
                lost.append(name)
        if lost:
            state.warnings.append(f"{model.path}: no file holds the values of {listed(lost)}; left out")
        for name, slot in whole.items():
            shape, slots, index = trained.get(name, (slot.shape, {}, None))
            if shape != slot.shape:
                raise LayoutError(f"{name} has two shapes", expected=f"{shape} as in param_shapes", found=slot.shape)
            held = {WEIGHT: slot, **slots}
            state.parameters[name] = Parameter(name, shape, slot.dtype, held, index, frozen=index is None)
        self._place_without_weight()
        complete_aliases(state.parameters)
        self.note_copies()

    def _place_without_weight(self) -> None:
        """Add trained parameters that no file has a weight of; an expert has a file of its own, so that is an error."""
        for name, (shape, slots, group) in self.trained.items():
            if name not in self.state.parameters and is_expert(name):
                number = expert_number(name)
                raise ShardError(
                    f"no file holds the weights of expert {number} ({name})",
                    expected=f"a file layer_*_expert_{number}_mp_rank_*_model_states.pt next to it",
                    code=MISSING_FILE,
                    parameters=[name],
                )
            if name not in self.state.parameters:
                self.state.parameters[name] = Parameter(name, shape, self.model.dtype, slots, group)

    def note_copies(self) -> None:
        """Note what the model file holds besides what is read: of tied weights, and of frozen ones."""
        state, model = self.state, self.model
        for name, parameter in state.parameters.items():
            if parameter.tied_to is not None and name in model.module:
                owner, copy = state.parameters[parameter.tied_to], weight_in(model.module[name], model.path)
                state.duplicates += copies_of(name, copy, owner.slots, kind="tied", of=owner.name)
        for name, tensor in (model.frozen_fragments or {}).items():
            if name in state.parameters:
                state.duplicates += copies_of(name, weight_in(tensor, model.path), state.parameters[name].slots)

    def add_values(self, partitions: Mapping[int, int], read: Mapping[int, Collection[str]]) -> None:
        """Add what each rank has of its own in the partitions of these groups, but for the keys that are read."""
        self.state.per_rank += rank_values(self.members, partitions, self.own, read)
        self.state.warnings += notes(self.members, {value.key for value in self.state.per_rank})

    def add_group(self, index: int, partitions: Sequence[int], names: list[str]) -> None:
        """Add a group with its hyperparameters and the state that is one value for all its elements."""
        members, hyperparameters = self.members, {}
        if index < len(members[0].groups):
            apart = own_hyperparameters(members, index).union(*self.apart.groups[index : index + 1])
            kept = {k: v for k, v in members[0].groups[index].items() if k != "params" and k not in apart}
            hyperparameters = {k: hyperparameter(members[0], v) for k, v in kept.items()}
            self.state.per_rank += group_values(members, index, min(partitions, default=index), apart)
        held = [member.scalars[partition] for member in members for partition in partitions]
        values = {k: v for scalars in reversed(held) for k, v in scalars.items() if k not in self.own}
        self.state.groups.append(ParamGroup(hyperparameters, names, values))


class _Flat(_Unpartitioned):
    """A rank of ZeRO-1, ZeRO-2 or BF16_Optimizer, see `flat`."""

    def read(self, spread: Spread[OptimizerShard]) -> None:
        """Read the optimizer's files."""
        state, model, members = self.state, self.model, self.members
        held = model.module | {name: tensor for name, (_, tensor) in self.weights.items()}
        groups = flat_groups(model, members, {name: tensor.shape for name, tensor in held.items()}, spread)
        if model.uses_zenflow:
            from zckpt.formats.deepspeed.zenflow import are_transposed, flipped

            state.transposed = are_transposed(held, [group.shapes for group in groups])
            if state.transposed:
                groups = [replace(group, shapes=flipped(group.shapes)) for group in groups]
        cuts = [
            [Partitions(group, ranks) for ranks in sharing(members, spread, group.index, list(group.shapes))]
            for group in groups
        ]
        momenta = self._whole_momenta([cut for of_group in cuts for cut in of_group])
        keys = element_slots(case for of_group in cuts for cut in of_group for case in cut.cases())
        per_rank = experts_per_rank(name for group in groups for name in group.shapes)
        paths = {member.path for member in members}
        read: dict[int, set[str]] = {}
        for group, of_group in zip(groups, cuts, strict=True):
            ep = len(of_group)
            check_shapes(group.shapes, self.auto, ep)
            state.degrees.append(ep if any(map(is_expert, group.shapes)) else None)
            state.expert_parallel = max(state.expert_parallel, ep)
            names: dict[str, None] = {}
            of_auto: dict[str, list[dict[str, Slot]]] = {}
            for expert_rank, cut in enumerate(of_group):
                per_element = keys[group.index].difference(*cut.aside)
                slots, padding, padding_spans = cut.cut(per_element)
                whole, copies = momenta.get(id(cut), ({}, []))
                read[group.index] = per_element | {slot.name for slot in whole.values()}
                state.duplicates += copies if members[0] in spread.members[:1] else []
                for name, slot in whole.items():
                    slots[name][slot.name] = slot
                # Of experts that are spread over all tensor-parallel ranks, each says what its own files have.
                own = zip(cut.members, padding, strict=True)
                state.padding += [one for member, one in own if member.path in paths]
                state.padding_spans.append([one for one in padding_spans if one.path in paths])
                renamed = {name: global_name(name, expert_rank, per_rank) if ep > 1 else name for name in group.shapes}
                for name, shape in group.shapes.items():
                    if name in self.auto:
                        of_auto.setdefault(name, []).append(slots[name])
                    else:
                        self._claim(renamed[name], shape, slots[name], group.index)
                order = optimizer_order(list(group.shapes), model, members[0].partition_count[group.index])
                names |= dict.fromkeys(renamed[name] for name in order)
            for name, parts in of_auto.items():
                slots_of_all = {
                    key: concat([one[key] for one in parts], 0) for key in parts[0] if all(key in one for one in parts)
                }
                self._claim(name, slots_of_all[MASTER].shape, slots_of_all, group.index)
            self.add_group(group.index, [group.index], list(names))
        self.add_values({index: index for index in read}, read)

    def _whole_momenta(self, cuts: Sequence[Partitions]) -> dict[int, tuple[dict[str, Slot], list[Duplicate]]]:
        """Return Muon's momenta of whole matrices and their copies, for groups that have such; see `muon`."""
        found = {}
        for cut in cuts:
            first = cut.members[0]
            hyperparameters = first.groups[cut.index] if cut.index < len(first.groups) else {}
            if hyperparameters.get("use_muon") is True:
                from zckpt.formats.deepspeed.muon import MOMENTUM, is_whole, keeps_whole_matrices, whole_slots

                config, partition = self.model.config, first.bf16_optimizer
                if keeps_whole_matrices(hyperparameters, config, partition=partition) and is_whole(cut):
                    cut.aside = [keys | {MOMENTUM} for keys in cut.aside]
                    found[id(cut)] = whole_slots(cut)
        return found

    def _claim(self, name: str, shape: Shape, slots: dict[str, Slot], group: int) -> None:
        if name in self.trained:
            raise LayoutError(f"{name} is in two param groups", found=f"groups {self.trained[name][2]} and {group}")
        self.trained[name] = (shape, slots, group)


class _Sharded(_Unpartitioned):
    """A rank of ZeRO-3, whose model files have no weights of what is trained, and shards of what is not."""

    parameterwise = True

    def read(self, spread: Spread[OptimizerShard]) -> None:  # noqa: ARG002
        """Read the optimizer's files."""
        state, model, members = self.state, self.model, self.members
        if model.param_shapes is None:
            raise LayoutError("no param_shapes", advice="the order of the shards is not known")
        shapes: Shapes = {name: shape for one in model.param_shapes for name, shape in one.items()}
        if len(shapes) != sum(map(len, model.param_shapes)):
            raise LayoutError("a parameter is in two param groups")
        state.transposed = model.uses_zenflow
        keys = element_slots(
            Case(member, index, master.numel, master.numel, quantised_keys(member.tensors[index]))
            for member in members
            for index, master in enumerate(member.masters)
        )
        read = {sub: keys[sub] - quantised_keys(tensors) for sub, tensors in enumerate(members[0].tensors)}
        groups_of_experts = members[0].content.get(GROUPS_KEY)
        cut = cut_experts(self.models, members, read) if groups_of_experts else cut_parameters(shapes, members, read)
        state.expert_parallel, state.padding_spans = cut.degree, [*cut.spans, FrozenPadding(self.models)]
        subs = [[int(n) for n in g.get("params", [i])] for i, g in enumerate(members[0].groups)]  # type: ignore[attr-defined]
        group_of = {sub: index for index, one in enumerate(subs) for sub in one}
        absent = sorted(sub for sub in group_of if not 0 <= sub < len(members[0].masters))
        if absent:
            raise LayoutError(
                "a param group names a sub-group that is not there",
                path=members[0].path,
                expected=f"below {len(members[0].masters)}",
                found=absent[0],
            )
        for name, shape in cut.shapes.items():
            if cut.sub_groups[name] not in group_of:
                raise LayoutError(f"sub-group {cut.sub_groups[name]} is in no param group", path=members[0].path)
            self.trained[name] = (shape, cut.slots[name], group_of[cut.sub_groups[name]])
        for index, its_subs in enumerate(subs):
            names = [name for name, (_, _, group) in self.trained.items() if group == index]
            self.add_group(index, its_subs, names)
        self.add_values(group_of, {sub: read[sub] for sub in group_of})
        state.padding = by_group(cut.padding, group_of)

    def weight(self, name: str, shape: Shape, tensor: Tensor, path: str) -> dict[str, Slot]:  # noqa: ARG002
        """Return nothing: in the file, its tensor is empty."""
        return {}

    def frozen(self, name: str, tensor: Tensor, path: str) -> Slot | None:
        """Return the weight of a parameter that is not trained, from the shards in each rank's model file."""
        if name not in self.model.module:
            return super().frozen(name, tensor, path)
        shape = (self.model.frozen_shapes or {}).get(name)
        if shape is None or 0 in shape:
            return None if shape is None else Slot(WEIGHT, tensor.dtype, shape, ())
        slot = frozen_weight(name, shape, self.models)
        if slot is None or not self.state.transposed:
            return slot
        from zckpt.formats.deepspeed.zenflow import transposed_slot

        return transposed_slot(slot)

    def is_beside(self, name: str, tensor: Tensor) -> bool:
        """Tell whether a tensor is none of a parameter's, which are empty."""
        return tensor.numel > 0 and name not in (self.model.frozen_shapes or {})

    def note_copies(self) -> None:
        """Note the copies of buffers that other ranks' files hold."""
        for model in self.models[1:]:
            for name, buffer in self.state.buffers.items():
                if name in model.module:
                    copy = weight_in(model.module[name], model.path)
                    self.state.duplicates += copies_of(name, copy, buffer.slots, model.shard.dp_rank, kind="buffer")
