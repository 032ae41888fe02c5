"""A run's checkpoints as one store, in a fraction of the room; and their files again, bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path, PurePosixPath

from zckpt.engine import Reporter, reporting
from zckpt.errors import DamagedFileError, SourceError, UsageError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.units import Unit, is_named, latest_of
from zckpt.immutable import immutable
from zckpt.operations.history import units_of
from zckpt.operations.options import Copying, Place, Unpack, shares
from zckpt.operations.prediction import Known, cuts_of
from zckpt.state import Checkpoint, Document, Result, nbytes_of
from zckpt.storage.durable import written
from zckpt.storage.packed.index import Filed, is_inside
from zckpt.storage.packed.mount import PackedMount
from zckpt.storage.packed.store import PackedStore, is_store
from zckpt.storage.packed.write import DEEPEST, Packing, files_of, writing
from zckpt.storage.packed.write import Known as Chunks
from zckpt.storage.remote import is_url

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
        The store has another checkpoint of the same name, or one name is given for several.
    SourceError
        There is no checkpoint, or one cannot be read, or changes meanwhile.
    TargetError
        The store cannot be written, or another run is packing into it.
    """
    if is_url(store):
        raise UsageError("a store of checkpoints must be a directory on a file system", path=store)
    if not 1 <= full_every <= 200:
        raise UsageError("--full-every must be a number from 1 to 200", found=full_every)
    run, place = Path(source), Path(store)
    every = units_of(run)
    if name is not None and (len(every) > 1 or not is_inside(name)):
        found = f"{len(every)} checkpoints" if len(every) > 1 else name
        raise UsageError("--name only applies to one checkpoint, and must lie within the store", path=run, found=found)
    called = {
        one.path: name or (run.name if one.path == run else one.path.relative_to(run).as_posix()) for one in every
    }
    if dry_run:
        present = PackedStore(place).names()[0] if is_store(place) else {}
        would = [PackedOne(called[one.path], nbytes_of(files_of(one.path)), 0) for one in every]
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


def _are_packed(path: Path, files: Sequence[Filed], packed: Sequence[Filed]) -> bool:
    """Tell whether a store has files as they are; of old it has a link where that leads to a file elsewhere."""
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
    files = {name: files_of(unit.path) for name, unit in every}
    for name, unit in every:
        if name in names and not _are_packed(unit.path, files[name], store.index(names[name]).files):
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
            packing = Packing(store, chunks, number, unit.path, files[name], full_every - 1, progress.advance)
            stored = packing.write(name, cuts_of(known, base), {})
            done.append(PackedOne(name, nbytes_of(files[name]), stored))
            chunks.named(number)
            store.originals = {number: unit.path}
            mounts.close()  # the next one is predicted from this one's own files
            base = known
    return Packed(str(store.path), done, [*names], dry_run=False, notes=notes)


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
