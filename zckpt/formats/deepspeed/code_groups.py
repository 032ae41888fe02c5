"""Whether quantised state of each param group can be cut for other ranks as it is: `codes` says when, and cuts it."""

from __future__ import annotations

from zckpt.formats.deepspeed.codes import Codes, Kept, bytes_of
from zckpt.formats.deepspeed.quantised import is_quantised, of_slices
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.torch_files.quantised import NESTED
from zckpt.state.checkpoint import RankValue, how_to_drop

FLOATS = "--requantize makes codes of it anew; --dequantize writes it as float32, which torchao's optimizers take, too"
HINT = "--requantize makes codes of it anew; --dequantize writes it as float32, for an optimizer that keeps it so"


def cut_codes(target: Target) -> tuple[bool, str | None]:
    """Cut quantised state for a target's ranks; tell whether that could be, and else what to do instead."""
    values = target.checkpoint.per_rank
    quantised = any(value.key == NESTED for value in values)
    if not any(map(is_quantised, values)):
        return False, how_to_drop(values)
    found = codes_of(target)
    if found is not None:
        target.codes.update(found)
        return True, None
    of_one = target.tp == target.checkpoint.topology.tp
    return False, (HINT if quantised else FLOATS) if of_one else of_slices("").advice


def codes_of(target: Target) -> dict[tuple[int, int], Codes] | None:
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
        all(map(is_quantised, checkpoint.per_rank))
        and len(target.ranks) == len(target.origin.ranks)
        and not target.regrouped
        and 3 not in (target.stage, first.stage)
        and not (target.elastic or first.elastic or target.round_robin or details.get("round_robin_gradients"))
        and target.alignment == bool(details.get("parameter_alignment"))
    )
    if not alike:
        return None
    found: dict[tuple[int, int], Codes] = {}
    held: dict[tuple[int, int], list[RankValue]] = {}
    for value in checkpoint.per_rank:
        held.setdefault((value.mp_rank, value.group), []).append(value)
    for rank in target.ranks:
        for group in rank.groups:
            own = held.get((rank.mp_rank, group.index), [])
            codes = _group(group, Kept.of(own, f"group {group.index}", checkpoint.source), len(rank.members))
            if codes is not None:
                found[rank.mp_rank, group.index] = codes
    return found if found.keys() == held.keys() else None


def _group(group: TargetGroup, kept: Kept, members: int) -> Codes | None:
    """Return the state of a group that every rank has in the same form, if its blocks are blocks of the target.

    What is more in the target is padding of whole ones.
    """
    forms = set()
    for alike in kept.moments.values():
        own = {
            (one.cls, one.codes.dtype, one.codes.shape, one.block, one.scale is None, bytes_of(one.qmap))
            for one in alike
        }
        if len(alike) != members or len(own) > 1 or len(alike[0].codes.shape) != 1:
            return None
        forms.add(alike[0].numel)
    blocks = {one.block for alike in kept.moments.values() for one in alike if one.scale is not None} or {1}
    if len(forms) != 1 or len(blocks) != 1 or len(group.experts) != 1:
        return None
    (partition,), (block,), after = forms, blocks, group.shared_by
    end = members * partition
    of_whole_blocks = any(alike[0].cls for alike in kept.moments.values())  # torchao's, on one rank, too
    fits = (
        (members == 1 or partition % block == 0)
        and ((after == 1 and not of_whole_blocks) or group.partition % block == 0)
        and (after * group.partition <= end or end % block == 0)
    )
    return Codes(kept, members, partition, block) if fits else None
