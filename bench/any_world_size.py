"""Time `zckpt.deepspeed.any_world_size` against stock DeepSpeed's load of a checkpoint that fits as it is.

    python bench/any_world_size.py [--repeat N] [--work DIR] [--size GB] [--stage 1|2|3] [--ranks N]

A bf16 model is saved by two engines, of N ranks and of N - 1. N ranks then load the first, with DeepSpeed alone, and
the second, in place, in turns; the page cache is warm, the slowest rank counts, and medians do. Bytes read are those
that the processes asked the system for, bytes written those for a disk (what ranks send each other is not in them),
of the rank with the most. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from tests.gloo import run

# The targets.
TIME_RATIO = 1.2  # in place / stock, at most
READ_RATIO = 1.2
WRITTEN_MB = 1.0  # what the processes print into a file is in it

STATE_NBYTES = 14  # of each parameter: weight in two bytes, master and two moments in four
WIDTH = 1024
TIMEOUT = 600


@dataclass
class Load:
    """A load on one rank: seconds, and bytes that were read and written."""

    seconds: float
    read: int
    written: int


def engine_of(stage: int, layers: int):
    import deepspeed

    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def train(engine, rank: int) -> None:
    """Take a step."""
    rows = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
    engine.backward(engine(rows).square().mean())
    engine.step()


def save(rank: int, _: int, directory: Path, stage: int, layers: int) -> None:
    engine = engine_of(stage, layers)
    train(engine, rank)
    engine.save_checkpoint(str(directory))


def counted() -> tuple[int, int]:
    """Return the bytes that this process has read so far, of cached pages too, and those written to disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["write_bytes"])


def load(
    _rank: int, _world_size: int, same: Path, other: Path, stage: int, layers: int, repeat: int
) -> list[list[Load]]:
    import zckpt

    engine = engine_of(stage, layers)
    found: list[list[Load]] = [[], []]
    for turn in range(repeat + 1):  # the first makes the optimizer's state
        for kind in ((0, 1), (1, 0))[turn % 2]:
            dist.barrier()
            before, began = counted(), time.perf_counter()
            with zckpt.deepspeed.any_world_size(engine) if kind else nullcontext():
                engine.load_checkpoint(str(other if kind else same))
            seconds, after = time.perf_counter() - began, counted()
            if turn:
                found[kind].append(Load(seconds, after[0] - before[0], after[1] - before[1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--size", type=float, default=4.0, help="GB of the checkpoint")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=3)
    given = parser.parse_args()
    layers = max(round(given.size * 1e9 / STATE_NBYTES / (WIDTH * (WIDTH + 1))), 1)
    work = Path(tempfile.mkdtemp(prefix="zckpt-any-world-size-", dir=given.work))
    try:
        same, other = work / "same", work / "other"
        run(save, given.ranks, same, given.stage, layers, timeout=TIMEOUT)
        run(save, given.ranks - 1, other, given.stage, layers, timeout=TIMEOUT)
        for path in work.rglob("*.pt"):  # into the page cache
            path.read_bytes()
        told = run(load, given.ranks, same, other, given.stage, layers, given.repeat, timeout=TIMEOUT)
        size = sum(path.stat().st_size for path in other.rglob("*.pt"))
    finally:
        shutil.rmtree(work)
    stock, ours = ([max(rank[kind][n].seconds for rank in told) for n in range(given.repeat)] for kind in (0, 1))
    read = [max(one.read for rank in told for one in rank[kind]) for kind in (0, 1)]
    written = max(one.written for rank in told for one in rank[1]) / 1e6
    ratio, more = statistics.median(ours) / statistics.median(stock), read[1] / read[0]
    print(f"ZeRO-{given.stage}, {size / 1e9:.2f} GB, {given.ranks} ranks; medians of {given.repeat}")
    print(f"stock, saved by {given.ranks} ranks      {statistics.median(stock):7.2f} s  {read[0] / 1e6:9.1f} MB read")
    print(
        f"in place, saved by {given.ranks - 1} ranks   {statistics.median(ours):7.2f} s  {read[1] / 1e6:9.1f} MB read"
    )
    met = ratio <= TIME_RATIO and more <= READ_RATIO and written <= WRITTEN_MB
    print(f"time x {ratio:.2f} (target {TIME_RATIO}), bytes x {more:.2f} (target {READ_RATIO}), "
          f"{written:.2f} MB written to disk: {'met' if met else 'MISSED'}")  # fmt: skip
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
