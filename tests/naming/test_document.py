"""Maps as documents: what they may say, what they need of a configuration, and what is refused in a line."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests import live
from tests.cli.console import ROOT, refused, succeeded
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.naming.apply import sorted_names
from zckpt.naming.axes import evaluated, parse_axes
from zckpt.naming.document import parse_map, read_map, template

EXAMPLES = [
    json.loads(one) for one in re.findall(r"^```json\n(.*?)^```", (ROOT / "docs/maps.md").read_text(), re.M | re.S)
]

SHIPPED = ROOT / "zckpt/naming/shipped"

QKV = {
    "sides": ["apart", "joined"],
    "sizes": {"heads": "n_head", "three": "3"},
    "rules": [
        {
            "apart": {f"{one}.weight": f"(heads three[{i}] d) in" for i, one in enumerate("qkv")},
            "joined": {"qkv.weight": "(heads three d) in"},
        },
        {"apart": "norm", "joined": "ln"},
    ],
}


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return {**{f"{one}.weight": torch.randn(12, 5, generator=drawn) for one in "qkv"}, "norm": torch.ones(5), **more}


def saved(path: str, found: dict[str, torch.Tensor]) -> str:
    save_file(found, path)
    return path


def mapped(source: str, document: object = QKV, **config: object) -> dict[str, torch.Tensor]:
    """What a map makes of a model, whose configuration says these numbers."""
    target = "mapped.safetensors"
    zckpt.consolidate(source, target, map=document, map_config=config or None, overwrite=True)
    return load_file(target)


# --- the page


def test_the_pages_maps_do_what_the_page_says():
    small, joined, experts = EXAMPLES
    drawn = {
        "model.norm.weight": torch.randn(4), "model.layers.0.q_proj.weight": torch.randn(8, 4),
        "model.layers.0.gate_proj.weight": torch.randn(6, 4), "model.layers.0.up_proj.weight": torch.randn(6, 4),
    }  # fmt: skip
    Path("map.json").write_text(json.dumps(small))
    Path("config.json").write_text(json.dumps({"n_head": 2, "hidden_size": 8}))  # found with the source
    saved("a.safetensors", drawn)
    succeeded("consolidate", "a.safetensors", "b.safetensors", "--map", "map.json")
    found = load_file("b.safetensors")
    q = drawn["model.layers.0.q_proj.weight"].view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    assert_same(found["blocks.0.query.weight"], q, "q")
    gates = torch.cat([drawn["model.layers.0.gate_proj.weight"], drawn["model.layers.0.up_proj.weight"]]).T
    assert_same(found["blocks.0.gate_up.weight"], gates.contiguous(), "gate_up")

    drawn = {f"h.3.{one}.weight": torch.randn(32, 5) for one in "vqk"}
    found = mapped(saved("c.safetensors", drawn), joined, n_head=4)
    parts = [drawn[f"h.3.{one}.weight"].view(4, 1, 8, 5) for one in "vqk"]
    assert_same(found["h.3.vqk.weight"], torch.cat(parts, dim=1).reshape(96, 5), "vqk")

    drawn = {f"layers.1.experts.{e}.down.weight": torch.randn(3, 2) for e in range(11)}
    found = mapped(saved("e.safetensors", drawn), experts)
    stacked = torch.stack([drawn[f"layers.1.experts.{e}.down.weight"].T for e in range(11)])
    assert_same(found["layers.1.experts.down"], stacked, "experts")
    back = zckpt.consolidate("mapped.safetensors", "g.safetensors", map=experts)
    assert back.notes == ("the map: names of memory become those of files",)
    assert zckpt.diff("e.safetensors", "g.safetensors").equal


# --- documents


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sides": ["a"]}, "unusable sides"),
        ({"sides": ["a", "a"]}, "unusable sides"),
        ({"rules": []}, "unusable rules"),
        ({"rule": []}, "a map has no rule"),
        ({"rules": [{"apart": "x"}]}, "rule 1: unusable"),
        ({"rules": [{"apart": "x.{l}", "joined": "y"}]}, "other letters"),
        ({"rules": [{"apart": {"x": "a b"}, "joined": {"y": "a c"}}]}, "other letters"),
        ({"rules": [{"apart": {"x": "a b"}, "joined": "y"}]}, "no arrangement"),
        ({"rules": [{"apart": {"x": "(a"}, "joined": {"y": "a"}}]}, "malformed"),
        ({"rules": [{"apart": {"x": "a a"}, "joined": {"y": "a"}}]}, "malformed"),
        ({"rules": [{"apart": {"x": "a"}, "joined": {"y": "a"}, "padded": ["b"]}]}, "unusable padded"),
        ({"rules": [{"apart": "x", "joined": "y", "beside": {"third": ["z"]}}]}, "unusable beside"),
        ({"rules": [{"apart": "x", "joined": "y", "beside": {"apart": ["z.{l}"]}}]}, "unusable beside"),
        ({"sizes": {"a": []}}, "unusable"),
        ({"tied": {"third": {}}}, "unusable tied"),
        ({"tied": {"apart": {"x.{l}": "y"}}}, "unusable tied"),
        ({"copies": {"apart": {"y": "x.{l}"}}}, "unusable copies"),
        ({"order": {"apart": "x"}}, "unusable order"),
        ({"like": "mine"}, "unusable like"),
        ({"like": 1}, "unusable like"),
        ({"again": [{'q"': "x."}]}, "unusable again"),
        ({"again": [{"q": "\\"}]}, "unusable again"),
        ({"again": [{", ": "x."}]}, "unusable again"),
        ({"settings": {"a": []}}, "unusable settings"),
        ({"refused": {"apart": ["x"]}}, "unusable refused"),
        ({"refused": {"third": {}}}, "unusable refused"),
        ({"optimizer": {"apart": {}}}, "unusable optimizer"),
        ({"optimizer": {"apart": [{"apart": "x", "joined": "y"}]}}, "unusable optimizer"),
        ({"optimizer": {"apart": [{"apart": {"x": "a", "y": "a"}, "joined": {"z": "a"}}]}}, "unusable optimizer"),
    ],
)
def test_a_malformed_map_is_refused(change, words):
    with refusing(UsageError, words):
        parse_map({**QKV, **change}, "mine")


def test_a_file_that_is_no_map_is_refused_in_a_line():
    source = saved("a.safetensors", tensors())
    for text, words in (("{", "JSON"), ("[]", "JSON object"), ("{}", "unusable sides")):
        Path("m.json").write_text(text)
        refused(2, "consolidate", source, "b.safetensors", "--map", "m.json", words=(words,))


def test_sizes_are_whole_numbers():
    sizes = {"heads": 6, "in": 4}
    assert evaluated("(heads + in*2) / 7 - 1", sizes.get, "here") == 1
    assert evaluated("heads*unknown", sizes.get, "here") is None
    malformed = ["heads/in", "heads//in", "1.5", "heads +", "f(1)", "()", "", "heads/0", "__import__('os')", "(" * 5000]
    for text in malformed:
        with refusing(UsageError, "is not a size"):
            evaluated(text, sizes.get, "here")


def test_axes_are_letters_in_brackets():
    [[heads, two], [inside], []] = parse_axes("(heads two[1:3]) in 1")
    assert (heads.name, heads.numel, two.numel, inside.numel) == ("heads", "heads", "(3)-(1)", "in")
    assert parse_axes("a[2]")[0][0].numel == "((2)+1)-(2)"


def test_names_are_in_the_order_of_the_program():
    texts = ["emb", "l.{l}.a", "l.{l}.e.{e}.x", "l.{l}.e.{e}.y", "l.{l}.b", "norm"]
    names = [
        "emb",
        *(f"l.{n}.{one}" for n in (0, 2, 10) for one in ("a", "e.0.x", "e.0.y", "e.10.x", "e.10.y", "b")),
        "norm",
    ]
    shuffled = sorted(names, key=lambda name: hash(name) % 7)
    assert sorted_names({name: i for i, name in enumerate([*shuffled, "other"])},
                        [template(text) for text in texts]) == [*names, "other"]  # fmt: skip


# --- what a checkpoint must be


def test_names_that_fit_neither_side_or_both_are_refused():
    source = saved("a.safetensors", tensors(more=torch.ones(2)))
    with refusing(UsageError, "has no rule for more"):
        mapped(source, n_head=3)
    without = tensors()
    del without["k.weight"]
    with refusing(UsageError, r"no rule for q\.weight, v\.weight"):
        mapped(saved(source, without), n_head=3)
    same = {"sides": ["one", "other"], "rules": [{"one": "x", "other": "x"}]}
    with refusing(UsageError, "both one and other"):
        mapped(saved(source, {"x": torch.ones(1)}), same)


def test_what_shapes_do_not_tell_is_asked_for():
    source = saved("a.safetensors", tensors())
    with refusing(UsageError, "do not determine heads: expected a configuration with n_head.*--map-config"):
        mapped(source)
    with refusing(UsageError, r"q\.weight has another shape"):
        mapped(source, n_head=5, d=1)
    wrong = {**QKV, "sizes": {**QKV["sizes"], "d": "4"}}
    with refusing(UsageError, r"expected \(16, 5\) with d=4, heads=4, in=5, three=3, found \(12, 5\)"):
        mapped(source, wrong, n_head=4)
    assert not Path("mapped.safetensors").exists()


@pytest.mark.parametrize("axes", ["(heads three[0:2] d) in", "(heads three[1] d) in"])
def test_a_map_that_loses_or_doubles_elements_is_refused(axes):
    rule = {"apart": {**QKV["rules"][0]["apart"], "q.weight": axes}, "joined": QKV["rules"][0]["joined"]}
    source = saved("a.safetensors", {**tensors(), "q.weight": torch.ones(24 if ":" in axes else 12, 5)})
    with refusing(UsageError, "not every element"):
        mapped(source, {**QKV, "rules": [rule, QKV["rules"][1]]}, n_head=3)


def trained(
    path: Path, *, groups: tuple[str, ...] = ("qkvn",), optimizer=torch.optim.AdamW, steps: str = "qkvn"
) -> Path:
    parameters = {name: torch.nn.Parameter(value) for name, value in tensors().items()}
    made = optimizer([
        {"params": [(name, one) for name, one in parameters.items() if name[0] in group]} for group in groups
    ])  # fmt: skip
    for _ in range(2):
        for name, one in parameters.items():
            one.grad = torch.full_like(one, 0.5) if name[0] in steps else None
        made.step()
        steps += "k"
    torch.save(
        {"model": {name: one.detach() for name, one in parameters.items()}, "optimizer": made.state_dict()}, path
    )
    return path


def test_parts_of_one_tensor_must_be_alike():
    def converted(source: Path) -> None:
        zckpt.convert(source, "out", to="zckpt", map=QKV, map_config={"n_head": 3})

    with refusing(UnsupportedError, "differ in the param group"):
        converted(trained("groups.pt", groups=("qv", "kn")))
    with refusing(LayoutError, "differ in step"):
        converted(trained("steps.pt", steps="qvn"))
    with refusing(LayoutError, "not all have exp_avg"):
        converted(trained("slots.pt", steps="qn"))
    with refusing(UnsupportedError, r"row_var of q\.weight does not have one number per element"):
        converted(trained("factored.pt", optimizer=torch.optim.Adafactor))
    assert not Path("out").exists()
    converted(trained("sound.pt"))
    renamed = {"sides": ["apart", "other"], "rules": [{"apart": f"{one}.weight", "other": one} for one in "qkv"]
               + [{"apart": "norm", "other": "n"}]}  # fmt: skip
    zckpt.convert("factored.pt", "names", to="zckpt", map=renamed, verify=True)
    assert zckpt.diff("factored.pt", "names", map=renamed, slots=["row_var", "col_var"]).equal


def test_ties_buffers_and_frozen_parameters_are_mapped():
    first, second = live.Words(4, 6, beside=(2,)), torch.nn.ModuleDict({"net": live.Words(4, 6)})
    second.net.frozen = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    second.net.register_buffer("scale", torch.zeros(4, 2))
    turned = ("frozen", "scale")
    rules = [
        {"one": name, "other": f"net.{name}"} for name in first.state_dict() if name not in ("embed.weight", *turned)
    ]
    rules += [{"one": {name: "a b"}, "other": {f"net.{name}": "b a"}} for name in turned]
    rules += [{"one": {"embed.weight": "a b"}, "other": {"net.embed.weight": "a b"}}]
    document = {"sides": ["one", "other"], "rules": rules}
    zckpt.save("run", model=first)
    zckpt.convert("run", "there", to="zckpt", map=document)
    found = zckpt.open("there")
    assert found.parameters["net.head.weight"].tied_to == "net.embed.weight"
    assert found.parameters["net.frozen"].frozen == zckpt.open("run").parameters["frozen"].frozen
    assert list(found.buffers) == ["net.scale"]
    zckpt.load("run", model=second, map=document)
    for name, value in first.state_dict().items():
        for its in (found.read(f"net.{name}"), second.state_dict()[f"net.{name}"]):
            assert_same(its, value.T if name in turned else value, name)
    zckpt.convert("there", "back", to="zckpt", map=document)
    assert zckpt.diff("run", "back").equal


def test_a_vocabulary_is_padded_and_cut_in_every_slot():
    rule = {"mine": {"weight": "rows[:vocab] d"}, "theirs": {"emb": "rows d"}, "padded": ["rows"]}
    document = {"sides": ["mine", "theirs"], "sizes": {"rows": "padded", "vocab": "vocab_size"}, "rules": [rule]}
    trained_both = live.trained(torch.nn.Linear(3, 5, bias=False))
    live.save_both(*trained_both, "c.pt")
    padded = {"map": document, "map_config": {"padded": 8}}
    done = zckpt.convert("c.pt", "d", to="dcp", world_size=2, **padded)
    assert "rows 5 to 7 of weight are added as padding, zero" in done.notes[1]
    found, state = zckpt.open("d"), live.state(*trained_both)
    for key in ("weight", "exp_avg"):
        assert_same(found.read("emb", key), torch.cat([state[f"{key}/weight"], torch.zeros(3, 3)]), key)
    done = zckpt.convert("d", "back", to="zckpt", map=document, map_config={"vocab_size": 5})
    assert "rows 5 to 7 of emb are left out as padding" in done.notes[1]
    assert zckpt.diff("c.pt", "back").equal
    with refusing(UsageError, "not that many rows"):
        zckpt.convert("d", "more", to="zckpt", map=document, map_config={"vocab_size": 9})


def test_elements_of_every_type_are_arranged():
    document = {"sides": ["a", "b"], "rules": [{"a": {"x.{n}": "i j"}, "b": {"y.{n}": "j i"}}]}
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
    values = {f"x.{n}": torch.arange(15).reshape(3, 5).to(kind) for n, kind in enumerate(kinds)}
    torch.save(values, "a.pt")
    zckpt.consolidate("a.pt", "b.pt", map=document)
    found = torch.load("b.pt", weights_only=True)
    for n in range(len(kinds)):
        ours, its = values[f"x.{n}"].T.contiguous(), found[f"y.{n}"]
        assert np.array_equal(ours.view(torch.uint8).numpy(), its.contiguous().view(torch.uint8).numpy())


def test_numbers_are_those_of_the_source_and_no_other_models():
    Path("config.json").write_text('{"n_head": 2}')  # of whatever else lies around
    Path("model").mkdir()
    source = saved("model/a.safetensors", tensors())
    with refusing(UsageError, "do not determine heads"):
        mapped(source)
    Path("model/params.json").write_text('{"n_head": 3, "other": null}')
    done = zckpt.consolidate(source, "b.safetensors", map=QKV)
    assert done.notes[-1] == "the model's sizes are from model/params.json"
    joined = torch.stack([tensors()[f"{one}.weight"].view(3, 4, 5) for one in "qkv"], dim=1).reshape(36, 5)
    assert_same(load_file("b.safetensors")["qkv.weight"], joined, "qkv")


@pytest.mark.parametrize("grouped", [True, False])
def test_numbers_are_in_the_arguments_of_megatron(grouped):
    model = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.randn((6 if grouped else 12) * 2, 8)}
    arguments = argparse.Namespace(
        num_attention_heads=4, num_query_groups=1, kv_channels=2, group_query_attention=grouped, seed=1
    )
    torch.save({"model": model, "args": arguments}, "c.pt")
    done = zckpt.consolidate("c.pt", "d.safetensors", map="llama-huggingface-megatron")
    assert done.notes[-1] == "the model's sizes are from the arguments in it"
    shapes = {name.split(".")[-2]: tuple(one.shape) for name, one in load_file("d.safetensors").items()}
    keys = (2, 8) if grouped else (8, 8)
    assert shapes == {"q_proj": (8, 8), "k_proj": keys, "v_proj": keys}


def test_a_model_alone_is_mapped_though_its_optimizer_only_numbers_its_parameters():
    weights = [torch.nn.Parameter(torch.randn(12, 5)) for _ in range(5)]  # which is which of three, nothing tells
    optimizer = torch.optim.SGD(weights, momentum=0.9)
    for one in weights:
        one.grad = torch.ones_like(one)
    optimizer.step()
    torch.save({"model": tensors(), "optimizer": optimizer.state_dict()}, "c.pt")
    with refusing(UnsupportedError, "give --names FILE"):
        zckpt.convert("c.pt", "d", to="zckpt", map=QKV, map_config={"n_head": 3})
    with refusing(UnsupportedError, "give --names FILE"):
        zckpt.consolidate("c.pt", "m.pt", slots="all", map=QKV, map_config={"n_head": 3})
    zckpt.consolidate("c.pt", "m.pt", map=QKV, map_config={"n_head": 3})
    assert torch.load("m.pt", weights_only=True)["qkv.weight"].shape == (36, 5)


# --- what another map is but for some keys; settings; tensors without a place


def test_a_map_like_another_has_the_others_keys_but_its_own():
    base = parse_map(json.loads((SHIPPED / "llama-huggingface-megatron.json").read_text()), "base")
    like = read_map({"like": "llama-huggingface-megatron", "settings": {"a": 1}, "about": "mine"})
    assert (like.rules, like.sides) == (base.rules, base.sides)
    assert (like.settings, like.about) == ({"a": 1}, "mine")


def test_a_configuration_that_says_the_weights_are_others_is_refused():
    source = saved("a.safetensors", tensors())
    about = {**QKV, "settings": {"zero_centered": True}}
    for config in ({"zero_centered": False}, {"text_config": {"zero_centered": False}}):
        with refusing(UnsupportedError, r"zero_centered.*expected True, found False"):
            mapped(source, about, n_head=2, **config)
    for config in ({}, {"zero_centered": True}, {"zero_centered": None}):
        mapped(source, about, n_head=2, **config)


def test_a_tensor_without_a_place_is_refused_by_name_until_a_map_leaves_it_out():
    source = saved("a.safetensors", tensors(**{"router.bias": torch.ones(3)}))
    about = {**QKV, "refused": {"apart": {"router.bias": "it chooses"}}}
    with refusing(UnsupportedError, r"router\.bias: it chooses; write your own map"):
        mapped(source, about, n_head=2)
    about = {**about, "ignored": {"apart": ["router.bias"]}}
    assert mapped(source, about, n_head=2).keys() == {"qkv.weight", "ln"}
