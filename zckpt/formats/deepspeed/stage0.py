"""Stage 0: the optimizer is a plain one, in the model file; with 16-bit weights its masters are next to it.

optimizer = {state, param_groups}                                           fp32
optimizer = {optimizer_state_dict: {state, param_groups}, fp32_groups,      FP16_UnfusedOptimizer: a list of
             dynamic_loss_scale, cur_scale, cur_iter, ...}                  tensors for each group
optimizer = {optimizer_state_dict, fp32_groups_flat, ...}                   FP16_Optimizer: one flat tensor each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.formats.deepspeed.origin import RankFiles
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.torch_files.optimizer import Sample, attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, parse
from zckpt.formats.torch_files.tensors import carried, slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.torchfile import Tensor, TorchFile

STATE_KEYS = frozenset({"optimizer_state_dict", "fp32_groups", "fp32_groups_flat", "state", "param_groups"})
"""What of an optimizer is read as slots and groups; the rest is about loss scaling and clipping."""


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
    keep_other_state(checkpoint, content, model.file)
    optimizer = of_content(content, path)
    if optimizer is None:
        checkpoint.warnings.append(
            f"{path}: FP16_Optimizer holds its masters and state in one flat tensor for each group without the names "
            f"and order of the parameters; they are left out, the weights are there"
        )
        return
    attach(checkpoint, optimizer, path, names=names, sample=rounds_to_weight(checkpoint, path, optimizer))
    mark_frozen(checkpoint)


def attach_to_slices(source: str, ranks: Sequence[RankFiles], names: Sequence[str] | None) -> list[str]:
    """Give each tensor-parallel rank the optimizer in its model file, under the names of its slices.

    Every rank numbers its own slices, which are alike on all of them. Where the names on one rank are not certain,
    none of them gets an optimizer.

    Returns
    -------
    list of str
        Why they have none; empty where they have one.

    Raises
    ------
    DamagedFileError
        One is none that DeepSpeed writes.
    """
    found: list[Checkpoint] = []
    for files in ranks:
        one = Checkpoint(source, "deepspeed")
        one.parameters = {name: replace(p, slots=dict(p.slots)) for name, p in files.state.parameters.items()}
        path = files.models[0].shard.path
        if not isinstance(files.models[0].content.get("optimizer"), dict):
            return [f"{path}: holds no optimizer, as other tensor-parallel ranks do; its state is left out"]
        attach_optimizer(one, files.models[0], names)
        groups = [group.parameters for group in one.param_groups]
        if one.unnamed or not groups or (found and groups != [group.parameters for group in found[0].param_groups]):
            return [
                f"{path}: which slices the optimizer's parameters are is not certain; its state is left out (give "
                f"--names FILE, one name a line in the optimizer's order)"
            ]
        found.append(one)
    for files, one in zip(ranks, found, strict=True):
        files.state.parameters.update(one.parameters)
        files.state.groups[:] = one.param_groups
    return []


def of_content(content: Mapping[object, object], path: str) -> OptimizerState | None:
    """Return an optimizer with its masters; None where they are flat.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """
    if "fp32_groups_flat" in content:
        return None
    masters: list[Tensor] = []
    base: object = content
    if "optimizer_state_dict" in content:
        base = content["optimizer_state_dict"]
        groups = content.get("fp32_groups")
        masters = [t for group in groups for t in group if isinstance(t, Tensor)] if isinstance(groups, list) else []
    return parse(base, path, masters)


def rounds_to_weight(checkpoint: Checkpoint, path: str, optimizer: OptimizerState) -> Sample | None:
    """Return what tells by values whether a master belongs to a weight; None where there are no masters."""

    def sample(master: Tensor, name: str) -> bool:
        from zckpt.compare.weights import rounds_to

        weight = checkpoint.parameters[name].slots.get(WEIGHT)
        return weight is not None and rounds_to(slot_of(MASTER, master, path), weight)

    return sample if optimizer.masters else None


def keep_other_state(checkpoint: Checkpoint, content: Mapping[object, object], file: TorchFile) -> None:
    """Keep what an optimizer has besides its state: the loss scale and how it changes, clipping."""
    for key, value in content.items():
        if key not in STATE_KEYS:
            checkpoint.optimizer_metadata[str(key)] = carried(file, value)
    scale = content.get("cur_scale")
    if isinstance(scale, (int, float)):
        checkpoint.loss_scale = float(scale)


def mark_frozen(checkpoint: Checkpoint) -> None:
    """Mark parameters that no number of the optimizer can stand for; what is not certain is not marked."""
    owned = {name for group in checkpoint.param_groups for name in group.parameters}
    shapes = {parameter.shape for parameter in checkpoint.unnamed.values()}
    if owned - set(checkpoint.parameters) - set(checkpoint.unnamed):
        return
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is None and parameter.name not in owned and parameter.shape not in shapes:
            parameter.frozen = True
