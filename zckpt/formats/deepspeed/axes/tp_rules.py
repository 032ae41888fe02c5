"""How tensor-parallel slices make up a parameter: the rules in `universal_checkpoint_info`. Pure.

    tp_replicated_parameter_patterns            every rank has the whole
    parameter_to_average_patterns               every rank has the whole, and they drift apart: the mean
    parameter_with_row_parallelism_patterns     slices along dimension 1
    parameter_with_2_sub_params_cat_dim_0       two equal sub-parameters along dimension 0, each sliced (SwiGLU)
    parameter_with_sub_params                   sub-parameters of given sizes along a given dimension, each sliced (QKV)
    vocabulary_parameter_patterns               rows beyond original_vocab_size are padding
    affine_map                                  where elements of slices are in the whole, see below; goes first
    none of these                               slices along dimension 0

Source: DeepSpeed 0.14 to 0.19, universal checkpoints.

A user gives such rules, and checkpoints get them, as JSON:

{"original_vocab_size": 50257, "vocabulary_parameter_patterns": ["embed.weight$"],
 "parameter_with_row_parallelism_patterns": [...], "tp_replicated_parameter_patterns": [...], ...}

AutoTP's affine maps are

    {version: 1, params: {pattern: {logical_shape, ranks: {rank: {shard_shape, pieces: [piece, ..]}}}}}
    piece = {shape, source: [offset, strides], dest: [offset, strides], locations: [rank, ..], scale: 1 if absent}

A piece is a box of the whole parameter (`source`, in elements) and where it lies in the rank's slice (`dest`).
DeepSpeed's own are all cut along one dimension:

    a layer's rows or columns        one piece for each rank, of any width
    fused query, key and value       a piece for each of them
    GPTBigCode                       the query's rows, and key and value whole on every rank
    CodeGen, Yuan                    blocks in an order of their own

Source: DeepSpeed 0.19.8, `checkpoint/affine.py`, `module_inject/layers.py`, `module_inject/tp_shard.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from zckpt.errors import LayoutError, SourceError, UnsupportedError, UsageError
from zckpt.state import Shape, are_sizes, are_texts, dict_of, list_of
from zckpt.state.boxes import merge, row_major, without
from zckpt.storage.files import given_json
from zckpt.torchfile import brief

OTHER_RULES = "give other rules with --tp-rules FILE"

MAXIMUM_SUBS = 4096
"""A rule that speaks of more sub-parameters than this is no rule for a model."""

MAXIMUM_QUANTIFIERS = 4
"""Patterns come from the file. With more wildcards than this, matching could take for ever."""

REPLICATED, AVERAGED, SLICED = "replicated", "averaged", "sliced"
TWO, SUB, MAPPED = "two", "sub", "map"

INFO_KEY = "universal_checkpoint_info"

Info = Mapping[str, object]
"""The content of that, as plain data."""

ARGUMENTS = "args"
"""Under which a model file has a program's arguments."""

UNKNOWN_KEY = "autotp_unsupported_parameter_patterns"
"""What AutoTP has no rule for: a pattern, and why."""

AFFINE_KEY, AFFINE_VERSION = "affine_map", 1

REPLICATED_KEY = "tp_replicated_parameter_patterns"

VOCABULARY_KEYS = ("vocabulary_parameter_patterns", "original_vocab_size")
"""The rules that also matter where nothing is sliced."""


class Named(NamedTuple):
    """What patterns say of a parameter: the kind of its rule, and the dimension that is sliced.

    Of sub-parameters also the pattern that names them, and how many they are or how large.
    """

    kind: str = SLICED
    dim: int = 0
    pattern: str = ""
    sizes: object = 1


_PATTERNS = {
    REPLICATED_KEY: Named(REPLICATED),
    "parameter_to_average_patterns": Named(AVERAGED),
    "parameter_with_2_sub_params_cat_dim_0": Named(TWO, sizes=2),
    "parameter_with_sub_params": Named(SUB),
    "parameter_with_row_parallelism_patterns": Named(SLICED, 1),
}
"""What each kind of patterns says; of several that name a parameter the first is its rule."""

