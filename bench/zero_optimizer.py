"""Time zckpt's ZeroOptimizer against DeepSpeed's engine, DDP + AdamW and ZeroRedundancyOptimizer; on CPU with gloo.

    python bench/zero_optimizer.py [--ranks 2 4] [--repeat N] [--scale S] [--work DIR]

A GPT of 100M parameters (fewer with --scale below 1), one short sequence on each rank, so that the model's own work
does not hide the optimizer's; AdamW, fused, with the gradients clipped. Against DeepSpeed the model is bfloat16 with
float32 masters; against DDP it is float32, where all do the same. The contestants of a heat are in the same processes,
each with a model of its own; they take turns, none always first, ranks meet before each turn, and the slowest rank
counts. Medians are compared within a heat. All memory has been used before.

Memory is what a rank with nothing but one contestant grows by at its peak, over some windows of two backwards; what is
freed goes back to the system. It is held against the bytes of weights, gradients and what is partitioned, as the ZeRO
paper counts them (Rajbhandari et al., 2020, section 5), plus the buckets that gradients are sent in. (A smaller model
is held against the same buckets, and may miss this target.)

Saving is `zckpt.optim.files.save`: all ranks write the directory of a tag, synced, against a synced copy of it. Exit 1
if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contest import Target, touch_memory, verdict
from ranks import Figures, first_to_fail, join, reset_peak, status, table

LAYERS, WIDTH, WORDS, TOKENS = 12, 768, 9600, 16
HEAD_WIDTH = 64
BUCKET = 1 << 23  # elements that are reduced at once, by all contestants that are told
GATHERED = 1 << 27
STAGES = (1, 2)
WINDOWS = 3  # of training, where memory is measured
MICROSTEPS = 2  # of such a window: stage 1 keeps whole gradients from one backward to the next
SAVES = 5
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes; what is larger goes back to the system when it is freed

# The targets.
STEP_RATIO = 0.9  # ours / DeepSpeed's, at most
MEMORY_RATIO = 1.05  # the peak / formula and buckets, at most
SAVE_RATIO = 1.1  # saving / (cp + sync) of as many bytes, at most

COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'


@dataclass(frozen=True)
class Match:
    """What a heat is played with."""

    world_size: int
    repeat: int
    scale: float
    work: str
    dtype: str = "bfloat16"
    layers: int = LAYERS

    @property
    def width(self) -> int:
        """Return the model's width."""
        return max(1, round(WIDTH * self.scale**0.5 / HEAD_WIDTH)) * HEAD_WIDTH

    def make_model(self) -> Any:
        """Return the GPT, the same on every rank."""
        import torch

        class GPT(torch.nn.Module):
            def __init__(self, width: int, layers: int) -> None:
                super().__init__()
                nn = torch.nn
                self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
                block = nn.TransformerEncoderLayer(
                    width, width // HEAD_WIDTH, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
                self.head = nn.Linear(width, WORDS, bias=False)

            def forward(self, ids: Any) -> Any:
                x = self.words(ids) + self.places.weight
                mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype)
                logits = self.head(self.blocks(x, mask, is_causal=True))
                return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            model = GPT(self.width, self.layers)
        finally:
            torch.set_default_dtype(before)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return model

    def batch(self, turn: int, rank: int) -> Any:
        """Return a rank's tokens."""
        import torch

        return torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(turn * self.world_size + rank))


