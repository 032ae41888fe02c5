"""What is in memory as a file that `torch.load` reads; its tensors are written from where they are, without a copy."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

from zckpt.engine.plan import plan
from zckpt.errors import UnsupportedError
from zckpt.formats.torch_files.writer import NewStorage, ValuePart, lay_out, new_storage, view
from zckpt.operations.target import write_target
from zckpt.torchfile import DType, Object, OrderedMapping, Size

PLAIN = (str, int, float, bool, complex, bytes, type(None))


def write_torch_file(root: object, path: Path) -> None:
    """Write a tree of plain data, tensors and inert nodes; it appears whole or not at all.

    Parameters
    ----------
    root : object
        Dicts, lists, tuples, sets, numbers, strings, tensors, shapes, element types, and nodes of `zckpt.torchfile`.
        Tensors share memory in the file as they do here, and bring all of it along.
    path : Path

    Raises
    ------
    UnsupportedError
        Something else, which only a pickle could hold.
    TargetError
        It cannot be written.
    """
    write_target(plan([lay_out(path.name, _Tree().of(root))]), path)


class _Tree:
    """Puts nodes that can be written in the place of what is in memory."""

    def __init__(self) -> None:
        self.storages: dict[int, NewStorage] = {}
        self.kept: list[torch.Tensor] = []

    def of(self, found: object) -> object:
        if type(found) in PLAIN or isinstance(found, (Object, DType)):
            return found
        if isinstance(found, torch.Tensor):
            return self._tensor(found)
        if isinstance(found, torch.dtype):
            return DType(str(found).removeprefix("torch."))
        return self._container(found)

    def _container(self, found: object) -> object:
        if isinstance(found, torch.Size):
            return Size(found)
        if isinstance(found, dict) and type(found) in (dict, OrderedDict):
            made: dict[object, object] = {} if type(found) is dict else OrderedMapping()
            made.update((self.of(key), self.of(value)) for key, value in found.items())
            return made
        if isinstance(found, (list, tuple, set)) and type(found) in (list, tuple, set):
            return type(found)(self.of(one) for one in found)
        name = f"{type(found).__module__}.{type(found).__qualname__}"
        raise UnsupportedError(f"{name} cannot be written without a pickle")

    def _tensor(self, tensor: torch.Tensor) -> object:
        here = tensor.detach().cpu()
        if here.layout != torch.strided:
            raise UnsupportedError(f"a tensor that is {here.layout} cannot be written")
        storage = here.untyped_storage()
        known = self.storages.get(storage.data_ptr()) if storage.nbytes() else None
        if known is None or known.dtype != str(here.dtype).removeprefix("torch."):
            self.kept.append(here)
            known = self._storage(here)
        return view(known, tuple(here.shape), start=int(here.storage_offset()), strides=tuple(here.stride()))

    def _storage(self, tensor: torch.Tensor) -> NewStorage:
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        parts = [ValuePart(0, memory.numpy().data)] if storage.nbytes() else []
        dtype = str(tensor.dtype).removeprefix("torch.")
        made = new_storage(dtype, storage.nbytes() // tensor.element_size(), parts)
        self.storages[storage.data_ptr()] = made
        return made
