"""Flat groups: which rank owns what is what `zckpt.state.partition` says, and parameters are views of one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gloo import on_ranks, run
from tests.pairwise import some
from zckpt.optim import ZeroOptimizer
from zckpt.state.partition import (
    FLAT_ALIGNMENT,
    PARAMETER_ALIGNMENT_NBYTES,
    alignment_padding,
    flat_padding,
    flat_partition_numel,
    flat_starts,
    round_robin_order,
)

pytestmark = pytest.mark.interop

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Shapes = Sequence[tuple[int, ...]]

ODD: Shapes = [(), (3,), (5, 7), (0, 4), (1,), (2, 3, 2), (11,)]


def parameters_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return parameters whose elements are all different, the same on all ranks."""
    made = []
    for shape in shapes:
        start = 1 + sum(one.numel() for one in made)
        values = torch.arange(start, start + math.prod(shape), dtype=torch.float32)
        made.append(torch.nn.Parameter(values.reshape(shape).to(dtype)))
    return made


def make(groups: Sequence[Sequence[torch.Tensor]], **options: Any) -> ZeroOptimizer:
    named = []
    for index, group in enumerate(groups):
        named.append({"params": [(f"{index}.{number}", p) for number, p in enumerate(group)]})
    return ZeroOptimizer(named, torch.optim.SGD, **{"lr": 1.0, **options})


def is_cut_as_it_should_be(rank, world_size, shapes: Shapes, dtype: torch.dtype, **options: bool) -> None:
    """Check one group's buffer and this rank's part of it from first principles."""
    parameters = parameters_of(shapes, dtype)
    values = [p.detach().clone() for p in parameters]
    ours = make([parameters], round_robin_gradients=options["turns"], parameter_alignment=options["align"])
    (group,) = ours.groups
    order = round_robin_order(len(shapes), world_size) if options["turns"] else list(range(len(shapes)))
    multiple = PARAMETER_ALIGNMENT_NBYTES // dtype.itemsize if options["align"] else 1
    pads = alignment_padding([values[number].numel() for number in order], multiple)
    wanted = torch.cat(
        [torch.cat([values[n].reshape(-1), values[n].new_zeros(pad)]) for n, pad in zip(order, pads, strict=True)]
    )
    total = wanted.numel()
    partition = flat_partition_numel(total, world_size)

    assert group.flat.numel() == world_size * partition
    assert group.flat.numel() % (FLAT_ALIGNMENT * world_size) == 0
    assert group.flat.numel() - total < FLAT_ALIGNMENT * world_size
    assert group.flat.dtype == dtype
    assert torch.equal(group.flat[:total], wanted)
    assert not group.flat[total:].any()
    assert group.padding == flat_padding(total, partition, rank)
    assert group.total == total
    assert group.pads == pads

    starts = flat_starts([values[n].numel() for n in order], pads)
    for number, start in zip(order, starts, strict=False):
        parameter = parameters[number]
        assert parameter.shape == values[number].shape
        assert torch.equal(parameter.detach(), values[number])
        if parameter.numel():
            assert parameter.data_ptr() == group.flat.data_ptr() + start * dtype.itemsize
            assert not options["align"] or start * dtype.itemsize % PARAMETER_ALIGNMENT_NBYTES == 0

    assert group.master.dtype == torch.float32
    assert group.master.shape == (partition,)
    assert torch.equal(group.master.detach(), group.flat[rank * partition :][:partition].float())
    state = ours.state_dict()
    assert state["group_paddings"] == [group.padding]
    assert state["param_alignment_paddings"] == [pads]
    assert state["partition_count"] == [world_size]
    owned = {name: (at.start, at.numel) for name, at in state["param_slice_mappings"][0].items()}
    for number, start in zip(order, starts, strict=False):
        low = max(start, rank * partition)
        high = min(start + values[number].numel(), (rank + 1) * partition)
        its = owned.pop(f"0.{number}", None)
        assert its == ((low - rank * partition, high - low) if low < high else None)
    assert not owned


