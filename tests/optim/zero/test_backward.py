"""Gradients and passes: what reaches the step is the gradient of unsharded training, however backward came about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.gloo import on_ranks
from tests.logical import assert_same_tree
from tests.optim.zero.reference import (
    TOLERANCE,
    Flat,
    Net,
    Unsharded,
    assert_alike,
    batch,
    beside_unsharded,
    bits,
    both_step,
    is_unchanged,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.pairwise import each, pairwise
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop

Uses = Callable[[int, int], bool]
"""Whether a rank uses the spare layer in a pass."""


MODES: list[dict[str, Any]] = [
    {"stage": 1, "overlap_comm": False, "reduce_scatter": True},
    {"stage": 1, "overlap_comm": True, "reduce_scatter": False},
    {"stage": 2, "overlap_comm": True, "reduce_scatter": True},
]
"""Options that send gradients in different ways."""

BUCKETS: list[dict[str, Any]] = [{"stage": 2, "reduce_bucket_size": size} for size in (1, 10_000)]

USES: dict[str, Uses] = {
    "always": lambda step, rank: True,
    "never": lambda step, rank: False,
    "not on the first rank": lambda step, rank: rank != 0,
    "on the first rank only": lambda step, rank: rank == 0,
    "by turns": lambda step, rank: (step + rank) % 2 == 0,
    "not in the first backward": lambda step, rank: step > 0,
    "in the first backward only": lambda step, rank: step == 0,
    "in one backward of one rank": lambda step, rank: (step, rank) == (1, 1),
}


@on_ranks(3, each=each(USES, MODES + BUCKETS))
def test_parameters_that_some_passes_or_ranks_do_not_use(rank, world_size, kind, options):
    uses = USES[kind]
    model, twin, ours = beside_unsharded(**options)
    for step in range(3):
        ours.zero_grad()
        stepped(ours, model, step, spare=uses(step, rank))
        twin.train([partial(loss_of, step=step, rank=r, spare=uses(step, r)) for r in range(world_size)])
        twin.assert_is(model)
    assert_alike(model)


@on_ranks(1)
def test_one_rank_is_flat_training_bit_for_bit():
    """Nothing is summed over ranks, so that all is equal, bit for bit, to one flat tensor's training."""
    for options in MODES:
        model, flat = Net(), Net()
        plain, twin = Flat(flat, torch.optim.AdamW), Unsharded(model, torch.optim.AdamW)
        ours = make(model, torch.optim.AdamW, **options)
        for step in range(5):
            stepped(ours, model, step, spare=step % 2 == 0)
            loss_of(flat, step, spare=step % 2 == 0).backward()
            plain.step()
            twin.train([partial(loss_of, step=step, spare=step % 2 == 0)], 1)
        assert is_unchanged(model, bits(flat))
        twin.assert_is(model)


