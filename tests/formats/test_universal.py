"""Universal checkpoints: what DeepSpeed's converter wrote is read bit for bit, and what is written comes back whole."""

from __future__ import annotations

import dataclasses
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import edit
from tests.folders import contents
from tests.formats.deepspeed.shards import MODEL_FILES, edit_all
from tests.live import both, trained
from tests.logical import assert_same_state
from tests.pairwise import some
from tests.plans import write_directory
from tests.refusals import refusing
from tests.truth import Truth, assert_same, assert_state, bits
from zckpt.engine.plan import plan
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnknownFormatError, UnsupportedError
from zckpt.formats.universal import directory as universal_directory
from zckpt.formats.universal import writer
from zckpt.formats.universal.directory import find
from zckpt.state import Checkpoint, Parameter, ParamGroup, Scalar
from zckpt.torchfile import read_torchfile

SAMPLES = FIXTURES / "universal"
MODEL = "mp_rank_00_model_states.pt"
WITH_TRUTH = ["hf_llama_s2_bf16_dp2", "moe_ep1_s2_bf16_dp2", "s1_fp32_dp3", "s2_bf16_dp4", "s3_bf16_dp2"]
WITHOUT_TRUTH = ["s1_bf16_dp4_bf16opt_notiny", "s2_bf16_dp2_empty"]

WRITTEN = [
    "moe_ep2_s2_fp32_dp4", "pp2_tp2_s1_bf16_dp1", "s0_bf16_dp2", "s1_bf16_dp2_bf16opt", "s2_bf16_dp2_client",
    "s2_bf16_dp2_zerodim", "s3_bf16_dp2_subgroup", "tp2_s3_bf16_dp2", "universal/s2_bf16_dp4",
]  # fmt: skip
"""In every run: those of each kind. `tests/operations/test_convert.py` sends more through this format."""
OTHERS = [
    "ds0145_s2_bf16_dp2_elastic_fused", "ds0145_s3_bf16_dp2", "hf_gpt2_s1_fp32_dp2", "pp2_s1_fp32_dp2",
    "s1_bf16_dp2_empty", "s1_bf16_dp3_fused", "s1_fp32_dp3_palign", "s1_fp32_dp4_sgdm", "s2_bf16_dp2_adagrad1g",
    "s2_bf16_dp2_bf16master", "s2_bf16_dp2_cpuadam", "s2_bf16_dp2_elastic", "s2_bf16_dp2_frozengroup",
    "s2_bf16_dp2_rr", "s2_bf16_dp2_lion", "s2_bf16_dp2_ucinfo", "s2_bf16_dp2_untied", "s2_fp16_dp2",
    "s3_bf16_dp2_fused", "s3_bf16_dp2_nofrozen", "s3_bf16_dp2_sgdm", "s3_bf16_dp4", "s3_fp32_dp2", "tp2_s2_fp32_dp2",
    "universal/s3_bf16_dp2",
]  # fmt: skip


def written(checkpoint, directory) -> Path:
    write_directory(plan(writer.lay_out(checkpoint)[0]), directory)
    return Path(directory)


def written_of(name, directory) -> Path:
    """What is written of a fixture."""
    return written(zckpt.open(FIXTURES / name), directory)


def assert_comes_back(checkpoint, directory) -> Path:
    target = written(checkpoint, directory)
    assert_same_state(zckpt.open(target), checkpoint)
    return target


def load(path):
    pytest.importorskip("deepspeed", reason="classes of DeepSpeed are in the file")
    return torch.load(path, weights_only=False)


# --- read: DeepSpeed's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_TRUTH)
def test_what_deepspeed_converted_is_read_bit_for_bit(name):
    found, truth = zckpt.open(SAMPLES / name), Truth(FIXTURES / name)
    for parameter, value in truth.weights.items():
        if parameter not in truth.buffers and "weight" in found.owner(parameter).slots:
            assert_same(found.read(parameter, "weight"), value, parameter)
    assert_state(found, truth)
    for buffer, value in truth.buffers.items():
        assert torch.equal(bits(found.read(buffer)), value)
    assert {*truth.masters} == {*found.grouped}
    assert set(found.buffers) == set(truth.buffers)
    assert {p.name for p in found.parameters.values() if p.frozen} == set(truth.frozen)
    assert found.aliases == truth.tied
    facts = truth.facts
    assert [group.parameters for group in found.param_groups] == facts["order"]
    for group, its, scalars in zip(
        found.param_groups, facts["param_groups"], facts["scalar_state_per_group"], strict=True
    ):
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in group.hyperparameters.items()}
        assert values == its
        assert group.state == {"step": Scalar(scalars["step"]["value"], "float32")}
    assert found.step == facts["global_steps"]
    assert found.zero_stage == facts["spec"]["stage"]
    assert found.world_size == facts["dp_world_size"]
    assert found.loss_scale == facts["loss_scale"]
    assert found.metadata["global_samples"] == 60


