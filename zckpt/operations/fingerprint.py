"""A digest of a checkpoint's logical state, the same for every format, stage and world size; see `leaves`."""

from __future__ import annotations

import os

from zckpt.compare.digests import Fingerprint
from zckpt.compare.leaves import digest_part, put_together
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.formats import open_checkpoint
from zckpt.state import Checkpoint


def fingerprint(
    source: str | os.PathLike[str] | Checkpoint,
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
) -> Fingerprint:
    """Return the fingerprint of a checkpoint; every element is read once, in parallel and in bounded memory.

    Parameters
    ----------
    source : path-like or Checkpoint
    memory : int, bytes
        Upper bound of what buffers take together; a few leaves for each thread are needed in any case.
    reporter : Reporter, optional
        Told of progress.

    Raises
    ------
    UnsupportedError
        Optimizer state that belongs to no parameter.
    SourceError
        The checkpoint cannot be read.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return put_together([digest_part(checkpoint, memory=memory, reporter=reporter)])
