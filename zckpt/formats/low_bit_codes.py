"""A model's weights as block FP8, as releases have it: float8_e4m3fn, and a float32 scale for each block beside them.

NAME.weight, NAME.weight_scale_inv           linear layers within numbered ones, each expert's among them
NAME.experts.down_proj, ..._proj_scale_inv   experts in one tensor, (experts, out, in)

Scales and codes are those that transformers 5.23 makes on a CPU. As there, a weight that is no whole number of blocks
stays as it is, unless config.json is already one of block FP8: releases have a last, short block, which transformers
reads on GPUs only. What no rule here knows for a linear layer stays. All that does is listed in config.json, by module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from zckpt.engine.cast import Array
from zckpt.engine.computed import Computed
from zckpt.engine.quantise import InBlocks
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.consolidated.model import Tensors
from zckpt.state import Shape, dict_of
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.storage.recent import Recent

_LINEAR = re.compile(
    r".+\.\d+\.(?:.+\.)?(?:(?!c_|dt_|eh_|weights_|x_)\w+_proj(?:_with_mqa|_qkvz?|_z)?"
    r"|w[123]|wq_b|wk|fc[12]|query_key_value|dense(?:_h_to_4h|_4h_to_h)?)\.weight"
)
_EXPERTS = re.compile(r"(.+\.\d+\.(?:.+\.)?experts)\..+", re.DOTALL)
_OTHER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*|\w*projector|\w*connector|mamba\w*|mixer|ssm\w*)\.")
"""Towers and layers that releases leave as they are."""

BLOCK = (128, 128)


def block_of(quantize: str) -> tuple[int, int]:
    """Return the rows and columns of a block; raise UsageError: this is not written."""
    found = re.fullmatch(r"fp8-block(?::(\d+)x(\d+))?", quantize)
    block = (int(found[1] or BLOCK[0]), int(found[2] or BLOCK[1])) if found else (0, 0)
    if not all(block):
        raise UsageError("unknown --quantize", expected="fp8-block, or fp8-block:ROWSxCOLUMNS", found=quantize)
    return block


def in_block_fp8(tensors: Tensors, block: tuple[int, int], config: Mapping[str, Any], path: str) -> tuple[Tensors, Any]:
    """Return a model's tensors with codes and scales among them, and the `quantization_config` that says so.

    Raises UnsupportedError: there is nothing that would be quantised.
    """
    hidden = (config.get("text_config") or config).get("hidden_size")
    before = config.get("quantization_config")
    short = dict_of(before).get("quant_method") == "fp8"
    units = {name: name.removesuffix(".weight").removesuffix(".bias") for name in tensors}  # modules that they are of
    units |= {name: match[1] for name in tensors if (match := _EXPERTS.fullmatch(name))}  # all experts of a layer
    fits = {name: _fits(name, slot.shape, dtype, block, hidden, short=short) for name, (slot, dtype) in tensors.items()}
    left = {unit for name, unit in units.items() if not fits[name] and name != f"{unit}.bias"}
    coded = {units[name] for name in tensors if fits[name]} - left
    if not coded:
        raise UnsupportedError(
            "no linear layer has a weight that is a whole number of blocks",
            path=path,
            expected=f"names such as model.layers.0.mlp.up_proj.weight, and multiples of {block[0]} x {block[1]}",
            advice="give smaller blocks: fp8-block:ROWSxCOLUMNS",
        )
    found: Tensors = {}
    kept: Recent[tuple[str, int], Array] = Recent(1 << 20)
    for name, (slot, dtype) in tensors.items():
        if units[name] not in coded or not fits[name]:
            found[name] = slot, dtype
            continue
        shape = tuple(-(-size // own) for size, own in zip(slot.shape[-2:], block, strict=True))
        for own, type_, sizes, scales in (
            (name, "float8_e4m3fn", slot.shape, False),
            (f"{name}_scale_inv", "float32", (*slot.shape[:-2], *shape), True),
        ):
            function = InBlocks(slot, block, f"{name} in {path}", scales, kept)
            found[own] = Computed(slot.name, type_, sizes, (), function=function), type_
    within = {unit[:at] for unit in coded for at, mark in enumerate(unit) if mark == "."}
    stacks = [  # GraniteMoe's experts are called otherwise in memory
        unit.rpartition(".")[0]
        for name, unit in units.items()
        if name == f"{unit}.weight" and "." in unit and len(tensors[name][0].shape) == 3
    ]
    modules = dict.fromkeys(["lm_head", *(unit for unit in (*units.values(), *stacks) if unit not in coded | within)])
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*block]}
    return found, {**settings, "modules_to_not_convert": [*modules]}


def _fits(name: str, shape: Shape, dtype: str, block: tuple[int, int], hidden: object, *, short: bool) -> bool:
    """Tell whether a tensor is a linear layer's weight, or those of experts, of whole blocks in whole halves."""
    if not is_floating(dtype) or itemsize(dtype) < 2 or not math.prod(shape) or _OTHER.search(name):
        return False
    rows, columns = block
    if len(shape) == 3:
        up = name.endswith(".experts.gate_up_proj")
        if not (up or name.endswith(".experts.down_proj")) or hidden != shape[2 if up else 1]:  # else (in, out)
            return False
        rows *= 1 + up
    elif len(shape) != 2 or not _LINEAR.fullmatch(name):
        return False
    return (short and len(shape) == 2) or not (shape[-2] % rows or shape[-1] % columns)
