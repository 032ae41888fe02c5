"""Experts without ZeRO, of several degrees and with flat masters: whose state each number is, and DeepSpeed goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop


def layers(name: str, *of: tuple[int, int, bool], **changes: object) -> Spec:
    known = {"stage": 0, "steps": 2, "steps_after": 2, "world_size": 2, **changes}
    return Spec(name, model="moe_layers", expert_layers=of, **known)  # type: ignore[arg-type]


FLAT = layers("moe_s0_flat", (4, 1, False), (4, 2, True), dtype="fp16", optimizer="fused")
OTHERS = [
    layers("moe_s0_fp32", (2, 2, True), (4, 4, False), (4, 1, False), dtype="fp32", world_size=4),
    layers("moe_s0_frozen", (2, 2, False), (4, 4, False), dtype="fp32", world_size=4, frozen_experts=True),
    layers("moe_s0_bf16", (4, 1, False), (4, 2, False)),
    layers("moe_s0_data_first", (2, 2, False), (4, 4, False), dtype="fp32", world_size=4,
           config={"use_data_before_expert_parallelism": True}),
]  # fmt: skip


@pytest.mark.parametrize("spec", some([FLAT], OTHERS), ids=lambda one: one.name)
def test_layers_over_different_numbers_of_ranks_are_read(spec, made):
    folder = made(spec)
    assert_consolidated(folder, Truth(folder))
    found = zckpt.open(folder)
    assert (found.warnings, found.unnamed) == ([], {})
    assert found.topology.ep == max(degree for _, degree, _ in spec.expert_layers)
    assert zckpt.verify(folder, deep=True).sound
    _another_order(Path(shutil.copytree(folder, "run")), flat=spec.optimizer == "fused")
    assert zckpt.fingerprint("run").text == zckpt.fingerprint(folder).text
    assert zckpt.verify("run", deep=True).sound
    zckpt.reshard(folder, "cut", world_size=4, verify=True)


def _another_order(run: Path, *, flat: bool) -> None:
    """Give the groups of experts in a file another order, as another process has them: by degree and not."""
    path = next(run.glob("*/expp_rank_1_*"))
    content = torch.load(path, weights_only=False)
    own = content["optimizer"]
    base = own.get("optimizer_state_dict", own)
    order = sorted(
        range(len(base["param_groups"])), key=lambda i: (base["param_groups"][i]["name"].startswith("ep"), -i)
    )
    base["param_groups"] = [base["param_groups"][i] for i in order]
    numbers = [n for group in base["param_groups"] for n in group["params"]]
    new = {old: number for number, old in enumerate(numbers)}
    base["state"] = {new[old]: state for old, state in base["state"].items()}
    for group in base["param_groups"]:
        group["params"] = [new[old] for old in group["params"]]
    for key in ("fp32_groups_flat",) if flat else ("fp32_groups",):
        if key in own:
            own[key] = [own[key][i] for i in order]
    torch.save(content, path)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [FLAT, *OTHERS], ids=lambda one: one.name)
def test_deepspeed_goes_on_from_them_under_zero(spec, made):
    """All layers over one number of ranks: groups of several have an order that is each process's own."""
    folder = made(spec)
    zckpt.convert(folder, "z", to="zckpt")
    options = {"stage": 2, "world_size": spec.world_size, "expert_parallel_size": 1}
    zckpt.convert("z", "back", to="deepspeed", verify=True, **options)
    of_one = tuple((count, 1, residual) for count, _, residual in spec.expert_layers)
    verdict = resume("back", spec.at(spec.world_size, stage=2, expert_layers=of_one), folder)
    verdict.assert_goes_on({"fp32": 2e-5, "bf16": 3e-3, "fp16": 2e-2}[spec.dtype])  # docs: moments of fp16


@pytest.mark.nightly
def test_degrees_that_do_not_divide_each_other_are_refused(made):
    """Each rank loads the file of its expert rank of 3: rank 3 that of rank 0, which has other experts of the 2."""
    folder = made(layers("moe_s0_2_and_3", (2, 2, False), (3, 3, False), dtype="fp32", world_size=6))
    assert_consolidated(folder, Truth(folder))
    with pytest.raises(zckpt.UnsupportedError, match="over 2, 3 ranks, which DeepSpeed loads wrongly"):
        zckpt.reshard(folder, "cut", world_size=6)
