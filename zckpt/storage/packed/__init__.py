"""Checkpoints of a run as one store: files as chunks, of which each is kept once, or as its difference to a prediction.

STORE/store.json            what it is, and of which version
STORE/000001.chunks         what the first checkpoint added: chunks, end to end
STORE/000001.index          its files, and of which chunks they consist; it appears last, in one step
STORE/000002.chunks ...

A prediction is ranges of other files of the store, so that no format is needed to read one. Who packs has found them.
"""

from __future__ import annotations

import os

from zckpt.errors import SourceError
from zckpt.storage.files import is_file, json_object

DOCUMENT = "store.json"

STORE, PATCH = "zckpt store", "zckpt patch"
"""What `DOCUMENT` says that a directory is."""


def is_store(path: str | os.PathLike[str], kind: str = STORE) -> bool:
    """Tell whether a directory is a store, or a patch; of any version. What cannot be looked at is none."""
    file = os.path.join(path, DOCUMENT)  # noqa: PTH118  # asked of every path that a verb gets
    try:
        return is_file(file) and json_object(file, "store", most=1 << 16).get("zckpt") == kind
    except SourceError:
        return False
