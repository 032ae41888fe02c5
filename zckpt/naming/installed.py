"""The map of a model in files and in the memory of the installed transformers, and names of an optimizer's numbers.

The map is made in a process of its own. Where transformers is not installed, `transformers.json` has the maps of a
version, made by `bench/transformers_tables.py`: not for the numbers of an optimizer, as nothing says how the model at
hand orders its parameters.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from zckpt.errors import MissingPackageError, UnsupportedError, UsageError, listed
from zckpt.evidence import Evidence
from zckpt.formats.transformers_trainer.architectures import Architecture, is_converted
from zckpt.formats.transformers_trainer.readings import Weights, names_in_order, said_by
from zckpt.naming import Mapped
from zckpt.naming.apply import fits, mapped
from zckpt.naming.document import Map, parse_map
from zckpt.naming.sizes import read_config
from zckpt.state import Checkpoint, without
from zckpt.state.names import is_number

LIVE_CLASS = "transformers.modeling_utils.PreTrainedModel"

SECONDS = 600
"""That making a model without memory may take."""


def transformers_map(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the map, as a document, of the model of a configuration.

    Raises UsageError: there is no configuration of a model; MissingPackageError: transformers, from version 5, is not
    installed; UnsupportedError: it has no such model, or does to it what no map says.
    """
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            "--map=transformers needs the configuration of the model", expected="model_type in config.json",
            advice="give --map-config FILE, the model's config.json",
        )  # fmt: skip
    return _made(json.dumps(config))


@lru_cache(maxsize=4)
def _made(config: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("traced.py"))]  # by path: not what lies in this directory
    path = os.pathsep.join(one for one in sys.path if one)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(  # noqa: S603  # this Python and a file of zckpt's own
            command, input=config, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"--map=transformers: the model could not be made: {error}") from error
    if "No module named" in str(found.get("refused")):
        tables = json.loads(Path(__file__).with_name("transformers.json").read_text(encoding="utf-8"))
        said = json.loads(config)
        name = next(iter(said.get("architectures") or []), "")
        borrowed = f"{said['model_type']} {name}"  # a type that has another's class, and other names in files
        name = borrowed if borrowed in tables["classes"].keys() | tables["refused"].keys() else name
        if name in tables["classes"]:
            table = tables["classes"][name]
            rules = [tables["rules"][number] for number in table.get("rules", [])]
            every = [{"file": one, "memory": one} if isinstance(one, str) else one for one in rules]
            return document_of({**table, "rules": every}, name, tables["transformers"])
        raise MissingPackageError(
            "--map=transformers needs transformers, from version 5, and torch", found=tables["refused"].get(name),
            expected=f"transformers, or a model in zckpt's table for {tables['transformers']}",
            advice="pip install 'transformers>=5'",
        )  # fmt: skip
    if "rules" not in found:
        why = found.get("refused") or (done.stderr.strip().splitlines() or ["it ended"])[-1]
        raise UnsupportedError(
            f"--map=transformers: what transformers does to this model cannot be expressed as a map: {why}",
            advice="write a map of your own (docs/maps.md)",
        )
    return found


def document_of(table: Mapping[str, Any], name: str, version: str) -> dict[str, Any]:
    """Return the map of a class of models as a document, by what a table has of it."""
    rules, letters = table["rules"], dict[str, str]()

    def ordered(name: str) -> str:  # what begins alike is repeated for each number, and nothing else with it
        return re.sub(r"\{l\d+", lambda match: letters.setdefault(name[: match.start()], f"{{l{len(letters)}"), name)

    memory = ([one] if isinstance(one := rule["memory"], str) else one for rule in rules)
    return {
        "about": f"transformers {version} ({name}, by zckpt's table)",
        "sides": ["file", "memory"],
        "sizes": dict(re.findall(r"\b(n(\d+)_\d+)\b", json.dumps(rules))),
        "rules": rules,
        "order": {"memory": [ordered(one) for names in memory for one in names]},
        "tied": {"memory": table.get("tied", {})},
        "live": {"transformers": "", "trained": [], "layer_norms": table.get("layer_norms", [])},
    }


