"""Stock DeepSpeed engines load checkpoints of other world sizes, stages and formats in place."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt
from tests.deepspeed_engine import SPECS, Spec, resume
from tests.gloo import run
from tests.interop.cut import TOLERANCE, cut
from tests.interop.test_reshard_pipeline import FEW, MANY, TWO
from tests.pairwise import pairwise, some
from tests.test_safety import MODEL, called, named, poison, shell
from tests.training.test_live_checksums import FLIPPED_NBYTES, flipped, records
from tests.truth import Truth, assert_same
from zckpt.codes import CHECKSUM
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError, ZckptError

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = ("s0_fp32_dp2", "s1_fp32_dp3", "s2_bf16_dp4", "s3_bf16_dp3")
FAST = {
    ("s0_fp32_dp2", 2, 3), ("s1_fp32_dp3", 3, 2), ("s2_bf16_dp4", 0, 3), ("s2_bf16_dp4", 3, 1),
    ("s3_bf16_dp3", 1, 4), ("s3_bf16_dp3", 0, 1),
}  # fmt: skip
"""Every source, every stage and every number of ranks; the whole product is nightly."""


def assert_resumes(run_directory: Path, spec: Spec, truth: Path) -> None:
    """Let the engine of a description load a checkpoint, and hold its state and next losses against the truth."""
    verdict = resume(run_directory, spec, truth, in_place=True)
    assert verdict.losses
    verdict.assert_goes_on(TOLERANCE[spec.dtype])


@pytest.mark.parametrize(
    ("source", "stage", "world_size"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.nightly)
        for case in ((s, stage, n) for s in SOURCES for stage in range(4) for n in (1, 2, 3, 4))
    ],
)
@pytest.mark.every(2)
def test_engine_goes_on_at_any_stage_and_number_of_ranks(source, stage, world_size):
    spec = SPECS[source].at(world_size, stage=stage)
    assert_resumes(FIXTURES / source, spec, FIXTURES / source)


OTHERS = [
    ("s2_bf16_dp2_rr", {"stage": 1, "world_size": 3}),
    ("s1_fp32_dp3_palign", {"stage": 2, "world_size": 2}),
    ("s2_bf16_dp2", {"round_robin": True, "world_size": 3}),
    ("s1_bf16_dp2_bf16opt", {"world_size": 3}),
    ("s1_bf16_dp2_bf16opt", {"stage": 2, "bf16_optimizer": False, "world_size": 1}),
    ("s3_bf16_dp2", {"stage": 1, "bf16_optimizer": True, "world_size": 3}),
    ("s0_bf16_dp2", {"stage": 1, "bf16_optimizer": True, "world_size": 1}),
    ("s2_bf16_dp2_frozengroup", {"stage": 0, "world_size": 1}),
    ("s2_bf16_dp2_zerodim", {"stage": 1, "world_size": 3}),
    ("s1_bf16_dp2_empty", {"world_size": 3}),
    ("s2_bf16_dp2_lion", {"stage": 3, "world_size": 1}),
    ("s2_bf16_dp2_sgdm", {"stage": 0, "world_size": 3}),
    ("s2_bf16_dp2_client", {"stage": 3, "world_size": 1}),
    ("s2_bf16_dp2_elastic", {"elastic": False, "world_size": 1}),
    ("s2_bf16_dp2_elastic", {"world_size": 2}),
    ("s2_bf16_dp2_elastic", {"stage": 3, "world_size": 3}),
    ("s2_bf16_dp2_elastic_fused", {"world_size": 3}),
]


@pytest.mark.parametrize(
    ("source", "changes"),
    [pytest.param(*case, marks=[] if n in (3, 5, 13) else pytest.mark.nightly) for n, case in enumerate(OTHERS)],
)
def test_engine_goes_on_with_other_forms_of_state(source, changes):
    changes = dict(changes)
    spec = SPECS[source].at(changes.pop("world_size"), **changes)
    assert_resumes(FIXTURES / source, spec, FIXTURES / source)


def test_sub_groups_are_cut_as_the_engine_cuts_them():
    source = "s2_bf16_dp4"
    spec = SPECS[source].at(1, stage=3, sub_group_size=50)
    verdict = resume(FIXTURES / source, spec, FIXTURES / source, in_place=True)
    assert (verdict.slots, verdict.weights, verdict.hyperparameters) == ([], [], [])
    assert verdict.loss_difference <= TOLERANCE["bf16"]


@pytest.mark.parametrize("source", ["s2_bf16_dp2", "s3_bf16_dp2"])
def test_weights_of_an_engine_in_float32_are_the_masters(source):
    """ZeRO-3 files no weights in 16 bits beside them."""
    spec = SPECS[source].at(1, stage=0, dtype="fp32")
    assert resume(FIXTURES / source, spec, FIXTURES / source, in_place=True).slots == []


@pytest.mark.parametrize(
    ("target", "stage", "world_size"),
    [
        pytest.param(to, stage, n, marks=[] if (to, stage) in (("zckpt", 0), ("dcp", 2)) else pytest.mark.nightly)
        for to in ("zckpt", "dcp", "universal", "consolidated")
        for stage, n in ((0, 1), (1, 2), (2, 1), (3, 3))
    ],
)
def test_engine_goes_on_with_other_formats(target, stage, world_size, tmp_path):
    source = "s2_bf16_dp4"
    made = tmp_path / "one" / "made"  # beside it lies what DeepSpeed calls `latest_universal`
    made.parent.mkdir()
    zckpt.convert(FIXTURES / source, made, to=target)
    assert_resumes(made, SPECS[source].at(world_size, stage=stage), FIXTURES / source)


SLICED = Spec(
    "tp2_s2", model="megatron", world_size=4, tensor_parallel=2, universal_info=True, invariant=True, dtype="fp32",
    groups=2, steps=3, steps_after=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(*case, marks=pytest.mark.nightly if n else [])
        for n, case in enumerate(
            [
                (1, {"tensor_parallel": 1}), (4, {"tensor_parallel": 4, "stage": 1}), (2, {}), (6, {"stage": 3}),
                (3, {"tensor_parallel": 1, "stage": 3}), (4, {"stage": 1}), (4, {"stage": 3}),
            ]
        )
    ],
)  # fmt: skip
def test_engine_goes_on_with_slices_of_another_degree(world_size, changes, made):
    source = made(SLICED)
    assert_resumes(source, SLICED.at(world_size, **changes), source)


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["tp2_s1_bf16_dp2", "tp2_s3_bf16_dp2"])
@pytest.mark.parametrize("world_size", [2, 6])
def test_engine_goes_on_with_slices_in_16_bits(source, world_size):
    assert_resumes(FIXTURES / source, SPECS[source].at(world_size), FIXTURES / source)


PIPELINES = [case for case in (*FEW, *MANY) if "elastic" not in case.source.name and case.source.expert_parallel == 1]
FEWEST = cut(TWO, 1)


@pytest.mark.parametrize("case", some([FEWEST], PIPELINES), ids=str)
def test_engine_goes_on_with_pipelines_of_other_stages(case, made):
    source = made(case.source)
    assert_resumes(source, case.resumed, source)


# --- every stage at every number of ranks, to every other


def train_and_save(rank, world_size, spec: Spec, folder: Path) -> None:
    """Make a checkpoint of the real engine, written by zckpt in one form or the other, and the truth about it."""
    from tests.deepspeed_engine.training import _produce

    written = ("deepspeed", "zckpt")[(spec.stage + world_size) % 2]
    with zckpt.deepspeed.durable_saves(async_=world_size > 1, format=written):
        _produce(rank, world_size, spec, folder)


CELLS = [
    pytest.param(*one.values, marks=pytest.mark.nightly)
    for one in pairwise(range(4), (1, 2, 3, 4), range(4), (1, 2, 3, 4))
    if not one.marks
]


@pytest.mark.parametrize(("stage", "ranks", "to_stage", "to_ranks"), CELLS)
def test_engine_goes_on_from_every_stage_and_number_of_ranks(stage, ranks, to_stage, to_ranks, shared):
    dtype = ("bf16", "fp32")[(stage + ranks) % 2]
    spec = Spec(f"s{stage}_{dtype}_dp{ranks}", stage=stage, dtype=dtype, world_size=ranks, steps=3, steps_after=3)

    def make(folder: Path) -> Path:
        run(train_and_save, ranks, spec, folder)
        return folder

    folder = shared(f"cell-{spec.name}", make)
    assert_resumes(folder, spec.at(to_ranks, stage=to_stage), folder)


# --- what is asked for


def engine_of(spec: Spec) -> Any:
    from tests.deepspeed_engine.training import build_engine

    return build_engine(spec, seed=5)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    held: AbstractContextManager[Any] = nullcontext()
    if engine.zero_optimization_stage() == 3:
        held = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with held:
        return {name: one.detach().clone() for name, one in parameters.items()}


def ask(rank, world_size, source: Path) -> dict[str, Any]:
    """Load in several ways, at the stages in which they differ; return what there was then."""
    told: dict[str, Any] = {}
    spec = SPECS["s2_bf16_dp2_client"]
    before = set(Path("/dev/shm").glob("zckpt-names-*"))
    for stage in (2, 3):
        for name, how in (
            ("module", {"load_module_only": True}),
            ("without state", {"load_optimizer_states": False}),
            ("all", {}),
        ):
            engine = engine_of(spec.at(world_size, stage=stage))
            method = engine.load_checkpoint
            with zckpt.deepspeed.any_world_size(engine) as loading:
                path, client = engine.load_checkpoint(str(source), **how)
                assert Path(path) == source
                assert len(loading.in_place) == 1
                assert loading.read_nbytes > 0
                assert engine.load_checkpoint(str(source / "absent")) == (None, None)
            assert engine.load_checkpoint == method
            told[f"{name} {stage}"] = (
                weights_of(engine), engine.global_steps, client,
                engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
            )  # fmt: skip
    assert set(Path("/dev/shm").glob("zckpt-names-*")) == before
    return told


def test_parts_of_a_checkpoint_are_loaded_as_asked():
    source = FIXTURES / "s2_bf16_dp2_client"
    truth = Truth(source)
    for name, (weights, steps, client, scheduler) in run(ask, 1, source)[0].items():
        for parameter, value in truth.kind("module").items():
            if parameter in weights:
                assert_same(weights[parameter], value, f"{name}: {parameter}")
        assert steps == (0 if name.startswith("module") else 5), name
        assert "note" in client or client.keys() & SPECS["s2_bf16_dp2_client"].client_state.keys(), name
        if not name.startswith("module"):
            assert scheduler["last_batch_iteration"] == 4, name


def refuse(rank, world_size, sources: dict[str, Path]) -> dict[str, str]:
    """Load what cannot be; return the errors, and whether the engine is as it was."""
    told = {}
    for kind, source in sources.items():
        spec = SPECS["moe_ep1_s2_bf16_dp2"] if kind == "experts" else Spec("mine", stage=2)
        if kind == "experts":
            spec = spec.at(1)
        if kind == "other groups":
            spec = spec.at(1, groups=2)
        engine = engine_of(spec.at(world_size))
        before, stock = weights_of(engine), engine.checkpoint_engine
        try:
            with zckpt.deepspeed.any_world_size(engine):
                engine.load_checkpoint(str(source))
        except ZckptError as error:
            told[kind] = f"{type(error).__name__}: {error}"
        assert engine.checkpoint_engine is stock
        assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    return told


def test_what_cannot_be_loaded_is_refused_and_nothing_changed():
    told = run(
        refuse,
        1,
        {
            "other model": FIXTURES / "hf_llama_s2_bf16_dp2",
            "other groups": FIXTURES / "s2_bf16_dp2",
            "experts": FIXTURES / "moe_ep1_s2_bf16_dp2",
            "each rank's own": FIXTURES / "own_lamb_s2_fp32_dp2",
            "file": FIXTURES / "README.md",
        },
    )[0]
    assert told["other model"].startswith(UsageError.__name__)
    assert "has no parameters" in told["other model"]
    assert "load_module_only=True" in told["other model"]
    assert "no param group" in told["other groups"]
    assert told["experts"].startswith(UnsupportedError.__name__)
    assert "zckpt reshard" in told["experts"]
    assert told["each rank's own"].startswith(UnsupportedError.__name__)
    assert "cannot be read: expected a directory" in told["file"]


def trust_little(rank, world_size, source: Path, evil: Path, sentinel: Path) -> dict[str, str]:
    """Load data in client state, objects that run something, and damage; return the client state, as text."""
    engine = engine_of(SPECS["s2_bf16_dp2_client"].at(world_size))
    with zckpt.deepspeed.any_world_size(engine):
        _, client = engine.load_checkpoint(str(source))
        with pytest.raises(UnsupportedError, match=r"found posix.system; .*unpickle_client_state=True"):
            engine.load_checkpoint(str(evil), load_lr_scheduler_states=False)
        assert not sentinel.exists()
        sums = [one for one in records(source) if one.nbytes > FLIPPED_NBYTES]
        assert len(sums) > 10
        for one in (next(one for one in sums if kind in one.path) for kind in ("model_states", "pp_rank_1")):
            with flipped(one, rank):
                with pytest.raises(DamagedFileError, match="the engine is in part the checkpoint's") as told:
                    engine.load_checkpoint(str(source))
                with zckpt.deepspeed.any_world_size(engine, verify=False):
                    engine.load_checkpoint(str(source))
            assert told.value.code == CHECKSUM
    with zckpt.deepspeed.any_world_size(engine, unpickle_client_state=True), zckpt.deepspeed.any_world_size(engine):
        engine.load_checkpoint(str(evil), load_lr_scheduler_states=False)
    assert sentinel.exists()
    torch.distributed.barrier()
    return {key: repr(value) for key, value in client.items()}


@pytest.mark.parametrize("world_size", [1, 2])  # in place, and as it is
def test_only_data_is_unpickled_unless_more_is_asked_for_and_damage_is_refused(world_size, tmp_path):
    source = shutil.copytree(FIXTURES / "s2_bf16_dp2_client", tmp_path / "client")
    sentinel = tmp_path / "sentinel"
    evil = shutil.copytree(FIXTURES / "s2_bf16_dp2", tmp_path / "evil")
    poison(evil / MODEL, called(named("posix:system"), shell(sentinel)))
    [model] = source.rglob("mp_rank_00_model_states.pt")
    expected = torch.load(model, weights_only=False) | {"nothing": np.zeros((0, 3))}  # `bytes()` makes its
    torch.save(expected, model)
    for told in run(trust_little, world_size, source, evil, sentinel):
        for key in (*SPECS["s2_bf16_dp2_client"].client_state, "nothing"):
            assert told[key] == repr(expected[key])


# --- programs that make the engine themselves


def accelerated(rank, world_size, directory: Path, resumes: bool) -> tuple[list[float], float]:
    """Train with Accelerate and DeepSpeed: three steps and a state, or from that state on; the next losses and lr."""
    import os

    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    AcceleratorState._reset_state()
    PartialState._reset_state()
    config = {
        "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 12 // world_size, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(int(resumes))
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(number: int) -> float:
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(number)).chunk(world_size)[rank]
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total / world_size)

    with zckpt.deepspeed.durable_saves() as saves, zckpt.deepspeed.any_world_size() as loading:
        if resumes:
            accelerator.load_state(str(directory))
        else:
            for number in range(3):
                step(number)
            accelerator.save_state(str(directory))
    assert (len(loading.in_place), len(saves.saved)) == ((1, 0) if resumes else (0, 1))
    return [step(number) for number in range(3, 6)], optimizer.param_groups[0]["lr"]


def test_accelerate_saves_and_resumes_at_another_number_of_processes(tmp_path):
    losses, rate = run(accelerated, 2, tmp_path / "state", False, fresh=True)[0]
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    found, its = run(accelerated, 3, tmp_path / "state", True, fresh=True)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    assert its == pytest.approx(rate)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files
