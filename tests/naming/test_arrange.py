"""Maps of random letters: every element comes where numpy puts it, from any cut and into any, and back bit by bit."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_plan import indices
from tests.strategies import cuts, extents, tilings
from zckpt.engine.copy import pieces, read_extent, read_piece
from zckpt.engine.plan import Fill, fill
from zckpt.engine.targets import Hole
from zckpt.naming.apply import mapped
from zckpt.naming.document import parse_map
from zckpt.state import WEIGHT, Checkpoint, CutFiles, CutSpans, Extent, Parameter, ParamGroup, Slot, Span
from zckpt.storage.files import Sources

LETTERS = "abcd"
SLOTS = (WEIGHT, "exp_avg")


@st.composite
def arrangements(draw: st.DrawFn, letters: dict[str, int]) -> tuple[list[list[str]], str, list[tuple[int, int]]]:
    """Draw one side of a rule: dimensions of letters in some order, a letter that its tensors divide, and how."""
    order = draw(st.permutations(sorted(letters)))
    axes: list[list[str]] = []
    for letter in order:
        if axes and draw(st.booleans()):
            axes[-1].append(letter)
        else:
            axes.append([letter])
    letter = draw(st.sampled_from(order))
    return axes, letter, draw(cuts(letters[letter], most=2, empty=False))


@st.composite
def maps(draw: st.DrawFn):
    """Draw a map of one rule, and what numpy makes of it."""
    letters = {letter: draw(st.sampled_from([1, 2, 3, 4])) for letter in LETTERS[: draw(st.integers(1, 4))]}
    sides = {name: draw(arrangements(letters)) for name in ("mine", "theirs")}
    rule, tensors = {}, {}
    whole = np.arange(math.prod(letters.values()), dtype=np.float32).reshape(list(letters.values()))
    for side, (axes, cut, ranges) in sides.items():
        templates, values = {}, {}
        for number, (low, size) in enumerate(ranges):
            name = f"{side}.part{'abcdef'[number]}"
            value = (f"{cut}[{low}:{low + size}]", cut)
            templates[name] = " ".join(
                f"({' '.join(value[0] if one == cut else one for one in axis)})" for axis in axes
            )
            box = whole[tuple(slice(low, low + size) if one == cut else slice(None) for one in letters)]
            moved = box.transpose([list(letters).index(one) for axis in axes for one in axis])
            sizes = {**letters, cut: size}
            values[name] = np.ascontiguousarray(moved).reshape([math.prod(sizes[one] for one in axis) for axis in axes])
        rule[side], tensors[side] = templates, values
    document = {
        "sides": ["mine", "theirs"],
        "sizes": {key: str(size) for key, size in letters.items()},
        "rules": [rule],
    }
    return parse_map(document, "random"), tensors


def laid(data: st.DataObject, folder: Path, name: str, value: np.ndarray, slot: str) -> Slot:
    """Write a tensor into files in some cut; return where it is."""
    if data.draw(st.booleans()) or not value.size:
        spans, content = [], []
        for tile in data.draw(tilings(value.shape)):
            spans.append(Span(tile, str(folder / f"{name}.{slot}"), 4 * sum(map(len, content)), "float32"))
            content.append(value.reshape(-1)[indices(tile, value.shape)])
        np.concatenate(content).tofile(folder / f"{name}.{slot}")
        return Slot(slot, "float32", value.shape, tuple(spans))
    width = data.draw(st.integers(1, value.size))  # a rule, as ZeRO cuts
    paths = [str(folder / f"{name}.{slot}.{rank}") for rank in range(-(-value.size // width))]
    for rank, path in enumerate(paths):
        value.reshape(-1)[rank * width : (rank + 1) * width].tofile(path)
    files = CutFiles(tuple(paths), (0,) * len(paths), "float32")
    return Slot(slot, "float32", value.shape, CutSpans(files, value.shape, 0, width))


def in_pieces(slot: Slot, extent: Extent, most: int, sources: Sources) -> np.ndarray:
    """Read an extent as it would be written, with little memory."""
    hole = Hole(0, slot.name, slot, extent, "float32")
    found = np.full(extent.numel, np.nan, np.float32)
    for piece in pieces(Fill(hole, tuple(fill(hole))), most, most):
        read_piece(piece, found.view(np.uint8).data, sources)
    return found


@given(st.data(), maps())
def test_every_element_is_where_numpy_puts_it_and_the_way_back_is_the_same(data, drawn):
    map_, tensors = drawn
    with tempfile.TemporaryDirectory() as folder, Sources() as sources:
        parameters = {}
        for name, value in tensors["mine"].items():
            slots = {key: laid(data, Path(folder), name, value + (key != WEIGHT) * 1000, key) for key in SLOTS}
            parameters[name] = Parameter(name, value.shape, "float32", slots, group=0)
        source = Checkpoint("here", "test", parameters=parameters, param_groups=[ParamGroup({}, list(parameters))])
        made = mapped(source, map_, {}).checkpoint
        assert sorted(made.parameters) == sorted(made.param_groups[0].parameters) == sorted(tensors["theirs"])
        for name, value in tensors["theirs"].items():
            for key in SLOTS:
                slot = made.parameters[name].slots[key]
                assert slot.shape == value.shape
                extent = data.draw(extents(value.shape))
                expected = (value + (key != WEIGHT) * 1000).reshape(-1)
                found = read_extent(slot, extent, sources)
                assert np.array_equal(found, expected[indices(extent, value.shape)])
                assert np.array_equal(read_extent(slot, Extent.whole(value.shape), sources), expected)
                most = data.draw(st.sampled_from([4, 8, 20, 64]))
                assert np.array_equal(in_pieces(slot, extent, most, sources), found)
                some = tuple(span for span in slot.spans if span.path.endswith(f"{key}.0"))
                if isinstance(slot.spans, tuple) or not slot.numel:
                    continue
                assert slot.spans.within({span.path for span in some}) == some
                assert len(slot.spans) == len(list(slot.spans))
