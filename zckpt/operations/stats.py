"""What the elements of each slot are like: extremes, mean, deviation, norm, zeros, what is not finite, magnitudes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from zckpt.engine.cast import Array, cast
from zckpt.engine.scan import SlotSet, scan, stored_once
from zckpt.errors import UsageError
from zckpt.executors.using import using
from zckpt.formats.floats import with_floats
from zckpt.immutable import immutable, mutable
from zckpt.operations.diff.match import Filter
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Compared, Unpack, how_read, naming_of, shares
from zckpt.operations.series import slots_of
from zckpt.operations.target import summary
from zckpt.state import Brief, Checkpoint, Document, Shape, document, is_floating, number

WIDER = 4
"""Bytes that figures take for each byte of a block: numbers of 8 bytes, twice, of elements of 4 at most as a rule."""

_LAYER = re.compile(r"(.*?(?:^|\.)[0-9]+)(?:\.|$)")
_EXPONENTS = {4: (np.uint32, 23, 0xFF, 127), 8: (np.uint64, 52, 0x7FF, 1023)}
"""Of a float of so many bytes: the word, where its exponent lies, which bits it has, and its bias."""


@mutable
class Distribution(Brief):
    """Statistics of one slot of a parameter, or of a layer.

    Parameters
    ----------
    name, slot : str
    dtype : str
        Complex elements count by magnitude; elements that are not numbers have no statistics.
    shape : tuple of int or None
        None for a layer.
    numel, zeros, nan, inf : int, elements
    least, most : float or None
        Of finite elements, like all below.
    mean : float
    squares : float
        Sum of squared differences from the mean.
    magnitudes : dict of int to int
        Elements by power of two: n counts those with 2**n <= |x| < 2**(n + 1); the lowest also counts all smaller ones.
    """

    name: str
    slot: str
    dtype: str
    shape: Shape | None = None
    numel: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    least: float | None = None
    most: float | None = None
    mean: float = 0.0
    squares: float = 0.0
    magnitudes: dict[int, int] = field(default_factory=dict)

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.numel - self.nan - self.inf

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite elements, by their number."""
        return math.sqrt(self.squares / self.finite) if self.least is not None else None

    @property
    def norm(self) -> float | None:
        """L2 norm of the finite elements."""
        return math.sqrt(self.squares + self.finite * self.mean**2) if self.least is not None else None

    def add(self, other: Distribution) -> None:
        """Add other elements (Chan, Golub and LeVeque: combine means and sums of squares of two sets)."""
        n, m = self.finite, other.finite
        if other.least is not None and other.most is not None:
            off = other.mean - self.mean
            self.squares += other.squares + off * off * (n * m / (n + m))
            self.mean += off * (m / (n + m))
            self.least = other.least if self.least is None else min(self.least, other.least)
            self.most = other.most if self.most is None else max(self.most, other.most)
        for name in ("numel", "zeros", "nan", "inf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for power, count in other.magnitudes.items():
            self.magnitudes[power] = self.magnitudes.get(power, 0) + count

    def as_dict(self) -> Document:
        """Return it as JSON-able data."""
        counts = ("name", "slot", "dtype", "shape", "numel", "zeros", "nan", "inf")
        return {
            **{key: document(getattr(self, key)) for key in counts},
            "min": number(self.least),
            "max": number(self.most),
            "mean": None if self.least is None else number(self.mean),
            "std": number(self.std),
            "norm": number(self.norm),
            "magnitudes": {str(power): self.magnitudes[power] for power in sorted(self.magnitudes)},
        }


@immutable
class Statistics(Brief):
    """Statistics of a checkpoint's slots, in the model's order, and of its layers."""

    checkpoint: Checkpoint
    distributions: list[Distribution]

    def layers(self) -> list[Distribution]:
        """Return statistics by slot and layer: names that are alike up to their first number."""
        found: dict[tuple[str, str], Distribution] = {}
        for one in self.distributions:
            key = layer_of(one.name), one.slot
            layer = found.setdefault(key, Distribution(*key, one.dtype))
            layer.add(one)
            layer.dtype = one.dtype if layer.dtype == one.dtype else "mixed"
        return list(found.values())

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "source": summary(self.checkpoint),
            "slots": document(self.distributions),
            "layers": document(self.layers()),
        }


