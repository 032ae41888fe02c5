"""What the benchmarks share: children that are timed, in turns, and targets that they are held against.

Every command runs as a child process; wall time is from spawn to exit and peak memory from wait4, the largest of the
child and its own children. The programs import nothing but the standard library: a child's peak includes what its
parent had when it was spawned. What all processes of a command take together, and how much disk, is watched in a run
that is not timed.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TEMPLATE = ROOT / "fixtures" / "s2_bf16_dp4" / "global_step5"
TAG = "global_step1000"
BYTECODE = str(HERE / "cache" / "bytecode")
BLOCK = 1 << 20  # bytes; small, because a child's peak is at least its parent's
POLL_SECONDS = 0.05

# On a virtual machine, memory that was never used costs many times more at its first use, and whichever command
# happens to be given it pays. So all of it is used once before anything is timed.
TOUCH_MEMORY = """
import mmap, os
nbytes = int(0.85 * os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
memory, block = mmap.mmap(-1, nbytes), b"x" * (1 << 22)
while memory.tell() + len(block) <= nbytes:
    memory.write(block)
"""


@dataclass
class Timing:
    """The runs of one command: wall and CPU time in seconds, peak memory in MB (10^6 bytes)."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median wall time in seconds."""
        return statistics.median(self.seconds)

    @property
    def peak(self) -> float:
        """Return the highest peak memory of all runs in MB."""
        return max(self.peaks)


def paired(one: Timing, other: Timing) -> float:
    """Return the median of what one command took over the other in each turn, in which both ran one after the other."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Target:
    """A promise about a measured value."""

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Say whether the promise is kept."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Peak:
    """The most that a command took at once, in MB (10^6 bytes): memory of all its processes, and disk."""

    memory: float = 0.0
    disk: float = 0.0


def run(command: Sequence[str], timing: Timing | None = None) -> None:
    """Run `command` to its end and note what it took; what it printed is shown if it failed."""
    os.sync()
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        child = _spawn(command, errors)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        _check(child, command, errors)
    if timing is not None:
        timing.seconds.append(seconds)
        timing.cpu.append(usage.ru_utime + usage.ru_stime)
        timing.peaks.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6)


def watch(command: Sequence[str], taken: Callable[[], int]) -> Peak:
    """Run `command` without timing it and return the most it took; `taken` tells the bytes of disk at a moment."""
    peak, first = Peak(), taken()
    ended = threading.Event()

    def poll(session: int) -> None:
        while not ended.wait(POLL_SECONDS):
            peak.memory = max(peak.memory, _memory(session) / 1e6)
            peak.disk = max(peak.disk, (taken() - first) / 1e6)

    with tempfile.TemporaryFile() as errors:
        child = _spawn(command, errors, start_new_session=True)  # by which its processes are known
        poller = threading.Thread(target=poll, args=(child.pid,))
        poller.start()
        try:
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            ended.set()
            poller.join()
        _check(child, command, errors)
    peak.disk = max(peak.disk, (taken() - first) / 1e6)
    return peak


def environment() -> dict[str, str]:
    """Return what a command finds in its environment."""
    found = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": BYTECODE}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode, and so is measured with it
    return found


def _spawn(command: Sequence[str], errors: IO[bytes], **options: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment(), cwd=HERE, **options)


def _check(child: subprocess.Popen[bytes], command: Sequence[str], errors: IO[bytes]) -> None:
    if child.returncode != 0:
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-2000:]
        sys.exit(f"{' '.join(command)}\nexited with {child.returncode}\n{said}")


def _memory(session: int) -> int:
    """Return the bytes that the processes of a session take, shared pages once; 0 where there is no /proc."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                rollup = (process / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return total


def disk_use(*folders: Path) -> int:
    """Return the bytes that all files in some folders take on disk."""
    total, waiting = 0, [str(folder) for folder in folders]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:  # a folder or file that is being removed
            continue
    return total


def make_checkpoint(work: Path, width: int | None = None) -> Path:
    """Return the run directory, made on first use; a width makes another model than the usual one."""
    checkpoint = work / ("checkpoint" if width is None else f"checkpoint-{width}")
    if not (checkpoint / "latest").exists():
        print("making the checkpoint (once) ...", file=sys.stderr)
        unfinished = work / "checkpoint.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        size = [] if width is None else [str(width)]
        run([sys.executable, str(HERE / "checkpoint.py"), str(TEMPLATE), str(unfinished), *size])
        unfinished.rename(checkpoint)
    return checkpoint


def make_source(path: Path, nbytes: int) -> None:
    """Write the incompressible file that `cp` copies."""
    with path.open("wb") as file:
        for start in range(0, nbytes, BLOCK):
            file.write(os.urandom(min(BLOCK, nbytes - start)))


def clear(*paths: Path) -> None:
    """Remove what a run wrote, so that no run pays for the file of the one before."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def touch_memory() -> None:
    """Use all memory once, so that no command pays for the first use of any."""
    run([sys.executable, "-c", TOUCH_MEMORY])


def table(timings: dict[str, Timing], base: str) -> str:
    """Return the table of the runs, each beside the one called `base`."""
    lines = [f"{'command':<18}{'runs':>5}{'median s':>10}{'min s':>9}{'max s':>9}{'peak MB':>10}{'ratio':>8}"]
    for name, t in timings.items():
        spread = f"{t.median:>10.3f}{min(t.seconds):>9.3f}{max(t.seconds):>9.3f}"
        lines.append(f"{name:<18}{len(t.seconds):>5}{spread}{t.peak:>10.1f}{t.median / timings[base].median:>8.2f}")
    return "\n".join(lines)


def verdict(targets: Sequence[Target]) -> str:
    """Return the table of the targets."""
    lines = [f"{'target':<36}{'measured':>10}{'limit':>12}"]
    for target in targets:
        limit = f"{'>=' if target.at_least else '<='} {target.limit:g}"
        lines.append(f"{target.text:<36}{target.value:>10.3f}{limit:>12}  {'holds' if target.holds else 'MISSED'}")
    return "\n".join(lines)
