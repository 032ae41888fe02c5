"""ZeroOptimizer in files and dicts: real DeepSpeed loads what we save and trains on, and we load what it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.deepspeed_engine import Spec, models, optimizers
from tests.deepspeed_engine.training import batch, build_engine
from tests.deepspeed_engine.truth import read_live
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from tests.truth import Truth, assert_same
from zckpt.optim import DynamicLossScaler, ZeroOptimizer, files

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[3] / "fixtures"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS, STEPS_AFTER = 2, 2

AS_DEEPSPEED = {"reduce_scatter": False, "reduce_bucket_size": 500_000_000}
"""Sums are taken in the same order as DeepSpeed takes them by default; stage 1 takes them when backward has ended."""

Slots = dict[str, dict[str, torch.Tensor]]


def build(spec: Spec, seed: int = models.MODEL_SEED, **options: Any) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """Return the model of a description and an optimizer like its engine's."""
    model = models.build_model(spec, seed).to(DTYPES[spec.dtype])
    return model, optimizer_of(spec, model, **options)


def optimizer_of(spec: Spec, model: torch.nn.Module, **options: Any) -> ZeroOptimizer:
    theirs = optimizers.KINDS[spec.optimizer](models.param_groups(spec, model))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return ZeroOptimizer(
        [{**group, "params": [(names[p], p) for p in group["params"]]} for group in theirs.param_groups],
        type(theirs),
        stage=spec.stage,
        clip_grad=spec.clip,
        round_robin_gradients=spec.round_robin,
        parameter_alignment=spec.parameter_alignment,
        elastic_checkpoint=spec.elastic,
        **{"overlap_comm": spec.stage == 2, **AS_DEEPSPEED, **options},
    )


def groups_of_experts(spec: Spec, model: torch.nn.Module) -> dict[str, dist.ProcessGroup]:
    """Let DeepSpeed part the experts of a model, and return the ranks that have the same, by the group's name."""
    if spec.model != "moe":
        return {}
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups as topology

    for module in model.modules():
        if isinstance(module, MoE):
            module.set_deepspeed_parallelism()
    name = f"ep_size_{spec.expert_parallel}"
    return {name: topology._get_expert_data_parallel_group(name)}


def losses(model: torch.nn.Module, optimizer: ZeroOptimizer, spec: Spec, steps: range) -> list[float]:
    """Train, and return this rank's losses."""
    found = []
    for step in steps:
        loss = model(*batch(spec, step))
        optimizer.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def full(optimizer: ZeroOptimizer) -> Slots:
    """Return all state, whole, by slot and name; under the names that tests/deepspeed_engine has."""
    found: Slots = {}
    for name, parameter in optimizer.names().items():
        if parameter in optimizer._place:
            state = optimizer.optim.state[optimizer.find(name)[0].master]
            for slot in ("master", *(key for key, value in state.items() if torch.is_tensor(value) and value.dim())):
                found.setdefault("fp32" if slot == "master" else slot, {})[name] = optimizer.full_state(name, slot)
    return found


def after() -> range:
    """Return the steps that are trained after saving."""
    return range(STEPS + 1, STEPS + STEPS_AFTER + 1)


def save_run(rank, world_size, spec: Spec, path: Path, options: dict[str, Any]) -> tuple[Slots, list[float]]:
    model, optimizer = build(spec, **options)
    losses(model, optimizer, spec, range(1, STEPS + 1))
    files.save(optimizer, path, model=model, step=STEPS)
    return full(optimizer), losses(model, optimizer, spec, after())


def full_of_engine(engine: Any, spec: Spec) -> Slots:
    """Return all state that an engine has, whole, by slot and name."""
    slots: Slots = {}
    for name, its in read_live(engine, spec).slots.items():
        for slot, value in its.items():
            slots.setdefault(slot, {})[name] = value
    return slots


def resume_in_deepspeed(rank, world_size, spec: Spec, run_directory: Path) -> tuple[Slots, Any, list[float]]:
    engine = build_engine(spec, seed=models.MODEL_SEED + 1)
    path, _ = engine.load_checkpoint(str(run_directory))
    assert path is not None
    slots = full_of_engine(engine, spec)
    scaler = engine.optimizer.loss_scaler
    about = (engine.global_steps, getattr(scaler, "cur_scale", None), getattr(scaler, "cur_hysteresis", None))
    found = []
    for step in after():
        loss = engine(*batch(spec, step))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return slots, about, found


