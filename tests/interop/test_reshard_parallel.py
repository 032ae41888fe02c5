"""Experts and slices that `reshard` spreads over another number of ranks: stock DeepSpeed goes on from there.

Compared bit for bit, as in `test_reshard`: masters, every slot, weights, steps and hyperparameters, by global name and
for the whole parameter. Losses are compared within tolerances: another number of ranks adds up in another order;
DeepSpeed's balancing loss of experts is a mean over ranks of products of means, so that it depends on which rank has
which tokens (MOE_TOLERANCE).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.interop.cut import cut, spec
from tests.pairwise import some
from tests.truth import bits

pytestmark = pytest.mark.interop

MOE_TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}


def moe(name: str, **changes: Any) -> Spec:
    return spec(name, **{"model": "moe", **changes})


def sliced(name: str, degree: int, **changes: Any) -> Spec:
    known = {"model": "megatron", "tensor_parallel": degree, "universal_info": True, "groups": 2, "invariant": True}
    return spec(name, **{**known, **changes})


EP1, EP2 = moe("ep1_fp32", dtype="fp32"), moe("ep2_fp32", expert_parallel=2, dtype="fp32")
EP2_BF16 = moe("ep2_bf16", expert_parallel=2)
EP4 = moe("ep4_s1", expert_parallel=4, stage=1)

LAYERS = ((3, 1, True), (6, 3, False))
"""Experts over one rank and over three: odd numbers, and more ranks than elements of some biases."""


def both(name: str, **changes: Any) -> Spec:
    known = {"model": "moe_megatron", "tensor_parallel": 2, "expert_parallel": 2, "invariant": True, "stage": 1}
    return moe(name, **{**known, "dtype": "fp32", **changes})


BOTH, DATA_FIRST = both("tp2_ep2"), moe("dbe_ep2", expert_parallel=2, dtype="fp32",
                                        config={"use_data_before_expert_parallelism": True})  # fmt: skip
SEVERAL = moe("layers", model="moe_layers", expert_layers=LAYERS, dtype="fp32", world_size=3)
SLICED_EXPERTS = both("tp2_sliced_experts", sliced_experts=True)
EVERY_THIRD = {"expert_layers": ((3, 3, True), (6, 3, False))}

MIXTRAL = spec("mixtral_s3", stage=3, model="mixtral", dtype="fp32", world_size=2)
"""Transformers' own, whose experts are ordinary parameters in leaf modules of ZeRO-3."""

TP2 = {stage: sliced(f"tp2_s{stage}", 2, stage=stage, dtype="fp32") for stage in (1, 2, 3)}
TP1 = sliced("tp1_s1", 1, stage=1, dtype="fp32")
TP2_BF16 = sliced("tp2_bf16", 2, universal_version=0.4)

ELSEWHERE = {"stage": 2, "expert_parallel_size": 3}

