"""Weights of a few bits as the numbers that they stand for, and the model's config.json without its quantisation.

FP8            float32(code) x scale of its block, row or tensor; compressed-tensors rounds to the type of its scales
bitsandbytes   nf4, fp4: map[code] x scale of its block, whose scales may be codes again, plus an offset; int8: rows
gpt-oss        MXFP4: e2m1 x 2 ^ (scale - 127), and (experts, in, out) as in the live model
NVFP4, MXFP4   e2m1 x scale of its 16 or 32 columns; NVFP4 has another scale for the whole tensor
packed         compressed-tensors' integers of up to 8 bits, without zeros

Values are bit-equal to those of bitsandbytes 0.50, compressed-tensors 0.20 and transformers 5.23 on a CPU; of block FP8
to DeepSeek's formula, also where the last block of a row or column is not whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zckpt.engine import scaled
from zckpt.engine.computed import Computed, Function
from zckpt.engine.copy import read_extent
from zckpt.engine.scaled import Part, alone, coded, matrices, whole
from zckpt.errors import DamagedFileError, UnsupportedError, listed
from zckpt.formats.low_bit import codes_in, settings_of
from zckpt.state import WEIGHT, Checkpoint, Parameter, Shape, Slot, Span
from zckpt.state.dtypes import is_floating
from zckpt.state.spans import Extent
from zckpt.state.views import transpose
from zckpt.storage.files import Sources

_BESIDE = (
    "weight_scale_inv", "weight_scale", "scale_weight", "weight_scale_2", "weight_global_scale", "weight_shape",
    "input_scale", "activation_scale", "input_global_scale", "input_scale_ub", "SCB", "weight_format",
)  # fmt: skip
"""What modules have besides codes, and plain ones have not."""

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)

_FLOATS = ("float32", "bfloat16", "float16")


def weights_as_floats(checkpoint: AnyCheckpoint) -> AnyCheckpoint:
    """Return a checkpoint with numbers in the place of codes, under the names that a plain model has.

    Raises UnsupportedError: codes that are packed or scaled in a way that is not known; DamagedFileError: codes and
    scales do not belong together.
    """
    codes = codes_in(checkpoint)
    if not codes:
        return checkpoint
    work = _Model(checkpoint)
    made = {name: work.floats(name) for name in codes}
    unknown = [name for name, found in made.items() if found is None and name not in work.used]
    if unknown:
        raise UnsupportedError(
            f"{listed(unknown)}: codes of few bits of a kind that is not dequantised",
            path=checkpoint.named,
            expected="FP8, bitsandbytes' nf4, fp4 and int8, MXFP4, NVFP4, or compressed-tensors' packed integers "
            "without zeros",
            found=work.settings.get("quant_method"),
            advice="dequantise it with the program that made it",
        )
    plain = {name: Parameter.of(*found) for name, found in made.items() if found is not None}
    parameters = {
        each.name: each
        for one in checkpoint.tensors()
        if one.name in plain or (one.name in checkpoint.parameters and one.name not in work.used)
        for each in (plain.get(one.name, one),)
    }
    buffers = {name: one for name, one in checkpoint.buffers.items() if name not in work.used and name not in plain}
    return replace(checkpoint, parameters=parameters, buffers=buffers)


def plain_config(path: Path, dtype: str | None, settings: Mapping[str, object]) -> bytes:
    """Return a model's config.json with other settings; without its quantisation, of the type that its weights have."""
    found = json.loads(path.read_bytes())
    for one in (found, found.get("text_config")):
        if isinstance(one, dict) and dtype:
            for key in ("quantization_config", "compression_config"):
                one.pop(key, None)
            for key in ("dtype", "torch_dtype"):
                if key in one:
                    one[key] = dtype
        if isinstance(one, dict):
            one.update((key, value) for key, value in settings.items() if one is found or key in one)
    if dtype and not {"dtype", "torch_dtype"} & found.keys():
        found["torch_dtype"] = dtype
    return json.dumps(found, indent=2).encode() + b"\n"


