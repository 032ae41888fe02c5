"""A digest of a checkpoint's logical state, the same for every format, stage and world size; see `leaves`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor

from zckpt.compare.digests import Fingerprint, digest_share, put_together
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.executors.using import check_executor, using
from zckpt.formats.floats import with_floats
from zckpt.naming import Config, MapSource, Naming
from zckpt.operations.open import Source, opened
from zckpt.operations.places import takes_urls


@takes_urls
def fingerprint(
    source: Source,
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    executor: Executor | str | None = None,
    direct: bool = False,
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
    rename: Sequence[tuple[str, str]] = (),
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    map: MapSource | None = None,  # noqa: A002
    map_config: Config | None = None,
    dequantize: bool = False,
) -> Fingerprint:
    """Return the fingerprint of a checkpoint; every element is read once, in parallel and in bounded memory.

    Parameters
    ----------
    source : path-like or Checkpoint
    memory : int, bytes
        Upper bound of what the buffers of all workers take together; those of one are needed in any case.
    reporter : Reporter, optional
    executor
        As for `consolidate`: who reads.
    direct : bool
        Read past the page cache, where the file systems can: what is larger than memory, and read once.
    roots, tag, names, tp_rules
        As for `open`; of a path only.
    rename, strip_prefix, add_prefix, map, map_config
        As for `consolidate`: the fingerprint of the checkpoint under other names.
    dequantize : bool
        As for `diff`: the fingerprint of the checkpoint with quantised state as floats.

    Raises
    ------
    UnsupportedError
        Optimizer state that belongs to no parameter.
    SourceError
        The checkpoint cannot be read.
    """
    check_executor(executor)
    naming = Naming(rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, map=map, map_config=map_config)
    found = opened(source, roots=roots, tag=tag, names=names, tp_rules=tp_rules)
    if dequantize:
        [found] = with_floats(found)
    checkpoint, _ = naming.of(found)
    with using(executor):
        return put_together([digest_share(checkpoint, memory=memory, reporter=reporter, direct=direct)])
