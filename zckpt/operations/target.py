"""The one way in which a target is written, whoever asks: an operation, a save in training, or DCP's writer.

own         what has the target's name may be replaced, or nothing is begun
plan        the files' holes have been met with spans, every element once, by who asks
fit         there is room for it, and memory, or nothing is begun: `foresight`
write       the plan is run under a temporary name, and source bytes held against their checksums
prove       what was written is looked at by who asks, and still has no name
name        all is synced to disk and gets its name in one step

`How` is what a verb is asked for: how to write, and what to do with a target before it gets its name.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from zckpt.engine import Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan, plan
from zckpt.engine.write import write
from zckpt.errors import TargetExistsError, UsageError, about, as_called, shown
from zckpt.executors.using import using
from zckpt.formats.account import take_inventory
from zckpt.formats.format import TargetFiles
from zckpt.formats.low_bit import refuse_casts
from zckpt.formats.suffixes import check_directory, optimizer_path
from zckpt.immutable import immutable, mutable
from zckpt.operations.foresight import Foresight, Reads, check_fits, foresee, note_reads
from zckpt.operations.options import DECIDING, Place, Unpack
from zckpt.state import Checkpoint, Document, Result, values_of
from zckpt.state.inventory import IMPLIED
from zckpt.storage.durable import written
from zckpt.storage.journal import Journal, Purpose, check_remains, settle
from zckpt.storage.ownership import FINGERPRINT_NAME, Owned, check_replaceable, check_target
from zckpt.storage.room import write_errors
from zckpt.storage.stand_ins import check_unchanged, is_remote, place


class Copied(TypedDict, total=False):
    """How elements are copied; see `engine.write.write`."""

    memory: int
    reporter: Reporter | None
    checks: Checks | None
    direct: bool


@mutable
class Proof:
    """What is done with a target before it gets its name."""

    look: Callable[[Path, Sequence[Path], Path | None], int]
    """Looks at a target, and the files of its plan in their order, by their temporary names; returns how many bytes it
    has compared. What it raises leaves no target. It also gets where to write the target's fingerprint, or None.
    """
    records: bool = False  # whether it writes that
    verified: int = 0  # bytes; compared so far


def record_of(target: Path, owned: Owned | None, proof: Proof | None) -> Path | None:
    """Return where a target's fingerprint goes, into a directory or next to a file; None: it is not recorded."""
    if proof is None or not proof.records:
        return None
    if owned is not None:
        return target / FINGERPRINT_NAME
    from zckpt.compare.digests import digests_path_of_file

    return digests_path_of_file(target)


@immutable(kw_only=True)
class How:
    """How a verb writes: options of `Writing`, as they are given, and what decides what is written, for the journal."""

    verb: str
    options: Mapping[str, object]
    weight_check: bool
    checksums: bool
    overwrite: bool
    resume: bool
    restart: bool
    dry_run: bool
    memory: int
    reporter: Reporter | None
    executor: Executor | str | None
    direct: bool
    overflow: str = "refuse"

    @classmethod
    def of(cls, verb: str, shared: Mapping[str, Any], **own: object) -> How:
        """Return how a verb writes, from the options that verbs share, with those of its own."""
        options = {**own, **{name: shared[name] for name in shared.keys() & DECIDING}}
        given = {one.name: shared[one.name] for one in fields(cls) if one.name in shared}
        return cls(verb=verb, options=options, **given)

    def journal(
        self, target: Path, planned: Plan, beside: Sequence[Path], origins: Sequence[Checkpoint]
    ) -> Journal | None:
        """Return the journal of a run to a target, and to the files beside it; to a store, of its purpose only.

        Of what it is made, it names what tensors are copied from and what else was read of the sources: what a target
        says of itself comes from there.

        Raises SourceError: a file of the source is gone.
        """
        options = {**self.options, "checksums": "" if self.checksums else "none"}
        sizes = planned.copy_nbytes, planned.write_nbytes
        read = planned.sources.union(file.path for one in origins for file in one.files)
        claims = ((path, claim, one.source) for one in origins for path, claim in one.claims.items())
        # what lies beside a checkpoint and only names it, as `latest` does, says nothing of what it holds
        read |= {path for path, claim, own in claims if claim.fate != IMPLIED or Path(own) in Path(path).parents}
        purpose = Purpose.of(self.verb, options, planned.names, sizes, read, [one.name for one in beside])
        return Journal(target, purpose, resume=self.resume, restart=self.restart)


