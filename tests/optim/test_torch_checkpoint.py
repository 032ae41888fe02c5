"""`get_state_dict` of torch.distributed.checkpoint: what it cannot tell by parameter is refused, not passed over."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim.zero_redundancy_optimizer as torchs
from torch.distributed.checkpoint import state_dict as of_torch

from tests import live
from tests.gloo import on_ranks
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer, zero_redundancy

pytestmark = pytest.mark.interop


def trained(kind: type[Any]) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return live.trained(model, kind(list(model.named_parameters()), torch.optim.AdamW, lr=0.1))


def copies(made: Any, *, weights_only: bool) -> list[Any]:
    """Return a state dict as others keep it: copied, pickled and in a file."""
    held = io.BytesIO()
    torch.save(made, held)
    held.seek(0)
    return [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(held, weights_only=weights_only)]


@on_ranks(3)
def test_of_flat_groups():
    model, optimizer = trained(ZeroOptimizer)
    for get in (of_torch.get_state_dict, of_torch.get_optimizer_state_dict):
        with refusing(UnsupportedError, r"DeepSpeed's form.*get_state_dict.*zckpt\.save\("):
            get(model, optimizer)
    made = optimizer.state_dict()
    with pytest.raises(KeyError, match="other"):
        made["other"]
    assert "state" not in made
    assert made.get("param_groups") is None
    for again in copies(made, weights_only=False):
        assert type(again) is dict
        optimizer.load_state_dict(again)


@on_ranks(3)
def test_of_parts(rank):
    """One rank's part is refused; the whole is what the plain optimizer's is."""
    model, optimizer = trained(ZeroRedundancyOptimizer)
    for options in (None, of_torch.StateDictOptions(full_state_dict=True)):
        with refusing(UnsupportedError, r"this rank's part.*get_state_dict.*consolidate_state_dict\(to"):
            of_torch.get_optimizer_state_dict(model, optimizer, options=options)
    for again in copies(optimizer.state_dict(), weights_only=True):
        again["param_groups"][0]["params"] = list(again["param_groups"][0]["params"])  # nobody is in the way
        optimizer.load_state_dict(again)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        found = of_torch.get_optimizer_state_dict(model, optimizer)
        other = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        wanted = of_torch.get_optimizer_state_dict(model, other)
        assert wanted["state"].keys() == dict(model.named_parameters()).keys()
        assert_same_tree(found["state"], wanted["state"])


@on_ranks(3)
def test_private_names_of_torch(rank):
    tree = {"a": [torch.full((2,), float(rank)), (rank, "b")], "c": {"d": torch.tensor(rank)}}
    pair = dist.new_group([1, 2])
    for module in (torchs, zero_redundancy):
        found = module._broadcast_object(tree, src_rank=2, group=dist.group.WORLD, device=torch.device("cpu"))
        assert found["a"][0].tolist() == [2.0, 2.0]
        assert found["a"][1] == (2, "b")
        assert int(found["c"]["d"]) == 2
        assert (found is tree) == (rank == 2)
        if rank:
            assert module._broadcast_object(tree, 1, pair)["a"][1] == (1, "b")
        copied = module._recursive_copy_to_device(tree, non_blocking=False, device=torch.device("meta"))
        assert copied["a"][0].is_meta
        assert copied["a"][1] == (rank, "b")
        assert module._is_trainable(torch.nn.Parameter(torch.ones(1)))