def live_maps(model: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Yield the maps of a live model of transformers: by what it was loaded with, and by the tables for its class."""
    if not any(f"{one.__module__}.{one.__name__}" == LIVE_CLASS for one in type(model).__mro__):
        return
    import torch

    from zckpt.naming.traced import map_of

    with suppress(Exception):  # another program's code, which may do what no map says: then the names stay
        with torch.device("meta"):
            bare = type(model)(deepcopy(model.config))
        used = getattr(model, "_weight_conversions", None)
        for conversions in [None] if used is None else [used, None]:
            bare._weight_conversions = conversions
            yield map_of(bare)


NO_SHAPE = {"step", "RMS"}

FILE, MEMORY, SAME = range(3)
"""Sides of the map of transformers; what has one name for everything in both."""


def numbers_alone(checkpoint: Checkpoint) -> bool:
    """Tell whether one optimizer of a Trainer only numbers its parameters, and the files told the name of none."""
    is_one = checkpoint.format == "transformers-trainer" and not checkpoint.optimizers()
    names = checkpoint.grouped
    return is_one and bool(names) and all(is_number(name) and name not in checkpoint.parameters for name in names)


def named_as_live(mapped: Checkpoint, source: Checkpoint, live: Mapping[str, Any]) -> Checkpoint | None:
    """Return what is mapped, without an optimizer, with the source's, whose numbers are live parameters.

    None if that is not certain: names that were given tell it, or that transformers of the same version made the model.
    `live`: as the map has it. Raises UsageError: given names do not fit.
    """
    names = [name for name in live["trained"] or mapped.parameters if name in mapped.parameters]
    candidates = {one.name: one.shape for one in map(mapped.owner, names)}
    groups = [[*map(int, group.parameters)] for group in source.param_groups]
    unnamed = {int(number): one for number, one in source.unnamed.items()}
    shapes = {number: None for group in groups for number in group} | {
        number: one.shape if one.shape or one.slots.keys() - NO_SHAPE else None for number, one in unnamed.items()
    }
    said = Evidence(groups, candidates, shapes)
    known = Weights(candidates, is_ordered=True, known=Architecture(layer_norms=frozenset(live["layer_norms"])))
    given = source.given_names
    if given is not None:
        order, found = said_by(given, said, known)
        if len(found) < len(said.numbers):
            raise UsageError(
                "the names do not match the optimizer",
                path=source.named,
                expected=f"{len(said.numbers)} names in its order, or all names of the model in memory, in the "
                "model's order",
                found=f"{len(given)} names, {len({*order} & {*candidates})} of the model's in memory",
            )
    elif len(names) == len(live["trained"]) and _is_of(live["transformers"], source):
        found = names_in_order(said, [*candidates], known)
    else:
        found = {}
    if len(found) < len(said.numbers):
        return None
    source.warnings[:] = [one for one in source.warnings if "give --names FILE" not in one]  # what they ask is known
    parameters = dict(mapped.parameters)
    for index, group in enumerate(groups):
        for number in group:
            one, own = parameters[found[number]], unnamed.get(number)
            slots, state = ({}, {}) if own is None else (own.slots, own.state)
            parameters[one.name] = replace(one, slots={**one.slots, **slots}, group=index, state=dict(state))
    named = [
        replace(group, parameters=[found[number] for number in own])
        for group, own in zip(source.param_groups, groups, strict=True)
    ]
    return replace(mapped, parameters=parameters, param_groups=named)


def by_transformers(checkpoint: Checkpoint, document: Mapping[str, Any], side: int | None) -> Mapped:
    """Return what the map of transformers makes of a checkpoint; errors are those of `mapped` and `named_as_live`."""
    found = _changing(document)

    def under(names_of: int | None, one: Checkpoint) -> Mapped:
        if found is not None:
            return mapped(one, found, {}, names_of)
        same = {name: name for name in one.names}
        known = one.parameters
        ties = {  # names in memory of tied tensors that it has under another name only
            name: replace(known[of], name=name, slots={}, group=None, state={}, tied_to=of)
            for name, of in document["tied"]["memory"].items()
            if names_of != FILE and name not in same and of in known
        }
        if not ties:
            return Mapped(one, [f"{document['about']}: the same names"], names_of or FILE, same)
        note = f"{document['about']}: the same names; files lack {listed(list(ties))}, another name of a tensor"
        return Mapped(replace(one, parameters={**one.parameters, **ties}), [note], MEMORY, same)

    if not numbers_alone(checkpoint):
        return under(side, checkpoint)
    live = under(MEMORY, replace(checkpoint, unnamed={}, param_groups=[]))
    named = named_as_live(live.checkpoint, checkpoint, document["live"])
    if named is None:
        return under(side, checkpoint)  # where a map refuses numbers
    if side == FILE or (side is None and not live.notes):
        return under(FILE, named)
    return replace(live, checkpoint=named)


def _changing(document: Mapping[str, Any]) -> Map | None:
    """Return the map that a document of transformers' is, unless all names are the same."""
    if all(rule["file"] == rule["memory"] for rule in document["rules"]):
        return None
    return parse_map(without(document, "live"), document["about"])


def _side_of(document: Mapping[str, Any], checkpoint: Checkpoint) -> int | None:
    """Return the side whose names a checkpoint has, FILE for the same names; None: neither. UsageError: either."""
    found = _changing(document)
    if found is None:
        return SAME
    followed, _ = fits(found, {one.name: one.shape for one in checkpoint.tensors()})
    changing = [one for fit in followed for one in fit.instances if one.rule.sides[0] != one.rule.sides[1]]
    if len(followed) > 1 and changing:
        raise UsageError(
            "the names fit transformers' names both in files and in memory",
            path=checkpoint.named,
            advice="give another --map or --rename, or a target file x.safetensors, which keeps the names",
        )
    return followed[0].source if followed else None


def has_names_of_files(checkpoint: Checkpoint, config: Mapping[str, object]) -> bool | None:
    """Tell whether tensors have the names that transformers gives them in files only; None: others than it gives.

    Errors are those of `transformers_map`; and UsageError: they may be of either.
    """
    side = _side_of(transformers_map(config), checkpoint)
    return None if side is None else side == FILE


def _is_of(version: str, checkpoint: Checkpoint) -> bool:
    """Tell whether transformers of a version, but for its last number, saved a checkpoint."""
    said = read_config(None, checkpoint)[0].get("transformers_version")
    return str(said).split(".")[:2] == version.split(".")[:2]


def as_live(checkpoint: Checkpoint, model: object, *, order: bool, told: bool) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint under the names of a live model of transformers if it has those of its files; and notes.

    `order`: there is a live optimizer; `told`: the user gave names for the numbers of the one that was saved. Raises
    UsageError: names may be of either; UnsupportedError: which number is which is not certain.
    """
    for document in live_maps(model):
        if _side_of(document, checkpoint) == FILE:
            if numbers_alone(checkpoint) and not order:
                checkpoint = replace(checkpoint, unnamed={}, param_groups=[])
            elif not told and not _is_of(document["live"]["transformers"], checkpoint):
                checkpoint = replace(checkpoint, given_names=None)  # the live order, which may be another version's
            done = by_transformers(checkpoint, document, MEMORY)
            return done.checkpoint, done.notes
    return checkpoint, []


def as_in_files(checkpoint: Checkpoint, config: Mapping[str, object]) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint under the names that transformers has in files if it has those in memory; and notes.

    Raises UsageError: names may be of either.
    """
    if not is_converted(config, in_any_version=True):
        return checkpoint, []
    try:
        document = transformers_map(config)
    except (UnsupportedError, UsageError) as error:
        return checkpoint, [f"names are as they were, of files or memory: {error.message}"]
    side = _side_of(document, checkpoint)
    if side == MEMORY or (side == FILE and numbers_alone(checkpoint)):
        done = by_transformers(checkpoint, document, FILE)
        return done.checkpoint, done.notes
    strange = [f"{document['about']}: names are as they were, none of files or memory"] if side is None else []
    return checkpoint, strange
