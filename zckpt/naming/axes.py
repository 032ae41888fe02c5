"""How the elements of a tensor are arranged, expressions of sizes, and which layers and rows are taken. Pure.

    "(heads two half) in"       two dimensions: the first is heads, then two, then half, outermost first
    "(group member[:q] d) in"   of the members only those below q: the others are in other tensors
    "in (three[1] d)"           transposed, and only the second of three

Every tensor of a rule is a part of one box of all its letters, whatever their order in each.

Layers and rows are taken in an order: some twice, some not, rows of zeros behind them.

{"taken": {"model.layers.{l}.": "0-23,8-31",                  48 layers of 32: those from 8 to 23 are there twice
           "model.embed_tokens.weight": "0-,zero*64"}}        all rows, and 64 of zeros

The names stay those of the same program; all else stays as it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from operator import add, floordiv, mul, sub

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Parameter, by_key
from zckpt.state.mappings import are_distinct
from zckpt.state.views import concat, narrow, zeros

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
    axes: list[list[Factor]] = []
    inside = False
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or len(text) > MAXIMUM_CHARACTERS:
            raise malformed
        at = match.end()
        mark, name, values, _ = match.groups()
        if mark and (mark == "(") == inside:
            raise malformed
        if mark != ")" and not inside:
            axes.append([])
        if mark:
            inside = not inside
        elif values is not None:
            low, colon, high = map(str.strip, values.partition(":"))
            axes[-1].append(Factor(name, low or None, high or None) if colon else Factor(name, low, f"({low})+1"))
        elif name is not None:
            axes[-1].append(Factor(name))
    if inside or not are_distinct([factor.name for axis in axes for factor in axis]):
        raise malformed
    return tuple(map(tuple, axes))


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


_ITEM = re.compile(r"(zero|[0-9]{1,9})(-(?P<last>[0-9]{0,9}))?(\*(?P<times>[1-9][0-9]{0,8}))?")

MOST = 1 << 17
"""Layers, or ranges of rows: a map may say any number."""

Ranges = list[tuple[int | None, int]]
"""The first index and how many follow, itself included; None: zeros."""


@immutable
class Taken:
    """Beginnings of names with a number, or whole names of tensors whose rows are taken, and what is taken."""

    front: str
    pattern: re.Pattern[str]
    items: tuple[re.Match[str], ...]

    def ranges(self, count: int) -> Ranges:
        """Return what is taken of `count` layers or rows; UsageError: there are not so many, or too many of them."""
        found: Ranges = []
        for item in self.items:
            times = int(item["times"] or 1)
            if item[1] == "zero":
                found.append((None, times))
                continue
            low = int(item[1])
            high = low if item["last"] is None else int(item["last"] or count - 1)
            if not low <= high < count:
                raise UsageError(f"{self.front} has no {item[0]}", expected=f"0 to {count - 1}")
            if times * (high + 1 - low if self.pattern.groups else 1) > MOST:
                raise UsageError(f"{self.front} {item[0]} is too large", expected=f"at most {MOST}")
            found += [(low, high + 1 - low)] * times
        return found


def parse_taken(front: str, pattern: re.Pattern[str], text: str) -> Taken:
    """Return what a map says of names; UsageError: it is malformed."""
    items = [one for word in text.split(",") if (one := _ITEM.fullmatch(word.strip()))]
    zero = [one for one in items if one[1] == "zero" and (pattern.groups or one["last"] is not None)]
    if "+" in front or pattern.groups > 1 or zero or len(items) != text.count(",") + 1:
        raise UsageError(
            f"unusable taken {front}: {text}",
            expected="numbers or ranges such as 0-23 or 8-, each optionally *N; for rows also zero*N",
        )
    return Taken(front, pattern, tuple(items))


def take(checkpoint: Checkpoint, taken: Sequence[Taken], where: str) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint, which stays as it is, of what is taken, and what to know of it.

    Raises UsageError: there is no such layer or tensor; UnsupportedError: tied layers, or state that has no rows.
    """
    notes = []
    for one in taken:
        checkpoint = (_layers if one.pattern.groups else _rows)(checkpoint, one, where)
        items = ",".join(item[0] for item in one.items)
        notes.append(f"{where}: takes {one.front} {items}; config.json must state how many there are")
    return checkpoint, notes


