"""It is a `torch.optim.Optimizer`: schedulers, hooks, param groups, state dicts and any class, as with torch's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.gloo import on_ranks
from tests.live import everything, same
from tests.optim.zero.reference import (
    TOLERANCE,
    Flat,
    Net,
    Unsharded,
    assert_alike,
    beside_unsharded,
    bits,
    both_step,
    is_unchanged,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.optim.zero_redundancy.training import OPTIMIZERS
from tests.pairwise import some
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = OPTIMIZERS | {
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}


@on_ranks(1, 2, each=zip(KINDS))
def test_every_optimizer_class_of_torch(world_size, kind):
    """On one rank bit for bit what the class does with one flat tensor; and within a tolerance, unsharded training."""
    if kind == "rprop" and world_size > 1:  # which looks at the sign of a sum, and so at its last bit
        return
    optimizer_class, defaults = KINDS[kind]
    model, flat = Net(), Net()
    plain = Flat(flat, optimizer_class, **defaults)
    twin = Unsharded(model, optimizer_class, **defaults)
    ours = make(model, optimizer_class, **defaults)
    before = bits(model)
    for step in range(3):
        ours.zero_grad()
        both_step(ours, model, twin, [step])
        loss_of(flat, step).backward()
        plain.step()
    assert not is_unchanged(model, before)
    assert world_size > 1 or is_unchanged(model, bits(flat))
    assert_alike(model)
    theirs = twin.optimizer.state_dict()["state"]
    keys = {key for slots in theirs.values() for key in slots}
    assert {key for slots in ours.optim.state_dict()["state"].values() for key in slots} == keys
    assert all(float(slots["step"]) == 3 for slots in ours.state.values() if "step" in keys)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=9),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=[lambda s: 1 / (1 + s), lambda s: 0.5**s]),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.3),
    "cosine": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.7)], milestones=[3]
    ),
}


@on_ranks(2, each=zip(SCHEDULERS))
def test_schedulers(kind):
    """Rates are those that torch's optimizer gets; they reach the step."""
    model, twin, ours = beside_unsharded()
    schedulers = [SCHEDULERS[kind](optimizer) for optimizer in (ours, twin.optimizer)]
    rates = set()
    for step in range(5):
        both_step(ours, model, twin, [step])
        for scheduler in schedulers:
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
        for mine, its in zip(ours.param_groups, twin.optimizer.param_groups, strict=True):
            assert mine["lr"] == its["lr"]
            assert mine["momentum"] == its["momentum"]  # OneCycleLR changes it
        rates.add(ours.param_groups[0]["lr"])
    assert len(rates) > 2


CHANGES = [{"lr": 0.3}, {"weight_decay": 0.5}, {"betas": (0.5, 0.6)}, {"eps": 1.0}, {"maximize": True}]


@on_ranks(2, each=zip(CHANGES))
def test_changed_hyperparameters(changes):
    """What a param group is told takes effect in the next step, in that group."""
    model, twin, ours = beside_unsharded(torch.optim.AdamW)
    unchanged = copy.deepcopy(twin)
    for step in range(4):
        both_step(ours, model, twin, [step])
        unchanged.train(losses(step))
        if step == 1:
            for optimizer in (ours, twin.optimizer):
                optimizer.param_groups[1].update(changes)
    assert not torch.allclose(model.last.bias, unchanged.model.last.bias, **TOLERANCE)


@on_ranks(2)
def test_hooks_of_a_step():
    model = Net()
    ours = make(model)
    seen = []
    before = bits(model)
    ours.register_step_pre_hook(lambda optimizer, *_: seen.append((optimizer is ours, is_unchanged(model, before))))
    ours.register_step_post_hook(lambda optimizer, *_: seen.append((optimizer is ours, is_unchanged(model, before))))
    stepped(ours, model, 0)
    assert seen == [(True, True), (True, False)]


