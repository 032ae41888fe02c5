"""A map as a JSON document says it; docs/maps.md describes it.

{"sides": ["huggingface", "meta"],
 "sizes": {"heads": ["num_attention_heads", "n_heads"], "half": "head_dim/2", ...},
 "rules": [{"huggingface": "model.norm.weight", "meta": "norm.weight"},
           {"huggingface": {"model.layers.{l}.self_attn.q_proj.weight": "(heads two half) in"},
            "meta": {"layers.{l}.attention.wq.weight": "(heads half two) in"}}, ...],
 "tied": {"meta": {"output.weight": "tok_embeddings.weight"}},
 "order": {"meta": ["tok_embeddings.weight", "layers.{l}.attention.wq.weight", ...]},
 "ignored": {"meta": ["rope.freqs"]},
 "refused": {"meta": {"layers.{l}.router.bias": "it chooses experts, for which Hugging Face has no place"}},
 "optimizer": {"meta": [{"huggingface": {"model.layers.{l}.self_attn.q_proj.weight": "(groups members[:q] d) in", ...},
                         "meta": {"layers.{l}.attention.wqkv.weight": "(groups members d) in"}}]},
 "settings": {"layernorm_zero_centered_gamma": false},
 "implied": {"huggingface": ["lm_head.weight"]}}

or what another map is but for some keys: {"like": "llama-huggingface-meta", "about": ..., "settings": {...}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import NoReturn, TypeGuard, TypeVar

from zckpt.errors import UsageError
from zckpt.naming.axes import Axes, parse_axes

One = TypeVar("One")

_INDEX = re.compile(r"\{([A-Za-z_]\w*)(?:\+([0-9]{1,4}))?\}")
NUMBER = re.compile(r"\{=([^{}]*)\}")

MAXIMUM_NBYTES = 1 << 22
"""Of a map, or a configuration."""

KEYS = frozenset({
    "about", "sides", "sizes", "rules", "tied", "order", "ignored", "refused", "optimizer", "settings", "implied",
})  # fmt: skip
LIKE = "like"


@dataclass(frozen=True, slots=True)
class Template:
    """The names of like tensors, `model.layers.{l}.mlp.up_proj.weight`, and how their elements are arranged.

    Parameters
    ----------
    text : str
    axes : Axes or None
        None: as they are on the other side.
    """

    text: str
    axes: Axes | None
    pattern: re.Pattern[str] = field(compare=False, repr=False)
    first: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Where the number in the name is not 0 for a letter's first value."""

    @property
    def indices(self) -> tuple[str, ...]:
        """The letters in the name."""
        return tuple(self.pattern.groupindex)

    def name(self, indices: Mapping[str, int]) -> str:
        """Return the name with numbers for its letters."""
        return _INDEX.sub(lambda match: str(indices[match[1]] + self.first.get(match[1], 0)), self.text)

    def numbers(self, name: str) -> dict[str, int] | None:
        """Return the values of the letters in a name; None if it is not such a name."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        found = {letter: int(value) - self.first.get(letter, 0) for letter, value in match.groupdict().items()}
        return found if all(value >= 0 for value in found.values()) else None

    def letters(self) -> set[str]:
        """Return the letters of the name and of the axes."""
        return {*self.indices, *(factor.name for axis in self.axes or () for factor in axis)}


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of one side that are the same elements as those of the other.

    Parameters
    ----------
    sides : pair of tuple of Template
    padded : tuple of str
        Letters of which one side may have more values: these are padding, zero where they are added.
    beside : pair of tuple of Template
        For each side, names that must be there, too, for it to hold from there to the other; they follow other rules.
    """

    sides: tuple[tuple[Template, ...], tuple[Template, ...]]
    padded: tuple[str, ...]
    beside: tuple[tuple[Template, ...], tuple[Template, ...]] = ((), ())

    @property
    def shared(self) -> tuple[str, ...]:
        """The letters that are in all names: the rule holds for each number of theirs by itself."""
        every = [template.indices for side in self.sides for template in side]
        return tuple(one for one in every[0] if all(one in other for other in every))


@dataclass(frozen=True, slots=True)
class Map:
    """Two ways to name and arrange the same weights.

    Parameters
    ----------
    name : str
    about : str
    sides : pair of str
    sizes : dict of str to tuple of str
        For each letter or name, expressions of which the first that can be told counts.
    rules : tuple of Rule
    tied : pair of dict of str to str
        Names of a side that are, where no rule gives them, other names of others.
    order : pair of tuple of Template
        The tensors in the order of each side's program; may be empty.
    ignored : pair of tuple of Template
        Tensors of a side that the other needs not, for they follow from its configuration.
    refused : pair of tuple of (Template, str)
        Tensors of a side for which the other has no place, and what they are.
    optimizer : pair of tuple of Rule
        For a side whose program has parameters that it takes apart when it saves the model, and not when it saves the
        optimizer: rules of the optimizer's own tensors.
    settings : dict of str to object
        What the configuration must say, where it says it: values that make other weights of the same arrangement.
    implied : pair of set of str
        Names of a side that the other has not where they are other names of a tensor.
    """

    name: str
    about: str
    sides: tuple[str, str]
    sizes: dict[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    tied: tuple[dict[str, str], dict[str, str]]
    order: tuple[tuple[Template, ...], tuple[Template, ...]]
    ignored: tuple[tuple[Template, ...], tuple[Template, ...]]
    refused: tuple[tuple[tuple[Template, str], ...], tuple[tuple[Template, str], ...]]
    optimizer: tuple[tuple[Rule, ...], tuple[Rule, ...]]
    settings: dict[str, object]
    implied: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())


