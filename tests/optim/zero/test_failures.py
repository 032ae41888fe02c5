"""What goes wrong on one rank leaves all usable: none waits for ever, steps alone or steps with half a gradient."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from tests.gloo import on_ranks
from tests.optim.zero.reference import (
    BrokenError,
    Net,
    Unsharded,
    assert_alike,
    batch,
    beside_unsharded,
    bits,
    both_step,
    fails,
    is_unchanged,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.pairwise import each
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop

PATIENCE = datetime.timedelta(seconds=30)  # of a rank that waits for another

OPTIONS: list[dict[str, Any]] = [
    {"stage": 1, "overlap_comm": False},
    {"stage": 1, "overlap_comm": True},
    {"stage": 2, "overlap_comm": True},
    {"stage": 2, "overlap_comm": False, "reduce_scatter": False},
]


def patient() -> dist.ProcessGroup:
    """Return a process group of all ranks with its own timeout."""
    return dist.new_group(timeout=PATIENCE)


class Fragile(Net):
    """Its backward breaks on demand: at its end, when most gradients are ready; or before any is."""

    def forward(self, x: torch.Tensor, *, breaks: str = "", **options: Any) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.last(self.spare(self.twice(hidden))) * self.scale
        if breaks:
            (hidden if breaks == "late" else out).register_hook(fails)
        return out


def train_on(ours: ZeroOptimizer, model: torch.nn.Module, twin: Unsharded) -> None:
    """Go on as if nothing had happened, and compare with a training in which nothing has."""
    for step in (50, 51):
        ours.zero_grad()
        both_step(ours, model, twin, [step])
    assert_alike(model)


WAYS = [
    ({}, "late", False, "step"),
    ({}, "late", True, "step"),
    ({}, "early", False, "backward"),
    ({}, "late", True, "backward"),
    ({}, "late", False, "zero_grad"),
    ({}, "late", True, "zero_grad"),
    ({"ignore_unused_parameters": False}, "late", False, "step"),
    ({"ignore_unused_parameters": False}, "early", False, "backward"),
]


@on_ranks(2, each=each(WAYS, OPTIONS, (0, 2)))
def test_exception_in_backward_of_one_rank(rank, world_size, way, options, at):
    """The rank that failed goes on to its step, forgets its gradients, or begins the next backward at once."""
    more, breaks, by_tensor, then = way
    model = Fragile()
    twin = Unsharded(model)
    ours = make(model, process_group=patient(), **options, **more)
    both_step(ours, model, twin, range(at))
    before = bits(model)
    steps_before = len(ours.optim.state)
    bad = rank == world_size - 1
    loss = loss_of(model, 20, breaks=breaks if bad else "")
    if bad:
        with pytest.raises(BrokenError):
            loss.backward() if by_tensor else ours.backward(loss)
    else:
        loss.backward() if by_tensor else ours.backward(loss)
    if not bad or then == "step":
        with pytest.raises(RuntimeError, match=r"backward failed on .* rank: no rank has stepped"):
            ours.step()
    elif then == "zero_grad":
        ours.zero_grad()
    assert is_unchanged(model, before)
    assert len(ours.optim.state) == steps_before
    train_on(ours, model, twin)


@on_ranks(2, each=each(OPTIONS, [(0, False), (1, False), (2, False), (0, True), (1, True)]))
def test_exception_in_one_of_several_passes(rank, world_size, options, where):
    """In any of the passes of a window: the whole window is lost, and nothing else."""
    failing, no_sync = where
    model = Fragile()
    twin = Unsharded(model)
    ours = make(model, process_group=patient(), gradient_accumulation_steps=3, **options)
    before = bits(model)
    if rank == 0:
        for step in range(failing):
            stepped(ours, model, step)
        with pytest.raises(BrokenError), ours.no_sync() if no_sync else contextlib.nullcontext():
            ours.backward(loss_of(model, 7, breaks="late"))
        with pytest.raises(RuntimeError, match="failed on this rank"):
            ours.step()
    else:
        for step in range(2):
            stepped(ours, model, step)
        ours.backward(loss_of(model, 2))
        with pytest.raises(RuntimeError, match="failed on another rank"):
            ours.step()
    assert is_unchanged(model, before)
    for step in range(2):
        for part in range(3):
            stepped(ours, model, 3 * step + part)
        twin.train(losses(range(3 * step, 3 * step + 3)), 3 * world_size)
    twin.assert_is(model)
    assert_alike(model)


@on_ranks(2, each=each(OPTIONS, (0, 2)))
def test_exception_in_forward_of_one_rank(rank, options, at):
    """A rank without a backward steps with the others, who take its gradient for zero."""
    model, twin, ours = beside_unsharded(process_group=patient(), **options)
    for step in range(4):
        if rank == 0 and step == at:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(1, 99))
        else:
            ours.backward(loss_of(model, step))
        ours.step()
        those = losses(step)
        twin.train(those[1:] if step == at else those)
        twin.assert_is(model)
    assert_alike(model)


@on_ranks(2, each=each(itertools.product(("before", "inside", "after"), (False, True)), OPTIONS))
def test_closure_that_raises(rank, way, options):
    """Before its backward, in it, or after it; on one rank or on all. That rank's step raises what the closure did."""
    where, everywhere = way
    model = Fragile()
    twin = Unsharded(model)
    ours = make(model, process_group=patient(), **options)
    before = bits(model)
    bad = everywhere or rank == 0

    def closure() -> torch.Tensor:
        ours.zero_grad()
        if bad and where == "before":
            raise BrokenError
        loss = loss_of(model, 3, breaks="late" if bad and where == "inside" else "")
        ours.backward(loss)
        if bad and where == "after":
            raise BrokenError
        return loss

    other = pytest.raises(RuntimeError, match="failed on another rank: no rank has stepped")
    with pytest.raises(BrokenError) if bad else other:
        ours.step(closure)
    assert is_unchanged(model, before)
    train_on(ours, model, twin)


