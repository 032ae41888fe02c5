"""AutoEP without ZeRO: each expert rank has a file of its own with all that its optimizer has.

expp_rank_E_mp_rank_MM_optim_states.pt   {optimizer: a plain optimizer, see `stage0`}

    of a parameter   dense ones, alike on all ranks; X.experts.w1 of the rank's own experts: (experts of a rank, ...)
    its order        the model's; or, where the client's optimizer was there before DeepSpeed put its layers into the
                     model, what that has put there (routers and experts) after all else of a group

Source: DeepSpeed 0.19.8, `_save_moe_checkpoint`, `_remap_param_groups_after_module_replacement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zckpt.codes import MISSING_FILE, STEPS_DIFFER
from zckpt.errors import ShardError, UnsupportedError, listed
from zckpt.evidence import NAMES_ADVICE
from zckpt.formats.deepspeed.auto_ep import AutoLayer, auto_layers, local
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.expert_optimizers import content_of
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.stage0 import keep_other_state, mark_frozen, of_content, rounds_to_weight
from zckpt.formats.deepspeed.stage0_flat import FLAT_KEY, certain_flat
from zckpt.formats.deepspeed.values import copies_of
from zckpt.formats.torch_files.optimizer import attach
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, Slot
from zckpt.state.views import concat
from zckpt.torchfile import TorchFile


@dataclass(frozen=True, slots=True)
class _Rank:
    """The optimizer of one expert rank, by name: experts under the name of the tensor of all, with its own of them."""

    number: int
    path: str
    own: Checkpoint

    def slots(self, name: str) -> dict[str, Slot]:
        """Return what the optimizer has of a parameter."""
        return {key: slot for key, slot in self.own.parameters[name].slots.items() if key != WEIGHT}

    @property
    def settings(self) -> list[object]:
        """Members, hyperparameters and single values of each group."""
        return [(group.parameters, group.hyperparameters, group.state) for group in self.own.param_groups]


def attach_auto_experts(
    checkpoint: Checkpoint, files: Sequence[tuple[Shard, TorchFile]], model: ModelShard, names: Sequence[str] | None
) -> None:
    """Give a checkpoint without ZeRO the optimizers of its expert ranks.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already, experts as one tensor for all of them.
    files : sequence of (Shard, TorchFile)
        By expert rank.
    model : ModelShard
        Whose own optimizer, where it has one, is that of the first rank.
    names : sequence of str, optional
        Names of a rank's parameters in its optimizer's order.

    Raises
    ------
    ShardError
        Files are missing, or of different steps.
    UnsupportedError
        Which parameter is which is not known, or what an optimizer has of experts is not for each of them.
    """
    layers = auto_layers(model)
    path = model.path
    degrees = {layer.degree for layer in layers}
    if len(degrees) > 1 or any(is_expert(name) for name in checkpoint.parameters):
        raise UnsupportedError("AutoEP's experts next to experts that are spread otherwise, without ZeRO", path=path)
    degree = degrees.pop()
    ranks = [shard.dp_rank or 0 for shard, _ in files]
    if ranks != list(range(degree)):
        raise ShardError(
            "optimizer files of expert ranks are missing, or too many",
            expected=f"{degree} ranks",
            found=", ".join(map(str, ranks)),
            code=MISSING_FILE,
        )
    found = [_rank(checkpoint, layers, rank, content_of(file), file, names) for rank, (_, file) in enumerate(files)]
    first = found[0]
    for one in found[1:]:
        if one.settings != first.settings:
            raise ShardError(f"expert rank {one.number} is from another step or run: its param groups differ",
                             path=one.path, code=STEPS_DIFFER, ranks=[one.number])  # fmt: skip
    sparse = {name for layer in layers for name in layer.names}
    for name, parameter in first.own.parameters.items():
        owner = checkpoint.parameters[name]
        owner.group, owner.state = parameter.group, parameter.state
        slots = _whole(name, found, checkpoint) if name in sparse else first.slots(name)
        owner.slots = {**owner.slots, **slots}
    checkpoint.param_groups += first.own.param_groups
    checkpoint.unnamed |= first.own.unnamed
    checkpoint.warnings += first.own.warnings
    for one in found[1:]:
        for name in (name for name in first.own.parameters if name not in sparse):
            checkpoint.duplicates += copies_of(name, one.slots(name), first.slots(name), one.number)
    own = model.optimizer
    if own is not None:
        copy = _rank(checkpoint, layers, 0, own, model.file, names)
        for name in copy.own.parameters:
            checkpoint.duplicates += copies_of(name, copy.slots(name), first.slots(name), 0)
    checkpoint.topology = replace(checkpoint.topology, ep=degree)
    keep_other_state(checkpoint, content_of(files[0][1]), files[0][1])
    mark_frozen(checkpoint)


def _rank(
    checkpoint: Checkpoint,
    layers: Sequence[AutoLayer],
    rank: int,
    content: dict[object, object],
    file: TorchFile,
    names: Sequence[str] | None,
) -> _Rank:
    own = Checkpoint(checkpoint.source, checkpoint.format)
    own.parameters = _parameters(checkpoint, layers, rank)
    replaced = {name for name in own.parameters if any(_is_of(name, layer) for layer in layers)}
    if FLAT_KEY in content:
        flat = certain_flat(own, content, file.path, names, last=replaced)
        attach(own, flat.state, file.path, certain=flat.names)
    else:
        numbered = of_content(content, file.path)
        attach(own, numbered, file.path, names=names, sample=rounds_to_weight(own, file.path, numbered), last=replaced)
    shapes = {own.parameters[name].shape for layer in layers for name in layer.names}
    doubtful = [name for name, parameter in own.unnamed.items() if parameter.shape in shapes]
    if doubtful:
        raise UnsupportedError(
            f"which expert's the optimizer's parameters {listed(doubtful)} are is not known",
            path=file.path,
            advice=NAMES_ADVICE,
        )
    return _Rank(rank, file.path, own)


def _is_of(name: str, layer: AutoLayer) -> bool:
    module = layer.prefix.removesuffix("experts")
    return name.startswith((f"{module}router.", f"{layer.prefix}."))


def _parameters(checkpoint: Checkpoint, layers: Sequence[AutoLayer], rank: int) -> dict[str, Parameter]:
    """Return the parameters of a rank, in the model's order: a layer's experts follow its router."""
    experts = {name: layer for layer in layers for name in layer.names}

    def held(layer: AutoLayer) -> dict[str, Parameter]:
        return {name: local(_alone(checkpoint.parameters[name]), layer, layer.degree, rank) for name in layer.names}

    found: dict[str, Parameter] = {}
    waiting = list(layers)
    previous: AutoLayer | None = None
    for name, parameter in checkpoint.parameters.items():
        if name in experts or parameter.tied_to is not None:
            continue
        here = next((layer for layer in waiting if _is_of(name, layer)), None)
        if previous is not None and here is not previous:
            found |= held(previous)
            waiting.remove(previous)
        previous = here
        found[name] = _alone(parameter)
    for layer in waiting:
        found |= held(layer)
    return found


def _alone(parameter: Parameter) -> Parameter:
    weight = {WEIGHT: parameter.slots[WEIGHT]} if WEIGHT in parameter.slots else {}
    return Parameter(parameter.name, parameter.shape, parameter.dtype, weight)


def _whole(name: str, ranks: Sequence[_Rank], checkpoint: Checkpoint) -> dict[str, Slot]:
    """Return the slots of all experts of a weight. A single value, as the step, is the first rank's."""
    first = ranks[0].own.parameters[name]
    count = first.shape[0]
    if any(one.own.parameters[name].state != first.state for one in ranks):
        raise UnsupportedError(f"state of {name} that each expert rank has of its own", path=ranks[0].path,
                               found=listed(list(first.state)))  # fmt: skip
    found = {}
    for key in dict.fromkeys(key for one in ranks for key in one.slots(name)):
        slots = [one.slots(name).get(key) for one in ranks]
        own = [slot for slot in slots if slot is not None]
        like = own[0]
        if len(own) < len(ranks) or any((slot.shape, slot.dtype) != (like.shape, like.dtype) for slot in own):
            raise UnsupportedError(f"{key} of {name} is not alike on all expert ranks", path=ranks[0].path,
                                   found=listed([str(slot and slot.shape) for slot in slots]))  # fmt: skip
        if like.shape == ():
            found[key] = like
            checkpoint.duplicates += [
                Duplicate("parameter", name, name, slot, like, one.number)
                for one, slot in zip(ranks[1:], own[1:], strict=True)
            ]
            continue
        if len(like.shape) != len(first.shape) or like.shape[0] != count:
            raise UnsupportedError(f"{key} of {name} is not state of each expert", path=ranks[0].path,
                                   expected=f"one for each of {count} experts", found=like.shape)  # fmt: skip
        found[key] = concat(own, 0)
    return found
