"""What a command costs before it does anything: `python bench/cold_start.py`. Minima, for a machine is never idle."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "fixtures" / "s2_bf16_dp4")
COMMANDS = (
    ["--version"],
    ["--help"],
    ["inspect", "--help"],
    ["convert", "--help"],
    ["inspect", SOURCE],
    ["fingerprint", SOURCE],
    ["diff", SOURCE, SOURCE],
    ["consolidate", SOURCE, "model.safetensors", "--overwrite"],
)


def timed(command: list[str], directory: str) -> tuple[float, float]:
    """Return the seconds of processor and of wall clock that a process took."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    print("| command | processor | wall |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for arguments in (None, *COMMANDS):
            command = (
                [sys.executable, "-c", "pass"] if arguments is None else [sys.executable, "-m", "zckpt", *arguments]
            )
            timed(command, directory)  # its modules are compiled, and its files in memory
            found = [timed(command, directory) for _ in range(runs)]
            processor, wall = (1000 * min(column) for column in zip(*found, strict=True))
            name = "python -c pass" if arguments is None else " ".join(["zckpt", *arguments]).replace(SOURCE, "SOURCE")
            print(f"| `{name}` | {processor:.0f} ms | {wall:.0f} ms |")


if __name__ == "__main__":
    main()
