"""Measure what opening, inspecting, planning, verifying and copying cost as the number of ranks grows.

    python bench/plan_scale.py [--kinds zero2,zero3] [--ranks 8,64,256] [--parameters N] [--verbs open,inspect] [--keep]
    python bench/plan_scale.py --kinds zero2,zero3 --ranks 1024 --verbs ends --work DIR --keep   # verbs to their end

Every checkpoint has the same small parameters (10,000 of about 3,000 elements), cut for so many ranks. The files are
genuine: a fixture that DeepSpeed wrote, its tensors, shapes and mappings replaced, saved by torch; ranks whose files
say the same are copies of one of them, under their own names. Our own format and DCP are converted from ZeRO-2, and
`reshard` converts them to themselves. `ends` are verbs that read or write all elements: `restage` writes ZeRO-2 as
ZeRO-3 and the other way round, for as many ranks, and `diff` compares a checkpoint with that. Each verb is a child
process; its CPU time is that of all its threads, and its memory the most that it had resident, and of that the most
that is no file's (`anon`: sampled, of Linux). `floor` reads the structure of each file and keeps none, of DCP and our
own that of the one file which lists all, and `start` starts the program and does nothing. The exponent is that of CPU
time, less `start`, in the number of ranks, between one row and the one above. `--keep` leaves the checkpoints in
bench/cache for the next time.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
TAG = "global_step5"
KINDS = ("zero1", "zero2", "zero3", "own", "dcp")
CONVERTED = {"own": "zckpt", "dcp": "dcp"}
CONVERTED_FROM = 8
VERBS = ("start", "floor", "open", "inspect", "reshard", "verify")
ENDS = ("inspect", "map", "consolidate", "fingerprint", "strip", "restage", "diff", "universal", "dcp", "deep")
SAMPLED_S = 0.02
WEIGHT_DECAY = 0.1

START = "import zckpt.cli"
FLOOR = """
import pathlib, sys
from zckpt.torchfile import read_torchfile
root = pathlib.Path(sys.argv[1])
for path in sorted(root.rglob("*.pt")):
    read_torchfile(path)
for path in root.glob(".metadata"):
    from zckpt.torchfile import read_pickle
    read_pickle(path)
for path in root.glob("checkpoint.json"):
    import json
    json.loads(path.read_bytes())
"""
OPEN = "import sys, zckpt.cli, zckpt; zckpt.open(sys.argv[1])"
COMMAND = "import sys; from zckpt.cli import main; sys.exit(main())"


Measured = tuple[float, float, float, int]
"""CPU time in seconds, peak of all memory and of what is no file's in MB, exit status."""


def shapes(count: int) -> dict[str, tuple[int, int]]:
    """Return the parameters: a few sizes, none a multiple of any number of ranks."""
    return {f"model.layers.{i // 10}.block.{i % 10}.weight": (61 + i % 7, 47 + i % 5) for i in range(count)}


def make(kind: str, ranks: int, count: int, target: Path) -> None:
    """Write a run directory, or a checkpoint of another format."""
    if kind in CONVERTED:
        source = target.with_name(f"{target.name}.source")
        make("zero2", CONVERTED_FROM, count, source)
        arguments = ["convert", source, target, "--to", CONVERTED[kind], "--world-size", str(ranks), "--quiet"]
        subprocess.run([sys.executable, "-m", "zckpt", *arguments, "--no-fingerprint"], check=True)
        shutil.rmtree(source)
        return
    folder = target / TAG
    folder.mkdir(parents=True)
    if kind == "zero3":
        parameterwise(folder, ranks, shapes(count))
    else:
        flat(folder, int(kind[-1]), ranks, shapes(count))
    (target / "latest").write_text(TAG)


def template(name: str, pattern: str) -> dict[str, Any]:
    """Return what a file of a fixture holds."""
    import torch

    (path,) = (FIXTURES / name / TAG).glob(pattern)
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content


def one_group(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**groups[0], "params": [0]}]


def state(numel: int, like: dict[Any, Any]) -> dict[int, dict[str, Any]]:
    import torch

    return {0: {"step": like[0]["step"], "exp_avg": torch.ones(numel), "exp_avg_sq": torch.ones(numel)}}


