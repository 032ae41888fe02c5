"""What the values in DeepSpeed's files are, and which of them each rank has of its own.

For the inventory, some say how state is cut, and others are state.

Of an optimizer's state, a rank's own is what is neither one value for each element nor one for a param group. An
optimizer sees a rank's partition as one parameter. What it computes over "the parameter" differs by rank:

    Adafactor       RMS                                     LAMB            trust_ratio, weight_norm, adam_norm
    bitsandbytes    __bnb_optimizer_quant_state__: codes, and a scale for each 256 elements from the partition's start
                    (older: the same keys without that dict around them); `rare.quantised` says where these can be cut
    Prodigy         d_numerator, d_denom, d_hat, and from them d and d_max, in the param group; D-Adaptation alike

Files do not say of which class an optimizer was; keys are what is known of it. Tests step the real classes (all of
torch.optim, Adafactor of transformers, bitsandbytes' where it is installed) and hold their state against this.

What follows from the number of steps alone is the same on all ranks: where it differs, files are mixed up.

What the files of all ranks have under one key is kept once. Where another rank has something else (a random state, a
sampler's position), that is kept under the file's stem and the key: `zero_pp_rank_1_mp_rank_00_model_states.rng`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zckpt.errors import LayoutError, UnsupportedError, listed
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard
from zckpt.formats.torch_files.optimizer import optimizer_rules
from zckpt.formats.torch_files.tensors import carried, slot_of, span_of, unresolved
from zckpt.state import (
    FOLLOWS_FROM_STEPS,
    WEIGHT,
    CutFiles,
    CutSpans,
    Duplicate,
    Extent,
    Parameter,
    Shape,
    Slot,
    Span,
    dict_of,
    differ,
    number_of,
)
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, STATE, Rule, exactly
from zckpt.storage.files import opened
from zckpt.torchfile import AlikeRecords, FromFile, Mentioned, Tensor, TorchFile, dump, has_tensors, plain


def implied(about: str, *keys: str, where: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return rules for what is under some keys of a mapping of a file's tree, and follows from the rest."""
    return tuple(Rule((*where, key, "**"), IMPLIED, about) for key in keys)


OF_THE_RUN = "ranks and version of the run"

MODEL_RULES = (
    *implied("names and shapes of the model's tensors", "buffer_names", "param_shapes", "frozen_param_shapes",
             "shared_params"),
    *implied(OF_THE_RUN, "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version"),
    *implied("which rank has which experts", "ds_autoep_layers"),
    *optimizer_rules("optimizer"),
    *optimizer_rules("optimizer", "optimizer_state_dict"),
)  # fmt: skip
"""Of a model file: `module`, the shards of frozen parameters and the client's keys need no rule."""

_Z = "optimizer_state_dict"
CUT_KEYS = (
    "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings", "ds_version",
    "ds_zero_partition_groups", "fp32_flat_groups", "single_partition_of_fp32_groups",
)  # fmt: skip
"""Of an optimizer file: how its state is cut."""


@cache
def shard_rules(*, first: bool) -> tuple[Rule, ...]:
    """Return the rules of a rank's optimizer file; of the first rank's, hyperparameters are state."""
    groups = (
        (_Z, "base_optimizer_state", "param_groups"),
        (_Z, "base_optimizer_param_groups"),
        (_Z, "optimizer_state_dict", "param_groups"),
    )
    return (
        *(
            rule
            for where in groups
            for rule in (
                Rule((*where, "*", "params", "**"), IMPLIED, "numbers of flat groups"),
                Rule((*where, "*", "param_names", "**"), IMPLIED, "names of the parameters"),
                Rule((*where, "*", "*", "**"), STATE, "hyperparameters")
                if first
                else Rule((*where, "**"), COPY, "hyperparameters, found to be the first rank's", tensors=True),
                *(Rule((*where, "*", key), STATE, "a value of each rank") for key in OF_ONE_RANK_IN_GROUPS),
            )
        ),
        *(
            Rule((_Z, *where, "#", "*", "**"), STATE, "single values of a group")
            for where in (
                ("base_optimizer_state", "state"),
                ("base_optimizer_state",),
                ("optimizer_state_dict", "state"),
            )
        ),
        Rule((_Z, "base_optimizer_state_step"), STATE, "the step"),
        *implied("how the state is cut", *CUT_KEYS, where=[_Z]),
        Rule(("ds_version",), IMPLIED, OF_THE_RUN),
        Rule(("ds_config", "**"), COPY, "the configuration, which the model file has"),
    )


BEGINS_AT_A_VALUE = frozenset({"step_size", "p0", "z"})
"""State of each element that begins elsewhere than at zero: Rprop's at the learning rate, what Prodigy and
schedule-free optimizers keep at the parameter's own elements."""