class Contestant:
    """A model and what trains it: stock DDP with AdamW, or with what else `make` returns."""

    buffers = 0  # buckets besides the gradients

    def __init__(self, match: Match, *, microsteps: int = 1) -> None:
        self.microsteps = microsteps
        self.model = match.make_model()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.prepare(match)

    def prepare(self, match: Match) -> None:  # noqa: ARG002
        """Make what trains the model."""
        import torch

        self.run = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer: Any = self.make(torch.optim.AdamW)

    def make(self, adamw: Any) -> Any:
        """Return the optimizer."""
        return adamw(self.parameters, **self.hyperparameters())

    @classmethod
    def nbytes(cls, world_size: int) -> float:  # noqa: ARG003
        """Return the bytes of a parameter on each rank: weight and gradient, and AdamW's float32 state."""
        return 4 + 4 + 8

    @staticmethod
    def hyperparameters() -> dict[str, Any]:
        """Return AdamW's."""
        return {"lr": 1e-4, "weight_decay": 0.1, "fused": True}

    def forward(self, ids: Any) -> Any:
        """Return the loss."""
        return self.run(ids)

    def backward(self, loss: Any) -> None:
        """Run backward."""
        loss.backward()

    def step(self) -> None:
        """Step and forget the gradients."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Redundancy(Contestant):
    """zckpt's ZeroRedundancyOptimizer, under DDP."""

    def make(self, adamw: Any) -> Any:
        """Return the optimizer."""
        from zckpt.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters, adamw, **self.hyperparameters())

    @classmethod
    def nbytes(cls, world_size: int) -> float:
        """Return the bytes of a parameter on each rank: the state is partitioned."""
        return 4 + 4 + 8 / world_size


class Zero(Contestant):
    """zckpt's ZeroOptimizer."""

    stage = 1
    buffers = 2

    def prepare(self, match: Match) -> None:  # noqa: ARG002
        """Make what trains the model."""
        import torch

        from zckpt.optim import ZeroOptimizer

        self.run = self.model
        self.optimizer = ZeroOptimizer(
            self.model.named_parameters(),
            torch.optim.AdamW,
            stage=self.stage,
            reduce_bucket_size=BUCKET,
            allgather_bucket_size=GATHERED,
            gradient_accumulation_steps=self.microsteps,
            clip_grad=1.0,
            **self.hyperparameters(),
        )

    @classmethod
    def nbytes(cls, world_size: int) -> float:
        """Return the bytes of a parameter on each rank: 2 + 2 + 12, of which the stage's are partitioned."""
        return paper_nbytes(cls.stage, world_size)

    def backward(self, loss: Any) -> None:
        """Run backward."""
        self.optimizer.backward(loss)

    def step(self) -> None:
        """Step, which forgets the gradients."""
        self.optimizer.step()


class Zero2(Zero):
    """The same of stage 2."""

    stage = 2


class DeepSpeed(Contestant):
    """DeepSpeed's engine."""

    stage = 1
    buffers = 1

    def prepare(self, match: Match) -> None:
        """Make the engine."""
        import deepspeed
        import torch

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.microsteps,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": GATHERED,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        if match.dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
        self.optimizer = self.make(torch.optim.AdamW)
        self.run, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )

    @classmethod
    def nbytes(cls, world_size: int) -> float:
        """Return the bytes of a parameter on each rank."""
        return paper_nbytes(cls.stage, world_size)

    def backward(self, loss: Any) -> None:
        """Run backward."""
        self.run.backward(loss)

    def step(self) -> None:
        """Step, which forgets the gradients."""
        self.run.step()


class DeepSpeed2(DeepSpeed):
    """The same of stage 2."""

    stage = 2


def paper_nbytes(stage: int, world_size: int) -> float:
    """Return the bytes of a parameter in 16 bits: weight, gradient, and float32 master and two states."""
    return 2 + (2 if stage == 1 else 2 / world_size) + 12 / world_size


CONTESTANTS: dict[str, type[Contestant]] = {
    "zckpt, stage 1": Zero,
    "zckpt, stage 2": Zero2,
    "DeepSpeed, stage 1": DeepSpeed,
    "DeepSpeed, stage 2": DeepSpeed2,
    "DDP + AdamW": Contestant,
    "DDP + ZeroRedundancyOptimizer": Redundancy,
}

HEATS = {
    "zckpt, stage 1 | DeepSpeed, stage 1": "bfloat16",
    "zckpt, stage 2 | DeepSpeed, stage 2": "bfloat16",
    "zckpt, stage 2 | DDP + AdamW | DDP + ZeroRedundancyOptimizer": "float32",
}
"""The contestants of each, and their models' type."""


