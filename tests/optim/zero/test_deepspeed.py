"""ZeroOptimizer beside the real DeepSpeed engine: the same losses, norms, loss scales, masters and optimizer state.

Where both take sums in the same order, all numbers are equal bit for bit, over twenty steps. That is so

- with `reduce_scatter=False`, beside DeepSpeed's default, which sums each bucket on all ranks;
- with `reduce_scatter=True`, beside DeepSpeed's `use_multi_rank_bucket_allreduce: false`, which sums to each owner;

if buckets have the same size. Stage 1 of DeepSpeed fills them in the order of the parameters unless it overlaps.
Where it is not so, `CLOSE` says why, and by how much numbers may differ.

With offload, DeepSpeed takes sums and roots of norms in Python's floats: norms differ in their last bits, and masters
without clipping do not. Masters of float16 it has only for its own compiled optimizer; those of bfloat16 are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.deepspeed_engine import Spec, models, optimizers
from tests.deepspeed_engine.training import batch, build_engine
from tests.gloo import on_ranks, run
from tests.optim.zero.test_files import DTYPES, groups_of_experts, optimizer_of
from tests.pairwise import some
from zckpt.optim import DynamicLossScaler, LossScaler, ZeroOptimizer

pytestmark = pytest.mark.interop

STEPS = 20
FEWER = 3
ONE_BUCKET = 500_000_000  # elements; DeepSpeed's default
SMALL = 150  # elements: the model fills several buckets, and has parameters that are larger than one
MEDIUM = 600  # elements: several buckets, and no parameter is larger than one

TO_OWNERS = {"use_multi_rank_bucket_allreduce": False}
SUMMED = {"reduce_scatter": False}  # on all ranks, and then divided
OVERLAPPED = {"overlap_comm": True}


@dataclass(frozen=True)
class Case:
    """One training that both do.

    `zero` and `config` go to the engine, `options` to ZeroOptimizer. `close` is by how much numbers may differ, in
    parts of the largest of their tensor; `close_norms` the same for the norm of all gradients.
    """

    name: str
    spec: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    bucket: int = ONE_BUCKET
    accumulation: int = 1
    steps: int = STEPS
    close: float = 0.0
    close_norms: float = 0.0
    expect: str = ""  # what must have happened for the case to mean something

    def at(self, world_size: int) -> Spec:
        spec = Spec(self.name, **{"world_size": world_size, "clip": 0.5, **self.spec})
        config = {
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": spec.batch * self.accumulation,
            **self.config,
        }
        return dataclasses.replace(spec, zero={"reduce_bucket_size": self.bucket, **self.zero}, config=config)


def our_twin(case: Case, spec: Spec) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """Return the model that the engine has, too, and ZeroOptimizer with the options of its configuration."""
    model = models.build_model(spec).to(DTYPES[spec.dtype])
    options = {
        "reduce_bucket_size": case.bucket,
        "expert_data_parallel_groups": groups_of_experts(spec, model),
        "gradient_accumulation_steps": case.accumulation,
        **case.options,
    }
    if spec.dtype == "fp16":
        options["loss_scale"] = our_scaler(case.config["fp16"])
    return model, optimizer_of(spec, model, **options)


def our_scaler(section: Mapping[str, Any]) -> LossScaler | DynamicLossScaler:
    """Return the loss scaler that DeepSpeed makes of a section fp16 of its configuration."""
    if section["loss_scale"]:
        return LossScaler(section["loss_scale"])
    return DynamicLossScaler(
        2.0 ** section["initial_scale_power"],
        scale_window=section["loss_scale_window"],
        min_scale=section["min_loss_scale"],
        delayed_shift=section["hysteresis"],
        consecutive_hysteresis=section["consecutive_hysteresis"],
    )


def loss_of(spec: Spec, model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a model or engine; those of Hugging Face want names."""
    if spec.model in models.HUGGING_FACE:
        return model(input_ids=data[0], labels=data[1]).loss
    return model(*data)


