"""State dicts: consolidated, a rank's own part, loaded anywhere, refused where they do not fit."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

from tests.deepspeed_engine.optimizers import FusedLayoutAdam
from tests.gloo import on_ranks
from tests.logical import assert_same_tree
from tests.optim.zero_redundancy.training import (
    OPTIMIZERS,
    groups,
    make,
    train,
    train_twins,
    trained_twins,
    twins,
    unsharded,
)
from tests.pairwise import each, some
from zckpt.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop


def consolidated(optimizer: ZeroRedundancyOptimizer | TorchOptimizer, to: int = 0) -> dict[str, Any]:
    """Return the whole state dict on every rank."""
    optimizer.consolidate_state_dict(to=to)
    told = [optimizer.state_dict() if dist.get_rank() == to else None]
    dist.broadcast_object_list(told, src=to)
    assert told[0] is not None
    return told[0]


@on_ranks(3, each=each(OPTIMIZERS, range(3)))
def test_consolidated_is_the_unsharded_optimizers(rank, kind, to):
    _, ours, _, theirs = trained_twins(kind, named=kind == "adamw")
    ours.consolidate_state_dict(to=to)
    if rank == to:
        found, wanted = ours.state_dict(), theirs.state_dict()
        assert_same_tree(found, wanted, kind)
        assert list(found) == list(wanted)
        assert list(found["state"]) == list(wanted["state"])


@on_ranks(3, each=some([*zip(OPTIMIZERS)][::3], [one for at, one in enumerate(zip(OPTIMIZERS)) if at % 3]))
def test_loaded_from_each_other(world_size, kind):
    model, ours, other, theirs = trained_twins(kind)
    whole, single = consolidated(ours, to=world_size - 1), copy.deepcopy(theirs.state_dict())
    fresh = model, make(kind, model), other, unsharded(kind, other)
    fresh[1].load_state_dict(single)
    fresh[3].load_state_dict(whole)
    train_twins(fresh, (3, 4), kind)
    torchs = TorchOptimizer(groups(other), OPTIMIZERS[kind][0], **OPTIMIZERS[kind][1])
    torchs.load_state_dict(consolidated(fresh[1]))
    back = make(kind, model)
    back.load_state_dict(consolidated(torchs))
    train_twins((model, back, other, torchs), (5, 6), kind)


@on_ranks(3)
def test_own_part_is_loaded_again(rank, world_size):
    model, ours, other, theirs = trained_twins("adamw")
    part = ours.state_dict()
    assert part["partition"]["rank"] == rank
    assert set(part["state"]) == {n for n, owner in enumerate(part["partition"]["ranks"]) if owner == rank}
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    fresh = make("adamw", model)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    train_twins((model, fresh, other, theirs), (3, 4))
    alone = [dist.new_group([one]) for one in range(world_size)][rank]
    with pytest.raises(ValueError, match=f"part of rank {rank} of {world_size}, and this is rank 0 of 1"):
        make("adamw", model, process_group=alone).load_state_dict(part)
    part["partition"]["rank"] += 1
    with pytest.raises(ValueError, match="part of rank"):
        fresh.load_state_dict(part)


@on_ranks(3)
def test_part_of_another_partition_is_taken_over(rank, world_size):
    model, ours, other, theirs = pair = twins("adamw", parameters_as_bucket_view=True)
    turned = [[p for p, r in ours._param_to_rank.items() if (r + 1) % world_size == rank] for rank in range(world_size)]
    ours._repartition(turned)
    train_twins(pair)
    part = ours.state_dict()
    fresh = make("adamw", model, parameters_as_bucket_view=True)
    fresh.load_state_dict(part)
    assert fresh._param_to_rank == ours._param_to_rank
    train_twins((model, fresh, other, theirs), (3, 4))
    assert_same_tree(consolidated(fresh)["state"], theirs.state_dict()["state"])
    with pytest.raises(RuntimeError, match="or loaded state, have assigned"):
        fresh.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


@on_ranks(3)
def test_consolidated_copy_shares_nothing_and_is_released(rank):
    model, ours, _, _ = trained_twins("adamw")
    ours.consolidate_state_dict(to=1)
    taken = ours.state_dict()
    before = copy.deepcopy(taken)
    train(model, ours, range(3, 5))
    ours.param_groups[0]["lr"] = 5.0
    if rank == 1:
        assert_same_tree(taken, before)
        assert ours.state_dict()["state"].keys() == before["state"].keys()
        assert "partition" not in ours.state_dict()
    ours.release_state_dict()
    assert "partition" in ours.state_dict()


@on_ranks(3)
def test_load_leaves_the_dict_alone_and_shares_nothing(rank):
    model, _, _, theirs = trained_twins("adamw")
    given = theirs.state_dict()
    before = copy.deepcopy(given)
    fresh = make("adamw", model)
    fresh.load_state_dict(given)
    train(model, fresh, range(3))
    assert_same_tree(given, before)
    assert fresh.state is fresh.optim.state
    assert set(fresh.state) == {p for p, owner in fresh._param_to_rank.items() if owner == rank}


@on_ranks(3)
def test_load_clears_what_the_dict_does_not_have():
    _, ours, _, theirs = pair = twins("adamw")
    fresh = theirs.state_dict()
    train_twins(pair)
    ours.load_state_dict(fresh)
    assert not ours.state
    _, ours, other, _ = twins("adamw")
    half = unsharded("adamw", other)
    train(other, half, [0])
    given = half.state_dict()
    del given["state"][1]
    ours.load_state_dict(given)
    count = torch.tensor(len(ours.state))
    dist.all_reduce(count)
    assert count == len(given["state"])


@on_ranks(3)
def test_load_casts_as_torch_does():
    for options in ({}, {"fused": True}, {"amsgrad": True}):
        parameters = [torch.nn.Parameter(torch.ones(n, 3, dtype=torch.bfloat16)) for n in (3, 4, 5)]
        ours = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1, **options)
        theirs = torch.optim.AdamW(parameters, lr=0.1, **options)
        full = torch.optim.AdamW([torch.nn.Parameter(torch.ones(n, 3)) for n in (3, 4, 5)], lr=0.1, **options)
        for group in full.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.rand_like(parameter)
        full.step()
        ours.load_state_dict(full.state_dict())
        theirs.load_state_dict(full.state_dict())
        found = consolidated(ours)
        assert_same_tree(found["state"], theirs.state_dict()["state"], str(options))
        assert {values["exp_avg"].dtype for values in found["state"].values()} == {torch.bfloat16}
        assert {values["step"].dtype for values in found["state"].values()} == {torch.float32}


@on_ranks(3)
def test_names_find_parameters_in_another_order():
    model, _, other, theirs = trained_twins("adamw", named=True)
    turned = [{**group, "params": group["params"][::-1]} for group in groups(model, named=True)]
    fresh = ZeroRedundancyOptimizer(turned, torch.optim.AdamW, lr=0.01)
    fresh.load_state_dict(theirs.state_dict())
    train_twins((model, fresh, other, theirs), (3, 4))


@on_ranks(3)
def test_mismatched_dicts_are_refused_by_what_differs(rank, world_size):
    _, ours, _, theirs = trained_twins("adamw", named=True)
    whole = theirs.state_dict()
    before = copy.deepcopy(ours.state_dict())

    def changed(**changes: object) -> dict[str, Any]:
        return {**copy.deepcopy(whole), **changes}

    first, second = copy.deepcopy(whole)["param_groups"]
    wrong = [
        ({}, "no 'state' and 'param_groups'"),
        (changed(state=[]), "no 'state' and 'param_groups'"),
        (changed(param_groups=[first]), "1 param groups, the optimizer has 2"),
        (changed(param_groups=[{**first, "params": first["params"][1:]}, second]), "group 0 has 2 parameters"),
        (changed(param_groups=[{**first, "params": None}, second]), "no list 'params'"),
        (changed(param_groups=[{**first, "param_names": ["a", "b", "c"]}, second]), "group 0 has other parameters"),
        (changed(param_groups=[first, {**second, "params": first["params"][:1] * len(second["params"])}]), "twice"),
        (changed(state={**whole["state"], 99: {}}), "state for parameter 99, which is in none"),
        (changed(state={**whole["state"], 0: None}), "state of parameter 0 is NoneType"),
        (changed(state={**whole["state"], 0: {"exp_avg": torch.ones(4, 5)}}), r"shape \(4, 5\).*\(13, 7\)"),
        (changed(partition={"rank": rank, "world_size": world_size, "ranks": [99] * 9}), "ranks that do not exist"),
        (changed(partition=3), "no usable 'partition'"),
        (changed(partition={"rank": rank, "world_size": world_size, "ranks": [99]}), "no usable"),
    ]  # fmt: skip
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            ours.load_state_dict(given)
    assert_same_tree(ours.state_dict()["state"], before["state"])
    for to in (-1, world_size):
        with pytest.raises(ValueError, match=f"no rank {to}"):
            ours.consolidate_state_dict(to=to)


@on_ranks(3)
def test_hyperparameters_that_count_steps_come_from_a_rank_that_steps(world_size):
    x, y = (torch.nn.Parameter(torch.ones(n)) for n in (5, 3))
    ours = ZeroRedundancyOptimizer([{"params": [x]}, {"params": [y]}], FusedLayoutAdam, lr=0.1)
    for group in ours.optim.param_groups:
        group["step"] = 7 if group["params"] else 0
    for index, group in enumerate(ours.param_groups):
        group["step"] = ours.optim.param_groups[index]["step"]
    for to in range(world_size):
        found = consolidated(ours, to=to)
        assert [group["step"] for group in found["param_groups"]] == [7, 7]


@on_ranks(3)
def test_hooks_of_state_dicts_are_called():
    _, ours, _, _ = twins("adamw")
    seen = []

    def mark(_: object, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return {**state_dict, "mark": 1}

    def unmark(_: object, state_dict: dict[str, Any]) -> None:
        seen.append(state_dict.pop("mark"))

    ours.register_state_dict_post_hook(mark)
    ours.register_load_state_dict_pre_hook(unmark)
    ours.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    ours.load_state_dict(ours.state_dict())
    assert seen == [1, "loaded"]