@shares(Compared)
def stats(
    source: Source,
    *,
    slots: Sequence[str] = (),
    parameters: Sequence[str] = (),
    **shared: Unpack[Compared],
) -> Statistics:
    """Return statistics of each slot. Reads every element once, in parallel and in bounded memory.

    Parameters
    ----------
    source : path-like or Checkpoint
    slots, parameters : sequence of str
        As for `diff`.
    **shared

    Raises
    ------
    UsageError
        No slot is selected.
    SourceError
        The checkpoint cannot be read.
    """
    found = opened(source, **shared)
    if shared["dequantize"]:
        [found] = with_floats(found)
    checkpoint, _ = naming_of(shared).of(found)
    wanted = Filter(slots, parameters)
    wanted.check(checkpoint)
    chosen = slots_of(checkpoint, wanted)
    if not chosen:
        known = f"some of {', '.join(found.slot_names())}" + ", and names of parameters" * bool(parameters)
        raise UsageError("no slot is selected", path=found.named, expected=known, found=[*slots, *parameters])
    made = [Distribution(name, key, slot.dtype, slot.shape) for (name, key), slot in chosen.items()]
    sets = [SlotSet(f"{key}/{name}", stored_once([slot]), (slot.dtype,)) for (name, key), slot in chosen.items()]
    how = {**how_read(shared), "memory": shared["memory"] // WIDER}
    with using(shared["executor"]):
        for index, part in scan(sets, _measured, **how):
            made[index].add(part)
    for one, its in zip(made, sets, strict=True):
        times = math.prod(one.shape or ()) // max(its.numel, 1)  # that the tensor says each stored element
        for name in ("numel", "zeros", "nan", "inf", "squares"):
            setattr(one, name, getattr(one, name) * times)
        one.magnitudes = {power: count * times for power, count in one.magnitudes.items()}
    return Statistics(checkpoint, made)


def layer_of(name: str) -> str:
    """Return what names of one layer have in common: all up to the first number, or else the first word."""
    match = _LAYER.match(name)
    return name.partition(".")[0] if match is None else match[1]


def _measured(_index: int, _start: int, arrays: Sequence[Array]) -> Distribution:
    """Return the figures of a block."""
    (array,) = arrays
    found = Distribution("", "", "", numel=array.size)
    if array.dtype.type is np.void:
        return found
    with np.errstate(all="ignore"):
        if array.dtype.kind == "c":
            values = np.abs(array).astype(np.float64)
        elif is_floating(array.dtype.name) and array.dtype.itemsize < np.dtype(np.float64).itemsize:
            values = cast(array, "float32")  # which has all values of their type
        else:
            values = np.ascontiguousarray(array, np.float64)
        word, shift, mask, bias = _EXPONENTS[values.dtype.itemsize]
        exponents = np.bincount(((values.view(word) >> word(shift)) & word(mask)).astype(np.intp), minlength=mask + 1)
        found.zeros = values.size - int(np.count_nonzero(values))
        if exponents[mask]:
            found.nan = int(np.isnan(values).sum())
            found.inf = int(exponents[mask]) - found.nan
            values = values[np.isfinite(values)]
        exponents[0] -= found.zeros
        found.magnitudes = {int(e) - bias: int(exponents[e]) for e in np.flatnonzero(exponents[:mask])}
        if values.size:
            found.least, found.most = float(values.min()), float(values.max())
            wide = values.astype(np.float64)
            found.mean = float(wide.mean())
            wide -= found.mean
            found.squares = float(np.vdot(wide, wide))
    return found
