"""The distributed optimizer's flat buffers in `torch_dist` as slots of parameters, where every value proves it.

[chained_N.]optimizer.distributed.dp_group_idx_<g>...
...gbuf_idx_<b>.dtype_(torch.bfloat16, torch.float32).bucket_idx_<k>.<slot>     a bucket, up to 0.13 with its padding
...per_bucket_numel_unpadded/shard_0_1     [[{(dtype, dtype): [n, ...]}, ...]]: how much of each bucket is none
...param_state/shard_0_1                   [{"buckets_coalesced": True, ...}]: all buckets of a buffer as one line,
                                           without padding between them (`dp_zero_gather_scatter`): see `gathered`
...optimizer/shard_0_1                     [{"param_groups": [...]}]: hyperparameters and step
...grad_scaler/shard_0_1                   [{"scale": ..., ...}]: of fp16

Group g is the model-parallel rank: tensor-parallel ranks of stage 0, of stage 1, ...; among experts those of each
expert-parallel rank in between, or (up to megatron-core 0.9) those of all stages for each expert-parallel rank. Buffer
b is of a chunk of the model and a type. Which layers a chunk has follows from the sizes of its buckets: no two numbers
of layers fill them. Where buckets are written as one, where they ended is another thing to be guessed.

A reading is a guess, laid out as a target of such ranks would be (`stages`), and has to prove itself: every element of
every master, rounded, is that of its weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from zckpt.errors import SourceError, UnsupportedError, ZckptError
from zckpt.formats.account.trees import text_of
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.megatron.buckets import (
    PARAM,
    Buffer,
    Layout,
    Line,
    Member,
    bucket_numels,
    gathered,
    gathered_rules,
    unproven,
)
from zckpt.formats.megatron.cut import cuts_of
from zckpt.formats.megatron.names import TIED, is_expert
from zckpt.formats.megatron.objects import OPTIMIZER, Arguments, Common
from zckpt.formats.megatron.optimizer import HYPERPARAMETERS, SCALER, loss_scale_of
from zckpt.formats.megatron.stages import FURTHER, Chunks, Dealt, Sliced, expert_counts, on_expert_rank, orders
from zckpt.formats.torch_files.tensors import TensorItem, carried
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Duplicate, PaddingSpan, Slot, by_key, dict_of, is_floating, size_of
from zckpt.state.inventory import ANY, CARRIED, COPY, IMPLIED, LEFT_OUT, REST, UNNAMED_STATE, Rule
from zckpt.state.inventory import STATE as AS_STATE
from zckpt.state.views import concat
from zckpt.torchfile import has_tensors

_GROUP = r"(?:chained_([0-9]{1,18})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,18})\."
_BUCKET = re.compile(
    _GROUP + r"gbuf_idx_([0-9]{1,18})\.dtype_\((?:torch\.)?(\w+), *(?:torch\.)?\w+\)\.bucket_idx_([0-9]{1,18})\.(.+)"
)
_OBJECT = re.compile(_GROUP + r"(\w+)/shard_.*")

GROUPS, STATE, SIZES, UNPADDED_SIZES = (
    "optimizer", "param_state", "per_bucket_numel", "per_bucket_numel_unpadded"
)  # fmt: skip

ADVICE = "save it as fully_reshardable with the program that wrote it"

Place = tuple[int, int]
"""An optimizer of a chain, and a model-parallel rank."""

Buffers = dict[int, dict[int, dict[int, Buffer]]]
"""By optimizer of a chain, model-parallel rank, and number."""


class Objects:
    """The objects beside buffers, by what they are and where."""

    def __init__(self, objects: Mapping[str, ObjectItem]) -> None:
        self._every: dict[str, dict[Place, ObjectItem]] = {}
        for key, one in objects.items():
            match = _OBJECT.fullmatch(key)
            if match is not None:
                self._every.setdefault(match[3], {})[int(match[1] or 0), int(match[2])] = one

    def of(self, kind: str) -> list[tuple[Place, ObjectItem]]:
        """Return those of a kind, in order."""
        return sorted(self._every.get(kind, {}).items(), key=lambda one: one[0])

    def node(self, kind: str, place: Place) -> object:
        """Return the object of a rank's only shard; None where it is not there."""
        one = self._every.get(kind, {}).get(place)
        return one.node[0] if one is not None and isinstance(one.node, list) and len(one.node) == 1 else None


@immutable
class Guess:
    """What is nowhere said: the parameters' order, how groups are numbered, and where buckets ended.

    `fused`: whether a layer's experts are one parameter; `experts_outside`: whether groups of experts are numbered by
    expert-parallel rank first; `numels`: at which sizes buckets may end, the likeliest first.
    """

    order: list[str]
    fused: bool
    experts_outside: bool
    numels: tuple[int | None, ...]