def write_target(
    plan: Plan,
    target: Place,
    *,
    owned: Owned | None = None,
    overwrite: bool = False,
    proof: Proof | None = None,
    journal: Journal | None = None,
    **how: Unpack[Copied],
) -> Checked:
    """Write the files of a plan; the target appears whole or not at all.

    Parameters
    ----------
    plan : Plan
    target : path-like
        A directory, which gets the files under their names. Or a file: the plan's only one; or that of its name, and
        the others go into its directory. All get their names when all are written, the target last, so that no new
        file is ever with an old one.
    owned : Owned, optional
        The target is a directory, and this tells which directories it may replace. None: it is a file.
    overwrite : bool
        Replace what may be replaced.
    proof : Proof, optional
        What is done with the target before it gets its name.
    journal : Journal, optional
        Record what is done, so that another run can go on with it, and go on with what is there.
    **how
        As for `engine.write.write`: `memory`, `reporter`, `checks` and `direct`.

    Returns
    -------
    Checked

    Raises
    ------
    TargetError
        The target exists, there is no room for it, or it cannot be written.
    UsageError
        A limit leaves too little memory.
    DamagedFileError
        A source file ends before the bytes that the plan reads, or they are not those of its checksum.
    """
    path = Path(target)
    if is_remote(path):
        from zckpt.operations.shared_target import write_remote

        return write_remote(plan, path, owned, overwrite, proof, journal, **how)
    is_file, names, record = owned is None, names_in(plan.names, path, owned), record_of(path, owned, proof)
    targets = [*filter(None, [record]), *sorted(names, key=lambda name: name == path)] if is_file else [path]
    with nullcontext() if journal is None else journal.telling(), write_errors(path):
        settle(path)
        for one in targets:
            check_target(one, overwrite=overwrite, owned=owned)
        check_fits(plan, targets if is_file else names, path, is_file=is_file)
        with written(targets, overwrite=overwrite, owned=owned, journal=journal) as partials:
            temporary = dict(zip(targets, partials, strict=True))
            if is_file:
                if record is not None:
                    record = temporary[record]
                    os.truncate(record, 0)  # of a run that is gone on with: `proof` writes it again
                names = [temporary[name] for name in names]
            else:
                names, record = names_in(plan.names, temporary[path], owned), record_of(temporary[path], owned, proof)
                if journal is not None and journal.resumes:
                    check_remains(temporary[path], frozenset(names))
                for folder in {name.parent for name in names}:
                    folder.mkdir(parents=True, exist_ok=True)
            checked = write(plan, names, journal=journal, **how)
            if journal is not None:
                journal.check_sources()
            check_unchanged()
            if proof is not None:
                if isinstance(plan.files, list):
                    plan.files.clear()
                with about(path):
                    proof.verified = proof.look(temporary[path], names, record)
    return checked


def names_in(files: Sequence[str], target: Path, owned: Owned | None) -> list[Path]:
    """Return where files go: into a directory, or the only one to the target and several into its directory."""
    if owned is not None:
        return [target / name for name in files]
    return [target] if len(files) == 1 else [target.parent / name for name in files]


# --- from a checkpoint