def differences(case: Case, world_size: int) -> list[str]:
    """Train both and return what differs."""
    from tests.deepspeed_engine import truth

    spec = case.at(world_size)
    engine = build_engine(spec)
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer"
    model, ours = our_twin(case, spec)
    found = []
    seen = {"overflows": 0, "rises": 0, "clipped": 0, "buckets": 0}

    def same(what: str, mine: Any, its: Any, close: float = case.close) -> None:
        mine, its = (torch.as_tensor(value, dtype=torch.float64) for value in (mine, its))
        if mine.shape != its.shape:
            found.append(f"{case.name}: {what} has the shape {tuple(mine.shape)}, not {tuple(its.shape)}")
        elif its.numel():
            off, largest = float((mine - its).abs().max()), float(its.abs().max())
            if not off <= close * largest:
                found.append(f"{case.name}: {what} differs by {off:.3g}, of {largest:.3g}")

    scale = engine.optimizer.loss_scaler.cur_scale
    for step in range(1, case.steps + 1):
        for micro in range(case.accumulation):
            data = batch(spec, step * case.accumulation + micro)
            its, mine = loss_of(spec, engine, data), loss_of(spec, model, data)
            engine.backward(its)
            ours.backward(mine)
            same(f"loss {step}.{micro}", mine.item(), its.item())
            skipped = engine.skipped_steps
            engine.step()
            ours.step()
        overflow = engine.skipped_steps > skipped
        seen["overflows"] += overflow
        if ours.overflow != overflow:
            found.append(f"{case.name}: overflow at {step}: {ours.overflow}, not {overflow}")
        if not overflow:
            norm = float(engine.get_global_grad_norm())
            same(f"norm {step}", ours.last_grad_norm, norm, max(case.close, case.close_norms))
            seen["clipped"] += 0 < spec.clip < norm
        scaler = engine.optimizer.loss_scaler
        seen["rises"] += scaler.cur_scale > scale
        scale = scaler.cur_scale
        same(f"loss scale {step}", ours.loss_scaler.cur_scale, scale, 0.0)
        if scaler.dynamic:
            same(f"hysteresis {step}", ours.loss_scaler.cur_hysteresis, scaler.cur_hysteresis, 0.0)
    seen["buckets"] = len(ours._reducer._buckets or [])
    live = truth.read_live(engine, spec)
    for index, (group, its) in enumerate(
        zip(ours.groups, engine.optimizer.single_partition_of_fp32_groups, strict=True)
    ):
        same(f"partition {index}", group.master.detach(), its.detach())
    compared = 0
    for name in ours.names():
        if ours.names()[name] not in ours._place:
            continue
        known = name
        if spec.model == "moe":
            known = truth.global_expert(name, truth.first_experts(engine))
        for slot, value in live.slots[known].items():
            held = ours.full_state(name, "master" if slot == "fp32" else slot)
            same(f"{slot} of {name}", held, value)
            compared += 1
        if spec.model != "moe":
            same(f"weight of {name}", ours.names()[name].detach(), live.weights[name])
    for what in case.expect.split():
        if not seen[what] > (what == "buckets"):
            found.append(f"{case.name}: no {what}")
    if compared < 2 * len(ours._place):  # masters, and what the optimizer keeps
        found.append(f"{case.name}: only {compared} slots compared")
    return found


def compare(rank, world_size, cases: list[Case]) -> list[str]:
    return [line for case in cases for line in differences(case, world_size)]


