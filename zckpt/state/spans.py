"""Where the elements of a slot lie: extents, spans, and spans that a rule gives. Pure: no I/O.

A `Span` places an `Extent`: a box of the tensor and a flattened range within that box. The whole tensor is a box with
the full range; a ZeRO slice is the whole box with a smaller range; a tensor-parallel slice is a smaller box; a ZeRO
slice of a tensor-parallel slice is both.

A slot has a sequence of spans. Few of them are a tuple. The spans that ZeRO cuts are a rule, so that a checkpoint of
thousands of parameters by thousands of ranks takes memory and time for their sum, not for their product:

    line        | a a a a a | b b b | c c c c c c c c |        the parameter begins at element `origin` of a line
    files       |  file 0  |  file 1  |  file 2  |             which is cut every `width` elements
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol, TypeVar, overload, runtime_checkable

from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state.dtypes import itemsize

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Item = TypeVar("Item")

Shape = tuple[int, ...]

ZEROS = ""
"""The path of a span whose elements are zero and lie in no file; its strides are zero, too."""

LOST = "\0"
"""What the path of a span begins with whose file is lost: what follows is where that would be."""


def position(index: Iterable[int], strides: Iterable[int]) -> int:
    """Return how far an element lies behind the first one of what is strided, given its index from there."""
    return sum(at * step for at, step in zip(index, strides, strict=True))


def reach_of(shape: Iterable[int], strides: Iterable[int], size: int = 1) -> int:
    """Return what lies from the first element of a box to the end of its last one, each of which takes `size`."""
    for n, step in zip(shape, strides, strict=True):
        size += (n - 1) * step
    return size


@immutable
class Extent:
    """A box of a tensor, and a flattened range within that box.

    Parameters
    ----------
    offsets, sizes : tuple of int, elements
        The box: its first index and its size along each dimension. Both empty for a 0-d tensor.
    start, numel : int, elements
        The range of the box's row-major flattening, [start, start + numel).
    """

    offsets: Shape
    sizes: Shape
    start: int
    numel: int

    @classmethod
    def whole(cls, shape: Shape) -> Extent:
        """Return the extent of all elements of a tensor of `shape`."""
        return cls.flat(shape, 0, math.prod(shape))

    @classmethod
    def flat(cls, shape: Shape, start: int, numel: int) -> Extent:
        """Return elements [start, start + numel) of the flattened tensor of `shape`."""
        return cls((0,) * len(shape), shape, start, numel)


@immutable
class Span:
    """An extent and where its bytes are.

    Parameters
    ----------
    extent : Extent
    path : str
        The file.
    offset : int, bytes
        Offset of the extent's first element.
    dtype : str
        Element type as stored.
    strides : tuple of int, elements, or None
        Distance between neighbours along each dimension of the box, for a tensor that is not stored in
        row-major order; the range is then the whole box. None: the range is contiguous.
    byteorder : {"little", "big"}
    unresolved : tuple of {"conj", "neg"}
        What must still be done to stored elements to get their values: torch's bits for lazy views.
    """

    extent: Extent
    path: str
    offset: int
    dtype: str
    strides: Shape | None = None
    byteorder: str = "little"
    unresolved: tuple[str, ...] = ()

    @property
    def reach(self) -> tuple[int, int]:
        """Bytes of the file from the first element to the last."""
        numel = self.extent.numel
        if numel and self.strides is not None:
            numel = reach_of(self.extent.sizes, self.strides)
        return self.offset, self.offset + numel * itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous and unchanged, except for byte order."""
        return self.strides is None and not self.unresolved


class Numbered(Sequence[Item]):
    """A sequence that says how many items it has, and computes the one of a number when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def numbered(self, index: int) -> Item:
        """Return one of them, counted from the first."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """Return an item, or some, in their order."""
        every = range(len(self))
        return tuple(map(self.numbered, every[index])) if isinstance(index, slice) else self.numbered(every[index])

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in their order."""
        return map(self.numbered, range(len(self)))