def merged_by_deepspeed(rank, world_size, run_directory: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(run_directory)))


def assert_state(found: Slots, expected: Slots) -> None:
    """Fail unless all state is the same, bit for bit."""
    assert found.keys() == expected.keys()
    for slot, values in expected.items():
        assert found[slot].keys() == values.keys()
        for name, value in values.items():
            assert_same(found[slot][name], value.float(), f"{slot}/{name}")


def assert_holds(path: Path, expected: Slots) -> None:
    """Fail unless a checkpoint has this state, bit for bit."""
    opened = zckpt.open(path)
    assert opened.step == STEPS
    held = {
        slot: {name: opened.read(name, None if slot == "fp32" else slot) for name in values}
        for slot, values in expected.items()
    }
    assert_state(held, expected)


CASES = [
    (Spec("clipped", stage=1, dtype="bf16", world_size=3, clip=0.5, scheduler=False), {}),
    (Spec("round_robin", stage=2, dtype="fp32", world_size=3, round_robin=True), {}),
    (Spec("elastic", stage=2, dtype="bf16", world_size=2, optimizer="lion", elastic=True), {}),
]
MORE = [
    (Spec("adamw", stage=2, dtype="bf16", world_size=2), {}),
    (Spec("momentum", stage=1, dtype="fp32", world_size=2, optimizer="sgdm"), {}),
    (Spec("aligned", stage=2, dtype="bf16", world_size=2, parameter_alignment=True), {}),
    (Spec("elastic_adamw", stage=1, dtype="bf16", world_size=2, elastic=True), {}),
    (Spec("one_rank", stage=2, dtype="fp32", world_size=1), {}),
    (Spec("frozen_in_group", stage=2, dtype="bf16", world_size=2, frozen_in_group=True), {}),
    (Spec("offload", stage=2, dtype="fp32", world_size=2), {"offload": True}),
]


@pytest.mark.parametrize(("spec", "options"), some(CASES, MORE))
def test_deepspeed_trains_on_with_what_we_save(spec, options, saved):
    ours = run(save_run, spec.world_size, spec, saved, options)
    state = ours[0][0]
    assert (saved.parent / "latest").read_text() == saved.name
    assert_holds(saved, state)
    [merged] = run(merged_by_deepspeed, 1, saved.parent)
    for name, value in state["fp32"].items():
        assert_same(merged[name], value, name)
    for (_, trained), (found, (steps, _, _), resumed) in zip(
        ours, run(resume_in_deepspeed, spec.world_size, spec, saved.parent), strict=True
    ):
        assert steps == STEPS
        assert resumed == trained
        assert_state(found, state)


@on_ranks(2)
def test_what_was_saved_before_a_step_is_loaded(world_size):
    spec = Spec("elastic_before_a_step", stage=1, dtype="fp32", world_size=world_size, elastic=True)
    model, optimizer = build(spec)
    files.save(optimizer, "global_step0", model=model)
    other, loaded = build(spec, seed=models.MODEL_SEED + 1)
    zckpt.load("global_step0", model=other, optimizer=loaded)
    assert losses(other, loaded, spec, after()) == losses(model, optimizer, spec, after())


def test_the_loss_scale_goes_along(saved):
    spec = Spec("fp16", stage=2, dtype="fp16", world_size=2)
    scaler = DynamicLossScaler(cur_scale=2.0**9, scale_window=100, cur_hysteresis=1)
    trained = run(save_run, 2, spec, saved, {"loss_scale": scaler})[0][1]
    _, about, resumed = run(resume_in_deepspeed, 2, spec, saved.parent)[0]
    assert about == (STEPS, 2.0**9, 1)
    assert resumed == trained


# --- what others have saved