def check(world_size: int, cases: list[Case]) -> None:
    for rank, found in enumerate(run(compare, world_size, cases)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


SOME = 3  # steps, where more would not show more
EXPERTS_APART = {"model": "moe", "expert_parallel": 2, "clip": 0.1}
SENT_IN_FP32 = {"communication_data_type": torch.float32}

FALLING = {
    "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
    "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
}  # fmt: skip
RISING = {**FALLING, "initial_scale_power": 10, "loss_scale_window": 2}
STATIC = {**FALLING, "loss_scale": 128.0}


def both(name: str, spec: Mapping[str, Any], **more: Any) -> list[Case]:
    """Return a case at stage 1 and at stage 2."""
    return [Case(f"stage {stage}, {name}", {"stage": stage, **spec}, **{"steps": SOME, **more}) for stage in (1, 2)]


PLAIN = [
    *both("bf16", {"dtype": "bf16", "groups": 2}, steps=STEPS, expect="clipped"),
    *both("fp32", {"dtype": "fp32", "groups": 2}, steps=STEPS, expect="clipped"),
]

CASES = {
    1: [*PLAIN, *both("fp16", {"dtype": "fp16"}, config={"fp16": FALLING}, steps=6, expect="overflows clipped")],
    2: [
        *PLAIN,
        *both("fp16", {"dtype": "fp16"}, config={"fp16": FALLING}, steps=6, expect="overflows clipped"),
        *both("GPT", {"model": "gpt2"}, steps=STEPS),
        *both("accumulation", {}, accumulation=4, steps=STEPS),
        *both("momentum, assigned in turns", {"optimizer": "sgdm", "round_robin": True}, steps=STEPS),
        *both("small buckets", {}, bucket=SMALL, expect="buckets"),
        *both("small buckets, overlapped", {}, bucket=SMALL, zero=OVERLAPPED, options=OVERLAPPED, expect="buckets"),
        *both("offloaded", {"offload": True, "clip": 0.0}, options={"offload": True}, close_norms=1e-6),
        *both("16-bit masters", {"bf16_master": True}, options={"fp16_master_weights_and_gradients": True}),
        *both("experts", {"model": "moe", "clip": 0.1}, expect="clipped"),
        *both("experts on two ranks", EXPERTS_APART, expect="clipped"),
    ],
    3: [
        *PLAIN,
        *both("fp16, one scale", {"dtype": "fp16"}, config={"fp16": STATIC}),
        *both("assigned in turns", {"round_robin": True}),
        *both("aligned", {"parameter_alignment": True}),
        *both("some frozen", {"frozen_in_group": True}),
        *both("sent in fp32", {}, config={"communication_data_type": "fp32"}, options=SENT_IN_FP32),
        *both("prescaled", {}, zero=SUMMED, config={"prescale_gradients": True}),
        *both(
            "predivided", {}, zero=SUMMED, config={"gradient_predivide_factor": 3.5},
            options={"gradient_predivide_factor": 3.5},
        ),
        *both("medium buckets", {}, bucket=MEDIUM, expect="buckets"),
        *both("to owners", {}, zero=TO_OWNERS, options={"reduce_scatter": True}),
        *both("to owners, small buckets", {}, zero=TO_OWNERS, options={"reduce_scatter": True}, bucket=SMALL),
        Case(
            "stage 2, accumulated in fp32", {}, accumulation=4, steps=SOME,
            config={"data_types": {"grad_accum_dtype": "fp32"}},
            options={"gradient_accumulation_dtype": torch.float32},
        ),
    ],
    4: [
        *PLAIN,
        *both("assigned in turns", {"round_robin": True, "optimizer": "sgdm"}, accumulation=4, expect="clipped"),
        *both("experts", {"model": "moe", "clip": 0.1}, expect="clipped"),
        *both("experts on two ranks", EXPERTS_APART, expect="clipped"),
    ],
}  # fmt: skip


def test_numbers_are_those_of_deepspeed():
    """On two ranks, at one stage of both in turn; over the first of many steps."""
    cases = [case for number, case in enumerate(CASES[2]) if number // 2 % 2 == number % 2]
    check(2, [dataclasses.replace(case, steps=FEWER) if case.steps == STEPS else case for case in cases])


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", CASES)
def test_numbers_stay_those_of_deepspeed(world_size):
    check(world_size, CASES[world_size])


ULPS = 2.0**-9  # of float16: four of the weights' last bits

CLOSE = [
    # A parameter that is larger than a bucket DeepSpeed sends in pieces, one for each owner; three ranks or more sum
    # the elements of a piece in an order that depends on where in it they lie.
    *both("small buckets", {"dtype": "fp32"}, bucket=SMALL, close=1e-4, expect="buckets"),
    # Beside DeepSpeed's default, reductions to owners sum in the order of ranks.
    *both("to owners", {"dtype": "fp32"}, options={"reduce_scatter": True}, close=1e-4),
    # Where it sums first and divides then, and where it takes norms of what is offloaded in Python's floats.
    *both("summed", {"dtype": "fp32"}, zero=SUMMED, close=1e-6),
    *both("offloaded, clipped", {"offload": True}, options={"offload": True}, close=1e-6, expect="clipped"),
    # DeepSpeed 0.19 divides gradients by the loss scale of the next step. Clipping takes that out, but for rounding.
    *both("fp16", {"dtype": "fp16"}, config={"fp16": RISING}, close=ULPS, expect="clipped rises"),
]


@pytest.mark.parametrize("cases", some([CLOSE[0::4] + CLOSE[3::4]], [CLOSE]), ids=["in turns", "all"])
def test_numbers_are_close_to_those_of_deepspeed_where_sums_or_scales_come_in_another_order(cases):
    check(3, cases)


# --- beside DistributedDataParallel


def losses_and_weights_of_ddp(spec: Spec, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train unsharded; as in a flat buffer, a parameter without gradient is stepped with zeros."""
    model = models.build_model(spec)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizers.KINDS[spec.optimizer](models.param_groups(spec, model))
    losses = []
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        loss = ddp(*batch(spec, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


KINDS = [("adamw", 1), ("sgdm", 2), ("adamw", 2), ("sgdm", 1)]


@on_ranks(3, each=some([(FEWER, *kind) for kind in KINDS[:2]], [(STEPS, *kind) for kind in KINDS]))
def test_fp32_is_unsharded_training(world_size, steps, optimizer, stage):
    spec = Spec("ddp", dtype="fp32", world_size=world_size, optimizer=optimizer, clip=0.5)
    wanted, weights = losses_and_weights_of_ddp(spec, steps)
    options = {"reduce_scatter": optimizer == "adamw"}
    case = Case("ddp", {"dtype": "fp32", "stage": stage, "optimizer": optimizer}, options, bucket=SMALL)
    model, ours = our_twin(case, case.at(world_size))
    losses = []
    for step in range(steps):
        loss = model(*batch(spec, step))
        ours.backward(loss)
        ours.step()
        losses.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close({n: p.detach() for n, p in model.named_parameters()}, weights, rtol=1e-4, atol=1e-5)
