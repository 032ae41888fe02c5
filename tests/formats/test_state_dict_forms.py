"""Optimizers of torch files in every form: by name, flattened, several in one file, and of several models."""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

import zckpt
from tests.cli.console import refused
from tests.fsdp_training.training import STEPS, made, step, truth
from tests.gloo import run
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError
from zckpt.formats.torch_files.attach import further_keys


def body(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer, wide: int = 5) -> None:
    for _ in range(2):
        model(torch.ones(3, wide)).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def assert_state(
    path: Path, model: nn.Module, optimizers: dict[str | None, torch.optim.Optimizer], prefix: str = ""
) -> Any:
    """Hold what is read against the live objects, bit by bit, and the inventory against nothing left out."""
    opened = zckpt.open(path)
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.read(prefix + name, "weight"), parameter)
        for called, optimizer in optimizers.items():
            for slot, value in optimizer.state.get(parameter, {}).items():
                assert torch.equal(opened.read(prefix + name, slot), value), (name, slot)
                group = opened.param_groups[opened.parameters[prefix + name].group]
                assert group.optimizer == called
    items = zckpt.inspect(path, include_inventory=True).as_dict()["inventory"]["items"]
    assert [one for one in items if one["fate"] == "left out"] == []
    return opened


# --- by name


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_get_state_dict_has_names_that_nothing_has_to_be_deduced_of(flat, tmp_path):
    model = body(5, 4, 4, 4)  # three shapes that fit several parameters
    model[1].requires_grad_(requires_grad=False)
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.1 / dim} for dim in (2, 1)]
    optimizer = torch.optim.AdamW(groups, amsgrad=True)
    stepped(model, optimizer)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    torch.save({"app": weights, "optim": state, "epoch": 3}, tmp_path / "c.pt")
    opened = assert_state(tmp_path / "c.pt", model, {None: optimizer})
    assert opened.warnings == []
    assert [(group.hyperparameters["lr"], len(group.parameters)) for group in opened.param_groups] == [
        (0.05, 3),
        (0.1, 3),
    ]
    torch.manual_seed(3)
    again = body(5, 4, 4, 4)
    again[1].requires_grad_(requires_grad=False)
    groups = [{"params": [p for p in again.parameters() if p.dim() == dim]} for dim in (2, 1)]
    other = torch.optim.AdamW(groups, amsgrad=True)
    zckpt.load(tmp_path / "c.pt", model=again, optimizer=other)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for slot, value in optimizer.state.get(ours, {}).items():
            assert torch.equal(value, other.state[theirs][slot])


def gathered(rank: int, world_size: int, wrap: str, folder: Path) -> Any:
    model, optimizer, scheduler = made(wrap, world_size)
    for number in range(STEPS):
        step(model, optimizer, scheduler, number)
    held = {key: one.clone() for key, one in truth(model, optimizer).items()}
    configs = FullStateDictConfig(), FullOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        weights = model.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state}, folder / "c.pt")
        torch.save(state, folder / "optimizer.pt")
    torch.distributed.barrier()
    return held


def test_the_full_state_of_flat_parameters(tmp_path):
    held = run(gathered, 3, "fsdp1", tmp_path)[0]
    opened = zckpt.open(tmp_path / "c.pt")
    for key, one in held.items():
        slot, _, name = key.partition("/")
        if "head.weight" not in name:
            assert torch.equal(opened.read(name, slot), one), key
    assert opened.warnings == []
    alone = zckpt.open(tmp_path / "optimizer.pt")
    assert torch.equal(alone.read("layers.1.up.bias", "exp_avg"), held["exp_avg/layers.1.up.bias"])


def test_a_warning_where_torch_has_lost_all_slots_but_one(tmp_path):
    run(gathered, 2, "fsdp1 orig", tmp_path)
    state = torch.load(tmp_path / "optimizer.pt")["state"]
    lost = all(torch.equal(one["exp_avg"], one["exp_avg_sq"]) for one in state.values())
    warnings = zckpt.open(tmp_path / "c.pt").warnings
    assert lost == any("are equal bit for bit: FSDP1 with use_orig_params=True" in text for text in warnings)
    for one in state.values():
        one["exp_avg_sq"] = one["exp_avg"].clone()
    torch.save(state, tmp_path / "weights.pt")
    torch.save({"state": state, "param_groups": [{"lr": 1.0, "params": list(state)}]}, tmp_path / "equal.pt")
    assert "all slots but the last are lost" in zckpt.open(tmp_path / "equal.pt").warnings[0]
    numbered = dict(enumerate(state.values()))  # as `rekey_optim_state_dict` makes them
    torch.save({"state": numbered, "param_groups": [{"lr": 1.0, "params": list(numbered)}]}, tmp_path / "by_id.pt")
    assert any("all slots but the last are lost" in text for text in zckpt.open(tmp_path / "by_id.pt").warnings)


def named_file(tmp_path: Path, state: dict[str, Any], params: list[Any]) -> Path:
    path = tmp_path / "c.pt"
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": params}]}
    torch.save({"model": {"w": torch.ones(3), "v": torch.ones(2)}, "optimizer": optimizer}, path)
    return path


def test_state_of_what_the_model_has_not_is_kept_and_said(tmp_path):
    state = {"w": {"m": torch.arange(3.0)}, "gone": {"m": torch.arange(4.0)}}
    opened = zckpt.open(named_file(tmp_path, state, ["w", "v", "gone"]))
    assert torch.equal(opened.read("gone", "m"), torch.arange(4.0))
    assert opened.param_groups[0].parameters == ["w", "v", "gone"]
    assert opened.warnings == ["the optimizer has state for gone, which the model lacks; it keeps these names"]
    for to in ("consolidated", "universal", "transformers-trainer"):
        with refusing(UnsupportedError, "has state of parameters that the model lacks: found gone; give what has both"):
            zckpt.convert(opened, tmp_path / to, to=to)
    zckpt.consolidate(opened, tmp_path / "whole.pt", slots="all")
    assert torch.load(tmp_path / "whole.optimizer.pt")["param_groups"][0]["param_names"] == ["w", "v", "gone"]


