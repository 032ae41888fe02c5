"""ZenFlow in the real engine, with its optimizer's C++ extension replaced: what it saves is cut, and it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume, train
from tests.formats.deepspeed.contents import run_of
from tests.truth import Truth, assert_consolidated

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

_ZENFLOW = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 4,
    "update_interval": 2,
    "overlap_step": False,
}
TRANSPOSED = "versions/ds0189_zenflow_s2_bf16_dp2"
_OFFLOAD = {"device": "cpu", "pin_memory": False}


def _spec(stage: int, warm_up: int) -> Spec:
    zero = {"offload_optimizer": _OFFLOAD, "zenflow": {**_ZENFLOW, "full_warm_up_rounds": warm_up}}
    config = {"zero_force_ds_cpu_optimizer": True}
    return Spec(
        f"zenflow_s{stage}_bf16_dp2",
        stage,
        model="tiny",
        optimizer="adamw_offloaded",
        groups=1,
        zero=zero,
        config=config,
    )  # fmt: skip


SPECS = [_spec(2, 0), _spec(3, 100)]
"""At ZeRO-3 it selects on CUDA only, so that all rounds are those before."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_deepspeed_resumes_it_at_other_ranks(spec, tmp_path):
    made = train(spec, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    zckpt.reshard(made, tmp_path / "cut", world_size=3, verify=True)
    verdict = resume(tmp_path / "cut", spec.at(3), made)
    assert verdict.differences == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_engine_without_zenflow_loads_it_in_place(world_size):
    """Also at the same ranks, where its files would load as they are, with matrices transposed."""
    plain = replace(SPECS[0], zero={"offload_optimizer": _OFFLOAD}, world_size=world_size)
    verdict = resume(run_of(TRANSPOSED), plain, run_of(TRANSPOSED), in_place=True)
    assert verdict.differences == []
