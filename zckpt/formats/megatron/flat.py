"""The distributed optimizer's flat buffers in `torch_dist` as slots of parameters, where every value proves it.

[chained_N.]optimizer.distributed.dp_group_idx_<g>...
...gbuf_idx_<b>.dtype_(torch.bfloat16, torch.float32).bucket_idx_<k>.<slot>
...dp_group_idx_<g>.optimizer/shard_0_1               [{"param_groups": [...]}]: hyperparameters and step
...dp_group_idx_<g>.per_bucket_numel[_unpadded]/...   sizes of buckets

Group g is the model-parallel rank: tensor-parallel ranks of stage 0, of stage 1, ...; among experts those of each
expert-parallel rank in between. Buffer b is of a chunk of the model and a type. Which layers a chunk has follows from
the sizes of its buckets: no two numbers of layers fill them. The parameters' order is guessed, and the guess has to
prove itself: every element of every master, rounded, is that of its weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.errors import SourceError
from zckpt.formats.account.fits import text_of
from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.megatron.buckets import Layout, Member, fit, gaps
from zckpt.formats.megatron.cut import KEPT, Cut, cut_of, joined
from zckpt.formats.megatron.lines import Buffer, Buffers, Line, UnprovenError, buffers_of
from zckpt.formats.megatron.objects import OPTIMIZER, Common
from zckpt.formats.megatron.order import BACK, FRONT, Order, orders
from zckpt.formats.megatron.proof import unproven
from zckpt.state import MASTER, WEIGHT, Checkpoint, Duplicate, Extent, PaddingSpan, Parameter, Slot
from zckpt.state.dtypes import itemsize
from zckpt.state.inventory import ANY, COPY, IMPLIED, REST, STATE, Rule
from zckpt.torchfile import walk_tensors

EMBEDDING, OUTPUT = FRONT[0], BACK[2]

_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)([0-9]+)(\..*)")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor- and expert-parallel ranks."""

    tp: int
    ep: int


@dataclass(slots=True)
class Chunk:
    """The parameters of one type of a chunk, and the buffers of all of its ranks, by (ep, tp)."""

    stage: int
    members: list[Member]
    layout: Layout
    buffers: dict[tuple[int, int], Buffer]


def attach_flat(checkpoint: Checkpoint, items: Mapping[str, TensorItem], arguments: Mapping[object, object]) -> None:
    """Give a checkpoint's parameters what flat buffers have of them.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its weights.
    items : mapping of str to TensorItem
        The buffers, by key.
    arguments : mapping
        The program's.

    Raises
    ------
    UnprovenError
        Which parameter is where is not certain; nothing has been given then.
    """
    buffers = buffers_of(items)
    ranks = _ranks(arguments, buffers)
    why = "a name of the model is not known"
    proven: list[Found] = []
    for order in orders(checkpoint.parameters):
        try:
            found = _found(checkpoint, order, buffers, ranks)
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
    checkpoint.padding_spans += [list(_padding(chunk)) for chunk in proven[0].chunks]


@dataclass(frozen=True, slots=True)
class Found:
    """What an order makes of the buffers: the slots of every parameter, and the copies that there are of them."""

    chunks: list[Chunk]
    slots: dict[str, dict[str, Slot]]
    copies: list[Duplicate]


def _found(checkpoint: Checkpoint, order: Order, buffers: Buffers, ranks: Ranks) -> Found:
    """Return what an order makes of the buffers, if every value of every master proves it."""
    chunks = [chunk for chain in sorted(buffers) for chunk in _chunks(checkpoint, order, buffers, chain, ranks)]
    slots, copies = _slots(checkpoint, chunks, ranks)
    masters = {name: its[MASTER] for name, its in slots.items() if MASTER in its}
    wrong = unproven(masters, {name: checkpoint.parameters[name].slots[WEIGHT] for name in masters})
    if wrong is not None or len(masters) != len(slots):
        raise UnprovenError(f"the master {wrong.removeprefix('that ')}" if wrong else "there are no masters")
    return Found(chunks, slots, copies)


def _ranks(arguments: Mapping[object, object], buffers: Buffers) -> Ranks:
    sizes = [arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "expert")]
    if max(len(groups) for groups in buffers.values()) == 1:
        return Ranks(1, 1)
    tp, ep = (size if type(size) is int and size > 0 else None for size in sizes)
    if tp is None:
        raise UnprovenError("tensor_model_parallel_size is not in the arguments")
    return Ranks(tp, ep or 1)


