"""State on a GPU, NCCL, copies to pinned memory and back: `pytest -m cuda`, where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zckpt
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

AdamW = torch.optim.AdamW
Made = tuple[nn.Module, Any]


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank over NCCL, where sums are taken in one order."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    rendezvous = f"file://{tmp_path_factory.mktemp('nccl')}/rendezvous"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    parts = [nn.Linear(37, 53), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(53), nn.Linear(53, 11, bias=False)]
    return nn.Sequential(*parts).to("cuda", dtype)


def plain(dtype: torch.dtype = torch.float32, **options: Any) -> Made:
    model = net(dtype)
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def zero(dtype: torch.dtype, **options: Any) -> Made:
    model = net(dtype)
    return model, ZeroOptimizer(model.named_parameters(), AdamW, lr=1e-2, **options)


def beside(**options: Any) -> Made:
    model = DistributedDataParallel(net(), device_ids=[0])
    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)


def sharded(dtype: torch.dtype = torch.float32) -> Made:
    model = fully_shard(net(dtype), mesh=init_device_mesh("cuda", (1,)))
    return model, AdamW(model.parameters(), lr=1e-2)


def sharded1() -> Made:
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=0)
    return model, AdamW(model.parameters(), lr=1e-2)


MAKERS: dict[str, Callable[[], Made]] = {
    "adamw": plain,
    "adamw bf16": partial(plain, torch.bfloat16),
    "adamw fused": partial(plain, fused=True),
    "adamw capturable": partial(plain, capturable=True),
    "zero1 bf16": partial(zero, torch.bfloat16, stage=1),
    "zero2 bf16": partial(zero, torch.bfloat16, stage=2),
    "zero2 fp16": partial(zero, torch.float16, stage=2, loss_scale=128.0),
    "zero2 bf16 fused": partial(zero, torch.bfloat16, stage=2, fused=True),
    "zero2 offload": partial(zero, torch.bfloat16, stage=2, offload=True),
    "zero2 fp32 clipped": partial(zero, torch.float32, stage=2, clip_grad=1.0, gradient_accumulation_steps=2),
    "redundancy": beside,
    "fsdp2": sharded,
    "fsdp2 bf16": partial(sharded, torch.bfloat16),
    "fsdp1": sharded1,
}


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Take steps with random inputs of the GPU's generator; the losses."""
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps * getattr(optimizer, "gradient_accumulation_steps", 1)):
        loss = model(torch.randn(8, 37, device="cuda", dtype=dtype)).float().square().mean()
        optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(maker: str, seed: int) -> Made:
    torch.manual_seed(seed)
    return MAKERS[maker]()


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_with_the_losses_of_the_unbroken_run(maker, async_, tmp_path):
    model, optimizer = made(maker, 0)
    train(model, optimizer, 3)
    saving = zckpt.save(tmp_path / "saved", model=model, optimizer=optimizer, step=3, async_=async_)
    unbroken = train(model, optimizer, 4)
    if saving is not None:
        saving.result()
    assert zckpt.verify(tmp_path / "saved", deep=True).sound
    model, optimizer = made(maker, 1)
    assert zckpt.load(tmp_path / "saved", model=model, optimizer=optimizer).step == 3
    zckpt.assert_restored(tmp_path / "saved", model=model, optimizer=optimizer)
    assert train(model, optimizer, 4) == unbroken


