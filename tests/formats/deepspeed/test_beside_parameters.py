"""What a model file holds beside parameters and buffers, ties that no list names, and tags of several levels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import content_of, run_of
from tests.formats.deepspeed.shards import MODEL_FILES, copy, edit, edit_all, model_file
from tests.pairwise import each
from tests.refusals import refusing

QUANTISED = "frozen_lin.weight"
BESIDE = {
    f"{QUANTISED}.absmax": torch.arange(4, dtype=torch.uint8),
    f"{QUANTISED}.quant_map": torch.linspace(-1, 1, 16),
    f"{QUANTISED}.quant_state.bitsandbytes__nf4": torch.arange(165, dtype=torch.uint8),
}


def quantised(name) -> Path:
    """A copy with what bitsandbytes' 4-bit layers put beside a frozen weight: in every rank's file, in no list."""

    def add(content):
        module = content["module"]
        before = list(module)[: list(module).index(QUANTISED)]
        values = {**module, **BESIDE}
        order = dict.fromkeys([*before, QUANTISED, *BESIDE, *module])
        module.clear()
        module.update((name, values[name]) for name in order)
        module["conv._extra_state"] = None
        module["ln1._extra_state"] = {"scale": torch.arange(3.0), "steps": 5}

    tag = copy(name)
    edit_all(tag, add, MODEL_FILES)
    return tag


def assert_has_quantisation(source):
    found = zckpt.open(source)
    assert found.warnings == []
    assert QUANTISED in found.parameters
    for name, value in BESIDE.items():
        assert name in found.buffers, name
        assert torch.equal(found.read(name, "weight"), value), name
    for path in source.glob(MODEL_FILES):
        module = torch.load(path, weights_only=False)["module"]
        assert module["conv._extra_state"] is None
        assert module["ln1._extra_state"]["scale"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("name", "stage"), each(["s1_bf16_dp2", "s2_bf16_dp2", "s3_bf16_dp3"], [3, 1, 2]))
def test_quantisation_of_frozen_weights_goes_along(name, stage):
    tag = quantised(name)
    assert_has_quantisation(tag)
    assert zckpt.verify(tag, deep=True).sound
    zckpt.reshard(tag, "cut", world_size=4, stage=stage, verify=True)
    assert_has_quantisation(Path("cut"))
    for path in Path("cut").glob(MODEL_FILES):
        content = content_of(path)
        assert set(BESIDE) <= set(content["module"])
        assert not set(BESIDE) & set(content["frozen_param_shapes"] or {})
    zckpt.consolidate("cut", "model.safetensors")
    consolidated = zckpt.open("model.safetensors")
    for key, value in BESIDE.items():
        assert torch.equal(consolidated.read(key, "weight"), value), key


def test_differing_copies_of_quantisation_are_found():
    tag = quantised("s3_bf16_dp3")
    edit(model_file(tag, 2), lambda content: content["module"][f"{QUANTISED}.absmax"].add_(1))
    findings = zckpt.verify(tag, deep=True).findings
    assert f"{QUANTISED}.absmax" in {name for one in findings for name in one.parameters}


@pytest.mark.parametrize("to", ["zckpt", "dcp", "universal"])
def test_quantisation_is_converted(to):
    zckpt.convert(quantised("s3_bf16_dp3"), "out", to=to)
    zckpt.convert("out", "back", to="deepspeed", world_size=2, stage=3)
    assert_has_quantisation(Path("back"))


def test_model_without_its_optimizer_has_parameters_all_the_same():
    """Then no group says what is trained, and what no list of frozen ones has may well be."""
    tag = quantised("s2_bf16_dp2")
    zckpt.strip(tag, "out", optimizer=True)
    found = zckpt.open("out")
    assert found.parameters.keys() == zckpt.open(tag).parameters.keys()
    assert found.buffers.keys() == zckpt.open(tag).buffers.keys()


def test_codes_of_a_frozen_weight_are_not_cast():
    """The universal form has fp32.pt of each parameter; that of codes holds them as they are."""
    tag = copy("s2_bf16_dp2")
    codes = torch.arange(11, dtype=torch.uint8)

    def quantise(content):
        content["module"]["frozen_odd"] = content["frozen_param_fragments"]["frozen_odd"] = codes

    edit(model_file(tag), quantise)
    zckpt.convert(tag, "out", to="universal", verify=True)
    found = zckpt.open("out")
    assert torch.equal(found.read("frozen_odd", "weight"), codes)
    assert zckpt.fingerprint("out").text == zckpt.fingerprint(tag).text


@pytest.mark.parametrize("name", ["s1_fp32_dp2", "s2_fp32_dp2"])
def test_a_buffer_under_a_second_name_that_no_list_has_is_a_buffer(name):
    """DeepSpeed lists one name of a buffer that a module has under two; under ZeRO-3 its module would be empty."""
    tag = copy(name)

    def change(content):
        none = torch.empty(0, 2)
        content["module"].update(again=content["module"]["pos"], none=none, nothing=none)
        content["buffer_names"].append("none")

    edit(model_file(tag), change)
    assert {"again", "nothing"} <= zckpt.open(tag).buffers.keys()
    zckpt.reshard(tag, "kept", world_size=3)
    for source in (tag, "kept"):
        zckpt.convert(source, "cut", to="deepspeed", world_size=2, stage=3, verify=True, overwrite=True)
        for path in Path("cut").rglob(MODEL_FILES):
            module = torch.load(path, weights_only=False)["module"]
            assert torch.equal(module["again"], module["pos"])
            assert module["nothing"].shape == (0, 2)


@pytest.mark.parametrize("name", ["s1_bf16_dp2", "s2_bf16_dp2"])
def test_tied_parameters_that_no_list_names_are_tied_by_their_storage(name):
    """DeepSpeed's own writer in Python leaves the list empty."""
    tag = copy(name)
    edit(model_file(tag), lambda content: content.update(shared_params={}))
    found = zckpt.open(tag)
    assert found.parameters["head.weight"].tied_to == "emb.weight"
    assert found.parameters.keys() == zckpt.open(run_of(name)).parameters.keys()
    zckpt.reshard(tag, "cut", world_size=3, stage=3)
    assert zckpt.open("cut").parameters["head.weight"].tied_to == "emb.weight"


