"""Hyperparameters from a user's file, for the elastic form, which holds none: a JSON list, an object for each group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UsageError
from zckpt.state import ParamGroup
from zckpt.storage.files import given_json

TUPLES = frozenset({"betas", "etas", "step_sizes"})
"""What torch's optimizers have as tuples, and JSON as lists."""

Group = dict[str, object]


def read_hyperparameters(path: str | os.PathLike[str], count: int, *, elastic: bool = False) -> list[Group]:
    """Return the hyperparameters of each of `count` param groups.

    Raises UsageError: the file cannot be read, or holds something else; or the target's form, an elastic one, holds
    none.
    """
    if elastic:
        raise UsageError("the elastic form holds no hyperparameters", path=path, expected="--rigid, or --stage 3")
    found = given_json(Path(path))
    if not isinstance(found, list) or len(found) != count or not all(isinstance(one, dict) and one for one in found):
        raise UsageError(
            "does not hold hyperparameters for each param group",
            path=path,
            expected=f'a list of {count} nonempty objects, such as [{{"lr": 0.001, "betas": [0.9, 0.95], ...}}]',
            found=f"a list of {len(found)}" if isinstance(found, list) else type(found).__name__,
        )
    return [
        {key: tuple(value) if key in TUPLES and isinstance(value, list) else value for key, value in one.items()
         if key != "params"}
        for one in found
    ]  # fmt: skip


def with_hyperparameters(
    groups: Sequence[ParamGroup], given: Sequence[Mapping[str, object]] | None
) -> list[ParamGroup]:
    """Return param groups with what was given for them; as they are, if nothing was."""
    if given is None:
        return list(groups)
    return [replace(group, hyperparameters=dict(own)) for group, own in zip(groups, given, strict=True)]
