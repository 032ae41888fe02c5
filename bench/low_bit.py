"""Time `zckpt consolidate --dequantize` of weights in few bits, and `--quantize fp8-block`, against a plain copy.

    python bench/low_bit.py [--repeat N] [--work DIR] [--layers N] [--only KIND ...] [--cold]

A model of 32 matrices of 4096 x 4096 is made once for each kind below --work, with random codes. What is written has
1.07 GB in bfloat16, in block FP8 half of that. Held against `cp` and `sync` of what is written; of `--quantize`, which
reads twice as much as it writes, also of what is read. The page cache is warm, all memory has been used before (unless
--cold), the commands take turns, and medians count. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from contest import HERE, Target, Timing, clear, paired, run, table, touch_memory, verdict

COPY_RATIO = 1.3  # consolidate / (cp + sync) of what is written, at most
MEMORY_MB = 150.0

SIZE = 4096
GROUP = 128

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name, type, shape, and bytes that are repeated."""

_RANDOM = random.Random(0)
ANY = _RANDOM.randbytes(1 << 20)
NUMBERS = ANY.translate(bytes(0x7E if one & 0x7F == 0x7F else one for one in range(256)))  # no NaN of e4m3


def floats(kind: str, low: float, high: float) -> bytes:
    """Return numbers between two, as `struct` packs them."""
    return b"".join(struct.pack(f"<{kind}", _RANDOM.uniform(low, high)) for _ in range(1 << 12))


def between(low: int, high: int) -> bytes:
    """Return bytes between two."""
    return bytes(_RANDOM.randint(low, high) for _ in range(1 << 12))


WEIGHTS = floats("f", -0.1, 0.1)
BFLOATS = b"".join(WEIGHTS[at : at + 2] for at in range(2, len(WEIGHTS), 4))  # its upper halves
LINEAR = "model.layers.{}.mlp.up_proj."


