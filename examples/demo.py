"""The main job on a real checkpoint: inspect it, consolidate it, and hold the result against the stored truth.

Run by `make demo`. The checkpoint was written by DeepSpeed 0.19.8 (ZeRO-2, bf16, 4 ranks); the truth beside it was
gathered from the live optimizer of that run. Neither DeepSpeed nor its pickles are used.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "fixtures" / "s2_bf16_dp4"
OUTPUT = ROOT / "demo"


def run(*arguments: str | Path) -> None:
    """Run one zckpt command and show it."""
    shown = " ".join(str(a.relative_to(ROOT)) if isinstance(a, Path) else a for a in arguments)
    print(f"\n$ zckpt {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "zckpt", *map(str, arguments)], check=True)


def main() -> int:
    """Run the demonstration; return an exit status."""
    OUTPUT.mkdir(exist_ok=True)
    model, optimizer = OUTPUT / "model.safetensors", OUTPUT / "model.optimizer.safetensors"
    run("inspect", SOURCE)
    run("consolidate", SOURCE, model, "--slots", "all", "--overwrite")
    truth = load_file(SOURCE / "truth.safetensors")
    found = {f"fp32/{name}": tensor for name, tensor in load_file(model).items()} | load_file(optimizer)
    compared = [key for key in truth if key in found]
    wrong = [key for key in compared if not torch.equal(found[key], truth[key])]
    print(f"\nheld {len(compared)} tensors (masters and every optimizer slot) against the live optimizer's: ", end="")
    print(f"{len(wrong)} differ: {wrong}" if wrong else "all bit-equal")
    print(f"\nthe model is in      {model}\nthe optimizer is in  {optimizer}")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
