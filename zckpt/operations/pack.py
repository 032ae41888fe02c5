"""A run's checkpoints as one store, in a fraction of the room; and their files again, bit for bit.

The bytes of its files are predicted by the same elements of the checkpoint before it, and by masters. Both may be of
any formats and world sizes: what is asked for is an extent of a slot of a parameter.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from zckpt.compare.logical import named
from zckpt.engine import Reporter, reporting
from zckpt.engine.plan import Copy, fill
from zckpt.engine.targets import Hole
from zckpt.errors import DamagedFileError, LayoutError, SourceError, UnsupportedError, UsageError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.units import TRACKERS, Unit, is_named, latest_of
from zckpt.immutable import immutable, mutable
from zckpt.operations.history import units_of
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.operations.places import on_disk, place_of
from zckpt.state import (
    MASTER,
    WEIGHT,
    ZEROS,
    Checkpoint,
    Document,
    Extent,
    Result,
    Slot,
    Span,
    by_key,
    itemsize,
    nbytes_of,
)
from zckpt.state.boxes import SpanIndexes
from zckpt.storage.ahead import ahead
from zckpt.storage.durable import written
from zckpt.storage.files import by_name
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.packed import is_store
from zckpt.storage.packed.chunks import AS_IT_IS, CHUNK_NBYTES, TO_BFLOAT16, TO_FLOAT16
from zckpt.storage.packed.index import Filed, is_inside
from zckpt.storage.packed.store import GIVEN, PackedMount, PackedStore, place_in
from zckpt.storage.packed.write import DEEPEST, Cut, Packing, Prediction, Range, files_of, writing
from zckpt.storage.packed.write import Known as Chunks

CASTS = {"bfloat16": TO_BFLOAT16, "float16": TO_FLOAT16}

LEAST_RANGE_NBYTES = 256
"""Elements of one that lie in pieces in the other are predicted if the pieces are as large as this; a range is 24."""

WIDTHS = (1, 2, 4, 8)

Key = tuple[str, str, str]
"""The path of a state in its checkpoint, a parameter, a slot."""


@mutable
class Known:
    """The slots of a checkpoint that lies in a store, or is going to."""

    number: int
    slots: dict[Key, Slot]
    numbers: Mapping[str, int]  # the files' numbers, by the paths that spans have
    path: Path = Path()
    _indexes: SpanIndexes = field(default_factory=SpanIndexes)

    @classmethod
    def of(
        cls, number: int, states: Mapping[str, Checkpoint], path: Path = Path(), files: Sequence[Filed] = ()
    ) -> Known:
        """Return the slots of what formats find in a checkpoint, by where they find it, and of which files."""
        slots = {
            (at, one.name, key): slot
            for at, state in states.items()
            for one in state.holders()
            for key, slot in one.slots.items()
        }
        return cls(number, slots, {_file_at(path, one.name): count for count, one in enumerate(files)}, path)

    def ranges(self, key: Key, like: Slot, extent: Extent, dtype: str) -> tuple[Range, ...]:
        """Return where the elements of an extent lie, in their order; none: not there, or in too small pieces."""
        slot = self.slots.get(key)
        if slot is None or slot.dtype != dtype or slot.shape != like.shape or slot.replicas or slot.factors:
            return ()
        try:
            copies = fill(Hole(0, slot.name, slot, extent, dtype), self._indexes)
        except LayoutError:
            return ()
        pieces = [piece for one in copies for piece in self._pieces(one, dtype)]
        if sum(nbytes for *_, nbytes in pieces) != extent.numel * itemsize(dtype):
            return ()
        return tuple((self.number, file, offset, nbytes) for _, file, offset, nbytes in sorted(pieces))

    def _pieces(self, copy: Copy, dtype: str) -> Iterable[tuple[int, int, int, int]]:
        """Yield of a copy what lies end to end: where it belongs, the file, and where it is there."""
        (source, *more), size = copy.sources, itemsize(dtype)
        odd = more or copy.unresolved or copy.byteorder != "little" or copy.source_dtype != dtype
        if odd or source.path == ZEROS or source.path not in self.numbers:
            return
        if source.strides[-1:] != (size,) or copy.strides[-1:] != (size,):
            return
        nbytes = copy.shape[-1] * size
        if len(copy.shape) > 1 and nbytes < LEAST_RANGE_NBYTES:
            return
        at = [(copy.offset, source.offset)]
        for count, there, here in zip(copy.shape[:-1], source.strides[:-1], copy.strides[:-1], strict=True):
            at = [(to + n * here, offset + n * there) for to, offset in at for n in range(count)]
        for to, offset in at:
            yield to, self.numbers[source.path], offset, nbytes


def _file_at(path: Path, name: str) -> str:
    """Return where a file of a checkpoint is, which may be that file."""
    return str(path if path.is_file() else path / name)


def cuts_of(own: Known, base: Known | None) -> Callable[[str], Sequence[Cut]]:
    """Return what tells how a file of a checkpoint is cut, by its name; `base`: the one that is in the store."""
    spans = by_key(
        (span.path, (*span.reach, key, slot, span))
        for key, slot in own.slots.items()
        for every in slot.sets
        for span in every
        if span.path in own.numbers and span.extent.numel
    )
    for some in spans.values():
        some.sort(key=lambda one: one[:2])

    def cuts(name: str) -> list[Cut]:
        found, at = [], 0
        for low, high, key, slot, span in spans.pop(_file_at(own.path, name), []):
            if low >= at and itemsize(span.dtype) in WIDTHS:
                found.append(Cut(low, high, itemsize(span.dtype), dict(_predictions(own, base, key, slot, span))))
                at = high
        return found

    return cuts


def _predictions(own: Known, base: Known | None, key: Key, slot: Slot, span: Span) -> Iterable[tuple[str, Prediction]]:
    if not span.is_contiguous or span.byteorder != "little":
        return
    (at, name, slot_name), cast = key, CASTS.get(span.dtype)
    if slot_name == WEIGHT and cast is not None:
        for kind, known in (("own", own), ("base master", base)):
            if known is not None and (ranges := known.ranges((at, name, MASTER), slot, span.extent, "float32")):
                yield kind, Prediction(cast, ranges)
    if base is not None:
        other = {MASTER: WEIGHT, WEIGHT: MASTER}.get(slot_name, slot_name)
        ranges = base.ranges(key, slot, span.extent, span.dtype)
        ranges = ranges or base.ranges((at, name, other), slot, span.extent, span.dtype)
        if ranges:
            yield "base", Prediction(AS_IT_IS, ranges)


def as_tensors(checkpoint: Checkpoint, *, alike: bool = True) -> tuple[Known, list[Slot]]:
    """Return the slots of a checkpoint as if each was a file of its elements in row-major order, and these slots.

    `alike`: those that each format has of one state, in one order; else all, as zckpt 0.2.0 numbered them in patches.
    """
    every = sorted(Known.of(GIVEN, {".": checkpoint}).slots.items(), key=lambda one: one[0])
    if alike:
        every = [
            ((".", one.name, key), slot)
            for _, one in sorted(named(checkpoint).items())
            for key, slot in sorted(one.slots.items(), key=lambda of: "" if of[0] in {WEIGHT, MASTER} else of[0])
            if one.tied_to is None and slot.shape  # a single value may be no tensor
            if key != WEIGHT or one.master is None  # which the weight is, rounded, and may be all that there is
        ]
    slots, given = dict[Key, Slot](), list[Slot]()
    for key, slot in every:
        if itemsize(slot.dtype) in WIDTHS and slot.numel:
            path = os.fsdecode(b"%d" % len(given))
            slots[key] = replace(slot, spans=(Span(slot.whole, path, 0, slot.dtype),), replicas=(), factors=None)
            given.append(slot)
    return Known(GIVEN, slots, {str(n): n for n in range(len(given))}), given


FULL_EVERY = DEEPEST + 1


@immutable
class PackedOne:
    """A checkpoint that was packed: its name, the bytes of its files, and those that the store has grown by."""

    name: str
    nbytes: int
    stored_nbytes: int


@immutable(repr=True)
class Packed(Result):
    """What `pack` did.

    Parameters
    ----------
    store : str
    packed : list of PackedOne
        With `dry_run`, those that would be packed; their `stored_nbytes` is unknown, and 0.
    present : list of str
        Checkpoints that the store already had.
    dry_run : bool
    notes : list of str
        Checkpoints that no format reads, which are packed as plain files.
    """

    store: str
    packed: list[PackedOne]
    present: list[str]
    dry_run: bool
    notes: list[str]

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        total = nbytes_of(self.packed), sum(one.stored_nbytes for one in self.packed)
        return {**Result.as_dict(self), "nbytes": total[0], "stored_nbytes": total[1]}


@shares(Copying)
def pack(
    source: Place,
    store: Place,
    *,
    full_every: int = FULL_EVERY,
    name: str | None = None,
    dry_run: bool = False,
    **shared: Unpack[Copying],
) -> Packed:
    """Add a run's checkpoints, of any formats, to a store, which is created if needed; its contents stay.

    Files of the run that name one of them as the latest (`latest` and the like) are kept, too, as they were last.

    Parameters
    ----------
    source : path-like
        A run directory, or one checkpoint.
    store : path-like
        A directory.
    full_every : int
        At most this many checkpoints must be read to restore one: elements are stored as the difference to the
        checkpoint before, and in full again after this many. At least 1.
    name : str, optional
        Name of a single checkpoint in the store. Default: that of its directory or file within the run.
    dry_run : bool
        Show what would be packed; write nothing.
    **shared

    Raises
    ------
    UsageError
        The store has another checkpoint of the same name, or is inside one, or one name is given for several.
    SourceError
        There is no checkpoint, or one cannot be read, or changes meanwhile.
    TargetError
        The store cannot be written, or another run is packing into it.
    """
    place = on_disk(store)
    if not 1 <= full_every <= 200:
        raise UsageError("--full-every must be a number from 1 to 200", found=full_every)
    run = by_name(source)
    every = [Unit(run, (run,))] if run.is_file() else units_of(run)
    if name is not None and (len(every) > 1 or not is_inside(name)):
        found = f"{len(every)} checkpoints" if len(every) > 1 else name
        raise UsageError("--name only applies to one checkpoint, and must lie within the store", path=run, found=found)
    if any(one.path.resolve() in place.resolve().parents for one in every):
        raise UsageError("the store is inside a checkpoint, and would be taken for a part of it", path=store)
    called = {
        one.path: name or (run.name if one.path == run else one.path.relative_to(run).as_posix()) for one in every
    }
    if dry_run:
        present = PackedStore(place).names()[0] if is_store(place) else {}
        apart = [one.resolve() for one in (place, *called)]
        would = [PackedOne(called[one.path], nbytes_of(files_of(one.path, apart)), 0) for one in every]
        return Packed(str(place), [one for one in would if one.name not in present], [*present], dry_run=True, notes=[])
    with writing(place) as into:
        done = packed_into(into, [(called[one.path], one) for one in every], full_every, shared["reporter"])
        for file, text in latest_of(run).items():
            if any(is_named(one.path, run, text) for one in every):
                with written([place / file], overwrite=True) as [new]:
                    new.write_bytes((run / file).read_bytes())
    return done


def _check_apart(new: Iterable[tuple[str, Unit]], known: Collection[str]) -> None:
    """Raise UsageError if a new checkpoint lies below one that is known, or one of these below it."""
    below = {above.as_posix(): name for name in known for above in PurePosixPath(name).parents}
    for name, unit in new:
        above = (one.as_posix() for one in PurePosixPath(name).parents)
        other = below.get(name) or next((one for one in above if one in known), None)
        if other is not None:
            raise UsageError(
                "one checkpoint of a store cannot lie below another", path=unit.path,
                expected=f"a name apart from {other}", found=name, advice="pack it alone, with another --name",
            )  # fmt: skip


def _are_packed(path: Path, files: Sequence[Filed], packed: Sequence[Filed], apart: Collection[Path]) -> bool:
    """Tell whether a store has files as they are.

    Of old it has a link where that leads to a file elsewhere, and checkpoints that lie in another twice.
    """
    root = path.resolve()
    others = {one.relative_to(root) for one in apart if root in one.parents}
    above = {up for one in others for up in one.parents}
    known = {Path(one.name) for one in files}

    def is_of_it(at: Path) -> bool:
        return at in known or (at not in above and others.isdisjoint((at, *at.parents)))

    packed = tuple(one for one in packed if is_of_it(Path(one.name)))
    links = {one.name: one for one in packed if one.kind == "link" and (path / one.name).is_symlink()}
    same = {name for name, one in links.items() if str((path / name).readlink()) == one.target}
    return packed == files or packed == tuple(links[one.name] if one.name in same else one for one in files)


def packed_into(
    store: PackedStore, every: list[tuple[str, Unit]], full_every: int, reporter: Reporter | None
) -> Packed:
    """Pack checkpoints, by their names, that a store has not."""
    names, wrong = store.names()
    for error in wrong.values():
        if not isinstance(error, DamagedFileError):  # of what is whole a checkpoint would be packed twice
            raise error
    apart = [one.resolve() for one in (store.path, *(unit.path for _, unit in every))]
    files = {name: files_of(unit.path, apart) for name, unit in every}
    for name, unit in every:
        if name in names and not _are_packed(unit.path, files[name], store.index(names[name]).files, apart):
            raise UsageError(
                "the store already has another checkpoint with this name", path=unit.path,
                expected="files with the packed sizes and times", advice="pack it into another store",
            )  # fmt: skip
    new = [(name, unit) for name, unit in every if name not in names]
    _check_apart(new, {*names, *files})
    done, notes, chunks = list[PackedOne](), list[str](), Chunks(store)
    with ExitStack() as mounts, reporting(reporter, sum(nbytes_of(files[name]) for name, _ in new)) as progress:
        base = None
        if names:  # the last one predicts the next
            last = max(names, key=names.__getitem__)
            path = mounts.enter_context(closing(PackedMount(store, last))).path
            own = [one for one in units_of_place(path) if one.path == path]
            states = {at: state for unit in own for at, state in _states(unit, []).items()}
            base = Known.of(names[last], states, path, store.index(names[last]).files)
        for number, (name, unit) in enumerate(new, max([*names.values(), *wrong, 0]) + 1):
            known = Known.of(number, _states(unit, notes), unit.path, files[name])
            packing = Packing(store, chunks, number, unit.path, files[name], full_every - 1, progress.advance, apart)
            stored = packing.write(name, cuts_of(known, base), {})
            done.append(PackedOne(name, nbytes_of(files[name]), stored))
            notes += _leading_out(unit.path, files[name])
            chunks.named(number)
            store.originals = {number: unit.path}
            mounts.close()  # the next one is predicted from this one's own files
            base = known
    return Packed(str(store.path), done, [*names], dry_run=False, notes=notes)


def _leading_out(path: Path, files: Sequence[Filed]) -> Iterator[str]:
    """Yield what to say of links to folders elsewhere, which stay links."""
    for at, to in ((path / one.name, one.target) for one in files if one.kind == "link"):
        if at.is_dir() and not at.resolve().is_relative_to(path.resolve()):
            yield f"{at} is packed as a link to {to}: that folder is not in this checkpoint, and is needed with it"


def _states(unit: Unit, notes: list[str]) -> dict[str, Checkpoint]:
    """Return what formats find in a checkpoint; what none reads is packed as files."""
    found = {}
    for state in unit.states:
        try:
            found[state.relative_to(unit.path).as_posix()] = open_checkpoint(state)
        except ZckptError as error:
            notes.append(f"{state} is packed as plain files: {error}")
    return found


def units_of_place(path: Path) -> list[Unit]:
    """Return the checkpoints at or below a place; none where there is none."""
    if path.is_file():
        return [Unit(path, (path,))]
    try:
        return units_of(path)
    except SourceError:
        return []


AT_ONCE_NBYTES = 8 * CHUNK_NBYTES


@immutable(repr=True)
class Unpacked(Result):
    """What `unpack` wrote, or with `dry_run` would write: target, checkpoints, number of files, bytes."""

    target: str
    checkpoints: list[str]
    files: int
    nbytes: int
    dry_run: bool


def unpack(
    store: Place,
    target: Place,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    reporter: Reporter | None = None,
) -> Unpacked:
    """Restore the files of one checkpoint in a store, or of all: bytes, modes, times and links.

    Parameters
    ----------
    store : path-like
        `STORE/NAME`, or the store; then `target` gets a directory for each checkpoint.
    target : path-like
        A directory (or a file, if the checkpoint is one) that does not exist. It appears whole or not at all.
    overwrite : bool
        Replace a file, or a directory that has no other files.
    dry_run : bool
        Show what would be written; write nothing.
    reporter : Reporter, optional

    Raises
    ------
    SourceError
        There is no such checkpoint, or its data is damaged.
    TargetError
        The target exists or cannot be written.
    """
    path, found = on_disk(target), place_in(place_of(store))
    if found is None:
        raise SourceError(
            "is not a store of checkpoints", path=store, expected="a store that `zckpt pack` wrote, or a name in it"
        )
    packed = PackedStore(found[0])
    names, wrong = packed.names()
    wanted = [found[1]] if found[1] in names else [n for n in names if not found[1] or n.startswith(f"{found[1]}/")]
    for error in () if found[1] and wanted else wrong.values():
        raise error
    if not wanted:
        raise SourceError("the store has no such checkpoint", path=store, expected=", ".join(names) or "none")
    alone = wanted == [found[1]]
    numbers = {"" if alone else name.removeprefix(f"{found[1]}/"): names[name] for name in wanted}
    every = [one for number in numbers.values() for one in packed.index(number).files]
    nbytes, files = nbytes_of(every), sum(one.kind == "file" for one in every)
    done = Unpacked(str(path), wanted, files, nbytes, dry_run)
    if not dry_run:
        latest = {} if found[1] else {name: data for name, data in packed.beside() if name in TRACKERS}
        write_files(packed, numbers, path, overwrite=overwrite, reporter=reporter, beside=latest)
    return done


def write_files(
    store: PackedStore,
    numbers: dict[str, int],
    path: Path,
    *,
    overwrite: bool,
    reporter: Reporter | None,
    prove: Callable[[Path], None] | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write checkpoints, by where they go in the target, and files `beside` them.

    `prove`: sees what has no name yet; what it raises leaves none.

    Raises SourceError: what they are made of is damaged, or some would lie in one place; TargetError: the target exists
    or cannot be written.
    """
    indexes = {front: store.index(number) for front, number in numbers.items()}
    every = [
        (front if index.is_file else os.path.join(front, one.name), one, (numbers[front], count))  # noqa: PTH118
        for front, index in indexes.items()
        for count, one in enumerate(index.files)
    ]
    names = Counter([*beside, *(at for at, one, _ in every if one.kind != "folder")])
    folders = {at for at, one, _ in every if one.kind == "folder"}
    folders |= {front for front, index in indexes.items() if not index.is_file}
    for name in (*names, *folders):  # a link in the place of a folder would lead out of the target
        if names[name] + (name in folders) > 1 or any(str(above) in names for above in PurePosixPath(name).parents):
            raise UnsupportedError(
                "two checkpoints of the store have files in one place", path=store.path, found=name,
                advice="give `zckpt unpack` STORE/NAME, to restore each one by itself",
            )  # fmt: skip
    owned = None if [*names] == [""] else Owned(lambda name: name in names)
    check_target(path, overwrite=overwrite, owned=owned)

    def copy(job: tuple[Path, int, int, int, int]) -> int:
        at, number, file, offset, nbytes = job
        data = bytearray(nbytes)
        store.read_into(number, file, offset, memoryview(data))
        with at.open("r+b") as out:
            out.seek(offset)
            out.write(data)
        return nbytes

    with (
        written([path], overwrite=overwrite, owned=owned) as [partial],
        reporting(reporter, nbytes_of(one for _, one, _ in every)) as progress,
    ):
        for front in numbers:
            (partial / front if front in folders else (partial / front).parent).mkdir(parents=True, exist_ok=True)
        for name, one, _ in every:
            at = partial / name
            if one.kind == "folder":
                at.mkdir(exist_ok=True)
            elif one.kind == "link":
                at.symlink_to(one.target)
            else:
                with at.open("wb") as out:
                    os.truncate(out.fileno(), one.nbytes)
        jobs = (
            (partial / at, *where, offset, min(AT_ONCE_NBYTES, one.nbytes - offset))
            for at, one, where in every
            for offset in range(0, one.nbytes, AT_ONCE_NBYTES)
        )
        with closing(ahead(copy, jobs)) as copies:
            for done in copies:
                progress.advance(done)
        for name, data in beside.items():
            (partial / name).write_bytes(data)
        if prove is not None:
            prove(partial)
        for name, one, _ in sorted(every, key=lambda each: (each[1].kind == "folder", -each[0].count("/"))):
            if one.kind != "link":
                (partial / name).chmod(one.mode & (0o7777 if one.kind == "folder" else 0o777))  # none runs as its owner
            os.utime(partial / name, ns=(one.modified_ns, one.modified_ns), follow_symlinks=False)
