"""What the constructor takes and what it refuses, as torch.optim does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zckpt.optim import ZeroRedundancyOptimizer


def test_no_process_group():
    with pytest.raises(ValueError, match="init_process_group first"):
        ZeroRedundancyOptimizer(tensors(1), torch.optim.SGD, lr=1.0)


@pytest.fixture
def _alone(tmp_path) -> Iterator[None]:
    """Make this process the only rank of a world."""
    path = tmp_path / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(n)) for n in sizes]


one = torch.nn.Parameter(torch.ones(2))
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("nothing", [], ValueError, "empty parameter list"),
    ("a tensor", torch.ones(1), TypeError, "got torch.FloatTensor"),
    ("no iterable", 1.2, TypeError, "not iterable"),
    ("a number among tensors", [one, 42], TypeError, "must be tensors, not int"),
    ("a group among tensors", [one, {"params": [one]}], TypeError, "must be tensors, not dict"),
    ("a dict", {"params": [one]}, TypeError, "must be tensors, not str"),
    ("a set", [{"params": {one}}], TypeError, "must have an order"),
    ("no params", [{"lr": 1.0}], ValueError, "without the key 'params'"),
    ("sparse", [torch.sparse_coo_tensor(size=(2, 3))], ValueError, "dense tensors, not torch.sparse_coo"),
    ("twice", [one, one], ValueError, "twice"),
    ("in two groups", [{"params": [one]}, {"params": [one]}], ValueError, "more than one parameter group"),
    ("some with names", [("a", one), torch.nn.Parameter(torch.ones(3))], ValueError, "all parameters of a group"),
    ("groups with and without", [{"params": [("a", one)]}, {"params": tensors(1)}], ValueError, "param groups"),
    ("too few names", [{"params": tensors(1, 2), "param_names": ["a"]}], ValueError, "1 names for 2"),
    ("computed", [one * 2], ValueError, "non-leaf"),
]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("given", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(given, error, message):
    with pytest.raises(error, match=message):
        ZeroRedundancyOptimizer(given, torch.optim.SGD, lr=1.0)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    "given",
    [iter(tensors(3, 2)), tensors(2), [("a", one)], [{"params": tensors(1)}, {"params": tensors(2), "lr": 2.0}],
     [{"params": one}], [{"params": iter([("a", one)])}], [*tensors(1), torch.nn.Parameter(torch.ones(1).double())]],
    ids=["iterator", "list", "names", "groups", "a single tensor", "iterator of names", "several types"],
)  # fmt: skip
def test_taken(given):
    optimizer = ZeroRedundancyOptimizer(given, torch.optim.SGD, lr=1.0, momentum=0.5)
    assert optimizer.param_groups[-1]["nesterov"] is False
    assert optimizer._all_params == optimizer._index_to_param
    assert list(optimizer._param_to_rank.values()) == [0] * len(optimizer._all_params)


@pytest.mark.usefixtures("_alone")
def test_names_are_kept_as_torch_keeps_them():
    ours = ZeroRedundancyOptimizer([("a", one)], torch.optim.SGD, lr=1.0)
    theirs = torch.optim.SGD([("a", one)], lr=1.0)
    assert ours.param_groups == theirs.param_groups
    assert ours.defaults == theirs.defaults


@pytest.mark.usefixtures("_alone")
def test_class_that_makes_no_optimizer():
    from torch.distributed.optim import functional_sgd

    with pytest.raises(ValueError, match=r"must create a torch\.optim\.Optimizer"):
        ZeroRedundancyOptimizer(tensors(1), functional_sgd._FunctionalSGD, lr=1.0)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_a_reason(act):
    optimizer = ZeroRedundancyOptimizer(tensors(1), torch.optim.SGD, lr=1.0)
    with pytest.raises(TypeError, match="bound to its process group"):
        act(optimizer)
