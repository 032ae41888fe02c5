"""Tensor-parallel rules that a user gives, and the rules that are written: `universal_checkpoint_info` as JSON.

{"original_vocab_size": 50257, "vocabulary_parameter_patterns": ["embed.weight$"],
 "parameter_with_row_parallelism_patterns": [...], "tp_replicated_parameter_patterns": [...], ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from zckpt.errors import SourceError, UsageError
from zckpt.formats.deepspeed.tp_rules import Rules
from zckpt.storage.files import read_whole

INFO_KEY = "universal_checkpoint_info"

REPLICATED_KEY = "tp_replicated_parameter_patterns"

MAXIMUM_NBYTES = 1 << 20
"""Rules are a page of patterns; a larger file is something else."""

RULE_KEYS = frozenset({
    "original_vocab_size", "padded_vocab_size", "vocabulary_parameter_patterns", REPLICATED_KEY,
    "parameter_to_average_patterns", "parameter_with_row_parallelism_patterns",
    "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params", "sub_param_shard_widths",
})  # fmt: skip
"""Keys that say how a parameter is cut."""

OTHER_KEYS = frozenset({
    "universal_checkpoint_version", "pipeline_replicated_parameter_patterns", "autotp_unsupported_parameter_patterns",
})  # fmt: skip
"""Keys of `universal_checkpoint_info` that have no part in it and are carried."""


def read_rules(path: Path) -> dict[str, object]:
    """Return the rules in a JSON file.

    Raises
    ------
    UsageError
        It cannot be read, has a key that is none of `universal_checkpoint_info`, or a rule that cannot be used.
    """
    try:
        data = read_whole(str(path), most=MAXIMUM_NBYTES)
    except SourceError as error:
        raise UsageError(error.message, path=path, expected=error.expected, found=error.found) from error
    try:
        info = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError("is no JSON document", path=path, found=str(error)[:80]) from error
    if not isinstance(info, dict):
        raise UsageError(
            "holds no tensor-parallel rules", path=path, expected="a JSON object", found=type(info).__name__
        )
    unknown = sorted(set(info) - RULE_KEYS - OTHER_KEYS)
    if unknown:
        raise UsageError("unknown tensor-parallel rules", path=path, expected=", ".join(sorted(RULE_KEYS)),
                         found=", ".join(unknown[:4]))  # fmt: skip
    try:
        Rules(info, str(path))
    except SourceError as error:
        raise UsageError(error.message, path=path, expected=error.expected, found=error.found) from error
    return info


def info_for(info: Mapping[str, object], rows: int | None, degree: int) -> dict[str, object]:
    """Return rules that are true of another tensor-parallel degree.

    Parameters
    ----------
    info : mapping
        `universal_checkpoint_info`, as a file's tree or a JSON document has it.
    rows : int or None
        Rows of the vocabularies with their padding, if all have the same number.
    degree : int
    """
    changed = {**info}
    if rows is not None and "padded_vocab_size" in info:
        changed["padded_vocab_size"] = rows
    widths = info.get("sub_param_shard_widths")
    if isinstance(widths, Mapping):
        changed["sub_param_shard_widths"] = {pattern: _widths(parts, degree) for pattern, parts in widths.items()}
    rules = info.get("parameter_with_sub_params")
    if isinstance(rules, (list, tuple)):
        changed["parameter_with_sub_params"] = [_with_tuples(rule) for rule in rules]
    return changed


def _widths(parts: object, degree: int) -> list[list[int]]:
    """Return an equal share of each part for each rank; a part that has none is refused where a parameter has it."""
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in parts):
        return []
    totals = [sum(width for width in part if type(width) is int) for part in parts]
    return [[total // degree] * degree for total in totals]


def _with_tuples(rule: object) -> object:
    """Return a rule for sub-parameters as DeepSpeed reads it: sizes of parts are tuples, which JSON does not have."""
    if not isinstance(rule, Mapping) or not isinstance(rule.get("shape"), (list, tuple)):
        return rule
    shape = tuple(tuple(n) if isinstance(n, list) else n for n in rule["shape"])
    return {**rule, "shape": shape}