@on_ranks(2, each=each(OPTIONS, [(0, False), (1, True), (1, False), (0, True)]))
def test_unused_parameters_of_one_rank_are_refused_on_all_if_asked(rank, options, where):
    """Those of one rank are told on all."""
    at, by_tensor = where
    model, twin, ours = beside_unsharded(ignore_unused_parameters=False, process_group=patient(), **options)
    both_step(ours, model, twin, range(at))
    before = bits(model)
    loss = loss_of(model, 9, spare=rank != 1)
    with pytest.raises(RuntimeError, match=r"no gradient on rank 1 for spare\.(weight|bias), spare\.(bias|weight);"):
        loss.backward() if by_tensor else ours.backward(loss)
    ours.zero_grad()
    assert is_unchanged(model, before)
    train_on(ours, model, twin)


@on_ranks(1)
def test_many_unused_parameters_are_told_in_a_line():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(7)]
    ours = ZeroOptimizer(parameters, torch.optim.SGD, ignore_unused_parameters=False, lr=1.0)
    with pytest.raises(RuntimeError, match=r"parameter 1 of param group 0, .* and 2 more; ignore_unused_parameters="):
        ours.backward(parameters[0].sum())


# --- uneven inputs


@on_ranks(3, each=each(OPTIONS, [(0, 1), (1, 2), (1, 1), (0, 2)]))
def test_ranks_that_join_early(rank, world_size, options, where):
    """Rank `first` has no batch at all, those after it more and more: sums are divided by all ranks, as DDP may do.

    The unsharded twin takes the batches that there are, divided by the number of all ranks.
    """
    first, accumulation = where
    model, twin, ours = beside_unsharded(
        process_group=patient(),
        gradient_accumulation_steps=accumulation,
        ignore_unused_parameters=first == 0,
        **options,
    )

    def batches(window: int, its: int) -> Iterable[int]:
        """Return the numbers of a rank's batches in a window."""
        return range(accumulation * window, accumulation * (window + 1) if window < (its - first) % world_size else 0)

    windows, every = range(world_size - 1), range(world_size)
    with Join([ours]):
        for step in [step for window in windows for step in batches(window, rank)]:
            stepped(ours, model, step)
    for window in windows:
        its = [partial(loss_of, step=step, rank=r) for r in every for step in batches(window, r)]
        twin.train(its, world_size * accumulation)
    twin.assert_is(model)
    assert_alike(model)
    for _ in range(accumulation):
        stepped(ours, model, 70)
    twin.train(losses(70))
    twin.assert_is(model)


@on_ranks(3)
def test_rank_that_has_joined_while_another_fails(rank):
    """A rank that has joined takes part in a step that fails on another, and in the next ones."""
    model = Fragile()
    ours = make(model, process_group=patient())
    before = bits(model)
    told = []
    with Join([ours]):
        for step in range(0 if rank == 1 else 4):
            if rank == 0 and step == 1:
                with pytest.raises(BrokenError):
                    ours.backward(loss_of(model, step, breaks="late"))
            else:
                ours.backward(loss_of(model, step))
            try:
                ours.step()
            except RuntimeError as error:
                told.append(str(error))
    assert len(told) == (rank != 1)
    assert not is_unchanged(model, before)
    assert_alike(model)


