"""Optimizers that some versions of DeepSpeed do not save: no file of theirs has been lost.

With bfloat16 and without ZeRO's own optimizer (stage 0, or stage 1 with gradients summed in float32) these versions
take FP16_UnfusedOptimizer where BF16_Optimizer was, write the model file as if another file had the optimizer, with
None and `param_shapes`, and write no such file.

Source: DeepSpeed 0.17.6 and 0.18.0, `_configure_optimizer` (two names for one constant), `_configure_checkpointing`;
files that 0.17.6 wrote. 0.17.5 and 0.18.9 save it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.state import Checkpoint

VERSIONS = ("0.17.6", "0.18.0")


def is_unsaved(models: Sequence[ModelShard], optimizers: Collection[object]) -> bool:
    """Tell whether a checkpoint has no optimizer because DeepSpeed wrote none."""
    return not optimizers and all(map(_is_of, models))


def _is_of(model: ModelShard) -> bool:
    content, config = model.content, model.config
    zero, types = config.get("zero_optimization"), config.get("data_types")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    summed = isinstance(types, dict) and types.get("grad_accum_dtype") in ("fp32", "float32")
    return (
        content.get("ds_version") in VERSIONS
        and content.get("optimizer") is None
        and bool(content.get("param_shapes"))
        and model.dtype == "bfloat16"
        and (stage == 0 or (stage == 1 and summed))
    )


def note_unsaved(checkpoint: Checkpoint, models: Sequence[ModelShard]) -> None:
    """Say that there is no optimizer, and mark as frozen what it did not train."""
    trained = {name for model in models for group in model.param_shapes or [] for name in group}
    for parameter in checkpoint.parameters.values():
        parameter.frozen = parameter.tied_to is None and parameter.name not in trained
    checkpoint.warnings.append(
        f"{models[0].shard.path}: DeepSpeed {models[0].content['ds_version']} saved no optimizer, as it does not with "
        f"bfloat16 at stage 0 or with BF16_Optimizer's settings: the weights are all there is"
    )
