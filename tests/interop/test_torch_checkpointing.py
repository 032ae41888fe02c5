"""What torch-checkpointing itself saves is read, and what zckpt writes it loads, at any number of ranks."""

from __future__ import annotations

import pytest

import zckpt
from tests import gloo
from tests.fsdp_training.torch_checkpointing import load, save
from tests.interop.test_fsdp_rank_files import assert_is
from zckpt.formats.account import take_inventory

pytest.importorskip("torch_checkpointing")
pytestmark = [pytest.mark.interop, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("wrap", "ranks", "keys", "reshards", "others", "theirs"),
    [
        ("fsdp2", 3, "flat", True, 2, ("fsdp2", 3, "numbers")),
        ("fsdp2 tp", 4, "numbers", True, 3, ("fsdp2", 2, "names")),
        ("fsdp2 hsdp", 4, "names", True, 1, ("fsdp2", 2, "flat")),
        ("fsdp2", 2, "numbers", False, 2, ("fsdp2", 2, "numbers")),
        ("fsdp2", 1, "numbers", False, 2, ("fsdp2 tp", 4, "names")),
    ],
)
def test_it_goes_on_from_what_was_read_and_written(wrap, ranks, keys, reshards, others, theirs, tmp_path):
    source, target = tmp_path / "theirs", tmp_path / "ours"
    truth, losses = gloo.run(save, ranks, wrap, keys, source, reshards)[0]
    checkpoint = zckpt.open(source)
    assert_is(checkpoint, truth)
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(source, deep=True).sound
    wrap, world_size, keys = theirs
    zckpt.convert(source, target, to="torch-checkpointing", world_size=others, keys=keys, device="cpu")
    found = gloo.run(load, world_size, wrap, keys, target, others != world_size)
    assert found == [pytest.approx(losses, rel=1e-5)] * world_size
