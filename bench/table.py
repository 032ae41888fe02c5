"""One table of every verb against a plain copy, and against the programs that do the same job.

    python bench/table.py [--megabytes N ...] [--repeat N] [--cores N ...] [--cache warm cold] [--only VERB ...]
                          [--work DIR] [--skip-peers] [--large-repeat N]

The checkpoint is that of bench/checkpoint.py, ZeRO-2 by 8 ranks, as large as --megabytes says; with several sizes the
growth of memory is judged. Held against `cp` and `sync`: of the checkpoint what writes all of it, of its float32 model
what writes a model (a cast, too, and a mean, which read as much or more). Held against `cat`: what only reads.

All take turns in one run, on 1 and on 2 cores, with all sources in the page cache (warm) and none (cold: dropped by
posix_fadvise). Of a checkpoint above LARGE_MEGABYTES every command is timed once, on the most cores, and the peers in
the watched run only: `--megabytes 500 8000` takes some 20 minutes of an idle machine. Anonymous memory, of all
processes of a command, and disk are the most of a run that is not timed; bytes read and written are what /proc/PID/io
counts. `extra` is disk taken at most, in multiples of what is left at the end. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contest import HERE, TAG, Target, clear, disk_use, environment, make_checkpoint, touch_memory, verdict

POLL_SECONDS = 0.02

# The targets.
COPY_RATIO, CAST_RATIO = 1.10, 1.5
GROWTH_MB = 16.0  # of anonymous memory, from the smallest checkpoint to the largest

LARGE_MEGABYTES = 2000  # from here on, what is measured is how memory grows, and that speed stays

VOCABULARY, LAYERS, BYTES_OF_PARAMETER = 51281, 12, 14  # of bench/checkpoint.py: bfloat16, three slots of float32


@dataclass(frozen=True)
class Contender:
    """A command, what it writes, what it reads, and which other one it is held against."""

    name: str
    command: tuple[str, ...]
    target: Path | None
    sources: tuple[Path, ...]
    against: str
    limit: float | None = None


@dataclass
class Taken:
    """What the runs of a command took: seconds; bytes read and written by the process, and from and to the disk."""

    seconds: list[float] = field(default_factory=list)
    io: list[dict[str, int]] = field(default_factory=list)

    def gigabytes(self, key: str) -> float:
        """Return the median of a count of /proc/PID/io in GB; not a number where there is none."""
        return statistics.median(one[key] for one in self.io) / 1e9 if all(self.io) else math.nan


@dataclass
class Peaks:
    """The most at any moment: MB of anonymous memory, and disk in multiples of what is left."""

    memory: float = 0.0
    extra: float = math.nan
    seconds: float = math.nan


def width_for(megabytes: int) -> int:
    """Return the width of the model whose checkpoint has about so many MB."""
    a, b, c = 12 * LAYERS, VOCABULARY + 13 * LAYERS, -megabytes * 1e6 / BYTES_OF_PARAMETER
    return max(int((-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)) // 8 * 8, 8)


def contenders(run: Path, work: Path, *, peers: bool) -> list[Contender]:
    """Return all commands, those that the others read from first."""
    tag, out = run / TAG, work / "targets"
    model, dcp = out / "model.safetensors", out / "dcp"
    program = (sys.executable, "-m", "zckpt")
    copy = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
    found = [
        Contender(
            "consolidate", (*program, "consolidate", str(tag), str(model)), model, (run,), "cp model", COPY_RATIO
        ),
        Contender("cp", ("sh", "-c", copy, "sh", str(run), str(out / "copied")), out / "copied", (run,), "cp"),
        Contender("cp model", ("sh", "-c", copy, "sh", str(model), str(out / "m")), out / "m", (model,), "cp model"),
        Contender("cat", ("sh", "-c", f"cat {run}/*/* > /dev/null"), None, (run,), "cat"),
    ]

    def add(name: str, words: Sequence[object], target: str | None, against: str, limit: float | None) -> None:
        where = out / target if target else None
        sources = {"dcp to .pt": (dcp,), "diff": (run, dcp)}.get(name, (run,))
        command = (*program, *map(str, words), *([str(where)] if where else []), "--quiet")
        found.append(Contender(name, command, where, sources, against, limit))

    add("to dcp", ("convert", "--to", "dcp", run), "dcp", "cp", COPY_RATIO)
    add("bfloat16", ("consolidate", "--dtype", "bfloat16", tag), "cast.safetensors", "cp model", CAST_RATIO)
    add("with slots", ("consolidate", "--slots", "all", tag), "all", "cp", COPY_RATIO)
    add("reshard", ("reshard", "--world-size", 6, run), "resharded", "cp", COPY_RATIO)
    add("to universal", ("convert", "--to", "universal", run), "universal", "cp", COPY_RATIO)
    add("to zckpt", ("convert", "--to", "zckpt", run), "native", "cp", COPY_RATIO)
    add("strip", ("strip", "--padding", tag), "stripped", "cp", COPY_RATIO)
    add("average", ("average", tag, tag, "--target"), "mean.safetensors", "cp model", CAST_RATIO)
    add("dcp to .pt", ("consolidate", dcp), "dcp.pt", "cp model", COPY_RATIO)
    both = f"cat {run}/*/* {dcp}/* > /dev/null"
    found.append(Contender("cat both", ("sh", "-c", both), None, (run, dcp), "cat both"))
    add("diff", ("diff", run, dcp), None, "cat both", COPY_RATIO)
    add("fingerprint", ("fingerprint", run), None, "cat", COPY_RATIO)
    add("verify --deep", ("verify", "--deep", run), None, "cat", CAST_RATIO)
    if peers:
        found += _peers(run, out, dcp)
    return found


def _peers(run: Path, out: Path, dcp: Path) -> list[Contender]:
    python = (sys.executable, "-m")
    fp32 = (*python, "deepspeed.utils.zero_to_fp32", str(run), str(out / "fp32"), "--safe_serialization")
    theirs = (*python, "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder",
              str(run / TAG), "--output_folder", str(out / "ds_universal"))  # fmt: skip
    dcp_save = (*python, "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(dcp), str(out / "torch.pt"))
    return [
        Contender("zero_to_fp32", fp32, out / "fp32", (run,), "cp model"),
        Contender("ds_to_universal", theirs, out / "ds_universal", (run,), "cp"),
        Contender("dcp_to_torch", dcp_save, out / "torch.pt", (dcp,), "cp"),
    ]


PEERS = frozenset({"zero_to_fp32", "ds_to_universal", "dcp_to_torch"})


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        for one in [path] if path.is_file() else path.rglob("*"):
            if one.is_file():
                descriptor = os.open(one, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def warm(paths: Sequence[Path]) -> None:
    """Read files once."""
    for path in paths:
        for one in [path] if path.is_file() else path.rglob("*"):
            if one.is_file():
                with one.open("rb") as file:
                    while file.read(1 << 20):
                        pass


def run_once(one: Contender, taken: Taken | None = None) -> Peaks:
    """Run a command; without a place for what it takes, watch it instead of timing it."""
    parents = [one.target.parent] if one.target else []
    before, peaks, ended = disk_use(*parents), Peaks(), threading.Event()
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        child = subprocess.Popen(
            one.command, stdout=subprocess.DEVNULL, stderr=errors, env=environment(), cwd=HERE, start_new_session=True
        )
        watcher = threading.Thread(target=_watch, args=(child.pid, parents, before, peaks, ended))
        try:
            if taken is None:
                watcher.start()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # what it read and wrote is still there to be read
            seconds, io = time.perf_counter() - began, _io(child.pid)
            status = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            ended.set()
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(one.command)}\nexited with {status}\n{errors.read().decode(errors='replace')[-2000:]}")
    if taken is not None:
        taken.seconds.append(seconds)
        taken.io.append(io)
    else:
        watcher.join()
        peaks.seconds = seconds
        left = disk_use(*parents) - before
        peaks.extra = max(peaks.extra / left, 1.0) if left > 0 else math.nan
    return peaks


def _watch(session: int, parents: list[Path], before: int, peaks: Peaks, ended: threading.Event) -> None:
    peaks.extra = 0.0
    while not ended.wait(POLL_SECONDS):
        peaks.memory = max(peaks.memory, _anonymous(session) / 1e6)
        peaks.extra = max(peaks.extra, float(disk_use(*parents) - before))


def _anonymous(session: int) -> int:
    """Return the bytes of anonymous memory of all processes of a session; 0 where there is no /proc."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (process / "status").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return total


