"""ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat, padded buffer for each param group, cut over the ranks.

`param_shapes` gives the order of the buffer. What else a file says of it - paddings, slice mappings, the sizes
of its tensors - is held against that, and a disagreement is an error, with one exception: under
`round_robin_gradients` without `parameter_alignment`, DeepSpeed computes the mappings as if nothing had been
reordered, so that they are wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zckpt.codes import DTYPES_DIFFER, SLOT_MISSING, WRONG_RANK
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.shards import OptimizerShard, Shapes
from zckpt.formats.torch_files.tensors import span_of, unresolved
from zckpt.state import MASTER, CutFiles, CutSpans, Extent, Padding, PaddingSpan, Slot, Span
from zckpt.state.partition import FlatShare, flat_padding, flat_partition_numel, flat_shares, flat_starts
from zckpt.torchfile import Tensor

Slots = dict[str, dict[str, Slot]]
"""Slots by parameter name, then by slot name."""

ZERO_WITHOUT_GRADIENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
)
"""State that begins at zero and stays there under zero gradients, which padding has; Adagrad's `sum` may begin at
another value, and Adamax's `exp_inf` grows by eps."""

GROWS_WITH_RMS = frozenset({"exp_avg_sq"})
"""Adafactor, which keeps an `RMS`, adds a constant to squared gradients (Transformers 5.23)."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A param group as its flat buffer holds it.

    Parameters
    ----------
    shapes : dict of str to tuple
        In the order of the buffer.
    pads : sequence of int, or None
        Alignment pad after each parameter, in elements.
    mappings_hold : bool
        Whether `param_slice_mappings` follow the order of the buffer.
    """

    index: int
    shapes: Shapes
    pads: Sequence[int] | None
    mappings_hold: bool

    @property
    def numels(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes.values()]


@dataclass(frozen=True, slots=True)
class Case:
    """How many elements a per-element tensor of one rank and group has: at least `low`, at most `high`.

    `others` are the keys of tensors that are something else.
    """

    member: OptimizerShard
    group: int
    low: int
    high: int
    others: frozenset[str] = frozenset()


def flat_cases(
    group: FlatGroup, members: Sequence[OptimizerShard], others: Sequence[frozenset[str]] | None = None
) -> list[Case]:
    """Return the cases of a flat group: whole partitions in the rigid form, possibly stripped ones in the elastic.

    Parameters
    ----------
    members : sequence of OptimizerShard
        The ranks that share the group, in order.
    others : sequence of frozenset of str, optional
        For each of them the keys of tensors that do not have a value for each element, whatever their size.
    """
    total = flat_starts(group.numels, group.pads)[-1]
    partition = partition_numel(group, members, total)
    needed = [partition - flat_padding(total, partition, position) for position in range(len(members))]
    return [
        Case(member, group.index, need if member.elastic else partition, partition, aside)
        for member, need, aside in zip(members, needed, others or [frozenset()] * len(members), strict=True)
    ]


def element_slots(cases: Iterable[Case]) -> dict[int, set[str]]:
    """Return the optimizer's keys that have a value for each element, by group; others have one for a whole group.

    An optimizer may keep a key in full in some groups, and factored in others; all ranks of a group have it alike.

    Raises
    ------
    LayoutError
        A key has a value for each element on some ranks of a group, and not on others.
    """
    votes: dict[str, dict[int, dict[bool, Case]]] = {}
    groups: dict[int, set[str]] = {}
    for case in cases:
        groups.setdefault(case.group, set())
        for key, tensor in case.member.tensors[case.group].items():
            if key in case.others:
                continue
            fits = len(tensor.shape) == 1 and case.low <= tensor.numel <= case.high
            found = votes.setdefault(key, {}).setdefault(case.group, {})
            if case.high > 1 or not fits:  # one element of one element says nothing
                found.setdefault(fits, case)
    for key, by_group in votes.items():
        elsewhere = {fits for found in by_group.values() for fits in found}
        for group, found in by_group.items():
            if len(found) == 2 or (not found and len(elsewhere) == 2):
                odd = next(case for one in by_group.values() for fits, case in one.items() if not fits)
                raise LayoutError(
                    f"rank {odd.member.rank}, group {odd.group}: {key} does not have a value for each element",
                    path=odd.member.path,
                    expected=f"{odd.high} elements, as elsewhere",
                    found=odd.member.tensors[odd.group][key].shape,
                )
            if False not in (found or elsewhere):
                groups[group].add(key)
    return groups


