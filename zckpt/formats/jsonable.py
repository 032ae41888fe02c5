"""Values that files hold, as JSON can say them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from zckpt.state import Scalar
from zckpt.torchfile import Renderer, Tensor
from zckpt.torchfile.plain import LIMIT

MAXIMUM_VALUES = 1 << 17
"""Values within values that are said of all groups, or of all parameters: a file may repeat a tree without end."""


def jsonables(groups: Iterable[Mapping[str, object]], renderer: Renderer | None = None) -> list[dict[str, object]]:
    """Return the values of groups, or of whatever has many, as JSON-able data.

    Parameters
    ----------
    groups : iterable of mapping
    renderer : Renderer, optional
        Limits how many there are in all; by default to `MAXIMUM_VALUES`, with `...` for the rest.
    """
    renderer = renderer or Renderer(MAXIMUM_VALUES)
    return [{key: jsonable(value, renderer) for key, value in group.items()} for group in groups]


def jsonable(value: object, renderer: Renderer | None = None) -> object:
    """Return a value as JSON-able data: single values as numbers, tensors by type and shape, NaN and Inf as text.

    Parameters
    ----------
    value : object
    renderer : Renderer, optional
        Limits what several values become together.
    """
    if isinstance(value, Scalar):
        return jsonable(value.value)
    if isinstance(value, Tensor):
        return {"tensor": value.dtype, "shape": list(value.shape)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    renderer = renderer or Renderer(LIMIT)
    if isinstance(value, dict) and any(isinstance(one, Scalar) for one in value.values()):
        return {str(key): jsonable(one, renderer) for key, one in value.items()}
    return renderer.render(value)
