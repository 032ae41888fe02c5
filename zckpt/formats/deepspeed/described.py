"""What is true of a checkpoint as a whole, from the files of all its ranks: topology, metadata, what else they hold."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.formats.deepspeed.auto_ep_lists import common
from zckpt.formats.deepspeed.directory import Shard, TagDirectory
from zckpt.formats.deepspeed.experts import SLICED_EXPERTS, is_expert
from zckpt.formats.deepspeed.one_bit import ONE_BIT_RULES, compresses
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.ranks import data_parallel_size
from zckpt.formats.deepspeed.shards import MODEL_KEYS, ModelShard, OptimizerShard, section
from zckpt.formats.deepspeed.stage0 import STATE_KEYS
from zckpt.formats.deepspeed.unsaved import base_shards
from zckpt.formats.deepspeed.values import copies_of_optimizers, keep_others, shard_rules
from zckpt.formats.deepspeed.zenflow import DETAIL, WARNING, uses_zenflow
from zckpt.formats.torch_files.tensors import carried
from zckpt.state import Checkpoint, Topology, as_float
from zckpt.state.inventory import Rule
from zckpt.torchfile import Object, TorchFile

EXTRA_STATE_KEY = "module_extra_state"
"""Where the state of modules that is no tensor is kept, by name; DeepSpeed has it among the weights."""

OPTIMIZER_METADATA_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What an optimizer file holds besides the optimizer's state and how it is cut."""


KEPT_KEYS = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "num_experts",
    "ds_config", "sparse_tensor_module_names",
)  # fmt: skip
"""DeepSpeed's own keys of a model file that go along as they are; so do all of the client's."""


def describe_whole(
    checkpoint: Checkpoint,
    directory: TagDirectory,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    state: RankState,
    *,
    pp: int,
    tp: int,
    first: RankState,
) -> None:
    """Fill in what is true of the checkpoint as a whole.

    Parameters
    ----------
    state, first : RankState
        That of all model-parallel ranks, put together, and that of the first one.
    """
    model = models[0]
    dp = data_parallel_size(models, members)
    checkpoint.topology = Topology(dp=dp, tp=tp, pp=pp, ep=state.expert_parallel)
    checkpoint.world_size = dp * tp * pp
    version = model.content.get("ds_version") or (members[0].version if members else None)
    checkpoint.format_version = version if isinstance(version, str) else None
    step = model.content.get("global_steps")
    checkpoint.step = step if type(step) is int else None
    checkpoint.zero_stage = _stage(model, members)
    checkpoint.loss_scale = _loss_scale(members)
    checkpoint.details["tag"] = directory.tag
    if members:
        checkpoint.details["optimizer_form"] = "elastic" if members[0].elastic else "rigid"
        checkpoint.details["round_robin_gradients"] = model.zero_option("round_robin_gradients")
        pads = any(any(group) for group in members[0].alignment_paddings or [])
        checkpoint.details["parameter_alignment"] = pads or model.zero_option("parameter_alignment")
        checkpoint.details["bf16_optimizer"] = members[0].bf16_optimizer
        if uses_zenflow(model.config):
            checkpoint.details[DETAIL] = first.transposed
            checkpoint.warnings.append(WARNING)
        checkpoint.warnings += base_shards(checkpoint.parameters, model.path)
        if members[0].elastic and not members[0].groups:
            checkpoint.warnings.append("the elastic form of the optimizer state does not hold hyperparameters")
    checkpoint.metadata = {
        key: carried(model.file, value) for key, value in model.content.items() if key not in MODEL_KEYS
    }
    checkpoint.metadata |= {
        key: carried(model.file, model.content[key]) for key in KEPT_KEYS if model.content.get(key) is not None
    }
    if tp > 1 and any(map(is_expert, checkpoint.parameters)):
        checkpoint.details[SLICED_EXPERTS] = first.lanes == 1
    if model.configuration is not None:
        checkpoint.metadata.setdefault("ds_config", carried(model.file, model.configuration))
    if members:
        content = members[0].content
        checkpoint.optimizer_metadata = {
            key: carried(members[0].file, content[key]) for key in OPTIMIZER_METADATA_KEYS if key in content
        }


def keep_extra(checkpoint: Checkpoint, models: Sequence[ModelShard]) -> dict[str, tuple[Rule, ...]]:
    """Keep the state of modules that is no tensor, of each rank; return rules for what is as in the first's file."""
    if models[0].extra:
        checkpoint.metadata[EXTRA_STATE_KEY] = carried(models[0].file, dict(models[0].extra))
    keys = dict.fromkeys(key for model in models for key in model.extra)
    held = [(model.file, model.extra) for model in models]
    own, rules = keep_others(held[0], held[1:], [*keys], ("module",))
    checkpoint.metadata |= own
    return rules


def keep_all_others(
    checkpoint: Checkpoint,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    members: Sequence[OptimizerShard],
    of_experts: Sequence[tuple[Shard, TorchFile]],
) -> None:
    """Keep what ranks have of their own, and say of everything else in their files what it is."""
    keys = dict.fromkeys(key for m in models for key in m.content if key not in MODEL_KEYS or key in KEPT_KEYS)
    held = [(m.file, common(m)) for m in models]
    metadata, rules = keep_others(held[0], held[1:], [*keys])
    checkpoint.metadata |= metadata
    of_modules = keep_extra(checkpoint, models)
    rules = {path: (*one, *of_modules[path]) for path, one in rules.items()}
    if members:
        lead = members[0]
        others = [(o.file, o.content) for o in optimizers if o is not lead]
        own, more = keep_others((lead.file, lead.content), others, OPTIMIZER_METADATA_KEYS, ("optimizer_state_dict",))
        checkpoint.optimizer_metadata |= own
        rules |= {path: (*one, *shard_rules(first=False)) for path, one in more.items()}
        rules[lead.path] = shard_rules(first=True)
        for path, one in copies_of_optimizers(models, optimizers).items():
            rules[path] = (*rules.get(path, ()), *one)
    else:
        plain_ones = [(file, file.root) for _, file in of_experts] + [
            (m.file, m.content) for m in models if of_experts or checkpoint.param_groups
        ]
        contents = [(file, root["optimizer"]) for file, root in plain_ones
                    if isinstance(root, dict) and isinstance(root.get("optimizer"), dict)]  # fmt: skip
        kept = dict.fromkeys(str(key) for _, one in contents for key in one if key not in STATE_KEYS)
        own, more = keep_others(contents[0], contents[1:], [*kept], ("optimizer",)) if contents else ({}, {})
        checkpoint.optimizer_metadata |= own
        rules |= {path: (*rules.get(path, ()), *one) for path, one in more.items()}
    compressed = {m.path for m in models if compresses(m.content.get("optimizer"))}
    for file in checkpoint.files:
        ahead = ONE_BIT_RULES if file.path in compressed else ()
        file.rules = (*ahead, *file.rules, *rules.get(file.path, ()))


def _stage(model: ModelShard, members: Sequence[OptimizerShard]) -> int:
    configured = section(model.config, "zero_optimization").get("stage")
    if members and not members[0].bf16_optimizer:
        return members[0].stage
    return configured if isinstance(configured, int) else (1 if members else 0)


def _loss_scale(members: Sequence[OptimizerShard]) -> float | None:
    scaler = members[0].content.get("loss_scaler") if members else None
    scale: object = None
    if isinstance(scaler, Object):
        scale = scaler.get("cur_scale")
    return as_float(scale)
