"""ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat, padded buffer for each param group, cut over the ranks.

`param_shapes` gives the order of the buffer; where a file has none, it follows from the slice mappings. What else a
file says of it - paddings, slice mappings, the sizes of its tensors - is held against that, and a disagreement is an
error, with one exception: under `round_robin_gradients`, DeepSpeed computes the mappings of a group as if nothing had
been reordered, so that they are wrong there, unless `parameter_alignment` has padded a parameter of that group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from zckpt.codes import DTYPES_DIFFER, SLOT_MISSING, WRONG_RANK
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.axes.auto_ep import check_shapes, of_all
from zckpt.formats.deepspeed.axes.expert_ranks import Spread
from zckpt.formats.deepspeed.axes.experts import experts_per_rank, global_name, is_expert
from zckpt.formats.deepspeed.layouts.layout import Layout, optimizer_order
from zckpt.formats.deepspeed.rare.muon import MOMENTUM, is_whole, keeps_whole_matrices, whole_slots
from zckpt.formats.deepspeed.shards import Addresses, ModelShard, OptimizerShard, Shapes, Weights, mapped_numels
from zckpt.formats.deepspeed.values import Case, Line, Slots, element_slots, quantised_keys
from zckpt.formats.lost import is_lost
from zckpt.state import MASTER, Duplicate, Padding, PaddingSpan, Parameter, Shape, Slot, Topology
from zckpt.state.boxes import without
from zckpt.state.partition import flat_padding, flat_partition_numel, flat_shares, flat_starts
from zckpt.torchfile import Tensor

ZERO_WITHOUT_GRADIENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
)
"""State that begins at zero and stays there under zero gradients, which padding has; Adagrad's `sum` may begin at
another value, and Adamax's `exp_inf` grows by eps."""

GROWS_WITH_RMS = frozenset({"exp_avg_sq"})
"""Adafactor, which keeps an `RMS`, adds a constant to squared gradients (Transformers 5.23)."""