@pytest.mark.parametrize("name", [*WITHOUT_TRUTH, *WITH_TRUTH])
@pytest.mark.every(2)
def test_files_are_read_as_torch_loads_them(name):
    found = zckpt.open(SAMPLES / name)
    for group in found.param_groups:
        for parameter in group.parameters:
            files = {p.stem: load(p) for p in (SAMPLES / name / "zero" / parameter).glob("*.pt")}
            slots = {"master" if stem == "fp32" else stem for stem in files if stem != "step"}
            assert set(found.parameters[parameter].slots) - {"weight"} == slots
            for stem, content in files.items():
                tensor = content["param"] if isinstance(content, dict) else content
                if stem == "step":
                    assert group.state["step"].value == tensor
                else:
                    mine = found.read(parameter, "master" if stem == "fp32" else stem)
                    assert torch.equal(bits(mine), bits(tensor))


def test_names_that_are_given_are_not_used_and_that_is_said():
    found = zckpt.open(SAMPLES / "s1_fp32_dp3", names=["a", "b"])
    assert found.warnings[-1] == "--names is ignored: the directory has the names of the parameters"


def test_empty_parameters_are_not_taken_for_each_other():
    parameters = zckpt.open(SAMPLES / "s2_bf16_dp2_empty").parameters
    assert parameters["empty"].shape == (0, 8)
    assert parameters["empty_frozen"].shape == (3, 0)
    assert parameters["empty_frozen"].tied_to is None


# --- write, and read again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(WRITTEN, OTHERS))
@pytest.mark.every(5)
def test_nothing_is_lost(name):
    checkpoint = zckpt.open(FIXTURES / name)
    target = assert_comes_back(checkpoint, "u")
    assert_same_state(zckpt.open(written(zckpt.open(target), "again")), checkpoint)


@pytest.mark.parametrize("name", ["plain_adamw", "plain_bf16"])
def test_a_run_that_is_not_deepspeeds_is_written(name):
    folder = FIXTURES / "other" / name
    checkpoint = zckpt.open(folder / "ckpt.pt", names=list(Truth(folder).numbers.values()))
    target = assert_comes_back(checkpoint, "u")
    model = torch.load(target / MODEL, weights_only=True)
    assert model["universal_checkpoint_info"] == {"universal_checkpoint_version": 0.2}
    assert model["global_steps"] == 5
    assert {"epoch", "step", "lr_scheduler", "skipped_steps", "dp_world_size", "mp_world_size"} <= set(model)
    found = zckpt.open(target).metadata
    assert set(found) == {"epoch", "step"}