@mutable
class Reading:
    """What a guess makes of the buffers: the slots of every parameter, the copies that there are of them, padding."""

    slots: dict[str, dict[str, Slot]]
    copies: list[Duplicate]
    padding: list[list[PaddingSpan]]


def with_flat(
    checkpoint: Checkpoint, items: Mapping[str, TensorItem], objects: Mapping[str, ObjectItem], common: Common
) -> Common:
    """Give a checkpoint what its flat buffers hold; return `common.pt` with the param groups that are beside them.

    Where it is not proven what is where, nothing is taken, and a warning says why.
    """
    known = Objects(objects)
    if not items and not known.of(STATE):
        return common
    try:
        firsts = [known.node(GROUPS, place) for place, _ in known.of(GROUPS) if place[1] == 0]  # of each of a chain
        if not firsts or not all(isinstance(one, dict) and not has_tensors(one) for one in firsts):
            raise UnsupportedError("there are no param groups with them")
        reading = _proven(checkpoint, _buffers(items, known), common.arguments)
    except SourceError as error:
        checkpoint.warnings.append(
            f"the optimizer's state is in {len(items) + len(known.of(STATE))} flat buffers without names, which "
            f"could not be read: {error.message} ({error.advice or ADVICE})"
        )
        keys = (*items, *(key for key in objects if _OBJECT.fullmatch(key)))
        unread = [Rule((text_of(key), REST), LEFT_OUT, UNNAMED_STATE, tensors=True) for key in keys]
        for file in checkpoint.files:
            file.rules = (*unread, *file.rules)
        return common
    for name, its in reading.slots.items():
        checkpoint.parameters[name].slots.update(its)
        checkpoint.parameters[name].frozen = False
    checkpoint.duplicates += reading.copies
    checkpoint.padding_spans += reading.padding
    for place, one in known.of(SCALER)[:1]:  # which all ranks have alike
        node = known.node(SCALER, place) or one.node
        checkpoint.optimizer_metadata[SCALER] = carried(one.file, node)
        checkpoint.loss_scale = loss_scale_of(node, one.file.path)
    _explain(checkpoint, known)
    around = dict_of(common.content.get(OPTIMIZER))
    chained = {chain: {**dict_of(around.get(chain)), OPTIMIZER: first} for chain, first in enumerate(firsts)}
    optimizer = {**around, OPTIMIZER: firsts[0]} if len(firsts) == 1 else chained
    return Common(common.file, {**common.content, OPTIMIZER: optimizer})


def _explain(checkpoint: Checkpoint, objects: Objects) -> None:
    """Say what the objects beside buffers are, in the files that hold them."""
    files = {file.path: file for file in checkpoint.files}
    for kind, about in (
        (GROUPS, HYPERPARAMETERS), (SCALER, SCALER), (STATE, ""), (SIZES, "sizes of buckets"),
        (UNPADDED_SIZES, "sizes of buckets"),
    ):  # fmt: skip
        for at, (place, one) in enumerate(objects.of(kind)):
            text, file = text_of(one.key), files[one.file.path]
            if kind == STATE:
                rules = gathered_rules(text, ANY)
            elif kind == GROUPS and place[1] == 0:
                rules = [Rule((text, ANY, "param_groups", ANY, ANY, REST), AS_STATE, about)]
            elif kind in (SIZES, UNPADDED_SIZES) or (kind == SCALER and at == 0):
                rules = [Rule((text, REST), CARRIED if kind == SCALER else IMPLIED, about)]
            else:
                rules = [Rule((text, REST), COPY, f"{about} of another rank", tensors=kind == SCALER)]
            file.rules = (*file.rules, *rules)


# --- the buffers, in whatever pieces the files have them