class Partitions:
    """A flat group as the ranks that share it have it.

    Parameters
    ----------
    index : int
        The group's.
    shapes : dict of str to tuple
        In the order of the buffer.
    members : sequence of OptimizerShard
        The ranks that share the group, in order.
    reorders : bool
        Whether the buffer has an order of its own, which `param_slice_mappings` know only of a group that is padded.

    Attributes
    ----------
    aside : list of frozenset of str
        For each rank the keys of tensors that do not have a value for each element, whatever their size.
    whole : dict of str to Slot
        Momenta of whole matrices, of which ranks have copies; see `muon`.

    Raises
    ------
    LayoutError
        The partitions do not fit the shapes.

    Notes
    -----
    Versions before 0.4 padded to the world size only; whichever rule fits the tensors of all ranks is the one.
    """

    def __init__(self, index: int, shapes: Shapes, members: Sequence[OptimizerShard], *, reorders: bool) -> None:
        self.index, self.shapes, self.members = index, shapes, members
        self.names, self.numels = list(shapes), [math.prod(shape) for shape in shapes.values()]
        pads = members[0].alignment_paddings
        self.starts = flat_starts(self.numels, pads[index] if pads else None)
        self.mappings_hold = not reorders or bool(pads and any(pads[index]))
        self.aside = [quantised_keys(member.tensors[index]) for member in members]
        self.whole: dict[str, Slot] = {}
        self.copies: list[Duplicate] = []
        total, world = self.starts[-1], len(members)
        found = [member.masters[index].numel for member in members]

        def misfits(partition: int) -> list[int]:
            least = [partition - flat_padding(total, partition, rank) for rank in range(world)]
            return [n for n in range(world) if not (least[n] <= found[n] <= partition or is_lost(members[n].path))]

        first, before = flat_partition_numel(total, world), -(-total // world)
        self.partition = before if misfits(first) and not misfits(before) else first
        for member in members:  # a lost file stands for whole partitions, where another's may be stripped
            if is_lost(member.path):
                own, numel = member.tensors[index], member.masters[index].numel
                member.masters[index] = replace(member.masters[index], shape=(self.partition,))
                own |= {key: replace(t, shape=(self.partition,)) for key, t in own.items() if t.shape == (numel,)}
        self.shares = [list(flat_shares(self.numels, self.starts, self.partition, rank)) for rank in range(world)]
        if wrong := misfits(self.partition):
            for position in range(world):
                self._check_rank(position)
            raise LayoutError(
                f"group {index}: partitions do not match the parameters",
                path=members[wrong[0]].path,
                expected=f"{first} elements on each of {world} ranks, for {total} in all without padding",
                found=f"{found[:16]} on ranks {[m.rank for m in members][:16]}",
                advice="a file may belong to another run or world size",
                ranks=[members[rank].rank for rank in wrong],
            )

    def padding(self, position: int) -> int:
        """Return how many elements at the end of a rank's partition belong to no parameter."""
        return flat_padding(self.starts[-1], self.partition, position)

    def tensors(self, key: str) -> list[Tensor | None]:
        """Return what each rank has of a slot."""
        return [member.tensor(self.index, key) for member in self.members]

    def cases(self) -> Iterator[Case]:
        """Yield the cases of the ranks: whole partitions in the rigid form, possibly stripped ones in the elastic."""
        for position, (member, others) in enumerate(zip(self.members, self.aside, strict=True)):
            least = self.partition - (self.padding(position) if member.elastic else 0)
            yield Case(member, self.index, least, self.partition, others)

    def cut(self, keys: set[str], own: Collection[str]) -> tuple[Slots, list[Padding], list[PaddingSpan]]:
        """Return the slots of the parameters, the padding of each rank, and where all of it lies, zero or not.

        `keys`: per-element state, from `element_slots`; `own`: the paths of files whose padding is asked for. Raises
        LayoutError: sizes, paddings or mappings disagree with the shapes.
        """
        paddings: list[Padding] = []
        padded: list[PaddingSpan] = []
        for position, member in enumerate(self.members):
            self._check_records(position)
            if member.path not in own:
                continue
            tensors, numel = member.element_tensors(self.index, keys), self.padding(position)
            # Padding is at the end and between aligned parameters; a stripped tensor may still have it behind its end,
            # in its storage. Of masters, and of state that is zero without gradients, it is zero: DeepSpeed 0.14.5 to
            # 0.19.8 flattens with zeros and gives padding zero gradients.
            found: list[PaddingSpan] = []
            taken = [(one.position, one.position + one.numel) for one in self.shares[position]]
            for key, tensor in tensors.items():
                limit = tensor.storage.offset + tensor.storage.nbytes
                for start, end in without([(0, self.partition)], taken):
                    low = tensor.offset + start * tensor.itemsize
                    high = min(tensor.offset + end * tensor.itemsize, limit)
                    if low < high:
                        found.append(PaddingSpan(key, member.path, low, high - low))
            zeros = ZERO_WITHOUT_GRADIENTS
            if "RMS" in member.scalars[self.index]:
                zeros -= GROWS_WITH_RMS
            # Lion, whose groups have betas and no eps, may step masters that have no gradient: an update is a sign,
            # and that of zero is 1 in DeepSpeed's CPULion (0.14 to 0.19, `copysign`), by which padding moves as far as
            # the learning rate in every step. An elastic file does not say which optimizer it was.
            known = member.group(self.index)
            if not ("betas" in known and "eps" not in known if known else member.elastic):
                zeros |= {MASTER}
            nbytes = numel * sum(tensor.itemsize for tensor in tensors.values())
            of_zero = tuple(span for span in found if span.slot in zeros)
            paddings.append(Padding(member.rank, self.index, numel, nbytes, of_zero, self.partition))
            padded += found
        slots: Slots = {name: {} for name in self.names}
        for key in (MASTER, *sorted(keys & {key for member in self.members for key in member.tensors[self.index]})):
            held, dtype = self._checked(key)
            line = Line(held, [member.path for member in self.members])
            for name, shape, start in zip(self.names, self.shapes.values(), self.starts, strict=False):
                slots[name][key] = Slot(key, dtype, shape, line.spans(shape, start, self.partition))
        return slots, paddings, padded

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
                advice="the file may belong to another run, or have a layout that zckpt does not know",
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
                f"rank {member.rank}, group {self.index}: the recorded padding does not match its partition",
                path=member.path,
                expected=f"{spread} elements",
                found=found,
                advice="the file may belong to another run or world size",
                ranks=[member.rank],
            )

    def _recorded(self, position: int) -> Addresses | None:
        """Return what a rank's file records of its shares; None where it records none, or wrong ones."""
        member = self.members[position]
        if member.mappings is None or not self.mappings_hold:
            return None
        return {name: address for name, address in member.mapping(self.index).items() if address[1]}

    def _assigned(self, position: int) -> Addresses:
        return {self.names[one.index]: (one.position, one.numel) for one in self.shares[position]}

    def _check_rank(self, position: int) -> None:
        """Raise if a file records the shares of another rank than its name says."""
        member, recorded = self.members[position], self._recorded(position)
        others = [rank for rank in range(len(self.members)) if recorded and recorded == self._assigned(rank)]
        if others and position not in others:
            raise LayoutError(
                f"is named as the file of rank {member.rank}, but holds another rank's share",
                path=member.path,
                expected=f"shares of {', '.join(list(self._assigned(position))[:4]) or 'nothing'}",
                found=f"those of rank {others[0]}: {', '.join(list(recorded or ())[:4])}",
                advice="rename the files of these ranks correctly",
                code=WRONG_RANK,
                ranks=sorted({member.rank, *others}),
            )

    def _checked(self, key: str) -> tuple[list[Tensor], str]:
        """Return each rank's tensor of a slot, which has to hold its shares, or any where it has none; and its type."""
        found: list[Tensor] = []
        dtypes: dict[str, OptimizerShard] = {}
        for member, tensor, shares in zip(self.members, self.tensors(key), self.shares, strict=True):
            held = member.masters[self.index] if tensor is None else tensor
            found.append(held)
            if tensor is not None:
                dtypes[tensor.dtype] = member
            whose = f"rank {member.rank}, group {self.index}: {key}"
            end = shares[-1].position + shares[-1].numel if shares else 0
            if tensor is None and shares:
                raise LayoutError(
                    f"rank {member.rank} has no {key} for group {self.index}, but other ranks do",
                    path=member.path,
                    code=SLOT_MISSING,
                    ranks=[member.rank],
                )
            if shares and not held.is_contiguous:
                raise UnsupportedError(
                    f"{whose} is a strided view",
                    path=member.path,
                    expected="a contiguous partition",
                    found=f"shape {held.shape}, strides {held.strides}",
                    advice="resume in the program that saved it",
                )
            if end > held.numel:
                raise LayoutError(
                    f"{whose} is too short",
                    path=member.path,
                    expected=f"at least {end} elements",
                    found=held.numel,
                    ranks=[member.rank],
                )
        if len(dtypes) > 1:
            raise LayoutError(
                f"group {self.index}: {key} has different element types on different ranks",
                path=list(dtypes.values())[-1].path,
                found=", ".join(sorted(dtypes)),
                code=DTYPES_DIFFER,
                ranks=sorted(member.rank for member in dtypes.values()),
            )
        return found, next(iter(dtypes))


