"""What a file has of a model under other names, and arranged otherwise, is found by its values, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from zckpt.engine.copy import read_extent
from zckpt.formats import rearranged as module
from zckpt.formats.rearranged import rearranged
from zckpt.formats.safetensors.file import read_header
from zckpt.state import Extent
from zckpt.storage.files import Sources

Tensors = dict[str, torch.Tensor]


def model(seed=0) -> Tensors:
    """Experts, a gate, vectors that are alike, a matrix in bfloat16's range, and a matrix of which all is zero."""
    given = torch.Generator().manual_seed(seed)

    def drawn(*shape) -> torch.Tensor:
        return torch.randn(shape, generator=given)

    return {
        "experts.gate_up": drawn(3, 2 * 4, 6), "experts.down": drawn(3, 6, 4), "experts.bias": drawn(3, 2 * 4),
        "gate.weight": drawn(5, 6), "up.weight": drawn(5, 6), "gate.bias": drawn(5), "up.bias": drawn(5),
        "norm.1.weight": torch.ones(6), "norm.2.weight": torch.ones(6), "turned": drawn(2, 7, 3),
        "conv": drawn(4, 2, 3, 3), "long": drawn(130, 101), "single": drawn(),
    }  # fmt: skip


def saved(live: Tensors) -> Tensors:
    """The same as a file has it."""
    found = {}
    for expert in range(3):
        halves = live["experts.gate_up"][expert].split(4)
        found |= {
            f"e.{expert}.w1": halves[0],
            f"e.{expert}.w3": halves[1],
            f"e.{expert}.w2": live["experts.down"][expert],
        }
        biases = live["experts.bias"][expert].split(4)
        found |= {f"e.{expert}.b1": biases[0], f"e.{expert}.b3": biases[1]}
    found["both.weight"] = torch.cat([live["gate.weight"], live["up.weight"]])
    found["both.bias"] = torch.cat([live["gate.bias"], live["up.bias"]])
    found |= {"ln.a": live["norm.1.weight"], "ln.b": live["norm.2.weight"], "t": live["turned"].transpose(1, 2)}
    found |= {"linear": live["conv"].reshape(4, 18), "big": live["long"], "scalar": live["single"]}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def found(live: Tensors, file: Tensors, folder) -> Tensors:
    """Return the copies that are found, as tensors; all of them are equal to what they are copies of."""
    save_file(live, folder / "live.safetensors")
    save_file(file, folder / "file.safetensors")
    originals, copies = (read_header(folder / f"{name}.safetensors")[0] for name in ("live", "file"))
    got = {}
    with Sources() as sources:
        for name, slot in rearranged(copies, originals):
            array = read_extent(slot, Extent.whole(slot.shape), sources)
            if slot.dtype == "float32":
                got[name] = torch.from_numpy(array).reshape(slot.shape)
            else:
                got[name] = torch.from_numpy(array.view("int16")).view(torch.bfloat16).reshape(slot.shape)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_arrange_is_found(dtype, tmp_path):
    live = model()
    copies = found(live, {name: one.to(dtype) for name, one in saved(live).items()}, tmp_path)
    assert copies.keys() == live.keys()
    assert [name for name, one in copies.items() if not torch.equal(one, live[name].to(dtype))] == []


def test_other_values_are_no_copies(tmp_path):
    live, other = model(), saved(model(1))
    assert found(live, other, tmp_path).keys() == {"norm.1.weight", "norm.2.weight"}  # ones


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ("e.2.w3", "experts.gate_up"), ("e.0.b1", "experts.bias"), ("both.bias", "gate.bias up.bias"),
        ("t", "turned"), ("linear", "conv"), ("big", "long"), ("scalar", "single"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_another_is_no_copy_nor_are_those_beside_it(changed, lost, tmp_path):
    live = model()
    file = saved(live)
    file[changed] = file[changed] + 1
    assert live.keys() - found(live, file, tmp_path).keys() == set(lost.split())
    del file[changed]
    assert live.keys() - found(live, file, tmp_path).keys() == set(lost.split())


def test_long_tensors_of_one_value_tell_nothing(tmp_path):
    live = {"a": torch.zeros(100, 100), "b": torch.zeros(10)}
    assert found(live, {"x": torch.zeros(100, 100), "y": torch.zeros(10)}, tmp_path).keys() == {"b"}


def test_few_places_are_looked_at(monkeypatch, tmp_path):
    """A vector could be any row of each matrix: there are too many, once the matrices themselves are not found."""
    looked = []
    seen = module._seen
    monkeypatch.setattr(
        module, "_seen", lambda slots, places, dtype: looked.append(len(places)) or seen(slots, places, dtype)
    )
    live = {f"m{n}": torch.randn(200, 8) for n in range(9)}
    assert found(live, {f"v{n}": torch.randn(8) for n in range(9)}, tmp_path) == {}
    assert sum(looked) < 9 * module.MOST_PLACES
