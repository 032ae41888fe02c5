"""AutoEP: experts that DeepSpeed 0.19 itself spreads, each of their weights one tensor for all experts of a rank.

    ds_autoep_layers          in the model file: which layers, how many experts, which rank has which
    param_shapes              X.experts.w1: (experts of a rank, rows, columns); w2 and w3 alike
    layer_L_expert_E_...      {X.experts.w1.E: (rows, columns), ...} of expert E, counted over all ranks

Within a rank's tensor experts follow each other, so that to the flat buffers each is a parameter of its own: as such
they are read and cut, like those of DeepSpeed's own layers, under names that only this package sees. A checkpoint has
one tensor for all experts of a layer, X.experts.w1: (experts, rows, columns).

Source: DeepSpeed 0.19.8, `_save_moe_checkpoint`, `load_moe_state_dict`, `checkpoint/autoep_affine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, about
from zckpt.formats.deepspeed.experts import expert_number, layer_of
from zckpt.formats.deepspeed.groups import zero_option
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.deepspeed.tensor_parallel import moved
from zckpt.formats.deepspeed.tp_shares import Share
from zckpt.state import Parameter, Slot
from zckpt.state.names import is_number

KEY = "ds_autoep_layers"

FOLDING_KEY = "folding"
"""Of experts that are sliced over tensor-parallel ranks as well."""

SLICED_AS_WELL = "experts of AutoEP that AutoTP slices as well, which DeepSpeed's own converter refuses, too"

_WEIGHTS = ("w1", "w2", "w3")
_INNER = ".deepspeed_experts."


@dataclass(frozen=True, slots=True)
class AutoLayer:
    """A layer of experts: the name before its weights, how many experts it has, over how many ranks, and its number."""

    prefix: str
    experts: int
    degree: int
    number: int = 0

    @property
    def per_rank(self) -> int:
        """Experts of one rank."""
        return self.experts // self.degree


def expert_names(layer: AutoLayer) -> list[str]:
    """Return the names of a layer's tensors of all experts, in the model's order."""
    return [f"{layer.prefix}.{weight}" for weight in _WEIGHTS]


def auto_layers(model: ModelShard) -> list[AutoLayer]:
    """Return the layers that AutoEP has made; none in almost every checkpoint.

    Raises
    ------
    DamagedFileError
        They are listed in a way that cannot be.
    UnsupportedError
        Experts are placed otherwise than in order, or sliced as well.
    """
    listed = model.content.get(KEY)
    if not listed:
        return []
    with about(model.shard.path):
        if model.content.get(FOLDING_KEY) is not None:
            raise UnsupportedError(SLICED_AS_WELL)
        return [layer_from(entry) for entry in (listed if isinstance(listed, list) else [listed])]


def layer_from(entry: object) -> AutoLayer:
    """Return a layer as it is listed; errors are those of `auto_layers`."""
    known = entry if isinstance(entry, dict) else {}
    prefix, experts, degree = (known.get(key) for key in ("expert_key_prefix", "num_experts", "ep_size"))
    if (
        not isinstance(prefix, str)
        or not isinstance(experts, int)
        or not isinstance(degree, int)
        or degree < 1
        or experts < 1
        or experts % degree
    ):
        raise DamagedFileError(f"unreadable {KEY}", expected="layers with their experts and ranks",
                               found=str(entry)[:80])  # fmt: skip
    number = known.get("moe_layer_id")
    layer = AutoLayer(prefix, experts, degree, number if isinstance(number, int) else 0)
    _check_placement(layer, known.get("expert_placement"))
    return layer


def _check_placement(layer: AutoLayer, placement: object) -> None:
    if placement is None:
        return
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    held = {one.get("rank"): one.get("experts") for one in ranks or [] if isinstance(one, dict)}
    count = layer.per_rank
    if held != {rank: list(range(rank * count, (rank + 1) * count)) for rank in range(layer.degree)}:
        raise UnsupportedError(
            f"the experts of {layer.prefix} are not placed on ranks in order",
            expected=f"{count} on each of {layer.degree} ranks, one after the other",
            found=str(held)[:80],
        )


def inner_name(name: str, number: int) -> str:
    """Return the name under which a weight of an expert is a parameter of its own."""
    return f"{name}{_INNER}{number}.weight"


def fused_name(name: str) -> str | None:
    """Return the tensor of all experts that a parameter is a part of; None if it is of none."""
    before, _, rest = name.rpartition(_INNER)
    return before if before.rpartition(".")[2] in _WEIGHTS and rest.partition(".")[2] == "weight" else None


def filed_name(name: str) -> str:
    """Return the name that a parameter of an expert has in the expert's file."""
    whole = fused_name(name)
    return name if whole is None else f"{whole}.{expert_number(name)}"


