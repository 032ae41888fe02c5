"""A rank's file: a safetensors file of pieces of slots and of storages, their checksums, and where each piece lies.

digests                 int64, the CRC-32 of every other tensor's bytes, ordered by the tensors' names
SLOT/NAME ...           a whole slot in its shape, a whole box in its shape, or a flat range
storage/N ...           bytes that tensors of the inert objects lie in, as uint8

The wider an element, the earlier it comes, so that each tensor starts on a multiple of its element's size; those of
one width are in the order of their names. So a document, which lists the files and what lies in them, says where each
tensor is: no header has to be read to know it.

The tensors of a file are in one order, so their offsets are sums of the sizes of those before. A few
pieces are summed up one by one. A layout of thousands of slots by thousands of files has only a few kinds of slots:

    offset in a file  =  where its tensors begin  +  sum over kinds (slots of the kind before this one x size there)

so that a table of slots by kinds, and one of kinds by files, hold all offsets, and there is no object for each.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from pathlib import Path

from zckpt.codes import LAYOUT, MISSING_FILE, OTHER_RUN, TRUNCATED
from zckpt.engine.checking import Sum, crc_of
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile, end_of
from zckpt.errors import DamagedFileError, ShardError, UnsupportedError
from zckpt.formats.native.document import Form, Json, formed, record, wrong
from zckpt.formats.safetensors.file import METADATA_KEY, read_header
from zckpt.formats.safetensors.layout import ALIGNMENT, header_of
from zckpt.immutable import immutable, mutable
from zckpt.state import Extent, Shape, Slot, Span, Spans, itemsize
from zckpt.state.boxes import ByPlace, is_within
from zckpt.state.dtypes import DTYPES
from zckpt.storage.crc32 import crc32
from zckpt.storage.files import Sources, is_file, opened, read_head

DIGESTS = "digests"
"""Has no slash, as every other tensor of the file has."""

DIGEST_DTYPE = "int64"
"""A CRC-32 needs 32 bits without a sign, which torch has only since 2.3."""

DIGEST_NBYTES = 8

ID_KEY = "zckpt_id"
"""Under which the file's own metadata have the checkpoint that it belongs to."""

AS_BYTES = frozenset({"complex64", "float4_e2m1fn_x2", "float8_e8m0fnu"})
"""Types that only newer versions of safetensors have: to others a single unknown code makes the file unreadable."""


@immutable
class Entry:
    """A tensor that is to be written."""

    key: str
    slot: Slot
    extent: Extent  # which elements of it
    dtype: str  # element type in the file's header
    shape: Shape
    width: int = 1  # bytes; of one element, by which the tensors of a file are ordered
    data: memoryview | bytes | None = None  # the bytes, if they are in memory and not in the slot's files

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.extent.numel * itemsize(self.slot.dtype)


@immutable
class Listed:
    """What a document says of a rank's file as a whole."""

    name: str
    nbytes: int  # of the file
    header_nbytes: int = 0
    """Bytes; of what precedes its tensors, the header's length included. 0: a document of version 1 does not say."""
    header_crc32: int = 0  # of the same bytes


UNWRITTEN = Listed("", 0)
"""Of a file that is still to be written."""


def listed(file: TargetFile) -> Listed:
    """Return what a document says of a file that `lay_out` has returned."""
    header = bytes(file.literals[0].data)
    return Listed(file.name, file.nbytes, len(header), crc32(header))


@mutable
class RankFile:
    """A rank's file that is there: its tensors by name, and those that something has taken."""

    path: str
    nbytes: int
    tensors: dict[str, Slot]
    taken: set[str] = field(default_factory=set)

    def take(self, key: str, dtype: str, shape: Shape) -> int:
        """Return the byte offset of a tensor, which must be as described and belongs to one thing only.

        Raises DamagedFileError: it is not there, is another, or has been taken.
        """
        found = self.tensors.get(key)
        if found is None or key in self.taken:
            message = f"{key} is missing" if found is None else f"{key} is used twice"
            raise DamagedFileError(message, path=self.path)
        if found.dtype != dtype or found.shape != shape:
            raise DamagedFileError(
                f"{key} differs from checkpoint.json",
                path=self.path,
                expected=f"{dtype} {shape}",
                found=f"{found.dtype} {found.shape}",
            )
        self.taken.add(key)
        return found.spans[0].offset if found.spans else 0


