"""What the elastic form does not hold, from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt
from tests.formats.deepspeed.contents import run_of
from tests.formats.deepspeed.shards import copy, edit, model_file
from tests.refusals import refusing
from tests.truth import Truth

ELASTIC, RIGID = "s2_bf16_dp2_elastic", "s2_bf16_dp2"


@pytest.fixture
def given() -> Path:
    file = Path("groups.json")
    file.write_text(json.dumps(Truth(run_of(ELASTIC)).facts["param_groups"]))
    return file


@pytest.mark.parametrize("options", [{"elastic": False}, {"stage": 3}])
def test_they_are_those_of_the_groups(given, options):
    zckpt.reshard(run_of(ELASTIC), "cut", world_size=3, hyperparameters=str(given), verify=True, **options)
    expected = [group.hyperparameters for group in zckpt.open(run_of(RIGID)).param_groups]
    assert [group.hyperparameters for group in zckpt.open("cut").param_groups] == expected
    assert zckpt.fingerprint("cut").text == zckpt.fingerprint(run_of(ELASTIC)).text


@pytest.mark.parametrize("content", ["[]", "[{}, {}, {}]", '{"lr": 1}', "[1, 2, 3]", "not a JSON document"])
def test_files_that_are_none(content, given):
    given.write_text(content)
    with pytest.raises(zckpt.UsageError) as error:
        zckpt.reshard(run_of(ELASTIC), "cut", world_size=3, elastic=False, hyperparameters=str(given))
    assert str(given) in str(error.value)


@pytest.mark.parametrize(("name", "options"), [(RIGID, {}), (RIGID, {"stage": 3}), (ELASTIC, {}), ("s0_bf16_dp2", {})])
def test_what_has_no_need_of_them_refuses_them(name, options, given):
    with refusing(zckpt.ZckptError, "hyperparameters"):
        zckpt.reshard(run_of(name), "cut", world_size=3, hyperparameters=str(given), **options)


def test_without_them_the_message_says_how():
    with refusing(zckpt.UnsupportedError, "--hyperparameters FILE"):
        zckpt.reshard(run_of(ELASTIC), "cut", world_size=3, elastic=False)


def test_those_of_the_configuration_are_told_and_not_taken():
    """DeepSpeed uses an optimizer that it is handed instead, and its param groups have values of their own."""
    tag, optimizer = copy(ELASTIC), {"type": "AdamW", "params": {"lr": 0.125, "betas": [0.9, 0.5]}}
    edit(model_file(tag), lambda content: content["ds_config"].update(optimizer=optimizer))
    with refusing(zckpt.UnsupportedError, r"only ds_config's.*0\.125.*--hyperparameters FILE"):
        zckpt.reshard(tag, "cut", world_size=3, elastic=False)


def test_a_pipeline_that_becomes_one_model_takes_them_too():
    source, elastic, file = run_of("pp2_s1_fp32_dp2"), "elastic", Path("groups.json")
    zckpt.reshard(source, elastic, world_size=2, elastic=True)
    file.write_text(json.dumps(Truth(source).facts["param_groups"]))
    named = zckpt.open(source)
    rename = [(one.name, f"model.{one.name.replace('tied_modules.', 'tied_')}") for one in named.tensors()]
    how = {"world_size": 2, "rename": rename, "pipeline_parallel_size": 1}
    zckpt.reshard(elastic, "one", elastic=False, hyperparameters=str(file), **how)
    expected = [group.hyperparameters for group in named.param_groups]
    assert [group.hyperparameters for group in zckpt.open("one").param_groups] == expected
    with refusing(zckpt.UsageError, "expected --rigid"):
        zckpt.reshard(elastic, "x", hyperparameters=str(file), **how)
    with refusing(zckpt.UnsupportedError, "--hyperparameters FILE and --rigid"):
        zckpt.reshard(elastic, "x", **how)