@on_ranks(2)
def test_hooks_of_state_dicts():
    model = Net()
    ours = make(model)
    stepped(ours, model, 0)
    seen = []
    ours.register_state_dict_pre_hook(lambda _: seen.append("before"))
    ours.register_state_dict_post_hook(lambda _, state: {**state, "note": 7})
    ours.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["note"]))
    ours.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert seen == ["before", 7, "after"]


@on_ranks(2)
def test_names_and_defaults():
    model = Net()
    ours = make(model, torch.optim.AdamW)
    theirs = Unsharded(model, torch.optim.AdamW).optimizer
    assert isinstance(ours, torch.optim.Optimizer)
    assert ours.defaults == theirs.defaults
    for mine, its in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert mine.keys() == its.keys()
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in its.items() if k != "params"}
        names = dict(model.named_parameters())
        assert [names[name] for name in mine["param_names"]] == mine["params"]
    assert set(ours.names()) == {name for name, _ in model.named_parameters()}
    assert repr(ours) == repr(theirs).replace("AdamW (", "ZeroOptimizer (")


@on_ranks(2)
def test_zeroed_gradients():
    """Forgotten are those of parameters, those reduced, and those of frozen parameters."""
    for set_to_none in (True, False):
        model = Net()
        model.spare.requires_grad_(False)
        ours = make(model)
        ours.backward(loss_of(model, 0))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        ours.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        before = bits(model)
        ours.param_groups[0]["weight_decay"] = 0.0
        ours.step()
        assert is_unchanged(model, before)


STATES = [(kind, {"stage": 1 + number % 2}) for number, kind in enumerate(KINDS)]
STATES += [("adamw", {"offload": True}), ("sgd_nesterov", {"dtype": torch.bfloat16})]


@on_ranks(2, each=some(STATES[::3] + STATES[-1:], STATES[1::3] + STATES[2:-1:3]))
def test_state_dict_goes_on_bit_for_bit(kind, options):
    """Training goes on bit for bit, in a new model and optimizer, from bytes; also with a scheduler's rates."""
    optimizer_class, defaults = KINDS[kind]
    model = Net(options.pop("dtype", torch.float32))
    ours = make(model, optimizer_class, **options, **defaults)
    for step in range(2):
        stepped(ours, model, step)
    ours.param_groups[1]["lr"] = 0.07
    held = io.BytesIO()
    torch.save(ours.state_dict(), held)
    held.seek(0)
    again = Net(next(model.parameters()).dtype)
    for parameter in again.parameters():
        parameter.data.zero_()
    other = make(again, optimizer_class, **options, **defaults)
    other.load_state_dict(torch.load(held, weights_only=False))
    assert is_unchanged(again, bits(model))
    assert other.param_groups[1]["lr"] == 0.07
    for step in range(2, 4):
        stepped(ours, model, step)
        stepped(other, again, step)
    assert same(everything(model, ours), everything(again, other))


@on_ranks(2)
def test_rates_that_are_tensors():
    """A rate may be a tensor, which is read at each step."""
    model, twin, ours = beside_unsharded(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False)
    for step in range(4):
        both_step(ours, model, twin, [step])
        if step == 1:
            for group in ours.param_groups:
                group["lr"] = torch.tensor(0.05)
            for group in twin.optimizer.param_groups:
                group["lr"] = 0.05
        if step == 2:
            ours.param_groups[0]["lr"].fill_(0.02)
            twin.optimizer.param_groups[0]["lr"] = 0.02


@on_ranks(1)
def test_defaults_are_optional():
    """An optimizer class may have defaults of its own, which groups get."""
    p = torch.nn.Parameter(torch.ones(3))
    ours = ZeroOptimizer([p], torch.optim.Adam)
    assert ours.param_groups[0]["lr"] == ours.defaults["lr"] == 1e-3
    ours.backward(p.sum())
    ours.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 1e-3), **TOLERANCE)
