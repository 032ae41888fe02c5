"""Names of a map that have a number of the model's in them, `{=layers+2}.weight`: the norm behind the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.errors import UsageError
from zckpt.naming.axes import evaluated, names_in
from zckpt.naming.document import NUMBER, Map, Rule, Template, template


def numbered(map_: Map, config: Mapping[str, int]) -> Map:
    """Return a map whose names have the numbers of a model.

    Parameters
    ----------
    map_ : Map
    config : mapping of str to int
        Numbers of the model.

    Raises
    ------
    UsageError
        One is not known, or is less than 0.
    """
    every = [one for rule in map_.rules for side in rule.sides for one in side]
    if not any(NUMBER.search(one.text) for one in every):
        return map_

    def known(name: str) -> int | None:
        found = (config.get(one) if one.isidentifier() else None for one in map_.sizes.get(name, (name,)))
        return next((one for one in found if one is not None), None)

    def number(expression: str) -> str:
        value = evaluated(expression, known, map_.name)
        if value is None or value < 0:
            keys = [key for name in names_in(expression) for key in map_.sizes.get(name, (name,))]
            raise UsageError(
                f"{map_.name}: names have {expression} in them, which nothing tells",
                expected=f"a configuration with {' or '.join(keys)}",
                found=value,
                advice="give --map-config FILE, the model's config.json",
            )
        return str(value)

    def named(one: Template) -> Template:
        text = NUMBER.sub(lambda match: number(match[1]), one.text)
        return one if text == one.text else replace(template(text, None, map_.name), axes=one.axes)

    def all_named(templates: Sequence[Template]) -> tuple[Template, ...]:
        return tuple(map(named, templates))

    def ruled(rule: Rule) -> Rule:
        (first, second), (one, other) = rule.sides, rule.beside
        return replace(rule, sides=(all_named(first), all_named(second)), beside=(all_named(one), all_named(other)))

    first, second = map_.order
    return replace(map_, rules=tuple(map(ruled, map_.rules)), order=(all_named(first), all_named(second)))
