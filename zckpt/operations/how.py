"""How a verb writes, and what is done with a target before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from zckpt.engine import Reporter
from zckpt.engine.checking import Checks
from zckpt.engine.plan import Plan
from zckpt.immutable import immutable, mutable
from zckpt.operations.options import DECIDING
from zckpt.state import Checkpoint
from zckpt.state.inventory import IMPLIED
from zckpt.storage.journal import Journal, Purpose
from zckpt.storage.ownership import FINGERPRINT_NAME, Owned


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
