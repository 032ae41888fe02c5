"""Tensor-parallel slices of a ZeroOptimizer: saved as whole parameters, loaded at any degree, and without slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zckpt
from tests.deepspeed_engine import Spec, models, tensor_parallel
from tests.deepspeed_engine.training import batch
from tests.gloo import run
from tests.live import groups_of, of_all_ranks
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.training.trainings import mean_over_ranks
from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.formats.deepspeed.axes.tp_rules import Rules
from zckpt.optim import ZeroOptimizer
from zckpt.optim.tensors import ModelState, Share
from zckpt.state import Extent
from zckpt.training.slices import Slices

STEPS, AFTER = 2, 2
SLOTS = ("master", "exp_avg", "exp_avg_sq")
Found = dict[tuple[str, str], torch.Tensor]


def spec_of(tp: int, dp: int) -> Spec:
    return Spec(f"tp{tp}_dp{dp}", model="megatron", tensor_parallel=tp, world_size=tp * dp, invariant=True, groups=2)


class Run:
    """The same training at any degrees: of slices in a ZeroOptimizer, or on one rank in AdamW."""

    def __init__(self, tp: int, dp: int, seed: int = 1, dtype: torch.dtype = torch.float32, stage: int = 2) -> None:
        self.spec = spec_of(tp, dp)
        self.grid = tensor_parallel.use_grid(self.spec)
        self.model = models.build_model(self.spec, seed).to(dtype)
        rows = (seed + torch.arange(24.0, dtype=dtype)).view(12, 2).chunk(tp)[self.grid.tensor_rank].clone()
        self.model.register_parameter("kept", torch.nn.Parameter(rows, requires_grad=False))
        self.rules = tensor_parallel.universal_info(self.spec)
        groups = groups_of(self.model, named=True)
        self.is_zero = tp * dp > 1 or dtype != torch.float32  # AdamW has no masters
        if self.is_zero:
            self.optimizer: Any = ZeroOptimizer(
                groups, torch.optim.AdamW, lr=1e-2, stage=stage, process_group=self.grid.get_data_parallel_group(),
                model_parallel=self.grid,
            )  # fmt: skip
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.given = {"model": self.model, "optimizer": self.optimizer}

    def train(self, first: int, count: int) -> list[float]:
        """Train, and return each step's loss over all ranks."""
        losses = []
        for step in range(first, first + count):
            loss = self.model(*batch(self.spec, step))
            if self.is_zero:
                self.optimizer.backward(loss)
            else:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    def state(self) -> Found:
        """Return all state of all ranks, whole, by the test's own rules; a vocabulary without padding."""
        mine: Found = {}
        for name, parameter in self.model.named_parameters():
            for slot in SLOTS if parameter.requires_grad else ():
                if self.is_zero:
                    mine[name, slot] = self.optimizer.full_state(name, slot)
                else:
                    held = parameter if slot == "master" else self.optimizer.state[parameter][slot]
                    mine[name, slot] = held.detach().clone()
            mine[name, "weight"] = parameter.detach().clone()
        slices = of_all_ranks(mine)[: self.spec.tensor_parallel]
        whole = {key: [one[key] for one in slices] for key in mine}
        return {
            key: torch.cat(its) if key[0] == "kept" else tensor_parallel.merge(key[0], its)
            for key, its in whole.items()
        }


