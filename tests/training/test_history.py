"""`Checkpointer(history=)`: what is saved is in the store before anything is removed, and is loaded from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests.live import trained
from tests.refusals import refusing


def model_and_optimizer():
    torch.manual_seed(0)
    return trained(torch.nn.Linear(40, 30), steps=0)


def steps(model, optimizer, first, last, **options):
    """Train and save each step, of which one is kept; return the weights after each."""
    weights = {}
    checkpointer = zckpt.Checkpointer("run", keep=1, every=1, history="store", **options)
    for step in range(first, last + 1):
        trained(model, optimizer)
        checkpointer.step(step, model=model, optimizer=optimizer)
        weights[f"step-{step:08d}"] = model.weight.detach().clone()
    checkpointer.close()
    return weights


def kept():
    return sorted(path.name for path in Path("run").glob("step-*"))


def stored():
    return [one.name for one in zckpt.history("store").checkpoints]


@pytest.mark.parametrize("async_", [False, True])
def test_all_that_was_saved_is_in_the_store_when_most_is_removed(async_):
    both = model_and_optimizer()
    weights = steps(*both, 1, 4, async_=async_) | steps(*both, 5, 6, async_=async_)
    assert kept() == ["step-00000006"]
    assert stored() == [*weights]
    for name, weight in weights.items():
        assert torch.equal(zckpt.open(f"store/{name}").read("weight", "weight"), weight)
    model, optimizer = model_and_optimizer()
    assert zckpt.load("store/step-00000003", model=model, optimizer=optimizer).step == 3
    assert torch.equal(model.weight, weights["step-00000003"])


def test_nothing_is_removed_while_the_store_cannot_be_written():
    Path("store").mkdir()
    Path("store/mine").write_text("something else")
    both = model_and_optimizer()
    with pytest.warns(UserWarning, match="could not remove checkpoints .*: .*holds something else"):
        steps(*both, 1, 3)
    assert len(kept()) == 3
    Path("store/mine").unlink()
    steps(*both, 4, 4)
    assert (len(stored()), len(kept())) == (4, 1)


def test_a_step_that_is_saved_again_is_in_the_store_twice():
    both = model_and_optimizer()
    first, again = steps(*both, 1, 2), steps(*both, 2, 3)
    names = stored()
    [other] = [one for one in names if one.startswith("step-00000002-")]
    assert len(names) == 4
    for name, weight in ({**again, **first} | {other: again["step-00000002"]}).items():
        assert torch.equal(zckpt.open(f"store/{name}").read("weight", "weight"), weight)
    assert kept() == ["step-00000003"]


def test_a_store_of_objects_is_refused():
    with refusing(zckpt.UsageError, "cannot be in a store such as S3"):
        zckpt.Checkpointer("run", history="s3://bucket/store")
