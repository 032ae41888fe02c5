"""ZenFlow in the real engine, with its optimizer's C++ extension replaced: what it saves is cut, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume, train
from tests.truth import Truth, assert_consolidated

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

_ZENFLOW = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 4,
    "update_interval": 2,
    "overlap_step": False,
}
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
def test_deepspeed_resumes_it_at_other_ranks(spec: Spec, tmp_path: Path) -> None:
    made = train(spec, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    zckpt.reshard(made, tmp_path / "cut", world_size=3, verify=True)
    verdict = resume(tmp_path / "cut", spec.at(3), made)
    assert [*verdict.slots, *verdict.weights, *verdict.hyperparameters, *verdict.steps] == []
