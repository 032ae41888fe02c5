"""Checkpoints that the real DeepSpeed engine writes here and now come out bit-equal to its live state."""

from __future__ import annotations

from typing import Any

import pytest

import zckpt
from tests.deepspeed_engine import Spec
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

BATCH_OF_5 = 60


def short(name: str, **changes: Any) -> Spec:
    return Spec(name, **{"steps": 2, "steps_after": 0, **changes})


KEPT = [
    short("s2_dp3_amsgrad", world_size=3, optimizer="adam_amsgrad"),
    short("s2_dp3_elastic", world_size=3, elastic=True),
    short("s2_dp3_bf16master", world_size=3, bf16_master=True),
    short("s2_dp3_zerodim_fp32", world_size=3, dtype="fp32", zero_dim=True),
]
DTYPES = ("bf16", "fp32", "fp16")
MORE = [
    *(short(f"s{stage}_dp{ranks}", stage=stage, world_size=ranks, dtype=DTYPES[(stage + ranks) % 3],
            **({"batch": BATCH_OF_5} if ranks == 5 else {}))
      for stage in (1, 2, 3) for ranks in (1, 2, 3, 5, 12)),
    short("s2_dp12_elastic_rr", world_size=12, elastic=True, round_robin=True),
    short("s1_dp12_bf16opt", stage=1, world_size=12, bf16_optimizer=True),
]  # fmt: skip
"""Every stage at every number of ranks. Slices, stages, experts and more are read where DeepSpeed then resumes them."""


@pytest.mark.parametrize("spec", some(KEPT, MORE), ids=lambda spec: spec.name)
def test_what_deepspeed_writes_is_read_bit_for_bit(spec, made, tmp_path):
    folder = made(spec)
    output = tmp_path / "output"
    output.mkdir()
    assert_consolidated(folder / spec.run_folder, Truth(folder), output)
    opened = zckpt.open(folder / spec.run_folder)
    assert opened.step == 2
    assert opened.topology.dp == spec.data_parallel