class _Model:
    """The codes of one model: its tensors by name, its settings, and the names that go with codes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.named
        self.slots = {one.name: one.slots[WEIGHT] for one in checkpoint.tensors() if WEIGHT in one.slots}
        config, self.settings = settings_of(checkpoint)
        stated = config.get("dtype", config.get("torch_dtype"))
        self.dtype = stated if stated in _FLOATS else "float32"
        self.used: set[str] = set()

    def get(self, name: str) -> Slot | None:
        """Return a tensor that goes with codes, and is gone with them."""
        if name in self.slots:
            self.used.add(name)
        return self.slots.get(name)

    def floats(self, name: str) -> tuple[str, Slot] | None:
        """Return the name and the slot of what codes stand for; None of a kind that is not known."""
        slot = self.slots[name]
        module = name.rpartition(".")[0]
        of = f"{module}." if module else ""
        kinds: tuple[Callable[[str, str, Slot], tuple[str, Slot] | None], ...] = (
            self._bitsandbytes, self._fp8, self._int8, self._experts, self._fp4, self._words,
        )  # fmt: skip
        found = next((one for kind in kinds if (one := kind(name, of, slot)) is not None), None)
        if found is not None and found[0].startswith(of) and found[0].endswith(".weight"):
            for beside in _BESIDE:
                self.get(of + beside)
        return found

    def _made(self, shape: Shape, function: Function, dtype: str) -> Slot:
        own = dtype if dtype in ("bfloat16", "float16") else self.dtype
        return Computed(WEIGHT, own, shape, (), function=function)

    def _fp8(self, name: str, of: str, slot: Slot) -> tuple[str, Slot] | None:
        names = (
            f"{name}_scale_inv",
            f"{name}_scale",
            *(of + one for one in ("scale_weight", "scale", "qscale_weight")),
        )
        scale = next((found for one in names if (found := self.get(one)) is not None), None)
        integers = slot.dtype == "int8" and self.settings.get("quant_method") == "compressed-tensors"
        if scale is None or not (integers or slot.dtype.startswith("float8_e")) or len(slot.shape) < 2:
            return None
        if not is_floating(scale.dtype) or f"{of}weight_zero_point" in self.slots:
            return None
        if scale.dtype.startswith("float8") and scale.dtype != "float8_e8m0fnu":
            return None
        block = self._block(name, slot.shape, scale)
        dtype = scale.dtype if scale.dtype in ("bfloat16", "float16") else "float32"
        columns = slot.shape[-1]
        codes = Part(slot, width=columns, dtype=slot.dtype if integers else "float32")
        values = partial(scaled.multiplied, columns=columns, block=block, dtype=dtype)
        if scale.numel == 1:
            function = matrices(slot.shape, (codes,), values, shared=(whole(scale),))
        else:
            function = matrices(slot.shape, (codes, Part(scale, block[0], -(-columns // block[1]))), values)
        return name, self._made(slot.shape, function, dtype)

    def _block(self, name: str, shape: Shape, scale: Slot) -> tuple[int, int]:
        """Return the rows and columns that a scale is of."""
        *stack, rows, columns = shape
        if scale.numel == 1:
            return rows, columns
        if scale.shape in ((*stack, rows, 1), (rows,)):
            return 1, columns
        stated = self.settings.get("weight_block_size") or [128, 128]
        for group in self._groups():
            stated = group.get("block_structure") or stated
        if isinstance(stated, list) and len(stated) == 2 and all(type(one) is int and one > 0 for one in stated):
            expected = (*stack, -(-rows // stated[0]), -(-columns // stated[1]))
            if scale.shape == expected:
                return stated[0], stated[1]
        if scale.shape[:-1] == (*stack, rows) and not columns % scale.shape[-1]:
            return 1, columns // scale.shape[-1]
        raise DamagedFileError(
            f"{name}: its scales fit no blocks", path=self.path, expected=f"one for each {stated} of {shape}",
            found=scale.shape,
        )  # fmt: skip

    def _groups(self) -> list[Mapping[str, Any]]:
        """Return how compressed-tensors quantises weights, of each group of modules."""
        groups = self.settings.get("config_groups")
        every = groups.values() if isinstance(groups, dict) else ()
        return [one["weights"] for one in every if isinstance(one, dict) and isinstance(one.get("weights"), dict)]

    def _int8(self, name: str, of: str, slot: Slot) -> tuple[str, Slot] | None:
        scale = self.get(f"{of}SCB")
        if scale is None or slot.dtype != "int8" or scale.shape != slot.shape[:1] or len(slot.shape) != 2:
            return None
        function = matrices(slot.shape, (Part(slot, width=slot.shape[1], dtype="int8"), Part(scale)), scaled.of_int8)
        return name, self._made(slot.shape, function, "float32")

    def _experts(self, name: str, _of: str, slot: Slot) -> tuple[str, Slot] | None:
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

    def _fp4(self, name: str, of: str, slot: Slot) -> tuple[str, Slot] | None:
        scale = self.get(f"{of}weight_scale")
        if (
            scale is None
            or slot.dtype != "uint8"
            or len(slot.shape) != 2
            or not name.endswith((".weight", ".weight_packed"))
        ):
            return None
        packed = name.endswith("_packed")
        shape = slot.shape[0], 2 * slot.shape[1]
        once = self.get(f"{of}weight_global_scale" if packed else f"{of}weight_scale_2")
        size = 32 if once is None else 16
        if scale.shape != (shape[0], shape[1] // size) or shape[1] % size:
            return None
        if (once is None) != (scale.dtype == "uint8") or (
            once is not None and (scale.dtype != "float8_e4m3fn" or once.numel != 1)
        ):
            return None
        dtype = "bfloat16" if packed else "float32"
        divides = None if once is None else packed
        read = "uint8" if once is None else "float32"
        parts = Part(slot, width=slot.shape[1], dtype="uint8"), Part(scale, width=scale.shape[1], dtype=read)
        values = partial(scaled.of_fp4, block=size, dtype=dtype, divides=divides)
        function = matrices(shape, parts, values, shared=() if once is None else (whole(once),))
        return f"{of}weight", self._made(shape, function, dtype)

    def _words(self, name: str, of: str, slot: Slot) -> tuple[str, Slot] | None:
        scale, stated = self.get(f"{of}weight_scale"), self.get(f"{of}weight_shape")
        bits = {one.get("num_bits") for one in self._groups()}
        if (
            scale is None
            or stated is None
            or slot.dtype != "int32"
            or len(bits) != 1
            or f"{of}weight_zero_point" in self.slots
        ):
            return None
        if f"{of}weight_g_idx" in self.slots or not name.endswith("weight_packed") or scale.dtype not in _FLOATS:
            return None
        count = bits.pop()
        with Sources() as sources:
            rows, columns = (int(one) for one in read_extent(stated, stated.whole, sources))
        if type(count) is not int or slot.shape != (rows, -(-columns * count // 32)) or scale.shape[0] != rows:
            return None
        groups = scale.shape[-1]
        if len(scale.shape) != 2 or columns % groups:
            return None
        parts = Part(slot, width=slot.shape[1], dtype="int32"), Part(scale, width=groups)
        dtype = scale.dtype
        values = partial(scaled.of_words, columns=columns, bits=count, group=columns // groups, dtype=dtype)
        return f"{of}weight", self._made((rows, columns), matrices((rows, columns), parts, values), dtype)

    def _bitsandbytes(self, name: str, _of: str, slot: Slot) -> tuple[str, Slot] | None:
        state = next(
            (one for kind in ("nf4", "fp4") if (one := self.get(f"{name}.quant_state.bitsandbytes__{kind}"))), None
        )
        scale, qmap = self.get(f"{name}.absmax"), self.get(f"{name}.quant_map")
        if state is None or scale is None or qmap is None:
            return None
        with Sources() as sources:
            told = json.loads(bytes(read_extent(state, state.whole, sources)))
        shape, block, dtype = tuple(told["shape"]), told["blocksize"], told["dtype"]
        numel = math.prod(shape)
        if dtype not in _FLOATS or qmap.shape != (16,) or -(-numel // block) != scale.numel:
            return None
        if -(-numel // 2) > slot.nbytes or len(slot.spans) != 1:
            return None
        [span] = slot.spans
        flat = Extent.whole((slot.nbytes,))
        codes = Slot(WEIGHT, "uint8", (slot.nbytes,), (Span(flat, span.path, span.offset, "uint8"),))
        nested, nested_map = self.get(f"{name}.nested_absmax"), self.get(f"{name}.nested_quant_map")
        if scale.dtype == "uint8":
            if nested is None or nested_map is None or -(-scale.numel // told["nested_blocksize"]) != nested.numel:
                return None
            every = coded(scale, nested, told["nested_blocksize"], nested_map, offset=told["nested_offset"])
            scale = Computed("absmax", "float32", scale.shape, (), function=alone(scale.numel, *every))
        function = alone(numel, *coded(codes, scale, block, qmap, halves=True, dtype=dtype))
        return name, self._made(shape, function, dtype)