def stored_as(dtype: str, extent: Extent) -> tuple[str, Shape]:
    """Return type and shape of elements of a slot in a header: as they are, or as bytes along one more dimension.

    The shape is that of their box if they are all of it, else flat. Raises UnsupportedError: the type is not known.
    """
    shape = extent.sizes if extent.numel == math.prod(extent.sizes) else (extent.numel,)
    nbytes = itemsize(dtype)
    if DTYPES[dtype].safetensors is None or dtype in AS_BYTES:
        return "uint8", (*shape, nbytes)
    return dtype, shape


def storage_key(number: int) -> str:
    """Return the name of a storage's bytes in the first file."""
    return f"storage/{number}"


def slot_entry(key: str, slot: Slot, extent: Extent, data: memoryview | None = None) -> Entry:
    """Return the entry of some elements of a slot, which may be in memory."""
    return Entry(key, slot, extent, *stored_as(slot.dtype, extent), itemsize(slot.dtype), data)


def order_key(key: str, width: int) -> tuple[int, str]:
    """Return what the tensors of a file are sorted by."""
    return -width, key


def header_for(
    tensors: Sequence[tuple[str, str, Shape]], identity: str, *, start: int | None = None, nbytes: int = 0
) -> bytes:
    """Return the header of a file of these tensors: name, type and shape of each, in their order.

    It is padded so that what follows begins at `start` modulo a block, or as that of so many bytes may have been.
    Raises UnsupportedError: it would be larger than safetensors allows.
    """
    every = [(DIGESTS, DIGEST_DTYPE, (len(tensors),)), *tensors]
    return header_of(every, {ID_KEY: identity}, start=start, nbytes=nbytes)


def lay_out(name: str, entries: Sequence[Entry], identity: str) -> TargetFile:
    """Return a rank's file of the checkpoint with this identity.

    Raises UnsupportedError: the header would be larger than safetensors allows.
    """
    from zckpt.engine.congruence import residue  # what only reads does without

    ordered = sorted(entries, key=lambda entry: order_key(entry.key, entry.width))
    starts = [*accumulate((one.nbytes for one in ordered), initial=DIGEST_NBYTES * len(ordered))]  # behind the header
    placed = list(zip(starts, ordered, strict=False))
    holes = [Hole(at, one.key, one.slot, one.extent, one.slot.dtype) for at, one in placed if one.data is None]
    start = residue(holes, ALIGNMENT)
    header = header_for([(one.key, one.dtype, one.shape) for one in ordered], identity, start=start)
    base = len(header)
    digests = {key: base + DIGEST_NBYTES * at for at, key in enumerate(sorted(one.key for one in ordered))}
    file = TargetFile(name, base + starts[-1], [Literal(0, header), Literal(base, bytes(starts[0]))])
    file.literals += (Literal(base + at, one.data) for at, one in placed if one.data)
    file.holes += (replace(hole, offset=base + hole.offset) for hole in holes)
    file.checksums += (Checksum(base + at, base + at + one.nbytes, (digests[one.key],)) for at, one in placed)
    return file


def open_rank_file(path: Path, *, identity: str, nbytes: int) -> RankFile:
    """Open a rank's file and see that it is the one that a document means.

    Raises ShardError: it is missing, or from another checkpoint; DamagedFileError: its header is malformed, or it is of
    another size.
    """
    if not is_file(path):
        raise ShardError(
            "a rank's file is missing",
            path=path,
            expected="every file that checkpoint.json lists",
            advice="copy it from the checkpoint's origin",
            code=MISSING_FILE,
        )
    tensors, metadata, size = read_header(path)
    if metadata.get(ID_KEY) != identity:
        raise ShardError(
            "belongs to another checkpoint",
            path=path,
            expected=f"{ID_KEY} {identity}",
            found=repr(metadata.get(ID_KEY))[:60],
            advice="an unfinished save may have left it",
            code=OTHER_RUN,
        )
    if size != nbytes:
        raise DamagedFileError("its size differs from checkpoint.json", path=path, expected=nbytes, found=size,
                               code=TRUNCATED if size < nbytes else None)  # fmt: skip
    _digests(tensors, path)
    return RankFile(str(path), size, tensors, {DIGESTS})


