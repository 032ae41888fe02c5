"""The order of tensors in a program's model, from templates of their names in that order. Pure.

embed.weight                0
layers.{l}.a.weight         1, l, 0         templates that follow each other and begin with the same letter are a
layers.{l}.b.weight         1, l, 1         block, which is repeated for each of its numbers
norm.weight                 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.naming.document import Template


def sorted_names(positions: Mapping[str, int], templates: Sequence[Template]) -> list[str]:
    """Return names in the order of templates; those that none fits come after them, by their positions.

    Parameters
    ----------
    positions : mapping of str to int
        By name.
    templates : sequence of Template
    """
    keys = {}
    blocks = _blocks(templates, 0)
    for name, position in positions.items():
        keys[name] = _key(name, templates, blocks) or ((1, position),)
    return sorted(positions, key=keys.__getitem__)


def _blocks(templates: Sequence[Template], depth: int) -> list[tuple[int, ...]]:
    """Return for each template the numbers of the blocks that it is in, outermost first."""
    found: list[tuple[int, ...]] = []
    before: str | None = None
    block, start = -1, 0

    def close(end: int) -> None:
        if before is not None:
            found.extend((block, *rest) for rest in _blocks(templates[start:end], depth + 1))

    for index, one in enumerate(templates):
        letter = one.indices[depth] if len(one.indices) > depth else None
        if letter is None:
            close(index)
            block += 1
            found.append((block,))
        elif letter != before:
            close(index)
            block, start = block + 1, index
        before = letter
    close(len(templates))
    return found


def _key(
    name: str, templates: Sequence[Template], blocks: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, int], ...] | None:
    for one, numbers in zip(templates, blocks, strict=True):
        match = one.pattern.fullmatch(name)
        if match is not None:
            indices = [int(match[letter]) for letter in one.indices]
            return tuple((0, part) for pair in zip(numbers, [*indices, 0], strict=True) for part in pair)
    return None
