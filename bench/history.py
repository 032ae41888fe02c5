"""How much room a run's checkpoints take: as they are, as `tar | zstd`, in a deduplicating backup, and packed.

    python bench/history.py [--steps 400] [--width 192] [--keep DIRECTORY]

A small transformer learns Python's own library by bytes: bf16 weights and ZeRO-2, AdamW at 3e-4, 20 checkpoints; and is
then tuned at 1e-5, of which weights alone are kept. restic and borg are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zckpt
from zckpt.optim import ZeroOptimizer

CHECKPOINTS, CONTEXT, BATCH = 20, 64, 8

ENVIRONMENT = {
    **os.environ,
    "PYTHONDONTWRITEBYTECODE": "",
    "RESTIC_PASSWORD": "x",
    "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
}


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what comes next, as logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.embedding(tokens) + self.positions(torch.arange(CONTEXT))
        return self.head(self.layers(hidden, mask, is_causal=True))


def train(folder: Path, steps: int, width: int) -> None:
    """Train, and save 20 checkpoints of all state; then tune, and save 20 of weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    torch.manual_seed(0)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = Model(width).to(torch.bfloat16)

    def step(model: Model, optimizer: ZeroOptimizer) -> None:
        at = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        some = torch.stack([data[i : i + CONTEXT + 1] for i in at]).long()
        weights = {name: one.float() for name, one in model.named_parameters()}  # few CPUs multiply bfloat16 fast
        logits = torch.func.functional_call(model, weights, some[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten())
        optimizer.backward(loss)
        optimizer.step()

    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-4, stage=2)
    every = max(steps // CHECKPOINTS, 1)
    for number in range(1, every * CHECKPOINTS + 1):
        step(model, optimizer)
        if number % every == 0:
            zckpt.save(folder / "all state" / f"step-{number:06d}", model=model, optimizer=optimizer, step=number)
    tuned = Model(width).to(torch.bfloat16)
    tuned.load_state_dict(model.state_dict())
    tuning = ZeroOptimizer(tuned.named_parameters(), torch.optim.AdamW, lr=1e-5, stage=2)
    for number in range(1, every * CHECKPOINTS + 1):
        step(tuned, tuning)
        if number % every == 0:
            at = folder / "weights" / f"step-{number:06d}"
            at.mkdir(parents=True)
            save_file({name: one.detach().clone() for name, one in tuned.named_parameters()}, at / "model.safetensors")
    dist.destroy_process_group()


def size(path: Path) -> int:
    """Return the bytes of all files at or below a path."""
    return sum(one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file())


LAUNCHER = """
import resource, subprocess, sys
done = subprocess.run(["bash", "-c", sys.argv[1]], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""
"""A small process, since what a process is started with counts as that of its child."""


def timed(command: str, *places: object) -> tuple[float, float]:
    """Run a command of a shell; return seconds, and megabytes of memory of its largest process."""
    quoted = [f"'{place}'" for place in places]
    launched = [sys.executable, "-S", "-c", LAUNCHER, command.format(*quoted)]
    begin = time.perf_counter()
    done = subprocess.run(launched, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE)
    return time.perf_counter() - begin, int(done.stdout) / 1e3


def compare(run: Path, folder: Path) -> None:
    """Print a table of one run."""
    whole = size(run)
    print(f"\n{run.name}, {len(list(run.iterdir()))} checkpoints, {whole / 1e6:.1f} MB\n")
    print(f"{'':16}{'size, MB':>10}{'share':>8}{'seconds':>9}{'memory, MB':>12}")
    ways = {
        "pack": f"{sys.executable} -m zckpt pack -q {{0}} {{1}}",
        "tar | zstd -3": "tar c -C {0} . | zstd -q -3 -T1 -o {1}",
        "tar | zstd -3 -T0": "tar c -C {0} . | zstd -q -3 -T0 -o {1}",
        "restic": "restic init -q -r {1} && restic backup -q -r {1} --compression max {0}",
        "borg": "borg init -e none {1} && borg create --compression zstd,3 {1}::a {0}",
    }
    for way, command in ways.items():
        if shutil.which(way.partition(" ")[0]) is None and way != "pack":
            continue
        target = folder / f"{run.name}.{way.split()[0]}{len(way)}".replace(" ", "-")
        seconds, memory = timed(command, run, target)
        print(f"{way:16}{size(target) / 1e6:10.1f}{size(target) / whole:8.1%}{seconds:9.1f}{memory:12.0f}")
    store = next(folder.glob(f"{run.name.replace(' ', '-')}.pack*"))
    names = sorted(one.name for one in run.iterdir())
    for what, name in (("first", names[0]), ("middle", names[len(names) // 2]), ("last", names[-1])):
        begin = time.perf_counter()
        zckpt.open(store / name)
        seconds = time.perf_counter() - begin
        at = folder / f"{name}.safetensors"
        taken = [timed(f"{sys.executable} -m zckpt consolidate -q {{0}} {{1}} --overwrite", one / name, at)[0]
                 for one in (store, run)]  # fmt: skip
        print(f"{what}: opened in {seconds:.3f} s, consolidated in {taken[0]:.2f} s (from the run: {taken[1]:.2f} s)")
    timed(f"{sys.executable} -m zckpt unpack -q {{0}} {{1}} && diff -r {{1}} {{2}}", store, folder / "again", run)
    shutil.rmtree(folder / "again")
    print("unpack: bit for bit as it was")


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="history-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "weights").exists():
        begin = time.perf_counter()
        train(folder, given.steps, given.width)
        print(f"trained {given.steps} + {given.steps} steps in {time.perf_counter() - begin:.0f} s")
    work = Path(tempfile.mkdtemp(prefix="history-stores-"))
    try:
        for run in ("all state", "weights"):
            compare(folder / run, work)
    finally:
        shutil.rmtree(work)
        if given.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
