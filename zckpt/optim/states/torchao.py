"""torchao's optimizers, whose state is codes: AdamW8bit, AdamW4bit, AdamWFp8, and those without decay.

torchao quantises what a rank has of a parameter, if it has 4096 elements or more, in whole blocks. A rank's share is
a range of the parameter, from a multiple of the block on; so blocks of all ranks are those of the whole parameter, and
are cut for others: codes and scales as they are. Where a rank then has too few elements for torchao to quantise, it
has the floats that they stand for; where it had floats, and has enough now, torchao quantises them.

Source: torchao 0.18, `optim/adam.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from zckpt.engine.tensors import TensorRead
from zckpt.errors import UnsupportedError, listed
from zckpt.formats.torch_files.quantised import CLASSES, PACKED, Moment, is_quantised, of_torchao, slots_of
from zckpt.formats.torch_files.tensors import TORCHAO
from zckpt.immutable import mutable
from zckpt.optim.states.by_parameter import OptimizerState, Snapshot
from zckpt.optim.tensors import Share, share_of
from zckpt.state import Extent, Parameter, Slot, without
from zckpt.state.boxes import merge

LEAST_NUMEL = 4096
"""Elements of a share that torchao quantises."""

Range = tuple[int, int]
"""First element of a parameter, flattened, and how many follow."""

SIGNED = "exp_avg"
"""The slot whose values have signs, for which maps are others."""

ADVICE = "dequantize=True loads the floats that they stand for, from which torchao makes new blocks"


def _pieces(key: str, parameter: torch.Tensor, local: Any, blank: Any, floats: Sequence[Range]) -> dict[str, Share]:
    """Return what this rank has of the pieces of a quantised slot, of which some ranges are floats.

    `local` is what it has of the slot, and `blank` is made of blocks as those are that any rank has.
    """
    share, qmap = share_of(parameter, key), getattr(blank, "qmap", None)
    block, whole = blank.block_size, parameter.numel()
    found: dict[str, Share] = {}
    if qmap is not None:
        extent = Extent.whole(tuple(qmap.shape))
        first = int(parameter.device_mesh.mesh.flatten()[0]) if isinstance(parameter, DTensor) else None
        found[f"{key}.qmap"] = Share(extent.sizes, extent, qmap, None if first is None else (first,))
    if share is None:
        return found
    start, numel = _flat(share)
    end, ranks = start + numel, share.ranks
    here = _is_codes(local)

    def added(piece: str, shape: int, low: int, high: int, tensor: torch.Tensor) -> None:
        found[f"{key}.{piece}"] = Share((shape,), Extent.flat((shape,), low, high - low), tensor, ranks)

    if type(blank).__name__ == PACKED:
        low, high = -(-start // 2), -(-end // 2)
        codes = local.codes if here else torch.zeros(high - low, dtype=torch.uint8)
        added("codes", -(-whole // 2), low, high, codes)
    else:
        dtype = torch.float8_e4m3fn if qmap is None else torch.uint8
        codes = local.codes if here else torch.zeros(local.shape, dtype=dtype)
        found[f"{key}.codes"] = Share(share.shape, share.extent, codes, ranks)
    low, high = -(-start // block), -(-end // block)
    added("scale", -(-whole // block), low, high, local.scale if here else torch.zeros(high - low))
    if floats:
        count = sum(numel for _, numel in floats)
        at = sum(max(min(first + many, start) - first, 0) for first, many in floats)
        elements = torch.empty(0, dtype=parameter.dtype) if here else local
        added("floats", count, at, at + elements.numel(), elements)
    return found


def _is_codes(local: object) -> bool:
    """Tell whether what a rank has of a slot is quantised."""
    return type(local).__name__ in CLASSES


def _local(value: torch.Tensor) -> Any:
    """Return what this rank has of a tensor, with what is in it."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _is_quantised(numel: int, block: int) -> bool:
    """Tell whether torchao quantises a share."""
    return numel >= LEAST_NUMEL and not numel % block


