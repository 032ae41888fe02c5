"""What the values in DeepSpeed's files are, for the inventory: some say how state is cut, others are state."""

from __future__ import annotations

from zckpt.formats.torch_files.optimizer import optimizer_rules
from zckpt.state.inventory import COPY, IMPLIED, STATE, Rule

MODEL_RULES = (
    *(
        Rule((key, "**"), IMPLIED, "names and shapes of the model's tensors")
        for key in ("buffer_names", "param_shapes", "frozen_param_shapes", "shared_params")
    ),
    *(
        Rule((key, "**"), IMPLIED, "ranks and version of the run")
        for key in ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version")
    ),
    *optimizer_rules("optimizer"),
    *optimizer_rules("optimizer", "optimizer_state_dict"),
)
"""Of a model file: `module`, the fragments of frozen parameters and the client's keys need no rule."""

_Z = "optimizer_state_dict"
_CUT = (
    "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings", "ds_version",
    "ds_zero_partition_groups", "fp32_flat_groups", "single_partition_of_fp32_groups",
)  # fmt: skip


def shard_rules(*, first: bool) -> tuple[Rule, ...]:
    """Return the rules of a rank's optimizer file; of the first rank's, hyperparameters are state."""
    groups = (
        (_Z, "base_optimizer_state", "param_groups"),
        (_Z, "base_optimizer_param_groups"),
        (_Z, "optimizer_state_dict", "param_groups"),
    )
    return (
        *(Rule((*place, "*", "params", "**"), IMPLIED, "numbers of flat groups") for place in groups),
        *(
            Rule((*place, "*", "*", "**"), STATE, "hyperparameters")
            if first
            else Rule((*place, "**"), COPY, "hyperparameters, found to be the first rank's")
            for place in groups
        ),
        Rule((_Z, "base_optimizer_state", "state", "*", "*"), STATE, "single values of a group"),
        Rule((_Z, "base_optimizer_state", "*", "*"), STATE, "single values of a group"),
        Rule(
            (
                _Z,
                "base_optimizer_state_step",
            ),
            STATE,
            "the step",
        ),
        Rule((_Z, "optimizer_state_dict", "state", "*", "*"), STATE, "single values of a group"),
        *(Rule((_Z, key, "**"), IMPLIED, "how the state is cut") for key in _CUT),
        Rule(("ds_version",), IMPLIED, "ranks and version of the run"),
        Rule(("ds_config", "**"), COPY, "the configuration, which the model file has"),
    )