def shipped() -> list[str]:
    """Return the names of the maps that come with zckpt."""
    folder = resources.files("zckpt.naming").joinpath("shipped")
    return sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))


def read_map(source: str | os.PathLike[str] | Mapping[str, object]) -> Map:
    """Return a map: a shipped one by its name, or that of a file.

    Raises
    ------
    UsageError
        There is none, or it is malformed.
    """
    if isinstance(source, Mapping):
        return parse_map(source, "the map")
    name = os.fspath(source)
    if name in shipped():
        return parse_map(_read_shipped(name), name)
    if not Path(name).is_file():
        raise UsageError(f"no map {name}", expected=f"a JSON file, or {', '.join(shipped())}")
    return parse_map(read_json(name), name)


def _read_shipped(name: str) -> dict[str, object]:
    text = resources.files("zckpt.naming").joinpath("shipped").joinpath(f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)
    return found


def read_json(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """Return what a JSON file holds, which must be an object.

    Raises
    ------
    UsageError
        It cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAXIMUM_NBYTES + 1)
        found = json.loads(data.decode("utf-8")) if len(data) <= MAXIMUM_NBYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("cannot be read", path=path, expected="JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise UsageError("cannot be used", path=path, expected=f"a JSON object of at most {MAXIMUM_NBYTES} bytes")
    return found


def parse_map(document: Mapping[str, object], name: str) -> Map:
    """Return the map that a document says; errors are those of `read_map`."""
    if LIKE in document:
        base = document[LIKE]
        if not isinstance(base, str) or base not in shipped() or base == name:
            _refuse(name, "unusable like", f"a map that comes with zckpt: {', '.join(shipped())}")
        document = {**_read_shipped(base), **{key: value for key, value in document.items() if key != LIKE}}
    strange = sorted(document.keys() - KEYS)
    if strange:
        _refuse(name, f"a map has no {strange[0]}", ", ".join(sorted({*KEYS, LIKE})))
    sides = document.get("sides")
    if not _is_texts(sides) or len(sides) != 2 or sides[0] == sides[1]:
        _refuse(name, "unusable sides", 'two names, {"sides": ["mine", "theirs"]}')
    first, second = sides
    rules = document.get("rules")
    if not isinstance(rules, list) or not rules:
        _refuse(name, "unusable rules", "a list of them")
    sizes = {key: _sizes(value, f"{name}: size {key}") for key, value in _mapping(document, "sizes", name).items()}
    parsed = tuple(_rule(one, (first, second), f"{name}: rule {number}") for number, one in enumerate(rules, 1))
    settings = _mapping(document, "settings", name)
    if not all(isinstance(value, (str, int, float)) for value in settings.values()):
        _refuse(name, "unusable settings", "texts, numbers, true or false")

    def pair(key: str, of: Callable[[object, str], One], empty: object) -> tuple[One, One]:
        """Return what is said of each side under a key."""
        found = _mapping(document, key, name)
        if found.keys() - {first, second}:
            _refuse(name, f"unusable {key}", f"{first} and {second}")
        one, other = (empty if (its := found.get(side)) is None else its for side in (first, second))
        return of(one, f"{name}: unusable {key}"), of(other, f"{name}: unusable {key}")

    def optimizer_rules(value: object, where: str) -> tuple[Rule, ...]:
        if not isinstance(value, list):
            raise UsageError(where, expected="a list of rules")
        return tuple(_rule(one, (first, second), where) for one in value)

    optimizer = pair("optimizer", optimizer_rules, [])
    for side, own in enumerate(optimizer):
        if any(one.padded or one.sides[0][0].axes is None or len(one.sides[side]) != 1 for one in own):
            _refuse(name, "unusable optimizer", f"one tensor of {sides[side]}, and arrangements")
    refused, other_refused = pair("refused", _texts_by_name, {})
    return Map(
        name, str(document.get("about", "")), (first, second), sizes, parsed, pair("tied", _texts_by_name, {}),
        pair("order", _templates, []), pair("ignored", _templates, []),
        (_reasons(refused, name), _reasons(other_refused, name)),
        optimizer, settings, pair("implied", lambda value, where: frozenset(_names(value, where)), []),
    )  # fmt: skip


def _refuse(where: str, message: str, expected: str) -> NoReturn:
    raise UsageError(f"{where}: {message}", expected=expected)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _mapping(document: Mapping[str, object], key: str, where: str) -> dict[str, object]:
    found = document.get(key, {})
    if not isinstance(found, dict):
        _refuse(where, f"unusable {key}", "an object")
    return found


def _texts_by_name(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not _is_texts([*value, *value.values()]):
        raise UsageError(where, expected="texts by names")
    return value


def _names(value: object, where: str) -> list[str]:
    if not _is_texts(value):
        raise UsageError(where, expected="a list of names")
    return value


def _templates(value: object, where: str) -> tuple[Template, ...]:
    return tuple(template(text, None, where) for text in _names(value, where))


def _reasons(refused: Mapping[str, str], where: str) -> tuple[tuple[Template, str], ...]:
    return tuple((template(text, None, where), why) for text, why in refused.items())


def _sizes(value: object, where: str) -> tuple[str, ...]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(one, (str, int)) and not isinstance(one, bool) for one in found):
        _refuse(where, "unusable", "an expression, or a list of which the first that can be told counts")
    return tuple(str(one) for one in found)


def template(text: str, axes: str | None, where: str) -> Template:
    """Return a template; errors are those of `read_map`."""
    seen: set[str] = set()
    first: dict[str, int] = {}
    pattern, end = "", 0
    if re.search(r"\}(?:[0-9]|\{[A-Za-z_])", text):
        _refuse(where, f"{text}: what follows a number is not told from it", "a text between, no digit first")
    for match in _INDEX.finditer(text):
        again = match[1] in seen
        pattern += re.escape(text[end : match.start()]) + (
            rf"(?P={match[1]})" if again else f"(?P<{match[1]}>0|[1-9][0-9]{{0,17}})"
        )
        if first.setdefault(match[1], int(match[2] or 0)) != int(match[2] or 0):
            _refuse(where, f"{text} counts {match[1]} in two ways", "one")
        seen.add(match[1])
        end = match.end()
    pattern += re.escape(text[end:])
    arranged = None if axes is None else parse_axes(axes, f"{where}: {text}")
    return Template(text, arranged, re.compile(pattern), {letter: number for letter, number in first.items() if number})


def _rule(value: object, names: tuple[str, str], where: str) -> Rule:
    if (
        not isinstance(value, dict)
        or value.keys() - {*names, "padded", "beside"}
        or names[0] not in value
        or names[1] not in value
    ):
        _refuse(where, "unusable", f"{names[0]} and {names[1]}, and perhaps padded and beside")
    padded = value.get("padded", [])
    if not _is_texts(padded) or len(padded) > 1:
        _refuse(where, "unusable padded", "a list of one letter")
    sides = (_side(value[names[0]], where), _side(value[names[1]], where))
    rule = Rule(sides, tuple(padded))
    rule = replace(rule, beside=_beside(value.get("beside", {}), names, rule.shared, where))
    every = [*sides[0], *sides[1]]
    if any(one.axes is None for one in every):
        if len(every) != 2 or any(one.axes is not None for one in every):
            _refuse(where, "some tensors have no arrangement", "that of all, or of none where one tensor is one")
        if set(every[0].indices) != set(every[1].indices):
            _refuse(where, f"{every[0].text} and {every[1].text} have other letters", "the same in both names")
        return rule
    letters = [one.letters() for one in every]
    for one, own in zip(every, letters, strict=True):
        axes = [factor.name for axis in one.axes or () for factor in axis]
        if own != letters[0] or set(axes) & set(one.indices):
            _refuse(where, f"{one.text} has other letters than {every[0].text}", "each once, in the name or the axes")
    if set(padded) - letters[0]:
        _refuse(where, "unusable padded", f"letters of {', '.join(sorted(letters[0]))}")
    return rule


def _beside(
    value: object, names: tuple[str, str], shared: tuple[str, ...], where: str
) -> tuple[tuple[Template, ...], tuple[Template, ...]]:
    """Return the names that must be there for a rule to hold, by side."""
    if not isinstance(value, dict) or value.keys() - set(names):
        _refuse(where, "unusable beside", f"names of {names[0]} or {names[1]}")
    first, second = (_templates(value.get(name, []), f"{where}: unusable beside") for name in names)
    found = (first, second)
    if any(set(one.indices) - set(shared) for side in found for one in side):
        _refuse(where, "unusable beside", "letters that all names of the rule have")
    return found


def _side(value: object, where: str) -> tuple[Template, ...]:
    if isinstance(value, str) and value:
        return (template(value, None, where),)
    if not isinstance(value, dict) or not value or not _is_texts(list(value)):
        _refuse(where, "unusable", "a name, or arrangements by name")
    if not all(isinstance(axes, str) for axes in value.values()):
        _refuse(where, "unusable", 'arrangements such as "(heads half two) in"')
    return tuple(template(text, axes, where) for text, axes in value.items())