CASES = [
    cut(EP2_BF16, 2),
    cut(BOTH, 2, tensor_parallel_size=2, expert_parallel_size=4),
    cut(SEVERAL, 3, EVERY_THIRD, through="dcp", **ELSEWHERE),
    cut(TP2[1], 2, tensor_parallel_size=1),
    cut(sliced("tp1_bf16", 1, world_size=2, stage=3, universal_version=0.4), 2, tensor_parallel_size=2),
]
MORE = [
    # experts
    *(cut(EP2, ranks) for ranks in (2, 4, 6)),
    *(cut(EP2, 4, expert_parallel_size=degree) for degree in (1, 4)),
    cut(EP2, 4, expert_parallel_size=2, round_robin=True),
    cut(moe("ep2_rr", expert_parallel=2, round_robin=True, world_size=2), 4, expert_parallel_size=4),
    *(cut(EP1, ranks, expert_parallel_size=2) for ranks in (2, 4)),
    cut(EP1, 6, expert_parallel_size=1, stage=1),
    cut(EP2_BF16, 6, expert_parallel_size=1),
    cut(EP4, 2, expert_parallel_size=2, stage=2),
    cut(EP4, 3, expert_parallel_size=1),
    cut(moe("ep2_palign", expert_parallel=2, parameter_alignment=True), 3, expert_parallel_size=1),
    cut(moe("ep2_sgdm", expert_parallel=2, optimizer="sgdm"), 2, expert_parallel_size=1),
    *(cut(MIXTRAL, ranks, stage=stage) for ranks, stage in ((3, 3), (2, 2))),
    # over tensor-parallel ranks as well, data-parallel first, or of each layer over a number of its own
    *(cut(BOTH, ranks, tensor_parallel_size=tp, expert_parallel_size=ep)
      for ranks, tp, ep in ((2, 2, 1), (3, 2, 2), (2, 1, 1), (1, 4, 4))),
    cut(both("tp2_ep4_bf16", expert_parallel=4, stage=2, dtype="bf16"), 2, tensor_parallel_size=2,
        expert_parallel_size=2),
    cut(both("tp1_ep2", tensor_parallel=1, world_size=2), 1, tensor_parallel_size=2, expert_parallel_size=2),
    *(cut(SLICED_EXPERTS, 2, tensor_parallel_size=tp, expert_parallel_size=ep) for tp, ep in ((2, 1), (1, 2))),
    *(cut(DATA_FIRST, ranks) for ranks in (2, 6)),
    *(cut(DATA_FIRST, ranks, expert_parallel_size=ep) for ranks, ep in ((4, 4), (3, 1))),
    cut(SEVERAL, 6),
    cut(SEVERAL, 3, EVERY_THIRD, expert_parallel_size=3),
    cut(SEVERAL, 2, {"expert_layers": ((3, 1, True), (6, 1, False))}, expert_parallel_size=1),
    # of another format; sliced experts as slices again, which it says, or spread over the ranks of the slices
    *(cut(SEVERAL, 3, EVERY_THIRD, through=to, **ELSEWHERE) for to in ("zckpt", "consolidated")),
    *(cut(SLICED_EXPERTS, 2, {"sliced_experts": spread is None}, through=to, tensor_parallel_size=2,
          expert_parallel_size=2, sliced_experts=spread)
      for to in ("zckpt", "consolidated") for spread in (None, False)),
    # slices: each stage merged, split and spread
    *(cut(TP2[stage], 2, tensor_parallel_size=1) for stage in (2, 3)),
    *(cut(TP2[stage], 1, tensor_parallel_size=4) for stage in (1, 2, 3)),
    *(cut(TP2[stage], 3, tensor_parallel_size=2) for stage in (1, 3)),
    cut(TP2[2], 1, tensor_parallel_size=2),
    cut(TP2[1], 4, tensor_parallel_size=1, stage=3),
    cut(TP2[3], 2, tensor_parallel_size=1, stage=2),
    cut(TP1, 2, tensor_parallel_size=2),
    cut(TP1, 1, tensor_parallel_size=4, stage=3),
    cut(TP2_BF16, 3, tensor_parallel_size=1),
    cut(TP2_BF16, 1, tensor_parallel_size=2),
    cut(sliced("drift_s2", 2, invariant=False, dtype="fp32", world_size=2), 2),  # copies stay as far apart
    cut(sliced("tp4_palign", 4, parameter_alignment=True), 2, tensor_parallel_size=2),
    cut(sliced("tp2_rr", 2, round_robin=True), 2, tensor_parallel_size=1),
    cut(sliced("tp2_sgdm", 2, optimizer="sgdm", stage=3, world_size=2), 1, tensor_parallel_size=4),
]  # fmt: skip


@pytest.mark.parametrize("case", some(CASES, MORE), ids=str)
def test_deepspeed_resumes_experts_and_slices(case, made):
    within = MOE_TOLERANCE[case.source.dtype] if "moe" in case.source.model else None
    case.assert_goes_on(made(case.source), Path("cut"), within)