class Sparse(torch.nn.Module):
    """An embedding whose gradient is sparse, between layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(4, 4)
        self.embedding = torch.nn.Embedding(6, 4, sparse=True)
        self.after = torch.nn.Linear(4, 2)

    def forward(self, *, sparse: bool) -> torch.Tensor:
        x = self.before(torch.ones(4))
        return self.after(x + self.embedding(torch.tensor(1)) if sparse else x).sum()


@on_ranks(2, each=pairwise((True, False), (1, 2), (True, False)))
def test_sparse_gradients_are_refused_by_name(rank, everywhere, stage, first):
    """Those after the first backward leave no trace of what had been reduced before they came."""
    model = Sparse()
    ours = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, stage=stage, lr=1.0, reduce_bucket_size=8)
    if not first:
        ours.backward(model(sparse=False) * 0)
        ours.step()
    before = bits(model)
    bad = everywhere or rank == 0
    with pytest.raises(ValueError, match=r"embedding\.weight is torch\.sparse") if bad else nullcontext():
        ours.backward(model(sparse=bad))
    with pytest.raises(RuntimeError, match="no rank has stepped"):
        ours.step()
    assert is_unchanged(model, before)
    ours.backward(model(sparse=False))
    ours.step()
    assert torch.equal(model.after.bias.detach(), before[-1] - 1)
    assert_alike(model)


PARTS = 3


def parts_of(step: int, rank: int) -> list[Callable[[torch.nn.Module], torch.Tensor]]:
    """Return the losses of a window; not all parameters are in each."""
    return [partial(loss_of, step=PARTS * step + part, rank=rank, spare=part == 1) for part in range(PARTS)]


@on_ranks(2, each=each(MODES, ("no_sync", "backward", "Tensor.backward")))
def test_accumulated_by_several_backwards(rank, world_size, options, how):
    """Of several losses it is the sum: nothing says how many are to come."""
    model, twin, ours = beside_unsharded(**options)
    for step in range(3):
        for number, loss in enumerate(parts_of(step, rank), 1):
            with ours.no_sync() if how == "no_sync" and number < PARTS else nullcontext():
                loss(model).backward() if how == "Tensor.backward" else ours.backward(loss(model))
        ours.step()
        twin.train([loss for its in range(world_size) for loss in parts_of(step, its)])
        twin.assert_is(model)
    assert_alike(model)


@on_ranks(2, each=zip(MODES))
def test_of_two_losses_with_one_graph(world_size, options):
    model, twin, ours = beside_unsharded(**options)
    for step in range(2):
        out = model(batch(step))
        ours.backward(out.pow(2).mean(), retain_graph=True)
        ours.backward(out.sin().mean())
        ours.step()

        def both(net: Net, its: int, at: int = step) -> torch.Tensor:
            return net(batch(at, its)).pow(2).mean() + net(batch(at, its)).sin().mean()

        twin.train([partial(both, its=its) for its in range(world_size)])
        twin.assert_is(model)


@on_ranks(2)
def test_zeroed_inside_of_no_sync():
    """Without a number of steps nothing is a window, and gradients are forgotten as torch forgets them."""
    for stage in (1, 2):
        model, twin, ours = beside_unsharded(stage=stage)
        with ours.no_sync():
            ours.backward(loss_of(model, 7))
        assert all(p.grad is not None for p in model.parameters())
        ours.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        ours.backward(loss_of(model, 0))
        ours.zero_grad()
        both_step(ours, model, twin, [1])


@on_ranks(2, each=each(MODES, (1, 10_000)))
def test_put_by_hand(rank, world_size, options, size):
    """Before any backward, later, and beside it; what was put there belongs to whoever did, and keeps its value."""
    model, twin, ours = beside_unsharded(reduce_bucket_size=size, **options)
    for step in range(4):
        if step == 2:
            ours.backward(loss_of(model, step))
        else:
            mine = [torch.full_like(p, (rank + 1.0) * (step + 1)) for p in model.parameters()]
            for parameter, gradient in zip(model.parameters(), mine, strict=True):
                parameter.grad = gradient
        ours.step()
        if step == 2:
            twin.train(losses(step))
        else:
            twin.gradients([], 1)
            for parameter in twin.model.parameters():
                parameter.grad.fill_((step + 1) * (1 + world_size) / 2)
            twin.optimizer.step()
            assert all(torch.equal(g, torch.full_like(g, (rank + 1.0) * (step + 1))) for g in mine)
        twin.assert_is(model)
        assert all(p.grad is None for p in model.parameters())
    assert_alike(model)


def _half(model: Net, hidden: torch.Tensor) -> torch.Tensor:
    return torch.tanh(model.twice(hidden))


@on_ranks(2, each=each(MODES, (True, False)))
def test_gradients_through_activation_checkpoints(world_size, options, reentrant):
    model, twin, ours = beside_unsharded(**options)
    for step in range(3):
        hidden = torch.tanh(model.first(batch(step).requires_grad_()))
        for _ in range(2):  # two segments share a parameter
            hidden = checkpoint(partial(_half, model), hidden, use_reentrant=reentrant)
        out = checkpoint(model.last, checkpoint(model.spare, hidden, use_reentrant=reentrant), use_reentrant=False)
        ours.backward((out * model.scale).pow(2).mean())
        ours.step()

        def loss(net: Net, x: torch.Tensor) -> torch.Tensor:
            hidden = _half(net, _half(net, torch.tanh(net.first(x))))
            return (net.last(net.spare(hidden)) * net.scale).pow(2).mean()

        twin.train([partial(loss, x=batch(step, its)) for its in range(world_size)])
        twin.assert_is(model)
    assert_alike(model)


def _closure(ours: ZeroOptimizer, model: Net, step: int, told: list[torch.Tensor]) -> torch.Tensor:
    assert torch.is_grad_enabled()
    ours.zero_grad()
    loss = loss_of(model, step)
    ours.backward(loss)
    told.append(loss)
    return loss


@on_ranks(2)
def test_by_a_closure():
    for stage in (1, 2):
        model, twin, ours = beside_unsharded(stage=stage)
        for step in range(3):
            told = []
            assert ours.step(partial(_closure, ours, model, step, told)) is told[0]
            assert len(told) == 1
            twin.train(losses(step))
            twin.assert_is(model)


@on_ranks(2)
def test_of_part_of_a_graph():
    """Arguments of `Tensor.backward` reach it."""
    model = Net()
    ours = make(model)
    ours.backward(loss_of(model, 0), inputs=[model.scale])
    assert ours.full_state("scale", "gradient").abs() > 0
    assert not ours.full_state("first.weight", "gradient").any()


# --- whole tensors by name


@on_ranks(1, 3, each=zip(MODES))
def test_whole_tensors_are_those_of_unsharded_training(options):
    model, twin, ours = beside_unsharded(torch.optim.AdamW, **options)
    theirs = dict(twin.model.named_parameters())

    def whole(slot: str) -> dict[str, torch.Tensor]:
        return {name: ours.full_state(name, slot) for name in theirs}

    for step in range(2):
        ours.backward(loss_of(model, step))
        twin.gradients(losses(step))
        gradients = {name: parameter.grad for name, parameter in theirs.items()}
        torch.testing.assert_close(whole("gradient"), gradients, **TOLERANCE)
        ours.step()
        twin.optimizer.step()
    twin.assert_is(model)
    assert_same_tree([*whole("master").values()], bits(model))
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        found, wanted = whole(slot), {name: twin.optimizer.state[one][slot] for name, one in theirs.items()}
        torch.testing.assert_close(found, wanted, **TOLERANCE)
        for copied in found.values():
            copied.fill_(77.0)
        assert all(not (value == 77.0).any() for value in whole(slot).values())


@on_ranks(3, each=each(MODES, (torch.float32, torch.bfloat16)))
def test_what_is_set_takes_effect(options, dtype):
    model = Net(dtype)
    ours = make(model, weight_decay=0.0, **options)
    for group in ours.param_groups:
        group["weight_decay"] = 0.0
    stepped(ours, model, 0)
    shape = model.twice.weight.shape
    master, momentum, gradient = (torch.randn(shape) for _ in range(3))  # ranks have the same seed
    other = model.last.weight.detach().clone()
    ours.backward(loss_of(model, 1) * 0)
    ours.set_full_state("twice.weight", "master", master)
    assert torch.equal(model.twice.weight.detach(), master.to(dtype))
    ours.set_full_state("twice.weight", "momentum_buffer", momentum)
    ours.set_full_state("twice.weight", "gradient", gradient)
    given = gradient.to(dtype).float()
    assert torch.equal(ours.full_state("twice.weight", "gradient").float(), given)
    lr, mu = ours.param_groups[0]["lr"], ours.param_groups[0]["momentum"]
    drift = ours.full_state("last.weight", "momentum_buffer") * mu * lr
    ours.step()
    buffer = mu * momentum + given
    torch.testing.assert_close(ours.full_state("twice.weight", "momentum_buffer"), buffer, **TOLERANCE)
    torch.testing.assert_close(ours.full_state("twice.weight", "master"), master - lr * buffer, **TOLERANCE)
    assert torch.equal(model.twice.weight.detach(), ours.full_state("twice.weight", "master").to(dtype))
    if dtype == torch.float32:  # its neighbours in the buffer have moved by themselves
        torch.testing.assert_close(model.last.weight.detach(), other - drift, **TOLERANCE)
    assert_alike(model)


@on_ranks(3)
def test_what_is_not_there_is_refused():
    model = Net()
    model.spare.requires_grad_(False)
    ours = make(model, torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"first\.weight has no gradient, only master$"):
        ours.full_state("first.weight", "gradient")
    with pytest.raises(ValueError, match="no parameter nowhere"):
        ours.full_state("nowhere", "master")
    with pytest.raises(ValueError, match=r"spare\.weight was frozen .* and has no state"):
        ours.full_state("spare.weight", "master")
    with pytest.raises(ValueError, match=r"has the shape \(9, 5\), not \(5, 9\)"):
        ours.set_full_state("first.weight", "master", torch.zeros(5, 9))
    stepped(ours, model, 0)
    with pytest.raises(ValueError, match="no momentum, only master, step, exp_avg, exp_avg_sq, gradient"):
        ours.full_state("first.weight", "momentum")
    with pytest.raises(ValueError, match="one value for its whole param group"):
        ours.set_full_state("first.weight", "step", torch.tensor(7.0))
    unnamed = ZeroOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="the parameters have no names"):
        unnamed.full_state("first.weight", "master")


# --- order


class Ordered(torch.nn.Module):
    """Two layers, of which one alone is a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = torch.nn.Linear(6, 6, bias=False)
        self.two = torch.nn.Linear(6, 6, bias=False)


