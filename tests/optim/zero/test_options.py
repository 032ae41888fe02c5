"""Every option of ZeroOptimizer changes what it should: what is sent, when, in which type, and with what result."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gloo import run
from tests.live import same
from tests.optim.zero.reference import (
    ModelParallel,
    Net,
    Unsharded,
    assert_alike,
    beside_unsharded,
    bits,
    has_gradient,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.optim.zero.traffic import Traffic, traffic
from zckpt.optim import DynamicLossScaler, ZeroOptimizer

pytestmark = pytest.mark.interop

Check = Callable[[int, int], None]

OPTIONS: dict[str, list[tuple[int, Check]]] = {}
"""The checks of each option, and how many ranks they need."""


def of(option: str, world_size: int) -> Callable[[Check], Check]:
    """Take note that a function checks an option on so many ranks."""

    def note(check: Check) -> Check:
        OPTIONS.setdefault(option, []).append((world_size, check))
        return check

    return note


# --- what is sent


class Layers(torch.nn.Module):
    """Four matrices of 36 elements, of which each rank of two owns two."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(4))).to(dtype)

    def loss(self, step: int = 0) -> torch.Tensor:
        x = torch.randn(6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        return self.layers(x.to(self.layers[0].weight.dtype)).float().pow(2).sum()


EACH = 36
ALL = 4 * EACH


def layered(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Layers, ZeroOptimizer]:
    model = Layers(dtype)
    return model, ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, **{"lr": 0.1, "reduce_bucket_size": EACH, **options}
    )