@pytest.mark.parametrize(
    ("name", "owner"), each(["s1_bf16_dp2", "s2_bf16_dp2", "s3_bf16_dp2"], ["prime", "frozen_odd"])
)
def test_second_name_in_a_module_is_tied_though_the_list_has_other_ties_alone(owner, name):
    """DeepSpeed lists no two names that one module has for a parameter, nor those of a module under two names."""
    tag = copy(name)
    for path in tag.glob("*model_states.pt"):
        edit(path, lambda content: content["module"].update(again=content["module"][owner]))
    assert zckpt.open(tag).parameters["again"].tied_to == owner
    for stage in (1, 3):
        zckpt.reshard(tag, f"cut{stage}", world_size=3, stage=stage)
        found = zckpt.open(f"cut{stage}").parameters
        assert (found["again"].tied_to, found["head.weight"].tied_to) == (owner, "emb.weight")


def test_name_whose_storage_several_parameters_have_under_zero3_is_no_alias():
    tag = copy("s3_bf16_dp2")
    empty = torch.empty(0)
    edit(model_file(tag, 0), lambda content: content["module"].update(again=empty, prime=empty, frozen_odd=empty))
    assert any("the values of again" in warning for warning in zckpt.open(tag).warnings)


def test_name_without_elements_that_no_list_has_stays_under_zero3():
    """So ZeRO-3 files the second name that one module has for a parameter, and DeepSpeed looks for it."""
    tag = copy("s3_bf16_dp2")
    edit_all(tag, lambda content: content["module"].update(again=torch.empty(0)), MODEL_FILES)
    assert any("the values of again" in warning for warning in zckpt.open(tag).warnings)
    zckpt.reshard(tag, "cut", world_size=3, verify=True)
    for path in Path("cut").rglob(MODEL_FILES):
        assert list(content_of(path)["module"]) == list(content_of(model_file(tag, 0))["module"])


def test_alias_of_a_parameter_that_was_not_saved_has_its_own_weight():
    tag = copy("s2_bf16_dp2")

    def change(content):
        content["module"]["alias"] = content["module"].pop("frozen_odd").clone()
        content["shared_params"]["alias"] = "frozen_odd"
        content["frozen_param_shapes"] = content["frozen_param_fragments"] = None

    edit(model_file(tag), change)
    found = zckpt.open(tag)
    assert found.parameters["alias"].frozen
    assert torch.equal(found.read("alias", "weight"), zckpt.open(run_of("s2_bf16_dp2")).read("frozen_odd", "weight"))


def in_levels() -> Path:
    """A run whose tag has slashes and a blank."""
    run = Path("run")
    shutil.copytree(copy("s2_bf16_dp2"), run / "runs/a/step 5")
    (run / "latest").write_text("runs/a/step 5\n")
    return run


def test_tag_may_have_slashes():
    run = in_levels()
    found = zckpt.open(run)
    assert found.details["tag"] == "runs/a/step 5"
    assert zckpt.open(run, tag="runs/a/step 5").details["tag"] == "runs/a/step 5"
    zckpt.reshard(run, "cut", world_size=3)
    assert Path("cut/latest").read_text() == "runs/a/step 5"
    assert Path("cut/runs/a/step 5/mp_rank_00_model_states.pt").is_file()
    assert zckpt.fingerprint("cut").text == zckpt.fingerprint(run).text
    zckpt.strip(run, "stripped", padding=True)
    assert zckpt.fingerprint("stripped").text == zckpt.fingerprint(run).text


@pytest.mark.parametrize("name", ["../run/runs/a/step 5", "/etc", "runs//a", "runs/./a", "runs/a/"])
def test_latest_does_not_lead_out_of_the_run(name):
    run = in_levels()
    (run / "latest").write_text(name)
    with refusing(zckpt.UnknownFormatError, "names no checkpoint"):
        zckpt.open(run)


def test_tag_of_the_user_leads_no_target_out_of_its_directory():
    run = in_levels()
    zckpt.reshard(run / "runs", "cut", world_size=3, tag="../runs/a/step 5")
    assert Path("cut/latest").read_text() == "step 5"
