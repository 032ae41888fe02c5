"""The files of ranks: each rank's local optimizer, which numbers its share of the parameters by itself.

Which number is which parameter follows from the optimizer's order of them, and that from names or from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import HYPERPARAMETERS_DIFFER, OTHER_WORLD_SIZE, WRONG_RANK
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, Evidence, in_order
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, optimizer_rules, parse, shared_values
from zckpt.formats.torch_files.tensors import describe
from zckpt.formats.zero_redundancy.directory import optimizer_key
from zckpt.state import Checkpoint, ParamGroup, Scalar, Topology
from zckpt.state.inventory import COPY, IMPLIED, Rule
from zckpt.state.partition import greedy_order, greedy_partition
from zckpt.torchfile import Tensor, TorchFile, alike, brief, each, read_torchfile

Order = list[list[str]]
"""For each param group, the names of its parameters."""

Shape = tuple[int, ...]

Shares = list[list[list[int]]]
"""For each rank and each group, indices of the group's parameters."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: the state of its local optimizer, and what else there is, where that is not the whole file."""

    file: TorchFile
    state: OptimizerState
    others: dict[object, object]


def read_ranks(checkpoint: Checkpoint, paths: Sequence[Path]) -> list[RankFile]:
    """Read the files of all ranks, and hold against each other what they must agree on.

    Raises
    ------
    DamagedFileError
        A file does not hold one optimizer's state dict.
    ShardError
        A file says that it is another rank's, or of another number of ranks.
    LayoutError
        Ranks have different param groups.
    """
    ranks: list[RankFile] = []
    for rank, path in enumerate(paths):
        file = read_torchfile(path)
        refuse_share(file)
        try:
            key = optimizer_key(file.root)
        except KeyError:
            raise DamagedFileError(
                "unexpected content", path=path, expected="one optimizer's state dict, as in rank 0's file"
            ) from None
        rules = rank_rules(key, first=rank == 0)
        checkpoint.files.append(describe(file, "optimizer", dp_rank=rank, rules=rules))
        others = dict(file.root) if key is not None and isinstance(file.root, dict) else {}
        node = file.root if key is None else others.pop(key)
        ranks.append(RankFile(file, parse(node, str(path)), others))
        for name, expected, code in (("rank", rank, WRONG_RANK), ("world_size", len(paths), OTHER_WORLD_SIZE)):
            found = others.pop(name, None)
            if type(found) is int and found != expected:
                raise ShardError(
                    f"is of another {name}", path=path, expected=expected, found=found, code=code, ranks=[rank]
                )
        _check_groups(ranks[0], ranks[-1])
    checkpoint.world_size = len(paths)
    checkpoint.topology = Topology(dp=len(paths))
    return ranks


def rank_rules(key: object, *, first: bool) -> tuple[Rule, ...]:
    """Return the inventory's rules for a rank's file: the hyperparameters of all are those of the first."""
    where = () if key is None else (str(key),)
    same = Rule((*where, "param_groups", "**"), COPY, "hyperparameters, found to be the first rank's")
    about = tuple(Rule((name,), IMPLIED, "which rank the file is of") for name in ("rank", "world_size") if where)
    return (*optimizer_rules(*where), *about) if first else (*optimizer_rules(*where)[:1], same, *about)


def _check_groups(first: RankFile, other: RankFile) -> None:
    """Raise unless two ranks have the same param groups but for their shares of the parameters."""
    mine, its = first.state.groups, other.state.groups
    if len(mine) != len(its):
        raise LayoutError(
            "has other param groups than rank 0", path=other.file.path, expected=len(mine), found=len(its)
        )
    for number, (one, two) in enumerate(zip(mine, its, strict=True)):
        for key in (one.keys() | two.keys()) - {"params", "param_names"}:
            expected, found = one.get(key), two.get(key)
            if _is_plain(expected) and _is_plain(found) and not alike(expected, found):
                raise LayoutError(
                    f"param group {number} has another {key} than rank 0's",
                    path=other.file.path,
                    expected=brief(expected),
                    found=brief(found),
                    advice="the files are of different steps or runs",
                    code=HYPERPARAMETERS_DIFFER,
                )


def _is_plain(value: object) -> bool:
    values = each(value, lambda node: node if isinstance(node, (list, tuple)) else ())
    return all(one is None or isinstance(one, (list, tuple, bool, int, float, str, Scalar)) for one in values)


