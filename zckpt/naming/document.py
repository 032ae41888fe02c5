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

or, of a model whose names stay, {"taken": {"model.layers.{l}.": "0-23,8-31"}} alone, which `axes` describes

or what another map is but for some keys: {"like": "llama-huggingface-meta", "about": ..., "settings": {...}}, with
"more" rules before its own, which hold "again" under other beginnings of names
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import NoReturn, TypeGuard

from zckpt.errors import UsageError
from zckpt.immutable import immutable
from zckpt.naming.axes import Axes, Factor, Taken, evaluated, names_in, parse_axes, parse_taken, within
from zckpt.state import are_texts, first_of, without

_INDEX = re.compile(r"\{([A-Za-z_]\w*)(?:\+([0-9]{1,4}|[A-Za-z_]\w*))?\}")
_NUMBER = re.compile(r"\{=([^{}]*)\}")
_PREFIX = re.compile(r"[^\s\"\\,:\]}][^\"\\]*")
_BEHIND = re.compile(r"(\{[A-Za-z_]\w*\+)([A-Za-z_]\w*)(?=\})")

MAXIMUM_NBYTES = 1 << 22
"""Of a map, or a configuration."""

KEYS = frozenset({
    "about", "sides", "sizes", "rules", "tied", "order", "ignored", "refused", "optimizer", "settings", "implied",
    "copies", "taken",
})  # fmt: skip
LIKE, MORE, AGAIN = "like", "more", "again"


