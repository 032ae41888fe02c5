"""The order in which models of transformers have their parameters, by `model_type` of their configuration.

`architectures.txt` has it, for each kind of model:

= TYPE ...            types that are arranged alike
! NAME ...            modules that are a `torch.nn.LayerNorm`, which the Trainer knows by its class, not by a name
PATH: NAME ...        siblings in their order; `*` stands for numbers, `.` for the root and for the base model

It holds what versions 4.46, 4.57, 5.23 and 5.24 have in common: where they differ in the order of some siblings, none
is given. `tests/interop/test_architectures.py` compares it with the models of the version at hand.

`conversions.json`, made by `bench/transformers_tables.py`, has the types that transformers 5 trains under other names,
or in other tensors, than its files have: their order tells nothing of the optimizer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

from zckpt.immutable import mutable

ROOT = "."

LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""What PEFT adds to a module, in its order."""

TENSORS = ("weight", "bias")
"""Parameters of one module, in the order of all modules of torch."""


_WITH_HEAD = re.compile(r"For(?:CausalLM|ConditionalGeneration|MaskedLM|VisionText2Text)\b|LMHead")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|proj_out|embed_out|predictions\.decoder)\.weight$")
"""The output layer of a language model, and the models that have one."""

_SHARED, _EMBEDDING = (re.compile(rf"(?:^|\.){name}\.weight$") for name in ("shared", "embed_tokens"))
"""The embedding of encoder and decoder, and what each of the two calls it."""


@mutable
class Architecture:
    """What is known of the models of one type.

    `siblings`: in their order, by the path of the module that they are in.
    """

    siblings: dict[str, list[str]] = field(default_factory=dict)
    layer_norms: frozenset[str] = frozenset()

    def order(self, path: str, names: Sequence[str]) -> Sequence[str]:
        """Return those of some siblings whose order is known, in that order.

        Parameters
        ----------
        path : str
            Of the module that they are in, with `*` for numbers. A model with a head has the base model in a module.
        names : sequence of str
        """
        if any(name in LORA for name in names):
            return LORA
        inside = path.partition(".")[2]
        for one in (path or ROOT, inside or ROOT):
            known = self.siblings.get(one)
            if known is not None and set(names) <= {*known}:
                return known
        return TENSORS


@cache
def architectures() -> dict[str, Architecture]:
    """Return what is known of all types."""
    found: dict[str, Architecture] = {}
    one = Architecture()
    text = Path(__file__).with_name("architectures.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "=":
            one = Architecture()
            found |= dict.fromkeys(rest.split(), one)
        elif kind == "!":
            one.layer_norms = frozenset(rest.split())
        elif kind:
            one.siblings[kind.removesuffix(":")] = rest.split()
    return found


def architecture(model_type: object) -> Architecture:
    """Return what is known of a type, as a configuration says it; nothing of one that is not known."""
    return architectures().get(str(model_type), Architecture())


@cache
def _conversions() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("conversions.json").read_text(encoding="utf-8"))
    return found


def is_converted(config: Mapping[str, object] | None, *, in_any_version: bool = False) -> bool:
    """Tell whether transformers may train in another order, or `in_any_version` under other names, than in files.

    Since version 5 it converts models by tables for their types and those of their parts; 4.52 to 4.57 put other
    prefixes before the parts of models of several. What a version after that of the table has new is not known.
    """
    table = _conversions()
    said = table["transformers"] if in_any_version else str((config or {}).get("transformers_version", ""))
    if config is None or not re.match(r"[0-9]+\.[0-9]+", said):
        return False
    version, known = (tuple(map(int, text.split(".")[:2])) for text in (said, table["transformers"]))
    kinds = {*_model_types(config)}
    converted = kinds & {*table["converted"], *(table["renamed"] if in_any_version else ())}
    if version < (5, 0):
        return version >= (4, 52) and bool(converted) and len(kinds) > 1
    strange = kinds - converted - {*table["plain"]}
    return bool(converted or (strange and version > known and "auto_map" not in config))


def lacks_tied_name(config: Mapping[str, object] | None, names: Iterable[str]) -> bool:
    """Tell whether a model in memory has another name for its embedding than its files."""
    said, every = config or {}, list(names)
    if any(map(_SHARED.search, every)) and "architectures" in said:
        return not any(map(_EMBEDDING.search, every))
    has_head = said.get("tie_word_embeddings") is True and _WITH_HEAD.search(str(said.get("architectures")))
    return bool(has_head) and not any(map(_HEAD.search, every))


def _model_types(config: Mapping[str, object]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _model_types(value)
        elif key == "model_type" and isinstance(value, str):
            yield value
