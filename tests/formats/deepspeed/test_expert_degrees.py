"""Which layers of experts are spread over how many ranks without ZeRO: by the shapes of state, and by names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.axes.expert_optimizers import _Optimizer
from zckpt.state import Checkpoint, Parameter
from zckpt.torchfile import read_torchfile


def layers(*of: tuple[int, int], names: Sequence[str] | None = None, **groups: list[int]) -> dict[int, set[int]]:
    """Over how many ranks layers are found to be: how many experts each has, how wide, and what is in which group."""
    model = [f"{i}.deepspeed_experts.{number}.w" for i, (count, _) in enumerate(of) for number in range(count)]
    checkpoint = Checkpoint("", "deepspeed")
    checkpoint.parameters = {name: Parameter(name, (8, of[int(name[0])][1]), "float32") for name in model}
    widths = [width for its in groups.values() for width in its]
    state = {n: {"exp_avg": torch.ones(8, width)} for n, width in enumerate(widths)}
    own, ends = [], 0
    for name, its in groups.items():
        own.append({"name": name, "moe": True, "params": list(range(ends, ends := ends + len(its)))})
    torch.save({"optimizer": {"state": state, "param_groups": own}}, "one.pt")
    file = read_torchfile("one.pt")
    found = _Optimizer(checkpoint, 0, file).layers(names)
    return {int(layer[0]): degrees for layer, degrees in found.items()}


def test_shapes_tell():
    model = (4, 9), (4, 11), (8, 9)
    assert layers(*model, ep_size_1=[11] * 4, ep_size_4=[9] * 3) == {0: {4}, 1: {1}, 2: {4}}
    assert layers(*model, ep_size_4=[9] * 3) == {0: {4}, 2: {4}}  # the second is not trained
    assert layers(*model, ep_size_2=[9, 9, 11, 11], ep_size_8=[9]) == {0: {2}, 1: {2}, 2: {8}}


@pytest.mark.parametrize("groups", [{"ep_size_1": [9] * 4, "ep_size_2": [9] * 2}, {"ep_size_2": [9], "ep_size_1": [9]}])
def test_what_fits_in_several_ways_is_not_certain(groups):
    with refusing(UnsupportedError, "over 1, 2 ranks, but it is uncertain which layers over how many"):
        layers((4, 9), (4, 9), **groups)


def test_names_tell():
    names = [f"1.deepspeed_experts.{n}.w" for n in range(4)] + [f"0.deepspeed_experts.{n}.w" for n in range(2)]
    assert layers((4, 9), (4, 9), names=names, ep_size_1=[9] * 4, ep_size_2=[9] * 2) == {1: {1}, 0: {2}}
