"""Under which key, and where in it, `torch_dist` has each tensor of a model: the other way round than `names`. Pure.

    decoder.layers.<i>.mlp.linear_fc2.weight              decoder.layers.mlp.linear_fc2.weight [L, ...] at (i)
    ...experts.local_experts.<e>.linear_fc2.weight        ...experts.experts.linear_fc2.weight [.., E, ...] at (.., e)
    decoder.layers.<i>.input_layernorm.weight             decoder.layers.self_attention.linear_qkv.layer_norm_weight
    mtp.layers.<i>....                                    as it is: layers that predict further tokens are not stacked

Where layers differ, Megatron-Core has each under its own number, and stacks none.

Source: the `sharded_state_dict` methods of megatron-core 0.16, and the `sharded_state_dict_keys_map` of its layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zckpt.errors import UnsupportedError, listed

Shape = tuple[int, ...]

_LAYER = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers)\.([0-9]{1,9})\.(.+)")
_LOCAL = re.compile(r"(.*\.experts)\.local_experts\.([0-9]{1,9})\.(.+)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))([0-9]{1,9})")

_MODEL = re.compile(r"(?:.*\.)?layers\.[0-9]+\.(?:.*\.)?linear_[a-z0-9_]+\.weight")
"""What every model of Megatron-Core has, and no other known."""

_UNWRITTEN = re.compile(r".*\.(?:in_proj|conv1d)\.(?:weight|bias)|.*\.experts\.weight[12]")
"""Tensors that Megatron-Core writes as several, at bounds that the tensor does not tell; or transposed."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor is. `index`: along the axes that its key has before the tensor's own; `sizes`: of these axes."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def check_names(names: Iterable[str]) -> None:
    """Raise UnsupportedError unless these are the names of a model of Megatron-Core that can be written."""
    every = list(names)
    odd = next((name for name in every if _UNWRITTEN.fullmatch(name)), None)
    if odd is not None:
        raise UnsupportedError(
            "Megatron-Core writes this tensor in another form, which follows from its configuration only",
            found=odd,
            advice="of Mamba, linear attention and the old grouped experts, `--to zckpt` or `--to dcp` keeps all",
        )
    if not any(_MODEL.fullmatch(name) for name in every):
        raise UnsupportedError(
            "its names are not those of a model of Megatron-Core",
            expected="names like decoder.layers.0.mlp.linear_fc1.weight",
            found=listed(every, most=3),
            advice="`--map` gives them, such as --map llama-huggingface-megatron; or --rename",
        )


def is_of_one_layer(key: str) -> bool:
    """Tell whether a key is of one layer of a block whose layers might be stacked."""
    return _LAYER.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class _Split:
    """A name in parts: what is before the layer's number, and behind it without an expert's."""

    key: str
    layer: int | None
    front: str
    rest: str
    expert: int | None


def _split(name: str) -> _Split:
    expert = None
    for pattern in (_LOCAL, _GROUPED):
        match = pattern.fullmatch(name)
        if match is not None:
            rest, number = (match[3], match[2]) if pattern is _LOCAL else (match[2], match[3])
            name, expert = f"{match[1]}.experts.{rest}", int(number)
            break
    match = _LAYER.fullmatch(name)
    if match is None:
        return _Split(name, None, "", name, expert)
    return _Split(name, int(match[2]), match[1], match[3], expert)


def placed(tensors: Mapping[str, tuple[Shape, object]], *, apart: bool | None) -> dict[str, Placed]:
    """Return where each tensor is.

    Parameters
    ----------
    tensors : mapping of str to (shape, kind)
        By the names that the files' keys have; those of one key have to be of one shape and kind.
    apart : bool or None
        Whether each layer has keys of its own. None: if they differ.

    Raises
    ------
    UnsupportedError
        Layers or experts are not numbered through, or differ where they are to be stacked.
    """
    parts = {name: _split(name) for name in tensors}
    counts = _layers(parts)
    stacked: dict[tuple[str, str, int | None], dict[int, tuple[Shape, object]]] = {}
    for name, part in parts.items():
        if part.layer is not None:
            stacked.setdefault((part.front, part.rest, part.expert), {})[part.layer] = tensors[name]
    unlike = [
        f"{front}.*.{rest}"
        for (front, rest, _), its in stacked.items()
        if len(its) != counts[front] or len(set(its.values())) > 1
    ]
    if unlike and apart is False:
        raise UnsupportedError("layers that differ cannot be stacked", found=listed(unlike, most=3),
                               advice="give --layers apart")  # fmt: skip
    one_by_one = bool(unlike) if apart is None else apart
    found = {name: _placed(part, counts, one_by_one=one_by_one) for name, part in parts.items()}
    return _with_experts(found, parts, tensors)


def _layers(parts: Mapping[str, _Split]) -> dict[str, int]:
    """Return how many layers there are in each block."""
    numbers: dict[str, set[int]] = {}
    for part in parts.values():
        if part.layer is not None:
            numbers.setdefault(part.front, set()).add(part.layer)
    for front, its in numbers.items():
        if its != set(range(len(its))):
            missing = next(at for at in range(len(its)) if at not in its)
            raise UnsupportedError(f"{front} has no layer {missing}", expected=f"layers 0 to {max(its)}")
    return {front: len(its) for front, its in numbers.items()}


def _placed(part: _Split, counts: Mapping[str, int], *, one_by_one: bool) -> Placed:
    if part.layer is None or one_by_one:
        return Placed(part.key)
    return Placed(f"{part.front}.{part.rest}", (part.layer,), (counts[part.front],))


def _with_experts(
    found: Mapping[str, Placed], parts: Mapping[str, _Split], tensors: Mapping[str, tuple[Shape, object]]
) -> dict[str, Placed]:
    """Give the tensors of experts their place among the others of their layer."""
    experts: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for name, part in parts.items():
        if part.expert is not None:
            experts.setdefault((found[name].key, found[name].index), {})[part.expert] = name
    counts = {key: 0 for key, _ in experts}
    for (key, _), its in experts.items():
        counts[key] = max(counts[key], len(its))
    done = dict(found)
    for (key, index), its in experts.items():
        if set(its) != set(range(counts[key])):
            raise UnsupportedError(f"the experts of {key} are not numbered through",
                                   expected=f"0 to {counts[key] - 1}", found=listed(sorted(its)))  # fmt: skip
        if len({tensors[name] for name in its.values()}) > 1:
            raise UnsupportedError(f"the experts of {key} differ", expected="one shape and type of all")
        for number, name in its.items():
            one = found[name]
            done[name] = Placed(key, (*index, number), (*one.sizes, counts[key]))
    return done
