"""The state that the files of one model-parallel rank describe: every parameter of that rank with its slots.

What a name in `module` is: a buffer if `buffer_names` has it; an alias if `shared_params` does; trained if a
param group has it; frozen if it is listed as that or may be one, which at stage 0 its optimizer tells; else what a
module puts next to its parameters, which is kept as a buffer is.

Param groups have an order, and so have their parameters in the optimizer. DeepSpeed goes through a set of names where
it makes groups of experts over several numbers of ranks (`ep_size_1`, `ep_size_2`), so that their order is that of a
process's hash seed, and each rank's is its own. Groups are told by what they say: their names and hyperparameters. Of
those that say the same, all have the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, listed
from zckpt.formats.deepspeed.axes.auto_ep import auto_experts, from_files, router_names
from zckpt.formats.deepspeed.axes.expert_ranks import Spread
from zckpt.formats.deepspeed.axes.experts import expert_number, is_expert
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.rare.aliases import notes
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Weights
from zckpt.formats.deepspeed.values import (
    PLAIN,
    copies_of,
    hyperparameter,
    own_hyperparameters,
    own_keys,
    weight_in,
)
from zckpt.formats.torch_files.tensors import identity_of, slot_of
from zckpt.state import WEIGHT, Parameter, ParamGroup, Scalar, Slot, without
from zckpt.state.checkpoint import RankValue
from zckpt.state.partition import round_robin_order
from zckpt.torchfile import Digests, FromFile


def optimizer_order(names: Sequence[str], model: ModelShard, world_size: int) -> list[str]:
    """Return a group's names in the optimizer's order, which round robin changes for the flat buffer only."""
    if not model.zero_option("round_robin_gradients"):
        return list(names)
    order = round_robin_order(len(names), world_size)
    return [name for _, name in sorted(zip(order, names, strict=True))]


def tied_names(
    models: Sequence[ModelShard], trained: Set[str], others: Mapping[str, str], *, parameterwise: bool
) -> dict[str, str]:
    """Return alias to owner.

    Parameters
    ----------
    models : sequence of ModelShard
        Of one model-parallel rank.
    trained : set of str
        Parameters that a param group has.
    others : mapping of str to str
        What the files of other model-parallel ranks list.
    parameterwise : bool
        ZeRO-3, where a model file holds no weights.

    Notes
    -----
    DeepSpeed takes empty parameters for aliases of each other, for they share no memory at the same address;
    they are not. It lists no two names that one module has for a parameter (`named_parameters` in its
    `_get_shared_params`); files before 2023 have no `shared_params`, and what its own Python writer writes has an empty
    one. So two names of the same bytes are one parameter, too. Under ZeRO-3 the weights in a model file are empty, but
    each parameter's has a storage of its own, which all of its names have.
    """
    found: dict[str, str] = dict(others)
    module = models[0].module
    for model in models:
        found.update(model.shared)
    alike: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, t in module.items():
        tells = not t.numel if parameterwise else bool(t.numel)
        if tells and name not in models[0].buffer_names:
            alike[identity_of(t)].append(name)
    known = trained | models[0].frozen.keys()
    for names in alike.values():
        if not parameterwise or len(known.intersection(names)) == 1:  # else they only share what is empty
            owner, *aliases = sorted(names, key=lambda name: (name not in trained, name not in known, name in found))
            found |= {name: owner for name in aliases if name not in found}
    result = {}
    for pair in found.items():
        alias, owner = pair if pair[0] not in trained or pair[1] in trained else pair[::-1]
        empty = alias in module and not parameterwise and not module[alias].numel
        if alias not in trained and not empty and alias not in models[0].frozen:
            result[alias] = owner
    return {alias: result.get(owner, owner) for alias, owner in result.items()}


def complete_aliases(parameters: Mapping[str, Parameter]) -> None:
    """Give tied parameters the shape and dtype of their owners.

    Raises LayoutError: there is no owner.
    """
    for name, parameter in parameters.items():
        if parameter.tied_to is None:
            continue
        owner = parameters.get(parameter.tied_to)
        if owner is None or owner.tied_to is not None:
            raise LayoutError(f"{name} is tied to a parameter that does not exist", found=parameter.tied_to)
        parameter.shape, parameter.dtype = owner.shape, owner.dtype


BY_GROUP = ("masters", "tensors", "scalars", "partition_count", "paddings", "alignment_paddings", "mappings")
"""What an optimizer's file has for each param group."""


