"""Time `zckpt consolidate` and `zckpt inspect` against a plain copy and against DeepSpeed's zero_to_fp32.

    python bench/consolidate.py [--repeat N] [--work DIR] [--width N] [--skip-reference]

A checkpoint of 300M parameters (4.2 GB) is made once below --work. The page cache is warm, all memory has been used
before, the commands take turns, neither always first, written data is synced between them, and medians count. Exit 1
if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from contest import (
    HERE,
    TAG,
    Target,
    Timing,
    clear,
    make_checkpoint,
    make_source,
    paired,
    run,
    table,
    touch_memory,
    verdict,
)

REFERENCE_RUNS = 3  # zero_to_fp32 is slow and hardly varies
INSPECT_RUNS = 3  # per turn: it is short, and short times vary more

# The targets.
COPY_RATIO = 1.10  # consolidate / (cp + sync), at most
REFERENCE_SPEEDUP = 6.0  # zero_to_fp32 / consolidate, at least
CONSOLIDATE_MB = 150.0
CHECKSUM_RATIO = 1.05  # consolidate / consolidate --no-checksums, at most
INSPECT_SECONDS = 0.25
INSPECT_MB = 60.0

UNCHECKED = "--no-checksums"

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

    def consolidate(self, *options: str) -> list[str]:
        """Return the command line of zckpt consolidate."""
        program = [sys.executable, "-m", "zckpt", "consolidate"]
        return [*program, str(self.checkpoint / TAG), str(self.model), "--quiet", "--overwrite", *options]

    def inspect(self, *options: str) -> list[str]:
        """Return the command line of zckpt inspect."""
        return [sys.executable, "-m", "zckpt", "inspect", str(self.checkpoint / TAG), *options]

    def reference(self) -> list[str]:
        """Return the command line of DeepSpeed's own tool."""
        program = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32"]
        return [*program, str(self.checkpoint), str(self.reference_folder), "--safe_serialization"]


def measure(commands: Commands, repeat: int, *, reference: bool) -> dict[str, Timing]:
    """Warm the cache, check the two results against each other, and time all commands in turns."""
    timings = {name: Timing() for name in ("cp + sync", "consolidate", UNCHECKED, "inspect", "inspect --json")}
    touch_memory()
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
            (commands.model, commands.consolidate("--no-checksums"), timings[UNCHECKED]),
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
        Target(f"consolidate / {UNCHECKED}", paired(consolidate, timings[UNCHECKED]), CHECKSUM_RATIO),
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


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 10 GB (default: bench/cache)")
    parser.add_argument("--width", type=int, help="of a narrower model, to try this program (default: 1280)")
    parser.add_argument("--skip-reference", action="store_true", help="leave zero_to_fp32 out")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    commands = Commands(work, make_checkpoint(work, arguments.width))
    try:
        timings = measure(commands, arguments.repeat, reference=not arguments.skip_reference)
        nbytes = commands.source.stat().st_size
    finally:
        clear(commands.source, commands.copied, commands.model, commands.reference_folder)
    targets = judge(timings)
    print(f"consolidated model: {nbytes / 1e6:.1f} MB\n\n{table(timings, 'cp + sync')}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
