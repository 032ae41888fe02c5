"""Write the tables of what the installed transformers saves under other names than it trains with.

    python bench/transformers_tables.py        writes both

zckpt/formats/transformers_trainer/conversions.json has the types of models:

`converted`: types of which some class has conversions of its own, unless all parameters are in the same tree in the
file and in memory: each under one name, and names of a module one after the other in the model's order.
`plain`: all other types, so that one that a later version has is told from them; `renamed`: those of them that have
conversions.

zckpt/naming/transformers.json has the maps of their classes, for where transformers is not installed: what the trace
of a model of the default configuration says, with sizes that shapes tell. `rules`: of all classes, a name where it is
the same;
`classes`: for each the numbers of its rules, in the order of memory, and what else the trace tells; none where names
are the same. `TYPE CLASS`: of a type that has the class of another's models (SARVAM of GLM's) and other names in files.
`refused`: why a class has none.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, models
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from zckpt.errors import ZckptError
from zckpt.formats.transformers_trainer.architectures import architectures, is_converted
from zckpt.naming.apply import mapped
from zckpt.naming.document import parse_map
from zckpt.naming.installed import document_of
from zckpt.naming.traced import NoMapError, _repeated, map_of
from zckpt.state import Checkpoint, Parameter

TABLE = Path(__file__).parents[1] / "zckpt/formats/transformers_trainer/conversions.json"
MAPS = Path(__file__).parents[1] / "zckpt/naming/transformers.json"

MOST_LAYERS = 8
MOST_PARTS = 8
"""More parts of one tensor are experts, of which another configuration has another number."""


def classes() -> Iterator[type[PreTrainedModel]]:
    """Yield all classes of models."""
    for one in pkgutil.walk_packages(models.__path__, "transformers.models."):
        if ".modeling_" not in one.name:
            continue
        try:
            module = importlib.import_module(one.name)
        except ImportError as error:
            print(f"left out {one.name}: {error}")
            continue
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.__module__ == one.name:
                yield found


def has_same_tree(kind: str) -> bool:
    """Tell whether the file's names of a type are those of the same tree, in an order that is known as theirs."""
    for factory in (AutoModel, AutoModelForCausalLM):
        config = fewer_layers(CONFIG_MAPPING[kind](), more=True)  # of two, experts may be in none
        if type(config) not in factory._model_mapping:  # there is none of this type
            continue
        with torch.device("meta"):
            model = factory.from_config(config)
        live = dict(model.named_parameters())
        saved = {id(one): name for name, one in revert_weight_conversion(model, live).items()}
        if saved.keys() != {id(one) for one in live.values()}:
            return False
        last: dict[str, int] = {}
        siblings: dict[str, dict[str, None]] = {}
        for at, one in enumerate(live.values()):
            steps = saved[id(one)].split(".")
            for count, step in enumerate(steps):
                module = ".".join(steps[:count])
                if last.get(module, at - 1) != at - 1:
                    return False
                last[module] = at
                if not step.isdecimal():
                    siblings.setdefault(re.sub(r"\b[0-9]+\b", "*", module), {})[step] = None
        for module, own in siblings.items():
            order = [step for step in architectures()[kind].order(module, [*own]) if step in own]
            if order != [step for step in own if step in order]:
                return False
    return True


def table() -> dict[str, object]:
    """Return the table."""
    every, converted = set(CONFIG_MAPPING), set()
    for one in classes():
        kind = getattr(one.config_class, "model_type", None)
        if kind:
            every.add(kind)
            if any(get_checkpoint_conversion_mapping(name) is not None for name in (one.__name__, kind)):
                converted.add(kind)
    converted |= {kind for kind in every if get_checkpoint_conversion_mapping(kind) is not None}
    same = {kind for kind in converted & architectures().keys() if has_same_tree(kind)}
    return {
        "transformers": transformers.__version__,
        "converted": sorted(converted - same),
        "plain": sorted(every - converted | same),
        "renamed": sorted(same),
    }


