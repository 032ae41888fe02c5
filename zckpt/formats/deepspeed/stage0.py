"""Stage 0: the optimizer is a plain one, in the model file; with 16-bit weights its masters are beside it.

optimizer = {state, param_groups}                                           fp32
optimizer = {optimizer_state_dict: {state, param_groups}, fp32_groups}      FP16_UnfusedOptimizer: a list of
                                                                            tensors for each group
optimizer = {optimizer_state_dict, fp32_groups_flat}                        FP16_Optimizer: one flat tensor each
"""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.errors import DamagedFileError
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.tensors import slot_of
from zckpt.formats.torch_optimizer import attach, parse
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.torchfile import Tensor


def attach_optimizer(checkpoint: Checkpoint, model: ModelShard, names: Sequence[str] | None) -> None:
    """Give a stage-0 checkpoint the optimizer in its model file.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """
    content = model.content["optimizer"]
    path = model.shard.path
    if not isinstance(content, dict):
        raise DamagedFileError(
            "unexpected content", path=path, expected="an optimizer's state dict", found=type(content).__name__
        )
    if "fp32_groups_flat" in content:
        checkpoint.warnings.append(
            f"{path}: FP16_Optimizer holds its masters and state in one flat tensor for each group without the names "
            f"and order of the parameters; they are left out, the weights are there"
        )
        return
    masters: list[Tensor] = []
    base: object = content
    if "optimizer_state_dict" in content:
        base = content["optimizer_state_dict"]
        groups = content.get("fp32_groups") or []
        masters = [t for group in groups for t in group if isinstance(t, Tensor)]
    optimizer = parse(base, path, masters)

    def sample(master: Tensor, name: str) -> bool:
        from zckpt.weight_check import rounds_to

        weight = model.module.get(name)
        return weight is not None and rounds_to(slot_of(MASTER, master, path), slot_of(WEIGHT, weight, path))

    attach(checkpoint, optimizer, path, names=names, sample=sample if masters else None)
    _mark_frozen(checkpoint)


def _mark_frozen(checkpoint: Checkpoint) -> None:
    """Mark parameters that no number of the optimizer can stand for; what is not certain is not marked."""
    owned = {name for group in checkpoint.param_groups for name in group.parameters}
    shapes = {parameter.shape for parameter in checkpoint.unnamed.values()}
    if owned - set(checkpoint.parameters) - set(checkpoint.unnamed):
        return
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is None and parameter.name not in owned and parameter.shape not in shapes:
            parameter.frozen = True
