"""Time `zckpt consolidate` and `zckpt inspect` against a plain copy and against DeepSpeed's zero_to_fp32.

    python bench/consolidate.py [--repeat N] [--work DIR] [--skip-reference]

A checkpoint of 300M parameters (4.2 GB) is made once below --work. Every command runs as a child process;
wall time is from spawn to exit and peak memory from wait4, so this program imports nothing but the standard
library: a child's peak includes what its parent had when it was spawned. The page cache is warm, all memory has
been used before, the commands take turns, neither always first, written data is synced between them, and medians
count. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TEMPLATE = ROOT / "fixtures" / "s2_bf16_dp4" / "global_step5"
TAG = "global_step1000"
REFERENCE_RUNS = 3  # zero_to_fp32 is slow and hardly varies
INSPECT_RUNS = 3  # per turn: it is short, and short times vary more
BLOCK = 1 << 20  # bytes; small, because a child's peak is at least its parent's

# The targets.
COPY_RATIO = 1.10  # consolidate / (cp + sync), at most
REFERENCE_SPEEDUP = 6.0  # zero_to_fp32 / consolidate, at least
CONSOLIDATE_MB = 150.0
INSPECT_SECONDS = 0.25
INSPECT_MB = 60.0

# On a virtual machine, memory that was never used costs many times more at its first use, and whichever command
# happens to be given it pays. So all of it is used once before anything is timed.
TOUCH_MEMORY = """
import mmap, os
nbytes = int(0.85 * os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
memory, block = mmap.mmap(-1, nbytes), b"x" * (1 << 22)
while memory.tell() + len(block) <= nbytes:
    memory.write(block)
"""

COMPARE = """
import sys
from safetensors import safe_open
a, b = (safe_open(path, "pt") for path in sys.argv[1:])
names, others = set(a.keys()), set(b.keys())
assert names == others, f"names differ: {sorted(names ^ others)[:5]}"
for name in sorted(names):
    x, y = a.get_tensor(name), b.get_tensor(name)
    assert x.dtype == y.dtype and x.shape == y.shape, f"{name}: {x.dtype}{x.shape} and {y.dtype}{y.shape}"
    assert bool((x.view(-1).numpy().view("u1") == y.view(-1).numpy().view("u1")).all()), f"{name} differs"
"""


@dataclass
class Timing:
    """The runs of one command: wall time in seconds, peak memory in MB (10^6 bytes)."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median wall time in seconds."""
        return statistics.median(self.seconds)

    @property
    def peak(self) -> float:
        """Return the highest peak memory of all runs in MB."""
        return max(self.peaks)


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


def run(command: Sequence[str], timing: Timing | None = None) -> None:
    """Run `command` to its end and note what it took; what it printed is shown if it failed."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    os.sync()
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=HERE)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-2000:]
            sys.exit(f"{' '.join(command)}\nexited with {child.returncode}\n{said}")
    if timing is not None:
        timing.seconds.append(seconds)
        timing.peaks.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6)


def make_checkpoint(work: Path) -> Path:
    """Return the run directory, made on first use."""
    checkpoint = work / "checkpoint"
    if not (checkpoint / "latest").exists():
        print("making the checkpoint (once) ...", file=sys.stderr)
        unfinished = work / "checkpoint.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        run([sys.executable, str(HERE / "checkpoint.py"), str(TEMPLATE), str(unfinished)])
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


@dataclass(frozen=True)
class Commands:
    """The command lines under comparison and the files they write, all below one folder."""

    work: Path
    checkpoint: Path

    @property
    def source(self) -> Path:
        """Return the file that is copied, as long as the consolidated model."""
        return self.work / "source.bin"

    @property
    def copied(self) -> Path:
        """Return the copy of it."""
        return self.work / "copied.bin"

    @property
    def model(self) -> Path:
        """Return what zckpt writes."""
        return self.work / "model.safetensors"

    @property
    def reference_folder(self) -> Path:
        """Return the folder that zero_to_fp32 writes."""
        return self.work / "reference"

    def copy(self) -> list[str]:
        """Return the copy that lasts: the least that any tool must do to write such a file."""
        return ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(self.source), str(self.copied)]

    def consolidate(self) -> list[str]:
        """Return the command line of zckpt consolidate."""
        program = [sys.executable, "-m", "zckpt", "consolidate"]
        return [*program, str(self.checkpoint / TAG), str(self.model), "--quiet", "--overwrite"]

    def inspect(self, *options: str) -> list[str]:
        """Return the command line of zckpt inspect."""
        return [sys.executable, "-m", "zckpt", "inspect", str(self.checkpoint / TAG), *options]

    def reference(self) -> list[str]:
        """Return the command line of DeepSpeed's own tool."""
        program = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32"]
        return [*program, str(self.checkpoint), str(self.reference_folder), "--safe_serialization"]


def measure(commands: Commands, repeat: int, *, reference: bool) -> dict[str, Timing]:
    """Warm the cache, check the two results against each other, and time all commands in turns."""
    timings = {name: Timing() for name in ("cp + sync", "consolidate", "inspect", "inspect --json")}
    run([sys.executable, "-c", TOUCH_MEMORY])
    run(commands.consolidate())
    run(commands.inspect())
    make_source(commands.source, commands.model.stat().st_size)
    if reference:
        timings["zero_to_fp32"] = Timing()
        run(commands.reference())
        check_equal(commands)
    for turn in range(repeat):
        print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
        contest = [
            (commands.copied, commands.copy(), timings["cp + sync"]),
            (commands.model, commands.consolidate(), timings["consolidate"]),
        ]
        for written, command, timing in contest[:: 1 if turn % 2 else -1]:  # neither is always the first
            clear(written)
            run(command, timing)
        clear(commands.reference_folder)
        for _ in range(INSPECT_RUNS):
            run(commands.inspect(), timings["inspect"])
            run(commands.inspect("--json"), timings["inspect --json"])
        if reference and turn < REFERENCE_RUNS:
            run(commands.reference(), timings["zero_to_fp32"])
    return timings


def check_equal(commands: Commands) -> None:
    """Stop unless zckpt and zero_to_fp32 wrote the same tensors, bit for bit."""
    (written,) = commands.reference_folder.glob("*.safetensors")
    run([sys.executable, "-c", COMPARE, str(commands.model), str(written)])
    print("the tensors of zckpt and zero_to_fp32 are equal, bit for bit", file=sys.stderr)


def judge(timings: dict[str, Timing]) -> list[Target]:
    """Return the targets with what was measured."""
    consolidate, inspect, as_json = (timings[k] for k in ("consolidate", "inspect", "inspect --json"))
    targets = [
        Target("consolidate / cp + sync", consolidate.median / timings["cp + sync"].median, COPY_RATIO),
        Target("consolidate, peak MB", consolidate.peak, CONSOLIDATE_MB),
        Target("inspect, seconds", inspect.median, INSPECT_SECONDS),
        Target("inspect, peak MB", inspect.peak, INSPECT_MB),
        Target("inspect --json, seconds", as_json.median, INSPECT_SECONDS),
        Target("inspect --json, peak MB", as_json.peak, INSPECT_MB),
    ]
    if "zero_to_fp32" in timings:
        speedup = timings["zero_to_fp32"].median / consolidate.median
        targets.append(Target("zero_to_fp32 / consolidate", speedup, REFERENCE_SPEEDUP, at_least=True))
    return targets


def print_results(timings: dict[str, Timing], targets: list[Target], nbytes: int) -> None:
    """Print the table of the runs and the table of the targets."""
    base = timings["cp + sync"].median
    print(f"consolidated model: {nbytes / 1e6:.1f} MB")
    print(f"\n{'command':<16}{'runs':>5}{'median s':>10}{'min s':>9}{'max s':>9}{'peak MB':>10}{'x cp':>8}")
    for name, t in timings.items():
        spread = f"{t.median:>10.3f}{min(t.seconds):>9.3f}{max(t.seconds):>9.3f}"
        print(f"{name:<16}{len(t.seconds):>5}{spread}{t.peak:>10.1f}{t.median / base:>8.2f}")
    print(f"\n{'target':<28}{'measured':>10}{'limit':>12}")
    for target in targets:
        limit = f"{'>=' if target.at_least else '<='} {target.limit:g}"
        print(f"{target.text:<28}{target.value:>10.3f}{limit:>12}  {'holds' if target.holds else 'MISSED'}")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 10 GB (default: bench/cache)")
    parser.add_argument("--skip-reference", action="store_true", help="leave zero_to_fp32 out")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    commands = Commands(work, make_checkpoint(work))
    try:
        timings = measure(commands, arguments.repeat, reference=not arguments.skip_reference)
        nbytes = commands.source.stat().st_size
    finally:
        clear(commands.source, commands.copied, commands.model, commands.reference_folder)
    targets = judge(timings)
    print_results(timings, targets, nbytes)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
