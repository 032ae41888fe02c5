"""Time `zckpt average` of three models, and `zckpt merge-adapter`, against a plain copy that moves as many bytes.

    python bench/average.py [--repeat N] [--work DIR] [--layers N] [--cold]

Three models of 600 MB (150 layers), of float32 and of bfloat16, and an adapter of rank 16 for each weight are made once
below --work. A copy moves as many bytes as are read and written together: of a mean of three that is a copy of two of
them. The page cache is warm, all memory has been used before (unless --cold), the commands take turns, and medians
count. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from pathlib import Path

from contest import HERE, Target, Timing, clear, paired, run, table, touch_memory, verdict

COPY_RATIO = 1.5  # average / (cat + sync), at most
MEMORY_MB = 150.0

ROWS, COLUMNS, RANK = 1000, 1000, 16
SIZES = {"F32": 4, "BF16": 2}
NUMBERS = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f"}  # 1.0: random bytes would be NaN and numbers without sense


def make(path: Path, tensors: dict[str, tuple[int, int]], dtype: str) -> Path:
    """Write a file of safetensors, every element of which is 1, unless it is there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for name, shape in tensors.items():
        end = at + shape[0] * shape[1] * SIZES[dtype]
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            file.write(NUMBERS[dtype] * (shape[0] * shape[1]))
    return path


def make_adapter(folder: Path, names: list[str]) -> Path:
    """Write a LoRA adapter for all of some weights."""
    factors = {f"base_model.model.{name[:-7]}.lora_A.weight": (RANK, COLUMNS) for name in names}
    factors |= {f"base_model.model.{name[:-7]}.lora_B.weight": (ROWS, RANK) for name in names}
    make(folder / "adapter_model.safetensors", factors, "F32")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


def copy(target: Path, *files: Path) -> list[str]:
    """Return a command that copies files into one and waits for the disk."""
    return ["sh", "-c", 'out="$1"; shift; cat "$@" > "$out"; sync "$out"', "sh", *map(str, (target, *files))]


def contest(work: Path, layers: int, dtype: str) -> dict[str, list[str]]:
    """Return the commands that are compared for models of one type."""
    weights = {f"layers.{i}.weight": (ROWS, COLUMNS) for i in range(layers * 4 // SIZES[dtype])}
    sources = [make(work / f"average-{dtype}-{layers}-{i}.safetensors", weights, dtype) for i in range(3)]
    adapter = make_adapter(work / f"average-adapter-{dtype}-{layers}", list(weights))
    out = work / "average-out.safetensors"
    zckpt = [sys.executable, "-m", "zckpt"]
    last = ["--overwrite", "--quiet"]
    return {
        f"cp of 2, {dtype}": copy(work / "average-copy", *sources[:2]),
        f"average of 3, {dtype}": [*zckpt, "average", *map(str, sources), "--target", str(out), *last],
        f"cp of 1, {dtype}": copy(work / "average-copy", sources[0]),
        f"merge-adapter, {dtype}": [*zckpt, "merge-adapter", str(sources[0]), str(adapter), str(out), *last],
    }


def measure(contests: list[dict[str, list[str]]], work: Path, repeat: int, *, cold: bool) -> dict[str, Timing]:
    """Time all commands in turns, neither always first."""
    commands = {name: command for one in contests for name, command in one.items()}
    timings = {name: Timing() for name in commands}
    if not cold:
        touch_memory()
    try:
        for command in commands.values():
            run(command)
        for turn in range(repeat):
            print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
            for name in list(commands)[:: 1 if turn % 2 else -1]:
                run(commands[name], timings[name])
    finally:
        clear(work / "average-copy", work / "average-out.safetensors")
    return timings


def judge(timings: dict[str, Timing]) -> list[Target]:
    """Return the targets with what was measured."""
    found = []
    for dtype in SIZES:
        average, merge = timings[f"average of 3, {dtype}"], timings[f"merge-adapter, {dtype}"]
        ratio = paired(average, timings[f"cp of 2, {dtype}"])
        found += [
            Target(f"average / cp, {dtype}", ratio, COPY_RATIO),
            Target(f"average, {dtype}, peak MB", average.peak, MEMORY_MB),
            Target(f"merge-adapter, {dtype}, peak MB", merge.peak, MEMORY_MB),
        ]
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 6 GB (default: bench/cache)")
    parser.add_argument("--layers", type=int, default=150, help="4 MB each in float32 (default: 150)")
    parser.add_argument("--cold", action="store_true", help="do not use all memory first")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    contests = [contest(work, arguments.layers, dtype) for dtype in SIZES]
    timings = measure(contests, work, arguments.repeat, cold=arguments.cold)
    targets = judge(timings)
    print(f"{table(timings, 'cp of 2, F32')}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
