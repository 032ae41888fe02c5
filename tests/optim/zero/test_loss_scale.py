"""Loss scaling: the rule of DeepSpeed's own scalers, and what an overflow on any rank does to a step."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gloo import on_ranks, run
from tests.live import equal, everything, of_all_ranks, same
from tests.optim.zero.reference import (
    Net,
    assert_alike,
    beside_unsharded,
    bits,
    is_unchanged,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.pairwise import each
from zckpt.optim import DynamicLossScaler, LossScaler

pytestmark = pytest.mark.interop


POWERS = st.integers(-2, 12).map(lambda power: 2.0**power)
SHARED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def told_by_deepspeed(kind: dict[str, Any], factor: float, overflows: Sequence[bool]) -> list[object]:
    """Return DeepSpeed's state after each step, and that it raised, if it did."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    scaler = loss_scaler.DynamicLossScaler(**kind)
    scaler.scale_factor = factor
    told: list[object] = []
    for overflow in overflows:
        try:
            scaler.update_scale(overflow)
        except Exception:
            return [*told, "raised"]
        told.append([getattr(scaler, name) for name in SHARED])
    return told


def told_by_ours(kind: dict[str, Any], factor: float, overflows: Sequence[bool]) -> list[object]:
    kind = dict(kind)
    scaler = DynamicLossScaler(kind.pop("init_scale"), scale_factor=factor, **kind)
    told: list[object] = []
    for overflow in overflows:
        try:
            scaler.update(overflow)
        except FloatingPointError:
            return [*told, "raised"]
        told.append([getattr(scaler, name) for name in SHARED])
    return told


@given(
    kind=st.fixed_dictionaries(
        {
            "init_scale": POWERS,
            "scale_window": st.integers(1, 5),
            "min_scale": st.sampled_from([0.25, 1.0, 3.0]),
            "delayed_shift": st.integers(1, 4),
            "consecutive_hysteresis": st.booleans(),
            "raise_error_at_min_scale": st.booleans(),
        }
    ),
    factor=st.sampled_from([2.0, 1.5, 4.0]),
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
)
def follows_deepspeeds_rule(kind: dict[str, Any], factor: float, overflows: list[bool]) -> None:
    assert told_by_ours(kind, factor, overflows) == told_by_deepspeed(kind, factor, overflows)


def follows_in_examples(rank, world_size, examples: int) -> None:
    settings(max_examples=examples, deadline=None, database=None)(follows_deepspeeds_rule)()


def test_dynamic_scale_follows_deepspeeds_rule():
    run(follows_in_examples, 1, 3 * settings.default.max_examples)  # of the profile, which ranks do not know


@on_ranks(1)
def test_fixed_scale_stays():
    from deepspeed.runtime.fp16 import loss_scaler

    ours, theirs = LossScaler(8.0), loss_scaler.LossScaler(8.0)
    for overflow in (True, False, True):
        ours.update(overflow)
        theirs.update_scale(overflow)
        assert ours.cur_scale == theirs.cur_scale == 8.0
    assert ours.dynamic is theirs.dynamic is False


def test_scalers_of_strange_numbers_are_refused():
    for strange in ({"scale_factor": 1.0}, {"scale_window": 0}, {"delayed_shift": 0}, {"min_scale": 0.0}):
        with pytest.raises(ValueError, match="a dynamic loss scale needs"):
            DynamicLossScaler(**strange)


# --- in a training


KINDS = [{"stage": 1}, {"stage": 2}, {"stage": 2, "reduce_scatter": False}, {"stage": 2, "offload": True}]
OVERFLOWS = [(torch.float32, math.inf, 2.0), (torch.float16, -math.inf, math.inf), (torch.bfloat16, math.nan, 2.0)]


@on_ranks(3, each=each(KINDS, (0, 2), OVERFLOWS))
def test_overflow_on_one_rank_skips_the_step_on_all(rank, options, bad, overflow):
    """Of one element. Weights and state are bit for bit what they were, and the scale has fallen on all ranks."""
    dtype, value, norm_type = overflow
    model = Net(dtype)
    scaler = DynamicLossScaler(2.0**6, delayed_shift=1)
    ours = make(model, torch.optim.AdamW, loss_scale=scaler, norm_type=norm_type, **options)
    stepped(ours, model, 0)
    before = everything(model, ours)
    assert (ours.loss_scale, ours.overflow) == (2.0**6, False)
    for times in (1, 2):
        loss = loss_of(model, times)
        ours.backward(loss + value * model.last.bias[1].float() if rank == bad else loss)
        ours.step()
        assert (ours.loss_scale, ours.overflow) == (2.0 ** (6 - times), True)
        assert not math.isfinite(ours.last_grad_norm)
    assert same(before, everything(model, ours))
    stepped(ours, model, 3)
    assert not ours.overflow
    assert math.isfinite(ours.last_grad_norm)
    assert not same(before, everything(model, ours))
    assert_alike(model)


