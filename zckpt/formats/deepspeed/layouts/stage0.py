"""Stage 0: the optimizer is a plain one, in the model file; with 16-bit weights its masters are next to it.

optimizer = {state, param_groups}                                           fp32
optimizer = {optimizer_state_dict: {state, param_groups}, fp32_groups,      FP16_UnfusedOptimizer: a list of
             dynamic_loss_scale, cur_scale, cur_iter, ...}                  tensors for each group
optimizer = {optimizer_state_dict, fp32_groups_flat, ...}                   FP16_Optimizer: one flat tensor each

The last has {state: {group: {slot: flat}}, param_groups: [{params: [group]}]}: the trained parameters of a group lie in
its flat tensor end to end, in the order in which the user gave them, and without names. So they are found by value:
what lies there rounds to a parameter's weight. As for numbered optimizers, an order is certain where a group in the
model's order, or sorted by name, has one reading, and not both have another.

Source: `FP16_Optimizer.__init__`, DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zckpt.errors import DamagedFileError, UsageError, about
from zckpt.evidence import NAMES_ADVICE, Orders, in_order_or_sorted, ways
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.rare.one_bit import without_errors
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.optimizer import OptimizerState, parse
from zckpt.formats.torch_files.tensors import carried, slot_of
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Extent,
    GivenNames,
    Parameter,
    Slot,
    are_distinct,
    as_float,
    dict_of,
    list_of,
)
from zckpt.state.boxes import row_major
from zckpt.state.dtypes import is_floating
from zckpt.state.views import narrow, reshape
from zckpt.storage.files import Sources
from zckpt.torchfile import Tensor, TorchFile

FLAT_KEY = "fp32_groups_flat"
STATE_KEYS = frozenset({"optimizer_state_dict", "fp32_groups", FLAT_KEY, "state", "param_groups"})
"""What of an optimizer is read as slots and groups; the rest is about loss scaling and clipping."""


Fits = Callable[[int, str], bool]
"""Whether what lies from an element of a flat master on rounds to the weight of this name."""


class Numbered:
    """The optimizer in a file, which has numbers for its parameters, or flat masters of all of a group.

    Parameters
    ----------
    file : TorchFile
        The file that holds it, under `optimizer`: a state dict, or one with masters.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """

    def __init__(self, file: TorchFile) -> None:
        self.file, content = file, dict_of(file.root).get("optimizer")
        with about(file.path):
            if not isinstance(content, dict):
                raise DamagedFileError(
                    "unexpected content", expected="an optimizer's state dict", found=type(content).__name__
                )
            groups = list_of(content.get("fp32_groups")) if "optimizer_state_dict" in content else []
            masters = [t for group in groups for t in list_of(group) if isinstance(t, Tensor)]
            base = None if FLAT_KEY in content else content
            state = parse(content.get("optimizer_state_dict", base), file.path, masters)
            self.content, self.state = content, without_errors(state)
            found = content.get(FLAT_KEY, [])
            if not isinstance(found, (list, tuple)) or not all(
                isinstance(t, Tensor) and len(t.shape) == 1 for t in found
            ):
                raise DamagedFileError(f"unreadable {FLAT_KEY}", expected="a list of flat tensors")
            self.flats = list(found) if FLAT_KEY in content else None
            if self.flats is not None and [len(numbers) for numbers in self.state.numbers] != [1] * len(found):
                raise DamagedFileError(
                    "flat masters and param groups disagree", expected=f"{len(found)} groups of one tensor",
                    found=str(self.state.numbers)[:80],
                )  # fmt: skip

    def attach(
        self,
        checkpoint: Checkpoint,
        names: GivenNames,
        orders: Orders = in_order_or_sorted,
    ) -> bool:
        """Give a checkpoint's parameters the optimizer's state; False: the order in flat masters is not certain.

        `names`: of all that the optimizer has, in its order, from the user; `orders`: in which groups may have their
        parameters, as for `Evidence.certain`. Raises UsageError: `names` do not fit the file.
        """
        path = self.file.path
        if self.flats is not None:
            with about(path):
                found = self._unflattened(checkpoint, names, orders)
            if found is not None:
                attach(checkpoint, found[0], path, certain=found[1])
            return found is not None
        attach(checkpoint, self.state, path, names=names, orders=orders)
        return True

    def _unflattened(
        self, checkpoint: Checkpoint, names: GivenNames, orders: Orders
    ) -> tuple[OptimizerState, Mapping[int, str]] | None:
        """Return an optimizer of flat masters as one that numbers its parameters, and their names by number.

        None where their order is not certain, or some state is not one value for each element, nor one for all.
        """
        flats, base = self.flats or [], self.state
        candidates = {
            p.name: p for p in checkpoint.owners
            if p.numel and p.weight and is_floating(p.weight.dtype)
        }  # fmt: skip
        found: list[list[str]] = []
        numels = {name: one.numel for name, one in candidates.items()}
        with Sources() as sources:
            rest = list(names or ())
            for index, flat in enumerate(flats):
                fits = _by_value(slot_of(MASTER, flat, self.file.path), candidates, sources)
                if names is None:
                    possible = orders(index, list(candidates))
                    readings = {_reading(one, numels, flat.numel, fits) for one in possible} - {(0, ())}
                    if len(readings) != 1 or next(iter(readings))[0] > 1:
                        return None
                    found.append(list(readings.pop()[1]))
                else:
                    found.append(_given(rest, numels, flat.numel, fits))
                    rest = rest[len(found[-1]) :]
        every = [name for order in found for name in order]
        if rest:
            raise UsageError("there are more names than the optimizer has parameters", found=rest[0])
        if not are_distinct(every):
            return None
        numbered = OptimizerState({}, [])
        by_number = dict(enumerate(every))
        first = 0
        for group, (number,), flat, order in zip(base.groups, base.numbers, flats, found, strict=True):
            state = base.state.get(number, {})
            whole = {key: one for key, one in state.items() if isinstance(one, Tensor) and one.shape}
            if any(one.shape != flat.shape or not one.is_contiguous for one in whole.values()):
                return None
            numbered.groups.append({**group, "params": list(range(first, first + len(order)))})
            starts = accumulate((numels[name] for name in order), initial=0)
            for own, (name, at) in enumerate(zip(order, starts, strict=False), first):
                shape = candidates[name].shape
                numbered.masters[own] = _part(flat, shape, at)
                if state:
                    cut = {key: _part(one, shape, at) for key, one in whole.items()}
                    numbered.state[own] = {key: cut.get(key, value) for key, value in state.items()}
            first += len(order)
        return numbered, by_number

    def count(self, numels: Sequence[int]) -> int:
        """Return how many parameters there are, given the elements of those of which the first make up flat masters."""
        if self.flats is None:
            return len(self.state.every_number)
        total = sum(flat.numel for flat in self.flats)
        return next((n for n, held in enumerate(accumulate(numels, initial=0)) if held >= total), len(numels))

    @property
    def recorded_names(self) -> list[str] | None:
        """The names that torch's optimizer wrote down with its numbers, where it was made of `named_parameters()`.

        They are those of the engine's module, as ZeRO's files have them. None: not all parameters have one.
        """
        names, listed = self.state.recorded_names, [group.get("param_names") for group in self.state.groups]
        counts = [len(list_of(its)) for its in listed]
        whole = counts == [len(numbers) for numbers in self.state.numbers] if self.flats is None else all(counts)
        return names if names and whole and are_distinct(names) else None


def attach_optimizer(rank: Rank, names: GivenNames) -> None:
    """Give a rank of stage 0 the optimizer in its model file; errors are those of `Numbered`."""
    optimizer = Numbered(rank.model.file)
    keep_other_state(rank, optimizer.content, rank.model.file)
    if optimizer.attach(rank, names):
        mark_frozen(rank)
    else:
        rank.warnings.append(
            f"{rank.model.path}: FP16_Optimizer holds its masters and state in one flat tensor per group, and the "
            f"order of parameters in it is uncertain; they are left out, but the weights are read ({NAMES_ADVICE})"
        )


def keep_other_state(checkpoint: Checkpoint, content: Mapping[object, object], file: TorchFile) -> None:
    """Keep what an optimizer has besides its state: the loss scale and how it changes, clipping."""
    for key, value in content.items():
        if key not in STATE_KEYS:
            checkpoint.optimizer_metadata[str(key)] = carried(file, value)
    if (scale := as_float(content.get("cur_scale"))) is not None:
        checkpoint.loss_scale = scale


def mark_frozen(checkpoint: Checkpoint) -> None:
    """Mark parameters that no number of the optimizer can stand for; what is not certain is not marked."""
    owned = set(checkpoint.grouped)
    shapes = {parameter.shape for parameter in checkpoint.unnamed.values()}
    if owned - set(checkpoint.parameters) - set(checkpoint.unnamed):
        return
    for parameter in checkpoint.owners:
        parameter.frozen |= parameter.name not in owned and parameter.shape not in shapes


def _given(names: Sequence[str], numels: Mapping[str, int], numel: int, fits: Fits) -> list[str]:
    """Return the first of the user's names, which make up a flat tensor."""
    found: list[str] = []
    at = 0
    for name in names:
        if at == numel:
            break
        if name not in numels or at + numels[name] > numel or not fits(at, name):
            raise UsageError(
                f"{name} does not match element {at} of a flat master",
                expected="a parameter whose weight is the master, rounded",
            )  # fmt: skip
        found.append(name)
        at += numels[name]
    if at != numel:
        raise UsageError("there are too few names for a flat master", expected=f"{numel} elements", found=at)
    return found