def cut_group(
    group: FlatGroup, members: Sequence[OptimizerShard], keys: set[str]
) -> tuple[Slots, list[Padding], list[PaddingSpan]]:
    """Return the slots of a group's parameters, the padding of each rank, and where all of it lies, zero or not.

    Parameters
    ----------
    members : sequence of OptimizerShard
        The ranks that share the group, in order.
    keys : set of str
        Per-element state, from `element_slots`.

    Raises
    ------
    LayoutError
        Sizes, paddings or mappings disagree with the shapes.
    """
    starts = flat_starts(group.numels, group.pads)
    partition = partition_numel(group, members, starts[-1])
    names = list(group.shapes)
    present = {key for m in members for key in m.tensors[group.index]} & keys
    paddings: list[Padding] = []
    padding_spans: list[PaddingSpan] = []
    numels, ranks = group.numels, range(len(members))
    assigned = [list(flat_shares(numels, starts, partition, position)) for position in ranks]
    for position, member in enumerate(members):
        _check_mappings(group, member, names, assigned, position)
        _check_paddings(group, member, position, len(members), partition, starts[-1])
        numel = flat_padding(starts[-1], partition, position)
        nbytes = sum(numel * tensor.itemsize for tensor in member.element_tensors(group.index, keys).values())
        own = list(_padding_spans(member, group.index, partition, assigned[position], keys))
        kept = ZERO_WITHOUT_GRADIENTS - (GROWS_WITH_RMS if "RMS" in member.scalars[group.index] else frozenset())
        kept = kept if _moves_padding(member, group.index) else kept | {MASTER}
        zeros = tuple(span for span in own if span.slot in kept)
        paddings.append(Padding(member.rank, group.index, numel, nbytes, zeros))
        padding_spans += own
    slots: Slots = {name: {} for name in names}
    for key in (MASTER, *sorted(present)):
        tensors = [_checked(group.index, key, *one) for one in zip(members, assigned, strict=True)]
        dtype = _dtype(members, group.index, key)
        files = cut_files(tensors, [member.path for member in members])
        for index, (name, shape) in enumerate(group.shapes.items()):
            spans: Sequence[Span] = CutSpans(files, shape, starts[index], partition) if files is not None else ()
            slots[name][key] = Slot(key, dtype, shape, spans)
        for name, found in _spelled_out(group, members, tensors, assigned).items() if files is None else ():
            slots[name][key] = Slot(key, dtype, group.shapes[name], tuple(found))
    return slots, paddings, padding_spans


def _moves_padding(member: OptimizerShard, group: int) -> bool:
    """Tell whether an optimizer may step masters that have no gradient: Lion, whose groups have betas and no eps.

    An update is a sign, and that of zero is 1 in DeepSpeed's CPULion (0.14 to 0.19, `copysign`), by which padding moves
    as far as the learning rate in every step. An elastic file does not say which optimizer it was.
    """
    known = member.groups[group] if group < len(member.groups) else None
    return member.elastic if known is None else "betas" in known and "eps" not in known


def cut_files(tensors: Sequence[Tensor], paths: Sequence[str]) -> CutFiles | None:
    """Return the tensors of all ranks as the files of one line; None where they are not all stored alike.

    Raises
    ------
    UnsupportedError
        The bytes of a tensor alone do not give its values.
    """
    if any(unresolved(tensor, path) for tensor, path in zip(tensors, paths, strict=True)):
        return None
    if len({(t.dtype, t.byteorder) for t in tensors}) != 1 or not all(t.is_contiguous for t in tensors):
        return None
    offsets = tuple(tensor.offset for tensor in tensors)
    return CutFiles(tuple(paths), offsets, tensors[0].dtype, tensors[0].byteorder)


