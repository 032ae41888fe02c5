"""The flat buffers of `torch_dist` as lines of elements, in whatever pieces the files have them.

[chained_N.]optimizer.distributed.dp_group_idx_<g>...
...gbuf_idx_<b>.dtype_(torch.bfloat16, torch.float32).bucket_idx_<k>.<slot>     a bucket, up to 0.13 with its padding
...per_bucket_numel_unpadded/shard_0_1     [[{(dtype, dtype): [n, ...]}, ...]]: how much of each bucket is none
...param_state/shard_0_1                   [{"buckets_coalesced": True, <b>: {(dtype, dtype): {<slot>: flat, ...}}}]

`param_state` (`dp_zero_gather_scatter`) has all buckets of a buffer as one line, without padding between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.megatron.buckets import Line
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER
from zckpt.state.views import concat
from zckpt.torchfile import DType, Tensor

_GROUP = r"(?:chained_([0-9]{1,18})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,18})\."

BUCKET = re.compile(
    _GROUP + r"gbuf_idx_([0-9]{1,18})\.dtype_\((?:torch\.)?(\w+), *(?:torch\.)?\w+\)\.bucket_idx_([0-9]{1,18})\.(.+)"
)
STATE = re.compile(_GROUP + r"param_state/shard_.*")
UNPADDED_SIZES = re.compile(_GROUP + r"per_bucket_numel_unpadded/shard_.*")

PARAM, UNPADDED, JOINED = "param", "numel_unpadded", "buckets_coalesced"


class UnprovenError(Exception):
    """Why what lies in the buffers is not certain."""


@dataclass(slots=True)
class Buffer:
    """A buffer of a rank.

    Parameters
    ----------
    dtype : str
        Of its parameters.
    slots : dict of str to Line
        Each of all buckets, one behind the other.
    numel : int, elements
        Of a line.
    stored, sizes : tuple of int, or None
        Elements of each bucket in the line, and without what pads it; None where buckets are written as one.
    """

    dtype: str
    slots: dict[str, Line] = field(default_factory=dict)
    numel: int = 0
    stored: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


Buffers = dict[int, dict[int, dict[int, Buffer]]]
"""By optimizer of a chain, model-parallel rank, and number."""


def buffers_of(items: Mapping[str, TensorItem], objects: Mapping[str, ObjectItem]) -> Buffers:
    """Return the buffers of a directory.

    `items`: buckets, by key; `objects`: all that there are. Raises UnprovenError: a key is of another form, or the
    tensors of a bucket are of different sizes.
    """
    found: Buffers = {}
    unpadded = {_place(match): _only(one) for key, one in objects.items() if (match := UNPADDED_SIZES.fullmatch(key))}
    for (chain, group, number), buckets in _buckets(items).items():
        buffer = _of_buckets(buckets, _sizes(unpadded.get((chain, group)), number))
        found.setdefault(chain, {}).setdefault(group, {})[number] = buffer
    for key, one in objects.items():
        match = STATE.fullmatch(key)
        if match is not None:
            chain, group = _place(match)
            groups = found.setdefault(chain, {})
            if group in groups:
                raise UnprovenError(f"{key[:120]} is beside buckets")
            groups[group] = dict(enumerate(_whole(_only(one), one.file.path)))
    return found


def _place(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1] or 0), int(match[2])


def _only(item: ObjectItem) -> object:
    """Return the object of a rank's only shard."""
    return item.node[0] if isinstance(item.node, list) and len(item.node) == 1 else None


Buckets = dict[int, tuple[str, dict[str, TensorItem]]]
"""The type of the parameters, and the tensors by slot, by number."""


def _buckets(items: Mapping[str, TensorItem]) -> dict[tuple[int, int, int], Buckets]:
    found: dict[tuple[int, int, int], Buckets] = {}
    for key, item in items.items():
        match = BUCKET.fullmatch(key)
        if match is None or len(item.shape) != 1:
            raise UnprovenError(f"{key[:120]} is no bucket")
        own = found.setdefault((*_place(match), int(match[3])), {})
        _, its = own.setdefault(int(match[5]), (match[4], {}))
        its[MASTER if match[6] == PARAM else match[6]] = item
    return found


def _of_buckets(buckets: Buckets, sizes: Sequence[int] | None) -> Buffer:
    """Return a buffer of its buckets, of which `sizes` are without padding."""
    ordered = [buckets[number] for number in sorted(buckets)]
    dtype, first = ordered[0]
    numels = [{item.shape[0] for item in its.values()} for _, its in ordered]
    alike = all(kind == dtype and its.keys() == first.keys() for kind, its in ordered)
    if sorted(buckets) != list(range(len(buckets))) or not alike or any(len(one) != 1 for one in numels):
        raise UnprovenError("the tensors of a buffer's buckets are not of one kind and size")
    stored = tuple(one.pop() for one in numels)
    own = stored if sizes is None else tuple(sizes)
    if len(own) != len(stored) or any(size > whole for size, whole in zip(own, stored, strict=False)):
        raise UnprovenError("the sizes of buckets are not those of their tensors")
    slots = {slot: Line(concat([its[slot].slot(slot) for _, its in ordered], 0)) for slot in first}
    return Buffer(dtype, slots, sum(stored), stored, own)


def _sizes(node: object, number: int) -> list[int] | None:
    """Return the sizes of a buffer's buckets as an object has them; None if it does not."""
    its = node[number] if isinstance(node, list) and number < len(node) else None
    values = [one for one in its.values() if isinstance(one, list)] if isinstance(its, dict) else []
    if len(values) == 1 and all(type(n) is int and n > 0 for n in values[0]):
        return list(values[0])
    return None


def _whole(node: object, path: str) -> Iterator[Buffer]:
    """Yield the buffers of a rank's `param_state`, in the order of their numbers."""
    content = node if isinstance(node, dict) else {}
    numbered = {key: value for key, value in content.items() if type(key) is int and isinstance(value, dict)}
    if content.get(JOINED) is not True or sorted(numbered) != list(range(len(numbered))):
        raise UnprovenError(f"param_state is not of the form with {JOINED}")
    for number in sorted(numbered):
        for types, its in numbered[number].items():
            tensors = {str(slot): one for slot, one in its.items() if isinstance(one, Tensor)} if isinstance(
                its, dict) else {}  # fmt: skip
            shapes = {one.shape for one in tensors.values()}
            kind = types[0].name if isinstance(types, tuple) and types and isinstance(types[0], DType) else None
            if PARAM not in tensors or len(shapes) != 1 or len(next(iter(shapes))) != 1 or kind is None:
                raise UnprovenError(f"buffer {number} has no flat tensors of one size, `{PARAM}` among them")
            named = {MASTER if slot == PARAM else slot: one for slot, one in tensors.items()}
            slots = {slot: Line(slot_of(slot, one, path)) for slot, one in named.items()}
            yield Buffer(kind, slots, tensors[PARAM].shape[0])