def _reading(order: Sequence[str], numels: Mapping[str, int], numel: int, fits: Fits) -> tuple[int, tuple[str, ...]]:
    """Return in how many ways names in this order, some left out, make up a flat tensor, and one of them."""

    def steps(index: int, at: int) -> Iterator[tuple[str, int]]:
        name = order[index]
        yield "", at
        if at + numels[name] <= numel and fits(at, name):
            yield name, at + numels[name]

    count, names = ways(len(order), 0, numel, steps)
    return count, tuple(filter(None, names))


def _by_value(master: Slot, known: Mapping[str, Parameter], sources: Sources) -> Fits:
    """Return what holds a flat master against weights, at both ends of each."""
    import numpy as np  # here, for no other checkpoint is opened by its elements

    from zckpt.compare.weights import rounds_to
    from zckpt.engine.cast import cast
    from zckpt.engine.copy import read_extent

    first: dict[str, bytes] = {}
    rounded: dict[tuple[int, str], bytes | None] = {}

    def begins(at: int, weight: Slot, name: str) -> bool:
        """Tell whether the first elements are alike, which is known for each place and name once."""
        if name not in first:
            first[name] = read_extent(weight, Extent.flat(weight.shape, 0, 1), sources).tobytes()
        key = at, weight.dtype
        if key not in rounded:
            one = cast(read_extent(master, Extent.flat(master.shape, at, 1), sources), weight.dtype)
            rounded[key] = None if np.isnan(one.astype(np.float32)).any() else one.tobytes()
        return rounded[key] in (None, first[name])

    def fits(at: int, name: str) -> bool:
        weight = known[name].slots[WEIGHT]
        return begins(at, weight, name) and rounds_to(
            reshape(narrow(master, 0, at, weight.numel), weight.shape), weight
        )

    return fits


def _part(flat: Tensor, shape: tuple[int, ...], at: int) -> Tensor:
    return replace(flat, shape=shape, strides=row_major(shape), storage_offset=flat.storage_offset + at)