def _digests(tensors: Mapping[str, Slot], path: str | Path) -> None:
    digests = tensors.get(DIGESTS)
    if digests is None or (digests.dtype, digests.shape) != (DIGEST_DTYPE, (len(tensors) - 1,)):
        found = None if digests is None else f"{digests.dtype} {digests.shape}"
        raise DamagedFileError(f"no {DIGESTS}", path=path, expected=f"{len(tensors) - 1} {DIGEST_DTYPE}", found=found)


def is_as_listed(path: Path, one: Listed) -> bool:
    """Tell whether a rank's file is the one that a document lists, by its size and its header."""
    if not is_file(path) or one.header_nbytes > one.nbytes:
        return False
    with opened(path) as file:
        return file.nbytes == one.nbytes and crc32(file.at(0, one.header_nbytes)) == one.header_crc32


def listed_header(path: str | Path, one: Listed) -> bytes:
    """Return the header of a file that a document lists. Raises DamagedFileError: it has another."""
    head = read_head(str(path), one.header_nbytes)
    if crc32(head) != one.header_crc32:
        raise DamagedFileError(
            "its header differs from the one in checkpoint.json",
            path=path,
            expected=f"{one.header_nbytes} bytes with CRC-32 {one.header_crc32:08x}",
            found=f"{crc32(head):08x}",
            advice="the file is damaged, or a program has rewritten it; copy it from the checkpoint's origin",
            code=LAYOUT,
        )
    return head


def recorded(path: str) -> list[Sum]:
    """Return the checksums that were written for the tensors of a rank's file, under their names.

    Raises SourceError: the file's header is damaged, or does not have them.
    """
    tensors, _, _ = read_header(Path(path))
    _digests(tensors, path)
    return _sums(path, {key: (slot.spans[0].offset if slot.spans else 0, slot.nbytes) for key, slot in tensors.items()})


def listed_sums(path: str, one: Listed) -> list[Sum]:
    """Return the checksums of a file's tensors, of which nothing is doubted where its header is the listed one."""
    head = listed_header(path, one)
    base = 8 + int.from_bytes(head[:8], "little")
    begins = {key: its["data_offsets"] for key, its in json.loads(head[8:base]).items() if key != METADATA_KEY}
    return _sums(path, {key: (base + low, high - low) for key, (low, high) in begins.items()})


def _sums(path: str, tensors: dict[str, tuple[int, int]]) -> list[Sum]:
    """Return checksums, given where tensors begin and how long they are."""
    offset, nbytes = tensors.pop(DIGESTS)
    with opened(path) as file:
        data = file.at(offset, nbytes)
    sums = struct.unpack(f"<{nbytes // DIGEST_NBYTES}Q", data)
    return [Sum(key, path, *tensors[key], crc) for key, crc in zip(sorted(tensors), sums, strict=True)]


def mismatches(path: str) -> Iterator[DamagedFileError]:
    """Yield an error for each tensor of a rank's file that is damaged; errors are those of `recorded`."""
    with Sources() as sources:
        for one in recorded(path):
            found = crc_of(path, one.offset, end_of(one), (), sources) if one.nbytes else 0
            if found != one.crc32:
                yield DamagedFileError(
                    f"{one.name} is damaged", path=path, expected=f"CRC-32 {one.crc32:08x}", found=f"{found:08x}"
                )


Pieces = Sequence[tuple[int, Extent]]
"""Which file, and which elements."""

PIECE = {
    "offsets": Form.SIZES,
    "sizes": Form.SIZES,
    "start": Form.INTEGER,
    "numel": Form.INTEGER,
}
"""What a piece leaves out depends on the slot's shape."""


@immutable
class Cut:
    """A slot as the document has it: `key` is the name of its tensors in the files."""

    name: str
    key: str
    dtype: str
    shape: Shape
    pieces: Pieces

    @property
    def order(self) -> tuple[int, str]:
        """What the tensors of a file are sorted by."""
        return order_key(self.key, itemsize(self.dtype))

    def tensor(self, extent: Extent) -> tuple[str, str, Shape]:
        """Return name, type and shape of the tensor that some of its elements are."""
        return self.key, *stored_as(self.dtype, extent)


