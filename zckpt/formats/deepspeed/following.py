"""Settings that only say how a checkpoint's state is cut, or that only DeepSpeed needs."""

from __future__ import annotations

import re

from zckpt.formats.deepspeed.affine import KEY as AFFINE_KEY
from zckpt.formats.deepspeed.shards import BOOKKEEPING
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.state import Checkpoint

_GROUP_NAME = re.compile(r"param_groups\[\d+\]\.name")
_SLICES = (
    "metadata.ds_config.tensor_parallel.autotp_size",
    *(f"metadata.{INFO_KEY}.{key}" for key in (AFFINE_KEY, "sub_param_shard_widths", "padded_vocab_size")),
)
_EXPERT_GROUP = re.compile(r"ep_size_\d+")


def follows(key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:
    """Tell whether a setting that differs follows from how state is cut, or is one that only DeepSpeed needs.

    Notes
    -----
    Source: DeepSpeed 0.19. The batch of one rank is the batch of all, over the ranks; ZeRO-3 files hold no `clip_grad`;
    groups of experts are named by the ranks that share them; rules for slices say where each rank's are.
    """
    a, b = sides
    if a.format != b.format and None in values and _is_bookkeeping(key):
        return True
    if key == "metadata.lr_scheduler" and values == (None, None):  # no scheduler, which only one of them says
        return True
    if key.startswith("metadata.ds_config.zero_optimization.") or (
        key.startswith(_SLICES) and a.topology.tp != b.topology.tp
    ):
        return True
    if key == "metadata.ds_config.train_micro_batch_size_per_gpu":
        return (a.world_size, a.topology.dp) != (b.world_size, b.topology.dp)
    if _GROUP_NAME.fullmatch(key):
        return all(_EXPERT_GROUP.fullmatch(str(one)) for one in values)
    return key == "optimizer.clip_grad" and None in values and a.zero_stage != b.zero_stage


def _is_bookkeeping(key: str) -> bool:
    """Tell whether DeepSpeed writes a setting for itself, and no other format needs it."""
    top, _, rest = key.partition(".")
    return top == "metadata" and re.split(r"[.\[]", rest, maxsplit=1)[0] in BOOKKEEPING