def write_from(
    kind: type[Made],
    checkpoint: Checkpoint,
    laid: TargetFiles,
    target: Path,
    how: How,
    *,
    owns: Owned | None = None,
    inside: Sequence[Place] = (),
    proof: Proof | None = None,
    dropped: tuple[str, ...] = (),
    sources: Sequence[Checkpoint] = (),
    **more: Any,  # noqa: ANN401  # of the result
) -> Made:
    """Plan the files that were laid out for a target, check the source, write the target and what points to it.

    Parameters
    ----------
    kind : type
        Of the result.
    checkpoint : Checkpoint
        The source.
    laid : TargetFiles
    target : Path
    how : How
    owns : Owned, optional
        Which directories may be replaced, by what the format writes; files of the target's own names may be there, too.
    inside : sequence of path-like
        Directories in which no directory is written.
    proof : Proof, optional
    dropped : tuple of str
        What of the source may be lost.
    sources : sequence of Checkpoint
        Where the elements come from, if the checkpoint is computed from others: these are checked in its stead.
    **more
        Of the result.

    Raises
    ------
    UsageError
        The target is, contains or is inside the source.
    SourceError
        It contradicts itself, or a file is damaged.
    TargetError
        The target exists or cannot be written.
    """
    origins = sources or [checkpoint]
    own = owns or Owned(lambda _: False)
    others = Owned(lambda name: own.is_own(name) or name in laid.copied or laid.replaceable(name), own.is_marked)
    owned = None if laid.is_file else others
    outside = [target.parent / one.name for one in laid.outside]
    recorded = [*filter(None, [record_of(target, owned, proof)])]
    _check_replaces(origins, laid, target, owned, recorded, inside, overwrite=how.overwrite)
    left = [item for one in origins for item in take_inventory(one).left_out] if dropped else []
    damaged = {item.file for item in left if item.error is not None and item.file in laid.copied}
    if damaged:  # files that come lazily are not kept
        laid = replace(laid, files=[one for one in laid.files if one.name not in damaged])
    reads: defaultdict[str, Reads] = defaultdict(Reads)
    planned = plan(laid.files, partial(note_reads, reads) if how.dry_run else None)
    names = names_in(planned.names, target, owned)
    every = (*names, *outside, *recorded)
    for origin in origins:
        casts = ((hole.slot, hole.dtype) for file in laid.files for hole in file.holes)
        refuse_casts(origin, casts, "--dtype=keep writes them unchanged, --dequantize as floats")
    compared, drifts = _compared(origins, laid) if how.weight_check else (0, [])
    checked, foresight = Checked(), None
    if how.dry_run:
        foresight = foresee(planned, reads, every, target, is_file=owned is None, memory=how.memory)
    else:
        from zckpt.formats.survey import source_checks

        checks = source_checks(origins, planned) if how.checksums else Checks()
        checks.allows_overflow = how.overflow == "allow"
        beside = [*recorded, *names] if owned is None else []
        with using(how.executor, 0 if how.direct else planned.computed_nbytes):
            checked = write_target(
                planned,
                target,
                owned=owned,
                overwrite=how.overwrite,
                memory=how.memory,
                reporter=how.reporter,
                checks=checks,
                proof=proof,
                journal=how.journal(target, planned, beside, origins),
                direct=how.direct,
            )
        for one, name in zip(laid.outside, outside, strict=True):
            write_target(plan([one]), name, overwrite=True)
    return kind(
        dry_run=how.dry_run,
        files=every,
        read_nbytes=planned.read_nbytes,
        write_nbytes=planned.write_nbytes,
        memory=how.memory,
        compared=compared,
        checksummed=checked.nbytes,
        verified=0 if proof is None else proof.verified,
        notes=(*laid.notes, *drifts, *filter(None, [checked.overflowed]), *_otherwise(planned, target, how)),
        dropped=dropped,
        warnings=tuple(dict.fromkeys(warning for one in origins for warning in one.warnings)),
        foresight=foresight,
        **more,
    )


def check_apart(targets: Iterable[Path], sources: Mapping[Path, Place], inside: Iterable[Place] = ()) -> None:
    """Raise UsageError if a target is what it is made of, contains it, or lies in one of some directories.

    `sources`: what each is called, by its place.
    """
    around = {parent for source in sources for parent in source.parents} | sources.keys()
    for one in targets:
        if (here := place(one)) in around:
            found = next(source for source in sorted(sources) if here in (source, *source.parents))
            raise UsageError("the target is, or contains, the source", path=one, found=str(sources[found]))
        for root in inside:
            if place(root) in here.parents:
                raise UsageError("the target is inside the source", path=one, found=str(root))


