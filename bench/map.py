"""Time `zckpt consolidate --map` on a Llama against a plain copy of as many bytes.

    python bench/map.py [--repeat N] [--work DIR] [--layers N] [--cold]

A model of Hugging Face's names (600 MB of float32 with 9 layers) is made once below --work, and mapped to Meta's names,
where the rows of queries and keys are in another order, to Megatron-Core's, where three tensors are one, and back. The
page cache is warm, all memory has been used before (unless --cold), the commands take turns, and medians count. Exit 1
if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

from contest import BLOCK, Target, Timing, clear, make_source, paired, run, table, touch_memory, verdict

COPY_RATIO = 1.3  # consolidate --map / (cp + sync), at most
MEMORY_MB = 150.0

HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 1024, 2816, 16, 4, 32000
CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY + 256,
}  # fmt: skip
SHORT = {"llama-huggingface-meta": "to Meta", "llama-huggingface-megatron": "to Megatron"}


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors by Hugging Face's names."""
    groups = GROUPS * HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        found |= {
            f"{start}self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{start}self_attn.k_proj.weight": (groups, HIDDEN),
            f"{start}self_attn.v_proj.weight": (groups, HIDDEN), f"{start}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{start}mlp.gate_proj.weight": (FFN, HIDDEN), f"{start}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{start}mlp.down_proj.weight": (HIDDEN, FFN), f"{start}input_layernorm.weight": (HIDDEN,),
            f"{start}post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_model(folder: Path, layers: int) -> Path:
    """Write the model with random bytes, unless it is there."""
    path = folder / f"llama{layers}" / "model.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    header, at = {}, 0
    for name, shape in tensors(layers).items():
        nbytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at:
            at -= file.write(os.urandom(min(at, BLOCK)))
    partial.rename(path)
    return path


def main() -> None:
    """Measure, print a table, and exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "zckpt-bench-map")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="do not use all memory once before")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = make_model(options.work, options.layers)
    source, copied = options.work / "source.bin", options.work / "copied.bin"

    def consolidate(given: Path, target: str, *more: str) -> list[str]:
        program = [sys.executable, "-m", "zckpt", "consolidate", str(given), str(options.work / target)]
        return [*program, "--quiet", "--overwrite", *more]

    config = ("--map-config", str(model.parent / "config.json"))
    contest = {
        "cp + sync": ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(source), str(copied)],
        "consolidate": consolidate(model, "plain.safetensors"),
    }
    targets = {"cp + sync": copied, "consolidate": options.work / "plain.safetensors"}
    for name, short in SHORT.items():
        there, back = f"{name}.safetensors", f"{name}-back.safetensors"
        contest[short] = consolidate(model, there, "--map", name, *config)
        contest[f"{short}, back"] = consolidate(options.work / there, back, "--map", name, *config)
        targets |= {short: options.work / there, f"{short}, back": options.work / back}
    make_source(source, model.stat().st_size)
    if not options.cold:
        touch_memory()
    for command in contest.values():
        run(command)
    for name in SHORT:
        back = options.work / f"{name}-back.safetensors"
        run([sys.executable, "-m", "zckpt", "diff", str(model), str(back), "--quiet"])
    timings = {name: Timing() for name in contest}
    for turn in range(options.repeat):
        print(f"turn {turn + 1} of {options.repeat}", file=sys.stderr)
        for name in list(contest)[:: 1 if turn % 2 else -1]:
            clear(targets[name])
            run(contest[name], timings[name])
    print(table(timings, "cp + sync"))
    for name, timing in timings.items():
        print(f"CPU, median: {sorted(timing.cpu)[len(timing.cpu) // 2]:.2f} s  {name}")
    judged = []
    for name in contest:
        if name not in ("cp + sync", "consolidate"):
            judged.append(Target(f"{name} / cp + sync", paired(timings[name], timings["cp + sync"]), COPY_RATIO))
            judged.append(Target(f"{name}, peak MB", timings[name].peak, MEMORY_MB))
    print(verdict(judged))
    sys.exit(0 if all(one.holds for one in judged) else 1)


if __name__ == "__main__":
    main()