def fewer_layers(config: PreTrainedConfig, *, more: bool) -> PreTrainedConfig:
    """Let a model have layers of all kinds, and not many; `more`: with what others may have."""
    most = {
        key: value for key, value in vars(config).items()
        if type(value) is int and value > MOST_LAYERS and re.search(r"num_.*layers$|_layers$|^depth$", key)
    }  # fmt: skip
    for key, value in list(vars(config).items()):
        if key in most:
            setattr(config, key, MOST_LAYERS)
        elif isinstance(value, list) and len(value) in most.values():
            setattr(config, key, value[:MOST_LAYERS])
        elif isinstance(value, PreTrainedConfig):
            fewer_layers(value, more=more)
        elif more and key.endswith("_bias") and value is False:
            setattr(config, key, True)
        elif more and key == "first_k_dense_replace" and value == 0:
            setattr(config, key, 1)
        elif more and key == "mlp_only_layers" and not value:
            setattr(config, key, [0])
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = True
    return config


def without_sizes(rule: dict[str, Any]) -> dict[str, Any]:
    """Return a rule of a trace whose letters are told by shapes, but for how many parts one is cut into."""
    if isinstance(rule["file"], str):
        return rule
    said = json.dumps([rule["memory"], rule["file"]])
    cuts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for letter, low, high in re.findall(r"(n[0-9]+_[0-9]+)\[([0-9]+):([0-9]+)\]", said):
        cuts[letter].append((int(low), int(high)))
    for at, letter in enumerate(dict.fromkeys(re.findall(r"\bn[0-9]+_[0-9]+\b", said))):
        size, widths = int(letter[1:].partition("_")[0]), {high - low for low, high in cuts[letter]}
        parts = size // min(widths) if widths else 1
        if len(widths) > 1 or parts > MOST_PARTS or any(low % size * parts % size for low, _ in cuts[letter]):
            raise NoMapError("cuts into parts that only a configuration tells")
        for low, high in cuts[letter]:
            said = said.replace(f"{letter}[{low}:{high}]", f"n{parts}_{at}[{low * parts // size}] d{at}")
        said = re.sub(rf"\b{letter}\b", f"n{parts}_{at} d{at}" if widths else f"d{at}", said)
    memory, file = json.loads(said)
    return {"file": file, "memory": memory}


def in_places(order: list[str]) -> list[str]:
    """Return names in an order, each for all its numbers; what a layer has for the first time is among its others."""

    def layer(at: int) -> str | None:
        steps = order[at].split(".") if 0 <= at < len(order) else []
        return next((step for step in steps if step.isdecimal()), None)

    def general(name: str) -> str:
        letter = (f"{{l{number}}}" for number in itertools.count())
        return ".".join(next(letter) if step.isdecimal() else step for step in name.split("."))

    names = [general(name) for name in order]
    places: list[str] = []
    at = 0
    while at < len(names):
        end = at
        while end < len(names) and names[end] not in places and layer(end) == layer(at):
            end += 1
        if end > at:
            place = places.index(names[at - 1]) + 1 if at else 0
            if layer(at - 1) != layer(at) == layer(end) and end < len(names) and names[end] in places:
                place = places.index(names[end])
            places[place:place] = dict.fromkeys(names[at:end])
        at = max(end, at + 1)
    return places


