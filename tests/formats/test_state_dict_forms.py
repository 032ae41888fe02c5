"""Optimizers of torch files in every form: by name, flattened, several in one file, and of several models."""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
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
from tests import live
from tests.cli.console import refused
from tests.formats.holding import assert_goes_on, assert_holds, assert_state, converted
from tests.fsdp_training.training import STEPS, made, step, truth
from tests.gloo import run
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError
from zckpt.formats.torch_files.attach import further_keys


def body(*sizes) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def trained(*sizes) -> tuple[nn.Module, torch.optim.Optimizer]:
    return live.trained(body(*sizes), torch.optim.Adam, lr=0.1)


def several(**models) -> tuple[nn.ModuleDict, dict[str | None, torch.optim.Optimizer]]:
    """Return models by their keys, and the optimizer that trained each."""
    return nn.ModuleDict(models), {key: live.trained(one, torch.optim.Adam, lr=0.1)[1] for key, one in models.items()}


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one.state_dict() for key, one in objects.items()}


# --- by name


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_get_state_dict_has_names_that_nothing_has_to_be_deduced_of(flat, torch_file):
    def made(rate) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = body(5, 4, 4, 4)  # three shapes that fit several parameters
        model[1].requires_grad_(requires_grad=False)
        groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": rate / dim} for dim in (2, 1)]
        return model, torch.optim.AdamW(groups, amsgrad=True)

    model, optimizer = live.trained(*made(0.1))
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    path = torch_file({"app": weights, "optim": state, "epoch": 3})
    assert assert_holds(path, model, optimizer).warnings == []
    assert_goes_on(path, model, optimizer, *made(0.2))
    zckpt.strip(path, "s.pt", keep_slots=["exp_avg"])
    kept = zckpt.open("s.pt")
    assert torch.equal(kept.read("0.weight", "exp_avg"), optimizer.state[model[0].weight]["exp_avg"])
    assert set(kept.parameters["0.weight"].slots) == {"weight", "exp_avg", "step"}
    zckpt.strip(path, "n.pt", optimizer=True)
    assert zckpt.open("n.pt").slot_names() == ["weight"]


def gathered(rank, world_size, wrap, folder):
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
    for to, options in {"consolidated": {}, "zero-redundancy": {}, "deepspeed": {"world_size": 2, "stage": 2}}.items():
        notes = str(zckpt.convert(tmp_path / "c.pt", tmp_path / to, to=to, **options).notes)
        assert "not in the model's order, as FSDP1 lists flat ones" in notes, to
    alone = zckpt.open(tmp_path / "optimizer.pt")
    assert torch.equal(alone.read("layers.1.up.bias", "exp_avg"), held["exp_avg/layers.1.up.bias"])


def test_a_model_in_the_order_of_its_names_tells_no_other(torch_file):
    model, optimizer = live.trained(layer := torch.nn.Linear(4, 3), torch.optim.AdamW(layer.parameters()))
    weights, state = get_state_dict(model, optimizer)
    path = torch_file({"model": dict(sorted(weights.items())), "optimizer": state})
    assert "order" not in str(zckpt.convert(path, "d", to="deepspeed", world_size=1, stage=1).notes)


def test_a_warning_where_torch_has_lost_all_slots_but_one(torch_file, tmp_path):
    run(gathered, 2, "fsdp1 orig", tmp_path)
    state = torch.load(tmp_path / "optimizer.pt")["state"]
    lost = all(torch.equal(one["exp_avg"], one["exp_avg_sq"]) for one in state.values())
    warnings = zckpt.open(tmp_path / "c.pt").warnings
    assert lost == ("are equal bit for bit: FSDP1 with use_orig_params=True" in str(warnings))
    for one in state.values():
        one["exp_avg_sq"] = one["exp_avg"].clone()
    for its in (state, dict(enumerate(state.values()))):  # as `rekey_optim_state_dict` makes them
        path = torch_file({"state": its, "param_groups": [{"lr": 1.0, "params": list(its)}]})
        assert "all slots but the last are lost" in str(zckpt.open(path).warnings)


