"""What Accelerate saves without DeepSpeed: one model or several, safetensors or torch files, read bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zckpt
from tests.cli.console import refused
from tests.hf_training.training import Truth, reset_accelerate, same
from zckpt.formats.account import take_inventory

pytestmark = pytest.mark.interop


class Odd(nn.Module):
    """Alike layers in two lists, norms, tied, frozen and unused parameters, a float buffer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(13, width)
        self.frozen = nn.Parameter(torch.rand(11), requires_grad=False)
        self.ups = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(11)])
        self.downs = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(11)])
        self.bn = nn.BatchNorm1d(width)
        self.unused = nn.Parameter(torch.rand(3, 5))
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.rand(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return self.head(self.bn(x.mean(1)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, inputs: torch.Tensor) -> None:
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, torch.Tensor]:
    truth = Truth()
    truth.take(model, optimizer)
    return {key.replace("/", f"/{prefix}", 1): one for key, one in truth.tensors.items()}


def assert_is(directory: Path, truth: dict[str, torch.Tensor], *, names: list[str] | None = None) -> Any:
    checkpoint = zckpt.open(directory, names=names)
    assert not checkpoint.unnamed
    for key, tensor in truth.items():
        slot, _, name = key.partition("/")
        if name in {**checkpoint.parameters, **checkpoint.buffers}:
            assert same(checkpoint.read(name, slot), tensor), key
        else:
            assert name == "head.weight"  # of a tied parameter safetensors have one name
    assert not take_inventory(checkpoint).left_out
    return checkpoint


def prepared(tmp_path: Path) -> Accelerator:
    reset_accelerate()
    torch.manual_seed(0)
    return Accelerator(cpu=True, project_dir=str(tmp_path))


@pytest.mark.parametrize("safe", [False, True])
def test_one_model_with_groups_of_its_own(safe, tmp_path):
    accelerator = prepared(tmp_path)
    model = Odd()
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 and p.requires_grad and n != "scale"]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}, {"params": [model.scale], "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    trained(model, optimizer, accelerator, torch.randint(13, (5, 4)))
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
    checkpoint = zckpt.open(tmp_path / "state")
    if safe:  # the file has sorted names: whether `ups` come before `downs` is seen from shapes
        assert checkpoint.step == 3
        known = [name for group in checkpoint.param_groups for name in group.parameters]
        assert all(name in (truth, str(number)) for number, (name, truth) in enumerate(zip(known, names, strict=True)))
        assert_is(tmp_path / "state", truth_of(model, optimizer), names=names)
    else:
        found = assert_is(tmp_path / "state", truth_of(model, optimizer))
        said = [name for group in found.param_groups for name in group.parameters]
        assert [name for name in said if not name.isdecimal()] == [name for name in names if name != "unused"]
        assert said[names.index("unused")] == "0"  # it has no state, and nothing says that it is not `frozen`
        assert found.parameters["head.weight"].tied_to == "embed.weight"
        assert {"bn.running_mean", "bn.running_var"} <= found.buffers.keys()


class Counter:
    """Something that a program registers."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def pair() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return two models and their optimizers, which differ."""
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 5)),
        nn.Sequential(nn.Linear(5, 11), nn.Linear(11, 1)),
    ]
    return models, [
        torch.optim.AdamW(models[0].parameters()), torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    ]  # fmt: skip


def truth_of_pair(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    return truth_of(models[0], optimizers[0], "model.") | truth_of(models[1], optimizers[1], "model_1.")


def two_models(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    accelerator = prepared(tmp_path)
    models, optimizers = pair()
    for model, optimizer, width in zip(models, optimizers, (7, 5), strict=True):
        trained(model, optimizer, accelerator, torch.rand(4, width))
    accelerator.save_state(str(tmp_path / "state"))
    return tmp_path / "state", truth_of_pair(models, optimizers)


def test_several_models_and_optimizers_are_paired_in_their_order(tmp_path):
    state, truth = two_models(tmp_path)
    found = assert_is(state, truth)
    assert found.optimizers() == ["optimizer", "optimizer_1"]
    assert found.details["models"] == ["model", "model_1"]
    names = [name for group in found.param_groups for name in group.parameters]
    assert_is(state, truth, names=names)
    zckpt.convert(state, tmp_path / "native", to="zckpt", verify=True)
    assert_is(tmp_path / "native", truth)
    refused(5, "convert", state, tmp_path / "t", "--to", "transformers-trainer", words=("several models", "--to=zckpt"))


def test_full_state_dicts_of_fsdp_go_by_names_and_the_copy_is_not_read_twice(tmp_path):
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(torch.randint(13, (5, 4))).square().mean().backward()
    optimizer.step()
    state = tmp_path / "state"
    state.mkdir()
    torch.save(model.state_dict(), state / "pytorch_model_fsdp.bin")
    by_name = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    torch.save(by_name, state / "optimizer.bin")
    from safetensors.torch import save_model

    save_model(model, str(state / "model.safetensors"))
    (state / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    found = assert_is(state, {k: v for k, v in truth_of(model, optimizer).items() if "unused" not in k})
    assert found.step == 7
    assert any(one.name == "embed.weight" for one in found.duplicates)
    equal = torch.load(state / "optimizer.bin")
    for slots in equal["state"].values():
        slots["exp_avg"] = slots["exp_avg_sq"]
    torch.save(equal, state / "optimizer.bin")
    assert any("equal bit for bit" in one for one in zckpt.open(state).warnings)


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_become_the_trainers_and_accelerates_again(tmp_path):
    accelerator = prepared(tmp_path)
    model = nn.Linear(3, 4)
    trained(model, torch.optim.AdamW(model.parameters()), accelerator, torch.rand(2, 3))
    accelerator.save_state(str(tmp_path / "state"))
    expected = drawn()
    zckpt.convert(tmp_path / "state", tmp_path / "t", to="transformers-trainer", train_batch_size=1)
    states = torch.load(tmp_path / "t" / "rng_state.pth", weights_only=False)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    assert drawn() == expected
    zckpt.convert(tmp_path / "t", tmp_path / "back", to="accelerate", groups="one")
    accelerator.load_state(str(tmp_path / "back"))
    assert drawn() == expected
