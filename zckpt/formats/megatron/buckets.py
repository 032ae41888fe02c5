"""Where the distributed optimizer has a parameter in its buffers, which hold no names.

buffer            one for each pair of parameter and gradient type, of each chunk of the model on a rank
    bucket 0      | p9 .| p8   .| p7 |     the trained parameters in reverse order, each start a multiple of 64
    bucket 1      | p6 | p5    .| p4 |     begins where a bucket has reached its size, or for a shared embedding

A bucket ends behind its last parameter. In memory it is padded, on disk it is not: buckets that are written as one line
follow each other without a gap. The bucket before that of a shared embedding ends at a multiple of 64, too.

Nothing on disk says that a layout is this one. Whoever uses it proves it (`unproven`): each element of a master,
rounded, is that of the weight which the layout says that it is of.

Source: megatron-core 0.16, `_ParamAndGradBuffer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import prod

from zckpt.compare.weights import not_rounded
from zckpt.engine.copy import read_extent
from zckpt.errors import DamagedFileError, UnsupportedError, listed
from zckpt.formats.megatron.objects import Arguments
from zckpt.formats.torch_files.tensors import as_mapping, slot_of
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, PaddingSpan, Shape, Slot, itemsize, list_of, size_of
from zckpt.state.boxes import SpanIndex, without
from zckpt.state.inventory import ANY, IMPLIED, Rule
from zckpt.state.views import narrow, reshape
from zckpt.storage.files import Sources
from zckpt.torchfile import DType, Tensor

ALIGNMENT = 64
"""Elements to a multiple of which each parameter's start in its bucket is rounded up."""

BUCKET_NUMEL, BUCKET_NUMEL_PER_RANK = 40_000_000, 1_000_000
"""Elements at which a bucket ends, at least, if gradients are reduced as they come and the user has said nothing."""


@immutable
class Member:
    """A parameter of a buffer.

    `alone`: whether it has a bucket of its own: an embedding that the first and the last stage share.
    """

    name: str
    numel: int
    alone: bool = False


@immutable
class Layout:
    """Where all parameters of a buffer are, in which bucket and from which element on, and elements of each bucket."""

    places: dict[str, tuple[int, int]]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all buckets."""
        return sum(self.sizes)

    def starts(self, stored: Sequence[int] | None = None) -> dict[str, int]:
        """Return where each parameter begins, if buckets lie end to end, `stored` elements each."""
        begins = (0, *accumulate(stored or self.sizes))
        return {name: begins[bucket] + start for name, (bucket, start) in self.places.items()}


def lay_out(members: Sequence[Member], bucket_numel: int | None = None) -> Layout:
    """Return the layout of a buffer whose buckets end at a size.

    `members`: in the model's order; `bucket_numel`: a bucket that has reached it takes no more. None: only a shared
    embedding ends one.
    """
    places: dict[str, tuple[int, int]] = {}
    sizes: list[int] = []
    end = 0
    for member in reversed(members):
        start = _rounded(end)
        if member.alone and end:
            sizes.append(start)
            start = 0
        places[member.name] = len(sizes), start
        end = start + member.numel
        if member.alone or (bucket_numel is not None and end >= bucket_numel):
            sizes.append(end)
            end = 0
    return Layout(places, (*sizes, end) if end else tuple(sizes))


def fit(members: Sequence[Member], sizes: Sequence[int]) -> Layout | None:
    """Return the layout of a buffer of which the size of each bucket is known; None if the parameters do not fill it.

    `members`: in the model's order; `sizes` (elements): of the buckets, unpadded.
    """
    places: dict[str, tuple[int, int]] = {}
    bucket, end = 0, 0
    for member in reversed(members):
        start = _rounded(end)
        if end and (end == sizes[bucket] or (member.alone and start == sizes[bucket])):
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + member.numel > sizes[bucket]:
            return None
        places[member.name] = bucket, start
        end = start + member.numel
    whole = bucket == len(sizes) - 1 and end == sizes[bucket] if places else not sizes
    return Layout(places, tuple(sizes)) if whole else None


def bucket_numels(arguments: Arguments) -> list[int | None]:
    """Return at which sizes buckets may have ended: never, or where the program's arguments say so, in elements."""
    return [None, default_bucket_numel(arguments, size_of(arguments, "data_parallel_size") or 1)]


def default_bucket_numel(arguments: Arguments, data_ranks: int) -> int:
    """Return the elements after which a bucket ends, if gradients are reduced as they come.

    `arguments`: the program's; `data_ranks`: data-parallel ones, without those of context parallelism.
    """
    size = arguments.get("ddp_bucket_size")
    if type(size) is int:
        return size
    return max(BUCKET_NUMEL, BUCKET_NUMEL_PER_RANK * data_ranks * (size_of(arguments, "context_parallel_size") or 1))