def of_names(state, params: list[Any]) -> dict[str, Any]:
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": params}]}
    return {"model": {"w": torch.ones(3), "v": torch.ones(2)}, "optimizer": optimizer}


def test_state_of_what_the_model_has_not_is_kept_and_said(torch_file):
    state = {"w": {"m": torch.arange(3.0)}, "gone": {"m": torch.arange(4.0)}}
    opened = zckpt.open(torch_file(of_names(state, ["w", "v", "gone"])))
    assert torch.equal(opened.read("gone", "m"), torch.arange(4.0))
    assert opened.param_groups[0].parameters == ["w", "v", "gone"]
    assert opened.warnings == ["the optimizer has state for gone, which the model lacks; it keeps these names"]
    for to in ("consolidated", "universal", "transformers-trainer"):
        with refusing(UnsupportedError, "has state of parameters that the model lacks: found gone; give what has both"):
            zckpt.convert(opened, to, to=to)
    zckpt.consolidate(opened, "whole.pt", slots="all")
    assert torch.load("whole.optimizer.pt")["param_groups"][0]["param_names"] == ["w", "v", "gone"]


@pytest.mark.parametrize(
    ("state", "params", "words"),
    [
        ({"w": {"m": torch.ones(3)}}, ["w", 1], "list a parameter twice, or mix names and numbers"),
        ({"z": {"m": torch.ones(3)}}, ["w"], "in no group"),
    ],
)
def test_names_that_contradict(state, params, words, torch_file):
    with refusing(DamagedFileError, words):
        zckpt.open(torch_file(of_names(state, params)))


def test_other_names_than_the_files_are_refused(torch_file):
    path = torch_file(of_names({"w": {"m": torch.ones(3)}}, ["w"]))
    assert zckpt.open(path, names=["w"]).warnings == []
    with refusing(UsageError, "omit --names"):
        zckpt.open(path, names=["v"])


# --- several optimizers of a model


def muon_and_adamw(seed, *, steps=0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = body(5, 7, 3)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [{"params": [model[0].bias], "lr": 0.3}, {"params": [model[1].bias]}]
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.2)]
    for _ in range(steps):
        model(torch.ones(3, 5)).square().sum().backward()
        for one in optimizers:
            one.step()
    return model, optimizers


@pytest.mark.parametrize("key", ["optimizer", "optimizers", "optimizer_states"])
def test_a_list_of_optimizers_each_numbered_from_0(key, torch_file):
    model, optimizers = muon_and_adamw(0, steps=2)
    path = torch_file({"state_dict": model.state_dict(), key: [one.state_dict() for one in optimizers]})
    assert assert_holds(path, model, {"0": optimizers[0], "1": optimizers[1]}).warnings == []
    for source in (path, converted(path, "z", "zckpt")):
        assert_goes_on(source, model, optimizers, *muon_and_adamw(1))


def test_a_dict_of_optimizers_by_name(torch_file):
    model, [muon, adamw] = muon_and_adamw(0, steps=2)
    optimizers = {"muon": muon, "adamw": adamw}
    path = torch_file({"model": model.state_dict(), "optimizer": states(optimizers), "step": 2})
    assert_holds(path, model, optimizers)
    again, [first, second] = muon_and_adamw(1)
    assert_goes_on(path, model, optimizers, again, {"adamw": second, "muon": first})
    with refusing(UsageError, "optimizers of other names"):
        zckpt.load(path, model=again, optimizer=[first, second])


def test_optimizers_that_have_one_child_each(torch_file):
    """As Lightning keeps a GAN: shapes alone leave two readings of the third layer."""
    model, optimizers = several(generator=body(5, 4, 4, 6), discriminator=body(5, 4, 4, 4))
    root = {"state_dict": model.state_dict(), "optimizer_states": [*states(optimizers).values()], "loops": {}}
    by_number = dict(zip(("0", "1"), optimizers.values(), strict=True))
    assert assert_holds(torch_file(root), model, by_number).warnings == []