def refuse_to_begin(parameter: Parameter, missing: Iterable[str]) -> None:
    """Raise UnsupportedError if zeros are not what state begins with that a parameter lacks, and its group has."""
    begun = BEGINS_AT_A_VALUE.intersection(missing)
    begun -= {"z"} if "n" in missing else set()  # FTRL's begins at zero
    if begun and parameter.numel:
        raise UnsupportedError(
            f"{listed(sorted(begun))} of {parameter.name} is missing, which others of its param group have, and which "
            "does not begin at zero",
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps the state of each parameter",
        )


OF_ONE_RANK = frozenset({"RMS", "trust_ratio", "weight_norm", "adam_norm"})
"""Single values that are each rank's own even where they happen to be equal."""

SUMS_IN_GROUPS = frozenset({
    "d_numerator", "numerator_weighted", "gsq_weighted", "sk_sq_weighted", "sk_l1", "sksq_weighted", "skl1", "g0_norm",
})  # fmt: skip
"""Values in param groups that may be each rank's own: estimates of Prodigy and D-Adaptation (prodigyopt 1.1,
pytorch_optimizer 4.1, dadaptation 3.2). These are sums over a rank's elements that grow from step to step, and norms:
what they are of fewer is not known."""

OF_ONE_RANK_IN_GROUPS = SUMS_IN_GROUPS | {"d", "d_max", "d_hat", "d_denom", "d_de_nom"}
"""All of them."""