class Spans(Numbered[Span]):
    """Spans that are not kept one by one: each is computed when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that have some of elements [low, high) of the flattened tensor."""

    @abstractmethod
    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""

    def __eq__(self, other: object) -> bool:
        """Tell whether another sequence has the same spans."""
        if not isinstance(other, (tuple, Spans)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        """Return the hash of a tuple of the same spans."""
        return hash(tuple(self))


@immutable
class Chosen(Numbered[int]):
    """A number for each of many, of which there are only a few. `which`: of `values`, for each."""

    which: tuple[int, ...]
    values: tuple[int, ...]

    def __len__(self) -> int:
        """Return for how many there is one."""
        return len(self.which)

    def numbered(self, index: int) -> int:
        """Return that of one."""
        return self.values[self.which[index]]


@immutable
class CutFiles:
    """The tensors, one in each rank's file, that together hold a line of elements."""

    paths: tuple[str, ...]
    offsets: Sequence[int]  # bytes; where the tensor of each file begins
    dtype: str
    byteorder: str = "little"  # {"little", "big"}
    _indexes: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def index(self, path: str) -> int | None:
        """Return which of the files a path is; None for another."""
        if not self._indexes:
            self._indexes.update({path: index for index, path in enumerate(self.paths)})
        return self._indexes.get(path)


@immutable(eq=False)
class CutSpans(Spans):
    """The spans of a parameter on a line that is cut every `width` elements.

    ZeRO-1/2: the line is a param group's buffer, the width that of a partition. ZeRO-3: each parameter is a line of its
    own, the width that of a shard, and in every file its shard begins at element `at` of the tensor there.

    Raises LayoutError: the parameter goes beyond the last file.
    """

    files: CutFiles  # one for all parameters that are cut alike
    shape: Shape  # of the parameter
    origin: int  # elements; where it begins on the line
    width: int  # elements; that each file has of the line
    at: int = 0  # elements; where in the tensor of a file its elements of the line begin

    def __post_init__(self) -> None:
        """Check that the files hold all of it: then each element is in one span."""
        numel = self.numel
        if min(self.origin, self.at) < 0 or (numel and self.width < 1) or self._end > len(self.files.paths):
            raise LayoutError(
                "a parameter goes beyond the files that hold it",
                expected=f"at most {len(self.files.paths)} files of {self.width} elements",
                found=f"elements {self.origin} to {self.origin + numel}",
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def _first(self) -> int:
        """Index of the first file with elements."""
        return self.origin // self.width if self.numel else 0

    @property
    def _end(self) -> int:
        """Index after the last file with elements."""
        return -(-(self.origin + self.numel) // self.width) if self.numel else 0

    def __len__(self) -> int:
        """Return the number of files that have some of it."""
        return self._end - self._first

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of the files."""
        return self._span(self._first + index)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that have some of elements [low, high) of the flattened tensor."""
        return tuple(map(self._span, range(*self.files_of(low, high))))

    def files_of(self, low: int, high: int) -> tuple[int, int]:
        """Return the first file that has some of elements [low, high) of the tensor, and the one after the last."""
        low, high = max(low, 0), min(high, self.numel)
        return ((self.origin + low) // self.width, -(-(self.origin + high) // self.width)) if low < high else (0, 0)

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        found = sorted(index for path in paths for index in (self.files.index(path),) if index is not None)
        return tuple(self._span(file) for file in found if self._first <= file < self._end)

    def _span(self, file: int) -> Span:
        begin = file * self.width
        low, high = max(self.origin, begin), min(self.origin + self.numel, begin + self.width)
        offset = self.files.offsets[file] + (self.at + low - begin) * itemsize(self.files.dtype)
        extent = Extent.flat(self.shape, low - self.origin, high - low)
        return Span(extent, self.files.paths[file], offset, self.files.dtype, None, self.files.byteorder)

    def __eq__(self, other: object) -> bool:
        """Tell whether another sequence has the same spans."""
        if isinstance(other, CutSpans) and self._place() == other._place() and self.files is other.files:
            return True
        return Spans.__eq__(self, other)

    def __hash__(self) -> int:
        """Return the hash of a tuple of the same spans."""
        return Spans.__hash__(self)

    def _place(self) -> tuple[object, ...]:
        return self.shape, self.origin, self.width, self.at


@immutable
class Slot:
    """One state of a parameter: its model weight, its master, or a tensor of the optimizer.

    Parameters
    ----------
    name : str
        `weight`, `master`, or the optimizer's own key.
    dtype : str
    shape : tuple of int
        The parameter's shape, except for state that is not per element (a factored second moment).
    spans : sequence of Span
        A tuple, or a rule. Together they cover every element exactly once.
    replicas : tuple of sequence of Span
        Further full sets of spans that are averaged with `spans` (tensor-parallel ranks whose values drift apart and
        are averaged by rule); almost always empty.
    factors : tuple of int, or None
        A finer shape of the same flattened elements, where each size of `shape` is a product of some of these in order.
        The spans are then boxes of that shape with strides: a tensor that a map has rearranged.
    """

    name: str
    dtype: str
    shape: Shape
    spans: Sequence[Span]
    replicas: tuple[Sequence[Span], ...] = ()
    factors: Shape | None = None

    @classmethod
    def at(cls, path: str, offset: int, dtype: str, shape: Shape, name: str, byteorder: str = "little") -> Slot:
        """Return one whose elements lie in a file from a byte on, end to end."""
        span = Span(Extent.whole(shape), path, offset, dtype, None, byteorder)
        return cls(name, dtype, shape, (span,) if math.prod(shape) else ())

    def __repr__(self) -> str:
        """Return a line: its name, shape and type, and how its spans are said."""
        return f"<Slot {self.name} {list(self.shape)} {self.dtype}: {type(self.spans).__name__} of spans>"

    @property
    def sets(self) -> tuple[Sequence[Span], ...]:
        """`spans`, and the sets that are averaged with them."""
        return self.spans, *self.replicas

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return self.numel * itemsize(self.dtype)

    @property
    def lost(self) -> tuple[Span, ...]:
        """The spans whose files are lost."""
        return tuple(span for spans in self.sets for span in spans if span.path.startswith(LOST))

    @property
    def whole(self) -> Extent:
        """All elements."""
        return Extent.whole(self.shape)

    def flat(self, start: int, numel: int) -> Extent:
        """Return elements [start, start + numel) of the flattened tensor."""
        return Extent.flat(self.shape, start, numel)


@immutable
class PaddingSpan:
    """Contiguous bytes of a file that are padding of one slot."""

    slot: str
    path: str
    offset: int
    nbytes: int


@runtime_checkable
class PaddingRule(Protocol):
    """Padding of many files that is worked out file by file: there may be millions of spans."""

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield all of it."""

    @property
    def is_large(self) -> bool:
        """Whether to ask for it file by file."""

    def within(self, path: str) -> Iterator[npt.NDArray[np.int64]]:
        """Yield where in one file it is, in bytes."""


@immutable
class Padding:
    """Elements of one rank's partition of one param group that belong to no parameter."""

    rank: int
    group: int
    numel: int
    nbytes: int
    zeros: tuple[PaddingSpan, ...] = ()
    """Where it is, as far as the program that writes it makes it zero and keeps it so."""
    partition: int = 0  # elements; of all that ends with it; 0 where it is spread over parameters
