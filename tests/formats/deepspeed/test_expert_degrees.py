"""Which layers of experts are spread over how many ranks, by shapes and numbers alone."""

from __future__ import annotations

from collections import Counter

from zckpt.formats.deepspeed.expert_optimizers import IsOf, degrees_of_layers
from zckpt.state import Parameter


def model(*layers: tuple[int, int]) -> tuple[dict[str, Parameter], dict[str, int]]:
    """Experts of one matrix each: how many of them a layer has, and how wide they are."""
    names = [(f"{i}.deepspeed_experts.", count, width) for i, (count, width) in enumerate(layers)]
    parameters = {
        f"{layer}{number}.w": Parameter(f"{layer}{number}.w", (8, width), "float32")
        for layer, count, width in names
        for number in range(count)
    }
    return parameters, {layer: count for layer, count, _ in names}


def held(**of: dict[tuple[int, int], int]) -> dict[int, IsOf]:
    return {int(degree[2:]): Counter(shapes).__eq__ for degree, shapes in of.items()}


def count(number: int) -> IsOf:
    return lambda shapes: shapes.total() == number


def numel(number: int) -> IsOf:
    return lambda shapes: sum(rows * columns * many for (rows, columns), many in shapes.items()) == number


def test_shapes_and_numbers_tell() -> None:
    parameters, totals = model((4, 9), (4, 11), (8, 9))
    a, b, c = totals
    found = degrees_of_layers(parameters, totals, held(ep1={(8, 11): 4}, ep4={(8, 9): 3}))
    assert found == {a: 4, b: 1, c: 4}
    assert degrees_of_layers(parameters, totals, held(ep4={(8, 9): 3})) == {a: 4, c: 4}  # b is not trained
    assert degrees_of_layers(parameters, totals, held(ep2={(8, 11): 2, (8, 9): 2}, ep8={(8, 9): 1})) == {
        a: 2,
        b: 2,
        c: 8,
    }


def test_what_fits_in_several_ways_is_not_certain() -> None:
    parameters, totals = model((4, 9), (4, 9))
    assert degrees_of_layers(parameters, totals, held(ep1={(8, 9): 4}, ep2={(8, 9): 2})) is None
    parameters, totals = model((4, 9), (8, 9))  # 4 + 4 or 2 + 8 of those
    assert degrees_of_layers(parameters, totals, {2: count(4), 1: count(4)}) is not None
    assert degrees_of_layers(parameters, totals, {2: numel(2 * 72), 1: numel(8 * 72)}) is not None
    assert degrees_of_layers(parameters, totals, held(ep2={(8, 9): 3}, ep1={(8, 9): 4})) is None
    parameters, totals = model(*[(4, width) for width in range(20)])
    assert degrees_of_layers(parameters, totals, {1: count(40), 2: count(20)}) is None