@pytest.mark.parametrize("name", ["s2_bf16_dp2_client", "s3_bf16_dp2", "s2_bf16_dp2_sgdm"])
def test_what_each_loader_of_deepspeed_looks_for_is_there(name):
    checkpoint = zckpt.open(FIXTURES / name)
    target = written(checkpoint, "u")
    for file in (MODEL, "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = load(target / file)
        assert model["mp_world_size"] == 1
        assert model["dp_world_size"] == 2
        assert model["global_steps"] == 5
        assert model["universal_checkpoint_info"]["universal_checkpoint_version"] == 0.2
        assert (model["lr_scheduler"] is None) == ("client" not in name)
    content = load(target / "zero/optimizer_state.pt")
    assert content["ds_version"] == "0.19.8"
    assert content["loss_scaler"].cur_scale == 1.0
    lrs = [group.hyperparameters["lr"] for group in checkpoint.param_groups]
    assert [group["lr"] for group in content["param_groups"]] == lrs
    if name == "s2_bf16_dp2_sgdm":
        assert "optimizer_state_dict" not in content
        return
    nested = content["optimizer_state_dict"]
    assert nested["state"][0]["step"] == torch.tensor(5.0)
    (shared,) = nested["param_groups"]
    assert shared["betas"] == (0.9, 0.95)
    assert ("lr" in shared) == (len(set(lrs)) == 1)
    assert "weight_decay" not in shared


def test_the_model_file_holds_the_whole_model():
    for name in ("s2_bf16_dp4", "s3_bf16_dp2"):
        target = written_of(name, name)
        module = load(target / MODEL)["module"]
        truth = load_file(FIXTURES / name / "truth.safetensors")
        for key in module:
            wanted = truth.get(f"module/{key}", truth.get(f"buffer/{key}"))
            wanted = truth["module/emb.weight"] if key == "head.weight" else wanted
            assert torch.equal(bits(module[key]), bits(wanted)), key
        assert module["head.weight"].data_ptr() == module["emb.weight"].data_ptr()
        empty = load(target / "zero_pp_rank_0_mp_rank_00_model_states.pt")["module"]
        assert empty["emb.weight"].shape == (0,)
        assert list(empty) == list(module)


def test_zero_dimensional_parameters_are_written_with_one_dimension():
    target = written_of("s2_bf16_dp2_zerodim", "u")
    for stem in ("fp32", "exp_avg", "exp_avg_sq"):
        content = torch.load(target / f"zero/alpha/{stem}.pt", weights_only=True)
        assert content["param"].shape == (1,)
    assert zckpt.open(target).read("alpha", "exp_avg").shape == ()


def test_archives_are_sound_and_load_without_running_anything():
    target = written_of("s2_bf16_dp4", "u")
    files = [path for path in target.rglob("*") if path.is_file()]
    assert len(files) > 70
    for file in files:
        assert universal_directory.is_own(file.relative_to(target).as_posix())
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        if file.name != "optimizer_state.pt":  # it holds DeepSpeed's loss scaler
            torch.load(file, weights_only=True, mmap=True)


def test_the_same_run_writes_the_same_bytes():
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp2_client")
    one, other = (contents(written(checkpoint, name)) for name in "ab")
    assert one == other


def test_files_of_other_programs_are_not_own():
    for name in ("notes.txt", "zero/a.txt", "zero/a/b/c.pt", "latest", "other/fp32.pt", "zero/x/readme"):
        assert not universal_directory.is_own(name)
    for name in ("zero/optimizer_state.pt", "zero/wte.weight/fp32.pt", MODEL):
        assert universal_directory.is_own(name)


# --- state that has no place in DeepSpeed's files ----------------------------------------------------------------


def test_a_parameter_that_no_step_has_reached_gets_zeros_and_loses_them_again(torch_file):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model["a"], optimizer)
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    checkpoint = zckpt.open(torch_file(both(model, optimizer)), names=names)
    target = assert_comes_back(checkpoint, "u")
    for stem in ("exp_avg", "exp_avg_sq"):
        content = torch.load(target / f"zero/b.weight/{stem}.pt", weights_only=True)
        assert torch.equal(content["param"], torch.zeros(2, 2))
    assert torch.load(target / "zero/b.weight/step.pt", weights_only=True) == 1
    assert set(zckpt.open(target).parameters["b.weight"].slots) == {"weight"}


def test_state_of_one_element_of_a_parameter_that_is_a_number_keeps_its_shape(torch_file):
    state = {"step": torch.tensor(3.0), "p0": torch.ones(1), "exp_avg": torch.tensor(2.0), "m": torch.ones(1, 1)}
    group = {"lr": 0.1, "params": [0]}
    content = {"model": {"w": torch.tensor(5.0)}, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    found = zckpt.open(assert_comes_back(zckpt.open(torch_file(content)), "u")).parameters["w"]
    assert {key: slot.shape for key, slot in found.optimizer_slots.items()} == {"p0": (1,), "exp_avg": (), "m": (1, 1)}


def test_state_of_any_kind_comes_back(torch_file):
    """Numbers that only some parameters have, 0-d tensors, factored moments, steps that differ."""
    weights = {name: torch.randn(4, 3) for name in ("a", "b", "c")}
    state = {
        0: {"step": torch.tensor(3.0), "row": torch.randn(4), "mu_product": torch.tensor(0.5), "seen": 7},
        1: {"step": torch.tensor(4.0), "row": torch.randn(4), "mu_product": torch.tensor(0.25), "seen": 7},
        2: {"step": 5, "moment": torch.randn(4, 3, dtype=torch.float64), "flag": True, "nothing": None},
    }
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}]
    path = torch_file({"model": weights, "optimizer": {"state": state, "param_groups": groups}})
    checkpoint = zckpt.open(path, names=list(weights))
    target = assert_comes_back(checkpoint, "u")
    assert torch.load(target / "zero/b/step.pt", weights_only=True) == 4
    assert any("stops at" in note for note in writer.lay_out(checkpoint)[1])