def split_model(model: ModelShard, layers: Sequence[AutoLayer]) -> ModelShard:
    """Return a model file with the shapes of each expert by itself."""
    if not layers or model.param_shapes is None:
        return model
    own = {f"{layer.prefix}.{weight}": layer for layer in layers for weight in _WEIGHTS}
    found: list[Shapes] = []
    for group in model.param_shapes:
        shapes: Shapes = {}
        for name, shape in group.items():
            layer = own.get(name)
            if layer is None:
                shapes[name] = shape
                continue
            if len(shape) != 3 or shape[0] != layer.per_rank:
                raise LayoutError(
                    f"{name} is not of the experts of one rank",
                    expected=f"{layer.per_rank} of them, rows and columns", found=shape,
                )  # fmt: skip
            shapes |= {inner_name(name, number): shape[1:] for number in range(shape[0])}
        found.append(shapes)
    return replace(model, param_shapes=found)


def split_files(
    models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard], of_experts: Sequence[object] = ()
) -> tuple[list[ModelShard], list[OptimizerShard]]:
    """Return model and optimizer files as if each expert had parameters of its own; all others as they are.

    Parameters
    ----------
    of_experts : sequence
        The optimizer files of expert ranks, which there are without ZeRO.

    Raises
    ------
    DamagedFileError, LayoutError
        Layers and shapes contradict each other.
    ShardError
        No expert rank's optimizer is there.
    UnsupportedError
        Experts of AutoEP of a kind that is not read.
    """
    layers = auto_layers(models[0])
    if not layers:
        return list(models), list(optimizers)
    if not optimizers and not of_experts and isinstance(models[0].content.get("optimizer"), dict):
        raise ShardError("no optimizer files of expert ranks", code=MISSING_FILE,
                         expected=f"expp_rank_*_mp_rank_00_optim_states.pt of {layers[0].degree} ranks")  # fmt: skip
    check_kind(models[0], optimizers, len({model.shard.mp_rank for model in models}))
    if optimizers and optimizers[0].stage == 3:  # see `auto_ep_shards`
        return list(models), list(optimizers)
    found = [split_model(model, layers) for model in models]
    counts = [len(group) for group in found[0].param_shapes or []]
    return found, [_split_optimizer(shard, counts) for shard in optimizers]


def _split_optimizer(shard: OptimizerShard, counts: Sequence[int]) -> OptimizerShard:
    """Return an optimizer file that has no pads as one with none after each expert; slices it has of whole tensors."""
    pads = None if shard.alignment_paddings is None else [[0] * count for count in counts]
    return replace(shard, alignment_paddings=pads, mappings=None)


def fused_pads(names: Sequence[str], pads: Sequence[int]) -> list[int]:
    """Return the pad after each parameter of a group, where the experts of a rank are one: after the last of them."""
    found = {fused_name(name) or name: pad for name, pad in zip(names, pads, strict=True)}
    return list(found.values())


