"""AutoEP: experts that DeepSpeed 0.19 itself spreads, each of their weights one tensor for all experts of a rank.

    ds_autoep_layers          in the model file: which layers, how many experts, which rank has which
    param_shapes              X.experts.w1: (experts of a rank, rows, columns); w2 and w3 alike
    layer_L_expert_E_...      {X.experts.w1.E: (rows, columns), ...} of expert E, counted over all ranks; not of ZeRO-3

A rank's experts follow those of the expert rank before it, so that its tensor is an extent of the whole one, which a
checkpoint has: X.experts.w1, (experts, rows, columns).

Source: DeepSpeed 0.19.8, `_save_moe_checkpoint`, `load_moe_state_dict`, `checkpoint/autoep_affine.py`.

What model files say of AutoEP's layers: `ds_autoep_layers`, which each rank writes from where it stands.

AutoEP's experts of a checkpoint of another format: one tensor for all of a layer, and which layers those are.

`universal_checkpoint_info`, which every format carries, lists them as `ds_autoep_layers` does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, about
from zckpt.formats.deepspeed.axes.experts import is_expert, of_auto_ep
from zckpt.formats.deepspeed.axes.tp_rules import INFO_KEY, SLICED, Rule, map_entry, shares_of
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes, Weights
from zckpt.formats.deepspeed.values import viewed
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import WEIGHT, Checkpoint, Parameter, Shape, Slot, are_sizes, dict_of, list_of, size_of, without
from zckpt.state.views import concat, narrow, reshape
from zckpt.torchfile import FromFile, node_of

KEY = "ds_autoep_layers"
FOLDING_KEY = "folding"
"""Of experts that are sliced over tensor-parallel ranks as well."""
MOST_EXPERTS = 1 << 16
"""A layer that a file says to have more is none of a model."""
SLICED_AS_WELL = "experts of AutoEP that AutoTP slices as well, which DeepSpeed's own converter refuses, too"


class AutoLayer(NamedTuple):
    """A layer of experts: the name before its weights, how many experts it has, over how many ranks, and its number."""

    prefix: str
    experts: int
    degree: int
    number: int = 0

    @property
    def per_rank(self) -> int:
        """Experts of one rank."""
        return self.experts // self.degree

    @property
    def placed(self) -> dict[int, list[int]]:
        """The experts of each rank."""
        count = self.per_rank
        return {rank: list(range(rank * count, (rank + 1) * count)) for rank in range(self.degree)}

    @property
    def names(self) -> list[str]:
        """The names of its tensors, in the model's order."""
        return [f"{self.prefix}.{weight}" for weight in ("w1", "w2", "w3")]


def auto_layers(model: ModelShard) -> list[AutoLayer]:
    """Return the layers that AutoEP has made; none in almost every checkpoint.

    Raises DamagedFileError: they are listed in a way that cannot be; UnsupportedError: experts are placed otherwise
    than in order, or sliced as well.
    """
    listed = model.content.get(KEY)
    if not listed:
        return []
    with about(model.path):
        if model.content.get(FOLDING_KEY) is not None:
            raise UnsupportedError(SLICED_AS_WELL)
        return [layer_from(entry) for entry in (listed if isinstance(listed, list) else [listed])]


def auto_experts(model: ModelShard) -> dict[str, AutoLayer]:
    """Return AutoEP's layers by the names of their tensors."""
    return {name: layer for layer in auto_layers(model) for name in layer.names}


def layer_from(entry: object) -> AutoLayer:
    """Return a layer as it is listed; errors are those of `auto_layers`."""
    known = dict_of(entry)
    prefix, experts, degree = known.get("expert_key_prefix"), size_of(known, "num_experts"), size_of(known, "ep_size")
    if not isinstance(prefix, str) or experts is None or degree is None or experts % degree or experts > MOST_EXPERTS:
        raise DamagedFileError(f"unreadable {KEY}", expected="layers with their experts and ranks",
                               found=str(entry)[:80])  # fmt: skip
    number, placement = known.get("moe_layer_id"), known.get("expert_placement")
    layer = AutoLayer(prefix, experts, degree, number if isinstance(number, int) else 0)
    ranks = map(dict_of, list_of(dict_of(placement).get("ranks")))
    held = {one.get("rank"): one.get("experts") for one in ranks}
    if placement is not None and held != layer.placed:
        raise UnsupportedError(
            f"the experts of {prefix} are not placed on the ranks in order",
            expected=f"{layer.per_rank} consecutive experts on each of {degree} ranks",
            found=str(held)[:80],
        )
    return layer


