"""The map of a model's own conversions: what the installed transformers does to its tensors when it saves them.

    python zckpt/naming/traced.py < config.json > map.json

It is a process of its own: a model of the configuration is made without memory, and transformers' code for saving is
run on tensors that have no elements, only a note of where each element comes from. So any operation that cuts, joins,
transposes or reshapes becomes a map, and another one is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

Factor = tuple[int, int, int]
"""A letter, by number, from a value to below another."""

SIDES = ["file", "memory"]


class NoMapError(Exception):
    """What a map cannot say."""


class LacksError(NoMapError, AttributeError):
    """What a traced tensor has not, of a torch one's attributes; those who ask whether it has them are told so."""


class Letters:
    """What all tensors are counted by; a letter may turn out to be others."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._made_of: dict[int, list[Factor]] = {}

    def new(self, size: int) -> Factor:
        """Return a new letter, whole."""
        self.sizes.append(size)
        return len(self.sizes) - 1, 0, size

    def define(self, factor: Factor, as_: list[Factor]) -> None:
        """Let a whole letter be others."""
        letter, low, high = factor
        if (low, high) != (0, self.sizes[letter]) or letter in self._made_of:
            raise NoMapError("it cuts what is already cut in another way")
        if as_ != [factor]:
            self._made_of[letter] = as_

    def resolved(self, factors: Iterable[Factor]) -> list[Factor]:
        """Return factors by what their letters turned out to be."""
        found: list[Factor] = []
        for letter, low, high in factors:
            made = self._made_of.get(letter)
            if made is None:
                found.append((letter, low, high))
            elif (low, high) == (0, self.sizes[letter]):
                found += self.resolved(made)
            elif len(made) == 1:
                found += self.resolved([(made[0][0], made[0][1] + low, made[0][1] + high)])
            else:
                found += self.resolved(self.cut(self.resolved(made), low, high))
        return found

    def cut(self, factors: list[Factor], low: int, high: int) -> list[Factor]:
        """Return the elements of a dimension from one to below another."""
        (letter, begin, _), *rest = factors
        inner = numel(rest)
        if low % inner or high % inner:
            raise NoMapError("it cuts through dimensions that are counted together")
        return [(letter, begin + low // inner, begin + high // inner), *rest]


def numel(factors: Iterable[Factor]) -> int:
    """Return how many elements factors have."""
    return math.prod(high - low for _, low, high in factors)


class Traced:
    """A tensor without elements, in whose place torch's functions take it."""

    def __init__(self, letters: Letters, axes: list[list[Factor]], roots: frozenset[str]) -> None:
        self._letters, self._axes, self.roots = letters, axes, roots
        self.extra: list[Factor] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # noqa: ANN401  # conversions ask whether it is one
        import torch

        return torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        name = function.__name__
        own = joined if name in ("cat", "concat") else getattr(cls, name, None)
        if own is None:
            raise NoMapError("it stacks tensors in the file" if name == "stack" else f"it calls {name}")
        return own(
            *args, **{{"dim0": "first", "dim1": "second"}.get(key, key): one for key, one in (kwargs or {}).items()}
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise LacksError(f"it calls {name}")

    def __getitem__(self, _: object) -> Any:  # noqa: ANN401
        raise NoMapError("it takes elements by their index")

    @property
    def axes(self) -> list[list[Factor]]:
        """The factors of each dimension."""
        return [self._letters.resolved(axis) for axis in self._axes]

    @property
    def shape(self) -> tuple[int, ...]:
        """As a tensor's."""
        return tuple(numel(axis) for axis in self.axes)

    @property
    def ndim(self) -> int:
        """As a tensor's."""
        return len(self._axes)

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As a tensor's."""
        return math.prod(self.shape)

    def contiguous(self) -> Traced:
        """As a tensor's."""
        return self

    def _with(self, axes: list[list[Factor]]) -> Traced:
        return Traced(self._letters, axes, self.roots)

    def transpose(self, first: int, second: int) -> Traced:
        """As a tensor's."""
        axes = self.axes
        axes[first], axes[second] = axes[second], axes[first]
        return self._with(axes)

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Traced, ...]:
        """As a tensor's."""
        whole = self.shape[dim]
        sizes = [min(size, whole - low) for low in range(0, whole, size)] if isinstance(size, int) else [*size]
        found, low = [], 0
        for one in sizes:
            axes = self.axes
            axes[dim] = self._letters.cut(axes[dim], low, low + one)
            found.append(self._with(axes))
            low += one
        return tuple(found)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
        """As a tensor's."""
        return self.split(-(-self.shape[dim] // chunks), dim)

    def squeeze(self, dim: int) -> Traced:
        """As a tensor's; what one value was taken of goes to a dimension beside it."""
        axes = self.axes
        if numel(axes[dim]) != 1:
            return self
        own = axes.pop(dim)
        if not axes:
            raise NoMapError("it makes a single number")
        beside = min(dim % (len(axes) + 1), len(axes) - 1)
        axes[beside] = own + axes[beside]
        return self._with(axes)

    def unbind(self, dim: int = 0) -> tuple[Traced, ...]:
        """As a tensor's."""
        return tuple(one.squeeze(dim) for one in self.split(1, dim))

    def reshape(self, *shape: Any) -> Traced:  # noqa: ANN401
        """As a tensor's."""
        wanted = [*shape[0]] if len(shape) == 1 and not isinstance(shape[0], int) else [*shape]
        if -1 in wanted:
            wanted[wanted.index(-1)] = self.numel() // -math.prod(wanted)
        rest = [factor for axis in self.axes for factor in axis]
        axes: list[list[Factor]] = []
        for size in wanted:
            axis: list[Factor] = []
            while rest and (numel(axis) < size or numel(rest[:1]) == 1):
                factor = rest.pop(0)
                left = size // numel(axis)
                if numel([factor]) > left:
                    if size % numel(axis) or numel([factor]) % left:
                        raise NoMapError("it reshapes sizes that do not divide")
                    parts = [self._letters.new(left), self._letters.new(numel([factor]) // left)]
                    self._letters.define(factor, parts)
                    factor = parts[0]
                    rest.insert(0, parts[1])
                axis.append(factor)
            if numel(axis) != size:
                raise NoMapError("it reshapes sizes that do not divide")
            axes.append(axis)
        return self._with(axes)

    view = reshape


def joined(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    """Return what `torch.cat` does."""
    first, letters = tensors[0], tensors[0]._letters
    if len(tensors) == 1:
        return first
    axes = first.axes
    for one in tensors[1:]:
        for number, other in enumerate(one.axes):
            own = first.axes[number]
            if number == dim % len(axes):
                continue
            if [numel([factor]) for factor in own] != [numel([factor]) for factor in other]:
                raise NoMapError("it joins tensors that are cut in different ways")
            for mine, its in zip(own, other, strict=True):
                if mine != its:
                    letters.define(its, [mine])
    whole, low = letters.new(sum(one.shape[dim] for one in tensors)), 0
    if any(len(one.axes[dim]) != 1 for one in tensors):
        raise NoMapError("it joins tensors that are arranged differently")
    for one in tensors:
        letters.define(one.axes[dim][0], [(whole[0], low, low + one.shape[dim])])
        low += one.shape[dim]
    axes[dim] = [whole]
    return Traced(letters, axes, frozenset().union(*(one.roots for one in tensors)))


def rules_of(live: dict[str, Traced], saved: dict[str, Traced], letters: Letters) -> list[dict[str, Any]]:
    """Return the rules of a map, each for all layers that are alike."""
    groups: dict[frozenset[str], list[str]] = {}
    of_root: dict[str, frozenset[str]] = {}
    for name, one in saved.items():
        roots, names = one.roots, [name]
        near = {of_root[root] for root in roots if root in of_root}
        joined = [its for its in groups if its in near] if len(near) > 1 else near  # in order; one needs no search
        for its in joined:
            roots, names = roots | its, groups.pop(its) + names
        groups[roots] = names
        of_root |= dict.fromkeys(roots, roots)
    lost = live.keys() - frozenset().union(*groups)
    if lost:
        raise NoMapError(f"it leaves out {min(lost)}")
    made = (
        ({name: saved[name] for name in names}, {name: one for name, one in live.items() if name in roots})
        for roots, names in groups.items()
    )
    return _repeated([_rule(file, memory, letters) for file, memory in made])


def _rule(file: dict[str, Traced], memory: dict[str, Traced], letters: Letters) -> dict[str, Any]:
    """Return the rule of tensors that are made of each other."""
    if len(file) == 1 and [*file.values()] == [*memory.values()]:
        return {"file": min(file), "memory": min(memory)}
    texts: dict[int, str] = {}

    def text(factor: Factor) -> str:
        letter, low, high = factor
        size = letters.sizes[letter]
        if letter not in texts:
            texts[letter] = f"n{size}_{sum(letters.sizes[other] == size for other in texts)}"
        return texts[letter] if (low, high) == (0, size) else f"{texts[letter]}[{low}:{high}]"

    def written(tensors: dict[str, Traced]) -> dict[str, str]:
        return {name: " ".join(f"({' '.join(map(text, axis))})" for axis in one.axes) for name, one in tensors.items()}

    its = written(memory)  # whose letters come first
    return {"file": _numbered(written(file)), "memory": its}


def _numbered(tensors: dict[str, str]) -> dict[str, str]:
    """Return tensors of which each has one value of a letter, which is a number in its name, as one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, axes in tensors.items():
        for match in re.finditer(r"(n(\d+)_\d+)\[(\d+):\d+\] ?", axes):
            steps = name.split(".")
            for at, step in enumerate(steps):
                if step == match[3]:
                    pattern = ".".join([*steps[:at], f"{{{match[1]}}}", *steps[at + 1 :]])
                    found.setdefault((pattern, axes.replace(match[0], ""), match[2]), []).append(name)
    rest, named = dict(tensors), {}
    for (pattern, axes, size), names in found.items():
        if len(names) == int(size) and all(name in rest for name in names):
            named[pattern] = axes
            for name in names:
                del rest[name]
    return named | rest


def _repeated(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rules that differ in a number only, such as that of a layer, as one."""

    def named(rule: dict[str, Any]) -> list[tuple[str, str]]:
        return [(side, name) for side, its in rule.items() for name in ([its] if isinstance(its, str) else its)]

    def general(rule: dict[str, Any]) -> dict[str, Any]:
        numbers = {tuple(step for step in name.split(".") if step.isdecimal()) for _, name in named(rule)}
        if len(numbers) != 1:
            return rule

        def template(name: str) -> str:
            letter = (f"{{l{number}}}" for number in count())
            return ".".join(next(letter) if step.isdecimal() else step for step in name.split("."))

        return {
            side: template(its) if isinstance(its, str) else {template(name): axes for name, axes in its.items()}
            for side, its in rule.items()
        }

    generals = [general(rule) for rule in rules]
    owners: dict[tuple[str, str], set[str]] = {}
    for one in generals:
        for where in named(one):
            owners.setdefault(where, set()).add(json.dumps(one))
    taken = {text for texts in owners.values() if len(texts) > 1 for text in texts}
    made = [rule if json.dumps(one) in taken else one for rule, one in zip(rules, generals, strict=True)]
    return [*{json.dumps(one): one for one in made}.values()]


def model_of(config: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return a model of a configuration, without memory."""
    import torch

    transformers: Any = import_module("transformers")
    kind, names = config.get("model_type"), config.get("architectures") or []
    if kind not in transformers.CONFIG_MAPPING:
        raise NoMapError(f"there is no model of type {kind}")
    found = transformers.CONFIG_MAPPING[kind].from_dict(config)
    owner = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        if owner is None:
            return transformers.AutoModel.from_config(found)
        return owner(found)


def map_of(model: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the map of a model's conversions, and the order of its parameters in memory."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    letters = Letters()
    shapes = {name: tuple(one.shape) for name, one in model.state_dict(keep_vars=True).items()}
    live = {
        name: Traced(letters, [[letters.new(size)] for size in shape], frozenset([name]))
        for name, shape in shapes.items()
    }
    saved = revert_weight_conversion(model, dict(live))
    rules = rules_of(live, saved, letters)
    said = json.dumps(rules)
    every = list(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tied = {name: owner for name, one in every if (owner := first.setdefault(id(one), name)) != name}
    return {
        "about": f"transformers {transformers.__version__} ({type(model).__name__})",
        "sides": SIDES,
        "sizes": dict(re.findall(r"\b(n(\d+)_\d+)\b", said)),
        "rules": rules,
        "order": {"memory": [name for name, _ in every]},
        "tied": {"memory": tied},
        "live": {
            "transformers": transformers.__version__,
            "trained": [name for name, one in model.named_parameters() if one.requires_grad],
            "layer_norms": sorted(
                {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.LayerNorm)}
            ),
        },
    }


def _number(found: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return infinity for what transformers writes for it, and everything else as it is."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def main(read: Callable[[], str] = sys.stdin.read) -> int:
    """Print the map of the configuration on standard input, or why there is none."""
    try:
        document: dict[str, Any] = map_of(model_of(json.loads(read(), object_hook=_number)))
    except Exception as error:  # noqa: BLE001  # another program's code, of which nothing is known
        document = {"refused": f"{error.__cause__ or error}".partition("\n")[0] or type(error).__name__}
    sys.stdout.write(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