def any_shapes(rank, world_size, examples: int) -> None:
    """All ranks draw the same examples, because hypothesis is derandomized."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(shape, min_size=1, max_size=9), st.sampled_from(DTYPES), st.booleans(), st.booleans())
    def holds(shapes: list[tuple[int, ...]], dtype: torch.dtype, turns: bool, align: bool) -> None:
        is_cut_as_it_should_be(rank, world_size, shapes, dtype, turns=turns, align=align)

    holds()


@pytest.mark.parametrize("world_size", some([1, 3], [4]))
def test_any_group_is_cut_as_partition_says(world_size):
    run(any_shapes, world_size, 2 * settings.default.max_examples)


# --- what happens to them


def step_with(ours: ZeroOptimizer, parameters: Sequence[torch.Tensor], rank: int) -> None:
    """Step with the gradient 1 + rank of each parameter."""
    ours.backward(sum((p.float() * (1.0 + rank)).sum() for p in parameters))
    ours.step()


def more_ranks_than_elements(rank, world_size) -> None:
    """Ranks that own nothing but padding step along, and get the others' weights."""
    paddings: list[tuple[Shapes, tuple[int, ...]]] = [
        ([(1,)], (1, 2, 2)),
        ([(), (1,)], (0, 2, 2)),
        ([(3,)], (0, 1, 2)),
        ([(0,)], (0, 0, 0)),
    ]
    for shapes, padding in paddings:
        for stage in (1, 2):
            for scatter in (False, True):
                parameters = parameters_of(shapes)
                before = [p.detach().clone() for p in parameters]
                ours = make([parameters], stage=stage, reduce_scatter=scatter, clip_grad=1e6)
                assert ours.groups[0].padding == padding[rank]
                step_with(ours, parameters, rank)
                for parameter, start in zip(parameters, before, strict=True):
                    assert torch.equal(parameter.detach(), start - (1 + world_size) / 2)


def padding_stays_zero(rank, world_size) -> None:
    """Also of an optimizer that moves what has no gradient, if it is not zero."""
    for dtype in (torch.float32, torch.bfloat16):
        parameters = parameters_of(ODD, dtype)
        named = [(str(number), p) for number, p in enumerate(parameters)]
        ours = ZeroOptimizer(named, torch.optim.AdamW, lr=0.1, weight_decay=0.1, parameter_alignment=True)
        for _ in range(3):
            step_with(ours, parameters, rank)
        (group,) = ours.groups
        is_padding = torch.ones(group.flat.numel(), dtype=torch.bool)
        for start, numel in zip(group.starts, group.numels, strict=False):
            is_padding[start : start + numel] = False
        assert is_padding.sum() > sum(group.pads) > 0
        own = is_padding[rank * group.partition :][: group.partition]
        assert not group.flat[is_padding].any()
        assert not group.master.detach()[own].any()
        for slot in ("exp_avg", "exp_avg_sq"):
            held = ours.optim.state[group.master][slot]
            assert not held[own].any()
            assert held[~own].all()


def parameters_stay_views(rank, world_size) -> None:
    """After steps, and after something has put a parameter elsewhere: what it was set to is then what it is."""
    parameters = parameters_of(ODD)
    turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    parameters.append(turned)
    ours = make([parameters])
    (group,) = ours.groups
    assert torch.equal(turned.detach(), torch.arange(6.0).reshape(2, 3).t())

    def check() -> None:
        for parameter, start in zip(parameters, group.starts, strict=False):
            if parameter.numel():
                assert parameter.data_ptr() == group.flat.data_ptr() + start * 4
                assert parameter.is_contiguous()

    step_with(ours, parameters, rank)
    check()
    parameters[2].data = torch.full((5, 7), 9.0)
    ours.refresh_masters()
    check()
    assert (parameters[2] == 9.0).all()
    assert (ours.full_state("0.2", "master") == 9.0).all()
    step_with(ours, parameters, rank)
    check()
    assert (parameters[2] == 9.0 - (1 + world_size) / 2).all()


