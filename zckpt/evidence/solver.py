"""Which candidates the numbers of an optimizer are, in an order of which some may be left out. Pure.

A name is certain where every reading that the evidence leaves gives the number this name. Each param group lists its
parameters in the model's order, or sorted by name, or as a format says; it need not have all.

Names that follow each other may also have to fill what has a known size: a flat tensor, or several in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain, permutations
from typing import Any, Generic, TypeVar

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.immutable import immutable
from zckpt.state import MASTER, Checkpoint, GivenNames, Parameter, Shape, are_distinct
from zckpt.state.dtypes import is_complex, is_floating
from zckpt.state.names import aligned, is_number

Number = TypeVar("Number", bound=Hashable)
State = TypeVar("State", bound=Hashable)
Step = TypeVar("Step")
Candidate = TypeVar("Candidate")

FACTORED = (("exp_avg_sq_row", "exp_avg_sq_col", 0), ("row_var", "col_var", 1))
"""Slots of Adafactor, transformers' and torch's: the shape of the parameter without its last dimension, and without the
one before; and how many dimensions of 1 are in their place."""


Orders = Callable[[int, Sequence[str]], Sequence[Sequence[str]]]


def in_order(_group: int, names: Sequence[str]) -> list[Sequence[str]]:
    """Return the only order of a group that has its parameters as the model has them."""
    return [names]


def in_order_or_sorted(_group: int, names: Sequence[str]) -> list[Sequence[str]]:
    """Return the orders of a group that has its parameters as the model has them, or sorted by name."""
    return [names, sorted(names)]


MOST_PERMUTED = 4
"""Of models that one optimizer has, those that it may have in any order; more are taken to be in the file's."""


def orders_of_models(models: Sequence[Collection[str]], group: int, names: Sequence[str]) -> list[Sequence[str]]:
    """Return the orders of a group of an optimizer of several models, each of which has these names."""
    if not models:
        return in_order_or_sorted(group, names)
    each = [[name for name in names if name in model] for model in models]
    ways = permutations(each) if len(each) <= MOST_PERMUTED else [each]
    return [[*chain(*way)] for one in ways for way in (one, map(sorted, one))]


