"""What a directory for Accelerate leaves to choose."""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.formats.options import option

SHARDED, FULL = "sharded", "full"


@dataclass(frozen=True, slots=True)
class Options:
    """What `convert --to accelerate` can be given."""

    fsdp: str | None = option(
        str,
        None,
        "For FSDP with Accelerate's SHARDED_STATE_DICT or FULL_STATE_DICT. Default: for training without FSDP.",
        choices=(SHARDED, FULL),
    )
    world_size: int | None = option(
        int, None, "Files to spread a sharded model over; any number of ranks loads it. Default: 1.", metavar="N"
    )
    groups: str = option(
        str,
        "keep",
        "Param groups: as SOURCE, or one of all parameters in the model's order.",
        choices=("keep", "one"),
    )
