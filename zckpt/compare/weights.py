"""Whether masters round to their weights: of a bounded sample of each, and of all elements, as fast as they are read.

A layout that is misread puts a parameter's elements elsewhere, and a file of another step holds other values;
either way a master no longer rounds to the weight that the model file has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.engine.copy import read_extent
from zckpt.errors import WeightMismatchError
from zckpt.immutable import immutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot, Span, is_floating, itemsize
from zckpt.state.views import reshape
from zckpt.storage.files import Sources
from zckpt.torchfile import node_of

SPANS_PER_PARAMETER = 4
"""Spans of a master that are sampled, besides the first one of each file."""

ELEMENTS_PER_END = 8
"""Elements at each end of a span that are sampled: a layout that is off by one shows at the ends."""

READ_WHOLE = 1 << 12
"""Elements of a span of which all are read, where that is cheaper than to read its two ends."""

_HALF = 1 << 15
"""Half of what the last bit of a bfloat16 is worth, in bits of the float32 that it is the upper half of."""


_INFINITY = 0x7F80
"""Bits of the bfloat16 beyond which there are only NaN, the sign aside."""

_BFLOAT16 = numpy_dtype("bfloat16")

_NATIVE = tuple(np.dtype(name) for name in ("float32", "float16", "float64"))
"""Types whose largest element numpy finds as fast as it reads them, and which is NaN if any is."""

_BLOCK_NUMEL = 1 << 18
"""Elements looked at together: few enough for the cache, with what is computed of them."""

_local = threading.local()


def scratch(numel: int) -> Array:
    """Return memory for words that this thread uses again: new pages cost more than what is computed in them."""
    if len(getattr(_local, "words", ())) < numel:
        _local.words = np.empty(numel, np.uint32)
    words: Array = _local.words[:numel]
    return words


def not_rounded(master: Array, weight: Array) -> Array:
    """Return the indices of masters that do not round to their weights, bit for bit.

    Any two NaN are alike, of which rounding defines none. Halfway between two bfloat16, the larger will do, too, to
    which Transformer Engine rounds.

    Parameters
    ----------
    master, weight : array, flat
        Of floating-point types, of one length.

    Notes
    -----
    A float32 less than half a step from a bfloat16 rounds to it, which a subtraction of their bits tells. Only what
    lies further away or halfway between two is rounded, and all where there is a NaN.
    """
    if weight.dtype != _BFLOAT16 or master.dtype != np.float32 or not len(master) or np.isnan(master.max()):
        return np.flatnonzero(_unequal(master, weight))
    words, halves = master.view(np.uint32), weight.view(np.uint16)
    gap = scratch(min(len(master), _BLOCK_NUMEL))
    doubtful = []
    for start in range(0, len(master), _BLOCK_NUMEL):
        block = gap[: len(master) - start]
        np.copyto(block, halves[start : start + _BLOCK_NUMEL])
        np.left_shift(block, 16, out=block)
        np.subtract(words[start : start + _BLOCK_NUMEL], block, out=block)
        np.add(block, _HALF - 1, out=block)
        if block.max() >= 2 * _HALF - 1:
            doubtful.append(start + np.flatnonzero(block >= 2 * _HALF - 1))
    if not doubtful:
        return np.empty(0, np.intp)
    where = np.concatenate(doubtful)
    return where[_unequal(master[where], weight[where])]


def _unequal(master: Array, weight: Array) -> Array:
    bits = f"u{weight.dtype.itemsize}"
    rounded = cast(master, weight.dtype.name)
    unequal: Array = rounded.view(bits) != weight.view(bits)
    if unequal.any():
        with np.errstate(invalid="ignore"):  # a signalling NaN
            unequal &= ~(np.isnan(rounded) & np.isnan(weight))
        if weight.dtype == _BFLOAT16 and master.dtype == np.float32:
            halfway = (weight.view(np.uint16).astype(np.uint32) << 16) - master.view(np.uint32) == _HALF
            unequal &= np.isnan(rounded) | ~halfway
    return unequal


def one_nan(array: Array) -> Array:
    """Return elements of which each NaN is the same one, whatever its bits were; the array itself if it has none.

    `array`: of any type; of a complex one, each part is a number.
    """
    if array.dtype.kind == "c":
        parts: Array = one_nan(array.view(f"f{array.dtype.itemsize // 2}"))
        return parts.view(array.dtype)
    dtype = array.dtype
    if dtype == _BFLOAT16:
        magnitudes = scratch(len(array)).view(np.uint16)[: len(array)]
        if not len(array) or np.bitwise_and(array.view(np.uint16), 0x7FFF, out=magnitudes).max() <= _INFINITY:
            return array
        where = magnitudes > _INFINITY
    elif dtype in _NATIVE:
        if not len(array) or not np.isnan(array.max()):
            return array
        where = np.isnan(array)
    elif not is_floating(dtype.name):
        return array
    else:
        where = np.isnan(array.astype(np.float32))
    if not where.any():
        return array
    found: Array = array.copy()
    found[where] = np.nan
    return found


def check_weights(checkpoint: Checkpoint) -> int:
    """Compare a sample of every master with its weight; return how many elements were compared.

    Raises WeightMismatchError: a master does not round to its weight.
    """
    compared = 0
    for sample in samples(checkpoint):
        compared += sample.numel
        if sample.error is not None:
            raise sample.error
    return compared


@immutable
class Comparison:
    """Elements of a master that were held against its weight."""

    parameter: str
    path: str  # files of the master and of the weight
    weight_path: str
    numel: int
    num_different: int = 0  # elements
    detail: str = ""  # of the first difference: where, what is stored and what should be
    error: WeightMismatchError | None = None  # the same


def samples(checkpoint: Checkpoint) -> Iterator[Comparison]:
    """Compare a sample of every master with its weight, and go on where one differs."""
    sampled: set[str] = set()
    if steps_weights(checkpoint):
        return
    with Sources() as sources:
        for parameter in checkpoint.parameters.values():
            if not comparable(parameter):
                continue
            weight_path = next((span.path for span in parameter.slots[WEIGHT].spans), "")
            master, weight = _alike(parameter.slots[MASTER], parameter.slots[WEIGHT])
            for span in _chosen(master.spans, sampled):
                sampled.add(span.path)
                yield _compared(parameter.name, master, weight, span, weight_path, sources)


def steps_weights(checkpoint: Checkpoint) -> bool:
    """Tell whether a training steps weights before their masters, so that these need not round to them.

    DeepSpeed's ZenFlow does, as the configuration says that every format carries.
    """
    config = node_of(checkpoint.metadata.get("ds_config"))
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("zenflow") is not None


def rounds_to(master: Slot, weight: Slot) -> bool:
    """Tell whether a sample of a master rounds to the same elements of a weight."""
    master, weight = _alike(master, weight)
    with Sources() as sources:
        for span in _chosen(master.spans, set()):
            for extent in _ends(span.extent):
                if len(not_rounded(read_extent(master, extent, sources), read_extent(weight, extent, sources))):
                    return False
    return True


def comparable(parameter: Parameter) -> bool:
    """Tell whether a weight is its master, rounded, and not a mean or of a wider type, nor the master computed."""
    master, weight = parameter.master, parameter.weight
    return (
        master is not None
        and weight is not None
        and is_floating(weight.dtype)
        and itemsize(master.dtype) >= itemsize(weight.dtype)
        and not (master.replicas or weight.replicas)
        and bool(master.spans or not master.numel)
    )


def _chosen(spans: Sequence[Span], sampled: set[str]) -> list[Span]:
    """Return spans spread evenly over the parameter, and one of each file that has none so far."""
    spans = tuple(span for span in spans if span.extent.numel)
    last = len(spans) - 1
    count = min(SPANS_PER_PARAMETER, len(spans))
    chosen = {round(i * last / max(count - 1, 1)) for i in range(count)}
    fresh = {span.path: index for index, span in reversed(list(enumerate(spans))) if span.path not in sampled}
    return [spans[index] for index in sorted(chosen | set(fresh.values()))]


def _alike(master: Slot, weight: Slot) -> tuple[Slot, Slot]:
    """Return both in the shape that a master's spans are boxes of."""
    finer = master.factors
    return (master, weight) if finer is None else (reshape(master, finer), reshape(weight, finer))