def in_one_order(optimizers: Sequence[OptimizerShard]) -> list[OptimizerShard]:
    """Return optimizer files with their groups as the first one of their model-parallel rank has them.

    Those whose groups are others stay as they are, and are found to be different later.
    """
    firsts: dict[int | None, OptimizerShard] = {}
    found: list[OptimizerShard] = []
    for one in optimizers:
        first, order = firsts.setdefault(one.mp_rank, one), None
        several = {repr(group.get("name")) for group in one.groups if group.get("moe") is True}
        by_group = {name: getattr(one, name) for name in BY_GROUP}
        fits = len(one.masters) == len(one.groups) and all(
            len(its) == len(one.groups) for its in by_group.values() if its
        )
        if one is not first and len(several) > 1 and fits:
            order = order_like(first.groups, one.groups)
        if order is None or order == sorted(order):
            found.append(one)
            continue
        moved: dict[str, Any] = {name: its and [its[at] for at in order] for name, its in by_group.items()}
        groups = [{**one.groups[at], "params": first.groups[index].get("params")} for index, at in enumerate(order)]
        found.append(replace(one, **moved, groups=groups, order=tuple(order)))
    return found


def order_like(wanted: Sequence[dict[str, object]], own: Sequence[dict[str, object]]) -> list[int] | None:
    """Return the places of the same groups among a rank's own; None if it has others."""
    digests = Digests()
    keys, left = ([digests.of(without(group, "params")) for group in groups] for groups in (wanted, own))
    found: list[int] = []
    for key in keys:
        at = next((at for at, other in enumerate(left) if other == key and at not in found), None)
        if at is None:
            return None
        found.append(at)
    return found if len(found) == len(own) else None


