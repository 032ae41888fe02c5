"""The optimizer's files of all ranks, as values by number (or name), slot and rank; nothing here knows what is whose.

{state: {number: {slot: DTensor, ShardedTensor, Tensor or single value}}, param_groups: [{params: [number, ...]}]}

Single values, such as `step`, are one for all ranks: of 0-d tensors that is found out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zckpt.codes import HYPERPARAMETERS_DIFFER
from zckpt.errors import DamagedFileError, LayoutError, about
from zckpt.formats.fsdp_rank_files.cut import RankFiles
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held, RankReader, elements, rules_of
from zckpt.formats.torch_files.state_dicts import looks_like_optimizer, optimizer_rules
from zckpt.formats.torch_files.tensors import describe, read_scalars, with_scalars
from zckpt.state import Checkpoint, Scalar
from zckpt.state.inventory import COPY, IMPLIED, Rule
from zckpt.torchfile import TorchFile, alike, brief, read_torchfile

Key = int | str
"""A parameter's number, or its name where the program saved that."""

MEMBERS = ("params", "param_names")


@dataclass(slots=True)
class Optimizer:
    """What the optimizer's files have.

    Parameters
    ----------
    files : RankFiles
    groups : list of dict
        Param groups, `params` included.
    tensors : dict of (Key, dict of str to list of (int, Held))
        By parameter and slot, the ranks that have any of it, in order.
    values : dict of (Key, dict of str to object)
        What is no tensor with dimensions, of which ranks have the same.
    """

    files: RankFiles
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Key, dict[str, list[tuple[int, Held]]]] = field(default_factory=dict)
    values: dict[Key, dict[str, object]] = field(default_factory=dict)

    @property
    def keys(self) -> list[list[Key]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.groups]

    def has_state(self, key: Key) -> bool:
        """Tell whether a parameter has any state."""
        return bool(self.tensors.get(key) or self.values.get(key))

    def cut(self, key: Key) -> dict[str, list[tuple[int, Held]]]:
        """Return the slots of a parameter that have dimensions."""
        return {slot: held for slot, held in self.tensors.get(key, {}).items() if held[0][1].shape != ()}


def read_optimizers(checkpoint: Checkpoint, paths: Sequence[Path]) -> Optimizer:
    """Read the optimizer's files of all ranks, and hold against each other what they must agree on.

    Raises DamagedFileError: a file does not hold an optimizer's state dict; LayoutError: ranks have other param groups,
    or other single values.
    """
    found = Optimizer(RankFiles([str(path) for path in paths]))
    for rank, path in enumerate(paths):
        file = read_torchfile(path)
        with about(path):
            groups, state = _parsed(file)
            if not rank:
                found.groups = groups
            else:
                _check_groups(found.groups, groups, rank)
            single = _add(found, rank, file, state)
        described = describe(file, "optimizer", dp_rank=rank, rules=_rules(rank, single))
        checkpoint.files.append(replace(described, tree=_tree(file)))
    return found


def _tree(file: TorchFile) -> object:
    """Return what the inventory has to look at."""
    root = file.root if isinstance(file.root, dict) else {}
    state = {
        key: {slot: elements(value) for slot, value in slots.items()} if isinstance(slots, dict) else slots
        for key, slots in root.get("state", {}).items()
    }
    return {**root, "state": state}


def _rules(rank: int, single: Sequence[str]) -> tuple[Rule, ...]:
    """Return the inventory's rules for a rank's file: what is one for all ranks is a copy of the first's."""
    inside = rules_of("state", "*", "*")
    if not rank:
        return (*inside, *optimizer_rules())
    about = "found to be rank 0's"
    same = tuple(Rule(("state", "*", key), COPY, about, tensors=True) for key in single)
    same += tuple(Rule(("state", "*", key, "**"), COPY, about) for key in single)  # of a tuple, what is in it
    listed = tuple(Rule(("param_groups", "*", key, "**"), IMPLIED, "which parameters they are") for key in MEMBERS)
    return (*inside, *same, *listed, Rule(("param_groups", "*", "**"), COPY, about, tensors=True), *optimizer_rules())


