"""Lightning's own loop saves through `zckpt.lightning`, and goes on at another number of processes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from tests.fsdp_training.training import truth
from tests.gloo import on_ranks, run
from tests.logical import assert_same_tree
from tests.resuming import lightning_of
from zckpt.errors import TargetError, UnsupportedError, UsageError

pytestmark = pytest.mark.interop

BATCH = 12  # for 1, 2 and 3 processes
PER_EPOCH = 2

Slots = dict[str, torch.Tensor]


@dataclass
class Trained:
    """What a run of Lightning held when it began and after its first epoch, and what it has left."""

    began: Slots
    saved: Slots
    losses: list[float]
    rate: float
    names: list[str]
    steps: int


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCH * PER_EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(5, generator=torch.Generator().manual_seed(index))


def module_of(world_size: int, kind: str) -> Any:
    from lightning import pytorch as pl
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 7})
            torch.manual_seed(world_size)  # a resumed model is another before
            self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            self.losses: list[float] = []
            self.began: Slots = {}
            self.saved: Slots = {}

        def configure_model(self) -> None:
            if kind == "fsdp2" and not hasattr(next(self.parameters()), "placements"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            self.losses.append(float(total / world_size))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def held(self) -> Slots:
            model = self.trainer.strategy.model if kind == "fsdp1" else self
            found = {} if kind == "deepspeed" else truth(model, self.trainer.optimizers[0])
            return {key.replace("_forward_module.", ""): one for key, one in found.items()}

        def on_train_start(self) -> None:
            self.began = self.held()

        def on_train_epoch_end(self) -> None:
            self.saved = self.saved or self.held()

    return Module()


def strategy_of(kind: str, world_size: int, *, stock: bool, async_: bool) -> Any:
    from lightning.pytorch import strategies
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from torch.distributed import fsdp

    from zckpt import lightning

    source: Any = strategies if stock else lightning
    options: dict[str, Any] = {} if stock else {"async_": async_}
    if kind == "ddp":
        return source.DDPStrategy(**options)
    if kind == "fsdp2":
        return source.ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, **options)
    if kind == "fsdp1":  # Lightning wants a GPU for it, and for DeepSpeed
        _AcceleratorConnector._check_strategy_and_fallback = lambda _: None  # type: ignore[method-assign]
        original = fsdp.FullyShardedDataParallel
        made = type("Here", (original,), {
            "__init__": lambda self, *given, **named: original.__init__(
                self, *given, **{**named, "device_id": torch.device("cpu")})})  # fmt: skip
        fsdp.FullyShardedDataParallel = made  # type: ignore[misc]
        return source.FSDPStrategy(**options)
    deepspeed.CUDAAccelerator = CPUAccelerator  # type: ignore[attr-defined,misc,assignment]
    deepspeed._validate_device_index_selection = lambda _: None  # type: ignore[attr-defined]
    source.DeepSpeedStrategy.root_device = property(lambda _: torch.device("cpu", 0))
    return source.DeepSpeedStrategy(stage=2, **options)


def fit(
    rank, world_size, kind: str, directory: Path, resume: Path | None = None, stock: bool = False,
    async_: bool = False, keep: int = -1,
) -> Trained:  # fmt: skip
    """Train to the end of the third epoch."""
    strategy = strategy_of(kind, world_size, stock=stock, async_=async_)
    from lightning.pytorch.callbacks import ModelCheckpoint

    keeps = ModelCheckpoint(directory, filename="{step}", save_top_k=keep, every_n_epochs=1)
    trainer = lightning_of(rank, world_size, strategy, max_epochs=3, callbacks=[keeps])
    module = module_of(world_size, kind)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH // world_size)
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    return Trained(
        module.began, module.saved, module.losses, trainer.optimizers[0].param_groups[0]["lr"],
        sorted(path.name for path in directory.iterdir()), trainer.global_step,
    )  # fmt: skip


def assert_goes_on(source: str, kind: str, directory: Path, *, stock: bool = False, world_size: int) -> None:
    """Let a run go on from the first epoch of another, and hold it against that."""
    saves = {"stock": stock, "async_": not stock}
    whole = run(fit, 2, source, directory / "whole", None, *saves.values())[0]
    assert whole.names == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    saved = directory / "whole" / "step=2.ckpt"
    if not stock:
        opened = zckpt.open(saved)
        assert (opened.format, opened.step) == ("deepspeed" if source == "deepspeed" else "zckpt", PER_EPOCH)
    resumed = run(fit, world_size, kind, directory / "resumed", saved, False, world_size == 3, 1)[0]
    assert resumed.names == ["step=6.ckpt"], "the earlier one is removed, and nothing else is left"
    assert_same_tree(resumed.began, whole.saved)
    assert resumed.losses == pytest.approx(whole.losses[PER_EPOCH:], rel=1e-5)
    assert (resumed.rate, resumed.steps) == (whole.rate, whole.steps)


def test_lightning_goes_on_with_sharded_models_at_another_number_of_processes(tmp_path):
    assert_goes_on("fsdp2", "fsdp2", tmp_path, world_size=1)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "deepspeed"])
def test_lightning_goes_on_with_every_strategy(kind, tmp_path):
    assert_goes_on(kind, kind, tmp_path, world_size=3)


@pytest.mark.nightly
@pytest.mark.parametrize(("source", "kind", "world_size"), [("ddp", "fsdp2", 3), ("fsdp2", "ddp", 1)])
def test_lightning_goes_on_with_what_its_own_strategies_saved(source, kind, world_size, tmp_path):
    assert_goes_on(source, kind, tmp_path, stock=True, world_size=world_size)


@pytest.mark.nightly
@on_ranks(1, fresh=True)
def test_a_checkpoint_stays_whose_successor_was_not_saved(rank, world_size, tmp_path):
    """The save fails after which Lightning would have but one checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from zckpt.lightning import SingleDeviceStrategy

    (tmp_path / ".step=4.ckpt.zckpt-partial").write_text("in the way")
    keeps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=1, every_n_epochs=1)
    strategy = SingleDeviceStrategy(device="cpu", async_=True)
    trainer = lightning_of(rank, world_size, strategy, max_epochs=3, callbacks=[keeps])
    with pytest.raises(TargetError, match="cannot be created"):
        trainer.fit(module_of(world_size, "ddp"), torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=2.ckpt"]


@pytest.mark.nightly
@on_ranks(1, each=[(False,), (True,)], fresh=True)
def test_a_checkpoint_takes_the_place_of_a_link_to_another(rank, world_size, async_, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from zckpt.lightning import SingleDeviceStrategy

    directory = tmp_path / str(async_)  # which is not there when Lightning links
    keeps = ModelCheckpoint(directory, filename="{step}", save_last="link", every_n_epochs=1)
    strategy = SingleDeviceStrategy(device="cpu", async_=async_)
    trainer = lightning_of(rank, world_size, strategy, max_epochs=1, callbacks=[keeps])
    trainer.fit(module_of(world_size, "ddp"), torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
    last, linked = directory / "last.ckpt", directory / "step=2.ckpt"
    before = zckpt.fingerprint(linked).text
    assert last.is_symlink()
    assert zckpt.fingerprint(last).text == before
    trainer.lightning_module.net[0].weight.data.zero_()
    trainer.save_checkpoint(last)
    trainer.strategy.teardown()
    assert not last.is_symlink()
    assert zckpt.fingerprint(last).text != before == zckpt.fingerprint(linked).text


@pytest.mark.nightly
@on_ranks(2, fresh=True)
def test_lightning_takes_what_other_programs_saved_and_says_what_it_cannot_keep(rank, world_size, tmp_path):
    from zckpt.lightning import DDPStrategy

    other = module_of(7, "ddp")
    given = tmp_path / "other"
    optimizer = torch.optim.AdamW(other.parameters())
    other.net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    zckpt.save(given, model=other, optimizer=optimizer, step=3, extra={"lightning": True})
    strategy = DDPStrategy()
    trainer = lightning_of(rank, world_size, strategy, max_epochs=1, enable_checkpointing=False)
    module = module_of(world_size, "ddp")
    rows = torch.utils.data.DataLoader(Rows(), batch_size=BATCH // world_size)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, rows, ckpt_path=str(given))
    assert any("Lightning counts from 0" in str(one.message) for one in warned) == (rank == 0)
    assert trainer.global_step == PER_EPOCH
    weights = {f"weight/{name}": value for name, value in other.state_dict().items()}
    assert_same_tree({name: module.began[name] for name in weights}, weights)
    trainer.save_checkpoint(tmp_path / "bare.ckpt", weights_only=True)
    assert zckpt.open(tmp_path / "bare.ckpt").param_groups == []
    with pytest.raises(UsageError, match="CheckpointIO"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={})
    module.hparams["scale"] = object()
    with pytest.raises(UnsupportedError, match="scale"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def average(rank, world_size, directory: Path, averages: bool, stock: bool) -> list[Slots]:
    """Train an epoch, with an average of the weights or not, and save; or resume with one; return both models."""
    from lightning.pytorch import strategies
    from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

    from zckpt import lightning

    held: list[Slots] = []
    resume = directory if directory.exists() else None
    averaging = EMAWeightAveraging(decay=0.5)

    class Looks(Callback):
        def look(self, module: nn.Module) -> None:
            models = (module, averaging._average_model.module if averages and averaging._average_model else module)
            held[:] = [{name: value.clone() for name, value in one.state_dict().items()} for one in models]

        def on_train_start(self, trainer, pl_module):
            if resume:
                self.look(pl_module)

        def on_train_epoch_end(self, trainer, pl_module):
            if not resume:
                self.look(pl_module)
                trainer.save_checkpoint(directory)

    source: Any = strategies if stock else lightning
    trainer = lightning_of(
        rank, world_size, source.SingleDeviceStrategy(device="cpu"), max_epochs=2 if resume else 1,
        callbacks=[Looks(), averaging] if averages else [Looks()], enable_checkpointing=False,
    )  # fmt: skip
    module = module_of(2 if resume else 1, "ddp")
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH), ckpt_path=resume and str(resume))
    return held


@on_ranks(1, each=[(True, False), (True, True), (False, False)], fresh=True)
def test_the_average_of_weights_that_lightning_keeps_comes_back(rank, world_size, averages, stock, tmp_path):
    directory = tmp_path / f"{averages}-{stock}.ckpt"
    saved = average(rank, world_size, directory, averages, stock)
    assert averages != all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    resumed = average(rank, world_size, directory, True, False)
    assert_same_tree(resumed, saved)
