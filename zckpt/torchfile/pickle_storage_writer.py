"""The storages that a pickle being written mentions: which file their bytes are in, and as what torch knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from zckpt.errors import UnsupportedError
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.torchfile.tensors import Storage
from zckpt.torchfile.torch_file import TorchFile

NUMPY = ("numpy.core", "numpy._core")
"""The package of numpy's own pickling functions before and since numpy 2; every numpy has the first, 1.26 has both."""


@dataclass(frozen=True, slots=True, eq=False)
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


@lru_cache(maxsize=64)
def _mentions(names: tuple[str, ...]) -> bool:
    """Tell whether a file mentions numpy's new package; asked for every part of it that is carried."""
    return any(name.startswith(f"{NUMPY[1]}.multiarray.") for name in names)


@dataclass(slots=True)
class Mentioned:
    """A storage that a pickle mentions.

    Parameters
    ----------
    storage : Storage
    path : str or None
        The file that its bytes are in; None for a new one.
    byteorder : str
        Of the bytes in that file.
    dtypes : set of str
        Of the tensors that are views of it.
    """

    storage: Storage
    path: str | None
    byteorder: str
    dtypes: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> str:
        """Type of the elements whose bytes have an order; an untyped storage has that of its tensors.

        Raises
        ------
        UnsupportedError
            Its bytes are to be put in another order, and its tensors do not agree on which.
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
