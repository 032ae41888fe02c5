"""State that is a tree with tensors in it (codes and scales, lists of factors): its elements are compared, too."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zckpt
from zckpt.compare.logical import single
from zckpt.torchfile import FromFile


def written(path, factor, *, apart=False) -> Path:
    """An optimizer that keeps a list of factors of each parameter, which may lie far apart in memory."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    own = torch.full((2, 4), factor)[:, ::2] if apart else torch.full((2, 2), factor)
    state = {number: {"step": 1, "factors": [own, None], "sizes": (1, 2.5)} for number in range(2)}
    groups = [{"lr": 0.1, "params": [0, 1]}]
    torch.save({"model": net.state_dict(), "optimizer": {"state": state, "param_groups": groups}}, path)
    return path


def test_trees_that_differ_in_an_element_differ():
    one, other = written("one.pt", 1.0), written("other.pt", 2.0)
    found = zckpt.diff(one, other)
    assert not found.equal
    assert [one["key"] for one in found.as_dict()["metadata"]] == ["param_groups[0].state.factors"]
    assert zckpt.fingerprint(one).text != zckpt.fingerprint(other).text


def test_it_does_not_matter_how_they_lie_or_in_which_format():
    one, other = written("one.pt", 1.0), written("other.pt", 1.0, apart=True)
    assert zckpt.diff(one, other).equal
    zckpt.convert(one, "z", to="zckpt")
    assert zckpt.diff(other, "z").equal
    assert len({zckpt.fingerprint(path).text for path in (one, other, Path("z"))}) == 1


def test_parts_of_files_are_found_however_deep_they_lie_and_whatever_shares_them():
    shared: object = [FromFile(3, "x")]
    for _ in range(40):
        shared = [shared, shared]
    deep: object = FromFile(3, "x")
    for _ in range(5000):
        deep = [deep]
    assert single({"a": FromFile([1, 2], "x"), "b": [FromFile(3, "y")]}) == {"a": [1, 2], "b": [3]}
    for one in (shared, deep):
        assert isinstance(single(one), list)
