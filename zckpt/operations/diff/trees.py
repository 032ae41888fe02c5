"""Any value that a checkpoint holds besides its parameters, as a list of leaves that can be compared one by one.

Of two checkpoints, these are hyperparameters, steps, and all that was carried along.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from zckpt.compare.logical import single
from zckpt.compare.slots import differences, pair
from zckpt.errors import listed
from zckpt.formats.registry import formats
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.immutable import immutable
from zckpt.operations.diff.match import Matches
from zckpt.state import Checkpoint, Scalar, Slot, by_key, without
from zckpt.torchfile import (
    LEAVES,
    PARTS,
    Below,
    Digests,
    FromFile,
    NumpyArray,
    Object,
    Storage,
    Tensor,
    children,
    each,
    plain,
)

MAXIMUM_LEAVES = 1 << 14
"""Of one value: a file may refer to its parts so often that no one could look at each of them."""

OF_CODES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
"""Element types by which the codes of a quantised tensor are compared."""

SHOWN_CHARACTERS = 200
"""A longer value is shown by its beginning and a digest, by which it is compared."""


@immutable
class Leaf:
    """A value with nothing below it."""

    value: object  # what it is compared by, and shown as
    slot: Slot | None = None  # the elements of a tensor, which are compared too


def leaves(value: object) -> dict[str, Leaf]:
    """Return the leaves below a value by their path, `client.args[0].name`.

    Lists and tuples are alike, and a single value is what it is however it is stored; tensors are compared by their
    elements wherever they lie.
    """
    found, meaning = list[tuple[str, Leaf]](), _Meaning()
    inside, summed = set[int](), set[int]()

    def collect(node: object, path: str, file: str, most: int) -> None:
        """Add the leaves below a node, at most `most`; of a tree that has too many, its largest parts are one each."""
        if isinstance(node, FromFile):
            collect(node.node, path, node.path, most)
            return
        leaf = _leaf(node)
        if leaf is not None:
            if file and isinstance(node, Tensor):
                codes = replace(node, dtype=OF_CODES.get(node.dtype, node.dtype))  # scales are leaves beside it
                leaf = replace(leaf, slot=slot_of(path, codes, file))
            found.append((path, leaf))
        elif id(node) in inside:
            found.append((path, Leaf("<cycle>")))
        else:
            inside.add(id(node))
            open_up(node, path, file, most)
            inside.remove(id(node))

    def open_up(node: object, path: str, file: str, most: int) -> None:
        below = _below(node)
        counts = [meaning.and_count(child)[1] for _, child in below]
        if len(counts) > most:
            sum_up(node, path, file)
            return
        if isinstance(node, Object):
            found.append((f"{path}.class", Leaf(_shown(node.cls))))
        elif not below:
            found.append((path, Leaf("{}" if isinstance(node, dict) else "[]")))
        share = most if sum(counts) <= most else most // len(counts)
        for (step, child), count in zip(below, counts, strict=True):
            if isinstance(node, dict) or isinstance(step, str):
                place = f"{path}.{step}" if path else str(step)
            else:
                place = f"{path}[{step}]"
            collect(child, place, file, min(count, share))

    def sum_up(node: object, path: str, file: str) -> None:
        """Add one leaf for all values below a node, and each tensor, whose elements are compared, once."""
        digest, count = meaning.and_count(node)
        found.append((path, Leaf(f"{count} values, digest {digest.hex()[:16]}")))
        parts = each(node, lambda one: (child for _, child in children(one)), summed)
        for number, part in enumerate(part for part in parts if isinstance(part, (Tensor, FromFile))):
            if isinstance(part, FromFile):
                sum_up(part.node, f"{path}[{number}]", part.path)
            else:
                collect(part, f"{path}[{number}]", file, 1)

    collect(value, "", "", MAXIMUM_LEAVES)
    return _apart(found)


def _apart(leaves: Iterable[tuple[str, Leaf]]) -> dict[str, Leaf]:
    """Return leaves by path; if keys read alike (1 and "1", "a.b" and "b" in "a"), further ones have numbers."""
    found = dict[str, Leaf]()
    uses = Counter[str]()
    for path, leaf in leaves:
        name = path
        while name in found:
            uses[path] += 1
            name = f"{path} ({uses[path] + 1})"
        found[name] = leaf
    return found


class _Meaning(Digests):
    """Digests of what values mean, of which leaves are the values."""

    def value(self, node: object) -> str | None:
        leaf = _leaf(node)
        return None if leaf is None else repr(leaf.value)

    def kind(self, node: object) -> str:
        if isinstance(node, Object):
            return node.qualified
        return "dict" if isinstance(node, dict) else type(node).__name__ if type(node) in PARTS else "list"

    def below(self, node: object) -> Below:
        return iter(_below(node))


def _leaf(node: object) -> Leaf | None:
    """Return what a value with nothing below it is compared by; None for any other."""
    if isinstance(node, Scalar):
        node = node.value
    if isinstance(node, Tensor):
        return Leaf(f"tensor of {node.dtype} {list(node.shape)}")
    is_one = type(node) in LEAVES or (isinstance(node, NumpyArray) and node.items is None)
    return Leaf(_shown(node)) if is_one else None


def _below(node: object) -> list[tuple[object, object]]:
    if isinstance(node, FromFile):
        return [("", node.node)]
    below = [(_shown(step) if isinstance(step, (Storage, Tensor)) else step, child) for step, child in children(node)]
    if isinstance(node, Object):
        return [(step, child) for step, child in below if step != "cls" and child not in ((), [], None)]
    return below


def _shown(node: object) -> object:
    if isinstance(node, NumpyArray):
        return f"array of {node.dtype} {list(node.shape)}, sha256 {hashlib.sha256(node.data).hexdigest()[:16]}"
    if isinstance(node, (bytes, bytearray)):
        return f"{len(node)} bytes, sha256 {hashlib.sha256(node).hexdigest()[:16]}"
    value = plain(node)
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}..., sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return value


SHOWN_NAMES = 3


@immutable
class Setting:
    """Something that is no tensor and differs; JSON-able values, None where a side has none."""

    key: str
    a: object
    b: object


def compare_settings(a: Checkpoint, b: Checkpoint, matches: Matches, *, memory: int) -> list[Setting]:
    """Return what differs besides the tensors. Raises SourceError: a tensor that was carried along cannot be read.

    Not compared is what a world size, a stage or a format decides: ranks, files, which names share one tensor, and
    the keys that formats say to `follow` from how state is cut.
    """
    scales = [single(1.0 if one.loss_scale is None else one.loss_scale) for one in (a, b)]  # 1: losses as they are
    facts = (("step", a.step, b.step), ("loss_scale", scales[0], scales[1]))
    found = [Setting(key, x, y) for key, x, y in facts if x != y]
    found += _groups(a, b, matches)
    found += _state(matches)
    if a.param_groups and b.param_groups:  # a model alone does not say what is trained
        for name in matches.names:
            x, y = (side[name].group is not None for side in (matches.ours, matches.theirs))
            found += [Setting(f"trained[{name}]", x, y)] if x != y else []
    ranks = [
        {
            f"{one.key}[group {one.group}, part {one.part}, rank {one.rank}, mp_rank {one.mp_rank}]": one.value
            for one in side.per_rank
        }
        for side in (a, b)
    ]
    found += _carried("per_rank", ranks[0], ranks[1], memory)
    found += _carried("metadata", a.metadata, b.metadata, memory)
    found += _carried("optimizer", a.optimizer_metadata, b.optimizer_metadata, memory)
    every = list(formats()) if found else []  # those of other packages, too: it takes a while to look for them
    return [one for one in found if not any(its.follows(one.key, (one.a, one.b), (a, b)) for its in every)]


def _groups(a: Checkpoint, b: Checkpoint, matches: Matches) -> Iterator[Setting]:
    if len(a.param_groups) != len(b.param_groups):
        yield Setting("param_groups", f"{len(a.param_groups)} groups", f"{len(b.param_groups)} groups")
        return
    sides = [{parameter.name: name for name, parameter in side.items()} for side in (matches.ours, matches.theirs)]
    for index, groups in enumerate(zip(a.param_groups, b.param_groups, strict=True)):
        key, (ours, theirs) = f"param_groups[{index}]", groups
        # the names that torch puts among hyperparameters are members, which are compared as such
        yield from _leaves(key, *(leaves(without(its.hyperparameters, "param_names")) for its in groups))
        if ours.optimizer != theirs.optimizer:
            yield Setting(f"{key}.optimizer", ours.optimizer, theirs.optimizer)
        x, y = ([names.get(one, one) for one in its.parameters] for names, its in zip(sides, groups, strict=True))
        if sorted(x) != sorted(y):
            alone = ([name for name in own if name not in other] for own, other in ((x, set(y)), (y, set(x))))
            yield Setting(f"{key}.params", *(listed(names, most=SHOWN_NAMES) or "none" for names in alone))
        elif x != y:
            at = next(i for i, (one, other) in enumerate(zip(x, y, strict=True)) if one != other)
            yield Setting(f"{key}.params", f"{x[at]} at {at}", f"{y[at]} at {at}")


def _leaves(key: str, a: Mapping[str, Leaf], b: Mapping[str, Leaf]) -> Iterator[Setting]:
    for path in dict.fromkeys([*a, *b]):
        x, y = (side[path].value if path in side else None for side in (a, b))
        if x != y or (path in a) != (path in b):
            yield Setting(f"{key}.{path}" if path else key, x, y)


def _state(matches: Matches) -> Iterator[Setting]:
    """Yield single values of parameters that differ; what all of a group have alike comes once."""
    ours = matches.ours
    groups = by_key(
        ((ours[name].group if name in ours else None, key), (name, x, y)) for name, key, x, y in matches.singles
    )
    sizes = Counter(parameter.group for parameter in ours.values() if parameter.tied_to is None)
    for (group, key), values in groups.items():
        if group is not None and len(values) == sizes[group] and len({repr(value[1:]) for value in values}) == 1:
            yield Setting(f"param_groups[{group}].state.{key}", *values[0][1:])
        else:
            yield from (Setting(f"state[{name}].{key}", x, y) for name, x, y in values)


def _carried(key: str, a: Mapping[str, object], b: Mapping[str, object], memory: int) -> Iterator[Setting]:
    """Compare trees, and the tensors in them."""
    ours, theirs = (
        _apart((f"{name}.{path}" if path else name, leaf) for name in side for path, leaf in leaves(side[name]).items())
        for side in (a, b)
    )
    yield from _leaves(key, ours, theirs)
    both = ((path, ours[path], theirs[path]) for path in ours if path in theirs)
    pairs = [
        pair(f"{key}.{path}", one.slot, other.slot)
        for path, one, other in both
        if one.value == other.value and one.slot is not None and other.slot is not None
    ]
    for one in differences(pairs, memory=memory):
        text = str(ours[one.label.removeprefix(f"{key}.")].value)
        yield Setting(one.label, text, f"differs in {one.figures.num_different} of {one.figures.numel}")
