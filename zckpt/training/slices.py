"""Tensor-parallel slices of a ZeroOptimizer's model, saved as parts of whole parameters and cut from these again.

What a rank has of a slice is saved as the box of the whole parameter that it is. Where a slice is of several boxes
(query, key and value; gate and up), of which a file of zckpt's format has one for each slot, one rank collects the
parameter, each another one, and writes it.

Rules say how slices make up parameters (`universal_checkpoint_info`, see `zckpt.formats.deepspeed.axes.tp_rules`).
What they say of ranks that have the same is compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.engine.tensors import as_bytes, dtype_name
from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.formats.deepspeed.axes.tensor_parallel import cut
from zckpt.formats.deepspeed.axes.tp_rules import SLICED, Rule, Rules, check_rules, read_rules
from zckpt.immutable import immutable, mutable
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.ranks import Ranks, answering
from zckpt.optim.states.by_parameter import NamedShare
from zckpt.optim.tensors import SAMPLE_NBYTES, ModelState, Share, digest_of, world_rank
from zckpt.optim.zero.files import refuse_parts
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import model_rank
from zckpt.state import WEIGHT, Extent, Parameter, Shape, by_key, differ
from zckpt.state.boxes import Box, boxes_of, row_major
from zckpt.state.spans import position

GIVEN = "tp_rules"
"""Stands for the file where rules are given as a mapping."""

NOT_COPIES = "give tp_rules that say how it is cut; what each rank trains separately, to be averaged, cannot be saved"
"""What to do where ranks have other values of what they should have alike."""

Key = tuple[str, str]
"""A parameter and a slot."""


@mutable
class Several:
    """What a rank has of one slot that is in several boxes: those, and their elements."""

    shape: Shape
    dtype: torch.dtype
    boxes: list[tuple[Box, torch.Tensor]] = field(default_factory=list)


@mutable
class Sliced:
    """What a rank has of slices: shares of whole parameters, those in several boxes, and what is to be compared."""

    shares: list[NamedShare] = field(default_factory=list)
    several: dict[Key, Several] = field(default_factory=dict)  # by parameter and slot
    same: dict[str, bytes] = field(default_factory=dict)
    """By what is to be said if they differ: digests of what ranks of all slices have alike."""
    apart: dict[str, bytes] = field(default_factory=dict)
    """By parameter: digests of what would be no slices if ranks of all slices had it alike; empty if it is one number.
    """


@immutable
class Slices:
    """The slices that a rank has of the parameters of a model."""

    rules: Rules
    rank: int  # which slices, of how many
    degree: int
    is_first: bool  # whether this rank is the first of those that have the same slices

    def rule(self, name: str, shape: Shape) -> Rule:
        """Return how slices of a shape make up a parameter.

        Raises LayoutError: the shape does not fit the rules; UnsupportedError: the rules say that none describes it, or
        that ranks have some of the same elements.
        """
        found = self.rules.rule(name, [shape] * self.degree, padded=True)
        if found.firsts:
            raise UnsupportedError(f"slices of {name} overlap", path=self.rules.path, advice='give format="deepspeed"')
        return found

    def whole(self, model: ModelState) -> ModelState:
        """Return the model with tensors of whole parameters, without elements, in the place of slices."""
        tensors = {
            name: torch.empty(self.rule(name, tuple(one.shape)).shape, dtype=one.dtype, device="meta")
            if name in model.parameters
            else one
            for name, one in model.tensors.items()
        }
        return replace(model, tensors=tensors)

    def sliced(self, model: ModelState, shares: Iterable[NamedShare]) -> Sliced:
        """Return what this rank has, as parts of whole parameters. `model`: with slices; `shares`: of slices."""
        found = Sliced()
        for name, slot, share in shares:
            if name not in model.parameters:
                found.shares.append((name, slot, share))
                if self.is_first:
                    found.same[f"{name} is a buffer with other values on ranks of other slices"] = digest_of(share)
                continue
            rule = self.rule(name, share.shape)
            if rule.kind != SLICED:  # bytes of weights are compared, too
                alone = (world_rank(),) if share.ranks is None else share.ranks
                found.shares.append((name, slot, replace(share, ranks=alone)))
                continue
            if slot == WEIGHT and self.is_first and self.rules.matching(name) is None:
                flat = share.tensor.detach().reshape(-1)[: SAMPLE_NBYTES // share.tensor.element_size()]
                is_constant = bool((flat == flat[:1]).all())  # as of a bias that was never trained
                found.apart[name] = b"" if is_constant else digest_of(share, SAMPLE_NBYTES)
            own = rule.shares[self.rank]
            if len(own) == 1 and (own[0].source, own[0].size) == (0, share.shape[rule.dim]):
                offsets = tuple(own[0].target if dim == rule.dim else 0 for dim in range(len(share.shape)))
                extent = replace(share.extent, offsets=offsets, sizes=share.shape)
                found.shares.append((name, slot, replace(share, shape=rule.shape, extent=extent)))
            else:
                boxes = list(_boxes(share, rule, self.rank))
                found.several[name, slot] = Several(rule.shape, share.tensor.dtype, boxes)
        return found

    def cut(self, checkpoint: OpenedCheckpoint, names: Iterable[str]) -> None:
        """Put this rank's slices in the place of a checkpoint's whole parameters.

        Raises LayoutError: a parameter does not divide among the ranks.
        """
        for name in dict.fromkeys(names):
            for section in (checkpoint.parameters, checkpoint.unnamed):
                its = section.get(name)
                if its is not None and its.tied_to is None:
                    section[name] = self._cut(its)

    def _cut(self, whole: Parameter) -> Parameter:
        rule = self.rules.cut(whole.name, whole.shape, self.degree)
        for key, slot in whole.slots.items():
            if rule.kind == SLICED and slot.shape and slot.shape != whole.shape:
                raise UsageError(
                    f"{key} of {whole.name} is not one value for each element, and cannot be cut",
                    expected=whole.shape, found=slot.shape,
                )  # fmt: skip
        return cut(whole, rule, self.rank)


def _boxes(share: Share, rule: Rule, rank: int) -> Iterable[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a whole parameter that a share of a slice has, with their elements."""
    extent, dim = share.extent, rule.dim
    flat, steps = share.tensor.detach().reshape(-1), row_major(share.shape)
    for offsets, sizes in boxes_of(extent):
        for source, target, size in rule.shares[rank]:
            low, high = max(offsets[dim], source), min(offsets[dim] + sizes[dim], source + size)
            if low < high:
                here, there, box = list(offsets), list(offsets), list(sizes)
                here[dim], there[dim], box[dim] = low, low - source + target, high - low
                first = position(here, steps) - extent.start
                yield (tuple(there), tuple(box)), flat.as_strided(box, steps, flat.storage_offset() + first)