def _check_replaces(
    origins: Sequence[Checkpoint],
    laid: TargetFiles,
    target: Path,
    owned: Owned | None,
    more: Sequence[Path],
    inside: Sequence[Place],
    *,
    overwrite: bool,
) -> None:
    """Raise unless a target can be created or replaced without losing a source, or what is none of its own files."""
    files = [*more, *names_in([one.name for one in laid.files], target, None)] if owned is None else [target]
    if owned is not None:
        check_directory(target)
    sources = {place(file.path) for one in origins for file in one.files}
    check_apart(files, dict(zip(sources, sources, strict=True)), inside if owned is not None else ())
    for one in [*(files if overwrite else ()), *(target.parent / one.name for one in laid.outside)]:
        check_replaceable(one, owned if one == target else None)
    if overwrite and owned is None and target.is_file():
        from zckpt.compare.digests import digests_path_of_file

        for one in (digests_path_of_file(target), optimizer_path(target)):
            if one not in files and os.path.lexists(one):
                raise TargetExistsError(
                    "belongs to the file that will be replaced, and would be taken for the new file's",
                    path=one,
                    advice="remove it, or let it be written again",
                )


def _otherwise(planned: Plan, target: Path, how: How) -> Iterator[str]:
    """Yield what of a plan is not done as options say."""
    if how.direct:
        from zckpt.storage.disk import unavailable

        yield from unavailable(planned.sources, target.parent)
    if not is_remote(target):
        return
    from zckpt.engine.upload import LEAST_MEMORY_NBYTES

    if how.memory < LEAST_MEMORY_NBYTES:
        yield f"parts for a store need up to {LEAST_MEMORY_NBYTES} bytes of memory, but --memory is {how.memory}"
    if how.executor not in (None, "threads"):
        yield "this process makes and sends what goes to a store, not the executor's workers"


def _compared(origins: Sequence[Checkpoint], laid: TargetFiles) -> tuple[int, list[str]]:
    """Hold masters against weights, ranks' files against each other, and what else the format can; count elements."""
    from zckpt.compare.twice import check_files_apart
    from zckpt.compare.weights import check_weights

    compared, drifts = 0 if laid.check is None else laid.check(), []
    for one in origins:
        check_files_apart(one)
        if one.duplicates:
            from zckpt.compare.copies import drifted

            drifts += drifted(one)
        compared += check_weights(one)
    return compared, drifts


@immutable(kw_only=True)
class Written(Result):
    """What a verb wrote, or with `dry_run` would write.

    Parameters
    ----------
    dry_run : bool
        Whether nothing was written.
    files : tuple of Path
    read_nbytes, write_nbytes : int, bytes
    memory : int, bytes
        Limit of the copy buffers.
    compared : int
        Elements of masters compared with their weights, and of slices compared with other ranks'.
    checksummed : int, bytes
        Bytes of the source that were compared with its checksums during the copy.
    verified : int, bytes
        Bytes of the target that were compared with the source after writing.
    notes : tuple of str
        Notes about the target.
    dropped : tuple of str
        What zckpt did not read, and `drop` named.
    missing, filled : tuple of dict
        What lost files held and the target lacks, or has from elsewhere: see `salvage`.
    warnings : tuple of str
        Warnings about the source.
    foresight : Foresight or None
        With `dry_run`, what the run would need.
    """

    dry_run: bool
    files: tuple[Path, ...]
    read_nbytes: int
    write_nbytes: int
    memory: int
    compared: int
    checksummed: int
    verified: int
    notes: tuple[str, ...]
    dropped: tuple[str, ...]
    missing: tuple[Document, ...] = ()
    filled: tuple[Document, ...] = ()
    warnings: tuple[str, ...]
    foresight: Foresight | None

    def __post_init__(self) -> None:
        for said in ("notes", "warnings"):
            object.__setattr__(self, said, tuple(map(as_called, getattr(self, said))))

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {_KEYS.get(key, key): value for key, value in Result.as_dict(self).items()}


Made = TypeVar("Made", bound=Written)

_KEYS = {
    "memory": "memory_nbytes",
    "compared": "checked_elements",
    "checksummed": "checksummed_nbytes",
    "verified": "verified_nbytes",
    "saved": "saved_nbytes",
}
"""What the document of `--json` calls some of a result's fields."""


def summary(checkpoint: Checkpoint) -> Document:
    """Return what a document says of one of several checkpoints."""
    found = values_of(checkpoint, ("source", "format", "step", "world_size", "zero_stage"))
    return {**found, "source": shown(checkpoint.source)}
