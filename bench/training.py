"""Time `zckpt.save` and `zckpt.load` in training against torch.distributed.checkpoint and torch.save; CPU and gloo.

    python bench/training.py [--ranks 2 4] [--repeat N] [--scale S] [--work DIR]

AdamW on 300M parameters (fewer with --scale below 1), trained in four ways:

    sharded      float32, fully_shard (FSDP2)                            12/N bytes of a parameter on each of N ranks
    replicated   bfloat16, DistributedDataParallel, state in bfloat16    6
    redundancy   float32, zckpt's ZeroRedundancyOptimizer                4 + 8/N
    zero         bfloat16, zckpt's ZeroOptimizer, float32 masters        2 + 12/N

Contestants save what one and the same model and optimizer have, synced, each into a directory of its own that is loaded
and removed before the next turn. What is loaded has the bits that were saved. They take turns, none always first, and
the first turn does not count; the disk is synced and ranks meet before each, and the slowest rank counts. Medians are
compared. Files are read from the memory that the system keeps them in. torch.save writes one file from each rank, with
all that the rank has. DCP's times have its get_state_dict and set_state_dict in them, which are shown for themselves,
too. Extra memory is what a rank grows by at its peak.

That training stands still is the time until an asynchronous save returns, where there has been one before, and the last
one has ended; dcp.async_save also with a stager that keeps its memory, which it does not by default.

What `Checkpointer.step` takes where nothing is to be saved ("step") is the median of many calls, of all ranks at the
same time; and of one call, where another rank makes its own 20 ms later.

torch's own ZeroRedundancyOptimizer consolidates 2% of the model only, and ours as many: it would take minutes.

Bytes read are what the kernel has counted for all threads of a rank while it loaded an optimizer's state, those of gloo
left out: all reads, also of headers and of checkpoint.json. Bytes owned are those of the state that it has then. The
ranks that load are as many as those that saved, or not. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contest import Target, touch_memory, verdict
from ranks import Figures, first_to_fail, join, reset_peak, status, table

LAYERS, WIDTH, WORDS = 24, 1024, 4000  # 300M parameters
HEADS = 8
PART = 0.02  # of the elements, which torch's ZeroRedundancyOptimizer consolidates in seconds
FAMILIES = ("zero", "redundancy")
CALLS = 1000  # of step
LATE = 0.02  # seconds that a rank is late

# The targets.
SAVE_RATIO = 1.0  # ours / DCP's, at most
LOAD_RATIO = 1.0
STALL_RATIO = 0.5
CONSOLIDATION_RATIO = 1.0
BYTES_RATIO = 1.02  # read / owned, at most
LATE_RATIO = 0.1  # of the time that another rank is late, what step waits, at most

Act = Callable[[Path], Any]


@dataclass(frozen=True)
class Match:
    """What a heat is played with.

    Parameters
    ----------
    kind : str
        How the model is trained; "bytes", where checkpoints of all FAMILIES are loaded; "step", where none is.
    saved : str
        The folder of the checkpoints that are loaded.
    saves : bool
        Whether they have to be saved first.
    """

    world_size: int
    repeat: int
    scale: float
    work: str
    kind: str = ""
    saved: str = ""
    saves: bool = False


class Training:
    """A model and its optimizer with state, as after a step."""

    def __init__(self, match: Match, kind: str, rank: int, *, optimizer_class: Any = None) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import zckpt.optim

        self.torch = torch
        dtype = torch.bfloat16 if kind in ("replicated", "zero") else torch.float32
        adamw = torch.optim.AdamW
        self.model: Any = make_model(match.scale, dtype)
        if kind == "sharded":
            self._shard(match.world_size)
        self.model.to_empty(device="cpu")
        named = list(self.model.named_parameters())
        if kind == "zero":
            self.optimizer: Any = zckpt.optim.ZeroOptimizer(named, adamw, stage=2)
        elif kind == "redundancy":
            made_of = named if optimizer_class is None else [parameter for _, parameter in named]
            self.optimizer = (optimizer_class or zckpt.optim.ZeroRedundancyOptimizer)(made_of, adamw, foreach=False)
        else:
            self.optimizer = adamw(self.model.parameters(), foreach=False)
        if kind == "replicated":
            self.model = DistributedDataParallel(self.model, init_sync=False)
        self._step(kind)
        self._fill(weights=rank if kind == "sharded" else 0, state=0 if kind == "replicated" else rank)

    def _shard(self, world_size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _step(self, kind: str) -> None:
        """Make the optimizer's state."""
        if kind == "zero":
            self.optimizer.backward(sum(parameter.sum() for parameter in self.model.parameters()))
        for parameter in self.model.parameters() if kind != "zero" else ():
            one = self.torch.ones((), dtype=parameter.dtype)
            parameter.grad = self.torch.ones_like(parameter) if kind == "sharded" else one.expand(parameter.shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _fill(self, *, weights: int, state: int) -> None:
        """Put random numbers everywhere, by seeds."""
        generators = [self.torch.Generator().manual_seed(seed) for seed in (weights, state)]
        for name, tensor in self.tensors().items():
            tensor.uniform_(generator=generators[0 if name.startswith("weight/") else 1])

    def tensors(self) -> dict[str, Any]:
        """Return what this rank has: weights, and state that is a tensor; of sharded tensors its own part."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {f"weight/{name}": parameter for parameter, name in names.items()}
        for at, group in enumerate(getattr(self.optimizer, "groups", ())):
            names[group.master] = f"group {at}"
            found[f"master/{at}"] = group.master
        for parameter, state in getattr(self.optimizer, "optim", self.optimizer).state.items():
            found |= {f"{key}/{names[parameter]}": value for key, value in state.items() if value.dim()}
        return {name: getattr(value.detach(), "_local_tensor", value.detach()) for name, value in found.items()}

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def owned(self) -> int:
        """Return the bytes of this rank's optimizer state, masters included."""
        inner = self.optimizer.optim
        masters = [group.master for group in getattr(self.optimizer, "groups", ())]
        state = [v for values in inner.state.values() for v in values.values() if v.dim()]
        return sum(tensor.nbytes for tensor in [*masters, *state])

    def digests(self) -> dict[str, int]:
        """Return a checksum of every tensor."""
        from zckpt.engine.tensors import memory_of
        from zckpt.storage.crc32 import crc32

        return {name: crc32(memory_of(tensor)) for name, tensor in self.tensors().items()}

    def forget(self) -> None:
        """Put zeros everywhere."""
        for tensor in self.tensors().values():
            tensor.zero_()


def make_model(scale: float, dtype: Any) -> Any:
    """Return a model that is never run, without memory yet: the blocks of a transformer, and an embedding."""
    import torch
    from torch import nn

    width = max(1, round(WIDTH * scale**0.5 / HEADS)) * HEADS
    options: dict[str, Any] = {"dtype": dtype, "device": "meta"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(max(8, round(WORDS * scale**0.5)), width, **options)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, HEADS, 4 * width, **options) for _ in range(LAYERS)
            )

    torch.manual_seed(0)
    return Model()


