"""Mixture-of-experts: local and global numbers of experts, and which ranks share an expert group.

With expert-parallel degree ep, expert parameters are spread over ep ranks and replicated over the rest: which ranks
those are, `expert_ranks` knows. A file names experts by their local number; the global one is e x (experts per rank) +
local, for expert rank e.

Without ZeRO, an expert rank has a file of its own with all that its optimizer has:

expp_rank_E_mp_rank_MM_optim_states.pt   {optimizer: a plain optimizer, see `stage0`}

    param_groups   dense ones, alike on all ranks, and of experts (`moe`, name `ep_size_N`), in the model's order
    expert number  global: e x (experts per rank) + local; a rank's optimizer has its own experts only

Under ZeRO, whose files have the state of experts, too, DeepSpeed before 0.19 writes them with `None`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zckpt.codes import MISSING_FILE, STEPS_DIFFER
from zckpt.errors import DamagedFileError, ShardError, UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.stage0 import keep_other_state, mark_frozen, of_content, rounds_to_weight
from zckpt.formats.deepspeed.stage0_flat import FLAT_KEY
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, ParamGroup
from zckpt.torchfile import TorchFile

FLAT_EXPERTS = (
    "flat masters, which have no names, of a rank's experts and all else: where an expert is in them, no file says"
)

_EXPERT = re.compile(r"(?P<before>.*deepspeed_experts\.)(?P<number>\d+)(?P<after>\..*)", re.DOTALL)

_NAMED = re.compile(r"ep_size_(\d{1,6})")


def is_expert(name: str) -> bool:
    """Tell whether a parameter belongs to an expert of DeepSpeed's MoE layer."""
    return _EXPERT.fullmatch(name) is not None


def expert_number(name: str) -> int | None:
    """Return the number of the expert that a parameter belongs to."""
    match = _EXPERT.fullmatch(name)
    return int(match["number"]) if match else None


def layer_of(name: str) -> str:
    """Return the MoE layer of an expert's parameter: the name before the expert's number."""
    match = _EXPERT.fullmatch(name)
    return match["before"] if match else ""


def in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that takes numbers in a name as numbers."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]+)", name)]


def named_degree(group: ParamGroup) -> int:
    """Return over how many ranks experts are spread as the group's name says; 1 where it does not."""
    name = group.hyperparameters.get("name")
    match = _NAMED.fullmatch(name) if isinstance(name, str) else None
    return max(int(match[1]), 1) if match else 1


def experts_per_rank(names: Iterable[str]) -> dict[str, int]:
    """Return for each MoE layer (the name before the number) how many experts these names speak of."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            numbers.setdefault(match["before"], set()).add(int(match["number"]))
    return {before: len(found) for before, found in numbers.items()}


def global_name(name: str, expert_rank: int, per_rank: dict[str, int]) -> str:
    """Return the name with the expert's global number."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    number = int(match["number"]) + expert_rank * per_rank[match["before"]]
    return f"{match['before']}{number}{match['after']}"


def local_name(name: str, expert_rank: int, per_rank: dict[str, int]) -> str:
    """Return the name with the number that the expert has on its expert rank."""
    return global_name(name, -expert_rank, per_rank)


