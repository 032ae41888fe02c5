"""A digest of a checkpoint's logical state, the same for every format, stage and world size; see `leaves`."""

from __future__ import annotations

from zckpt.compare.digests import Fingerprint, digest_share, put_together
from zckpt.executors.using import using
from zckpt.formats.floats import with_floats
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Compared, Unpack, how_read, naming_of, shares


@shares(Compared)
def fingerprint(source: Source, **shared: Unpack[Compared]) -> Fingerprint:
    """Return a checkpoint's fingerprint. Reads every element once, in parallel and in bounded memory.

    Parameters
    ----------
    source : path-like or Checkpoint
    **shared

    Raises
    ------
    UnsupportedError
        There is optimizer state that belongs to no parameter.
    SourceError
        The checkpoint cannot be read.
    """
    found = opened(source, **shared)
    if shared["dequantize"]:
        [found] = with_floats(found)
    checkpoint, _ = naming_of(shared).of(found)
    with using(shared["executor"]):
        return put_together([digest_share(checkpoint, **how_read(shared))])