def map_without_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the map of a class; it is tried on the shapes of the model, there and back."""
    document = map_of(model)
    order = document["order"]["memory"]
    same = all(rule["file"] == rule["memory"] for rule in document["rules"])
    rules = [] if same else _repeated([without_sizes(rule) for rule in document["rules"]])
    if any(step.isdecimal() for text in re.findall(r'"([^"]*)"', json.dumps(rules)) for step in text.split(".")):
        raise NoMapError("differs from layer to layer")

    places = in_places(order)
    first = {id(rule): [*([rule["memory"]] if isinstance(rule["memory"], str) else rule["memory"])] for rule in rules}

    def place(rule: dict[str, Any]) -> int:
        return min((places.index(name) for name in first[id(rule)] if name in places), default=len(places))

    made = {"rules": sorted(rules, key=place), "tied": {} if same else document["tied"]["memory"],
            "layer_norms": document["live"]["layer_norms"]}  # fmt: skip
    if not same:
        whole = document_of(made, type(model).__name__, transformers.__version__)
        live = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        untied = {name: shape for name, shape in live.items() if name not in made["tied"]}
        memory = Checkpoint(
            "", "", parameters={name: Parameter(name, shape, "float32") for name, shape in untied.items()}
        )
        table = parse_map({key: value for key, value in whole.items() if key != "live"}, "table")
        traced = parse_map({key: value for key, value in document.items() if key != "live"}, "trace")
        files, truth = (mapped(memory, one, {}).checkpoint for one in (table, traced))
        back = mapped(files, table, {}).checkpoint.parameters
        shapes = [{name: one.shape for name, one in found.parameters.items()} for found in (files, truth)]
        if shapes[0] != shapes[1] or {name: live[name] for name in back} != {n: one.shape for n, one in back.items()}:
            raise NoMapError("has shapes that the configuration tells")
        if [name for name in back if name in order] != order:
            raise NoMapError("has an order of parameters that differs from layer to layer")
    return made


def borrowed() -> Iterator[tuple[str, type[PreTrainedModel], type[PreTrainedConfig]]]:
    """Yield `TYPE CLASS` of types whose models are of a class for another type's, that class and the configuration."""
    kinds = [kind for kind in CONFIG_MAPPING if is_converted({"model_type": kind}, in_any_version=True)]
    for kind, factory in itertools.product(kinds, (AutoModel, AutoModelForCausalLM)):
        one = factory._model_mapping.get(config := CONFIG_MAPPING[kind], None)
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.config_class is not config:
            yield f"{kind} {one.__name__}", one, config


def maps() -> dict[str, Any]:
    """Return the maps of all classes of converted types."""
    rules: dict[str, int] = {}
    made: dict[str, Any] = {}
    refused: dict[str, str] = {}
    own = ((one.__name__, one, one.config_class) for one in classes())
    for name, one, config_class in itertools.chain(own, borrowed()):
        if name.endswith("PreTrainedModel") or config_class is None:
            continue
        for more in (True, False):
            try:
                config = fewer_layers(config_class(), more=more)
                if not is_converted(config.to_dict(), in_any_version=True):
                    break
                with torch.device("meta"):
                    found = map_without_sizes(one(config))
                numbers = [rules.setdefault(json.dumps(rule), len(rules)) for rule in found["rules"]]
                made[name] = {key: value for key, value in {**found, "rules": numbers}.items() if value}
                refused.pop(name, None)
                break
            except (NoMapError, ZckptError) as error:
                refused[name] = str(error)
            except Exception as error:  # noqa: BLE001  # a class that its configuration alone does not make
                refused[name] = f"is not made: {str(error).strip().partition(chr(10))[0][:80]}"
    for name in [name for name in made if " " in name and made[name] == made.get(name.partition(" ")[2])]:
        del made[name]
    every = [json.loads(rule) for rule in rules]
    short = [rule["file"] if rule["file"] == rule["memory"] else rule for rule in every]
    return {"transformers": transformers.__version__, "rules": short,
            "classes": made, "refused": refused}  # fmt: skip


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=0) + "\n", encoding="utf-8")
    parts = {key: json.dumps(value) for key, value in maps().items()}
    parts["rules"], parts["classes"] = (
        re.sub(r"(?<=\}), (?=[\{\"])", ",\n", parts[one]) for one in ("rules", "classes")
    )
    MAPS.write_text("{" + ",\n".join(f'"{key}": {text}' for key, text in parts.items()) + "}\n", encoding="utf-8")
