"""A dense model becomes one of experts that are its MLP each, in every slot; and back if all are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import zckpt
from tests.logical import assert_same_tree
from tests.naming.test_shipped import LLAMA, assert_same_logits, made, saved_run, untrained
from tests.naming.test_training import trained
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import UnsupportedError, UsageError
from zckpt.naming.document import parse_map

UPCYCLED = {"dense-mixtral": ("mistral", "mixtral"), "dense-qwen3-moe": ("qwen3", "qwen3_moe")}


def as_large(kind: str):
    """An untrained model with experts as large as the MLP of the dense ones."""
    torch.manual_seed(1)
    return untrained(kind, moe_intermediate_size=LLAMA["intermediate_size"])


@pytest.mark.parametrize("name", UPCYCLED)
def test_upcycled_the_model_says_the_same_as_the_dense_one(name):
    dense, moe = made(UPCYCLED[name][0]), as_large(UPCYCLED[name][1])
    dense.save_pretrained("dense")
    moe.save_pretrained("initial")
    zckpt.consolidate("dense", "experts", map=name, map_config="initial")
    done = zckpt.consolidate("experts", "moe", fill_from="initial",
                             config="initial")  # fmt: skip
    inner = "block_sparse_moe" if name == "dense-mixtral" else "mlp"
    assert {one["name"] for one in done.filled} == {f"model.layers.{n}.{inner}.gate.weight" for n in (0, 1)}
    loaded = hf.AutoModelForCausalLM.from_pretrained("moe", attn_implementation="eager").float().eval()
    assert_same_logits(loaded, dense)
    zckpt.consolidate("experts", "back", map=name)
    assert zckpt.diff("dense", "back").equal
    with refusing(UnsupportedError, "a dense model has no router"):
        zckpt.consolidate("moe", "not", map=name)


def test_moments_go_to_every_expert_and_names_have_the_order_of_the_models_parameters():
    model, optimizer = saved_run("mistral", "dense.pt")
    zckpt.convert("dense.pt", "moe", to="zckpt", map="dense-mixtral",
                  map_config={"num_local_experts": 3})  # fmt: skip
    found = zckpt.open("moe")
    own = dict(model.named_parameters())
    moment = optimizer.state[own["model.layers.1.mlp.up_proj.weight"]]
    for expert in range(3):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"
        assert_same(found.read(name, "weight"), own["model.layers.1.mlp.up_proj.weight"].detach(), name)
        assert_same(found.read(name, "exp_avg"), moment["exp_avg"], name)
        assert found.param_groups[0].state["step"].value == 2
    first = [name for name in found.param_groups[0].parameters if ".layers.0." in name and "experts" in name]
    assert [name.split("experts.")[1] for name in first] == [f"{e}.w{n}.weight" for e in range(3) for n in (1, 2, 3)]
    zckpt.convert("moe", "moe.pt", to="consolidated")
    loaded = torch.load("moe.pt", weights_only=True)
    every = [loaded["model"], *loaded["optimizer"]["state"].values()]
    places = [value.data_ptr() for one in every for value in one.values()]
    assert len({*places}) == len(places)
    zckpt.convert("moe", "back", to="zckpt", map="dense-mixtral")
    assert zckpt.diff("dense.pt", "back").equal


def test_a_live_model_of_experts_goes_on_from_a_dense_run_with_its_own_router():
    model, optimizer = saved_run("mistral", "dense.pt")
    moe = as_large("mixtral").train()
    if "model.layers.0.mlp.experts.gate_up_proj" not in moe.state_dict():
        pytest.skip("transformers before 5")
    router = moe.get_parameter("model.layers.1.mlp.gate.weight").detach().clone()
    new = torch.optim.AdamW(moe.named_parameters(), lr=0.01)
    moe.save_pretrained("initial")
    zckpt.convert("dense.pt", "experts", to="zckpt", map="dense-mixtral",
                  map_config="initial")  # fmt: skip
    done = zckpt.load("experts", model=moe, optimizer=new, strict=False)
    assert done.missing == [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)]
    assert_same(moe.get_parameter("model.layers.1.mlp.gate.weight").detach(), router, "the router")
    down, whole = "model.layers.1.mlp.experts.down_proj", model.get_parameter("model.layers.1.mlp.down_proj.weight")
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same(new.state[moe.get_parameter(down)][key], optimizer.state[whole][key].expand(3, -1, -1), key)
    assert_same_logits(moe.eval(), model.eval())
    trained(moe.train(), new, range(2, 4))
    assert not torch.equal(moe.get_parameter("model.layers.1.mlp.gate.weight"), router)


STACKED = {
    "sides": ["dense", "experts"],
    "sizes": {"e": "experts"},
    "rules": [{"dense": {"up": "out in"}, "experts": {"up.all": "in (e out)"}, "copied": ["e"]}],
}


def test_copies_within_a_tensor():
    up = torch.randn(3, 2)
    save_file({"up": up}, "dense.safetensors")
    mapped = {"map": STACKED, "map_config": {"experts": 4}}
    zckpt.consolidate("dense.safetensors", "moe.safetensors", **mapped)
    assert_same_tree(load_file("moe.safetensors"), {"up.all": up.T.repeat(1, 4)})
    zckpt.consolidate("moe.safetensors", "b.safetensors", **mapped)
    assert_same_tree(load_file("b.safetensors"), {"up": up})


def test_copies_that_differ_are_not_made_one():
    one, rest = "model.layers.0.block_sparse_moe.experts", [torch.ones(2, 2)] * 4
    for number in (1, 2, 3):
        tensors = {f"{one}.{e}.w{n}.weight": value + 0 for n in (1, 2, 3) for e, value in enumerate(rest)}
        tensors[f"{one}.3.w{number}.weight"][1, 0] = 2
        save_file(tensors, "moe.safetensors")
        with refusing(UnsupportedError, "are not copies of one tensor"):
            zckpt.consolidate("moe.safetensors", "dense.safetensors", map="dense-mixtral")
        assert not Path("dense.safetensors").exists()


def test_how_many_copies_is_told_by_the_configuration():
    source = Path("dense.safetensors")
    save_file({"up": torch.ones(3, 2)}, source)
    for config, words in (({}, "do not determine e"), ({"experts": 1 << 40}, "at most")):
        with refusing(UsageError, words):
            zckpt.consolidate("dense.safetensors", "m.safetensors", map=STACKED, map_config=config)


@pytest.mark.parametrize("rule", [
    {"dense": {"up": "out in"}, "experts": {"up.all": "in (e out)"}},
    {"dense": {"up": "out in"}, "experts": {"up.all": "in out"}, "copied": ["e"]},
    {"dense": {"up": "e in"}, "experts": {"up.all": "e in"}, "copied": ["e"]},
    {"dense": {"up": "out in"}, "experts": {"up.all": "in (e out)"}, "copied": ["e"], "padded": ["e"]},
    {"dense": "up.{l}", "experts": "up.all.{l}", "copied": ["e"]},
    {"dense": {"up": "out"}, "experts": {"all.{e}": "(two[0] out)", "some": "(two[1] out)"}, "copied": ["e"]},
])  # fmt: skip
def test_a_rule_says_which_letters_one_side_alone_has(rule):
    with refusing(UsageError, "other letters|unusable copied|no arrangement"):
        parse_map({**STACKED, "rules": [rule]}, "test")