def _io(process: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def measure(every: list[Contender], repeat: int, cores: int, *, cold: bool) -> dict[str, Taken]:
    """Time all commands in turns on so many cores."""
    found = {one.name: Taken() for one in every}
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        for turn in range(repeat):
            for one in every[:: 1 if turn % 2 else -1]:
                if one.target is not None and not _is_needed(one, every):
                    clear(one.target)
                os.sync()
                (forget if cold else warm)(one.sources)
                if _is_needed(one, every):
                    _renewed(one, found[one.name])
                else:
                    run_once(one, found[one.name])
                    if one.target is not None:
                        clear(one.target)
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def watched(one: Contender, every: list[Contender]) -> Peaks:
    """Run a command and watch it; what it wrote stays only if others read it."""
    warm(one.sources)
    peaks = run_once(one)
    if one.target is not None and not _is_needed(one, every):
        clear(one.target)
    return peaks


def _is_needed(one: Contender, every: list[Contender]) -> bool:
    return any(one.target in other.sources for other in every if other is not one)


def _renewed(one: Contender, taken: Taken) -> None:
    """Run a command whose target others read: it is out of the way meanwhile."""
    kept = one.target.with_name(f"{one.target.name}.kept")
    one.target.rename(kept)
    try:
        run_once(one, taken)
        clear(one.target)
    finally:
        kept.rename(one.target)


def table(every: list[Contender], taken: dict[str, Taken], peaks: dict[str, Peaks]) -> str:
    """Return the table of one size, on some cores, warm or cold."""
    lines = [
        f"{'command':<17}{'runs':>5}{'median s':>10}{'min s':>8}{'ratio':>7}  {'of':<11}{'anon MB':>8}"
        f"{'read GB':>9}{'written':>9}{'from disk':>10}{'extra':>7}"
    ]
    for one in every:
        t, base = taken[one.name], taken[one.against]
        ratio = statistics.median(a / b for a, b in zip(t.seconds, base.seconds, strict=True))
        lines.append(
            f"{one.name:<17}{len(t.seconds):>5}{statistics.median(t.seconds):>10.3f}{min(t.seconds):>8.3f}{ratio:>7.2f}"
            f"  {one.against:<11}{peaks[one.name].memory:>8.1f}{t.gigabytes('rchar'):>9.3f}{t.gigabytes('wchar'):>9.3f}"
            f"{t.gigabytes('read_bytes'):>10.3f}{peaks[one.name].extra:>7.2f}"
        )
    return "\n".join(lines)


def table_of_peers(every: list[Contender], peaks: dict[str, Peaks]) -> str:
    """Return what the peers, and what they are held against, took while they were watched."""
    names = {*PEERS, *(one.against for one in every if one.name in PEERS)}
    lines = [f"{'command':<17}{'s':>10}{'anon MB':>10}{'extra':>7}"]
    for one in every:
        if one.name in names:
            p = peaks[one.name]
            lines.append(f"{one.name:<17}{p.seconds:>10.3f}{p.memory:>10.1f}{p.extra:>7.2f}")
    return "\n".join(lines)


def judged(every: list[Contender], taken: dict[str, Taken], label: str) -> list[Target]:
    """Return the targets of speed."""
    return [
        Target(
            f"{label}, {one.name} / {one.against}",
            statistics.median(a / b for a, b in zip(taken[one.name].seconds, taken[one.against].seconds, strict=True)),
            one.limit,
        )
        for one in every
        if one.limit is not None
    ]


def main() -> int:
    """Measure, print tables, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[500], help="of the checkpoint (default: 500)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cache", choices=["warm", "cold"], nargs="+", default=["warm", "cold"])
    parser.add_argument("--only", nargs="+", help="these commands, and what they are held against")
    parser.add_argument("--large-repeat", type=int, default=1, help="of checkpoints above 2 GB (default: 1)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 6 x the checkpoint")
    parser.add_argument("--skip-peers", action="store_true")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    targets: list[Target] = []
    memory: dict[str, list[float]] = {}
    touch_memory()
    for size in options.megabytes:
        checkpoint = make_checkpoint(work, width_for(size))
        every = contenders(checkpoint, work, peers=not options.skip_peers)
        if options.only:
            needed = {"consolidate", "to dcp", "cp", *options.only}
            needed |= {one.against for one in every if one.name in needed}
            every = [one for one in every if one.name in needed]
        clear(work / "targets")
        (work / "targets").mkdir()
        try:
            peaks = {one.name: watched(one, every) for one in every}
            for one in every:
                if one.limit is not None:
                    memory.setdefault(one.name, []).append(peaks[one.name].memory)
            large = size > LARGE_MEGABYTES
            if large and not options.skip_peers:
                print(f"{size} MB, peers, watched\n\n{table_of_peers(every, peaks)}\n", flush=True)
                every = [one for one in every if one.name not in PEERS]
            for cores in [max(options.cores)] if large else options.cores:
                for cache in options.cache:
                    repeat = options.large_repeat if large else options.repeat
                    taken = measure(every, repeat, cores, cold=cache == "cold")
                    label = f"{size} MB, {cache}, {cores} core{'s' if cores > 1 else ''}"
                    print(f"{label}\n\n{table(every, taken, peaks)}\n", flush=True)
                    targets += judged(every, taken, label)
        finally:
            clear(work / "targets")
    if len(options.megabytes) > 1:
        targets += [Target(f"{name}, growth, MB", max(some) - some[0], GROWTH_MB) for name, some in memory.items()]
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