def _layers(checkpoint: Checkpoint, taken: Taken, where: str) -> Checkpoint:
    parts = {name: (name[: match.start(1)], int(match[1]), name[match.end(1) :])
             for name in checkpoint.names
             if (match := taken.pattern.match(name)) is not None}  # fmt: skip
    if not parts:
        raise UsageError(f"{where}: no name begins with {taken.front}", path=checkpoint.named)
    ties = [one.name for one in checkpoint.tensors() if one.tied_to and {one.name, one.tied_to} & parts.keys()]
    if ties:
        raise UnsupportedError(f"{where}: {listed(ties)} is another name of a tensor in the layers that are taken")
    numbers = {number for _, number, _ in parts.values()}
    with within(where):
        ranges = taken.ranges(max(numbers) + 1)
    places = by_key((old, new) for new, old in enumerate((low or 0) + n for low, size in ranges for n in range(size)))
    if missing := places.keys() - numbers:
        raise UsageError(f"{where}: {taken.front} has no {min(missing)}", path=checkpoint.named)

    def of(every: Iterable[str]) -> list[tuple[str, str]]:
        """Return new names and old ones, by layer where the old ones are, else each tensor's together."""
        old = list(every)
        own = [parts[name][1] for name in old if name in parts]
        by_layer = own == sorted(own)
        first: dict[str, int] = {}
        keyed: list[tuple[tuple[int, ...], str, str]] = []
        for at, name in enumerate(old):
            if name not in parts:
                keyed.append(((at,), name, name))
                continue
            front, number, rest = parts[name]
            begin = first.setdefault("" if by_layer else rest, at)
            keyed += (((begin, new, at), f"{front}{new}{rest}", name) for new in places.get(number, ()))
        return [(new, name) for _, new, name in sorted(keyed)]

    def section(some: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {new: copied(some[name], new) for new, name in of(some)}

    def copied(one: Parameter, name: str) -> Parameter:  # with slots of its own: what shares one is written as tied
        slots = {key: replace(slot) for key, slot in one.slots.items()}
        return one if one.name == name else replace(one, name=name, slots=slots, state=dict(one.state))

    groups = [replace(one, parameters=[new for new, _ in of(one.parameters)]) for one in checkpoint.param_groups]
    kept = [one for one in checkpoint.duplicates if not {one.name, one.of} & parts.keys()]
    return replace(checkpoint, parameters=section(checkpoint.parameters), buffers=section(checkpoint.buffers),
                   param_groups=groups, duplicates=kept)  # fmt: skip


def _rows(checkpoint: Checkpoint, taken: Taken, where: str) -> Checkpoint:
    from zckpt.engine.computed import Computed  # what only lists the maps does without
    from zckpt.formats.low_bit import codes_in
    from zckpt.formats.torch_files.tensors import holds_tensors

    name = taken.front
    own = checkpoint.find(name)
    if own is None or own.tied_to is not None or not own.shape:
        raise UsageError(
            f"{where}: {name} does not have its own rows", path=checkpoint.named, expected="the name of a tensor",
            found=None if own is None or own.tied_to is None else f"another name of {own.tied_to}",
        )  # fmt: skip
    with within(where):
        ranges = taken.ranges(own.shape[0])
    if name in codes_in(checkpoint) or any(isinstance(slot, Computed) for slot in own.slots.values()):
        raise UnsupportedError(f"{name} is quantised, so it has no rows", advice="dequantize it first")
    slots = dict(own.slots)
    for key, slot in own.slots.items():
        if slot.shape not in (own.shape, ()) or holds_tensors(own.state.get(key)):
            raise UnsupportedError(f"{key} of {name} does not have one number per element, so it has no rows",
                                   expected=own.shape, found=slot.shape)  # fmt: skip
        if slot.shape:
            rest = slot.shape[1:]
            rows = [zeros(slot, (n, *rest)) if at is None else narrow(slot, 0, at, n) for at, n in ranges]
            slots[key] = concat(rows, 0)
    shape = (sum(size for _, size in ranges), *own.shape[1:])

    def section(some: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {
            key: replace(one, shape=shape, slots=slots if one is own else one.slots)
            if one is own or one.tied_to == name
            else one
            for key, one in some.items()
        }

    kept = [one for one in checkpoint.duplicates if name not in (one.name, one.of)]
    return replace(checkpoint, parameters=section(checkpoint.parameters), buffers=section(checkpoint.buffers),
                   duplicates=kept)  # fmt: skip
