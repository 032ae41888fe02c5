"""The order of tensors in a program's model, from templates of their names in that order. Pure.

embed.weight                0
layers.{l}.a.weight         1, l, 0         templates that follow each other and begin with the same letter are a
layers.{l}.b.weight         1, l, 1         block, which is repeated for each of its numbers
norm.weight                 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from zckpt.naming.document import Template


def sorted_names(positions: Mapping[str, int], templates: Sequence[Template]) -> list[str]:
    """Return names, which have positions, in the order of templates; those that none fits come after them."""
    blocks = list(_blocks(templates, 0))

    def key(name: str) -> tuple[tuple[int, int], ...]:
        for one, numbers in zip(templates, blocks, strict=True):
            match = one.pattern.fullmatch(name)
            if match is not None:
                indices = [int(match[letter]) for letter in one.indices]
                return tuple((0, part) for pair in zip(numbers, [*indices, 0], strict=True) for part in pair)
        return ((1, positions[name]),)

    return sorted(positions, key=key)


def _blocks(templates: Sequence[Template], depth: int) -> Iterator[tuple[int, ...]]:
    """Yield for each template the numbers of the blocks that it is in, outermost first."""

    def letter(numbered: tuple[int, Template]) -> str | int:
        at, one = numbered
        return one.indices[depth] if len(one.indices) > depth else at  # a block of its own

    for block, (key, some) in enumerate(groupby(enumerate(templates), letter)):
        if isinstance(key, int):
            yield (block,)
        else:
            yield from ((block, *rest) for rest in _blocks([one for _, one in some], depth + 1))
