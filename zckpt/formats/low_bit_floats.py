"""Weights of a few bits as the numbers that they stand for, and the model's config.json without its quantisation.

FP8            float32(code) x scale of its block, row or tensor; compressed-tensors rounds to the type of its scales
bitsandbytes   nf4, fp4: map[code] x scale of its block, whose scales may be codes again, plus an offset; int8: rows
gpt-oss        MXFP4: e2m1 x 2 ^ (scale - 127), and (experts, in, out) as in the live model
NVFP4, MXFP4   e2m1 x scale of its 16 or 32 columns; NVFP4 has another scale for the whole tensor
MLX            code x scale of a group + its bias, each rounded to their type (Metal: the sum); or FP4, FP8, as above
packed         (code - zero) x scale of a group of columns: compressed-tensors' integers, GPTQ (its first format keeps
               zeros less one, and may sort columns by g_idx), AWQ's gemm (eight rows in a word, in an order of its own)

Values are bit-equal to those of bitsandbytes 0.50, compressed-tensors 0.20 and transformers 5.23 on a CPU; of block FP8
to DeepSeek's formula, also where the last block of a row or column is not whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zckpt.engine import scaled
from zckpt.engine.cast import Array
from zckpt.engine.computed import Computed, Function
from zckpt.engine.copy import read_extent
from zckpt.engine.scaled import Part, alone, coded, matrices, whole
from zckpt.errors import DamagedFileError, UnsupportedError, listed
from zckpt.formats.adapters import MAXIMUM_CONFIG_NBYTES
from zckpt.formats.low_bit import OF_CONFIG, codes_in, settings_of
from zckpt.state import WEIGHT, Checkpoint, Parameter, Shape, Slot, are_sizes, dict_of, first_of, without
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.views import transpose
from zckpt.storage.files import Sources, json_object
from zckpt.torchfile import MAX_ELEMENTS

_BESIDE = (
    "weight_scale_inv", "weight_scale", "scale_weight", "weight_scale_2", "weight_global_scale", "weight_shape",
    "input_scale", "scale_input", "qscale_act", "activation_scale", "input_global_scale", "input_scale_ub", "SCB",
    "weight_format", "input_zero_point", "output_zero_point", "input_scale_inv", "output_activation_scale", "act_scale",
    "input_amax", "weight_amax", "comfy_quant",
)  # fmt: skip
"""What modules have besides codes, and plain ones have not."""

_OF_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Types of transformers' models that have its Conv1D, for which bitsandbytes and GPTQ have a Linear."""

_CONV1D = re.compile(r"(?:.*\.)?c_(?:attn|proj|fc)\.weight|(?:.*\.)?q_attn\.weight", re.DOTALL)

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)

Plain = tuple[str, Slot]
"""What codes stand for: its name in a plain model, and its numbers."""

_FLOATS = ("float32", "bfloat16", "float16")

_OF_AUTO_ROUND = {
    "auto_round": ("gptq", "gptq_v2"), "auto_round:auto_gptq": ("gptq", "gptq"), "auto_round:auto_awq": ("awq", "gemm"),
}  # fmt: skip

_OF_MLX = {
    ("mxfp4", 4, 32, "uint8"): ("uint8", "uint8"),
    ("nvfp4", 4, 16, "uint8"): ("uint8", "float8_e4m3fn"),
    ("mxfp8", 8, 32, "uint8"): ("float8_e4m3fn", "uint8"),
}
"""What codes and scales are of MLX's modes, besides `affine`: of a mode, of bits, columns, and the type of scales."""


_CACHE = re.compile(r"(?:.*\.)?(?:[qkv]|kv|prob|output)_(?:scale|zero_point)", re.DOTALL)


def cache_scales(checkpoint: Checkpoint) -> list[str]:
    """Return the scales of a cache of keys and values in FP8, which go with codes, and no plain model has."""
    found = [one for one in checkpoint.tensors() if _CACHE.fullmatch(one.name)]
    return [one.name for one in found if one.numel == 1 or one.shape[1:] == (1, 1)]  # of each head


