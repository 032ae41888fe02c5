"""FP16_Optimizer of stage 0: one flat master for each param group, and the order of the parameters in it.

{optimizer_state_dict: {state: {group: {slot: flat}}, param_groups: [{params: [group]}]}, fp32_groups_flat: [flat, ...]}

The trained parameters of a group lie in its flat tensor end to end, in the order in which the user gave them, and
without names. So they are found by value: what lies there rounds to a parameter's weight. As for numbered optimizers,
an order is certain where a group in the model's order, or sorted by name, has one reading, and not both have another.

Source: `FP16_Optimizer.__init__`, DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import UsageError
from zckpt.evidence import Orders, ways
from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot
from zckpt.state.boxes import row_major
from zckpt.state.dtypes import is_floating
from zckpt.storage.files import Sources
from zckpt.torchfile import Tensor

FLAT_KEY = "fp32_groups_flat"

Fits = Callable[[int, str], bool]
"""Whether what lies from an element of a flat master on rounds to the weight of this name."""


def unflattened(
    checkpoint: Checkpoint,
    base: OptimizerState,
    flats: Sequence[Tensor],
    path: str,
    names: Sequence[str] | None,
    orders: Orders,
) -> tuple[OptimizerState, Mapping[int, str]] | None:
    """Return an optimizer of flat masters as one that numbers its parameters, and their names by number.

    None where their order is not certain, or some state is not one value for each element, nor one for all.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    names : sequence of str, optional
        All of the optimizer's, in its order, from the user.
    orders : callable
        In which groups may have their parameters, as for `Evidence.certain`.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    candidates = {
        p.name: p for p in checkpoint.parameters.values()
        if p.tied_to is None and p.numel and WEIGHT in p.slots and is_floating(p.slots[WEIGHT].dtype)
    }  # fmt: skip
    found: list[list[str]] = []
    numels = {name: one.numel for name, one in candidates.items()}
    with Sources() as sources:
        rest = list(names or ())
        for index, flat in enumerate(flats):
            fits = _by_value(slot_of(MASTER, flat, path), candidates, sources)
            if names is None:
                possible = orders(index, list(candidates))
                readings = {_reading(one, numels, flat.numel, fits) for one in possible} - {(0, ())}
                if len(readings) != 1 or next(iter(readings))[0] > 1:
                    return None
                found.append(list(readings.pop()[1]))
            else:
                found.append(_given(rest, candidates, flat.numel, fits))
                rest = rest[len(found[-1]) :]
    every = [name for order in found for name in order]
    if rest:
        raise UsageError("more parameter names than the optimizer has", found=rest[0])
    if len(set(every)) < len(every):
        return None
    numbered = OptimizerState({}, [])
    by_number: dict[int, str] = {}
    for group, (number,), flat, order in zip(base.groups, base.numbers, flats, found, strict=True):
        state = base.state.get(number, {})
        whole = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape}
        if any(state[key].shape != flat.shape or not state[key].is_contiguous for key in whole):  # type: ignore[attr-defined]
            return None
        starts = itertools.accumulate((candidates[name].numel for name in order), initial=0)
        first = len(by_number)
        for own, (name, at) in enumerate(zip(order, starts, strict=False), first):
            by_number[own] = name
            shape = candidates[name].shape
            numbered.masters[own] = _part(flat, shape, at)
            if state:
                numbered.state[own] = {
                    key: _part(value, shape, at) if isinstance(value, Tensor) and key in whole else value
                    for key, value in state.items()
                }
        numbered.groups.append({**group, "params": list(range(first, len(by_number)))})
    return numbered, by_number


def _given(names: Sequence[str], known: Mapping[str, Parameter], numel: int, fits: Fits) -> list[str]:
    """Return the first of the user's names, which make up a flat tensor."""
    found: list[str] = []
    at = 0
    for name in names:
        if at == numel:
            break
        if name not in known or at + known[name].numel > numel or not fits(at, name):
            raise UsageError(
                f"{name} is not what lies at element {at} of a flat master",
                expected="a parameter whose weight is that, rounded",
            )  # fmt: skip
        found.append(name)
        at += known[name].numel
    if at != numel:
        raise UsageError("too few parameter names for a flat master", expected=f"{numel} elements", found=at)
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

    from zckpt.compare.weights import ELEMENTS_PER_END, not_rounded
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
        if not begins(at, weight, name):
            return False
        count = min(ELEMENTS_PER_END, weight.numel)
        for start in dict.fromkeys((0, weight.numel - count)):
            there = Extent.flat(master.shape, at + start, count)
            stored = read_extent(weight, Extent.flat(weight.shape, start, count), sources)
            if len(not_rounded(read_extent(master, there, sources), stored)):
                return False
        return True

    return fits


def _part(flat: Tensor, shape: tuple[int, ...], at: int) -> Tensor:
    return replace(flat, shape=shape, strides=row_major(shape), storage_offset=flat.storage_offset + at)