@pytest.mark.parametrize(
    ("state", "params", "words"),
    [
        ({"w": {"m": torch.ones(3)}}, ["w", 1], "list a parameter twice, or mix names and numbers"),
        ({"z": {"m": torch.ones(3)}}, ["w"], "in no group"),
    ],
)
def test_names_that_contradict(state, params, words, tmp_path):
    with refusing(DamagedFileError, words):
        zckpt.open(named_file(tmp_path, state, params))


def test_other_names_than_the_files_are_refused(tmp_path):
    path = named_file(tmp_path, {"w": {"m": torch.ones(3)}}, ["w"])
    assert zckpt.open(path, names=["w"]).warnings == []
    with refusing(UsageError, "omit --names"):
        zckpt.open(path, names=["v"])


# --- several optimizers of a model


def muon_and_adamw(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = body(5, 7, 3)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [{"params": [model[0].bias], "lr": 0.3}, {"params": [model[1].bias]}]
    return model, [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.2)]


@pytest.mark.parametrize("key", ["optimizer", "optimizers", "optimizer_states"])
def test_a_list_of_optimizers_each_numbered_from_0(key, tmp_path):
    model, optimizers = muon_and_adamw(0)
    stepped(model, *optimizers)
    path = tmp_path / "c.pt"
    torch.save({"state_dict": model.state_dict(), key: [one.state_dict() for one in optimizers]}, path)
    opened = assert_state(path, model, {"0": optimizers[0], "1": optimizers[1]})
    assert opened.warnings == []
    assert [group.hyperparameters["lr"] for group in opened.param_groups] == [0.1, 0.3, 0.2]
    zckpt.convert(path, tmp_path / "z", to="zckpt")
    for source in (path, tmp_path / "z"):
        again, others = muon_and_adamw(1)
        zckpt.load(source, model=again, optimizer=others)
        for optimizer, other in zip(optimizers, others, strict=True):
            theirs = [p for group in other.param_groups for p in group["params"]]
            ours = [p for group in optimizer.param_groups for p in group["params"]]
            for one, its in zip(ours, theirs, strict=True):
                assert torch.equal(one, its)
                assert all(torch.equal(value, other.state[its][slot]) for slot, value in optimizer.state[one].items())


def test_a_dict_of_optimizers_by_name(tmp_path):
    model, [muon, adamw] = muon_and_adamw(0)
    stepped(model, muon, adamw)
    path = tmp_path / "c.pt"
    optimizers = {"muon": muon.state_dict(), "adamw": adamw.state_dict()}
    torch.save({"model": model.state_dict(), "optimizer": optimizers, "step": 2}, path)
    assert_state(path, model, {"muon": muon, "adamw": adamw})
    again, [first, second] = muon_and_adamw(1)
    zckpt.load(path, model=again, optimizer={"adamw": second, "muon": first})
    assert torch.equal(second.state[again[1].bias]["exp_avg"], adamw.state[model[1].bias]["exp_avg"])
    again, [first, second] = muon_and_adamw(1)
    with refusing(UsageError, "optimizers of other names"):
        zckpt.load(path, model=again, optimizer=[first, second])


def test_optimizers_that_have_one_child_each(tmp_path):
    """As Lightning keeps a GAN: shapes alone leave two readings of the third layer."""
    model = nn.ModuleDict({"generator": body(5, 4, 4, 6), "discriminator": body(5, 4, 4, 4)})
    optimizers = [torch.optim.Adam(model[name].parameters(), lr=0.1) for name in ("generator", "discriminator")]
    for name, optimizer in zip(model, optimizers, strict=True):
        stepped(model[name], optimizer)
    path = tmp_path / "c.ckpt"
    root = {"state_dict": model.state_dict(), "optimizer_states": [one.state_dict() for one in optimizers], "loops": {}}
    torch.save(root, path)
    opened = assert_state(path, model, {"0": optimizers[0], "1": optimizers[1]})
    assert opened.warnings == []


# --- several models


def gan(low: int = 4) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = {"generator": body(5, 4, 4), "discriminator": body(5, low, 1)}
    optimizers = {f"optimizer_{name[0]}": torch.optim.Adam(one.parameters(), lr=0.1) for name, one in models.items()}
    for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
        stepped(model, optimizer)
    return models, optimizers


