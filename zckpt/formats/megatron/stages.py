"""How a model is dealt to pipeline stages, their chunks and expert-parallel ranks, and what each calls it. Pure.

Chunk v of stage p of P is number v P + p of all chunks in the model's order. The first one has what is before the
layers, the last one what is behind them; of a tied embedding it has a copy, under another name. Layers are numbered
from 0 in each chunk, experts on each expert-parallel rank: the other way round than `ranks.Numbering`.

Layers that predict further tokens (`mtp`) are on the last chunk, which has a copy of the embedding for them, under its
own name; the last norm is then where the last layer is. What sees images is on the first chunk.

Source: megatron-core 0.16, `get_transformer_layer_offset`, `get_num_layers_to_build`, `mtp_on_this_rank`,
`TransformerBlock.has_final_layernorm_in_this_stage`, `LLaVAModel`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.megatron.fused import is_fused, name_of_all

_LAYER = re.compile(r"((?:.*?\.)?layers)\.([0-9]{1,18})(\..*)")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]{1,18})((?:\..*)?)")

BLOCK = re.compile(r"(?:language_model\.)?(?:decoder|encoder|transformer)\.layers")
_FRONT = re.compile(r"(?:language_model\.)?embedding\..+")
_BACK = re.compile(r"(?:(?:language_model\.)?(?:decoder|encoder|transformer)\.final_(?:layernorm|norm)|"
                   r"(?:language_model\.)?output_layer)\..+")  # fmt: skip
"""What is known to be before the layers, and behind them. Anything else has a stage that only its program knows."""

_FURTHER = re.compile(r"(?:language_model\.)?mtp\.layers\..+")
_WORDS = re.compile(r"(?:language_model\.)?embedding\.word_embeddings\.weight")
_IMAGES = re.compile(r"vision_(?:model|projection)\..+")

Bounds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dealt:
    """A tensor of a chunk: its name in the whole model, and that on the rank.

    `shared`: whether the first and the last stage both have it; `experts`: where it is of all experts of the rank, the
    names of each one's part in the whole model; `name` is the first.
    """

    name: str
    local: str
    shared: bool = False
    experts: tuple[str, ...] = ()


def layer_count(names: Iterable[str]) -> int:
    """Return how many layers the block of a model has, that stages share."""
    numbers = [int(match[2]) for match in map(_LAYER.fullmatch, names) if match and BLOCK.fullmatch(match[1])]
    return 1 + max(numbers, default=-1)


def bounds_of(given: str | None, layers: int, chunks: int) -> Bounds:
    """Return the first layer of each chunk, and the number of all layers.

    `given`: as the user says; None: each has as many; `path`: for messages. Raises UsageError: they are not in order,
    or do not divide.
    """
    if given is None:
        if chunks > 1 and layers % chunks:
            raise UsageError(
                f"{layers} layers are not dealt evenly to {chunks} chunks of the model",
                expected="--stage-bounds 0,N,...: the first layer of each, and the number of layers",
            )
        return tuple(at * layers // chunks for at in range(chunks + 1))
    try:
        found = tuple(int(one) for one in given.split(","))
    except ValueError:
        found = ()
    if len(found) != chunks + 1 or found[0] != 0 or found[-1] != layers or list(found) != sorted(found):
        raise UsageError("unusable stage bounds", found=given,
                         expected=f"{chunks + 1} numbers from 0 to {layers}, in order")  # fmt: skip
    return found


def dealt(names: Sequence[str], bounds: Bounds, *, stages: int, tied: Mapping[str, str]) -> list[list[list[Dealt]]]:
    """Return what each stage has, by chunk, in the order of `names`.

    `bounds`: of all chunks, in the model's order; `tied`: by the name of an embedding that is the output layer, too:
    what the last stage calls its copy. Raises UnsupportedError: of something it is not known which stage has it.
    """
    chunks = len(bounds) - 1
    further = chunks > 1 and any(map(_FURTHER.fullmatch, names))
    if further:
        _check_further(names, tied)
    with_last = next((at for at in reversed(range(chunks)) if bounds[at] < bounds[-1]), chunks - 1)
    found: list[list[Dealt]] = [[] for _ in range(chunks)]
    unknown = []
    for name in names:
        layer = _LAYER.fullmatch(name)
        if chunks == 1:
            found[0].append(Dealt(name, name))
        elif further and _WORDS.fullmatch(name):
            found[0].append(Dealt(name, name, shared=True))
            found[-1].append(Dealt(name, name, shared=True))
        elif _FURTHER.fullmatch(name):
            found[-1].append(Dealt(name, name))
        elif _IMAGES.fullmatch(name):
            found[0].append(Dealt(name, name))
        elif layer is not None and BLOCK.fullmatch(layer[1]):
            at = next(at for at in range(chunks) if bounds[at] <= int(layer[2]) < bounds[at + 1])
            found[at].append(Dealt(name, f"{layer[1]}.{int(layer[2]) - bounds[at]}{layer[3]}"))
        elif _FRONT.fullmatch(name):
            found[0].append(Dealt(name, name, shared=name in tied))
        elif _BACK.fullmatch(name):
            found[with_last if further and "output_layer" not in name else -1].append(Dealt(name, name))
        else:
            unknown.append(name)
    if unknown:
        raise UnsupportedError("which pipeline stage has it is not known", found=listed(unknown),
                               advice="give --pipeline-parallel-size 1")  # fmt: skip
    if chunks > 1:
        found[-1] += [Dealt(name, local, shared=True) for name, local in tied.items() if name in set(names)]
    return [[found[chunk * stages + stage] for chunk in range(chunks // stages)] for stage in range(stages)]


def _check_further(names: Sequence[str], tied: Mapping[str, str]) -> None:
    """Raise UnsupportedError where the copy of the embedding for further tokens is not one of the words' alone."""
    odd = next((name for name in names if _FRONT.fullmatch(name) and not _WORDS.fullmatch(name)), None)
    if odd is not None or tied:
        raise UnsupportedError(
            "multi-token prediction on several stages is of words' embeddings alone, which are no output layer",
            found=odd or "a tied embedding, which megatron-core does not save on several stages, either",
            advice="give --pipeline-parallel-size 1",
        )


