"""Is a checkpoint whole, and does what it holds make sense? Every defect is a finding with a stable code.

`verify`, here, opens a source, surveys what cannot be opened, and runs the checks; it reads tensors only if it is deep.

structure.py   findings, and what metadata alone tell: coverage, element types, leftovers, steps
inventory.py   what lies where, and the blocks in which it is read; pure
deep.py        reads every byte, once, in parallel: NaN, Inf, sign, equality of elements; masters against weights
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.codes import ADDED, CHANGED, GONE
from zckpt.errors import SourceError, UnknownFormatError, UnsupportedError, UsageError
from zckpt.executors.using import using
from zckpt.formats.format import Format, Search
from zckpt.formats.registry import find_format
from zckpt.formats.survey import survey
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Place, ReadCopied, Unpack, how_read, shares
from zckpt.operations.verify.structure import (
    Checked,
    Finding,
    Verification,
    finding_of,
    findings_of,
    in_order,
    structure_findings,
)
from zckpt.state import Checkpoint, SourceFile
from zckpt.storage.files import by_name, is_file
from zckpt.storage.nodes import on_nodes

__all__ = ["Finding", "Verification", "verify"]

if TYPE_CHECKING:
    from zckpt.compare.digests import Fingerprint


@shares(ReadCopied)
def verify(
    source: Source,
    *,
    deep: bool = False,
    against: Place | None = None,
    **shared: Unpack[ReadCopied],
) -> Verification:
    """Check that a checkpoint is whole and makes sense. Changes nothing, and executes nothing in it.

    Parameters
    ----------
    source : path-like or Checkpoint
        Any checkpoint that zckpt opens, or one that it would open if it were not damaged.
    deep : bool
        Read every byte once: checksums, NaN and Inf, signs, all weights against their masters, padding, copies. Without
        it, only structure and a bounded sample of weights and masters are read.
    against : path-like, optional
        Digests that `zckpt fingerprint` recorded: a file, or a checkpoint that has them; reads every slot.
    **shared

    Returns
    -------
    Verification
        What is wrong, the worst first. A damaged, incomplete or hostile checkpoint is a finding, not an error.

    Raises
    ------
    UsageError
        Options contradict each other.
    SourceError
        There is nothing to verify (no such path, or no checkpoint), or the digests cannot be read.
    """
    executor, how = shared["executor"], how_read(shared)
    if how["direct"] and not deep and against is None:
        raise UsageError("--direct does not apply to a sample", expected="--deep or --against with it")
    from zckpt.compare.twice import files_twice

    expected = None if against is None else _recorded(Path(against), shared["tag"])
    try:
        checkpoint = opened(source, **shared)
    except SourceError as error:
        if isinstance(source, Checkpoint):
            raise
        with using(executor if deep else None):
            return _unopened(by_name(source), error, deep, how, shared["tag"], [Path(root) for root in shared["roots"]])
    findings = [*structure_findings(checkpoint), *findings_of(files_twice(checkpoint))]
    owners = [one for one in checkpoint.holders() if one.slots]
    slots = sum(len(one.slots) for one in owners)
    counts = {"files": len(checkpoint.files), "parameters": len(owners), "slots": slots, "elements": 0}
    text = None
    with using(executor if deep or expected is not None else None):
        if deep:
            owner = find_format(checkpoint.format)
            findings += _deep(counts, checkpoint.files, owner, checkpoint, how)
        else:
            findings += _sampled(counts, checkpoint)
        if expected is not None:
            text, changed = _against(checkpoint, expected, how)
            findings += changed
    return Verification(
        checkpoint.opened, checkpoint.format, deep, in_order(findings, checkpoint.files), Checked(**counts), text,
        checkpoint, checkpoint.source,
    )  # fmt: skip


def _recorded(path: Path, tag: str | None) -> Fingerprint:
    """Return the digests of a file of them, or of a checkpoint that has them: of a run, of the latest or `tag`."""
    from zckpt.compare.digests import FILE_NAME, digests_path_of_file, read_digests

    if path.is_dir() and not (path / FILE_NAME).is_file():
        path = Path(opened(path, tag=tag).source)
    beside = digests_path_of_file(path)
    return read_digests(beside if beside.is_file() and not path.is_dir() else path)


def _against(checkpoint: Checkpoint, expected: Fingerprint, how: dict[str, Any]) -> tuple[str | None, list[Finding]]:
    """Hold the digests of all slots against those that were recorded; return the fingerprint, and what changed."""
    from zckpt.compare.digests import changes
    from zckpt.operations.fingerprint import fingerprint

    try:
        found = fingerprint(checkpoint, **how)
    except SourceError as error:
        return None, [finding_of(error)]
    findings = []
    for one in changes(expected, found):
        code, what = CHANGED, "is not the one that was recorded"
        if one.expected is None:
            code, what = ADDED, "was not recorded"
        elif one.found is None:
            code, what = GONE, "does not exist"
        which = one.name if one.entry is None else f"{one.entry} of {one.name}"
        findings.append(Finding(code, f"{which} {what}", None, (one.name,), one.expected, one.found))
    return found.text, findings


def _unopened(
    path: Path, error: SourceError, deep: bool, how: dict[str, Any], tag: str | None, roots: Sequence[Path]
) -> Verification:
    """Say what is wrong with a source that cannot be opened, and what with each of its files."""
    if not os.path.lexists(path):
        raise error
    with on_nodes(path, roots):
        surveyed = survey(Search(path, tuple(roots), tag))
    said = {(one.path, one.message) for one in surveyed.errors}
    is_said = (error.path, error.message) in said
    about_it = error.path is None or Path(error.path) == path
    unknown = isinstance(error, UnknownFormatError)
    if error.code is None and about_it and (unknown or isinstance(error, UnsupportedError)):
        readable = path.is_file() and not surveyed.errors
        if len(said) == is_said and (readable or unknown):
            raise error  # nothing here is a checkpoint
    found = list(surveyed.errors)
    files = {one.path for one in found if one.path and is_file(one.path)}
    because = unknown and error.code is None and found  # it is not recognised because of those
    if not (because or is_said or error.path in files):
        found.append(error)
    counts = {"files": len(surveyed.files) + len(surveyed.errors)}
    findings = [finding_of(one) for one in found]
    if deep:
        findings += _deep(counts, surveyed.files, surveyed.format, None, how)
    ranked = [file for file in surveyed.files if file.dp_rank is not None]
    return Verification(os.fspath(path), None, deep, in_order(findings, ranked), Checked(**counts))


def _sampled(counts: dict[str, int], checkpoint: Checkpoint) -> Iterator[Finding]:
    """Hold a bounded sample of the masters against the weights."""
    if not any(p.master and p.weight for p in checkpoint.parameters.values()):
        return  # without what would be loaded for that
    from zckpt.compare.weights import samples
    from zckpt.operations.verify.deep import weight_findings

    compared = []
    try:
        for one in samples(checkpoint):
            compared.append(one)
            counts["elements"] += one.numel
    except SourceError as error:
        yield finding_of(error)
    yield from weight_findings(compared)


def _deep(
    counts: dict[str, int],
    files: Sequence[SourceFile],
    owner: Format | None,
    checkpoint: Checkpoint | None,
    how: dict[str, Any],
) -> Iterator[Finding]:
    """Read every byte once."""
    from zckpt.engine.checking import Checks, Sum
    from zckpt.formats.survey import checksums
    from zckpt.operations.verify.deep import damage_findings, run
    from zckpt.operations.verify.inventory import Inventory, take_inventory
    from zckpt.torchfile import AlikeRecords

    sums: list[Sum] = []
    empty = 0
    errors: list[SourceError] = []
    for file in files:
        try:
            found = checksums(file, owner)
            filled = [one for one in found if one.nbytes or one.crc32]  # of thousands of ranks, millions are not
            sums += filled
            records = file.records if isinstance(file.records, AlikeRecords) and found else found
            empty += len(records) - len(filled)
        except SourceError as error:
            errors.append(error)
    checks = Checks(sums)
    inventory = Inventory() if checkpoint is None else take_inventory(checkpoint, checks)
    paths = list(dict.fromkeys([*(file.path for file in files), *inventory.pieces]))
    outcome, wrong = run(inventory, checks, paths, **how)
    counts |= {"nbytes": outcome.nbytes, "elements": outcome.elements, "checksums": outcome.checksums + empty}
    yield from map(finding_of, [*errors, *outcome.errors])
    yield from damage_findings(outcome, inventory, wrong, checkpoint)
