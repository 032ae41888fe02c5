"""The files of ranks: each rank's local optimizer, which numbers its share of the parameters by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import HYPERPARAMETERS_DIFFER, OTHER_WORLD_SIZE, WRONG_RANK
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UsageError
from zckpt.formats.tensors import describe
from zckpt.formats.torch_optimizer import OptimizerState, attach, optimizer_rules, parse
from zckpt.formats.zero_redundancy.directory import optimizer_key
from zckpt.formats.zero_redundancy.order import Order
from zckpt.state import Checkpoint, ParamGroup, Scalar, Topology
from zckpt.state.inventory import COPY, IMPLIED, Rule
from zckpt.state.partition import greedy_partition
from zckpt.torchfile import TorchFile, alike, brief, each, read_torchfile

Shares = list[list[list[int]]]
"""For each rank and each group, indices of the group's parameters."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: the state of its local optimizer, and the key it is under (None: it is the whole file)."""

    file: TorchFile
    key: object
    state: OptimizerState


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
        try:
            key = optimizer_key(file.root)
        except KeyError:
            raise DamagedFileError(
                "unexpected content", path=path, expected="one optimizer's state dict, as in rank 0's file"
            ) from None
        rules = rank_rules(key, first=rank == 0)
        checkpoint.files.append(describe(file, "optimizer", dp_rank=rank, rules=rules))
        root = file.root if isinstance(file.root, dict) else {}
        ranks.append(RankFile(file, key, parse(root if key is None else root[key], str(path))))
        for name, expected in (("rank", rank), ("world_size", len(paths))):
            if key is not None and type(root.get(name)) is int and root[name] != expected:
                code = WRONG_RANK if name == "rank" else OTHER_WORLD_SIZE
                raise ShardError(
                    f"is of another {name}", path=path, expected=expected, found=root[name], code=code, ranks=[rank]
                )
        _check_groups(ranks[0], ranks[-1])
    checkpoint.world_size = len(paths)
    checkpoint.topology = Topology(dp=len(paths))
    return ranks


def rank_rules(key: object, *, first: bool) -> tuple[Rule, ...]:
    """Return the inventory's rules for a rank's file: the hyperparameters of all are those of the first."""
    place = () if key is None else (str(key),)
    same = Rule((*place, "param_groups", "**"), COPY, "hyperparameters, found to be the first rank's")
    about = tuple(Rule((name,), IMPLIED, "which rank the file is of") for name in ("rank", "world_size") if place)
    return (*optimizer_rules(*place), *about) if first else (*optimizer_rules(*place)[:1], same, *about)


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
    parts = each(value, lambda node: node if isinstance(node, (list, tuple)) else ())
    return all(one is None or isinstance(one, (list, tuple, bool, int, float, str, Scalar)) for one in parts)


def attach_ranks(checkpoint: Checkpoint, ranks: Sequence[RankFile], order: Order, held: Shares | None = None) -> None:
    """Give the parameters their state from the rank that holds each, and the checkpoint its param groups.

    Parameters
    ----------
    checkpoint : Checkpoint
    ranks : sequence of RankFile
    order : list of list of str
    held : list of list of list of int, optional
        For each rank and each group, which of the group's parameters it has; by default as torch deals them.

    Raises
    ------
    LayoutError
        A rank's share is another one, by number or by shape.
    """
    if held is None:
        held = greedy_partition([[checkpoint.parameters[name].numel for name in group] for group in order], len(ranks))
    shares: list[list[ParamGroup]] = []
    for rank, groups in zip(ranks, held, strict=True):
        numbers = rank.state.numbers
        if [len(indices) for indices in groups] != [len(group) for group in numbers]:
            raise LayoutError(
                "another share of the parameters than it was dealt",
                path=rank.file.path,
                expected=" + ".join(str(len(indices)) for indices in groups),
                found=" + ".join(str(len(group)) for group in numbers),
            )
        part = Checkpoint(checkpoint.source, checkpoint.format, parameters=checkpoint.parameters)
        names = [order[group][index] for group, indices in enumerate(groups) for index in indices]
        attach_named(part, rank.state, rank.file.path, names)
        shares.append(part.param_groups)
    for number, group in enumerate(order):
        states = [share[number].state for rank, share in zip(ranks, shares, strict=True) if _has_state(rank, number)]
        if len({repr(state["step"]) for state in states if "step" in state}) > 1:
            checkpoint.warnings.append(f"ranks have taken different steps with param group {number}")
        shared = dict(states[0]) if states else {}
        common = {k: v for k, v in shared.items() if all(k in state and state[k] == v for state in states)}
        checkpoint.param_groups.append(ParamGroup(shares[0][number].hyperparameters, list(group), common))


def attach_named(checkpoint: Checkpoint, state: OptimizerState, path: str, names: Sequence[str]) -> None:
    """Attach a state under names that the directory gives; that they do not fit is then no fault of the user's.

    Raises
    ------
    LayoutError
        A parameter has another shape than its state.
    """
    try:
        attach(checkpoint, state, path, names=names)
    except UsageError as error:
        raise LayoutError(error.message, path=path, expected=error.expected, found=error.found) from error


def _has_state(rank: RankFile, group: int) -> bool:
    return any(number in rank.state.state for number in rank.state.numbers[group])
