"""From the files of a directory to a Checkpoint. Structure only; no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import UnknownFormatError
from zckpt.formats.zero_redundancy.directory import find
from zckpt.formats.zero_redundancy.foreign import read_foreign
from zckpt.formats.zero_redundancy.own import read_own
from zckpt.state import Checkpoint


def read(path: Path, *, names: Sequence[str] | None = None) -> Checkpoint:
    """Read the structure of a directory.

    Ranks' files number their parameters by themselves, in the order in which these were dealt. Which is which
    follows from the sizes of all of them in the optimizer's order: as `metadata.pt` has it where zckpt wrote the
    directory; else by `names`, or as deduced, and then by the sizes that the model has.

    Parameters
    ----------
    path : Path
    names : sequence of str, optional
        Names of the optimizer's parameters, in its order.

    Raises
    ------
    SourceError
        Files are missing or damaged, contradict each other, or do not tell which parameter is which.
    UsageError
        `names` do not fit.
    """
    directory = find(path)
    if directory is None:
        raise UnknownFormatError("holds no state of a ZeroRedundancyOptimizer", path=path)
    if directory.metadata is not None:
        return read_own(directory, directory.metadata, names)
    return read_foreign(directory, names)
