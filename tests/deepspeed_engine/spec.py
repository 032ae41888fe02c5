"""What to train: one frozen description from which model, optimizer and engine are built.

Knows how a description becomes a DeepSpeed configuration, and nothing of processes or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.deepspeed_engine.optimizers import BY_CONFIGURATION

# 12 divides evenly among 1, 2, 3, 4, 6 and 12 ranks, so that every world size sees the same batches.
# A description for 5 ranks says another one.
GLOBAL_BATCH = 12


@dataclass(frozen=True, slots=True)
class Spec:
    """One checkpoint to be made by the real engine.

    `world_size` counts all ranks; the data-parallel degree is what `tensor_parallel` and
    `pipeline_parallel` leave of it. `zero` and `bf16` are merged into those sections of the DeepSpeed
    configuration, `config` into the whole of it.
    """

    name: str
    stage: int = 2
    dtype: str = "bf16"
    world_size: int = 2
    # rich, matrices, tiny, moe, moe_layers, moe_megatron, megatron, pipeline, pipeline_megatron, pipeline_moe,
    # pipeline_moe_megatron, pipeline_megatron_ and one of gpt_pipe.KINDS, or one of models.HUGGING_FACE
    model: str = "rich"
    optimizer: str = "adamw"  # see optimizers.KINDS
    groups: int = 3
    named: bool = False  # the optimizer is made of `named_parameters()`, and writes the names down
    batch: int = GLOBAL_BATCH  # over all ranks
    steps: int = 5
    steps_after: int = 5  # trained past the checkpoint, for the losses that a resumed run must repeat
    tag: str | None = None
    extra_tag_step: int | None = None  # saves once more, after this many steps
    tied: bool = True
    recomputed: bool = False  # of pipeline and unstaged: a block is in torch's `checkpoint_wrapper`
    empty: bool = False
    zero_dim: bool = False
    prefix: str = ""  # a wrapping module of this name, as Lightning puts around the model
    run_folder: str = ""  # the run directory inside the folder that also holds the truth
    elastic: bool = False
    round_robin: bool = False
    parameter_alignment: bool = False
    bf16_optimizer: bool = False
    bf16_master: bool = False
    offload: bool = False
    sub_group_size: int | None = None
    frozen_in_group: bool = False
    exclude_frozen: bool = False
    scheduler: bool = False
    clip: float = 0.0
    universal_info: bool = False  # as client state, for DeepSpeed's own converter
    universal_version: float = 0.2  # of that; from 0.4 on it lists the width of every sub-parameter's slice
    client_state: Mapping[str, Any] = field(default_factory=dict)
    expert_parallel: int = 1
    experts: int = 4
    sliced_experts: bool = False  # of ..moe_megatron: each tensor-parallel rank has all experts, for DeepSpeed slices
    expert_layers: tuple[tuple[int, int, bool], ...] = ()  # of moe_layers: experts, expert parallel, residual
    frozen_experts: bool = False  # of the last of moe_layers
    expert_group_size: int = 178_956_971  # elements of a rank's experts in one param group
    tensor_parallel: int = 1
    auto_tp: bool = False  # DeepSpeed itself slices the model
    invariant: bool = False  # megatron computes the same at any tensor-parallel degree, and nothing drifts apart
    pipeline_parallel: int = 1
    partition_method: str = "uniform"  # of a pipeline
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_pipeline(self) -> bool:
        return self.model.startswith("pipeline")

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)

    def at(self, world_size: int, **changes: Any) -> Spec:
        """Describe the same training at another number of ranks."""
        return dataclasses.replace(self, world_size=world_size, **changes)


def ds_config(spec: Spec) -> dict[str, Any]:
    """Build the configuration that `deepspeed.initialize` gets for `spec`."""
    config: dict[str, Any] = {
        "train_batch_size": spec.batch,
        "train_micro_batch_size_per_gpu": spec.batch // spec.data_parallel,
        "gradient_accumulation_steps": 1,
        "zero_optimization": _zero_section(spec),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "gradient_clipping": spec.clip,
    }
    if spec.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if spec.bf16_master:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif spec.dtype == "fp16":
        config["fp16"] = {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 8,
            "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 1,
        }  # fmt: skip
    if spec.optimizer in BY_CONFIGURATION:
        config["optimizer"] = BY_CONFIGURATION[spec.optimizer]
    if spec.bf16_optimizer:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if spec.auto_tp:
        del config["train_batch_size"]  # it would count the ranks that share a batch
        config["tensor_parallel"] = {"autotp_size": spec.tensor_parallel}
    return config | dict(spec.config)


def _zero_section(spec: Spec) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": spec.stage}
    if spec.stage in (1, 2):
        section["elastic_checkpoint"] = spec.elastic
        section["round_robin_gradients"] = spec.round_robin
        if spec.parameter_alignment:
            section["parameter_alignment"] = True
    if spec.optimizer == "muon":
        section["reduce_scatter"] = False  # DeepSpeed asks for it
    if spec.stage == 3:
        section["stage3_param_persistence_threshold"] = 0
        if spec.sub_group_size is not None:
            section["sub_group_size"] = spec.sub_group_size
    if spec.offload:
        section["offload_optimizer"] = {"device": "cpu"}
    return section | dict(spec.zero)


def plain_config(stage: int, **more: Any) -> dict[str, Any]:
    """Build the configuration of a training that has no description."""
    return {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **more,
    }  # fmt: skip