def _ends(extent: Extent) -> Iterator[Extent]:
    first = min(ELEMENTS_PER_END, extent.numel)
    yield replace(extent, numel=first)
    rest = min(ELEMENTS_PER_END, extent.numel - first)
    if rest:
        yield replace(extent, start=extent.start + extent.numel - rest, numel=rest)


def _compared(name: str, master: Slot, weight: Slot, span: Span, weight_path: str, sources: Sources) -> Comparison:
    """Compare the elements at the ends of a master's span."""
    ends, start = list(_ends(span.extent)), span.extent.start
    indices = np.concatenate([np.arange(one.start, one.start + one.numel) for one in ends])

    def sampled(slot: Slot) -> Array:
        if span.extent.numel > READ_WHOLE:
            return np.concatenate([read_extent(slot, one, sources) for one in ends])
        found: Array = read_extent(slot, span.extent, sources)[indices - start]
        return found

    masters, stored = sampled(Slot(master.name, master.dtype, master.shape, (span,))), sampled(weight)
    wrong = not_rounded(masters, stored)
    found = Comparison(name, span.path, weight_path, len(indices), len(wrong))
    if not len(wrong):
        return found
    index = int(wrong[0])
    (rounded,) = cast(masters[index : index + 1], weight.dtype)
    error = WeightMismatchError(
        f"master of {name} does not round to its weight at element {indices[index]}",
        path=span.path,
        expected=f"{float(stored[index])!r} ({weight.dtype}, from {weight.spans[0].path})",
        found=repr(float(rounded)),
        advice="the file may be from another step or run; --no-weight-check accepts the masters",
        parameters=[name],
    )
    return replace(found, detail=f"{error.found} where the weight is {error.expected}", error=error)
