"""How tensors are cut: the only place that knows how a layout partitions and pads. Pure functions of integers.

Flat (ZeRO-1/2): the parameters of a group lie end to end in one buffer, cut in equal partitions.

    | a a a a a | b b b | c c c c c c c c | . . |      . padding
    |   rank 0   |   rank 1   |   rank 2     |

Per parameter (ZeRO-3): every parameter is cut in equal shards of its own.

    a: | a a | a a | a . |    b: | b | b | b |    rank 0 holds the first shard of each, one after the other

Whole parameters (torch's ZeroRedundancyOptimizer): each belongs to one rank, the largest assigned first.

    | a a a a a a |   | b b b b | d |   | c c c | e e |
         rank 0           rank 1            rank 2

Rows and stacks (nanochat): parameters in equal rows, small ones whole; matrices of one shape in a padded stack.

Even (zckpt's own files): all tensors end to end, cut into as many bytes for each file.

    | a a a a b b | b b b b c d | d d d |
         file 0        file 1     file 2
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add

from zckpt.errors import LayoutError, UsageError
from zckpt.immutable import immutable

FLAT_ALIGNMENT = 2
"""Partitions of a flat group start on a multiple of two elements: 4 bytes for 16-bit types, which NCCL wants."""

PARAMETER_ALIGNMENT_NBYTES = 16
"""Bytes of the model dtype on which each parameter of an aligned flat group starts (DeepSpeed 0.19)."""


@immutable
class FlatShare:
    """Elements of one parameter inside one rank's partition."""

    index: int  # which parameter of the group, in the order of the buffer
    start: int  # elements; first element within the flattened parameter
    position: int  # elements; where it lies within the rank's partition
    numel: int

    @property
    def of_parameter(self) -> slice:
        """These of all elements of the flattened parameter."""
        return slice(self.start, self.start + self.numel)

    @property
    def of_partition(self) -> slice:
        """These of all elements of the rank's partition."""
        return slice(self.position, self.position + self.numel)


def check_world_size(world_size: int) -> None:
    """Raise UsageError unless `world_size` is a positive number of ranks."""
    if world_size < 1:
        raise UsageError("unusable world size", expected="at least 1", found=world_size)