def like(path: Path, **options: Any) -> ZeroOptimizer:
    """Return an optimizer of parameters of a checkpoint's names, shapes and types, all zero."""
    checkpoint = zckpt.open(path)
    parameters = {
        name: torch.nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype)))
        for name, p in checkpoint.parameters.items()
        if p.group is not None
    }
    kind = {"momentum_buffer": torch.optim.SGD, "sum": torch.optim.Adagrad}
    keys = {key for p in checkpoint.parameters.values() for key in p.slots}
    optimizer_class = next((kind[key] for key in kind if key in keys), torch.optim.AdamW)
    made = [{"params": [(n, parameters[n]) for n in group.parameters]} for group in checkpoint.param_groups]
    return ZeroOptimizer(made, optimizer_class, lr=1.0, **options)


NAMES = ["s3_bf16_dp3", "s2_bf16_dp2_adagrad1g", "s1_fp32_dp4_sgdm", "s1_bf16_dp2_bf16opt"]


@pytest.mark.parametrize("world_size", some([3], [1, 5]))
def test_checkpoints_of_deepspeed_are_loaded_at_any_number_of_ranks(world_size):
    """Of optimizers that tests/training/test_load_any_format.py has not, and by name alone."""
    run(load_by_name, world_size)


def load_by_name(rank, world_size) -> None:
    for name in NAMES:
        optimizer, truth = like(FIXTURES / name), Truth(FIXTURES / name)
        files.load(optimizer, FIXTURES / name)
        slots = full(optimizer)
        for parameter, master in slots["fp32"].items():
            weight = optimizer.names()[parameter].detach()
            assert_same(master, truth.masters[parameter].float(), f"{name}: master/{parameter}")
            assert_same(weight, truth.masters[parameter].to(weight.dtype), f"{name}: weight/{parameter}")
        for slot in truth.slots:
            for parameter, value in truth.kind(slot).items():
                assert_same(slots[slot][parameter].float(), value, f"{name}: {slot}/{parameter}")


def load_files(rank, world_size, path: Path, spec: Spec) -> None:
    """Load DeepSpeed's own state dicts, read with torch.load, and train on beside its engine."""
    import deepspeed  # noqa: F401  # whose classes the files name

    engine = build_engine(spec, seed=models.MODEL_SEED + 1)
    engine.load_checkpoint(str(path))
    model, optimizer = build(spec, seed=models.MODEL_SEED + 2)
    folder = path / f"global_step{spec.steps}"
    states = [
        torch.load(next(folder.glob(f"*zero_pp_rank_{r}_mp_rank_00_optim_states.pt")), weights_only=False)
        for r in range(world_size)
    ]
    frozen = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    model.load_state_dict(frozen)
    optimizer.load_state_dict(states)
    for step in range(6, 9):
        loss, ours = engine(*batch(spec, step)), model(*batch(spec, step))
        engine.backward(loss)
        engine.step()
        optimizer.backward(ours)
        optimizer.step()
        assert loss.item() == ours.item()
    assert_state(full_of_engine(engine, spec), full(optimizer))


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s1_fp32_dp3", "s2_bf16_dp2_rr"])
def test_state_dicts_of_deepspeed_train_on(name):
    from tests.deepspeed_engine import SPECS

    spec = SPECS[name]
    run(load_files, spec.world_size, FIXTURES / name, spec)


# --- state dicts


def keep_states(rank, world_size, spec: Spec, path: Path) -> Slots:
    model, optimizer = build(spec)
    losses(model, optimizer, spec, range(1, STEPS + 1))
    torch.save(optimizer.state_dict(), path / f"{rank}.pt")
    return full(optimizer)


def restore_states(rank, world_size, spec: Spec, path: Path, saved_by: int) -> Slots | str:
    states = [torch.load(path / f"{r}.pt", weights_only=False) for r in range(saved_by)]
    _, optimizer = build(spec, seed=models.MODEL_SEED + 1)
    before = full_masters(optimizer)
    try:
        optimizer.load_state_dict(states)
    except ValueError as error:
        assert_same_tree(full_masters(optimizer), before)
        return str(error)
    for name, value in full_masters(optimizer).items():
        weight = optimizer.names()[name].detach()
        assert torch.equal(weight, value.to(weight.dtype))
    return full(optimizer)


def full_masters(optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.full_state(n, "master") for n, p in optimizer.names().items() if p in optimizer._place}


