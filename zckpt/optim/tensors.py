"""Live tensors: a model's by the names that it has without wrappers, what this rank has, and their order in memory.

A fused optimizer needs state to lie in memory as its parameter does, or steps it out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zckpt.engine.tensors import memory_of
from zckpt.errors import UnsupportedError, UsageError
from zckpt.immutable import immutable, mutable
from zckpt.optim.flat_parameters import EXTRA_STATE, Bare, Member, Members, flat_model, is_flat
from zckpt.state import WEIGHT, Extent, Shape
from zckpt.state.names import INNER, plain_name

Model = torch.nn.Module | Sequence[torch.nn.Module] | None
"""What `save` and `load` take as `model`: one, or in a list the parts of one that this rank has, as of a pipeline."""

PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
"""Wrappers that keep the model as `module`, which only their class tells from a model's own child."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the bare model in a module: itself, if it is no wrapper."""
    while True:
        inner = next((one for name in sorted(INNER) if (one := model._modules.get(name)) is not None), None)
        if isinstance(model, PARALLEL):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def bare(model: torch.nn.Module) -> Bare:
    """Return a model's tensors by the names that it has without wrappers, around it or within it.

    Raises UnsupportedError: FullyShardedDataParallel is in it: its tensors lie in a flat one, whose memory comes and
    goes.
    """
    if is_flat(model):
        raise UnsupportedError(
            "the model is in FullyShardedDataParallel, which flattens its parameters",
            advice="use zckpt.save and zckpt.load, or zckpt.dcp with torch's get_state_dict and set_state_dict",
        )
    inner = unwrapped(model)
    state, buffers = inner.state_dict(keep_vars=True), dict(inner.named_buffers(remove_duplicate=False))
    state.update((name, buffers[name]) for name in state.keys() & buffers.keys())  # of which hooks may make copies
    return Bare(state, dict(inner.named_parameters(remove_duplicate=False))).without_wrappers()


class Stateful(Protocol):
    """A scheduler or grad scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Continue from a state."""


@mutable
class ModelState:
    """A model's tensors by their first names, a DTensor or a Member where one is sharded.

    `parameters` are the names of those that are no buffers; `tied` has the further names of parameters, with the first
    name of each; `extra` is what modules keep besides tensors, by key; `members` is what optimizers have of Members.
    `copies` are buffers that a further part of the model has, too; `added` are what optimizers have, and no model.
    """

    tensors: dict[str, torch.Tensor | Member] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    copies: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    added: set[str] = field(default_factory=set)

    @classmethod
    def of_parameters(cls, parameters: dict[str, torch.Tensor]) -> ModelState:
        """Return the tensors of a model of which there are only an optimizer's parameters."""
        return cls(dict(parameters), set(parameters))

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add parameters, but for those of names that are known."""
        new = {name: one for name, one in parameters.items() if name not in self.tensors and name not in self.tied}
        self.tensors |= new
        self.parameters |= new.keys()
        self.added |= new.keys()

    def renamed(self, name_of: Callable[[str], str]) -> ModelState:
        """Return the same tensors under other names."""
        return replace(
            self,
            tensors={name_of(name): one for name, one in self.tensors.items()},
            parameters={name_of(name) for name in self.parameters},
            tied={name_of(name): name_of(owner) for name, owner in self.tied.items()},
            copies=[(name_of(name), one) for name, one in self.copies],
        )

    def shares(self) -> list[tuple[str, str, Share]]:
        """Return what this rank has of them."""
        every = ((name, share_of(tensor, name)) for name, tensor in self.tensors.items())
        return [(name, WEIGHT, share) for name, share in every if share is not None]

    def names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each parameter."""
        every = ((self.tensors[name], name) for name in self.tensors if name in self.parameters)
        return {tensor: name for tensor, name in every if isinstance(tensor, torch.Tensor)}


def parts_of(model: Model) -> list[torch.nn.Module]:
    """Return the modules that are given as a model. Raises UsageError: something else is given."""
    if model is None:
        return []
    parts: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    for one in parts:
        if not isinstance(one, torch.nn.Module):
            raise UsageError("not a model", expected="a Module, or a list of them", found=torch.typename(one))
    return parts


