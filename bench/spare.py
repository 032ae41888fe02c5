"""Time for which a step stands still while what it made is kept in memory, against a save to disk.

    python bench/spare.py [--repeat N] [--work DIR] [--size GB] [--ranks N]

A float32 model with its AdamW is kept in memory by ranks of one node, by ranks that are each a node of their own and
send to each other while the step after it would be taken, and saved to disk. The slowest rank counts, and medians do.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from tests.gloo import run

WIDTH = 1024
KINDS = ("in memory, one node", "in memory of two nodes", "saved to disk")
SHOWN = (KINDS[0], KINDS[1], "  until it is on the next node", KINDS[2])


def keep(rank: int, _world_size: int, work: Path, memory: Path, layers: int, repeat: int) -> list[list[float]]:
    """Return for each kind how long each call of `step` took."""
    import zckpt

    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    told = []
    for kind, name in enumerate(KINDS):
        within = memory / (f"node{rank}" if kind == 1 else "node")
        within.mkdir(exist_ok=True)
        options = {"replicate": True, "replicate_in": within} if kind < 2 else {"every": 1, "keep": 1}
        with zckpt.Checkpointer(work / name, **options) as checkpointer:
            seconds, sent = [], []
            for step in range(repeat + 1):
                dist.barrier()
                began = time.perf_counter()
                checkpointer.step(step + 1, model=model, optimizer=optimizer)
                seconds.append(time.perf_counter() - began)
                if checkpointer._spare is not None:
                    checkpointer._spare.finish()
                sent.append(time.perf_counter() - began)
        told.append(seconds[1:])
        if kind == 1:
            told.append(sent[1:])
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where there is memory")
    parser.add_argument("--size", type=float, default=0.5, help="GB of what is kept")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    layers = max(round(given.size * 1e9 / (12 * WIDTH * WIDTH)), 1)
    work = Path(tempfile.mkdtemp(prefix="zckpt-spare-", dir=given.work))
    memory = Path(tempfile.mkdtemp(prefix="zckpt-spare-", dir=given.memory))
    try:
        every = run(keep, given.ranks, work, memory, layers, given.repeat, timeout=1800)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(memory)
    size = layers * 12 * WIDTH * WIDTH / 1e9
    for kind, name in enumerate(SHOWN):
        slowest = [max(times) for times in zip(*(told[kind] for told in every), strict=True)]
        median = statistics.median(slowest)
        print(f"{name:34} {median:6.2f} s  {size / median:5.2f} GB/s  ({size:.2f} GB, {given.ranks} ranks)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
