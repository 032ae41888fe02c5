"""Directories of `torch.distributed.checkpoint` (DCP): read whatever wrote them, written for whatever reads them.

DIR/.metadata                      a pickle: which tensors and objects there are, in which pieces, and where each lies
DIR/__<rank>_<n>.distcp            items one after the other, each a whole file of `torch.save`
DIR/zckpt.pt                       where zckpt wrote it: what such a directory has no place for

Models, optimizers and anything else are under whatever keys the program chose. Every chunk is a box of its tensor, so
that FSDP, tensor parallelism and both are read alike.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.dcp.directory import Directory, find
from zckpt.formats.dcp.reader import read
from zckpt.formats.dcp.writer import is_own, lay_out

__all__ = ["Directory", "find", "is_dcp", "is_own", "lay_out", "read"]


def is_dcp(path: Path) -> bool:
    """Tell whether a directory holds a checkpoint of torch's DCP."""
    return find(path) is not None