def check_kind(
    models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard], of_experts: Sequence[object]
) -> None:
    """Raise for what is not read of AutoEP.

    `of_experts`: the optimizer files of expert ranks, which there are without ZeRO. Raises ShardError: no expert rank's
    optimizer is there; UnsupportedError: experts of a kind that is not read.
    """
    layers = auto_layers(models[0])
    if not layers:
        return
    if not optimizers and not of_experts and models[0].optimizer is not None:
        raise ShardError("no optimizer files of expert ranks", code=MISSING_FILE,
                         expected=f"expp_rank_*_mp_rank_00_optim_states.pt for {layers[0].degree} ranks")  # fmt: skip
    if (mp := len({model.mp_rank for model in models})) > 1:
        raise UnsupportedError(
            f"AutoEP's experts are on {mp} model-parallel ranks, but nothing says how they are sliced"
        )
    reordered = models[0].zero_option("round_robin_gradients")
    if reordered or any(any(pads) for shard in optimizers[:1] for pads in shard.alignment_paddings or []):
        raise UnsupportedError(
            "round_robin_gradients or parameter_alignment, which treat AutoEP's experts as one tensor per rank",
            advice="load it in DeepSpeed, switch both off, and save it again",
        )


def check_shapes(shapes: Shapes, layers: Mapping[str, AutoLayer], degree: int) -> None:
    """Raise LayoutError where a tensor of a rank's is not of the experts that the rank has over so many ranks."""
    for name in shapes.keys() & layers.keys():
        layer, shape = layers[name], shapes[name]
        if layer.degree != degree or not holds_all(shape, layer.per_rank):
            raise LayoutError(
                f"{name} does not have the experts of one rank",
                expected=f"{layer.per_rank} of {layer.experts}, over {layer.degree} ranks",
                found=f"{shape}, over {degree} ranks",
            )


def holds_all(shape: Shape, experts: int) -> bool:
    """Tell whether a tensor of this shape is one of so many experts: their rows and columns."""
    return len(shape) == 3 and shape[0] == experts


def of_all(parts: Sequence[Mapping[str, Slot]]) -> dict[str, Slot]:
    """Return the slots of all experts of a tensor, given those of each expert rank."""
    alike = [key for key in parts[0] if all(key in one for one in parts)]
    return {key: concat([one[key] for one in parts], 0) for key in alike}


def local(parameter: Parameter, layer: AutoLayer, degree: int, rank: int) -> Parameter:
    """Return what one of so many expert ranks has of the tensor of all experts."""
    if not holds_all(parameter.shape, layer.experts):
        raise LayoutError(f"{parameter.name} does not have all experts", expected=f"{layer.experts}, rows and columns",
                          found=parameter.shape)  # fmt: skip
    count = layer.experts // degree
    return viewed(parameter, (count, *parameter.shape[1:]), lambda slot: narrow(slot, 0, rank * count, count))


def alone(parameter: Parameter, layer: AutoLayer, number: int) -> Parameter:
    """Return one expert's weight, as its file has it."""
    one = local(parameter, layer, layer.experts, number)
    one = viewed(one, one.shape[1:], lambda slot: reshape(slot, slot.shape[1:]))
    return replace(one, name=f"{parameter.name}.{number}")


def from_files(weights: Weights, layers: Iterable[AutoLayer], trained: Collection[str]) -> Weights:
    """Return what files hold, and of these layers the weights of all experts.

    Raises ShardError: the file of an expert is missing; LayoutError: experts are of different shapes.
    """
    found = dict(weights)
    for layer in layers:
        for name in layer.names:
            parts = (found.pop(f"{name}.{number}", None) for number in range(layer.experts))
            held = [slot for slot in parts if slot is not None]
            if not held and trained and name not in trained:  # left out, for it is frozen
                continue
            if len(held) < layer.experts:
                raise ShardError(
                    f"no file holds the weights of all experts of {name}",
                    expected=f"files layer_*_expert_*_mp_rank_*_model_states.pt for {layer.experts} experts",
                    found=f"those of {len(held)}", code=MISSING_FILE, parameters=[name],
                )  # fmt: skip
            if len({(slot.shape, slot.dtype) for slot in held}) > 1:
                raise LayoutError(f"experts of {name} have different shapes")
            found[name] = concat([reshape(slot, (1, *slot.shape)) for slot in held], 0)
    return found


def router_names(model: ModelShard, *, parameterwise: bool) -> dict[str, str]:
    """Return second names of routers, under which a model finds what AutoEP has put in their place, and the first.

    Only some files list them as shared. But under ZeRO-3, which has no weights there, both must look alike.
    """
    found: dict[str, str] = {}
    listed = model.trained.keys() | model.frozen

    def is_copy(name: str, first: str) -> bool:
        """Tell whether two tensors have one shape, one type and, in a sample, the same values."""
        from zckpt.compare.weights import rounds_to

        one, other = model.module[name], model.module.get(first)
        if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return rounds_to(*(slot_of(WEIGHT, tensor, model.path) for tensor in (other, one)))

    for layer in auto_layers(model):
        module = layer.prefix.removesuffix(".experts")
        for name in model.module:
            gate = re.fullmatch(rf"{re.escape(module)}\.\w+\.gate\.(weight|bias)", name)
            first = f"{module}.router.gate.{gate[1]}" if gate else name
            if name == first:
                continue
            if (name not in listed and first in listed) if parameterwise else is_copy(name, first):
                found[name] = first
    return found