# --- what is timed


class Zckpt:
    """zckpt's own."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def save(self, folder: Path) -> None:
        """Save."""
        import zckpt

        zckpt.save(folder, model=self.training.model, optimizer=self.training.optimizer)

    def load(self, folder: Path) -> None:
        """Load."""
        import zckpt

        zckpt.load(folder, model=self.training.model, optimizer=self.training.optimizer)

    def begin(self, folder: Path) -> Any:
        """Begin to save."""
        import zckpt

        return zckpt.save(folder, model=self.training.model, optimizer=self.training.optimizer, async_=True)


class DCP:
    """torch.distributed.checkpoint; with a stager that is kept, if there is one."""

    def __init__(self, training: Training, stager: Any = None) -> None:
        self.training, self.stager = training, stager
        self.own = 0.0  # seconds of state_dicts, the last time

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        started = time.perf_counter()
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        self.own = time.perf_counter() - started
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Save."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        started = time.perf_counter()
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.own += time.perf_counter() - started

    def begin(self, folder: Path) -> Any:
        """Begin to save."""
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(self.state(), checkpoint_id=folder, async_stager=self.stager)


class PerRank:
    """torch.save of all that a rank has, by each rank."""

    def __init__(self, training: Training, rank: int) -> None:
        self.training, self.name = training, f"rank{rank}.pt"

    def save(self, folder: Path) -> None:
        """Save."""
        folder.mkdir(exist_ok=True)
        save_synced(self.training.tensors(), folder / self.name)

    def load(self, folder: Path) -> None:
        """Load."""
        import torch

        found = torch.load(folder / self.name)
        for name, tensor in self.training.tensors().items():
            tensor.copy_(found[name])


class Consolidated:
    """torch.save by the first rank, which all others have sent their state before."""

    def __init__(self, training: Training, rank: int) -> None:
        self.training, self.rank = training, rank

    def save(self, folder: Path) -> None:
        """Save."""
        self.training.optimizer.consolidate_state_dict(to=0)
        if self.rank == 0:
            folder.mkdir()
            state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
            save_synced(state, folder / "whole.pt")
        if hasattr(self.training.optimizer, "release_state_dict"):
            self.training.optimizer.release_state_dict()


def save_synced(state: dict[str, Any], path: Path) -> None:
    """Save with torch.save, to disk."""
    import torch

    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_nbytes(others: list[int]) -> int:
    """Return the bytes that the kernel says this process has read, without those of some of its threads."""
    counted = [Path("/proc/self/io"), *(Path(f"/proc/self/task/{thread}/io") for thread in others)]
    whole, *parts = (int(path.read_text().split()[1]) for path in counted)  # "rchar: NUMBER"
    return whole - sum(parts)


# --- heats


class Rank:
    """One rank of a heat."""

    def __init__(self, rank: int, match: Match) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.match = torch, dist, rank, match
        self.work = Path(match.work)
        self.figures: Figures = {}

    def note(self, key: str, value: float) -> None:
        """Note the largest of all ranks' values."""
        told = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(told, op=self.dist.ReduceOp.MAX)
        self.figures.setdefault(key, []).append(told.item())

    def clear(self) -> None:
        """Remove what was written, and let the disk be idle."""
        self.dist.barrier()
        if self.rank == 0:
            for path in self.work.glob("saved-*"):
                shutil.rmtree(path)
            os.sync()
        self.dist.barrier()

    def time(self, key: str, act: Act, folder: Path) -> None:
        """Note what an act takes until it returns, and by how much this process grows; wait for its end."""
        gc.collect()
        reset_peak()
        before = status("VmRSS")
        self.dist.barrier()
        started = time.perf_counter()
        result = act(folder)
        seconds = time.perf_counter() - started
        grown = status("VmHWM") - before
        if result is not None:
            result.result()  # before anything else is sent: DCP's background uses the same process group
        self.note(f"{key}, s", seconds)
        self.note(f"{key}, extra MB", grown)

    def play(self) -> None:
        """Play a heat."""
        if self.match.kind in ("bytes", "step"):
            getattr(self, self.match.kind)()
            return
        training = Training(self.match, self.match.kind, self.rank)
        if self.match.kind == "redundancy":
            self.saves({"zckpt": Zckpt(training), "consolidated": Consolidated(training, self.rank)}, training)
            del training
            self.torchs()
            return
        every = {"zckpt": Zckpt(training), "DCP": DCP(training), "torch, per rank": PerRank(training, self.rank)}
        self.saves(every, training)
        self.stalls({"zckpt": Zckpt(training), "DCP": DCP(training)}, ", DCP's own stager")
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(False, False, False, False))
        self.stalls({"zckpt": Zckpt(training), "DCP": DCP(training, stager)}, ", a kept stager")
        stager.close()

    def saves(self, contestants: dict[str, Any], training: Training) -> None:
        """Let contestants save and load in turns."""
        digests = training.digests()
        for turn in range(self.match.repeat + 1):
            if turn == 1:
                self.figures.clear()  # in the turn before, modules were imported and process groups made
            for name in list(contestants)[:: 1 if turn % 2 else -1]:
                contestant, folder = contestants[name], self.work / f"saved-{turn}"
                self.clear()
                self.time(f"save, {name}", contestant.save, folder)
                if isinstance(contestant, DCP):
                    self.note(f"save, {name}: its state_dict, s", contestant.own)
                if not hasattr(contestant, "load"):
                    continue
                training.forget()
                self.time(f"load, {name}", contestant.load, folder)
                if isinstance(contestant, DCP):
                    self.note(f"load, {name}: its state_dicts, s", contestant.own)
                assert training.digests() == digests, name
        self.note("state of a rank, MB", training.nbytes / 1e6)
        self.clear()

    def stalls(self, contestants: dict[str, Any], beside: str) -> None:
        """Let contestants save while training goes on, in turns; the first saves are told apart."""
        for turn in range(self.match.repeat + 1):
            for name in list(contestants)[:: 1 if turn % 2 else -1]:
                self.clear()
                first = "" if turn else ", the first"
                self.time(f"stall{beside}, {name}{first}", contestants[name].begin, self.work / f"saved-{turn}")
        self.clear()

    def torchs(self) -> None:
        """Let torch's ZeroRedundancyOptimizer consolidate a part, and ours the same part."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        part = replace(self.match, scale=self.match.scale * PART)
        for name, optimizer_class in (("torch's", ZeroRedundancyOptimizer), ("zckpt's", None)):
            training = Training(part, "redundancy", self.rank, optimizer_class=optimizer_class)
            self.clear()
            consolidated = Consolidated(training, self.rank)
            self.time(f"save of {PART:.0%}, consolidated by {name}", consolidated.save, self.work / "saved-part")
        self.clear()

    def step(self) -> None:
        """Time steps of a Checkpointer after which nothing is saved."""
        import zckpt

        checkpointer = zckpt.Checkpointer(self.work / "run")
        for _ in range(self.match.repeat):
            self.dist.barrier()
            seconds = []
            for number in range(CALLS):
                started = time.perf_counter()
                checkpointer.step(number)
                seconds.append(time.perf_counter() - started)
            self.note("step, us", statistics.median(seconds) * 1e6)
            self.dist.barrier()
            if self.rank == 0:
                time.sleep(LATE)
            started = time.perf_counter()
            checkpointer.step(CALLS)
            waited = time.perf_counter() - started
            self.note(f"step, another rank {LATE * 1e3:.0f} ms late, ms", waited * 1e3 if self.rank else 0.0)
        checkpointer.close()

    def bytes(self) -> None:
        """Load the optimizer's state of checkpoints, and count what is read; save them before, if that is wanted."""
        import zckpt

        saved = Path(self.match.saved)
        for kind in FAMILIES if self.match.saves else ():
            training = Training(self.match, kind, self.rank)
            zckpt.save(saved / kind, model=training.model, optimizer=training.optimizer)
            del training
        for kind in FAMILIES:
            training = Training(self.match, kind, self.rank)
            zckpt.load(saved / kind, optimizer=training.optimizer)  # imports, and makes groups
            threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
            others = [thread for thread in threads if thread != threading.get_native_id()]
            for source in FAMILIES:
                before = read_nbytes(others)
                zckpt.load(saved / source, optimizer=training.optimizer)
                read = read_nbytes(others) - before
                before = read_nbytes(others)
                zckpt.open(saved / source)
                opening = read_nbytes(others) - before
                key = f"of {source} into {kind}"
                self.note(f"{key}: read / owned", read / training.owned)
                self.note(f"{key}: of that by opening", opening / training.owned)
                self.note(f"{key}: owned, MB", training.owned / 1e6)
            del training