def _buffers(items: Mapping[str, TensorItem], objects: Objects) -> Buffers:
    """Return the buffers of a directory.

    Raises UnsupportedError: a key is of another form, or the tensors of a bucket are of different sizes.
    """
    buckets: dict[tuple[int, int, int], dict[int, tuple[str, dict[str, TensorItem]]]] = {}
    for key, item in items.items():
        match = _BUCKET.fullmatch(key)
        if match is None or len(item.shape) != 1:
            raise UnsupportedError(f"{key[:120]} is not a bucket")
        if match[6] == PARAM and not is_floating(item.dtype):
            raise UnsupportedError("masters are lower halves alone (store_param_remainders), which fit any weights",
                                   advice="only its own program goes on with it")  # fmt: skip
        own = buckets.setdefault((int(match[1] or 0), int(match[2]), int(match[3])), {})
        own.setdefault(int(match[5]), (match[4], {}))[1][MASTER if match[6] == PARAM else match[6]] = item
    found: Buffers = {}
    for (chain, group, number), its in buckets.items():
        ordered = [its[at] for at in sorted(its)]
        dtype, first = ordered[0]
        numels = [{item.shape[0] for item in tensors.values()} for _, tensors in ordered]
        alike = all(kind == dtype and tensors.keys() == first.keys() for kind, tensors in ordered)
        if sorted(its) != list(range(len(its))) or not alike or any(len(one) != 1 for one in numels):
            raise UnsupportedError("the tensors of a buffer's buckets differ in kind or size")
        stored = unpadded = tuple(one.pop() for one in numels)
        node = objects.node(UNPADDED_SIZES, (chain, group))
        said = node[number] if isinstance(node, list) and number < len(node) else None
        sizes = [one for one in dict_of(said).values() if isinstance(one, list)]
        if len(sizes) == 1 and all(type(n) is int and n > 0 for n in sizes[0]):
            unpadded = tuple(sizes[0])
        if len(unpadded) != len(stored) or any(size > whole for size, whole in zip(unpadded, stored, strict=False)):
            raise UnsupportedError("the sizes of buckets do not match their tensors")
        slots = {slot: Line(concat([tensors[slot].slot(slot) for _, tensors in ordered], 0)) for slot in first}
        buffer = Buffer(dtype, slots, sum(stored), stored, unpadded)
        found.setdefault(chain, {}).setdefault(group, {})[number] = buffer
    for (chain, group), one in objects.of(STATE):
        groups = found.setdefault(chain, {})
        if group in groups:
            raise UnsupportedError(f"{one.key[:120]} is mixed with buckets")
        groups[group] = dict(enumerate(gathered(objects.node(STATE, (chain, group)), one.file.path)))
    return found


# --- guesses, and what proves one


def _proven(checkpoint: Checkpoint, buffers: Buffers, arguments: Arguments) -> Reading:
    """Return the only reading that the values prove. Raises UnsupportedError: there is none, or more than one."""
    why = "a name of the model is not known"
    proven: list[Reading] = []
    is_whole = any(one.sizes is None for groups in buffers.values() for its in groups.values() for one in its.values())
    sizes = tuple(bucket_numels(arguments) if is_whole else [None])
    ends = [sizes, sizes[::-1]] if len(sizes) > 1 else [sizes]
    numberings = (False, True) if len(buffers) > 1 else (False,)
    for (order, fused), outside, numels in product(orders(checkpoint.parameters), numberings, ends):
        try:
            reading = _read(checkpoint, Guess(order, fused, outside, numels), buffers, arguments)
        except ZckptError as error:
            why = error.message
            continue
        if all(reading.slots != one.slots for one in proven):
            proven.append(reading)
    if len(proven) != 1:
        raise UnsupportedError("the values fit more than one order" if proven else why)
    return proven[0]


def _read(checkpoint: Checkpoint, guess: Guess, buffers: Buffers, arguments: Arguments) -> Reading:
    """Return what a guess makes of the buffers, if every value of every master proves it."""
    found = Reading({}, [], [])
    for chain in sorted(buffers):
        _Chain(checkpoint, guess, buffers, chain, arguments).read(found)
    slots = found.slots
    if not slots or any(its.keys() != next(iter(slots.values())).keys() for its in slots.values()):
        raise UnsupportedError("buffers have different slots")
    masters = {name: its[MASTER] for name, its in slots.items() if MASTER in its}
    wrong = unproven(masters, {name: checkpoint.parameters[name].slots[WEIGHT] for name in masters})
    if wrong is not None or len(masters) != len(slots):
        raise UnsupportedError(f"the master {wrong.removeprefix('that ')}" if wrong else "there are no masters")
    return found


