"""`zckpt.load` of what other programs wrote, into every optimizer family, at other numbers of ranks: bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zckpt
from tests.cli.console import FIXTURES
from tests.deepspeed_engine import models
from tests.deepspeed_engine.catalogue import SPECS
from tests.gloo import run
from tests.pairwise import some
from tests.training.trainings import whole
from tests.truth import Truth, assert_same, bits
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop

SOURCES = [
    "s0_bf16_dp2", "s1_fp32_dp3", "s2_bf16_dp4", "s2_bf16_dp2_elastic", "s2_bf16_dp2_rr", "s1_fp32_dp3_palign",
    "s2_bf16_dp2_zerodim",
    "s3_bf16_dp3", "s3_fp32_dp2", "hf_gpt2_s1_fp32_dp2",
]  # fmt: skip
FAMILIES = ["zero1", "zero2", "redundancy", "adamw", "fsdp"]


def load_fixture(rank, world_size, every: int) -> int:
    """Load sources into families, of all pairs one in `every`; check every slot of every parameter; return how many."""
    checked = 0
    for row, source in enumerate(SOURCES):
        truth = Truth(FIXTURES / source)
        for column, family in enumerate(FAMILIES):
            if (row + column + world_size // 2) % every or (
                family == "fsdp" and SPECS[source].zero_dim
            ):  # `fully_shard` takes none
                continue
            checked += load_one(source, family, truth)
    return checked


def load_one(source: str, family: str, truth: Truth) -> int:
    spec = SPECS[source]
    inner, model, optimizer, dtype = build(source, family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = zckpt.load(FIXTURES / source, model=model, optimizer=optimizer, random_states=False)
    assert not restored.missing + restored.unexpected + restored.reshaped
    assert restored.step
    if not spec.elastic:  # which keeps no hyperparameters
        for mine, its in zip(optimizer.param_groups, truth.facts["param_groups"], strict=True):
            assert (mine["lr"], mine["weight_decay"]) == (its["lr"], its["weight_decay"])
    return check(inner, optimizer, truth, dtype)


def build(source: str, family: str) -> tuple[torch.nn.Module, torch.nn.Module, Any, torch.dtype]:
    """Return a fixture's model, bare and as it is trained, an optimizer of a family, and the type of its weights."""
    spec = SPECS[source]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.dtype if family[:4] == "zero" else "fp32"]
    inner = models.build_model(spec, seed=99).to(dtype)
    names = {parameter: name for name, parameter in inner.named_parameters()}
    groups = [
        {**group, "params": [(names[p], p) for p in group["params"] if p.requires_grad]}
        for group in models.param_groups(spec, inner)
    ]
    model: torch.nn.Module = inner
    if family == "fsdp":
        model = fully_shard(inner, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        named = dict(inner.named_parameters())
        groups = [{**group, "params": [(name, named[name]) for name, _ in group["params"]]} for group in groups]
    elif family != "zero1":
        model = DistributedDataParallel(inner)
    return inner, model, make(family, groups), dtype


def make(family: str, groups: list[dict[str, Any]]) -> Any:
    if family[:4] == "zero":
        return ZeroOptimizer(groups, torch.optim.AdamW, lr=1.0, stage=int(family[-1]))
    if family == "redundancy":
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1.0)
    return torch.optim.AdamW(groups, lr=1.0, fused=family == "fsdp")


def check(model: torch.nn.Module, optimizer: Any, truth: Truth, dtype: torch.dtype) -> int:
    checked = 0
    for name, parameter in model.named_parameters():
        exact = truth.masters.get(name, truth.weights.get(name))
        if parameter.requires_grad or dtype == torch.float32:
            assert_same(whole(parameter), exact.to(dtype), name)
        if not parameter.requires_grad:
            continue
        for slot in truth.slots:
            expected = truth.kind(slot).get(name)
            found = state_of(optimizer, name, parameter, slot)
            if expected is not None and found is not None:
                assert_same(found, expected, f"{slot} of {name}")
                checked += 1
        if isinstance(optimizer, ZeroOptimizer):
            assert_same(optimizer.full_state(name, "master"), truth.masters[name], f"master of {name}")
    for name, buffer in model.named_buffers():
        if name in truth.buffers and buffer.nbytes == truth.buffers[name].numel():  # of the type that was saved
            assert torch.equal(bits(buffer), truth.buffers[name]), name
    return checked


def state_of(optimizer: Any, name: str, parameter: torch.Tensor, slot: str) -> torch.Tensor | None:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.full_state(name, slot)
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    value = inner.state.get(parameter, {}).get(slot)
    return None if value is None else whole(value)


@pytest.mark.parametrize(("world_size", "every"), some([(1, 5), (3, 5)], [(1, 1), (3, 1)]))
def test_every_family_gets_the_state_that_was_saved(world_size, every):
    told = run(load_fixture, world_size, every)
    assert sum(told) > 50 * world_size / every * len(SOURCES)


def load_state_of_ranks(rank, world_size, source: str) -> str:
    """Load a checkpoint with state that is each rank's own, with an optimizer and without; return the refusal."""
    model = models.build_model(SPECS[source])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(zckpt.UnsupportedError) as raised:
        zckpt.load(FIXTURES / source, model=model, optimizer=optimizer)
    assert all(torch.equal(bits(value), bits(before[name])) for name, value in model.state_dict().items())
    zckpt.load(FIXTURES / source, model=model)
    truth = Truth(FIXTURES / source)
    for name, value in truth.masters.items():
        assert_same(model.state_dict()[name], value, name)
    return str(raised.value)


def test_state_that_was_each_ranks_own_is_refused_by_name_and_the_model_is_loaded_without():
    (said,) = run(load_state_of_ranks, 1, "own_lamb_s2_fp32_dp2")
    assert "trust_ratio, weight_norm, adam_norm" in said


def test_param_groups_in_which_nothing_is_trained_need_not_be_in_a_checkpoint(tmp_path):
    """DeepSpeed files none, and neither need those that load one have those that a checkpoint has."""

    def training(*, more: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 4)
        model.bias.requires_grad_(False)
        others = [{"params": [], "lr": 5.0}, {"params": [model.bias], "lr": 6.0}] if more else []
        return model, torch.optim.AdamW([*others, {"params": [model.weight], "lr": 1e-2}])

    model, optimizer = training(more=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    zckpt.save(tmp_path / "saved", model=model, optimizer=optimizer, step=1)
    zckpt.convert(tmp_path / "saved", tmp_path / "filed", to="deepspeed", stage=2, world_size=2)
    for path in (tmp_path / "saved", tmp_path / "filed"):
        for more in (True, False):
            model, optimizer = training(more=more)
            zckpt.load(path, model=model, optimizer=optimizer)
            zckpt.assert_restored(path, model=model, optimizer=optimizer)
            assert [group["lr"] for group in optimizer.param_groups] == [5.0, 6.0] * more + [1e-2]