@immutable
class Template:
    """The names of like tensors, `model.layers.{l}.mlp.up_proj.weight`, and how their elements are arranged."""

    text: str
    axes: Axes | None  # None: as they are on the other side
    pattern: re.Pattern[str] = field(compare=False, repr=False)
    first: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Where the number in the name is not 0 for a letter's first value."""
    behind: str = ""
    """A size which nothing has told yet, that the name counts from: no name is such a one then."""

    @property
    def indices(self) -> tuple[str, ...]:
        """The letters in the name."""
        return tuple(self.pattern.groupindex)

    def name(self, indices: Mapping[str, int]) -> str:
        """Return the name with numbers for its letters; UsageError: one is not known."""
        if self.behind:
            raise _untold(self.text, (self.behind,), None)
        return _INDEX.sub(lambda match: str(indices[match[1]] + self.first.get(match[1], 0)), self.text)

    def numbers(self, name: str) -> dict[str, int] | None:
        """Return the values of the letters in a name; None if it is not such a name."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        found = {letter: int(value) - self.first.get(letter, 0) for letter, value in match.groupdict().items()}
        return found if all(value >= 0 for value in found.values()) else None

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All that the axes have."""
        return tuple(factor for axis in self.axes or () for factor in axis)

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of the name and of the axes."""
        return (*self.indices, *(factor.name for factor in self.factors))


Templates = tuple[Template, ...]


@immutable
class Rule:
    """Tensors of one side that are the same elements as those of the other."""

    sides: tuple[Templates, ...]  # two
    padded: tuple[str, ...]
    """Letters of which one side may have more values: these are padding, zero where they are added."""
    beside: tuple[Templates, ...] = ((), ())
    """For each side, names that must be there, too, for it to hold from there to the other; they follow other rules."""
    copied: tuple[str, ...] = ()
    """Letters that one side alone has: what it has of each of their values is a copy of what the other has."""

    @property
    def shared(self) -> tuple[str, ...]:
        """The letters that are in all names: the rule holds for each number of theirs by itself."""
        every = [template.indices for side in self.sides for template in side]
        return tuple(one for one in every[0] if all(one in other for other in every))

    @property
    def factors(self) -> list[Factor]:
        """All that the tensors of both sides have."""
        return [factor for side in self.sides for template in side for factor in template.factors]


@immutable
class Side:
    """One of the two ways."""

    name: str
    tied: dict[Template, Template]  # names that are, where no rule gives them, other names of others
    order: Templates  # the tensors in the order of its program; may be empty
    ignored: Templates  # tensors that the other side needs not, for they follow from its configuration
    refused: dict[Template, str]  # tensors for which the other side has no place, and what they are
    optimizer: tuple[Rule, ...]
    """Where its program has parameters that it takes apart when it saves the model, and not when it saves the
    optimizer: rules of the optimizer's own tensors.
    """
    implied: frozenset[str]  # names that the other side has not where they are other names of a tensor
    copies: dict[Template, Template]  # tensors that the other side has not, for they are equal to another


@immutable
class Map:
    """Two ways to name and arrange the same weights.

    Parameters
    ----------
    name : str
    about : str
    sides : pair of Side
    sizes : dict of str to tuple of str
        For each letter or name, expressions of which the first that can be told counts.
    rules : tuple of Rule
    settings : dict of str to object
        What the configuration must say, where it says it: values that make other weights of the same arrangement.
    document : mapping
        That says so.
    taken : sequence of Taken
        In a map without rules, whose sides have the same names.
    """

    name: str
    about: str
    sides: tuple[Side, Side]
    sizes: dict[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    settings: dict[str, object]
    document: Mapping[str, object] = field(repr=False, compare=False)
    taken: Sequence[Taken] = ()

    def numbered(self, config: Mapping[str, int]) -> Map:
        """Return the map whose names have the numbers of a model: `{=layers+2}.weight`, the norm behind the layers.

        Raises
        ------
        UsageError
            One is not known, or is less than 0.
        """

        def known(name: str) -> int | None:
            found = (config.get(one) if one.isidentifier() else None for one in self.sizes.get(name, (name,)))
            return first_of(found)

        def number(match: re.Match[str]) -> str:
            value = evaluated(match[1], known, self.name)
            if value is None or value < 0:
                raise _untold(
                    match[1], [key for name in names_in(match[1]) for key in self.sizes.get(name, (name,))], value
                )
            return str(value)

        before = json.dumps(self.document)
        text = _BEHIND.sub(lambda match: f"{match[1]}{known(match[2]) or match[2]}", _NUMBER.sub(number, before))
        return self if text == before else parse_map(json.loads(text), self.name)


def _untold(what: str, keys: Sequence[str], found: int | None) -> UsageError:
    return UsageError(
        f"names contain {what}, whose values are unknown",
        expected=f"a configuration with {' or '.join(keys)}",
        found=found,
        advice="give --map-config FILE, the model's config.json",
    )


def shipped() -> list[str]:
    """Return the names of the maps that come with zckpt."""
    folder = resources.files("zckpt.naming").joinpath("shipped")
    return sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))


def read_map(source: str | os.PathLike[str] | Mapping[str, object]) -> Map:
    """Return a map: a shipped one by its name, or that of a file.

    Raises UsageError: there is none, or it is malformed.
    """
    if isinstance(source, Mapping):
        return parse_map(source, "the map")
    name = os.fspath(source)
    if name in shipped():
        return parse_map(_read_shipped(name), name)
    if not Path(name).is_file():
        near = get_close_matches(name, shipped(), cutoff=0.5)
        found = f", such as {' or '.join(near)}" if near else ""
        raise UsageError(
            f"there is no map {name}", expected=f"transformers, a JSON file, or a map that `zckpt formats` lists{found}"
        )
    return parse_map(read_json(name), name)


def _read_shipped(name: str) -> dict[str, object]:
    text = resources.files("zckpt.naming").joinpath("shipped").joinpath(f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)
    return found


def read_json(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """Return what a JSON file holds, which must be an object.

    Raises UsageError: it cannot be read.
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
    with within(name):
        document = _again(_like(document))
        strange = sorted(document.keys() - KEYS)
        if strange:
            _refuse(f"a map has no {strange[0]}", ", ".join(sorted({*KEYS, LIKE, MORE, AGAIN})))
        about = str(document.get("about", ""))
        if "taken" in document:
            said = _mapping(document, "taken")
            if document.keys() - {"about", "taken"} or not said or not _is_texts([*said, *said.values()]):
                _refuse("unusable taken", "layers and rows to take, in a map without other keys")
            taken = [parse_taken(front, template(front).pattern, str(text)) for front, text in said.items()]
            names = ["before", "after"]
            return Map(name, about, (_side({}, 0, names), _side({}, 1, names)), {}, (), {}, document, taken)
        found = document.get("sides")
        if not _is_texts(found) or len(found) != 2 or found[0] == found[1]:
            _refuse("unusable sides", 'two names, {"sides": ["mine", "theirs"]}')
        sizes = {}
        for key, value in _mapping(document, "sizes").items():
            several = value if isinstance(value, list) else [value]
            if not several or not all(isinstance(one, (str, int)) and not isinstance(one, bool) for one in several):
                _refuse(f"size {key}: unusable", "an expression, or a list whose first computable one counts")
            sizes[key] = tuple(map(str, several))
        settings = _mapping(document, "settings")
        if not all(isinstance(value, (str, int, float)) for value in settings.values()):
            _refuse("unusable settings", "texts, numbers, true or false")
        sides, rules = (_side(document, 0, found), _side(document, 1, found)), list[Rule]()
        for number, one in enumerate(_rules_of(document), 1):
            with within(f"rule {number}"):
                rules.append(_rule(one, found))
        return Map(name, about, sides, sizes, tuple(rules), settings, document)


