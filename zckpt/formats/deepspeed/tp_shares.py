"""How one tensor-parallel parameter is put together of slices: shares, and the maps that say them. Pure.

AutoTP's affine maps lie in `universal_checkpoint_info`:

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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.state.boxes import row_major
from zckpt.torchfile import brief

REPLICATED = "replicated"
AVERAGED = "averaged"
SLICED = "sliced"


class Share(NamedTuple):
    """Consecutive indexes along the sliced dimension: where they are in one tensor, where in another, and how many.

    In a `Rule`, `source` is in a rank's slice and `target` in the whole parameter.
    """

    source: int
    target: int
    size: int


Shares = tuple[tuple[Share, ...], ...]
"""By rank."""


class Rule(NamedTuple):
    """How one parameter is put together.

    Parameters
    ----------
    kind : str
        REPLICATED, AVERAGED or SLICED.
    shape : tuple of int
        Of the whole parameter.
    dim : int
        Along which it is sliced.
    shares : tuple of tuple of Share
        What each rank's slice has of the whole.
    copies : tuple of tuple of Share
        What of that a rank before it has, too; empty where no part is on several ranks.
    """

    kind: str
    shape: tuple[int, ...]
    dim: int = 0
    shares: Shares = ()
    copies: Shares = ()

    @property
    def read(self) -> Shares:
        """What is read of each rank's slice: its shares without the copies."""
        if not self.copies:
            return self.shares
        return tuple(
            tuple(part for share in shares for part in without(share, copies))
            for shares, copies in zip(self.shares, self.copies, strict=True)
        )


def without(share: Share, others: tuple[Share, ...]) -> list[Share]:
    """Return what is left of a share without what others have of the whole."""
    left = [share]
    for _, low, size in others:
        rest = []
        for source, target, count in left:
            before, after = min(low - target, count), min(target + count - (low + size), count)
            if before > 0:
                rest.append(Share(source, target, before))
            if after > 0:
                rest.append(Share(source + count - after, target + count - after, after))
        left = rest
    return left


KEY = "affine_map"
VERSION = 1

_OF_ONE_NAME = re.compile(r"\^((?:\\[^A-Za-z0-9]|[^\\.^$*+?{}\[\]|()])*)\$")
"""A pattern that one name matches, as AutoTP writes all of them."""