def _parsed(file: TorchFile) -> tuple[list[dict[str, Any]], dict[Key, dict[str, object]]]:
    root = file.root
    if not isinstance(root, dict) or not looks_like_optimizer(root):
        raise DamagedFileError("unexpected content", expected="an optimizer's state dict", found=brief(root, 60))
    groups: list[dict[str, Any]] = []
    for group in root["param_groups"]:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, (list, tuple)) or not all(type(one) in (int, str) for one in params):
            raise DamagedFileError(
                "unreadable param group", expected="numbers or names in `params`", found=brief(params)
            )
        groups.append({**with_scalars(group, file.path), "params": list(params)})
    known = [key for group in groups for key in group["params"]]
    members = set(known)
    if len(members) != len(known) or len({type(key) for key in known}) > 1:
        raise DamagedFileError("param groups have a parameter twice")
    state: dict[Key, dict[str, object]] = {}
    for key, slots in root["state"].items():
        if type(key) not in (int, str) or key not in members or not isinstance(slots, dict):
            raise DamagedFileError("state of a parameter that is in no group", found=brief(key))
        state[key] = {str(slot): value for slot, value in slots.items()}
    return groups, state


def _check_groups(mine: Sequence[Mapping[str, Any]], its: Sequence[Mapping[str, Any]], rank: int) -> None:
    if [group["params"] for group in mine] != [group["params"] for group in its]:
        raise LayoutError(
            "has other param groups than rank 0",
            expected=" + ".join(str(len(group["params"])) for group in mine),
            found=" + ".join(str(len(group["params"])) for group in its),
            ranks=[rank],
        )
    for number, (one, two) in enumerate(zip(mine, its, strict=True)):
        for key in sorted((one.keys() | two.keys()) - set(MEMBERS)):
            if not alike(_plain(one.get(key)), _plain(two.get(key))):
                raise LayoutError(
                    f"param group {number} has another {key} than rank 0's",
                    expected=brief(one.get(key)),
                    found=brief(two.get(key)),
                    advice="the files are of different steps or runs",
                    code=HYPERPARAMETERS_DIFFER,
                    ranks=[rank],
                )


def _plain(value: object) -> object:
    return (value.value, value.dtype) if isinstance(value, Scalar) else value


def _add(found: Optimizer, rank: int, file: TorchFile, state: Mapping[Key, Mapping[str, object]]) -> list[str]:
    """Add a rank's state; return the keys of what is no tensor with dimensions."""
    reader = RankReader()
    single: dict[str, None] = {}
    scalars: list[tuple[Key, str, Held]] = []
    for key, slots in state.items():
        for slot, value in slots.items():
            held = reader.held(value)
            if held is None:
                single[slot] = None
                _agree(found, key, slot, value, rank)
                continue
            ranks = found.tensors.setdefault(key, {}).setdefault(slot, [])
            if held.kind == PLAIN and held.shape == ():
                single[slot] = None
                scalars.append((key, slot, held))
                if ranks:
                    continue
            ranks.append((rank, held))
    values = read_scalars(file.path, [held.boxes[0].tensor for _, _, held in scalars])
    for (key, slot, _), scalar in zip(scalars, values, strict=True):
        _agree(found, key, slot, scalar, rank)
    return list(single)


def _agree(found: Optimizer, key: Key, slot: str, value: object, rank: int) -> None:
    """Keep a single value, which is the same on all ranks that have it."""
    values = found.values.setdefault(key, {})
    if slot not in values:
        values[slot] = value
    elif not alike(_plain(values[slot]), _plain(value)):
        raise LayoutError(
            f"state {slot} of the optimizer's parameter {key} is another than on the first rank",
            expected=brief(_plain(values[slot])),
            found=brief(_plain(value)),
            advice="the files are of different steps or runs",
            ranks=[rank],
        )