@pytest.mark.parametrize("into", ["adamw", "adamw fused", "zero2 fp32 clipped", "redundancy", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("maker", ["adamw capturable", "redundancy", "fsdp2"])
def test_one_optimizers_state_goes_into_another(maker, into, tmp_path):
    model, optimizer = made(maker, 0)
    train(model, optimizer, 3)
    zckpt.save(tmp_path / "saved", model=model, optimizer=optimizer, step=3)
    other, its = made(into, 1)
    zckpt.load(tmp_path / "saved", model=other, optimizer=its)
    zckpt.assert_restored(tmp_path / "saved", model=other, optimizer=its)
    zckpt.save(tmp_path / "again", model=other, optimizer=its, step=3)
    assert zckpt.diff(
        tmp_path / "saved", tmp_path / "again", ignore_metadata=True, slots=["weight", "exp_avg", "exp_avg_sq"]
    ).equal


def test_what_is_saved_beside_training_is_what_was_there_when_it_was_asked_for(tmp_path):
    model = nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(24)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for number in range(4):
        loss = model(torch.randn(16, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zckpt.save(tmp_path / f"at{number}", model=model, optimizer=optimizer, step=number)
        saving = zckpt.save(tmp_path / f"beside{number}", model=model, optimizer=optimizer, step=number, async_=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-3)
                optimizer.state[parameter]["exp_avg"].fill_(torch.nan)
        saving.result()
        assert zckpt.diff(tmp_path / f"at{number}", tmp_path / f"beside{number}").equal
        zckpt.load(tmp_path / f"at{number}", model=model, optimizer=optimizer)


def test_checkpointer_resumes(tmp_path):
    model, optimizer = made("zero2 bf16", 0)
    checkpointer = zckpt.Checkpointer(tmp_path, keep=2, every=2, async_=True)
    losses = []
    for number in range(1, 7):
        losses += train(model, optimizer, 1)
        checkpointer.step(number, model=model, optimizer=optimizer)
    unbroken = train(model, optimizer, 2)
    checkpointer.close()
    model, optimizer = made("zero2 bf16", 1)
    assert zckpt.Checkpointer(tmp_path).resume(model=model, optimizer=optimizer).step == 6
    assert train(model, optimizer, 2) == unbroken


def test_dcp_reads_and_writes_through_zckpt(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = made("fsdp2", 0)
    train(model, optimizer, 3)
    its, states = get_state_dict(model, optimizer)
    dcp.save({"model": its, "optimizer": states}, storage_writer=zckpt.dcp.Writer(tmp_path / "zckpt"))
    dcp.save({"model": its, "optimizer": states}, checkpoint_id=str(tmp_path / "torch"))
    assert zckpt.diff(tmp_path / "zckpt", tmp_path / "torch", ignore_metadata=True).equal
    torch.manual_seed(9)
    unbroken = train(model, optimizer, 2)
    for source in ("zckpt", "torch"):
        other, its_optimizer = made("fsdp2", 1)
        its, states = get_state_dict(other, its_optimizer)
        dcp.load({"model": its, "optimizer": states}, storage_reader=zckpt.dcp.Reader(tmp_path / source))
        set_state_dict(other, its_optimizer, model_state_dict=its, optim_state_dict=states)
        assert all(
            torch.equal(zckpt.open(tmp_path / source).read(name, "weight"), one.full_tensor().cpu())
            for name, one in other.named_parameters()
        )
        torch.manual_seed(9)
        assert train(other, its_optimizer, 2) == unbroken


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_tensors_on_a_gpu_are_read_bit_for_bit(legacy, tmp_path):
    model, optimizer = made("adamw bf16", 0)
    train(model, optimizer, 3)
    file = tmp_path / "saved.pt"
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        file,
        _use_new_zipfile_serialization=not legacy,
    )
    opened = zckpt.open(file)
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.read(name, "weight"), parameter.detach().cpu())
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opened.read(name, slot), optimizer.state[parameter][slot].cpu())
    zckpt.consolidate(file, tmp_path / "model.safetensors")
    assert zckpt.diff(file, tmp_path / "model.safetensors", slots=["weight"], ignore_metadata=True).equal


def two_ranks(rank: int, folder: str, maker: str) -> None:
    """Two ranks on one GPU, over gloo; the first keeps the losses that come next."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    model, optimizer = made(maker, 0)
    torch.manual_seed(rank)
    train(model, optimizer, 3)
    zckpt.save(f"{folder}/two", model=model, optimizer=optimizer, step=3)
    other, its = made(maker, 5)
    zckpt.load(f"{folder}/two", model=other, optimizer=its)
    zckpt.assert_restored(f"{folder}/two", model=other, optimizer=its)
    dist.destroy_process_group()


@pytest.mark.parametrize("maker", ["zero1 bf16", "zero2 bf16", "zero2 offload", "redundancy"])
def test_two_ranks_share_a_gpu_and_one_takes_over(maker, tmp_path):
    mp.spawn(two_ranks, args=(str(tmp_path), maker), nprocs=2)
    model, optimizer = made(maker, 7)
    zckpt.load(tmp_path / "two", model=model, optimizer=optimizer)
    zckpt.assert_restored(tmp_path / "two", model=model, optimizer=optimizer)
    zckpt.save(tmp_path / "one", model=model, optimizer=optimizer, step=3)
    assert zckpt.diff(tmp_path / "two", tmp_path / "one", ignore_metadata=True).equal


# --- DeepSpeed's engine, over NCCL


def engine(stage: int, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    return deepspeed.initialize(model=net(), config=config, dist_init_required=False)[0]


def train_engine(its: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = its(torch.randn(8, 37, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        its.backward(loss)
        its.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_a_gpu_loads_what_is_written_and_trains_on(stage, tmp_path):
    pytest.importorskip("deepspeed")
    its = engine(stage, 0)
    train_engine(its, 3)
    its.save_checkpoint(str(tmp_path / "run"))
    torch.manual_seed(9)
    unbroken = train_engine(its, 3)
    run = tmp_path / "run"
    assert zckpt.verify(run, deep=True).sound
    zckpt.reshard(run, tmp_path / "three", world_size=3)
    zckpt.reshard(tmp_path / "three", tmp_path / "back", world_size=1)
    zckpt.convert(run, tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "dcp", tmp_path / "from-dcp", to="deepspeed", world_size=1, stage=stage)
    for source in ("back", "from-dcp"):
        other = engine(stage, 1)
        assert other.load_checkpoint(str(tmp_path / source))[0] is not None
        torch.manual_seed(9)
        assert train_engine(other, 3) == unbroken
    model, optimizer = made("zero2 bf16", 3)
    zckpt.load(run, model=model, optimizer=optimizer)
    torch.manual_seed(9)
    assert train(model, optimizer, 3) == unbroken
    zckpt.save(tmp_path / "ours" / "global_step6", model=model, optimizer=optimizer, step=6, format="deepspeed")
    ours = zckpt.open(tmp_path / "ours" / "global_step6")
    if stage == 2:
        other = engine(2, 4)
        other.load_checkpoint(str(tmp_path / "ours"), tag="global_step6")
        torch.manual_seed(10)
        expected = train(model, optimizer, 2)
        torch.manual_seed(10)
        assert train_engine(other, 2) == expected
    assert set(ours.slot_names()) >= {"weight", "master", "exp_avg", "exp_avg_sq"}