# --- several models


def gan() -> tuple[nn.ModuleDict, dict[str | None, torch.optim.Optimizer]]:
    models, optimizers = several(generator=body(5, 4, 4), discriminator=body(5, 4, 1))
    return models, {f"optimizer_{key[0]}": one for key, one in optimizers.items()}


def test_two_models_and_the_optimizer_of_each(torch_file):
    models, optimizers = gan()
    path = torch_file(states(models) | states(optimizers) | {"epoch": 4})
    opened = assert_holds(path, models, optimizers)
    assert opened.warnings == [
        "there are several models (generator, discriminator); tensor names begin with their keys"
    ]
    assert opened.metadata == {"epoch": 4}
    assert_goes_on(path, models, optimizers, *gan())


def in_parts(m: list[Any], o: list[Any]) -> dict[str, Any]:
    return {"run": {k: {"net": m[i], "opt": o[i]} for i, k in enumerate("gd")}, "epoch": 7}


DEEPER: dict[str, tuple[str, str, Callable[[list[Any], list[Any]], object]]] = {
    "a list": ("0.", "0", lambda m, o: [{"model": m[0], "optimizer": o[0]}, {"model": m[1], "optimizer": o[1]}, 7]),
    "dicts": ("models.0.", "0", lambda m, o: {"checkpoint": {"models": m, "optimizers": o}, "epoch": 7}),
    "pairs": (
        "g.",
        "opt_g",
        lambda m, o: {"agent": {"all": {"g": m[0], "d": m[1], "opt_g": o[0], "opt_d": o[1]}}, "epoch": 7},
    ),
    "a buffer": ("g.", "g", lambda m, o: {**in_parts(m, o), "replay": {"obs": {"x": torch.ones(3, 4)}}}),
    "parts": ("g.", "g", in_parts),
}


@pytest.mark.parametrize("form", DEEPER)
def test_models_and_optimizers_that_lie_deeper(form, torch_file):
    prefix, called, make = DEEPER[form]
    models, optimizers = gan()
    path = torch_file(make(*([*states(objects).values()] for objects in (models, optimizers))))
    opened = assert_holds(path, models["generator"], {called: optimizers["optimizer_g"]}, prefix)
    assert 7 in opened.metadata.values()
    assert zckpt.verify(path, deep=True).sound
    for to in ("zckpt", "dcp"):
        converted(path, to, to)
    zckpt.strip(path, "s.pt", optimizer=True)
    assert zckpt.open("s.pt").slot_names() == ["weight"]


def test_a_dict_that_lies_in_itself_is_looked_into_once(torch_file):
    model, optimizer = trained(5, 4)
    state = optimizer.state_dict() | {"seen": 3}
    root = {"run": {"last": {"net": model.state_dict(), "opt": state}}}
    root |= {f"again{at}": root for at in range(20)}
    opened = assert_holds(torch_file(root), model, optimizer)
    assert further_keys(opened.optimizer_metadata) == ["seen"]


def test_a_list_of_a_model_and_its_optimizer(torch_file):
    model, optimizer = trained(5, 4)
    path = torch_file((model.state_dict(), optimizer.state_dict(), 3))
    assert_holds(path, model, optimizer)
    assert_goes_on(path, model, optimizer, *trained(5, 4))


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("models", "optimizers"), ("models", "optims")])
def test_models_and_optimizers_that_lie_in_a_dict_or_a_list_each(keys, torch_file):
    models, optimizers = several(g=body(5, 4), d=body(5, 4))
    weights, its = states(models), states(optimizers)
    path = torch_file({keys[0]: {**weights, "count": 2}, keys[1]: its, "epoch": 4})
    opened = assert_holds(path, models, optimizers, prefix=f"{keys[0]}.")
    assert opened.metadata == {keys[0]: {"count": 2}, "epoch": 4}
    for kind in (tuple, list):
        torch_file({keys[0]: kind(weights.values()), keys[1]: kind(its.values())})
        for at, (key, model) in enumerate(models.items()):
            assert_holds(path, model, {str(at): optimizers[key]}, prefix=f"{keys[0]}.{at}.")
        assert zckpt.verify(path, deep=True).sound
    path = torch_file({"model": weights["g"], "emas": [*weights.values()]})  # these are no part of the model
    assert [*assert_holds(path, models["g"]).metadata] == ["emas"]