Places = Mapping[str, tuple[int, int, int]]
"""Where a rank stands in a layer, by the layer's prefix: over how many ranks its experts are spread, which of them this
one is, and which of those that have the same. By default as it was, the first."""


def listed_layers(model: ModelShard, places: Places, world_size: int, *, sharded: bool = False) -> dict[str, object]:
    """Return the keys of a model file that list AutoEP's layers as a rank writes them over other ranks; none without.

    `world_size`: data-parallel ranks; `sharded`: whether they are in the sub-groups of ZeRO-3.
    """
    if not model.content.get(KEY):
        return {}
    listed: list[object] = []
    for entry in list_of(model.content[KEY]):
        known = layer_from(entry)
        degree, rank, position = places.get(known.prefix, (known.degree, 0, 0))
        layer = known._replace(degree=degree)
        per = layer.per_rank
        changed = {
            "num_local_experts": per,
            "ep_size": degree,
            "ep_group_name": f"ep_size_{degree}",
            "ep_rank": rank,
            "expert_data_parallel_rank": position,
            "expert_data_parallel_world_size": world_size // degree,
            "global_expert_start": rank * per,
            "global_expert_end": (rank + 1) * per,
            "checkpoint_format": "zero3_partitioned" if sharded else "per_expert_files",
            "checkpoint_format_version": 1 if sharded else None,
        }
        if isinstance(placement := entry.get("expert_placement"), dict):
            ranks = [{"rank": number, "experts": experts} for number, experts in layer.placed.items()]
            changed["expert_placement"] = {**placement, "ep_size": degree, "ranks": ranks}
        if isinstance(maps := entry.get("affine_maps"), dict):  # where the slices of a tensor are in the whole
            shares, params = shares_of([[per] * degree], degree), {}
            for name, one in dict_of(maps.get("params")).items():
                sizes = list_of(dict_of(one).get("logical_shape"))
                if not sizes or not are_sizes(sizes):
                    raise DamagedFileError(f"unreadable {KEY}", path=model.path, expected="maps of whole tensors",
                                           found=str(one)[:80])  # fmt: skip
                entry_of = map_entry(Rule(SLICED, (layer.experts, *sizes[1:]), 0, shares), degree)
                params[name] = {**one, "ranks": entry_of["ranks"]}
            changed["affine_maps"] = {**maps, "params": params}
        more = changed if sharded else {}  # which DeepSpeed does not load without; some lists leave them out
        listed.append({key: changed.get(key, value) for key, value in {**entry, **more}.items()})
    found: dict[str, object] = {KEY: listed}
    info = model.content.get(INFO_KEY)
    kept = info if isinstance(info, FromFile) else FromFile.of(model.file, info)
    node = dict_of(kept.node)
    if KEY in node:
        found[INFO_KEY] = replace(kept, node={**node, KEY: found[KEY]})
    return found


def common(model: ModelShard) -> Mapping[str, object]:
    """Return what a model file holds without what it says of its own rank's experts."""
    info = model.content.get(INFO_KEY)
    if not model.content.get(KEY) or not isinstance(info, dict):
        return model.content
    return {**model.content, INFO_KEY: without(info, KEY)}


def listed_entries(checkpoint: Checkpoint) -> list[Mapping[str, object]]:
    """Return what a checkpoint lists of AutoEP's layers; none where it has none.

    Raises UnsupportedError: it has experts that AutoEP has as one tensor, and what it lists is not of them.
    """
    listed = _listed(checkpoint)
    if not listed:
        if of_auto_ep(checkpoint):
            raise _unknown(f"no {KEY} in {INFO_KEY}")
        return []
    for entry in listed:
        layer = layer_from(entry)
        for name in layer.names:
            parameter = checkpoint.parameters.get(name)
            if parameter is None or not holds_all(parameter.shape, layer.experts):
                raise _unknown(f"{name}: {None if parameter is None else parameter.shape}")
    if any(map(is_expert, checkpoint.parameters)):
        raise _unknown("experts of DeepSpeed's own layer as well")
    return listed


def _listed(checkpoint: Checkpoint) -> list[Mapping[str, object]]:
    listed = dict_of(node_of(checkpoint.metadata.get(INFO_KEY))).get(KEY)
    return [listed] if isinstance(listed, dict) else list_of(listed)


def expert_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many experts each tensor has that AutoEP has made of them, as far as they are listed as they are."""
    known = checkpoint.parameters
    return {
        name: layer.experts
        for layer in map(layer_from, _listed(checkpoint))
        for name in layer.names
        if name in known and holds_all(known[name].shape, layer.experts)
    }


def _unknown(found: str) -> UnsupportedError:
    return UnsupportedError(
        "AutoEP's experts are one tensor, but DeepSpeed's list of their layers is missing",
        expected=f"{KEY} in {INFO_KEY}, for tensors with these names",
        found=found,
        advice="use `zckpt reshard` on DeepSpeed's own checkpoint",
    )