def _chunks(checkpoint: Checkpoint, order: Order, buffers: Buffers, chain: int, ranks: Ranks) -> Iterator[Chunk]:
    """Yield the chunks of an optimizer of a chain, in the model's order: each has as many layers as fill it."""
    apart = len(buffers) > 1
    experts = ranks.ep if apart and chain == max(buffers) else 1
    groups = buffers[chain]
    stages, odd = divmod(len(groups), ranks.tp * experts)
    if odd or sorted(groups) != list(range(len(groups))):
        raise UnprovenError(f"{len(groups)} groups of ranks are not those of {ranks.tp} tensor-parallel ranks")
    is_own = _is_expert if apart and chain == max(buffers) else _is_dense if apart else _is_any
    queues = [sorted(groups[stage * ranks.tp * experts]) for stage in range(stages)]
    tied = stages > 1 and OUTPUT not in order.back
    done, taken, at_front = 0, 0, True
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                raise UnprovenError("stages have different numbers of buffers")
            lead = groups[stage * ranks.tp * experts]
            for count, names in _candidates(order, done, at_front, tied):
                taken = count
                own = [name for name in names if is_own(name)]
                parts = _by_type(checkpoint, own, ranks, experts, tied)
                if not own or len(parts) > len(queue):
                    continue
                layouts = [
                    fit(members, lead[number].sizes) for number, members in zip(queue, parts.values(), strict=False)
                ]
                types = [lead[number].dtype for number in queue[: len(parts)]]
                if types == list(parts) and all(layouts):
                    break
            else:
                raise UnprovenError(f"no number of layers fills the buckets of stage {stage}")
            done, at_front = done + taken, False
            for members, layout in zip(parts.values(), layouts, strict=True):
                number = queue.pop(0)
                ranked = {(e, t): groups[(stage * experts + e) * ranks.tp + t].get(number)
                          for e in range(experts) for t in range(ranks.tp)}  # fmt: skip
                same = {key: one for key, one in ranked.items() if one is not None and one.sizes == lead[number].sizes}
                if layout is None or len(same) != len(ranked):
                    raise UnprovenError("ranks have buckets of different sizes")
                yield Chunk(stage, members, layout, same)
    if any(is_own(name) for layer in order.layers[done:] for name in layer):
        raise UnprovenError(f"the buffers are of {done} of {len(order.layers)} layers")


