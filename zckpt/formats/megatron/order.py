"""The order of a model's parameters in memory, which Megatron-Core's names tell as far as its layers are known. Pure.

A layer    input norm, attention's linear_proj, linear_qkv, norms of query and key; norm, router, linear_fc1, linear_fc2
           with Transformer Engine the input norm is a part of linear_qkv, and behind linear_proj
Further    tokens' layers (`mtp`): two norms, eh_proj, a layer, a norm; behind all others, before the output layer
Experts    each with both of its layers; grouped: all first layers, then all second ones, by Transformer Engine as
           parameters of their own, and by `GroupedMLP` as one of all experts, transposed

The files of `torch_dist` have no order; one that follows from here is a guess, to be proven by values.

Source: megatron-core 0.16, `get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_NORM = ("layer_norm_weight", "layer_norm_bias")
_BOTH = ("weight", "bias")


def _of(module: str, *kinds: str) -> list[str]:
    return [f"{module}.{kind}" for kind in kinds]


_QKV_NORM = _of("self_attention.linear_qkv", *_NORM)
_PROJ = _of("self_attention.linear_proj", *_BOTH)
_REST = [
    *_of("self_attention.linear_qkv", *_BOTH),
    *_of("self_attention.linear_q_proj", *_BOTH),
    *_of("self_attention.linear_q_down_proj", *_BOTH),
    *_of("self_attention.linear_q_up_proj", *_NORM, *_BOTH),
    *_of("self_attention.linear_kv_down_proj", *_BOTH),
    *_of("self_attention.linear_kv_up_proj", *_NORM, *_BOTH),
    *_of("self_attention.q_layernorm", *_BOTH),
    *_of("self_attention.k_layernorm", *_BOTH),
    *_of("self_attention.kv_layernorm", *_BOTH),
    *_of("pre_mlp_layernorm", *_BOTH),
    *_of("mlp.linear_fc1", *_NORM),
    *_of("mlp.router", *_BOTH),
    *_of("mlp.linear_fc1", *_BOTH),
    *_of("mlp.linear_fc2", *_BOTH),
    "mlp.experts",
    "mlp.shared_experts.gate_weight",
    *_of("mlp.shared_experts.linear_fc1", *_BOTH),
    *_of("mlp.shared_experts.linear_fc2", *_BOTH),
]
_SPECS = ([*_of("input_layernorm", *_BOTH), *_QKV_NORM, *_PROJ, *_REST], [*_PROJ, *_QKV_NORM, *_REST])
_IN_EXPERT = [*_of("linear_fc1", *_BOTH), *_of("linear_fc2", *_BOTH)]

FRONT = _of("embedding", "word_embeddings.weight", "position_embeddings.weight", "tokentype_embeddings.weight")
BACK = [*_of("decoder.final_layernorm", *_BOTH), *_of("output_layer", *_BOTH)]

_LAYER = re.compile(r"decoder\.layers\.([0-9]{1,18})\.(.+)")
_FURTHER = re.compile(r"mtp\.layers\.([0-9]{1,18})\.(?:(?:transformer_layer|mtp_model_layer)\.(.+)|(.+))")
_AROUND = (_of("enorm", *_BOTH) + _of("hnorm", *_BOTH) + ["eh_proj.weight"], _of("final_layernorm", *_BOTH))
"""What a layer that predicts further tokens has before its transformer layer, and behind it."""

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.([0-9]{1,18})\.(.+)")
_LOCAL = re.compile(r"\.mlp\.experts\.local_experts\.")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Order:
    """One way in which a model's parameters may follow each other.

    Parameters
    ----------
    front, back : list of str
        What is before the layers, and behind them.
    layers : list of list of str
        By number.
    fused : bool
        Whether each layer's experts are one parameter, `GroupedMLP`'s: [H, F] of all, or [F, H].
    """

    front: list[str]
    layers: list[list[str]]
    back: list[str]
    fused: bool = False

    @property
    def further(self) -> bool:
        """Whether there are layers that predict further tokens."""
        return any(map(_FURTHER.fullmatch, self.back))


def orders(names: Iterable[str]) -> list[Order]:
    """Return the orders in which parameters may be in memory; none where a name is not known."""
    every = list(names)
    layers = _layers(every)
    experts = [name for name in every if _LOCAL.search(name)]
    fusible = bool(experts) and all(name.endswith(".weight") for name in experts)
    found: list[Order] = []
    for spec in _SPECS:
        for grouped in (False, True):
            its = _specified(every, layers, spec, grouped=grouped)
            its += [replace(one, fused=True) for one in its if grouped and fusible]
            found += [one for one in its if one not in found]
    return found


def order_of(names: Iterable[str], *, engine: bool) -> list[str] | None:
    """Return parameters in the order in which a module has them that names them so; None where a name is not known.

    `names`: as the module's; `engine`: whether its layers are Transformer Engine's.
    """
    every = list(names)
    layers = _layers(every)
    known = [one for spec in _SPECS for one in _specified(every, layers, spec, grouped=False)]
    if not known:
        return None
    order = known[-1] if engine else known[0]
    return [*order.front, *(name for layer in order.layers for name in layer), *order.back]


def _layers(every: Sequence[str]) -> dict[int, list[tuple[str, str]]] | None:
    """Return what is in each layer, by its name there and its whole name; None where something is not known."""
    layers: dict[int, list[tuple[str, str]]] = {}
    for name in every:
        match = _LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(int(match[1]), []).append((match[2], name))
        elif name not in FRONT and name not in BACK and _FURTHER.fullmatch(name) is None:
            return None
    return layers if sorted(layers) == list(range(len(layers))) else None


def _specified(
    every: Sequence[str], layers: Mapping[int, Sequence[tuple[str, str]]] | None, spec: list[str], *, grouped: bool
) -> list[Order]:
    """Return the order that a specification of layers gives; none where it lacks a name."""
    if layers is None:
        return []
    ranked = [[(_rank(inner, spec, grouped), name) for inner, name in layers[n]] for n in range(len(layers))]
    if any(rank is None for layer in ranked for rank, _ in layer):
        return []
    inside = [[name for _, name in sorted(layer, key=lambda one: one[0] or ())] for layer in ranked]
    further = _further(every, spec, grouped)
    if further is None:
        return []
    back = [n for n in BACK if n in every]
    at = next((at for at, n in enumerate(back) if n.startswith("output_layer.")), len(back))
    return [Order([n for n in FRONT if n in every], inside, [*back[:at], *further, *back[at:]])]


def _further(every: Sequence[str], spec: list[str], grouped: bool) -> list[str] | None:
    """Return what predicts further tokens in its order, which is before the output layer; None for an odd name."""
    ranked: list[tuple[tuple[int, ...], str]] = []
    for name in every:
        match = _FURTHER.fullmatch(name)
        if match is None:
            continue
        inner = match[2] or match[3]
        place = _rank(inner, spec, grouped) if match[2] else None
        number = next((n for n, names in zip((0, 2), _AROUND, strict=True) if inner in names), 1)
        if number != 1 and not match[2]:
            place = (_AROUND[number // 2].index(inner),)
        if place is None:
            return None
        ranked.append(((int(match[1]), 1 if match[2] else number, *place), name))
    return [name for _, name in sorted(ranked)]


def _rank(inner: str, spec: list[str], grouped: bool) -> tuple[int, ...] | None:
    whole = _GROUPED.fullmatch(inner)
    if whole is not None:
        return (spec.index("mlp.experts"), int(whole[1] == "linear_fc2"), int(whole[3]), int(whole[2] == "bias"))
    match = _EXPERT.fullmatch(inner)
    if match is None:
        return (spec.index(inner),) if inner in spec else None
    if match[2] not in _IN_EXPERT:
        return None
    at, expert = _IN_EXPERT.index(match[2]), int(match[1])
    inside = (at // len(_BOTH), expert, at % len(_BOTH)) if grouped else (expert, at)
    return (spec.index("mlp.experts"), *inside)
