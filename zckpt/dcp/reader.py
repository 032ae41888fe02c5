"""`Reader`: any checkpoint that zckpt reads, for `torch.distributed.checkpoint.load`."""

from __future__ import annotations

import io
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zckpt.dcp.keys import Elements, Keys, Option, Value
from zckpt.engine.checking import Checks, watching
from zckpt.engine.read import check_reads
from zckpt.engine.targets import Hole
from zckpt.engine.tensors import TensorRead, read_tensors, slot_like
from zckpt.errors import UsageError, ZckptError
from zckpt.formats.dcp.tree import PARAMS
from zckpt.operations.open import open as open_checkpoint
from zckpt.optim.ranks import ALONE, Ranks, check_together, find_checksums
from zckpt.optim.values import inside, read_scalars, refuse_lossy, value_of
from zckpt.state import Extent, Scalar, Slot
from zckpt.storage.stand_ins import check_unchanged
from zckpt.torchfile import each

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice,
    torch.Tensor, torch.dtype, torch.device, np.generic, np.ndarray, Mapping, list, tuple, set, frozenset, deque,
)  # fmt: skip


class Reader(StorageReader):
    """Read a checkpoint of any format with `dcp.load`, at any number of ranks; a rank reads only its own chunks.

        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=zckpt.dcp.Reader("run/global_step500"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    `get_state_dict` of `torch.distributed.checkpoint.state_dict` also creates an optimizer's state if it has none yet;
    state that the state dict lacks is not loaded. Both of its forms work, nested or with
    `flatten_optimizer_state_dict`, and so does a model's own `state_dict()`. What `Optimizer.state_dict` itself returns
    has numbers instead of names, and is refused.

    The model is found under "model" or another usual key, or at the root, and the optimizer under "optimizer", "optim"
    and the like; both can be below "app". Parameters are found by name, without the prefixes of DistributedDataParallel
    and `torch.compile`. Elements are rounded if types differ: weights are read from the slot of the program's type, or
    else from the most exact one, which is the master if there is one. Hyperparameters are those of the parameter's
    group; those that the checkpoint lacks do not change. State of a parameter that no step had reached when it was
    saved is zero.

    If the checkpoint has nothing for a key, DCP's planner raises an error, or with
    `DefaultLoadPlanner(allow_partial_load=True)` the value does not change.

    Parameters
    ----------
    path : path-like, optional
        As for `zckpt.open`. Default: the `checkpoint_id` given to `dcp.load`.
    model, optimizer : str, optional
        The program's key for it, if unusual; dots separate several; "": at the root.
    tag : str, optional
        Which checkpoint of a run directory.
    names : sequence of str, optional
        Names of the optimizer's parameters in its order, for a checkpoint that only numbers them.
    verify : bool
        Compare what is read with the checksums in the files; ranks combine checksums of what they read in parts.
        Tensors have already been read then: a state dict from a damaged checkpoint must not be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: str | None = None,
        optimizer: str | None = None,
        tag: str | None = None,
        names: Sequence[str] | None = None,
        verify: bool = True,
    ) -> None:
        self.path = None if path is None else os.fspath(path)
        self._verify = verify
        self._model, self._optimizer = model, optimizer
        self._tag, self._names = tag, names
        self._keys: Keys | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as DCP calls it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a checkpoint that zckpt reads."""
        try:
            open_checkpoint(checkpoint_id)
        except ZckptError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; called on each rank."""
        self._keys = None
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Read the structure of the checkpoint; called on each rank, first.

        Raises
        ------
        UsageError
            No path was given.
        SourceError
            It cannot be read.
        """
        del args, options
        self._keys = None
        keys = self._opened()
        return Metadata(state_dict_metadata=keys, planner_data=keys.paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **options: object) -> None:
        """Do nothing; called on each rank, with the metadata that it has read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged, if everything that this rank needs can be read; nothing is read yet.

        Raises
        ------
        SourceError
            A file is missing or too short; DCP tells all ranks.
        UsageError
            Two keys of the model would get one tensor, because they only differ by a wrapper's prefix.
        """
        found, keys = self._opened(), dict[str, str]()
        holes: list[Hole] = []
        for item in plan.items:
            key, meaning = item.storage_index.fqn, found.find(item.storage_index.fqn)
            if item.type != LoadItemType.TENSOR or not isinstance(meaning, Elements):
                continue
            name = meaning.name
            if name is not None and keys.setdefault(name, key) != key:
                raise UsageError(
                    f"{keys[name]} and {key} would both be {name}",
                    path=str(self.path),
                    expected="a tensor for each in the checkpoint",
                )
            holes += [Hole(0, slot.name, slot, _extent(item), slot.dtype) for slot in meaning.slots]
        check_reads(holes)
        return replace(plan, storage_data=dist.get_rank() if dist.is_initialized() else 0)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, marked with their ranks; called on one rank."""
        return [replace(plan, storage_data=[one.storage_data for one in plans]) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's chunks, all at once, into the tensors of the state dict, and then its values.

        Raises
        ------
        SourceError
            The files cannot be read.
        UsageError
            Param groups do not fit the checkpoint's.
        """
        checks, ranks = Checks(), Ranks(purpose=ALONE)
        members: Sequence[int] | None = plan.storage_data  # whose plans were put together, which DCP tells nowhere else
        if self._verify and members is not None and len(members) > 1:
            everyone = len(members) == dist.get_world_size()
            group = None if everyone else dist.new_group([*members], backend="gloo", use_local_synchronization=True)
            ranks = Ranks(group)
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]

        def read() -> None:
            with torch.no_grad(), watching(checks):
                held = [planner.resolve_tensor(item) for item in tensors]
                reads = [
                    TensorRead(slot_like(meaning.slots, tensor.dtype), _extent(item), tensor, item.storage_index.fqn)
                    for item, tensor in zip(tensors, held, strict=True)
                    if isinstance(meaning := self._opened().find(item.storage_index.fqn), Elements)
                ]
                lossy = "load a model in the types of the checkpoint, scales included"
                refuse_lossy(self._opened().checkpoint, reads, lossy)
                read_tensors(reads)
                for item, tensor in zip(tensors, held, strict=True):
                    planner.commit_tensor(item, tensor)
                self._read_values([item for item in plan.items if item.type != LoadItemType.TENSOR], planner)
            check_unchanged()

        if self._verify:
            ranks.do(lambda: find_checksums(checks, self._opened().checkpoint, ranks))
        ranks.do(read)
        check_together(checks, ranks, str(self.path))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Keys:
        if self._keys is None:
            if self.path is None:
                raise UsageError("no checkpoint to read", advice="give Reader a path, or dcp.load a checkpoint_id")
            checkpoint = open_checkpoint(self.path, tag=self._tag, names=self._names)
            self._keys = Keys(checkpoint, self._model, self._optimizer)
        return self._keys

    def _read_values(self, planned: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Give the state dict what is no tensor, and single numbers where the program has tensors of them."""
        state: Mapping[str, Any] = getattr(planner, "state_dict", {})
        nodes: list[tuple[ReadItem, object]] = []
        for item in planned:
            meaning = self._opened().find(item.storage_index.fqn)
            if isinstance(meaning, Value):
                nodes.append((item, meaning.node))
            elif isinstance(meaning, Option):
                group = item.dest_index.fqn.removesuffix(meaning.key)
                with suppress(KeyError):  # the program's own stays
                    nodes.append((item, self._opened().option(meaning, state.get(f"{group}{PARAMS}"))))
        numbers = iter(read_scalars([node for _, node in nodes if isinstance(node, Slot)]))
        for item, node in nodes:
            known = next(numbers) if isinstance(node, Slot) else node
            value, current = value_of(known), state.get(item.dest_index.fqn)
            if isinstance(current, torch.Tensor) and isinstance(value, (bool, int, float)):
                if current.numel() != 1:
                    name, shape = item.dest_index.fqn, tuple(current.shape)
                    raise UsageError(f"{name} is a single number in the checkpoint", found=f"shape {shape}")
                current.detach().fill_(value)
                continue
            if isinstance(known, Scalar) and not isinstance(current, (bool, int, float)):
                value = torch.tensor(known.value, dtype=getattr(torch, known.dtype), device="cpu")
            if not all(isinstance(one, PLAIN) for one in each(value, inside)):
                continue  # of a class of which nothing is made without running code of others; the program's own stays
            data = io.BytesIO()
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)


def _extent(item: ReadItem) -> Extent:
    sizes = tuple(item.lengths)
    return Extent(tuple(item.storage_offsets), sizes, 0, math.prod(sizes))