def between(ranges: Iterable[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Return what of a line is in no range: first element and how many; each range is first element and how many."""
    taken = sorted((start, start + count) for start, count in ranges)
    return [(low, high - low) for low, high in without([(0, numel)], taken)]


class Line(SpanIndex):
    """The elements of a slot, in one dimension."""

    def part(self, start: int, shape: Shape) -> Slot:
        """Return the elements from one on, as a parameter of a shape."""
        numel = prod(shape)
        flat = narrow(self.reaching(self.slot.flat(start, numel)), 0, start, numel)
        return reshape(flat, shape)


@mutable
class Buffer:
    """A buffer of a rank."""

    dtype: str  # of its parameters
    slots: dict[str, Line]  # each of all buckets, one behind the other
    numel: int  # of a line
    stored: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    """Elements of each bucket in the line, and without what pads it; None where buckets are written as one."""
    gradients: str = ""  # the type of its gradients; empty where that is not said

    def layouts(self, members: Sequence[Member], numels: Sequence[int | None]) -> Iterator[Layout]:
        """Yield the layouts in which parameters fill it; `numels`: at which sizes its buckets may have ended."""
        if self.sizes is not None:
            layout = fit(members, self.sizes)
            yield from [] if layout is None else [layout]
            return
        together = [replace(one, alone=False) for one in members]
        for its in [members] if together == members else [members, together]:
            for numel in dict.fromkeys(numels):
                layout = lay_out(its, numel)
                if layout.numel == self.numel:
                    yield layout

    def padding(self, ranges: Iterable[tuple[int, int]]) -> Iterator[PaddingSpan]:
        """Yield where elements are that are no parameter's, of which `ranges` are: the first and how many, of each."""
        for start, numel in between(ranges, self.numel):
            for line in self.slots.values():
                for span in line.part(start, (numel,)).spans:
                    yield PaddingSpan(line.slot.name, span.path, span.offset, span.extent.numel * itemsize(span.dtype))


PARAM, UNPADDED, JOINED = "param", "numel_unpadded", "buckets_coalesced"


def gathered(node: object, path: str) -> list[Buffer]:
    """Return the buffers of a rank that are written as one line each, in the order of their numbers.

    {"buckets_coalesced": True, 0: {(bfloat16, float32): {"param": flat, "exp_avg": flat, ..., "numel_unpadded": n}}}

    Raises UnsupportedError: it is of an older form; DamagedFileError: a buffer is unreadable.
    """
    content = as_mapping(node, path)
    if content.get(JOINED) is not True:
        raise UnsupportedError(
            "holds the distributed optimizer's state in an older form",
            expected=f"{JOINED}, as Megatron-Core writes it since 0.6",
            advice="load and save it with a newer version of its program",
        )
    numbers = sorted(key for key in content if type(key) is int)
    found = []
    for types, its in chain.from_iterable(as_mapping(content[number], path).items() for number in numbers):
        tensors = {str(key): one for key, one in as_mapping(its, path).items() if isinstance(one, Tensor)}
        shapes = {one.shape for one in tensors.values()}
        if PARAM not in tensors or len(shapes) > 1 or len(tensors[PARAM].shape) != 1:
            raise DamagedFileError("an unreadable buffer of the distributed optimizer",
                                   expected="flat tensors of one size, including `param`",
                                   found=listed(sorted(map(str, shapes))))  # fmt: skip
        said = [one.name for one in list_of(types) if isinstance(one, DType)]
        kind, gradients = (*said, "", "")[:2]
        named = {MASTER if key == PARAM else key: one for key, one in tensors.items()}
        lines = {key: Line(slot_of(key, one, path)) for key, one in named.items()}
        found.append(Buffer(kind, lines, tensors[PARAM].shape[0], gradients=gradients))
    return found


def gathered_rules(*steps: str) -> list[Rule]:
    """Return what the inventory has to know of such buffers."""
    return [
        Rule((*steps, JOINED), IMPLIED, "that buckets are one tensor"),
        Rule((*steps, ANY, ANY, UNPADDED), IMPLIED, "how many elements a buffer has"),
        Rule((*steps, ANY, ANY, ANY), IMPLIED, "the types of a buffer"),
    ]


def _rounded(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


BLOCK_NUMEL = 1 << 20
"""Elements that are held against each other at a time."""


def unproven(masters: Mapping[str, Slot], weights: Mapping[str, Slot]) -> str | None:
    """Return what is wrong with the first master that does not round to its weight in every element; None if all do.

    `masters`, `weights`: by name, the same names. Raises SourceError: a file cannot be read.
    """
    with Sources() as sources:
        for name, master in masters.items():
            weight = weights[name]
            for start in range(0, master.numel, BLOCK_NUMEL):
                extent = master.flat(start, min(BLOCK_NUMEL, master.numel - start))
                wrong = not_rounded(read_extent(master, extent, sources), read_extent(weight, extent, sources))
                if len(wrong):
                    return f"that of {name} does not round to its weight at element {start + int(wrong[0])}"
    return None