def test_equal_models_that_lie_with_their_optimizers(torch_file):
    models, optimizers = several(G=body(5, 4), D=body(5, 4))
    parts = {key: {"net": models[key].state_dict(), "opt": optimizers[key].state_dict()} for key in "GD"}
    path = torch_file({"G": {**parts["G"], "sched": {"last_epoch": 3}}, "D": parts["D"], "epoch": 4, "none": {}})
    for to in (None, "zckpt", "dcp"):
        if to is not None:
            path = converted(path, to, to, verify=True)
        opened = assert_holds(path, models, optimizers)
        assert opened.metadata == {"G": {"sched": {"last_epoch": 3}}, "epoch": 4, "none": {}}
        assert_goes_on(path, models, optimizers, *several(G=body(5, 4), D=body(5, 4)))
    path = torch_file({"G": parts["G"], "D": {"net": parts["D"]["net"]}})
    assert_holds(path, models["G"], {None: optimizers["G"]}, prefix="G.")  # the other's is not kept
    assert assert_holds(path, models).parameters["D.0.weight"].group is None


def test_equal_models_are_told_apart_by_their_keys_and_nothing_is_guessed(torch_file):
    models, optimizers = several(netG=body(5, 4), netD=body(5, 4))
    its = {"optD": optimizers["netD"], "optG": optimizers["netG"]}
    average = {"netG_ema": models["netG"].state_dict()}
    assert_holds(torch_file(states(models) | average | states(its)), models, its)
    its = {"one": optimizers["netG"], "two": optimizers["netD"]}
    renamed = nn.ModuleDict({"left": models["netG"], "right": models["netD"]})
    opened = zckpt.open(path := torch_file(states(renamed) | states(its)))
    assert len(opened.unnamed) == 4
    assert "one could be the optimizer of several models: left, right" in str(opened.warnings)
    names = [f"{side}.0.{kind}" for side in ("left", "right") for kind in ("weight", "bias")]
    assert_holds(zckpt.open(path, names=names), renamed, its)


def test_one_optimizer_of_an_encoder_and_a_decoder(torch_file):
    models = nn.ModuleDict({"encoder": body(5, 4), "decoder": body(4, 5)})
    optimizer = torch.optim.Adam(models.parameters())
    live.trained(nn.Sequential(*models.values()), optimizer)
    assert_holds(torch_file(states(models) | {"optimizer": optimizer.state_dict(), "epoch": 4}), models, optimizer)


