"""Where a model's norms are: modules of their own, or parts of the linear layers behind them. Pure.

                    Transformer Engine's layers                    others
module              linear_qkv.layer_norm_weight                   input_layernorm.weight
torch_dist          the same                                       the same as with Transformer Engine
before experts      pre_mlp_layernorm.weight                       the module the same, in torch_dist
                                                                   mlp.linear_fc1.layer_norm_weight
latent attention    linear_q_up_proj.layer_norm_weight             q_layernorm.weight, and every key the module's name

Source: megatron-core 0.16, `get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ENGINE, LOCAL = "transformer_engine", "local"
"""Whose layers a module has: Megatron-LM's --transformer-impl."""

_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv."),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1."),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj."),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj."),
)
"""Norms, and the linear layers behind them, of which they are a part with Transformer Engine."""

_PART, _KINDS = "layer_norm_", ("weight", "bias")

_MERGED = [(norm, linear + _PART, linear) for norm, linear in _NORMS[:2]]
"""Norms that `torch_dist` may merge, what they are called as a part of the layer behind them, and that."""

_APART = [(linear + _PART, norm, linear) for norm, linear in _NORMS]
"""The other way round, for all."""

_LATENT = re.compile(r".*\.self_attention\.linear_kv_(?:down|up)_proj\.weight")


def _called(name: str, otherwise: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    """Return what a norm is called otherwise, and the weight of the linear layer behind it; other names twice."""
    for here, there, linear in otherwise:
        front, _, kind = name.rpartition(here)
        if front and kind in _KINDS:
            return f"{front}{there}{kind}", f"{front}{linear}weight"
    return name, name


def filed_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that the files' keys have for each tensor: norms that belong to a linear layer are a part of it.

    A norm before experts stays by itself, as with Transformer Engine.
    """
    every = set(names)
    merged = {name: _called(name, _MERGED) for name in every}
    return {name: new if linear in every and new not in every else name for name, (new, linear) in merged.items()}


def keyed_names(names: Iterable[str], implementation: object) -> dict[str, str]:
    """Return the name that the keys of `torch_dist` have for each tensor of a model whose layers are known.

    `names`: of Megatron-Core, of either kind of layers; `implementation`: {ENGINE, LOCAL}; of anything else it is not
    known, and what the names leave open stays as it is.
    """
    every = set(names)
    if implementation == LOCAL:
        latent = any(map(_LATENT.fullmatch, every))
        return live_names(every, engine=False) if latent else {name: _called(name, _MERGED)[0] for name in every}
    found = filed_names(every)
    if implementation == ENGINE:
        for name, (new, linear) in [(name, _called(filed, _APART)) for name, filed in found.items()]:
            if ".pre_mlp_layernorm." in new and linear not in every:
                found[name] = new
    return found


def live_names(names: Iterable[str], *, engine: bool) -> dict[str, str]:
    """Return what the module calls each tensor. `names`: of Megatron-Core, of either kind of layers."""
    every = list(names)
    apart = {name: (filed, *_called(filed, _APART)) for name, filed in filed_names(every).items()}
    return {name: filed if engine and linear in every else new for name, (filed, new, linear) in apart.items()}
