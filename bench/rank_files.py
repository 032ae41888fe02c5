"""Time `zckpt consolidate` on the files of FSDP's ranks against a merger that loads them all, as verl's own does.

    python bench/rank_files.py [--repeat N] [--work DIR] [--gigabytes N] [--ranks N]

A model of 4 GB in float32 (`--gigabytes 1`: of 1, to try this program), cut for 8 ranks, is made once below --work. The
merger loads every rank's file with torch.load in threads, casts to bfloat16, concatenates and saves: the steps of verl
0.9's FSDP merger. zckpt writes the same bytes. The page cache is warm, all memory has been used before, the commands
take turns, neither always first, and medians count. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from contest import HERE, Target, Timing, clear, run, table, touch_memory, verdict

# The targets.
SPEEDUP = 5.0  # merger / consolidate, at least
MEMORY = 0.1  # consolidate's peak / the merger's, at most

MAKE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import zckpt
folder, gigabytes, ranks = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
w = 2048
layer = {"q": (w, w), "k": (w // 4, w), "v": (w // 4, w), "o": (w, w), "gate": (4 * w, w), "up": (4 * w, w),
         "down": (w, 4 * w), "norm": (w,)}
torch.manual_seed(0)
layers = max(round(gigabytes * 1e9 / 4 / sum(torch.Size(shape).numel() for shape in layer.values())), 1)
whole = folder.with_suffix(".safetensors")
save_file({f"model.layers.{n}.{name}.weight": torch.randn(shape) for n in range(layers)
           for name, shape in layer.items()}, whole)
zckpt.convert(whole, folder, to="fsdp-rank-files", world_size=ranks, device="cpu")
whole.unlink()
"""

COMPARE = "import sys, zckpt; sys.exit(not zckpt.diff(*sys.argv[1:]).equal)"

MERGE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
import torch
from safetensors.torch import save_file
source, target, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def load(rank):
    return torch.load(source / f"model_world_size_{ranks}_rank_{rank}.pt", map_location="cpu", weights_only=False)
with ThreadPoolExecutor(min(32, cpu_count())) as threads:
    shards = list(threads.map(load, range(ranks)))
merged = {}
for name in list(shards[0]):
    pieces = [shard.pop(name)._local_tensor.bfloat16() for shard in shards]
    merged[name] = torch.cat(pieces, dim=0).contiguous()
save_file(merged, target, {"format": "pt"})
"""


def make_ranks(work: Path, gigabytes: float, ranks: int) -> Path:
    """Return a directory with the files of all ranks, made if it is not there."""
    folder = work / f"ranks_{gigabytes:g}_{ranks}"
    if not folder.exists():
        run([sys.executable, "-c", MAKE, str(folder), str(gigabytes), str(ranks)])
    return folder


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 9 GB (default: bench/cache)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the model in float32 (default: 4)")
    parser.add_argument("--ranks", type=int, default=8, help="(default: 8)")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = make_ranks(work, arguments.gigabytes, arguments.ranks)
    ours, theirs = work / "ours.safetensors", work / "theirs.safetensors"
    consolidate = [
        sys.executable,
        "-m",
        "zckpt",
        "consolidate",
        str(source),
        str(ours),
        "--dtype",
        "bfloat16",
        "--quiet",
    ]
    merge = [sys.executable, "-c", MERGE, str(source), str(theirs), str(arguments.ranks)]
    timings = {"consolidate": Timing(), "merger": Timing()}
    touch_memory()
    try:
        run(consolidate)
        run(merge)
        run([sys.executable, "-c", COMPARE, str(ours), str(theirs)])
        print("the tensors of zckpt and the merger are equal, bit for bit", file=sys.stderr)
        for turn in range(arguments.repeat):
            print(f"turn {turn + 1} of {arguments.repeat}", file=sys.stderr)
            contest = [(ours, consolidate, timings["consolidate"]), (theirs, merge, timings["merger"])]
            for written, command, timing in contest[:: 1 if turn % 2 else -1]:  # neither is always the first
                clear(written)
                run(command, timing)
                os.sync()
    finally:
        clear(ours, theirs)
    first, second = timings.values()
    targets = [
        Target("merger / consolidate", second.median / first.median, SPEEDUP, at_least=True),
        Target("peak memory, consolidate / merger", first.peak / second.peak, MEMORY),
    ]
    print(f"{table(timings, 'consolidate')}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
