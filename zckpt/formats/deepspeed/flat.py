"""ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat, padded buffer for each param group, cut over the ranks.

`param_shapes` gives the order of the buffer. What else a file says of it - paddings, slice mappings, the sizes
of its tensors - is held against that, and a disagreement is an error, with one exception: under
`round_robin_gradients` without `parameter_alignment`, DeepSpeed computes the mappings as if nothing had been
reordered, so that they are wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.codes import DTYPES_DIFFER, SLOT_MISSING, WRONG_RANK
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.shards import OptimizerShard, Shapes
from zckpt.formats.deepspeed.values import quantised_keys
from zckpt.formats.torch_files.tensors import span_of, unresolved
from zckpt.state import MASTER, CutFiles, CutSpans, Extent, Padding, PaddingSpan, Slot, Span
from zckpt.state.partition import flat_padding, flat_partition_numel, flat_shares, flat_starts
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


class Partitions:
    """A flat group as the ranks that share it have it.

    Parameters
    ----------
    group : FlatGroup
    members : sequence of OptimizerShard
        The ranks that share the group, in order.

    Attributes
    ----------
    aside : list of frozenset of str
        For each rank the keys of tensors that do not have a value for each element, whatever their size.

    Raises
    ------
    LayoutError
        The partitions do not fit the shapes.

    Notes
    -----
    Versions before 0.4 padded to the world size only; whichever rule fits the tensors of all ranks is the one.
    """

    def __init__(self, group: FlatGroup, members: Sequence[OptimizerShard]) -> None:
        self.group, self.members, self.index = group, members, group.index
        self.names, self.numels = list(group.shapes), [math.prod(shape) for shape in group.shapes.values()]
        self.starts = flat_starts(self.numels, group.pads)
        self.aside = [quantised_keys(member.tensors[group.index]) for member in members]
        total, world = self.starts[-1], len(members)
        found = [member.masters[group.index].numel for member in members]

        def misfits(partition: int) -> list[int]:
            least = [partition - flat_padding(total, partition, rank) for rank in range(world)]
            return [rank for rank in range(world) if not least[rank] <= found[rank] <= partition]

        first, before = flat_partition_numel(total, world), -(-total // world)
        self.partition = before if misfits(first) and not misfits(before) else first
        self.shares = [list(flat_shares(self.numels, self.starts, self.partition, rank)) for rank in range(world)]
        if wrong := misfits(self.partition):
            for position in range(world):
                self._check_rank(position)
            raise LayoutError(
                f"group {group.index}: partitions do not fit the parameters",
                path=members[wrong[0]].path,
                expected=f"{first} elements on each of {world} ranks for {total} in all, padding aside",
                found=f"{found[:16]} on ranks {[m.rank for m in members][:16]}",
                advice="a file belongs to another run or world size",
                ranks=[members[rank].rank for rank in wrong],
            )

    def padding(self, position: int) -> int:
        """Return how many elements at the end of a rank's partition belong to no parameter."""
        return flat_padding(self.starts[-1], self.partition, position)

    def tensors(self, key: str) -> list[Tensor | None]:
        """Return what each rank has of a slot."""
        return [m.masters[self.index] if key == MASTER else m.tensors[self.index].get(key) for m in self.members]

    def cases(self) -> Iterator[Case]:
        """Yield the cases of the ranks: whole partitions in the rigid form, possibly stripped ones in the elastic."""
        for position, (member, others) in enumerate(zip(self.members, self.aside, strict=True)):
            least = self.partition - (self.padding(position) if member.elastic else 0)
            yield Case(member, self.index, least, self.partition, others)

    def cut(self, keys: set[str]) -> tuple[Slots, list[Padding], list[PaddingSpan]]:
        """Return the slots of the parameters, the padding of each rank, and where all of it lies, zero or not.

        Parameters
        ----------
        keys : set of str
            Per-element state, from `element_slots`.

        Raises
        ------
        LayoutError
            Sizes, paddings or mappings disagree with the shapes.
        """
        paddings: list[Padding] = []
        padded: list[PaddingSpan] = []
        for position, member in enumerate(self.members):
            self._check_records(position)
            tensors, numel = member.element_tensors(self.index, keys), self.padding(position)
            own = list(self._padding_spans(position, tensors))
            zeros = ZERO_WITHOUT_GRADIENTS
            if "RMS" in member.scalars[self.index]:
                zeros -= GROWS_WITH_RMS
            # Lion, whose groups have betas and no eps, may step masters that have no gradient: an update is a sign,
            # and that of zero is 1 in DeepSpeed's CPULion (0.14 to 0.19, `copysign`), by which padding moves as far as
            # the learning rate in every step. An elastic file does not say which optimizer it was.
            known = member.groups[self.index] if self.index < len(member.groups) else None
            if not (member.elastic if known is None else "betas" in known and "eps" not in known):
                zeros |= {MASTER}
            nbytes = numel * sum(tensor.itemsize for tensor in tensors.values())
            of_zero = tuple(span for span in own if span.slot in zeros)
            paddings.append(Padding(member.rank, self.index, numel, nbytes, of_zero))
            padded += own
        slots: Slots = {name: {} for name in self.names}
        for key in (MASTER, *sorted(keys & {key for member in self.members for key in member.tensors[self.index]})):
            held, dtype = self._checked(key)
            files = cut_files(held, [member.path for member in self.members])
            spelled = self._spelled_out(held) if files is None else {}
            for name, shape, start in zip(self.names, self.group.shapes.values(), self.starts, strict=False):
                one_by_one = tuple(spelled.get(name, ()))
                spans = CutSpans(files, shape, start, self.partition) if files is not None else one_by_one
                slots[name][key] = Slot(key, dtype, shape, spans)
        return slots, paddings, padded

    def _spelled_out(self, tensors: Sequence[Tensor]) -> dict[str, list[Span]]:
        """Return the spans of each parameter, one by one."""
        spans: dict[str, list[Span]] = {name: [] for name in self.names}
        for member, tensor, shares in zip(self.members, tensors, self.shares, strict=True):
            for one in shares:
                name = self.names[one.index]
                extent = Extent.flat(self.group.shapes[name], one.start, one.numel)
                spans[name].append(span_of(tensor, member.path, extent, first=one.position))
        return spans

    def _check_records(self, position: int) -> None:
        """Hold what a rank's file records of its padding and its shares against those that it is assigned."""
        member, recorded, computed = self.members[position], self._recorded(position), self._assigned(position)
        if recorded is not None and recorded != computed:
            self._check_rank(position)
            name = next(name for name in [*computed, *recorded] if computed.get(name) != recorded.get(name))
            raise LayoutError(
                f"rank {member.rank}: param_shapes and param_slice_mappings disagree on {name}",
                path=member.path,
                expected=f"(start, numel) {computed.get(name)}",
                found=recorded.get(name),
                advice="the file belongs to another run, or its layout is one that zckpt does not know",
                ranks=[member.rank],
                parameters=[name],
            )
        if member.paddings is None:
            return
        found = member.paddings[self.index] if self.index < len(member.paddings) else None
        world, spread = len(self.members), self.padding(position)
        on_last = world * self.partition - self.starts[-1] if position == world - 1 else 0
        if found not in (spread, on_last):
            raise LayoutError(
                f"rank {member.rank}, group {self.index}: the recorded padding is not that of its partition",
                path=member.path,
                expected=f"{spread} elements",
                found=found,
                advice="the file belongs to another run or world size",
                ranks=[member.rank],
            )

    def _recorded(self, position: int) -> dict[str, tuple[int, int]] | None:
        """Return what a rank's file records of its shares; None where it records none, or wrong ones."""
        mappings = self.members[position].mappings
        if mappings is None or not self.group.mappings_hold:
            return None
        held = mappings[self.index] if self.index < len(mappings) else {}
        return {name: address for name, address in held.items() if address[1]}

    def _assigned(self, position: int) -> dict[str, tuple[int, int]]:
        return {self.names[one.index]: (one.position, one.numel) for one in self.shares[position]}

    def _check_rank(self, position: int) -> None:
        """Raise if a file records the shares of another rank than its name says."""
        member, recorded = self.members[position], self._recorded(position)
        others = [rank for rank in range(len(self.members)) if recorded and recorded == self._assigned(rank)]
        if others and position not in others:
            raise LayoutError(
                f"is named as the file of rank {member.rank} and holds the share of another",
                path=member.path,
                expected=f"shares of {', '.join(list(self._assigned(position))[:4]) or 'nothing'}",
                found=f"those of rank {others[0]}: {', '.join(list(recorded or ())[:4])}",
                advice="give the files of these ranks their own names back",
                code=WRONG_RANK,
                ranks=sorted({member.rank, *others}),
            )

    def _checked(self, key: str) -> tuple[list[Tensor], str]:
        """Return each rank's tensor of a slot, which has to hold its shares, or any where it has none; and its type."""
        found: list[Tensor] = []
        dtypes: dict[str, OptimizerShard] = {}
        for member, tensor, shares in zip(self.members, self.tensors(key), self.shares, strict=True):
            found.append(member.masters[self.index] if tensor is None else tensor)
            if tensor is not None:
                dtypes[tensor.dtype] = member
            whose = f"rank {member.rank}, group {self.index}: {key}"
            end = shares[-1].position + shares[-1].numel if shares else 0
            if tensor is None and shares:
                raise LayoutError(
                    f"rank {member.rank} has no {key} for group {self.index}, other ranks have",
                    path=member.path,
                    code=SLOT_MISSING,
                    ranks=[member.rank],
                )
            if shares and not found[-1].is_contiguous:
                raise UnsupportedError(
                    f"{whose} is a view with strides",
                    path=member.path,
                    expected="a partition, element after element",
                    found=f"shape {found[-1].shape}, strides {found[-1].strides}",
                    advice="resume in the program that saved it",
                )
            if end > found[-1].numel:
                raise LayoutError(
                    f"{whose} is too short",
                    path=member.path,
                    expected=f"at least {end} elements",
                    found=found[-1].numel,
                    ranks=[member.rank],
                )
        if len(dtypes) > 1:
            raise LayoutError(
                f"group {self.index}: {key} has several element types over the ranks",
                path=list(dtypes.values())[-1].path,
                found=", ".join(sorted(dtypes)),
                code=DTYPES_DIFFER,
                ranks=sorted(member.rank for member in dtypes.values()),
            )
        return found, next(iter(dtypes))

    def _padding_spans(self, position: int, tensors: Mapping[str, Tensor]) -> Iterator[PaddingSpan]:
        """Yield where the padding of a rank's partition is: at its end and between aligned parameters.

        A stripped tensor may still have it behind its end, in its storage. Of masters, and of state that is zero
        without gradients, it is zero.
        Source: flat buffers of DeepSpeed 0.14.5 to 0.19.8, which flattens with zeros and gives padding zero gradients.
        """
        shares = self.shares[position]
        ends = [0, *(one.position + one.numel for one in shares)]
        gaps = [gap for gap in zip(ends, [*(one.position for one in shares), self.partition], strict=True)
                if gap[0] < gap[1]]  # fmt: skip
        for key, tensor in tensors.items():
            limit = tensor.storage.offset + tensor.storage.nbytes
            for start, end in gaps:
                low = tensor.offset + start * tensor.itemsize
                high = min(tensor.offset + end * tensor.itemsize, limit)
                if low < high:
                    yield PaddingSpan(key, self.members[position].path, low, high - low)


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