class Layouts:
    """The layouts of a document, which lists `count` files."""

    def __init__(self, layouts: list[Json], count: int) -> None:
        self._layouts = [
            [record(piece, "piece", {"file": Form.INTEGER}, PIECE) for piece in formed(Form.LIST, one, "layout")]
            for one in layouts
        ]
        for piece in (piece for layout in self._layouts for piece in layout):
            if piece["file"] >= count:
                raise wrong("file of piece", f"a number below {count}", piece["file"])
        self._checked: dict[tuple[int, Shape], Pieces] = {}

    def pieces(self, layout: int, key: str, shape: Shape) -> Pieces:
        """Return which file has which elements of a slot: together as many as it has.

        Raises DamagedFileError: the layout does not fit the slot.
        """
        if layout >= len(self._layouts):
            raise wrong(f"layout of {key}", f"a number below {len(self._layouts)}", layout)
        found = self._checked.get((layout, shape))
        if found is not None:
            return found
        found = []
        for piece in self._layouts[layout]:
            offsets, sizes, start, numel = (piece[name] for name in PIECE)
            if (offsets is None) != (sizes is None) or (start is None) != (numel is None):
                raise wrong(f"piece of {key}", "offsets and sizes, start and numel", piece)
            if offsets is None:
                offsets, sizes = (0,) * len(shape), shape
            if start is None:
                start, numel = 0, math.prod(sizes)
            if not is_within((offsets, sizes), shape):
                raise wrong(f"box of {key}", f"within {shape}", (offsets, sizes))
            if start + numel > math.prod(sizes):
                raise wrong(f"range of {key}", f"within {math.prod(sizes)} elements", (start, numel))
            found.append((piece["file"], Extent(offsets, sizes, start, numel)))
        total = sum(extent.numel for _, extent in found)
        if total != math.prod(shape):
            raise DamagedFileError(
                f"layout {layout} does not fit {key}", expected=f"{math.prod(shape)} elements", found=total
            )
        self._checked[layout, shape] = found
        return found


MAX_CELLS = 1 << 24
"""Of the table of slots by kinds: 64 MiB."""

MAX_NBYTES = 1 << 44
"""Of a file of a table, so that no sum leaves 64 bits."""

Offsets = Mapping[str, Shape]
"""Where each piece of a slot is in its file, in bytes, by the slot's key."""


def offsets_in(files: Sequence[RankFile], cuts: Sequence[Cut]) -> Offsets:
    """Return where the headers of files, which were read, have the pieces of slots.

    Raises DamagedFileError: a file does not hold what the document says.
    """
    return {cut.key: tuple(files[file].take(*cut.tensor(extent)) for file, extent in cut.pieces) for cut in cuts}


def summed(files: Sequence[Listed], identity: str, cuts: Sequence[Cut]) -> Offsets | None:
    """Return where the pieces of all that the files hold are, summed up one by one.

    None where the headers that follow from the document have not the CRC-32 that it lists: headers are to be read.
    """
    tensors: list[list[tuple[str, str, Shape]]] = [[] for _ in files]
    ordered = sorted(cuts, key=lambda cut: cut.order)
    for cut in ordered:
        for file, extent in cut.pieces:
            tensors[file].append(cut.tensor(extent))
    at = [one.header_nbytes + DIGEST_NBYTES * len(held) for one, held in zip(files, tensors, strict=True)]
    found: dict[str, Shape] = {}
    for cut in ordered:
        own = []
        for file, extent in cut.pieces:
            own.append(at[file])
            at[file] += extent.numel * itemsize(cut.dtype)
        found[cut.key] = tuple(own)
    if len(found) != len(ordered) or at != [one.nbytes for one in files]:
        return None
    try:
        for one, held in zip(files, tensors, strict=True):
            header = header_for(held, identity, nbytes=one.header_nbytes)
            if (len(header), crc32(header)) != (one.header_nbytes, one.header_crc32):
                return None
    except UnsupportedError:  # there can be no such file
        return None
    return found