def _spelled_out(
    group: FlatGroup, members: Sequence[OptimizerShard], tensors: Sequence[Tensor], assigned: Sequence[list[FlatShare]]
) -> dict[str, list[Span]]:
    """Return the spans of each parameter, one by one."""
    names, shapes = list(group.shapes), list(group.shapes.values())
    spans: dict[str, list[Span]] = {name: [] for name in names}
    for member, tensor, shares in zip(members, tensors, assigned, strict=True):
        for one in shares:
            extent = Extent.flat(shapes[one.index], one.start, one.numel)
            spans[names[one.index]].append(span_of(tensor, member.path, extent, first=one.position))
    return spans


def partition_numel(group: FlatGroup, members: Sequence[OptimizerShard], total: int) -> int:
    """Return the partition's size, checked against the tensors of every rank.

    Versions before 0.4 padded to the world size only; whichever rule fits the tensors is the one.
    """
    world = len(members)
    found = [member.masters[group.index].numel for member in members]
    for partition in (flat_partition_numel(total, world), -(-total // world)):
        needed = [min(max(total - rank * partition, 0), partition) for rank in range(world)]
        if all(need <= have <= partition for need, have in zip(needed, found, strict=True)):
            return partition
    first = flat_partition_numel(total, world)
    starts = flat_starts(group.numels, group.pads)
    numels = group.numels
    assigned = [list(flat_shares(numels, starts, first, position)) for position in range(world)]
    _check_ranks(group, members, range(world), list(group.shapes), assigned)
    wrong = [m.rank for r, m in enumerate(members) if not min(max(total - r * first, 0), first) <= found[r] <= first]
    raise LayoutError(
        f"group {group.index}: partitions do not fit the parameters",
        path=members[wrong[0]].path if wrong else members[0].path,
        expected=f"{first} elements on each of {world} ranks for {total} in all, padding aside",
        found=f"{found[:16]} on ranks {[m.rank for m in members][:16]}",
        advice="a file belongs to another run or world size",
        ranks=wrong,
    )


def _check_paddings(
    group: FlatGroup, member: OptimizerShard, position: int, world: int, partition: int, total: int
) -> None:
    if member.paddings is None:
        return
    found = member.paddings[group.index] if group.index < len(member.paddings) else None
    spread = flat_padding(total, partition, position)
    on_last = world * partition - total if position == world - 1 else 0
    if found not in (spread, on_last):
        raise LayoutError(
            f"rank {member.rank}, group {group.index}: the recorded padding is not that of its partition",
            path=member.path,
            expected=f"{spread} elements",
            found=found,
            advice="the file belongs to another run or world size",
            ranks=[member.rank],
        )


def _check_mappings(
    group: FlatGroup, member: OptimizerShard, names: list[str], assigned: Sequence[list[FlatShare]], position: int
) -> None:
    """Hold what a rank's file records of its shares against those that it is assigned."""
    if member.mappings is None or not group.mappings_hold:
        return
    recorded = member.mappings[group.index] if group.index < len(member.mappings) else {}
    recorded = {name: address for name, address in recorded.items() if address[1]}
    computed = _addresses(names, assigned[position])
    if recorded == computed:
        return
    _check_ranks(group, [member], [position], names, assigned)
    for name in [*computed, *recorded]:
        if computed.get(name) != recorded.get(name):
            raise LayoutError(
                f"rank {member.rank}: param_shapes and param_slice_mappings disagree on {name}",
                path=member.path,
                expected=f"(start, numel) {computed.get(name)}",
                found=recorded.get(name),
                advice="the file belongs to another run, or its layout is one that zckpt does not know",
                ranks=[member.rank],
                parameters=[name],
            )


def _check_ranks(
    group: FlatGroup,
    members: Sequence[OptimizerShard],
    positions: Sequence[int],
    names: Sequence[str],
    assigned: Sequence[list[FlatShare]],
) -> None:
    """Raise if a file records the shares of another rank than its name says."""
    for position, member in zip(positions, members, strict=True):
        if member.mappings is None or not group.mappings_hold or group.index >= len(member.mappings):
            continue
        recorded = {name: address for name, address in member.mappings[group.index].items() if address[1]}
        computed = _addresses(names, assigned[position])
        others = [rank for rank, one in enumerate(assigned) if recorded and recorded == _addresses(names, one)]
        if others and position not in others:
            raise LayoutError(
                f"is named as the file of rank {member.rank} and holds the share of another",
                path=member.path,
                expected=f"shares of {', '.join(list(computed)[:4]) or 'nothing'}",
                found=f"those of rank {others[0]}: {', '.join(list(recorded)[:4])}",
                advice="give the files of these ranks their own names back",
                code=WRONG_RANK,
                ranks=sorted({member.rank, *others}),
            )


def _addresses(names: Sequence[str], shares: Iterable[FlatShare]) -> dict[str, tuple[int, int]]:
    return {names[f.index]: (f.position, f.numel) for f in shares}


def _checked(group: int, key: str, member: OptimizerShard, shares: Sequence[FlatShare]) -> Tensor:
    """Return a rank's tensor of a slot, which has to hold its shares; where it has none, any tensor."""
    tensor = member.masters[group] if key == MASTER else member.tensors[group].get(key)
    if tensor is None and shares:
        raise LayoutError(
            f"rank {member.rank} has no {key} for group {group}, other ranks have",
            path=member.path,
            code=SLOT_MISSING,
            ranks=[member.rank],
        )
    if tensor is None:
        return member.masters[group]
    if shares and not tensor.is_contiguous:
        raise UnsupportedError(
            f"rank {member.rank}, group {group}: {key} is a view with strides",
            path=member.path,
            expected="a partition, element after element",
            found=f"shape {tensor.shape}, strides {tensor.strides}",
            advice="resume in the program that saved it",
        )
    for one in shares[-1:]:
        if one.position + one.numel > tensor.numel:
            raise LayoutError(
                f"rank {member.rank}, group {group}: {key} is too short",
                path=member.path,
                expected=f"at least {one.position + one.numel} elements",
                found=tensor.numel,
                ranks=[member.rank],
            )
    return tensor


def _dtype(members: Sequence[OptimizerShard], group: int, key: str) -> str:
    dtypes = {
        tensor.dtype: member
        for member in members
        for tensor in [member.masters[group] if key == MASTER else member.tensors[group].get(key)]
        if tensor is not None
    }
    if len(dtypes) > 1:
        raise LayoutError(
            f"group {group}: {key} has several element types over the ranks",
            path=list(dtypes.values())[-1].path,
            found=", ".join(sorted(dtypes)),
            code=DTYPES_DIFFER,
            ranks=sorted(member.rank for member in dtypes.values()),
        )
    return next(iter(dtypes))


def _padding_spans(
    member: OptimizerShard, group: int, partition: int, shares: Sequence[FlatShare], keys: set[str]
) -> Iterator[PaddingSpan]:
    """Yield where the padding of a rank's partition is: at its end and between aligned parameters.

    A stripped tensor may still have it behind its end, in its storage. Of masters, and of state that is zero without
    gradients, it is zero.
    Source: flat buffers of DeepSpeed 0.14.5 to 0.19.8, which flattens with zeros and gives padding zero gradients.
    """
    ends = [0, *(f.position + f.numel for f in shares)]
    gaps = [gap for gap in zip(ends, [*(f.position for f in shares), partition], strict=True) if gap[0] < gap[1]]
    for key, tensor in member.element_tensors(group, keys).items():
        limit = tensor.storage.offset + tensor.storage.nbytes
        for start, end in gaps:
            low = tensor.offset + start * tensor.itemsize
            high = min(tensor.offset + end * tensor.itemsize, limit)
            if low < high:
                yield PaddingSpan(key, member.path, low, high - low)
