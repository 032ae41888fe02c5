"""`Checkpointer(history=)`: what is saved is in the store before anything is removed, and is loaded from there."""

from __future__ import annotations

import pytest
import torch

import zckpt
from tests.refusals import refusing


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    return model, torch.optim.AdamW(model.parameters())


def steps(checkpointer, model, optimizer, first, last):
    weights = {}
    for step in range(first, last + 1):
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
        checkpointer.step(step, model=model, optimizer=optimizer)
        weights[step] = model.weight.detach().clone()
    checkpointer.close()
    return weights


@pytest.mark.parametrize("async_", [False, True])
def test_all_that_was_saved_is_in_the_store_when_most_is_removed(async_, tmp_path):
    model, optimizer = trained()
    given = {"keep": 1, "every": 1, "async_": async_, "history": tmp_path / "store"}
    weights = steps(zckpt.Checkpointer(tmp_path / "run", **given), model, optimizer, 1, 4)
    weights |= steps(zckpt.Checkpointer(tmp_path / "run", **given), model, optimizer, 5, 6)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000006"]
    names = [one.name for one in zckpt.history(tmp_path / "store").checkpoints]
    assert names == [f"step-{step:08d}" for step in weights]
    for step, weight in weights.items():
        place = tmp_path / "store" / f"step-{step:08d}"
        assert torch.equal(zckpt.open(place).read("weight", "weight"), weight)
    other, its = trained()
    restored = zckpt.load(tmp_path / "store" / "step-00000003", model=other, optimizer=its)
    assert restored.step == 3
    assert torch.equal(other.weight, weights[3])


def test_nothing_is_removed_while_the_store_cannot_be_written(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("something else")
    model, optimizer = trained()
    checkpointer = zckpt.Checkpointer(tmp_path / "run", keep=1, every=1, history=tmp_path / "store")
    with pytest.warns(UserWarning, match="could not remove checkpoints .*: .*holds something else"):
        steps(checkpointer, model, optimizer, 1, 3)
    assert len(list((tmp_path / "run").glob("step-*"))) == 3
    (tmp_path / "store" / "mine").unlink()
    checkpointer = zckpt.Checkpointer(tmp_path / "run", keep=1, every=1, history=tmp_path / "store")
    steps(checkpointer, model, optimizer, 4, 4)
    assert len(zckpt.history(tmp_path / "store").checkpoints) == 4
    assert len(list((tmp_path / "run").glob("step-*"))) == 1


def test_a_step_that_is_saved_again_is_in_the_store_twice(tmp_path):
    model, optimizer = trained()
    given = {"keep": 1, "every": 1, "history": tmp_path / "store"}
    first = steps(zckpt.Checkpointer(tmp_path / "run", **given), model, optimizer, 1, 2)
    again = steps(zckpt.Checkpointer(tmp_path / "run", **given), model, optimizer, 2, 3)
    names = [one.name for one in zckpt.history(tmp_path / "store").checkpoints]
    [other] = [one for one in names if one.startswith("step-00000002-")]
    assert len(names) == 4
    for name, weight in (("step-00000002", first[2]), (other, again[2]), ("step-00000003", again[3])):
        assert torch.equal(zckpt.open(tmp_path / "store" / name).read("weight", "weight"), weight)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000003"]


def test_a_store_of_objects_is_refused(tmp_path):
    with refusing(zckpt.UsageError, "a directory on a file system"):
        zckpt.Checkpointer(tmp_path / "run", history="s3://bucket/store")
