"""Every verb with a tenth of the checkpoint's size for memory: `python bench/limits.py [--work DIR] [--width N]`.

A ZeRO-2 checkpoint (0.9 GB; `--width 1280`: 4.2 GB) is made once below --work. Each verb runs without a limit, then
with RLIMIT_AS of a tenth of the checkpoint's size, then in a control group of a tenth, where one can be made. What it
writes must be the same each time, byte for byte. RLIMIT_AS counts every library that is mapped, NumPy's among them,
which are some 100 MB whatever is done; a tenth that is less than LEAST is raised to it. Exit 1 if a verb fails or
differs.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contest import HERE, make_checkpoint
from safetensors.numpy import save_file

LEAST = 160 << 20
"""Of RLIMIT_AS: the interpreter with NumPy, and the least buffers."""

RANK = 4
LORA = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": False}

GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Where version 1 and version 2 of control groups are."""


def make_adapter(work: Path, width: int) -> Path:
    """Return a LoRA adapter of the checkpoint's model, made if it is not there."""
    folder = work / f"adapter_{width}"
    if not folder.exists():
        folder.mkdir()
        name, some = "base_model.model.transformer.h.0.attn.c_attn", np.random.default_rng(0)
        a = some.normal(size=(RANK, 3 * width)).astype(np.float32)
        b = some.normal(size=(width, RANK)).astype(np.float32)
        save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(LORA))
    return folder


def verbs(source: Path, adapter: Path, target: Path) -> dict[str, list[str]]:
    """Return the arguments of every verb that reads or writes elements."""
    given, out = str(source), str(target)
    formats = (
        "universal", "zckpt", "dcp", "consolidated", "deepspeed", "zero-redundancy", "transformers-trainer",
        "fsdp-rank-files", "accelerate",
    )  # fmt: skip
    return {
        "consolidate": ["consolidate", given, f"{out}.safetensors", "--slots", "all"],
        "consolidate to bfloat16, .pt": ["consolidate", given, f"{out}.pt", "--dtype", "bfloat16"],
        "reshard": ["reshard", given, out, "--world-size", "6", "--verify"],
        "reshard to stage 3": ["reshard", given, out, "--world-size", "3", "--stage", "3"],
        **{f"convert to {one}": ["convert", given, out, "--to", one] for one in formats},
        "strip": ["strip", given, out, "--padding", "--keep-slots", "exp_avg"],
        "average": ["average", given, given, "--target", f"{out}.safetensors", "--slots", "all", "--verify"],
        "merge-adapter": ["merge-adapter", given, str(adapter), f"{out}.safetensors"],
        "diff": ["diff", given, given],
        "fingerprint": ["fingerprint", given],
        "verify --deep": ["verify", given, "--deep"],
        "inspect": ["inspect", given],
        "map": ["map", given, "--json"],
    }


def run(arguments: list[str], before: Callable[[], None] | None = None) -> str:
    """Run a verb; return its last words if it fails."""
    command = [sys.executable, "-m", "zckpt", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=before)
    return "" if done.returncode == 0 else f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}"


def written(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by their names."""
    return {str(one.relative_to(folder)): one for one in sorted(folder.rglob("*")) if one.is_file()}


def differing(one: Path, other: Path) -> str:
    """Return what is not the same in two folders; documents of JSON and pickles may hold names of the target."""
    a, b = written(one), written(other)
    if a.keys() != b.keys():
        return f"other files: {sorted(a.keys() ^ b.keys())[:3]}"
    return next((f"{name} differs" for name in a if not filecmp.cmp(a[name], b[name], shallow=False)), "")


def group_of(nbytes: int) -> Path | None:
    """Return a control group that may take so much memory; None: none can be made here."""
    for root in GROUPS:
        limit = root / "zckpt-bench" / ("memory.max" if root.name == "cgroup" else "memory.limit_in_bytes")
        try:
            limit.parent.mkdir(exist_ok=True)
            if limit.exists():
                limit.write_text(str(nbytes))
                return limit.parent
            limit.parent.rmdir()
        except OSError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "cache")
    parser.add_argument("--width", type=int, default=520)
    parser.add_argument("--only", nargs="+", default=[""], help="the verbs whose names have one of these in them")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    source, adapter = make_checkpoint(options.work, options.width), make_adapter(options.work, options.width)
    tenth = sum(one.stat().st_size for one in written(source).values()) // 10
    mapped, group = max(tenth, LEAST), group_of(tenth)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))

    def grouped() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    ways = {f"RLIMIT_AS {mapped >> 20} MiB": limited}
    if group is not None:
        ways[f"cgroup {tenth >> 20} MiB"] = grouped
    print(f"a checkpoint of {10 * tenth / 1e9:.2g} GB\n\n| verb | {' | '.join(ways)} |\n|---{'|---' * len(ways)}|")
    failed = False
    for name in verbs(source, adapter, Path("x")):
        if not any(one in name for one in options.only):
            continue
        folders = [options.work / f"limits_{number}" for number in range(len(ways) + 1)]
        said = []
        for folder, before in zip(folders, (None, *ways.values()), strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            wrong = run(verbs(source, adapter, folder / "out")[name], before)
            said.append(wrong or differing(folders[0], folder) or "same")
        print(f"| {name} | {' | '.join(said[1:] if said[0] == 'same' else said)} |", flush=True)
        failed |= set(said) != {"same"}
        for folder in folders:
            shutil.rmtree(folder)
    if group is not None:
        group.rmdir()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