def read_slices(
    ranks: Ranks, given: str | os.PathLike[str] | Mapping[str, Any] | None, every: Sequence[Optimizer]
) -> Slices | None:
    """Return which slices of its model's parameters this rank has, given `tp_rules` or an optimizer of slices.

    All ranks call it together. Raises UsageError: the rules cannot be read, or it is not known which slices are this
    rank's; or other ranks are to have them; UnsupportedError: slices and no rules, slices besides experts, or of
    several optimizers.
    """
    of_zero = [one for one in every if isinstance(one, ZeroOptimizer)]
    cut_apart = [one for one in of_zero if one.is_model_parallel]

    def found() -> Slices | None:
        if given is None:
            for one in cut_apart:
                refuse_parts(one)
            return None
        if isinstance(given, Mapping):
            check_rules(given, GIVEN)
            rules = Rules(given, GIVEN)
        else:
            rules = Rules(read_rules(Path(given)), os.fspath(given))
        if cut_apart:
            only = cut_apart[0]
            if len(every) > 1:
                raise UnsupportedError(
                    "tensor-parallel slices are saved and loaded with one optimizer", found=len(every)
                )
            if any(group.is_expert for group in only.groups):
                raise UnsupportedError(
                    "experts of a model in tensor-parallel slices are not saved or loaded by name",
                    advice='save with format="deepspeed", and call load_state_dict() with this rank\'s file',
                )
            rank, degree = model_rank(only.model_parallel)
            if only.world_size * degree != ranks.world_size:
                raise UsageError(
                    "slices of a model are saved and loaded by all ranks that have some of them",
                    expected=f"{only.world_size * degree} ranks, {only.world_size} for each of {degree} slices",
                    found=ranks.world_size,
                    advice="leave process_group out, or give the group of all",
                )
            return Slices(rules, rank, degree, only.rank == 0)
        # ranks that are not the optimizer's may have other slices, of which it has not been told
        is_alone = any(one.model_parallel is None and one.world_size < dist.get_world_size() for one in of_zero)
        if is_alone or (ranks.world_size > 1 and not of_zero):
            raise UsageError(
                "tp_rules are given, but nothing says which slices this rank has",
                expected="one ZeroOptimizer(process_group=DATA_PARALLEL, model_parallel=...)",
                found=", ".join(type(one).__name__ for one in every) or "no optimizer",
                advice="give model_parallel= with the group of the ranks that hold the model together",
            )
        return None

    return ranks.do(found)  # a file may be missing on one rank


