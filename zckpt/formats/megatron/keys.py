"""Under which key, and where in it, `torch_dist` has each tensor of a model: both ways. Pure.

    on disk                                                             in the model
    decoder.layers.mlp.linear_fc2.weight                  [L, ...]      decoder.layers.<i>.mlp.linear_fc2.weight
    decoder.layers.<i>.mlp.linear_fc2.weight              [...]         the same
    decoder.layers.mlp.experts.experts.linear_fc2.weight  [L, E, ...]   ...experts.local_experts.<e>.linear_fc2.weight
    ...mlp.linear_fc1.weight_w, ..._v                     [F, H] each   ...mlp.linear_fc1.weight [2F, H]
    ...mixer.in_proj.weight.z, .x, .B, .C, .dt                          ...mixer.in_proj.weight
    mtp.layers.<i>....                                                  the same: what predicts further tokens

A layer has its number in the whole model. Names are those of the model on one rank, but for norms that Transformer
Engine puts into the linear layer behind them: the disk knows no others (`names`). Where layers differ, Megatron-Core
has each under its own number, and stacks none. What it writes as several is read and not written.

Source: the `sharded_state_dict` methods of megatron-core 0.13 and 0.16, and the `sharded_state_dict_keys_map` of its
layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.megatron.names import Name
from zckpt.immutable import immutable
from zckpt.state import Shape

LAYER, EXPERT = "layer", "expert"
"""What the first axes of a tensor on disk may count."""

_LAYERS = re.compile(r"((?:^|\.)layers)\.(?![0-9]+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?![0-9]+\.)")
_ONE_EXPERT = re.compile(r"\.experts\.experts\.(?=[0-9]+\.)")

Orders = tuple[tuple[str, ...], ...]

_JOINED: tuple[tuple[re.Pattern[str], Orders], ...] = (
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

_ALONE: Orders = (("",),)

_STACKED = re.compile(r"(?:.*\.)?(?:decoder|encoder)\.layers")
"""What the names of layers begin with that may be stacked."""

_MODEL = re.compile(r"(?:.*\.)?layers\.[0-9]+\.(?:.*\.)?linear_[a-z0-9_]+\.weight")
"""What every model of Megatron-Core has, and no other known."""

_UNWRITTEN = re.compile(r".*\.(?:in_proj|conv1d)\.(?:weight|bias)|.*\.experts\.weight[12]")
"""Tensors that Megatron-Core writes as several, at bounds that the tensor does not tell; or transposed."""


# --- from keys to names


@immutable
class Stored:
    """A tensor on disk, or several that are one of the model's."""

    key: str  # without what tells several apart
    parts: tuple[str, ...]  # their keys, in order
    axes: tuple[str, ...]  # {"layer", "expert"}; what its first axes count

    def name(self, index: Shape) -> str:
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
    wholes: dict[tuple[str, Orders], dict[str, str]] = {}
    for key in keys:
        whole, part, of = key, "", _ALONE
        for pattern, orders in _JOINED:
            match = pattern.fullmatch(key)
            if match is not None and any(match[2] in order for order in orders):
                whole, part, of = match[1], match[2], orders
        wholes.setdefault((whole, of), {})[part] = key
    found = []
    for (whole, every_order), parts in wholes.items():
        order = next((one for one in every_order if set(one) == set(parts)), None)
        every = [(key, (key,)) for key in parts.values()]  # those that are not all there are by themselves
        for key, its in every if order is None else [(whole, tuple(parts[part] for part in order))]:
            axes = tuple(axis for axis, pattern in ((LAYER, _LAYERS), (EXPERT, _EXPERTS)) if pattern.search(key))
            found.append(Stored(key, its, axes))
    return found


# --- from names to keys


@immutable
class Placed:
    """Where a tensor is. `index`: along the axes that its key has before the tensor's own; `sizes`: of these axes."""

    key: str
    index: Shape = ()
    sizes: Shape = ()