def weights_as_floats(checkpoint: AnyCheckpoint) -> AnyCheckpoint:
    """Return a checkpoint with numbers in the place of codes, under the names that a plain model has.

    Raises UnsupportedError: codes that are packed or scaled in a way that is not known; DamagedFileError: codes and
    scales do not belong together.
    """
    codes = codes_in(checkpoint)
    if not codes:
        return checkpoint
    work = _Model(checkpoint)
    work.refuse_what_inputs_get()
    made = {name: work.as_it_lies(work.floats(name)) for name in codes}
    work.used.update(cache_scales(checkpoint))
    unknown = [name for name, found in made.items() if found is None and name not in work.used]
    if unknown:
        raise UnsupportedError(
            f"{listed(unknown)}: low-bit codes of a kind that zckpt cannot dequantise",
            path=checkpoint.named,
            expected="FP8, MXFP8, MXFP4, NVFP4, bitsandbytes' nf4, fp4 and int8, compressed-tensors' integers, GPTQ, "
            "MLX, or AWQ as `gemm`",
            found=work.settings.get("quant_method"),
            advice="dequantise it with the program that made it",
        )
    plain = {name: Parameter.of(*found) for name, found in made.items() if found is not None}
    work.used.update(codes)
    work.refuse_what_else_modules_have(one.name for one in plain.values())
    parameters = {
        each.name: each
        for one in checkpoint.tensors()
        if one.name in plain or (one.name in checkpoint.parameters and one.name not in work.used)
        for each in (plain.get(one.name, one),)
    }
    return replace(checkpoint, parameters=parameters, buffers=without(checkpoint.buffers, *work.used, *plain))


def plain_config(path: Path, dtype: str | None, settings: Mapping[str, object]) -> bytes:
    """Return a model's config.json with other settings; without its quantisation, of the type that its weights have."""
    found = json_object(path, "configuration", most=MAXIMUM_CONFIG_NBYTES)
    for one in (found, found.get("text_config")):
        if isinstance(one, dict) and dtype:
            for key in OF_CONFIG:
                one.pop(key, None)
            for key in ("dtype", "torch_dtype"):
                if key in one:
                    one[key] = dtype
        if isinstance(one, dict):
            one.update((key, value) for key, value in settings.items() if one is found or key in one)
    if dtype and not {"dtype", "torch_dtype"} & found.keys():
        found["torch_dtype"] = dtype
    return json.dumps(found, indent=2).encode() + b"\n"


def _read(slot: Slot) -> Array:
    with Sources() as sources:
        return read_extent(slot, slot.whole, sources)


def _seen_as(slot: Slot, dtype: str) -> Slot:
    """Return the bytes of a slot of one span as elements of a byte."""
    [span] = slot.spans
    return Slot.at(span.path, span.offset, dtype, (*slot.shape[:-1], slot.shape[-1] * itemsize(slot.dtype)), WEIGHT)


