"""A whole torch file as its reader returns it, and the storages that pickles mention by persistent id.

    zip      ("storage", class, key, location, numel)
    legacy   ("storage", class, key, location, numel, None or (view key, offset, numel))

Sizes are in elements of the storage class. Several tensors may mention one key; they must agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import lru_cache

from zckpt.errors import PickleError, UnsupportedError
from zckpt.immutable import immutable, mutable
from zckpt.state.dtypes import DTYPES, FROM_STORAGE, itemsize
from zckpt.torchfile.archive import Record
from zckpt.torchfile.nodes import Global, Storage
from zckpt.torchfile.rebuild import MAX_ELEMENTS

NUMPY = ("numpy.core", "numpy._core")
"""The package of numpy's own pickling functions before and since numpy 2; every numpy has the first, 1.26 has both."""


UNTYPED = ("UntypedStorage", "_UntypedStorage")

MAX_NAME = 256
"""Characters of a key or a location; keys are small numbers or addresses."""

Locate = Callable[[str, int], int]
"""From a storage's key and its size in bytes to its absolute offset in the file."""


class StorageTable:
    """Turns persistent ids into storages, each key located once.

    Parameters
    ----------
    locate : callable
        From key and nbytes to the offset in the file; raises where the file has no such storage.
    legacy : bool
        Whether ids have the sixth member of legacy files.
    """

    __slots__ = ("_by_id", "legacy", "locate", "storages")

    def __init__(self, locate: Locate, *, legacy: bool = False) -> None:
        self.locate = locate
        self.legacy = legacy
        self.storages: dict[str, Storage] = {}
        self._by_id: dict[tuple[str, str, str], Storage] = {}

    def __call__(self, pid: object) -> object:
        """Return the storage of one persistent id."""
        if self.legacy and isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return pid[1]  # a class that was saved with its source
        if not isinstance(pid, tuple) or len(pid) != 5 + self.legacy or pid[0] != "storage":
            raise PickleError("a persistent id that torch does not write", found=f"{type(pid).__name__}")
        cls, key, location, numel = pid[1:5]
        if not isinstance(cls, Global) or not isinstance(key, str) or not isinstance(location, str):
            raise PickleError("a persistent id that torch does not write", found="members of other types")
        if len(key) > MAX_NAME or len(location) > MAX_NAME:
            raise PickleError("a persistent id that torch does not write", found="a long name")
        if type(numel) is not int or not 0 <= numel <= MAX_ELEMENTS:
            raise PickleError(f"storage {key!r}", expected="a size from 0 to 2**63-1", found=f"{numel!r:.40}")
        dtype = "uint8" if cls.name in UNTYPED else FROM_STORAGE.get(cls.name)  # an untyped one holds bytes
        if dtype is None:
            raise PickleError("unknown storage class", found=f"{cls.qualified:.100}")
        storage = self._storage(key, dtype, numel * DTYPES[dtype].itemsize, location)
        if not self.legacy or pid[5] is None:
            return storage
        match pid[5]:  # a view of it: a range with a key of its own
            case tuple((str(key), int(start), int(numel))) if len(key) <= MAX_NAME and min(start, numel) >= 0:
                size = DTYPES[dtype].itemsize
            case _:
                raise PickleError(f"view of storage {storage.key!r}", expected="(key, offset, size)")
        if (start + numel) * size > storage.nbytes:
            raise PickleError(f"a view exceeds storage {storage.key!r}", expected=f"at most {storage.nbytes} bytes")
        view = Storage(key, dtype, numel * size, location, storage.offset + start * size)
        known = self._by_id.setdefault((key, dtype, location), view)
        if known != view or (known is view and self.storages.setdefault(key, view) is not view):
            raise PickleError(f"storage {key!r} is described in two ways")
        return known

    def _storage(self, key: str, dtype: str, nbytes: int, location: str) -> Storage:
        """Return the storage of a key; one of no bytes may be mentioned with several dtypes."""
        known = self._by_id.get((key, dtype, location))
        if known is not None and known.nbytes == nbytes:
            return known
        first = self.storages.get(key)
        if first is not None and (first.nbytes != nbytes or (first.dtype != dtype and nbytes)):
            raise PickleError(
                f"storage {key!r} is described in two ways",
                expected=f"{first.nbytes} bytes of {first.dtype}",
                found=f"{nbytes} bytes of {dtype}",
            )
        offset = first.offset if first is not None else self.locate(key, nbytes)
        storage = Storage(key, dtype, nbytes, location, offset)
        self._by_id[(key, dtype, location)] = storage
        self.storages.setdefault(key, storage)
        return storage


