"""The step in pieces: the numbers of a step of the whole, without all gradients converted at once; memory is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gloo import on_ranks
from zckpt.optim import ZeroOptimizer
from zckpt.optim.zero import stepping

NUMEL = 100
PIECE = 32  # the last piece is a shorter one


class Counting(torch.optim.SGD):
    """Counts steps in its param groups and depends on them, as some optimizers do; notes what it is given."""

    seen: list[int]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
            self.seen = [*getattr(self, "seen", []), *(p.grad.numel() for p in group["params"])]
        super().step(closure)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.1),
    "counting": lambda params: Counting(params, lr=0.1, momentum=0.9),
}


def group_of(master: torch.nn.Parameter) -> Any:
    return SimpleNamespace(master=master, partition=NUMEL, gradient=None)


def train(kind: str, *, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, dict[str, Any], Any]:
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
    group = group_of(master)
    optimizer = OPTIMIZERS[kind]([master])
    for _ in range(3):
        group.gradient = torch.randn(NUMEL, generator=generator).to(dtype)
        stepping.step(optimizer, group, 1.5)
        assert master.grad is None
        assert master.shape == (NUMEL,)
    return master.detach(), optimizer.state_dict(), optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pieces_give_what_the_whole_gives(kind, monkeypatch):
    whole, state, _ = train(kind)
    monkeypatch.setattr(stepping, "PIECE", PIECE)
    pieces, its, _ = train(kind)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(its["state"], state["state"])
    assert its["param_groups"] == state["param_groups"]


def test_only_what_must_be_converted_is_stepped_in_pieces(monkeypatch):
    monkeypatch.setattr(stepping, "PIECE", PIECE)
    assert train("counting")[2].seen == [32, 32, 32, 4] * 3
    assert train("counting", dtype=torch.float32)[2].seen == [NUMEL] * 3


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_that_fails_leaves_the_master_whole(monkeypatch, *, is_first):
    monkeypatch.setattr(stepping, "PIECE", PIECE)
    master = torch.nn.Parameter(torch.ones(NUMEL))
    group = group_of(master)
    group.gradient = torch.ones(NUMEL, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], lr=0.1)
    if not is_first:
        stepping.step(optimizer, group, 1.0)
    steps = 0

    def fail(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("in the second piece")

    hook = optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="second piece"):
        stepping.step(optimizer, group, 1.0)
    assert master.shape == (NUMEL,)
    assert master.grad is None
    hook.remove()
    stepping.step(optimizer, group, 1.0)
    assert optimizer.state[master]["exp_avg"].shape == (NUMEL,)
    assert optimizer.state[master]["step"] == (1 if is_first else 2)


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_norm_in_pieces(order, monkeypatch):
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(stepping, "NORM_PIECE", PIECE)
    expected = torch.linalg.vector_norm(values, order, dtype=torch.float64)
    torch.testing.assert_close(stepping._norm(values, order), expected)


@pytest.mark.interop
@on_ranks(2)
def test_memory_is_given_back(rank, world_size):
    del rank, world_size
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, stage=1, gradient_accumulation_steps=2)
    for step in range(4):
        optimizer.backward(model(torch.ones(1, 8)).sum())
        assert (optimizer.groups[0].gradient is None) == (step % 2 == 0)  # no partition beside whole gradients
        optimizer.step()
    held = [weakref.ref(optimizer), weakref.ref(model.weight)]
    del optimizer
    model(torch.ones(1, 8)).sum().backward()  # its hooks do nothing any more
    assert model.weight.grad is not None
    del model
    gc.collect()
    assert [one() for one in held] == [None, None]
