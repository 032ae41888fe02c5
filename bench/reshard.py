"""Time `zckpt reshard` and `zckpt convert --to universal` against a plain copy and against DeepSpeed's ds_to_universal.

    python bench/reshard.py [--repeat N] [--work DIR] [--width N] [--skip-reference]

The checkpoint is that of bench/consolidate.py: 300M parameters by 8 ranks, 4.2 GB. The page cache is warm, all memory
has been used before, the commands take turns, none always first, written data is synced between them, and medians
count. Memory of all processes together and disk are the most at any moment of a run that is not timed; disk is what
the files in the folder of the target take, above what they took before. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from contest import (
    HERE,
    TAG,
    Peak,
    Target,
    Timing,
    clear,
    disk_use,
    make_checkpoint,
    paired,
    run,
    table,
    touch_memory,
    verdict,
    watch,
)

REFERENCE_RUNS = 3  # ds_to_universal is slow
WORLD_SIZE = 6

UNCHECKED = "--no-checksums"

# The targets.
COPY_RATIO = 1.15  # reshard / (cp + sync), at most
REFERENCE_SPEEDUP = 8.0  # ds_to_universal / convert, at least
CHECKSUM_RATIO = 1.05  # reshard / reshard --no-checksums, at most
PEAK_MB = 200.0
DISK_RATIO = 1.05  # disk taken at most / the target


@dataclass(frozen=True)
class Commands:
    """The command lines under comparison and the folders they write."""

    work: Path
    checkpoint: Path

    @property
    def targets(self) -> Path:
        """Return the folder below which everything is written."""
        return self.work / "targets"

    @property
    def copied(self) -> Path:
        """Return the copy of the run directory."""
        return self.targets / "copied"

    @property
    def resharded(self) -> Path:
        """Return what zckpt reshard writes."""
        return self.targets / "resharded"

    @property
    def universal(self) -> Path:
        """Return what zckpt convert writes."""
        return self.targets / "universal"

    @property
    def reference_folder(self) -> Path:
        """Return what ds_to_universal writes."""
        return self.targets / "reference"

    def copy(self) -> list[str]:
        """Return the copy that lasts."""
        script = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
        return ["sh", "-c", script, "sh", str(self.checkpoint), str(self.copied)]

    def reshard(self, *options: str) -> list[str]:
        """Return the command line of zckpt reshard."""
        program = [sys.executable, "-m", "zckpt", "reshard", "--world-size", str(WORLD_SIZE), "--quiet", *options]
        return [*program, str(self.checkpoint), str(self.resharded)]

    def convert(self) -> list[str]:
        """Return the command line of zckpt convert."""
        program = [sys.executable, "-m", "zckpt", "convert", "--to", "universal", "--quiet"]
        return [*program, str(self.checkpoint), str(self.universal)]

    def reference(self) -> list[str]:
        """Return the command line of DeepSpeed's own tool, with its default number of workers."""
        program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        folders = ["--input_folder", str(self.checkpoint / TAG), "--output_folder", str(self.reference_folder)]
        return [*program, *folders]


COMPARE = """
import sys, torch
from pathlib import Path
ours, theirs = (Path(path) / "zero" for path in sys.argv[1:])
names = sorted(path.name for path in theirs.iterdir() if path.is_dir())
assert names == sorted(path.name for path in ours.iterdir() if path.is_dir())
for name in names:
    for path in sorted((theirs / name).iterdir()):
        a, b = (torch.load(one / name / path.name, weights_only=False) for one in (ours, theirs))
        a, b = (x["param"] if isinstance(x, dict) else x for x in (a, b))
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), f"{name}/{path.name} differs"
"""


def nbytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fresh(folder: Path) -> None:
    """Make a folder, or empty it."""
    clear(folder)
    folder.mkdir()


def measure(commands: Commands, repeat: int, *, reference: bool) -> tuple[dict[str, Timing], dict[str, Peak]]:
    """Watch every command once, check the two universal checkpoints against each other, and time all in turns."""
    ours = {"cp + sync": commands.copy(), "reshard": commands.reshard(), "universal": commands.convert()}
    theirs = {"ds_to_universal": commands.reference()} if reference else {}
    touch_memory()
    peaks = watched(commands, ours | theirs)
    ours[UNCHECKED] = commands.reshard("--no-checksums")
    timings = {name: Timing() for name in ours | theirs}
    if reference:
        run([sys.executable, "-c", COMPARE, str(commands.universal), str(commands.reference_folder)])
        print("the tensors of zckpt and ds_to_universal are equal, bit for bit", file=sys.stderr)
    for turn in range(repeat):
        print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
        first = turn % len(ours)
        order = [*ours][first:] + [*ours][:first] + [name for name in theirs if turn < REFERENCE_RUNS]
        for name in order:
            fresh(commands.targets)
            run((ours | theirs)[name], timings[name])
    return timings, peaks


def watched(commands: Commands, all_of_them: dict[str, list[str]]) -> dict[str, Peak]:
    """Return what each command takes at most; its disk in multiples of what it leaves. Leaves all targets."""
    peaks = {}
    fresh(commands.targets)
    for name, command in all_of_them.items():
        before = nbytes(commands.targets)
        peaks[name] = watch(command, lambda: disk_use(commands.targets))
        peaks[name].disk *= 1e6 / (nbytes(commands.targets) - before)
    return peaks


def judge(timings: dict[str, Timing], peaks: dict[str, Peak]) -> list[Target]:
    """Return the targets with what was measured."""
    copy, reshard, universal = (timings[name] for name in ("cp + sync", "reshard", "universal"))
    targets = [
        Target("reshard / cp + sync", reshard.median / copy.median, COPY_RATIO),
        Target(f"reshard / {UNCHECKED}", paired(reshard, timings[UNCHECKED]), CHECKSUM_RATIO),
    ]
    if "ds_to_universal" in timings:
        speedup = timings["ds_to_universal"].median / universal.median
        targets.append(Target("ds_to_universal / universal", speedup, REFERENCE_SPEEDUP, at_least=True))
    for name in ("reshard", "universal"):
        targets.append(Target(f"{name}, peak MB", max(timings[name].peak, peaks[name].memory), PEAK_MB))
        targets.append(Target(f"{name}, disk / target", peaks[name].disk, DISK_RATIO))
    return targets


def watched_table(peaks: dict[str, Peak]) -> str:
    """Return the table of what the commands take at most."""
    lines = [f"{'command':<18}{'all processes, MB':>18}{'disk / target':>15}"]
    return "\n".join(lines + [f"{name:<18}{p.memory:>18.1f}{p.disk:>15.3f}" for name, p in peaks.items()])


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=6, help="turns (default: 6)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 25 GB (default: bench/cache)")
    parser.add_argument("--width", type=int, help="of a narrower model, to try this program (default: 1280)")
    parser.add_argument("--skip-reference", action="store_true", help="leave ds_to_universal out")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    commands = Commands(work, make_checkpoint(work, arguments.width))
    try:
        timings, peaks = measure(commands, arguments.repeat, reference=not arguments.skip_reference)
    finally:
        clear(commands.targets)
    targets = judge(timings, peaks)
    print(f"source: {nbytes(commands.checkpoint) / 1e6:.1f} MB")
    print(f"\n{table(timings, 'cp + sync')}\n\n{watched_table(peaks)}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