@immutable
class Evidence(Generic[Number]):
    """What speaks for a number being a parameter."""

    groups: Sequence[Sequence[Number]]  # the numbers in each param group, in order
    candidates: Mapping[str, Shape]  # shapes of what an optimizer could own, in the model's order
    shapes: Mapping[Number, Shape | None] = field(default_factory=dict)
    """As an optimizer's state shows them; it fits any candidate where it shows none."""
    rules: Sequence[Callable[[Number, str], bool]] = ()
    """What else tells whether a number can be a candidate; asked in turn, of those of one shape."""
    tied: Mapping[str, str] = field(default_factory=dict)  # candidates by further names
    factored: bool = False  # whether state may have fewer elements than its parameter

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, groups: Sequence[Sequence[Number]], shapes: Mapping[Number, Shape | None],
        **more: Any,  # noqa: ANN401  # fields of this class
    ) -> Evidence[Number]:  # fmt: skip
        """Return evidence whose candidates are a checkpoint's parameters."""
        candidates = {one.name: one.shape for one in checkpoint.owners}
        return cls(groups, candidates, shapes, tied=checkpoint.aliases, **more)

    @property
    def numbers(self) -> list[Number]:
        """The numbers of all groups."""
        return [number for group in self.groups for number in group]

    def fits(self, number: Number, name: str) -> bool:
        """Tell whether a number can be a candidate."""
        shape, whole = self.shapes.get(number), self.candidates[name]
        alike = shape is None or shape == whole or (self.factored and can_be_of(shape, whole))
        frozen = shape is not None and self.is_original(name)
        return alike and not frozen and all(rule(number, name) for rule in self.rules)

    def is_original(self, name: str) -> bool:
        """Tell what PEFT keeps as it was, frozen, beside a copy that it trains."""
        owner, original, _ = name.partition(".original_module.")
        return bool(original) and any(one.startswith(f"{owner}.modules_to_save.") for one in self.candidates)

    def known(self, names: Sequence[str]) -> list[str]:
        """Return names as the candidates have them, whatever wrappers they were in; strange ones as they are."""
        own = aligned([*self.candidates, *self.tied], names)
        return [self.tied.get(name, name) for name in (own.get(name, name) for name in names)]

    def given(self, names: Sequence[str]) -> dict[Number, str]:
        """Return the candidates that someone names in the order of the numbers.

        Raises UsageError: it cannot be these.
        """
        numbers = self.numbers
        if len(names) != len(numbers) or not are_distinct(names):
            raise UsageError(
                "unusable parameter names",
                expected=f"{len(numbers)} different names",
                found=f"{len(set(names))} different ones of {len(names)}",
            )
        found = dict(zip(numbers, self.known(names), strict=True))
        for (number, name), own in zip(found.items(), names, strict=True):
            if name not in self.candidates:
                raise UsageError(f"the model has no parameter {own}")
            if not self.fits(number, name):
                raise UsageError(
                    f"parameter {number[-1] if isinstance(number, tuple) else number} of the optimizer is not {own}",
                    expected=f"shape {self.candidates[name]}",
                    found=self.shapes.get(number),
                )
        if len(set(found.values())) < len(found):
            raise UsageError("two of the names belong to one tied parameter")
        return found

    def recorded(self, names: Sequence[str]) -> dict[Number, str]:
        """Return the candidates that a program names in the order of the numbers; none where it cannot be these."""
        try:
            return self.given(names)
        except UsageError:
            return {}

    def certain(self, orders: Orders = in_order_or_sorted) -> dict[Number, str]:
        """Return the candidates that are certain.

        `orders`: given the index of a group and names in the model's order, the orders in which it may have some of
        them.
        """
        certain: dict[Number, str] = {}
        while True:
            found = dict(certain)
            taken = set(certain.values())
            for index, group in enumerate(self.groups):
                own = {certain[number] for number in group if number in certain}
                free = [name for name in self.candidates if name not in taken or name in own]
                readings = []  # in each order, what is the same of the first and the last place of each number
                for order in orders(index, free):
                    first = self._leftmost(group, order)
                    if first is not None:
                        last = self._leftmost(group[::-1], order[::-1]) or []
                        readings.append([a if a == b else None for a, b in zip(first, last[::-1], strict=True)])
                for number, *names in zip(group, *readings, strict=True):
                    if names and names[0] is not None and len(set(names)) == 1:
                        found[number] = names[0]
            uses = Counter(found.values())
            if len(uses) < len(found):  # two groups have some
                return {number: name for number, name in found.items() if uses[name] == 1}
            if found == certain:
                return certain
            certain = found

    def alone(self) -> dict[Number, str]:
        """Return the candidates that fit one number alone, which fits no other: whatever order groups have."""
        fitting = {number: [name for name in self.candidates if self.fits(number, name)] for number in self.numbers}
        uses = Counter(name for names in fitting.values() for name in names)
        return {number: names[0] for number, names in fitting.items() if len(names) == 1 == uses[names[0]]}

    def _leftmost(self, group: Sequence[Number], order: Sequence[str]) -> list[str] | None:
        """Return the first names in order as which the group can be read; None if it cannot."""
        rest = iter(order)
        found = [next((name for name in rest if self.fits(number, name)), None) for number in group]
        return [name for name in found if name is not None] if None not in found else None


def agree(state: Shape, parameter: Shape) -> bool:
    """Tell whether state of this shape can belong to a parameter: per element, or factored over some dimensions."""
    if len(state) == len(parameter):
        return all(own in (1, whole) for own, whole in zip(state, parameter, strict=True))
    return len(state) < max(len(parameter), 1) and set(state) <= set(parameter)


def can_be_of(state: Shape, parameter: Shape) -> bool:
    """Tell whether state of this shape can belong to a parameter that is named.

    It agrees, or is of rows, once for each shard of their columns, as torchrec's row-wise optimizers have.
    """
    if agree(state, parameter):
        return True
    return len(state) == 1 and len(parameter) == 2 and state[0] >= parameter[0] > 0 and not state[0] % parameter[0]


def shown_shape(state: Mapping[str, Iterable[Shape]]) -> Shape | None:
    """Return the shape of a parameter as the tensors of its slots show it: the largest of them; None if none does."""
    shapes = {slot: list(its) for slot, its in state.items() if slot not in ("step", "RMS")}
    if shapes.get(MASTER):
        return shapes[MASTER][0]
    if (whole := factored_shape(shapes)) is not None:
        return whole
    return max((one for its in shapes.values() for one in its), key=lambda shape: (len(shape), shape), default=None)


def factored_shape(shapes: Mapping[str, Sequence[Shape]]) -> Shape | None:
    """Return the shape of a parameter of which slots are rows and columns; None if none are."""
    for row, column, spare in FACTORED:
        if shapes.get(row) and shapes.get(column):
            first = shapes[row][0]
            return (*first[: len(first) - spare], *shapes[column][0][-1:])
    return None


def is_trainable(dtype: str) -> bool:
    """Tell whether elements of a type can be trained; integers and bools are buffers."""
    return is_floating(dtype) or is_complex(dtype)