_QUANTISED = frozenset(
    {"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "max1", "max2", "new_max1", "new_max2"}
)
_SCALES = ("absmax1", "max1")
"""What tells that a state is quantised, and its keys (bitsandbytes 0.35 to 0.50)."""


def quantised_keys(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the keys of one state that are codes and what is needed to make numbers of them."""
    return _QUANTISED & tensors.keys() if any(key in tensors for key in _SCALES) else frozenset()


def own_keys(members: Sequence[OptimizerShard], firsts: Sequence[OptimizerShard]) -> set[str]:
    """Return the keys of what is no tensor, or one of no dimension, of which each rank has its own.

    Parameters
    ----------
    members, firsts : sequence of OptimizerShard
        Of one model-parallel rank all files, and of each the first; a stage may have fewer groups than others.
    """
    found: set[str] = set()
    for files in (members, firsts):
        for index in range(len(files[0].masters)):
            states = [one.scalars[index] for one in files if index < len(one.scalars)]
            # the size of a partition, or its shape: ranks alike, but not any ranks
            sizes = {one.masters[index].numel for one in members if index < len(one.masters)} - {0, 1}
            for key in {key for state in states for key in state} - FOLLOWS_FROM_STEPS - found:
                held = [state[key] for state in states if key in state]
                values = [plain(number_of(value)) for value in held]
                told = values[0][0] if isinstance(values[0], (list, tuple)) and len(values[0]) == 1 else values[0]
                if len({repr(value) for value in values}) > 1 or (files is members and (
                    key in OF_ONE_RANK
                    or any(map(has_tensors, held))
                    or (len(values) == 1 and _has_float(values[0]))  # which one rank alone does not show
                    or (type(told) is int and told in sizes)
                )):  # fmt: skip
                    found.add(key)
    return found


def own_hyperparameters(files: Sequence[OptimizerShard], index: int) -> frozenset[str]:
    """Return the keys of what a param group has otherwise on some rank: known ones, and those of tensors."""
    first = files[0]
    others = [(one, one.group(index)) for one in files[1:]]

    def differs(key: str, value: object) -> bool:
        if has_tensors(value):
            return not all(key in its and is_same(first.file, value, one.file, its[key]) for one, its in others)
        every = [value, *(its.get(key) for _, its in others)] if key in OF_ONE_RANK_IN_GROUPS else []
        return differ([(type(one), repr(plain(number_of(one)))) for one in every])

    return frozenset(key for key, value in first.groups[index].items() if differs(key, value))


def hyperparameter(member: OptimizerShard, value: object) -> object:
    """Return a value of a param group as it is kept: with its file, if it has tensors."""
    return FromFile.of(member.file, value) if has_tensors(value) else value


def _has_float(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    return any(map(_has_float, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, float)


def copies_of(
    name: str,
    held: Mapping[str, Slot],
    read: Mapping[str, Slot],
    rank: int | None = None,
    *,
    kind: str = "parameter",
    of: str | None = None,
) -> Iterator[Duplicate]:
    """Yield what a file holds of a parameter besides the slots that are read."""
    for key, slot in held.items():
        first = read.get(key)
        if first is not None and first.shape == slot.shape and first.spans != slot.spans:
            yield Duplicate(kind, name, of or name, slot, first, rank)


def weight_in(tensor: Tensor, path: str) -> dict[str, Slot]:
    """Return a tensor of a file as a weight."""
    return {WEIGHT: slot_of(WEIGHT, tensor, path)}


def weight_or_master(parameter: Parameter) -> Slot:
    """Return what a parameter's weight is written from: itself, or rounded from the master where no file has it.

    Raises UnsupportedError: there is neither.
    """
    slot = parameter.weight or parameter.master
    if slot is None:
        raise UnsupportedError(f"no file holds the values of {parameter.name}")
    return slot


def copies_of_buffers(models: Iterable[ModelShard], buffers: Mapping[str, Parameter]) -> Iterator[Duplicate]:
    """Yield the copies of buffers that further ranks' files hold."""
    for model in models:
        for name, buffer in buffers.items():
            if name in model.module:
                copy = weight_in(model.module[name], model.path)
                yield from copies_of(name, copy, buffer.slots, model.shard.dp_rank, kind="buffer")


def viewed(parameter: Parameter, shape: Shape, view: Callable[[Slot], Slot]) -> Parameter:
    """Return a parameter of another shape, with a view of each slot but those that are one value."""
    slots = {key: view(slot) if slot.shape else slot for key, slot in parameter.slots.items()}
    return replace(parameter, shape=shape, slots=slots)


Slots = dict[str, dict[str, Slot]]
"""Slots by parameter name, then by slot name."""

PLAIN = (type(None), bool, int, float, str)

COMPARED_NBYTES = 1 << 20
"""Bytes of tensors of one key that are compared in any case, and at a time: random states are a few kilobytes."""

FileRules = dict[str, tuple[Rule, ...]]
"""By file."""

Content = tuple[TorchFile, Mapping[str, object]]
"""A file, and its keys."""


def keep_others(held: Iterable[Content], keys: Iterable[str], *where: str) -> tuple[dict[str, object], FileRules]:
    """Return what ranks' files hold otherwise than the first of them, and rules for what they hold as it does.

    `keys`: those that the metadata have of the first, and others of the same kind; `where`: where in the file's tree
    the mapping is. Rules also say which plain values are a rank's own.
    """
    every, keys = list(held), list(dict.fromkeys(keys))
    metadata: dict[str, object] = {}
    rules: FileRules = {}
    same: dict[tuple[str, int], bool] = {}  # files that are alike share a tree, but not what tensors hold

    @cache
    def copied(*keys: str) -> tuple[Rule, ...]:
        about = f"as in {Path(every[0][0].path).name}"
        return tuple(Rule((*where, exactly(key), "**"), COPY, about, tensors=True) for key in keys)

    for file, content in every[1:]:
        first, known = every[0]
        copies, own = [], []
        for key in (key for key in keys if content.get(key) is not None):
            node = content[key]
            found = same.get((key, id(node)))
            if found is None:
                found = known.get(key) is not None and is_same(first, known[key], file, node)
                if not has_tensors(node):
                    same[key, id(node)] = found
            if found:
                copies.append(key)
            else:
                kept = f"{Path(file.path).stem}.{key}"
                metadata[kept] = carried(file, node)
                own += [Rule((*where, exactly(key)), CARRIED, kept)] if type(node) in PLAIN else []
        rules[file.path] = (*copied(*copies), *own)
    return metadata, rules


def copies_of_optimizers(models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard]) -> FileRules:
    """Return rules for the optimizer that a model file of stage 0 holds besides that of BF16_Optimizer's own files.

    It is the one of the first data-parallel rank; what is not, is not accounted for.
    """
    firsts = {shard.mp_rank: shard for shard in optimizers if shard.rank == 0}
    rules: FileRules = {}
    for model in models:
        first = firsts.get(model.mp_rank)
        if model.optimizer is not None and first is not None:
            own = {"optimizer": dict_of(first.file.root)["optimizer_state_dict"]}
            found = keep_others([(first.file, own), (model.file, model.content)], own)[1]
            rules |= {path: tuple(rule for rule in its if rule.fate == COPY) for path, its in found.items()}
    return rules


def is_same(one: TorchFile, mine: object, other: TorchFile, its: object) -> bool:
    """Tell whether what two files hold would be written alike.

    Of tensors, `COMPARED_NBYTES` are compared, and of more the checksums of storages, or all bytes where not both files
    state one.
    """
    if mine is its and not has_tensors(mine):
        return True  # files that are alike share a tree
    if type(mine) in PLAIN and type(its) in PLAIN and repr(mine) != "nan":
        return type(mine) is type(its) and repr(mine) == repr(its)
    a, b = dump(FromFile.of(one, mine)), dump(FromFile.of(other, its))
    sizes = [mentioned.storage.nbytes for mentioned in a.storages]
    if a.data != b.data or sizes != [mentioned.storage.nbytes for mentioned in b.storages]:
        return False
    sums, its_sums = (_sums(one), _sums(other)) if sum(sizes) > COMPARED_NBYTES else ({}, {})
    left = COMPARED_NBYTES
    for x, y in zip(a.storages, b.storages, strict=True):
        most, crc, its_crc = x.storage.nbytes, sums.get(x.storage.offset), its_sums.get(y.storage.offset)
        if crc and its_crc:
            if crc != its_crc:
                return False
            most = min(left, most)
        left = max(left - most, 0)
        if any(mine != its for mine, its in zip(_pieces(x, most), _pieces(y, most), strict=True)):
            return False
    return True


def _sums(file: TorchFile) -> dict[int, int]:
    """Return the checksums of storages by where they begin, as far as a file states any; 0 is none."""
    records = file.records
    filled = records.filled() if isinstance(records, AlikeRecords) else records
    return {record.offset: record.crc32 for record in filled if record.nbytes}


def _pieces(one: Mentioned, most: int) -> Iterator[bytes]:
    """Yield the first bytes of a storage."""
    if one.path is None or not most:
        return
    with opened(one.path) as file:
        for at in range(0, most, COMPARED_NBYTES):
            yield file.at(one.storage.offset + at, min(COMPARED_NBYTES, most - at))


class Case(NamedTuple):
    """How many elements a per-element tensor of one rank and group has: at least `low`, at most `high`.

    `others` are the keys of tensors that are something else.
    """

    member: OptimizerShard
    group: int
    low: int
    high: int
    others: frozenset[str] = frozenset()


def element_slots(cases: Iterable[Case]) -> dict[int, set[str]]:
    """Return the optimizer's keys that have a value for each element, by group; others have one for a whole group.

    An optimizer may keep a key in full in some groups, and factored in others; all ranks of a group have it alike.

    Raises LayoutError: a key has a value for each element on some ranks of a group, and not on others.
    """
    votes: dict[str, dict[int, dict[bool, Case]]] = {}
    groups: dict[int, set[str]] = {}
    for case in cases:
        groups.setdefault(case.group, set())
        for key, tensor in case.member.tensors[case.group].items():
            if key in case.others:
                continue
            fits = len(tensor.shape) == 1 and case.low <= tensor.numel <= case.high
            found = votes.setdefault(key, {}).setdefault(case.group, {})
            if case.high > 1 or not fits:  # one element of one element says nothing
                found.setdefault(fits, case)
    for key, by_group in votes.items():
        elsewhere = {fits for found in by_group.values() for fits in found}
        for group, found in by_group.items():
            if len(found) == 2 or (not found and len(elsewhere) == 2):
                odd = next(case for one in by_group.values() for fits, case in one.items() if not fits)
                raise LayoutError(
                    f"rank {odd.member.rank}, group {odd.group}: {key} does not have one value per element",
                    path=odd.member.path,
                    expected=f"{odd.high} elements, as elsewhere",
                    found=odd.member.tensors[odd.group][key].shape,
                )
            if False not in (found or elsewhere):
                groups[group].add(key)
    return groups


class Line:
    """The tensors of one slot in the files of all ranks, each of which has some of a line of elements, see `CutSpans`.

    Parameters
    ----------
    tensors : sequence of Tensor or None
        Some ranks may have none.

    Raises
    ------
    UnsupportedError
        The bytes of a tensor alone do not give its values.
    """

    def __init__(self, tensors: Sequence[Tensor | None], paths: Sequence[str]) -> None:
        self.tensors, self.paths = tensors, paths
        held = [(tensor, path) for tensor, path in zip(tensors, paths, strict=True) if tensor is not None]
        self._files: CutFiles | None = None
        alike = len(held) == len(tensors) and not any(unresolved(tensor, path) for tensor, path in held)
        kinds = {(tensor.dtype, tensor.byteorder) for tensor, _ in held}
        if alike and len(kinds) == 1 and all(tensor.is_contiguous for tensor, _ in held):
            self._files = CutFiles(tuple(paths), tuple(tensor.offset for tensor, _ in held), *kinds.pop())

    def spans(self, shape: Shape, origin: int, width: int, at: int = 0) -> Sequence[Span]:
        """Return where a parameter lies: by a rule, or one by one where files are not alike."""
        if self._files is not None:
            return CutSpans(self._files, shape, origin, width, at)
        found: list[Span] = []
        for rank, (tensor, path) in enumerate(zip(self.tensors, self.paths, strict=True)):
            low, high = max(origin, rank * width), min(origin + math.prod(shape), (rank + 1) * width)
            if tensor is not None and low < high:
                extent = Extent.flat(shape, low - origin, high - low)
                found.append(span_of(tensor, path, extent, first=low - rank * width + at))
        return tuple(found)