class Layout:
    """A layout of a rank's files: all that lies in the model file, and what is common to the others.

    Parameters
    ----------
    rank : Rank
        Has its files; there are no members at stage 0.
    weights : mapping of str to Slot
        What lies outside of the model file: of experts, of pipeline layers.
    firsts : sequence of OptimizerShard
        Of each model-parallel rank the first one: what they have otherwise, each has of its own.
    """

    parameterwise = False

    def __init__(self, rank: Rank, weights: Weights, firsts: Sequence[OptimizerShard]) -> None:
        self.rank, self.model, self.members, self.firsts = rank, rank.model, rank.members, firsts
        self.auto = auto_experts(self.model)
        module = {name: slot_of(WEIGHT, tensor, self.model.path) for name, tensor in self.model.module.items()}
        self.held = module | weights | module  # names of the module come first
        self.own = own_keys(self.members, firsts) if self.members else set()
        self.trained: dict[str, Parameter] = {}

    def fill(self, shared: Mapping[str, str], spread: Spread) -> None:
        """Put together what the files say.

        `shared`: tied parameters, alias to owner, that another model-parallel rank's file lists: DeepSpeed lets the
        first rank of all list them, and the others none; `spread`: the ranks over which experts are spread. Raises
        LayoutError: the files contradict each other.
        """
        self.read(spread)
        if self.rank.transposed:
            from zckpt.formats.deepspeed.rare.zenflow import transposed

            self.trained = {name: transposed(one) for name, one in self.trained.items()}
        self.place(shared)

    def read(self, spread: Spread) -> None:
        """Read the optimizer's files: groups, and shape, slots and group of each trained parameter."""

    def frozen(self, name: str, slot: Slot) -> Slot | None:  # noqa: ARG002  # of the others
        """Return the weight of a parameter that is not trained; None where no file has it."""
        return slot

    def is_beside(self, name: str, slot: Slot) -> bool:  # noqa: ARG002
        """Tell whether a module has put a tensor into its state dict that is neither a parameter nor a buffer.

        A quantised weight has its scales and maps there (bitsandbytes: `weight.absmax`, `weight.quant_map`, ...), and
        without them its codes mean nothing. Every rank has them whole. They are known by what they are not: a trained
        parameter is in a group and a frozen one is listed. ZeRO-1 has no such list, and a file without its optimizer
        no groups; there, what lies below a tensor's name is no parameter of a module.
        """
        if self.model.frozen_shapes is not None and self.trained:
            return name not in self.model.frozen
        words = name.split(".")
        above = any(".".join(words[:end]) in self.model.module for end in range(1, len(words)))
        return name not in self.model.frozen and (words[-1] == "_extra_state" or above)

    def place(self, shared: Mapping[str, str]) -> None:
        """Sort the names of the module, of other weight files and of the groups into parameters and buffers."""
        rank, module, trained, held = self.rank, self.model.module, self.trained, self.held
        aliases = tied_names(rank.model_files, trained.keys(), shared, parameterwise=self.parameterwise)
        if self.auto:
            aliases = {**router_names(self.model, parameterwise=self.parameterwise), **aliases}
            held = from_files(held, () if self.parameterwise else dict.fromkeys(self.auto.values()), trained)
        lost = []
        # DeepSpeed lists one name of a buffer that a module has under two, or of a module that another has twice.
        of_buffers = {module[name].storage for name in self.model.buffer_names if name in module}
        for name, slot in held.items():
            if name in self.model.buffer_names:
                rank.buffers[name] = Parameter.of(name, slot)
            elif name in module and (owner := aliases.get(name)) is not None and (owner in held or owner in trained):
                rank.parameters[name] = Parameter(name, (), slot.dtype, tied_to=owner)
            elif name in trained:
                own, later = trained[name], name in self.model.frozen  # frozen while it was trained
                stored: Slot | None = slot
                if self.parameterwise:  # whose files have no other weights
                    stored = self.frozen(name, slot) if later else None
                if stored is not None and stored.shape != own.shape:
                    path = next((span.path for span in stored.spans), None)
                    expected = f"{own.shape} as in param_shapes"
                    raise LayoutError(f"{name} has two shapes", path=path, expected=expected, found=stored.shape)
                weight = {} if stored is None else {WEIGHT: stored}
                rank.parameters[name] = replace(own, dtype=slot.dtype, slots={**weight, **own.slots}, frozen=later)
            elif name in module and (module[name].storage in of_buffers or self.is_beside(name, slot)):
                rank.buffers[name] = Parameter.of(name, slot)
            elif (frozen := self.frozen(name, slot)) is not None:
                rank.parameters[name] = replace(Parameter.of(name, frozen), frozen=bool(self.firsts))
            else:
                lost.append(name)
        if lost:
            rank.warnings.append(f"{self.model.path}: no file holds the values of {listed(lost)}; they are left out")
        for name, own in trained.items():
            if name not in rank.parameters and is_expert(name):  # which has a file of its own
                number = expert_number(name)
                raise ShardError(
                    f"no file holds the weights of expert {number} ({name})",
                    expected=f"a file layer_*_expert_{number}_mp_rank_*_model_states.pt next to it",
                    code=MISSING_FILE,
                    parameters=[name],
                )
            rank.parameters.setdefault(name, own)
        complete_aliases(rank.parameters)
        self.note_copies()

    def note_copies(self) -> None:
        """Note what the model file holds besides what is read: of tied weights, and of frozen ones."""
        rank, model = self.rank, self.model
        for name, parameter in rank.parameters.items():
            if parameter.tied_to is not None and name in model.module:
                copy, read = weight_in(model.module[name], model.path), rank.owner(name).slots
                rank.duplicates += copies_of(name, copy, read, kind="tied", of=parameter.tied_to)
        for name, tensor in model.frozen_fragments.items():
            if name in rank.parameters:
                rank.duplicates += copies_of(name, weight_in(tensor, model.path), rank.parameters[name].slots)

    def add_values(self, partitions: Mapping[int, int], read: Mapping[int, Collection[str]]) -> None:
        """Add what each rank has of its own in these partitions, given their groups, but for the keys that are read."""
        for member in self.members:
            for part, group in partitions.items():
                values = [(key, value) for key, value in member.scalars[part].items() if key in self.own]
                tensors = [(key, tensor) for key, tensor in member.tensors[part].items() if key not in read[part]]
                for key, value in [*values, *tensors]:
                    kept = value if isinstance(value, (*PLAIN, Scalar)) else FromFile.of(member.file, value)
                    self.rank.per_rank.append(RankValue(key, group, part, member.rank, member.mp_rank, kept))
        self.rank.warnings += notes(self.members, {value.key for value in self.rank.per_rank})

    def add_group(self, index: int, partitions: Sequence[int], names: list[str]) -> None:
        """Add a group with its hyperparameters and the state that is one value for all its elements."""
        members, hyperparameters = self.members, {}
        if own := members[0].group(index):
            apart = own_hyperparameters([*members, *(one for one in self.firsts if one.group(index))], index)
            kept = without(own, "params", *apart)
            hyperparameters = {k: hyperparameter(members[0], v) for k, v in kept.items()}
            part = min(partitions, default=index)
            self.rank.per_rank += [
                RankValue(key, index, part, one.rank, one.mp_rank, hyperparameter(one, value), in_group=True)
                for one in members
                for key, value in one.group(index).items()
                if key in apart
            ]
        held = [member.scalars[partition] for member in members for partition in partitions]
        values = {k: v for scalars in reversed(held) for k, v in without(scalars, *self.own).items()}
        self.rank.param_groups.append(ParamGroup(hyperparameters, names, values))
