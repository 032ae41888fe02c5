"""Training goes on under the other side's names: moments and masters are arranged as the weights are."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests import gloo
from tests.live import groups_of, state
from tests.logical import assert_same_tree
from tests.naming.models import Megatron, MetaLlama
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import UsageError
from zckpt.optim import ZeroOptimizer

NAMES = ("llama-huggingface-meta", "llama-huggingface-megatron")


def adamw(model: torch.nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model, named=True), lr=lr)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(step))
        found = model(tokens[:, :-1])
        logits = getattr(found, "logits", found)[..., :37]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def llama_trained(path: Path) -> tuple[torch.nn.Module, torch.optim.AdamW, dict[str, object]]:
    """Save a model of Hugging Face after some steps; return it, its optimizer, and its configuration."""
    from tests.naming.test_shipped import made  # which imports transformers: ranks do without

    model = made("llama").train()
    optimizer = adamw(model)
    trained(model, optimizer, range(3))
    zckpt.save(path, model=model, optimizer=optimizer, step=3)
    return model, optimizer, json.loads(model.config.to_json_string())


def other(name: str, config) -> Megatron | MetaLlama:
    from tests.naming.test_shipped import megatron

    return MetaLlama(config) if name.endswith("meta") else megatron("llama", config, 37)


@pytest.mark.parametrize("name", NAMES)
def test_a_llama_trained_in_one_naming_goes_on_in_the_other_and_back(name):
    model, optimizer, config = llama_trained("mine")
    mapped = {"map": name, "map_config": config}

    # zckpt.load maps by itself; `convert` writes it for the other program, and torch loads it by number
    theirs = other(name, model.config)
    live = adamw(theirs, lr=1.0)
    zckpt.load("mine", model=theirs, optimizer=live, **mapped)
    zckpt.convert("mine", "theirs.pt", to="consolidated", verify=True, **mapped)
    file = torch.load("theirs.pt", weights_only=True)
    plain = other(name, model.config)
    by_number = adamw(plain, lr=1.0)
    plain.load_state_dict(file["model"])
    by_number.load_state_dict(file["optimizer"])
    assert_same_tree(state(theirs, live), state(plain, by_number))

    expected = trained(model, optimizer, range(3, 6))
    assert trained(theirs, live, range(3, 6)) == pytest.approx(expected, rel=2e-4)

    zckpt.convert("mine", "there", to="dcp", world_size=2, verify=True, **mapped)
    zckpt.convert("there", "back", to="zckpt", verify=True, **mapped)
    assert zckpt.diff("mine", "back").equal
    assert zckpt.diff("mine", "there", **mapped).equal


def test_moments_are_arranged_as_torch_arranges_them():
    model, optimizer, config = llama_trained("mine")
    names = {"map": "llama-huggingface-megatron", "map_config": config}
    zckpt.convert("mine", "theirs", to="universal", **names)
    found, ours = zckpt.open("theirs"), state(model, optimizer)
    for layer, key in product(range(2), ("exp_avg", "exp_avg_sq")):
        here = f"{key}/model.layers.{layer}"
        q, k, v = (ours[f"{here}.self_attn.{one}_proj.weight"] for one in "qkv")
        parts = [q.view(2, 3, 8, 24), k.view(2, 1, 8, 24), v.view(2, 1, 8, 24)]
        name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
        assert_same(found.read(name, key), torch.cat(parts, dim=1).reshape(80, 24), name)
        gates = torch.cat([ours[f"{here}.mlp.{one}_proj.weight"] for one in ("gate", "up")])
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        assert_same(found.read(name, key), gates, name)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_training_of_torchtitan_with_one_parameter_of_queries_keys_and_values_goes_on(kind):
    """Its model is saved in three tensors, its optimizer's state in one: the keys are those of torchtitan 0.3."""
    from tests.naming.test_shipped import made

    name = f"{kind}-huggingface-torchtitan"
    model = made(kind).train()
    config = json.loads(model.config.to_json_string())
    titan = MetaLlama(model.config, titan=True, fused=True)
    with torch.no_grad():
        for parameter in titan.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    optimizer = torch.optim.AdamW(titan.named_parameters(), lr=3e-3)
    trained(titan, optimizer, range(2))
    moments, (group,) = optimizer.state_dict()["state"], optimizer.state_dict()["param_groups"]
    names = dict(zip(group.pop("params"), group.pop("param_names"), strict=True))
    flat = {f"state.{names[i]}.{key}": value for i, one in moments.items() for key, value in one.items()}
    flat |= {f"param_groups.{one}.{key}": value for one in names.values() for key, value in group.items()}
    dcp.save({**titan.saved(), "optimizer": flat}, checkpoint_id="titan")

    live = torch.optim.AdamW(model.parameters(), lr=1.0)
    zckpt.load("titan", model=model, optimizer=live, map=name, map_config=config)
    expected = trained(titan, optimizer, range(2, 5))
    assert trained(model, live, range(2, 5)) == pytest.approx(expected, rel=2e-4)

    refused = {key: value for key, value in config.items() if "head" not in key}
    with refusing(UsageError, r"map-config"):
        zckpt.convert("titan", "no", to="zckpt", map=name, map_config=refused)


class Net(torch.nn.Module):
    """An embedding and three linear layers that are one in the other arrangement, head by head, and transposed."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.emb = torch.nn.Embedding(37, 6)
        if joined:
            self.qkv = torch.nn.Parameter(torch.randn(6, 3 * 8))
        else:
            self.q, self.k, self.v = (torch.nn.Linear(6, 8, bias=False) for _ in range(3))
        self.joined = joined
        self.out = torch.nn.Linear(24, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        if self.joined:
            mixed = (x @ self.qkv).unflatten(-1, (2, 3, 4)).transpose(-3, -2)
        else:
            mixed = torch.stack([one(x).unflatten(-1, (2, 4)) for one in (self.q, self.k, self.v)], dim=-3)
        return self.out(torch.tanh(mixed.flatten(-3)))


JOINED = {
    "sides": ["apart", "joined"],
    "sizes": {"three": "3", "heads": "2"},
    "rules": [
        {
            "apart": {f"{one}.weight": f"(heads three[{i}] d) in" for i, one in enumerate("qkv")},
            "joined": {"qkv": "in (heads three d)"},
        },
        *({"apart": name, "joined": name} for name in ("emb.weight", "out.weight", "out.bias")),
    ],
}


def _saved_by_ranks(rank: int, world_size: int, folder: Path) -> list[float]:
    model = Net(joined=False)
    optimizer = ZeroOptimizer(groups_of(model, named=True), torch.optim.AdamW, lr=3e-3, stage=2)
    trained(model, optimizer, range(3))
    zckpt.save(folder / "mine", model=model, optimizer=optimizer, step=3)
    return trained(model, optimizer, range(3, 6))


def _goes_on_at_ranks(rank: int, world_size: int, folder: Path) -> list[float]:
    model = Net(joined=True)
    optimizer = ZeroOptimizer(groups_of(model, named=True), torch.optim.AdamW, lr=1.0, stage=1)
    zckpt.load(folder / "mine", model=model, optimizer=optimizer, map=JOINED)
    return trained(model, optimizer, range(3, 6))


def test_shares_of_ranks_are_of_mapped_tensors_at_another_number_of_ranks(tmp_path):
    expected = gloo.run(_saved_by_ranks, 2, tmp_path)[0]
    found = gloo.run(_goes_on_at_ranks, 3, tmp_path)
    assert all(losses == pytest.approx(expected, rel=2e-4) for losses in found)
