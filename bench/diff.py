"""Time `zckpt diff` and `zckpt fingerprint` against reading the same files once, `cmp`, and a script with torch.

    python bench/diff.py [--repeat N] [--work DIR] [--width N]

A checkpoint of 300M parameters (4.2 GB) is made once below --work, and cut for 8 and for 6 ranks: the same state in
other places, which is compared. `cmp` and the script compare the one of 8 ranks with a copy of it, file by file, for
they know nothing of layouts. The page cache is warm, the commands take turns, and medians count. Exit 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from contest import HERE, Target, Timing, clear, make_checkpoint, run, table, touch_memory, verdict

WORLD_SIZES = 8, 6

# The targets.
DIFF_RATIO = 1.5  # diff / reading both once, at most
DIFF_MB = 400.0
FINGERPRINT_RATIO = 1.3  # fingerprint / reading one once, at most

CMP = 'cd "$1" && find . -type f | while read -r file; do cmp "$file" "$2/$file" || exit 1; done'

SCRIPT = """
import sys, torch
from pathlib import Path

def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)

a, b = map(Path, sys.argv[1:])
count = 0
for path in sorted(a.rglob("*.pt")):
    both = (torch.load(one, weights_only=False) for one in (path, b / path.relative_to(a)))
    for x, y in zip(*map(tensors, both), strict=True):
        assert torch.equal(x, y), path
        count += 1
assert count
"""


@dataclass(frozen=True)
class Commands:
    """The command lines under comparison, all below one folder."""

    work: Path

    def cut(self, world_size: int) -> Path:
        """Return the checkpoint of some ranks."""
        return self.work / f"diff-dp{world_size}"

    @property
    def a(self) -> Path:
        """Return one side."""
        return self.cut(WORLD_SIZES[0])

    @property
    def b(self) -> Path:
        """Return the other side."""
        return self.cut(WORLD_SIZES[1])

    @property
    def copy(self) -> Path:
        """Return what has the same files as the one side."""
        return self.work / "diff-copy"

    def read(self, *folders: Path) -> list[str]:
        """Return what reads all files once."""
        return ["sh", "-c", 'find "$@" -type f -exec cat {} + > /dev/null', "sh", *map(str, folders)]

    def zckpt(self, verb: str, *folders: Path) -> list[str]:
        """Return a command line of zckpt."""
        return [sys.executable, "-m", "zckpt", verb, "--quiet", *map(str, folders)]


def measure(commands: Commands, repeat: int) -> dict[str, Timing]:
    """Time all commands in turns, neither always first."""
    contest = {
        "read both": commands.read(commands.a, commands.b),
        "cmp": ["sh", "-c", CMP, "sh", str(commands.a), str(commands.copy)],
        "diff": commands.zckpt("diff", commands.a, commands.b),
        "torch.equal": [sys.executable, "-c", SCRIPT, str(commands.a), str(commands.copy)],
        "read one": commands.read(commands.a),
        "fingerprint": commands.zckpt("fingerprint", commands.a),
    }
    timings = {name: Timing() for name in contest}
    touch_memory()
    for command in contest.values():
        run(command)
    for turn in range(repeat):
        print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
        for name in list(contest)[:: 1 if turn % 2 else -1]:
            run(contest[name], timings[name])
    return timings


def judge(timings: dict[str, Timing]) -> list[Target]:
    """Return the targets with what was measured."""
    diff, fingerprint = timings["diff"], timings["fingerprint"]
    return [
        Target("diff / reading both once", diff.median / timings["read both"].median, DIFF_RATIO),
        Target("diff, peak MB", diff.peak, DIFF_MB),
        Target("fingerprint / reading one once", fingerprint.median / timings["read one"].median, FINGERPRINT_RATIO),
        Target("fingerprint, peak MB", fingerprint.peak, DIFF_MB),
    ]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 17 GB (default: bench/cache)")
    parser.add_argument("--width", type=int, help="of a narrower model, to try this program (default: 1280)")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    commands = Commands(work)
    try:
        checkpoint = make_checkpoint(work, arguments.width)
        for world_size in WORLD_SIZES:
            options = ["--world-size", str(world_size), "--overwrite"]
            run([*commands.zckpt("reshard", checkpoint, commands.cut(world_size)), *options])
        clear(commands.copy)
        run(["cp", "-r", str(commands.a), str(commands.copy)])
        timings = measure(commands, arguments.repeat)
    finally:
        clear(commands.a, commands.b, commands.copy)
    targets = judge(timings)
    print(f"{table(timings, 'read both')}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
