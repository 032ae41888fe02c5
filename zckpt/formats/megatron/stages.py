"""How a model is dealt to pipeline stages, their chunks and expert-parallel ranks, in which order each has it. Pure.

Chunk v of stage p of P is number v P + p of all chunks in the model's order. The first one has what is before the
layers, the last one what is behind them; of a tied embedding it has a copy, under another name. Layers are numbered
from 0 in each chunk, experts on each expert-parallel rank: the other way round than `legacy.Numbering`.

Layers that predict further tokens (`mtp`) are on the last chunk, which has a copy of the embedding for them, under its
own name; the last norm is then where the last layer is. What sees images is on the first chunk.

Names tell the order of parameters in memory, as far as layers are known:

A layer    input norm, attention's linear_proj, linear_qkv, norms of query and key; norm, router, linear_fc1, linear_fc2
           with Transformer Engine the input norm is a part of linear_qkv, and behind linear_proj
Further    tokens' layers (`mtp`): two norms, eh_proj, a layer, a norm; behind all others, before the output layer
Experts    each with both of its layers; grouped: all first layers, then all second ones, by Transformer Engine as
           parameters of their own, and by `GroupedMLP` as one of all experts, transposed

The files of `torch_dist` have no order; one that follows from here is a guess, to be proven by values.

Source: megatron-core 0.16, `get_transformer_layer_offset`, `get_num_layers_to_build`, `mtp_on_this_rank`,
`TransformerBlock.has_final_layernorm_in_this_stage`, `LLaVAModel`, `get_gpt_layer_local_spec`,
`get_gpt_layer_with_transformer_engine_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.megatron.cut import Cut, Shapes
from zckpt.formats.megatron.fused import ONE, apart, is_fused, shape_of_all, together
from zckpt.formats.megatron.names import BLOCK, Name
from zckpt.immutable import immutable
from zckpt.state import Shape, Slot, first_of


def _both(*fronts: str) -> list[str]:
    """Return the weights and biases whose names begin so."""
    return [front + kind for front in fronts for kind in ("weight", "bias")]


_PROJ, _QKV_NORM = "self_attention.linear_proj.", "self_attention.linear_qkv.layer_norm_"
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
    "mlp.experts",
    "mlp.shared_experts.gate_weight",
    *_both("mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2."),
]
_IN_EXPERT = _both("linear_fc1.", "linear_fc2.")

_EMBEDDINGS = [f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype")]
_OUTSIDE = {
    name: (part, at)
    for part, names in ((0, _EMBEDDINGS), (2, _both("decoder.final_layernorm.")), (4, _both("output_layer.")))
    for at, name in enumerate(names)
}
"""The place of what is in no layer: before the layers, behind them, and behind those of further tokens."""

_LAYERS, _FURTHER = "decoder.layers", "mtp.layers"
_INSIDE = {_LAYERS: 1, _FURTHER: 3}
"""That of layers."""

Spec = Mapping[str, Sequence[str]]
"""What a layer of each block has, in its order."""


def _spec(*first: str) -> Spec:
    """Return what layers have that begin with some modules."""
    layer = [*_both(*first), *_REST]
    inner = [f"{module}.{one}" for module in ("transformer_layer", "mtp_model_layer") for one in layer]
    before, behind = [*_both("enorm.", "hnorm."), "eh_proj.weight"], _both("final_layernorm.")
    return {_LAYERS: layer, _FURTHER: [*before, *inner, *behind]}


_SPECS = _spec("input_layernorm.", _QKV_NORM, _PROJ), _spec(_PROJ, _QKV_NORM)
"""Others' layers, and Transformer Engine's."""

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


def _ordered(names: Sequence[str], spec: Spec, *, grouped: bool) -> list[str] | None:
    """Return names in the order that a specification of layers gives; None where it lacks one."""
    places = {name: _place(name, spec, grouped=grouped) for name in names}
    layers = {place[1] for place in places.values() if place is not None and place[0] == 1}
    if None in places.values() or layers != set(range(len(layers))):
        return None
    return sorted(names, key=lambda name: places[name] or ())


def _place(text: str, spec: Spec, *, grouped: bool) -> Place | None:
    """Return where a name is: before the layers, in one, behind them, in one of further tokens', or at the end."""
    name = Name.of(text)
    if text in _OUTSIDE or name.layer is None or name.block not in spec:
        return _OUTSIDE.get(text)
    layer, place = spec[name.block], (_INSIDE[name.block], name.layer)
    if name.expert is None:
        return (*place, layer.index(name.front)) if name.front in layer else None
    module, _, last = name.front.partition(".experts.")
    is_module = last == "local_experts."
    kind, experts = name.rest.removeprefix(".") if is_module else last + name.rest, f"{module}.experts"
    if experts not in layer or kind not in _IN_EXPERT:
        return None
    at = _IN_EXPERT.index(kind)
    own = (name.expert, at) if is_module and not grouped else (at // 2, name.expert, at % 2)
    return (*place, layer.index(experts), *own)


_FRONT = re.compile(r"(?:language_model\.)?embedding\..+")
_BACK = re.compile(r"(?:(?:language_model\.)?(?:decoder|encoder|transformer)\.final_(?:layernorm|norm)|"
                   r"(?:language_model\.)?output_layer)\..+")  # fmt: skip
"""What is known to be before the layers, and behind them. Anything else has a stage that only its program knows."""

FURTHER = re.compile(r"(?:language_model\.)?mtp\.layers\..+")
"""Layers that predict further tokens."""

_WORDS = re.compile(r"(?:language_model\.)?embedding\.word_embeddings\.weight")
_IMAGES = re.compile(r"vision_(?:model|projection)\..+")

Bounds = tuple[int, ...]


@immutable
class Dealt:
    """A tensor of a chunk: its name in the whole model, and that on the rank.

    `names`: several where it is of all experts of the rank; `shared`: whether the first and the last stage have it.
    """

    names: tuple[str, ...]
    local: str
    shared: bool = False

    @property
    def name(self) -> str:
        """The name, or the first of them."""
        return self.names[0]


@immutable
class Sliced:
    """What tensor-parallel ranks have of tensors, which a chunk has.

    `shapes`: of the whole model's; `rows`: of vocabularies in the module, by whose names they are cut.
    """

    shapes: Shapes
    cuts: Mapping[str, Cut]
    ranks: int
    rows: Mapping[str, int]

    def shape(self, one: Dealt) -> Shape:
        """Return the shape of what a rank has."""
        own = self.cuts[one.name].shape(self.shapes[one.name], self.ranks, self.rows.get(one.name))
        return shape_of_all(one.local, len(one.names), own) if is_fused(one.local) else own

    def part(self, one: Dealt, rank: int, slots: Sequence[Slot]) -> Slot:
        """Return what a rank has of slots, one of each name."""
        own = [self.cuts[name].slice(slot, rank, self.ranks, self.rows.get(name))
               for name, slot in zip(one.names, slots, strict=True)]  # fmt: skip
        return together(own, one.local) if is_fused(one.local) else own[0]

    def slices(self, one: Dealt, part: Slot) -> list[Slot]:
        """Return a rank's slices, one of each name: the other way round than `part`."""
        return apart(part, one.local, len(one.names)) if is_fused(one.local) else [part]


def bounds_of(given: str | None, layers: int, chunks: int) -> Bounds:
    """Return the first layer of each chunk, and the number of all layers.

    `given`: as the user says; None: each has as many. Raises UsageError: they are not in order, or do not divide.
    """
    if given is None:
        if layers % chunks:
            raise UsageError(
                f"{layers} layers cannot be distributed evenly over {chunks} chunks of the model",
                expected="--stage-bounds 0,N,...: the first layer of each, then the number of layers",
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


class Chunks:
    """The chunks that a model's tensors may be dealt to.

    `names`: in the model's order; `tied`: by the name of an embedding that is the output layer, too: what the last
    stage calls its copy. `unknown`: those of which it is not known which stage has them.
    """

    def __init__(self, names: Sequence[str], tied: Mapping[str, str]) -> None:
        self._names, self._tied = names, {name: local for name, local in tied.items() if name in set(names)}
        self._layers: dict[int, list[tuple[int, Name]]] = {}
        self._ends: list[tuple[int, str]] = []
        self.unknown: list[str] = []
        further = any(map(FURTHER.fullmatch, names))
        for at, name in enumerate(names):
            one = Name.of(name)
            if one.layer is not None and BLOCK.fullmatch(one.block):
                self._layers.setdefault(one.layer, []).append((at, one))
            elif _FRONT.fullmatch(name) or _IMAGES.fullmatch(name):
                self._ends.append((at, "both" if further and _FRONT.fullmatch(name) else "first"))
            elif FURTHER.fullmatch(name) or _BACK.fullmatch(name):
                is_norm = further and "final_" in name and _BACK.fullmatch(name)
                self._ends.append((at, "norm" if is_norm else "last"))
            else:
                self.unknown.append(name)
        self.count = 1 + max(self._layers, default=-1)

    def of(self, low: int, high: int, *, first: bool, last: bool) -> list[Dealt]:
        """Return what the chunk has that begins with layer `low` and ends before `high`."""
        if first and last:
            return [Dealt((name,), name) for name in self._names]
        found = [
            (at, str(replace(one, layer=n - low))) for n in range(low, high) for at, one in self._layers.get(n, ())
        ]
        has_norm = low < high == self.count or (last and not self.count)
        has = {"first": first, "both": first or last, "last": last, "norm": has_norm}
        found += [(at, self._names[at]) for at, end in self._ends if has[end]]
        both = [self._names[at] for at, end in self._ends if end == "both"]
        words = {*self._tied, *filter(_WORDS.fullmatch, both)}
        dealt = [Dealt((self._names[at],), local, self._names[at] in words) for at, local in sorted(found)]
        return [*dealt, *(Dealt((name,), local, shared=True) for name, local in self._tied.items())] if last else dealt


def dealt(names: Sequence[str], bounds: Bounds, *, stages: int, tied: Mapping[str, str]) -> list[list[list[Dealt]]]:
    """Return what each stage has, by chunk, in the order of `names`.

    `bounds`: of all chunks, in the model's order; `tied` is as of `Chunks`. Raises UnsupportedError: of something it is
    not known which stage has it.
    """
    count, every = len(bounds) - 1, Chunks(names, tied)
    if count > 1:
        odd = next((name for name in names if _FRONT.fullmatch(name) and not _WORDS.fullmatch(name)), None)
        if (odd is not None or tied) and any(map(FURTHER.fullmatch, names)):
            raise UnsupportedError(
                "on several stages, multi-token prediction needs word embeddings alone, which are not the output layer",
                found=odd or "a tied embedding, which megatron-core cannot save on several stages either",
                advice="give --pipeline-parallel-size 1",
            )
        if every.unknown:
            raise UnsupportedError("it is unknown which pipeline stage has it", found=listed(every.unknown),
                                   advice="give --pipeline-parallel-size 1")  # fmt: skip
    found = [every.of(bounds[at], bounds[at + 1], first=at == 0, last=at == count - 1) for at in range(count)]
    return [[found[chunk * stages + stage] for chunk in range(count // stages)] for stage in range(stages)]


def on_expert_rank(
    dealt: Sequence[Dealt], counts: Mapping[object, int], rank: int, ranks: int, *, fused: bool = False
) -> list[Dealt]:
    """Return what an expert-parallel rank has of a chunk: of experts its own, numbered from 0.

    `counts`: of `expert_counts`; `fused`: whether they are one parameter for each layer, which is where the first of
    them is. Raises UnsupportedError: they have what such a module has no place for.
    """
    found: dict[str, Dealt] = {}
    for one in dealt:
        name, local = Name.of(one.name), one.local
        if name.expert is not None:
            own = counts[name.experts] // ranks
            number = name.expert - rank * own
            if not 0 <= number < own:
                continue
            local = str(replace(Name.of(local), expert=number))
            if fused and ".experts.local_experts." in local:
                local = ONE.sub(r"\1weight\2", local)
                if not is_fused(local):
                    raise UnsupportedError("experts that are one parameter can only have weights", found=local)
                first = found.get(local)
                found[local] = Dealt((*(first.names if first else ()), one.name), local, one.shared)
                continue
        found[local] = replace(one, local=local)
    return list(found.values())


def expert_counts(names: Iterable[str], ranks: int) -> dict[object, int]:
    """Return how many experts there are, by `Name.experts`. Raises UsageError: they are not dealt evenly."""
    found: dict[object, int] = {}
    for one in map(Name.of, names):
        if one.expert is not None:
            found[one.experts] = max(found.get(one.experts, 0), one.expert + 1)
    odd = next((count for count in found.values() if count % ranks), None)
    if odd is not None or (not found and ranks > 1):
        raise UsageError("unusable --expert-parallel-size", found=ranks,
                         expected=f"a divisor of {odd}" if odd else "1, for a model without experts")  # fmt: skip
    return found