RULE_KEYS = frozenset({*VOCABULARY_KEYS, "padded_vocab_size", "sub_param_shard_widths", AFFINE_KEY, *_PATTERNS})
"""Keys that say how a parameter is cut."""

OTHER_KEYS = frozenset({
    "universal_checkpoint_version", "pipeline_replicated_parameter_patterns", UNKNOWN_KEY,
})  # fmt: skip
"""Keys of `universal_checkpoint_info` that do not say that and are carried."""

_OF_ONE_NAME = re.compile(r"\^((?:\\[^A-Za-z0-9]|[^\\.^$*+?{}\[\]|()])*)\$")
"""A pattern that one name matches, as AutoTP writes all of them."""

_NEARLY_EVEN = ("lm_head", "embed_out")
_NEARLY_EVEN_PARTS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Modules whose slices AutoTP does not cut by heads: where the ranks do not divide them, the first have one more."""


class Share(NamedTuple):
    """Consecutive indexes along the sliced dimension: where they are in one tensor, where in another, and how many.

    In a `Rule`, `source` is in a rank's slice and `target` in the whole parameter.
    """

    source: int
    target: int
    size: int

    def without(self, others: Sequence[Share]) -> list[Share]:
        """Return what is left of it without what others have of the whole."""
        theirs = merge((one.target, one.target + one.size) for one in others)
        left = without([(self.target, self.target + self.size)], theirs)
        return [Share(self.source + low - self.target, low, high - low) for low, high in left]


Shares = tuple[tuple[Share, ...], ...]
"""By rank."""


class Rule(NamedTuple):
    """How one parameter is put together."""

    kind: str  # REPLICATED, AVERAGED or SLICED
    shape: Shape  # of the whole parameter
    dim: int = 0  # along which it is sliced
    shares: Shares = ()  # what each rank's slice has of the whole
    firsts: Shares = ()  # what of that no rank before it has; empty where no part is on several ranks

    @property
    def read(self) -> Shares:
        """What is read of each rank's slice."""
        return self.firsts or self.shares

    def local(self, rank: int) -> Shape:
        """Return the shape of a rank's slice."""
        return self.sized(sum(share.size for share in self.shares[rank]))

    def sized(self, size: int) -> Shape:
        """Return the shape of so many indexes along the dimension that is sliced."""
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


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

    def __init__(self, info: Info, path: str) -> None:
        self.path = path
        self._mapped: dict[str, Rule | None] = {}
        self._by_name: dict[str, object] = {}
        self._by_pattern: list[tuple[re.Pattern[str], object]] = []
        maps = {} if info.get(AFFINE_KEY) is None else info[AFFINE_KEY]
        known = {"version": AFFINE_VERSION, "params": {}, **(maps if isinstance(maps, dict) else {"version": 0})}
        version, params = known["version"], known["params"]
        if version != AFFINE_VERSION or not isinstance(params, dict) or not are_texts(params):
            raise self._unusable(f"an affine map of slices of version {brief(version)}", brief(maps))
        for pattern, entry in params.items():
            if match := _OF_ONE_NAME.fullmatch(pattern):
                self._by_name[re.sub(r"\\(.)", r"\1", match[1])] = entry
            else:
                self._by_pattern += [(one, entry) for one in self._compile([pattern])]
        unknown = info.get(UNKNOWN_KEY)
        self.unknown = [
            (one, brief(reason)) for pattern, reason in dict_of(unknown).items() for one in self._compile([pattern])
        ]
        self.named_by: list[tuple[re.Pattern[str], Named]] = []
        for key, named in _PATTERNS.items():
            if named.kind != SUB:
                self.named_by += [(one, named) for one in self._compile(info.get(key))]
                continue
            for rule in list_of(info.get(key)):
                shape, along = _of(rule, "shape"), _of(rule, "partition_dim")
                if not isinstance(shape, (list, tuple)) or type(along) is not int or not 0 <= along < len(shape):
                    raise self._unusable("unreadable rule for sub-parameters", brief(rule))
                if type(shape[along]) is int and shape[along] > MAXIMUM_SUBS:
                    raise self._unusable("too many sub-parameters", shape[along])
                patterns = self._compile(_of(rule, "patterns"))
                self.named_by += [(one, Named(SUB, along, one.pattern, shape[along])) for one in patterns]
        self.vocabularies = self._compile(info.get(VOCABULARY_KEYS[0]))
        widths, size = info.get("sub_param_shard_widths"), info.get(VOCABULARY_KEYS[1])
        self.widths = dict_of(widths)
        self.vocabulary_size = size if type(size) is int else None

    @classmethod
    def of_vocabulary(cls, info: Info, path: str) -> Rules:
        """Return those of a checkpoint's rules that say what a vocabulary is."""
        return cls({key: info[key] for key in VOCABULARY_KEYS if key in info}, path)

    def rule(self, name: str, shapes: Sequence[Shape], *, padded: bool = False) -> Rule:
        """Return how the slices of a parameter, of these shapes by rank, make it up.

        `padded`: whether a vocabulary keeps its padding rows. Raises LayoutError: the shapes do not fit the rule;
        UnsupportedError: the checkpoint says that no rule describes it.
        """
        if (mapped := self.mapped(name)) is not None:
            local = [mapped.local(rank) for rank in range(len(mapped.shares))]
            expected = [mapped.shape] * len(shapes) if mapped.kind == REPLICATED else local
            if list(shapes) != expected:
                raise LayoutError(
                    f"slices of {name} do not fit its affine map",
                    path=self.path,
                    expected=expected,
                    found=list(shapes),
                    advice=OTHER_RULES,
                )
            return mapped
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
            widths, count = self._widths(name, shapes), len(shapes)
            fits = widths and all(len(sub) == count for sub in widths)
            local_sizes = [sum(sub[rank] for sub in widths) if fits else -1 for rank in range(count)]
            whole = (*shapes[0][:dim], sum(local_sizes), *shapes[0][dim + 1 :])
            found = Rule(SLICED, whole, dim, shares_of(widths if fits else [local_sizes], count))
            if [found.local(rank) for rank in range(count)] != list(shapes):
                raise LayoutError(
                    f"slices of {name} do not fit their rule",
                    path=self.path,
                    expected=f"sizes {local_sizes} along dimension {dim}",
                    found=list(shapes),
                )
        size = self.vocabulary_size
        is_padded = kind not in (TWO, SUB) and size is not None and found.shape[:1] > (size,)
        if padded or size is None or not is_padded or not self.is_vocabulary(name):
            return found
        if found.kind != SLICED or dim:
            raise self._unusable(f"vocabulary parameter {name} is not sliced along its rows")
        shares = [tuple(s._replace(size=max(min(s.size, size - s.target), 0)) for s in one) for one in found.shares]
        return Rule(SLICED, (size, *found.shape[1:]), 0, tuple(shares))

    def named(self, name: str) -> Named:
        """Return what patterns say of a parameter; they do not know of maps."""
        return next((named for pattern, named in self.named_by if pattern.match(name)), Named())

    def cut(self, name: str, shape: Shape, ranks: int) -> Rule:
        """Return how a whole parameter is cut: every rank gets an equal share of each sub-parameter.

        Raises LayoutError: a sub-parameter does not divide among the ranks; UnsupportedError: it is cut in a way that
        is known for the source's ranks only.
        """
        mapped, (kind, dim, _, _) = self.mapped(name), self.named(name)
        if mapped is not None and (mapped.kind == REPLICATED or len(mapped.shares) == ranks):
            return mapped
        if mapped is None and kind in (REPLICATED, AVERAGED):
            return Rule(kind, shape)
        subs = [sum(widths) for widths in self._widths(name, [shape])] if mapped is None or kind == SUB else []
        is_nearly_even = False
        if mapped is not None:
            shape, dim = mapped.shape, mapped.dim
            known = [one for one in ([shape[dim]], subs) if ranks == 1 or _are_subs(mapped, one)]
            if not known:
                raise self._unusable(
                    f"{name} is cut in a special order, which does not say how to cut it for {ranks} "
                    "tensor-parallel ranks",
                    f"{len(mapped.shares)} ranks",
                )
            subs = known[0]
            module = name.rpartition(".")[0]
            parts = any(one in module for one in _NEARLY_EVEN_PARTS)
            is_nearly_even = len(subs) == 1 and (parts or module.rpartition(".")[2] in _NEARLY_EVEN)
        divides = bool(subs) and (is_nearly_even or not any(width % ranks for width in subs))
        if not divides or dim >= len(shape) or sum(subs) != shape[dim]:
            raise LayoutError(
                f"{name} cannot be cut for {ranks} tensor-parallel ranks",
                path=self.path,
                expected=f"sub-parameters along dimension {dim} that divide by {ranks}",
                found=f"{subs} in a shape of {shape}",
            )
        even = [[width // ranks + (rank < width % ranks) for rank in range(ranks)] for width in subs]
        return Rule(SLICED, shape, dim, shares_of(even, ranks))

    def is_vocabulary(self, name: str) -> bool:
        """Tell whether a parameter has a row for each word of a vocabulary."""
        if self.vocabulary_size is None or not any(pattern.match(name) for pattern in self.vocabularies):
            return False
        return self.mapped(name) is None  # a map says of every row where it is: there is no padding

    def matching(self, name: str) -> str | None:
        """Return the kind of the rule that names a parameter; None if it is sliced for want of a rule."""
        mapped, (kind, dim, _, _) = self.mapped(name), self.named(name)
        if mapped is not None and mapped.kind == REPLICATED:
            return REPLICATED
        if kind != SLICED or dim or any(pattern.match(name) for pattern in self.vocabularies):
            return kind
        return None if mapped is None else MAPPED

    def maps_for(self, names: Sequence[str], degree: int) -> dict[str, object]:
        """Return the affine map of these parameters for another tensor-parallel degree, as DeepSpeed writes it."""
        known = {name: rule for name in names if (rule := self.mapped(name)) is not None}
        params = {f"^{re.escape(n)}$": map_entry(self.cut(n, rule.shape, degree), degree) for n, rule in known.items()}
        return {"version": AFFINE_VERSION, "params": params}

    def mapped(self, name: str) -> Rule | None:
        """Return how the slices of a parameter make it up, as its map says; None if no map speaks of it.

        Raises UnsupportedError: its map is none that can be followed; LayoutError: its map contradicts itself.
        """
        if name not in self._mapped:
            its = self._by_name.get(name)
            found = [one for pattern, one in self._by_pattern if pattern.match(name)] if its is None else [its]
            self._mapped[name] = self._rule_of(name, found[0]) if found else None
        return self._mapped[name]

    def _rule_of(self, name: str, entry: object) -> Rule:
        shape = _ints(_of(entry, "logical_shape"))
        by_number = {str(key): one for key, one in dict_of(_of(entry, "ranks")).items()}  # JSON's are text
        ranks = [by_number.get(str(rank)) for rank in range(len(by_number))]
        if shape is None or not ranks or None in ranks:
            raise self._unusable(f"unreadable affine map of {name}", brief(entry))
        parts: list[tuple[Shape, list[tuple[Shape, Shape, Shape]]]] = []
        for rank, one in enumerate(ranks):
            local, pieces = _ints(_of(one, "shard_shape")), _of(one, "pieces")
            if local is None or len(local) != len(shape) or not isinstance(pieces, (list, tuple)):
                raise self._unusable(f"unreadable affine map of {name}, rank {rank}", brief(one))
            parts.append(
                (local, [box for piece in pieces if (box := self._box(name, piece, shape, local)) is not None])
            )
        cut = {
            dim
            for local, boxes in parts
            for own in (local, *(sizes for _, _, sizes in boxes))
            for dim, size in enumerate(own)
            if size != shape[dim]
        }
        if len(cut) > 1:
            raise self._unusable(f"{name} is sliced along several dimensions", sorted(cut))
        wrong = LayoutError(
            f"the affine map of {name} contradicts itself",
            path=self.path,
            expected="every element of the whole, and of each slice, exactly once",
            advice=OTHER_RULES,
        )
        if not cut:
            if not math.prod(shape) or all(len(boxes) == 1 for _, boxes in parts):
                return Rule(REPLICATED, shape)
            raise wrong
        dim = cut.pop()
        shares: list[tuple[Share, ...]] = []
        firsts: list[tuple[Share, ...]] = []
        covered: list[Share] = []
        for local, boxes in parts:
            held = sorted(Share(there[dim], here[dim], sizes[dim]) for there, here, sizes in boxes)
            end = local[dim] if math.prod(local) else 0
            if [*(s.source for s in held), end] != list(accumulate((s.size for s in held), initial=0)):
                raise wrong
            firsts.append(tuple(part for share in held for part in share.without(covered)))
            shares.append(tuple(held))
            covered += firsts[-1]
        if Share(0, 0, shape[dim]).without(covered) or sum(s.size for s in covered) != shape[dim]:
            raise wrong
        is_apart = sum(s.size for one in shares for s in one) == shape[dim]
        return Rule(SLICED, shape, dim, tuple(shares), () if is_apart else tuple(firsts))

    def _box(self, name: str, piece: object, shape: Shape, local: Shape) -> tuple[Shape, Shape, Shape] | None:
        """Return the origin of a piece in the slice and in the whole, and its sizes; None of an empty one."""
        sizes, scale = _ints(_of(piece, "shape")), _of(piece, "scale")
        if scale not in (None, 1.0):
            raise self._unusable(f"the slices of {name} hold it multiplied by a number", brief(scale))
        if sizes is not None and not math.prod(sizes):
            return None
        there, here = _origin(_of(piece, "dest"), sizes, local), _origin(_of(piece, "source"), sizes, shape)
        if sizes is None or there is None or here is None:
            raise self._unusable(f"a slice of {name} is not made of boxes of it", brief(piece))
        return there, here, sizes

    def _unusable(self, message: str, found: object = None) -> UnsupportedError:
        return UnsupportedError(message, path=self.path, found=found, advice=OTHER_RULES)

    def _compile(self, patterns: object) -> list[re.Pattern[str]]:
        if patterns is None:
            return []
        if not isinstance(patterns, (list, tuple)) or not are_texts(patterns):
            raise self._unusable("unreadable tensor-parallel rules", brief(patterns))
        for pattern in patterns:
            quantifiers = len(re.findall(r"(?<!\\)[*+{]", pattern))
            if re.search(r"\)[*+{?]", pattern) or quantifiers > MAXIMUM_QUANTIFIERS:
                raise self._unusable("a tensor-parallel rule that could take forever to match", brief(pattern))
        try:
            return [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise self._unusable("unreadable tensor-parallel rule", str(error)) from error

    def _widths(self, name: str, shapes: Sequence[Shape]) -> list[list[int]]:
        """Return for each sub-parameter its width on each rank, as the rules record it, or an equal share."""
        _, dim, pattern, sizes = self.named(name)
        if (found := self.widths.get(pattern)) is not None and pattern:
            subs = [_ints(sub) for sub in list_of(found)]
            if not subs or None in subs or len({len(sub or ()) for sub in subs}) > 1:
                raise self._unusable(f"unreadable widths of the sub-parameters of {name}", brief(found))
            return [list(sub or ()) for sub in subs]
        local = [shape[dim] if dim < len(shape) else -1 for shape in shapes]
        if isinstance(sizes, int):
            if sizes < 1 or (pattern and any(width % sizes for width in local)):
                raise LayoutError(
                    f"{name} does not have {sizes} equal sub-parameters", path=self.path, found=list(shapes)
                )
            return [[width // sizes for width in local]] * sizes
        subs_of = [n for n in list_of(sizes) if type(n) is int]
        if sum(subs_of) != sum(local) or any(n % len(shapes) for n in subs_of):
            raise LayoutError(
                f"the sub-parameters of {name} do not add up to its size",
                path=self.path,
                expected=f"{subs_of} over {len(shapes)} ranks",
                found=list(shapes),
            )
        return [[n // len(shapes)] * len(shapes) for n in subs_of]


def shares_of(subs: Sequence[Sequence[int]], ranks: int) -> Shares:
    """Return what each rank has of sub-parameters, given the width of each of them on each rank."""
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    at, used = 0, [0] * ranks
    for of_sub in subs:
        for rank, width in enumerate(of_sub):
            shares[rank].append(Share(used[rank], at, width))
            used[rank] += width
            at += width
    return tuple(map(joined, shares))


def joined(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Return the shares of one rank, those that follow each other in both tensors as one."""
    found: list[Share] = []
    for share in shares:
        last = found[-1] if found else Share(0, 0, 0)
        if found and (last.source + last.size, last.target + last.size) == share[:2]:
            found[-1] = last._replace(size=last.size + share.size)
        elif share.size:
            found.append(share)
    return tuple(found)


def _are_subs(rule: Rule, widths: Sequence[int]) -> bool:
    """Tell whether a rule is one of sub-parameters of these widths, of each of which every rank has the next share."""
    ends = accumulate(widths, initial=0)
    found = [
        [sum(s.size for s in one if low <= s.target < high) for one in rule.shares] for low, high in pairwise(ends)
    ]
    is_whole = [sum(sub) for sub in found] == list(widths)
    return is_whole and shares_of(found, len(rule.shares)) == tuple(map(joined, rule.shares))


def _of(node: object, key: str) -> object:
    return dict_of(node).get(key)


def _ints(node: object) -> Shape | None:
    if not isinstance(node, (list, tuple)) or not are_sizes(node):
        return None
    return tuple(node)


def _origin(node: object, sizes: Shape | None, shape: Shape) -> Shape | None:
    """Return where a box of a tensor begins; None if what offset and strides say is no box of it."""
    offset, strides = node if isinstance(node, (list, tuple)) and len(node) == 2 else (None, None)
    steps = _ints(strides)
    if type(offset) is not int or steps is None or sizes is None or not len(steps) == len(sizes) == len(shape):
        return None
    origin = []
    for size, step, own in zip(sizes, steps, row_major(shape), strict=True):
        if size > 1 and step != own:
            return None
        at, offset = divmod(offset, own) if own else (0, offset)
        origin.append(at)
    if offset or any(at + size > whole for at, size, whole in zip(origin, sizes, shape, strict=True)):
        return None
    return tuple(origin)


def map_entry(rule: Rule, degree: int) -> dict[str, object]:
    """Return the map of one parameter for so many ranks."""
    whole = rule.shape
    if rule.kind != SLICED:
        rule = rule._replace(shares=((Share(0, 0, whole[0] if whole else 1),),) * degree)
    found = {}
    for rank, own in enumerate(rule.shares):
        local = rule.local(rank) if whole else ()

        def piece(start: int, shape: Shape) -> list[object]:
            steps = row_major(shape)
            return [start * (steps[rule.dim] if steps else 1), list(steps)]

        found[rank] = {"shard_shape": list(local), "pieces": [
            {
                "shape": list(rule.sized(share.size) if whole else ()),
                "source": piece(share.target, whole),
                "dest": piece(share.source, local),
                "locations": [number for number, held in enumerate(rule.shares) if not share.without(held)],
            }
            for share in own
        ]}  # fmt: skip
    return {"logical_shape": list(whole), "ranks": found}


def read_rules(path: Path) -> dict[str, object]:
    """Return the rules in a JSON file.

    Raises UsageError: it cannot be read, has a key that is none of `universal_checkpoint_info`, or a rule that cannot
    be used.
    """
    info = given_json(path)
    if not isinstance(info, dict):
        raise UsageError(
            "holds no tensor-parallel rules", path=path, expected="a JSON object", found=type(info).__name__
        )
    check_rules(info, str(path))
    return info


def check_rules(info: Info, path: str) -> None:
    """Raise UsageError if there is a key that is none of `universal_checkpoint_info`, or a rule that is unusable."""
    unknown = sorted(map(str, set(info) - RULE_KEYS - OTHER_KEYS))
    if unknown:
        raise UsageError("unknown tensor-parallel rules", path=path, expected=", ".join(sorted(RULE_KEYS)),
                         found=", ".join(unknown[:4]))  # fmt: skip
    try:
        Rules(info, path)
    except SourceError as error:
        raise UsageError(error.message, path=path, expected=error.expected, found=error.found) from error