_NEARLY_EVEN = ("lm_head", "embed_out")
_NEARLY_EVEN_PARTS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Modules whose slices AutoTP does not cut by heads: where the ranks do not divide them, the first have one more."""


class AffineMaps:
    """The affine maps of a checkpoint, by parameter.

    Parameters
    ----------
    node : object
        `affine_map` as plain data; None if there is none.
    path : str
        The file it is in.
    compiled : callable
        Returns patterns that are safe to match, compiled.
    advice : str
        What to do where a map cannot be followed.

    Raises
    ------
    UnsupportedError
        A version that zckpt does not know, or no map at all.
    """

    def __init__(
        self, node: object, path: str, compiled: Callable[[list[str]], list[re.Pattern[str]]], advice: str
    ) -> None:
        self.path, self.advice = path, advice
        self._by_name: dict[str, object] = {}
        self._others: list[tuple[re.Pattern[str], object]] = []
        self._rules: dict[str, Rule | None] = {}
        if node is None:
            return
        version, params = (node.get("version", VERSION), node.get("params", {})) if isinstance(node, dict) else (0, 0)
        if version != VERSION or not isinstance(params, dict) or not all(isinstance(key, str) for key in params):
            raise self._unsupported(f"an affine map of slices of version {brief(version)}", brief(node))
        for pattern, entry in params.items():
            match = _OF_ONE_NAME.fullmatch(pattern)
            if match:
                self._by_name[re.sub(r"\\(.)", r"\1", match[1])] = entry
            else:
                self._others += [(one, entry) for one in compiled([pattern])]

    def rule(self, name: str) -> Rule | None:
        """Return how the slices of a parameter make it up; None if no map speaks of it.

        Raises
        ------
        UnsupportedError
            Its map is none that can be followed.
        LayoutError
            Its map contradicts itself.
        """
        if name not in self._rules:
            entry = self._by_name.get(name)
            found = [one for pattern, one in self._others if pattern.match(name)] if entry is None else [entry]
            self._rules[name] = self._rule(name, found[0]) if found else None
        return self._rules[name]

    def cut(self, name: str, rule: Rule, ranks: int, widths: Sequence[int]) -> Rule:
        """Return how a whole parameter is cut for so many ranks, given how it was cut.

        Parameters
        ----------
        rule : Rule
            From `rule`.
        widths : sequence of int
            Of its sub-parameters, as another rule says; empty if none does.

        Raises
        ------
        UnsupportedError
            It is cut in a way that does not tell how it is cut for another number of ranks.
        LayoutError
            It does not divide among the ranks.
        """
        if rule.kind == REPLICATED or len(rule.shares) == ranks:
            return rule
        size = rule.shape[rule.dim]
        if ranks == 1:
            return Rule(SLICED, rule.shape, rule.dim, ((Share(0, 0, size),),))

        def of_subs() -> Shares | None:
            """Return the shares of the ranks that `rule` is for, if these are the widths of its sub-parameters."""
            at, found = 0, []
            for width in widths:
                found.append([sum(s.size for s in one if at <= s.target < at + width) for one in rule.shares])
                at += width
            return shares_of(found, len(rule.shares)) if [sum(sub) for sub in found] == list(widths) else None

        subs = [list(_split(width, ranks)) for width in widths]
        held = [share for shares in rule.shares for share in shares]
        if not rule.copies and [share.target for share in held] == _starts([share.size for share in held]):
            subs, widths = [list(_split(size, ranks))], [size]
        elif sum(widths) != size or of_subs() != tuple(map(joined, rule.shares)):
            raise self._unsupported(
                f"{name} is cut in an order of its own, which does not say how {ranks} tensor-parallel ranks have it",
                f"{len(rule.shares)} ranks",
            )
        if any(width % ranks for width in widths) and not (len(subs) == 1 and _is_nearly_even(name)):
            raise LayoutError(
                f"{name} cannot be cut for {ranks} tensor-parallel ranks",
                path=self.path,
                expected=f"sub-parameters along dimension {rule.dim} that divide by {ranks}",
                found=f"{list(widths)} in a shape of {rule.shape}",
            )
        return Rule(SLICED, rule.shape, rule.dim, shares_of(subs, ranks))

    def node(self, names: Sequence[str], degree: int, cut: Callable[[str, Rule], Rule]) -> dict[str, object]:
        """Return the map of these parameters as DeepSpeed writes it, cut for so many ranks."""
        known = {name: rule for name in names if (rule := self.rule(name)) is not None}
        params = {f"^{re.escape(name)}$": map_entry(cut(name, rule), degree) for name, rule in known.items()}
        return {"version": VERSION, "params": params}

    def _rule(self, name: str, entry: object) -> Rule:
        node = entry if isinstance(entry, dict) else {}
        shape, ranks = _ints(node.get("logical_shape")), _by_rank(node.get("ranks"))
        if shape is None or ranks is None:
            raise self._unsupported(f"unreadable affine map of {name}", brief(entry))
        boxes, locals_ = [], []
        for rank, one in enumerate(ranks):
            local = _ints(one.get("shard_shape")) if isinstance(one, dict) else None
            pieces = one.get("pieces") if isinstance(one, dict) else None
            if local is None or len(local) != len(shape) or not isinstance(pieces, (list, tuple)):
                raise self._unsupported(f"unreadable affine map of {name}, rank {rank}", brief(one))
            boxes.append([box for piece in pieces if (box := self._box(name, piece, shape, local)) is not None])
            locals_.append(local)
        cut = {
            dim
            for local, held in zip(locals_, boxes, strict=True)
            for dim in range(len(shape))
            if local[dim] != shape[dim] or any(sizes[dim] != shape[dim] for _, _, sizes in held)
        }
        if len(cut) > 1:
            raise self._unsupported(f"{name} is sliced along several dimensions", sorted(cut))
        wrong = LayoutError(
            f"the affine map of {name} contradicts itself",
            path=self.path,
            expected="every element of the whole, and of each slice, once",
            advice=self.advice,
        )
        if not cut:
            if not math.prod(shape) or all(len(held) == 1 for held in boxes):
                return Rule(REPLICATED, shape)
            raise wrong
        dim = cut.pop()
        shares, copies = [], []
        covered: tuple[Share, ...] = ()
        for local, held in zip(locals_, boxes, strict=True):
            own = sorted(Share(there[dim], here[dim], sizes[dim]) for there, here, sizes in held)
            if [share.source for share in own] != _starts([s.size for s in own]) or sum(s.size for s in own) != (
                local[dim] if math.prod(local) else 0
            ):
                raise wrong
            fresh = [part for share in own for part in without(share, covered)]
            copies.append(tuple(part for share in own for part in without(share, tuple(fresh))))
            shares.append(tuple(own))
            covered += tuple(fresh)
        if without(Share(0, 0, shape[dim]), covered) or sum(s.size for s in covered) != shape[dim]:
            raise wrong
        return Rule(SLICED, shape, dim, tuple(shares), tuple(copies) if any(copies) else ())

    def _box(self, name: str, piece: object, shape: _Shape, local: _Shape) -> tuple[_Shape, _Shape, _Shape] | None:
        """Return the origin of a piece in the slice and in the whole, and its sizes; None of an empty one."""
        node = piece if isinstance(piece, dict) else {}
        sizes, scale = _ints(node.get("shape")), node.get("scale", 1.0)
        if scale != 1.0:
            raise self._unsupported(f"the slices of {name} hold it multiplied by a number", brief(scale))
        if sizes is not None and not math.prod(sizes):
            return None
        there = None if sizes is None else _origin(node.get("dest"), sizes, local)
        here = None if sizes is None else _origin(node.get("source"), sizes, shape)
        if sizes is None or there is None or here is None:
            raise self._unsupported(f"a slice of {name} is not made of boxes of it", brief(piece))
        return there, here, sizes

    def _unsupported(self, message: str, found: object) -> UnsupportedError:
        return UnsupportedError(message, path=self.path, found=found, advice=self.advice)


_Shape = tuple[int, ...]


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


def _split(size: int, ranks: int) -> Iterator[int]:
    yield from (size // ranks + (rank < size % ranks) for rank in range(ranks))


def _is_nearly_even(name: str) -> bool:
    module = name.split(".")[:-1]
    return bool(module) and (module[-1] in _NEARLY_EVEN or any(one in ".".join(module) for one in _NEARLY_EVEN_PARTS))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _ints(node: object) -> _Shape | None:
    if not isinstance(node, (list, tuple)) or not all(type(n) is int and n >= 0 for n in node):
        return None
    return tuple(node)


def _by_rank(node: object) -> list[object] | None:
    """Return the ranks' entries in order; a JSON document has their numbers as text."""
    if not isinstance(node, dict) or not node:
        return None
    by_number = {str(key): value for key, value in node.items()}
    ordered = [by_number.get(str(rank)) for rank in range(len(by_number))]
    return None if None in ordered else ordered