class Rank:
    """One rank of a heat."""

    def __init__(self, rank: int, match: Match) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.match = torch, dist, rank, match
        self.figures: Figures = {}

    def note(self, key: str, value: float) -> None:
        """Note the largest of all ranks' values."""
        told = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(told, op=self.dist.ReduceOp.MAX)
        self.figures.setdefault(key, []).append(told.item())

    def race(self, names: list[str]) -> None:
        """Let contestants train in turns; where DeepSpeed is among them, ours is saved afterwards."""
        contestants = {name: CONTESTANTS[name](self.match) for name in names}
        for name, contestant in contestants.items():
            self.turn(name, contestant, 0)  # makes state
        self.figures.clear()
        for turn in range(1, self.match.repeat + 1):
            losses = [self.turn(name, contestants[name], turn) for name in names[:: 1 if turn % 2 else -1]]
            assert max(losses) < 1.01 * min(losses), losses  # they do the same
        if "DeepSpeed, stage 2" in names:
            self.save(contestants["zckpt, stage 2"])

    def turn(self, name: str, contestant: Contestant, number: int) -> float:
        """Time a contestant's step; return the loss."""
        ids = self.match.batch(number, self.rank)
        self.dist.barrier()
        marks = [time.perf_counter()]
        loss = contestant.forward(ids)
        marks.append(time.perf_counter())
        contestant.backward(loss)
        marks.append(time.perf_counter())
        contestant.step()
        marks.append(time.perf_counter())
        forward, backward, step = (after - before for before, after in itertools.pairwise(marks))
        self.note(f"{name}: training step, s", forward + backward + step)
        self.note(f"{name}: its backward, s", backward)
        self.note(f"{name}: its optimizer's step, s", step)
        return loss.item()

    def measure(self, names: list[str]) -> None:
        """Note the memory that a contestant takes."""
        [name] = names
        shallow = replace(self.match, layers=1)
        self.train(CONTESTANTS[name](shallow, microsteps=MICROSTEPS))  # what libraries make for themselves is there
        gc.collect()
        self.dist.barrier()
        reset_peak()
        before = status("VmRSS")
        contestant = CONTESTANTS[name](self.match, microsteps=MICROSTEPS)
        self.train(contestant)
        self.note(f"{name}: peak, MB", status("VmHWM") - before)
        numel = sum(parameter.numel() for parameter in contestant.parameters)
        self.note(f"{name}: formula, MB", contestant.nbytes(self.match.world_size) * numel / 1e6)
        self.note(f"{name}: buckets, MB", contestant.buffers * BUCKET * contestant.parameters[0].itemsize / 1e6)

    def train(self, contestant: Contestant) -> None:
        """Train for some windows. DDP is not told of them: it steps after each backward."""
        for number in range(WINDOWS * contestant.microsteps):
            contestant.backward(contestant.forward(self.match.batch(number, self.rank)))
            contestant.step()

    def save(self, contestant: Contestant) -> None:
        """Save, all ranks together, against a copy by one of them."""
        from zckpt.optim import files

        work = Path(self.match.work)
        saved, copied = work / "saved", work / "copied"

        def save() -> None:
            files.save(contestant.optimizer, saved / "global_step1", model=contestant.model)

        def copy() -> None:
            if self.rank == 0:
                subprocess.run(["sh", "-c", COPY, "sh", str(saved), str(copied)], check=True)

        acts = [("saving, s", saved, save), ("cp + sync of what was saved, s", copied, copy)]
        saved.mkdir(exist_ok=True)
        save()
        for turn in range(SAVES):
            for key, target, act in acts if turn % 2 else [acts[1], acts[0]]:
                if self.rank == 0:
                    shutil.rmtree(target, ignore_errors=True)
                    if act is save:
                        target.mkdir()
                    os.sync()
                self.dist.barrier()
                started = time.perf_counter()
                act()
                self.note(key, time.perf_counter() - started)
        self.note("saved, MB", sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) / 1e6)
        masters = [group.master.detach().clone() for group in contestant.optimizer.groups]
        for group in contestant.optimizer.groups:
            group.master.detach().zero_()
        files.load(contestant.optimizer, saved / "global_step1", model=contestant.model)
        pairs = zip(contestant.optimizer.groups, masters, strict=True)
        assert all(self.torch.equal(group.master, master) for group, master in pairs)


