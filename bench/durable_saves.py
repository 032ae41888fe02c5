"""Time for which training stands still while an engine of DeepSpeed saves: by itself, and with `durable_saves`.

    python bench/durable_saves.py [--repeat N] [--work DIR] [--size GB] [--stage 1|2|3] [--ranks N]

A bf16 model is saved in turns by DeepSpeed alone (which leaves what it writes in the page cache), by zckpt (which syncs
it to disk) and by zckpt while training goes on, in DeepSpeed's form and its own; the slowest rank counts, and medians
do. Between saves everything is synced, so that none pays for another. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from bench.any_world_size import STATE_NBYTES, TIMEOUT, WIDTH, engine_of, train
from tests.gloo import run

# The target.
STALL_RATIO = 0.5  # asynchronous / DeepSpeed's own, at most

KINDS = (
    "DeepSpeed", "zckpt, synced to disk", "zckpt, while training goes on", "its format, synced to disk",
    "its format, while training goes on",
)  # fmt: skip


def save(
    rank: int, _world_size: int, work: Path, stage: int, layers: int, repeat: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return for each kind how long training stood still at each save, and how long it took until all was written."""
    import zckpt

    engine = engine_of(stage, layers)
    train(engine, rank)
    stalls: list[list[float]] = [[] for _ in KINDS]
    whole: list[list[float]] = [[] for _ in KINDS]
    ways, waits = [engine.save_checkpoint], []
    for written in ("deepspeed", "zckpt"):
        for async_ in (False, True):
            with zckpt.deepspeed.durable_saves(engine, async_=async_, format=written) as saves:
                ways.append(engine.save_checkpoint)
            waits.append(saves.wait)
    for turn in range(repeat + 1):  # the first makes the memory that tensors are copied to
        for kind, way in enumerate(ways):
            directory = work / str(kind)
            if rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
                os.sync()
            dist.barrier()
            began = time.perf_counter()
            way(str(directory))
            stall = time.perf_counter() - began
            if kind:
                waits[kind - 1]()
            if turn:
                stalls[kind].append(stall)
                whole[kind].append(time.perf_counter() - began)
    return stalls, whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--size", type=float, default=2.0, help="GB of the checkpoint")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    layers = max(round(given.size * 1e9 / STATE_NBYTES / (WIDTH * (WIDTH + 1))), 1)
    work = Path(tempfile.mkdtemp(prefix="zckpt-durable-saves-", dir=given.work))
    try:
        told = run(save, given.ranks, work, given.stage, layers, given.repeat, timeout=TIMEOUT)
        size = sum(path.stat().st_size for path in (work / "0").rglob("*.pt"))
    finally:
        shutil.rmtree(work)
    stall, whole = ([statistics.median(map(max, zip(*ranks, strict=True))) for ranks in zip(*each, strict=True)]
                    for each in zip(*told, strict=True))  # fmt: skip
    print(f"ZeRO-{given.stage}, {size / 1e9:.2f} GB, {given.ranks} ranks; medians of {given.repeat}")
    print(f"{'':34}  stands still   all written")
    for kind, name in enumerate(KINDS):
        print(f"{name:34} {stall[kind]:10.2f} s {whole[kind]:10.2f} s")
    ratio = max(stall[2], stall[4]) / stall[0]
    met = ratio <= STALL_RATIO
    print(f"stall x {ratio:.2f} (target {STALL_RATIO}): {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