def groups_have_their_own_buffers(rank, world_size) -> None:
    """And their own types, and steps with their own rates."""
    one, two = parameters_of([(5,), (3,)]), parameters_of([(4,), (1,)], torch.bfloat16)
    ours = make([one, two])
    ours.param_groups[1]["lr"] = 2.0
    assert [group.partition * world_size for group in ours.groups] == [12, 6]
    assert [group.flat.dtype for group in ours.groups] == [torch.float32, torch.bfloat16]
    step_with(ours, [*one, *two], rank)
    average = (1 + world_size) / 2
    assert torch.equal(one[0].detach(), torch.arange(1.0, 6.0) - average)
    assert torch.equal(two[0].detach(), torch.arange(1.0, 5.0).bfloat16() - 2 * average)


def turns_deal_parameters_to_ranks(rank, world_size) -> None:
    """Of equal parameters, each of the first has another owner; otherwise the first rank owns all of them."""
    shapes = [(4,)] * (2 * world_size)
    for turns in (False, True):
        ours = make([parameters_of(shapes)], round_robin_gradients=turns)
        first = [int(name[2:]) for name in ours.state_dict()["param_slice_mappings"][0]]
        assert first == ([rank, rank + world_size] if turns else [2 * rank, 2 * rank + 1])


def frozen_parameters_are_left_out(rank, world_size) -> None:
    """They keep their memory and values; unfrozen, they can be added, and those that were there go on as before."""
    parameters = parameters_of(ODD)
    frozen = parameters[2].requires_grad_(False)
    memory, value = frozen.data_ptr(), frozen.detach().clone()
    trained = [p for p in parameters if p is not frozen]
    ours = ZeroOptimizer(
        [(f"n{i}", p) for i, p in enumerate(parameters)], torch.optim.SGD, lr=1.0, momentum=0.5, reduce_bucket_size=8
    )
    assert ours.groups[0].total == sum(p.numel() for p in trained)
    assert [p is q for p, q in zip(ours.groups[0].parameters, trained, strict=True)] == [True] * len(trained)
    assert list(ours.names()) == [f"n{i}" for i in range(len(ODD))]
    step_with(ours, trained, rank)
    assert frozen.data_ptr() == memory
    assert torch.equal(frozen.detach(), value)
    before = [p.detach().clone() for p in trained]

    frozen.requires_grad_()
    ours.add_param_group({"params": [("n2", frozen)], "lr": 3.0})
    assert ours.param_groups[1]["param_names"] == ["n2"]
    assert [group.total for group in ours.groups] == [sum(p.numel() for p in trained), 35]
    assert sorted(ours.names()) == [f"n{i}" for i in range(len(ODD))]
    step_with(ours, parameters, rank)
    average = (1 + world_size) / 2
    assert torch.equal(frozen.detach(), value - 3 * average)
    for parameter, its in zip(trained, before, strict=True):  # with the momentum of both steps
        assert torch.equal(parameter.detach(), its - 1.5 * average)
    assert ours.state_dict()["partition_count"] == [world_size] * 2


def half_masters_are_of_the_models_type(rank, world_size) -> None:
    """A step that is less than half of the last bit is lost in them, and kept in float32."""
    for half in (False, True):
        parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        ours = make([[parameter]], fp16_master_weights_and_gradients=half)
        master = ours.groups[0].master
        assert master.dtype == (torch.bfloat16 if half else torch.float32)
        assert master.data_ptr() != ours.groups[0].weights.data_ptr()
        for _ in range(16):
            ours.backward(-parameter.float().sum() / 1024)
            ours.step()
        assert (parameter == (1.0 if half else 1 + 16 / 1024)).all()


CHECKS = (
    more_ranks_than_elements,
    padding_stays_zero,
    parameters_stay_views,
    groups_have_their_own_buffers,
    turns_deal_parameters_to_ranks,
    frozen_parameters_are_left_out,
    half_masters_are_of_the_models_type,
)


@on_ranks(3)
def test_flat_groups(rank, world_size):
    for check in CHECKS:
        check(rank, world_size)
