"""Whether masters and weights belong together: a bounded sample of each master, rounded, against the weight beside it.

A layout that is misread puts a parameter's elements elsewhere, and a file of another step holds other values;
either way a master no longer rounds to the weight that the model file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zckpt.engine.cast import Array, cast
from zckpt.engine.read import read_extent
from zckpt.errors import WeightMismatchError
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot, Span
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.storage.files import Sources

SPANS_PER_PARAMETER = 4
"""Spans of a master that are sampled, besides the first one of each file."""

ELEMENTS_PER_END = 8
"""Elements at each end of a span that are sampled: a layout that is off by one shows at the ends."""


def check_weights(checkpoint: Checkpoint) -> int:
    """Compare a sample of every master with the weight beside it; return how many elements were compared.

    Raises
    ------
    WeightMismatchError
        A master does not round to its weight.
    """
    compared = 0
    for sample in samples(checkpoint):
        compared += sample.numel
        if sample.error is not None:
            raise sample.error
    return compared


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements of one span of a master that were compared, and what is wrong with the first that differs."""

    parameter: str
    path: str
    numel: int
    num_different: int
    error: WeightMismatchError | None


def samples(checkpoint: Checkpoint) -> Iterator[Sample]:
    """Compare a sample of every master with the weight beside it, and go on where one differs."""
    sampled: set[str] = set()
    with Sources() as sources:
        for parameter in checkpoint.parameters.values():
            if not comparable(parameter):
                continue
            master, weight = parameter.slots[MASTER], parameter.slots[WEIGHT]
            for span in _chosen(master.spans, sampled):
                sampled.add(span.path)
                numel, different, error = 0, 0, None
                for extent in _ends(span.extent):
                    numel += extent.numel
                    wrong, at = _compare(parameter.name, master, weight, span, extent, sources)
                    different, error = different + wrong, error or at
                yield Sample(parameter.name, span.path, numel, different, error)


def rounds_to(master: Slot, weight: Slot) -> bool:
    """Tell whether a sample of a master rounds to the same elements of a weight."""
    with Sources() as sources:
        for span in _chosen(master.spans, set()):
            for extent in _ends(span.extent):
                found = cast(read_extent(master, extent, sources), weight.dtype)
                if len(_differing(found, read_extent(weight, extent, sources))):
                    return False
    return True


def comparable(parameter: Parameter) -> bool:
    """Tell whether a parameter's weight is its master, rounded, and not a mean or of a wider type."""
    master, weight = parameter.slots.get(MASTER), parameter.slots.get(WEIGHT)
    return (
        master is not None
        and weight is not None
        and is_floating(weight.dtype)
        and itemsize(master.dtype) >= itemsize(weight.dtype)
        and not master.replicas
    )


def _chosen(spans: Sequence[Span], sampled: set[str]) -> list[Span]:
    """Return spans spread evenly over the parameter, and one of each file that has none so far."""
    spans = tuple(span for span in spans if span.extent.numel)
    last = len(spans) - 1
    count = min(SPANS_PER_PARAMETER, len(spans))
    chosen = {round(i * last / max(count - 1, 1)) for i in range(count)}
    fresh = {span.path: index for index, span in reversed(list(enumerate(spans))) if span.path not in sampled}
    return [spans[index] for index in sorted(chosen | set(fresh.values()))]


def _ends(extent: Extent) -> Iterator[Extent]:
    first = min(ELEMENTS_PER_END, extent.numel)
    yield Extent(extent.offsets, extent.sizes, extent.start, first)
    rest = min(ELEMENTS_PER_END, extent.numel - first)
    if rest:
        yield Extent(extent.offsets, extent.sizes, extent.start + extent.numel - rest, rest)


def _compare(
    name: str, master: Slot, weight: Slot, span: Span, extent: Extent, sources: Sources
) -> tuple[int, WeightMismatchError | None]:
    own = Slot(master.name, master.dtype, master.shape, (span,))
    found = cast(read_extent(own, extent, sources), weight.dtype)
    stored = read_extent(weight, extent, sources)
    wrong = _differing(found, stored)
    if not len(wrong):
        return 0, None
    index = int(wrong[0])
    return len(wrong), WeightMismatchError(
        f"master of {name} does not round to its weight at element {extent.start + index}",
        path=span.path,
        expected=f"{float(stored[index])!r} ({weight.dtype}, from {weight.spans[0].path})",
        found=repr(float(found[index])),
        advice="the file may be from another step or run; --no-weight-check takes the masters as they are",
        parameters=[name],
    )


def _differing(a: Array, b: Array) -> Array:
    """Return the indices at which two arrays have different bits, any two NaNs being alike."""
    bits = f"u{a.dtype.itemsize}"
    unequal = (a.view(bits) != b.view(bits)) & ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
    return np.flatnonzero(unequal)
