"""Where the files of a plan are until they have their names, and what is said of them if they do not get them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zckpt.engine.plan import Plan
from zckpt.errors import Interrupted, SourceError, TargetError, WorkerError
from zckpt.operations.foresight import check_fits
from zckpt.storage.durable import written_directory, written_files
from zckpt.storage.journal import Journal, check_remains, settle
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.room import NOTHING_LEFT, write_errors

Partial = tuple[list[Path], Path, list[Path]]
"""The temporary names of a plan's files, of the target, and of what else belongs to it."""


class Proof:
    """What is done with a target before it gets its name, and what it leaves: `verified` bytes that were compared."""

    verified = 0

    @property
    def companions(self) -> Sequence[Path]:
        """Files that it writes next to a target that is one."""
        return ()

    def of(self, written: Path, companions: Sequence[Path], files: Sequence[Path]) -> None:
        """Look at a target, and the files of its plan in their order, by their temporary names; write the companions.

        What it raises leaves no target.
        """
        raise NotImplementedError


@contextmanager
def partial_target(
    plan: Plan, target: Path, owned: Owned | None, more: Sequence[Path], *, overwrite: bool, journal: Journal | None
) -> Iterator[Partial]:
    """Yield temporary names, under which the files of a plan are written; on success they get theirs.

    Parameters are those of `write_target`. Raises TargetError: the target exists or cannot be written; like a
    SourceError, it says what is left to go on with.
    """
    names = names_in(plan.names, target, owned)
    try:
        with write_errors(target):
            settle(target)
            if owned is not None:
                check_target(target, overwrite=overwrite, owned=owned)
                check_fits(plan, names, target, is_file=False)
                with written_directory(target, overwrite=overwrite, owned=owned, journal=journal) as partial:
                    names = names_in(plan.names, partial, owned)
                    if journal is not None and journal.resumes:
                        check_remains(partial, frozenset(names))
                    for name in names:
                        name.parent.mkdir(parents=True, exist_ok=True)
                    yield names, partial, []
                return
            every = [*more, *sorted(names, key=lambda name: name == target)]
            for name in every:
                check_target(name, overwrite=overwrite)
            check_fits(plan, every, target, is_file=True)
            with written_files(every, overwrite=overwrite, journal=journal) as partials:
                temporary = dict(zip(every, partials, strict=True))
                for name in more:
                    os.truncate(temporary[name], 0)  # of a run that is gone on with: `prove` writes it again
                yield [temporary[name] for name in names], temporary[target], [temporary[name] for name in more]
    except (TargetError, SourceError, WorkerError) as error:
        if journal is not None and journal.kept:
            advice = (error.advice or NOTHING_LEFT).replace(NOTHING_LEFT, journal.said())
            error.advice = advice if journal.said() in advice else f"{advice}; {journal.said()}"
        raise
    except KeyboardInterrupt as error:
        if journal is not None and journal.kept:
            raise Interrupted.of(error, journal.said()) from error
        raise


def names_in(files: Sequence[str], target: Path, owned: Owned | None) -> list[Path]:
    """Return where files go: into a directory, or the only one to the target and several into its directory."""
    if owned is not None:
        return [target / name for name in files]
    return [target] if len(files) == 1 else [target.parent / name for name in files]
