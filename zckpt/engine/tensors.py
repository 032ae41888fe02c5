"""Elements of slots read into torch tensors, wherever those are: straight into their memory where that is possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zckpt.engine.checking import Checks
from zckpt.engine.read import check_reads, read_all
from zckpt.engine.targets import Hole
from zckpt.engine.workers import batched
from zckpt.errors import UsageError
from zckpt.immutable import immutable
from zckpt.state import Extent, Slot

STAGED_NBYTES = 256 << 20
"""Read at once on the way to tensors that are on a GPU or not contiguous."""


@immutable
class TensorRead:
    """Elements of a slot that a tensor is to have.

    `tensor`: with as many elements, which are those of the extent in its order; of any floating-point type, or of the
    slot's; `name`: of what they are, for messages; by default the slot's.
    """

    slot: Slot
    extent: Extent
    tensor: torch.Tensor
    name: str = ""

    @property
    def hole(self) -> Hole:
        """The elements, in the tensor's type."""
        return Hole(0, self.name or self.slot.name, self.slot, self.extent, dtype_name(self.tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Return an element type as zckpt calls it."""
    return str(dtype).removeprefix("torch.")


def slot_like(slots: Sequence[Slot], dtype: torch.dtype) -> Slot:
    """Return the slot of an element type, or else the last, which is the most exact."""
    return next((slot for slot in slots if slot.dtype == dtype_name(dtype)), slots[-1])


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU; writing to them writes to the tensor, if it is no lazy view.

    Of a lazy view, which has yet to be conjugated or negated, they are those of a copy.
    """
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(as_bytes(tensor.detach().resolve_conj().resolve_neg()).numpy().data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat one, in the same memory."""
    flat = tensor.reshape(-1)
    if flat.numel() == 1:  # of which the stride may be any number: torch would not take it
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def check_tensors(reads: Iterable[TensorRead]) -> None:
    """Check all that can be known before elements are read.

    Errors are those of `zckpt.engine.read.check_reads`, and UsageError: elements of a tensor share memory or have none.
    """
    check_reads(_hole_of(one) for one in reads if one.tensor.numel())


def _hole_of(read: TensorRead) -> Hole:
    if read.tensor.is_meta:
        raise UsageError(f"{read.hole.label} is for a tensor on the meta device, where it has no elements")
    if _overlaps_itself(read.tensor):
        raise UsageError(
            f"elements of {read.hole.label} share memory, as those of an expanded tensor: nothing can be read into it",
            advice="give it memory of its own: clone()",
        )
    return read.hole


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor share memory; all are looked at only where strides do not tell."""
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in steps:
        if step <= reach:
            if not step or tensor.numel() > 1 + sum(step * (size - 1) for step, size in steps):
                return True
            every = torch.arange(1 + sum(step * (size - 1) for step, size in steps), device="cpu")
            return bool(every.as_strided(tensor.shape, tensor.stride()).flatten().bincount().max() > 1)
        reach += step * (size - 1)
    return False


def read_tensors(reads: Iterable[TensorRead], *, checks: Checks | None = None) -> None:
    """Read the elements of many extents into tensors; as `zckpt.engine.read.read_all`."""
    some = (one for one in reads if one.tensor.numel())
    for batch in batched(some, lambda one: one.tensor.nbytes * _is_staged(one.tensor), STAGED_NBYTES, None):
        tensors = [one.tensor.detach() for one in batch]
        memories = [
            torch.empty(one.shape, dtype=one.dtype, device="cpu") if _is_staged(one) else one for one in tensors
        ]
        into = map(memory_of, memories)
        read_all([(one.hole, memory) for one, memory in zip(batch, into, strict=True)], checks=checks)
        for tensor, memory in zip(tensors, memories, strict=True):
            if memory is not tensor:
                tensor.copy_(memory)


def tensors_of(slots: Sequence[Slot]) -> list[torch.Tensor]:
    """Return all elements of slots as tensors of their types, on the CPU; as `read_tensors`."""
    found = [torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="cpu") for one in slots]
    read_tensors(TensorRead(one, one.whole, tensor) for one, tensor in zip(slots, found, strict=True))
    return found


def _is_staged(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