def flat_groups(model: ModelShard, members: Sequence[OptimizerShard], held: Weights, spread: Spread) -> list[Shapes]:
    """Return shapes by name for each group, in the order of its flat buffer.

    `members`: all data-parallel ranks, in order; `held`: weights, for files without `param_shapes`; `spread`: the ranks
    over which experts are spread. Raises LayoutError: the groups do not follow from what the files hold.
    """
    first, shapes = members[0], model.param_shapes
    if shapes is None and model.reorders:
        raise UnsupportedError("there are no param_shapes, and slice mappings are wrong under round_robin_gradients")
    if shapes is None:
        shapes, known = [], {name: slot.shape for name, slot in held.items()}
        for index in range(len(first.masters)):
            named = [name for member in members for name in member.mapping(index)]
            sharing = spread.sharing(members, index, named)[0]
            numels = mapped_numels(sharing, index)
            there, mapped = sum(one.masters[index].numel for one in sharing), sum(numels.values())
            padded = len(sharing) * flat_partition_numel(mapped, len(sharing))
            if any(map(is_expert, named)) and there > padded and first.alignment_paddings is None:
                raise UnsupportedError(
                    f"names only some parameters of the experts in group {index}, as DeepSpeed up to 0.14.0 does",
                    path=first.path,
                    expected=f"param_slice_mappings of {there} elements",
                    found=mapped,
                    advice="load it with DeepSpeed 0.14.5 or newer, which can, and save it again; for the weights "
                    "alone, move *optim_states.pt away",
                )
            for name, numel in numels.items():
                if name not in known or math.prod(known[name]) != numel:
                    raise LayoutError(
                        f"the shape of {name} is unknown",
                        path=first.path,
                        expected=f"a weight of {numel} elements",
                        found=known.get(name),
                    )
            shapes.append({name: known[name] for name in numels})
    elif len(shapes) == 1 < len(first.masters):
        shapes = _split(shapes[0], members)
    if len(shapes) != len(first.masters):
        raise LayoutError(
            "param_shapes and the optimizer have different numbers of groups",
            expected=len(first.masters),
            found=len(shapes),
        )
    pads = first.alignment_paddings
    for index, group in enumerate(shapes):
        if pads is not None and (index >= len(pads) or len(pads[index]) != len(group)):
            raise LayoutError(
                f"group {index}: param_alignment_paddings do not fit param_shapes",
                path=first.path,
                expected=f"{len(group)} paddings",
            )
    return shapes