def flat_partition_numel(total: int, world_size: int) -> int:
    """Return the number of elements of each rank's partition of a flat group, padding included.

    Parameters
    ----------
    total : int, elements
        All parameters of the group and their alignment pads.
    world_size : int, ranks

    Notes
    -----
    Source: pad each group to a multiple of 2 x dp elements (DeepSpeed 0.4 to 0.19, ZeRO-1/2 and BF16_Optimizer).
    """
    check_world_size(world_size)
    return FLAT_ALIGNMENT * -(-total // (FLAT_ALIGNMENT * world_size))


def flat_padding(total: int, partition: int, rank: int) -> int:
    """Return how many elements at the end of a rank's partition belong to no parameter.

    Padding may reach over several trailing ranks when a group is small.

    `total`, `partition`: elements.
    """
    return min(max((rank + 1) * partition - total, 0), partition)


def alignment_padding(numels: Sequence[int], multiple: int) -> list[int]:
    """Return the pad after each parameter that lets the next one start on a multiple of `multiple` elements.

    Parameters
    ----------
    numels : sequence of int, elements
    multiple : int, elements
        `PARAMETER_ALIGNMENT_NBYTES` divided by the size of the model's element type.

    Notes
    -----
    Source: `parameter_alignment` of DeepSpeed 0.19; after the last parameter there is none.
    """
    return [-n % multiple for n in numels[:-1]] + [0] * bool(numels)


def flat_starts(numels: Sequence[int], pads: Sequence[int] | None = None) -> list[int]:
    """Return where each parameter starts in the flat buffer, and as a last item where the buffer ends, in elements."""
    return list(accumulate(map(add, numels, pads) if pads else numels, initial=0))


def flat_shares(numels: Sequence[int], starts: Sequence[int], partition: int, rank: int) -> Iterator[FlatShare]:
    """Yield the non-empty shares of parameters in one rank's partition, in order.

    `numels` (elements): the parameters of the group, in the order of the buffer; `starts` (elements): from
    `flat_starts`; `partition` (elements): from `flat_partition_numel`; `rank`: position among the ranks that share the
    group.
    """
    low, high = rank * partition, (rank + 1) * partition
    index = max(bisect_right(starts, low, 0, len(numels)) - 1, 0)
    while index < len(numels) and starts[index] < high:
        begin, end = max(starts[index], low), min(starts[index] + numels[index], high)
        if begin < end:
            yield FlatShare(index, begin - starts[index], begin - low, end - begin)
        index += 1


def round_robin_order(count: int, world_size: int) -> list[int]:
    """Return the order in which a group's parameters enter its flat buffer under `round_robin_gradients`.

    Item i is the index, in the optimizer's order, of the parameter that comes i-th: parameters 0, ws, 2 ws, ...
    first, then 1, ws + 1, ...

    Notes
    -----
    Source: DeepSpeed 0.14 to 0.19, ZeRO-1/2.
    """
    check_world_size(world_size)
    return [i for first in range(min(world_size, count)) for i in range(first, count, world_size)]


def shard_numel(numel: int, world_size: int) -> int:
    """Return the number of elements every rank holds of one parameter, padding included.

    Notes
    -----
    Source: ceil(n / ws) for each parameter by itself (DeepSpeed 0.14 to 0.19, ZeRO-3).
    """
    check_world_size(world_size)
    return -(-numel // world_size)


def sub_groups(numels: Sequence[int], world_size: int, most: int) -> list[list[int]]:
    """Return the indices of a param group's parameters in each of its sub-groups.

    A sub-group is closed as soon as one rank's shards of its parameters reach `most` elements.

    Parameters
    ----------
    numels : sequence of int, elements
    world_size : int
    most : int, elements
        `sub_group_size` of the configuration.

    Notes
    -----
    Source: DeepSpeed 0.14 to 0.19, ZeRO-3.
    """
    shards = [shard_numel(numel, world_size) for numel in numels]
    if most >= sum(shards):
        return [list(range(len(numels)))] if numels else []
    found: list[list[int]] = [[]]
    size = 0
    for index, shard in enumerate(shards):
        if size >= most:
            found.append([])
            size = 0
        found[-1].append(index)
        size += shard
    return found


def shard_share(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return (start, numel) of the elements of one parameter that one rank holds, without padding."""
    per_rank = shard_numel(numel, world_size)
    start = min(rank * per_rank, numel)
    return start, min(per_rank, numel - start)


def shard_paddings(numels: Sequence[int], world_size: int) -> list[int]:
    """Return how many elements of each rank's shards of these parameters, all together, are padding.

    Takes as many steps as there are parameters and ranks, not one for each of both.
    """
    more, less = [0] * (world_size + 1), [0] * (world_size + 1)
    for numel in numels:
        per_rank = shard_numel(numel, world_size)
        if per_rank:
            full, rest = divmod(numel, per_rank)
            more[full] += per_rank  # this rank and all after it hold nothing,
            less[full] += rest  # but for the rest, which this one has
    return [held - rest for held, rest in zip(accumulate(more[:world_size]), less, strict=False)]


def greedy_partition(
    groups: Sequence[Sequence[int]], world_size: int, *, largest_first: bool = True
) -> list[list[list[int]]]:
    """Return which whole parameters each rank holds, in the order in which its optimizer has them.

    Each group's parameters are assigned largest first, equal ones in their order, to the rank that holds the least
    elements so far, groups before included; the lowest of equal ranks.

    Parameters
    ----------
    groups : sequence of sequence of int, elements
        The sizes of each param group's parameters, in the optimizer's order, frozen ones included.
    world_size : int
    largest_first : bool
        False: in their order, as fairscale's OSS assigns them.

    Returns
    -------
    list of list of list of int
        For each rank and each group, indices of the group's parameters.

    Notes
    -----
    Source: torch 2.13 and 2.15, `ZeroRedundancyOptimizer._partition_parameters`
    (torch/distributed/optim/zero_redundancy_optimizer.py); fairscale 0.4.13, `OSS.partition_parameters`.
    """
    check_world_size(world_size)
    ranks = [(0, rank) for rank in range(world_size)]
    found: list[list[list[int]]] = [[[] for _ in groups] for _ in range(world_size)]
    for number, numels in enumerate(groups):
        for index in sorted(range(len(numels)), key=lambda i: -numels[i] if largest_first else i):
            held, rank = ranks[0]
            found[rank][number].append(index)
            heapq.heapreplace(ranks, (held + numels[index], rank))
    return found


def greedy_order(held: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[int, int]]]:
    """Return the order in which `greedy_partition` assigned the parameters that ranks hold, which is largest first.

    Parameters
    ----------
    held : sequence of sequence of sequence of int, elements
        For each rank and each group, the sizes of the rank's parameters in its optimizer's order.

    Returns
    -------
    list of list of (int, int)
        For each group, (rank, position among the rank's parameters of the group).

    Raises
    ------
    LayoutError
        They were not assigned that way.
    """
    ranks = [(0, rank) for rank in range(len(held))]
    found: list[list[tuple[int, int]]] = []
    for number in range(len(held[0]) if held else 0):
        taken = [0] * len(held)
        assigned: list[tuple[int, int]] = []
        last = math.inf
        for _ in range(sum(len(groups[number]) for groups in held)):
            size, rank = ranks[0]
            mine = held[rank][number]
            if taken[rank] == len(mine) or mine[taken[rank]] > last:
                raise LayoutError(
                    "parameters are not assigned largest first to the rank that holds the fewest elements",
                    found=f"rank {rank}'s parameter {taken[rank]} of group {number}",
                )
            last = mine[taken[rank]]
            assigned.append((rank, taken[rank]))
            taken[rank] += 1
            heapq.heapreplace(ranks, (size + int(last), rank))
        found.append(assigned)
    return found


SMALL_NUMEL = 1024
"""Elements; of a parameter that has fewer, each rank has all rows."""


def rows_of_rank(shape: tuple[int, ...], world_size: int) -> int | None:
    """Return how many rows of a parameter each rank has; None: all of them.

    Raises LayoutError: ranks cannot have equally many. Source: `MuonAdamW._reduce_adamw` (nanochat, July 2026).
    """
    if world_size == 1 or math.prod(shape) < SMALL_NUMEL:
        return None
    if shape[0] % world_size:
        raise LayoutError("rows cannot be shared evenly", expected=f"a multiple of {world_size}", found=shape[0])
    return shape[0] // world_size


def stack_of_rank(count: int, world_size: int) -> int:
    """Return how many of so many matrices each rank has, the last ones perhaps fewer, and padding in their place."""
    return -(-count // world_size)


@immutable
class FileShare:
    """Elements [start, start + numel) of a flattened tensor, which lie in one file."""

    file: int
    start: int
    numel: int


def even_extents(tensors: Sequence[tuple[int, int]], world_size: int, *, before: int = 0) -> Iterator[list[FileShare]]:
    """Yield the shares of each tensor when all, end to end, are cut evenly; an empty tensor has an empty share.

    Files get the same size to within an element, whatever the tensors are, and there are never many more shares than
    tensors.

    `tensors`: in elements, and bytes of one element; `before` (bytes): what the first file holds already, and is
    counted as its own.
    """
    total = before + sum(numel * size for numel, size in tensors)
    ends = [total * (file + 1) // world_size for file in range(world_size)]
    file, at = 0, before
    for numel, size in tensors:
        shares: list[FileShare] = []
        start = 0
        while start < numel or not shares:
            while file < world_size - 1 and ends[file] - at < (size if numel else 1):
                file += 1
            room = (ends[file] - at) // size if file < world_size - 1 else numel
            shares.append(FileShare(file, start, min(numel - start, room)))
            start += shares[-1].numel
            at += shares[-1].numel * size
        yield shares
