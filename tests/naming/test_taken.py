"""Layers there twice or not at all, and rows added to a vocabulary: what transformers' own model says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests import live
from tests.cli.console import FIXTURES
from tests.live import save_both
from tests.logical import assert_same_tree
from tests.naming.test_shipped import made, saved_run, untrained
from tests.naming.test_training import trained
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import UnsupportedError, UsageError
from zckpt.naming.document import parse_map

LAYERS = "model.layers.{l}."
RUN = FIXTURES / "hf_llama_s2_bf16_dp2"
TOKENS = torch.randint(0, 37, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("said", "numbers"), [("0-1,0-1", [0, 1, 0, 1]), ("1", [1]), ("0-,1*2", [0, 1, 1, 1])])
def test_layers_taken_make_the_model_that_was_put_together_by_hand_and_moments_follow(said, numbers):
    """Of optimizers of two groups, which a file only numbers in the order of the model."""
    model, other = made("llama").train(), untrained("llama", num_hidden_layers=len(numbers)).train()
    optimizer, next_optimizer = (torch.optim.AdamW(live.groups_of(one), lr=0.01) for one in (model, other))
    trained(model, optimizer, range(2))
    trained(other, next_optimizer, range(1))  # so that it has state, which is not the one loaded
    save_both(model, optimizer, "run.pt")
    order = [name for group in live.groups_of(model, named=True) for name, _ in group["params"]]
    done = zckpt.convert("run.pt", "new.pt", to="consolidated", names=order,
                         map={"taken": {LAYERS: said}})  # fmt: skip
    assert any("config.json must state how many" in note for note in done.notes)
    found = torch.load("new.pt", weights_only=True)
    states = [value for one in found["optimizer"]["state"].values() for value in one.values()]
    assert len({value.data_ptr() for value in states}) == len(states)
    other.load_state_dict(found["model"])
    next_optimizer.load_state_dict(found["optimizer"])
    ours, theirs = live.state(model, optimizer), live.state(other, next_optimizer)
    was = {key: re.sub(r"(?<=layers\.)\d+", lambda layer: str(numbers[int(layer[0])]), key) for key in theirs}
    assert_same_tree(theirs, {key: ours[was[key]] for key in theirs})
    trained(other, next_optimizer, range(3, 5))


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_a_vocabulary_grown_is_that_of_resize_token_embeddings_with_rows_of_zeros_or_copies(kind):
    model, optimizer = saved_run(kind, "run.pt")
    taken = {"model.embed_tokens.weight": "0-36,zero*3,5*2"}
    if kind == "llama":
        taken["lm_head.weight"] = "0-,zero*3,5*2"
    zckpt.convert("run.pt", "new", to="zckpt", map={"taken": taken})
    other = made(kind)
    other.load_state_dict(model.state_dict())
    other.resize_token_embeddings(42, mean_resizing=False)
    with torch.no_grad():
        for name in taken:
            weight = other.get_parameter(name)
            weight[37:40], weight[40:] = 0, weight[5]
    grown = untrained(kind, vocab_size=42)
    new = torch.optim.AdamW(grown.named_parameters())
    zckpt.load("new", model=grown, optimizer=new)
    assert live.equal(grown, other)
    with torch.no_grad():
        assert torch.equal(grown(TOKENS).logits, other.eval()(TOKENS).logits)
        assert torch.equal(grown(TOKENS).logits[..., :37], model.eval()(TOKENS).logits)
    ours, theirs = live.state(model, optimizer), live.state(grown, new)
    for name in taken:
        moment = ours[f"exp_avg/{name}"]
        expected = torch.cat([moment, torch.zeros(3, 24), moment[5:6], moment[5:6]])
        assert_same(theirs[f"exp_avg/{name}"], expected, name)
    trained(grown.train(), new, range(2, 4))


def test_a_vocabulary_is_cut():
    save_file({"embed": torch.arange(12.0).reshape(6, 2), "other": torch.ones(1)}, "a.safetensors")
    zckpt.consolidate("a.safetensors", "b.safetensors", map={"taken": {"embed": "4-5,0-1"}})
    assert load_file("b.safetensors")["embed"].tolist() == [[8, 9], [10, 11], [0, 1], [2, 3]]


def test_a_deeper_run_of_deepspeed_has_masters_and_moments_of_the_layers_that_it_took():
    document = Path("deeper.json")
    document.write_text(json.dumps({"taken": {LAYERS: "0-1,1", "model.embed_tokens.weight": "0-,zero*5"}}))
    zckpt.convert(RUN, "deeper", to="deepspeed", world_size=2, stage=2, map=document)
    before, after = zckpt.open(RUN), zckpt.open("deeper")
    assert after.parameters["lm_head.weight"].shape == (72, 16)
    for slot in ("master", "exp_avg", "weight"):
        assert_same(after.read("model.layers.2.mlp.up_proj.weight", slot),
                    before.read("model.layers.1.mlp.up_proj.weight", slot), slot)  # fmt: skip
        embedding = after.read("model.embed_tokens.weight", slot)
        assert_same(embedding[:67], before.read("model.embed_tokens.weight", slot), slot)
        assert not embedding[67:].any()
    order = [name for group in after.param_groups for name in group.parameters if name.endswith("up_proj.weight")]
    assert order == [f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1, 2)]


@pytest.mark.parametrize(("taken", "words"), [
    ({LAYERS: "0-4"}, "has no 0-4: expected 0 to 1"),
    ({LAYERS: "2"}, "has no 2"),
    ({LAYERS: "1-0"}, "has no 1-0"),
    ({"blocks.{l}.": "0"}, "no name begins with blocks"),
    ({"lm_head.weight": "0-"}, "does not have its own rows.*another name of model.embed_tokens.weight"),
    ({"nothing": "0-"}, "does not have its own rows"),
    ({LAYERS: "0*999999999"}, "is too large"),
    ({"model.embed_tokens.weight": "0*999999999"}, "is too large"),
])  # fmt: skip
def test_what_is_not_there_is_not_taken(taken, words):
    with refusing(UsageError, words):
        zckpt.consolidate(RUN, "no.safetensors", map={"taken": taken})


def test_state_without_rows_and_tied_layers_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    save_both(*live.trained(model, torch.optim.Adafactor(model.named_parameters())), "run.pt")
    with refusing(UnsupportedError, "does not have one number per element"):
        zckpt.convert("run.pt", "no", to="zckpt", map={"taken": {"0.weight": "0-3"}})
    one = torch.ones(2)
    torch.save({"h.0.w": one, "h.1.w": one}, "tied.pt")
    with refusing(UnsupportedError, "another name of a tensor in the layers"):
        zckpt.consolidate("tied.pt", "no.pt", map={"taken": {"h.{l}.": "0"}})


@pytest.mark.parametrize("document", [
    {"taken": {}}, {"taken": {LAYERS: 3}}, {"taken": {LAYERS: "zero*2"}}, {"taken": {LAYERS: "a"}},
    {"taken": {"embed": "zero-3"}}, {"taken": {"embed": "0,,1"}}, {"taken": {"h.{l}.{m}.": "0"}},
    {"taken": {"h.{l+1}.": "0"}}, {"taken": {LAYERS: "0"}, "rules": []}, {"taken": {"": "0"}},
])  # fmt: skip
def test_a_map_says_what_it_takes_in_one_way(document):
    with refusing(UsageError, "unusable taken"):
        parse_map(document, "test")
