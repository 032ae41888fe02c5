"""Options of the engine that change how it computes or saves: its state is cut, and DeepSpeed goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume, train

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}
HPZ = {"zero_hpz_partition_size": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 1, "dtype": "fp32", "config": AUTOCAST},
        {"stage": 3, "dtype": "fp32", "config": AUTOCAST},
        {"stage": 3, "config": STATES},
        {"stage": 2, "config": NODE_LOCAL},
        {"stage": 3, "zero": HPZ},
    ],
    ids=["autocast1", "autocast3", "states_in_bf16", "node_local", "hpz"],
)
def test_deepspeed_resumes_it(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec("options", groups=2, steps=2, steps_after=2, **changes)
    made = train(spec, tmp_path)
    assert zckpt.verify(made, deep=True).sound
    zckpt.reshard(made, tmp_path / "cut", world_size=3, verify=True)
    hpz = changes.get("zero") is HPZ
    verdict = resume(tmp_path / "cut", spec.at(3, zero={"zero_hpz_partition_size": 3} if hpz else {}), made)
    assert [*verdict.slots, *verdict.weights, *verdict.hyperparameters, *verdict.steps] == []
    # under hpZ, DeepSpeed 0.19 goes on as far off after loading its own files at the same number of ranks
    assert hpz or verdict.loss_difference <= 3e-3
