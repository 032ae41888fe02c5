"""What ranks of the installed torch save as verl does, under FSDP1 and FSDP2 of any form, is read bit by bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests import gloo
from tests.fsdp_training.training import resume, train_and_save, train_and_save_freely
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import ShardError
from zckpt.formats.account import take_inventory
from zckpt.operations.open import OpenedCheckpoint

pytestmark = pytest.mark.interop

WRAPS = [("fsdp2", 3), ("fsdp2 tp", 4), ("fsdp1", 3), ("fsdp1 mesh fine", 2), ("fsdp1 orig hsdp", 4),
         ("fsdp1 orig adagrad", 3)]  # fmt: skip
NIGHTLY = [("fsdp2", 1), ("fsdp2", 2), ("fsdp2 hsdp", 4), ("fsdp1", 1), ("fsdp2 columns", 3), ("fsdp2 alone", 2),
           ("fsdp1 mesh", 4), ("fsdp1 one", 2),
           ("fsdp1 fine", 2), ("fsdp1 hsdp", 4), ("fsdp1 hsdp groups", 4), ("fsdp1 orig", 3), ("fsdp1 orig", 1),
           ("fsdp1 orig mesh fine", 2), ("fsdp1 whole", 2)]  # fmt: skip
"""A word for each choice; see `placed`."""


def assert_is(checkpoint: OpenedCheckpoint, truth: dict[str, torch.Tensor], *, optimizer: bool = True) -> None:
    """Hold every slot of every name against whole tensors of the live model and optimizer, both ways."""
    missing = set(truth)
    for parameter in checkpoint.tensors():
        for slot in checkpoint.owner(parameter.name).slots:
            key = f"{slot}/{parameter.name}"
            if parameter.tied_to is not None and slot != "weight":
                continue
            found = checkpoint.read(parameter.name, slot)
            assert found.shape == truth[key].shape, key
            assert found.dtype == truth[key].dtype, key
            assert torch.equal(found, truth[key]), key
            missing.discard(key)
    assert not {key for key in missing if optimizer or key.startswith("weight/")}


@pytest.mark.parametrize(("wrap", "world_size"), some(WRAPS, NIGHTLY))
@pytest.mark.every(3)
def test_every_element_is_read_as_it_was_live(wrap, world_size, tmp_path):
    folder = tmp_path / "run" / "global_step_7" / "actor"
    truth, _ = gloo.run(train_and_save, world_size, wrap, folder)[0]
    checkpoint = zckpt.open(tmp_path / "run")
    assert_is(checkpoint, truth, optimizer="alone" not in wrap)
    assert checkpoint.step == 7
    assert checkpoint.parameters["head.weight"].tied_to == (None if "fine" in wrap else "embed.weight")
    assert set(checkpoint.buffers) == {"scale", "count"}
    assert not checkpoint.unnamed
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(tmp_path / "run", deep=True).sound


@pytest.mark.parametrize(
    ("wrap", "ranks", "other", "others", "options"),
    some(
        [
            ("fsdp2 trained", 2, "fsdp1 mesh", 3, {"fsdp_version": 1, "units": "layers.*"}),
            ("fsdp1 mesh", 3, "fsdp2 trained hsdp", 4, {"fsdp_version": 2, "fsdp_size": 2}),
            ("fsdp2 unnamed", 2, "fsdp2 unnamed", 1, {}),  # what fully_shard makes without a mesh
        ],
        [
            ("fsdp2", 2, "fsdp2", 3, {}),
            ("fsdp1 mesh", 4, "fsdp1 mesh", 2, {}),
            ("fsdp2 hsdp", 4, "fsdp2", 1, {}),
            ("fsdp1", 2, "fsdp1", 1, {"device": "cpu"}),
        ],
    ),
)
@pytest.mark.every(3)
def test_other_ranks_go_on_where_these_left_off(wrap, ranks, other, others, options, tmp_path):
    source, target = tmp_path / "run" / "global_step_2", tmp_path / "target"
    _, losses = gloo.run(train_and_save, ranks, wrap, source)[0]
    zckpt.convert(source, target, to="fsdp-rank-files", world_size=others, **options)
    if wrap != "fsdp2 trained":  # of which FSDP1 has state for the parameters that no step has reached, too
        assert zckpt.diff(source, target).equal
    assert gloo.run(resume, others, other, target) == [pytest.approx(losses, rel=1e-6)] * others


@pytest.mark.parametrize(
    ("wrap", "ranks"),
    some([("fsdp2", 2)], [("fsdp1", 2), ("fsdp1 orig mesh", 2), ("fsdp1 hsdp groups", 4), ("fsdp2 hsdp", 4),
                                        ("fsdp2 tp", 4)]),
)  # fmt: skip
def test_files_under_a_programs_own_names_are_read_and_converted(wrap, ranks, tmp_path):
    source = tmp_path / "saved"
    truth = gloo.run(train_and_save_freely, ranks, wrap, source)[0]
    assert_is(zckpt.open(source), truth)
    assert not take_inventory(zckpt.open(source)).left_out
    zckpt.convert(source, tmp_path / "dcp", to="dcp")
    assert_is(zckpt.open(tmp_path / "dcp"), truth)
    zckpt.consolidate(source, tmp_path / "model.safetensors")
    whole = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(one, truth[f"weight/{name}"]) for name, one in whole.items())
    (source / "ckpt_rank0.pt").unlink()
    with refusing(ShardError, "the model file of rank 0 is missing"):
        zckpt.open(source)
