"""Pipeline parallelism: weights in a file for each layer, optimizer state by stage.

    mp_rank = stage x tp + tensor-parallel rank
    layer_NN-model_TT-model_states.pt    {name within the layer: tensor}; NN counts over the whole model
    param_shapes of a stage              `NN.<name>`, and `tied_modules.<key>.<name>` for a layer used in several stages

A tied layer's weights lie in the file of its first use only; every stage that uses it has its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.state import Duplicate, Parameter, ParamGroup
from zckpt.torchfile import Tensor, TorchFile

TIED = "tied_modules."

Weights = dict[str, tuple[str, Tensor]]
"""File and tensor by parameter name."""


def degrees(model: ModelShard, layers: Sequence[Shard], mp_ranks: int) -> tuple[int, int]:
    """Return (pipeline, tensor) parallel degrees.

    Newer model files record them; in older ones the layer files tell how many tensor-parallel ranks there are.

    Raises
    ------
    LayoutError
        They do not multiply to the number of model-parallel ranks.
    """
    recorded = model.content.get("checkpoint_parallel_dimensions")
    if isinstance(recorded, dict) and type(recorded.get("tp_degree")) is int and recorded["tp_degree"] > 0:
        tp = recorded["tp_degree"]
    else:
        tp = len({layer.mp_rank or 0 for layer in layers}) if layers else mp_ranks
    if mp_ranks % tp or (not layers and tp != mp_ranks):
        raise LayoutError(
            "model-parallel ranks do not make a grid of stages and tensor-parallel ranks",
            path=model.shard.path,
            expected=f"a multiple of {tp} ranks and, for several stages, layer files",
            found=mp_ranks,
        )
    return mp_ranks // tp, tp


def stage_weights(
    files: Sequence[tuple[Shard, TorchFile]], models: Sequence[ModelShard], tp: int
) -> dict[int, Weights]:
    """Return the weights of each model-parallel rank, under the names that its groups have for them.

    What no stage's groups or buffers name (frozen parameters) goes to the first stage.

    Parameters
    ----------
    files : sequence of (Shard, TorchFile)
        The layer files.
    models : sequence of ModelShard
        By model-parallel rank.
    tp : int
        Tensor-parallel degree.

    Raises
    ------
    UnsupportedError
        A layer's weights could be those of several tied layers.
    """
    found: dict[int, Weights] = {rank: {} for rank in range(len(models))}
    for tp_rank in range(tp):
        stages = range(tp_rank, len(models), tp)
        named = {rank: _names(models[rank]) for rank in stages}
        known: dict[str, tuple[int, ...] | None] = {}
        for names in named.values():
            known.update(names)
        for shard, file in files:
            if (shard.mp_rank or 0) != tp_rank or not isinstance(file.root, dict):
                continue
            for key, tensor in file.root.items():
                if not isinstance(tensor, Tensor):
                    continue
                name = _full_name(shard, str(key), tensor, known)
                owners = [rank for rank in stages if name in named[rank]] or [tp_rank]
                for rank in owners:
                    found[rank][name] = (shard.path, tensor)
    return found


def _names(model: ModelShard) -> dict[str, tuple[int, ...] | None]:
    names: dict[str, tuple[int, ...] | None] = dict.fromkeys(model.buffer_names)
    for group in model.param_shapes or []:
        names.update(group)
    return names


def _full_name(shard: Shard, key: str, tensor: Tensor, known: Mapping[str, tuple[int, ...] | None]) -> str:
    """Return the model's name for a key of a layer file."""
    name = f"{shard.layer}.{key}"
    if name in known:
        return name
    of_shape = (n for n, shape in known.items() if n.startswith(TIED) and shape == tensor.shape)
    tied = [n for n in of_shape if n.removeprefix(TIED).partition(".")[2] == key]  # tied_modules.<layer's key>.<key>
    if len(tied) > 1:
        raise UnsupportedError(
            f"{key} could be the weight of several tied layers", path=shard.path, found=", ".join(sorted(tied))
        )
    return tied[0] if tied else name


def _kept_by(name: str, parameter: Parameter, used: Parameter, mp_rank: int) -> Iterator[Duplicate]:
    """Yield the copies that a later stage keeps of a tied layer."""
    for key, slot in parameter.slots.items():
        first = used.slots.get(key)
        if first is not None and first.shape == slot.shape and first.spans != slot.spans:
            yield Duplicate("parameter", name, name, slot, first, mp_rank)


def join(stages: Sequence[RankState], path: str) -> RankState:
    """Return one state for all stages; of a tied layer, the first stage's.

    Raises
    ------
    LayoutError
        A parameter that is not tied is in two stages.
    """
    if len(stages) == 1:
        return stages[0]
    joined = RankState(0, expert_parallel=max(stage.expert_parallel for stage in stages))
    for stage in stages:
        twice = [n for n in stage.parameters if n in joined.parameters and not n.startswith(TIED)]
        if twice:
            raise LayoutError(f"{twice[0]} is in two pipeline stages", path=path)
        joined.buffers.update(stage.buffers)
        joined.padding += stage.padding
        joined.padding_spans += stage.padding_spans
        joined.duplicates += stage.duplicates
        joined.per_rank += stage.per_rank
        for name in [name for name in stage.parameters if name in joined.parameters]:
            joined.duplicates += _kept_by(name, stage.parameters[name], joined.parameters[name], stage.mp_rank)
        joined.warnings += stage.warnings
        for index, group in enumerate(stage.groups):
            if index == len(joined.groups):
                joined.groups.append(ParamGroup(group.hyperparameters, [], group.state))
            joined.groups[index].parameters += [n for n in group.parameters if n not in joined.parameters]
        for name, parameter in stage.parameters.items():
            joined.parameters.setdefault(name, parameter)
    return joined
