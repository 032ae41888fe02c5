"""Weights that are codes of a few bits, numbers only with the scales beside them: no cast makes numbers of them.

FP8           NAME.weight or NAME, of float8, and NAME.weight_scale_inv, .weight_scale, .scale_weight, NAME_scale_inv
MXFP4, NVFP4  NAME_blocks, NAME_scales; NAME.weight of uint8, .weight_scale and .weight_scale_2
in integers   NAME.weight_packed and .weight_scale; NAME.qweight and .scales; NAME.weight and .SCB (int8)
bitsandbytes  NAME.weight of uint8, and NAME.weight.absmax, .quant_state.*
quanto        NAME.weight._data, or of less than 8 bits NAME.weight._data._data, and NAME.weight._scale
torchao       NAME._weight_qdata and ._weight_scale
MLX           NAME.weight of uint32 and .scales; Mistral NAME.weight of float8 and .qscale_weight
others        NAME.trellis and .suh (EXL3), .codes and .codebooks (AQLM), .indices (VPTQ), .W_q (HQQ), .B and .s, ...

Or integers that no plain model has (NAME.qweight, .weight_packed, .W_q, .B_24, .Qidxs), or any of these where the
model's config.json has a quantization_config, and other files that say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.assets import CONFIG_NAME, FOLDERS
from zckpt.state import Checkpoint, Slot, dict_of
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.storage.files import is_file, read_json

_SCALE = re.compile(
    r"(?P<of>.*?)[._](?:weight_|embedding_)?(?:scales?(?:_inv|_\d|_and_zero)?|q?scale_weight|absmax|SCB|quant_state\..*)"
    r"|(?P<by_s>.*?)\.sf?",
    re.DOTALL,
)
_CODES = re.compile(
    r"(?P<of>.*?)(?:\.(?:weight|qweight|weight_packed|weight\.compressed|W_q|embedding_quantized)|_blocks"
    r"|(?<=\.)_(?:weight_q)?data(?:\._data)?)",
    re.DOTALL,
)
_TOGETHER = (
    ("trellis", "suh"), ("trellis", "scales"), ("codes", "scales"), ("indices", "scales"), ("B", "scales"), ("B", "s"),
    ("indices", "centroids.weight", "weight_scale"), ("indices", "centroids.weight", "perm"), ("B", "s_channel"),
    ("dense_weights", "col_vals"), ("weight.compressed", "col_vals"),
)  # fmt: skip
"""What codes are called that ordinary tables are, too, and what lies beside them in a module."""

_ALONE = re.compile(r"(?:.*\.)?(?:q_?weight|weight_packed|W_q|B_24|Qidxs|quantized_weight_values)", re.DOTALL)
"""What no integers but codes are called, whatever their scales are."""

_KNOWN = re.compile(
    r"(?:.*\.)?(?:weight|qweight|qzeros|weight_packed|weight_zero_point)|.*_(?:blocks|scales)", re.DOTALL
)
_NAMED = ("fp8", "bitsandbytes", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt", "mlx", "metal")
"""Of which codes that are no 8-bit floats have names that are known: other integers of theirs are buffers."""
_PACKED = re.compile(r"(.*)\.quant_state\..*", re.DOTALL)
"""Beside codes of bitsandbytes, which may be kept as floats, as one column."""

_FLAT = (".weight.compressed", ".dense_weights")
"""Ends of names of codes that are no matrices."""

OF_MLX = "quantization"
OF_CONFIG = ("quantization_config", "compression_config", OF_MLX)
"""What a config.json says of how weights are quantised."""

_SETTINGS = {CONFIG_NAME: OF_CONFIG, "hf_quant_config.json": ("quantization",)}


def codes_in(checkpoint: Checkpoint) -> list[str]:
    """Return the names of tensors that are codes, by scales that lie beside them, or as the model's files say."""
    every = list(checkpoint.tensors())
    beside = {found[1] for one in every if (found := _PACKED.fullmatch(one.name)) is not None}
    packed = {one.name for one in every if one.name in beside and one.shape[1:] == (1,)}
    stored = {one.dtype for one in every}
    types = {one for one in stored if "int" in one or (itemsize(one) == 1 and one != "bool")}
    is_table = {one.name: len(one.shape) > 1 or one.name.endswith(_FLAT) for one in every}
    low = [one for one in every if (one.dtype in types and is_table[one.name]) or one.name in packed]
    if not low:
        return []
    settings = settings_of(checkpoint)[1]
    if not settings:  # matrices of int64 are positions
        low = [one for one in low if one.dtype != "int64" or one.name.endswith(_FLAT)]
    is_unknown = bool(settings) and settings.get("quant_method") not in _NAMED
    scaled = packed | {found["of"] or found["by_s"] for one in every if (found := _SCALE.fullmatch(one.name))}
    for own, *others in _TOGETHER:
        modules = (one.name.removesuffix(own) for one in low if one.name.endswith(f".{own}"))
        scaled |= {of + own for of in modules if is_table.keys() >= {of + name for name in others}}
    return [
        one.name
        for one in low
        if (is_unknown and one.dtype != "int64")
        or (settings and (one.dtype.startswith("float8") or _KNOWN.fullmatch(one.name)))
        or one.name in scaled
        or (not one.dtype.startswith("float") and _ALONE.fullmatch(one.name))
        or ((found := _CODES.fullmatch(one.name)) is not None and found["of"] in scaled)
    ]


