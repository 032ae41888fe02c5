"""Parameters, and what an optimizer has of each, under names and with values that do not depend on what wrote them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.state import Checkpoint, Extent, Parameter, Slot, Span, number_of
from zckpt.state.names import canonical_names
from zckpt.storage.files import Sources
from zckpt.torchfile import FromFile, InPieces, Tensor, children, node_of, plain, walk_tensors

TOGETHER_NUMEL = 1 << 20
"""Elements of a tensor below a node that are in memory at once."""


def named(checkpoint: Checkpoint) -> dict[str, Parameter]:
    """Return all parameters and buffers by canonical name; those without a name by `#` and their number."""
    every = {parameter.name: parameter for parameter in checkpoint.tensors()}
    names = canonical_names(every)
    found = {names[name]: parameter for name, parameter in every.items()}
    found.update({f"#{number}": parameter for number, parameter in checkpoint.unnamed.items()})
    return found


def own_weight(parameter: Parameter) -> Slot | None:
    """Return the weight of a parameter, if it says anything.

    Where ranks' values are averaged, the weight is the rounded mean of the masters, not the mean of the weights.
    """
    weight = parameter.weight
    return None if weight and weight.replicas and parameter.master else weight


def single(value: object) -> object:
    """Return a single value as JSON-able data, however it is stored: a tensor of no dimension, a number, a node.

    Of tensors below a node (codes and scales, a list of factors) it is a digest of their elements.
    """
    if isinstance(value, Slot):
        return f"tensor of {value.dtype} {list(value.shape)}" if value.shape else number_in(value)
    below = ((at, part, *one) for at, part in _parts(value) for one in walk_tensors(part.node))
    tensors = sorted(((repr((*at, *place)), part.path, one) for at, part, place, one in below), key=itemgetter(0))
    return {"tensors": _digest(tensors), "in": plain(value)} if tensors else plain(number_of(node_of(value)))


def _parts(value: object) -> Iterator[tuple[tuple[object, ...], FromFile]]:
    """Yield the parts of files in a value, each with its place: of DCP there are several, where ranks saved some."""
    waiting: list[tuple[tuple[object, ...], object]]
    waiting = [((), value)] if isinstance(value, (dict, list, FromFile)) else []
    seen: set[int] = set()
    while waiting:
        at, one = waiting.pop()
        if isinstance(one, FromFile):
            yield at, one
        elif id(one) not in seen:
            seen.add(id(one))
            inner = ((key, child) for key, child in children(one) if isinstance(child, (dict, list, FromFile)))
            waiting += [((*at, key), child) for key, child in inner]


def number_in(slot: Slot) -> Any:  # noqa: ANN401  # of any type
    """Return the number that a slot of no dimension is."""
    from zckpt.engine.copy import read_extent

    with Sources() as sources:
        return read_extent(slot, Extent.whole(()), sources)[0].item()


def _digest(tensors: Iterable[tuple[str, str, Tensor]]) -> str:
    """Return a digest of the elements of tensors, wherever they lie."""
    from zckpt.engine.copy import read_extent

    found = hashlib.blake2b(digest_size=16)
    with Sources() as sources:
        for place, path, tensor in tensors:
            found.update(f"{place} {tensor.dtype} {tensor.shape};".encode())
            strides = None if tensor.is_contiguous else tensor.strides
            span = Span(Extent.whole(tensor.shape), path, tensor.offset, tensor.dtype, strides, tensor.byteorder)
            slot = Slot("", tensor.dtype, tensor.shape, (span,) if tensor.numel else ())
            slot = tensor.storage.slot if isinstance(tensor.storage, InPieces) else slot
            for start in range(0, slot.numel, TOGETHER_NUMEL):
                extent = Extent.flat(tensor.shape, start, min(TOGETHER_NUMEL, slot.numel - start))
                found.update(read_extent(slot, extent, sources).tobytes())
    return found.hexdigest()


def parameter_values(checkpoint: Checkpoint, parameter: Parameter) -> dict[str, object]:
    """Return a parameter's state as `torch.optim` keeps it in `state[parameter]`: slots and single values by key.

    A single value that a file keeps once for a whole param group (`step` of a flat ZeRO buffer) is a value of each
    of its parameters. A parameter that no step has reached has no state at all: where others of its group have
    tensors and it has none, or it has no elements, the group's values are not its own.

    Returns
    -------
    dict of str to Slot, Scalar, number, bool or inert node
        Without weight and master. Empty for a parameter that no optimizer owns.

    Raises
    ------
    UnsupportedError
        A tensor that belongs to a whole param group, which no single parameter can hold.
    """
    if parameter.group is None:
        return {}
    group = checkpoint.param_groups[parameter.group]
    own = {**parameter.state, **parameter.optimizer_slots}
    if group.state and not own:
        members = map(checkpoint.find, group.parameters)
        if not parameter.numel or any(one is not None and (one.state or one.optimizer_slots) for one in members):
            return {}
    for key, value in group.state.items():
        if isinstance(value, Tensor):
            raise UnsupportedError(
                f"{key} is a tensor for a whole param group, which a parameter's state cannot hold",
                path=checkpoint.source,
                advice="`zckpt consolidate` writes the model without it, and `zckpt diff` compares everything else",
            )
    return {**group.state, **own}