def _split(shapes: Shapes, members: Sequence[OptimizerShard]) -> list[Shapes]:
    """Cut one dict of all shapes (files before 2021) where the partitions of the groups say; the one way or none."""
    totals, world = list(accumulate(map(math.prod, shapes.values()), initial=0)), len(members)

    def fits(begin: int, end: int, largest: int) -> bool:
        total = totals[end] - totals[begin]
        partition = flat_partition_numel(total, world)
        return largest in (partition, min(partition, total))

    ways: list[Shape] = [(0,)]
    for group in range(len(members[0].masters)):
        most = max(member.masters[group].numel for member in members)
        ways = [(*way, end) for way in ways for end in range(way[-1], len(totals)) if fits(way[-1], end, most)]
    ways = [way for way in ways if way[-1] == len(shapes)]
    if len(ways) != 1:
        raise LayoutError(
            "one param_shapes for several groups, which cannot be separated",
            expected="one way to split it",
            found=f"{len(ways)} ways",
        )
    items = list(shapes.items())
    return [dict(items[begin:end]) for begin, end in pairwise(ways[0])]


class FlatLayout(Layout):
    """That of ZeRO-1, ZeRO-2 or BF16_Optimizer."""

    def read(self, spread: Spread) -> None:
        """Read the optimizer's files."""
        rank, model, members = self.rank, self.model, self.members
        groups = flat_groups(model, members, self.held, spread)
        if model.uses_zenflow:
            from zckpt.formats.deepspeed.rare.zenflow import are_transposed, flipped

            rank.transposed = are_transposed(self.held, groups)
            if rank.transposed:
                groups = list(map(flipped, groups))
        cuts = [
            [
                Partitions(index, shapes, ranks, reorders=model.reorders)
                for ranks in spread.sharing(members, index, list(shapes))
            ]
            for index, shapes in enumerate(groups)
        ]
        config, dtype, partition = model.config, model.dtype, members[0].bf16_optimizer
        for cut in (cut for of_group in cuts for cut in of_group):
            values = cut.members[0].group(cut.index)
            if keeps_whole_matrices(values, config, partition=partition) and is_whole(cut):
                cut.aside = [keys | {MOMENTUM} for keys in cut.aside]
                cut.whole, cut.copies = whole_slots(cut)
        keys = element_slots(case for of_group in cuts for cut in of_group for case in cut.cases())
        per_rank = experts_per_rank(name for shapes in groups for name in shapes)
        paths = {member.path for member in members}
        read: dict[int, set[str]] = {}
        for index, (shapes, of_group) in enumerate(zip(groups, cuts, strict=True)):
            ep = len(of_group)
            check_shapes(shapes, self.auto, ep)
            rank.degrees.append(ep if any(map(is_expert, shapes)) else None)
            rank.topology = Topology(ep=max(rank.topology.ep, ep))
            names: dict[str, None] = {}
            of_auto: dict[str, list[dict[str, Slot]]] = {}
            for expert_rank, cut in enumerate(of_group):
                per_element = keys[index].difference(*cut.aside)
                slots, padding, padding_spans = cut.cut(per_element, paths)
                read[index] = per_element | {slot.name for slot in cut.whole.values()}
                rank.duplicates += cut.copies if members[0] in spread.members[:1] else []
                for name, slot in cut.whole.items():
                    slots[name][slot.name] = slot
                # Of experts that are spread over all tensor-parallel ranks, each says what its own files have.
                rank.padding += padding
                rank.padding_spans.append(padding_spans)
                renamed = {name: global_name(name, expert_rank, per_rank) if ep > 1 else name for name in shapes}
                for name, shape in shapes.items():
                    if name in self.auto:
                        of_auto.setdefault(name, []).append(slots[name])
                    else:
                        self._claim(Parameter(renamed[name], shape, dtype, slots[name], index))
                order = list(shapes)
                if not members[0].bf16_optimizer:
                    order = optimizer_order(order, model, members[0].partition_count[index])
                names |= dict.fromkeys(renamed[name] for name in order)
            for name, parts in of_auto.items():
                of_experts = of_all(parts)
                self._claim(Parameter(name, of_experts[MASTER].shape, dtype, of_experts, index))
            self.add_group(index, [index], list(names))
        self.add_values({index: index for index in read}, read)

    def _claim(self, one: Parameter) -> None:
        if one.name in self.trained:
            groups = f"groups {self.trained[one.name].group} and {one.group}"
            raise LayoutError(f"{one.name} is in two param groups", found=groups)
        self.trained[one.name] = one
