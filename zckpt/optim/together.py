"""Directories that the ranks of a process group write together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zckpt.errors import TargetError, ZckptError
from zckpt.optim.ranks import Ranks
from zckpt.storage.durable import written_directory
from zckpt.storage.ownership import Owned


@contextmanager
def written_together(path: Path, ranks: Ranks, *, overwrite: bool, owned: Owned) -> Iterator[Path]:
    """Let all ranks write into one new directory, which the first rank makes and names; a failure of one is one of all.

    Parameters
    ----------
    path : Path
    ranks : Ranks
    overwrite : bool
        Replace a directory that `owned` tells.
    owned : Owned

    Raises
    ------
    TargetError
        It exists, or cannot be written.
    """
    made = written_directory(path, overwrite=overwrite, owned=owned) if ranks.rank == 0 else None
    partial, error = None, None
    try:
        if made is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = str(made.__enter__())
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = _target_error(failure, path)
    ranks.agree(error)
    try:
        directory = Path(ranks.told(partial) or "")
        try:
            yield directory
        except Exception as failure:  # noqa: BLE001  # told to all ranks
            error = _target_error(failure, path)
        ranks.agree(error)
    except BaseException as failure:
        if made is not None:
            made.__exit__(type(failure), failure, failure.__traceback__)
        raise
    try:
        if made is not None:
            made.__exit__(None, None, None)
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = _target_error(failure, path)
    ranks.agree(error)


def _target_error(failure: Exception, path: Path) -> Exception:
    """Return a failure of the operating system as one of the target."""
    if isinstance(failure, OSError) and not isinstance(failure, ZckptError):
        return TargetError("cannot be written", path=path, found=failure.strerror or str(failure))
    return failure