# --- what is refused


def one(*, numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(numel).to(dtype))


SGD = torch.optim.SGD
Refused = tuple[Any, dict[str, Any], type[Exception], str]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"stage": 0}, "^stage must be 1 or 2, not 0$"),
    "stage 3": ({"stage": 3}, "^stage must be 1 or 2, not 3$"),
    "no bucket": ({"reduce_bucket_size": 0}, "^reduce_bucket_size must be at least 1, not 0$"),
    "no gather": ({"allgather_bucket_size": -1}, "^allgather_bucket_size must be at least 1, not -1$"),
    "no accumulation": ({"gradient_accumulation_steps": 0}, "^gradient_accumulation_steps must be at least 1, not 0$"),
    "negative clipping": ({"clip_grad": -1.0}, "^clip_grad must be at least 0, not -1.0$"),
    "clipping to nan": ({"clip_grad": math.nan}, "^clip_grad must be at least 0, not nan$"),
    "no predivision": ({"gradient_predivide_factor": 0.0}, "^gradient_predivide_factor must be above 0, not 0.0$"),
    "strange norm": ({"norm_type": 3.0}, "^norm_type must be 2.0 or infinity, not 3.0$"),
    "no loss scale": ({"loss_scale": 0.0}, "^a loss scale must be above 0, not 0.0$"),
    "its own argument": ({"lr": -1.0}, "Invalid learning rate"),
}  # fmt: skip
REFUSED: dict[str, Refused] = {  # beside what every sharded optimizer refuses: zero_redundancy/test_arguments.py
    **{case: ([one()], options, ValueError, said) for case, (options, said) in WRONG.items()},
    "several element types": (
        [one(), one(dtype=torch.bfloat16)], {}, ValueError,
        r"has several element types \(torch\.bfloat16, torch\.float32\), which one flat buffer cannot hold",
    ),
    "several devices": (
        [one(), torch.nn.Parameter(torch.ones(2, device="meta"))], {}, ValueError,
        r"has several devices \(cpu, meta\), which one flat buffer cannot hold",
    ),
    "complex": (
        [one(dtype=torch.complex64)], {}, ValueError,
        r"^parameters must have a floating-point type, not torch\.complex64$",
    ),
    "nothing": ([], {}, ValueError, "an empty parameter list$"),
    "a set": ([{"params": {one()}}], {}, TypeError, "must have an order"),
    "experts without a group": (
        [{"params": [one()], "moe": True, "name": "e"}], {}, ValueError,
        "'e' has no process group in expert_data_parallel_groups",
    ),
    "unknown argument": ([one()], {"betas": 1}, TypeError, "betas"),
}  # fmt: skip


@on_ranks(1)
def test_what_is_refused():
    for name, (parameters, options, error, message) in REFUSED.items():
        with pytest.raises(error, match=message) as told:
            ZeroOptimizer(parameters, SGD, **{"lr": 1.0, **options})
        assert "\n" not in str(told.value), name


@on_ranks(2)
def test_reentrant_checkpoints_of_a_backward_that_is_not_ours_are_told():
    """A backward inside of one that `Tensor.backward` runs is told, wherever it comes, and nothing stepped."""
    for stage in (1, 2):
        for inside in ("first", "twice", "last"):
            model, twin, ours = beside_unsharded(stage=stage, process_group=patient())
            before = bits(model)
            hidden = batch(0).requires_grad_()
            for layer, module in (("first", model.first), ("twice", model.twice), ("last", model.last)):
                hidden = checkpoint(module, hidden, use_reentrant=True) if layer == inside else module(hidden)
            with pytest.raises(RuntimeError, match="a backward ran inside another"):
                hidden.sum().backward()
            with pytest.raises(RuntimeError, match="no rank has stepped"):
                ours.step()
            assert is_unchanged(model, before)
            train_on(ours, model, twin)


@on_ranks(2)
def test_groups_that_are_refused():
    shared = one()
    with pytest.raises(ValueError, match="more than one parameter group"):
        ZeroOptimizer([{"params": [shared]}, {"params": [shared]}], SGD, lr=1.0)
    ours = ZeroOptimizer([shared], SGD, lr=1.0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours.add_param_group({"params": [shared]})
    assert len(ours.param_groups) == len(ours.groups) == len(ours.optim.param_groups) == 1
    ours.backward(shared.sum())
    with pytest.raises(RuntimeError, match="cannot be added between backward and step"):
        ours.add_param_group({"params": [one()]})
    ours.step()
    assert torch.equal(shared.detach(), torch.zeros(4))
    ours.add_param_group({"params": [one()]})
    assert len(ours.groups) == 2
