"""Live objects as a torch file that is still to be written: pickled as `torch.save` does, bytes of tensors apart.

What an engine saves holds objects of its own, which only their own pickling knows. This writes pickles, and reads none.

Source: `_save` of torch/serialization.py, 2.5 to 2.13.
"""

from __future__ import annotations

import io
from pickle import Pickler
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from zckpt.engine.targets import TargetFile
from zckpt.engine.tensors import memory_of
from zckpt.errors import UnsupportedError
from zckpt.formats.torch_files.writer import ValueContent, lay_out_pickled, new_storage
from zckpt.immutable import immutable
from zckpt.torchfile import Mentioned, Pickled
from zckpt.training.directory import Staging

PROTOCOL = 2
"""That of `torch.save`."""


@immutable
class Captured:
    """A file that is to be written: its pickle, and the bytes of each storage that it mentions, in their order."""

    name: str
    pickle: bytes
    contents: list[memoryview]

    def laid_out(self) -> TargetFile:
        """Return the file."""
        storages = tuple(
            Mentioned(new_storage("uint8", len(data), [ValueContent(0, data)]), None, "little")
            for data in self.contents
        )
        return lay_out_pickled(self.name, Pickled(self.pickle, storages))


def capture(name: str, root: object, staging: Staging | None) -> Captured:
    """Return the file that `torch.save` would write of a tree.

    `root`: whatever can be pickled; `staging`: where tensors are copied to; without it, those on the CPU are written
    from where they are. Raises UnsupportedError: tensors of several types lie in the same memory; Exception: what
    pickling an object raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(root)
    storages = pickler.storages.values()
    found = [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in storages]  # their bytes
    contents = [memory_of(one.cpu()) for one in found] if staging is None else staging.copy(found)
    return Captured(name, file.getvalue(), contents)


class _Pickler(Pickler):
    """Writes a number for each storage, which are kept in the order of theirs."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, value: Any) -> tuple[object, ...] | None:
        """Return what stands for a storage; None for anything else."""
        storage: Any
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype = value._untyped_storage, value.dtype
            kind = getattr(torch, value._pickle_storage_type())  # type: ignore[no-untyped-call]
            count = value._size()  # type: ignore[no-untyped-call]
        elif torch.is_storage(value):
            storage, dtype = value, torch.uint8
            kind, count = normalize_storage_type(type(value)), value.nbytes()  # type: ignore[no-untyped-call]
        else:
            return None
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise UnsupportedError(
                "tensors of several types share memory, which a torch file cannot express",
                found=f"{self._dtypes[storage.data_ptr()]} and {dtype}",
            )
        key = self._numbers.setdefault(storage._cdata, str(len(self._numbers)))
        self.storages[storage._cdata] = storage  # as long as it is kept, no other has this number
        return "storage", kind, key, location_tag(storage), count