def test_keys_that_mean_something_else_in_deepspeeds_files_are_kept_apart():
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp4")
    odd = {"module": "mine", "dp_world_size": 77, "zckpt": [1], "model": {"a": 1}, "epoch": 3}
    checkpoint.metadata.update(odd)
    checkpoint.optimizer_metadata |= {"param_groups": "mine", "ds_version": 0, "other": 1}
    found = zckpt.open(assert_comes_back(checkpoint, "u"))
    assert {key: found.metadata[key] for key in odd} == odd
    assert found.world_size == 4


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../out", "a/b", "..", "", "nul\0", "x" * 260, "optimizer_state.pt", "\ud800"])
def test_names_that_cannot_be_files_are_refused(name):
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp4")
    parameter = checkpoint.parameters.pop("alpha")
    checkpoint.parameters[name] = dataclasses.replace(parameter, name=name)
    checkpoint.param_groups[2].parameters = [name]
    with refusing(UnsupportedError, "cannot be a file name"):
        writer.lay_out(checkpoint)


@pytest.mark.parametrize("slot", ["../x", "fp32", "y" * 260])
def test_slots_that_cannot_be_files_are_refused(slot):
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp4")
    slots = checkpoint.parameters["alpha"].slots
    slots[slot] = slots["exp_avg"]
    with refusing(UnsupportedError, "file name|another meaning here"):
        writer.lay_out(checkpoint)


def test_what_deepspeed_would_load_nothing_of_is_refused():
    with refusing(UnsupportedError, r"14, 16.*--names"):
        writer.lay_out(zckpt.open(FIXTURES / "other/plain_adamw/ckpt.pt"))
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp4")
    checkpoint.param_groups = []
    with refusing(UnsupportedError, "no optimizer"):
        writer.lay_out(checkpoint)
    nowhere = Checkpoint("x", "x", parameters={"a": Parameter("a", (1,), "float32", group=0)})
    nowhere.param_groups = [ParamGroup({}, ["a"])]
    with refusing(UnsupportedError, "no file holds the values of a"):
        writer.lay_out(nowhere)


def sample(directory=".", name="s2_bf16_dp4") -> Path:
    return Path(shutil.copytree(SAMPLES / name, Path(directory, name)))


def test_groups_of_other_hyperparameters_may_have_other_state(torch_file):
    """AMSGrad keeps one slot more; a parameter of the other group is not to have it."""
    model = torch.nn.ParameterDict({name: torch.ones(4, 3) for name in ("a", "b")})
    optimizer = torch.optim.AdamW([{"params": [model["a"]], "amsgrad": True}, {"params": [model["b"]]}])
    torch.stack(list(model.values())).sum().backward()
    optimizer.step()
    checkpoint = zckpt.open(torch_file(both(model, optimizer)), names=["a", "b"])
    assert_comes_back(checkpoint, "u")


