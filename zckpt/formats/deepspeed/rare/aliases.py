"""State of an optimizer that is one tensor under several keys, or of several param groups, and has to stay one.

state/0   m ----+               what `torch.save` finds in the same memory, it writes once, and `torch.load` gives back
          again +-> a tensor    as one tensor: an optimizer that changes it under one key sees that under the other
state/1   total ---> 0-d one

A rank's own state is copied with its file's memory, and stays together by that; what is cut, or kept as a number, does
not by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.state import dict_of, list_of
from zckpt.torchfile import FromFile, Tensor

Place = tuple[int, str]
"""A partition's number in a file, and the key of its state."""


def aliases(member: OptimizerShard) -> dict[Place, Place]:
    """Return which state of a rank's file is one tensor with state that comes before it."""
    found: dict[Place, Place] = {}
    first: dict[tuple[object, ...], Place] = {}
    base = member.content.get("optimizer_state_dict" if member.stage == 3 else "base_optimizer_state")
    states = base.get("state") if isinstance(base, dict) else base
    numbered = states.items() if isinstance(states, dict) else enumerate(list_of(states))
    for index, state in numbered:
        for key, value in dict_of(state).items() if type(index) is int else ():
            if isinstance(value, Tensor) and value.numel:
                owner = first.setdefault(identity_of(value), (index, str(key)))
                if owner != (index, str(key)):
                    found[index, str(key)] = owner
    return found


def notes(members: Sequence[OptimizerShard], own: Collection[str]) -> list[str]:
    """Say which state of a model-parallel rank is one tensor, that is not each rank's own."""
    pairs = [(key, its) for (_, key), (_, its) in aliases(members[0]).items() if key not in own]
    keys = list(dict.fromkeys(name for key, its in pairs for name in (its, key)))
    if not keys:
        return []
    return [f"{listed(keys)} of the optimizer's state: one tensor under several keys, or of several groups; "
            f"DeepSpeed's files keep it one, other formats have one of each"]  # fmt: skip


def joined(states: Mapping[object, dict[object, object]], found: Mapping[Place, Place], partitions: int) -> None:
    """Make what was one tensor one again, in the states of a rank's file that is to be written.

    Parameters
    ----------
    states : mapping of int to dict
        By number of the partition; changed.
    found : mapping
        From `aliases`, of the source's file.
    partitions : int
        How many the source's file has. Where the target's has others, keys of one partition are still one.
    """
    pairs = [(states.get(index, {}), key, states.get(owner, {}), its) for (index, key), (owner, its) in found.items()]
    if partitions != len(states):
        within = {(key, its) for (index, key), (owner, its) in found.items() if index == owner}
        pairs = [(state, key, state, its) for key, its in within for state in states.values()]
    for state, key, other, its in pairs:
        if key in state and its in other and not isinstance(state[key], FromFile):
            state[key] = other[its]


def check(found: Mapping[Place, Place], partitions: int, count: int, own: Collection[str]) -> None:
    """Raise UnsupportedError where a number that several partitions share would have to be for others.

    `own`: keys of what is each rank's own, and refused or carried as such.
    """
    across = sorted({key for (index, key), (owner, _) in found.items() if index != owner} - set(own))
    if across and partitions != count:
        raise UnsupportedError(
            f"{listed(across)}: several of a rank's partitions share one tensor, and the target has another number "
            "of partitions",
            expected=f"{partitions} partitions per rank, as in the source",
            found=count,
        )