def check_names(names: Iterable[str]) -> None:
    """Raise UnsupportedError unless these are the names of a model of Megatron-Core that can be written."""
    every = list(names)
    for odd in filter(_UNWRITTEN.fullmatch, every):
        raise UnsupportedError(
            "Megatron-Core writes this tensor in another form, which only its configuration determines",
            found=odd,
            advice="for Mamba, linear attention and old grouped experts, use `--to=zckpt` or `--to=dcp`",
        )
    if not any(_MODEL.fullmatch(name) for name in every):
        raise UnsupportedError(
            "its names are not those of a Megatron-Core model",
            expected="names like decoder.layers.0.mlp.linear_fc1.weight",
            found=listed(every, most=3),
            advice="`--map` gives them, such as --map=llama-huggingface-megatron; or --rename",
        )


def is_of_one_layer(key: str) -> bool:
    """Tell whether a key is of one layer of a block whose layers might be stacked."""
    return _STACKED.fullmatch(Name.of(key).block) is not None


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
    names = {text: Name.of(text) for text in tensors}
    inner = {text: name.front for text, name in names.items()}
    for text, name in names.items():
        if name.expert is not None:  # as the key of all experts has it
            module, _, grouped = name.front.removesuffix("local_experts.").rpartition("experts.")
            inner[text] = f"{module}experts.experts.{grouped}{name.rest.removeprefix('.')}"
    layers: dict[str, set[int]] = {}
    stacks: dict[tuple[str, str, int | None], list[tuple[Shape, object]]] = {}
    for text, name in names.items():
        if name.layer is not None and _STACKED.fullmatch(name.block):
            layers.setdefault(name.block, set()).add(name.layer)
            stacks.setdefault((name.block, inner[text], name.expert), []).append(tensors[text])
    for block, numbers in layers.items():
        for missing in sorted({*range(len(numbers))} - numbers):
            raise UnsupportedError(f"{block} has no layer {missing}", expected=f"layers 0 to {max(numbers)}")
    unlike = [f"{block}.*.{rest}" for (block, rest, _), its in stacks.items()
              if len(its) != len(layers[block]) or len(set(its)) > 1]  # fmt: skip
    if unlike and apart is False:
        raise UnsupportedError("layers that differ cannot be stacked", found=listed(unlike, most=3),
                               advice="give --layers=apart")  # fmt: skip
    found: dict[str, Placed] = {}
    for text, name in names.items():
        if name.layer is None:
            found[text] = Placed(inner[text])
        elif name.block not in layers or apart or unlike:
            found[text] = Placed(f"{name.block}.{name.layer}.{inner[text]}")
        else:
            found[text] = Placed(f"{name.block}.{inner[text]}", (name.layer,), (len(layers[name.block]),))
    return found | _of_experts(found, names, tensors)


def _of_experts(
    found: Mapping[str, Placed], names: Mapping[str, Name], tensors: Mapping[str, tuple[Shape, object]]
) -> dict[str, Placed]:
    """Return where the tensors of experts are among the others of their layer."""
    experts: dict[Placed, dict[int, str]] = {}
    for text, name in names.items():
        if name.expert is not None:
            experts.setdefault(found[text], {})[name.expert] = text
    counts: dict[str, int] = {}
    for at, its in experts.items():
        counts[at.key] = max(counts.get(at.key, 0), len(its))
    done = {}
    for at, its in experts.items():
        count = counts[at.key]
        if set(its) != set(range(count)):
            raise UnsupportedError(f"the experts of {at.key} are not numbered consecutively",
                                   expected=f"0 to {count - 1}", found=listed(sorted(its)))  # fmt: skip
        if len({tensors[text] for text in its.values()}) > 1:
            raise UnsupportedError(f"the experts of {at.key} differ", expected="one shape and type for all")
        for number, text in its.items():
            done[text] = Placed(at.key, (*at.index, number), (*at.sizes, count))
    return done
