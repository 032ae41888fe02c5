"""What is written as a universal checkpoint, stock DeepSpeed loads at another number of ranks and another stage.

The model starts from another seed, so every master, slot, weight, step and hyperparameter that is right was loaded;
they are compared bit for bit. Losses of the steps that follow are compared within the tolerances of `test_reshard`,
for its reasons. What DeepSpeed's own loader does wrongly is shown here as well, so that a version that does better is
noticed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import edit
from tests.deepspeed_engine import Spec, resume
from tests.deepspeed_engine.catalogue import odd_client_state
from tests.deepspeed_engine.universal import converted_by_deepspeed, resume_universal
from tests.gloo import WorkerError
from tests.interop.cut import TOLERANCE, Cut, cut
from tests.interop.cut import small as spec
from tests.interop.test_reshard_parallel import EP2_BF16, sliced
from tests.interop.test_reshard_pipeline import TWO
from tests.logical import assert_same_state
from tests.pairwise import some
from tests.plans import write_directory
from tests.refusals import refusing
from tests.truth import bits
from zckpt.engine.plan import plan
from zckpt.formats.universal import directory as universal_directory
from zckpt.formats.universal import writer
from zckpt.formats.universal.directory import find
from zckpt.state import Checkpoint

pytestmark = pytest.mark.interop


def to(source: Spec, world_size: int, stage: int, **training: Any) -> Cut:
    """A source, and data-parallel ranks, stage and what else is different of the training that loads it."""
    return cut(source, world_size, training, stage=stage)


S1_FP32 = spec("s1_fp32", stage=1, dtype="fp32")
S2 = spec("s2_bf16")
S2_FP16 = spec("s2_fp16", dtype="fp16")
S3 = spec("s3_bf16", stage=3)
S3_FP32 = spec("s3_fp32", stage=3, dtype="fp32")
S3_ONE_GROUP = spec("s3_fp32_1g", stage=3, dtype="fp32", groups=1)
S3_INT_STEP = spec("s3_fp32_fused", stage=3, dtype="fp32", optimizer="fused_layout")
S2_SGDM = spec("s2_fp32_sgdm", dtype="fp32", optimizer="sgdm")
S3_SGDM = spec("s3_fp32_sgdm", stage=3, dtype="fp32", optimizer="sgdm")
ROUND_ROBIN = spec("s2_rr", round_robin=True, world_size=4)
UNPADDED = spec("llama_rr_palign", model="llama", round_robin=True, parameter_alignment=True, world_size=2)
THREE_GROUPS = spec("s2_fp32_3g", dtype="fp32", groups=3, world_size=4)
CLIENT = spec("s2_client", client_state=odd_client_state(), scheduler=True, clip=1.0)

NO_ZERO = spec("s0_fp32", stage=0, dtype="fp32", world_size=2)
TENSOR_PARALLEL = sliced("drift_s1", 2, stage=1, invariant=False, world_size=2)

CASES = [
    to(S3_ONE_GROUP, 2, 3),
    to(S2_SGDM, 2, 2),  # which DeepSpeed's own converter cannot convert
    # experts spread over two ranks, then all of them on each; stages of a pipeline
    to(EP2_BF16, 3, 2, expert_parallel=1),
    to(TWO, 1, 1),
]
MORE = [
    to(CLIENT, 2, 2),
    # ranks, stages and element types
    to(S1_FP32, 2, 1),
    to(S2, 4, 2),
    to(S2_FP16, 2, 2),
    to(S3_INT_STEP, 2, 3),
    # optimizers that DeepSpeed's own converter cannot convert
    to(S3_SGDM, 2, 1),
    to(spec("s3_fp32_lion", stage=3, dtype="fp32", optimizer="lion"), 2, 2),
    to(spec("s2_adagrad", optimizer="adagrad", groups=1), 2, 2),
    to(spec("s2_amsgrad", dtype="fp32", optimizer="adam_amsgrad"), 2, 2),
    # other forms, odd parameters
    to(spec("s1_bf16opt", stage=1, bf16_optimizer=True), 2, 1),
    to(ROUND_ROBIN, 2, 2, round_robin=False),
    to(spec("s2_palign", parameter_alignment=True), 2, 2),
    to(spec("s2_frozengroup", frozen_in_group=True), 2, 2),
    to(spec("s1_empty", stage=1, empty=True), 2, 1),
    to(spec("s2_zerodim", zero_dim=True, groups=2), 2, 2),
    to(S3, 2, 2),
    to(S3_ONE_GROUP, 2, 1),
    to(S1_FP32, 4, 2),
    to(spec("s2_bf16_1g", groups=1), 2, 3),
    to(spec("s1_bf16_fused", stage=1, optimizer="fused_layout"), 4, 3),
    to(spec("s1_bf16_lion", stage=1, optimizer="lion"), 2, 1),
    to(spec("s2_rr_palign", round_robin=True, parameter_alignment=True), 2, 2),
]


def written(source: Path | Checkpoint, directory: Path) -> Path:
    """Write a source as `directory/step_u`, and `latest_universal` beside it; return the directory."""
    checkpoint = zckpt.open(source) if isinstance(source, Path) else source
    write_directory(plan(writer.lay_out(checkpoint)[0]), directory / "step_u")
    (directory / universal_directory.LATEST_NAME).write_text("step_u")
    return directory


@pytest.mark.parametrize("case", some(CASES, MORE), ids=str)
def test_deepspeed_loads_it(case, made, tmp_path):
    folder = made(case.source)
    verdict = resume_universal(written(folder, tmp_path), case.resumed, folder)
    verdict.assert_goes_on(TOLERANCE[case.source.dtype])
    assert len(verdict.losses) == case.source.steps_after


@pytest.mark.parametrize(
    "case",
    some(
        [to(TENSOR_PARALLEL, 2, 1, tensor_parallel=1)],
        [to(TENSOR_PARALLEL, 1, 1), to(TENSOR_PARALLEL, 2, 2)],
    ),
    ids=str,
)
def test_deepspeed_cuts_slices_again(case, made, tmp_path):
    """By the rules that the files carry.

    Copies that drift apart are averaged, as DeepSpeed's converter does: their weights are then rounded from the mean,
    and the steps that follow are those of another model than before.
    """
    folder = made(case.source)
    verdict = resume_universal(written(folder, tmp_path), case.resumed, folder)
    assert [*verdict.slots, *verdict.hyperparameters, *verdict.steps] == []
    assert {name for name in verdict.weights if "local_norm" not in name} == set()


def test_deepspeed_loads_the_optimizer_of_a_run_without_zero(made, tmp_path):
    """And of parameters that have no state, as without a gradient: DeepSpeed needs some for all, and gets zeros."""
    folder = made(NO_ZERO)
    names = [name for group in json.loads((folder / "truth.json").read_text())["order"] for name in group]
    checkpoint = zckpt.open(folder, names=names)
    for name in ("unused.weight", "unused.bias"):
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            checkpoint.parameters[name].slots.pop(slot, None)
    verdict = resume_universal(written(checkpoint, tmp_path), NO_ZERO.at(2, stage=2), folder)
    verdict.assert_goes_on(TOLERANCE["fp32"])


# --- what DeepSpeed's loaders do not do, whatever the files hold -----------------------------------------------------


def test_frozen_parameters_are_not_loaded(made, tmp_path):
    folder = made(S1_FP32)
    verdict = resume(written(folder, tmp_path), S1_FP32.at(2), folder, universal=True)
    assert verdict.slots == []
    assert set(verdict.weights) == {"frozen_odd", "frozen_lin.weight", "frozen_lin.bias"}


NOTED = {
    "s3_fp32_dp2": "count up one step",
    "s2_bf16_dp2_sgdm": "momentum_buffer",
    "s2_bf16_dp2_rr": "round_robin_gradients",
    "s1_bf16_dp2": "does not load the .* frozen parameters",
}


@pytest.mark.parametrize(("name", "words"), NOTED.items())
def test_what_they_do_not_do_is_noted(name, words):
    assert any(re.search(words, note) for note in writer.lay_out(zckpt.open(FIXTURES / name))[1])


@pytest.mark.nightly
def test_zero3_has_one_step_for_all_groups(made, tmp_path):
    """Everything is right after loading, but a step that is a tensor is then counted up by each group.

    That is all that is wrong with the losses: with a copy for each they are right.
    """
    folder = made(S3_FP32)
    directory = written(folder, tmp_path)
    verdict = resume_universal(directory, S3_FP32.at(2), folder)
    assert verdict.differences == []
    assert verdict.loss_difference > 1e-3
    assert resume_universal(directory, S3_FP32.at(2), folder, own_steps=True).loss_difference <= TOLERANCE["fp32"]


@pytest.mark.nightly
@pytest.mark.parametrize("source", [S3_SGDM, S2_SGDM], ids=lambda source: source.name)
def test_zero3_stops_at_slots_that_it_would_lose(source, made, tmp_path):
    folder = made(source)
    with pytest.raises(WorkerError, match="KeyError: 'optimizer_state_dict'"):
        resume_universal(written(folder, tmp_path), dataclasses.replace(source, world_size=3, stage=3), folder)


@pytest.mark.nightly
def test_a_rank_that_holds_nothing_of_a_group_stops(made, tmp_path):
    folder = made(THREE_GROUPS)
    with pytest.raises(WorkerError, match="IndexError: list index out of range"):
        resume_universal(written(folder, tmp_path), THREE_GROUPS.at(3), folder)


@pytest.mark.nightly
@pytest.mark.parametrize("training", [ROUND_ROBIN, UNPADDED], ids=lambda one: one.name)
def test_a_training_with_round_robin_takes_parameters_for_one_another(training, made, tmp_path):
    folder = made(training)
    assert any("round_robin_gradients" in note for note in writer.lay_out(zckpt.open(folder))[1])
    assert resume_universal(written(folder, tmp_path), training.at(3), folder).slots != []


# --- beside DeepSpeed's own converter ---------------------------------------------------------------------------------


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def assert_same_files(ours: Path, theirs: Path, *, flat: bool) -> None:
    """Every file of theirs is one of ours with the same keys and the same bits (ZeRO-3: as flat tensors by itself)."""
    files = [path.relative_to(theirs) for path in theirs.rglob("*.pt") if path.parent != theirs]
    assert len(files) > 20
    for file in files:
        mine, its = load(ours / file), load(theirs / file)
        if file.name == "step.pt":
            assert type(mine) is type(its)
            assert mine == its
            continue
        if not flat:
            assert list(mine) == list(its), file
            assert {k: v for k, v in mine.items() if k != "param"} == {k: v for k, v in its.items() if k != "param"}
        tensor = its if flat else its["param"]
        assert mine["param"].dtype == tensor.dtype
        assert flat or mine["param"].shape == tensor.shape
        assert torch.equal(bits(mine["param"]), bits(tensor)), file


@pytest.mark.parametrize("source", some([S1_FP32, S3], [S2, THREE_GROUPS]), ids=lambda source: source.name)
def test_files_are_those_of_the_converter_which_are_read_too(source, made, tmp_path):
    folder = made(source)
    (tmp_path / "run").mkdir()
    theirs = converted_by_deepspeed(folder / "global_step2", tmp_path / "run" / "theirs")
    assert find(tmp_path / "run") == theirs
    assert_same_state(zckpt.open(tmp_path / "run"), zckpt.open(folder))
    ours = written(folder, tmp_path) / "step_u"
    for buffer in zckpt.open(folder).buffers:
        assert not (ours / "zero" / buffer).exists()
        for file in (theirs / "zero" / buffer).glob("*"):
            file.unlink()
    (theirs / "zero/optimizer_state.pt").unlink()
    assert_same_files(ours, theirs, flat=source.stage == 3)
    assert (tmp_path / "latest_universal").read_text() == "step_u"


@pytest.mark.parametrize(
    "name", some(["tp2_s1_bf16_dp2"], ["moe_ep1_s2_bf16_dp2", "tp2_s2_fp32_dp2", "hf_gpt2_s1_fp32_dp2"])
)
def test_files_of_fixtures_are_those_of_the_converter(name, tmp_path):
    theirs = converted_by_deepspeed(FIXTURES / name / "global_step5", tmp_path / "theirs")
    (theirs / "zero/optimizer_state.pt").unlink()
    assert_same_files(written(FIXTURES / name, tmp_path) / "step_u", theirs, flat=False)


@pytest.mark.parametrize("name", ["tp2_s1_bf16_dp2", "tp2_s2_fp32_dp2", "tp2_s3_bf16_dp2"])
def test_slices_of_weights_beside_whole_masters_are_put_together(name, tmp_path):
    """The converter copies the model files of tensor-parallel ranks as they are."""
    theirs = converted_by_deepspeed(FIXTURES / name / "global_step5", tmp_path / "theirs")
    assert zckpt.verify(theirs, deep=True).sound
    found, source = zckpt.open(theirs), zckpt.open(FIXTURES / name)
    assert {one: p.slots.keys() for one, p in found.parameters.items()} == {
        one: p.slots.keys() for one, p in source.parameters.items()
    }
    assert_same_state(found, source)
    zckpt.convert(theirs, tmp_path / "cut", to="deepspeed", world_size=2, tensor_parallel_size=2, verify=True)
    assert_same_state(zckpt.open(tmp_path / "cut"), source, means_are_rounded=True)


def test_slices_that_were_put_together_without_regard_to_their_parts_are_refused(tmp_path):
    """DeepSpeed up to 0.14.0 does not know `parameter_with_sub_params`, and puts whole slices one after the other."""
    theirs = converted_by_deepspeed(FIXTURES / "tp2_s2_fp32_dp2" / "global_step5", tmp_path / "theirs")
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        path = theirs / f"zero/layer.query_key_value.weight/{name}.pt"
        edit(path, lambda content: [content.pop("sub_param_shape"), content.update(cat_dim=0)])
    with refusing(zckpt.UnsupportedError, "slices of layer.query_key_value.weight were put together without regard"):
        zckpt.open(theirs)
