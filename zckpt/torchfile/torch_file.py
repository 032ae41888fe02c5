"""What a reader returns for a whole file."""

from __future__ import annotations

from dataclasses import dataclass, field

from zckpt.torchfile.archive import Record
from zckpt.torchfile.plain_parts import PlainParts
from zckpt.torchfile.tensors import Storage


@dataclass(slots=True)
class TorchFile:
    """The structure of a file that torch.save wrote.

    Parameters
    ----------
    path : str
    nbytes : int, bytes
        Of the file, or of the range of it that was read.
    container : str
        `zip` or `legacy`.
    byteorder : str
        Of tensor data: `little` or `big`.
    root : object
        The object tree: plain Python data and nodes.
    storages : dict
        By key: first those that the pickle mentions, in that order, then those that no tensor mentions.
    globals : dict
        Pickle record to the globals it mentions, `module.name`, sorted.
    protocol : int
        Pickle protocol of the object tree.
    records : tuple of Record
        Of a zip archive, in the order of its directory.
    archive : str
        Name of the archive's root folder; empty for legacy files.
    plain : PlainParts or None
        What is known of the tree's parts; None for a tree that is no file's and may change.
    """

    path: str
    nbytes: int
    container: str
    byteorder: str
    root: object
    storages: dict[str, Storage]
    globals: dict[str, tuple[str, ...]]
    protocol: int
    records: tuple[Record, ...] = ()
    archive: str = ""
    plain: PlainParts | None = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class PickleFile:
    """A pickle on its own: its object tree, the globals it mentions, and its protocol."""

    path: str
    root: object
    globals: tuple[str, ...]
    protocol: int
