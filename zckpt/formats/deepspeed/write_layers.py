"""The files of a pipeline's layers that are to be written, as trees.

A layer has the same number in any number of stages, so that its file stays what it is until it is sliced otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.pipeline import TIED, layer_names, within
from zckpt.formats.deepspeed.stages import layer_of, tied_key
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.wrapped import unwrapped
from zckpt.formats.deepspeed.write_model import is_filed, single
from zckpt.formats.torch_files.writer import FromFile, SlotTensor
from zckpt.state import WEIGHT, Parameter
from zckpt.torchfile import OrderedMapping, TorchFile


def layer_count(target: Target) -> int:
    """Return the number of layers' files."""
    if is_filed(target) and not target.origin.layers:
        return len(_made(target, 0)) * target.tp
    return sum((shard.mp_rank or 0) == 0 for shard, _ in target.origin.layers) * target.tp


def _made(target: Target, rank: int) -> dict[int, dict[str, Parameter]]:
    """Return what a tensor-parallel rank has of each layer by its keys, of a checkpoint of another format.

    A tied layer has a file for each of its uses: DeepSpeed reads one where no function wraps the layer, and elsewhere
    does not look for it.
    """
    uses = target.stages.uses if target.stages is not None else {}
    found: dict[int, dict[str, Parameter]] = {}
    for mp in target.ranks[rank :: target.tp]:
        for name, one in {**mp.parameters, **mp.buffers}.items():
            key = tied_key(name)
            for number in (layer_of(name),) if key is None else uses[key]:
                found.setdefault(number, {}).setdefault(unwrapped(within(name)), one)
    return dict(sorted(found.items()))


def _made_files(target: Target) -> Iterator[tuple[str, object]]:
    buffers = {name for mp in target.ranks for name in mp.buffers}
    layers = ((lane, *one) for lane in range(target.tp) for one in _made(target, lane).items())
    for rank, number, its in layers:
        tree = OrderedMapping()
        for key, one in its.items():
            slot = one.slots.get(WEIGHT)
            is_buffer = slot is not None and one.name in buffers
            tree[key] = SlotTensor(slot, slot.dtype, one.name) if slot and is_buffer else single(target, one)
        middle = f"-model_{rank:02d}" if target.tp > 1 else ""
        yield f"layer_{number:02d}{middle}-model_states.pt", tree


def layer_files(target: Target) -> Iterator[tuple[str, object]]:
    """Yield the name and the content of each layer's files."""
    tp = target.checkpoint.topology.tp
    layers = target.origin.layers
    if is_filed(target) and not layers:
        yield from _made_files(target)
        return
    if target.tp == tp and target.rules is None:
        for shard, file in layers:
            yield shard.name, FromFile.of(file, file.root)
        return
    sliced = any("-model_" in shard.name.partition("-model_states")[0] for shard, _ in layers)
    for rank in range(target.tp):
        parameters: dict[str, Parameter] = {}
        buffers: dict[str, Parameter] = {}
        for mp in target.ranks[rank :: target.tp]:
            parameters, buffers = {**mp.parameters, **parameters}, {**mp.buffers, **buffers}
        like = rank if target.tp == tp else 0
        for shard, file in layers:
            if (shard.mp_rank or 0) == like:
                middle = f"-model_{rank:02d}" if sliced or target.tp > 1 else ""
                yield (
                    f"layer_{shard.layer:02d}{middle}-model_states.pt",
                    _tree(target, shard, file, parameters, buffers),
                )


def _tree(
    target: Target, shard: Shard, file: TorchFile, parameters: dict[str, Parameter], buffers: dict[str, Parameter]
) -> object:
    """Return a layer's content with the slices of one tensor-parallel rank."""
    if not isinstance(file.root, dict):
        return FromFile.of(file, file.root)
    tp = target.checkpoint.topology.tp
    models = [files.models[0] for files in target.origin.ranks[shard.mp_rank or 0 :: tp]]
    names = layer_names(shard, file, models)
    tree = OrderedMapping()
    if isinstance(file.root, OrderedMapping):
        tree.state = file.root.state
    for key, value in file.root.items():
        name = names.get(key) if isinstance(key, str) else None
        if name in parameters:
            tree[key] = single(target, parameters[name])
        elif name in buffers:
            slot = buffers[name].slots[WEIGHT]
            tree[key] = SlotTensor(slot, slot.dtype, name)
        else:
            tree[key] = FromFile.of(file, value)
    return tree


def stage_notes(target: Target) -> list[str]:
    """Return how layers were dealt anew."""
    stages = target.stages
    if stages is None:
        return []
    pairs = list(zip(stages.bounds, stages.bounds[1:], strict=False))
    notes = ["stages of layers " + "; ".join(f"{low} to {high - 1}" for low, high in pairs)]
    for key in stages.uses if target.pp > 1 else ():
        its = ", ".join(map(str, stages.of(f"{TIED}{key}.")))
        notes.append(f"tied layer {key} is taken to be used in stages {its}, which get its first stage's state")
    return [*notes, *stages.untold]