@pytest.mark.parametrize(
    ("name", "file", "error", "words"),
    [
        ("s2_bf16_dp4", "zero/emb.weight/fp32.pt", LayoutError, "fp32.pt"),
        ("s2_bf16_dp4", "zero/optimizer_state.pt", ShardError, "optimizer_state.pt"),
        ("s2_bf16_dp4", MODEL, ShardError, MODEL),
        ("s3_bf16_dp2", f"zero_pp_rank_1_{MODEL}", ShardError, "missing for rank 1"),
        # slots and steps that others have; `alpha` has a param group by itself
        *(("s2_bf16_dp4", f"zero/{file}", LayoutError, rf"zero/{file}: no .* of this parameter: expected a file")
          for file in ("fc1.weight/exp_avg.pt", "fc1.weight/step.pt", "unused.bias/exp_avg_sq.pt", "alpha/step.pt",
                       "alpha/exp_avg.pt")),
    ],
)  # fmt: skip
def test_missing_files_are_named(name, file, error, words, tmp_path):
    target = sample(tmp_path, name)
    (target / file).unlink()
    with refusing(error, words):
        zckpt.open(target)


def test_files_that_contradict_each_other_are_refused():
    def refused(kind, words):
        with refusing(kind, words):
            zckpt.open(target)

    target = sample("a")
    torch.save({"param": torch.zeros(37, 9), "cat_dim": 0}, target / "zero/emb.weight/fp32.pt")
    refused(LayoutError, r"emb.weight/fp32.pt.*\(37, 8\).*\(37, 9\)")
    target = sample("b", "s3_bf16_dp2")
    torch.save(torch.zeros(37 * 8 - 1), target / "zero/emb.weight/exp_avg.pt")
    refused(LayoutError, r"emb\.weight/exp_avg\.pt")
    target = sample("c")
    edit(target / "zero/optimizer_state.pt", lambda content: content["param_groups"].pop())
    refused(LayoutError, "different numbers of groups")
    target = sample("d")
    shutil.copy(target / "zero/emb.weight/fp32.pt", target / "zero/emb.weight/weight.pt")
    refused(UnsupportedError, "'weight'")


def test_a_vocabulary_that_is_padded_in_the_model_file_is_cut_to_its_rows(tmp_path):
    """A master of no dimension, or of more rows, is not one of such a weight."""
    name = "emb.weight"

    def pad(content):
        weight = content["module"][name]
        content["module"][name] = torch.cat([weight, torch.ones(3, 8, dtype=weight.dtype)])
        for group in content["param_shapes"]:
            group.update({name: (40, 8)} if name in group else {})

    target, weight = sample(tmp_path), load(SAMPLES / "s2_bf16_dp4" / MODEL)["module"][name]
    edit(target / MODEL, pad)
    for file in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
        edit(target / "zero" / name / file, lambda content: content.update(vocab_tensor=True))
    assert_same(zckpt.open(target).read(name, "weight"), weight, name)
    for master in (torch.tensor(1.0), torch.zeros(41, 8)):
        edit(target / "zero" / name / "fp32.pt", lambda content, master=master: content.update(param=master))
        with refusing(LayoutError, rf"model_states.pt: {name} has two shapes"):
            zckpt.open(target)


@pytest.mark.parametrize("content", [5, {"param": 3}, [torch.zeros(1)], {"param": {"param": torch.zeros(1)}}], ids=str)
def test_files_that_hold_something_else_are_refused(content, tmp_path):
    target = sample(tmp_path)
    torch.save(content, target / "zero/emb.weight/exp_avg.pt")
    with refusing(DamagedFileError, r"emb.weight/exp_avg.pt: unexpected content"):
        zckpt.open(target)


def test_a_universal_checkpoint_without_hyperparameters_is_read(tmp_path):
    """DeepSpeed up to 0.14.0 converts neither these nor steps."""
    target = sample(tmp_path)
    edit(target / "zero/optimizer_state.pt", lambda content: content.pop("param_groups"))
    for path in target.rglob("step.pt"):
        path.unlink()
    found, truth = zckpt.open(target), Truth(FIXTURES / "s2_bf16_dp4")
    assert_state(found, truth)
    assert [group.parameters for group in found.param_groups] == truth.facts["order"]
    assert [(group.hyperparameters, group.state) for group in found.param_groups] == [({}, {})] * 3
    assert any("no hyperparameters and no steps" in warning for warning in found.warnings)
    zckpt.convert(target, tmp_path / "z", to="zckpt", verify=True)
    with refusing(UnsupportedError, "holds no hyperparameters"):
        zckpt.convert(target, tmp_path / "d", to="deepspeed", world_size=2)


