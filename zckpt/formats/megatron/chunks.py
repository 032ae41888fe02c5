"""Which parameters each flat buffer of `torch_dist` is of, and where they are in it: a reading, that is to be proven.

Group g is the model-parallel rank: tensor-parallel ranks of stage 0, of stage 1, ...; among experts those of each
expert-parallel rank in between, or (up to megatron-core 0.9) those of all stages for each expert-parallel rank. Buffer
b is of a chunk of the model and a type. Which layers a chunk has follows from the sizes of its buckets: no two numbers
of layers fill them. Where buckets are written as one, where they ended is another thing to be guessed. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zckpt.formats.megatron.buckets import Layout, Member, bucket_numels, fit, lay_out
from zckpt.formats.megatron.cut import KEPT, Cut, cut_of
from zckpt.formats.megatron.lines import Buffer, Buffers, UnprovenError
from zckpt.formats.megatron.order import BACK, FRONT, Order, orders
from zckpt.state import Checkpoint, Parameter

EMBEDDING, OUTPUT = FRONT[0], BACK[-2]

EXPERT = re.compile(r"(.*\.experts\.local_experts\.)([0-9]{1,18})(\..*)")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor- and expert-parallel ranks that share an optimizer of a chain. `kind`: of which parameters it is."""

    tp: int
    ep: int
    kind: str

    def has(self, name: str) -> bool:
        """Tell whether it is of a parameter."""
        return self.kind == "all" or (self.kind == "experts") == (EXPERT.fullmatch(name) is not None)


@dataclass(frozen=True, slots=True)
class Guess:
    """What is nowhere said: the parameters' order, how groups are numbered, and where buckets ended.

    `experts_outside`: whether groups of experts are numbered by expert-parallel rank first; `numels`: at which sizes
    buckets may end, the likeliest first.
    """

    order: Order
    experts_outside: bool
    numels: tuple[int | None, ...]


@dataclass(slots=True)
class Chunk:
    """The parameters of one type of a chunk, where each begins, and the buffers of all of its ranks, by (ep, tp).

    `fused`: whether experts are transposed in it.
    """

    ranks: Ranks
    starts: dict[str, int]
    buffers: dict[tuple[int, int], Buffer]
    fused: bool = False


def guesses(checkpoint: Checkpoint, buffers: Buffers, arguments: Mapping[object, object]) -> Iterator[Guess]:
    """Yield all that may be so."""
    every = [one for groups in buffers.values() for its in groups.values() for one in its.values()]
    stored_whole = any(one.sizes is None for one in every)
    sizes = bucket_numels(arguments) if stored_whole else [None]
    ends = [tuple(sizes), tuple(reversed(sizes))] if len(sizes) > 1 else [tuple(sizes)]
    numberings = (False, True) if len(buffers) > 1 else (False,)
    for order, outside, numels in product(orders(checkpoint.parameters), numberings, ends):
        yield Guess(order, outside, numels)


def chunks(
    checkpoint: Checkpoint, guess: Guess, buffers: Buffers, arguments: Mapping[object, object]
) -> Iterator[Chunk]:
    """Yield the chunks of all optimizers of a chain, each in the model's order.

    Raises UnprovenError: the parameters do not fill the buffers in this way.
    """
    for chain in sorted(buffers):
        yield from _of_chain(checkpoint, guess, buffers[chain], ranks_of(arguments, buffers, chain))


def ranks_of(arguments: Mapping[object, object], buffers: Buffers, chain: int) -> Ranks:
    """Return the ranks that share an optimizer of a chain, of which the last is that of experts."""
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    tp, ep, expert_tp = (n if type(n := arguments.get(name)) is int and n > 0 else None for name in names)
    apart = len(buffers) > 1
    kind = ("experts" if chain == max(buffers) else "rest") if apart else "all"
    if len(buffers[chain]) == 1:
        return Ranks(1, 1, kind)
    if tp is None:
        raise UnprovenError("tensor_model_parallel_size is not in the arguments")
    return Ranks((expert_tp or tp) if kind == "experts" else tp, (ep or 1) if kind == "experts" else 1, kind)


def _of_chain(
    checkpoint: Checkpoint, guess: Guess, groups: Mapping[int, Mapping[int, Buffer]], ranks: Ranks
) -> Iterator[Chunk]:
    """Yield the chunks of an optimizer of a chain: each has as many layers as fill it."""
    order = guess.order
    stages, odd = divmod(len(groups), ranks.tp * ranks.ep)
    if odd or sorted(groups) != list(range(len(groups))):
        raise UnprovenError(f"{len(groups)} groups of ranks are not those of {ranks.tp} tensor-parallel ranks")

    def group(stage: int, expert: int, tensor: int) -> Mapping[int, Buffer]:
        first = expert * stages + stage if guess.experts_outside else stage * ranks.ep + expert
        return groups[first * ranks.tp + tensor]

    queues = [sorted(group(stage, 0, 0)) for stage in range(stages)]
    tied = stages > 1 and (OUTPUT not in order.back or order.further)
    done, at_front = 0, True
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                raise UnprovenError("stages have different numbers of buffers")
            lead = group(stage, 0, 0)
            taken, parts = _filling(checkpoint, guess, ranks, [lead[n] for n in queue], done, at_front, tied)
            if not parts:
                raise UnprovenError(f"no number of layers fills the buckets of stage {stage}")
            done, at_front = done + taken, False
            for layout in parts:
                number = queue.pop(0)
                its = {(e, t): group(stage, e, t).get(number) for e in range(ranks.ep) for t in range(ranks.tp)}
                same = {key: one for key, one in its.items() if one is not None and _alike(one, lead[number])}
                if len(same) != len(its):
                    raise UnprovenError("ranks have buckets of different sizes")
                starts = layout.starts(lead[number].stored)
                if order.fused:
                    starts = dict(_apart(checkpoint, starts, ranks))
                yield Chunk(ranks, starts, same, order.fused)
    if any(ranks.has(name) for layer in order.layers[done:] for name in layer):
        raise UnprovenError(f"the buffers are of {done} of {len(order.layers)} layers")