class _Model:
    """The codes of one model: its tensors by name, its settings, and the names that go with codes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.named
        self.slots = {one.name: one.weight for one in checkpoint.tensors() if one.weight}
        config, self.settings = settings_of(checkpoint)
        stated = config.get("dtype", config.get("torch_dtype"))
        self.dtype = stated if stated in _FLOATS else "float32"
        self.elsewhere = [
            key for key, one in self.settings.items() if dict_of(one) and f"{key}.scales" not in self.slots
        ]
        self.used: set[str] = set()
        is_of_gpt2 = any(one.get("model_type") in _OF_CONV1D for one in (config, *map(dict_of, config.values())))
        self.has_conv1d = is_of_gpt2 and self.settings.get("quant_method") in ("bitsandbytes", "gptq", "auto-round")

    def refuse_what_inputs_get(self) -> None:
        """Raise UnsupportedError if inputs of a layer are scaled (AWQ, SmoothQuant) or rotated before it is applied."""
        found = [name for name in self.slots if name.endswith((".act.scales", ".pre_quant_scale"))]
        groups = dict_of(dict_of(self.settings.get("transform_config")).get("config_groups"))
        for name, group in groups.items():
            applied = dict_of(group).get("apply", [])
            places = [dict_of(one).get("location") for one in applied] if isinstance(applied, list) else [None]
            if any(one not in ("weight_input", "weight_output") for one in places):
                found.append(f"transform_config {name}")
        if self.settings.get("rotation_config"):
            found.append("rotation_config")
        self._refuse(found)

    def refuse_what_else_modules_have(self, plain: Iterable[str]) -> None:
        """Raise UnsupportedError if modules that had codes have something else of their own: an order, a rotation."""
        modules = {name.rpartition(".")[0] for name in plain if f".{name}".endswith(".weight")}
        self._refuse(
            [name for name in self.slots.keys() - self.used
             if not name.endswith(("weight", "bias")) and name.rpartition(".")[0] in modules]
        )  # fmt: skip

    def _refuse(self, found: list[str]) -> None:
        if found:
            raise UnsupportedError(
                f"{listed(sorted(found))}: changes what a layer computes with, which no plain model does",
                path=self.path,
                expected="codes and scales alone",
                advice="dequantise it with the program that made it",
            )

    def as_it_lies(self, plain: Plain | None) -> Plain | None:
        """Return numbers as the plain model has them: transformers' Conv1D as (in, out), of codes as (out, in)."""
        if plain is None or not self.has_conv1d or not _CONV1D.fullmatch(plain[0]) or len(plain[1].shape) != 2:
            return plain
        name, slot = plain
        return name, Computed(WEIGHT, slot.dtype, slot.shape[::-1], (), function=scaled.turned(slot))

    def get(self, name: str) -> Slot | None:
        """Return a tensor that goes with codes, and is gone with them."""
        if name in self.slots:
            self.used.add(name)
        return self.slots.get(name)

    def floats(self, name: str) -> Plain | None:
        """Return the name and the slot of what codes stand for; None of a kind that is not known."""
        slot = self.slots[name]
        module = name.rpartition(".")[0]
        of = f"{module}." if module else ""
        kinds: tuple[Callable[[str, str, Slot], Plain | None], ...] = (
            self._bitsandbytes, self._fp8, self._int8, self._experts, self._fp4, self._words, self._columns, self._mlx,
        )  # fmt: skip
        found = first_of(kind(name, of, slot) for kind in kinds)
        if found is not None and found[0].startswith(of) and found[0].endswith(".weight"):
            for beside in _BESIDE:
                self.get(of + beside)
        return found

    def _made(self, shape: Shape, function: Function, dtype: str) -> Slot:
        own = dtype if dtype in ("bfloat16", "float16") else self.dtype
        return Computed(WEIGHT, own, shape, (), function=function)

    def _fp8(self, name: str, of: str, slot: Slot) -> Plain | None:
        names = (
            f"{name}_scale_inv",
            f"{name}_scale",
            *(of + one for one in ("scale_weight", "scale", "qscale_weight")),
        )
        scale = None if name in names else first_of(map(self.get, names))
        integers = slot.dtype == "int8" and self.settings.get("quant_method") == "compressed-tensors"
        if scale is None or not (integers or slot.dtype.startswith("float8_e")) or len(slot.shape) < 2:
            return None
        if scale.dtype not in (*_FLOATS, "uint8", "float8_e8m0fnu"):
            return None
        block, zero = self._block(name, slot.shape, scale), self.get(f"{of}weight_zero_point")
        if zero is not None and (not integers or zero.shape != scale.shape or zero.dtype != "int8"):
            return None
        dtype = scale.dtype if scale.dtype in ("bfloat16", "float16") else "float32"
        if scale.dtype == "uint8" and self.settings.get("quant_method") == "compressed-tensors":
            dtype = "bfloat16"
        columns = slot.shape[-1]
        grid = [(one, "float32" if is_floating(one.dtype) else one.dtype) for one in (scale, zero) if one is not None]
        codes = Part(slot, width=columns, dtype=slot.dtype)
        values = partial(scaled.multiplied, columns=columns, block=block, dtype=dtype)
        if scale.numel == 1:
            function = matrices(slot.shape, (codes,), values, shared=tuple(whole(*one) for one in grid))
        else:
            width = -(-columns // block[1])
            parts = codes, *(Part(one, block[0], width, dtype) for one, dtype in grid)
            function = matrices(slot.shape, parts, values)
        return name, self._made(slot.shape, function, dtype)

    def _block(self, name: str, shape: Shape, scale: Slot) -> tuple[int, int]:
        """Return the rows and columns that a scale is of."""
        *stack, rows, columns = shape
        if scale.numel == 1:
            return rows, columns
        if scale.shape in ((*stack, rows, 1), (rows,)):
            return 1, columns
        every = [one for group in self._groups() if (one := group.get("block_structure"))]
        every = every or [self.settings.get("weight_block_size") or [128, 128]]
        of_modelopt = len(scale.shape) == len(shape) + 2 and scale.shape[-3::2] == (1, 1)
        grid = scale.shape[-4::2] if of_modelopt else scale.shape
        pairs = (one for one in every if isinstance(one, list) and len(one) == 2 and are_sizes(one) and all(one))
        fitting = {
            (max(min(high, rows), 1), max(min(wide, columns), 1))  # of one block, whatever its size
            for high, wide in pairs
            if grid == (*stack, -(-rows // high), -(-columns // wide))
        }
        if len(fitting) == 1:
            return fitting.pop()
        if not fitting and scale.shape[:-1] == (*stack, rows) and scale.numel and not columns % scale.shape[-1]:
            return 1, columns // scale.shape[-1]
        raise (UnsupportedError if fitting else DamagedFileError)(
            f"{name}: its scales {'may be of several' if fitting else 'do not fit any'} blocks", path=self.path,
            expected=f"one scale for each {' or '.join(map(str, every))} of {shape}", found=scale.shape,
        )  # fmt: skip

    def _groups(self) -> list[Mapping[str, Any]]:
        """Return how compressed-tensors quantises weights, of each group of modules."""
        groups = self.settings.get("config_groups")
        every = dict_of(groups).values()
        return [one["weights"] for one in every if isinstance(one, dict) and isinstance(one.get("weights"), dict)]

    def _int8(self, name: str, of: str, slot: Slot) -> Plain | None:
        scale = self.get(f"{of}SCB")
        if scale is None or slot.dtype != "int8" or scale.shape != slot.shape[:1] or len(slot.shape) != 2:
            return None
        function = matrices(slot.shape, (Part(slot, width=slot.shape[1], dtype="int8"), Part(scale)), scaled.of_int8)
        return name, self._made(slot.shape, function, "float32")

    def _experts(self, name: str, _of: str, slot: Slot) -> Plain | None:
        scale = self.get(f"{name.removesuffix('_blocks')}_scales")
        if scale is None or slot.shape[:-1] != scale.shape or slot.shape[-1] != 16 or len(slot.shape) != 4:
            return None
        if {slot.dtype, scale.dtype} != {"uint8"}:
            return None
        experts, columns, count, _ = slot.shape
        shape = (experts, 32 * count, columns)
        parts = (
            Part(transpose(slot, (0, 2, 1, 3)), 32, columns * 16, "uint8"),
            Part(transpose(scale, (0, 2, 1)), 32, columns, "uint8"),
        )
        function = matrices(shape, parts, partial(scaled.of_experts, columns=columns), least=128)
        return name.removesuffix("_blocks"), self._made(shape, function, "float32")

    def _fp4(self, name: str, of: str, slot: Slot) -> Plain | None:
        beside = {"uint8": ("weight_scale",), "int8": ("scale", "weight_scale_inv")}.get(slot.dtype, ())  # DeepSeek's
        scale = first_of(self.get(of + one) for one in beside)
        if scale is None or len(slot.shape) != 2 or not name.endswith((".weight", ".weight_packed")):
            return None
        packed = name.endswith("_packed")
        shape = slot.shape[0], 2 * slot.shape[1]
        once = self.get(f"{of}weight_global_scale" if packed else f"{of}weight_scale_2")
        size, types = (32, ("uint8", "float8_e8m0fnu")) if once is None else (16, ("float8_e4m3fn",))
        if scale.shape != (shape[0], shape[1] // size) or shape[1] % size:
            return None
        if scale.dtype not in types or (once is not None and once.numel != 1):
            return None
        dtype = "bfloat16" if packed else "float32"
        divides = None if once is None else packed
        parts = tuple(Part(one, width=one.shape[1], dtype=one.dtype) for one in (slot, scale))
        values = partial(scaled.of_fp4, block=size, dtype=dtype, divides=divides)
        function = matrices(shape, parts, values, shared=() if once is None else (whole(once),))
        return f"{of}weight", self._made(shape, function, dtype)

    def _words(self, name: str, of: str, slot: Slot) -> Plain | None:
        scale, stated = self.get(f"{of}weight_scale"), self.get(f"{of}weight_shape")
        if scale is None or stated is None or slot.dtype != "int32":
            return None
        is_said = (stated.shape, stated.dtype[:3]) == ((2,), "int")
        if not is_said or not scale.numel or len(scale.shape) != 2 or scale.dtype not in _FLOATS:
            return None
        if not name.endswith("weight_packed"):
            return None
        rows, columns = (int(one) for one in _read(stated))
        stated_bits = (n for one in self._groups() if type(n := one.get("num_bits")) is int and 1 <= n <= 8)
        bits = {n for n in stated_bits if slot.shape == (rows, -(-columns * n // 32))}
        if len(bits) != 1 or scale.shape[0] != rows:
            return None
        [count] = bits
        groups, zero = scale.shape[-1], self.get(f"{of}weight_zero_point")
        wanted = "int32", (-(-rows * count // 32), groups)
        if columns % groups or (zero is not None and (zero.dtype, zero.shape) != wanted):
            return None
        codes = Part(slot, width=slot.shape[1], dtype="int32")
        return self._integers(of, (rows, columns), count, codes, scale, zero, groups=columns // groups)

    def _columns(self, name: str, of: str, slot: Slot) -> Plain | None:
        """Return what GPTQ and AWQ keep as (in, out), with zeros beside it."""
        scale, zero, order = self.get(f"{of}scales"), self.get(f"{of}qzeros"), self.get(f"{of}g_idx")
        told, method = dict(self.settings), self.settings.get("quant_method")
        if method == "auto-round":  # none of its modules has other bits, unless it is no code
            others = [dict_of(one) for one in dict_of(told.get("extra_config")).values()]
            if all(one.get("bits") == 16 for one in others):
                method, told["format"] = _OF_AUTO_ROUND.get(str(told.get("packing_format")), (None, None))
        kind = told.get("version") or told.get("checkpoint_format") or told.get("format")
        kinds = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"gemm": 0}}.get(str(method), {})  # what is added to zeros
        offset = kinds.get(str(kind).lower() if kind else next(iter(kinds), ""))
        bits, size = told.get("bits"), told.get("group_size")
        if type(bits) is not int or type(size) is not int:
            return None
        if offset is None or name != f"{of}qweight" or scale is None or zero is None or scale.dtype not in _FLOATS:
            return None
        if bits not in ((4,) if method == "awq" else (2, 3, 4, 8)) or told.get("dynamic"):
            return None
        if len(scale.shape) != 2 or not slot.numel:
            return None
        groups, rows = scale.shape
        across = method == "awq"
        columns = slot.shape[0] if across else slot.shape[0] * 32 // bits
        shape = (columns, rows * bits // 32) if across else (-(-columns * bits // 32), rows)
        size = columns if size < 1 else size
        wanted = shape, (-(-columns // size), rows * bits // 32)
        if (slot.shape, zero.shape) != wanted or groups != wanted[1][0] or {slot.dtype, zero.dtype} != {"int32"}:
            raise DamagedFileError(
                f"{name}: codes, scales and zeros do not fit together", path=self.path,
                expected=f"{wanted} in groups of {size}", found=f"{slot.shape}, {zero.shape} and {scale.shape}",
            )  # fmt: skip
        which: Array | int = size
        if order is not None:
            found = _read(order)
            if order.shape != (columns,) or found.min() < 0 or found.max() >= groups:
                raise DamagedFileError(
                    f"{of}g_idx: does not state the group of each column", path=self.path,
                    expected=f"{columns} numbers below {groups}", found=f"{order.shape}, up to {found.max()}",
                )  # fmt: skip
            which = size if (found == np.arange(columns) // size).all() else found.astype(np.intp)
        turned = transpose(slot, (1, 0))
        codes = Part(turned, 32, 4 * columns, "int32") if across else Part(turned, width=slot.shape[0], dtype="int32")
        return self._integers(
            of, (rows, columns), bits, codes, transpose(scale, (1, 0)), transpose(zero, (1, 0)),
            groups=which, layout=str(method), offset=offset,
        )  # fmt: skip

    def _mlx(self, name: str, of: str, slot: Slot) -> Plain | None:
        """Return what MLX keeps in words of rows, as is said of all modules or of one; or transformers for Metal."""
        told, module = dict_of(self.settings.get(of[:-1])) or self.settings, f".{of[:-1]}"
        alike = [one for one in self.elsewhere if module.endswith(f".{one}") or f".{one}".endswith(module)]
        if told is self.settings and alike:
            raise UnsupportedError(
                f"{name}: what is said of {listed(alike)} may be of it", path=self.path,
                expected="settings under the names that modules have", advice="rename them in config.json",
            )  # fmt: skip
        mode, bits, size = str(told.get("mode", "affine")), told.get("bits"), told.get("group_size")
        scale, bias = self.get(f"{of}scales"), first_of(self.get(of + one) for one in ("biases", "qbiases"))
        if slot.dtype != "uint32" or scale is None or type(bits) is not int or type(size) is not int:
            return None
        method = self.settings.get("quant_method")
        is_metal = method == "metal"
        if method not in ("mlx", "metal") or told.get("global_scale"):
            return None
        if not 1 <= bits <= 8 or size < 1 or (is_metal and 32 % bits):
            return None
        columns = slot.shape[-1] * 32 // bits
        shape = *slot.shape[:-1], columns
        if scale.shape != (*shape[:-1], columns // size) or columns % size:
            raise DamagedFileError(
                f"{name}: codes and scales do not fit together", path=self.path,
                expected=f"{columns // size} scales of {size} columns in {bits} bits for each row", found=scale.shape,
            )  # fmt: skip
        if mode == "affine" and bias is not None and (bias.shape, bias.dtype) == (scale.shape, scale.dtype):
            every, dtype = [(slot, slot.dtype), (scale, "float32"), (bias, "float32")], scale.dtype
            values = partial(scaled.of_groups, bits=bits, dtype=dtype, is_rounded_once=is_metal)
        elif (mode, bits, size, scale.dtype) in _OF_MLX and len(slot.spans) == len(scale.spans) == 1:
            kinds, dtype = _OF_MLX[mode, bits, size, "uint8"], "bfloat16"
            every = [(_seen_as(one, kind), kind) for one, kind in zip((slot, scale), kinds, strict=True)]
            values = partial(scaled.of_fp4, block=size, dtype=dtype, divides=None)
            if mode == "mxfp8":
                values = partial(scaled.multiplied, columns=columns, block=(1, size), dtype=dtype)
        else:
            return None
        parts = [Part(one, width=one.shape[-1], dtype=kind) for one, kind in every]
        return name, self._made(shape, matrices(shape, parts, values), dtype)

    def _integers(
        self, of: str, shape: Shape, bits: int, codes: Part, scale: Slot, zero: Slot | None,
        *, groups: Array | int, layout: str = "", offset: int = 0,
    ) -> tuple[str, Slot]:  # fmt: skip
        """Return packed integers, of scales and zeros for each group of columns; zeros lie across rows."""
        width, dtype, name = scale.shape[1], scale.dtype, f"{of}weight"
        parts = [codes, Part(scale, width=width)]
        parts += [] if zero is None else [Part(zero, 32, bits * width, "int32")]
        values = partial(
            scaled.of_integers, columns=shape[1], bits=bits, dtype=dtype, groups=groups, layout=layout, offset=offset,
            what=f"{name} in {self.path}",
        )  # fmt: skip
        return name, self._made(shape, matrices(shape, parts, values, least=128), dtype)

    def _quant_state(self, name: str, state: Slot) -> tuple[Shape, int, str, int, float]:
        """Return shape, block, element type, block of scales that are codes, and offset of these."""
        try:
            told = json.loads(bytes(_read(state)))
            shape, block, nested = tuple(told["shape"]), told["blocksize"], told.get("nested_blocksize", 1)
            offset, dtype = float(told.get("nested_offset", 0)), str(told["dtype"])
            is_one = all(type(one) is int and 0 < one <= MAX_ELEMENTS for one in (*shape, block, nested))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            is_one = False
        if not is_one:
            expected = "shape, blocksize and dtype"
            raise DamagedFileError(f"{name}: its quant_state is unreadable", path=self.path, expected=expected)
        return shape, block, dtype, nested, offset

    def _bitsandbytes(self, name: str, _of: str, slot: Slot) -> Plain | None:
        state = first_of(self.get(f"{name}.quant_state.bitsandbytes__{kind}") for kind in ("nf4", "fp4"))
        scale, qmap = self.get(f"{name}.absmax"), self.get(f"{name}.quant_map")
        if state is None or scale is None or qmap is None:
            return None
        shape, block, dtype, nested_block, offset = self._quant_state(name, state)
        numel = math.prod(shape)
        if dtype not in _FLOATS or qmap.shape != (16,) or -(-numel // block) != scale.numel:
            return None
        if -(-numel // 2) > slot.nbytes or len(slot.spans) != 1:
            return None
        [span] = slot.spans
        codes = Slot.at(span.path, span.offset, "uint8", (slot.nbytes,), WEIGHT)
        block = min(block, numel)  # scales are repeated so often
        nested, nested_map = self.get(f"{name}.nested_absmax"), self.get(f"{name}.nested_quant_map")
        if scale.dtype == "uint8":
            if nested is None or nested_map is None or -(-scale.numel // nested_block) != nested.numel:
                return None
            if nested_map.shape != (256,):
                return None
            every = coded(scale, nested, min(nested_block, scale.numel), nested_map, offset=offset)
            scale = Computed("absmax", "float32", scale.shape, (), function=alone(scale.numel, *every))
        function = alone(numel, *coded(codes, scale, block, qmap, halves=True, dtype=dtype))
        return name, self._made(shape, function, dtype)
