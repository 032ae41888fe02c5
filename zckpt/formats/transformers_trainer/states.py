"""What the Trainer keeps besides the model and the optimizer, of whatever the source has: scheduler, random states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from zckpt.state import Checkpoint, as_float, dict_of, list_of
from zckpt.torchfile import node_of, plain, put_back

FILES = {"scaler": "scaler.pt", "training_args": "training_args.bin"}
"""Files of the Trainer's that are written as they were, by the key under which they are carried."""

SCHEDULER_KEYS = ("scheduler", "lr_scheduler")

_RANDOM = re.compile(r"rng_state(?:_([0-9]+))?")
_ACCELERATES = re.compile(r"random_states_([0-9]+)")

RANDOM_KEYS = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
"""What the Trainer and Accelerate call the same states."""

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
"""What a scheduler keeps for each param group."""


def scheduler(checkpoint: Checkpoint, notes: list[str], *, name: str = "scheduler.pt") -> object:
    """Return the state of a scheduler: the source's, or one at its step.

    `checkpoint`: with the param groups of the target; `notes`: gets what was written by rule; `name`: of the file.
    """
    count = len(checkpoint.param_groups)
    found: Mapping[object, object] = {}
    for key in SCHEDULER_KEYS:
        value = checkpoint.metadata.get(key)
        node = dict_of(node_of(value))
        if type(node.get("last_epoch")) is int:
            found = node
            if all(not isinstance(its := node.get(one), (list, tuple)) or len(its) == count for one in PER_GROUP):
                return value
            break
    last = found.get("last_epoch", checkpoint.step or 0)
    rates = [as_float(group.hyperparameters.get("lr")) for group in checkpoint.param_groups]
    bases = [as_float(group.hyperparameters.get("initial_lr")) for group in checkpoint.param_groups]
    is_lambda = not found or "lr_lambdas" in found
    said = {key: values for key, values in (("_last_lr", rates), ("base_lrs", bases)) if None not in values}
    kept: dict[object, object] = {} if is_lambda else _of_groups(found, said, count)
    what = "a LambdaLR" if is_lambda else "the source's for these param groups"
    notes.append(
        f"{name} was generated: {what} after {last} steps"
        + ("" if None not in bases else ", whose base rates are those that it is created with")
    )
    kept |= {
        "last_epoch": last,
        "_step_count": found.get("_step_count", last + 1 if isinstance(last, int) else 1),
        "_get_lr_called_within_step": False,
        **({"lr_lambdas": [None] * count} if is_lambda else {}),
    }
    return kept | said


def _of_groups(found: Mapping[object, object], said: Mapping[str, object], count: int) -> dict[object, object]:
    """Return a scheduler's state for so many groups, and those of the schedulers in it; `said`: what groups say."""
    kept = {key: value for key, value in found.items() if key not in PER_GROUP}
    kept |= {key: value for key, value in said.items() if key in found}
    if "lr_lambdas" in found:
        kept["lr_lambdas"] = [None] * count
    for key in PER_GROUP[3:]:  # which no param group says
        limits = found.get(key)
        if isinstance(limits, (list, tuple)) and limits and all(one == limits[0] for one in limits):
            kept[key] = [limits[0]] * count
    if "_schedulers" in found:
        kept["_schedulers"] = [_of_groups(dict_of(one), said, count) for one in list_of(found["_schedulers"])]
    return kept


def is_by_rule(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Tell whether the scheduler of one is what `scheduler` makes of it, and the other has none."""
    found = dict_of(plain(node_of(checkpoint.metadata.get("scheduler"))))
    has_none = not any(dict_of(node_of(other.metadata.get(key))) for key in SCHEDULER_KEYS)
    made = dict_of(scheduler(replace(checkpoint, metadata={}), [])) if found and has_none else {}
    return bool(made) and all(made.get(key) == value for key, value in found.items())


def random_states(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the random states of all processes, by the names of the Trainer's files."""
    own = {f"{key}.pth": value for key, value in checkpoint.metadata.items() if _RANDOM.fullmatch(key)}
    by_rank = _restated(checkpoint, _ACCELERATES, {its: ours for ours, its in RANDOM_KEYS.items()})
    alone = {"rng_state.pth": by_rank[0]} if by_rank.keys() == {0} else {}
    return own or alone or {f"rng_state_{rank}.pth": state for rank, state in by_rank.items()}


def random_states_of_accelerate(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the random states of all processes, by the names of Accelerate's files."""
    own = {f"{key}.pkl": value for key, value in checkpoint.metadata.items() if _ACCELERATES.fullmatch(key)}
    by_rank = _restated(checkpoint, _RANDOM, RANDOM_KEYS)
    return own or {f"random_states_{rank}.pkl": state for rank, state in by_rank.items()}


def _restated(checkpoint: Checkpoint, names: re.Pattern[str], keys: Mapping[str, str]) -> dict[int, object]:
    """Return one program's random states of each process under the other's keys; of those that have all of them."""
    found: dict[int, object] = {}
    for key, value in checkpoint.metadata.items():
        match = names.fullmatch(key)
        node = dict_of(node_of(value))
        if match is not None and keys.keys() <= node.keys():
            state = {its: node[ours] for ours, its in keys.items()}
            found[int(match[1] or 0)] = put_back(value, state)
    return found
