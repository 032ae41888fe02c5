"""Experts and parts of models in files: DeepSpeed trains on with them, zckpt reads, converts and loads them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zckpt
from tests.deepspeed_engine import Spec, models, tensor_parallel
from tests.deepspeed_engine.truth import global_expert
from tests.gloo import on_ranks, run
from tests.live import of_all_ranks
from tests.optim.zero.test_files import (
    DTYPES,
    FIXTURES,
    STEPS,
    Slots,
    after,
    assert_holds,
    assert_state,
    full,
    groups_of_experts,
    losses,
    optimizer_of,
    resume_in_deepspeed,
)
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.optim import ZeroOptimizer, files
from zckpt.optim.zero.files import experts_of, place_of

pytestmark = pytest.mark.interop

MEGATRON: dict[str, Any] = {"model": "megatron", "tensor_parallel": 2, "universal_info": True, "groups": 2}

EXPERTS = [
    Spec("moe_ep2", model="moe", expert_parallel=2, stage=2, dtype="bf16", world_size=2),
    Spec("moe_ep2_of_4", model="moe", expert_parallel=2, stage=1, dtype="fp32", world_size=4, clip=0.5),
    Spec("moe_ep1", model="moe", expert_parallel=1, stage=2, dtype="fp32", world_size=2),
]
PARTS = [
    Spec("tp2_s2", stage=2, dtype="fp32", world_size=4, clip=0.5, **MEGATRON),
    Spec("tp2_s1", stage=1, dtype="bf16", world_size=2, **MEGATRON),
]


def build(spec: Spec, seed: int = models.MODEL_SEED) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """Return the model of a description and an optimizer like its engine's."""
    options: dict[str, Any] = {}
    if spec.tensor_parallel > 1:
        grid = tensor_parallel.use_grid(spec)
        options = {"process_group": grid.get_data_parallel_group(), "model_parallel": grid}
    model = models.build_model(spec, seed).to(DTYPES[spec.dtype])
    options["expert_data_parallel_groups"] = groups_of_experts(spec, model)
    return model, optimizer_of(spec, model, **options)