def _origin(node: object, sizes: _Shape, shape: _Shape) -> _Shape | None:
    """Return where a box of a tensor begins; None if what offset and strides say is no box of it."""
    offset, strides = node if isinstance(node, (list, tuple)) and len(node) == 2 else (None, None)
    steps = _ints(strides)
    if type(offset) is not int or steps is None or not len(steps) == len(sizes) == len(shape):
        return None
    packed, origin = row_major(shape), []
    for size, step, own in zip(sizes, steps, packed, strict=True):
        if size > 1 and step != own:
            return None
        at, offset = divmod(offset, own) if own else (0, offset)
        origin.append(at)
    if offset or any(at + size > whole for at, size, whole in zip(origin, sizes, shape, strict=True)):
        return None
    return tuple(origin)


def map_entry(rule: Rule, degree: int) -> dict[str, object]:
    """Return the map of one parameter for so many ranks."""

    def sized(size: int) -> list[int]:
        return [*rule.shape[: rule.dim], size, *rule.shape[rule.dim + 1 :]] if rule.shape else []

    def steps(shape: _Shape) -> tuple[list[int], int]:
        """Return the strides of a tensor, and that of the dimension that is sliced."""
        packed = list(row_major(shape))
        return packed, packed[rule.dim] if packed else 0

    size, found = rule.shape[rule.dim] if rule.shape else 1, {}
    shares = rule.shares if rule.kind == SLICED else ((Share(0, 0, size),),) * degree
    whole, step = steps(rule.shape)
    for rank, own in enumerate(shares):
        local = sized(sum(share.size for share in own))
        packed, own_step = steps(tuple(local))
        found[rank] = {"shard_shape": local, "pieces": [
            {
                "shape": sized(share.size),
                "source": [share.target * step, [*whole]],
                "dest": [share.source * own_step, [*packed]],
                "locations": [number for number, held in enumerate(shares) if not without(share, tuple(held))],
            }
            for share in own
        ]}  # fmt: skip
    return {"logical_shape": list(rule.shape), "ranks": found}
