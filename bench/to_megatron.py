"""Time `zckpt convert --to megatron` of what Megatron-Core wrote at tensor parallel 2, against `cp -r` of the same.

Both leave their files on the disk, not in the page cache: `cp` is followed by `sync`.

    python bench/to_megatron.py [--repeat N] [--work DIR] [--gigabytes N]

A `torch_dist` checkpoint of 4 GB (`--gigabytes 1`: of 1, to try this program), bfloat16 weights with masters and two
moments, is saved once by megatron-core itself, on two ranks: every layer is in halves, of which those of row-parallel
layers are columns. Written are whole layers. The page cache is warm, all memory has been used before, the commands take
turns, neither always first, and medians count. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from contest import HERE, Target, Timing, clear, run, table, touch_memory, verdict

# The targets.
TIME = 2.0  # convert / cp, at most
MEMORY = 250.0  # MB, convert's peak, at most

STATE_NBYTES = 14  # of each parameter: weight in two bytes, master and two moments in four
WIDTH = 1024

MAKE = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
from tests import gloo
if __name__ == "__main__":
    import bench.to_megatron as bench
    gloo.run(bench.save, 2, Path(sys.argv[1]), int(sys.argv[2]), fresh=True)
"""

COMPARE = """
import sys, zckpt
found = zckpt.diff(*sys.argv[1:])
sys.exit(bool(found.changed or found.only_in_a or found.only_in_b))
"""


def save(rank: int, world: int, run: Path, layers: int) -> None:
    """Save a model of some layers, of which each of two ranks has half, as Megatron-Core does."""
    import torch
    import torch.distributed as dist

    from tests import megatron_core

    megatron_core.patch()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    half, w = WIDTH * 4 // world, WIDTH
    shapes = {
        "self_attention.linear_qkv.weight": (0, (3 * w // world, w)),
        "self_attention.linear_proj.weight": (1, (w, w // world)),
        "mlp.linear_fc1.weight": (0, (half, w)),
        "mlp.linear_fc2.weight": (1, (w, half)),
    }
    state = {}
    torch.manual_seed(rank)
    for layer in range(layers):
        for name, (axis, shape) in shapes.items():
            master = torch.randn(shape)
            its = {"": master.bfloat16(), "optimizer.state.param.": master}
            its |= {f"optimizer.state.{slot}.": torch.rand(shape) for slot in ("exp_avg", "exp_avg_sq")}
            for prefix, tensor in its.items():
                key = f"{prefix}decoder.layers.{name}"
                state[f"{layer}.{key}"] = ShardedTensor.from_rank_offsets(
                    key, tensor, (0, layer, layers), (1 + axis, rank, world), prepend_axis_num=1
                )
    group = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 1e-3}
    optimizer = {
        "optimizer": {"param_groups": [{**group, "step": 7.0}]},
        "param_state_sharding_type": "fully_reshardable",
    }
    folder = run / "iter_0000007"
    if rank == 0:
        folder.mkdir(parents=True)
        (run / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    with megatron_core.writers():
        dist_checkpointing.save({"model": state, "optimizer": optimizer, "iteration": 7}, str(folder))
    dist.barrier()


def make(work: Path, gigabytes: float) -> Path:
    """Return a run's directory, made if it is not there."""
    folder = work / f"torch_dist_{gigabytes:g}"
    if not folder.exists():
        layers = max(round(gigabytes * 1e9 / STATE_NBYTES / (12 * WIDTH**2)), 1)
        run([sys.executable, "-c", MAKE.format(root=str(HERE.parent)), str(folder), str(layers)])
    return folder


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 12 GB (default: bench/cache)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint (default: 4)")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = make(work, arguments.gigabytes)
    ours, copy = work / "ours", work / "copy"
    convert = [sys.executable, "-m", "zckpt", "convert", str(source), str(ours), "--to", "megatron", "--quiet"]
    copied = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source), str(copy)]
    timings = {"convert": Timing(), "cp and sync": Timing()}
    touch_memory()
    clear(ours, copy)
    try:
        run(convert)
        run(copied)
        run([sys.executable, "-c", COMPARE, str(source), str(ours)])
        print("every slot is the source's, bit for bit", file=sys.stderr)
        for turn in range(arguments.repeat):
            print(f"turn {turn + 1} of {arguments.repeat}", file=sys.stderr)
            contest = [(ours, convert, timings["convert"]), (copy, copied, timings["cp and sync"])]
            for written, command, timing in contest[:: 1 if turn % 2 else -1]:  # neither is always the first
                clear(written)
                run(command, timing)
                os.sync()
    finally:
        clear(ours, copy)
    first, second = timings.values()
    targets = [
        Target("convert / cp", first.median / second.median, TIME),
        Target("peak memory of convert, MB", first.peak, MEMORY),
    ]
    print(f"{table(timings, 'cp and sync')}\n\n{verdict(targets)}")
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