def test_ranks_may_have_their_groups_in_orders_of_their_own(made):
    """As they do where each was started with a hash seed of its own: DeepSpeed goes through a set of their names."""
    folder = made(SEVERAL)
    run = Path(shutil.copytree(folder, "run"))
    for path in run.glob("*/*zero_pp_rank_[12]_*"):
        content = torch.load(path, weights_only=False)
        z = content["optimizer_state_dict"]
        base = z["base_optimizer_state"]
        names = [group["name"] for group in base["param_groups"]]
        order = sorted(range(len(names)), key=lambda at: (names[at].startswith("ep_size"), names[at], at))
        assert order != sorted(order)
        base["state"] = {new: base["state"][at] for new, at in enumerate(order)}
        base["param_groups"] = [{**base["param_groups"][at], "params": [new]} for new, at in enumerate(order)]
        for key in ("single_partition_of_fp32_groups", "partition_count", "group_paddings", "param_slice_mappings",
                    "param_alignment_paddings"):  # fmt: skip
            z[key] = [z[key][at] for at in order] if z.get(key) is not None else None
        torch.save(content, path)
    assert zckpt.fingerprint(run).text == zckpt.fingerprint(folder).text
    assert zckpt.verify(run, deep=True).sound
    zckpt.reshard(run, "cut", world_size=3)
    assert zckpt.diff(folder, "cut").equal
    with pytest.raises(zckpt.UnsupportedError, match="in different orders"):
        zckpt.strip(run, "lean", padding=True)
    (path,) = run.glob("*/*zero_pp_rank_1_*optim_states.pt")
    path.write_bytes(path.read_bytes()[:300])
    assert [one.file for one in zckpt.verify(run).findings] == [str(path)]
    (path,) = run.glob("*/*zero_pp_rank_2_*optim_states.pt")
    content = torch.load(path, weights_only=False)
    for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["name"] = ["no text"]
    torch.save(content, path)
    assert not zckpt.verify(run).sound


@pytest.mark.nightly
@pytest.mark.parametrize("degree", [2, 1])
def test_deepspeed_resumes_frozen_experts(degree, made):
    """Its own ZeRO-2 lists those of rank 0, and gives them to all ranks; without the list each has its own."""
    source = moe("frozen_experts", model="moe_layers", expert_layers=((2, 2, False), (4, 2, False)), dtype="fp32",
               world_size=2, frozen_experts=True)  # fmt: skip
    folder = made(source)
    assert len(resume(folder, source, folder).weights) == 8
    zckpt.reshard(folder, "cut", world_size=2, expert_parallel_size=degree, verify=True)
    assert zckpt.verify("cut", deep=True).sound
    of_degree = tuple((count, degree, residual) for count, _, residual in source.expert_layers)
    verdict = resume("cut", source.at(2, expert_layers=of_degree), folder)
    assert verdict.differences == []
    zckpt.reshard("cut", "back", world_size=2, expert_parallel_size=2)
    assert zckpt.diff(folder, "back").equal
    assert [p.frozen for p in zckpt.open(folder).parameters.values()].count(True) == 16


@pytest.mark.nightly
@pytest.mark.parametrize("degree", [2, 1])
def test_deepspeed_resumes_experts_in_groups_that_it_splits_by_size(degree, made, monkeypatch):
    spec = moe("split", expert_parallel=2, dtype="fp32", world_size=2, expert_group_size=200)
    monkeypatch.setattr("zckpt.formats.deepspeed.target_groups.EXPERT_GROUP_NUMEL", spec.expert_group_size)
    case = cut(spec, 2, through="zckpt", expert_parallel_size=degree)
    case.assert_goes_on(made(spec), Path("cut"), MOE_TOLERANCE["fp32"])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.every(2)
def test_copies_that_drifted_apart_become_their_mean(stage, made):
    """Training goes on from another model then, as it does from a universal checkpoint: losses are not compared."""
    source = sliced(f"drift_s{stage}", 2, stage=stage, invariant=False, world_size=2)
    folder = made(source)
    zckpt.reshard(folder, "cut", world_size=2, tensor_parallel_size=1)
    verdict = resume("cut", source.at(2, tensor_parallel=1), folder)
    assert [*verdict.slots, *verdict.hyperparameters, *verdict.steps] == []
    averaged = {"layer.local_norm.weight", "layer.local_norm.bias"}
    assert set(verdict.weights) <= averaged  # the truth has the mean of rounded values
    truth, found = load_file(folder / "truth.safetensors"), zckpt.open("cut")
    for name in averaged:
        master = truth[f"fp32/{name}"]
        assert torch.equal(bits(found.read(name, "master")), bits(master))
        if stage == 1:
            assert torch.equal(bits(found.read(name, "weight")), bits(master.bfloat16()))