class _Chain:
    """An optimizer of a chain, of which the last is that of experts, as a guess has it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        guess: Guess,
        buffers: Buffers,
        chain: int,
        arguments: Arguments,
    ) -> None:
        self._guess, self._groups, self._parameters = guess, buffers[chain], checkpoint.parameters
        self._of_experts = chain == max(buffers) if len(buffers) > 1 else None  # None: of all parameters
        names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
        tp, ep, expert_tp = (size_of(arguments, name) for name in names)
        self._tp = self._ep = 1
        if len(self._groups) > 1:
            if tp is None:
                raise UnsupportedError("tensor_model_parallel_size is not in the arguments")
            self._tp, self._ep = (expert_tp or tp, ep or 1) if self._of_experts else (tp, 1)
        self._stages, odd = divmod(len(self._groups), self._tp * self._ep)
        if odd or sorted(self._groups) != list(range(len(self._groups))):
            raise UnsupportedError(f"{len(self._groups)} groups of ranks do not fit {self._tp} tensor-parallel "
                "ranks")  # fmt: skip
        own = [name for name in guess.order if self._has(name)]
        shapes = {name: self._parameters[name].shape for name in own}
        self._sliced = Sliced(shapes, cuts_of(shapes, self._tp), self._tp, {})
        self._counts = expert_counts(own, self._ep)
        is_tied = self._stages > 1 and not any(name in TIED or FURTHER.fullmatch(name) for name in guess.order)
        self._chunks = Chunks(guess.order, {own: copy for copy, own in TIED.items()} if is_tied else {})

    def _has(self, name: str) -> bool:
        return self._of_experts is None or self._of_experts == is_expert(name)

    def _group(self, stage: int, expert: int, tensor: int) -> Mapping[int, Buffer]:
        first = expert * self._stages + stage if self._guess.experts_outside else stage * self._ep + expert
        return self._groups[first * self._tp + tensor]

    def _on_rank(self, chunk: Sequence[Dealt], expert: int) -> list[Dealt]:
        own = [one for one in chunk if self._has(one.name)]
        return on_expert_rank(own, self._counts, expert, self._ep, fused=self._guess.fused)

    def read(self, found: Reading) -> None:
        """Add what the buffers of all stages are: each chunk has as many layers as fill it.

        Raises UnsupportedError: the parameters do not fill the buffers in this way.
        """
        queues = [sorted(self._group(stage, 0, 0)) for stage in range(self._stages)]
        done, at_front = 0, True
        while any(queues):
            for stage, queue in enumerate(queues):
                if not queue:
                    raise UnsupportedError("stages have different numbers of buffers")
                lead = self._group(stage, 0, 0)
                taken, chunk, layouts = self._filling([lead[n] for n in queue], done, first=at_front)
                if not layouts:
                    raise UnsupportedError(
                        f"no number of layers, all of them trained, fills the buckets of stage {stage}"
                    )
                done, at_front = done + taken, False
                for layout in layouts:
                    self._take(found, chunk, layout, stage, queue.pop(0))
        behind = self._chunks.of(done, self._chunks.count, first=False, last=False)
        if any(self._has(one.name) for one in behind):
            raise UnsupportedError(f"the buffers cover {done} of {self._chunks.count} layers")

    def _filling(self, queue: Sequence[Buffer], done: int, *, first: bool) -> tuple[int, list[Dealt], list[Layout]]:
        """Return how many layers fill the next buffers, with what a chunk of them has, and how, for each type."""
        for end in range(done, self._chunks.count + 1):
            for last in (False, True) if end == self._chunks.count else (False,):
                chunk = self._chunks.of(done, end, first=first, last=last)
                by_type = by_key(
                    (self._parameters[one.name].dtype, Member(one.local, prod(self._sliced.shape(one)), one.shared))
                    for one in self._on_rank(chunk, 0)
                )
                if not by_type or list(by_type) != [one.dtype for one in queue[: len(by_type)]]:
                    continue
                ways = zip(by_type.values(), queue, strict=False)
                layouts = [next(one.layouts(its, self._guess.numels), None) for its, one in ways]
                fitting = [one for one in layouts if one is not None]
                if len(fitting) == len(layouts):
                    return end - done, chunk, fitting
        return 0, [], []

    def _take(self, found: Reading, chunk: Sequence[Dealt], layout: Layout, stage: int, number: int) -> None:
        """Add what the buffers of a number are on all ranks that share a stage."""
        lead = self._group(stage, 0, 0)[number]
        starts = layout.starts(lead.stored)
        for expert in range(self._ep):
            buffers = [self._group(stage, expert, tensor).get(number) for tensor in range(self._tp)]
            alike = [one for one in buffers if one is not None and _kind(one) == _kind(lead)]
            if len(alike) != len(buffers):
                raise UnsupportedError("ranks have buckets of different sizes")
            own = {one.local: one for one in self._on_rank(chunk, expert)}
            here = [(own[local], start, self._sliced.shape(own[local])) for local, start in starts.items()]
            for one, start, shape in here:
                for slot in lead.slots:
                    ranks = [self._sliced.slices(one, buffer.slots[slot].part(start, shape)) for buffer in alike]
                    for name, *parts in zip(one.names, *ranks, strict=True):
                        self._add(found, name, slot, parts)
            ranges = [(start, prod(shape)) for _, start, shape in here]
            found.padding += [list(buffer.padding(ranges)) for buffer in alike]

    def _add(self, found: Reading, name: str, slot: str, parts: Sequence[Slot]) -> None:
        """Add what tensor-parallel ranks have of a slot of a parameter."""
        cut = self._sliced.cuts[name]
        whole = cut.joined(name, parts)
        original = found.slots.setdefault(name, {}).setdefault(slot, whole)
        found.copies += cut.copies("parameter", name, whole, parts, original)


def _kind(one: Buffer) -> tuple[object, ...]:
    return one.dtype, one.numel, one.stored, one.sizes