def play(rank: int, match: Match) -> None:
    """Run one rank's part of a heat; rank 0 writes the figures down."""
    import torch
    import torch.distributed as dist

    join(rank, match.world_size, match.work)
    contest = Rank(rank, match)
    with torch.no_grad() if match.kind not in ("zero", "bytes", "step") else torch.enable_grad():
        contest.play()
    if rank == 0:
        Path(match.work, "figures.json").write_text(json.dumps(contest.figures))
    dist.barrier()
    dist.destroy_process_group()


def hold(match: Match) -> Figures:
    """Return the figures of a heat."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=match.work)
    try:
        its = replace(match, work=folder)
        ranks = [context.Process(target=play, args=(rank, its)) for rank in range(match.world_size)]
        for process in ranks:
            process.start()
        failed = first_to_fail(ranks)
        if failed is not None:
            said = Path(folder, f"log{failed}").read_text()[-4000:]
            sys.exit(f"{match.kind}: rank {failed} of {match.world_size} exited with {ranks[failed].exitcode}\n{said}")
        return json.loads(Path(folder, "figures.json").read_text())
    finally:
        shutil.rmtree(folder)


# --- the verdict


def judge(figures: Figures, heat: str) -> list[Target]:
    """Return the targets of a timed heat with what was measured."""

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(figures[f"{ours}, s"]) / statistics.median(figures[f"{theirs}, s"])

    pairs = {
        "save": ("save, zckpt", "save, DCP", SAVE_RATIO),
        "load": ("load, zckpt", "load, DCP", LOAD_RATIO),
        "stall": ("stall, DCP's own stager, zckpt", "stall, DCP's own stager, DCP", STALL_RATIO),
        "save / consolidated": ("save, zckpt", "save, consolidated", CONSOLIDATION_RATIO),
    }
    late = [statistics.median(values) for key, values in figures.items() if "late" in key]
    return [Target(f"{heat}: waited / late", one / (LATE * 1e3), LATE_RATIO) for one in late] + [
        Target(f"{heat}: {what}", ratio(ours, theirs), limit)
        for what, (ours, theirs, limit) in pairs.items()
        if f"{theirs}, s" in figures
    ]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--repeat", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of elements (default: 1.0)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for files of 10 GB")
    parser.add_argument(
        "--only", choices=["sharded", "replicated", "redundancy", "step", "bytes"], nargs="+", help="these only"
    )
    arguments = parser.parse_args()
    touch_memory()
    targets: list[Target] = []
    for world_size in arguments.ranks:
        for kind in ("sharded", "replicated", "redundancy", "step"):
            if arguments.only and kind not in arguments.only:
                continue
            match = Match(world_size, arguments.repeat, arguments.scale, str(arguments.work), kind)
            figures = hold(match)
            print(f"### {world_size} ranks, {kind}\n\n{table(figures)}\n", flush=True)
            targets += judge(figures, f"{world_size} ranks, {kind}")
    if not arguments.only or "bytes" in arguments.only:
        targets += count(arguments)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


def count(arguments: argparse.Namespace) -> list[Target]:
    """Let checkpoints of each number of ranks be loaded by each, and return the targets."""
    targets = []
    for saving in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.work) as saved:
            match = Match(saving, 1, arguments.scale, str(arguments.work), "bytes", saved)
            for loading in sorted(arguments.ranks, key=lambda ranks: ranks != saving):
                figures = hold(replace(match, world_size=loading, saves=loading == saving))
                what = f"saved by {saving} ranks, loaded by {loading}"
                print(f"### {what}\n\n{table(figures)}\n", flush=True)
                worst = max(max(values) for key, values in figures.items() if key.endswith("read / owned"))
                targets.append(Target(f"{saving} ranks to {loading}: read / owned", worst, BYTES_RATIO))
    return targets


if __name__ == "__main__":
    sys.exit(main())
