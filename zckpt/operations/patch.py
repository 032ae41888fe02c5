"""What changed from one checkpoint to another of the same model, whatever their formats: made, and applied.

A patch is what a store has of one checkpoint, predicted from the tensors of another: each as a file of its elements in
row-major order, read out of whatever format that is in. Both ends are proven by their fingerprints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from zckpt.compare.digests import changes
from zckpt.engine import reporting
from zckpt.engine.copy import read_extent
from zckpt.errors import DamagedFileError, SourceError, UsageError, about
from zckpt.formats import open_checkpoint
from zckpt.formats.safetensors.deltas import ENCODINGS, XOR, version_of
from zckpt.formats.safetensors.file import is_delta
from zckpt.immutable import immutable
from zckpt.operations.deltas import apply_published, pairs, publish
from zckpt.operations.fingerprint import fingerprint
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Copying, Place, ReadCopied, Unpack, only, shares
from zckpt.operations.pack import Known, Unpacked, as_tensors, cuts_of, write_files
from zckpt.operations.places import on_disk
from zckpt.operations.target import check_apart
from zckpt.state import Checkpoint, Result, Slot, itemsize, nbytes_of
from zckpt.storage.durable import written
from zckpt.storage.files import Sources
from zckpt.storage.ownership import Owned, called, check_target
from zckpt.storage.packed import PATCH
from zckpt.storage.packed.chunks import Bytes
from zckpt.storage.packed.store import GIVEN, PackedStore
from zckpt.storage.packed.write import Packing, files_of, writing
from zckpt.storage.stand_ins import place

ZCKPT, SLIME = FORMS = ("zckpt", "slime")

NUMBER = GIVEN + 1

DEEPEST = 2
"""Of what is predicted from the other checkpoint, or from a master that is."""

_OWNED = Owned(called(r"store\.json|00000\d\.(index|chunks)|\.0*\d+\.index|\.store\.json.*"))


@immutable(repr=True)
class Patched(Result):
    """What `patch` wrote.

    Parameters
    ----------
    target : str
    base, result : str
        Fingerprints of the checkpoint that it applies to, and of the result; for slime, versions.
    equal, changed : int
        Tensors and single values that both have; weights, masters and optimizer state are counted separately.
    differences : list of str
        Those that differ, or that only one has.
    nbytes, stored_nbytes : int
        Size of the files or tensors that it produces, and of the patch itself; 0 with `dry_run`.
    dry_run : bool
    """

    target: str
    base: str
    result: str
    equal: int
    changed: int
    differences: list[str]
    nbytes: int
    stored_nbytes: int
    dry_run: bool


@shares(ReadCopied)
def patch(
    a: Source,
    b: Place,
    target: Place,
    *,
    to: str = ZCKPT,
    encoding: str = XOR,
    overwrite: bool = False,
    dry_run: bool = False,
    **shared: Unpack[ReadCopied],
) -> Patched:
    """Write what turns checkpoint A into checkpoint B of the same model, of any formats and world sizes.

    Parameters
    ----------
    a : path-like or Checkpoint
        The checkpoint that it will be applied to, in any format.
    b : path-like
        A directory or a file; `apply` writes all its files.
    target : path-like
        A directory that does not exist.
    to : str
        "zckpt"; or "slime": the changed bytes of weights, as slime publishes a version (`weight_v000003`).
    encoding : str
        For slime: "xor", or "overwrite", which can be applied twice.
    overwrite : bool
        Replace an existing patch.
    dry_run : bool
        Show what differs; write nothing.
    **shared
        About A.

    Raises
    ------
    UsageError
        An option does not exist, or does not apply to that form.
    UnsupportedError
        One has state that no fingerprint covers; or, for slime, their weights are not the same tensors.
    SourceError
        One cannot be read, or changes meanwhile.
    TargetError
        The target exists or cannot be written.
    """
    path, source = on_disk(target), Path(b)
    if to not in FORMS or encoding not in ENCODINGS or (to == ZCKPT and encoding != XOR):
        raise UsageError("unknown form of a patch", expected="zckpt; or slime, with xor or overwrite", found=to)
    base, result = opened(a, **shared), open_checkpoint(source)
    _check_apart(path, base, b)
    if to == SLIME:
        tensors = pairs(base, result)
        nbytes = sum(slot.nbytes for _, _, slot in tensors)
        names, stored = publish(
            tensors,
            lambda slot: _elements((slot,), 0, 0, slot.nbytes),
            path,
            encoding,
            overwrite=overwrite,
            dry_run=dry_run,
            reporter=shared["reporter"],
        )
        before, after = (f"weight_v{number:06d}" for number in (version_of(path) - 1, version_of(path)))
        return Patched(str(path), before, after, len(tensors) - len(names), len(names), names, nbytes, stored, dry_run)
    check_target(path, overwrite=overwrite, owned=_OWNED)
    copying = only(Copying, {**shared, "reporter": None})
    prints = fingerprint(base, **copying), fingerprint(result, **copying)
    differ = changes(*prints)
    ours, theirs = ({(name, entry) for name, its in one.entries.items() for entry in its} for one in prints)
    both = ours & theirs
    changed = {(one.name, one.entry) for one in differ} & both
    shown = sorted(f"{entry} of {name}" for name, entry in changed | (ours ^ theirs))
    files = files_of(source)
    nbytes, stored = nbytes_of(files), 0
    if not dry_run:
        known, given = as_tensors(base)
        cuts = cuts_of(Known.of(NUMBER, {".": result}, source, files), known)
        details: dict[str, object] = {"base": prints[0].text, "result": prints[1].text, "alike": True}
        with (
            written([path], overwrite=overwrite, owned=_OWNED) as [made],
            reporting(shared["reporter"], nbytes) as progress,
            writing(made, kind=PATCH) as store,
        ):
            store.given = partial(_elements, given)
            packing = Packing(store, None, NUMBER, source, files, DEEPEST, progress.advance)
            stored = packing.write(source.name, cuts, details)
    return Patched(
        str(path), prints[0].text, prints[1].text, len(both - changed), len(changed), shown, nbytes, stored, dry_run
    )


@shares(ReadCopied)
def apply(
    a: Source,
    patch: Place,
    target: Place,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    **shared: Unpack[ReadCopied],
) -> Unpacked:
    """Apply a patch to a checkpoint: write the other checkpoint's files, bit for bit.

    Parameters
    ----------
    a : path-like or Checkpoint
        What the patch was made from, in any format; its fingerprint identifies it. For slime's versions: the directory
        of a model at any earlier version, by default 0.
    patch : path-like
        A patch, or a version that slime has published, with the versions in between next to it.
    target : path-like
        A directory (or a file, if a file was patched) that does not exist. It appears whole or not at all.
    overwrite : bool
        Replace a file, or a directory that has no other files.
    dry_run : bool
        Check that the patch is for A, and show what would be written; write nothing.
    **shared
        About A.

    Raises
    ------
    UsageError
        The patch is for another checkpoint.
    SourceError
        A or the patch is damaged.
    TargetError
        The target exists or cannot be written.
    """
    delta = on_disk(patch)
    base, path = opened(a, **shared), on_disk(target)
    _check_apart(path, base, delta)
    if is_delta(delta):
        done = apply_published(base, delta, path, overwrite=overwrite, dry_run=dry_run, reporter=shared["reporter"])
        return Unpacked(str(path), *done, dry_run)
    store = PackedStore(delta, kind=PATCH)
    index = store.index(NUMBER)
    store.check_index(NUMBER)
    store.given = partial(_elements, as_tensors(base, alike=bool(index.details.get("alike")))[1])
    expected, result = index.details.get("base"), index.details.get("result")
    copying = only(Copying, {**shared, "reporter": None})
    found = fingerprint(base, **copying).text
    if found != expected:
        raise UsageError(
            "the patch is for another checkpoint", path=base.named, expected=expected, found=found,
            advice="give the checkpoint that the patch was made from, in any format",
        )  # fmt: skip

    def prove(done: Path) -> None:
        with about(path):
            made = fingerprint(open_checkpoint(done), **copying).text
        if made != result:
            raise DamagedFileError("the result of the patch differs from its original", path=patch, expected=result,
                                   found=made)  # fmt: skip

    count = sum(one.kind == "file" for one in index.files)
    nbytes = nbytes_of(index.files)
    if not dry_run:
        write_files(store, {"": NUMBER}, path, overwrite=overwrite, reporter=shared["reporter"], prove=prove)
    return Unpacked(str(path), [index.name], count, nbytes, dry_run)


def _check_apart(target: Path, base: Checkpoint, other: Place) -> None:
    sources = {place(one): one for one in (base.source, other)}
    check_apart([target], sources, sources.values())


def _elements(given: Sequence[Slot], number: int, offset: int, nbytes: int) -> Bytes:
    """Return bytes of a tensor's elements in row-major order. Raises SourceError: they are not there, or unreadable."""
    if number >= len(given):
        raise SourceError("the patch needs tensors that do not exist", path=str(number))
    slot = given[number]
    size = itemsize(slot.dtype)
    first, end = offset // size, -(-(offset + nbytes) // size)
    if end > slot.numel:
        raise SourceError("the patch needs elements that do not exist", path=slot.name)
    with Sources() as sources:
        data = read_extent(slot, slot.flat(first, end - first), sources).view(np.uint8)
    return data[offset - first * size : offset - first * size + nbytes]