def _rules_of(document: Mapping[str, object]) -> list[object]:
    rules = document.get("rules")
    if not isinstance(rules, list) or not rules:
        _refuse("unusable rules", "a list of them")
    return rules


def _like(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return a document with all that it has like another, whose rules come behind those that it has more."""
    if LIKE not in document:
        return document
    base, more = document[LIKE], document.get(MORE, [])
    if not isinstance(base, str) or base not in shipped():
        _refuse("unusable like", f"a map that comes with zckpt: {', '.join(shipped())}")
    made = {**_like(_read_shipped(base)), **document}
    if not isinstance(more, list) or not isinstance(made["rules"], list):
        _refuse("unusable rules, or more", "a list of them")
    return without(made, LIKE, MORE) | {"rules": [*more, *made["rules"]]}


def _again(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return a document whose rules hold under other beginnings of names first, and the order of these names."""
    if AGAIN not in document:
        return document
    spellings, rules = document[AGAIN], _rules_of(document)
    if not isinstance(spellings, list) or not all(
        isinstance(one, dict) and _is_texts(texts := [*one, *one.values()]) and all(map(_PREFIX.fullmatch, texts))
        for one in spellings
    ):
        _refuse("unusable again", "a list of name prefixes, and what they become")
    made = [
        json.loads(reduce(lambda text, pair: text.replace(f'"{pair[0]}', f'"{pair[1]}'), spelling.items(), text))
        for spelling in spellings
        for text in map(json.dumps, rules)
        if all(f'"{old}' in text for old in spelling)
    ]
    pairs = [pair for spelling in spellings for pair in spelling.items()]
    order = {
        side: [
            one
            for text in texts
            for one in [
                new + rest[len(old) :] for old, new in pairs if new == text for rest in texts if rest.startswith(old)
            ]
            or [text]
        ]
        if _is_texts(texts)
        else texts
        for side, texts in _mapping(document, "order").items()
    }
    return without(document, AGAIN) | {"rules": [*made, *rules], "order": order}


def _refuse(message: str, expected: str) -> NoReturn:
    raise UsageError(message, expected=expected)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _mapping(document: Mapping[str, object], key: str) -> dict[str, object]:
    found = document.get(key, {})
    if not isinstance(found, dict):
        _refuse(f"unusable {key}", "an object")
    return found


def _side(document: Mapping[str, object], number: int, names: list[str]) -> Side:
    """Return what a document says of one of its sides."""
    name = names[number]

    def said(key: str, empty: object) -> object:
        found = _mapping(document, key)
        if found.keys() - set(names):
            _refuse(f"unusable {key}", " and ".join(names))
        return empty if found.get(name) is None else found[name]

    def texts(key: str) -> list[str]:
        value = said(key, [])
        if not _is_texts(value):
            _refuse(f"unusable {key}", "a list of names")
        return value

    def by_name(key: str) -> dict[str, str]:
        value = said(key, {})
        if not isinstance(value, dict) or not _is_texts([*value, *value.values()]):
            _refuse(f"unusable {key}", "texts by names")
        return value

    def pairs(key: str) -> dict[Template, Template]:
        found = {template(one): template(of) for one, of in by_name(key).items()}
        for one, of in found.items():
            made, known = (one, of) if key == "tied" else (of, one)
            if set(made.indices) - set(known.indices):
                _refuse(f"unusable {key}", f"letters in {made.text} that {known.text} has, too")
        return found

    rules = said("optimizer", [])
    if not isinstance(rules, list):
        _refuse("unusable optimizer", "a list of rules")
    with within("unusable optimizer"):
        optimizer = tuple(_rule(one, names) for one in rules)
    if any(one.padded or one.sides[0][0].axes is None or len(one.sides[number]) != 1 for one in optimizer):
        _refuse("unusable optimizer", f"one tensor of {name}, and arrangements")
    return Side(
        name,
        pairs("tied"),
        tuple(map(template, texts("order"))),
        tuple(map(template, texts("ignored"))),
        {template(text): why for text, why in by_name("refused").items()},
        optimizer,
        frozenset(texts("implied")),
        pairs("copies"),
    )


def template(text: str, axes: str | None = None) -> Template:
    """Return a template; errors are those of `read_map`."""
    first: dict[str, int] = {}
    pattern, end, behind = "", 0, ""
    if re.search(r"\}(?:[0-9]|\{[A-Za-z_])", text):
        _refuse(f"{text}: a number and what follows it cannot be told apart", "a text between, no digit first")
    for match in _INDEX.finditer(text):
        letter, after = match[1], match[2] or "0"
        behind = behind if after.isdecimal() else after
        begin = int(after) if after.isdecimal() else 0
        value = f"(?P={letter})" if letter in first else f"(?P<{letter}>{'(?!)' if behind else '0|[1-9][0-9]{0,17}'})"
        pattern += re.escape(text[end : match.start()]) + value
        if first.setdefault(letter, begin) != begin:
            _refuse(f"{text} counts {letter} in two ways", "one")
        end = match.end()
    pattern += re.escape(text[end:])
    with within(text):
        arranged = None if axes is None else parse_axes(axes)
    told = {letter: number for letter, number in first.items() if number}
    return Template(text, arranged, re.compile(pattern), told, behind)


def _rule(value: object, names: list[str]) -> Rule:
    keys = {*names, "padded", "beside", "copied"}
    if not isinstance(value, dict) or value.keys() - keys or not set(names) <= value.keys():
        _refuse("unusable", f"{' and '.join(names)}, and perhaps padded, beside and copied")
    padded, beside, copied = value.get("padded", []), value.get("beside", {}), value.get("copied", [])
    if not _is_texts(padded) or len(padded) > 1:
        _refuse("unusable padded", "a list of one letter")
    if not _is_texts(copied) or set(copied) & set(padded):
        _refuse("unusable copied", "a list of letters that are not padded")
    if not isinstance(beside, dict) or beside.keys() - set(names):
        _refuse("unusable beside", f"names of {' or '.join(names)}")
    others = []
    for name in names:
        texts = beside.get(name, [])
        if not _is_texts(texts):
            _refuse("unusable beside", "a list of names")
        with within("unusable beside"):
            others.append(tuple(map(template, texts)))
    rule = Rule(tuple(_tensors(value[name]) for name in names), tuple(padded), tuple(others), tuple(copied))
    if any(set(one.indices) - set(rule.shared) for side in others for one in side):
        _refuse("unusable beside", "letters that all names of the rule have")
    first, *rest = every = [*rule.sides[0], *rule.sides[1]]
    if any(one.axes is None for one in every):
        if len(every) != 2 or any(one.axes is not None for one in every) or copied:
            _refuse("some tensors have no arrangement", "the state of all, or of none if one tensor has none")
        if set(first.indices) != set(rest[0].indices):
            _refuse(f"{first.text} and {rest[0].text} have other letters", "the same in both names")
        return rule
    _check_letters(rule)
    return rule


def _check_letters(rule: Rule) -> None:
    """Raise UsageError unless both sides have the same letters, but for those that are copied."""
    first, *_ = every = [*rule.sides[0], *rule.sides[1]]
    for letter in rule.copied:
        holders = [{letter in one.letters for one in side} for side in rule.sides]
        if holders not in ([{True}, {False}], [{False}, {True}]):
            _refuse(f"unusable copied {letter}", "a letter of all tensors of one side, and none of the other")
    for one in every:
        other = (set(one.letters) ^ set(first.letters)) - set(rule.copied)
        if other or len(set(one.letters)) != len(one.letters):
            _refuse(f"{one.text} has other letters than {first.text}", "each once, in the name or the axes")
    if set(rule.padded) - set(first.letters):
        _refuse("unusable padded", f"letters of {', '.join(sorted(first.letters))}")


def _tensors(value: object) -> Templates:
    """Return what a rule says of one side."""
    if isinstance(value, str) and value:
        return (template(value),)
    if not isinstance(value, dict) or not value or not _is_texts(list(value)):
        _refuse("unusable", "a name, or arrangements by name")
    if not are_texts(value.values()):
        _refuse("unusable", 'arrangements such as "(heads half two) in"')
    return tuple(template(text, axes) for text, axes in value.items())
