"""Optimizers whose state is quantised: carried bit for bit with names, written where it has room, refused as floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from tests import live
from tests.folders import names_in
from tests.formats.holding import converted
from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.formats.account import take_inventory
from zckpt.torchfile import walk_tensors

BLOCK = 256
NESTED = "__bnb_optimizer_quant_state__"


class State8bit(torch.Tensor):
    """A slot as torchao has it: a tensor without elements, with codes and scales in it."""

    @staticmethod
    def __new__(cls, codes, scale, qmap) -> State8bit:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)

    def __init__(self, codes, scale, qmap):
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "qmap"], []

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride) -> State8bit:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].qmap)
        raise NotImplementedError(function)


def pieces(shape) -> dict[str, torch.Tensor]:
    return {
        "codes": torch.randint(256, shape, dtype=torch.uint8),
        "scale": torch.rand(-(-shape.numel() // BLOCK)),
        "qmap": torch.linspace(-1, 1, 256),
    }


def as_torchao(shape, small) -> dict[str, Any]:
    slots = ("exp_avg", "exp_avg_sq")
    values = {slot: torch.rand(shape) if small else State8bit(**pieces(shape)) for slot in slots}
    return {"step": torch.tensor(3.0), **values}


def as_bitsandbytes(shape, small) -> dict[str, Any]:
    return {"step": 3, NESTED: of_bitsandbytes(shape, small)}


def as_old_bitsandbytes(shape, small) -> dict[str, Any]:
    return {"step": 3, **of_bitsandbytes(shape, small)}


def of_bitsandbytes(shape, small) -> dict[str, Any]:
    if small:
        return {"state1": torch.rand(shape), "state2": torch.rand(shape)}
    found = {}
    for number in ("1", "2"):
        its = pieces(shape)
        found |= {f"state{number}": its["codes"], f"absmax{number}": its["scale"], f"qmap{number}": its["qmap"]}
    return found


KINDS = {"torchao": as_torchao, "bitsandbytes": as_bitsandbytes, "old bitsandbytes": as_old_bitsandbytes}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 67), nn.Linear(67, 64), nn.Linear(64, 3))


def written(path, kind) -> dict[str, dict[str, Any]]:
    """Write a file as torch does with the optimizer's state dict; return the state by name."""
    net = model()
    names = [name for name, _ in net.named_parameters()]
    state = {number: KINDS[kind](one.shape, one.numel() < 4096) for number, one in enumerate(net.parameters())}
    groups = [{"lr": 0.1, "params": [0, 2, 4]}, {"lr": 0.2, "params": [1, 3, 5]}]
    torch.save({"model": net.state_dict(), "optimizer": {"state": state, "param_groups": groups}}, path)
    return dict(zip(names, state.values(), strict=True))


def leaves(value) -> list[bytes]:
    """Return the bytes of each tensor below a value that was read."""
    found = []
    with Path(value.path).open("rb") as file:
        for _, tensor in walk_tensors(value.node):
            file.seek(tensor.offset)
            found.append(file.read(tensor.numel * tensor.itemsize))
    return sorted(found)


def raw(value) -> list[bytes]:
    every = value.values() if isinstance(value, dict) else (value.codes, value.scale, value.qmap)
    return sorted(one.numpy().tobytes() for one in every)


def is_quantised(value) -> bool:
    return isinstance(value, dict) or type(value) is State8bit


def assert_carried(path, expected: dict[str, dict[str, Any]]):
    opened = zckpt.open(path)
    assert opened.unnamed == {}
    for name, slots in expected.items():
        for slot, value in slots.items():
            if is_quantised(value):
                assert leaves(opened.parameters[name].state[slot]) == raw(value), (name, slot)
            elif isinstance(value, torch.Tensor):
                assert torch.equal(opened.read(name, slot), value), (name, slot)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_carried_with_names(kind):
    path = "c.pt"
    expected = written(path, kind)
    assert zckpt.open(path).warnings == []
    assert_carried(path, expected)
    assert take_inventory(zckpt.open(path)).left_out == []
    for target in ("zckpt", "dcp", "zero-redundancy"):
        assert_carried(converted(path, target, target), expected)
    zckpt.consolidate("zckpt", "x.pt", slots="all")  # a file as the program wrote it
    state = torch.load("x.optimizer.pt", weights_only=False)
    for group in state["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            for slot, value in expected[name].items():
                its = state["state"][number][slot]
                assert type(its) is type(value)
                assert not is_quantised(value) or raw(its) == raw(value)


@pytest.mark.parametrize(("kind", "slot"), [("torchao", "exp_avg"), ("bitsandbytes", NESTED)])
def test_it_is_refused_by_name_where_floats_are_wanted(kind, slot, tmp_path):
    path = tmp_path / "c.pt"
    written(path, kind)
    net = model()
    groups = [{"params": [p for p in net.parameters() if p.dim() == dim]} for dim in (2, 1)]
    with refusing(UnsupportedError, rf"{slot} of 0\.weight is not a plain tensor"):
        zckpt.load(path, model=net, optimizer=torch.optim.AdamW(groups))
    with refusing(UnsupportedError, f"which safetensors files cannot hold: found {slot} of"):
        zckpt.consolidate(path, tmp_path / "x.safetensors", slots="all")
    with refusing(UnsupportedError, "which these files cannot hold"):
        zckpt.convert(path, tmp_path / "r", to="fsdp-rank-files")
    with refusing(UnsupportedError, f"{slot}.* of 0.weight"):
        zckpt.convert(path, tmp_path / "d", to="deepspeed", world_size=2, stage=2)
    zckpt.consolidate(path, tmp_path / "model.safetensors")
    assert names_in(tmp_path) == ["c.pt", "model.safetensors"]


def test_a_live_one_is_refused():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.state[net[0].weight] = as_torchao(net[0].weight.shape, small=False)
    with refusing(UnsupportedError, r"exp_avg of 0.weight is a State8bit"):
        zckpt.save("z", model=net, optimizer=optimizer)
    assert not Path("z").exists()


@pytest.mark.parametrize("cls", ["OptimState8bit", "Other", ["OptimState8bit"], {}])
def test_what_only_looks_as_if_zckpt_had_written_it_is_refused_as_floats(cls):
    model, optimizer = live.trained(nn.Linear(4, 4))
    optimizer.state[model.weight]["exp_avg"] = {"torchao": cls}
    path = live.save_both(model, optimizer, "ckpt.pt")
    with refusing(UnsupportedError, "exp_avg of weight is quantised in an unknown way"):
        zckpt.convert(path, "out", to="zckpt", dequantize=True)
