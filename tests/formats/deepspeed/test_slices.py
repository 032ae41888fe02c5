"""Slices by rule: put together they are the whole, cut again they are what torch's own cutting gives; any range of it.

The bytes lie in a file: of every slice, runs of elements in any order, as ZeRO leaves them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import read_slot
from tests.refusals import refusing
from tests.strategies import cuts
from zckpt.engine.copy import read_extent
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.axes.tensor_parallel import cut, merge
from zckpt.formats.deepspeed.axes.tp_rules import Rules
from zckpt.formats.deepspeed.origin import Rank
from zckpt.state import Extent, Parameter, Slot, Span
from zckpt.storage.files import Sources

NAME = "some.weight"
DEGREES = (1, 2, 3, 4, 6)


@dataclass(frozen=True)
class Way:
    """A way of slicing: the rules that say it, the shape of the whole, the sliced dimension and the parts along it."""

    info: dict[str, object]
    shape: tuple[int, ...]
    dim: int | None
    parts: tuple[int, ...] = ()

    def slices(self, whole, degree) -> list[np.ndarray]:
        """Cut as a training does: each rank has its share of each part, one after the other."""
        if self.dim is None:
            return [whole] * degree
        parts = np.split(whole, list(itertools.accumulate(self.parts))[:-1], axis=self.dim)
        shares = [np.split(part, degree, axis=self.dim) for part in parts]
        return [np.concatenate([share[rank] for share in shares], axis=self.dim) for rank in range(degree)]


@st.composite
def ways(draw, degrees: tuple[int, ...]) -> Way:
    """Draw a rule and a shape whose parts divide among all of these degrees."""
    kind = draw(st.sampled_from(["column", "row", "two", "equal", "sizes", "replicated"]))
    unit = math.lcm(*degrees)
    dims = draw(st.integers(2 if kind == "row" else 1, 4))
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    if kind == "replicated":
        return Way({"tp_replicated_parameter_patterns": [r"some\.weight$"]}, tuple(shape), None)
    dim = {"column": 0, "row": 1, "two": 0}.get(kind)
    dim = draw(st.integers(0, dims - 1)) if dim is None else dim
    multiples = st.integers(1, 2)
    count = {"column": 1, "row": 1, "two": 2}.get(kind) or draw(st.integers(1, 4))
    parts = [unit * draw(multiples) for _ in range(count)]
    if kind in ("two", "equal"):
        parts = parts[:1] * count
    shape[dim] = sum(parts)
    asked = [-1] * dims
    asked[dim] = count if kind == "equal" else parts
    info = {
        "column": {},
        "row": {"parameter_with_row_parallelism_patterns": ["some"]},
        "two": {"parameter_with_2_sub_params_cat_dim_0": [r".*weight"]},
    }
    sub = {"parameter_with_sub_params": [{"patterns": [r"\w+\.weight"], "shape": asked, "partition_dim": dim}]}
    return Way(info.get(kind, sub), tuple(shape), dim, tuple(parts))


@st.composite
def stored(draw, values, path, start) -> tuple[Slot, bytes]:
    """Draw the runs in which a tensor's elements lie in a file, from byte `start` on, in any order."""
    runs = draw(st.permutations(draw(cuts(values.size, most=4))))
    spans, data = [], b""
    for low, size in runs:
        spans.append(Span(Extent.flat(values.shape, low, size), path, start + len(data), "float32"))
        data += values.reshape(-1)[low : low + size].tobytes()
    return Slot("master", "float32", values.shape, tuple(spans)), data


def put_together(slots: list[Slot], rules: Rules) -> Parameter:
    states = [
        Rank("", "deepspeed", mp_rank=rank, parameters={NAME: Parameter(NAME, slot.shape, "float32", {"master": slot})})
        for rank, slot in enumerate(slots)
    ]
    return merge(states, rules).parameters[NAME]


@st.composite
def cases(draw) -> tuple[Way, int, int, np.ndarray]:
    degree, other = draw(st.sampled_from(DEGREES)), draw(st.sampled_from(DEGREES))
    way = draw(ways((degree, other)))
    whole = np.arange(math.prod(way.shape), dtype=np.float32).reshape(way.shape)
    return way, degree, other, whole


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("slices") / "bytes"


