"""Measure what the work costs on processes, against threads of one process, and what sending it takes.

    python bench/scale.py [--gigabytes 2] [--rounds 5] [--workers 2] [--keep]     efficiency
    python bench/scale.py --plan [--ranks 1024] [--parameters 10000]              tasks of a large plan

The first writes a checkpoint of random elements, starts a Dask scheduler and as many workers as processes of one
thread, and runs each verb on as many threads and on the workers, in turn, warm cache. Of each round the ratio of both
times is taken; the median is the efficiency. Connecting is not measured, syncing to disk is. CPU seconds are those of
all processes, of Dask's without what they take when idle: on a machine that others use, they say more than the times.

The second plans a reshard of a checkpoint that `plan_scale.py` makes, cuts it into tasks as for 16 workers, and pickles
each: how long that takes together, how many bytes are sent, and the most memory that was resident.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
PORT = 18787
IDLE_SECONDS = 5


def make(path: Path, gigabytes: float) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = int(gigabytes * 1e9 / 2 / 4 / (1 << 20))
    model = {f"layer{i}.weight": torch.randn(1024, 1024, generator=generator) for i in range(2 * count)}
    torch.save(model, path)


def verbs(source: Path, target: Path) -> dict[str, Callable[[object], object]]:
    import zckpt

    return {
        "consolidate": lambda executor: zckpt.consolidate(source, target, executor=executor),
        "to bfloat16": lambda executor: zckpt.consolidate(source, target, dtype="bfloat16", executor=executor),
        "fingerprint": lambda executor: zckpt.fingerprint(source, executor=executor),
        "verify": lambda executor: zckpt.verify(source, deep=True, executor=executor),
    }


def timed(
    verb: Callable[[object], object], executor: object, target: Path, cpu: Callable[[], float] = time.process_time
) -> tuple[float, float]:
    """Run a verb; return its seconds, and those that `cpu` counts."""
    target.unlink(missing_ok=True)
    subprocess.run(["sync", "-f", str(target.parent)], check=True)
    before, start = cpu(), time.perf_counter()
    verb(executor)
    return time.perf_counter() - start, cpu() - before


def cpu_of(processes: list[subprocess.Popen[bytes]]) -> float:
    """Return the CPU seconds that this process and others took so far."""
    import psutil

    found = [psutil.Process(one.pid).cpu_times() for one in processes]
    return time.process_time() + sum(one.user + one.system for one in found)


def efficiency(options: argparse.Namespace) -> None:
    from zckpt.executors.on_dask import DaskExecutor

    source, target = options.work / f"scale-{options.gigabytes}.pt", options.work / "scale-target.safetensors"
    if not source.exists():
        make(source, options.gigabytes)
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([*dask, "--host", "127.0.0.1", "--port", str(PORT), "--no-dashboard"], **quiet)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"127.0.0.1:{PORT}", "--nthreads", "1"]
    worker += ["--no-nanny", "--no-dashboard", "--local-directory", str(options.work / "dask")]
    processes += [subprocess.Popen(worker, **quiet) for _ in range(options.workers)]
    try:
        with DaskExecutor(f"127.0.0.1:{PORT}") as there, ThreadPoolExecutor(options.workers) as here:
            while len(there._client.nthreads()) < options.workers:
                time.sleep(0.1)
            there.workers = options.workers
            before = cpu_of(processes)
            time.sleep(IDLE_SECONDS)
            idle = (cpu_of(processes) - before) / IDLE_SECONDS
            print(f"{'verb':<14}{'threads s':>11}{'workers s':>11}{'efficiency':>12}{'CPU':>8}{'CPU':>8}{'ratio':>7}")
            for name, verb in verbs(source, target).items():
                timed(verb, here, target)
                timed(verb, there, target)
                pairs = []
                for _ in range(options.rounds):
                    a, b = timed(verb, here, target), timed(verb, there, target, partial(cpu_of, processes))
                    pairs.append((a[0], b[0], a[0] / b[0], a[1], b[1] - idle * b[0]))
                *three, cpu, theirs = (statistics.median(one) for one in zip(*pairs, strict=True))
                threads, workers, ratio = three
                row = f"{name:<14}{threads:>11.2f}{workers:>11.2f}{ratio:>12.2f}"
                print(f"{row}{cpu:>8.2f}{theirs:>8.2f}{cpu / theirs:>7.2f}", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        target.unlink(missing_ok=True)
        shutil.rmtree(options.work / "dask", ignore_errors=True)
        if not options.keep:
            source.unlink()


def planned(options: argparse.Namespace) -> None:
    import zckpt
    import zckpt.engine.write as written
    import zckpt.operations.target as target
    from zckpt.engine.checking import Checks
    from zckpt.engine.workers import Portions, results_of, tasks_of

    name = f"scale-{options.kind}-{options.ranks}-{options.parameters}"
    source = options.work / name
    if not source.exists():
        arguments = [sys.executable, str(HERE / "plan_scale.py"), "--make", str(source), "--kinds", options.kind]
        arguments += ["--ranks", str(options.ranks), "--parameters", str(options.parameters)]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    start = time.perf_counter()
    counts = {"tasks": 0, "nbytes": 0, "largest": 0}

    def write(plan, names, **_):
        print(f"planned   {time.perf_counter() - start:8.1f} s")
        most = written.BATCH_NBYTES
        batches = written._together(zip(names, plan.files, strict=True), most, sys.maxsize, Checks(), most)
        paths = lambda task: (one.path for one in task)  # noqa: E731
        portions = Portions(plan.copy_nbytes, written._task_nbytes, written._reads, paths)
        run = partial(written.run_task, written.write_batch)
        for task in tasks_of(run, batches, portions, 16):
            size = len(pickle.dumps((results_of, task), protocol=5))
            counts["tasks"] += 1
            counts["nbytes"] += size
            counts["largest"] = max(counts["largest"], size)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        seconds, cpu = time.perf_counter() - start, time.process_time()
        print(f"sent      {seconds:8.1f} s in all, CPU {cpu:.1f} s, peak {peak:.0f} MB")
        print(
            f"{counts['tasks']} tasks of {plan.copy_nbytes / 1e6:.0f} MB of elements: {counts['nbytes'] / 1e6:.1f} MB "
            f"pickled, the largest {counts['largest'] / 1e6:.2f} MB"
        )
        raise KeyboardInterrupt  # nothing is written

    target.write = write
    with contextlib.suppress(KeyboardInterrupt):
        zckpt.reshard(source, options.work / "scale-tasks", world_size=options.ranks * 3 // 4, checksums=False)
    if not options.keep:
        shutil.rmtree(source)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--kind", default="zero2")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--work", type=Path, default=HERE / "cache")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    (planned if options.plan else efficiency)(options)


if __name__ == "__main__":
    main()
