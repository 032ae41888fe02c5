"""How DeepSpeed deals the layers of a pipeline to its stages. Pure.

    layers    0 Embedding=embed   1 Block   2 relu   3 FeedForward   4 LayerNorm   5 Embedding=embed
    bounds    (0, 3, 6): stage s has the layers from bounds[s] to before bounds[s + 1]

Source: `PipelineModule._partition_layers`, `partition_uniform`, `partition_balanced`; DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from zckpt.errors import UsageError

Numbers = tuple[int, ...]
"""Of layers: bounds of stages, or those that use a tied one."""
UNIFORM = "uniform"
PARAMETERS = "parameters"
TYPE = "type:"

METHODS = f"{UNIFORM}, {PARAMETERS} or {TYPE}REGEX"

MOST_LAYERS = 4096
"""A list of more layers than this is a slip; dealing them by weight takes the square of their number."""


class Layer(NamedTuple):
    """A layer as the training's `PipelineModule` gets it.

    Parameters
    ----------
    kind : str
        Name of its class or function.
    tied : str or None
        The key of a `TiedLayerSpec`.
    """

    kind: str
    tied: str | None = None


def uniform(layers: int, stages: int) -> Numbers:
    """Return the bounds of stages that have the same number of layers, the first ones one more where it must be."""
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages + 1))


def balanced(weights: Sequence[int], stages: int) -> Numbers:
    """Return the bounds of stages of which the heaviest is least heavier than the lightest.

    Of equal ones that with the latest bounds, from the last stage on: the first stages get the layers of no weight.

    Parameters
    ----------
    weights : sequence of int
        One for each layer.
    """
    layers = len(weights)
    if layers <= stages:
        return uniform(layers, stages)
    before = [0, *accumulate(weights)]
    # heaviest and lightest stage of the best way to deal the first i layers to some stages; one stage to begin with
    best = [(total, total) for total in before]
    bounds = [[0] * (layers + 1)]
    for stage in range(2, stages + 1):
        following, chosen = list(best), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            least: int | None = None
            for start in range(stage - 1, end):
                own = before[end] - before[start]
                heaviest, lightest = max(best[start][0], own), min(best[start][1], own)
                if least is None or heaviest - lightest <= least:
                    least = heaviest - lightest
                    following[end], chosen[end] = (heaviest, lightest), start
        best = following
        bounds.append(chosen)
    found = [layers]
    for chosen in reversed(bounds):
        found.append(chosen[found[-1]])
    return tuple(reversed(found))


def of_type(layers: Sequence[Layer], pattern: str, stages: int) -> Numbers:
    """Return the bounds of stages that have the same number of layers of some type.

    Raises
    ------
    UsageError
        It is no regular expression, or matches none of them.
    """
    lowered = pattern.lower().split(":")[0]  # as DeepSpeed does
    try:
        found = re.compile(lowered, re.IGNORECASE)
    except re.error as error:
        raise UsageError("unusable type of layers", expected="a regular expression", found=str(error)) from error
    weights = [int(found.search(layer.kind) is not None) for layer in layers]
    if not any(weights):
        raise UsageError("no layer is of that type", expected=", ".join(kinds(layers)), found=pattern)
    return balanced(weights, stages)


def kinds(layers: Iterable[Layer]) -> list[str]:
    """Return the kinds of layers, each once."""
    return list(dict.fromkeys(layer.kind for layer in layers))


def parse_layers(text: str) -> list[Layer]:
    """Return the layers that a text lists: `Embedding=embed,Block*24,relu,LayerNorm,Embedding=embed`.

    Raises
    ------
    UsageError
        It is not such a list.
    """
    found: list[Layer] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([^=*]+?)\s*(?:=\s*([^=*]+?)\s*)?(?:\*\s*(\d{1,4})\s*)?", item)
        times = int(match[3] or 1) if match else 0
        if match is None or not times or len(found) + times > MOST_LAYERS:
            raise UsageError(
                "unusable list of a pipeline's layers",
                expected="Embedding=KEY,Block*24,LayerNorm,... as PipelineModule gets them, KEY of a TiedLayerSpec",
                found=item.strip()[:80],
            )
        found += [Layer(match[1], match[2])] * times
    return found


def parse_bounds(text: str) -> Numbers:
    """Return the bounds that a text lists: `0,3,6`.

    Raises
    ------
    UsageError
        It is not such a list.
    """
    items = [item.strip() for item in text.split(",")]
    found = tuple(int(item) for item in items if re.fullmatch(r"\d{1,4}", item))
    rising = all(low < high for low, high in pairwise(found))
    if len(found) != len(items) or len(found) < 2 or found[0] != 0 or not rising:
        raise UsageError(
            "unusable bounds of stages", expected="0, the first layer of each further stage, and the number of layers",
            found=text[:80],
        )  # fmt: skip
    return found
