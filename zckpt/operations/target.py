"""The one way in which a target is written, whoever asks: an operation, a save in training, or DCP's writer.

own         what has the target's name may be replaced, or nothing is begun
plan        the files' holes have been met with spans, every element once, by who asks
write       the plan is run under a temporary name, and source bytes held against their checksums
prove       what was written is looked at by who asks, and still has no name
name        all is synced to disk and gets its name in one step
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan
from zckpt.engine.write import write
from zckpt.errors import TargetError
from zckpt.storage.durable import check_space, written_directory, written_files
from zckpt.storage.ownership import Owned, check_target

Prove = Callable[[Path, Sequence[Path]], None]
"""Gets the temporary names of a target and of the files in `more`, which it writes. What it raises leaves no target."""


def write_target(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    owned: Owned | None = None,
    more: Sequence[Path] = (),
    overwrite: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    checks: Checks | None = None,
    prove: Prove | None = None,
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
    more : sequence of Path
        Further files that belong to a target that is a file; `prove` writes them.
    overwrite : bool
        Replace what may be replaced.
    memory : int, bytes
        Upper bound of what copy buffers take together.
    reporter : Reporter, optional
    checks : Checks, optional
        Hold what is copied against the checksums of the sources, before the target gets its name.
    prove : callable, optional
        See `Prove`.

    Returns
    -------
    Checked

    Raises
    ------
    TargetError
        The target exists, or cannot be written.
    DamagedFileError
        A source file ends before the bytes that the plan reads, or they are not those of its checksum.
    """
    path = Path(target)
    partial = (
        _partial_files(plan, path, more, overwrite)
        if owned is None
        else _partial_directory(plan, path, owned, overwrite)
    )
    with _write_errors(path), partial as (names, whole, beside):
        checked = write(plan, names, memory=memory, reporter=reporter, checks=checks)
        if prove is not None:
            prove(whole, beside)
    return checked


Partial = tuple[list[Path], Path, list[Path]]
"""The temporary names of a plan's files, of the target, and of what else belongs to it."""


@contextmanager
def _partial_files(plan: Plan, target: Path, more: Sequence[Path], overwrite: bool) -> Iterator[Partial]:
    names = [target] if len(plan.files) == 1 else [target.parent / one.file.name for one in plan.files]
    every = [*more, *sorted(names, key=lambda name: name == target)]
    for name in every:
        check_target(name, overwrite=overwrite)
    check_space(target.parent, plan.write_nbytes)
    with written_files(every, overwrite=overwrite) as partials:
        partial = dict(zip(every, partials, strict=True))
        yield [partial[name] for name in names], partial[target], [partial[name] for name in more]


@contextmanager
def _partial_directory(plan: Plan, target: Path, owned: Owned, overwrite: bool) -> Iterator[Partial]:
    check_target(target, overwrite=overwrite, owned=owned)
    check_space(target.parent, plan.write_nbytes)
    with written_directory(target, overwrite=overwrite, owned=owned) as partial:
        names = [partial / one.file.name for one in plan.files]
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
        yield names, partial, []


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into a TargetError."""
    try:
        yield
    except TargetError:
        raise
    except OSError as error:
        raise TargetError(
            "cannot be written",
            path=path,
            found=error.strerror or str(error),
            advice="nothing was left behind",
        ) from error