def described(checkpoint: Checkpoint) -> str | None:
    """Return of which kind a model's codes are, for people; None if it has none."""
    if not codes_in(checkpoint):
        return None
    settings = settings_of(checkpoint)[1]
    block = settings.get("weight_block_size")
    if isinstance(block, list) and block:
        return f"block FP8, {' x '.join(map(str, block))}"
    keys = ("quant_method", "format", "mode", "bnb_4bit_quant_type", "quant_algo", "bits")
    told = (settings.get(key) for key in keys)
    return " ".join(str(one) for one in told if one) or "codes of few bits, with scales"


def refuse_casts(checkpoint: Checkpoint, casts: Iterable[tuple[Slot, str]], advice: str) -> None:
    """Raise UnsupportedError if a checkpoint has codes, and floats of it that go with them change their type.

    Of a model alone all floats go with them; of a training, in which such a model is frozen, codes and scales do.
    `casts` are what is written or loaded, and its type there.
    """
    codes = codes_in(checkpoint)
    if not codes:
        return
    trains = checkpoint.param_groups or checkpoint.has_masters
    names = {*filter(_SCALE.fullmatch, checkpoint.names)}.union(codes)
    names_at = {_place(slot): one.name for one in checkpoint.tensors() for slot in one.slots.values()}
    for slot, dtype in casts:
        name = names_at.get(_place(slot))
        if slot.dtype != dtype and is_floating(slot.dtype) and (not trains or name in names):
            raise UnsupportedError(
                f"{listed(codes)}: low-bit codes, which only mean something with their scales, so they cannot be cast",
                path=checkpoint.named,
                expected=f"{name or slot.name} in {slot.dtype}, or weights without scales",
                found=dtype,
                advice=advice,
            )


def _place(slot: Slot) -> tuple[str, int] | None:
    return next(((span.path, span.offset) for span in slot.spans), None)


def settings_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's configuration, and what it or a file beside it says of how weights are quantised; or nothing."""
    return settings_in(Path(root) for root in (checkpoint.opened, checkpoint.source) if root)


def settings_in(given: Iterable[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same of directories, or of those that files are in."""
    roots = dict.fromkeys(root.parent if is_file(root) else root for root in given)
    config: dict[str, Any] = {}
    for path in (root / folder / name for root in roots for folder in FOLDERS for name in _SETTINGS):
        found = read_json(path) or {}
        config = config or (found if path.name == CONFIG_NAME else {})
        inner = [one for one in (found, found.get("text_config")) if isinstance(one, dict)]
        for one in inner:
            for key in _SETTINGS[path.name]:
                told = dict_of(one.get(key))
                is_mlx = path.name == CONFIG_NAME and {"group_size", "bits"} <= told.keys()
                if told and (is_mlx or path.name != CONFIG_NAME or key != OF_MLX):
                    return config or one, {**({"quant_method": "mlx"} if is_mlx else {}), **told}
    return config, {}