def on_expert_rank(dealt: Sequence[Dealt], counts: Mapping[str, int], rank: int, ranks: int) -> list[Dealt]:
    """Return what an expert-parallel rank has of a chunk: of experts its own, numbered from 0.

    `counts`: how many experts there are, by what their names begin with.
    """
    found = []
    for one in dealt:
        match, whole = _EXPERT.fullmatch(one.local), _EXPERT.fullmatch(one.name)
        if match is None or whole is None:
            found.append(one)
            continue
        own = counts[whole[1]] // ranks
        number = int(match[2]) - rank * own
        if 0 <= number < own:
            found.append(Dealt(one.name, f"{match[1]}{number}{match[3]}", one.shared))
    return found


def with_fused(dealt: Sequence[Dealt]) -> list[Dealt]:
    """Return what a rank has of a chunk whose experts are one parameter, which is where the first of them is.

    Raises UnsupportedError: they have what such a module has no place for.
    """
    every: dict[str, list[Dealt]] = {}
    for one in dealt:
        every.setdefault(name_of_all(one.local), []).append(one)
    odd = next((name for name in every if ".experts.local_experts." in name), None)
    if odd is not None:
        raise UnsupportedError("experts that are one parameter have weights alone", found=odd)
    return [
        Dealt(its[0].name, name, its[0].shared, tuple(one.name for one in its)) if is_fused(name) else its[0]
        for name, its in every.items()
    ]


def expert_counts(names: Iterable[str], ranks: int) -> dict[str, int]:
    """Return how many experts there are, by what their names begin with.

    Raises UsageError: they are not dealt evenly.
    """
    found: dict[str, int] = {}
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    odd = next((count for count in found.values() if count % ranks), None)
    if odd is not None or (not found and ranks > 1):
        raise UsageError("unusable expert-parallel size", found=ranks,
                         expected=f"a divisor of {odd}" if odd else "1, for a model without experts")  # fmt: skip
    return found
