"""What the letters of a rule are: from the shapes of the tensors, and from the configuration of the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed.axes.gpt_model import JOINED
from zckpt.formats.torch_files.tensors import arguments_of as attributes_of
from zckpt.immutable import immutable
from zckpt.naming.axes import Factor, evaluated, names_in
from zckpt.naming.document import Map, Rule, Template, read_json
from zckpt.state import Checkpoint, Shape, first_of

FILES = ("config.json", "params.json", "huggingface/config.json", "hf_config/config.json")
"""Where programs keep a model's numbers, in a checkpoint's folder."""

INSIDE = ("text_config", "llm_config")
"""Where the configuration of a model of several keeps that of its language model."""


def read_config(
    given: str | os.PathLike[str] | Mapping[str, object] | None, checkpoint: Checkpoint
) -> tuple[Mapping[str, object], str | None]:
    """Return a model's configuration: the one given, or that of the checkpoint's program; and where that was found.

    Only with the checkpoint is looked: the configuration of another model may have the same shapes. Raises UsageError:
    a file was given that cannot be read, or one is there that cannot be.
    """
    if given is not None:
        if isinstance(given, Mapping):
            return given, None
        inside = (Path(given) / name for name in FILES)
        return read_json(next((one for one in inside if one.is_file()), given)), None
    paths = [Path(path) for path in (checkpoint.source, checkpoint.opened) if path]
    for folder in dict.fromkeys(path if path.is_dir() else path.parent for path in paths):
        for name in FILES:
            if (folder / name).is_file():
                return read_json(folder / name), str(folder / name)
    found = arguments_of(checkpoint)
    return found, "the arguments in it" if found else None


ORDER = "query_key_value"
"""What Megatron-DeepSpeed's arguments say by one of their names: how queries, keys and values lie in one tensor."""


def arguments_of(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the arguments of Megatron-LM, or Megatron-DeepSpeed, in a checkpoint; empty where it has none."""
    found = {str(key): value for key, value in attributes_of(checkpoint.metadata.get("args")).items()}
    if found.get("group_query_attention") is False:
        found.pop("num_query_groups", None)  # Megatron-LM has 1 there for what is not used
    if "deepspeed" in found:  # and not Megatron-LM, whose order is always the first
        found[ORDER] = "end to end" if JOINED in found else "by heads"
    return found


def numbers_of(config: Mapping[str, object]) -> dict[str, int]:
    """Return the whole numbers in a configuration, those of its language model included."""
    return {key: value for one in _levels(config) for key, value in one.items() if type(value) is int}


def _levels(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [*(one for key in INSIDE if isinstance(one := config.get(key), Mapping)), config]


def check_settings(map_: Map, config: Mapping[str, object]) -> None:
    """Raise UnsupportedError if a configuration says that the weights are others than those that a map is about."""
    for key, value in map_.settings.items():
        for one in _levels(config):
            if one.get(key) is not None and one[key] != value:
                raise UnsupportedError(
                    f"the map {map_.name} does not apply to models with this {key}", expected=value, found=one[key]
                )


@immutable
class Tensor:
    """A tensor of one side of a rule: its template, the numbers in its name, its name, and its shape if it is there."""

    template: Template
    indices: Mapping[str, int]
    name: str
    shape: Shape | None = None


class Sizes:
    """The letters of one rule for some tensors that are there.

    Raises UsageError: a letter cannot be told, or a tensor has another shape than the rule says.
    """

    def __init__(self, map_: Map, rule: Rule, config: Mapping[str, int], tensors: Sequence[Tensor]) -> None:
        self._map, self._config, self._tensors = map_, config, tensors
        self._solved: dict[str, int] = {}
        self._asked: set[str] = set()
        late = [
            [factor.name, *names_in(f"{factor.low or ''} {factor.high or ''}")]
            for factor in rule.factors
            if factor.name in rule.padded
        ]
        self._late = {name for names in late for name in names}
        for letter in {letter for one in tensors for letter in one.indices} - set(rule.shared):
            self._solved[letter] = 1 + max(one.indices.get(letter, 0) for one in tensors)
        self._solve()
        self._late = set()
        for names in late:  # what nothing tells is as many as there are: no padding
            known = [size for name in names if (size := self.of(name)) is not None]
            for name in names if known else ():
                self._solved.setdefault(name, self._configured(name) or max(known))
        self._solve()
        for factor in rule.factors:
            low, high = self.bounds(factor)
            most = self.value(factor.name)
            if not 0 <= low <= high <= most:
                raise UsageError(
                    f"{self._map.name}: there are not that many {factor.name}",
                    expected=f"at most {most}",
                    found=f"{low} to {high}",
                    advice="the configuration belongs to another model" if late else None,
                )
        for one in tensors:
            expected = tuple(
                math.prod(high - low for low, high in map(self.bounds, axis)) for axis in one.template.axes or ()
            )
            if one.shape != expected:
                letters = sorted({factor.name for factor in one.template.factors})
                sizes = ", ".join(f"{name}={self.of(name)}" for name in letters)
                raise self._misshapen(one, f"{expected} with {sizes}")

    def of(self, name: str) -> int | None:
        """Return the size of a letter or name; None if it is not known."""
        if name in self._solved:
            return self._solved[name]
        return None if name in self._late else self._configured(name)

    def _configured(self, name: str) -> int | None:
        if name in self._asked:
            return None

        def known(other: str) -> int | None:
            return self._config[other] if other in self._config else self.of(other)

        self._asked.add(name)
        try:
            where = f"{self._map.name}: size {name}"
            values = (evaluated(one, known, where) for one in self._map.sizes.get(name, ()))
            return first_of(values)
        finally:
            self._asked.discard(name)

    def value(self, expression: str) -> int:
        """Return what an expression is: of a letter, how many values it has."""
        value = evaluated(expression, self.of, self._map.name)
        if value is not None:
            return value
        name = next((one for one in names_in(expression) if self.of(one) is None), expression)
        texts = self._map.sizes.get(name, ())
        raise UsageError(
            f"{self._map.name}: the shapes of {listed([one.name for one in self._tensors])} do not determine {name}",
            expected=f"a configuration with {' or '.join(texts)}" if texts else f"a size {name} in the map",
            advice="give --map-config FILE, the model's config.json or params.json",
        )

    def bounds(self, factor: Factor) -> tuple[int, int]:
        """Return from which to below which value a factor goes."""
        return self.value(factor.low or "0"), self.value(factor.high or factor.name)

    def _solve(self) -> None:
        """Tell sizes from shapes, as long as there is a dimension with one that is not known."""
        every = [
            (axis, size, one)
            for one in self._tensors
            for axis, size in zip(one.template.axes or (), one.shape or (), strict=False)
        ]
        at = 0
        while at < len(every):
            axis, size, of = every[at]
            values = [(factor.numel, evaluated(factor.numel, self.of, self._map.name)) for factor in axis]
            unknown = [text for text, value in values if value is None]
            known = math.prod(value for _, value in values if value is not None)
            at += 1
            if len(unknown) == 1 and unknown[0].isidentifier() and known > 0:
                if size % known:
                    told = " x ".join(text for text, value in values if value is not None)
                    raise self._misshapen(of, f"a multiple of {known}, which is {told}")
                self._solved[unknown[0]] = size // known
                at = 0  # it may tell of others

    def _misshapen(self, of: Tensor, expected: str) -> UsageError:
        return UsageError(
            f"{self._map.name}: {of.name} has another shape",
            expected=expected,
            found=of.shape,
            advice="check that the configuration is this model's",
        )
