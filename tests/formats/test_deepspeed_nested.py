"""Models that gave DeepSpeed their state dict in dicts, as Megatron-DeepSpeed's do where there is no pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.formats.deepspeed.contents import run_of
from tests.formats.deepspeed.shards import copy, edit_all
from tests.refusals import refusing
from zckpt.errors import DamagedFileError
from zckpt.formats.deepspeed.nested import flattened, renested
from zckpt.torchfile import read_torchfile

STATES = "*/*model_states.pt"


def nested(flat) -> dict[str, Any]:
    made = {}
    for name, value in flat.items():
        front, _, rest = name.partition(".")
        if rest:
            made.setdefault(front, {})[rest] = value
        else:
            made[name] = value
    return made


def joined(tree, front="") -> dict[str, Any]:
    made = {}
    for key, value in tree.items():
        made |= joined(value, f"{front}{key}.") if isinstance(value, dict) else {f"{front}{key}": value}
    return made


@pytest.mark.parametrize("name", ["s1_bf16_dp2", "s3_bf16_dp2"])
def test_a_nested_model_is_that_whose_names_are_joined(name):
    run = copy(name).parent
    edit_all(run, lambda content: content.update(module=nested(content["module"])), STATES)
    compared = zckpt.diff(run_of(name), run)
    assert compared.equal, compared.settings
    assert zckpt.open(run).parameters.keys() == zckpt.open(run_of(name)).parameters.keys()
    assert not [one for one in zckpt.verify(run, deep=True).findings if one.severity == "error"]
    zckpt.reshard(run, "out", world_size=3, verify=True)
    assert zckpt.diff(run, "out").equal
    module = torch.load(next(Path("out").glob(STATES)), weights_only=False)["module"]
    assert isinstance(module["big"], dict)


def test_what_is_none_of_the_model_stays_where_it_was():
    torch.save({"a": {"w": torch.ones(2), "x._extra_state": {"s": torch.ones(1)}}, "empty": {}, "n": 3}, "m")
    file = read_torchfile("m")
    assert isinstance(file.root, dict)
    found, rest = flattened(file.root, {"a.w"}, is_listed=True)
    assert list(found) == ["a.w"]
    assert rest.keys() == {"a", "empty", "n"}
    assert flattened(file.root, {"b"}, is_listed=True)[0] == {}
    assert list(flattened(file.root, {"b"}, is_listed=False)[0]) == ["a.w"]
    whole = renested(file.root, {"a.w": "new"}, file)
    assert whole["a"]["w"] == "new"
    assert list(whole) == ["a", "empty", "n"]
    torch.save({"a": {"w": torch.ones(2)}, "a.w": torch.ones(2)}, "twice")
    twice = read_torchfile("twice")
    with refusing(DamagedFileError, r"two tensors are named a\.w"):
        flattened(twice.root, {"a.w"}, is_listed=True)


class Megatron(torch.nn.Module):
    """Modules named as those of Megatron-DeepSpeed's GPTModel, whose state dict has dicts."""

    def __init__(self):
        super().__init__()
        embedding, layer = torch.nn.Module(), torch.nn.Module()
        embedding.word_embeddings = torch.nn.Embedding(16, 8)
        layer.input_layernorm, layer.dense_h_to_4h = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.language_model = torch.nn.Module()
        self.language_model.embedding, self.language_model.encoder = embedding, torch.nn.Module()
        self.language_model.encoder.layers = torch.nn.ModuleList([layer])
        self.language_model.encoder.final_layernorm = torch.nn.LayerNorm(8)

    def forward(self, tokens) -> torch.Tensor:
        its = self.language_model
        words, layer = its.embedding.word_embeddings, its.encoder.layers[0]
        hidden = layer.dense_h_to_4h(layer.input_layernorm(words(tokens)))
        return (its.encoder.final_layernorm(hidden) @ words.weight.T).float().square().mean()

    def state_dict(self, *args, **kwargs):
        flat = super().state_dict(*args, **kwargs)
        its = {"embedding": {"word_embeddings": {}}, "encoder": {}, "moe_state_dict": {}}
        for name, value in flat.items():
            _, part, rest = name.split(".", 2)
            place = its["embedding"]["word_embeddings"] if part == "embedding" else its["encoder"]
            place[rest.removeprefix("word_embeddings.")] = value
        return {"language_model": its}

    def load_state_dict(self, state, *args, **kwargs):
        assert set(state["language_model"]) == {"embedding", "encoder", "moe_state_dict"}
        return super().load_state_dict(joined(state), *args, **kwargs)


def _engine(source: Path | None, target) -> list[float]:
    """Train from a checkpoint or from the start, and save; return the losses."""
    import deepspeed

    torch.manual_seed(5)
    model = Megatron()
    configuration = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
    if source is not None:
        engine.load_checkpoint(str(source))
    losses = []
    for step in range(3):
        loss = engine(torch.arange(6) + step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    about = {"args": argparse.Namespace(num_layers=1), "checkpoint_version": 3.0, "iteration": 3}
    engine.save_checkpoint(str(target), client_state=about)
    return losses


def resumed(rank, world, source: Path | None, target) -> list[float]:
    return _engine(source, target)


@pytest.mark.interop
def test_deepspeed_goes_on_from_a_nested_model_on_other_ranks(tmp_path):
    gloo.run(resumed, 1, None, tmp_path / "run")
    opened = zckpt.open(tmp_path / "run")
    assert "language_model.encoder.layers.0.dense_h_to_4h.weight" in opened.parameters
    assert set(opened.slot_names()) >= {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert opened.metadata["iteration"] == 3
    zckpt.reshard(tmp_path / "run", tmp_path / "one", world_size=1, verify=True)
    zckpt.reshard(tmp_path / "run", tmp_path / "two", world_size=2, verify=True)
    [theirs] = gloo.run(resumed, 1, tmp_path / "run", tmp_path / "a")
    [ours] = gloo.run(resumed, 1, tmp_path / "one", tmp_path / "b")
    assert ours == theirs
    both = gloo.run(resumed, 2, tmp_path / "two", tmp_path / "c")
    assert both[0] == pytest.approx(theirs, rel=2e-2)