def saved(rank, world_size, tp: int, path: str, dtype: torch.dtype, async_: bool) -> tuple[Found, list[float]]:
    run_ = Run(tp, world_size // tp, dtype=dtype)
    run_.train(0, STEPS)
    saving = zckpt.save(path, **run_.given, step=STEPS, tp_rules=run_.rules, async_=async_, fingerprint=True)
    if saving is not None:
        saving.result()
    return run_.state(), run_.train(STEPS, AFTER)


def loaded(rank, world_size, tp: int, path: str, dtype: torch.dtype) -> tuple[Found, list[float]]:
    run_ = Run(tp, world_size // tp, seed=2, dtype=dtype)
    restored = zckpt.load(path, **run_.given, tp_rules=run_.rules)
    assert (restored.step, restored.missing, restored.unexpected) == (STEPS, [], [])
    return run_.state(), run_.train(STEPS, AFTER)


def assert_is_saved(path: str, expected: Found) -> None:
    checkpoint = zckpt.open(path)
    assert set(checkpoint.parameters) == {name for name, _ in expected}
    assert checkpoint.parameters["embedding.weight"].shape[0] == tensor_parallel.PADDED
    for (name, slot), value in expected.items():
        its = checkpoint.read(name, slot if slot in checkpoint.parameters[name].slots else "weight")
        whole = its[: len(value)] if name == "embedding.weight" else its
        assert torch.equal(whole, value), f"{slot} of {name}"
    assert zckpt.verify(path, deep=True).sound


def two_ranks(rank, world_size) -> tuple[Found, list[float], list[float]]:
    """Save slices, go on from them, and meet the refusals; AdamW on one rank has its turn elsewhere."""
    first = Run(2, 1)
    first.train(0, STEPS)
    rules = Path("rules.json")
    if rank == 0:
        rules.write_text(json.dumps(first.rules))
    dist.barrier()
    zckpt.save("slices", **first.given, step=STEPS, tp_rules=rules)
    state, unbroken = first.state(), first.train(STEPS, AFTER)
    again = Run(2, 1, seed=2)
    zckpt.load("slices", **again.given, tp_rules=rules)
    assert_same_tree(again.state(), state)

    refused_at = Path(f"refused_{rank}")  # where ranks are to save by themselves, each has its own

    def refused(kind: type[Exception], match: str, **more: Any) -> None:
        with pytest.raises(kind, match=match):
            zckpt.save(refused_at, **{**again.given, **more})

    refused(UnsupportedError, "model needs rules that say how tensors are cut")
    with refusing(UnsupportedError, "model needs rules that say how tensors are cut"):
        zckpt.load("slices", **again.given)
    plain = [one for one in again.rules["tp_replicated_parameter_patterns"] if "input_norm" not in one]
    twice = {**again.rules, "tp_replicated_parameter_patterns": plain}
    refused(LayoutError, "input_norm.weight is the same on ranks of all slices, although no rule", tp_rules=twice)
    copies = {**again.rules, "tp_replicated_parameter_patterns": [r".*adapter_in\.", *plain, r".*input_norm"]}
    refused(
        LayoutError,
        "adapter_in.* has different values on ranks.*give tp_rules that say how it is cut",
        tp_rules=copies,
    )
    refused(UsageError, "rules_1.json", tp_rules=Path(f"rules{'_1' * rank}.json"))  # of rank 0 it is there
    refused(UsageError, "unknown tensor-parallel rules", tp_rules={"column": []})
    refused(UsageError, "tp_rules are for zckpt's own format", tp_rules=rules, format="deepspeed")
    data = again.grid.get_data_parallel_group()
    refused(UsageError, "by all ranks that have some of them", tp_rules=rules, process_group=data)
    alone = ZeroOptimizer(again.model.named_parameters(), torch.optim.AdamW, lr=0.1, process_group=data)
    refused(UsageError, "nothing says which slices this rank has", tp_rules=rules, optimizer=alone)
    refused(
        UsageError, "nothing says which slices", tp_rules=rules, optimizer=torch.optim.SGD(again.model.parameters())
    )
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    with pytest.raises(ValueError, match="DTensors are not supported"):
        ZeroOptimizer([("sharded", sharded)], torch.optim.AdamW, lr=0.1)
    again.model.register_buffer("mask", torch.full((2,), float(rank)))
    refused(LayoutError, "mask is a buffer with other values", tp_rules=rules)
    assert not refused_at.exists()
    del again.model.mask
    last = Run(2, 1, seed=3)
    zckpt.load("slices", **last.given, tp_rules=rules)
    return state, unbroken, last.train(STEPS, AFTER)


def test_slices_of_two_ranks_are_whole_parameters_to_one():
    (state, unbroken, again), (_, _, other) = run(two_ranks, 2)
    assert again == other == unbroken
    assert_is_saved("slices", state)
    [(found, losses)] = run(loaded, 1, 1, "slices", torch.float32)
    assert_same_tree(found, state)
    assert losses == pytest.approx(unbroken, rel=1e-5)


def test_boxes_of_slices_along_any_dimension_are_the_whole():
    """Two parts along the second of three dimensions, each cut for two ranks, of which each has three flat ranges."""
    info = {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [3, [8, 4], 2], "partition_dim": 1}]}
    whole = torch.arange(3 * 12 * 2.0).view(3, 12, 2)
    found = torch.full_like(whole, -1)
    for rank in range(2):
        local = torch.cat([part.chunk(2, 1)[rank] for part in whole.split([8, 4], 1)], 1).contiguous()
        slices = Slices(Rules(info, "rules"), rank, 2, is_first=True)
        for first, last in ((0, 7), (7, 30), (30, 36)):
            extent = Extent.flat(tuple(local.shape), first, last - first)
            share = Share(tuple(local.shape), extent, local.view(-1)[first:last], (rank,))
            its = slices.sliced(ModelState.of_parameters({"w": local}), [("w", "exp_avg", share)])
            assert (its.shares, its.several["w", "exp_avg"].shape) == ([], (3, 12, 2))
            for (offsets, sizes), elements in its.several["w", "exp_avg"].boxes:
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert (found[box] == -1).all()
                found[box] = elements
    assert torch.equal(found, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_are_loaded_at_any_degrees(dtype):
    degrees = [(2, 2), (1, 2), (2, 1), (1, 1)] + [(4, 1), (1, 3)] * (dtype == torch.float32)
    for number, (tp, dp) in enumerate(degrees):
        path = f"{tp}_{dp}"
        state, unbroken = run(saved, tp * dp, tp, path, dtype, number % 2 == 0)[0]
        assert_is_saved(path, state)
        for its_tp, its_dp in degrees:
            for found, losses in run(loaded, its_tp * its_dp, its_tp, path, dtype):
                assert_same_tree(found, state)
                if (its_tp, its_dp) == (tp, dp):
                    assert losses == unbroken
                elif dtype == torch.float32:
                    assert losses == pytest.approx(unbroken, rel=1e-4)


def checkpointed(rank, world_size) -> tuple[list[float], list[float]]:
    one = Run(2, world_size // 2)
    options: dict[str, Any] = {"every": 2, "replicate": True, "replicate_in": ".", "tp_rules": one.rules}
    checkpointer = zckpt.Checkpointer("run", **options)
    for step in range(3):
        one.train(step, 1)
        checkpointer.step(step + 1, **one.given)
    unbroken = one.train(3, AFTER)
    again = Run(2, world_size // 2, seed=2)
    with zckpt.Checkpointer("run", **options) as resuming:
        restored = resuming.resume(**again.given)
        assert restored.step == 3  # kept in memory after the save of step 2
    return unbroken, again.train(3, AFTER)


@pytest.mark.nightly
def test_a_checkpointer_saves_and_keeps_slices():
    for unbroken, again in run(checkpointed, 4):
        assert again == unbroken
