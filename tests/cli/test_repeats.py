"""Tensors that torch's `expand` makes: a few stored elements that are said to be 10**12."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cli.console import in_time, refused, run, succeeded
from tests.logical import assert_same_tree
from zckpt.engine.scan import stored_once
from zckpt.state import Extent, Slot, Span


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with in_time(60):
        yield


@pytest.fixture
def endless() -> str:
    torch.save({"w": torch.zeros(1).expand(10**6, 10**6), "v": torch.ones(3)}, "a.pt")
    return "a.pt"


def test_verify_looks_at_what_is_stored(endless):
    assert "4 elements looked at" in succeeded(f"verify --deep {endless}").stdout


def test_verify_finds_what_is_repeated():
    values = torch.tensor([1.0, float("nan"), 2.0])
    torch.save({"w": values[:, None, None].expand(3, 10**6, 10**6)}, "a.pt")
    done = run("verify --deep a.pt")
    assert done.returncode == 1
    assert "1 NaN" in done.stdout


def test_what_reads_each_element_in_its_place_or_has_no_room_refuses_at_once(endless):
    for command in (f"fingerprint {endless}", f"diff {endless} {endless}"):
        refused(5, command, words="repeats 1 stored elements as 1000000000000")
    for target in ("out.pt", "out.safetensors"):
        refused(4, f"consolidate {endless} {target}", words="not enough space")


def test_repeated_elements_have_the_fingerprint_of_stored_ones():
    row = torch.arange(50.0)
    torch.save({"w": row.expand(40, 50), "v": row[:, None].expand(50, 30)}, "a.pt")
    whole = {"w": row.expand(40, 50).contiguous(), "v": row[:, None].expand(50, 30).contiguous()}
    torch.save(whole, "b.pt")
    succeeded("diff a.pt b.pt")
    a, b = (succeeded(f"fingerprint {name}").stdout for name in ("a.pt", "b.pt"))
    assert a == b
    succeeded("consolidate a.pt c.pt")
    assert_same_tree(torch.load("c.pt"), whole)


def slot(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Slot:
    return Slot("weight", "float32", shape, (Span(Extent.whole(shape), "x", 0, "float32", strides),))


def test_only_what_all_repeat_is_left_out():
    a, b = stored_once([slot((4, 5, 6), (0, 0, 1)), slot((4, 5, 6), (0, 6, 1))])
    assert a.shape == b.shape == (1, 5, 6)
    assert a.spans[0].strides == (0, 0, 1)
    assert stored_once([slot((4, 5), (0, 1)), slot((4, 5), None)]) == (slot((4, 5), (0, 1)), slot((4, 5), None))
    assert stored_once([slot((0, 5), (0, 1))]) == (slot((0, 5), (0, 1)),)
