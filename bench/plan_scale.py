"""Measure what opening, inspecting, planning, verifying and copying cost as the number of ranks grows.

    python bench/plan_scale.py [--kinds zero2,zero3] [--ranks 8,64,256] [--parameters N,...] [--verbs open,map] [--keep]
    python bench/plan_scale.py --kinds zero2,zero3 --ranks 1024 --verbs ends --work DIR --keep   # verbs to their end
    python bench/plan_scale.py --kinds zero2,zero3 --ranks 1024,4096 --verbs dry --descriptors 256   # the goals
    python bench/plan_scale.py --kinds zero2 --ranks 1024 --factor 47 --verbs dry                # 1 TB of sparse files

Every checkpoint has the same small parameters (10,000 of about 3,000 elements; `--factor` makes each of both sizes so
many times as large), cut for so many ranks. The files are genuine: a fixture that DeepSpeed wrote, its tensors, shapes
and mappings replaced, saved by torch; ranks whose files say the same are copies of one of them, under their own names.
FSDP's rank files torch saves, too: of ranks that have as many rows of everything one, and copies of it have their own
numbers. All other kinds (our own format, DCP, Megatron's torch_dist) are converted from ZeRO-2, and `reshard` converts
them to themselves. With a factor, files are sparse: torch saves them without their elements, and of what is
converted all is written but these. `ends` are verbs that read or write all elements: `restage` writes ZeRO-2 as ZeRO-3
and the other way round, for as many ranks, and `diff` compares a checkpoint with that. `dry` are those that read and
write none.

Each verb is a child process; its CPU time is that of all its threads, and its memory the most that it had resident, and
of that the most that is no file's (`anon`: sampled, of Linux; so is `fds`, the most descriptors that were open). CPU
time is no more comparable than machines are, and what else runs on one counts too: `loop` is the CPU time of a loop of
2 million additions, just before. `floor` reads the structure of each file and keeps none, of DCP and our own that of
the one file which lists all, and `start` starts the program and does nothing. The exponents are those of CPU time, less
`start`, in the number of ranks and in that of parameters, between one row and the one above with as many of the other.
`--descriptors` is a limit on open files, as `ulimit -n`. Goals are listed last, if what they are of was measured.
`--keep` leaves the checkpoints in bench/cache for the next time.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from contest import HERE, ROOT, environment

FIXTURES = ROOT / "fixtures"
TAG = "global_step5"
KINDS = ("zero1", "zero2", "zero3", "own", "dcp")
CONVERTED = {"own": "zckpt", "dcp": "dcp", "fsdp": "fsdp-rank-files", "torch_dist": "megatron"}
CONVERTED_FROM = 8
LAYER = "decoder.layers.{}.mlp.linear_fc1.weight"
"""Of Megatron, whose names say what they are."""
VERBS = ("start", "floor", "open", "inspect", "reshard", "verify")
DRY = ("inspect", "reshard", "convert", "merge", "verify", "map")
ENDS = ("inspect", "map", "consolidate", "fingerprint", "strip", "restage", "diff", "universal", "dcp", "deep")
SAMPLED_S = 0.02
LOOP = 2_000_000
WEIGHT_DECAY = 0.1

GOALS = {"inspect": (2.0, 200), "reshard": (8.0, 200)}
"""At 1,024 ranks and 10,000 parameters of ZeRO-2 and ZeRO-3: seconds of CPU, and MB."""
TIMES_AS_MUCH = 4
"""At most, at 4,096 ranks."""

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


Measured = tuple[float, float, float, int, int]
"""CPU time in seconds, peak of all memory and of what is no file's in MB, most descriptors, exit status."""

Shapes = dict[str, tuple[int, int]]


def shapes(count: int, factor: int, name: str = "model.layers.{}.block.{}.weight") -> Shapes:
    """Return the parameters: a few sizes, none a multiple of any number of ranks."""
    numbers = (divmod(i, 10) if name.count("{}") == 2 else (i,) for i in range(count))
    return {name.format(*at): (factor * (61 + i % 7), factor * (47 + i % 5)) for i, at in enumerate(numbers)}