def play(rank: int, match: Match, names: list[str]) -> None:
    """Run one rank's part of a heat, or measure the memory of one that is alone; rank 0 writes the figures down."""
    import torch.distributed as dist

    join(rank, match.world_size, match.work)
    if any("DeepSpeed" in name for name in names):
        join_deepspeed(rank, match.world_size)
    contest = Rank(rank, match)
    contest.race(names) if len(names) > 1 else contest.measure(names)
    if rank == 0:
        Path(match.work, "figures.json").write_text(json.dumps(contest.figures))
    dist.barrier()
    os._exit(0)  # DeepSpeed's exit handlers may wait for peers that are gone


def join_deepspeed(rank: int, world_size: int) -> None:
    """Let DeepSpeed take the process group that there is."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a kernel for inference, compiled on first use
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def hold(match: Match, names: list[str]) -> Figures:
    """Return the figures of a heat."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=match.work)
    its = replace(match, work=folder)
    try:
        ranks = [context.Process(target=play, args=(rank, its, names)) for rank in range(match.world_size)]
        for process in ranks:
            process.start()
        failed = first_to_fail(ranks)
        if failed is not None:
            said = Path(folder, f"log{failed}").read_text()[-2000:]
            who = f"{', '.join(names)}: rank {failed} of {match.world_size}"
            sys.exit(f"{who} exited with {ranks[failed].exitcode}\n{said}")
        return json.loads(Path(folder, "figures.json").read_text())
    finally:
        shutil.rmtree(folder)


def judge(figures: Figures, world_size: int) -> list[Target]:
    """Return the targets with what was measured at one number of ranks."""

    def median(key: str) -> float:
        return statistics.median(figures[key])

    targets = []
    for stage in STAGES:
        ours, theirs = (median(f"{name}, stage {stage}: training step, s") for name in ("zckpt", "DeepSpeed"))
        targets.append(Target(f"{world_size} ranks: step, stage {stage}", ours / theirs, STEP_RATIO))
    for stage in STAGES:
        peak, formula, buckets = (median(f"zckpt, stage {stage}: {key}, MB") for key in ("peak", "formula", "buckets"))
        targets.append(Target(f"{world_size} ranks: memory, stage {stage}", peak / (formula + buckets), MEMORY_RATIO))
    saving = median("saving, s") / median("cp + sync of what was saved, s")
    return [*targets, Target(f"{world_size} ranks: saving", saving, SAVE_RATIO)]


def memory_table(figures: Figures) -> str:
    """Return a markdown table of the memory that contestants take."""
    lines = ["| MB on each rank | peak | formula | buckets | peak / both |", "|---|---:|---:|---:|---:|"]
    for name in CONTESTANTS:
        peak, formula, buckets = (figures[f"{name}: {key}, MB"][0] for key in ("peak", "formula", "buckets"))
        ratio = peak / (formula + buckets)
        lines.append(f"| {name} | {peak:.0f} | {formula:.0f} | {buckets:.0f} | {ratio:.3f} |")
    return "\n".join(lines)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--repeat", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of elements (default: 1.0)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for files of 3 GB")
    arguments = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("bench/zero_optimizer.py needs deepspeed, which zckpt[interop] installs")
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    touch_memory()
    targets: list[Target] = []
    for world_size in arguments.ranks:
        match = Match(world_size, arguments.repeat, arguments.scale, str(arguments.work))
        every: Figures = {}
        for names, dtype in HEATS.items():
            figures = hold(replace(match, dtype=dtype), names.split(" | "))
            print(f"### {world_size} ranks, {dtype}\n\n{table(figures)}\n", flush=True)
            every = figures | every  # of stage 2 against DeepSpeed
        os.environ |= RETURN_FREED
        for name, contestant in CONTESTANTS.items():
            dtype = "bfloat16" if issubclass(contestant, Zero | DeepSpeed) else "float32"
            every |= hold(replace(match, dtype=dtype), [name])
        for key in RETURN_FREED:
            del os.environ[key]
        print(f"### {world_size} ranks, memory\n\n{memory_table(every)}\n", flush=True)
        targets += judge(every, world_size)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
