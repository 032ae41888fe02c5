"""Stage 0 for other ranks: stock DeepSpeed goes on from there, with pipelines and experts, too."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume, train
from tests.deepspeed_engine.catalogue import SPECS
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


@pytest.mark.parametrize(
    ("name", "world_size", "ranks"),
    [
        ("s0_bf16_dp2", 3, 3),
        ("pp2_s0_fp32_dp2", 1, 2),
        pytest.param("moe_ep2_s0_fp32_dp4", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_deepspeed_resumes_it(name: str, world_size: int, ranks: int, tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / name, tmp_path / "cut", world_size=world_size)
    verdict = resume(tmp_path / "cut", SPECS[name].at(ranks), FIXTURES / name)
    assert [verdict.slots, verdict.weights, verdict.hyperparameters, verdict.steps] == [[], [], [], []]
    assert verdict.loss_difference <= (2e-3 if "moe" in name else verdict.loss_tolerance)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_slices_have_their_optimizer(dtype: str, tmp_path: Path) -> None:
    """Each tensor-parallel rank numbers its own slices; they are read as whole parameters, and resumed as slices."""
    spec = Spec("tp2_s0", model="megatron", tensor_parallel=2, stage=0, dtype=dtype, groups=2, universal_info=True,
                invariant=True, steps=2, steps_after=2)  # fmt: skip
    made = train(spec, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    assert not zckpt.open(made).warnings
    assert zckpt.verify(made, deep=True).sound
    zckpt.reshard(made, tmp_path / "cut", world_size=2, verify=True)
    verdict = resume(tmp_path / "cut", spec.at(4), made)
    assert verdict.ok, verdict
