"""Values that files hold, as JSON can say them."""

from __future__ import annotations

import math

from zckpt.state import Scalar
from zckpt.torchfile import Tensor, plain


def jsonable(value: object) -> object:
    """Return a value as JSON-able data: single values as numbers, tensors by type and shape, NaN and Inf as text."""
    if isinstance(value, Scalar):
        return jsonable(value.value)
    if isinstance(value, Tensor):
        return {"tensor": value.dtype, "shape": list(value.shape)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and any(isinstance(one, Scalar) for one in value.values()):
        return {str(key): jsonable(one) for key, one in value.items()}
    return plain(value)
