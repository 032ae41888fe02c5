"""The pickle of a torch file: any tree that was read from one, or made anew of the same nodes.

Classes are named, never imported: `torch._utils._rebuild_tensor_v2`, `collections.OrderedDict`, `torch.Size`. An
object that occurs several times in the tree is written once and is one object again after loading, cycles included.
"""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.torchfile import (  # noqa: F401  # they register what they write
    pickle_numpy_writer,
    pickle_object_writer,
    pickle_plain_writer,
    pickle_tensor_writer,
)
from zckpt.torchfile.pickle_storage_writer import FromFile, Mentioned
from zckpt.torchfile.pickle_stream_writer import StandFor, Writer

__all__ = ["FromFile", "Mentioned", "Pickled", "dump"]


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle and the storages it mentions.

    Parameters
    ----------
    data : bytes
    storages : tuple of Mentioned
        A storage's key is its number here, in decimal.
    """

    data: bytes
    storages: tuple[Mentioned, ...]


def dump(root: object, stand_for: StandFor = lambda _: None) -> Pickled:
    """Return the pickle of a tree, in protocol 2.

    Parameters
    ----------
    root : object
        Plain data, nodes, and `FromFile` around those whose storages are in a file.
    stand_for : callable
        From a node of any other type to the node that is to be written for it; None: it cannot be.

    Raises
    ------
    UnsupportedError
        The tree holds something that cannot be written.
    """
    writer = Writer(stand_for)
    data = writer.run(root)
    return Pickled(data, tuple(mentioned for _, mentioned in writer.storages.values()))
