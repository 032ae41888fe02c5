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

from collections.abc import Iterable, Sequence
from itertools import product

from zckpt.formats.megatron.fused import ONE
from zckpt.formats.megatron.names import Name
from zckpt.state import first_of


def _both(*fronts: str) -> list[str]:
    """Return the weights and biases whose names begin so."""
    return [front + kind for front in fronts for kind in ("weight", "bias")]


_PROJ, _QKV_NORM = "self_attention.linear_proj.", "self_attention.linear_qkv.layer_norm_"
_EXPERTS = "mlp.experts"
_REST = [
    *_both(
        "self_attention.linear_qkv.",
        "self_attention.linear_q_proj.",
        "self_attention.linear_q_down_proj.",
        "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.linear_q_up_proj.",
        "self_attention.linear_kv_down_proj.",
        "self_attention.linear_kv_up_proj.layer_norm_",
        "self_attention.linear_kv_up_proj.",
        "self_attention.q_layernorm.",
        "self_attention.k_layernorm.",
        "self_attention.kv_layernorm.",
        "pre_mlp_layernorm.",
        "mlp.linear_fc1.layer_norm_",
        "mlp.router.",
        "mlp.linear_fc1.",
        "mlp.linear_fc2.",
    ),
    _EXPERTS,
    "mlp.shared_experts.gate_weight",
    *_both("mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2."),
]
_SPECS = ([*_both("input_layernorm.", _QKV_NORM, _PROJ), *_REST], [*_both(_PROJ, _QKV_NORM), *_REST])
"""What a layer has, in its order: others', and Transformer Engine's."""

_IN_EXPERT = _both("linear_fc1.", "linear_fc2.")

_FRONT = [f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype")]
_NORM, _OUTPUT = _both("decoder.final_layernorm."), _both("output_layer.")
_BEFORE, _BEHIND = [*_both("enorm.", "hnorm."), "eh_proj.weight"], _both("final_layernorm.")
"""What a layer that predicts further tokens has before its transformer layer, and behind it."""

Place = tuple[int, ...]


def orders(names: Iterable[str]) -> list[tuple[list[str], bool]]:
    """Return the orders in which parameters may be in memory; none where a name is not known.

    With each is whether a layer's experts are one parameter, `GroupedMLP`'s: [H, F] of all, or [F, H].
    """
    every = list(names)
    experts = [name for name in every if "mlp.experts.local_experts." in name]
    fusible = bool(experts) and all(map(ONE.fullmatch, experts))
    found: list[tuple[list[str], bool]] = []
    for spec, grouped in product(_SPECS, (False, True)):
        order = _ordered(every, spec, grouped=grouped)
        if order is not None:
            fused = [(order, True)] if grouped and fusible else []
            found += [one for one in [(order, False), *fused] if one not in found]
    return found


def order_of(names: Iterable[str], *, engine: bool) -> list[str] | None:
    """Return parameters in the order in which a module has them that names them so; None where a name is not known.

    `names`: as the module's; `engine`: whether its layers are Transformer Engine's.
    """
    every = list(names)
    return first_of(_ordered(every, spec, grouped=False) for spec in (reversed(_SPECS) if engine else _SPECS))


def _ordered(names: Sequence[str], spec: list[str], *, grouped: bool) -> list[str] | None:
    """Return names in the order that a specification of layers gives; None where it lacks one."""
    places = {name: _place(name, spec, grouped=grouped) for name in names}
    layers = {place[1] for place in places.values() if place is not None and place[0] == 1}
    if None in places.values() or layers != set(range(len(layers))):
        return None
    return sorted(names, key=lambda name: places[name] or ())


def _place(text: str, spec: list[str], *, grouped: bool) -> Place | None:
    """Return where a name is: before the layers, in one, behind them, in one of further tokens', or at the end."""
    for part, its in ((0, _FRONT), (2, _NORM), (4, _OUTPUT)):
        if text in its:
            return part, its.index(text)
    name = Name.of(text)
    if name.layer is None:
        return None
    if name.block == "decoder.layers":
        inside = _in_layer(name, name.front, spec, grouped=grouped)
        return None if inside is None else (1, name.layer, *inside)
    if name.block != "mtp.layers":
        return None
    for part, its in ((0, _BEFORE), (2, _BEHIND)):
        if name.front in its:
            return 3, name.layer, part, its.index(name.front)
    module, _, front = name.front.partition(".")
    known = module in ("transformer_layer", "mtp_model_layer")
    inside = _in_layer(name, front, spec, grouped=grouped) if known else None
    return None if inside is None else (3, name.layer, 1, *inside)


def _in_layer(name: Name, front: str, spec: list[str], *, grouped: bool) -> Place | None:
    if name.expert is None:
        return (spec.index(front),) if front in spec else None
    module, _, last = front.partition(".experts.")
    first = spec.index(_EXPERTS)
    if module != "mlp":
        return None
    is_module = last == "local_experts."
    kind = name.rest.removeprefix(".") if is_module else last + name.rest
    if kind not in _IN_EXPERT:
        return None
    at = _IN_EXPERT.index(kind)
    return (first, name.expert, at) if is_module and not grouped else (first, at // 2, name.expert, at % 2)
