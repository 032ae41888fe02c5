"""Tensors of a state dict that are not dense are the model's: nothing is written without them unless that is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import copy, edit, optimizer_file
from tests.refusals import refusing

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's: its own kinds of tensors are beta, or to go

PLAIN = {"a.weight": torch.randn(3, 3), "b.weight": torch.randn(3, 3)}
EYE = torch.eye(4)


def odd(kind) -> object:
    quantised = torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8)
    made = {
        "sparse": EYE.to_sparse(),
        "compressed": EYE.to_sparse_csr(),
        "parameter": torch.nn.Parameter(EYE.to_sparse()),
        "quantised": quantised,
        "packed": (quantised, None),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, 3, device="meta"),
    }
    return made[kind]


KINDS = ["sparse", "compressed", "parameter", "quantised", "packed", "nested", "meta"]


@pytest.mark.parametrize("form", ["flat", "model", "with optimizer"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_nothing_is_written_without_it(kind, form, tmp_path):
    source, target = tmp_path / "x.pt", tmp_path / "m.safetensors"
    state = {**PLAIN, "odd_one": odd(kind)}
    parameters = [torch.nn.Parameter(one) for one in PLAIN.values()]
    optimizer = torch.optim.SGD(parameters, momentum=0.9).state_dict()
    torch.save(
        state if form == "flat" else {"model": state, **({"optimizer": optimizer} if "opt" in form else {})}, source
    )
    with refusing(zckpt.LeftOutError, r"odd_one.*which zckpt does not write densely") as caught:
        zckpt.consolidate(source, target)
    with refusing(zckpt.LeftOutError, "odd_one"):
        zckpt.convert(source, tmp_path / "own", to="zckpt")
    assert not zckpt.verify(source).sound
    assert [one.name for one in tmp_path.iterdir()] == ["x.pt"]
    assert zckpt.consolidate(source, target, drop=caught.value.names).num_tensors == 2


def test_a_dict_beside_a_model_is_none_of_its_tensors(torch_file):
    path = torch_file({"model": PLAIN, "mask": EYE.to_sparse(), "epoch": 3})
    assert zckpt.consolidate(path, "m.safetensors").num_tensors == 2
    assert "mask" in zckpt.open(path).metadata


def test_no_state_of_an_optimizer_stands_for_a_weight(torch_file):
    state, groups = {0: {"weight": EYE, "exp_avg": EYE}}, [{"params": [0], "lr": 0.1}]
    path = torch_file({"model": {"a": EYE}, "optimizer": {"state": state, "param_groups": groups}})
    with refusing(zckpt.UnsupportedError, "a slot is named 'weight', which has another meaning"):
        zckpt.open(path)

    def spoil(content) -> None:
        for its in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            its["master"] = its["exp_avg"]

    edit(optimizer_file(run := copy("s2_bf16_dp2"), 1), spoil)
    with refusing(zckpt.UnsupportedError, "a slot is named 'master'"):
        zckpt.open(run)
    zckpt.consolidate(FIXTURES / "s2_bf16_dp2", "model", slots=["all"])
    save_file({**load_file(file := Path("model/optimizer.safetensors")), "weight/fc1.weight": EYE}, file,
              safe_open(file, "pt").metadata())  # fmt: skip
    with refusing(zckpt.DamagedFileError, "weight/fc1.weight is no slot of an optimizer"):
        zckpt.open("model")


@pytest.mark.parametrize("kind", ["sparse", "quantised"])
def test_one_in_deepspeeds_model_file_is_named(kind):
    shutil.copytree(FIXTURES / "s2_bf16_dp2", "run")
    for path in Path("run").glob("*/*model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["module"]["odd_one"] = odd(kind)
        torch.save(content, path)
    with refusing(zckpt.LeftOutError, "odd_one"):
        zckpt.consolidate("run", "m.safetensors")


@pytest.mark.parametrize("kind", ["sparse", "quantised"])
def test_one_in_a_models_directory_is_named(kind):
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    torch.save({**PLAIN, "odd_one": odd(kind)}, "model/pytorch_model.bin")
    with refusing(zckpt.LeftOutError, "odd_one"):
        zckpt.consolidate("model", "m.safetensors")