def make(kind: str, ranks: int, parameters: Shapes, target: Path, *, sparse: bool) -> None:
    """Write a run directory, or a checkpoint of another format."""
    if kind == "fsdp" and not sparse:
        rankwise(target, ranks, parameters)
        return
    if kind in CONVERTED:
        import zckpt
        import zckpt.operations.target as written

        source = target.with_name(f"{target.name}.source")
        make("zero2", CONVERTED_FROM, parameters, source, sparse=sparse)
        if sparse:
            written.write = write_hollow
        own = {"layers": "apart"} if kind == "torch_dist" else {}
        zckpt.convert(source, target, to=CONVERTED[kind], world_size=ranks, fingerprint=False, **own)
        shutil.rmtree(source)
        return
    folder = target / TAG
    folder.mkdir(parents=True)
    save = Saving(target.with_name(f"{target.name}.elements"), sparse=sparse)
    if kind == "zero3":
        parameterwise(folder, ranks, parameters, save)
    else:
        flat(folder, int(kind[-1]), ranks, parameters, save)
    (target / "latest").write_text(TAG)


def write_hollow(plan: Any, names: Sequence[Path], **_: object) -> Any:  # in the place of `engine.write.write`
    """Write all of a plan's files but the elements of tensors."""
    from zckpt.engine.checking import Checked

    for one, name in zip(plan.files, names, strict=True):
        with name.open("wb") as file:
            for literal in one.file.literals:
                file.seek(literal.offset)
                file.write(literal.data)
            file.truncate(one.file.nbytes)
    return Checked()


class Saving:
    """How torch saves tensors: with elements that are one, or sparse, with holes for them."""

    def __init__(self, elements: Path, *, sparse: bool) -> None:
        self.elements, self.sparse = elements, sparse

    def tensor(self, numel: int, dtype: str = "float32") -> Any:
        """Return a tensor; a sparse one lies in a sparse file, which is gone."""
        import torch

        if not self.sparse:
            return torch.ones(numel, dtype=getattr(torch, dtype))
        found = torch.from_file(str(self.elements), shared=True, size=numel, dtype=getattr(torch, dtype))
        self.elements.unlink()
        return found

    def __call__(self, content: object, path: Path) -> None:
        """Save what may have tensors."""
        import torch

        with torch.serialization.skip_data() if self.sparse else nullcontext():
            torch.save(content, path)


def template(name: str, pattern: str) -> dict[str, Any]:
    """Return what a file of a fixture holds."""
    import torch

    (path,) = (FIXTURES / name / TAG).glob(pattern)
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content


def one_group(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**groups[0], "params": [0]}]


def state(numel: int, like: dict[Any, Any], save: Saving) -> dict[int, dict[str, Any]]:
    return {0: {"step": like[0]["step"], "exp_avg": save.tensor(numel), "exp_avg_sq": save.tensor(numel)}}


