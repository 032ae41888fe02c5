"""How the elements of a tensor are arranged, and expressions of sizes. Pure.

    "(heads two half) in"       two dimensions: the first is heads, then two, then half, outermost first
    "(group member[:q] d) in"   of the members only those below q: the others are in other tensors
    "in (three[1] d)"           transposed, and only the second of three

Every tensor of a rule is a part of one box of all its letters, whatever their order in each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from zckpt.errors import UsageError
from zckpt.state.names import is_number

_TOKEN = re.compile(r"\s*(?:([()])|([A-Za-z_]\w*)(?:\[([^\]]*)\])?|(1))")

MAXIMUM_CHARACTERS = 1000
"""Of axes or an expression: a map is written by hand."""


@dataclass(frozen=True, slots=True)
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


def parse_axes(text: str, where: str) -> Axes:
    """Return what a text says of the dimensions of a tensor.

    Parameters
    ----------
    text : str
    where : str
        For messages.

    Raises
    ------
    UsageError
        It is malformed, or has a letter twice.
    """
    axes: list[tuple[Factor, ...]] = []
    inside: list[Factor] | None = None
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or len(text) > MAXIMUM_CHARACTERS:
            raise _malformed(text, where)
        at = match.end()
        mark, name, values, _ = match.groups()
        if mark == "(" and inside is None:
            inside = []
        elif mark == ")" and inside is not None:
            axes.append(tuple(inside))
            inside = None
        elif mark:
            raise _malformed(text, where)
        else:
            own = [] if name is None else [_factor(name, values)]
            if inside is None:
                axes.append(tuple(own))
            else:
                inside += own
    names = [factor.name for axis in axes for factor in axis]
    if inside is not None or len(names) != len(set(names)):
        raise _malformed(text, where)
    return tuple(axes)


def _malformed(text: str, where: str) -> UsageError:
    return UsageError(
        f"{where}: the arrangement {text!r} is malformed", expected="letters, (a b) for one dimension, a[low:high]"
    )


def _factor(name: str, values: str | None) -> Factor:
    if values is None:
        return Factor(name)
    low, mark, high = values.partition(":")
    if not mark:
        return Factor(name, low.strip(), f"({low.strip()})+1")
    return Factor(name, low.strip() or None, high.strip() or None)


def evaluated(expression: str, known: Callable[[str], int | None], where: str) -> int | None:
    """Return the value of an expression of sizes; None if a name in it is not known.

    Parameters
    ----------
    expression : str
    known : callable
        Returns the size of a name.
    where : str
        For messages.

    Raises
    ------
    UsageError
        It is malformed, or divides what does not divide.
    """
    tokens = _PART.findall(expression[:MAXIMUM_CHARACTERS])
    try:
        if "".join(tokens) != "".join(expression.split()):
            raise ValueError  # noqa: TRY301  # turned into a UsageError below
        value = _sum(tokens, known)
        if tokens:
            raise ValueError  # noqa: TRY301
    except (ValueError, IndexError, RecursionError):
        raise UsageError(
            f"{where}: {expression[:80]!r} is no size",
            expected="whole numbers and names with + - * and /, which must divide",
            found=", ".join(f"{name}={known(name)}" for name in names_in(expression)) or None,
        ) from None
    return value


_PART = re.compile(r"[A-Za-z_]\w*|[0-9]+|[-+*/()]")


def names_in(expression: str) -> list[str]:
    """Return the names in an expression."""
    return re.findall(r"[A-Za-z_]\w*", expression[:MAXIMUM_CHARACTERS])


Known = Callable[[str], int | None]


def _sum(tokens: list[str], known: Known) -> int | None:
    """Take a sum off the front of the tokens, and return its value."""
    value = _product(tokens, known)
    while tokens and tokens[0] in "+-":
        sign, other = (1 if tokens.pop(0) == "+" else -1), _product(tokens, known)
        value = None if value is None or other is None else value + sign * other
    return value


def _product(tokens: list[str], known: Known) -> int | None:
    value = _single(tokens, known)
    while tokens and tokens[0] in "*/":
        mark, other = tokens.pop(0), _single(tokens, known)
        if value is None or other is None:
            value = None
        elif mark == "*":
            value *= other
        elif other and value % other == 0:
            value //= other
        else:
            raise ValueError
    return value


def _single(tokens: list[str], known: Known) -> int | None:
    first = tokens.pop(0)
    if first == "(":
        value = _sum(tokens, known)
        if tokens.pop(0) != ")":
            raise ValueError
        return value
    if is_number(first):
        return int(first)
    if not first.isidentifier():
        raise ValueError
    return known(first)
