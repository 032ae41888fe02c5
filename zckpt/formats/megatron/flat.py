"""The distributed optimizer's flat buffers in `torch_dist` as slots of parameters, where every value proves it.

lines    the buffers, as the files have them
order    in which order a model's parameters may be in memory
chunks   which parameters a buffer may be of, and where they may be

[chained_N.]optimizer.distributed.dp_group_idx_<g>...
...optimizer/shard_0_1       [{"param_groups": [...]}]: hyperparameters and step
...grad_scaler/shard_0_1     [{"scale": ..., ...}]: of fp16

A reading is a guess, and has to prove itself: every element of every master, rounded, is that of its weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.errors import SourceError
from zckpt.formats.account.fits import text_of
from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.megatron.buckets import between, padding_of
from zckpt.formats.megatron.chunks import EXPERT, Chunk, Guess, chunks, cut_for, experts_of, guesses
from zckpt.formats.megatron.cut import joined
from zckpt.formats.megatron.lines import (
    JOINED,
    STATE,
    UNPADDED,
    UNPADDED_SIZES,
    Buffers,
    UnprovenError,
    buffers_of,
)
from zckpt.formats.megatron.objects import OPTIMIZER, Common
from zckpt.formats.megatron.proof import unproven
from zckpt.formats.torch_files.tensors import carried, read_scalars
from zckpt.state import MASTER, WEIGHT, Checkpoint, Duplicate, PaddingSpan, Slot
from zckpt.state.inventory import ANY, CARRIED, COPY, IMPLIED, REST, Rule
from zckpt.state.inventory import STATE as AS_STATE
from zckpt.state.views import reshape, transpose
from zckpt.torchfile import Tensor, walk_tensors

_OBJECT = r"(?:chained_([0-9]{1,18})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,18})\."
_GROUPS = re.compile(_OBJECT + r"optimizer/shard_.*")
_SCALER = re.compile(_OBJECT + r"grad_scaler/shard_.*")
_SIZES = re.compile(_OBJECT + r"per_bucket_numel/shard_.*")

SCALER = "grad_scaler"


@dataclass(frozen=True, slots=True)
class Found:
    """What a guess makes of the buffers: the slots of every parameter, and the copies that there are of them."""

    chunks: list[Chunk]
    slots: dict[str, dict[str, Slot]]
    copies: list[Duplicate]


def attach_flat(checkpoint: Checkpoint, buffers: Buffers, arguments: Mapping[object, object]) -> None:
    """Give a checkpoint's parameters what flat buffers have of them."""
    why = "a name of the model is not known"
    proven: list[Found] = []
    for guess in guesses(checkpoint, buffers, arguments):
        try:
            found = _found(checkpoint, guess, buffers, arguments)
        except (UnprovenError, SourceError) as error:
            why = error.message if isinstance(error, SourceError) else str(error)
            continue
        if all(found.slots != one.slots for one in proven):
            proven.append(found)
    if len(proven) != 1:
        raise UnprovenError("the values fit more than one order" if proven else why)
    for name, its in proven[0].slots.items():
        checkpoint.parameters[name].slots.update(its)
        checkpoint.parameters[name].frozen = False
    checkpoint.duplicates += proven[0].copies
    checkpoint.padding_spans += [list(_padding(checkpoint, chunk)) for chunk in proven[0].chunks]


def _found(checkpoint: Checkpoint, guess: Guess, buffers: Buffers, arguments: Mapping[object, object]) -> Found:
    """Return what a guess makes of the buffers, if every value of every master proves it."""
    every = list(chunks(checkpoint, guess, buffers, arguments))
    slots, copies = _slots(checkpoint, every)
    masters = {name: its[MASTER] for name, its in slots.items() if MASTER in its}
    wrong = unproven(masters, {name: checkpoint.parameters[name].slots[WEIGHT] for name in masters})
    if wrong is not None or len(masters) != len(slots):
        raise UnprovenError(f"the master {wrong.removeprefix('that ')}" if wrong else "there are no masters")
    return Found(every, slots, copies)


