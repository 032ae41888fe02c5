"""Settings that only say how a checkpoint's state is cut, or that only DeepSpeed needs."""

from __future__ import annotations

import re

from zckpt.formats.deepspeed.axes.experts import is_expert
from zckpt.formats.deepspeed.axes.tp_rules import AFFINE_KEY, INFO_KEY
from zckpt.formats.deepspeed.shards import BOOKKEEPING
from zckpt.state import Checkpoint

_GROUP_NAME = re.compile(r"param_groups\[\d+\]\.name")
_SLICES = (
    "metadata.ds_config.tensor_parallel.autotp_size",
    *(
        f"metadata.{INFO_KEY}.{key}"
        for key in (AFFINE_KEY, "ds_autoep_layers", "sub_param_shard_widths", "padded_vocab_size")
    ),
)
_PLACES = (f"metadata.{INFO_KEY}.ds_autoep_layers", "metadata.ds_config.expert_parallel.autoep_size")
"""Which rank has which of AutoEP's experts."""

_ARGUMENT = re.compile(r"metadata\.args\.(\w+)")
_OF_A_RANK = re.compile(r"metadata\.(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.(args|rng_state)\b")
"""Megatron-DeepSpeed's arguments, and what further ranks have of them and of random states."""

OF_RANKS = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size",
    "data_parallel_size", "world_size", "rank", "local_rank", "padded_vocab_size",
})  # fmt: skip

_GROUP_ORDER = re.compile(r"param_groups\[(\d+)\]\.params")
_EXPERTS = re.compile(r"metadata\.(mp_rank_\d+_model_states\.)?num_experts\b")
"""Of each layer of experts that a stage of a pipeline has."""

_EXPERT_GROUP = re.compile(r"ep_size_\d+")


def follows(key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:
    """Tell whether a setting that differs follows from how state is cut, or is one that only DeepSpeed needs.

    Notes
    -----
    Source: DeepSpeed 0.19. The batch of one rank is the batch of all, over the ranks; ZeRO-3 files hold no `clip_grad`;
    groups of experts are named by the ranks that share them, and counted by stage; rules for slices say where each
    rank's are.
    """
    a, b = sides
    top, _, rest = key.partition(".")
    if (
        (a.format != b.format and None in values and top == "metadata" and re.split(r"[.\[]", rest)[0] in BOOKKEEPING)
        or (key == "metadata.lr_scheduler" and values == (None, None))  # no scheduler, which only one of them says
        or key.startswith("metadata.ds_config.zero_optimization.")
        or (key.startswith(_SLICES) and a.topology.tp != b.topology.tp)
        or key.startswith(_PLACES)
        or (_EXPERTS.match(key) and a.topology.pp != b.topology.pp)
        or _is_of_gpt_ranks(key, values, a, b)
    ):
        return True
    if key == "metadata.ds_config.train_micro_batch_size_per_gpu":
        return (a.world_size, a.topology.dp) != (b.world_size, b.topology.dp)
    if _GROUP_NAME.fullmatch(key):
        return all(_EXPERT_GROUP.fullmatch(str(one)) for one in values)
    if match := _GROUP_ORDER.fullmatch(key):
        return _are_of_experts(int(match[1]), a, b)
    return key == "optimizer.clip_grad" and None in values and a.zero_stage != b.zero_stage


def _is_of_gpt_ranks(key: str, values: tuple[object, object], a: Checkpoint, b: Checkpoint) -> bool:
    """Tell whether Megatron-DeepSpeed's arguments, or the rules that it writes for slices only, differ by ranks."""
    degrees = [(one.topology.tp, one.topology.pp) for one in (a, b)]
    match = _ARGUMENT.match(key)
    if match is not None and match[1] in OF_RANKS:
        return degrees[0] != degrees[1] or a.topology.dp != b.topology.dp
    if _OF_A_RANK.match(key):
        return degrees[0] != degrees[1] or (a.topology.dp, a.zero_stage == 3) != (b.topology.dp, b.zero_stage == 3)
    own = key.startswith(f"metadata.{INFO_KEY}") and "args" in a.metadata and "args" in b.metadata
    return own and a.topology.tp != b.topology.tp and (None in values or not key.endswith("original_vocab_size"))


def _are_of_experts(group: int, a: Checkpoint, b: Checkpoint) -> bool:
    """Tell whether a group has the same experts, which come expert rank by expert rank, over other ranks."""
    if a.topology.ep == b.topology.ep or max(len(a.param_groups), len(b.param_groups)) <= group:
        return False
    names = [one.param_groups[group].parameters for one in (a, b)]
    return sorted(names[0]) == sorted(names[1]) and all(map(is_expert, names[0]))
