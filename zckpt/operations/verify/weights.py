"""Weights that are not their masters, rounded: single damage, or a file of another step or run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zckpt.codes import OTHER_RUN, WEIGHT_MISMATCH
from zckpt.errors import listed
from zckpt.operations.verify.findings import Finding

MOST = 0.75
"""Share of a file's parameters that differ in a file of another step or run: all but those that were not trained."""

FEWEST = 3
"""Compared parameters of a file below which nothing is concluded from how many differ."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What part of a master was held against its weight.

    Parameters
    ----------
    parameter : str
    path, weight_path : str
        Files of the master and of the weight.
    numel : int, elements
    num_different : int, elements
    detail : str
        Of the first difference: where, what is stored and what should be.
    """

    parameter: str
    path: str
    weight_path: str
    numel: int
    num_different: int = 0
    detail: str = ""


def weight_findings(compared: Iterable[Comparison], ranks: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Yield a finding for each file in which masters do not round to their weights.

    Parameters
    ----------
    compared : iterable of Comparison
    ranks : mapping of str to tuple of int
        Ranks that wrote each file.
    """
    by_file: dict[str, dict[str, list[Comparison]]] = {}
    for one in compared:
        by_file.setdefault(one.path, {}).setdefault(one.parameter, []).append(one)
    wrong = {path: _different(parameters) for path, parameters in by_file.items()}
    foreign = [
        path
        for path, names in wrong.items()
        if len(by_file[path]) >= FEWEST and len(names) >= MOST * len(by_file[path])
    ]
    if foreign and len(foreign) == len(by_file):
        names = list(dict.fromkeys(name for path in foreign for name in wrong[path]))
        first = by_file[foreign[0]][names[0]][0]
        yield Finding(
            OTHER_RUN,
            f"the weights of this file are not the masters of the optimizer's {len(foreign)} files, rounded: "
            f"{len(names)} parameters differ",
            first.weight_path,
            parameters=tuple(names),
            expected="a model and an optimizer of one step",
            found=first.detail,
        )
        return
    for path, names in wrong.items():
        if not names:
            continue
        parts = [part for name in names for part in by_file[path][name] if part.num_different]
        if path in foreign:
            yield Finding(
                OTHER_RUN,
                f"masters of {len(names)} of {len(by_file[path])} parameters do not round to the weights beside them",
                path,
                ranks.get(path, ()),
                tuple(names),
                "a file of this step and run",
                parts[0].detail,
            )
            continue
        count, total = sum(part.num_different for part in parts), sum(part.numel for part in parts)
        yield Finding(
            WEIGHT_MISMATCH,
            f"{listed(names)}: {count} of {total} elements of the weight are not the master, rounded",
            path,
            ranks.get(path, ()),
            tuple(names),
            None,
            parts[0].detail,
            f"one of the two is damaged, here or in {parts[0].weight_path}",
        )


def _different(parameters: Mapping[str, list[Comparison]]) -> list[str]:
    return [name for name, parts in parameters.items() if any(part.num_different for part in parts)]
