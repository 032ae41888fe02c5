"""What the ranks of legacy files have of each parameter of the whole model, by its name there.

Source: megatron-core 0.16, `LanguageModule.setup_embeddings_and_output_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.formats.megatron.fused import apart, expert_count, is_fused, name_of_one
from zckpt.formats.megatron.ranks import RankFile
from zckpt.state import Checkpoint, Parameter

TIED = {
    "output_layer.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
}
"""What the last stage calls its copy of an embedding that is the output layer, too."""


FURTHER = re.compile(r"(?:language_model\.)?mtp\.layers\.")
"""Layers that predict further tokens."""


@dataclass(slots=True)
class Whole:
    """What ranks have of a parameter of the whole model.

    Parameters
    ----------
    name : str
        The module's.
    given : str
        In the checkpoint; the same, but where a file says otherwise.
    copies : dict of (int, int, int) to dict
        By stage, chunk and expert-parallel rank: the rank's parameter, by tensor-parallel rank.
    said : int or None
        Along which dimension its masters say that it is cut.
    """

    name: str
    given: str = ""
    copies: dict[tuple[int, int, int], dict[int, Parameter]] = field(default_factory=dict)
    said: int | None = None


def label_of(chunk: int, name: str) -> str:
    """Return the name that a parameter of a chunk has on its rank, where names of chunks may be the same."""
    return name if chunk == 0 else f"model{chunk}.{name}"


def gather(
    wholes: dict[str, Whole],
    one: RankFile,
    names: Sequence[Mapping[str, str]],
    checkpoint: Checkpoint,
    said: Mapping[str, int | None],
    *,
    tied: bool,
    expert_ranks: int,
) -> bool:
    """Add what a rank has to what is known of the whole model's parameters; tell whether it has experts as one.

    Parameters
    ----------
    wholes : dict of str to Whole
    one : RankFile
    names : sequence of mapping of str to str
        By chunk, the names in the whole model by those of the file.
    checkpoint : Checkpoint
        Of the rank, by its own names.
    said : mapping of str to int or None
        Along which dimension masters say that a parameter is cut.
    tied : bool
        Whether the output layer is a copy of the embedding.
    expert_ranks : int
    """
    has_fused = False
    for chunk, its in enumerate(names):
        own: dict[str, Parameter] = {}
        for name in its:
            label = label_of(chunk, name)
            parameter = checkpoint.parameters.get(label) or checkpoint.buffers.get(label)
            if parameter is not None:
                own[name] = parameter
        shapes = {name: parameter.shape for name, parameter in own.items()}
        place = (one.rank.pp, chunk, one.rank.ep)
        for name, parameter in own.items():
            renamed, cut = its[name], said.get(label_of(chunk, name))
            parts = [(TIED[renamed] if tied and renamed in TIED else renamed, parameter)]
            if is_fused(name):
                has_fused = True
                count = expert_count(name, shapes, expert_ranks)
                numbers = range(one.rank.ep * count, (one.rank.ep + 1) * count)
                split = apart(name, parameter, count)
                parts = [(name_of_one(renamed, n), part) for n, part in zip(numbers, split, strict=True)]
                cut = None if cut is None else 1 - cut
            for whole, part in parts:
                known = wholes.setdefault(whole, Whole(whole))
                known.said = cut if label_of(chunk, name) in said else known.said
                known.copies.setdefault(place, {})[one.rank.tp] = part
    return has_fused
