"""Some elements of one tensor: read as NumPy has them, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.copy import read_extent
from zckpt.engine.scan import refuse_endless
from zckpt.errors import UsageError
from zckpt.immutable import immutable
from zckpt.operations.open import OpenedCheckpoint, Source, opened
from zckpt.operations.options import Salvaged, Unpack, shares
from zckpt.state import Document, Result, Shape, Slot, is_floating, number
from zckpt.state.views import narrow
from zckpt.storage.durable import written
from zckpt.storage.files import Sources
from zckpt.storage.ownership import check_target

MOST_SHOWN = 1 << 24
"""Elements that are printed, or returned; a file has any number."""

BLOCK_NUMEL = 1 << 20

_INDEX = re.compile(r"([+-]?[0-9]{1,18})|([+-]?[0-9]{1,18})?:([+-]?[0-9]{1,18})?")


@immutable
class Elements(Result):
    """Elements of one slot.

    Parameters
    ----------
    name, slot, dtype : str
    shape : tuple of int
        Of the whole slot.
    slice : str or None
        The part that was requested.
    values : numpy.ndarray or None
        With a type of NumPy or `ml_dtypes`; None if they were written to a file.
    file : str or None
    """

    name: str
    slot: str
    dtype: str
    shape: Shape
    slice: str | None
    values: Array | None
    file: str | None = None

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        values = None if self.values is None else _jsonable(_plain(self.values).tolist())
        return {**Result.as_dict(self), "values": values}


@shares(Salvaged)
def show(
    source: Source,
    name: str,
    *,
    slot: str | None = None,
    slice: str | None = None,  # noqa: A002  # as NumPy says it
    npy: str | Path | None = None,
    overwrite: bool = False,
    **shared: Unpack[Salvaged],
) -> Elements:
    """Read some elements of one slot of one parameter, and only their bytes.

    Parameters
    ----------
    source : path-like or Checkpoint
    name : str
        A parameter or buffer, as for `OpenedCheckpoint.read`.
    slot : str, optional
        Default: the master if there is one, otherwise the weight.
    slice : str, optional
        An index or a range for each dimension, `0:4,:,-1`; further dimensions are whole.
    npy : path-like, optional
        An .npy file for the elements, written in bounded memory; types that NumPy lacks are stored exactly, as float32.
    overwrite : bool
        Replace that file if it exists.
    **shared

    Raises
    ------
    UsageError
        There is no such parameter or slot, the slice does not fit its shape, or there are too many elements.
    TargetError
        The file cannot be written.
    SourceError
        The checkpoint cannot be read.
    """
    whole = OpenedCheckpoint.of(opened(source, **shared)).slot(name, slot)
    part, shape = _part(whole, slice)
    refuse_endless(part, f"{whole.name} of {name}")
    elements = Elements(name, whole.name, whole.dtype, whole.shape, slice, None)
    if npy is not None:
        file = Path(npy)
        check_target(file, overwrite=overwrite)
        dtype = _plain(np.empty(0, numpy_dtype(part.dtype))).dtype
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with written([file], overwrite=overwrite) as [partial], partial.open("wb") as into:
            np.lib.format.write_array_header_1_0(into, header)
            for _, block in _blocks(part):
                into.write(_plain(block).tobytes())
        return replace(elements, file=str(npy))
    if part.numel > MOST_SHOWN:
        raise UsageError(
            f"{whole.name} of {name} has too many elements to show",
            expected=f"at most {MOST_SHOWN:,}",
            found=f"{part.numel:,}",
            advice="give --slice, or --npy FILE for all of them",
        )
    values = np.empty(part.numel, numpy_dtype(part.dtype))
    for start, block in _blocks(part):
        values[start : start + block.size] = block
    return replace(elements, values=values.reshape(shape))


def _part(whole: Slot, text: str | None) -> tuple[Slot, Shape]:
    """Return the part of a slot that a slice names, and its shape, without dimensions of which one index is said."""
    words = text.split(",") if text is not None else []
    if len(words) > len(whole.shape):
        raise UsageError(f"a slice with {len(words)} dimensions", expected=f"at most {len(whole.shape)}", found=text)
    part, kept = whole, list(whole.shape)
    for axis, (word, size) in enumerate(zip(words, whole.shape, strict=False)):
        match = _INDEX.fullmatch(word.strip())
        if match is None:
            raise UsageError("not a slice of a tensor", expected="an index or a range for each dimension", found=text)
        at, low, high = (int(one) if one else None for one in match.groups())
        chosen = range(size)[low:high]
        kept[axis] = len(chosen)
        if at is not None:
            if not -size <= at < size:
                raise UsageError(f"dimension {axis} has no index {at}", expected=f"below {size}")
            chosen, kept[axis] = range(size)[at:][:1], -1
        part = narrow(part, axis, chosen.start, len(chosen))
    return part, tuple(size for size in kept if size >= 0)


def _blocks(part: Slot) -> Iterator[tuple[int, Array]]:
    """Yield the elements of a slot, some at a time, each with the index of the first."""
    with Sources() as sources:
        for start in range(0, part.numel, BLOCK_NUMEL):
            yield start, read_extent(part, part.flat(start, min(BLOCK_NUMEL, part.numel - start)), sources)


def _plain(values: Array) -> Array:
    """Return elements in a type that NumPy itself has."""
    is_known = values.dtype.kind in "biufc"
    return values if is_known or not is_floating(values.dtype.name) else values.astype(np.float32)


def _jsonable(values: object) -> object:
    if isinstance(values, list):
        return [_jsonable(one) for one in values]
    if isinstance(values, complex):
        return [number(values.real), number(values.imag)]
    return number(values) if isinstance(values, float) else values if isinstance(values, bool | int) else str(values)