def flat(folder: Path, stage: int, ranks: int, parameters: dict[str, tuple[int, int]]) -> None:
    """Write the files of ZeRO-1 or 2: one for the model, and one for each rank with its partition."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    model = template("s2_bf16_dp4", "mp_rank_00_model_states.pt")
    numels = [math.prod(shape) for shape in parameters.values()]
    starts = [0, *accumulate(numels)]
    partition = 2 * -(-starts[-1] // (2 * ranks))
    buffer = torch.ones(partition * ranks, dtype=torch.bfloat16)
    module = {
        name: buffer[at : at + math.prod(shape)].view(shape)
        for (name, shape), at in zip(parameters.items(), starts, strict=False)
    }
    model["ds_config"]["zero_optimization"]["stage"] = stage
    model |= {
        "module": OrderedDict(module),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in parameters.items())],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "dp_world_size": ranks,
    }
    if stage == 1:
        model["frozen_param_shapes"] = model["frozen_param_fragments"] = None
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    like = template("s2_bf16_dp4", "*zero_pp_rank_0_*optim_states.pt")
    z, names = like["optimizer_state_dict"], list(parameters)
    for rank in range(ranks):
        low, high = rank * partition, (rank + 1) * partition
        mapping: OrderedDict[str, Any] = OrderedDict()
        index = bisect_right(starts, low) - 1
        while index < len(names) and starts[index] < high:
            begin, end = max(starts[index], low), min(starts[index + 1], high)
            mapping[names[index]] = fragment_address(numel=end - begin, start=begin - low)
            index += 1
        padding = min(max(high - starts[-1], 0), partition)
        base = z["base_optimizer_state"]
        z |= {
            "base_optimizer_state": {
                "state": state(partition, base["state"]),
                "param_groups": one_group(base["param_groups"]),
            },
            "single_partition_of_fp32_groups": [torch.ones(partition - padding)],
            "zero_stage": ZeroStageEnum(stage),
            "group_paddings": [padding],
            "partition_count": [ranks],
            "param_slice_mappings": [mapping],
        }
        z.pop("param_alignment_paddings", None)
        torch.save(like, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def parameterwise(folder: Path, ranks: int, parameters: dict[str, tuple[int, int]]) -> None:
    """Write the files of ZeRO-3: for each rank its shards, and a model file with all names and shapes."""
    import torch

    model = template("s3_bf16_dp2", "zero_pp_rank_0_*model_states.pt")
    empty = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in parameters)
    model |= {
        "module": empty,
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in parameters.items())],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "dp_world_size": ranks,
    }
    like = template("s3_bf16_dp2", "*zero_pp_rank_0_*optim_states.pt")
    z = like["optimizer_state_dict"]
    numel = sum(-(-math.prod(shape) // ranks) for shape in parameters.values())
    z |= {
        "partition_count": ranks,
        "optimizer_state_dict": {
            "state": state(numel, z["optimizer_state_dict"]["state"]),
            "param_groups": one_group(z["optimizer_state_dict"]["param_groups"]),
        },
        "fp32_flat_groups": [torch.ones(numel)],
    }
    same(model, folder, "zero_pp_rank_{}_mp_rank_00_model_states.pt", ranks)
    same(like, folder, "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", ranks)


def same(content: object, folder: Path, name: str, ranks: int) -> None:
    """Write a file for each rank, all with the same content; their records begin with the name of the file."""
    import torch

    for digits in range(1, len(str(ranks - 1)) + 1):
        first = 10 ** (digits - 1) if digits > 1 else 0
        torch.save(content, folder / name.format(first))
        data = (folder / name.format(first)).read_bytes()
        stem = Path(name).stem
        for rank in range(first + 1, min(10**digits, ranks)):
            old, new = stem.format(first).encode() + b"/", stem.format(rank).encode() + b"/"
            (folder / name.format(rank)).write_bytes(data.replace(old, new))


def measured(code: str, *arguments: str) -> Measured:
    """Run a child; return its CPU time in seconds, its peak memory in MB, all and anonymous, and its exit status."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, cwd=HERE / "cache")
    anonymous = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        with suppress(OSError):  # no Linux, or it has ended
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            anonymous = max(anonymous, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
        time.sleep(SAMPLED_S)
    peaks = usage.ru_maxrss * 1024 / 1e6, anonymous * 1024 / 1e6
    return usage.ru_utime + usage.ru_stime, *peaks, os.waitstatus_to_exitcode(status)


def runs(kind: str, source: Path, ranks: int) -> dict[str, Callable[[], Measured]]:
    """Return how each verb is run."""
    path = str(source)
    world = str(max(ranks * 3 // 4, 1))
    verb = ("convert", "--to", CONVERTED[kind]) if kind in CONVERTED else ("reshard",)
    dry = (*verb, path, f"{path}-to-{world}", "--world-size", world, "--dry-run", "--quiet", "--json")
    restaged, restage = f"{path}.out/restaged", ("--world-size", str(ranks), "--stage", "2" if kind == "zero3" else "3")
    return {
        "start": lambda: measured(START),
        "floor": lambda: measured(FLOOR, path),
        "open": lambda: measured(OPEN, path),
        "inspect": lambda: measured(COMMAND, "inspect", path, "--json"),
        "reshard": lambda: measured(COMMAND, *dry),
        "verify": lambda: measured(COMMAND, "verify", path, "--quiet", "--json"),
        "deep": lambda: measured(COMMAND, "verify", path, "--deep", "--quiet", "--json"),
        "consolidate": lambda: measured(COMMAND, "consolidate", path, f"{path}.out/m.safetensors", "--quiet"),
        "fingerprint": lambda: measured(COMMAND, "fingerprint", path, "--quiet"),
        "map": lambda: measured(COMMAND, "map", path, "--json"),
        "strip": lambda: measured(COMMAND, "strip", path, f"{path}.out/stripped", "--optimizer", "--quiet"),
        "restage": lambda: measured(COMMAND, "reshard", path, restaged, *restage, "--quiet"),
        "diff": lambda: measured(COMMAND, "diff", path, restaged, "--quiet", "--json"),
        "universal": lambda: measured(COMMAND, "convert", path, f"{path}.out/u", "--to", "universal", "--quiet"),
        "dcp": lambda: measured(COMMAND, "convert", path, f"{path}.out/dcp", "--to", "dcp", "--quiet"),
    }


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    heads = f"{'CPU s':>9}{'peak MB':>9}{'anon':>7}{'x floor':>9}{'exponent':>10}{'exit':>5}"
    yield f"{'kind':<8}{'ranks':>6}  {'verb':<12}{heads}"
    start = measured(START)[0]
    for kind in options.kinds.split(","):
        before: dict[str, tuple[int, float]] = {}
        for ranks in map(int, options.ranks.split(",")):
            source = options.work / f"scale-{kind}-{ranks}-{options.parameters}"
            if not source.exists():
                part = source.with_name(f"{source.name}.part")
                shutil.rmtree(part, ignore_errors=True)
                arguments = ["--make", str(part), "--kinds", kind, "--ranks", str(ranks)]
                arguments += ["--parameters", str(options.parameters)]  # in a child: the peak of ours would be theirs
                subprocess.run(
                    [sys.executable, __file__, *arguments],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                part.rename(source)
            verbs = runs(kind, source, ranks)
            floor = 0.0
            out = source.with_name(f"{source.name}.out")
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            for verb in ENDS if options.verbs == "ends" else options.verbs.split(","):
                cpu, peak, anonymous, code = verbs[verb]()
                floor = cpu - start if verb == "floor" else floor
                share = f"{(cpu - start) / floor:.2f}" if floor > 0 else ""
                exponent = ""
                if verb in before and cpu > start:
                    others, other = before[verb]
                    exponent = f"{math.log((cpu - start) / other) / math.log(ranks / others):.2f}"
                before[verb] = (ranks, max(cpu - start, 1e-3))
                figures = f"{cpu:>9.2f}{peak:>9.0f}{anonymous:>7.0f}{share:>9}{exponent:>10}{code:>5}"
                yield f"{kind:<8}{ranks:>6}  {verb:<12}{figures}"
            shutil.rmtree(out)
            if not options.keep:
                shutil.rmtree(source)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--verbs", default=",".join(VERBS[1:]))
    parser.add_argument("--work", type=Path, default=HERE / "cache")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        make(options.kinds, int(options.ranks), options.parameters, options.make)
        return
    options.work = options.work.resolve()  # verbs run in the cache
    for folder in (options.work, HERE / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    for row in rows(options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