@on_ranks(2)
def test_small_gradients():
    """Gradients of 2 ** -30 vanish in float16 unless they are scaled; steps are as without a scale."""
    for scale, survives in ((1.0, False), (2.0**20, True)):
        model = Net(torch.float16)
        ours = make(model, loss_scale=scale, weight_decay=0.0)
        ours.param_groups[0]["weight_decay"] = 0.0
        ours.backward(model.last.bias.float().sum() * 2.0**-30)
        ours.step()
        momentum = ours.full_state("last.bias", "momentum_buffer")
        assert torch.equal(momentum, torch.full_like(momentum, 2.0**-30 if survives else 0.0))
        assert (ours.last_grad_norm > 0) == survives
        assert abs(ours.last_grad_norm - (2.0**-30 * 3**0.5 if survives else 0)) < 2.0**-40


@on_ranks(2)
def test_powers_of_two_change_nothing():
    """In float32, bit for bit; clipping and norm are of what is not scaled."""
    models = [Net(), Net()]
    scales = [1.0, DynamicLossScaler(2.0**4, scale_window=1)]
    both = [make(m, loss_scale=s, clip_grad=0.1) for m, s in zip(models, scales, strict=True)]
    for step in range(5):
        for model, ours in zip(models, both, strict=True):
            stepped(ours, model, step)
        assert both[0].last_grad_norm == both[1].last_grad_norm > 0.1
    assert equal(*models)
    assert both[1].loss_scale == 2.0**8  # raised in all steps but the first, which has none before it


@on_ranks(2)
def test_scale_of_somebody_else():
    """One that is set holds, whatever happens; None gives the choice back."""
    model, twin, ours = beside_unsharded(loss_scale=DynamicLossScaler(4.0, delayed_shift=1))
    ours.loss_scale = 32.0
    ours.backward(loss_of(model, 0))
    twin.gradients(losses(0))
    wanted = 32.0 * twin.model.last.bias.grad
    torch.testing.assert_close(ours.full_state("last.bias", "gradient"), wanted, rtol=1e-5, atol=1e-5)
    ours.step()
    twin.optimizer.step()
    twin.assert_is(model)
    ours.backward(loss_of(model, 1) * math.inf)
    ours.step()
    assert ours.overflow
    assert ours.loss_scale == 32.0
    ours.loss_scale = None
    assert ours.loss_scale == ours.loss_scaler.cur_scale == 2.0


@on_ranks(2)
def test_scales_itself_by_hand():
    """Whoever runs `Tensor.backward` scales the loss by what `loss_scale` tells."""
    model, twin, ours = beside_unsharded(loss_scale=64.0)
    for step in range(2):
        (loss_of(model, step) * ours.loss_scale).backward()
        ours.step()
        twin.train(losses(step))
    twin.assert_is(model)


@on_ranks(2)
def test_least_scale(rank):
    """Raised on all ranks, with nothing stepped; or kept, and the step skipped."""
    for raises in (True, False):
        model = Net()
        scaler = DynamicLossScaler(2.0, min_scale=1.0, delayed_shift=1, raise_error_at_min_scale=raises)
        ours = make(model, loss_scale=scaler)
        before = bits(model)
        for _ in range(2):
            ours.backward(loss_of(model, 0) * (math.inf if rank == 1 else 1.0))
            if raises and ours.loss_scale == 1.0:
                with pytest.raises(FloatingPointError, match=r"^gradients overflow at the minimum loss scale of 1\.0"):
                    ours.step()
            else:
                ours.step()
        assert ours.loss_scale == 1.0
        assert is_unchanged(model, before)
        stepped(ours, model, 0)
        assert not is_unchanged(model, before)
        assert_alike(model)


@on_ranks(2)
def test_scale_in_state():
    """All of what decides about the next scales is saved and loaded; also where the kind of scaler is another."""
    kinds = [
        DynamicLossScaler(2.0**10, scale_window=2, delayed_shift=3, consecutive_hysteresis=True, min_scale=0.5),
        LossScaler(16.0),
    ]
    for elastic in (False, True):
        for scaler in kinds:
            model = Net()
            ours = make(model, loss_scale=copy.deepcopy(scaler), elastic_checkpoint=elastic)
            for step, overflows in enumerate((True, False, False, True, False, True)):
                ours.backward(loss_of(model, step) * (math.inf if overflows else 1.0))
                ours.step()
            states = of_all_ranks(ours.state_dict())
            assert states[0]["dynamic_loss_scale"] == scaler.dynamic
            for fresh in (1.0, DynamicLossScaler(4.0)):
                other = make(Net(), loss_scale=fresh, elastic_checkpoint=elastic)
                other.load_state_dict(states)
                assert other.loss_scaler == ours.loss_scaler
                assert other.loss_scale == ours.loss_scale
                assert other.overflow
                its = copy.deepcopy(ours.loss_scaler)
                for overflow in (False, True, True, True, True, False):
                    other.loss_scaler.update(overflow)
                    its.update(overflow)
                    assert other.loss_scaler == its
    assert isinstance(other.loss_scaler, LossScaler)
