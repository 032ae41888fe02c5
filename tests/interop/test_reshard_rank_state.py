"""Optimizers whose state is not one value for each element: what DeepSpeed resumes, and what is refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.interop.cut import cut
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

OWN = {
    "lamb": {"trust_ratio", "weight_norm", "adam_norm"},
    "adafactor": {"RMS"},
    "blockwise": {"__bnb_optimizer_quant_state__"},
    "prodigy": {"d", "d_max", "d_numerator", "d_denom", "d_hat"},  # in its param groups
}


def spec(name: str, **changes: Any) -> Spec:
    return Spec(name, **{"world_size": 3, "steps": 3, "steps_after": 2, **changes})


MUON = spec("muon_s2", model="matrices", optimizer="muon")
MUON_FP32 = spec("muon_s1_fp32", model="matrices", optimizer="muon", stage=1, dtype="fp32")
MUON_ALIGNED = spec("muon_s2_palign", model="matrices", optimizer="muon", world_size=4, parameter_alignment=True)
MUON_TWO = spec("muon_s2_dp2", model="matrices", optimizer="muon", world_size=2)
MUON_S3 = spec("muon_s3", model="matrices", optimizer="muon", stage=3)
NADAM = spec("nadam_s2", optimizer="nadam")


CASES = [spec(f"{kind}_s{stage}", optimizer=kind, stage=stage, dtype="fp32", world_size=2)
         for kind, stage in (("lamb", 2), ("adafactor", 1), ("blockwise", 1), ("blockwise", 3))]  # fmt: skip
CASES.append(spec("prodigy_s2", optimizer="prodigy", dtype="fp32", world_size=2, groups=2))


@pytest.mark.parametrize("source", some(CASES[::2], CASES[1::2]), ids=lambda one: one.name)
def test_state_of_each_rank_is_its_own(source, made):
    """It is read, refused by name for other ranks and formats, and resumed by as many ranks with the same losses."""
    folder, keys = made(source), OWN[source.optimizer]
    found = zckpt.open(folder)
    assert {value.key for value in found.per_rank} == keys
    assert {value.rank for value in found.per_rank} == {0, 1}
    assert not any(keys & group.state.keys() for group in found.param_groups)
    verified = zckpt.verify(folder, deep=True)
    assert verified.sound, verified.findings
    assert_consolidated(folder, Truth(folder))

    other_stage = 1 if source.stage == 3 else 3
    for write in (
        partial(zckpt.reshard, world_size=3),
        partial(zckpt.reshard, world_size=2, stage=other_stage),
        *(partial(zckpt.convert, to=to) for to in ("zckpt", "consolidated", "universal")),
    ):
        with pytest.raises(zckpt.UnsupportedError, match=min(keys)) as error:
            write(folder, Path("other"))
        assert all(key in str(error.value) for key in keys)
    assert not Path("other").exists()

    zckpt.reshard(folder, "cut", world_size=2, verify=True)
    verdict = resume("cut", source, folder)
    assert verdict.ok, verdict
    assert [one.key for one in zckpt.open("cut").per_rank] == [one.key for one in found.per_rank]


def test_sums_over_all_elements_are_not_given_to_each_of_more_ranks(made, tmp_path):
    """One rank's estimates of Prodigy are the whole model's. Of two, each would add to the sum of both."""
    folder = made(spec("prodigy_one", optimizer="prodigy", dtype="fp32", world_size=1, groups=2))
    assert zckpt.open(folder).per_rank == []
    zckpt.convert(folder, tmp_path / "dcp", to="dcp")
    for source, verb in ((folder, zckpt.reshard), (tmp_path / "dcp", zckpt.convert)):
        its = {} if verb is zckpt.reshard else {"to": "deepspeed", "stage": 1}
        with pytest.raises(zckpt.UnsupportedError, match=r"d_numerator of param groups: .* sums .* found 2 ranks"):
            verb(source, tmp_path / "two", world_size=2, **its)
        verb(source, tmp_path / verb.__name__, world_size=1, **its)
        assert zckpt.diff(folder, tmp_path / verb.__name__).equal_slots


def test_what_stages_and_slices_have_of_their_own_is_read_so(made):
    """Where each of them has one data-parallel rank, only they differ; the copies of a tied layer drift apart."""
    stages = spec("prodigy_pp2", model="pipeline", stage=1, pipeline_parallel=2, world_size=2, groups=2, dtype="fp32",
                  optimizer="prodigy")  # fmt: skip
    folder = made(stages)
    found = zckpt.open(folder)
    assert {(one.key, one.mp_rank) for one in found.per_rank} >= {("d", 0), ("d", 1), ("d_numerator", 0)}
    assert len(found.param_groups) == 2
    with pytest.raises(zckpt.UnsupportedError, match="d_numerator"):
        zckpt.convert(folder, "dcp", to="dcp")
    with pytest.raises(zckpt.UnsupportedError, match=r"expected 1 rank for each of tp=1 pp=2 .* found 1 rank of ZeRO"):
        zckpt.reshard(folder, "one", world_size=1, pipeline_parallel_size=1)
    zckpt.reshard(folder, "same", world_size=1)
    again = zckpt.open("same").per_rank
    assert [(one.key, one.mp_rank, one.value) for one in again] == [(o.key, o.mp_rank, o.value) for o in found.per_rank]
    verdict = resume("same", stages, folder)
    assert [*verdict.slots, *verdict.hyperparameters, *verdict.steps] == []


@pytest.mark.parametrize(
    "source", some([NADAM, MUON], [MUON_S3, MUON_FP32, MUON_ALIGNED, MUON_TWO]), ids=lambda one: one.name
)
def test_what_is_read_is_the_truth(source, made):
    folder = made(source)
    assert_consolidated(folder, Truth(folder))
    assert zckpt.open(folder).per_rank == []
    verified = zckpt.verify(folder, deep=True)
    assert verified.sound, verified.findings


MATRICES = [cut(MUON, 2, stage=3), cut(NADAM, 2)]
MORE = [
    cut(MUON, 2),
    cut(MUON_S3, 2, stage=2),
    cut(NADAM, 4),
    cut(MUON, 4),
    cut(MUON_TWO, 3),
    cut(MUON_FP32, 4, stage=2),
    cut(MUON_ALIGNED, 3),
]


@pytest.mark.parametrize("case", some(MATRICES, MORE), ids=str)
def test_deepspeed_resumes_resharded_matrices(case, made):
    case.assert_goes_on(made(case.source), Path("cut"), verify=True)


def test_muon_is_not_made_elastic(made):
    with pytest.raises(zckpt.UnsupportedError, match="momentum"):
        zckpt.reshard(made(MUON), "cut", world_size=2, elastic=True)


@pytest.mark.parametrize("source", CASES[:2], ids=lambda one: one.name)
def test_what_each_step_computes_anew_is_dropped(source, made):
    """State, weights and steps arrive; losses are others by nature, for these optimizers take norms of a partition."""
    folder = made(source)
    zckpt.reshard(folder, "cut", world_size=1, drop=sorted(OWN[source.optimizer]))
    verdict = resume("cut", source.at(1), folder)
    assert verdict.differences == []
