"""The files of experts in a DeepSpeed checkpoint that is to be written. See `expert_ranks` for who looks for which.

What a source's file holds goes along as it is, under the mp_rank of every rank that looks for it, unless experts are
sliced and cut anew; from another format files are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zckpt.errors import LayoutError
from zckpt.formats.deepspeed.auto_ep import alone, auto_experts, auto_layers
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.expert_ranks import Placement, is_data_first
from zckpt.formats.deepspeed.experts import expert_number, in_order, is_expert, layer_of
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.write_model import single
from zckpt.formats.torch_files.writer import FromFile
from zckpt.torchfile import Tensor, TorchFile


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """One file: its name, and what it holds: the source's file, or these parameters of a model-parallel rank."""

    name: str
    mp_rank: int
    file: TorchFile | None
    parameters: Sequence[str] = ()

    def tree(self, target: Target) -> object:
        """Return its content."""
        if self.file is not None and not self.parameters:
            return FromFile.of(self.file, self.file.root)
        own = target.ranks[self.mp_rank].parameters
        auto = auto_experts(target.origin.model)
        found: dict[object, object] = {}
        for name in self.parameters:
            whole, _, number = name.rpartition(".")
            one = alone(own[whole], auto[whole], int(number)) if whole in auto else own[name]
            found[name] = single(target, one)
        root = self.file.root if self.file is not None and isinstance(self.file.root, dict) else {}
        rest = {key: FromFile.of(self.file, value) for key, value in root.items() if self.file and key not in found}
        return {**found, **rest}


def expert_files(target: Target) -> list[ExpertFile]:
    """Return the files of all experts, in the order of layers, experts and model-parallel ranks."""
    if target.stage == 3:
        return []  # AutoEP's, which are sub-groups
    if target.origin.experts:
        return list(_from_files(target))
    return [
        ExpertFile(_name(layer, expert, stage * target.tp + lane), stage * target.tp + lane, None, names)
        for stage in range(target.pp)
        for layer, expert, names in _made(target, stage)
        for lane in _lanes(target, stage, layer_of(names[0]), expert)
    ]


def optimizer_files(target: Target) -> list[tuple[str, TorchFile]]:
    """Return the files for the optimizer of experts, which hold nothing: DeepSpeed before 0.19 looks for them."""
    known = target.origin.expert_optimizers
    degree = max((len(group.experts) for mp in target.ranks for group in mp.groups), default=1)
    found: list[tuple[str, TorchFile]] = []
    for rank in range(degree if known else 0):
        for first in range(0, len(target.ranks), target.tp):
            for lane in _lanes_of_rank(target, rank, degree):
                _, file = known[min(rank, len(known) - 1)]
                found.append((f"expp_rank_{rank}_mp_rank_{first + lane:02d}_optim_states.pt", file))
    return found


def _from_files(target: Target) -> Iterator[ExpertFile]:
    """Yield the files of a source's experts. Those of a pipeline are numbered by stage."""
    origin, tp = target.origin, target.checkpoint.topology.tp
    files: dict[tuple[int, int, int], dict[int, tuple[Shard, TorchFile]]] = {}
    for shard, file in origin.experts:
        stage, lane = divmod(shard.mp_rank or 0, tp)
        key = stage, -1 if shard.layer is None else shard.layer, shard.expert or 0
        files.setdefault(key, {})[lane] = shard, file
    whole = target.ranks[0].lanes > 1 or any(one.state.lanes > 1 for one in origin.ranks)
    same = target.tp == tp
    for (source, _, expert), by_lane in sorted(files.items(), key=lambda item: item[0]):
        first = by_lane[min(by_lane)]
        root = first[1].root if isinstance(first[1].root, dict) else {}
        names = [str(key) for key, value in root.items() if isinstance(value, Tensor)]
        prefix = next(map(layer_of, filter(is_expert, names)), "")
        stage, layer = (source, first[0].layer) if target.stages is None else _place(target, prefix)
        for lane in _lanes(target, stage, prefix, expert):
            mp_rank = stage * target.tp + lane
            shard, file = by_lane.get(lane, first) if same else first
            kept = (layer, mp_rank) == (shard.layer, shard.mp_rank)
            name = shard.name if kept else _name(layer, expert, mp_rank)
            if whole or (same and lane in by_lane):
                yield ExpertFile(name, mp_rank, file)
            else:
                here = target.ranks[mp_rank].parameters
                yield ExpertFile(name, mp_rank, file, [one for one in names if one in here])


def _place(target: Target, layer: str) -> tuple[int, int]:
    """Return the stage that has a layer of experts, and the layer's number among the stage's own."""
    for stage, mp in enumerate(target.ranks[:: target.tp]):
        own = sorted({layer_of(name) for name in mp.parameters if is_expert(name)}, key=in_order)
        if layer in own:
            return stage, own.index(layer)
    raise LayoutError(f"no stage has the experts of {layer}")


def _made(target: Target, stage: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield layer, expert and names of its parameters, of a stage and a checkpoint of another format.

    DeepSpeed numbers layers in the model's order. Of names alone that is not known, and does not matter: every file
    says whose weights it has, and all of them are loaded. Those of AutoEP are looked up by the number that is listed.
    """
    for auto in auto_layers(target.origin.model):
        for expert in range(auto.experts):
            yield auto.number, expert, [f"{name}.{expert}" for name in auto.names]
    layers: dict[str, dict[int, list[str]]] = {}
    for name in target.ranks[stage * target.tp].parameters:
        number = expert_number(name)
        if number is not None:
            layers.setdefault(layer_of(name), {}).setdefault(number, []).append(name)
    for index, layer in enumerate(sorted(layers, key=in_order)):
        for expert in sorted(layers[layer]):
            yield index, expert, layers[layer][expert]


def _lanes(target: Target, stage: int, layer: str, expert: int) -> list[int]:
    """Return the tensor-parallel ranks of a stage that look for the files of an expert under their number."""
    for group in target.ranks[stage * target.tp].groups:
        numbers = {expert_number(p.name) for p in group.experts[0] if layer_of(p.name) == layer and is_expert(p.name)}
        if numbers:
            return _lanes_of_rank(target, expert // len(numbers), len(group.experts))
    return list(range(target.tp))


def _lanes_of_rank(target: Target, expert_rank: int, degree: int) -> list[int]:
    lanes = target.ranks[0].lanes
    if lanes == 1:
        return list(range(target.tp))
    placement = Placement(target.world_size * lanes, is_data_first(target.origin.model))
    count = placement.ranks // degree
    return sorted({placement.rank(expert_rank, position, degree) % lanes for position in range(count)})


def _name(layer: int | None, expert: int, mp_rank: int) -> str:
    before = "" if layer is None else f"layer_{layer}_"
    return f"{before}expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"
