"""Tensors whose bytes are not their values: what torch still has to do to them is done, or they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import zckpt
from tests.live import both, trained
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.formats import open_checkpoint
from zckpt.formats.torch_files.tensors import slot_of, span_of
from zckpt.operations.verify import verify
from zckpt.state import WEIGHT, Extent
from zckpt.torchfile import read_torchfile


def lazy_views() -> dict[str, torch.Tensor]:
    """Return tensors with each bit set, with both, and views of them, beside the plain ones that share their memory."""
    torch.manual_seed(0)
    square = torch.randn(6, 5, dtype=torch.complex64)
    square[0, 0] = complex(0.0, -0.0)
    wide = torch.randn(64, dtype=torch.complex128)
    return {
        "conjugate": square.conj(),
        "plain": square,  # the same place in the file, and other values
        "adjoint": square.mH[1:4],
        "both": torch._neg_view(wide).conj(),
        "imaginary": torch.randn(7, 3, dtype=torch.complex64).conj().imag,
        "negative": torch._neg_view(torch.randn(33)),
        "half": torch._neg_view(torch.randn(33).bfloat16()),
        "integers": torch._neg_view(torch.arange(9)),
        "nothing": torch.randn(0, 3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2 + 3j).conj(),
    }


def resolved(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().contiguous().clone() for name, tensor in tensors.items()}


def assert_read(path, expected) -> zckpt.OpenedCheckpoint:
    checkpoint = zckpt.open(path)
    for name, tensor in expected.items():
        assert_bits(checkpoint.read(name, WEIGHT), tensor)
    return checkpoint


def assert_bits(found, expected):
    """Assert the same type, shape and bits; a NaN and a signed zero count as what they are."""
    assert not found.is_conj()
    assert not found.is_neg()
    assert_same_tree(found, expected)


@pytest.fixture
def source() -> Path:
    torch.save({"model": lazy_views(), "note": torch.randn(3, dtype=torch.complex64).conj()}, "lazy.pt")
    return Path("lazy.pt")


def test_lazy_views_are_read_resolved(source):
    checkpoint = assert_read(source, resolved(lazy_views()))
    assert all(one.tied_to is None for one in checkpoint.parameters.values())
    torch.save(lazy_views(), "legacy.pt", _use_new_zipfile_serialization=False)
    assert_read("legacy.pt", resolved(lazy_views()))


def test_lazy_views_are_consolidated_resolved(torch_file):
    tensors = {name: one for name, one in lazy_views().items() if one.dtype != torch.complex128}  # not in safetensors
    path = torch_file(tensors)
    for target, load in (("model.safetensors", load_file), ("model.pt", torch.load)):
        zckpt.consolidate(path, target)
        found = load(Path(target))
        for name, expected in resolved(tensors).items():
            assert_bits(found[name], expected)


@pytest.mark.parametrize("to", ["zckpt", "dcp", "consolidated"])
def test_lazy_views_are_converted_resolved(to, source, tmp_path):
    target = tmp_path / ("whole.pt" if to == "consolidated" else "target")
    zckpt.convert(source, target, to=to, verify=True)
    assert_read(target, resolved(lazy_views()))
    if to == "consolidated":
        root = torch.load(target)
        assert root["zckpt"]["metadata"]["note"].equal(torch.load(source)["note"])


def test_lazy_views_have_the_fingerprint_of_their_values(source, torch_file):
    path = torch_file({"model": resolved(lazy_views()), "note": torch.load(source)["note"].resolve_conj()})
    assert zckpt.fingerprint(source).text == zckpt.fingerprint(path).text
    assert zckpt.diff(source, path).equal
    assert verify(source, deep=True).sound


def test_lazy_views_are_loaded_resolved(torch_file):
    model = torch.nn.Linear(3, 2)
    weight = torch.randn(2, 3)
    zckpt.load(torch_file({"weight": torch._neg_view(weight), "bias": torch.ones(2)}), model=model)
    assert model.weight.equal(-weight)


def test_lazy_views_are_sliced_resolved():
    """Items of DCP are torch files, whose tensors may be lazy too."""
    tensors = {name: one for name, one in lazy_views().items() if one.numel() > 1}
    dcp.save(dict(tensors), checkpoint_id="dcp")
    loaded = {name: torch.zeros_like(one).resolve_conj().resolve_neg() for name, one in tensors.items()}
    dcp.load(loaded, checkpoint_id="dcp")
    assert_read("dcp", loaded)


def test_step_counts_may_be_lazy(torch_file):
    model, optimizer = trained(torch.nn.Linear(3, 2))
    for one in optimizer.state.values():
        one["step"] = torch._neg_view(torch.tensor(-5.0))
    assert open_checkpoint(torch_file(both(model, optimizer))).step == 5


class Packed(torch.Tensor):
    """A class of tensors that makes something else of its elements."""


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(5, dtype=torch.uint8).as_subclass(Packed), "Packed"),
        (torch._neg_view(torch.ones(3).to(torch.float8_e4m3fn)), "float8_e4m3fn with neg set"),
    ],
)
def test_tensors_without_values_of_their_own_are_refused(tensor, said, torch_file):
    with refusing(UnsupportedError, said):
        zckpt.consolidate(torch_file({"w": tensor, "b": torch.ones(2)}), "model.safetensors")
    assert not Path("model.safetensors").exists()


def test_metadata_of_other_devices_is_refused():
    torch.save({"w": torch.ones(3)}, "x.pt")
    file = read_torchfile("x.pt")
    assert isinstance(file.root, dict)
    plain = replace(file.root["w"], metadata={"conj": False, "neg": False})
    assert slot_of(WEIGHT, plain, file.path).spans[0].is_contiguous
    with refusing(UnsupportedError, "'npu_format' in its metadata"):
        slot_of(WEIGHT, replace(plain, metadata={"npu_format": 29}), file.path)


def test_a_flat_tensor_with_gaps_is_refused_as_a_partition():
    torch.save(torch.arange(12.0)[::2], "x.pt")
    file = read_torchfile("x.pt")
    with refusing(UnsupportedError, "not contiguous"):
        span_of(file.root, file.path, Extent.flat((2, 3), 1, 3), first=1)


def test_attributes_that_torch_sets_mean_nothing_and_others_are_named():
    model = torch.nn.Module()
    model.cloned, model.buffer = torch.nn.Parameter(torch.ones(3)), torch.nn.Buffer(torch.ones(2))
    model.cloned._has_been_cloned = model.buffer._fsdp_synced = True
    model.cloned._dynamo_dynamic_indices = {0}
    state = dict(model.state_dict(keep_vars=True))
    torch.save(state, "x.pt")
    assert verify(Path("x.pt"), deep=True).sound
    assert zckpt.consolidate("x.pt", "m.safetensors").num_tensors == 2
    for value in (3, torch.ones(4)):
        state["cloned"].mine = value
        torch.save(state, "x.pt")
        with refusing(zckpt.LeftOutError, "cloned/attributes/mine"):
            zckpt.consolidate("x.pt", "n.safetensors")
    del state["cloned"].mine
    state["cloned"]._dynamo_dynamic_indices = torch.ones(4)
    torch.save(state, "x.pt")
    with refusing(zckpt.LeftOutError, "_dynamo_dynamic_indices"):
        zckpt.consolidate("x.pt", "n.safetensors")