def _apart(checkpoint: Checkpoint, starts: Mapping[str, int], ranks: Ranks) -> Iterator[tuple[str, int]]:
    """Yield where each parameter begins, of experts that are one parameter in the buffer each by itself."""
    for name, start in starts.items():
        match = EXPERT.fullmatch(name)
        for expert in range(experts_of(checkpoint, name) // ranks.ep if match is not None else 1):
            own = name if match is None else f"{match[1]}{expert}{match[3]}"
            yield own, start + expert * _numel(checkpoint, name, ranks)


def _numel(checkpoint: Checkpoint, name: str, ranks: Ranks) -> int:
    """Return how many elements of a parameter a rank has."""
    one = checkpoint.parameters[name]
    return one.numel if cut_for(checkpoint, one, ranks.tp).dimension is None else one.numel // ranks.tp


def _alike(one: Buffer, other: Buffer) -> bool:
    return (one.dtype, one.numel, one.stored, one.sizes) == (other.dtype, other.numel, other.stored, other.sizes)


def _filling(
    checkpoint: Checkpoint, guess: Guess, ranks: Ranks, queue: Sequence[Buffer], done: int, at_front: bool, tied: bool
) -> tuple[int, list[Layout]]:
    """Return how many layers fill the next buffers, and how, for each type; no layouts if none does."""
    for count, names in _candidates(guess.order, done, at_front, tied):
        own = [name for name in names if ranks.has(name)]
        parts = _by_type(checkpoint, own, ranks, tied, fused=guess.order.fused)
        if not own or list(parts) != [one.dtype for one in queue[: len(parts)]]:
            continue
        found = [_layout(members, one, guess) for members, one in zip(parts.values(), queue, strict=False)]
        layouts = [one for one in found if one is not None]
        if len(layouts) == len(found):
            return count, layouts
    return 0, []


def _layout(members: list[Member], buffer: Buffer, guess: Guess) -> Layout | None:
    if buffer.sizes is not None:
        return fit(members, buffer.sizes)
    together = [replace(one, alone=False) for one in members]
    ways = [members] if together == members else [members, together]
    layouts = (lay_out(its, numel) for its in ways for numel in guess.numels)
    return next((one for one in layouts if one.numel == buffer.numel), None)


def _candidates(order: Order, done: int, at_front: bool, tied: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield what the next chunk may have: how many layers, and all names.

    The last one has a copy of the embedding for an output layer, or for layers that predict further tokens.
    """
    front = order.front if at_front else []
    last = [*order.back, *([EMBEDDING] if tied and not at_front and not order.further else [])]
    for count in range(len(order.layers) - done + 1):
        inside = [name for layer in order.layers[done : done + count] for name in layer]
        yield count, [*front, *inside]
        if done + count == len(order.layers):
            yield count, [*(order.front if order.further else front), *inside, *last]


def _by_type(
    checkpoint: Checkpoint, names: Sequence[str], ranks: Ranks, tied: bool, *, fused: bool
) -> dict[str, list[Member]]:
    """Return the parameters of a chunk on the first of its ranks, by type; of experts that are one, the first."""
    found: dict[str, list[Member]] = {}
    for name in names:
        match = EXPERT.fullmatch(name)
        numel = _numel(checkpoint, name, ranks)
        if match is not None:
            here = experts_of(checkpoint, name) // ranks.ep
            if int(match[2]) >= (1 if fused else here):
                continue
            numel *= here if fused else 1
        dtype = checkpoint.parameters[name].dtype
        found.setdefault(dtype, []).append(Member(name, numel, tied and name == EMBEDDING))
    return found


def experts_of(checkpoint: Checkpoint, name: str) -> int:
    """Return how many experts there are where one has this name."""
    match = EXPERT.fullmatch(name)
    count = 0
    while match is not None and f"{match[1]}{count}{match[3]}" in checkpoint.parameters:
        count += 1
    return count


def cut_for(checkpoint: Checkpoint, one: Parameter, ranks: int) -> Cut:
    """Return how a parameter is cut for a number of tensor-parallel ranks.

    Raises UnprovenError: it is not cut evenly; UnsupportedError: no rule is known for its name.
    """
    if ranks == 1:
        return KEPT
    partner = checkpoint.parameters.get(one.name.replace(".linear_fc1.", ".linear_fc2.").replace(".bias", ".weight"))
    gated = None
    if ".linear_fc1." in one.name and partner is not None and len(partner.shape) == 2:
        gated = one.shape[0] == 2 * partner.shape[1]
    cut = cut_of(one.name, one.shape, gated=gated)
    if cut.dimension is not None and one.shape[cut.dimension] % (ranks * cut.parts):
        raise UnprovenError(f"{one.name} is not cut evenly")
    return cut
