"""What benchmarks of several ranks share: processes that meet on gloo, their memory, and their figures as a table."""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from contest import ROOT

Figures = dict[str, list[float]]
"""What was measured, in turns, by what it is."""

PATIENCE = datetime.timedelta(minutes=20)


def join(rank: int, world_size: int, work: str) -> None:
    """Be a rank: of one thread, in a group of gloo that meets in a folder, where what it prints goes, too."""
    log = os.open(f"{work}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meeting = f"file://{work}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)


def first_to_fail(ranks: Sequence[BaseProcess]) -> int | None:
    """Wait for all ranks, or end the others when one has failed; return which."""
    left = {process.sentinel: rank for rank, process in enumerate(ranks)}
    failed = None
    while left:
        for sentinel in wait(left):
            rank = left.pop(sentinel)
            ranks[rank].join()  # its exit code is known a little later
            if failed is None and ranks[rank].exitcode != 0:
                failed = rank
                for other in left.values():
                    ranks[other].kill()
    return failed


def reset_peak() -> None:
    """Begin to measure the peak of memory again."""
    Path("/proc/self/clear_refs").write_text("5")


def status(key: str) -> float:
    """Return a figure of this process in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(key))


def table(figures: Figures) -> str:
    """Return a markdown table of what was measured."""
    lines = ["| | runs | median | min |", "|---|---:|---:|---:|"]
    for key, values in sorted(figures.items()):
        lines.append(f"| {key} | {len(values)} | {statistics.median(values):.3f} | {min(values):.3f} |")
    return "\n".join(lines)
