"""Other names for tensors: every slot, tie, group and buffer follows, in every format; what cannot be is one line."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt
from tests import live
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.folders import names_in
from tests.refusals import refusing
from tests.truth import Truth, assert_same
from zckpt.errors import UnsupportedError
from zckpt.formats.registry import formats

SOURCE = FIXTURES / "s2_bf16_dp2"
"""With a tied pair, frozen parameters, buffers and two param groups."""

RENAME = [(r"^(\w+)\.(weight|bias)$", r"model.\1_layer.\2")]
BACK = [(r"^model\.(\w+)_layer\.", r"\1.")]

OPTIONS = {"deepspeed": {"world_size": 3, "stage": 1}, "consolidated": {}}


NAMED = {"transformers-trainer", "megatron"}
"""Formats whose models have names of their own, which these are not."""


@pytest.mark.parametrize("to", [one.name for one in formats() if one.writes and one.name not in NAMED])
@pytest.mark.every(3)
def test_all_of_a_checkpoint_follows_in_every_format(to):
    before = zckpt.open(SOURCE)
    done = zckpt.convert(SOURCE, "new", to=to, rename=RENAME, add_prefix="net.", verify=True, **OPTIONS.get(to, {}))
    after = zckpt.open("new")
    expected = {name: "net." + re.sub(*RENAME[0], name) for name in (one.name for one in before.tensors())}
    assert {one.name for one in after.tensors()} == set(expected.values())
    assert done.verified > 0
    for name, one in before.parameters.items():
        new = after.parameters[expected[name]]
        assert new.frozen == one.frozen
        assert new.tied_to == (None if one.tied_to is None else expected[one.tied_to])
    assert [{expected[name] for name in group.parameters} for group in before.param_groups] == [
        set(group.parameters) for group in after.param_groups
    ]
    assert not zckpt.diff(SOURCE, "new").equal
    same = zckpt.diff("new", SOURCE, strip_prefix="net.", rename=BACK)
    assert not [*same.changed, *same.only_in_a, *same.only_in_b]


def test_a_model_has_the_new_names_and_the_optimizer_beside_it():
    rename = ("--rename", r"^fc(\d)=layers.\1", "--add-prefix", "model.")
    succeeded("consolidate", SOURCE, "m.pt", "--slots", "all", *rename)
    model = torch.load("m.pt", weights_only=True)
    for name, value in Truth(SOURCE).masters.items():
        assert_same(model["model." + re.sub(r"^fc(\d)", r"layers.\1", name)], value, name)
    optimizer = torch.load("m.optimizer.pt", weights_only=True)
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    assert all(name.startswith("model.") for name in names)
    shown = printed("fingerprint", SOURCE, *rename)
    assert shown != printed("fingerprint", SOURCE)
    succeeded("diff", SOURCE, "m.pt", *rename, "--slots", "master", "--ignore", "metadata")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rename", "nothing=x"), ("--rename nothing=x matches no name",)),
        (("--strip-prefix", "module."), ("--strip-prefix module. matches no name",)),
        (("--rename", r"fc\d=fc"), ("would give", "the same name", "make it more specific")),
        (("--rename", r"^alpha$="), ("would make alpha empty",)),
        (("--rename", r"(fc)=\2"), ("invalid regular expression",)),
        (("--rename", "fc1"), ("OLD=NEW",)),
        (("--rename", "fc1.*=x.*.*"), ("as many `*`", "fc1.*=x.*.*")),
        (("--rename", "c1.*=x.*"), ("matches no name",)),
        (("--map", "no-such-map"), ("no map no-such-map", "`zckpt formats`")),
        (("--map", "llama-huggingface-mta"), ("such as llama-huggingface-meta",)),
        (("--map", "llama-huggingface-meta"), ("has no rule for", "huggingface or meta")),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, words):
    refused(2, "consolidate", SOURCE, "m.safetensors", *options, words=words)
    refused(2, "convert", SOURCE, "m", "--to", "dcp", *options, words=words)
    assert names_in() == []


@pytest.mark.parametrize("rename", [{"fc": "x"}, ["fc"], "fc=layer", [("fc", "x", "y")], [("fc", 1)], 5, np.ones(2)])
def test_what_is_no_pair_of_texts_is_refused(rename):
    """Of a text of two letters, one would become the other."""
    with refusing(zckpt.UsageError, r"unusable --rename: expected pairs, \[\(OLD, NEW\), ...\]"):
        zckpt.consolidate(SOURCE, "m.safetensors", rename=rename)


@pytest.mark.parametrize("option", ["strip_prefix", "add_prefix"])
def test_a_prefix_is_a_text(option):
    with refusing(zckpt.UsageError, f"unusable --{option.replace('_', '-')}: expected a text, found 5"):
        zckpt.consolidate(SOURCE, "m.safetensors", **{option: 5})


def test_globs_are_of_whole_names_and_put_back_what_they_find():
    options = ("--rename", "fc*.*=layers.*[0].*", "--rename", r"*.bias=\1.*")
    succeeded("consolidate", SOURCE, "m.pt", *options)
    names = set(torch.load("m.pt", weights_only=True))
    for old in Truth(SOURCE).masters:
        new = re.sub(r"^fc(.*?)\.(.*)$", r"layers.\1[0].\2", old)
        new = re.sub(r"^(.*)\.bias$", r"\\1.\1", new)
        assert new in names, (old, new)


def test_reshard_names_the_verb_that_changes_names():
    options = ("--rename", r"^fc=layers.")
    refused(5, "reshard", SOURCE, "r", "--world-size", 2, *options, words=("convert --to deepspeed",))
    succeeded("convert", SOURCE, "r", "--to", "deepspeed", "--world-size", 2, *options)
    assert any(name.startswith("layers.") for name in zckpt.open("r").parameters)
    assert not zckpt.diff(SOURCE, "r", rename=[("^fc", "layers.")]).settings


def test_digests_under_other_names_are_not_stored_with_the_source():
    refused(2, "fingerprint", SOURCE, "--write", "--rename", "fc=layer", words=("--output",))


def test_metadata_that_speaks_of_old_names_is_not_written_under_new_ones():
    layer = torch.nn.Linear(2, 3)
    torch.save({"model": layer.state_dict(), "best": {"of": "weight"}}, "c.pt")
    refused(5, "convert", "c.pt", "d", "--to", "dcp", "--rename", "weight=w",
            words=("best refers to weight",))  # fmt: skip
    zckpt.convert("c.pt", "d", to="dcp", rename=[("bias", "b")])


def test_names_in_metadata_that_are_names_for_sure_follow():
    """Tables by names, as of an average of weights, and lists of names; not what may be something else."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    average = {name: value * 2 for name, value in model.state_dict().items()}
    own = {"average": average, "frozen": ("0.weight", ["1.bias", "0"]), "decay": 0.9, "weights": {"0": 1}}
    torch.save({"model": model.state_dict(), "ema": own, "also": average}, "c.pt")

    def renamed(*rename: tuple[str, str]) -> dict[str, Any]:
        there = Path(rename[0][1])
        done = zckpt.convert("c.pt", there, to="zckpt", rename=rename, verify=True)
        assert any(note.startswith("ema refers to tensors") for note in done.notes)
        zckpt.convert(there, there.with_suffix(".pt"), to="consolidated")
        return torch.load(there.with_suffix(".pt"), weights_only=True)["zckpt"]["metadata"]["ema"]

    found = renamed(("^0", "first"))
    new = {name.replace("0.", "first.", 1): value for name, value in average.items()}
    assert list(found["average"]) == list(new)
    assert all(found["average"][name].equal(value) for name, value in new.items())
    assert found["frozen"] == ("first.weight", ["1.bias", "0"])
    assert (found["decay"], found["weights"]) == (0.9, {"0": 1})

    # two names exchanged are exchanged in it, too
    found = renamed(("^0", "x"), ("^1", "0"), ("^x", "1"))["average"]
    assert all(found[f"{1 - int(name[0])}{name[1:]}"].equal(value) for name, value in average.items())

    # in a map, only what has nothing but another name
    rules = [{"a": f"0.{one}", "b": f"first.{one}"} for one in ("weight", "bias")]
    plain = {"sides": ["a", "b"], "rules": [*rules, *({"a": f"1.{x}", "b": f"last.{x}"} for x in ("weight", "bias"))]}
    zckpt.convert("c.pt", "w", to="zckpt", map=plain)
    turned = {**plain, "rules": [{"a": {"0.weight": "out in"}, "b": {"first.weight": "in out"}}, *plain["rules"][1:]]}
    with refusing(UnsupportedError, r"refers to 0\.weight"):
        zckpt.convert("c.pt", "v", to="zckpt", map=turned)

    # not in objects of classes that nobody knows, and not where two would have one name
    more = {"args": argparse.Namespace(frozen="0.bias"), "of": {"0.bias": 1, "first.bias": 2}}
    for (key, value), name in zip(more.items(), ("0", "first"), strict=True):
        torch.save({"model": model.state_dict(), key: value}, "o.pt")
        with refusing(UnsupportedError, rf"{key} refers to {name}\.bias"):
            zckpt.convert("o.pt", "v", to="zckpt", rename=[("^0", "first")])
    assert not Path("v").exists()


def test_a_live_model_with_other_names_goes_on():
    first, second = (torch.nn.Sequential(OrderedDict({name: torch.nn.Linear(3, 5)})) for name in ("old", "new"))
    ours, theirs = (torch.optim.AdamW(net.named_parameters(), lr=0.1) for net in (first, second))
    live.trained(first, ours)
    zckpt.save("run", model=first, optimizer=ours, step=1)
    with refusing(zckpt.UsageError, "not a checkpoint of this model"):
        zckpt.load("run", model=second, optimizer=theirs)
    zckpt.load("run", model=second, optimizer=theirs, rename=[("^old", "new")])
    for net, optimizer in ((first, ours), (second, theirs)):
        torch.manual_seed(7)
        live.trained(net, optimizer, steps=2)
    assert live.equal(first, second)
