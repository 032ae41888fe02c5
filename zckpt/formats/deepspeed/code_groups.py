"""Whether quantised state of each param group can be cut for other ranks as it is: `codes` says when, and cuts it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zckpt.formats.deepspeed.codes import KNOWN, Codes, TorchaoCodes, alike_forms, bytes_of
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.torch_files import torchao
from zckpt.formats.torch_files.quantised import NESTED, block_of, pieces_of
from zckpt.state import Parameter
from zckpt.state.checkpoint import RankValue
from zckpt.torchfile import FromFile, MetaTensor

FLOATS = "--requantize makes codes of it anew; --dequantize writes it as float32, which torchao's optimizers take, too"
HINT = "--requantize makes codes of it anew; --dequantize writes it as float32, for an optimizer that keeps it so"


def codes_of(target: Target) -> dict[tuple[int, int], Codes | TorchaoCodes] | None:
    """Return quantised state by model-parallel rank and group; None where some cannot be cut for a target's ranks.

    Raises
    ------
    UnsupportedError
        It is not known what the state is.
    DamagedFileError
        Codes, scales and map do not belong together.
    """
    checkpoint, details = target.checkpoint, target.checkpoint.details
    first = target.origin.members[0]
    alike = (
        all(value.key == NESTED or torchao.is_quantised(value.value) for value in checkpoint.per_rank)
        and len(target.ranks) == len(target.origin.ranks)
        and not target.regrouped
        and 3 not in (target.stage, first.stage)
        and not (target.elastic or first.elastic or target.round_robin or details.get("round_robin_gradients"))
        and target.alignment == bool(details.get("parameter_alignment"))
    )
    if not alike:
        return None
    found: dict[tuple[int, int], Codes | TorchaoCodes] = {}
    held: dict[tuple[int, int], list[RankValue]] = {}
    for value in checkpoint.per_rank:
        held.setdefault((value.mp_rank, value.group), []).append(value)
    for rank in target.ranks:
        for group in rank.groups:
            own = sorted(held.get((rank.mp_rank, group.index), ()), key=lambda one: one.rank)
            is_torchaos = bool(own) and all(value.key != NESTED for value in own)
            make = _group_of_torchao if is_torchaos else _group
            codes = make(group, own, len(rank.members), checkpoint.source)
            if codes is not None and not _fits(codes, group):
                return None
            if codes is not None:
                found[rank.mp_rank, group.index] = codes
    return found if found.keys() == held.keys() else None


def _group(group: TargetGroup, own: Sequence[RankValue], members: int, path: str) -> Codes | None:
    """Return the state of a group; None where not every one of the data-parallel ranks has the same kinds of it."""
    what = f"group {group.index}"
    if any(one.key != NESTED for one in own):
        return None
    values = [one.value for one in own if isinstance(one.value, FromFile)]
    pieces = [pieces_of(value, what, path)[1] for value in values]
    if not pieces or len(pieces) != members or len(group.experts) != 1:
        return None
    first = pieces[0]
    if not alike_forms(pieces) or not first.keys() <= KNOWN:
        return None
    maps = [key for key in first if key[:-1] == "qmap"]
    if any(bytes_of(first[key]) != bytes_of(one[key]) for key in maps for one in pieces[1:]):
        return None
    states = {key: slot for key, slot in first.items() if key[:-1] == "state"}
    blocks = {
        block_of(key, slot, first.get(f"absmax{key[-1]}"), first.get(f"qmap{key[-1]}"), what, path)
        for key, slot in states.items()
        if slot.dtype != "float32" or f"absmax{key[-1]}" in first
    }
    sizes = {slot.shape for slot in states.values()}
    if len(sizes) != 1 or len(blocks) > 1:
        return None
    return Codes(values, pieces, math.prod(sizes.pop()), blocks.pop() if blocks else 1)


def _group_of_torchao(group: TargetGroup, own: Sequence[RankValue], members: int, path: str) -> TorchaoCodes | None:
    """Return the state of a group; None where not every rank has the same kinds of it, or not all blocks are alike."""
    what = f"group {group.index}"
    values: dict[str, list[FromFile]] = {}
    moments: dict[str, list[torchao.Quantised]] = {}
    for one in own:
        node = one.value.node if isinstance(one.value, FromFile) else None
        if isinstance(one.value, FromFile) and isinstance(node, MetaTensor):
            partition = Parameter(what, node.shape, node.dtype, state={one.key: one.value})
            values.setdefault(one.key, []).append(one.value)
            moments.setdefault(one.key, []).append(torchao.quantised(one.key, partition, path))
    if any(len(one) != members for one in values.values()) or len(group.experts) != 1:
        return None
    for alike in moments.values():
        if len({(moment.cls, moment.shape, moment.block, moment.codes.dtype) for moment in alike}) > 1:
            return None
        maps = [moment.qmap for moment in alike]
        if any((qmap is None) != (maps[0] is None) for qmap in maps):
            return None
        if len({bytes_of(qmap) for qmap in maps if qmap is not None}) > 1:
            return None
    forms = {(moment.shape, moment.block) for alike in moments.values() for moment in alike}
    if len(forms) != 1:
        return None
    [(shape, block)] = forms
    # of whole blocks, on one rank, too
    return None if len(shape) != 1 or group.partition % block else TorchaoCodes(values, moments, shape[0], block)


def _fits(codes: Codes | TorchaoCodes, group: TargetGroup) -> bool:
    """Tell whether every block of the source is one of the target, and what is more there is padding of whole ones."""
    before, after, block = codes.count, group.shared_by, codes.block
    end = before * codes.partition
    return (
        (before == 1 or codes.partition % block == 0)
        and (after == 1 or group.partition % block == 0)
        and (after * group.partition <= end or end % block == 0)
    )
