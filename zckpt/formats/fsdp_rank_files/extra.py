"""The further files of ranks: what all of them hold, what is one rank's own, and both as they are written again."""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.formats.fsdp_rank_files.directory import EXTRA, FORMAT, rank_name
from zckpt.state import Checkpoint

OF_ITS_RANK = ("rank", "world_size")
"""What a rank's file says of itself."""

SCHEDULERS = ("lr_scheduler", "scheduler")
"""Keys of metadata under which programs have the scheduler's state; the files have it under the first."""

_OF_ONE = re.compile(r"extra_state_world_size_([0-9]{1,7})_rank_([0-9]{1,7})\.(.+)")
"""Keys of metadata for what only one rank has; the first rank's are under their own."""

KEYS = "extra_state"
"""Under which the details have the keys of the files."""


def keys_of(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of the source's further files; none of a source of another format."""
    known = checkpoint.details.get(KEYS) if checkpoint.format == FORMAT else None
    return [str(key) for key in known] if isinstance(known, list) else []


def of_single_ranks(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of which some rank has a value of its own."""
    own = {match[3] for match in map(_OF_ONE.fullmatch, checkpoint.metadata) if match is not None}
    return [key for key in keys_of(checkpoint) if key in own]


def ranks_with_state(checkpoint: Checkpoint) -> int:
    """Return how many ranks the values of single ranks are of: those of the files that a program wrote first."""
    found = {int(match[1]) for match in map(_OF_ONE.fullmatch, checkpoint.metadata) if match is not None}
    return max(found, default=checkpoint.world_size)


def extra_state(checkpoint: Checkpoint, rank: int, world_size: int) -> dict[str, object]:
    """Return what a rank's further file holds: what the source's has, without what is of ranks that it had not."""
    metadata, ranks = checkpoint.metadata, ranks_with_state(checkpoint)
    scheduler = next((metadata[key] for key in SCHEDULERS if key in metadata), None)
    found: dict[str, object] = {"lr_scheduler": scheduler}
    single = of_single_ranks(checkpoint)
    for key in keys_of(checkpoint):
        own = f"{Path(rank_name(EXTRA, ranks, rank)).stem}.{key}"
        if key in OF_ITS_RANK:
            found[key] = rank if key == "rank" else world_size
        elif own in metadata:
            found[key] = metadata[own]
        elif key in metadata and (key not in single or rank < ranks):
            found[key] = metadata[key]
    return found
