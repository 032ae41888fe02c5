"""Settings that only say how a checkpoint's state is cut, or that only DeepSpeed needs."""

from __future__ import annotations

import re
from dataclasses import asdict

from zckpt.formats.deepspeed.axes.experts import is_expert
from zckpt.formats.deepspeed.axes.tp_rules import AFFINE_KEY, INFO_KEY
from zckpt.formats.deepspeed.shards import BOOKKEEPING
from zckpt.state import Checkpoint

OF_RANKS = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size",
    "data_parallel_size", "world_size", "rank", "local_rank", "padded_vocab_size",
})  # fmt: skip
"""Of Megatron-DeepSpeed's arguments."""

_LAYERS = rf"metadata\.{INFO_KEY}\.ds_autoep_layers"
_SLICES = "|".join([AFFINE_KEY, "sub_param_shard_widths", "padded_vocab_size"])
_RULES = (
    (r"metadata\.ds_config\.zero_optimization\.", ()),
    (rf"{_LAYERS}|metadata\.ds_config\.expert_parallel\.autoep_size", ()),  # which rank has which of AutoEP's experts
    (rf"metadata\.ds_config\.tensor_parallel\.autotp_size|metadata\.{INFO_KEY}\.({_SLICES})", ("tp",)),
    (r"metadata\.(mp_rank_\d+_model_states\.)?num_experts\b", ("pp",)),  # of each layer that a stage has
    (rf"metadata\.args\.({'|'.join(OF_RANKS)})\b", ("tp", "pp", "dp")),
    # Arguments and random states of further ranks.
    (r"metadata\.(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.(args|rng_state)\b", ("tp", "pp", "dp", "sharded")),
    (r"metadata\.ds_config\.train_micro_batch_size_per_gpu$", ("ranks", "dp")),
)
"""How settings begin that follow from how state is cut, and in what of that checkpoints then differ, if in anything."""

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
    mine, its = ({**asdict(x.topology), "ranks": x.world_size, "sharded": x.zero_stage == 3} for x in sides)
    top, _, rest = key.partition(".")
    if (
        any(
            re.match(pattern, key) and (not facts or any(mine[fact] != its[fact] for fact in facts))
            for pattern, facts in _RULES
        )
        or (key == "metadata.lr_scheduler" and values == (None, None))  # no scheduler, which only one of them says
        or (
            a.format != b.format and None in values and top == "metadata" and re.split(r"[.\[]", rest)[0] in BOOKKEEPING
        )
    ):
        return True
    if key.startswith(f"metadata.{INFO_KEY}") and "args" in a.metadata and "args" in b.metadata:
        # Megatron-DeepSpeed writes rules where there are slices only.
        return a.topology.tp != b.topology.tp and (None in values or not key.endswith("original_vocab_size"))
    if re.fullmatch(r"param_groups\[\d+\]\.name", key):
        return all(_EXPERT_GROUP.fullmatch(str(one)) for one in values)
    if match := re.fullmatch(r"param_groups\[(\d+)\]\.params", key):
        # The same experts, which come expert rank by expert rank, over other ranks.
        names, others = (one.param_groups[int(match[1])].parameters for one in sides)
        return a.topology.ep != b.topology.ep and sorted(names) == sorted(others) and all(map(is_expert, names))
    return key == "optimizer.clip_grad" and None in values and a.zero_stage != b.zero_stage