def _slots(checkpoint: Checkpoint, every: Sequence[Chunk]) -> tuple[dict[str, dict[str, Slot]], list[Duplicate]]:
    """Return the slots of every parameter, and the copies that there are of them."""
    found: dict[str, dict[str, Slot]] = {}
    copies: list[Duplicate] = []
    for chunk in every:
        tensor_ranks = chunk.ranks.tp
        for lead, start in chunk.starts.items():
            for expert in sorted({e for e, _ in chunk.buffers}):
                name = _global(checkpoint, lead, expert, chunk.ranks.ep)
                one = checkpoint.parameters[name]
                cut = cut_for(checkpoint, one, tensor_ranks)
                shape = tuple(n // tensor_ranks if at == cut.dimension else n for at, n in enumerate(one.shape))
                its = [chunk.buffers[expert, t] for t in range(tensor_ranks)]
                for slot in its[0].slots:
                    turned = chunk.fused and EXPERT.fullmatch(lead) is not None
                    parts = [buffer.slots[slot].part(start, math.prod(shape)) for buffer in its]
                    parts = [transpose(reshape(one, shape[::-1]), (1, 0)) if turned else reshape(one, shape)
                             for one in parts]  # fmt: skip
                    whole = joined(name, parts, cut)
                    original = found.setdefault(name, {}).setdefault(slot, whole)
                    others: list[tuple[Slot, int | None]] = [(whole, None)] if original is not whole else []
                    others += [(part, t) for t, part in enumerate(parts[1:], 1) if cut.dimension is None]
                    copies += [
                        Duplicate("parameter", name, name, copy, original, t) for copy, t in others if copy.numel
                    ]
    if not found or any(its.keys() != next(iter(found.values())).keys() for its in found.values()):
        raise UnprovenError("buffers have different slots")
    return found, copies


def _global(checkpoint: Checkpoint, name: str, rank: int, ranks: int) -> str:
    match = EXPERT.fullmatch(name)
    if match is None or ranks == 1:
        return name
    return f"{match[1]}{rank * (experts_of(checkpoint, name) // ranks) + int(match[2])}{match[3]}"


def _padding(checkpoint: Checkpoint, chunk: Chunk) -> Iterator[PaddingSpan]:
    ranges = []
    for name, start in chunk.starts.items():
        one = checkpoint.parameters[name]
        kept = cut_for(checkpoint, one, chunk.ranks.tp).dimension is None
        ranges.append((start, one.numel if kept else one.numel // chunk.ranks.tp))
    for buffer in chunk.buffers.values():
        for line in buffer.slots.values():
            yield from padding_of(line, between(ranges, buffer.numel))


def with_flat(
    checkpoint: Checkpoint, items: Mapping[str, TensorItem], objects: Mapping[str, ObjectItem], common: Common
) -> Common:
    """Give a checkpoint what its flat buffers hold; return `common.pt` with the param groups that are beside them.

    Where it is not proven what is where, nothing is taken, and a warning says why.
    """
    states = [key for key in objects if STATE.fullmatch(key)]
    if not items and not states:
        return common
    groups = {(int(m[1] or 0), int(m[2])): one for key, one in objects.items() if (m := _GROUPS.fullmatch(key))}
    nodes = {key: one.node[0] if isinstance(one.node, list) and len(one.node) == 1 else None
             for key, one in groups.items()}  # fmt: skip
    firsts = [nodes[key] for key in sorted(nodes) if key[1] == 0]
    plain = [isinstance(one, dict) and not any(True for _ in walk_tensors(one)) for one in firsts]
    why = None if plain and all(plain) else "no param groups are beside them"
    try:
        if why is None:
            attach_flat(checkpoint, buffers_of(items, objects), common.arguments)
    except (UnprovenError, SourceError) as error:
        why = error.message if isinstance(error, SourceError) else str(error)
    if why is not None:
        checkpoint.warnings.append(
            f"the optimizer's state is in {len(items) + len(states)} flat buffers without names, which are not read: "
            f"{why}"
        )
        return common
    _keep_scaler(checkpoint, objects)
    _explain(checkpoint, objects)
    known = common.content.get(OPTIMIZER)
    around = known if isinstance(known, dict) else {}
    optimizer: object = {**around, OPTIMIZER: firsts[0]}
    if len(firsts) > 1:
        its = {chain: around.get(chain) for chain in range(len(firsts))}
        optimizer = {
            chain: {**(one if isinstance(one, dict) else {}), OPTIMIZER: firsts[chain]} for chain, one in its.items()
        }
    return Common(common.file, {**common.content, OPTIMIZER: optimizer})


def _keep_scaler(checkpoint: Checkpoint, objects: Mapping[str, ObjectItem]) -> None:
    """Carry the loss scaler of the first rank, which all ranks have alike."""
    found = sorted((int(m[1] or 0), int(m[2]), key) for key in objects if (m := _SCALER.fullmatch(key)))
    for _, _, key in found[:1]:
        one = objects[key]
        node = one.node[0] if isinstance(one.node, list) and len(one.node) == 1 else one.node
        checkpoint.optimizer_metadata[SCALER] = carried(one.file, node)
        scale = node.get("scale") if isinstance(node, dict) else None
        if isinstance(scale, Tensor) and scale.numel == 1:
            checkpoint.loss_scale = float(read_scalars(one.file.path, [scale])[0].value)


def _explain(checkpoint: Checkpoint, objects: Mapping[str, ObjectItem]) -> None:
    """Say what the objects beside buffers are, in the files that hold them."""
    rules: dict[str, list[Rule]] = {}
    scalers = sorted((int(m[1] or 0), int(m[2]), key) for key in objects if (m := _SCALER.fullmatch(key)))
    for key, one in objects.items():
        groups = _GROUPS.fullmatch(key)
        text = text_of(key)
        if groups is not None and int(groups[2]) == 0:
            found = [Rule((text, ANY, "param_groups", ANY, ANY, REST), AS_STATE, "hyperparameters")]
        elif groups is not None:
            found = [Rule((text, REST), COPY, "hyperparameters of another rank")]
        elif _SCALER.fullmatch(key):
            own = key == scalers[0][2]
            fate, about = (CARRIED, SCALER) if own else (COPY, "the loss scaler of another rank")
            found = [Rule((text, REST), fate, about, tensors=not own)]
        elif _SIZES.fullmatch(key) or UNPADDED_SIZES.fullmatch(key):
            found = [Rule((text, REST), IMPLIED, "sizes of buckets")]
        elif STATE.fullmatch(key):
            found = [
                Rule((text, ANY, JOINED), IMPLIED, "that buckets are one tensor"),
                Rule((text, ANY, ANY, ANY, UNPADDED), IMPLIED, "how many elements a buffer has"),
                Rule((text, ANY, ANY, ANY, ANY), IMPLIED, "the types of a buffer"),
            ]
        else:
            continue
        rules.setdefault(one.file.path, []).extend(found)
    for file in checkpoint.files:
        file.rules = (*file.rules, *rules.get(file.path, ()))
