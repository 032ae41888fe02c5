"""Which settings of a DeepSpeed training say only how its state is cut or stored."""

from __future__ import annotations

import re

from zckpt.formats.deepspeed.shards import BOOKKEEPING
from zckpt.state import Checkpoint

_GROUP_NAME = re.compile(r"param_groups\[\d+\]\.name")
_EXPERT_GROUP = re.compile(r"ep_size_\d+")


def follows(key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:
    """Tell whether a setting that differs follows from how state is cut, or is one that only DeepSpeed needs.

    Notes
    -----
    Source: DeepSpeed 0.19. The batch of one rank is the batch of all, over the ranks; ZeRO-3 files hold no `clip_grad`;
    groups of experts are named by the ranks that share them.
    """
    a, b = sides
    if a.format != b.format and None in values and _is_bookkeeping(key):
        return True
    if key.startswith("metadata.ds_config.zero_optimization."):
        return True
    if key == "metadata.ds_config.train_micro_batch_size_per_gpu":
        return a.world_size != b.world_size
    if _GROUP_NAME.fullmatch(key):
        return all(_EXPERT_GROUP.fullmatch(str(one)) for one in values)
    return key == "optimizer.clip_grad" and None in values and a.zero_stage != b.zero_stage


def _is_bookkeeping(key: str) -> bool:
    """Tell whether DeepSpeed writes a setting for itself, and no other format needs it."""
    top, _, rest = key.partition(".")
    return top == "metadata" and re.split(r"[.\[]", rest, maxsplit=1)[0] in BOOKKEEPING