def may_be_trained(name: str, dtypes: Mapping[str, str]) -> bool:
    """Tell whether a tensor may be a parameter: not a batch norm's running statistic, beside which is an integer count.

    `dtypes`: of all tensors of the state dict.
    """
    module, dot, last = name.rpartition(".")
    count = dtypes.get(f"{module}{dot}num_batches_tracked") if last in ("running_mean", "running_var") else None
    return is_trainable(dtypes[name]) and (count is None or is_trainable(count))


def greatest(candidates: Iterable[Candidate], by: Callable[[Candidate], Any]) -> list[Candidate]:
    """Return those candidates of which something is greatest: of several things what comes first counts most."""
    found = [(by(one), one) for one in candidates]
    most = max((its for its, _ in found), default=None)
    return [one for its, one in found if its == most]


# --- what is said, and refused, where no name is certain, and what would settle it

NAMES_ADVICE = "give --names FILE, with one name per line in the optimizer's order"

NAMES_BY_STAGE_ADVICE = "give --names FILE, with one name per line: stage by stage, in the order of each optimizer"

NAMES_OF_RANK_ADVICE = f"{NAMES_ADVICE}, experts by their number on a rank"


MOST_SHOWN = 8


def refuse_unnamed(checkpoint: Checkpoint, why: str) -> None:
    """Raise UnsupportedError unless all parameters of the optimizer have names; `why` says who needs them."""
    every = checkpoint.grouped
    unknown = list(dict.fromkeys([*checkpoint.unnamed, *(name for name in every if name not in checkpoint.parameters)]))
    absent = [name for name in unknown if not is_number(name.rpartition(".")[2])]
    if absent:
        raise UnsupportedError(
            "the optimizer has state of parameters that the model lacks",
            found=listed(absent, most=MOST_SHOWN),
            advice="give what has both the model and the optimizer",
        )
    if unknown:
        mapped = (
            "add --map=transformers, or " if any("--map=transformers" in one for one in checkpoint.warnings) else ""
        )
        raise UnsupportedError(
            f"the names of some of the optimizer's parameters are unknown, {why}",
            found=listed(unknown, most=MOST_SHOWN),
            advice=f"{mapped}{NAMES_ADVICE}",
        )


def refuse_ungrouped(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError unless it is known which param group each parameter with state is in."""
    grouped = {*checkpoint.grouped}
    lost = [
        one.name
        for one in checkpoint.parameters.values()
        if one.name not in grouped and (one.optimizer_slots or (one.master and one.master.dtype != one.dtype))
    ]
    if lost:
        raise UnsupportedError(
            "it is unknown which parameters each param group has",
            path=checkpoint.source,
            found=f"{listed(lost, most=3)} in none",
            advice="`zckpt consolidate` writes the model; convert to zckpt keeps everything",
        )


def keep_number(checkpoint: Checkpoint, label: str, shape: Shape | None, *, is_kept: bool = True) -> Parameter:
    """Return what stands for a parameter that the model has not, or that has no certain name: kept if it has state."""
    one = Parameter(label, shape or (), "float32")
    if is_kept:
        checkpoint.unnamed[label] = one
    return one


def note_numbers(checkpoint: Checkpoint, numbers: Sequence[object], *, advice: str = NAMES_ADVICE) -> None:
    """Warn of parameters that have no certain names and stay numbers, if there are any."""
    if numbers:
        checkpoint.warnings.append(
            "the optimizer numbers its parameters, and several of the model's tensors fit "
            f"{listed(numbers, most=MOST_SHOWN)}: this state keeps its number ({advice})"
        )


def note_not_used(checkpoint: Checkpoint, names: GivenNames, whose: str = "the directory has") -> None:
    """Warn of names that were given where a file has them all."""
    if names is not None:
        checkpoint.warnings.append(f"--names is ignored: {whose} the names of the parameters")


def ways(
    count: int, start: State, end: State, steps: Callable[[int, State], Iterable[tuple[Step, State]]]
) -> tuple[int, list[Step]]:
    """Return in how many ways so many steps lead from a state to another, 2 if in more, and one of them.

    `steps`: yields what can be done in the n-th step in a state, and the state after it.
    """
    numbers = {start: 1}
    before: list[dict[State, tuple[Step, State]]] = []
    for number in range(count):
        after: dict[State, int] = {}
        before.append({})
        for state, leading in numbers.items():
            for step, to in steps(number, state):
                after[to] = min(after.get(to, 0) + leading, 2)
                before[-1][to] = step, state
        numbers = after
    found: list[Step] = []
    at = end
    for known in reversed(before) if end in numbers else ():
        step, at = known[at]
        found.append(step)
    return numbers.get(end, 0), found[::-1]