@given(case=cases(), data=st.data())
def test_slices_put_together_and_cut_again(file, case, data):
    way, degree, other, whole = case
    slots, content = [], b""
    for values in way.slices(whole, degree):
        slot, more = data.draw(stored(values, str(file), len(content)))
        slots.append(slot)
        content += more
    file.write_bytes(content)
    rules = Rules(way.info, "rules")
    merged = put_together(slots, rules)
    assert merged.shape == way.shape
    assert np.array_equal(read_slot(merged.slots["master"]), whole)
    rule = rules.cut(NAME, merged.shape, other)
    with Sources() as sources:
        for rank, expected in enumerate(way.slices(whole, other)):
            local = cut(merged, rule, rank)
            assert local.shape == expected.shape
            low = data.draw(st.integers(0, expected.size))
            count = data.draw(st.integers(0, expected.size - low))
            found = read_extent(local.slots["master"], Extent.flat(local.shape, low, count), sources)
            assert np.array_equal(found, expected.reshape(-1)[low : low + count])
            assert np.array_equal(read_slot(local.slots["master"]), expected)


def one_run(shape: tuple[int, ...]) -> Slot:
    return Slot("master", "float32", shape, (Span(Extent.whole(shape), "file", 0, "float32"),))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_is_described_in_a_few_spans(dim):
    """However many rows a matrix has, its columns over the ranks are a box each, not a run for each row."""
    info = {"parameter_with_row_parallelism_patterns": [".*"]} if dim else {}
    shape = (100_000, 8)
    parameter = Parameter(NAME, shape, "float32", {"master": one_run(shape)})
    rules = Rules(info, "rules")
    for rank in range(4):
        assert len(cut(parameter, rules.cut(NAME, shape, 4), rank).slots["master"].spans) == 1


def test_parts_along_rows_stay_few_spans():
    info = {"parameter_with_sub_params": [{"patterns": [".*"], "shape": [-1, [8, 4, 4]], "partition_dim": 1}]}
    shape = (50_000, 16)
    parameter = Parameter(NAME, shape, "float32", {"master": one_run(shape)})
    for rank in range(4):
        spans = cut(parameter, Rules(info, "rules").cut(NAME, shape, 4), rank).slots["master"].spans
        assert [span.extent.sizes for span in spans] == [(50_000, 2), (50_000, 1), (50_000, 1)]


@pytest.mark.parametrize(
    ("info", "shape", "degree"),
    [
        ({}, (7, 4), 2),
        ({}, (), 2),
        ({"parameter_with_row_parallelism_patterns": [".*"]}, (8, 3), 2),
        ({"parameter_with_row_parallelism_patterns": [".*"]}, (8,), 2),
        ({"parameter_with_2_sub_params_cat_dim_0": [".*"]}, (7,), 1),
        ({"parameter_with_2_sub_params_cat_dim_0": [".*"]}, (6,), 2),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": [[4, 3]], "partition_dim": 0}]}, (8,), 1),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": [[4, 2]], "partition_dim": 0}]}, (6,), 4),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": [4], "partition_dim": 0}]}, (6,), 1),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": ["x"], "partition_dim": 0}]}, (0,), 1),
    ],
)
def test_what_does_not_divide_is_refused_by_name(info, shape, degree):
    with refusing(LayoutError, NAME):
        Rules(info, "rules").cut(NAME, shape, degree)


@pytest.mark.parametrize("widths", [3, [], [[2], "x"], [[2, 2], [1]], [[-1, 1]], [["2"]], {"a": 1}])
def test_widths_that_are_none(widths):
    sub = [{"patterns": [".*"], "shape": [[4]], "partition_dim": 0}]
    rules = Rules({"parameter_with_sub_params": sub, "sub_param_shard_widths": {".*": widths}}, "rules")
    with refusing(UnsupportedError, NAME):
        rules.rule(NAME, [(2,), (2,)])


def test_uneven_widths_are_read_and_cut_evenly(file):
    """Three heads over two ranks are two and one; three ranks have one each."""
    sub = [{"patterns": [".*"], "shape": [[6, 3]], "partition_dim": 0}]
    rules = Rules({"parameter_with_sub_params": sub, "sub_param_shard_widths": {".*": [[4, 2], [2, 1]]}}, "rules")
    whole = np.arange(9, dtype=np.float32)
    slices = [np.concatenate([whole[:4], whole[6:8]]), np.concatenate([whole[4:6], whole[8:]])]
    file.write_bytes(b"".join(one.tobytes() for one in slices))
    slots = [Slot("master", "float32", s.shape, (Span(Extent.whole(s.shape), str(file), at, "float32"),))
             for s, at in zip(slices, (0, 24), strict=True)]  # fmt: skip
    merged = put_together(slots, rules)
    assert np.array_equal(read_slot(merged.slots["master"]), whole)
    rule = rules.cut(NAME, (9,), 3)
    found = [read_slot(cut(merged, rule, rank).slots["master"]).tolist() for rank in range(3)]
    assert found == [[0, 1, 6], [2, 3, 7], [4, 5, 8]]