def merged(optimizer: ZeroOptimizer, spec: Spec) -> Slots:
    """Return all state of all ranks, whole, by slot and global name."""
    mine = full(optimizer)
    if spec.model == "moe":
        experts = experts_of(optimizer, {p: n for n, p in optimizer.names().items()})
        rank = next(iter(experts.places.values())).rank
        firsts = defaultdict(lambda: rank * spec.experts // spec.expert_parallel)  # of any layer
        mine = {slot: {global_expert(n, firsts): v for n, v in values.items()} for slot, values in mine.items()}
    told = of_all_ranks(mine)
    if spec.model == "moe":
        return {slot: {n: v for one in told for n, v in one[slot].items()} for slot in mine}
    slices = told[: spec.tensor_parallel]
    return {
        slot: {name: tensor_parallel.merge(name, [one[slot][name] for one in slices]) for name in values}
        for slot, values in mine.items()
    }


def save_run(rank, world_size, spec: Spec, path: Path) -> tuple[Slots, list[float]]:
    model, optimizer = build(spec)
    losses(model, optimizer, spec, range(1, STEPS + 1))
    info = tensor_parallel.universal_info(spec) if spec.tensor_parallel > 1 else None
    extra = {"universal_checkpoint_info": info, "iteration": STEPS} if info else {}
    files.save(optimizer, path, model=model, step=STEPS, beside={"extra": extra})
    if spec.model == "moe":
        saving = zckpt.save(native(path), model=model, optimizer=optimizer, step=STEPS, async_=spec.stage == 1)
        _ = saving and saving.result()
    return merged(optimizer, spec), losses(model, optimizer, spec, after())


def native(path: Path) -> Path:
    """Where the same is in zckpt's format."""
    return path.parents[1] / "saved"


def load_part(rank, world_size, spec: Spec, path: Path) -> tuple[Slots, list[float]]:
    """From this rank's own file; by name, nothing says which part is whose."""
    model, optimizer = build(spec, models.MODEL_SEED + 1)
    with refusing(zckpt.ZckptError, "which part of a tensor this rank has"):
        files.load(optimizer, path, model=model)
    own = next(path.glob(f"*zero_pp_rank_{optimizer.rank}_mp_rank_{rank % spec.tensor_parallel:02d}_optim_states.pt"))
    optimizer.load_state_dict(torch.load(own, weights_only=False))
    return merged(optimizer, spec), losses(model, optimizer, spec, after())


@pytest.mark.parametrize("spec", some([EXPERTS[0], PARTS[1]], [*EXPERTS[1:], PARTS[0]]), ids=lambda spec: spec.name)
def test_deepspeed_and_zckpt_read_what_we_save(spec, saved):
    ours = run(save_run, spec.world_size, spec, saved)
    resumed = run(resume_in_deepspeed, spec.world_size, spec, saved.parent)
    assert {steps for _, (steps, _, _), _ in resumed} == {STEPS}
    found = [(state, again) for state, _, again in resumed]
    parts = run(load_part, spec.world_size, spec, saved) if spec in PARTS else []
    for (state, trained), (its, again) in zip(itertools.cycle(ours), found + parts):
        assert again == trained
        assert_state(its, state)
    assert zckpt.verify(saved, deep=True).sound
    zckpt.convert(saved, "native", to="zckpt")
    for where in (saved, Path("native"), *([native(saved)] if spec.model == "moe" else [])):
        assert_holds(where, ours[0][0])


def load_run(rank, world_size, spec: Spec, path: Path) -> tuple[Slots, list[float]]:
    model, optimizer = build(spec, models.MODEL_SEED + 1)
    if path.name == "saved":
        restored = zckpt.load(path, model=model, optimizer=optimizer)
        assert (restored.step, restored.missing, restored.unexpected) == (STEPS, [], [])
    else:
        files.load(optimizer, path, model=model)
    return merged(optimizer, spec), losses(model, optimizer, spec, after())


@pytest.mark.parametrize("every", some([False], [True]))
def test_experts_are_loaded_by_any_number_of_ranks(every, saved):
    """DeepSpeed's files, and zckpt's, in turn."""
    two, four, one = EXPERTS
    state, trained = run(save_run, 4, four, saved)[0]
    others = [four, Spec("two", model="moe", expert_parallel=2, stage=2, dtype="fp32", world_size=2), one]
    for turn, spec in enumerate(others):
        for where in (saved, native(saved)) if every else (saved if turn % 2 else native(saved),):
            for number, (found, again) in enumerate(run(load_run, spec.world_size, spec, where)):
                assert_state(found, state)
                assert spec is not four or number or again == trained
    fixture = FIXTURES / two.name.replace("moe_ep2", "moe_ep2_s2_bf16_dp2")
    truth = zckpt.open(fixture)
    for found, _ in run(load_run, 2, two, fixture):
        assert set(found) == {"fp32", "exp_avg", "exp_avg_sq"}
        for slot, values in found.items():
            for name, value in values.items():
                assert torch.equal(truth.read(name, "master" if slot == "fp32" else slot), value), name


# --- refusals


@on_ranks(2)
def test_what_cannot_be_saved_is_refused(rank, world_size):
    groups = {"e": [dist.new_group([one]) for one in range(world_size)][rank]}
    for name, is_told in (
        ("experts.0.weight", False), ("moe.deepspeed_moe.experts.deepspeed_experts.0.weight", True),
    ):  # fmt: skip
        given = [
            {"params": [("dense", nn.Parameter(torch.ones(4)))]},
            {"params": [(name, nn.Parameter(torch.ones(3)))], "moe": True, "name": "e"},
        ]
        optimizer = ZeroOptimizer(given, torch.optim.SGD, lr=0.1, expert_data_parallel_groups=groups)
        for form in ("deepspeed", "zckpt"):
            words = r"experts\.0\.weight belongs to an expert, but its name does not say to which"
            with nullcontext() if is_told else refusing(zckpt.ZckptError, words):
                zckpt.save(form, optimizer=optimizer, format=form)
            dist.barrier()
            assert Path(form).exists() == is_told


PLACES = {
    (0, 2, 4): (0, 2, False), (1, 3, 5): (1, 2, False), (0, 1, 2): (0, 2, True), (3, 4, 5): (1, 2, True),
    (2,): (2, 6, False), (0, 1, 2, 3, 4, 5): (0, 1, False), (0, 3): (0, 3, False), (2, 3): (1, 3, True),
}  # fmt: skip


@on_ranks(1)
def test_places_of_experts():
    every = list(range(6))
    for sharing, wanted in PLACES.items():
        place = place_of([*sharing], every)
        assert (place.rank, place.degree, place.data_first) == wanted
    with refusing(zckpt.UnsupportedError, "expected every 2th rank, or 3 neighbours"):
        place_of([0, 1, 4], every)
    with refusing(zckpt.UnsupportedError, "data-parallel ranks 1, 2 of 6"):
        place_of([1, 2], every)
