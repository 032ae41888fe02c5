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
from collections.abc import Iterable

ENGINE, LOCAL = "transformer_engine", "local"
"""Whose layers a module has: Megatron-LM's --transformer-impl."""

_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_", ".self_attention.linear_qkv.weight"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_", ".mlp.linear_fc1.weight"),
)
"""Norms that are stored as a part of the linear layer behind them, and what has to be there for that."""

_MERGED = (
    (re.compile(r"(.*)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)"), r"\1.input_layernorm.\2"),
    (re.compile(r"(.*)\.mlp\.linear_fc1\.layer_norm_(weight|bias)"), r"\1.pre_mlp_layernorm.\2"),
    (
        re.compile(r"(.*)\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)"),
        r"\1.self_attention.\2_layernorm.\3",
    ),
)
"""Norms that are a part of the linear layer behind them with Transformer Engine, and modules of their own without."""

_LATENT = re.compile(r".*\.self_attention\.linear_kv_(?:down|up)_proj\.weight")
_BY_ITSELF = re.compile(r"(.*)\.mlp\.linear_fc1\.layer_norm_(weight|bias)")


def filed_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that the files' keys have for each tensor: norms that belong to a linear layer are a part of it.

    A norm before experts stays by itself, as with Transformer Engine.
    """
    every = set(names)
    found = {}
    for name in every:
        new = name
        for norm, part, linear in _NORMS:
            front, _, rest = name.rpartition(norm)
            if front and rest in ("weight", "bias") and f"{front}{linear}" in every:
                new = f"{front}{part}{rest}"
        found[name] = name if new in every else new
    return found


def keyed_names(names: Iterable[str], implementation: str | None) -> dict[str, str]:
    """Return the name that the keys of `torch_dist` have for each tensor of a model whose layers are known.

    `names`: of Megatron-Core, of either kind of layers; `implementation`: None: it is not known, and what the names
    leave open stays as it is.
    """
    every = set(names)
    if implementation == LOCAL and any(map(_LATENT.fullmatch, every)):
        return live_names(every, engine=False)
    found = filed_names(every)
    for name, new in found.items():
        if implementation == LOCAL:
            for norm, part, _ in _NORMS:
                front, _, rest = name.rpartition(norm)
                if front and rest in ("weight", "bias"):
                    found[name] = f"{front}{part}{rest}"
        elif implementation == ENGINE:
            match = _BY_ITSELF.fullmatch(new)
            if match is not None and f"{match[1]}.mlp.linear_fc1.weight" not in every:
                found[name] = f"{match[1]}.pre_mlp_layernorm.{match[2]}"
    return found


def live_names(names: Iterable[str], *, engine: bool) -> dict[str, str]:
    """Return what the module calls each tensor. `names`: of Megatron-Core, of either kind of layers."""
    every = list(names)
    filed = filed_names(every)
    found = {}
    for name in every:
        new = filed[name]
        for pattern, live in _MERGED:
            match = pattern.fullmatch(new)
            linear = new.rpartition(".")[0] + ".weight"
            if match is not None and not (engine and linear in every):
                new = pattern.sub(live, new)
        found[name] = new
    return found
