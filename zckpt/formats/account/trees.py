"""Every leaf of a file's tree: the tensor or value there, and what has become of it.

A tensor with elements is what its bytes are: all of them have to lie in spans, copies or padding. What lies below a
node that the checkpoint's metadata or state has taken over goes with it. Of any other value a rule of the adapter says
what it is, and a value that is said to be state has to be under a key that some parameter or param group has.

The rules of a file become a tree of their own, step by step as the file's tree is gone through: a place there has the
rules that fit all steps to it, in their order. Steps that no rule names lead to the same place, however many there are;
numbers may have one of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import lru_cache, reduce

from zckpt.formats.account.ranges import Known, spans_of
from zckpt.immutable import immutable, mutable
from zckpt.state import Checkpoint, Slot, SourceFile
from zckpt.state.boxes import Range, total
from zckpt.state.inventory import (
    ANY,
    CARRIED,
    EXACTLY,
    IMPLIED,
    LEFT_OUT,
    NUMBER,
    RECORD,
    REST,
    STATE,
    TENSOR,
    VALUE,
    Item,
    Rule,
)
from zckpt.torchfile import (
    LEAVES,
    Below,
    FromFile,
    OrderedMapping,
    Storage,
    Tensor,
    children,
    each,
    has_tensors,
    node_of,
    oddity,
)

Steps = Sequence[object]
"""Keys, indices and names of fields from the root of a tree."""

SHOWN_STEP = 200
"""Characters of a key that a place shows: a name in a file may have any length."""

KEPT = 8
"""Sets of rules whose places are kept: the files of all ranks have the same few."""

FEW = 64
"""Rules of a set that is kept: a file may have one for each of its items."""


class Fit:
    """A place that some rules fit.

    Parameters
    ----------
    rules : sequence of Rule
        Those whose steps fit, in the order in which they are asked.
    depth : int
        Number of steps to the place.

    Attributes
    ----------
    rule : Rule or None
        The first that speaks for what is here.
    """

    __slots__ = ("_any", "_depth", "_is_same_below", "_named", "_next", "_numbers", "_rules", "rule")

    def __init__(self, rules: Sequence[Rule], depth: int) -> None:
        self._rules, self._depth = rules, depth
        self._named: dict[str, list[int]] = {}  # which rules go on with a step, by the step
        self._any: list[int] = []
        self._numbers: list[int] = []
        for number, one in enumerate(rules):
            step = one.pattern[depth] if len(one.pattern) > depth else None
            if step in (ANY, REST) or (step is None and one.pattern[-1:] == (REST,)):
                self._any.append(number)
            elif step == NUMBER:
                self._numbers.append(number)
            elif step is not None:
                self._named.setdefault(step.removeprefix(EXACTLY), []).append(number)
        self._next: dict[str | bool, Fit] = {}
        """By a step that rules name; of others by whether it is a number that has rules of its own."""
        ends = ((one, len(one.pattern)) for one in rules)
        self.rule = next(
            (one for one, n in ends if depth == n or (depth >= n - 1 and one.pattern[-1:] == (REST,))), None
        )
        self._is_same_below = all(one.pattern[-1:] == (REST,) and len(one.pattern) <= depth for one in rules)

    def after(self, step: object) -> Fit:
        """Return the place that one more step leads to."""
        if self._is_same_below:
            return self
        text = step if type(step) is str else text_of(step)
        is_number = bool(self._numbers) and text.isdecimal()
        key = text if text in self._named else is_number
        if key not in self._next:
            those = [*self._named.get(text, ()), *(self._numbers if is_number else ()), *self._any]
            self._next[key] = Fit([self._rules[number] for number in sorted(those)], self._depth + 1)
        return self._next[key]


_kept = lru_cache(maxsize=KEPT)(Fit)


def text_of(step: object) -> str:
    """Return a step as a place shows it, and as rules name it."""
    text = step if isinstance(step, str) else ":".join(map(str, step)) if isinstance(step, tuple) else str(step)
    return text if len(text) <= SHOWN_STEP else text[: SHOWN_STEP - 3] + "..."


def place_of(steps: Steps) -> str:
    """Return the steps to a place as text."""
    return "/".join(map(text_of, steps))


TRAINED_ROLES = frozenset({"model", "optimizer", "expert", "pipeline layer", "shard", "rank"})
"""Roles of files whose tensors are state of a model or an optimizer, whatever else they may be."""


FIRST = "first"
"""In the place of a path: the first of the files that share a tree."""


@mutable
class Taken:
    """What a checkpoint has taken of its files, other than elements."""

    nodes: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """Fate, and under which key, by the file of a node, where one is named, and its id: files that are alike share a
    tree, of which each keeps its own tensors. What is one for all is by `FIRST`: it is that of the first file with the
    tree, of which others hold copies. The checkpoint keeps nodes alive.
    """
    paths: set[str] = field(default_factory=set)  # files that are named
    values: dict[tuple[str, int], str] = field(default_factory=dict)
    """Under which key a plain value of the first file is carried, by its own key and its id."""
    keys: set[str] = field(default_factory=set)  # of single values that parameters and param groups have


def taken(checkpoint: Checkpoint) -> Taken:
    """Return what a checkpoint has taken of its files, other than elements."""
    found = Taken()
    every = checkpoint.holders()
    for values in (checkpoint.metadata, checkpoint.optimizer_metadata):
        for key, value in values.items():
            found.values[key, id(node_of(value))] = key
            _mark(found, value, CARRIED, key)
    for number, group in enumerate(checkpoint.param_groups):
        for values in (group.hyperparameters, group.state):
            found.keys.update(values)
            for key, value in values.items():
                _mark(found, value, STATE, f"{key} of param group {number}")
    for own in checkpoint.per_rank:
        found.keys.add(own.key)
        _mark(found, own.value, STATE, f"{own.key} of rank {own.rank}", path="")
    for parameter in every:
        found.keys.update(parameter.state)
        found.keys.update(parameter.optimizer_slots)
        for key, value in parameter.state.items():
            _mark(found, value, STATE, f"{key} of {parameter.name}")
    return found


def _mark(found: Taken, value: object, fate: str, key: str, path: str = FIRST) -> None:
    """Note a node and all below it: those that are more than plain values by themselves, the others by their keys."""
    waiting = [(value, path)]
    while waiting:
        node, path = waiting.pop()
        if isinstance(node, FromFile):
            waiting.append((node.node, node.path))
            found.paths.add(node.path)
        elif (type(node) not in LEAVES or isinstance(node, Storage)) and (path, id(node)) not in found.nodes:
            found.nodes[path, id(node)] = fate, key
            for step, child in children(node):
                waiting.append((child, path))
                if fate == CARRIED and isinstance(step, str):
                    found.values.setdefault((step, id(child)), key)


@immutable
class LazyTree:
    """What a file holds, of which some tensors have an object only while they are looked at."""

    held: dict[str, object]  # the rest, a tree
    tensors: Iterable[tuple[Steps, Tensor]]  # those, with the steps to each


@mutable
class _Sum:
    """Items of one kind, fate and reason: the place of the first, and how many there are."""

    place: str
    nbytes: int = 0
    count: int = 0


class FileAccount:
    """Goes through one file.

    Parameters
    ----------
    file : SourceFile
    shown : str
        Its name in the inventory.
    known : Known
        What the checkpoint has of its bytes.
    taken : Taken
    is_first : bool
        Whether no file before it has the same tree.
    """

    def __init__(self, file: SourceFile, shown: str, known: Known, taken: Taken, *, is_first: bool) -> None:
        self.file = file
        self.shown = shown
        self.known = known
        self.taken = taken
        self.elements: list[Range] = []
        self.ranges: dict[str, list[Range]] = defaultdict(list)
        self._paths = [file.path] * (file.path in taken.paths) + [FIRST] * is_first + [""]
        self._values = taken.values if is_first else {}
        self._sums: dict[tuple[str, str, str], _Sum] = {}
        self._lost: list[Item] = []

    def items(self) -> list[Item]:
        """Return what the file holds: one item for each reason, and each thing that is left out by itself."""
        for name, _, nbytes, _ in self.file.records:
            inside = name.partition("/")[2]
            if inside in _RECORDS or inside.startswith("data/"):
                self._add(RECORD, IMPLIED, "records of the archive", (inside,), nbytes)
            else:
                self._add(RECORD, LEFT_OUT, "no file of torch.save has such a record", (inside,), nbytes)
        tree, rules = self.file.tree, self.file.rules
        fit = _kept(rules, 0) if len(rules) <= FEW else Fit(rules, 0)
        held, tensors = (tree.held, tree.tensors) if isinstance(tree, LazyTree) else (tree, ())
        self._walk(held, (), fit)
        for steps, tensor in tensors:
            self._walk(tensor, steps, reduce(Fit.after, steps, fit))
        if held is not tree and not self._sums and not self._lost:
            self._add(TENSOR, IMPLIED, "tensors without elements", ())
        sums = [
            Item(self.shown, one.place, kind, fate, about, one.nbytes, one.count)
            for (kind, fate, about), one in self._sums.items()
        ]
        return [*sums, *self._lost]

    def _walk(self, root: object, above: Steps, fit: Fit) -> None:
        """Go through a tree in its order, each object once; nothing recurses."""
        seen: set[int] = set()
        steps = list(above)
        levels = [(self._below(root, steps, fit, seen), fit)]
        while levels:
            below, fit = levels[-1]
            for step, child in below:
                inner = fit.after(step)
                steps.append(step)
                if type(child) in LEAVES:
                    self._value(child, steps, inner.rule)
                elif id(child) not in seen:
                    levels.append((self._below(child, steps, inner, seen), inner))
                    break
                steps.pop()
            else:
                levels.pop()
                if levels:
                    steps.pop()

    def _below(self, node: object, steps: Steps, fit: Fit, seen: set[int]) -> Below:
        """Account for a node by itself; return what is below it and has to be looked at."""
        if type(node) in LEAVES:
            self._value(node, steps, fit.rule)
            return _NOTHING
        seen.add(id(node))
        if self._take(node, steps, fit.rule):
            return _NOTHING
        if isinstance(node, Slot):
            self._elements([span.reach for span in spans_of(node)], steps, None)
            return _NOTHING
        if isinstance(node, Tensor):
            self._tensor(node, steps, fit.rule)
            return self._of_tensor(node, steps)
        if isinstance(node, dict):
            return self._entries(node, steps)
        return children(node) if node else _NOTHING

    def _of_tensor(self, tensor: Tensor, steps: Steps) -> Below:
        """Yield what a tensor has besides its elements, but flags of its view and attributes that torch itself sets."""
        for step, child in children(tensor):
            own = child is tensor.attributes and all(_TORCHS.fullmatch(str(key)) for key in tensor.attributes or ())
            if own and not has_tensors(child):
                self._add(VALUE, IMPLIED, "attributes that torch sets on tensors", (*steps, step))
            elif child is not tensor.metadata:
                yield step, child

    def _entries(self, node: dict[object, object], steps: Steps) -> Below:
        """Yield what is in a mapping, but plain values that the metadata have under their keys.

        Nor does it yield what `state_dict` sets on its result: the version of each module's layout.
        """
        values = self._values
        state = node.state if isinstance(node, OrderedMapping) else None
        for step, child in children(node):
            if type(child) in LEAVES:
                key = values.get((step, id(child))) if child is not None and isinstance(step, str) else None
                if key is not None:
                    self._add(VALUE, CARRIED, key, (*steps, step))
                    continue
            elif child is state and isinstance(child, dict) and list(child) == [_VERSIONS]:
                self._add(VALUE, IMPLIED, "versions of modules", (*steps, _VERSIONS))
                continue
            yield step, child

    def _take(self, node: object, steps: Steps, rule: Rule | None) -> bool:
        """Account for a node that the checkpoint has taken, or cannot have, with the tensors below it, if it is one."""
        nodes = self.taken.nodes
        fate, about = next((nodes[path, id(node)] for path in self._paths if (path, id(node)) in nodes), ("", ""))
        odd = None if fate else oddity(node)
        if odd is not None and rule is not None and rule.tensors:
            fate, about = rule.fate, rule.about
        elif odd is not None:
            fate, about = LEFT_OUT, f"a tensor {odd}, which zckpt does not write densely"
        if not fate:
            return False
        below = each(node, lambda one: [child for _, child in children(one) if type(child) not in LEAVES])
        ranges = [_range(one) for one in below if isinstance(one, Tensor)]
        self.ranges[fate] += ranges
        kind = TENSOR if fate == LEFT_OUT or isinstance(node, Tensor) else VALUE
        self._add(kind, fate, about, steps, total(ranges))
        return True

    def _tensor(self, tensor: Tensor, steps: Steps, rule: Rule | None) -> None:
        low, high = _range(tensor)
        is_state = rule is not None and rule.fate == IMPLIED and bool(self.known.shares([(low, high)]))
        if rule is not None and rule.tensors and tensor.numel and not is_state:
            self._add(TENSOR, rule.fate, rule.about, steps, high - low)
            self.ranges[rule.fate].append((low, high))
            return
        is_value = rule is not None and tensor.numel == 1 and rule.fate != LEFT_OUT
        is_known = is_value and sum(self.known.shares([(low, high)]).values()) == high - low
        if is_value and not is_known and self._value(tensor, steps, rule, high - low):
            self.ranges[rule.fate if rule else IMPLIED].append((low, high))
            return
        self._elements([(low, high)], steps, tensor)

    def _elements(self, ranges: Sequence[Range], steps: Steps, tensor: Tensor | None) -> None:
        """Account for elements by where their bytes are."""
        nbytes = total(ranges)
        if not nbytes:
            self._add(TENSOR, IMPLIED, "tensors without elements", steps)
            return
        self.elements += ranges
        found = self.known.shares(ranges)
        lost = nbytes - sum(found.values())
        if lost:
            reason = "nothing has read it" if lost == nbytes else f"{lost} of {nbytes} bytes are in no parameter"
            if tensor is not None and tensor.subclass is not None:
                reason += f"; it is a {tensor.subclass.qualified}"
            self._add(TENSOR, LEFT_OUT, reason, steps, lost)
            return
        fate = next(iter(found))
        slots = dict.fromkeys(slot for low, high in ranges for slot in self.known.slots(fate, low, high))
        self._add(TENSOR, fate, ", ".join(slots), steps, nbytes)

    def _value(self, node: object, steps: Steps, rule: Rule | None, nbytes: int = 0) -> bool:
        """Account for a value; tell whether it has any other fate than to be left out."""
        stars = [at for at, step in enumerate(rule.pattern) if step == ANY] if rule and rule.fate == STATE else []
        # of state, what the last `*` stands for is a key that some parameter has
        if rule is not None and (not stars or text_of(steps[stars[-1]]) in self.taken.keys):
            self._add(TENSOR if nbytes else VALUE, rule.fate, rule.about, steps, nbytes)
            return True
        if node is None or (rule is not None and not nbytes and node in ("", False)):
            self._add(VALUE, IMPLIED, "nothing: None", steps)
            return True
        if not nbytes:
            reason = "nothing has read it" if rule is None else "no parameter and no param group has it"
            self._add(VALUE, LEFT_OUT, reason, steps)
        return False

    def _add(self, kind: str, fate: str, about: str, steps: Steps, nbytes: int = 0) -> None:
        """Count what has some fate; what is left out is an item by itself."""
        if fate == LEFT_OUT:
            trained = kind == TENSOR and self.file.role in TRAINED_ROLES
            self._lost.append(Item(self.shown, place_of(steps), kind, fate, about, nbytes, trained=trained))
            return
        one = self._sums.get((kind, fate, about))
        if one is None:
            one = self._sums[kind, fate, about] = _Sum(place_of(steps))
        one.nbytes += nbytes
        one.count += 1


_RECORDS = frozenset({"data.pkl", "version", "byteorder", ".format_version", ".storage_alignment",
                      ".data/serialization_id"})  # fmt: skip
_NOTHING: Below = iter(())
_VERSIONS = "_metadata"
_TORCHS = re.compile(r"_has_been_cloned|_fsdp_\w+|_ddp_ignored|_is_buffer|_is_param|persistent|_dynamo_\w+")
"""Attributes of FSDP1's clones, of parameters and buffers under FSDP, DDP and torch.compile (torch 2.13); all say only
how the process that saved them had made or would treat them."""


def _range(tensor: Tensor) -> Range:
    """Return the bytes of the file from the first to the last element of a tensor."""
    low, high = tensor.reach
    return tensor.storage.offset + low, tensor.storage.offset + high