def test_names_in_a_file_do_not_lead_out_of_the_directory(tmp_path):
    elsewhere = {"../../elsewhere": torch.Size([1])}
    target = changed("s2_bf16_dp4", tmp_path, lambda content: content["param_shapes"].__setitem__(2, elsewhere))
    with refusing(DamagedFileError, "leads elsewhere"):
        zckpt.open(target)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return written(zckpt.open(FIXTURES / "s2_bf16_dp4"), tmp_path_factory.mktemp("kept") / "u")


@pytest.mark.parametrize(
    "changes",
    [{"groups": 3}, {"groups": [[], [], []]}, {"version": 9}, {"made": 5}, {"values": {"alpha": 1}}, {"frozen": "x"}],
    ids=str,
)
def test_what_zckpt_keeps_beside_is_checked(changes, kept):
    target = Path(shutil.copytree(kept, "u"))
    edit(target / "zero/optimizer_state.pt", lambda content: content["zckpt"].update(changes))
    with pytest.raises(DamagedFileError):
        zckpt.open(target)


# --- found -------------------------------------------------------------------------------------------------------


def test_a_universal_checkpoint_is_found(tmp_path):
    target = sample(tmp_path)
    assert find(target) == target
    assert find(tmp_path) is None
    (tmp_path / universal_directory.LATEST_NAME).write_text(target.name)
    assert find(tmp_path) == target
    (tmp_path / "latest").write_text("global_step5")
    assert find(tmp_path) is None, "an ordinary checkpoint is there"
    assert find(tmp_path, tag=target.name) == target
    assert find(tmp_path, tag="..") is None
    assert find(FIXTURES / "s2_bf16_dp4") is None
    assert find(FIXTURES / "s2_bf16_dp4", tag="global_step5") is None


@pytest.mark.parametrize("name", ["..", "../x", "", "nothing", "x" * 5000, "a\0b"])
def test_latest_universal_must_name_a_directory_beside_it(name, tmp_path):
    (tmp_path / "latest_universal").write_text(name)
    with refusing(UnknownFormatError, "names no universal checkpoint"):
        find(tmp_path)


def test_a_run_with_round_robin_is_warned_of(tmp_path):
    def turn_on(content):
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    target = changed("s2_bf16_dp4", tmp_path, turn_on)
    assert any("round_robin_gradients" in warning for warning in zckpt.open(target).warnings)
    assert zckpt.open(SAMPLES / "s2_bf16_dp4").warnings == []


def test_notes_say_where_the_loader_stops():
    """At a single tensor of a parameter, as NAdam has one, and where a rank holds nothing of a group; past a number."""
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp2")
    assert [note for note in writer.lay_out(checkpoint)[1] if "IndexError" in note and "param group 2" in note]
    assert not [note for note in writer.lay_out(zckpt.open(FIXTURES / "s2_bf16_dp1"))[1] if "IndexError" in note]
    for group in checkpoint.param_groups:
        group.state["mu_product"] = 0.5
    assert ["does not load mu_product" in note for note in writer.lay_out(checkpoint)[1] if "mu_product" in note] == [
        True
    ]
    for group in checkpoint.param_groups:
        group.state["mu_product"] = Scalar(0.5, "float32")
    assert [note for note in writer.lay_out(checkpoint)[1] if "stops at mu_product" in note]


def test_steps_of_their_own_arrive_with_each_parameter(torch_file):
    """A parameter of a group that began to be trained later has taken fewer steps."""
    model = torch.nn.ParameterDict({"late": torch.randn(3), "early": torch.randn(3)})
    optimizer = torch.optim.AdamW([model["late"], model["early"]])
    for step in range(3):
        model["early"].grad, model["late"].grad = torch.ones(3), torch.ones(3) if step else None
        optimizer.step()
    source = zckpt.open(torch_file(both(model, optimizer)), names=["late", "early"])
    zckpt.convert(source, "u", to="universal", verify=True)
    assert not zckpt.diff(source, "u").as_dict()["different"]
    assert source.step == zckpt.open("u").step == 3
    assert [float(torch.load(f"u/zero/{name}/step.pt")) for name in ("late", "early")] == [2, 3]