# --- what one rank collects


def collected(ranks: Ranks, own: Sliced) -> list[NamedShare]:
    """Return what this rank has collected of slots that are in several boxes. All ranks call it together.

    Raises LayoutError: ranks have other values, or not together the whole: on all ranks.
    """
    described = {
        key: (one.shape, dtype_name(one.dtype), [box for box, _ in one.boxes]) for key, one in own.several.items()
    }
    told = ranks.gather_all((described, own.same, own.apart))
    _compare(told)
    of_keys = by_key((key, (rank, *one)) for rank, (its, _, _) in enumerate(told) for key, one in its.items())
    loads = [0] * ranks.world_size
    found: list[NamedShare] = []
    for key, parts in sorted(of_keys.items()):
        _, shape, dtype, _ = parts[0]
        senders: dict[Box, int] = {}
        for rank, _, _, boxes in parts:
            for box in boxes:
                senders.setdefault(box, rank)
        numel = sum(math.prod(sizes) for _, sizes in senders)
        if any(one[1:3] != (shape, dtype) for one in parts) or numel != math.prod(shape):
            name, slot = key
            raise LayoutError(
                f"{slot} of {name}: slices of all ranks are not together the whole",
                expected=f"{dtype} {shape}",
                found=", ".join(dict.fromkeys(f"{dtype} {shape}" for _, shape, dtype, _ in parts)),
            )
        at = loads.index(min(loads))
        loads[at] += math.prod(shape)
        held = dict(own.several[key].boxes) if key in own.several else {}
        whole = torch.empty(shape if ranks.rank == at else 0, dtype=getattr(torch, dtype), device="cpu")
        for box, sender in senders.items():
            if ranks.rank not in (sender, at):
                continue
            is_sender = ranks.rank == sender
            elements = held[box].cpu().contiguous() if is_sender else whole.new_empty(box[1])
            if sender != at:
                flat = as_bytes(elements)
                with answering():
                    if is_sender:
                        dist.send(flat, ranks.members[at], group=ranks.group)
                    else:
                        dist.recv(flat, ranks.members[sender], group=ranks.group)
            if ranks.rank == at:
                whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] = elements
        if ranks.rank == at:
            found.append((*key, Share(shape, Extent.whole(shape), whole, (world_rank(),))))
    return found


def _compare(told: Sequence[tuple[Any, Mapping[str, bytes], Mapping[str, bytes]]]) -> None:
    """Refuse values that contradict the rules."""
    for message, digests in by_key(one for _, same, _ in told for one in same.items()).items():
        if differ(digests):
            raise LayoutError(message, advice="keep only what is the same on all of them there")
    for name, digests in by_key(one for _, _, apart in told for one in apart.items()).items():
        if digests[0] and not differ(digests):
            raise LayoutError(
                f"{name} is the same on ranks of all slices, although no rule says that each has the whole",
                advice="say so in tp_rules: tp_replicated_parameter_patterns",
            )