def ranges_of(parameter: torch.Tensor) -> list[Range] | None:
    """Return the ranges of a parameter that ranks have, flattened, in order; None if they have none.

    Source: torch's `Shard`: rows are dealt in equal numbers, rounded up; last ranks have fewer, or none.
    """
    numel = parameter.numel()
    if not isinstance(parameter, DTensor):
        return [(0, numel)]
    sharded = [dim for dim, one in enumerate(parameter.placements) if not one.is_replicate()]
    if not sharded:
        return [(0, numel)]
    [first, *more] = sharded
    placement: Any = parameter.placements[first]
    if more or type(placement) is not Shard or placement.dim != 0 or not numel:
        return None
    rows, count = parameter.shape[0], parameter.device_mesh.size(first)
    each = -(-rows // count)
    bounds = [min(number * each, rows) * (numel // rows) for number in range(count + 1)]
    return [(low, high - low) for low, high in pairwise(bounds)]


def _flat(share: Share) -> Range:
    """Return the range of the parameter that whole rows of it are."""
    rows = share.extent.offsets[0] if share.shape else 0
    return rows * math.prod(share.shape[1:]) + share.extent.start, share.extent.numel


def _not_cut(what: str, block: int) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is quantised in blocks that do not match the whole parameter",
        expected=f"shares of whole rows that begin at multiples of {block} elements",
        advice="shard by rows only (Shard(0) along one dimension of the mesh), or use an optimizer that keeps floats",
    )


# --- on the way back


@mutable
class _Anew:
    """Floats that torchao is to quantise when they have been read: blocks of a share, from `block` on."""

    state: Any
    block: int
    floats: torch.Tensor


class TorchaoState(OptimizerState):
    """The state of one of torchao's optimizers."""

    def _shares(
        self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor, found: Snapshot
    ) -> dict[str, Share]:
        optimizer: Any = self.optimizer
        local, ranges, share = _local(value), ranges_of(parameter), share_of(parameter, name)
        here = _is_codes(local)
        block = local.block_size if here else optimizer.block_size
        starts = [start for start, count in ranges or () if _is_quantised(count, block)]
        if here and not starts:
            raise _not_cut(f"{key} of {name}", block)
        has_floats = not here and share is not None and _is_quantised(share.extent.numel, block)
        if not starts or has_floats:  # who has loaded floats has them on all ranks
            return super()._shares(name, parameter, key, value, found)
        if any(start % block for start in starts):
            raise _not_cut(f"{key} of {name}", block)
        unquantised = ((start, start + count) for start, count in ranges or () if not _is_quantised(count, block))
        floats = [(low, high - low) for low, high in merge(unquantised)]
        blank = local if here else optimizer._subclass_zeros(torch.empty(block), key == SIGNED, block)
        told = {TORCHAO: type(blank).__name__, "block": block, "floats": [list(one) for one in floats]}
        found.values.setdefault(name, {})[key] = told
        return _pieces(key, parameter, local, blank, floats)

    # --- loading

    def prepare(self) -> None:
        """Make room for the state."""
        self.anew: list[_Anew] = []
        self.rounded: list[str] = []
        super().prepare()
        if self.rounded:
            self.notes.append(f"quantised from the checkpoint's floats, which rounds: {listed(self.rounded)}")

    def values(self, owner: Parameter) -> dict[str, object]:
        """Return what the checkpoint has of a parameter, without the pieces of quantised slots."""
        found = super().values(owner)
        pieces = {piece for key in owner.state for piece in slots_of(key, owner)}
        return without(found, *pieces)

    def _value(self, key: str, value: object, parameter: torch.Tensor, owner: Parameter) -> object:
        is_codes = is_quantised(value)
        if not is_codes and (not isinstance(value, Slot) or not value.shape or value.shape != owner.shape):
            return super()._value(key, value, parameter, owner)
        its = of_torchao(key, owner) if is_codes else None
        floats: Any = value if its is None else its.as_floats(key, owner.shape)
        optimizer: Any = self.optimizer
        found = optimizer._new_buffer(parameter.detach(), key == SIGNED)
        local, share, what = _local(found), share_of(parameter, owner.name), f"{key} of {owner.name}"
        if share is None:
            return found
        if not _is_codes(local):
            self.reads.append(TensorRead(floats, share.extent, local))
        elif ranges_of(parameter) is None:
            raise _not_cut(what, local.block_size)
        elif its is None:
            self._quantise(local, 0, floats, _flat(share), what)
        else:
            self._fill(local, its, floats, _flat(share), what)
        return found

    def _fill(self, local: Any, its: Moment, floats: Slot, where: Range, what: str) -> None:
        """Read blocks as they are, and the floats of those that were none."""
        start, numel = where
        block = local.block_size
        if (its.cls, its.block) != (type(local).__name__, block) or start % block:
            raise UnsupportedError(
                f"{what} is quantised in other blocks than the optimizer's on this rank",
                expected=f"{type(local).__name__}, blocks of {block}, from element {start} on",
                found=f"{its.cls}, blocks of {its.block}",
                advice=ADVICE,
            )
        for piece, source, per in (("codes", its.codes, its.per_code), ("scale", its.scale, block)):
            if source is not None:
                extent = source.flat(start // per, numel // per)
                self.reads.append(TensorRead(source, extent, getattr(local, piece)))
        if its.qmap is not None:
            self.reads.append(TensorRead(its.qmap, its.qmap.whole, local.qmap))
        for first, count in its.ranges:
            low, high = max(first, start), min(first + count, start + numel)
            if low < high:
                self._quantise(local, (low - start) // block, floats, (low, high - low), what)

    def _quantise(self, local: Any, block: int, floats: Slot, where: Range, what: str) -> None:
        """Read floats of which torchao is to make blocks, the first of which is so many blocks from the share's."""
        start, numel = where
        into = torch.empty(numel)
        self.reads.append(TensorRead(floats, floats.flat(start, numel), into))
        self.anew.append(_Anew(local, block, into))
        self.rounded.append(what)

    def read(self) -> None:
        """Read state, and let torchao quantise what was floats."""
        super().read()
        optimizer: Any = self.optimizer
        for one in self.anew:
            size = one.state.block_size
            count = one.floats.numel() // size
            made = optimizer._subclass_zeros(one.floats, getattr(one.state, "signed", True), size)
            made.copy_(one.floats)
            per = 2 if type(one.state).__name__ == PACKED else 1
            first, last = one.block * size // per, (one.block + count) * size // per
            one.state.codes.view(-1)[first:last].copy_(made.codes.view(-1))
            one.state.scale[one.block : one.block + count].copy_(made.scale)
        self.anew.clear()