def flat(folder: Path, stage: int, ranks: int, parameters: Shapes, save: Saving) -> None:
    """Write the files of ZeRO-1 or 2: one for the model, and one for each rank with its partition."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    model = template("s2_bf16_dp4", "mp_rank_00_model_states.pt")
    numels = [math.prod(shape) for shape in parameters.values()]
    starts = [0, *accumulate(numels)]
    partition = 2 * -(-starts[-1] // (2 * ranks))
    buffer = save.tensor(partition * ranks, "bfloat16")
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
    save(model, folder / "mp_rank_00_model_states.pt")
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
                "state": state(partition, base["state"], save),
                "param_groups": one_group(base["param_groups"]),
            },
            "single_partition_of_fp32_groups": [save.tensor(partition - padding)],
            "zero_stage": ZeroStageEnum(stage),
            "group_paddings": [padding],
            "partition_count": [ranks],
            "param_slice_mappings": [mapping],
        }
        z.pop("param_alignment_paddings", None)
        save(like, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def parameterwise(folder: Path, ranks: int, parameters: Shapes, save: Saving) -> None:
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
            "state": state(numel, z["optimizer_state_dict"]["state"], save),
            "param_groups": one_group(z["optimizer_state_dict"]["param_groups"]),
        },
        "fp32_flat_groups": [save.tensor(numel)],
    }
    same(model, folder, "zero_pp_rank_{}_mp_rank_00_model_states.pt", ranks)
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    if save.sparse:  # too large to be copied
        for rank in range(ranks):
            save(like, folder / name.format(rank))
    else:
        same(like, folder, name, ranks)


def rankwise(folder: Path, ranks: int, parameters: Shapes) -> None:
    """Write the files of FSDP2's ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made: dict[tuple[object, ...], list[Numbered]] = {}
    folder.mkdir(parents=True)
    for rank in range(ranks):
        held = {
            rows: max(min(-(-rows // ranks), rows - -(-rows // ranks) * rank), 0) for rows, _ in parameters.values()
        }
        like = len(str(rank)), rank > 0xFF, *held.values()  # whose names and numbers have as many bytes
        stems = [f"{kind}_world_size_{ranks}_rank_{rank}" for kind in ("model", "optim")]
        if like not in made:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            model, moments = (
                {
                    name: DTensor.from_local(torch.ones(held[rows], width), mesh, [Shard(0)], run_check=False,
                                             shape=torch.Size((rows, width)), stride=(width, 1))
                    for name, (rows, width) in parameters.items()
                }
                for _ in range(2)
            )  # fmt: skip
            state = {
                number: {"step": torch.tensor(5.0), "exp_avg": one, "exp_avg_sq": model[name]}
                for number, (name, one) in enumerate(moments.items())
            }
            groups = [{"lr": 1e-3, "weight_decay": WEIGHT_DECAY, "params": list(range(len(parameters)))}]
            for stem, content in zip(stems, (model, {"state": state, "param_groups": groups}), strict=True):
                torch.save(content, folder / f"{stem}.pt")
            dist.destroy_process_group()
            made[like] = [Numbered(folder / f"{stem}.pt") for stem in stems]
        else:
            for one, stem in zip(made[like], stems, strict=True):
                one.write(folder / f"{stem}.pt", rank)
    same({"lr_scheduler": {"last_epoch": 5}}, folder, f"extra_state_world_size_{ranks}_rank_{{}}.pt", ranks)


class Numbered:
    """A rank's file, of which other ranks' are copies: where it has its name, its numbers and their CRC-32."""

    def __init__(self, path: Path) -> None:
        from zckpt.torchfile import find_blanks, opened, read_entries, read_torchfile

        self.data, self.stem = path.read_bytes(), path.stem
        pickle = next(one for one in read_torchfile(path).records if one.name.endswith("/data.pkl"))
        with opened(path) as source:
            start, entries = read_entries(source)
            entry = next(one for one in entries if one.name == pickle.name)
        self.pickle = slice(pickle.offset, pickle.offset + pickle.nbytes)
        self.places = [(begin, end) for at, begin, end in find_blanks(self.data[self.pickle]) if begin == at + 1]
        self.sums = [start + entry.at + 16, entry.header + 14]
        if self.data[self.pickle.stop :].startswith(b"PK\x07\x08"):
            self.sums.append(self.pickle.stop + 4)

    def write(self, path: Path, rank: int) -> None:
        """Write the file of another rank."""
        data = bytearray(self.data.replace(self.stem.encode() + b"/", path.stem.encode() + b"/"))
        for begin, end in self.places:
            data[self.pickle.start + begin : self.pickle.start + end] = rank.to_bytes(end - begin, "little")
        for at in self.sums:
            data[at : at + 4] = zlib.crc32(data[self.pickle]).to_bytes(4, "little")
        path.write_bytes(data)


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


def loop() -> float:
    """Return the CPU time of a loop."""
    start, number = time.process_time(), 0
    for at in range(LOOP):
        number += at
    return time.process_time() - start


def measured(code: str, *arguments: str) -> Measured:
    """Run a child; return what it took."""
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=HERE / "cache", env=environment())
    anonymous = most = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        with suppress(OSError):  # no Linux, or it has ended
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            anonymous = max(anonymous, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
            most = max(most, sum(1 for _ in Path(f"/proc/{child.pid}/fd").iterdir()))
        time.sleep(SAMPLED_S)
    peaks = usage.ru_maxrss * 1024 / 1e6, anonymous * 1024 / 1e6
    return usage.ru_utime + usage.ru_stime, *peaks, most, os.waitstatus_to_exitcode(status)


def runs(kind: str, source: Path, ranks: int) -> dict[str, Callable[[], Measured]]:
    """Return how each verb is run."""
    path = str(source)
    world = str(max(ranks * 3 // 4, 1))
    verb = ("convert", "--to", CONVERTED[kind]) if kind in CONVERTED else ("reshard",)
    dry = (*verb, path, f"{path}-to-{world}", "--world-size", world, "--dry-run", "--quiet", "--json")
    merged = ("consolidate", path, f"{path}.out/m.safetensors", "--dry-run", "--quiet", "--json")
    whole = ("convert", path, f"{path}.out/whole", "--to", "consolidated", "--dry-run", "--quiet", "--json")
    restaged, restage = f"{path}.out/restaged", ("--world-size", str(ranks), "--stage", "2" if kind == "zero3" else "3")
    return {
        "start": lambda: measured(START),
        "floor": lambda: measured(FLOOR, path),
        "open": lambda: measured(OPEN, path),
        "inspect": lambda: measured(COMMAND, "inspect", path, "--json"),
        "reshard": lambda: measured(COMMAND, *dry),
        "convert": lambda: measured(COMMAND, *whole),
        "merge": lambda: measured(COMMAND, *merged),
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


Key = tuple[str, str, int, int]
"""Verb, kind, ranks, parameters."""


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    heads = f"{'CPU s':>9}{'loop':>7}{'peak MB':>9}{'anon':>7}{'fds':>5}{'x floor':>9}{'ranks^':>8}{'params^':>8}"
    yield f"{'kind':<11}{'ranks':>6}{'params':>8}  {'verb':<12}{heads}{'exit':>5}"
    subprocess.run([sys.executable, "-m", "compileall", "-qq", str(ROOT / "zckpt")], env=environment(), check=True)
    start = measured(START)[0]
    found: dict[Key, Measured] = {}
    sizes = (map(int, one.split(",")) for one in (options.parameters, options.ranks))
    verbs = {"ends": ENDS, "dry": DRY}.get(options.verbs, tuple(options.verbs.split(",")))
    for kind, count, ranks in product(options.kinds.split(","), *sizes):
        source = options.work / f"scale-{kind}-{ranks}-{count}{'' if options.factor == 1 else f'-{options.factor}'}"
        if not source.exists():
            part = source.with_name(f"{source.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            arguments = ["--make", str(part), "--kinds", kind, "--ranks", str(ranks), "--factor", str(options.factor)]
            arguments += ["--parameters", str(count)]  # in a child: the peak of ours would be theirs
            command = [sys.executable, __file__, *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            part.rename(source)
        if options.verbs == "none":
            continue
        how = runs(kind, source, ranks)
        floor = 0.0
        out = source.with_name(f"{source.name}.out")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for verb in verbs:
            unit = loop()
            found[verb, kind, ranks, count] = cpu, peak, anonymous, most, code = how[verb]()
            floor = cpu - start if verb == "floor" else floor
            share = f"{(cpu - start) / floor:.2f}" if floor > 0 else ""
            row = f"{cpu:>9.2f}{unit:>7.2f}{peak:>9.0f}{anonymous:>7.0f}{most:>5}{share:>9}"
            row += f"{exponent(found, (verb, kind, ranks, count), 2, start):>8}"
            row += f"{exponent(found, (verb, kind, ranks, count), 3, start):>8}"
            yield f"{kind:<11}{ranks:>6}{count:>8}  {verb:<12}{row}{code:>5}"
        shutil.rmtree(out)
        if not options.keep:
            shutil.rmtree(source)
    yield from goals(found)


def exponent(found: dict[Key, Measured], key: Key, at: int, start: float) -> str:
    """Return the slope of CPU time since an earlier row with less of one number, on paper with logarithms as axes."""
    before = [one for one in found if one[at] < key[at] and (*one[:at], key[at], *one[at + 1 :]) == key]
    if not before or min(found[before[-1]][0], found[key][0]) <= start:
        return ""
    slope = math.log((found[key][0] - start) / (found[before[-1]][0] - start))
    return f"{slope / math.log(int(key[at]) / int(before[-1][at])):.2f}"


def goals(found: dict[Key, Measured]) -> Iterator[str]:
    """Yield which goals are reached."""
    for verb, (most, memory) in GOALS.items():
        for kind in ("zero2", "zero3"):
            one, four = (found.get((verb, kind, ranks, 10_000)) for ranks in (1024, 4096))
            if one is not None:
                said = f"{verb} of {kind}, 1,024 ranks: {one[0]:.1f} s of {most:.0f}, {one[1]:.0f} MB of {memory}"
                yield f"{'reached' if one[0] <= most and one[1] <= memory else 'NOT reached'}: {said}"
            if one is not None and four is not None:
                times = four[0] / one[0]
                said = f"{verb} of {kind}, 4,096 ranks: {times:.1f} times as much of {TIMES_AS_MUCH}"
                yield f"{'reached' if times <= TIMES_AS_MUCH else 'NOT reached'}: {said}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--parameters", default="10000")
    parser.add_argument("--factor", type=int, default=1)
    parser.add_argument("--descriptors", type=int)
    parser.add_argument("--verbs", default=",".join(VERBS[1:]))
    parser.add_argument("--work", type=Path, default=HERE / "cache")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        name = (LAYER,) if options.kinds == "torch_dist" else ()
        parameters = shapes(int(options.parameters), options.factor, *name)
        make(options.kinds, int(options.ranks), parameters, options.make, sparse=options.factor > 1)
        return
    if options.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, options.descriptors))
    options.work = options.work.resolve()  # verbs run in the cache
    for folder in (options.work, HERE / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    for row in rows(options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