PLAIN = frozenset({type(None), bool, int, float, str})


class PlainParts:
    """Tells which parts of a tree are plain data: dicts with text for keys, lists, and single values below them.

    What contains itself is not plain: it has no end for those who go down every path. Answers are remembered.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[int, tuple[object, bool]] = {}  # keeps the objects, so that ids stay their own

    def __contains__(self, node: object) -> bool:
        if type(node) in PLAIN:
            return True
        if type(node) is not dict and type(node) is not list:
            return False
        if id(node) not in self._answers:
            self._answers[id(node)] = node, False  # while it is open: what leads back to it contains itself
            is_plain = type(node) is list or all(type(key) is str for key in node)
            values = node.values() if isinstance(node, dict) else node
            self._answers[id(node)] = node, is_plain and all(value in self for value in values)
        return self._answers[id(node)][1]


@mutable
class TorchFile:
    """The structure of a file that torch.save wrote."""

    path: str
    nbytes: int  # of the file, or of the range of it that was read
    container: str  # `zip`, `legacy`, or `pickle` of what torch has not saved
    byteorder: str  # of tensor data: `little` or `big`
    root: object  # the object tree: plain Python data and nodes
    storages: dict[str, Storage]
    """By key: first those that the pickle mentions, in that order, then those that no tensor mentions."""
    globals: dict[str, tuple[str, ...]]  # pickle record to the globals it mentions, `module.name`, sorted
    protocol: int  # pickle protocol of the object tree
    records: Sequence[Record] = ()  # of a zip archive, in the order of its directory
    archive: str = ""  # name of the archive's root folder; empty for legacy files
    plain: PlainParts | None = field(default=None, repr=False, compare=False)
    """What is known of the tree's parts; None for a tree that is no file's and may change."""
    numbers: tuple[int | str, ...] = ()  # what blanks in the tree stand for: see `blanks`


@immutable(eq=False)
class FromFile:
    """A part of a tree that was read from a file: plain storages below it have their bytes there.

    Parameters
    ----------
    node : object
    path : str
    byteorder : str
        Of a storage that no tensor mentions: `little` or `big`.
    numpy : str
        Which of `NUMPY` the file mentions.
    """

    node: object
    path: str
    byteorder: str = "little"
    numpy: str = NUMPY[0]

    @classmethod
    def of(cls, file: TorchFile, node: object) -> FromFile:
        """Return a node of a file's tree, to be written as that file spells it."""
        new = any(names and _mentions(names) for names in file.globals.values())
        return cls(node, file.path, file.byteorder, NUMPY[1] if new else NUMPY[0])


def node_of(value: object) -> object:
    """Return the node of a value that may be a part of a file's tree."""
    return value.node if isinstance(value, FromFile) else value


def put_back(value: object, node: object) -> object:
    """Return a node as a part of the tree that a value is of, if it is of a file's."""
    return replace(value, node=node) if isinstance(value, FromFile) else node


@lru_cache(maxsize=64)
def _mentions(names: tuple[str, ...]) -> bool:
    """Tell whether a file mentions numpy's new package; asked for every part of it that is carried."""
    return any(name.startswith(f"{NUMPY[1]}.multiarray.") for name in names)


@mutable
class Mentioned:
    """A storage that a pickle mentions."""

    storage: Storage
    path: str | None  # the file that its bytes are in; None for a new one
    byteorder: str  # of the bytes in that file
    dtypes: set[str] = field(default_factory=set)  # of the tensors that are views of it

    @property
    def dtype(self) -> str:
        """Type of the elements whose bytes have an order; an untyped storage has that of its tensors.

        Raises UnsupportedError: its bytes are to be put in another order, and its tensors do not agree on which.
        """
        if self.storage.dtype != "uint8" or self.byteorder == "little" or all(itemsize(d) == 1 for d in self.dtypes):
            return self.storage.dtype
        dtype = min(self.dtypes)
        if len(self.dtypes) > 1 or self.storage.nbytes % itemsize(dtype):
            raise UnsupportedError(
                f"big-endian storage {self.storage.key!r} has several element types and cannot be made little-endian",
                path=self.path,
                found=", ".join(sorted(self.dtypes)),
            )
        return dtype


def class_of(storage: Storage, dtype: str | None) -> str | None:
    """Return the name of a storage's typed class; None for an untyped one, as of dtypes newer than those classes."""
    if storage.dtype == "uint8" and dtype is not None and DTYPES[dtype].storage is None:
        return None
    return DTYPES[storage.dtype].storage