def model_state(model: Model) -> ModelState:
    """Return a model's tensors, which are the model's own and not copies.

    Raises UsageError: two parts have a parameter of one name; UnsupportedError: a part is in FullyShardedDataParallel,
    or a parameter not initialised.
    """
    if isinstance(model, (list, tuple)):
        return _of_parts(parts_of(model))
    one = next(iter(parts_of(model)), None)
    if one is None:
        return ModelState()
    its = flat_model(one) if is_flat(one) else bare(one)
    tied, first, _ = its.roles({})
    found = ModelState(dict(first), set(first), tied)  # tensors under their first names
    for key, value in its.state.items():
        if key in its.parameters:
            continue
        if isinstance(value, torch.Tensor) and key.rpartition(".")[2] != EXTRA_STATE:
            found.tensors[key] = value
        else:
            found.extra[key] = value
    for name, tensor in found.tensors.items():
        _check_initialised(tensor, name)
    called = {id(one): name for name, one in found.tensors.items()}
    held = {tensor: [(called[id(one)], one) for one in every] for tensor, every in its.steps.items()}
    found.members = Members(held, tuple(found.tensors))
    return found


def _check_initialised(tensor: torch.Tensor | Member, name: str) -> None:
    if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
        raise UnsupportedError(f"{name} is not initialised", advice="call the model once before")


def _of_parts(parts: Sequence[torch.nn.Module]) -> ModelState:
    """Return the tensors of a model's parts, whose names are those of the whole model."""
    found = ModelState()
    for part in parts:
        if is_flat(part):
            raise UnsupportedError("a part of the model is in FullyShardedDataParallel", advice="use fully_shard")
        its = model_state(part)
        for name in sorted((its.tensors.keys() | its.tied.keys()) & (found.tensors.keys() | found.tied.keys())):
            ours, theirs = found.tensors.get(name), its.tensors.get(name)
            if name in its.parameters | found.parameters | its.tied.keys() | found.tied.keys():
                if ours is not theirs or ours is None:
                    raise UsageError(
                        f"two parts of the model have a parameter {name}",
                        advice="give parts with the names of the whole model",
                    )
            elif isinstance(theirs, torch.Tensor):
                found.copies.append((name, theirs))
        found.tensors = its.tensors | found.tensors
        found.parameters |= its.parameters
        found.tied |= its.tied
        found.extra |= its.extra
    return found


