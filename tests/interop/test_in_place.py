"""Stock DeepSpeed engines load checkpoints of other world sizes, stages and formats in place."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.deepspeed_engine import SPECS, Spec, resume
from tests.deepspeed_engine.spec import ds_config
from tests.gloo import on_ranks, run
from tests.interop.cut import TOLERANCE, cut
from tests.interop.test_reshard_parallel import TP2
from tests.interop.test_reshard_pipeline import FEW, MANY, TWO
from tests.live import trained
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from tests.test_safety import MODEL, called, named, poison, shell
from tests.training.test_live_checksums import FLIPPED_NBYTES, flipped, records
from tests.truth import Truth, assert_same
from zckpt.codes import CHECKSUM
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError, ZckptError

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = ("s0_fp32_dp2", "s1_fp32_dp3", "s2_bf16_dp4", "s3_bf16_dp3")
CASES = list(product(SOURCES, range(4), (1, 2, 3, 4)))
"""A source, and the stage and ranks of the engine that loads it."""
KEPT = [("s0_fp32_dp2", 2, 3), ("s2_bf16_dp4", 0, 3)]


def assert_resumes(run_directory: Path, spec: Spec, truth: Path) -> None:
    """Let the engine of a description load a checkpoint, and hold its state and next losses against the truth."""
    verdict = resume(run_directory, spec, truth, in_place=True)
    assert verdict.losses
    verdict.assert_goes_on(TOLERANCE[spec.dtype])


@pytest.mark.parametrize(("source", "stage", "world_size"), some(KEPT, [one for one in CASES if one not in KEPT]))
def test_engine_goes_on_at_any_stage_and_number_of_ranks(source, stage, world_size):
    spec = SPECS[source].at(world_size, stage=stage)
    assert_resumes(FIXTURES / source, spec, FIXTURES / source)


FORMS = [
    ("s1_bf16_dp2_bf16opt", {"world_size": 3}),
    ("s3_bf16_dp2", {"stage": 1, "bf16_optimizer": True, "world_size": 3}),
    ("s2_bf16_dp2_elastic", {"elastic": False, "world_size": 1}),
    ("s2_fp16_dp2", {"stage": 0, "world_size": 1}),
]
OTHERS = [
    ("s2_bf16_dp2_rr", {"stage": 1, "world_size": 3}),
    ("s1_fp32_dp3_palign", {"stage": 2, "world_size": 2}),
    ("s2_bf16_dp2", {"round_robin": True, "world_size": 3}),
    ("s1_bf16_dp2_bf16opt", {"stage": 2, "bf16_optimizer": False, "world_size": 1}),
    ("s0_bf16_dp2", {"stage": 1, "bf16_optimizer": True, "world_size": 1}),
    ("s2_bf16_dp2_frozengroup", {"stage": 0, "world_size": 1}),
    ("s2_bf16_dp2_zerodim", {"stage": 1, "world_size": 3}),
    ("s1_bf16_dp2_empty", {"world_size": 3}),
    ("s2_bf16_dp2_lion", {"stage": 3, "world_size": 1}),
    ("s2_bf16_dp2_sgdm", {"stage": 0, "world_size": 3}),
    ("s2_bf16_dp2_client", {"stage": 3, "world_size": 1}),
    ("s2_bf16_dp2_elastic", {"world_size": 2}),
    ("s2_bf16_dp2_elastic", {"stage": 3, "world_size": 3}),
    ("s2_bf16_dp2_elastic_fused", {"world_size": 3}),
]


@pytest.mark.parametrize(("source", "changes"), some(FORMS, OTHERS))
def test_engine_goes_on_with_other_forms_of_state(source, changes):
    spec = dataclasses.replace(SPECS[source], **changes)
    assert_resumes(FIXTURES / source, spec, FIXTURES / source)


def test_sub_groups_are_cut_as_the_engine_cuts_them():
    source = "s2_bf16_dp4"
    spec = SPECS[source].at(1, stage=3, sub_group_size=50)
    verdict = resume(FIXTURES / source, spec, FIXTURES / source, in_place=True)
    assert (verdict.slots, verdict.weights, verdict.hyperparameters) == ([], [], [])
    assert verdict.loss_difference <= TOLERANCE["bf16"]


def go_on_beside_frozen_groups(rank, world_size, folder: Path, loads: str = "") -> list[float]:
    import deepspeed

    spec = Spec("frozen_group", stage=3, dtype="fp32", world_size=world_size)
    torch.manual_seed(len(loads))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    for frozen in (model[0].bias, *model[2].parameters()):
        frozen.requires_grad_(False)
    groups = [[model[0].weight], [model[0].bias], list(model[1].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.AdamW([{"params": one, "lr": 0.1 * at} for at, one in enumerate(groups, 1)])
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=ds_config(spec), dist_init_required=False
    )

    def step() -> float:
        loss = engine(torch.ones(2, 3)).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss)

    if not loads:
        step()
        engine.save_checkpoint(str(folder / "saved"))
    else:
        with nullcontext() if loads.startswith("cut") else zckpt.deepspeed.any_world_size(engine):
            assert engine.load_checkpoint(str(folder / loads))[0]
    return [step(), step()]


def test_groups_in_which_nothing_is_trained_stay_without_sub_groups(tmp_path):
    """ZeRO-3 makes none of them, and files them without any, also those after the last that is trained."""
    expected = run(go_on_beside_frozen_groups, 2, tmp_path)[0]
    zckpt.reshard(tmp_path / "saved", tmp_path / "cut", world_size=1, verify=True)
    zckpt.convert(tmp_path / "saved", tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "dcp", tmp_path / "cut-from-dcp", to="deepspeed", world_size=1, stage=3)
    for loads in ("saved", "cut", "dcp", "cut-from-dcp"):
        assert run(go_on_beside_frozen_groups, 1, tmp_path, loads)[0] == pytest.approx(expected, rel=1e-5)


def tied_ends() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    return model


@on_ranks(2, each=product((0, 2, 3)))
def test_a_checkpoint_may_have_any_name_of_a_tied_parameter_but_not_two_values(rank, world_size, stage, tmp_path):
    import deepspeed

    saved, optimizer = trained(tied_ends(), steps=2, lr=0.1)
    weights = {name: one.detach().clone() for name, one in saved.state_dict().items()}
    for path, held in (
        (tmp_path / str(stage) / "second", {name: weights[name] for name in ("1.weight", "2.weight")}),
        (tmp_path / str(stage) / "differ", {**weights, "2.weight": weights["2.weight"] + 1}),
    ):
        model, spec = tied_ends(), Spec("tied", stage=stage, dtype="fp32", world_size=world_size)
        its = torch.optim.AdamW(model.parameters(), lr=0.5)
        engine, *_ = deepspeed.initialize(model=model, optimizer=its, config=ds_config(spec), dist_init_required=False)
        if rank == 0:
            path.mkdir(parents=True)
            save_file(held, path / "model.safetensors")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
            (path / "trainer_state.json").write_text('{"global_step": 2}')
        torch.distributed.barrier()
        with zckpt.deepspeed.any_world_size(engine):
            if path.name == "differ":
                with refusing(UsageError, "2.weight is the same tensor as 0.weight here, but not in the checkpoint"):
                    engine.load_checkpoint(str(path))
            else:
                assert engine.load_checkpoint(str(path))[0]
                zckpt.assert_restored(path, model=engine, optimizer=engine.optimizer)


@pytest.mark.parametrize("source", ["s2_bf16_dp2", "s3_bf16_dp2"])
def test_weights_of_an_engine_in_float32_are_the_masters(source):
    """ZeRO-3 files no weights in 16 bits beside them."""
    spec = SPECS[source].at(1, stage=0, dtype="fp32")
    assert resume(FIXTURES / source, spec, FIXTURES / source, in_place=True).slots == []


FORMATS = [("zckpt", 0, 1), ("dcp", 2, 1)]
MORE_FORMATS = [
    (to, stage, world_size)
    for to in ("zckpt", "dcp", "universal", "consolidated")
    for stage, world_size in ((0, 1), (1, 2), (2, 1), (3, 3))
    if (to, stage, world_size) not in FORMATS
]


@pytest.mark.parametrize(("target", "stage", "world_size"), some(FORMATS, MORE_FORMATS))
def test_engine_goes_on_with_other_formats(target, stage, world_size, tmp_path):
    source = "s2_bf16_dp4"
    made = tmp_path / "one" / "made"  # beside it lies what DeepSpeed calls `latest_universal`
    made.parent.mkdir()
    zckpt.convert(FIXTURES / source, made, to=target)
    assert_resumes(made, SPECS[source].at(world_size, stage=stage), FIXTURES / source)


DEGREES = [
    (4, {"tensor_parallel": 4, "stage": 1}), (2, {}), (6, {"stage": 3}), (3, {"tensor_parallel": 1, "stage": 3}),
    (4, {"stage": 1}), (4, {"stage": 3}),
]  # fmt: skip
PIPELINES = [case for case in (*FEW, *MANY) if "elastic" not in case.source.name and case.source.expert_parallel == 1]
IN_16_BITS = [SPECS[name] for name in ("tp2_s1_bf16_dp2", "tp2_s3_bf16_dp2")]
CUTS = some(
    [(TP2[1], TP2[1].at(1, tensor_parallel=1)), (TWO, cut(TWO, 1).resumed)],
    [
        *((TP2[2], TP2[2].at(world_size, **changes)) for world_size, changes in DEGREES),
        *((spec, spec.at(world_size)) for spec in IN_16_BITS for world_size in (2, 6)),
        *((case.source, case.resumed) for case in PIPELINES),
    ],
)


@pytest.mark.parametrize(("source", "target"), CUTS, ids=lambda one: f"{one.name}-{one.world_size}")
def test_engine_goes_on_with_other_slices_and_stages(source, target, made):
    folder = made(source)
    assert_resumes(folder, target, folder)


# --- what is asked for


def engine_of(spec: Spec) -> Any:
    from tests.deepspeed_engine.training import build_engine

    return build_engine(spec, seed=5)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_optimization_stage() == 3):
        return {name: one.detach().clone() for name, one in parameters.items()}


HOW: dict[str, dict[str, bool]] = {
    "module": {"load_module_only": True}, "without state": {"load_optimizer_states": False}, "all": {}
}  # fmt: skip


@on_ranks(1, each=list(product((2, 3), HOW)))  # the stages in which they differ
def test_parts_of_a_checkpoint_are_loaded_as_asked(rank, world_size, stage, how):
    spec, source = SPECS["s2_bf16_dp2_client"], FIXTURES / "s2_bf16_dp2_client"
    engine = engine_of(spec.at(world_size, stage=stage))
    method = engine.load_checkpoint
    with zckpt.deepspeed.any_world_size(engine) as loading:
        path, client = engine.load_checkpoint(str(source), **HOW[how])
        assert Path(path) == source
        assert len(loading.in_place) == 1
        assert loading.read_nbytes > 0
        assert engine.load_checkpoint(str(source / "absent")) == (None, None)
    assert engine.load_checkpoint == method
    truth = Truth(source).kind("module")
    for name, value in weights_of(engine).items():
        assert_same(value, truth[name], name)
    assert client.keys() & spec.client_state.keys()
    assert engine.global_steps == (0 if how == "module" else 5)
    assert how == "module" or engine.lr_scheduler.state_dict()["last_batch_iteration"] == 4
    assert not [*Path("/dev/shm").glob(f"zckpt-names-{os.getpid()}-*")]


@on_ranks(
    1,
    each=[
        ("hf_llama_s2_bf16_dp2", Spec("mine"), UsageError, "has no parameters.*load_module_only=True"),
        ("s2_bf16_dp2", Spec("mine", groups=2), ZckptError, "no param group"),
        ("moe_ep1_s2_bf16_dp2", SPECS["moe_ep1_s2_bf16_dp2"], UnsupportedError, "zckpt reshard"),
        (
            "pp2_s0_fp32_dp2",
            SPECS["pp2_s0_fp32_dp2"].at(1, pipeline_parallel=1),
            UnsupportedError,
            "ranks of each of 1 stages, found deepspeed on 2 .* of each of 2 stages",
        ),
        ("own_lamb_s2_fp32_dp2", Spec("mine"), UnsupportedError, ""),
        ("README.md", Spec("mine"), ZckptError, "cannot be read: expected a directory"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_nothing_changed(rank, world_size, source, spec, kind, words):
    engine = engine_of(spec.at(world_size))
    before, stock = weights_of(engine), engine.checkpoint_engine
    with zckpt.deepspeed.any_world_size(engine), pytest.raises(kind, match=words):
        engine.load_checkpoint(str(FIXTURES / source))
    assert engine.checkpoint_engine is stock
    assert_same_tree(weights_of(engine), before)


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