def composers(*, full) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """Return what is trained, and the layout of composer 0.32 (`State.state_dict`), from its source."""
    model = nn.ModuleDict({"model": body(5, 4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    live.trained(model["model"], optimizer)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full))
    inner = {
        "model": weights, "optimizers": {"DecoupledAdamW": state}, "timestamp": {"Timestamp": {"epoch": 1, "batch": 22}}
    }  # fmt: skip
    return model, optimizer, inner


def test_what_composer_writes(torch_file):
    model, optimizer, inner = composers(full=True)
    inner |= {
        "schedulers": {"LambdaLR": {"last_epoch": 2}},
        "algorithms": [("EMA", {"smoothing": 0.9, "buffer": torch.arange(4)})],
        "run_name": "r",
    }
    rng = {"python": (3, (1, 2), None), "torch": torch.arange(8, dtype=torch.uint8)}
    path = torch_file({"state": inner, "rng": [rng]}).rename(Path("ep1-ba22-rank0.pt"))
    assert assert_holds(path, model, optimizer).step == 22
    assert zckpt.open(converted(path, "z", "zckpt")).metadata.keys() == {"state", "rng"}


def test_what_composer_writes_sharded():
    """The same dict by torch.distributed.checkpoint, in a folder `epE-baB`; of its parent the newest is read."""
    model, optimizer, inner = composers(full=False)
    run = Path("run")
    for folder in ("ep1-ba9", "ep1-ba22"):
        root = {"state": inner, "rng": [{"torch": torch.arange(8, dtype=torch.uint8)}]}
        dcp.save(root, checkpoint_id=run / folder, no_dist=True)
    opened = assert_holds(run / "ep1-ba22", model, optimizer)
    assert opened.step == 22
    assert opened.metadata.keys() == {"state.timestamp", "rng"}
    assert zckpt.open(run).source.endswith("ep1-ba22")
    link = run / "latest-rank0.pt"
    link.symlink_to("ep1-ba9")
    assert zckpt.open(run).source.endswith("ep1-ba9")
    assert zckpt.open(run, tag="ep1-ba22").source.endswith("ep1-ba22")
    link.unlink()
    link.symlink_to("ep1-ba30")
    refused(3, "inspect", run, words=("latest-rank0.pt", "names no checkpoint", "ep1-ba22"))


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
        content = {**model.state_dict(), "train_state": {"step": number}}
        dcp.save(content, checkpoint_id=tmp_path / f"step-{number}", no_dist=True)
    assert zckpt.open(tmp_path / "step-10").step == 10
    assert zckpt.open(tmp_path).step == 10
    assert zckpt.open(tmp_path, tag="step-9").step == 9
    refused(3, "inspect", tmp_path, "--tag", "step-8", words=("no such tag", "step-8"))
    assert zckpt.verify(tmp_path).sound
    (tmp_path / "step-10" / ".metadata").unlink()
    opened = zckpt.open(tmp_path)
    assert opened.step == 9
    assert "later steps are incomplete: step-10" in str(opened.warnings)
    (tmp_path / "step-9").rename(tmp_path / "ep0-ba9")
    assert zckpt.open(tmp_path).step == 9
    shutil.copytree(tmp_path / "ep0-ba9", tmp_path / "step-9")
    refused(3, "inspect", tmp_path, words=("steps of two programs", "step-9", "ep0-ba9"))


# --- and back


def test_what_lightning_keeps_besides_survives_conversions(torch_file):
    model, optimizers = muon_and_adamw(0, steps=2)
    root = {
        "epoch": 1,
        "global_step": 16,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2, "completed": 1}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5), "best_k_models": {}}
        },
        "optimizer_states": [one.state_dict() for one in optimizers],
        "lr_schedulers": [{"last_epoch": 2, "base_lrs": [0.1]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 7},
    }
    first = torch_file(root)
    assert assert_holds(first, model, {"0": optimizers[0], "1": optimizers[1]}).step == 16
    source = converted(converted(first, "zckpt", "zckpt"), "dcp", "dcp")
    assert zckpt.diff(first, source).equal
    with refusing(UnsupportedError, "holds several optimizers"):
        zckpt.convert(source, "universal", to="universal")
    assert zckpt.open(source).metadata.keys() == root.keys() - {"state_dict", "optimizer_states"}
    assert_goes_on(source, model, optimizers, *muon_and_adamw(1))


