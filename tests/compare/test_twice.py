"""What two files have alike by rule is not taken for one file under two names, and what only copying gives is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zckpt.compare.twice import _varies, _words, files_twice
from zckpt.state import Checkpoint, Extent, Parameter, ParamGroup, Slot, SourceFile, Span

NUMEL = 40
RANDOM, OTHER, LESS = (np.random.default_rng(seed).normal(size=NUMEL).astype(np.float32) for seed in (1, 2, 3))
ZEROS, ONES = np.zeros(NUMEL, np.float32), np.ones(NUMEL, np.float32)
FEW = np.tile(np.float32([1, 2]), NUMEL // 2)
SIGNS = RANDOM > 0  # many words, but two values

Tensors = Mapping[tuple[str, str], np.ndarray]
"""What a file holds, by parameter and slot."""


def checkpoint(*files: Tensors, head: tuple[int, ...] = ()) -> Checkpoint:
    """A checkpoint of files, each of which has its own elements of what it holds.

    Parameters
    ----------
    head : tuple of int, bytes
        Before the tensors of each file.
    """
    found = Checkpoint(".", "of a test")
    for rank, tensors in enumerate(files):
        path = Path(f"rank_{rank}")
        data = bytearray(bytes(head[rank] if head else 0))
        for (name, key), values in tensors.items():
            among = [other for other in files if (name, key) in other]
            shape = (len(among) * NUMEL,)
            extent = Extent.flat(shape, next(i for i, one in enumerate(among) if one is tensors) * NUMEL, len(values))
            parameter = found.parameters.setdefault(name, Parameter(name, shape, "float32"))
            span = Span(extent, str(path), len(data), str(values.dtype))
            before = parameter.slots[key].spans if key in parameter.slots else ()
            parameter.slots[key] = Slot(key, span.dtype, shape, (*before, span))
            data += values.tobytes()
        path.write_bytes(data)
        found.files.append(SourceFile(str(path), len(data), "optimizer", rank))
    return found


def pairs(found) -> list[tuple[str | None, str]]:
    return [(Path(str(one.path)).name, str(one.found)) for one in files_twice(found)]


def slices(a, b, key="master") -> Tensors:
    return {("a", key): a, ("b", key): b}


SAME, NOT = slices(RANDOM, OTHER), slices(OTHER, LESS)


@pytest.mark.parametrize(
    ("files", "head", "told"),
    [
        ((SAME, {**SAME}, NOT), (), ("rank_1", "rank_0")),
        ((SAME, {**SAME}, NOT), (0, 64, 0), ("rank_1", "rank_0")),
        ((NOT, SAME, slices(RANDOM[:7], OTHER[:3])), (), ("rank_2", "rank_1")),
    ],
    ids=["", "after something", "of which the last rank has less"],
)
def test_slices_of_the_same_parameters_are_told(files, head, told):
    assert pairs(checkpoint(*files, head=head)) == [told]


@pytest.mark.parametrize("key", ["weight", "master"])
def test_slices_of_which_one_is_alike_are_not(key):
    """Each row of a state space's `A_log` begins as the others do, whatever else there is."""
    assert not pairs(checkpoint(slices(RANDOM, OTHER, key), slices(RANDOM, LESS, key)))
    assert not pairs(checkpoint({("A_log", key): RANDOM}, {("A_log", key): RANDOM}))


@pytest.mark.parametrize("values", [ZEROS, ONES, FEW, SIGNS])
def test_what_is_one_value_or_few_tells_nothing(values):
    assert not pairs(checkpoint(slices(values, values, "exp_avg"), slices(values, values, "exp_avg")))


def of_expert(number, values, moments) -> Tensors:
    name = f"experts.{number}.weight"
    return {(name, "weight"): values, (name, "master"): values, (name, "exp_avg"): moments}


def test_experts_that_begin_as_one_are_not_told_and_what_was_trained_is():
    assert not pairs(checkpoint(of_expert(0, RANDOM, ZEROS), of_expert(1, RANDOM, ZEROS)))
    assert not pairs(checkpoint(of_expert(0, RANDOM, OTHER), of_expert(1, RANDOM, LESS)))
    assert pairs(checkpoint(of_expert(0, RANDOM, OTHER), of_expert(1, RANDOM, OTHER)))


@pytest.mark.parametrize(("step", "rate", "told"), [(1, 0.1, False), (5, 0.0, False), (5, 0.1, True)])
def test_masters_that_were_stepped_apart_are_not_alike(step, rate, told):
    """Each slot in a file of its own, as universal checkpoints have them."""
    files = [{place: values} for number, moments in ((0, OTHER), (1, LESS))
             for place, values in of_expert(number, RANDOM, moments).items() if place[1] != "weight"]  # fmt: skip
    found = checkpoint(*files)
    found.step, found.param_groups = step, [ParamGroup({"lr": rate}, list(found.parameters))]
    assert pairs(found) == ([("rank_2", "rank_0")] if told else [])


def named(*archives, role="model") -> Checkpoint:
    files = [SourceFile(f"/run/rank_{n}.pt", 9, role, n, archive=name) for n, name in enumerate(archives)]
    return Checkpoint("/run", "of a test", files=files)


def test_names_that_archives_have_for_themselves():
    assert not pairs(named("rank_0", "rank_1"))
    assert not pairs(named("archive", "archive"))
    assert not pairs(named("rank_7", "rank_8"))  # renamed together, or of another run: nothing says which is which
    assert not pairs(named("rank_0", "rank_0", role="expert"))
    assert [(e.path, e.code, e.ranks) for e in files_twice(named("rank_0", "rank_0"))] == [
        ("/run/rank_1.pt", "ZC-113", (1,))
    ]
    on_nodes = named("rank_0", "rank_0")
    on_nodes.files[1] = replace(on_nodes.files[1], path="/node_1/run/rank_1.pt")
    assert [e.path for e in files_twice(on_nodes)] == ["/node_1/run/rank_1.pt"]
    assert [(e.code, e.ranks) for e in files_twice(named("rank_1", "rank_0"))] == [("ZC-116", (0, 1))]
    assert [e.code for e in files_twice(named("rank_1", "rank_2", "rank_0"))] == ["ZC-116"] * 3


@pytest.mark.parametrize("nbytes", range(0, 17))
def test_data_varies_if_it_has_two_different_words(nbytes):
    same, other = (b"abcd" * 5)[:nbytes], bytearray((b"abcd" * 5)[:nbytes])
    assert not _varies(same)
    for at in range(nbytes):
        other[at] ^= 1
        assert _varies(bytes(other)) is (_words(bytes(other)) > 1)
        other[at] ^= 1
