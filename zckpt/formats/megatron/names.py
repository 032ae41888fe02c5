"""What a tensor's name says: which layer of which block, which expert, which norm; and the order of names. Pure.

decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight     of experts that are modules of their own
decoder.layers.3.mlp.experts.linear_fc1.weight5                    of `TEGroupedMLP`: one module, a parameter of each
decoder.layers.3.mlp.experts.weight1                               of `GroupedMLP`: one parameter of all, see `fused`

Norms are modules of their own, or parts of the linear layers behind them.

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

from zckpt.immutable import immutable

_LAYER = re.compile(r"((?:.*?\.)?layers)\.([0-9]{1,9})\.(.+)")
_EXPERT = re.compile(r"((?:.*\.)?experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]{1,9})((?:\..+)?)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))([0-9]+)(_[wv])?\Z")
_OF_EXPERTS = re.compile(r"(?:.*\.)?experts\..*")

BLOCK = re.compile(r"(?:language_model\.)?(?:decoder|encoder|transformer)\.layers")
"""What the names of layers begin with that stages of a pipeline share."""

BUFFERS = re.compile(r".*\.(?:expert_bias|inv_freq|running_mean|running_var|local_tokens_per_expert)")
"""Tensors of floating point that are none of the parameters."""

TIED = {
    "output_layer.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
}
"""What the last stage calls its copy of an embedding that is the output layer, too."""

_PLACES, _REST = {"embedding": 0, "encoder": 1, "decoder": 2, "mtp": 3, "output_layer": 5}, 4
"""Where the modules of a model are, and all others."""


@immutable
class Name:
    """A name in parts: BLOCK.LAYER.FRONT EXPERT REST, of which the numbers may be missing."""

    block: str
    layer: int | None
    front: str
    expert: int | None
    rest: str

    @classmethod
    def of(cls, text: str) -> Name:
        """Return a name in its parts."""
        layer = _LAYER.fullmatch(text)
        block, number, inner = (layer[1], int(layer[2]), layer[3]) if layer else ("", None, text)
        expert = _EXPERT.fullmatch(inner)
        if expert is None:
            return cls(block, number, inner, None, "")
        return cls(block, number, expert[1], int(expert[2]), expert[3])

    @property
    def experts(self) -> tuple[str, int | None, str]:
        """What the names of all experts beside this one begin with."""
        return self.block, self.layer, self.front

    def __str__(self) -> str:
        """Return the name."""
        inner = f"{self.front}{'' if self.expert is None else self.expert}{self.rest}"
        return inner if self.layer is None else f"{self.block}.{self.layer}.{inner}"


def is_expert(name: str) -> bool:
    """Tell by its name whether a parameter is an expert's, or of several."""
    return _OF_EXPERTS.fullmatch(name) is not None


def by_itself(name: str) -> str:
    """Return what a parameter of grouped experts is called where each expert is a module."""
    return _GROUPED.sub(r"\1local_experts.\3.\2\4", name)


def in_order(names: Iterable[str]) -> list[str]:
    """Return names as the model has them: embeddings, layers by number, the rest; within a layer as they are given.

    Ranks share out what they write, so that keys on disk come in no order.
    """
    seen: dict[str, int] = {}

    def place(at: int, text: str) -> tuple[int, ...]:
        rank = next((_PLACES[step] for step in text.split(".") if step in _PLACES), _REST)
        one = Name.of(text)
        if one.layer is None:
            return rank, 1, at
        block, front, rest = (seen.setdefault(part, len(seen)) for part in (one.block, one.front, one.rest))
        return rank, 0, block, one.layer, front, one.expert or 0, rest

    every = list(names)
    places = {text: place(at, text) for at, text in enumerate(every)}
    return sorted(every, key=places.__getitem__)


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
