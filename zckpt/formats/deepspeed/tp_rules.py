"""How tensor-parallel slices make up a parameter: the rules in `universal_checkpoint_info`. Pure.

    tp_replicated_parameter_patterns            every rank has the whole
    parameter_to_average_patterns               every rank has the whole, and they drift apart: the mean
    parameter_with_row_parallelism_patterns     slices along dimension 1
    parameter_with_2_sub_params_cat_dim_0       two equal sub-parameters along dimension 0, each sliced (SwiGLU)
    parameter_with_sub_params                   sub-parameters of given sizes along a given dimension, each sliced (QKV)
    vocabulary_parameter_patterns               rows beyond original_vocab_size are padding
    affine_map                                  where elements of slices are in the whole, see `tp_shares`; goes first
    none of these                               slices along dimension 0

Source: DeepSpeed 0.14 to 0.19, universal checkpoints.

A user gives such rules, and checkpoints get them, as JSON:

{"original_vocab_size": 50257, "vocabulary_parameter_patterns": ["embed.weight$"],
 "parameter_with_row_parallelism_patterns": [...], "tp_replicated_parameter_patterns": [...], ...}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zckpt.errors import LayoutError, SourceError, UnsupportedError, UsageError
from zckpt.formats.deepspeed.tp_shares import AVERAGED, REPLICATED, SLICED, AffineMaps, Rule, shares_of
from zckpt.formats.deepspeed.tp_shares import KEY as AFFINE_KEY
from zckpt.state import Shape
from zckpt.storage.files import given_json
from zckpt.torchfile import brief

OTHER_RULES = "give other rules with --tp-rules FILE"

MAXIMUM_SUBS = 4096
"""A rule that speaks of more sub-parameters than this is no rule for a model."""

MAXIMUM_QUANTIFIERS = 4
"""Patterns come from the file. With more wildcards than this, matching could take for ever."""

TWO, SUB, MAPPED = "two", "sub", "map"

UNKNOWN_KEY = "autotp_unsupported_parameter_patterns"
"""What AutoTP has no rule for: a pattern, and why."""

_KEYS = {
    REPLICATED: "tp_replicated_parameter_patterns",
    AVERAGED: "parameter_to_average_patterns",
    "row": "parameter_with_row_parallelism_patterns",
    TWO: "parameter_with_2_sub_params_cat_dim_0",
    "vocabulary": "vocabulary_parameter_patterns",
}


class Rules:
    """The rules that a checkpoint carries.

    Parameters
    ----------
    info : mapping
        `universal_checkpoint_info` as plain data.
    path : str
        The file it is in.

    Raises
    ------
    UnsupportedError
        Rules newer than this version of zckpt, or a pattern that cannot be matched safely.
    """

    def __init__(self, info: Mapping[str, object], path: str) -> None:
        self.path = path
        self.maps = AffineMaps(info.get(AFFINE_KEY), path, self._compile, OTHER_RULES)
        unknown = info.get(UNKNOWN_KEY)
        self.unknown = [
            (one, brief(reason))
            for pattern, reason in (unknown.items() if isinstance(unknown, dict) else ())
            for one in self._compile([pattern])
        ]
        self.patterns = {kind: self._compile(info.get(key)) for kind, key in _KEYS.items()}
        self.sub_params = self._sub_params(info.get("parameter_with_sub_params"))
        widths = info.get("sub_param_shard_widths")
        self.widths = widths if isinstance(widths, dict) else {}
        size = info.get("original_vocab_size")
        self.vocabulary_size = size if type(size) is int else None

    @classmethod
    def of_vocabulary(cls, info: Mapping[str, object], path: str) -> Rules:
        """Return those of a checkpoint's rules that say what a vocabulary is."""
        return cls({key: info[key] for key in VOCABULARY_KEYS if key in info}, path)

    def rule(self, name: str, shapes: Sequence[Shape], *, padded: bool = False) -> Rule:
        """Return how the slices of a parameter, of these shapes by rank, make it up.

        Parameters
        ----------
        padded : bool
            Whether a vocabulary keeps its padding rows.

        Raises
        ------
        LayoutError
            The shapes do not fit the rule.
        UnsupportedError
            The checkpoint says that no rule describes it.
        """
        mapped = self.maps.rule(name)
        if mapped is not None:
            return self._fitting(name, mapped, shapes)
        for unknown, reason in self.unknown:
            if unknown.match(name):
                raise self._unusable(f"AutoTP does not say how {name} is sliced", reason)
        kind, dim = self.named(name)[:2]
        if kind in (REPLICATED, AVERAGED):
            if len(set(shapes)) > 1:
                raise LayoutError(
                    f"{name} is {kind} over tensor-parallel ranks, but its shapes differ",
                    path=self.path,
                    found=list(shapes),
                )
            found = Rule(kind, shapes[0])
        else:
            found = self._sliced(name, shapes, dim, self._widths(name, shapes))
        size = self.vocabulary_size
        if padded or kind in (TWO, SUB) or size is None or not found.shape or found.shape[0] <= size:
            return found
        if not self.is_vocabulary(name):
            return found
        if found.kind != SLICED or dim:
            raise self._unusable(f"vocabulary parameter {name} is not sliced along its rows")
        shares = [tuple(s._replace(size=max(min(s.size, size - s.target), 0)) for s in one) for one in found.shares]
        return Rule(SLICED, (size, *found.shape[1:]), 0, tuple(shares))

    def named(self, name: str) -> tuple[str, int, str, object]:
        """Return the kind of a parameter's rule, but for maps, and the dimension that is sliced.

        Of sub-parameters also the pattern that names them, and how many they are or how large.
        """
        for kind in (REPLICATED, AVERAGED, TWO):
            if self._matches(kind, name):
                return kind, 0, "", 2
        for pattern, dim, sizes in self.sub_params:
            if pattern.match(name):
                return SUB, dim, pattern.pattern, sizes
        return SLICED, int(self._matches("row", name)), "", 1

    def cut(self, name: str, shape: Shape, ranks: int) -> Rule:
        """Return how a whole parameter is cut: every rank gets an equal share of each sub-parameter.

        Raises
        ------
        LayoutError
            A sub-parameter does not divide among the ranks.
        UnsupportedError
            It is cut in a way that is known for the source's ranks only.
        """
        mapped = self.maps.rule(name)
        kind, dim = self.named(name)[:2]
        if mapped is None and kind in (REPLICATED, AVERAGED):
            return Rule(kind, shape)
        subs = [sum(widths) for widths in self._widths(name, [shape])] if mapped is None or kind == SUB else []
        if mapped is not None:
            return self.maps.cut(name, mapped, ranks, subs)
        if dim >= len(shape) or sum(subs) != shape[dim] or any(width % ranks for width in subs):
            raise LayoutError(
                f"{name} cannot be cut for {ranks} tensor-parallel ranks",
                path=self.path,
                expected=f"sub-parameters along dimension {dim} that divide by {ranks}",
                found=f"{subs} in a shape of {shape}",
            )
        local = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
        return self._sliced(name, [local] * ranks, dim, [[width // ranks] * ranks for width in subs])

    def is_vocabulary(self, name: str) -> bool:
        """Tell whether a parameter has a row for each word of a vocabulary."""
        if self.vocabulary_size is None or not self._matches("vocabulary", name):
            return False
        return self.maps.rule(name) is None  # a map says of every row where it is: there is no padding

    def matching(self, name: str) -> str | None:
        """Return the kind of the rule that names a parameter; None if it is sliced for want of a rule."""
        mapped, (kind, dim, _, _) = self.maps.rule(name), self.named(name)
        if mapped is not None and mapped.kind == REPLICATED:
            return REPLICATED
        if kind != SLICED or dim or self._matches("vocabulary", name):
            return kind
        return None if mapped is None else MAPPED

    def maps_for(self, names: Sequence[str], degree: int) -> dict[str, object]:
        """Return the affine map of these parameters for another tensor-parallel degree."""
        return self.maps.node(names, degree, lambda name, rule: self.cut(name, rule.shape, degree))

    def _fitting(self, name: str, mapped: Rule, shapes: Sequence[Shape]) -> Rule:
        """Return the rule of a map, if it is one for slices of these shapes."""
        sizes = [sum(share.size for share in shares) for shares in mapped.shares]
        local = [(*mapped.shape[: mapped.dim], size, *mapped.shape[mapped.dim + 1 :]) for size in sizes]
        expected = [mapped.shape] * len(shapes) if mapped.kind == REPLICATED else local
        if list(shapes) != expected:
            raise LayoutError(
                f"slices of {name} do not fit the affine map of it",
                path=self.path,
                expected=expected,
                found=list(shapes),
                advice=OTHER_RULES,
            )
        return mapped

    def _unusable(self, message: str, found: object = None) -> UnsupportedError:
        return UnsupportedError(message, path=self.path, found=found, advice=OTHER_RULES)

    def _matches(self, kind: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self.patterns[kind])

    def _compile(self, patterns: object) -> list[re.Pattern[str]]:
        if patterns is None:
            return []
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
            raise self._unusable("unreadable tensor-parallel rules", brief(patterns))
        for pattern in patterns:
            quantifiers = len(re.findall(r"(?<!\\)[*+{]", pattern))
            if re.search(r"\)[*+{?]", pattern) or quantifiers > MAXIMUM_QUANTIFIERS:
                raise self._unusable(
                    "a tensor-parallel rule that is not matched, for it could take for ever", brief(pattern)
                )
        try:
            return [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise self._unusable("unreadable tensor-parallel rule", str(error)) from error

    def _sub_params(self, node: object) -> list[tuple[re.Pattern[str], int, object]]:
        found: list[tuple[re.Pattern[str], int, object]] = []
        for one in node if isinstance(node, (list, tuple)) else []:
            shape, dim = (one.get("shape"), one.get("partition_dim")) if isinstance(one, dict) else (None, None)
            if not isinstance(shape, (list, tuple)) or type(dim) is not int or not 0 <= dim < len(shape):
                raise self._unusable("unreadable rule for sub-parameters", brief(one))
            if type(shape[dim]) is int and shape[dim] > MAXIMUM_SUBS:
                raise self._unusable("too many sub-parameters", shape[dim])
            found += [(pattern, dim, shape[dim]) for pattern in self._compile(one.get("patterns"))]
        return found

    def _widths(self, name: str, shapes: Sequence[Shape]) -> list[list[int]]:
        """Return for each sub-parameter its width on each rank, as the rules record it, or an equal share."""
        _, dim, pattern, sizes = self.named(name)
        found = self.widths.get(pattern) if pattern else None
        if found is not None:
            if (
                not isinstance(found, (list, tuple))
                or not found
                or not all(isinstance(sub, (list, tuple)) and len(sub) == len(found[0]) for sub in found)
                or not all(type(width) is int and width >= 0 for sub in found for width in sub)
            ):
                raise self._unusable(f"unreadable widths of the sub-parameters of {name}", brief(found))
            return [list(sub) for sub in found]
        local = [shape[dim] if dim < len(shape) else -1 for shape in shapes]
        if isinstance(sizes, int):
            if sizes < 1 or (pattern and any(width % sizes for width in local)):
                raise LayoutError(
                    f"{name} does not have {sizes} equal sub-parameters", path=self.path, found=list(shapes)
                )
            return [[width // sizes for width in local]] * sizes
        subs = [n for n in sizes if type(n) is int] if isinstance(sizes, (list, tuple)) else []
        if sum(subs) != sum(local) or any(n % len(shapes) for n in subs):
            raise LayoutError(
                f"the sub-parameters of {name} do not have its size",
                path=self.path,
                expected=f"{subs} over {len(shapes)} ranks",
                found=list(shapes),
            )
        return [[n // len(shapes)] * len(shapes) for n in subs]

    def _sliced(self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Rule:
        """Return the rule for slices that hold, along `dim`, one share of each sub-parameter."""
        fits = widths and all(len(sub) == len(shapes) for sub in widths)
        local = [sum(sub[rank] for sub in widths) if fits else -1 for rank in range(len(shapes))]
        rest = {s[:dim] + s[dim + 1 :] for s in shapes}
        if len(rest) > 1 or any(dim >= len(s) or s[dim] != n for s, n in zip(shapes, local, strict=True)):
            raise LayoutError(
                f"slices of {name} do not fit the rule for it",
                path=self.path,
                expected=f"sizes {local} along dimension {dim}",
                found=list(shapes),
            )
        whole = (*shapes[0][:dim], sum(map(sum, widths)), *shapes[0][dim + 1 :])
        return Rule(SLICED, whole, dim, shares_of(widths, len(shapes)))


INFO_KEY = "universal_checkpoint_info"

ARGUMENTS = "args"
"""Under which a model file has a program's arguments."""

REPLICATED_KEY = "tp_replicated_parameter_patterns"

VOCABULARY_KEYS = ("vocabulary_parameter_patterns", "original_vocab_size")
"""The rules that also matter where nothing is sliced."""

RULE_KEYS = frozenset({
    *VOCABULARY_KEYS, "padded_vocab_size", REPLICATED_KEY,
    "parameter_to_average_patterns", "parameter_with_row_parallelism_patterns",
    "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params", "sub_param_shard_widths",
    AFFINE_KEY,
})  # fmt: skip
"""Keys that say how a parameter is cut."""

OTHER_KEYS = frozenset({
    "universal_checkpoint_version", "pipeline_replicated_parameter_patterns", UNKNOWN_KEY,
})  # fmt: skip
"""Keys of `universal_checkpoint_info` that do not say that and are carried."""


def read_rules(path: Path) -> dict[str, object]:
    """Return the rules in a JSON file.

    Raises
    ------
    UsageError
        It cannot be read, has a key that is none of `universal_checkpoint_info`, or a rule that cannot be used.
    """
    info = given_json(path)
    if not isinstance(info, dict):
        raise UsageError(
            "holds no tensor-parallel rules", path=path, expected="a JSON object", found=type(info).__name__
        )
    check_rules(info, str(path))
    return info


def check_rules(info: Mapping[str, object], path: str) -> None:
    """Raise UsageError if there is a key that is none of `universal_checkpoint_info`, or a rule that is unusable."""
    unknown = sorted(map(str, set(info) - RULE_KEYS - OTHER_KEYS))
    if unknown:
        raise UsageError("unknown tensor-parallel rules", path=path, expected=", ".join(sorted(RULE_KEYS)),
                         found=", ".join(unknown[:4]))  # fmt: skip
    try:
        Rules(info, path)
    except SourceError as error:
        raise UsageError(error.message, path=path, expected=error.expected, found=error.found) from error


def info_for(info: Mapping[str, object], rows: int | None, degree: int) -> dict[str, object]:
    """Return rules that are true of another tensor-parallel degree.

    Parameters
    ----------
    info : mapping
        `universal_checkpoint_info`, as a file's tree or a JSON document has it.
    rows : int or None
        Rows of the vocabularies with their padding, if all have the same number.
    """
    changed = {**info}
    if rows is not None and "padded_vocab_size" in info:
        changed["padded_vocab_size"] = rows
    if isinstance(widths := info.get("sub_param_shard_widths"), Mapping):  # an equal share for each rank
        totals = {
            pattern: [sum(width for width in sub if type(width) is int) for sub in subs]
            for pattern, subs in widths.items()
            if isinstance(subs, (list, tuple)) and all(isinstance(sub, (list, tuple)) for sub in subs)
        }
        changed["sub_param_shard_widths"] = {
            pattern: [[total // degree] * degree for total in totals.get(pattern, ())] for pattern in widths
        }
    rules = info.get("parameter_with_sub_params")
    if isinstance(rules, (list, tuple)):  # DeepSpeed reads sizes that are tuples, which JSON does not have
        changed["parameter_with_sub_params"] = [
            {**rule, "shape": tuple(tuple(n) if isinstance(n, list) else n for n in rule["shape"])}
            if isinstance(rule, Mapping) and isinstance(rule.get("shape"), (list, tuple))
            else rule
            for rule in rules
        ]
    return changed