def changed(name, tmp_path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint that DeepSpeed converted, with something else in its model files."""
    source = sample(tmp_path, name)
    edit_all(source, change, MODEL_FILES)
    return source


def test_floats_that_deepspeed_made_of_integers_and_doubles_are_copies_of_them(tmp_path):
    def widen(content):
        content["module"]["pos"] = content["module"]["pos"].double() + 1e-12  # less than half a step of float32

    source = changed("s2_bf16_dp4", tmp_path, widen)
    zckpt.consolidate(source, tmp_path / "out.safetensors")
    assert zckpt.verify(source, deep=True).sound
    assert zckpt.open(tmp_path / "out.safetensors").read("counter").dtype == torch.int64


def test_alias_of_a_parameter_that_was_not_saved_has_its_own_values(tmp_path):
    elsewhere = {"frozen_odd": "frozen_elsewhere"}
    source = changed("s2_bf16_dp4", tmp_path, lambda content: content["shared_params"].update(elsewhere))
    expected = zckpt.open(SAMPLES / "s2_bf16_dp4").read("frozen_odd")
    assert_same(zckpt.open(source).read("frozen_odd"), expected, "frozen_odd")


def test_state_of_modules_that_is_no_tensor_is_carried(tmp_path):
    extra = {"amax": torch.ones(3), "recipe": "delayed"}
    source = changed("s3_bf16_dp2", tmp_path, lambda content: content["module"].update({"a._extra_state": extra}))
    zckpt.convert(source, tmp_path / "out", to="zckpt")
    assert "module_extra_state" in zckpt.open(tmp_path / "out").metadata


def test_files_of_parameters_of_one_shape_share_a_tree():
    """So that tens of thousands of them take little; each has its own place and checksums."""
    found = zckpt.open(written_of("s2_bf16_dp2", "u"))
    files = [one for one in found.files if Path(one.path).parent.parent.name == "zero"]
    read = [read_torchfile(one.path) for one in files]
    kinds = {(repr(file.root), str([one[1:3] for one in file.records])) for file in read}
    assert len({id(one.tree) for one in files}) == len(kinds) < len(files)
    for one, file in zip(files, read, strict=True):
        assert repr(one.tree) == repr(file.root)
        assert list(one.records) == list(file.records)


def test_gated_slices_that_were_put_together_without_their_halves_are_refused(tmp_path):
    """Megatron-DeepSpeed's rules that do not name them left masters in another order than weights are read in."""
    folder, by_columns = tmp_path / "global_step5", ["self_attention.dense.weight", "mlp.dense_4h_to_h.weight"]
    sizes = {"self_attention.query_key_value.weight": (12, 8), by_columns[0]: (8, 4),
             "mlp.dense_h_to_4h.weight": (16, 8), by_columns[1]: (8, 8)}  # fmt: skip
    ranks = [{f"0.{name}": torch.rand(shape) for name, shape in sizes.items()} for _ in range(2)]
    for name in sizes:
        (folder / f"zero/0.{name}").mkdir(parents=True)
        whole = torch.cat([own[f"0.{name}"] for own in ranks], int(name in by_columns))
        torch.save({"param": whole}, folder / f"zero/0.{name}/fp32.pt")
    rules = {"parameter_with_row_parallelism_patterns": [rf"\d+\.{name}" for name in by_columns]}
    for number, own in enumerate(ranks):
        content = {"module": own, "param_shapes": [{name: one.shape for name, one in own.items()}], "buffer_names": [],
                   "args": Namespace(num_attention_heads=4, hidden_size=8), "mp_world_size": 2,
                   "universal_checkpoint_info": rules}  # fmt: skip
        torch.save(content, folder / f"mp_rank_{number:02}_model_states.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, folder / "zero/optimizer_state.pt")
    shutil.copytree(folder, tmp_path / "pipeline")  # whose stages have their weights in layers' files
    edit_all(tmp_path / "pipeline", lambda content: content.update(module={}), MODEL_FILES)
    for one in (folder, tmp_path / "pipeline"):
        with refusing(UnsupportedError, "slices of 0.mlp.dense_h_to_4h.weight were put together without regard"):
            zckpt.open(one)
    path = folder / "zero/0.mlp.dense_h_to_4h.weight/fp32.pt"
    edit(path, lambda content: content.update(param_n_sub_params=2))
    assert zckpt.open(folder).parameters["0.mlp.dense_h_to_4h.weight"].slots.keys() == {"weight", "master"}