class Table:
    """Computes where a tensor is when asked. Takes all that the files hold, from a document as it was written.

    `is_proven`: whether the sizes of all tensors are those of the files. If not, headers are to be read.
    """

    def __init__(self, files: Sequence[Listed], cuts: Sequence[Cut]) -> None:
        import numpy as np

        ordered = sorted(cuts, key=lambda cut: cut.order)
        self.rows = {cut.key: row for row, cut in enumerate(ordered)}
        kinds: dict[tuple[int, int], int] = {}
        numbers = [kinds.setdefault((id(cut.pieces), itemsize(cut.dtype)), len(kinds)) for cut in ordered]
        layouts = {id(cut.pieces): cut.pieces for cut in ordered}
        self.held = {key: Held(pieces) for key, pieces in layouts.items()}
        self.is_proven = (
            len(self.rows) == len(ordered)
            and len(kinds) * len(ordered) <= MAX_CELLS
            and max(one.nbytes for one in files) <= MAX_NBYTES
            and all(len({file for file, _ in pieces}) == len(pieces) for pieces in layouts.values())
            and all(one.numel <= files[file].nbytes for pieces in layouts.values() for file, one in pieces)
        )
        if not self.is_proven:
            return
        self._sizes = np.zeros((len(kinds), len(files)), np.int64)
        there = np.zeros((len(kinds), len(files)), np.int64)
        for (key, width), kind in kinds.items():
            which = [file for file, _ in layouts[key]]
            there[kind, which] = 1
            self._sizes[kind, which] = [width * extent.numel for _, extent in layouts[key]]
        steps = np.zeros((len(ordered) + 1, len(kinds)), np.int32)
        steps[np.arange(1, len(ordered) + 1), numbers] = 1
        self._before = np.cumsum(steps, axis=0, dtype=np.int32)
        every = self._before[-1].astype(np.int64)
        self._starts = np.array([one.header_nbytes for one in files]) + DIGEST_NBYTES * (every @ there)
        ends = self._starts + every @ self._sizes
        self.is_proven = ends.tolist() == [one.nbytes for one in files]

    def __getitem__(self, key: str) -> list[int]:
        """Return where the tensor of a slot is in each file that has one."""
        found: list[int] = (self._starts + self._before[self.rows[key]] @ self._sizes).tolist()
        return found

    def offset(self, key: str, file: int) -> int:
        """Return where the tensor of a slot is in one file."""
        return int(self._starts[file] + self._before[self.rows[key]] @ self._sizes[:, file])


class Held:
    """The pieces of a layout that have elements, by what may be asked for."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = [(file, extent) for file, extent in pieces if extent.numel]
        self._placed: ByPlace[tuple[int, Extent]] | None = None

    def reaching(self, shape: Shape, low: int, high: int) -> Pieces:
        """Return the pieces that may have some of elements [low, high) of the flattened slot."""
        if self._placed is None:
            self._placed = ByPlace(shape, ((one, one[1]) for one in self.pieces))
        return self._placed.reaching(low, high)


class PieceSpans(Spans):
    """The spans of a slot whose pieces lie in many files, as a table says; slots cut alike share what they hold."""

    __slots__ = ("_cut", "_held", "_paths", "_table")

    def __init__(self, table: Table, cut: Cut, paths: Sequence[str]) -> None:
        self._table, self._cut, self._paths = table, cut, paths
        self._held = table.held[id(cut.pieces)]

    def __len__(self) -> int:
        """Return the number of files that have some of it."""
        return len(self._held.pieces)

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of the layout."""
        return self._span(self._held.pieces[index])

    def __iter__(self) -> Iterator[Span]:
        """Yield the spans in the order of the layout."""
        offsets = self._table[self._cut.key]
        for file, extent in self._held.pieces:
            yield Span(extent, self._paths[file], offsets[file], self._cut.dtype)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that have some of elements [low, high) of the flattened tensor."""
        return tuple(map(self._span, self._held.reaching(self._cut.shape, low, high)))

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        return tuple(self._span(piece) for piece in self._held.pieces if self._paths[piece[0]] in paths)

    def _span(self, piece: tuple[int, Extent]) -> Span:
        file, extent = piece
        return Span(extent, self._paths[file], self._table.offset(self._cut.key, file), self._cut.dtype)


def spans_of(cut: Cut, where: Offsets | Table, paths: Sequence[str]) -> Sequence[Span]:
    """Return the spans of a slot, those of a table each computed when it is asked for."""
    if isinstance(where, Table):
        return PieceSpans(where, cut, paths)
    return tuple(
        Span(extent, paths[file], offset, cut.dtype)
        for (file, extent), offset in zip(cut.pieces, where[cut.key], strict=True)
        if extent.numel
    )