def spread_experts(names: Sequence[Sequence[str]], degree: int, path: str) -> list[list[str]]:
    """Return the names of experts, under their global numbers, for each rank of another expert-parallel degree.

    Parameters
    ----------
    names : sequence of sequence of str
        For each expert rank of the source, in the optimizer's order.
    path : str
        For messages.

    Raises
    ------
    UsageError
        The experts of a layer do not divide among the ranks.
    UnsupportedError
        They are not layer by layer and expert by expert, so that their order at another degree is not known.
    """
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names[0]:
        match = _EXPERT.fullmatch(name)
        if match:
            layers.setdefault(match["before"], {}).setdefault(int(match["number"]), []).append(match["after"])
    counts = {layer: len(found) * len(names) for layer, found in layers.items()}

    def assigned(ranks: int) -> list[list[str]]:
        return [
            [
                f"{layer}{number}{after}"
                for layer, found in layers.items()
                for number in range(rank * counts[layer] // ranks, (rank + 1) * counts[layer] // ranks)
                for after in found[min(found)]
            ]
            for rank in range(ranks)
        ]

    for layer, count in counts.items():
        if count % degree:
            raise UsageError(
                f"{count} experts of {layer.removesuffix('.deepspeed_experts.')} cannot be spread over {degree} ranks",
                path=path,
                expected=f"a divisor of {count}",
                found=degree,
            )
    if assigned(len(names)) != [list(one) for one in names]:
        raise UnsupportedError(
            "the optimizer has its experts neither layer by layer nor expert by expert: their order over other ranks "
            "is not known",
            path=path,
            expected="--expert-parallel-size left out",
        )
    return assigned(degree)


Files = Sequence[tuple[Shard, TorchFile]]


def check_empty(files: Files) -> None:
    """Raise UnsupportedError unless these files, which lie next to those of ZeRO, hold nothing."""
    for shard, file in files:
        if not isinstance(file.root, dict) or any(value is not None for value in file.root.values()):
            raise UnsupportedError(
                "holds state of an optimizer next to the files of ZeRO, which have all of it",
                path=shard.path,
                expected="{'optimizer': None}",
                advice="if it is left over from a run without ZeRO, move it elsewhere",
            )


def attach_experts(checkpoint: Checkpoint, files: Files, model: ModelShard, names: Sequence[str] | None) -> None:
    """Give a checkpoint without ZeRO the optimizers of its expert ranks.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already, experts under their global numbers.
    files : sequence of (Shard, TorchFile)
        By expert rank.
    model : ModelShard
        Whose own optimizer, where it has one, is that of the first rank.
    names : sequence of str, optional
        Names of a rank's parameters in its optimizer's order, experts under their local numbers.

    Raises
    ------
    ShardError
        Files are missing, or of different steps.
    UnsupportedError
        Which experts a rank's optimizer has, or which parameter is which, is not known.
    """
    ranks = [shard.dp_rank or 0 for shard, _ in files]
    expected = max(max(ranks) + 1, _degree(content_of(files[0][1])))
    if len(ranks) != expected or ranks != list(range(expected)):  # a file name may have any number
        raise ShardError(
            "optimizer files of expert ranks are missing",
            path=checkpoint.source,
            expected=f"{expected} ranks",
            found=", ".join(map(str, ranks)),
            code=MISSING_FILE,
        )
    found = [_Rank(checkpoint, rank, len(files), content_of(file), file, names) for rank, (_, file) in enumerate(files)]
    first = found[0]
    for one in found:
        if one.settings != first.settings:
            raise ShardError(
                f"expert rank {one.rank} is from another step or run: its param groups differ",
                path=one.file.path,
                code=STEPS_DIFFER,
                ranks=[one.rank],
            )
        one.give_experts()
    first.give_dense()
    for index, group in enumerate(first.groups):
        ranks_of_group = found if index in first.of_experts else found[:1]
        members = [name for one in ranks_of_group for name in one.groups[index].parameters]
        checkpoint.param_groups.append(ParamGroup(group.hyperparameters, members, group.state))
    own = model.content.get("optimizer")
    if isinstance(own, dict):
        found.append(_Rank(checkpoint, 0, len(files), own, model.file, names))
    for one in found[1:]:
        checkpoint.duplicates += one.copies()
    checkpoint.topology = replace(checkpoint.topology, ep=len(files))
    keep_other_state(checkpoint, first.content, first.file)
    mark_frozen(checkpoint)


def content_of(file: TorchFile) -> dict[object, object]:
    """Return the optimizer of an expert rank's file."""
    content = file.root.get("optimizer") if isinstance(file.root, dict) else None
    if not isinstance(content, dict):
        raise DamagedFileError(
            "unexpected content", path=file.path, expected="an optimizer's state dict", found=type(content).__name__
        )
    return content


def _degree(content: dict[object, object]) -> int:
    """Return over how many ranks the experts are spread, as the names of their groups say; 1 where they do not."""
    base = content.get("optimizer_state_dict", content)
    groups = base.get("param_groups") if isinstance(base, dict) else None
    names = [group.get("name") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    degrees = {int(match[1]) for name in names if isinstance(name, str) and (match := _NAMED.fullmatch(name))}
    return degrees.pop() if len(degrees) == 1 else 1


class _Rank:
    """What the optimizer of one expert rank has, by name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rank: int,
        degree: int,
        content: dict[object, object],
        file: TorchFile,
        names: Sequence[str] | None,
    ) -> None:
        self.checkpoint, self.rank, self.content, self.file = checkpoint, rank, content, file
        if FLAT_KEY in content:
            raise UnsupportedError(FLAT_EXPERTS, path=file.path)
        optimizer = of_content(content, file.path)
        self.of_experts = [i for i, group in enumerate(optimizer.groups) if group.get("moe") is True]
        self._check_degree(optimizer, degree)
        total = experts_per_rank(checkpoint.parameters)
        per_rank = {layer: count // degree for layer, count in total.items()}
        owners = [name for name, p in checkpoint.parameters.items() if p.tied_to is None]
        dense = [name for name in owners if not is_expert(name)]
        local = [name for name in owners if is_expert(name) and self._has(name, per_rank)]
        given = None if names is None else [global_name(name, rank, per_rank) for name in names]
        others = [i for i in range(len(optimizer.groups)) if i not in self.of_experts]
        self.dense = self._of_groups(optimizer, others, {name: name for name in dense}, given)
        # In an order that is not by name: "10" would come before "2".
        self.experts = self._of_groups(optimizer, self.of_experts, {f"{i:09}": n for i, n in enumerate(local)}, given)
        if self.experts.unnamed:
            raise UnsupportedError(
                f"which expert's the optimizer's parameters {listed(list(self.experts.unnamed))} are is not known",
                path=file.path,
                advice="give --names FILE, one name a line in the optimizer's order, experts by their number on a rank",
            )
        both = {**dict(zip(others, self.dense.param_groups, strict=True)),
                **dict(zip(self.of_experts, self.experts.param_groups, strict=True))}  # fmt: skip
        self.groups = [both[i] for i in range(len(optimizer.groups))]

    def _check_degree(self, optimizer: OptimizerState, degree: int) -> None:
        odd = [name for i in self.of_experts if (name := optimizer.groups[i].get("name")) != f"ep_size_{degree}"]
        if odd:
            raise UnsupportedError(
                "experts spread over different numbers of ranks, without ZeRO",
                path=self.file.path,
                expected=f"param groups ep_size_{degree}, as there are files",
                found=", ".join(map(str, odd)),
            )

    def _has(self, name: str, per_rank: dict[str, int]) -> bool:
        match = _EXPERT.fullmatch(name)
        count = per_rank[match["before"]] if match else 0
        return match is not None and count > 0 and int(match["number"]) // count == self.rank

    def _of_groups(
        self, optimizer: OptimizerState, groups: Sequence[int], known: dict[str, str], given: Sequence[str] | None
    ) -> Checkpoint:
        """Return some of the groups and their parameters as a checkpoint of their own, under the parameters' names.

        `known` has the label under which a parameter is looked for, and its name.
        """
        every = [n for numbers in optimizer.numbers for n in numbers]
        numbers = [n for i in groups for n in optimizer.numbers[i]]
        chosen = set(numbers)
        own = Checkpoint(self.checkpoint.source, self.checkpoint.format)
        for label, name in known.items():
            whole = self.checkpoint.parameters[name]
            weight = {WEIGHT: whole.slots[WEIGHT]} if WEIGHT in whole.slots else {}
            own.parameters[label] = Parameter(label, whole.shape, whole.dtype, dict(weight))
        state = OptimizerState(
            {n: one for n, one in optimizer.state.items() if n in chosen},
            [optimizer.groups[i] for i in groups],
            {n: master for n, master in optimizer.masters.items() if n in chosen},
        )
        labels = {name: label for label, name in known.items()}
        chosen_names = None
        if given is not None:
            by_number = dict(zip(every, given, strict=False))
            chosen_names = [labels.get(by_number.get(n, ""), by_number.get(n, "")) for n in numbers]
        attach(own, state, self.file.path, names=chosen_names, sample=rounds_to_weight(own, self.file.path, state))
        own.parameters = {known[label]: replace(p, name=known[label]) for label, p in own.parameters.items()}
        for group in own.param_groups:
            group.parameters[:] = [known.get(label, label) for label in group.parameters]
        return own

    @property
    def settings(self) -> list[tuple[dict[str, object], dict[str, object]]]:
        """Hyperparameters and single values of each group."""
        return [(group.hyperparameters, group.state) for group in self.groups]

    def give_experts(self) -> None:
        """Give the experts of this rank their slots."""
        self._give(self.of_experts)

    def give_dense(self) -> None:
        """Give all other parameters theirs."""
        self._give([i for i in range(len(self.groups)) if i not in self.of_experts])
        numbers = [i for i in range(len(self.groups)) if i not in self.of_experts]
        for name, parameter in self.dense.unnamed.items():
            index = None if parameter.group is None else numbers[parameter.group]
            self.checkpoint.unnamed[name] = replace(parameter, group=index)
        self.checkpoint.warnings += self.dense.warnings

    def _give(self, groups: Sequence[int]) -> None:
        for index in groups:
            for name in self.groups[index].parameters:
                found = self.experts.parameters.get(name) or self.dense.parameters.get(name)
                if found is not None:
                    owner = self.checkpoint.parameters[name]
                    owner.slots = {**owner.slots, **found.slots}
                    owner.group, owner.state = index, found.state

    def copies(self) -> list[Duplicate]:
        """Return what this rank has of parameters that are read from another's file."""
        found = []
        for own in (self.dense, self.experts):
            for name, parameter in own.parameters.items():
                read = self.checkpoint.parameters[name].slots
                for key, slot in parameter.slots.items():
                    if (
                        key != WEIGHT
                        and key in read
                        and read[key].spans != slot.spans
                        and slot.shape == read[key].shape
                    ):
                        found.append(Duplicate("parameter", name, name, slot, read[key], self.rank))
        return found
