"""What the Trainer keeps besides the model and the optimizer, of whatever the source has: scheduler, random states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from zckpt.state import Checkpoint, Scalar
from zckpt.torchfile import FromFile

FILES = {"scaler": "scaler.pt", "training_args": "training_args.bin"}
"""Files of the Trainer's that are written as they were, by the key under which they are carried."""

SCHEDULER_KEYS = ("scheduler", "lr_scheduler")

_RANDOM = re.compile(r"rng_state(?:_[0-9]+)?")
_ACCELERATES = re.compile(r"random_states_([0-9]+)")

RANDOM_KEYS = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
"""What the Trainer and Accelerate call the same states."""

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""What a scheduler keeps for each param group."""


def scheduler(checkpoint: Checkpoint, notes: list[str]) -> object:
    """Return the state of the Trainer's scheduler: the source's, or one at its step.

    Parameters
    ----------
    checkpoint : Checkpoint
        With the Trainer's param groups.
    notes : list of str
        Gets what was written by rule.
    """
    count = len(checkpoint.param_groups)
    found: Mapping[object, object] = {}
    for key in SCHEDULER_KEYS:
        value = checkpoint.metadata.get(key)
        node = value.node if isinstance(value, FromFile) else value
        if isinstance(node, Mapping) and type(node.get("last_epoch")) is int:
            found = node
            if all(_length(node.get(one)) in (None, count) for one in PER_GROUP):
                return value
            break
    last = found.get("last_epoch", checkpoint.step)
    rates = [_number(group.hyperparameters.get("lr")) for group in checkpoint.param_groups]
    bases = [_number(group.hyperparameters.get("initial_lr")) for group in checkpoint.param_groups]
    notes.append(
        f"scheduler.pt was written by rule: a LambdaLR after {last} steps"
        + ("" if None not in bases else ", whose base rates are those of the Trainer's arguments")
    )
    return {
        "last_epoch": last,
        "_step_count": found.get("_step_count", last + 1 if isinstance(last, int) else 1),
        "_get_lr_called_within_step": False,
        "lr_lambdas": [None] * count,
        **({} if None in rates else {"_last_lr": rates}),
        **({} if None in bases else {"base_lrs": bases}),
    }


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple)) else None


def _number(value: object) -> float | None:
    number = value.value if isinstance(value, Scalar) else value
    return float(number) if isinstance(number, (int, float)) else None


def random_states(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the random states of all processes, by the names of the Trainer's files."""
    own = {f"{key}.pth": value for key, value in checkpoint.metadata.items() if _RANDOM.fullmatch(key)}
    if own:
        return own
    found: dict[str, object] = {}
    for key, value in checkpoint.metadata.items():
        match = _ACCELERATES.fullmatch(key)
        node = value.node if isinstance(value, FromFile) else value
        if match is None or not isinstance(node, Mapping) or not set(RANDOM_KEYS.values()) <= node.keys():
            continue
        state = {ours: node[its] for ours, its in RANDOM_KEYS.items()}
        found[f"rng_state_{int(match[1])}.pth"] = replace(value, node=state) if isinstance(value, FromFile) else state
    return {"rng_state.pth": found["rng_state_0.pth"]} if list(found) == ["rng_state_0.pth"] else found
