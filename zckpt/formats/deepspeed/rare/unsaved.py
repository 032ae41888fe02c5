"""What DeepSpeed does not save: no file of it has been lost.

Optimizers: with bfloat16 and without ZeRO's own optimizer (stage 0, or stage 1 with gradients summed in float32) some
versions take FP16_UnfusedOptimizer where BF16_Optimizer was, write the model file as if another file had the optimizer,
with None and `param_shapes`, and write no such file.

Source: DeepSpeed 0.17.6 and 0.18.0, `_configure_optimizer` (two names for one constant), `_configure_checkpointing`;
files that 0.17.6 wrote. 0.17.5 and 0.18.9 save it.

Base weights of `OptimizedLinear` with `base_weight_sharding`: each rank has a flat part, and the model file is the
first rank's.

Source: `LoRAOptimizedLinear`, 0.14.5 to 0.19.8; files that 0.19.8 wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zckpt.errors import listed
from zckpt.formats.deepspeed.shards import ModelShard, section
from zckpt.state import Checkpoint, Parameter
from zckpt.state.dtypes import is_floating

VERSIONS = ("0.17.6", "0.18.0")


def is_unsaved(models: Sequence[ModelShard], optimizers: Collection[object]) -> bool:
    """Tell whether a checkpoint has no optimizer because DeepSpeed wrote none."""
    return not optimizers and all(
        model.content.get("ds_version") in VERSIONS
        and model.content.get("optimizer") is None
        and model.content.get("param_shapes")
        and model.dtype == "bfloat16"
        and (
            (stage := model.zero.get("stage", 0)) == 0
            or (stage == 1 and section(model.config, "data_types").get("grad_accum_dtype") in ("fp32", "float32"))
        )
        for model in models
    )


def note_unsaved(checkpoint: Checkpoint, models: Sequence[ModelShard]) -> None:
    """Say that there is no optimizer, and mark as frozen what it did not train."""
    trained = {name for model in models for name in model.trained}
    for parameter in checkpoint.owners:
        parameter.frozen = parameter.name not in trained
    checkpoint.warnings.append(
        f"{models[0].path}: DeepSpeed {models[0].content['ds_version']} saved no optimizer, as it does with "
        "bfloat16 at stage 0 or with BF16_Optimizer's settings: there are only weights"
    )


def base_shards(parameters: Mapping[str, Parameter], path: str) -> list[str]:
    """Return a warning where base weights of LoRA layers are parts that the first rank has."""
    found = []
    for name, first in parameters.items():
        layer = name.removesuffix("lora_weight_1.weight")
        base, second = parameters.get(f"{layer}weight"), parameters.get(f"{layer}lora_weight_2.weight")
        if layer == name or base is None or second is None or len(first.shape) != 2 or len(second.shape) != 2:
            continue
        whole = second.shape[0] * first.shape[1]
        if base.frozen and len(base.shape) == 1 and is_floating(base.dtype) and 0 < base.numel < whole:
            found.append(base.name)
    if not found:
        return []
    return [
        f"{path}: {listed(found)}: DeepSpeed only saves the first rank's part of sharded base weights "
        "(`base_weight_sharding`); the whole ones are in the model that the training started from"
    ]
