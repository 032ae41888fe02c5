"""Finite values that are beyond the type that is written: counted, named, and refused unless they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

import zckpt
import zckpt.dcp
from tests.cli.console import printed, refused, succeeded
from tests.folders import names_in
from tests.operations.test_merge_adapter import adapter, factors
from tests.refusals import refusing

MODEL = {
    "wide": torch.tensor([[1.0, 7e4], [-1e30, 65504.0]]),
    "own": torch.tensor([float("inf"), float("nan"), 1e38, -2.0]),
    "fine": torch.randn(5000),
}


@pytest.fixture
def model() -> str:
    torch.save({**MODEL, "turned": MODEL["wide"].clone().t()}, "a.pt")
    return "a.pt"


def test_what_overflows_is_counted_named_and_refused(model):
    expected = ("1 values of own overflow float16, 2 values of turned overflow float16, "
                "2 values of wide overflow float16: finite in the source")  # fmt: skip
    with refusing(zckpt.UsageError, expected):
        zckpt.consolidate(model, "m.safetensors", dtype="float16")
    assert names_in() == ["a.pt"]
    done = zckpt.consolidate(model, "m.safetensors", dtype="float16", overflow="allow")
    assert expected.startswith(done.notes[0])
    found = load_file("m.safetensors")
    assert all(torch.equal(found[name].isinf(), one.half().isinf()) for name, one in MODEL.items())
    assert zckpt.consolidate(model, "n.safetensors", dtype="bfloat16").notes == ()
    with refusing(zckpt.UsageError, "unusable --overflow: expected refuse or allow, found 'yes'"):
        zckpt.consolidate(model, "o.safetensors", overflow="yes")


def test_a_store_and_the_command_line_refuse_too(model):
    for target in ("m", "memory://overflow/m"):
        command = f"convert {model} {target} --to consolidated --dtype float16"
        refused(2, command, "-q", words="--overflow=allow")
        assert "1 values of own overflow float16" in succeeded(command, "--overflow allow").stderr


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("memory", [1, 64 << 20])
def test_every_value_is_counted_once(memory, size):
    chosen = np.random.default_rng(size)
    tensors = {f"w{i}": torch.from_numpy(chosen.normal(size=(size,)).astype(np.float32)) for i in range(7)}
    beyond = 0
    for one in tensors.values():
        at = torch.from_numpy(chosen.integers(0, size, max(size // 100, 1)))
        one[at] = 1e6
        beyond += len(at.unique())
    save_file(tensors, "a.safetensors")
    done = zckpt.consolidate("a.safetensors", "m.pt", dtype="float16", overflow="allow", memory=memory)
    shown, _, more = done.notes[0].partition(" and ")
    assert more == "3 more"
    assert sum(int(one.split()[0]) for one in shown.split(", ")) <= beyond
    assert [one.split()[3] for one in shown.split(", ")] == ["w0", "w1", "w2", "w3"]
    counts = {f"w{i}": int((tensors[f"w{i}"] > 65504).sum()) for i in range(4)}
    assert {one.split()[3]: int(one.split()[0]) for one in shown.split(", ")} == counts


def test_a_run_that_is_resumed_counts_what_the_first_one_wrote(model, monkeypatch):
    monkeypatch.setattr("zckpt.storage.journal.LEAST_NBYTES", 0)
    for resume in (False, True):
        with refusing(zckpt.UsageError, "2 values of wide overflow"):
            zckpt.consolidate(model, "m.pt", dtype="float16", resume=resume)
    done = zckpt.consolidate(model, "m.pt", dtype="float16", resume=True, overflow="allow")
    assert "2 values of wide overflow float16" in done.notes[0]
    assert len(names_in()) == 2


def test_a_mean_and_a_merged_adapter_that_overflow_are_refused():
    for name, value in (("a", 3e4), ("b", 2e5)):
        save_file({"w": torch.full((3, 4), value)}, f"{name}.safetensors")
    pair = ["a.safetensors", "b.safetensors"]
    with refusing(zckpt.UsageError, "12 values of w overflow float16"):
        zckpt.average(pair, "m.safetensors", dtype="float16")
    lora = adapter(factors("m", 3, 4), lora_alpha=1e38)
    save_file({"m.weight": torch.full((3, 4), 3e38)}, "c.safetensors")
    with refusing(zckpt.UsageError, r"values of m\.weight overflow float32"):
        zckpt.merge_adapter("c.safetensors", lora, "m.safetensors")
    assert not Path("m.safetensors").exists()


@pytest.mark.parametrize(
    "weights", [(1e39, 2e39), (1e-50, 2e-50), (1e38, 2e38), (1e-42, 2e-42), (1e308, 1e308), (5e-324, 1e-323)]
)
def test_weights_may_be_of_any_unit(weights):
    tensors = [torch.randn(50) * 1e20 for _ in range(2)]
    for name, one in zip("ab", tensors, strict=True):
        save_file({"w": one}, f"{name}.safetensors")
    pair = ["a.safetensors", "b.safetensors"]
    zckpt.average(pair, "m.safetensors", weights=weights)
    share = weights[0] / max(weights) / (weights[0] / max(weights) + weights[1] / max(weights))
    expected = share * tensors[0].double() + (1 - share) * tensors[1].double()
    assert torch.allclose(load_file("m.safetensors")["w"].double(), expected, rtol=1e-6, atol=1e14)


@pytest.mark.parametrize("options", ["--dtype float16", "--dtype bfloat16", "--slots all"])
def test_what_is_within_the_type_says_nothing(options):
    assert printed(f"consolidate fixtures/s2_bf16_dp2 m.pt {options}")["notes"] == []


def test_a_load_refuses_too_and_takes_it_unverified():
    tensors = {"weight": torch.full((2, 3), 70_000.0), "bias": torch.ones(2)}
    torch.save(tensors, "a.pt")
    model = torch.nn.Linear(3, 2, dtype=torch.float16)
    with refusing(zckpt.UsageError, r"6 values of weight overflow float16: .* must not be used"):
        zckpt.load("a.pt", model=model)
    state = model.state_dict()
    with pytest.raises(CheckpointException, match="6 values of weight overflow float16"):
        dcp.load(state, storage_reader=zckpt.dcp.Reader("a.pt"))
    zckpt.load("a.pt", model=model, verify=False)
    assert model.weight.isinf().all()
    assert model.bias.eq(1).all()
    tensors["weight"][0] = torch.inf  # which the source says itself
    tensors["weight"][1] = 7
    torch.save(tensors, "a.pt")
    zckpt.load("a.pt", model=model)
    assert model.weight.float().equal(tensors["weight"])