@pytest.mark.parametrize("has_more", [False, True])
def test_one_optimizer_of_two_models_may_lie_beside_single_values(has_more, torch_file):
    """As OpenNMT-py saves them."""
    models = nn.ModuleDict({"model": nn.Linear(3, 4), "generator": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam((models if has_more else models["model"]).parameters())
    live.trained(nn.Sequential(*models.values()), optimizer)
    optim = {"training_step": 7, "optimizer": optimizer.state_dict()}
    path = torch_file({**states(models), "optim": optim})
    opened = assert_holds(path, models if has_more else models["model"], optimizer)
    assert not opened.unnamed
    assert opened.metadata["optim"] == {"training_step": 7}
    for to in ("zckpt", "dcp"):
        converted(path, to, to)


@pytest.mark.parametrize("whole", [False, True])
def test_peft_trains_a_copy_of_what_it_keeps(whole, torch_file):
    model = nn.ModuleDict()
    for name in ("a", "b"):
        model[name] = nn.ModuleDict({"original_module": nn.Linear(3, 3), "modules_to_save": nn.ModuleDict()})
        model[name]["original_module"].requires_grad_(False)
        model[name]["modules_to_save"]["default"] = nn.Linear(3, 3)
    its = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.Adam(model.parameters() if whole else its.values())
    sum(one.square().sum() for one in its.values()).backward()
    optimizer.step()
    opened = zckpt.open(torch_file(live.both(model, optimizer)))
    for name, one in its.items():
        assert_state(opened, name, optimizer.state[one])
    assert not opened.unnamed


def test_a_complex_parameter_is_one_beside_an_optimizer_in_safetensors(torch_file):
    model = nn.ParameterDict({"c": nn.Parameter(torch.randn(3, dtype=torch.complex64)), "w": torch.randn(2)})
    optimizer = torch.optim.Adam(model.parameters())
    sum(one.abs().square().sum() for one in model.values()).backward()
    optimizer.step()
    converted(torch_file(live.both(model, optimizer)), "whole", "consolidated")


@pytest.mark.parametrize("to", ["zckpt", "dcp"])
def test_numbers_that_stay_are_not_the_parameters_that_are_called_so(to, torch_file):
    def made() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        model = nn.ParameterList(torch.randn(3) for _ in range(4))
        return model, torch.optim.Adam([{"params": [model[2], model[0]]}, {"params": [model[3], model[1]]}])

    model, optimizer = made()
    sum((one**3).sum() for one in model).backward()
    optimizer.step()
    source = torch_file(live.both(model, optimizer))
    assert len(zckpt.open(source).unnamed) == 4
    other, its = made()
    zckpt.load(converted(source, to, to), model=other, optimizer=its)
    for mine, loaded in zip(model, other, strict=True):
        assert torch.equal(its.state[loaded]["exp_avg"], optimizer.state[mine]["exp_avg"])


def test_a_value_among_a_models_tensors_and_a_defaultdict_of_state_hide_neither(torch_file):
    model, optimizer = trained(3, 4)
    its = optimizer.state_dict()
    its["state"] = defaultdict(dict, its["state"])
    path = torch_file({"model": {**model.state_dict(), "epoch": 3}, "optimizer": its})
    assert assert_holds(path, model, optimizer).metadata == {"model": {"epoch": 3}}
    converted(path, "dcp", "dcp")


class Projector:
    """In the place of GaLore's, of which each parameter of a group with a rank has one."""

    def __init__(self, matrix):
        self.ortho_matrix = matrix


def test_moments_of_a_projected_gradient_take_names(torch_file):
    """As GaLore 1.0 and APOLLO 1.0 save them: those of the group with a `rank`."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False))
    of = {0: (8, 8), 1: (8, 4), 2: (4, 6)}
    state = {n: {"step": 1, "exp_avg": torch.rand(size), "exp_avg_sq": torch.rand(size)} for n, size in of.items()}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "rank": 4, "params": [1, 2]}]
    path = torch_file({"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}})
    names = ["1.weight", "0.weight", "2.weight"]
    found = zckpt.open(path, names=names)
    zckpt.convert(path, "own", to="zckpt", names=names)
    for one in (found, zckpt.open("own")):
        for number, name in enumerate(names):
            assert torch.equal(one.read(name, "exp_avg"), state[number]["exp_avg"])
    assert torch.equal(zckpt.open(path).read("2.weight", "exp_avg"), state[2]["exp_avg"])  # the order alone tells
    with refusing(UsageError, "is not"):
        zckpt.open(path, names=names[::-1])


def test_an_object_in_an_optimizers_state_is_refused_as_that():
    model, optimizer = live.trained(nn.Linear(6, 8, bias=False))
    optimizer.state[model.weight]["projector"] = Projector(torch.ones(6, 4))
    path = live.save_both(model, optimizer, "c.pt")
    with refusing(UnsupportedError, "projector of weight is an object that only a pickle can make"):
        zckpt.load(path, model=model, optimizer=optimizer)


def test_a_param_groups_dict_by_parameter_is_no_part_of_dcp():
    """GrokAdamW 0.1 keeps its state so, which torch's DCP would put under a text of the whole tensor."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["state"] = {model.weight: {"exp_avg": torch.ones(2, 3)}}
    path = live.save_both(model, optimizer, "c.pt")
    with refusing(UnsupportedError, "state, which the optimizer keeps of a param group, has keys that are no texts"):
        zckpt.convert(path, "dcp", to="dcp")
    zckpt.convert(path, "own", to="zckpt")


@pytest.mark.parametrize(("to", "options"), [
    ("fsdp-rank-files", {"world_size": 2}), ("torch-checkpointing", {"keys": "flat"}), ("universal", {}),
    ("zero-redundancy", {"world_size": 2}), ("deepspeed", {"world_size": 2, "stage": 1}),
    ("deepspeed", {"world_size": 2, "stage": 3}), ("dcp", {"world_size": 3}),
])  # fmt: skip
def test_tensors_among_hyperparameters_go_through_other_formats(to, options, torch_file):
    model = body(5, 3, 2)
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    optimizer.param_groups[0]["drift"] = torch.arange(3)
    live.trained(model, optimizer, steps=2)
    zckpt.convert(torch_file(live.both(model, optimizer, step=2)), "other", to=to, **options)
    zckpt.convert("other", "back", to="consolidated")
    [group] = torch.load("back/optimizer.pt", weights_only=False)["param_groups"]
    assert (group["lr"], group["betas"]) == (0.1, betas)
    assert group["drift"].equal(torch.arange(3))


def test_lists_of_tensors_that_several_ranks_saved_are_equal_to_one_files(torch_file):
    model = body(5, 3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    live.trained(model, optimizer, steps=2)
    for state in optimizer.state.values():
        state["factors"] = [torch.eye(2), {"left": torch.ones(3)}]
    path = torch_file(live.both(model, optimizer, step=2))
    assert zckpt.fingerprint(path).text == zckpt.fingerprint(converted(path, "dcp", "dcp", world_size=5)).text


def test_each_of_several_models_has_its_own_bare_names(torch_file):
    """As GANs save networks in DDP, and DINO its student beside the teacher and the loss."""
    (one, optimizer), other = trained(3, 2), body(3, 2)
    wrapped = {f"module.{name}": value for name, value in one.state_dict().items()}
    path = torch_file({"G": wrapped, "D": other.state_dict(), "optimizer": optimizer.state_dict()})
    for model, prefix in ((one, "G."), (other, "D.")):  # the optimizer could be of either
        found = assert_holds(path, model, prefix=prefix)
    assert set(found.parameters) == {"G.0.weight", "G.0.bias", "D.0.weight", "D.0.bias"}
    zckpt.strip(path, "s.pt", optimizer=True)
    assert torch.load("s.pt")["G"].keys() == wrapped.keys()


def networks() -> tuple[nn.ModuleDict, dict[str | None, torch.optim.Optimizer]]:
    return several(G=nn.Linear(3, 2), D=nn.Linear(3, 1))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("form", ["apart", "together"])
def test_models_in_dicts_are_read_whatever_average_is_beside_them(form, average, torch_file):
    models, optimizers = networks()
    weights, its = states(models), states(optimizers)
    content = {
        "apart": {"nets": weights, "optims": its, "rng": {"cpu": torch.get_rng_state()}},
        "together": {key: {"model": weights[key], "optimizer": its[key]} for key in models},
    }[form]
    path = torch_file({**content, **({"ema": weights["G"]} if average else {})})
    front = "nets." if form == "apart" else ""
    for source in (path, *(converted(path, to, to) for to in ("zckpt", "dcp"))):
        assert_holds(source, models, optimizers, prefix=front)
    assert zckpt.verify(path, deep=True).sound
    with refusing(UsageError, f"give one module.* that has all models in it: {front}G, {front}D"):
        zckpt.load(path, model=nn.Linear(3, 2))
    if not (average and front):  # where the average is one of the models
        again, others = networks()
        assert_goes_on(path, models, optimizers, nn.ModuleDict({"nets": again}) if front else again, others)


@pytest.mark.parametrize("more", [{}, {"trainer": {"rng": {"cpu": torch.arange(9)}}}], ids=["alone", "beside"])
def test_a_model_that_is_carried_is_told_and_no_part_of_the_model_in_dcp(more, torch_file):
    models, optimizers = networks()
    weights, its = states(models), states(optimizers)
    critic = {"net": weights["D"], "optimizer": its["D"]}
    path = torch_file({"model": weights["G"], "optimizer": its["G"], "critic": critic, **more})
    found = assert_holds(path, models["G"], optimizers["G"])
    assert set(found.parameters) == {"weight", "bias"}
    assert found.warnings == ["more models or optimizers are carried as they are, and not read: critic"]
    again, others = networks()
    assert_goes_on(converted(path, "dcp", "dcp"), models["G"], optimizers["G"], again["G"], others["G"])


@pytest.mark.parametrize(
    ("key", "is_dcp"), each(["fp32_from_fp16_params", "fp32_from_fp16", "fp32_groups"], [False, True])
)
def test_masters_beside_an_optimizer_are_its_parameters(key, is_dcp, tmp_path):
    """Of Megatron's and Apex's optimizers of 16 bits. Where shapes leave a choice, masters tell which is which."""
    path, model, masters, optimizer = mixed(tmp_path, key, is_dcp=is_dcp)
    opened = assert_holds(path, model)
    for name, master in zip(opened.parameters, masters, strict=True):
        assert torch.equal(opened.read(name, "master"), master)
        assert_state(opened, name, optimizer.state[master])
    assert not opened.unnamed
    assert key not in str(list(opened.metadata))
    assert zckpt.verify(path).sound
    converted(path, tmp_path / "again", "dcp", verify=True)
    zckpt.strip(path, tmp_path / "kept", keep_slots=["exp_avg"])
    assert torch.equal(zckpt.open(tmp_path / "kept").read("0.weight", "master"), masters[0])
    zckpt.strip(path, tmp_path / "small", optimizer=True)
    slots = {*zckpt.open(tmp_path / "small").slot_names()}
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


def mixed(tmp_path, key, *, is_dcp, lacks="") -> tuple[Path, nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
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
def test_an_optimizer_that_holds_another_may_have_damaged_groups(params, torch_file):
    inner = {"state": {}, "param_groups": [{"params": [0]}]}
    damaged = {"state": {}, "param_groups": [{"params": params}], "inner": inner}
    with refusing(DamagedFileError, "unreadable param group"):
        zckpt.open(torch_file({"model": {"w": torch.ones(3)}, "optimizer": damaged}))


@pytest.mark.parametrize("fsdp", [None, "full", "sharded"])
def test_a_parameter_that_two_models_share_is_in_the_files_of_both(fsdp, torch_file):
    """As an actor and a critic share an encoder: Accelerate saves each model by itself."""
    actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    critic.weight = actor.weight
    path = torch_file(states({"actor": actor, "critic": critic}) | {"step": 1})
    out = converted(path, "out", "accelerate", fsdp=fsdp, verify=True)
    assert zckpt.open(out).parameters["critic.weight"].tied_to == "actor.weight"
    (out / "zckpt.pt").unlink()
    apart = zckpt.open(out)
    weights = [name for name in apart.parameters if name.endswith("weight")]
    assert len(weights) == 2
    assert all(torch.equal(apart.read(name), actor.weight) for name in weights)