def fp8_block(layer: int) -> Tensors:
    """Return a matrix as DeepSeek's releases have it."""
    name = LINEAR.format(layer)
    scales = ("F32", [SIZE // GROUP] * 2, floats("f", 1e-4, 1e-3))
    return {f"{name}weight": ("F8_E4M3", [SIZE, SIZE], NUMBERS), f"{name}weight_scale_inv": scales}


def fp8_rows(layer: int) -> Tensors:
    """Return a matrix with a scale for each row."""
    name = LINEAR.format(layer)
    scales = ("BF16", [SIZE, 1], BFLOATS)
    return {f"{name}weight": ("F8_E4M3", [SIZE, SIZE], NUMBERS), f"{name}weight_scale": scales}


def mxfp4(layer: int) -> Tensors:
    """Return two experts of gpt-oss."""
    name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
    shape = [2, SIZE // 2, SIZE // 32]
    return {f"{name}_blocks": ("U8", [*shape, 16], ANY), f"{name}_scales": ("U8", shape, between(110, 125))}


def nvfp4(layer: int) -> Tensors:
    """Return a matrix as compressed-tensors packs it."""
    name = LINEAR.format(layer)
    return {
        f"{name}weight_packed": ("U8", [SIZE, SIZE // 2], ANY),
        f"{name}weight_scale": ("F8_E4M3", [SIZE, SIZE // 16], between(0x40, 0x7E)),
        f"{name}weight_global_scale": ("F32", [1], struct.pack("<f", 3000)),
    }


def nf4(layer: int) -> Tensors:
    """Return a matrix of bitsandbytes' blocks of 64."""
    name, count = f"{LINEAR.format(layer)}weight", SIZE * SIZE
    stated = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [SIZE, SIZE]}
    text = json.dumps(stated).encode()
    values = b"".join(struct.pack("<f", (one - 7) / 8) for one in range(16))
    return {
        name: ("U8", [count // 2, 1], ANY),
        f"{name}.absmax": ("F32", [count // 64], floats("f", 0.01, 0.1)),
        f"{name}.quant_map": ("F32", [16], values),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", [len(text)], text),
    }


def gptq(layer: int) -> Tensors:
    """Return a matrix of 4 bits in groups of rows."""
    name, groups = LINEAR.format(layer), SIZE // GROUP
    return {
        f"{name}qweight": ("I32", [SIZE // 8, SIZE], ANY),
        f"{name}qzeros": ("I32", [groups, SIZE // 8], bytes([0x77])),
        f"{name}scales": ("F16", [groups, SIZE], floats("e", 0.001, 0.01)),
        f"{name}g_idx": ("I32", [SIZE], struct.pack(f"<{SIZE}i", *(at // GROUP for at in range(SIZE)))),
    }


def bfloat16(layer: int) -> Tensors:
    """Return a matrix of numbers."""
    return {f"{LINEAR.format(layer)}weight": ("BF16", [SIZE, SIZE], BFLOATS)}


KINDS: dict[str, tuple[Callable[[int], Tensors], dict[str, object]]] = {
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "fp8-rows": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "nvfp4": (nvfp4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}),
    "quantize": (bfloat16, {}),
}


def make(folder: Path, kind: str, layers: int) -> Path:
    """Write a model unless it is there."""
    if folder.exists():
        return folder
    unfinished = folder.with_name("low-bit.part")
    clear(unfinished)
    unfinished.mkdir(parents=True)
    tensors, settings = KINDS[kind]
    every = {name: one for layer in range(layers) for name, one in tensors(layer).items()}
    sizes = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}
    header, at = {}, 0
    for name, (dtype, shape, _) in every.items():
        nbytes = sizes[dtype]
        for size in shape:
            nbytes *= size
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}, at + nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (unfinished / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (_, _, some) in every.items():
            low, high = header[name]["data_offsets"]
            for start in range(0, high - low, len(some)):
                file.write(some[: high - low - start])
    config = {"model_type": "llama", "hidden_size": SIZE, "torch_dtype": "bfloat16"}
    config |= {"quantization_config": settings} if settings else {}
    (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(folder)
    return folder


def copy(source: Path, target: Path) -> list[str]:
    """Return a command that copies a directory anew and waits for the disk."""
    words = 'rm -rf "$2"; cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
    return ["sh", "-c", words, "sh", str(source), str(target)]


def contest(work: Path, kind: str, layers: int) -> dict[str, list[str]]:
    """Return the commands that are compared for one kind, and make what they read."""
    source = make(work / f"low-bit-{kind}-{layers}", kind, layers)
    written, out = work / f"low-bit-{kind}-written", work / "low-bit-out"
    wanted = ["--quantize", "fp8-block"] if kind == "quantize" else ["--dequantize", "--dtype", "bfloat16"]
    program = [sys.executable, "-m", "zckpt", "consolidate", str(source)]
    last = [*wanted, "--quiet"]
    run([*program, str(written), *last, "--overwrite"])
    found = {
        f"cp, {kind}": copy(written, out),
        kind: ["sh", "-c", 'rm -rf "$1"; shift; exec "$@"', "sh", str(out), *program, str(out), *last],
    }
    return found | ({"cp of what is read": copy(source, out)} if kind == "quantize" else {})


def main() -> int:
    """Measure, print the tables, and return 1 if a target is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 8 GB (default: bench/cache)")
    parser.add_argument("--layers", type=int, default=32, help="34 MB each in bfloat16 (default: 32)")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="these kinds")
    parser.add_argument("--cold", action="store_true", help="do not use all memory first")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not arguments.cold:
        touch_memory()
    targets: list[Target] = []
    for kind in arguments.only:
        commands = contest(work, kind, arguments.layers)
        timings = {name: Timing() for name in commands}
        for turn in range(arguments.repeat):
            for name in list(commands)[:: 1 if turn % 2 else -1]:
                run(commands[name], timings[name])
        clear(work / "low-bit-out", work / f"low-bit-{kind}-written")
        print(f"{table(timings, f'cp, {kind}')}\n", flush=True)
        against = timings[[*commands][0 if kind != "quantize" else 2]]
        targets += [
            Target(f"{kind} / cp", paired(timings[kind], against), COPY_RATIO),
            Target(f"{kind}, peak MB", timings[kind].peak, MEMORY_MB),
        ]
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
