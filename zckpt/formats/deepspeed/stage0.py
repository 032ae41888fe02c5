"""Stage 0: the optimizer is a plain one, in the model file; with 16-bit weights its masters are next to it.

optimizer = {state, param_groups}                                           fp32
optimizer = {optimizer_state_dict: {state, param_groups}, fp32_groups,      FP16_UnfusedOptimizer: a list of
             dynamic_loss_scale, cur_scale, cur_iter, ...}                  tensors for each group
optimizer = {optimizer_state_dict, fp32_groups_flat, ...}                   FP16_Optimizer: one flat tensor each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from zckpt.errors import DamagedFileError
from zckpt.evidence import NAMES_ADVICE
from zckpt.formats.deepspeed.one_bit import without_errors
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.stage0_flat import FLAT_KEY, flat_optimizer
from zckpt.formats.torch_files.optimizer import Sample, attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, parse
from zckpt.formats.torch_files.tensors import carried, slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, as_float
from zckpt.torchfile import Tensor, TorchFile

STATE_KEYS = frozenset({"optimizer_state_dict", "fp32_groups", FLAT_KEY, "state", "param_groups"})
"""What of an optimizer is read as slots and groups; the rest is about loss scaling and clipping."""


def attach_optimizer(checkpoint: Checkpoint, model: ModelShard, names: Sequence[str] | None) -> None:
    """Give a stage-0 checkpoint the optimizer in its model file.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """
    content = model.content["optimizer"]
    path = model.path
    if not isinstance(content, dict):
        raise DamagedFileError(
            "unexpected content", path=path, expected="an optimizer's state dict", found=type(content).__name__
        )
    keep_other_state(checkpoint, content, model.file)
    if FLAT_KEY in content:
        flat = flat_optimizer(checkpoint, content, path, names)
        if flat is None:
            checkpoint.warnings.append(
                f"{path}: FP16_Optimizer holds its masters and state in one flat tensor for each group, and in which "
                f"order parameters make it up is not certain; they are left out, the weights are there "
                f"({NAMES_ADVICE})"
            )
            return
        attach(checkpoint, flat.state, path, certain=flat.names)
    else:
        optimizer = of_content(content, path)
        attach(checkpoint, optimizer, path, names=names, sample=rounds_to_weight(checkpoint, path, optimizer))
    mark_frozen(checkpoint)


def has_all_names(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint has an optimizer, and the name of each parameter that it numbers."""
    names = [name for group in checkpoint.param_groups for name in group.parameters]
    return bool(names) and all(name in checkpoint.parameters for name in names)


def numbers_of(model: ModelShard, numels: Sequence[int]) -> int:
    """Return how many parameters a model file's optimizer has.

    Parameters
    ----------
    numels : sequence of int, elements
        Of parameters of which the first make up flat masters; of numbered ones nothing is asked.
    """
    content = model.optimizer
    if content is None:
        return 0
    if FLAT_KEY not in content:
        return len(of_content(content, model.path).every_number)
    flats = content[FLAT_KEY]
    total = sum(t.numel for t in flats if isinstance(t, Tensor)) if isinstance(flats, (list, tuple)) else 0
    return next((n for n, held in enumerate(accumulate(numels, initial=0)) if held >= total), len(numels))


def recorded_names(model: ModelShard) -> list[str] | None:
    """Return the names that torch's optimizer wrote down with its numbers, where it was made of `named_parameters()`.

    They are those of the engine's module, as ZeRO's files have them. None: not all parameters have one.
    """
    content = model.optimizer
    if content is None:
        return None
    flat = FLAT_KEY in content
    optimizer = parse(content.get("optimizer_state_dict"), model.path) if flat else of_content(content, model.path)
    names = optimizer.recorded_names
    counts = [
        len(its) if isinstance(its := group.get("param_names"), (list, tuple)) else 0 for group in optimizer.groups
    ]
    whole = all(counts) if flat else counts == [len(numbers) for numbers in optimizer.numbers]
    return names if names and whole and len(set(names)) == len(names) else None


def of_content(content: Mapping[object, object], path: str) -> OptimizerState:
    """Return an optimizer with its masters, which are no flat ones.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """
    masters: list[Tensor] = []
    base: object = content
    if "optimizer_state_dict" in content:
        base = content["optimizer_state_dict"]
        groups = content.get("fp32_groups")
        masters = [t for group in groups for t in group if isinstance(t, Tensor)] if isinstance(groups, list) else []
    return without_errors(parse(base, path, masters))


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
    if (scale := as_float(content.get("cur_scale"))) is not None:
        checkpoint.loss_scale = scale


def mark_frozen(checkpoint: Checkpoint) -> None:
    """Mark parameters that no number of the optimizer can stand for; what is not certain is not marked."""
    owned = {name for group in checkpoint.param_groups for name in group.parameters}
    shapes = {parameter.shape for parameter in checkpoint.unnamed.values()}
    if owned - set(checkpoint.parameters) - set(checkpoint.unnamed):
        return
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is None and parameter.name not in owned and parameter.shape not in shapes:
            parameter.frozen = True