def check_kind(model: ModelShard, optimizers: Sequence[OptimizerShard], mp: int) -> None:
    """Raise UnsupportedError for what is not read of AutoEP."""
    if mp > 1:
        raise UnsupportedError(f"experts of AutoEP on {mp} ranks of a model, and nothing says how they are sliced")
    reordered = zero_option(model, "round_robin_gradients")
    if reordered or any(any(pads) for shard in optimizers[:1] for pads in shard.alignment_paddings or []):
        raise UnsupportedError(
            "round_robin_gradients or parameter_alignment, which place AutoEP's experts as one tensor of each rank",
            advice="load it in DeepSpeed, switch both off, and save it again",
        )  # fmt: skip


def split_names(content: Mapping[str, object], layers: Sequence[AutoLayer]) -> dict[str, object]:
    """Return what a file of an expert holds, under the names of an expert's own parameters."""
    own = {f"{layer.prefix}.{weight}" for layer in layers for weight in _WEIGHTS}
    found = {}
    for key, value in content.items():
        name, _, number = key.rpartition(".")
        found[inner_name(name, int(number)) if name in own and is_number(number) else key] = value
    return found


def fused(state: RankState) -> RankState:
    """Return a state with one tensor for all experts of a layer in place of those that are parts of one."""
    parts: dict[str, dict[int, Parameter]] = {}
    for name, parameter in state.parameters.items():
        whole = fused_name(name)
        if whole is not None:
            parts.setdefault(whole, {})[expert_number(name) or 0] = parameter
    if not parts:
        return state
    parameters: dict[str, Parameter] = {}
    for name, parameter in state.parameters.items():
        whole = fused_name(name)
        if whole is None:
            parameters[name] = parameter
        elif whole not in parameters:
            parameters[whole] = _joined(whole, parts[whole])
    groups = [
        replace(group, parameters=list(dict.fromkeys(fused_name(name) or name for name in group.parameters)))
        for group in state.groups
    ]
    return replace(state, parameters=parameters, groups=groups)


def _joined(name: str, parts: Mapping[int, Parameter]) -> Parameter:
    ordered = [parts[number] for number in sorted(parts)]
    first = ordered[0]
    if sorted(parts) != list(range(len(parts))) or any(
        p.shape != first.shape or p.dtype != first.dtype for p in ordered
    ):
        raise LayoutError(f"experts of {name} are missing or of different shapes")
    shape = (len(ordered), *first.shape)
    slots = {}
    for key in first.slots:
        own = [p.slots[key] for p in ordered if key in p.slots]
        if len(own) < len(ordered):
            raise LayoutError(f"{key} of {name} is missing for some experts")
        slots[key] = _stacked(own, shape)
    return replace(first, name=name, shape=shape, slots=slots)


def _stacked(slots: Sequence[Slot], shape: tuple[int, ...]) -> Slot:
    first = slots[0]
    spans = [
        one for number, slot in enumerate(slots) for one in moved(_with_front(slot).spans, 0, [Share(0, number, 1)])
    ]
    return Slot(first.name, first.dtype, shape, tuple(spans))


def _with_front(slot: Slot) -> Slot:
    """Return a slot of one dimension more, of size one, in front."""
    spans = tuple(
        replace(
            span,
            extent=replace(span.extent, offsets=(0, *span.extent.offsets), sizes=(1, *span.extent.sizes)),
            strides=None if span.strides is None else (0, *span.strides),
        )
        for span in slot.spans
    )
    return Slot(slot.name, slot.dtype, (1, *slot.shape), spans)


def fused_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes with one tensor for the experts of a rank."""
    counts: dict[str, int] = {}
    for name in shapes:
        whole = fused_name(name)
        if whole is not None:
            counts[whole] = counts.get(whole, 0) + 1
    return {
        whole or name: (counts[whole], *shape) if whole is not None else shape
        for name, shape in shapes.items()
        for whole in (fused_name(name),)
    }


def indivisible(names: Sequence[str]) -> list[str]:
    """Return for each parameter what DeepSpeed puts into a param group as one: itself, or a rank's experts together."""
    return [layer_of(name) if fused_name(name) is not None else name for name in names]
