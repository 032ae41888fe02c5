"""What went through other formats, stock DeepSpeed loads again: masters, slots, steps, hyperparameters, losses.

Bits are compared as in `test_reshard`, from the live engine; losses within the tolerances stated there.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.deepspeed_engine.catalogue import odd_client_state
from tests.interop.cut import TOLERANCE, small, spec
from tests.logical import plain_values
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.truth import Truth

pytestmark = pytest.mark.interop


RING: list[tuple[str, dict[str, Any]]] = [
    ("universal", {}),
    ("zckpt", {"world_size": 3}),
    ("dcp", {"world_size": 2}),
    ("consolidated", {}),
    ("zero-redundancy", {"world_size": 3}),
]

CASES = some([
    (small("s2_client", client_state=odd_client_state(), scheduler=True, clip=1.0), 2, 1),
    (small("s3_fp32_sgdm", stage=3, dtype="fp32", optimizer="sgdm"), 2, 3),
], [
    (spec("s3_fp32", stage=3, dtype="fp32"), 3, 1),
    (spec("s1_fp32_sgdm", stage=1, dtype="fp32", optimizer="sgdm"), 2, 3),
    (spec("s2_bf16"), 3, 2),
    (spec("s2_lion", optimizer="lion"), 3, 2),
    (spec("s2_fp16", dtype="fp16"), 3, 3),
    (small("s2_zerodim", zero_dim=True), 2, 2),
])  # fmt: skip


def assert_resumes(run_directory: Path, wanted: Spec, folder: Path) -> None:
    verdict = resume(run_directory, wanted, folder)
    verdict.assert_goes_on(TOLERANCE[wanted.dtype])
    assert len(verdict.losses) == 2


@pytest.mark.parametrize(("source", "world_size", "stage"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_deepspeed_resumes_what_went_around_the_ring(source, world_size, stage, made):
    at = folder = made(source)
    for to, options in RING:
        zckpt.convert(at, to, to=to, verify=True, **options)
        at = Path(to)
    zckpt.convert(at, "run", to="deepspeed", world_size=world_size, stage=stage, verify=True)
    assert_resumes("run", source.at(world_size, stage=stage), folder)


@pytest.mark.parametrize(("dtype", "stage"), each(["fp32", "bf16"], [1, 2, 3]))
@pytest.mark.every(3, 1)
def test_a_run_without_zero_goes_on_with_it(stage, dtype, made):
    source = small(f"s0_{dtype}", stage=0, dtype=dtype, world_size=2)
    folder = made(source)
    names = list(Truth(folder).numbers.values())
    zckpt.convert(folder, "run", to="deepspeed", world_size=3, stage=stage, names=names)
    assert_resumes("run", source.at(3, stage=stage), folder)


def assert_loss_scaler(expected: dict[str, Any], engine: Any) -> None:
    found = vars(engine.optimizer.loss_scaler)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.every(4)
def test_weights_in_float32_go_on_in_bf16(dtype, stage, made, tmp_path):
    """DeepSpeed's engine with bf16 looks for files of another name; weights are masters in what trains in float32."""
    source = spec(f"s2_{dtype}", dtype=dtype)
    folder = made(source)
    zckpt.convert(folder, tmp_path / "there", to="dcp", dtype="float32")
    options = {"dtype": "bfloat16"} if dtype == "fp32" else {}  # else the configuration that goes along says it
    zckpt.convert(tmp_path / "there", tmp_path / "back", to="deepspeed", world_size=2, stage=stage, **options)
    verdict = resume(tmp_path / "back", source.at(2, dtype="bf16", stage=stage), folder)
    assert not [*verdict.slots, *verdict.hyperparameters, *verdict.steps, *verdict.held]
    assert verdict.loss_difference <= TOLERANCE["bf16"]
    with refusing(zckpt.UsageError, "--dtype does not apply|dtype= does not apply"):
        zckpt.convert(folder, tmp_path / "other", to="deepspeed", dtype="bfloat16")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.every(2)
def test_loss_scale_of_a_run_without_zero_goes_on(stage, made):
    """Without ZeRO, DeepSpeed 0.19 divides gradients by a scale that the loss never had: losses are another matter."""
    source = spec("s0_fp16", stage=0, dtype="fp16", world_size=2)
    folder = made(source)
    names = list(Truth(folder).numbers.values())
    zckpt.convert(folder, "run", to="deepspeed", world_size=3, stage=stage, names=names)
    known = zckpt.open(folder).optimizer_metadata
    expected = {
        key: plain_values(known[key]) for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    }
    expected |= {"delayed_shift": 2, "dtype": torch.float16}
    verdict = resume("run", source.at(3, stage=stage), folder, then=partial(assert_loss_scaler, expected))
    assert verdict.differences == []


@pytest.mark.parametrize(("stage", "lost", "base"), [(2, "*rank_1_*optim_states.pt", "backup"),
                                                     (3, "*rank_1_*model_states.pt", "whole.safetensors")])  # fmt: skip
def test_what_was_lost_and_filled_goes_on(stage, lost, base, made):
    source = small(f"s{stage}_bf16", stage=stage)
    folder = made(source)
    run = Path(shutil.copytree(folder, "run"))
    zckpt.convert(run, "backup", to="zckpt")
    zckpt.consolidate(run, "whole.safetensors")
    [file.unlink() for file in run.rglob(lost)]
    done = zckpt.convert(run, "new", to="deepspeed", world_size=2, stage=stage, salvage=True,
                         fill_from=base)  # fmt: skip
    assert done.filled
    assert_resumes("new", source.at(2, stage=stage), folder)
