"""What `strip` leaves, the programs it came from load: real DeepSpeed resumes or loads it, real torch steps with it.

Where nothing that counts was taken away (padding, unused bytes), the resumed run has the same bits and, at the same
number of ranks on the same machine, the same losses to the last digit.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import gloo
from tests.deepspeed_engine import Spec, resume
from tests.interop.cut import small as spec
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.truth import Truth
from zckpt.operations.convert import convert
from zckpt.operations.sanitize import sanitize
from zckpt.operations.strip import strip

pytestmark = pytest.mark.interop


ADAMW = spec("s2_adamw")
SGDM = spec("s2_sgdm", dtype="fp32", optimizer="sgdm")
LION = spec("s2_lion", optimizer="lion")
SCHEDULED = spec("s2_lion_scheduled", optimizer="lion", scheduler=True)
FUSED = spec("s2_fused", optimizer="fused_layout")
MANY_RANKS = spec("s2_sgdm_dp6", optimizer="sgdm", world_size=6)
ELASTIC = spec("s2_elastic", elastic=True, optimizer="fused_layout")
ALIGNED = spec("s1_palign", stage=1, parameter_alignment=True, optimizer="lion")
BF16_OPTIMIZER = spec("s1_bf16opt", stage=1, bf16_optimizer=True)
STAGE3 = spec("s3_adamw", stage=3)
STAGE0 = spec("s0_adamw", stage=0, dtype="fp32", world_size=2)


# --- nothing that counts is taken away


@pytest.mark.parametrize(
    ("wanted", "lean"),
    some([(SGDM, True), (BF16_OPTIMIZER, False)],
         [(ADAMW, False), (FUSED, True), (ALIGNED, True), (ELASTIC, True), (SCHEDULED, False), (LION, True),
          (MANY_RANKS, True)]),
    ids=lambda one: one.name if isinstance(one, Spec) else "lean" if one else "rigid",
)  # fmt: skip
def test_deepspeed_resumes_without_padding(wanted, lean, made, tmp_path):
    done = strip(made(wanted), tmp_path / "thin", padding=True, unreferenced=True)
    assert done.saved["padding"] > 0
    state = optimizer_content(tmp_path / "thin")["base_optimizer_state"]
    assert isinstance(state, list) is lean
    verdict = resume(tmp_path / "thin", wanted, made(wanted))
    verdict.assert_goes_on(0.0)
    assert len(verdict.losses) == 2


class Progress:
    """A client's own class, of which no scanner knows anything."""


