"""What a tensor on disk is of the model that it was cut from: which layers and experts, by which names. Pure.

    on disk                                                             in the model
    decoder.layers.mlp.linear_fc2.weight                  [L, ...]      decoder.layers.<i>.mlp.linear_fc2.weight
    decoder.layers.<i>.mlp.linear_fc2.weight              [...]         the same
    decoder.layers.mlp.experts.experts.linear_fc2.weight  [L, E, ...]   ...experts.local_experts.<e>.linear_fc2.weight
    ...mlp.linear_fc1.weight_w, ..._v                     [F, H] each   ...mlp.linear_fc1.weight [2F, H]
    ...mixer.in_proj.weight.z, .x, .B, .C, .dt                          ...mixer.in_proj.weight

A layer has its number in the whole model. Names are those of the model on one rank, but for norms that Transformer
Engine puts into the linear layer behind them: the disk knows no others.

Source: the `sharded_state_dict` methods of megatron-core 0.13 and 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LAYER, EXPERT = "layer", "expert"
"""What the first axes of a tensor on disk may count."""

_LAYERS = re.compile(r"((?:^|\.)layers)\.(?![0-9]+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?![0-9]+\.)")
_ONE_EXPERT = re.compile(r"\.experts\.experts\.(?=[0-9]+\.)")
_NUMBERED = re.compile(r"(.*?(?:^|\.)layers\.)([0-9]{1,9})\.(.*)")

_JOINED = (
    (re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_(w|v)"), (("w", "v"),)),
    (
        re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.([A-Za-z]+)"),
        (
            ("z", "x", "B", "C", "dt"),
            ("x", "B", "C"),
            ("query", "key", "value", "z", "beta", "alpha"),
            ("query", "key", "value"),
        ),
    ),
)
"""Tensors that are written as several, in the order in which they lie in the whole along its first axis."""

_LOCAL_EXPERT = re.compile(r"(.*\.local_experts\.)([0-9]{1,9})\.(.*)")

BUFFERS = re.compile(r".*\.(?:expert_bias|inv_freq|running_mean|running_var|local_tokens_per_expert)")
"""Tensors of floating point that are none of the parameters."""

_FIRST = ("embedding", "encoder", "decoder", "mtp")
_LAST = ("output_layer",)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor on disk, or several that are one of the model's.

    Parameters
    ----------
    key : str
        Without what tells several apart.
    parts : tuple of str
        Their keys, in order.
    axes : tuple of {"layer", "expert"}
        What its first axes count.
    """

    key: str
    parts: tuple[str, ...]
    axes: tuple[str, ...]

    def name(self, index: tuple[int, ...]) -> str:
        """Return the name of one of its tensors, by a number for each of `axes`."""
        numbers = dict(zip(self.axes, index, strict=True))
        name = self.key
        if EXPERT in numbers:
            name = _EXPERTS.sub(f".experts.local_experts.{numbers[EXPERT]}.", name, count=1)
        else:
            name = _ONE_EXPERT.sub(".experts.local_experts.", name, count=1)
        return _LAYERS.sub(rf"\1.{numbers[LAYER]}.", name, count=1) if LAYER in numbers else name


def stored(keys: Iterable[str]) -> list[Stored]:
    """Return what the keys of a model's tensors are; each key is a part of one."""
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        whole, part = _split(key)
        groups.setdefault(whole, {})[part] = key
    found = []
    for whole, parts in groups.items():
        order = _order_of(parts)
        if order is not None:
            found.append(Stored(whole, tuple(parts[part] for part in order), _axes(whole)))
        else:  # by themselves
            found += [Stored(key, (key,), _axes(key)) for key in parts.values()]
    return found


def _split(key: str) -> tuple[str, str]:
    for pattern, orders in _JOINED:
        match = pattern.fullmatch(key)
        if match is not None and any(match[2] in order for order in orders):
            return match[1], match[2]
    return key, ""


def _order_of(parts: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the order of all parts of a tensor; None if they are none of those that are known."""
    if list(parts) == [""]:
        return ("",)
    for pattern, orders in _JOINED:
        for order in orders:
            if set(order) == set(parts) and all(pattern.fullmatch(key) for key in parts.values()):
                return order
    return None


def _axes(key: str) -> tuple[str, ...]:
    layers = (LAYER,) if _LAYERS.search(key) else ()
    return (*layers, EXPERT) if _EXPERTS.search(key) else layers


def in_order(names: Iterable[str]) -> list[str]:
    """Return names as the model has them: embeddings, layers by number, the rest; within a layer as they are given.

    Ranks share out what they write, so that keys on disk come in no order.
    """
    listed = list(names)
    rest: dict[str, int] = {}
    places: dict[str, tuple[int, ...]] = {}
    for at, name in enumerate(listed):
        front = next((step for step in name.split(".") if step in (*_FIRST, *_LAST)), "")
        rank = _FIRST.index(front) if front in _FIRST else len(_FIRST) + (front in _LAST)
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            places[name] = (rank, 1, at)
            continue
        expert = _LOCAL_EXPERT.fullmatch(numbered[3])
        above, number, inner = (expert[1], int(expert[2]), expert[3]) if expert else (numbered[3], 0, "")
        within = [rest.setdefault(text, len(rest)) for text in (numbered[1], above, inner)]
        places[name] = (rank, 0, within[0], int(numbered[2]), within[1], number, within[2])
    return sorted(listed, key=lambda name: places[name])
