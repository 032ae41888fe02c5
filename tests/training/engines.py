"""One training in every engine: DeepSpeed of each stage, DDP, FSDP1, FSDP2, and the two sharded optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zckpt
from tests.deepspeed_engine import Spec
from tests.deepspeed_engine.truth import read_live
from tests.training.trainings import ROWS, Net, State, mean_over_ranks, share_of_batch, slots_of
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

DEEPSPEED = ("ds0", "ds1", "ds2", "ds3")
ENGINES = (*DEEPSPEED, "ddp", "fsdp1", "fsdp2", "redundancy", "zero")
SLOTS = ("exp_avg", "exp_avg_sq")


class Engine:
    """A model in training, float32 with AdamW, the same whatever the engine.

    Parameters
    ----------
    name : str
        One of `ENGINES`.
    seed : int
        Of its first weights.
    lr : float
    clips : bool
        Whether DeepSpeed clips gradients as it usually does, which its configuration then does not say.
    """

    def __init__(self, name: str, seed: int, lr: float, *, clips: bool = False) -> None:
        self.name = name
        torch.manual_seed(seed)
        self.inner = Net(empty=False)  # `fully_shard` takes no parameter without elements
        self.model: nn.Module = self.inner
        self.engine: Any = None
        if name == "fsdp1":
            self.model = FullyShardedDataParallel(self.inner, use_orig_params=True, device_id=torch.device("cpu"))
        elif name == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.inner.body, mesh=mesh)
            self.model = fully_shard(self.inner, mesh=mesh)
        elif name in ("ddp", "redundancy"):
            self.model = DistributedDataParallel(self.inner)
        named = [(its, p) for its, p in self.model.named_parameters() if p.requires_grad]
        weights = [(its, p) for its, p in named if its.rpartition(".")[2] == "weight"]
        others = [(its, p) for its, p in named if its.rpartition(".")[2] != "weight"]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        if name == "zero":
            self.optimizer: Any = ZeroOptimizer(groups, torch.optim.AdamW, lr=lr)
        elif name == "redundancy":
            self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=lr)
        else:
            bare = [{**group, "params": [p for _, p in group["params"]]} for group in groups]  # as DeepSpeed wants them
            self.optimizer = torch.optim.AdamW(bare, lr=lr)
        if name in DEEPSPEED:
            import deepspeed

            config = {
                "train_batch_size": ROWS, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0},
                "steps_per_print": 10**9, **({} if clips else {"gradient_clipping": 0.0}),
            }  # fmt: skip
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=self.inner, optimizer=self.optimizer, config=config, dist_init_required=False
            )
            self.model = self.engine

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train and return each step's loss over all ranks."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        ids, expected = share_of_batch(step)
        loss = nn.functional.cross_entropy(self.model(ids), expected)
        if self.name in (*DEEPSPEED, "zero"):
            (self.engine or self.optimizer).backward(loss)
        else:
            loss.backward()
        if self.engine is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()
        return mean_over_ranks(loss)

    def save(self, directory: Path) -> None:
        """Save as the engine is saved: DeepSpeed by itself, what has no means of its own by zckpt."""
        if self.engine is not None:
            self.engine.save_checkpoint(str(directory))
        else:
            zckpt.save(directory, model=self.model, optimizer=self.optimizer)

    def load(self, directory: Path) -> None:
        """Load what any engine has saved."""
        if self.engine is None:
            restored = zckpt.load(directory, model=self.model, optimizer=self.optimizer)
            assert not restored.missing + restored.unexpected + restored.reshaped
            return
        with zckpt.deepspeed.any_world_size(self.engine):
            path, _ = self.engine.load_checkpoint(str(directory))
        assert path is not None

    def state(self) -> State:
        """Return everything by name, whole, on every rank, by the engine's own means."""
        if self.name in DEEPSPEED:
            return self._state_of_deepspeed()
        found: State = {}
        if self.name in ("fsdp1", "fsdp2", "ddp"):
            options = StateDictOptions(full_state_dict=True, cpu_offload=False)
            for name, value in get_model_state_dict(self.model, options=options).items():
                found[name] = {"weight": value.clone()}
            for name, its in get_optimizer_state_dict(self.model, self.optimizer, options=options)["state"].items():
                found[name] |= {slot: its[slot].clone() for slot in SLOTS}
            return _everywhere(found)
        for name, value in self.inner.state_dict().items():
            found[name] = {"weight": value.detach().clone()}
        for name, parameter in self.inner.named_parameters():
            if parameter.requires_grad:
                its = slots_of(self.optimizer, name, parameter)
                found[name] |= {slot: its[slot] for slot in SLOTS}
        return _everywhere(found)

    def _state_of_deepspeed(self) -> State:
        live = read_live(self.engine, Spec(self.name))
        found: State = {name: {"weight": value} for name, value in (live.weights | live.buffers).items()}
        for name, its in live.slots.items():
            assert torch.equal(its["fp32"], found[name]["weight"])
            found[name] |= {slot: its[slot] for slot in SLOTS}
        return _everywhere(found)


def _everywhere(found: State) -> State:
    """Give a tied parameter one name."""
    found.pop("head.weight", None)
    return found