def takers_of_extra(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that take again what they kept besides tensors, each with its key."""
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            bare_name = plain_name(name)
            yield f"{bare_name}.{EXTRA_STATE}" if bare_name else EXTRA_STATE, module


# --- what this rank has


@immutable
class Share:
    """What this rank has of a tensor."""

    shape: Shape  # of the whole tensor
    extent: Extent  # a whole box, or a range of the flattened tensor
    tensor: torch.Tensor  # those elements, in the extent's order; not a copy
    ranks: tuple[int, ...] | None = None  # the ranks, in the world, that have the same; None: all that save together


def share_of(tensor: torch.Tensor | Member, name: str) -> Share | None:
    """Return what this rank has of a tensor; None if it has nothing of it.

    Raises UnsupportedError: a DTensor that is yet to be summed up, or of which a rank has several boxes; a sparse or a
    quantised tensor; one without memory.
    """
    if isinstance(tensor, Member):
        return None if tensor.extent is None else Share(tuple(tensor.shape), tensor.extent, tensor.tensor, tensor.ranks)
    _check_initialised(tensor, name)
    if tensor.is_meta:
        raise UnsupportedError(
            f"{name} is on the meta device, where it has no elements",
            advice="give the model memory: model.to_empty(device=...)",
        )
    if isinstance(tensor, DTensor):
        return _share_of_dtensor(tensor, name)
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"{name} is a {type(tensor).__name__}, whose elements are in inner tensors",
            found=torch.typename(tensor),
            advice="save the optimizer's state_dict() with torch.save",
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{name} is {tensor.layout}, whose elements have no fixed order", advice="convert it to a dense tensor"
        )
    shape = tuple(tensor.shape)
    whole = getattr(tensor, "global_shape", None) if hasattr(tensor, "global_offsets") else None
    if isinstance(whole, (list, tuple)) and tuple(whole) != shape:
        raise UnsupportedError(
            f"{name} is marked as a part of a tensor, as torch 2.15's CheckpointableTensor is",
            found=f"{shape} of {whole}",
            advice="save it by torch.distributed.checkpoint, whose files zckpt reads",
        )
    return Share(shape, Extent.whole(shape), tensor.detach())


def _share_of_dtensor(tensor: DTensor, name: str) -> Share | None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(f"{name} is a partial sum on each rank", found=tensor.placements)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    where = list(zip(coordinate, tensor.placements, strict=True))
    try:
        is_apart = any(not one.is_replicate() and mesh.get_local_rank(dim) != at for dim, (at, one) in enumerate(where))
    except RuntimeError as error:
        raise UnsupportedError(
            f"{name} is on a mesh without process groups, so that nothing says how torch cuts it",
            advice="make the mesh by init_device_mesh",
        ) from error
    if is_apart:
        raise UnsupportedError(
            f"{name} is on a mesh whose ranks are in another order than in its process groups, by which torch cuts it, "
            "so that elements are not where it says",
            advice="let ranks ascend along each dimension, or make the mesh with preserve_rank_order=True (torch 2.15)",
        )
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local().detach()
    if len(chunks) > 1:
        raise UnsupportedError(f"{name} has {len(chunks)} boxes on one rank", found=tensor.placements)
    if not chunks:
        return None
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    extent = Extent(offsets, sizes, 0, local.numel())
    if not any(one.is_replicate() for one in tensor.placements):  # a mesh makes its table of ranks anew when asked
        return Share(tuple(tensor.shape), extent, local, (world_rank(),))
    ranks = mesh.mesh[tuple(slice(None) if one.is_replicate() else at for at, one in where)]  # along what is replicated
    return Share(tuple(tensor.shape), extent, local, tuple(sorted(ranks.flatten().tolist())))


def world_rank() -> int:
    """Return this rank's number in the world."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


SAMPLE_NBYTES = 1 << 20
"""Of a plain parameter, compared between ranks."""

DIGEST_NBYTES = 16


def digest_of(share: Share, limit: int | None = None) -> bytes:
    """Return a digest of what a rank has of a tensor, or of so many bytes of it."""
    flat = share.tensor.detach().reshape(-1)
    if limit is not None:
        flat = flat[: limit // share.tensor.element_size()]
    return blake2b(memory_of(flat.cpu().contiguous()), digest_size=DIGEST_NBYTES).digest()


# --- in memory


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in whatever order of dimensions, such as channels last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as they lie, without copying."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor that has the shape of another and lies as that does, row-major if it has gaps."""
    if is_dense(like):
        return elements.as_strided(like.shape, like.stride(), elements.storage_offset())
    return elements.view(like.shape)


def room_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with room for as many elements as another has, of its shape, lying as that does."""
    return shaped(torch.empty(tensor.numel(), dtype=dtype, device=tensor.device), tensor)


def copied_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, lying as another does if they have the same shape."""
    if value.shape != like.shape or value.stride() == like.stride():
        return value.detach().clone()
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value.detach())


def end_to_end(elements: torch.Tensor, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tensors, each with its elements of a flat one in which they lie end to end."""
    at = 0
    for one in tensors:
        yield one, elements[at : at + one.numel()]
        at += one.numel()


@contextmanager
def with_gradients(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
    """Let parameters have these gradients for a while."""
    before = [(parameter, parameter.grad) for parameter in gradients]
    try:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


Future = torch.futures.Future

GradBucket = Any
"""DDP's own class has no type information, and DDP compares what a hook is annotated with to the class itself."""

Hook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]
"""Takes a state and a bucket, and returns the bucket's average over ranks."""


def reduced_gradients(bucket: GradBucket, future: Future[torch.Tensor]) -> list[torch.Tensor]:
    """Wait for a bucket's reduction and return its gradients, wherever the hook has put them.

    In a bucket, a gradient lies as its parameter does. `bucket.gradients()` takes them all to be row-major.
    """
    result = future.wait()
    reduced = result[0] if isinstance(result, (list, tuple)) else result
    return [shaped(elements, one).to(one.dtype) for one, elements in end_to_end(reduced, bucket.parameters())]