def single(numel: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[torch.nn.Parameter, ZeroOptimizer]:
    """Return a parameter that is zero, and its optimizer, at a rate of one."""
    parameter = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
    return parameter, ZeroOptimizer([("p", parameter)], torch.optim.SGD, lr=1.0, **options)


def warmed(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Layers, ZeroOptimizer]:
    """Return them after a first window, in which the order of gradients is agreed on."""
    model, ours = layered(dtype, **options)
    for _ in range(options.get("gradient_accumulation_steps", 1)):
        ours.backward(model.loss())
    ours.step()
    return model, ours


def sent(model: Layers, ours: ZeroOptimizer, step: int = 1) -> Traffic:
    """Return what a backward sends."""
    with traffic() as seen:
        ours.backward(model.loss(step))
    return seen


@of("stage", 2)
@of("overlap_comm", 2)
def what_reduces_while_backward_runs_has_reduced_all_buckets_but_the_last(rank, world_size) -> None:
    """When the last gradient is made. Stage 2 does so, and stage 1 if it overlaps; what is reduced is not held."""
    for stage, overlap, reduced in ((1, False, 0), (1, True, 3), (2, False, 3)):
        model, ours = warmed(stage=stage, overlap_comm=overlap)
        held: list[int] = []
        with traffic() as seen:
            model.layers[0].weight.register_hook(
                lambda _, model=model, seen=seen, held=held: held.extend(
                    [len(seen.reductions), sum(p.grad is not None for p in model.parameters())]
                )
            )
            ours.backward(model.loss(1))
        assert held == [reduced, 3 - reduced]
        assert len(seen.reductions) == 4


@of("stage", 2)
def stage_2_reduces_in_every_backward_and_stage_1_in_the_last(rank, world_size) -> None:
    for stage in (1, 2):
        model, ours = warmed(stage=stage, gradient_accumulation_steps=3)
        counts = []
        for step in range(3):
            counts.append(len(sent(model, ours, step).reductions))
        assert counts == ([0, 0, 4] if stage == 1 else [4, 4, 4])
        assert not any(map(has_gradient, model.parameters()))


@of("stage", 2)
def memory_held_between_two_backwards_is_whole_or_a_partition(rank, world_size) -> None:
    for stage in (1, 2):
        model, ours = layered(stage=stage, gradient_accumulation_steps=2)
        ours.backward(model.loss())
        whole = sum(p.numel() for p in model.parameters() if has_gradient(p))
        parts = sum(group.gradient.numel() for group in ours.groups if group.gradient is not None)
        assert (whole, parts) == ((ALL, 0) if stage == 1 else (0, ALL // 2))
        ours.backward(model.loss())
        assert sum(group.gradient.numel() for group in ours.groups) == ALL // 2


@of("reduce_bucket_size", 2)
def buckets_are_filled_with_whole_parameters(rank, world_size) -> None:
    for stage in (1, 2):
        for size, wanted in (
            (1, [EACH] * 4),
            (2 * EACH - 1, [EACH] * 4),
            (2 * EACH, [2 * EACH] * 2),
            (3 * EACH, [3 * EACH, EACH]),
            (ALL, [ALL]),
        ):
            seen = sent(*warmed(stage=stage, reduce_bucket_size=size, reduce_scatter=False))
            assert seen.reductions == [("all_reduce", numel, torch.float32) for numel in wanted]


@of("allgather_bucket_size", 2)
def weights_are_gathered_in_pieces(rank, world_size) -> None:
    for size, wanted in ((ALL, [72, 72]), (ALL // 2, [36] * 4), (100, [50, 50, 22, 22]), (1, [1] * ALL)):
        model, ours = layered(allgather_bucket_size=size)
        ours.backward(model.loss())
        with traffic() as seen:
            ours.step()
        assert [numel for _, numel, _ in seen.of("broadcast")] == wanted
        assert_alike(model)


@of("reduce_scatter", 2)
def gradients_are_reduced_to_owners_or_on_all_ranks(rank, world_size) -> None:
    """A bucket with parts of two ranks is two reductions, of one part each."""
    for scatter in (False, True):
        seen = sent(*warmed(reduce_scatter=scatter, reduce_bucket_size=ALL))
        wanted = [("reduce", ALL // 2)] * 2 if scatter else [("all_reduce", ALL)]
        assert [(name, numel) for name, numel, _ in seen.reductions] == wanted


@of("reduce_scatter", 2)
def what_is_reduced_to_an_owner_others_do_not_get(rank, world_size) -> None:
    """Half as many elements come back: those of other ranks' partitions are not averaged here."""
    for scatter in (False, True):
        model, ours = warmed(reduce_scatter=scatter, reduce_bucket_size=ALL, overlap_comm=False)
        ours.backward(model.loss(1))
        (wire,) = ours._reducer._buffers.values()
        mine = ours.groups[0].gradient
        whole = torch.cat([ours.full_state(name, "gradient").reshape(-1) for name in ours.names()])
        matches = sum(int((whole == value).any()) for value in wire.tolist())
        assert (matches == ALL) == (not scatter)
        assert torch.equal(whole[rank * ALL // 2 :][: ALL // 2], mine)


@of("overlap_comm", 2)
def a_bucket_is_sent_before_the_last_one_has_arrived(rank, world_size) -> None:
    """With two buffers: the wait for one comes when the third is about to be sent, or backward has ended."""
    for stage in (1, 2):
        for overlap, wanted in (
            (False, ["send", "wait"] * 4),
            (True, ["send", "send", "wait", "send", "wait", "send", "wait", "wait"]),
        ):
            seen = sent(*warmed(stage=stage, overlap_comm=overlap, reduce_scatter=False))
            assert seen.events == wanted


@of("overlap_comm", 2)
def buffers_are_one_or_two(rank, world_size) -> None:
    for overlap in (False, True):
        _, ours = warmed(overlap_comm=overlap, reduce_bucket_size=2 * EACH)
        assert len(ours._reducer._buffers) == 1 + overlap


@of("communication_data_type", 3)
def gradients_are_sent_in_the_type_wanted(rank, world_size) -> None:
    """The first rank's gradient is 256 times the others': their units are lost in bfloat16, and not in float32."""
    for sent in (None, torch.float32):
        parameter, ours = single(
            12, torch.bfloat16, communication_data_type=sent, reduce_scatter=False,
            gradient_predivide_factor=1.0, gradient_accumulation_dtype=torch.float32,
        )  # fmt: skip
        with traffic() as seen:
            ours.backward((parameter.float() * (256.0 if rank == 0 else 1.0)).sum())
        assert seen.reductions == [("all_reduce", 12, sent or torch.bfloat16)]
        total = ours.full_state("p", "gradient") * 3
        assert (total.round() == 258.0).all() == (sent == torch.float32)


FLOAT16_LIMIT = 65504.0


@of("gradient_predivide_factor", 2)
def what_is_divided_before_does_not_overflow(rank, world_size) -> None:
    """The sum of two large gradients does, in float16; that of their halves does not. Nor do small ones vanish."""
    tiny = 2.0**-24  # the least float16 above 0: its half is 0
    for factor, value, wanted in (
        (None, FLOAT16_LIMIT, FLOAT16_LIMIT),
        (2.0, FLOAT16_LIMIT, FLOAT16_LIMIT),
        (1.0, FLOAT16_LIMIT, math.inf),
        (None, tiny, 0.0),
        (1.0, tiny, tiny),
        (4.0, 3.0, 3.0),
    ):
        for scatter in (False, True):
            parameter, ours = single(8, torch.float16, gradient_predivide_factor=factor, reduce_scatter=scatter)
            ours.backward((parameter.float() * value).sum())
            assert (ours.full_state("p", "gradient") == wanted).all()
            ours.step()
            assert ours.overflow == (wanted == math.inf)


# --- what is accumulated


@of("gradient_accumulation_dtype", 2)
def many_small_gradients_are_not_lost(rank, world_size) -> None:
    """Units added to 256 vanish in bfloat16 and are kept in float32, before and after the reduction."""
    for stage, dtype, sent in itertools.product((1, 2), (None, torch.float32), ("reduced", "whole")):
        parameter, ours = single(
            8, torch.bfloat16, stage=stage, gradient_accumulation_dtype=dtype, communication_data_type=torch.float32
        )
        for value in (256.0, *[1.0] * 8):
            with ours.no_sync() if sent == "whole" else contextlib.nullcontext():
                ours.backward((parameter.float() * value).sum())
        ours.backward((parameter.float() * 0).sum())
        held = ours.full_state("p", "gradient")
        assert held.dtype == (dtype or torch.bfloat16)
        assert (held == (264.0 if dtype else 256.0)).all(), (stage, dtype, sent, held)


# --- norms


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@of("clip_grad", 2)
@of("norm_type", 2)
def gradients_are_clipped_by_their_norm(rank, world_size) -> None:
    for norm_type in (2.0, math.inf):
        for clip in (0.0, 0.05, 1e6):
            model, twin, ours = beside_unsharded(clip_grad=clip, norm_type=norm_type)
            for step in range(2):
                stepped(ours, model, step)
                twin.gradients(losses(step))
                norm = float(torch.linalg.vector_norm(flat_gradient(twin.model), norm_type))
                assert ours.last_grad_norm == pytest.approx(norm, rel=1e-5)
                if clip:
                    torch.nn.utils.clip_grad_norm_(twin.model.parameters(), clip, norm_type)
                    assert (norm > clip) == (clip < 1)
                twin.optimizer.step()
            twin.assert_is(model)


@of("norm_type", 3)
def the_largest_magnitude_may_be_on_any_rank_and_not_finite(rank, world_size) -> None:
    for where in range(6):
        for value, wanted in ((-7.0, 7.0), (math.inf, math.inf), (math.nan, math.inf)):
            parameter, ours = single(6, norm_type=math.inf)
            parameter.grad = torch.ones(6)
            parameter.grad[where] = value
            ours.step()
            assert ours.last_grad_norm == wanted
            assert ours.overflow == math.isinf(wanted)
            assert bool(parameter.any()) != ours.overflow


def grid() -> tuple[dist.ProcessGroup, ModelParallel]:
    """Return this rank's data-parallel and model-parallel group: 0 and 1 hold a model, and so do 2 and 3."""
    rank = dist.get_rank()
    models = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return data[rank % 2], ModelParallel(models[rank // 2])


@of("model_parallel", 4)
@of("process_group", 4)
def norms_are_those_of_the_whole_model_and_count_each_parameter_once(rank, world_size) -> None:
    data, together = grid()
    for norm_type in (2.0, math.inf):
        for model_parallel in (None, together):
            sliced = torch.nn.Parameter(torch.zeros(5))
            sliced.model_parallel = True
            shared = torch.nn.Parameter(torch.zeros(3))
            ours = ZeroOptimizer(
                [("sliced", sliced), ("shared", shared)], torch.optim.SGD, lr=1.0, process_group=data,
                model_parallel=model_parallel, norm_type=norm_type, clip_grad=1.0,
            )  # fmt: skip
            assert (ours.rank, ours.world_size) == (rank // 2, 2)
            assert ours.groups[0].partition == 4
            part = 3.0 + rank % 2  # of rank 0 and 1 of the model, on both data-parallel ranks
            sliced.grad = torch.full((5,), part + (rank // 2) - 0.5)
            shared.grad = torch.full((3,), 2.0)
            ours.step()
            if norm_type == math.inf:
                wanted = 4.0 if model_parallel else part
            elif model_parallel:
                wanted = math.sqrt(5 * 3.0**2 + 5 * 4.0**2 + 3 * 2.0**2)
            else:
                wanted = math.sqrt(5 * part**2 + 3 * 2.0**2)
            assert ours.last_grad_norm == pytest.approx(wanted, rel=1e-6)
            assert torch.allclose(sliced.detach(), torch.full((5,), -part / wanted))
            assert torch.allclose(shared.detach(), torch.full((3,), -2.0 / wanted))


@of("model_parallel", 4)
def an_overflow_in_one_part_of_the_model_skips_the_step_of_all(rank, world_size) -> None:
    data, together = grid()
    for model_parallel in (None, together):
        scaler = DynamicLossScaler(4.0, delayed_shift=1)
        parameter, ours = single(6, process_group=data, model_parallel=model_parallel, loss_scale=scaler)
        parameter.model_parallel = True
        parameter.grad = torch.full((6,), math.inf if rank == 3 else 4.0)
        ours.step()
        stepped = rank in (0, 2) and model_parallel is None
        assert ours.overflow != stepped
        assert ours.loss_scale == (4.0 if stepped else 2.0)
        assert (parameter == (-1.0 if stepped else 0.0)).all()


# --- which ranks


@of("process_group", 3)
def only_the_ranks_of_the_group_train_together(rank, world_size) -> None:
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    model = Net()
    twin = Unsharded(model)
    members = [1] if rank == 1 else [0, 2]
    ours = make(model, process_group=alone if rank == 1 else pair, clip_grad=0.5)
    for step in range(3):
        stepped(ours, model, step)
        twin.gradients([partial(loss_of, step=step, rank=r) for r in members], len(members))
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.5)
        twin.optimizer.step()
        twin.assert_is(model)
    assert [group.world_size for group in ours.groups] == [len(members)] * 2


@of("expert_data_parallel_groups", 4)
def experts_are_reduced_and_partitioned_over_the_ranks_that_hold_them(rank, world_size) -> None:
    """Ranks 0 and 2 hold one expert, 1 and 3 the other; gradients are divided by all ranks, as DeepSpeed does."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = pairs[rank % 2]
    for scatter in (False, True):
        dense = torch.nn.Parameter(torch.zeros(16))
        expert = torch.nn.Parameter(torch.full((8,), float(rank % 2)))
        given = [
            {"params": [("dense", dense)]},
            {"params": [("expert", expert)], "moe": True, "name": "experts"},
        ]
        ours = ZeroOptimizer(
            given, torch.optim.SGD, lr=1.0, expert_data_parallel_groups={"experts": mine}, reduce_scatter=scatter
        )
        assert [group.partition for group in ours.groups] == [4, 4]
        assert [group.world_size for group in ours.groups] == [4, 2]
        assert ours.state_dict()["partition_count"] == [4, 2]
        ours.backward(((dense + expert.repeat(2)) * (1.0 + rank)).sum())
        assert (ours.full_state("dense", "gradient") == 2.5).all()
        summed = 4.0 if rank % 2 == 0 else 6.0  # ranks 0 and 2, or 1 and 3
        assert (ours.full_state("expert", "gradient") == 2 * summed / 4).all()
        ours.step()
        assert (expert == rank % 2 - 2 * summed / 4).all()
        # of both experts, each counted once
        both = math.sqrt(8 * ((2.0) ** 2 + (3.0) ** 2))
        assert ours.last_grad_norm == pytest.approx(math.sqrt(16 * 2.5**2 + both**2), rel=1e-6)


# --- memory and state


@of("offload", 2)
def offloaded_training_is_the_same_bit_for_bit(rank, world_size) -> None:
    """On the CPU there is nothing to move; what changes is when stage 1 has a partition's memory for gradients."""
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for stage, optimizer_class, dtype in (
        (1, sgd, torch.float32), (1, adamw, torch.bfloat16), (2, sgd, torch.bfloat16), (2, adamw, torch.float32),
    ):  # fmt: skip
        found = []
        for offload in (False, True):
            model = Net(dtype)
            ours = make(
                model, optimizer_class, stage=stage, offload=offload, clip_grad=0.5,
                gradient_accumulation_steps=2, gradient_accumulation_dtype=torch.float32,
            )  # fmt: skip
            for step in range(4):
                ours.backward(loss_of(model, step))
                for group in ours.groups:
                    assert group.master.device.type == "cpu"
                    if step % 2:
                        assert group.gradient.device.type == "cpu"
                ours.step()
            found.append([*bits(model), *(g.master.detach().clone() for g in ours.groups)])
            kept = [group.gradient is not None for group in ours.groups]
            assert all(kept) == (stage == 2 or offload)
        assert same(*found)


@of("elastic_checkpoint", 3)
def elastic_state_has_no_padding(rank, world_size) -> None:
    for elastic in (False, True):
        model = Net()
        ours = make(model, torch.optim.AdamW, elastic_checkpoint=elastic)
        stepped(ours, model, 0)
        state = ours.state_dict()["base_optimizer_state"]
        if not elastic:
            assert [s["exp_avg"].numel() for s in state["state"].values()] == [g.partition for g in ours.groups]
            continue
        lean = [group.partition - group.padding for group in ours.groups]
        assert [one["exp_avg"].numel() for one in state] == lean
        assert ours.state_dict()["base_optimizer_state_step"] == 1
        totals = torch.tensor(lean)
        dist.all_reduce(totals)
        assert totals.tolist() == [group.total for group in ours.groups]


def in_turn(rank, world_size, checks: list[Check]) -> None:
    for check in checks:
        check(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_option_changes_what_it_should(world_size):
    """In one group of processes, because to start one takes longer than most checks."""
    checks = {check: None for its in OPTIONS.values() for size, check in its if size == world_size}
    run(in_turn, world_size, list(checks))


ELSEWHERE = {
    "round_robin_gradients", "parameter_alignment", "fp16_master_weights_and_gradients",  # test_partition.py
    "broadcast_weights",  # test_weights.py
    "allow_per_tensor",  # test_per_tensor.py
    "gradient_accumulation_steps",  # test_windows.py
    "loss_scale",  # test_loss_scale.py
    "ignore_unused_parameters",  # test_backward.py and test_failures.py
}  # fmt: skip


def test_every_option_has_a_test():
    parameters = inspect.signature(ZeroOptimizer).parameters.values()
    options = {parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}
    assert options == set(OPTIONS) | ELSEWHERE
