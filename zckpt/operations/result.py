"""What the verbs that write return: what they wrote, or under `dry_run` would have, and how it was checked.

And what all results say alike of a checkpoint, and of numbers that JSON cannot say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zckpt.state import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A target that was written, or under `dry_run` would be.

    Parameters
    ----------
    dry_run : bool
        Whether nothing was written.
    files : tuple of Path
    read_nbytes, write_nbytes : int, bytes
    memory : int, bytes
        Upper bound of the copy buffers.
    compared : int
        Elements of masters that were held against their weights, and of slices against those of other ranks.
    checksummed : int, bytes
        Of the source that were held against the checksums in it as they were copied.
    verified : int, bytes
        Of the target that were compared with the source after writing.
    notes : tuple of str
        What to know about the target.
    dropped : tuple of str
        What the source holds and nothing has read, which `drop` named.
    warnings : tuple of str
        What to know about the source.
    """

    dry_run: bool
    files: tuple[Path, ...]
    read_nbytes: int
    write_nbytes: int
    memory: int
    compared: int = 0
    checksummed: int = 0
    verified: int = 0
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return all parameters, for a result that has more."""
        return {one.name: getattr(self, one.name) for one in fields(Written)}

    def as_dict(self) -> dict[str, object]:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "dry_run": self.dry_run,
            "files": [str(path) for path in self.files],
            "read_nbytes": self.read_nbytes,
            "write_nbytes": self.write_nbytes,
            "memory_nbytes": self.memory,
            "checked_elements": self.compared,
            "checksummed_nbytes": self.checksummed,
            "verified_nbytes": self.verified,
            "notes": list(self.notes),
            "dropped": list(self.dropped),
            "warnings": list(self.warnings),
        }


def about(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what a document says of one of several checkpoints."""
    keys = ("source", "format", "step", "world_size", "zero_stage")
    return {key: getattr(checkpoint, key) for key in keys}


def number(value: float | None) -> float | str | None:
    """Return a float as JSON can say it."""
    return str(value) if value is not None and not math.isfinite(value) else value