def _candidates(order: Order, done: int, at_front: bool, tied: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield what the next chunk may have: how many layers, and all names."""
    front = order.front if at_front else []
    last = [*order.back, *([EMBEDDING] if tied and not at_front else [])]
    for count in range(len(order.layers) - done + 1):
        names = [*front, *(name for layer in order.layers[done : done + count] for name in layer)]
        yield count, names
        if done + count == len(order.layers):
            yield count, [*names, *last]


def _is_any(_: str) -> bool:
    return True


def _is_expert(name: str) -> bool:
    return _EXPERT.fullmatch(name) is not None


def _is_dense(name: str) -> bool:
    return not _is_expert(name)


def _by_type(
    checkpoint: Checkpoint, names: Sequence[str], ranks: Ranks, experts: int, tied: bool
) -> dict[str, list[Member]]:
    """Return the parameters of a chunk on the first of its ranks, by type."""
    found: dict[str, list[Member]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None and experts > 1 and int(match[2]) >= _experts_of(checkpoint, name) // experts:
            continue
        one = checkpoint.parameters[name]
        cut = _cut(checkpoint, one, ranks.tp)
        numel = one.numel if cut.dimension is None else one.numel // ranks.tp
        found.setdefault(one.dtype, []).append(Member(name, numel, tied and name == EMBEDDING))
    return found


def _experts_of(checkpoint: Checkpoint, name: str) -> int:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return 0
    count = 0
    while f"{match[1]}{count}{match[3]}" in checkpoint.parameters:
        count += 1
    return count


def _cut(checkpoint: Checkpoint, one: Parameter, ranks: int) -> Cut:
    if ranks == 1:
        return KEPT
    partner = checkpoint.parameters.get(one.name.replace(".linear_fc1.", ".linear_fc2.").replace(".bias", ".weight"))
    gated = None
    if ".linear_fc1." in one.name and partner is not None and len(partner.shape) == 2:
        gated = one.shape[0] == 2 * partner.shape[1]
    cut = cut_of(one.name, one.shape, checkpoint.source, gated=gated)
    if cut.dimension is not None and one.shape[cut.dimension] % (ranks * cut.parts):
        raise UnprovenError(f"{one.name} is not cut evenly")
    return cut


def _slots(
    checkpoint: Checkpoint, chunks: Sequence[Chunk], ranks: Ranks
) -> tuple[dict[str, dict[str, Slot]], list[Duplicate]]:
    """Return the slots of every parameter, and the copies that there are of them."""
    found: dict[str, dict[str, Slot]] = {}
    copies: list[Duplicate] = []
    for chunk in chunks:
        for place in chunk.layout.places:
            for expert in sorted({e for e, _ in chunk.buffers}):
                name = _global(checkpoint, place.name, expert, len({e for e, _ in chunk.buffers}))
                one = checkpoint.parameters[name]
                cut = _cut(checkpoint, one, ranks.tp)
                shape = tuple(n // ranks.tp if at == cut.dimension else n for at, n in enumerate(one.shape))
                its = [chunk.buffers[expert, t].buckets[place.bucket] for t in range(ranks.tp)]
                for slot in its[0].slots:
                    parts = [_slot(line, slot, place.start, shape) for line in its]
                    whole = joined(name, parts, cut, checkpoint.source)
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
    match = _EXPERT.fullmatch(name)
    if match is None or ranks == 1:
        return name
    return f"{match[1]}{rank * (_experts_of(checkpoint, name) // ranks) + int(match[2])}{match[3]}"


def _slot(line: Line, slot: str, start: int, shape: tuple[int, ...]) -> Slot:
    dtype = line.slots[slot][2]
    zeros = (0,) * len(shape)
    spans = tuple(
        replace(one, extent=Extent(zeros, shape, low, numel), strides=None)
        for low, numel, one in line.part(slot, start, math.prod(shape))
    )
    return Slot(slot, dtype, shape, spans)


def _padding(chunk: Chunk) -> Iterator[PaddingSpan]:
    for buffer in chunk.buffers.values():
        for bucket, start, numel in gaps(chunk.layout, chunk.members):
            line = buffer.buckets[bucket]
            for slot in line.slots:
                for _, count, span in line.part(slot, start, numel):
                    yield PaddingSpan(slot, span.path, span.offset, count * itemsize(span.dtype))


_GROUPS = re.compile(r"(?:chained_([0-9]+)\.)?optimizer\.distributed\.dp_group_idx_([0-9]+)\.optimizer/shard_.*")
_SIZES = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\..+\.per_bucket_numel(?:_unpadded)?/shard_.*")


def with_flat(
    checkpoint: Checkpoint, items: Mapping[str, TensorItem], objects: Mapping[str, ObjectItem], common: Common
) -> Common:
    """Give a checkpoint what its flat buffers hold; return `common.pt` with the param groups that are beside them.

    Where it is not proven what is where, nothing is taken, and a warning says why.
    """
    if not items:
        return common
    groups = {(int(m[1] or 0), int(m[2])): one for key, one in objects.items() if (m := _GROUPS.fullmatch(key))}
    nodes = {key: one.node[0] if isinstance(one.node, list) and len(one.node) == 1 else None
             for key, one in groups.items()}  # fmt: skip
    firsts = [nodes[key] for key in sorted(nodes) if key[1] == 0]
    plain = [isinstance(one, dict) and not any(True for _ in walk_tensors(one)) for one in firsts]
    why = None if plain and all(plain) else "no param groups are beside them"
    try:
        if why is None:
            attach_flat(checkpoint, items, common.arguments)
    except UnprovenError as error:
        why = str(error)
    if why is not None:
        checkpoint.warnings.append(
            f"the optimizer's state is in {len(items)} flat buffers without names, which are not read: {why}"
        )
        return common
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


def _explain(checkpoint: Checkpoint, objects: Mapping[str, ObjectItem]) -> None:
    """Say what the objects beside buffers are, in the files that hold them."""
    rules: dict[str, list[Rule]] = {}
    for key, one in objects.items():
        match = _GROUPS.fullmatch(key)
        if match is not None and int(match[2]) == 0:
            rule = Rule((text_of(key), ANY, "param_groups", ANY, ANY, REST), STATE, "hyperparameters")
        elif match is not None:
            rule = Rule((text_of(key), REST), COPY, "hyperparameters of another rank")
        elif _SIZES.fullmatch(key):
            rule = Rule((text_of(key), REST), IMPLIED, "sizes of buckets")
        else:
            continue
        rules.setdefault(one.file.path, []).append(rule)
    for file in checkpoint.files:
        file.rules = (*file.rules, *rules.get(file.path, ()))
