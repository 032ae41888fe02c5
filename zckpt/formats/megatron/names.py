"""What a tensor's name says: which layer of which block, which expert; and the order of names. Pure.

decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight     of experts that are modules of their own
decoder.layers.3.mlp.experts.linear_fc1.weight5                    of `TEGroupedMLP`: one module, a parameter of each
decoder.layers.3.mlp.experts.weight1                               of `GroupedMLP`: one parameter of all, see `fused`
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