@pytest.mark.parametrize("wanted", some([SGDM], [STAGE3, ELASTIC]), ids=lambda one: one.name)
def test_deepspeed_resumes_what_was_sanitized(wanted, made, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(made(wanted), source)
    for file in source.rglob("*model_states.pt"):
        content = torch.load(file, weights_only=False)
        torch.save({**content, "progress": Progress()}, file)
    assert sanitize(source, tmp_path / "clean").removed != []
    for file in (tmp_path / "clean").rglob("*model_states.pt"):
        assert "progress" not in torch.load(file, weights_only=False)
    resume(tmp_path / "clean", wanted, made(wanted)).assert_goes_on(0.0)


def test_deepspeed_resumes_zero3_without_unused_bytes(made, tmp_path):
    strip(made(STAGE3), tmp_path / "thin", unreferenced=True, padding=True)
    resume(tmp_path / "thin", STAGE3, made(STAGE3)).assert_goes_on(0.0)


# --- the optimizer's state is taken away


WITHOUT_OPTIMIZER = {"load_optimizer_states": False}
MODULE_ONLY = {"load_module_only": True}  # of ZeRO-3, it makes DeepSpeed load nothing from any checkpoint
AS_ALWAYS: dict[str, bool] = {}  # with ZeRO-1 and 2, DeepSpeed then wants the optimizer's files


@pytest.mark.parametrize(
    ("wanted", "options"),
    some([(BF16_OPTIMIZER, MODULE_ONLY), (STAGE3, AS_ALWAYS), (STAGE0, WITHOUT_OPTIMIZER)],
         [(ADAMW, WITHOUT_OPTIMIZER), (ADAMW, MODULE_ONLY), (BF16_OPTIMIZER, WITHOUT_OPTIMIZER),
          (STAGE3, WITHOUT_OPTIMIZER), (STAGE0, AS_ALWAYS), (STAGE0, MODULE_ONLY)]),
    ids=lambda one: one.name if isinstance(one, Spec) else "-".join(one) or "as_always",
)  # fmt: skip
def test_deepspeed_loads_the_model_without_the_optimizer(wanted, options, made, tmp_path):
    strip(made(wanted), tmp_path / "model", optimizer=True)
    loaded = load(tmp_path / "model", wanted, options)
    truth = load_file(made(wanted) / "truth.safetensors")
    assert_same_tree(loaded.weights, {name: truth[f"module/{name}"] for name in loaded.weights})
    exact = wanted.stage == 3 and not options
    masters = {name: truth[f"fp32/{name}" if exact else f"module/{name}"].float() for name in loaded.masters}
    assert_same_tree(loaded.masters, masters)
    loaded.assert_trains_anew()


def test_deepspeed_keeps_exact_masters_and_starts_an_optimizer_afresh(made, tmp_path):
    strip(made(ADAMW), tmp_path / "masters", keep_slots=["master"])
    loaded = load(tmp_path / "masters", ADAMW, {})
    assert_same_tree(loaded.masters, Truth(made(ADAMW)).masters)
    loaded.assert_trains_anew()


@pytest.mark.parametrize("wanted", some([STAGE3], [ADAMW]), ids=lambda one: one.name)
def test_deepspeed_loads_the_slots_that_were_kept(wanted, made, tmp_path):
    strip(made(wanted), tmp_path / "some", keep_slots=["exp_avg"])
    loaded = load(tmp_path / "some", wanted, {}, train=False)
    truth = load_file(made(wanted) / "truth.safetensors")
    for name, slots in loaded.slots.items():
        assert_same_tree(slots, {slot: truth[f"{slot}/{name}"] for slot in ("fp32", "exp_avg")}, name)


@pytest.mark.parametrize(
    ("wanted", "options"),
    some([(ADAMW, AS_ALWAYS)], [(STAGE3, MODULE_ONLY)]),
    ids=lambda one: getattr(one, "name", None),
)
def test_deepspeed_loads_a_universal_checkpoint_without_the_optimizer(wanted, options, made, tmp_path):
    """The masters stay, and weights are rounded from them."""
    source = tmp_path / "run" / "universal"
    source.parent.mkdir()
    convert(made(wanted), source, to="universal")
    strip(source.parent, tmp_path / "model", optimizer=True)
    universal = wanted.at(1, config={**wanted.config, "checkpoint": {"load_universal": True}})
    loaded = load(tmp_path / "model", universal, options)
    truth = Truth(made(wanted))
    assert_same_tree(loaded.masters, truth.masters)
    assert_same_tree(*({name: one[name] for name in truth.masters} for one in (loaded.weights, truth.weights)))
    loaded.assert_trains_anew()


# --- how it is loaded


@dataclass
class Loaded:
    """What a rank holds after `load_checkpoint`: weights, slots, whether the optimizer is new, steps it then took."""

    weights: dict[str, torch.Tensor]
    slots: dict[str, dict[str, torch.Tensor]]
    fresh: bool
    steps: int

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        assert self.slots
        return {name: slots["fp32"] for name, slots in self.slots.items()}

    def assert_trains_anew(self) -> None:
        assert self.fresh
        assert self.steps == 2


def load(run: Path, wanted: Spec, options: dict[str, bool], *, train: bool = True) -> Loaded:
    loaded: Loaded = gloo.run(_load, wanted.world_size, wanted, run, options, train)[0]
    return loaded


def _load(rank, world_size, wanted: Spec, run: Path, options: dict[str, bool], train: bool) -> Loaded:
    from tests.deepspeed_engine import models
    from tests.deepspeed_engine.training import build_engine, train_step
    from tests.deepspeed_engine.truth import read_live

    engine = build_engine(wanted, seed=models.MODEL_SEED + 1)
    path, _ = engine.load_checkpoint(str(run), **options)
    assert path is not None
    live = read_live(engine, wanted)
    fresh = all(not value.any() for slots in live.slots.values() for key, value in slots.items() if key != "fp32")
    losses = [train_step(engine, wanted, 3 + i)[0] for i in range(2)] if train else []
    return Loaded(live.weights, live.slots, fresh, steps=sum(loss == loss and loss < 10 for loss in losses))


def optimizer_content(run: Path) -> Any:
    path = min(run.rglob("*optim_states.pt"))
    return torch.load(path, weights_only=False)["optimizer_state_dict"]
