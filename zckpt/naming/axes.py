"""How the elements of a tensor are arranged, and expressions of sizes. Pure.

    "(heads two half) in"       two dimensions: the first is heads, then two, then half, outermost first
    "(group member[:q] d) in"   of the members only those below q: the others are in other tensors
    "in (three[1] d)"           transposed, and only the second of three

Every tensor of a rule is a part of one box of all its letters, whatever their order in each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import add, floordiv, mul, sub

from zckpt.errors import UsageError
from zckpt.immutable import immutable
from zckpt.state.mappings import are_distinct

_TOKEN = re.compile(r"\s*(?:([()])|([A-Za-z_]\w*)(?:\[([^\]]*)\])?|(1))")

_NAME = re.compile(r"[A-Za-z_]\w*")

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv,
}  # fmt: skip

MAXIMUM_CHARACTERS = 1000
"""Of axes or an expression: a map is written by hand."""


@contextmanager
def within(where: str) -> Iterator[None]:
    """Let the message of a UsageError begin with what it is about."""
    try:
        yield
    except UsageError as error:
        error.message = f"{where}: {error.message}"
        raise


@immutable
class Factor:
    """A letter of an axis, or its values from `low` to below `high`: expressions, and None for its end."""

    name: str
    low: str | None = None
    high: str | None = None

    @property
    def numel(self) -> str:
        """How many values it has, as an expression."""
        high = self.high or self.name
        return high if self.low in (None, "0") else f"({high})-({self.low})"


Axes = tuple[tuple[Factor, ...], ...]
"""The factors of each dimension, outermost first."""


def parse_axes(text: str) -> Axes:
    """Return what a text says of the dimensions of a tensor; UsageError: it is malformed, or has a letter twice."""
    malformed = UsageError(
        f"the arrangement {text!r} is malformed", expected="letters, (a b) for one dimension, a[low:high]"
    )
    axes: list[tuple[Factor, ...]] = []
    inside: list[Factor] | None = None
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or len(text) > MAXIMUM_CHARACTERS:
            raise malformed
        at = match.end()
        mark, name, values, _ = match.groups()
        if mark:
            if (mark == "(") != (inside is None):
                raise malformed
            if inside is not None:
                axes.append(tuple(inside))
            inside = [] if inside is None else None
            continue
        own: list[Factor] = []
        if name is not None and values is None:
            own = [Factor(name)]
        elif name is not None:
            low, colon, high = map(str.strip, values.partition(":"))
            own = [Factor(name, low or None, high or None) if colon else Factor(name, low, f"({low})+1")]
        if inside is None:
            axes.append(tuple(own))
        else:
            inside += own
    names = [factor.name for axis in axes for factor in axis]
    if inside is not None or not are_distinct(names):
        raise malformed
    return tuple(axes)


Known = Callable[[str], int | None]


def evaluated(expression: str, known: Known, where: str) -> int | None:
    """Return the value of an expression of sizes; None if a name in it is not known, whose size `known` returns.

    Raises UsageError: it is malformed, or divides what does not divide.
    """
    try:
        return _value(_parsed(expression), known)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UsageError(
            f"{where}: {expression[:80]!r} is not a size",
            expected="whole numbers and names with + - * and /, which must divide",
            found=", ".join(f"{name}={known(name)}" for name in names_in(expression)) or None,
        ) from None


@lru_cache
def _parsed(expression: str) -> ast.expr:
    """Return an expression of names with a line before each: `in` is a word of Python's."""
    return ast.parse(_NAME.sub(r"_\g<0>", expression[:MAXIMUM_CHARACTERS].strip()), mode="eval").body


def _value(node: ast.expr, known: Known) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known(node.id[1:])
    compute = _OPERATIONS.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if compute is None or not isinstance(node, ast.BinOp):
        raise ValueError
    a, b = _value(node.left, known), _value(node.right, known)
    if a is None or b is None:
        return None
    if compute is floordiv and (not b or a % b):
        raise ValueError
    return compute(a, b)


def names_in(expression: str) -> list[str]:
    """Return the names in an expression."""
    return _NAME.findall(expression[:MAXIMUM_CHARACTERS])