def gan_file(path: Path, models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> Path:
    every = {**models, **optimizers}
    torch.save({key: one.state_dict() for key, one in every.items()} | {"epoch": 4}, path)
    return path


def test_two_models_and_the_optimizer_of_each(tmp_path):
    models, optimizers = gan()
    path = gan_file(tmp_path / "c.pt", models, optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        opened = assert_state(path, models[model], {optimizer: optimizers[optimizer]}, prefix=f"{model}.")
    assert opened.warnings == [
        "there are several models (generator, discriminator); tensor names begin with their keys"
    ]
    assert opened.metadata == {"epoch": 4}
    again = nn.ModuleDict({name: body(5, 4, 4) if name[0] == "g" else body(5, 4, 1) for name in models})
    others = {key: torch.optim.Adam(one.parameters()) for key, one in zip(optimizers, again.values(), strict=True)}
    zckpt.load(path, model=again, optimizer=others)
    ours = optimizers["optimizer_d"].state[models["discriminator"][1].bias]
    assert torch.equal(others["optimizer_d"].state[again["discriminator"][1].bias]["exp_avg"], ours["exp_avg"])


DEEPER: dict[str, tuple[str, Callable[[list[Any], list[Any]], object]]] = {
    "a list": ("0.", lambda m, o: [{"model": m[0], "optimizer": o[0]}, {"model": m[1], "optimizer": o[1]}, 7]),
    "dicts": ("models.0.", lambda m, o: {"checkpoint": {"models": m, "optimizers": o}, "epoch": 7}),
    "pairs": ("g.", lambda m, o: {"agent": {"all": {"g": m[0], "d": m[1], "opt_g": o[0], "opt_d": o[1]}}, "epoch": 7}),
    "a buffer": (
        "g.",
        lambda m, o: {
            "run": {k: {"net": m[i], "opt": o[i]} for i, k in enumerate("gd")},
            "epoch": 7,
            "replay": {"obs": {"x": torch.ones(3, 4)}},
        },
    ),
    "parts": ("g.", lambda m, o: {"run": {k: {"net": m[i], "opt": o[i]} for i, k in enumerate("gd")}, "epoch": 7}),
}


@pytest.mark.parametrize("form", DEEPER)
def test_models_and_optimizers_that_lie_deeper(form, tmp_path):
    prefix, make = DEEPER[form]
    models, optimizers = gan()
    states = [[one.state_dict() for one in every.values()] for every in (models, optimizers)]
    torch.save(make(*states), tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    model, optimizer = next(iter(models.values())), next(iter(optimizers.values()))
    for name, one in model.named_parameters():
        assert torch.equal(opened.read(f"{prefix}{name}", "weight"), one)
        assert torch.equal(opened.read(f"{prefix}{name}", "exp_avg"), optimizer.state[one]["exp_avg"])
    assert 7 in opened.metadata.values()
    assert zckpt.verify(tmp_path / "c.pt", deep=True).sound
    for to in ("zckpt", "dcp"):
        zckpt.convert(tmp_path / "c.pt", tmp_path / to, to=to)
        assert zckpt.diff(tmp_path / "c.pt", tmp_path / to).equal
    zckpt.strip(tmp_path / "c.pt", tmp_path / "s.pt", optimizer=True)
    assert zckpt.open(tmp_path / "s.pt").slot_names() == ["weight"]


def test_a_dict_that_lies_in_itself_is_looked_into_once(tmp_path):
    models, optimizers = gan()
    model, optimizer = next(iter(models.values())), next(iter(optimizers.values()))
    state = optimizer.state_dict() | {"seen": 3}
    root: dict[str, Any] = {"run": {"last": {"net": model.state_dict(), "opt": state}}}
    root |= {f"again{at}": root for at in range(20)}
    torch.save(root, tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    assert torch.equal(opened.read("0.weight", "exp_avg"), optimizer.state[model[0].weight]["exp_avg"])
    assert further_keys(opened.optimizer_metadata) == ["seen"]


def test_a_list_of_a_model_and_its_optimizer(tmp_path):
    model = body(5, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict(), 3), tmp_path / "c.pt")
    assert_state(tmp_path / "c.pt", model, {None: optimizer})
    again = body(5, 4)
    its = torch.optim.Adam(again.parameters())
    zckpt.load(tmp_path / "c.pt", model=again, optimizer=its)
    assert torch.equal(its.state[again[0].bias]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("models", "optimizers")])
def test_models_and_optimizers_that_lie_in_a_dict_each(keys, tmp_path):
    models, optimizers = {key: body(5, 4) for key in "gd"}, {}
    for key, model in models.items():
        stepped(model, optimizers.setdefault(key, torch.optim.Adam(model.parameters(), lr=0.1)))
    states: list[dict[str, Any]] = [{k: one.state_dict() for k, one in every.items()} for every in (models, optimizers)]
    states[0]["count"] = 2
    torch.save(dict(zip(keys, states, strict=True)) | {"epoch": 4}, tmp_path / "c.pt")
    for key, model in models.items():
        opened = assert_state(tmp_path / "c.pt", model, {key: optimizers[key]}, prefix=f"{keys[0]}.{key}.")
    assert opened.metadata == {keys[0]: {"count": 2}, "epoch": 4}
    torch.save({keys[0]: tuple(states[0][key] for key in "gd"), keys[1]: tuple(states[1].values())}, tmp_path / "t.pt")
    for at, (model, optimizer) in enumerate(zip(models.values(), optimizers.values(), strict=True)):
        assert_state(tmp_path / "t.pt", model, {str(at): optimizer}, prefix=f"{keys[0]}.{at}.")


def test_equal_models_that_lie_with_their_optimizers(tmp_path):
    models, optimizers = {key: body(5, 4) for key in "GD"}, {}
    for key, model in models.items():
        stepped(model, optimizers.setdefault(key, torch.optim.Adam(model.parameters(), lr=0.1)))
    parts = {key: {"net": models[key].state_dict(), "opt": optimizers[key].state_dict()} for key in "GD"}
    path = tmp_path / "c.pt"
    torch.save({"G": {**parts["G"], "sched": {"last_epoch": 3}}, "D": parts["D"], "epoch": 4, "none": {}}, path)
    for to in (None, "zckpt", "dcp"):
        if to is not None:
            zckpt.convert(path, tmp_path / to, to=to, verify=True)
            path = tmp_path / to
        for key, model in models.items():
            opened = assert_state(path, model, {key: optimizers[key]}, prefix=f"{key}.")
        assert opened.metadata == {"G": {"sched": {"last_epoch": 3}}, "epoch": 4, "none": {}}
        again = nn.ModuleDict({key: body(5, 4) for key in "GD"})
        others = {key: torch.optim.Adam(one.parameters()) for key, one in again.items()}
        zckpt.load(path, model=again, optimizer=others)
        assert torch.equal(others["D"].state[again["D"][0].bias]["exp_avg"],
                           optimizers["D"].state[models["D"][0].bias]["exp_avg"])  # fmt: skip
    torch.save({"G": parts["G"], "D": {"net": parts["D"]["net"]}}, path := tmp_path / "one.pt")
    opened = assert_state(path, models["G"], {None: optimizers["G"]}, prefix="G.")  # the other's is not kept
    assert torch.equal(opened.read("D.0.weight"), models["D"][0].weight)
    assert opened.parameters["D.0.weight"].group is None


def test_equal_models_are_told_apart_by_their_keys(tmp_path):
    models = {"netG": body(5, 4), "netD": body(5, 4), "netG_ema": body(5, 4)}
    optimizers = {
        "optD": torch.optim.Adam(models["netD"].parameters()),
        "optG": torch.optim.Adam(models["netG"].parameters()),
    }
    stepped(models["netG"], optimizers["optG"])
    stepped(models["netD"], optimizers["optD"])
    path = gan_file(tmp_path / "c.pt", models, optimizers)
    assert_state(path, models["netD"], {"optD": optimizers["optD"]}, prefix="netD.")
    assert_state(path, models["netG"], {"optG": optimizers["optG"]}, prefix="netG.")


def test_nothing_is_guessed_where_two_models_fit(tmp_path):
    models = {"left": body(5, 4), "right": body(5, 4)}
    optimizers = {
        "one": torch.optim.Adam(models["left"].parameters()),
        "two": torch.optim.Adam(models["right"].parameters()),
    }
    stepped(models["left"], optimizers["one"])
    stepped(models["right"], optimizers["two"])
    path = gan_file(tmp_path / "c.pt", models, optimizers)
    opened = zckpt.open(path)
    assert len(opened.unnamed) == 4
    assert any("one could be the optimizer of several models: left, right" in text for text in opened.warnings)
    names = [f"{side}.0.{kind}" for side in ("left", "right") for kind in ("weight", "bias")]
    given = zckpt.open(path, names=names)
    expected = optimizers["two"].state[models["right"][0].bias]["exp_avg"]
    assert torch.equal(given.read("right.0.bias", "exp_avg"), expected)


def test_one_optimizer_of_an_encoder_and_a_decoder(tmp_path):
    models = nn.ModuleDict({"encoder": body(5, 4), "decoder": body(4, 5)})
    optimizer = torch.optim.Adam(models.parameters())
    models["decoder"](models["encoder"](torch.ones(2, 5))).sum().backward()
    optimizer.step()
    path = gan_file(tmp_path / "c.pt", dict(models.items()), {"optimizer": optimizer})
    assert_state(path, models, {None: optimizer})


def test_what_composer_writes(tmp_path):
    """The layout of composer 0.32 (`State.state_dict`), from its source."""
    model = nn.ModuleDict({"model": body(5, 4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model["model"], optimizer)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    inner = {
        "model": weights,
        "optimizers": {"DecoupledAdamW": state},
        "schedulers": {"LambdaLR": {"last_epoch": 2}},
        "algorithms": [("EMA", {"smoothing": 0.9, "buffer": torch.arange(4)})],
        "timestamp": {"Timestamp": {"epoch": 1, "batch": 22}},
        "run_name": "r",
    }
    root = {"state": inner, "rng": [{"python": (3, (1, 2), None), "torch": torch.arange(8, dtype=torch.uint8)}]}
    torch.save(root, tmp_path / "ep1-ba22-rank0.pt")
    opened = assert_state(tmp_path / "ep1-ba22-rank0.pt", model, {None: optimizer})
    assert opened.step == 22
    zckpt.convert(tmp_path / "ep1-ba22-rank0.pt", tmp_path / "z", to="zckpt")
    there = zckpt.open(tmp_path / "z")
    assert there.metadata.keys() == {"state", "rng"}
    assert zckpt.diff(tmp_path / "ep1-ba22-rank0.pt", tmp_path / "z").equal


def test_what_composer_writes_sharded(tmp_path):
    """The same dict by torch.distributed.checkpoint, in a folder `epE-baB`; of its parent the newest is read."""
    model = nn.ModuleDict({"model": body(5, 4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model["model"], optimizer)
    weights, state = get_state_dict(model, optimizer)
    inner = {"model": weights, "optimizers": {"DecoupledAdamW": state}, "timestamp": {"Timestamp": {"batch": 22}}}
    for folder in ("ep1-ba9", "ep1-ba22"):
        root = {"state": inner, "rng": [{"torch": torch.arange(8, dtype=torch.uint8)}]}
        dcp.save(root, checkpoint_id=tmp_path / "run" / folder, no_dist=True)
    opened = assert_state(tmp_path / "run" / "ep1-ba22", model, {None: optimizer})
    assert opened.step == 22
    assert opened.metadata.keys() == {"state.timestamp", "rng"}
    assert_state(tmp_path / "run", model, {None: optimizer})
    assert zckpt.open(tmp_path / "run").source.endswith("ep1-ba22")
    link = tmp_path / "run" / "latest-rank0.pt"
    link.symlink_to("ep1-ba9")
    assert zckpt.open(tmp_path / "run").source.endswith("ep1-ba9")
    assert zckpt.open(tmp_path / "run", tag="ep1-ba22").source.endswith("ep1-ba22")
    link.unlink()
    link.symlink_to("ep1-ba30")
    refused(3, "inspect", tmp_path / "run", words=("latest-rank0.pt", "names no checkpoint", "ep1-ba22"))


def test_the_last_of_composers_files_is_read(tmp_path):
    for name in ("ep0-ba5", "ep1-ba22", "ep1-ba9"):
        torch.save({"state": {"model": body(5, 4).state_dict()}, "rng": []}, tmp_path / f"{name}-rank0.pt")
    assert zckpt.open(tmp_path).source == str(tmp_path / "ep1-ba22-rank0.pt")
    zckpt.consolidate(tmp_path, tmp_path / "m.safetensors")
    (tmp_path / "latest-rank0.pt").symlink_to("ep1-ba9-rank0.pt")
    assert zckpt.open(tmp_path).source == str(tmp_path / "ep1-ba9-rank0.pt")
    (tmp_path / "latest-rank0.pt").unlink()
    (tmp_path / "ep0-ba5-rank0.pt").rename(tmp_path / "ep4-ba5-rank0.pt")
    refused(3, "inspect", tmp_path, words=("in different orders", "ep4-ba5-rank0.pt"))


@pytest.mark.parametrize(
    ("names", "last"),
    [(("epoch_2", "epoch_10"), "/gone/run/epoch_10.pth"), (("model_0000009", "model_final"), "model_final.pth")],
)
def test_the_file_that_a_run_names_as_its_last_is_read(names, last, tmp_path):
    """As mmengine and detectron2 keep it beside the others, with or without the path that it had then."""
    for name in names:
        torch.save({"model": body(5, 4).state_dict()}, tmp_path / f"{name}.pth")
    (tmp_path / "last_checkpoint").write_text(last)
    assert zckpt.open(tmp_path).source == str(tmp_path / f"{names[-1]}.pth")
    assert zckpt.verify(tmp_path, deep=True).sound
    zckpt.consolidate(tmp_path, tmp_path / "m.safetensors")


def test_the_last_whole_one_of_torchtitans_steps_is_read(tmp_path):
    model = body(5, 4)
    for number in (9, 10):
        dcp.save(
            {**model.state_dict(), "train_state": {"step": number}},
            checkpoint_id=tmp_path / f"step-{number}",
            no_dist=True,
        )
    assert zckpt.open(tmp_path / "step-10").step == 10
    assert zckpt.open(tmp_path).step == 10
    assert zckpt.open(tmp_path, tag="step-9").step == 9
    refused(3, "inspect", tmp_path, "--tag", "step-8", words=("no such tag", "step-8"))
    assert zckpt.verify(tmp_path).sound
    (tmp_path / "step-10" / ".metadata").unlink()
    opened = zckpt.open(tmp_path)
    assert opened.step == 9
    assert any("later steps are incomplete: step-10" in one for one in opened.warnings)
    (tmp_path / "step-9").rename(tmp_path / "ep0-ba9")
    assert zckpt.open(tmp_path).step == 9
    shutil.copytree(tmp_path / "ep0-ba9", tmp_path / "step-9")
    refused(3, "inspect", tmp_path, words=("steps of two programs", "step-9", "ep0-ba9"))


# --- and back


def test_what_lightning_keeps_besides_survives_conversions(tmp_path):
    model, optimizers = muon_and_adamw(0)
    stepped(model, *optimizers)
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2, "completed": 1}}}}
    root = {
        "epoch": 1,
        "global_step": 16,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": loops,
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5), "best_k_models": {}}
        },
        "optimizer_states": [one.state_dict() for one in optimizers],
        "lr_schedulers": [{"last_epoch": 2, "base_lrs": [0.1]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 7},
    }
    torch.save(root, tmp_path / "last.ckpt")
    opened = assert_state(tmp_path / "last.ckpt", model, {"0": optimizers[0], "1": optimizers[1]})
    assert opened.step == 16
    source = tmp_path / "last.ckpt"
    for target in ("zckpt", "dcp", "universal"):
        if target == "universal":
            with refusing(UnsupportedError, "holds several optimizers"):
                zckpt.convert(source, tmp_path / target, to=target)
            continue
        zckpt.convert(source, tmp_path / target, to=target)
        assert zckpt.diff(tmp_path / "last.ckpt", tmp_path / target).equal
        source = tmp_path / target
    there = zckpt.open(source)
    assert there.metadata.keys() == root.keys() - {"state_dict", "optimizer_states"}
    again, others = muon_and_adamw(1)
    zckpt.load(source, model=again, optimizer=others)
    assert torch.equal(others[1].state[again[1].bias]["exp_avg"], optimizers[1].state[model[1].bias]["exp_avg"])


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_slots_are_stripped_of_named_state(flat, tmp_path):
    model = body(5, 4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    torch.save({"model": weights, "optimizer": state}, tmp_path / "c.pt")
    zckpt.strip(tmp_path / "c.pt", tmp_path / "s.pt", keep_slots=["exp_avg"])
    kept = zckpt.open(tmp_path / "s.pt")
    assert torch.equal(kept.read("0.weight", "exp_avg"), optimizer.state[model[0].weight]["exp_avg"])
    assert set(kept.parameters["0.weight"].slots) == {"weight", "exp_avg", "step"}
    zckpt.strip(tmp_path / "c.pt", tmp_path / "n.pt", optimizer=True)
    assert set(zckpt.open(tmp_path / "n.pt").parameters["0.weight"].slots) == {"weight"}


@pytest.mark.parametrize("has_more", [False, True])
def test_one_optimizer_of_two_models_may_lie_beside_single_values(has_more, tmp_path):
    """As OpenNMT-py saves them."""
    torch.manual_seed(0)
    model, generator = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *(generator.parameters() if has_more else ())])
    generator(model(torch.randn(5, 3))).square().sum().backward()
    optimizer.step()
    optim = {"training_step": 7, "optimizer": optimizer.state_dict()}
    models = {"model": model.state_dict(), "generator": generator.state_dict()}
    torch.save({**models, "optim": optim}, tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    assert not opened.unnamed
    assert opened.metadata["optim"] == {"training_step": 7}
    prefix = "model." if has_more else ""
    assert torch.equal(opened.read(f"{prefix}bias", "exp_avg"), optimizer.state[model.bias]["exp_avg"])
    if has_more:
        assert torch.equal(opened.read("generator.bias", "exp_avg"), optimizer.state[generator.bias]["exp_avg"])
    for to in ("zckpt", "dcp"):
        zckpt.convert(tmp_path / "c.pt", tmp_path / to, to=to)
        assert zckpt.diff(tmp_path / "c.pt", tmp_path / to).equal


@pytest.mark.parametrize("whole", [False, True])
def test_peft_trains_a_copy_of_what_it_keeps(whole, tmp_path):
    model = nn.ModuleDict()
    for name in ("a", "b"):
        model[name] = nn.ModuleDict({"original_module": nn.Linear(3, 3), "modules_to_save": nn.ModuleDict()})
        model[name]["original_module"].requires_grad_(False)
        model[name]["modules_to_save"]["default"] = nn.Linear(3, 3)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.Adam(model.parameters() if whole else trained.values())
    sum(one.square().sum() for one in trained.values()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    for name, one in trained.items():
        assert torch.equal(opened.read(name, "exp_avg"), optimizer.state[one]["exp_avg"])
    assert not opened.unnamed


def test_a_complex_parameter_is_one_beside_an_optimizer_in_safetensors(tmp_path):
    model = nn.ParameterDict({"c": nn.Parameter(torch.randn(3, dtype=torch.complex64)), "w": torch.randn(2)})
    optimizer = torch.optim.Adam(model.parameters())
    sum(one.abs().square().sum() for one in model.values()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "whole", to="consolidated")
    assert zckpt.diff(tmp_path / "c.pt", tmp_path / "whole").equal


def test_models_in_a_list_are_read_with_their_optimizers(tmp_path):
    torch.manual_seed(0)
    models = [nn.Linear(3, 4), nn.Linear(4, 2)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in models]
    models[1](models[0](torch.randn(5, 3))).square().sum().backward()
    for one in optimizers:
        one.step()
    weights = [one.state_dict() for one in models]
    torch.save({"models": weights, "optims": [one.state_dict() for one in optimizers]}, tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        assert torch.equal(opened.read(f"models.{number}.bias", "weight"), model.bias)
        assert torch.equal(opened.read(f"models.{number}.bias", "exp_avg"), optimizer.state[model.bias]["exp_avg"])
    assert zckpt.verify(tmp_path / "c.pt", deep=True).sound
    torch.save({"model": weights[0], "emas": weights}, tmp_path / "d.pt")  # these are no part of the model
    beside = zckpt.open(tmp_path / "d.pt")
    assert [*beside.parameters] == ["weight", "bias"]
    assert [*beside.metadata] == ["emas"]


def test_a_value_among_a_models_tensors_and_a_defaultdict_of_state_hide_neither(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    state = {**saved, "state": defaultdict(dict, saved["state"])}
    torch.save({"model": {**model.state_dict(), "epoch": 3}, "optimizer": state}, tmp_path / "c.pt")
    opened = zckpt.open(tmp_path / "c.pt")
    assert torch.equal(opened.read("bias", "exp_avg"), optimizer.state[model.bias]["exp_avg"])
    assert opened.metadata == {"model": {"epoch": 3}}
    zckpt.convert(tmp_path / "c.pt", tmp_path / "dcp", to="dcp")
    assert zckpt.diff(tmp_path / "c.pt", tmp_path / "dcp").equal


class Projector:
    """In the place of GaLore's, of which each parameter of a group with a rank has one."""

    def __init__(self, matrix):
        self.ortho_matrix = matrix


def low_rank(tmp_path):
    """Save what GaLore 1.0 and APOLLO 1.0 do: moments of the group with a `rank` are of the projected gradient."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False))
    of = {0: (8, 8), 1: (8, 4), 2: (4, 6)}
    state = {n: {"step": 1, "exp_avg": torch.rand(size), "exp_avg_sq": torch.rand(size)} for n, size in of.items()}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "rank": 4, "params": [1, 2]}]
    path = tmp_path / "low.pt"
    torch.save({"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}, path)
    return state, path


def test_moments_of_a_projected_gradient_take_names(tmp_path):
    state, path = low_rank(tmp_path)
    names = ["1.weight", "0.weight", "2.weight"]
    found = zckpt.open(path, names=names)
    zckpt.convert(path, tmp_path / "own", to="zckpt", names=names)
    for one in (found, zckpt.open(tmp_path / "own")):
        for number, name in enumerate(names):
            assert torch.equal(one.read(name, "exp_avg"), state[number]["exp_avg"])
    assert torch.equal(zckpt.open(path).read("2.weight", "exp_avg"), state[2]["exp_avg"])  # the order alone tells
    with refusing(UsageError, "is not"):
        zckpt.open(path, names=names[::-1])


def test_an_object_in_an_optimizers_state_is_refused_as_that(tmp_path):
    model = nn.Linear(6, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["projector"] = Projector(torch.ones(6, 4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with refusing(UnsupportedError, "projector of weight is an object that only a pickle can make"):
        zckpt.load(tmp_path / "c.pt", model=model, optimizer=optimizer)


def test_a_param_groups_dict_by_parameter_is_no_part_of_dcp(tmp_path):
    """GrokAdamW 0.1 keeps its state so, which torch's DCP would put under a text of the whole tensor."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["state"] = {model.weight: {"exp_avg": torch.ones(2, 3)}}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with refusing(UnsupportedError, "state, which the optimizer keeps of a param group, has keys that are no texts"):
        zckpt.convert(tmp_path / "c.pt", tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "own", to="zckpt")


@pytest.mark.parametrize(("to", "options"), [
    ("fsdp-rank-files", {"world_size": 2}), ("torch-checkpointing", {"keys": "flat"}), ("universal", {}),
    ("zero-redundancy", {"world_size": 2}), ("deepspeed", {"world_size": 2, "stage": 1}),
    ("deepspeed", {"world_size": 2, "stage": 3}), ("dcp", {"world_size": 3}),
])  # fmt: skip
def test_tensors_among_hyperparameters_go_through_other_formats(to, options, tmp_path):
    model = body(5, 3, 2)
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    optimizer.param_groups[0]["drift"] = torch.arange(3)
    stepped(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "c.pt")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "other", to=to, **options)
    zckpt.convert(tmp_path / "other", tmp_path / "back", to="consolidated")
    [group] = torch.load(tmp_path / "back" / "optimizer.pt", weights_only=False)["param_groups"]
    assert (group["lr"], group["betas"]) == (0.1, betas)
    assert group["drift"].equal(torch.arange(3))


def test_lists_of_tensors_that_several_ranks_saved_are_equal_to_one_files(tmp_path):
    model = body(5, 3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    stepped(model, optimizer)
    for state in optimizer.state.values():
        state["factors"] = [torch.eye(2), {"left": torch.ones(3)}]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "c.pt")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "dcp", to="dcp", world_size=5)
    assert zckpt.diff(tmp_path / "c.pt", tmp_path / "dcp").equal
    assert zckpt.fingerprint(tmp_path / "c.pt").text == zckpt.fingerprint(tmp_path / "dcp").text


def test_each_of_several_models_has_its_own_bare_names(tmp_path):
    """As GANs save networks in DDP, and DINO its student beside the teacher and the loss."""
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(one.parameters())
    one(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    wrapped = {f"module.{name}": value for name, value in one.state_dict().items()}
    torch.save({"G": wrapped, "D": other.state_dict(), "optimizer": optimizer.state_dict()},
               tmp_path / "c.pt")  # fmt: skip
    found = zckpt.open(tmp_path / "c.pt")
    assert set(found.parameters) == {"G.weight", "G.bias", "D.weight", "D.bias"}
    assert torch.equal(found.read("G.weight"), one.weight)
    zckpt.strip(tmp_path / "c.pt", tmp_path / "s.pt", optimizer=True)
    assert torch.load(tmp_path / "s.pt")["G"].keys() == wrapped.keys()


def networks():
    models = {"G": nn.Linear(3, 2), "D": nn.Linear(3, 1)}
    optimizers = {key: torch.optim.AdamW(model.parameters()) for key, model in models.items()}
    for key, model in models.items():
        model(torch.ones(1, 3)).sum().backward()
        optimizers[key].step()
    return models, optimizers


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("form", ["apart", "together"])
def test_models_in_dicts_are_read_whatever_average_is_beside_them(form, average, tmp_path):
    models, optimizers = networks()
    weights = {key: one.state_dict() for key, one in models.items()}
    states = {key: one.state_dict() for key, one in optimizers.items()}
    content = {
        "apart": {"nets": weights, "optims": states, "rng": {"cpu": torch.get_rng_state()}},
        "together": {key: {"model": weights[key], "optimizer": states[key]} for key in models},
    }[form]
    torch.save({**content, **({"ema": weights["G"]} if average else {})}, tmp_path / "c.pt")
    for to in ("zckpt", "dcp"):
        zckpt.convert(tmp_path / "c.pt", tmp_path / to, to=to)
    for path in (tmp_path / "c.pt", tmp_path / "zckpt", tmp_path / "dcp"):
        found = zckpt.open(path)
        front = "nets." if form == "apart" else ""
        for key, model in models.items():
            assert torch.equal(found.read(f"{front}{key}.weight"), model.weight)
            moment = optimizers[key].state[model.weight]["exp_avg"]
            assert torch.equal(found.read(f"{front}{key}.weight", "exp_avg"), moment)
    assert zckpt.verify(tmp_path / "c.pt", deep=True).sound
    with refusing(UsageError, f"give one module.* that has all models in it: {front}G, {front}D"):
        zckpt.load(tmp_path / "c.pt", model=nn.Linear(3, 2))
    if average and front:
        return  # the average is one of the models
    both = nn.ModuleDict({key: nn.Linear(3, len(model.bias)) for key, model in models.items()})
    its = {key: torch.optim.AdamW(one.parameters()) for key, one in both.items()}
    zckpt.load(tmp_path / "c.pt", model=nn.ModuleDict({"nets": both}) if front else both, optimizer=its)
    assert torch.equal(its["D"].state[both["D"].bias]["exp_avg"], optimizers["D"].state[models["D"].bias]["exp_avg"])


def test_a_model_that_is_carried_is_told(tmp_path):
    models, optimizers = networks()
    critic = {"net": models["D"].state_dict(), "optimizer": optimizers["D"].state_dict()}
    whole = {"model": models["G"].state_dict(), "optimizer": optimizers["G"].state_dict()}
    torch.save({**whole, "critic": critic, "trainer": {"rng": {"cpu": torch.get_rng_state()}}}, tmp_path / "c.pt")
    found = zckpt.open(tmp_path / "c.pt")
    assert set(found.parameters) == {"weight", "bias"}
    assert found.warnings == ["more models or optimizers are carried as they are, and not read: critic"]


def test_a_model_that_is_carried_into_dcp_is_no_part_of_the_model_there(tmp_path):
    models, optimizers = networks()
    critic = {"net": models["D"].state_dict(), "optimizer": optimizers["D"].state_dict()}
    whole = {"model": models["G"].state_dict(), "optimizer": optimizers["G"].state_dict()}
    torch.save({**whole, "critic": critic}, tmp_path / "c.pt")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "dcp", to="dcp")
    assert zckpt.diff(tmp_path / "c.pt", tmp_path / "dcp").equal
    again = nn.Linear(3, 2)
    its = torch.optim.AdamW(again.parameters())
    zckpt.load(tmp_path / "dcp", model=again, optimizer=its)
    assert torch.equal(its.state[again.weight]["exp_avg"], optimizers["G"].state[models["G"].weight]["exp_avg"])


@pytest.mark.parametrize("is_dcp", [False, True])
@pytest.mark.parametrize("key", ["fp32_from_fp16_params", "fp32_from_fp16", "fp32_groups"])
def test_masters_beside_an_optimizer_are_its_parameters(key, is_dcp, tmp_path):
    """Of Megatron's and Apex's optimizers of 16 bits. Where shapes leave a choice, masters tell which is which."""
    path, model, masters, optimizer = mixed(tmp_path, key, is_dcp=is_dcp)
    opened = zckpt.open(path)
    for (name, weight), master in zip(model.named_parameters(), masters, strict=True):
        assert torch.equal(opened.read(name, "weight"), weight)
        assert torch.equal(opened.read(name, "master"), master)
        assert torch.equal(opened.read(name, "exp_avg"), optimizer.state[master]["exp_avg"])
    assert not opened.unnamed
    assert key not in str(list(opened.metadata))
    assert zckpt.verify(path).sound
    items = zckpt.inspect(path, include_inventory=True).as_dict()["inventory"]["items"]
    assert [one for one in items if one["fate"] == "left out"] == []
    zckpt.convert(path, tmp_path / "again", to="dcp", verify=True)
    assert zckpt.diff(path, tmp_path / "again").equal
    zckpt.strip(path, tmp_path / "kept", keep_slots=["exp_avg"])
    assert torch.equal(zckpt.open(tmp_path / "kept").read("0.weight", "master"), masters[0])
    zckpt.strip(path, tmp_path / "small", optimizer=True)
    slots = {slot for one in zckpt.open(tmp_path / "small").parameters.values() for slot in one.slots}
    assert slots == {"weight"} if is_dcp else {"weight", "master"}  # without which its own program would not load it


@pytest.mark.parametrize("is_dcp", [False, True])
@pytest.mark.parametrize("lacks", ["its weight", "its shape"])
def test_masters_that_no_weight_tells_keep_their_number(lacks, is_dcp, tmp_path):
    path, model, masters, _ = mixed(tmp_path, "fp32_from_fp16_params", is_dcp=is_dcp, lacks=lacks)
    opened = zckpt.open(path)
    assert "master" not in opened.parameters["0.weight"].slots
    assert opened.unnamed["0"].slots.keys() >= {"master", "exp_avg"}
    assert torch.equal(opened.read("1.weight", "master"), masters[2])
    zckpt.strip(path, tmp_path / "small", optimizer=True)
    assert torch.equal(zckpt.open(tmp_path / "small").read("0.weight", "weight"), model[0].weight)


@pytest.mark.parametrize("is_dcp", [False, True])
@pytest.mark.parametrize("lacks", ["a master", "a list"])
def test_masters_of_only_some_parameters_are_carried(lacks, is_dcp, tmp_path):
    path, *_ = mixed(tmp_path, "fp32_from_fp16_params", is_dcp=is_dcp, lacks=lacks)
    opened = zckpt.open(path)
    assert all("master" not in one.slots for one in opened.parameters.values())
    assert "optimizer" in str(list(opened.metadata))


def mixed(
    tmp_path: Path, key: str, *, is_dcp: bool, lacks: str = ""
) -> tuple[Path, nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
    """Save a bfloat16 model that an optimizer of masters in two groups has trained."""
    model = body(5, 4, 4, 4, 1).bfloat16()
    masters = [one.detach().float() for one in model.parameters()]
    groups = [[one for one in masters if one.dim() == axes] for axes in (2, 1)]
    optimizer = torch.optim.AdamW([{"params": its, "weight_decay": 0.1 * at} for at, its in enumerate(groups)])
    for _ in range(2):
        for one in masters:
            one.grad = torch.randn_like(one)
        optimizer.step()
    for one, master in zip(model.parameters(), masters, strict=True):
        one.data.copy_(master)
    lists = {
        "a list": groups[:1],
        "a master": [groups[0], groups[1][1:]],
        "its weight": [[masters[0] + 1, *groups[0][1:]], groups[1]],
        "its shape": [[masters[0].flatten(), *groups[0][1:]], groups[1]],
    }.get(lacks, groups)
    held = {"optimizer": optimizer.state_dict(), key: lists, "loss_scaler": argparse.Namespace(cur_scale=2.0)}
    content = {"model": model.state_dict(), "optimizer": held, "iteration": 2}
    path = tmp_path / ("dcp" if is_dcp else "file.pt")
    if is_dcp:
        dcp.save(content, checkpoint_id=path)
    else:
        torch.save(content, path)
    return path, model, masters, optimizer


@pytest.mark.parametrize("params", [5, None, "ab"])
def test_an_optimizer_that_holds_another_may_have_damaged_groups(params, tmp_path):
    inner = {"state": {}, "param_groups": [{"params": [0]}]}
    damaged = {"state": {}, "param_groups": [{"params": params}], "inner": inner}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": damaged}, tmp_path / "c.pt")
    with refusing(DamagedFileError, "unreadable param group"):
        zckpt.open(tmp_path / "c.pt")


@pytest.mark.parametrize("fsdp", [None, "full", "sharded"])
def test_a_parameter_that_two_models_share_is_in_the_files_of_both(fsdp, tmp_path):
    """As an actor and a critic share an encoder: Accelerate saves each model by itself."""
    actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    critic.weight = actor.weight
    torch.save({"actor": actor.state_dict(), "critic": critic.state_dict(), "step": 1}, tmp_path / "c.pt")
    zckpt.convert(tmp_path / "c.pt", tmp_path / "out", to="accelerate", fsdp=fsdp, verify=True)
    assert zckpt.diff(tmp_path / "c.pt", tmp_path / "out").equal
    assert zckpt.open(tmp_path / "out").parameters["critic.weight"].tied_to == "actor.weight"
    (tmp_path / "out" / "zckpt.pt").unlink()
    apart = zckpt.open(tmp_path / "out")
    weights = [name for name in apart.parameters if name.endswith("weight")]
    assert len(weights) == 2
    assert all(torch.equal(apart.read(name), actor.weight) for name in weights)
