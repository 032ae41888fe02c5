"""Time the copier alone, case by case: pieces that are long, small, thin, strided, cast; of this tree or another, too.

    python bench/copier.py [--repeat N] [--work DIR] [--megabytes N] [--other TREE] [--cold] [--direct] [CASE ...]

Each case is a plan that is run in a process of its own: seconds, CPU seconds and calls to the system of the copy,
without the start and the planning of holes. With --other, the copier of another checkout takes turns with this one's,
and the last column is what it takes of the other's time; with --direct, so does this one past the page cache. The
source is in the page cache, unless --cold; the time includes the target's sync.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from contest import BLOCK, ROOT

Holes = list[tuple[Any, str]]
"""Slots, and the type of each in the target."""


def make_source(path: Path, nbytes: int) -> None:
    """Write random numbers of float32, all finite, unless they are there."""
    if not path.exists() or path.stat().st_size != nbytes:
        with path.open("wb") as file:
            for _ in range(0, nbytes, BLOCK):
                file.write((np.frombuffer(os.urandom(BLOCK), np.uint32) & 0xBFFF_FFFF).tobytes())


def whole(path: str, nbytes: int, dtype: str = "float32") -> Holes:
    """Return one long tensor."""
    return [(_slot(path, (nbytes // 4,), 0), dtype)]


def small(path: str, nbytes: int, *, dtype: str = "float32", shuffled: bool = False) -> Holes:
    """Return tensors of 256 B to 8 KB, end to end."""
    chosen = random.Random(7)
    found, at = [], 0
    while at + 8192 <= nbytes:
        numel = chosen.randrange(64, 2048)
        found.append((_slot(path, (numel,), at), dtype))
        at += 4 * numel
    if shuffled:
        chosen.shuffle(found)
    return found


def columns(path: str, nbytes: int, width: int) -> Holes:
    """Return a tensor whose columns are there in 8 slices of `width`, each by itself."""
    from zckpt.state import Extent, Slot, Span

    rows = nbytes // (4 * 8 * width)
    spans = [
        Span(Extent((0, i * width), (rows, width), 0, rows * width), path, i * rows * width * 4, "float32")
        for i in range(8)
    ]
    return [(Slot("weight", "float32", (rows, 8 * width), tuple(spans)), "float32")]


def slices(path: str, nbytes: int, width: int) -> Holes:
    """Return 8 tensors of `width` columns, of which one lies beside the other."""
    rows = nbytes // (4 * 8 * width)
    return [(_slot(path, (rows, width), i * width * 4, (8 * width, 1)), "float32") for i in range(8)]


def transposed(path: str, nbytes: int) -> Holes:
    """Return a matrix that lies column by column."""
    rows = nbytes // 4 // 4096
    return [(_slot(path, (rows, 4096), 0, (1, rows)), "float32")]


def far(path: str, nbytes: int) -> Holes:
    """Return 16 elements of every 4,096."""
    return [(_slot(path, (nbytes // 4 // 4096, 16), 0, (4096, 1)), "float32")]


CASES: dict[str, Callable[[str, int], Holes]] = {
    "long": whole,
    "long, cast": lambda path, nbytes: whole(path, nbytes, "bfloat16"),
    "small": small,
    "small, shuffled": lambda path, nbytes: small(path, nbytes, shuffled=True),
    "small, cast": lambda path, nbytes: small(path, nbytes, dtype="bfloat16"),
    **{f"columns of {n}": lambda path, nbytes, n=n: columns(path, nbytes, n) for n in (1, 4, 16, 512)},
    **{f"slices of {n}": lambda path, nbytes, n=n: slices(path, nbytes, n) for n in (1, 4, 16, 512)},
    "transposed": transposed,
    "16 of 4096": far,
}


def _slot(path: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None = None) -> Any:
    from zckpt.state import Extent, Slot, Span

    return Slot("weight", "float32", shape, (Span(Extent.whole(shape), path, offset, "float32", strides),))


def copy(name: str, source: Path, target: Path, *, cold: bool, direct: bool) -> dict[str, float]:
    """Run one case in this process."""
    from zckpt.engine.plan import plan
    from zckpt.engine.targets import Hole, TargetFile
    from zckpt.engine.write import write
    from zckpt.state import Extent
    from zckpt.state.dtypes import itemsize

    holes, at = [], 0
    for slot, dtype in CASES[name](str(source), source.stat().st_size):
        holes.append(Hole(at, "weight", slot, Extent.whole(slot.shape), dtype))
        at += slot.numel * itemsize(dtype)
    planned = plan([TargetFile(target.name, at, [], holes)])
    if cold:
        drop(source)
    before, cpu, began = calls(), time.process_time(), time.perf_counter()
    write(planned, [target], **({"direct": True} if direct else {}))
    sync(target)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "calls": calls() - before, "MB": at / 1e6}


def calls() -> int:
    """Return how many reads and writes this process has asked the system for; 0 where there is no /proc."""
    try:
        counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(counted["syscr"]) + int(counted["syscw"])


def sync(path: Path) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop(path: Path) -> None:
    """Ask the system to forget a file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def child(tree: Path, name: str, source: Path, target: Path, *, cold: bool, direct: bool) -> dict[str, float]:
    """Run one case in a process with the copier of a tree."""
    target.unlink(missing_ok=True)
    os.sync()
    command = [sys.executable, __file__, "--run", "--work", str(source.parent), *(["--cold"] if cold else [])]
    command += [*(["--direct"] if direct else []), name]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tree)}
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "zckpt-bench-copier")
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--other", type=Path, help="another checkout, to compare with")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--direct", action="store_true", help="compare with reads and writes past the page cache")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    source, target = options.work / "source.bin", options.work / "target.bin"
    if options.run:
        print(json.dumps(copy(options.cases[0], source, target, cold=options.cold, direct=options.direct)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    make_source(source, options.megabytes * BLOCK)
    trees = {"here": ROOT} | ({"other": options.other.resolve()} if options.other else {})
    trees |= {"direct": ROOT} if options.direct else {}
    print(f"{'case':<18}{'tree':<7}{'MB':>8}{'median s':>10}{'CPU s':>8}{'calls':>9}{'GB/s':>7}{'ratio':>7}")
    for name in options.cases or CASES:
        found: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for turn in range(options.repeat):
            for tree in list(trees)[:: 1 if turn % 2 else -1]:
                found[tree].append(child(trees[tree], name, source, target, cold=options.cold, direct=tree == "direct"))
        for tree, runs in found.items():
            seconds, cpu = (median(run[key] for run in runs) for key in ("seconds", "cpu"))
            line = f"{name:<18}{tree:<7}{runs[0]['MB']:>8.1f}{seconds:>10.3f}{cpu:>8.3f}{runs[0]['calls']:>9.0f}"
            ratio = median(
                a["seconds"] / b["seconds"] for a, b in zip(runs, found.get("other", found["here"]), strict=True)
            )
            print(f"{line}{runs[0]['MB'] / 1e3 / seconds:>7.2f}{ratio:>7.2f}", flush=True)
    target.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
