"""Time zckpt's ZeroRedundancyOptimizer against PyTorch's: steps, consolidation, saving; on CPU with gloo.

    python bench/zero_redundancy.py [--ranks 2 4] [--repeat N] [--scale S] [--work DIR]

AdamW on 100M parameters in 150 tensors (fewer with --scale below 1). Both are in the same processes, have the same
gradients and take turns, neither always first; ranks meet before each turn, and the slowest rank counts. Medians are
compared, minima shown. Memory is what a rank grew by at its peak. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contest import Target, touch_memory, verdict
from ranks import Figures, first_to_fail, join, reset_peak, status, table

LAYERS, WIDTH, WORDS = 24, 576, 8000  # 24 x 6 + 6 tensors
STEPS_OF_A_TURN = 3

# The targets.
STEP_RATIO = 1.0  # ours / torch's, at most, with and without bucket views
CONSOLIDATION_RATIO = 0.1
EXTRA_MB = 20.0  # at most, where the consolidated state is not wanted; the largest tensor has 5 MB

"""What each contest took, seconds or MB: the slowest rank, in each turn."""


def shapes(scale: float) -> list[tuple[int, ...]]:
    """Return the shapes of a model's 150 parameters; with `scale`, of so many times the elements."""
    width = max(8, round(WIDTH * scale**0.5))
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    return [*block * LAYERS, (max(8, round(WORDS * scale**0.5)), width), *[(width,)] * 5]


class Rank:
    """One rank of the contest."""

    def __init__(self, rank: int, world_size: int, repeat: int, scale: float, work: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

        from zckpt.optim import ZeroRedundancyOptimizer as Ours

        self.torch, self.dist, self.rank, self.world_size = torch, dist, rank, world_size
        self.repeat, self.work = repeat, work
        self.classes: dict[str, type[Any]] = {"torch": Torchs, "zckpt": Ours}
        self.shapes = shapes(scale)
        self.gradients = [torch.full(shape, 1e-3) for shape in self.shapes]
        self.figures: Figures = {}

    def contestants(self, **options: Any) -> dict[str, Any]:
        """Return an optimizer of each class, of parameters of its own; gradients are shared."""
        made = {}
        for name, optimizer_class in self.classes.items():
            parameters = [self.torch.nn.Parameter(self.torch.zeros(shape)) for shape in self.shapes]
            for parameter, gradient in zip(parameters, self.gradients, strict=True):
                parameter.grad = gradient
            made[name] = optimizer_class(parameters, self.torch.optim.AdamW, lr=1e-3, **options)
            made[name].step()  # makes the state
        return made

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        told = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(told, op=self.dist.ReduceOp.MAX)
        return told.item()

    def time(self, key: str, act: Callable[[], object], times: int = 1) -> None:
        """Note what an act takes, and by how much this process grows."""
        reset_peak()
        before = status("VmRSS")
        self.dist.barrier()
        started = time.perf_counter()
        for _ in range(times):
            act()
        seconds = (time.perf_counter() - started) / times
        grown = status("VmHWM") - before
        self.figures.setdefault(f"{key}, s", []).append(self.slowest(seconds))
        self.figures.setdefault(f"{key}, MB on rank 0", []).append(self.slowest(grown if self.rank == 0 else 0.0))
        self.figures.setdefault(f"{key}, MB elsewhere", []).append(self.slowest(grown if self.rank else 0.0))

    def steps(self, view: bool) -> dict[str, Any]:
        """Let both step in turns."""
        contestants = self.contestants(parameters_as_bucket_view=view)
        for turn in range(self.repeat):
            for name in list(contestants)[:: 1 if turn % 2 else -1]:  # neither is always the first
                self.time(f"{name} step{', bucket views' if view else ''}", contestants[name].step, STEPS_OF_A_TURN)
        pairs = zip(*(contestant._all_params for contestant in contestants.values()), strict=True)
        assert all(self.torch.equal(one, other) for one, other in pairs)
        return contestants

    def states(self, contestants: dict[str, Any]) -> None:
        """Let both consolidate and save; torch's takes long and hardly varies."""
        ours, torchs = contestants["zckpt"], contestants["torch"]
        for turn in range(3):
            self.time("zckpt consolidation", ours.consolidate_state_dict)
            ours.release_state_dict()
            self.time("zckpt save of all ranks, no consolidation", lambda turn=turn: self.save(ours, f"{turn}"))
        self.time("torch consolidation", torchs.consolidate_state_dict)
        self.time("torch save on rank 0, after consolidation", lambda: self.save_whole(torchs))
        ours.consolidate_state_dict()
        if self.rank == 0:
            pairs = zip(*(one.state_dict()["state"].values() for one in (ours, torchs)), strict=True)
            assert all(self.torch.equal(one[key], other[key]) for one, other in pairs for key in other)

    def save(self, optimizer: Any, name: str) -> None:
        """Save with torch.distributed.checkpoint, from every rank."""
        import torch.distributed.checkpoint as dcp

        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=self.work / name)

    def save_whole(self, optimizer: Any) -> None:
        """Save the consolidated state."""
        if self.rank == 0:
            self.torch.save(optimizer.state_dict(), self.work / "whole.pt")
        self.dist.barrier()


def play(rank: int, world_size: int, repeat: int, scale: float, work: str) -> None:
    """Run one rank's part of the contest; rank 0 writes the figures down."""
    import torch.distributed as dist

    join(rank, world_size, work)
    contest = Rank(rank, world_size, repeat, scale, Path(work))
    contest.steps(view=True)
    contest.states(contest.steps(view=False))
    if rank == 0:
        Path(work, "figures.json").write_text(json.dumps(contest.figures))
    dist.destroy_process_group()


def hold(world_size: int, repeat: int, scale: float, work: Path) -> Figures:
    """Return the figures of the contest at one number of ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=work)
    try:
        ranks = [
            context.Process(target=play, args=(rank, world_size, repeat, scale, folder)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        failed = first_to_fail(ranks)
        if failed is not None:
            sys.exit(f"rank {failed} failed\n{Path(folder, f'log{failed}').read_text()[-4000:]}")
        return json.loads(Path(folder, "figures.json").read_text())
    finally:
        shutil.rmtree(folder)


def judge(figures: Figures, world_size: int) -> list[Target]:
    """Return the targets with what was measured."""

    def ratio(what: str) -> float:
        ours, torchs = (statistics.median(figures[f"{name} {what}, s"]) for name in ("zckpt", "torch"))
        return ours / torchs

    extra = max(figures["zckpt consolidation, MB elsewhere"])
    return [
        Target(f"{world_size} ranks: step", ratio("step"), STEP_RATIO),
        Target(f"{world_size} ranks: step, bucket views", ratio("step, bucket views"), STEP_RATIO),
        Target(f"{world_size} ranks: consolidation", ratio("consolidation"), CONSOLIDATION_RATIO),
        Target(f"{world_size} ranks: extra MB elsewhere", extra, EXTRA_MB),
    ]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--repeat", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of elements (default: 1.0)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for files of 5 GB")
    arguments = parser.parse_args()
    touch_memory()
    targets: list[Target] = []
    for world_size in arguments.ranks:
        figures = hold(world_size, arguments.repeat, arguments.scale, arguments.work)
        print(f"### {world_size} ranks\n\n{table(figures)}\n", flush=True)
        targets += judge(figures, world_size)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