@pytest.mark.parametrize(("elastic", "world_sizes"), [(True, (1, 4)), (False, (3, 4))])
def test_state_dicts_at_other_numbers_of_ranks(elastic, world_sizes, tmp_path):
    spec = Spec("states", stage=2, dtype="bf16", world_size=3, elastic=elastic)
    expected = run(keep_states, 3, spec, tmp_path)[0]
    for world_size in world_sizes:
        [found, *_] = run(restore_states, world_size, spec.at(world_size), tmp_path, 3)
        if elastic or world_size == 3:
            assert_state(found, expected)
        else:
            assert "rigid state of 3 ranks does not fit" in found
            assert "zckpt reshard SOURCE TARGET --world-size 4" in found


@on_ranks(2)
def test_masters_from_weights(world_size):
    spec = Spec("rounded", stage=1, dtype="bf16", world_size=world_size)
    model, optimizer = build(spec)
    losses(model, optimizer, spec, range(1, 3))
    state = optimizer.state_dict()
    _, other = build(spec, seed=1)
    of_its_own_weights = full_masters(other)
    other.load_state_dict(state, load_from_fp32_weights=False)
    assert_same_tree(full_masters(other), of_its_own_weights)
    other.load_state_dict(state, load_optimizer_states=False)
    assert_same_tree(full_masters(other), full_masters(optimizer))


@on_ranks(2)
def test_refused_states(world_size):
    spec = Spec("refused", stage=1, dtype="bf16", world_size=world_size)
    _, optimizer = build(spec)
    state = optimizer.state_dict()
    masters = state["single_partition_of_fp32_groups"]
    for given, error, message in (
        ({}, TypeError, "a ZeRO-1/2 state dict"),
        ([], TypeError, "an empty list"),
        ({**state, "single_partition_of_fp32_groups": masters[:1]}, ValueError, "1 param groups, but .* has 3"),
        ({**state, "single_partition_of_fp32_groups": [t[:-1] for t in masters]}, ValueError, "param group 0 has"),
        ({**state, "param_alignment_paddings": [[1], [2], [3]]}, ValueError, "parameter_alignment"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(given)
    unnamed = ZeroOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="no names"):
        unnamed.state_dict()


# --- the tools


def load_and_train(rank, world_size, spec: Spec, path: Path) -> tuple[Slots, list[float]]:
    model, optimizer = build(spec, seed=models.MODEL_SEED + 1)
    reference, _ = build(spec)
    model.load_state_dict(reference.state_dict())  # what is frozen
    files.load(optimizer, path, model=model)
    return full(optimizer), losses(model, optimizer, spec, after())


def test_tools_treat_it_like_any_other(saved):
    spec = Spec("tools", stage=2, dtype="fp32", world_size=2)
    results = run(save_run, 2, spec, saved, {})
    state = results[0][0]
    trained = [sum(one[1][step] for one in results) / 2 for step in range(STEPS_AFTER)]
    zckpt.reshard(saved.parent, "three", world_size=3)
    zckpt.convert(saved.parent, "universal", to="universal")
    for source, world_size in ((saved, 1), (Path("three"), 3), (Path("universal"), 2)):
        loaded = run(load_and_train, world_size, spec.at(world_size), source)
        assert_state(loaded[0][0], state)
        means = [sum(one[1][step] for one in loaded) / world_size for step in range(STEPS_AFTER)]
        assert means == pytest.approx(trained, abs=2e-5)  # sums are taken in another order


@on_ranks(2)
def test_refusals_reach_all_ranks(world_size):
    model, optimizer = build(Spec("small", world_size=world_size))
    other = ZeroOptimizer([("strange", torch.nn.Parameter(torch.ones(3)))], torch.optim.SGD, lr=0.1)
    unnamed = ZeroOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    Path("exists").mkdir(exist_ok=True)
    with refusing(zckpt.UsageError, "param groups"):
        files.load(other, FIXTURES / "s2_bf16_dp2")
    with refusing(zckpt.UsageError, "has no name"):
        files.save(unnamed, "unnamed")
    with pytest.raises(zckpt.TargetExistsError):
        files.save(optimizer, "exists", model=model)
    dist.barrier()
    assert names_in() == ["exists"]
