"""Hold what zckpt reads and writes against the truth that was gathered from the live optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import zckpt
from tests.refusals import refusing

KINDS_OF_MODEL = ("module", "weight", "buffer", "buffer_real", "buffer_u8", "fp32", "master")


class Truth:
    """The truth beside a checkpoint: `truth.safetensors` and `truth.json`."""

    def __init__(self, directory: Path) -> None:
        self.tensors = load_file(directory / "truth.safetensors")
        self.facts = json.loads((directory / "truth.json").read_text())
        persistent = self.facts.get("persistent_buffers", [])
        self.buffers = {name: self._buffer(name) for name in persistent}
        self.tied = self.facts.get("tied", {})
        self.frozen = self.facts.get("frozen", [])

    def _buffer(self, name: str) -> torch.Tensor:
        """A buffer, as bytes; safetensors holds complex numbers as pairs and float8 as bytes in older versions."""
        for kind in ("buffer", "buffer_real", "buffer_u8"):
            if f"{kind}/{name}" in self.tensors:
                return bits(self.tensors[f"{kind}/{name}"])
        raise KeyError(name)

    def kind(self, kind: str) -> dict[str, torch.Tensor]:
        """Tensors of one kind, by parameter."""
        return {k.split("/", 1)[1]: v for k, v in self.tensors.items() if k.split("/", 1)[0] == kind}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's own weights."""
        return self.kind("module") or self.kind("weight")

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 masters."""
        return self.kind("fp32") or self.kind("master")

    @property
    def numbers(self) -> dict[str, str]:
        """Parameter names by their number in the optimizer."""
        names = self.facts.get("optimizer_state_index") or [n for g in self.facts.get("order", []) for n in g]
        names = names or [name for group in self.facts["param_groups"] for name in group.get("params", [])]
        return {str(number): name for number, name in enumerate(names)}

    @property
    def slots(self) -> list[str]:
        """The optimizer's keys."""
        return sorted({k.split("/", 1)[0] for k in self.tensors} - set(KINDS_OF_MODEL))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    """Bit for bit; truth files hold 16-bit state as float32, which loses nothing."""
    assert tuple(found.shape) == tuple(expected.shape), label
    if found.dtype != expected.dtype:
        assert expected.dtype == torch.float32, f"{label}: {found.dtype} {expected.dtype}"
        found = found.to(torch.float32)
    assert torch.equal(bits(found), bits(expected)), label


def assert_consolidated(
    checkpoint: Path,
    truth: Truth,
    directory: Path = Path(),
    *,
    without: frozenset[str] = frozenset(),
) -> None:
    """Consolidate a checkpoint and compare everything that it holds with the truth."""
    own = sorted({one.key for one in zckpt.open(checkpoint).per_rank})  # which has no place outside of ranks' files
    if own and truth.slots:
        with refusing(zckpt.UnsupportedError, own[0]):
            zckpt.consolidate(checkpoint, directory / "model.safetensors", slots="all")
    slots = list(truth.slots) if own or not truth.slots else "all"
    zckpt.consolidate(checkpoint, directory / "model.safetensors", slots=slots)
    model = load_file(directory / "model.safetensors")
    masters = truth.masters
    expected = {**truth.weights, **masters}
    expected.update({alias: expected[owner] for alias, owner in truth.tied.items() if owner in expected})
    expected = {name: value for name, value in expected.items() if name not in without and name not in truth.buffers}
    assert set(model) == set(expected) | set(truth.buffers)
    for name, value in expected.items():
        if name in masters or truth.tied.get(name) in masters:
            assert model[name].dtype == torch.float32
        elif name in truth.frozen:
            assert model[name].dtype == value.dtype, name
        assert_same(model[name], value, name)
    for name, value in truth.buffers.items():
        assert torch.equal(bits(model[name]), value), name
    if truth.slots:
        slots = load_file(directory / "model.optimizer.safetensors")
        by_name = {key: _named(key, truth.numbers) for key in slots}
        expected_keys = {f"{slot}/{name}" for slot in truth.slots for name in truth.kind(slot)}
        assert expected_keys <= set(by_name.values())
        assert {name.split("/")[0] for name in set(by_name.values()) - expected_keys} <= {"master", "step"}
        for key, name in by_name.items():
            if name in expected_keys:
                assert_same(slots[key], truth.tensors[name], name)


def _named(key: str, names: dict[str, str]) -> str:
    """A key under a number (a parameter whose name the file does not tell) as the key under its name."""
    slot, name = key.split("/", 1)
    return f"{slot}/{names.get(name, name)}"


def assert_state(found: zckpt.OpenedCheckpoint, truth: Truth) -> None:
    """The master and the optimizer's slots of every parameter that is trained, bit for bit."""
    assert truth.masters
    for slot, expected in [("master", truth.masters), *((slot, truth.kind(slot)) for slot in truth.slots)]:
        for name, value in expected.items():
            if found.owner(name).group is not None:
                assert_same(found.read(name, slot), value, f"{slot}/{name}")


def assert_same_groups(found: zckpt.OpenedCheckpoint, source: zckpt.OpenedCheckpoint) -> None:
    """Param groups hold the same parameters, and the same of each optimizer's hyperparameters and state, in order."""
    for mine, its in zip(found.param_groups, source.param_groups, strict=True):
        assert (mine.parameters, mine.state) == (its.parameters, its.state)
        assert list(mine.hyperparameters.items()) == list(its.hyperparameters.items())


def assert_slots_equal(opened: zckpt.OpenedCheckpoint, truth: Path) -> None:
    """Hold every slot but the steps against a file with slot/parameter of each, bit for bit."""
    expected = load_file(truth)
    assert {f"{slot}/{one.name}" for one in opened.tensors() for slot in one.slots if slot != "step"} == expected.keys()
    for key, tensor in expected.items():
        slot, _, parameter = key.partition("/")
        read = opened.read(parameter, slot=slot)
        assert read.dtype == tensor.dtype, key
        assert torch.equal(read, tensor), key