def attach_ranks(checkpoint: Checkpoint, ranks: Sequence[RankFile], order: Order, held: Shares | None = None) -> None:
    """Give the parameters their state from the rank that holds each, and the checkpoint its param groups.

    `held`: for each rank and each group, which of the group's parameters it has; by default as torch assigns them.
    Raises LayoutError: a rank's share is another one, by number or by shape.
    """
    if held is None:
        held = greedy_partition([[checkpoint.parameters[name].numel for name in group] for group in order], len(ranks))
    shares: list[list[ParamGroup]] = []
    for rank, groups in zip(ranks, held, strict=True):
        numbers = rank.state.numbers
        if [len(indices) for indices in groups] != [len(group) for group in numbers]:
            raise LayoutError(
                "another share of the parameters than it was assigned",
                path=rank.file.path,
                expected=" + ".join(str(len(indices)) for indices in groups),
                found=" + ".join(str(len(group)) for group in numbers),
            )
        own = Checkpoint(checkpoint.source, checkpoint.format, parameters=checkpoint.parameters)
        names = [order[group][index] for group, indices in enumerate(groups) for index in indices]
        attach_named(own, rank.state, rank.file.path, names)
        shares.append(own.param_groups)
    for number, group in enumerate(order):
        states = [
            share[number].state
            for rank, share in zip(ranks, shares, strict=True)
            if any(own in rank.state.state for own in rank.state.numbers[number])
        ]
        if len({repr(state["step"]) for state in states if "step" in state}) > 1:
            checkpoint.warnings.append(f"ranks have taken different steps with param group {number}")
        hyperparameters = shares[0][number].hyperparameters
        checkpoint.param_groups.append(ParamGroup(hyperparameters, list(group), shared_values(states)))


def attach_named(checkpoint: Checkpoint, state: OptimizerState, path: str, names: Sequence[str]) -> None:
    """Attach a state under names that the directory gives; that they do not fit is then no fault of the user's.

    Raises LayoutError: a parameter has another shape than its state.
    """
    try:
        attach(checkpoint, state, path, names=names)
    except UsageError as error:
        raise LayoutError(error.message, path=path, expected=error.expected, found=error.found) from error


def order_by_names(names: Sequence[str], lengths: Sequence[int], checkpoint: Checkpoint) -> Order:
    """Return a list of names, group by group.

    Parameters
    ----------
    names : sequence of str
        Of all parameters, in the optimizer's order.
    lengths : sequence of int
        How many parameters each group has.
    checkpoint : Checkpoint
        Has the model's parameters.

    Raises
    ------
    UsageError
        Too few or too many names, or one that the model has not.
    """
    groups = [[(group, at) for at in range(length)] for group, length in enumerate(lengths)]
    found = Evidence.of(checkpoint, groups, {}).given(names)
    return [[found[number] for number in group] for group in groups]


def order_by_model(ranks: Sequence[OptimizerState], checkpoint: Checkpoint) -> Order:
    """Return the only names that the shapes of the ranks' state leave, if each group is in the model's order.

    That order is the one of `model.parameters()`, which nothing in the files can prove: parameters of one size were
    assigned in the optimizer's order, and of those of different sizes no order is kept. An optimizer of one group that
    has all of the model's parameters needs no shapes. `ranks`: each rank's own; `checkpoint`: has the model's
    parameters. Raises LayoutError: the ranks' shares are not those that torch assigns; UnsupportedError: a parameter
    has no state that tells its size, or several of the model's tensors fit.
    """
    candidates = [p.name for p in checkpoint.parameters.values() if p.tied_to is None]
    if all(len(state.groups) == 1 for state in ranks) and sum(len(s.numbers[0]) for s in ranks) == len(candidates):
        return [candidates]
    shapes = [
        [[_shape(state, number, rank) for number in group] for group in state.numbers]
        for rank, state in enumerate(ranks)
    ]
    try:
        assigned = greedy_order([[[math.prod(s) for s in group] for group in rank] for rank in shapes])
    except LayoutError as error:
        raise LayoutError(error.message, found=error.found, advice=NAMES_ADVICE) from error
    of = {(group, at): shapes[rank][group][position]
          for group, order in enumerate(assigned) for at, (rank, position) in enumerate(order)}  # fmt: skip
    by_size: dict[int, tuple[list[list[tuple[int, int]]], dict[str, Shape]]] = {}  # of one size the order is kept
    for (group, at), shape in of.items():
        by_size.setdefault(math.prod(shape), ([[] for _ in assigned], {}))[0][group].append((group, at))
    for name in candidates:
        one = checkpoint.parameters[name]
        if one.numel in by_size:
            by_size[one.numel][1][name] = one.shape
    names: dict[tuple[int, int], str] = {}
    for numbers, fitting in by_size.values():
        names |= Evidence(numbers, fitting, of).certain(in_order)
    for (group, at), shape in of.items():
        if (group, at) not in names:
            rank, position = assigned[group][at]
            raise UnsupportedError(
                f"parameter {position} of group {group} of rank {rank}, of shape {shape}, has no name that is certain",
                advice=NAMES_ADVICE,
            )
    position_of = {name: at for at, name in enumerate(checkpoint.parameters)}
    return [
        sorted((names[group, at] for at in range(len(order))), key=position_of.__getitem__)
        for group, order in enumerate(assigned)
    ]


def _shape(state: OptimizerState, number: int, rank: int) -> Shape:
    """Return the shape of a parameter, which all tensors of its state have."""
    tensors = {key: v.shape for key, v in state.state.get(number, {}).items() if isinstance(v, Tensor)}
    found = {shape for key, shape in tensors.items() if key != "step"}
    if len(found) != 1:
        raise UnsupportedError(
            f"rank {rank}'s parameter {number} has no state that shows its shape, and without it the others' "
            f"names are not certain either",
            advice=NAMES_ADVICE,
        )
    return found.pop()