@on_ranks(3)
def test_ranks_may_make_gradients_in_different_orders(rank, world_size):
    """Ranks whose gradients become ready in different orders reduce the same buckets."""
    for options in MODES:
        model = Ordered()
        ours = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, reduce_bucket_size=36, **options)
        before = bits(model)
        for step in range(3):
            layers = [model.one, model.two]
            x = torch.ones(6)
            for layer in layers if (rank + step) % 2 else layers[::-1]:
                x = layer(x) * (rank + 1)
            ours.backward(x.sum())
            told = [ours.full_state(name, "gradient") for name in ("one.weight", "two.weight")]
            wanted = [torch.zeros(6, 6), torch.zeros(6, 6)]
            for its in range(world_size):
                weights = [b.clone().requires_grad_() for b in before]
                y = torch.ones(6)
                for w in weights if (its + step) % 2 else weights[::-1]:
                    y = w @ y * (its + 1)
                y.sum().backward()
                wanted = [a + w.grad / world_size for a, w in zip(wanted, weights, strict=True)]
            torch.testing.assert_close(told, wanted, rtol=1e-5, atol=1e-5)
            ours.zero_grad()


@on_ranks(2)
def test_second_gradients_in_one_backward_are_refused_or_taken():
    """After the first was sent they are refused, not lost. First of all, or under no_sync, they are taken."""
    for way in ("refused", "first", "no_sync"):
        model = Ordered()
        ours = ZeroOptimizer(
            model.named_parameters(), torch.optim.SGD, stage=2, lr=1.0, reduce_bucket_size=1, overlap_comm=True
        )
        if way != "first":
            ours.backward(_once(model) * 0)
            ours.step()
        before = bits(model)
        if way == "refused":
            with pytest.raises(RuntimeError, match=r"second gradient in one backward.*no_sync"):
                ours.backward(_twice(model))
            with pytest.raises(RuntimeError, match="no rank has stepped"):
                ours.step()
            assert is_unchanged(model, before)
        loss = _once if way == "refused" else _twice
        with ours.no_sync() if way == "no_sync" else nullcontext():
            ours.backward(loss(model))
        ours.step()
        wanted = Ordered()
        loss(wanted).backward()
        expected = [start - its.grad for start, its in zip(before, wanted.parameters(), strict=True)]
        torch.testing.assert_close(bits(model), expected, **TOLERANCE)


def _once(model: Ordered) -> torch.Tensor:
    return model.two(model.one(torch.ones(6))).sum()


def _twice(model: Ordered) -> torch.Tensor:
    """Return a loss whose backward, through reentrant checkpoints, makes each gradient twice."""
    x = torch.ones(6, requires_grad=True)
    for _ in range(2):
        for layer in (model.one, model.two):
            x = checkpoint(layer, x, use_reentrant=True)
    return x.sum()
