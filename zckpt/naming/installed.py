"""The map of a model in files and in the memory of the installed transformers, made in a process of its own.

Where it is not installed, `transformers.json` has the maps of a version, made by `bench/transformers_tables.py`: not
for the numbers of an optimizer, as nothing says how the model at hand orders its parameters.
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
from functools import lru_cache
from pathlib import Path
from typing import Any

from zckpt.errors import MissingPackageError, UnsupportedError, UsageError

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
        name = next(iter(json.loads(config).get("architectures") or []), "")
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
