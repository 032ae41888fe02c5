"""From the files of a directory to a Checkpoint. Structure only; no tensor is read.

Where zckpt wrote it, `metadata.pt` has the order of the optimizer's parameters, and everything else. Other programs
write one file for each rank, and the model in a file next to them or in each of them.

Each rank's local optimizer numbers its share of the parameters by itself. Which number is which parameter follows from
the optimizer's order of them, and that from names or from shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from zckpt.codes import OTHER_WORLD_SIZE, WRONG_RANK
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
    about,
)
from zckpt.evidence import NAMES_ADVICE, Evidence, in_order, note_not_used
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.remainder import restore_from
from zckpt.formats.torch_files import reader as torch_reader
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.beside import unlike
from zckpt.formats.torch_files.optimizer import (
    OptimizerState,
    check_hyperparameters,
    optimizer_rules,
    parse,
    shared_values,
)
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe, with_file
from zckpt.formats.zero_redundancy.directory import FORMAT, KEY, OPTIMIZER_NAME, Directory, optimizer_place
from zckpt.immutable import immutable
from zckpt.state import (
    WEIGHT,
    Checkpoint,
    Duplicate,
    GivenNames,
    Parameter,
    ParamGroup,
    Shape,
    Topology,
    are_distinct,
    are_sizes,
    by_key,
    dict_of,
    differ,
    list_of,
    positions,
    without,
)
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, Claim, Rule, exactly
from zckpt.state.partition import greedy_order, greedy_partition
from zckpt.torchfile import Tensor, TorchFile, is_leaf, read_torchfile, value_at

Order = list[list[str]]
"""For each param group, the names of its parameters."""

Shares = Sequence[Sequence[Sequence[int]]]
"""For each rank and each group, indices of the group's parameters."""


@immutable
class RankFile:
    """One rank's file: the state of its local optimizer, and what else there is, where that is not the whole file."""

    file: TorchFile
    state: OptimizerState
    others: dict[object, object]


def read_ranks(checkpoint: Checkpoint, paths: Sequence[Path]) -> list[RankFile]:
    """Read the files of all ranks, and hold against each other what they must agree on.

    Raises DamagedFileError: a file does not hold one optimizer's state dict; ShardError: a file says that it is another
    rank's, or of another number of ranks; LayoutError: ranks have different param groups.
    """
    ranks: list[RankFile] = []
    for rank, path in enumerate(paths):
        file = read_torchfile(path)
        refuse_share(file)
        place = optimizer_place(file.root)
        if place is None:
            raise DamagedFileError(
                "unexpected content", path=path, expected="one optimizer's state dict, as in rank 0's file"
            )
        where = tuple(map(str, place))
        rules = optimizer_rules(*where)
        if rank:
            same = Rule(
                (*where, "param_groups", "**"), COPY, "hyperparameters, found to be the first rank's", tensors=True
            )
            rules = (rules[0], same)
        rules += tuple(Rule((name,), IMPLIED, "which rank the file is of") for name in ("rank", "world_size") if where)
        checkpoint.files.append(describe(file, "optimizer", dp_rank=rank, rules=rules))
        others = without(dict_of(file.root), *place) if place else {}
        node = value_at(file.root, place)
        ranks.append(RankFile(file, parse(node, str(path)), others))
        for name, expected, code in (("rank", rank, WRONG_RANK), ("world_size", len(paths), OTHER_WORLD_SIZE)):
            found = others.pop(name, None)
            if type(found) is int and found != expected:
                raise ShardError(
                    f"has another {name}", path=path, expected=expected, found=found, code=code, ranks=[rank]
                )
        with about(path):
            mine, its = ([with_file(one.file, group) for group in one.state.groups] for one in (ranks[0], ranks[-1]))
            check_hyperparameters(mine, its, rank)
    checkpoint.world_size = len(paths)
    checkpoint.topology = Topology(dp=len(paths))
    return ranks


def attach_ranks(checkpoint: Checkpoint, ranks: Sequence[RankFile], order: Order, held: Shares | None = None) -> None:
    """Give the parameters their state from the rank that holds each, and the checkpoint its param groups.

    `held`: for each rank and each group, which of the group's parameters it has; by default as torch assigns them, or
    else fairscale. Raises LayoutError: a rank's share is another one, by number or by shape.
    """

    def named(shares: Shares) -> list[Order]:
        return [[[order[group][at] for at in its] for group, its in enumerate(groups)] for groups in shares]

    if held is None:
        numels = [[checkpoint.parameters[name].numel for name in group] for group in order]
        ways = [named(greedy_partition(numels, len(ranks), largest_first=first)) for first in (True, False)]
        names = next((way for way in ways if all(map(partial(_fits, checkpoint), ranks, way))), ways[0])
    else:
        names = named(held)
    shares: list[list[ParamGroup]] = []
    for rank, theirs in zip(ranks, names, strict=True):
        expected, found = (" + ".join(str(len(its)) for its in each) for each in (theirs, rank.state.numbers))
        if expected != found:
            raise LayoutError(
                "does not hold the share of parameters that it was assigned",
                path=rank.file.path,
                expected=expected,
                found=found,
            )
        own = Checkpoint(checkpoint.source, checkpoint.format, parameters=checkpoint.parameters)
        attach_named(own, rank.state, rank.file.path, list(chain(*theirs)))
        shares.append(own.param_groups)
    for number, (group, its) in enumerate(zip(order, zip(*shares, strict=True), strict=True)):
        states = [
            share.state
            for rank, share in zip(ranks, its, strict=True)
            if any(own in rank.state.state for own in rank.state.numbers[number])
        ]
        if differ([repr(state["step"]) for state in states if "step" in state]):
            checkpoint.warnings.append(f"ranks have different steps for param group {number}")
        checkpoint.param_groups.append(ParamGroup(its[0].hyperparameters, list(group), shared_values(states)))


def _fits(checkpoint: Checkpoint, rank: RankFile, names: Order) -> bool:
    """Tell whether a rank has parameters of the shapes that these have, as far as its state shows it."""
    if list(map(len, names)) != list(map(len, rank.state.numbers)):
        return False
    pairs = zip(rank.state.every_number, chain(*names), strict=True)
    return all(rank.state.shape(number) in (None, checkpoint.parameters[name].shape) for number, name in pairs)


def attach_named(checkpoint: Checkpoint, state: OptimizerState, path: str, names: Sequence[str]) -> None:
    """Attach a state under names that the directory gives; that they do not fit is then no fault of the user's.

    Raises LayoutError: a parameter has another shape than its state.
    """
    try:
        attach(checkpoint, state, path, names=names)
    except UsageError as error:
        raise LayoutError(error.message, path=path, expected=error.expected, found=error.found) from error


def order_by_names(names: Sequence[str], lengths: Sequence[int], checkpoint: Checkpoint) -> Order:
    """Return a list of names, group by group.

    `names`: of all parameters, in the optimizer's order; `lengths`: how many parameters each group has; `checkpoint`:
    has the model's parameters. Raises UsageError: too few or too many names, or one that the model has not.
    """
    found = iter(Evidence.of(checkpoint, [range(sum(lengths))], {}).given(names).values())
    return [list(islice(found, length)) for length in lengths]


def order_by_model(ranks: Sequence[OptimizerState], checkpoint: Checkpoint) -> Order:
    """Return the only names that the shapes of the ranks' state leave, if each group is in the model's order.

    That order is the one of `model.parameters()`, which nothing in the files can prove: parameters of one size were
    assigned in the optimizer's order, and of those of different sizes no order is kept. An optimizer of one group that
    has all of the model's parameters needs no shapes. `ranks`: each rank's own; `checkpoint`: has the model's
    parameters. Raises LayoutError: the ranks' shares are not those that torch assigns; UnsupportedError: a parameter
    has no state that tells its size, or several of the model's tensors fit.
    """
    owners = checkpoint.owners
    if all(len(state.groups) == 1 for state in ranks) and sum(len(s.numbers[0]) for s in ranks) == len(owners):
        return [[p.name for p in owners]]
    shapes = [
        [[_shape(state, number, rank) for number in group] for group in state.numbers]
        for rank, state in enumerate(ranks)
    ]
    try:
        assigned = greedy_order([[[math.prod(s) for s in group] for group in rank] for rank in shapes])
    except LayoutError as error:
        raise LayoutError(error.message, found=error.found, advice=NAMES_ADVICE) from error
    of = {(group, at): shapes[rank][group][position]
          for group, order in enumerate(assigned) for at, (rank, position) in enumerate(order)}  # fmt: skip
    names: dict[tuple[int, int], str] = {}
    fitting = by_key((p.numel, p) for p in owners)
    alike = by_key((math.prod(shape), place) for place, shape in of.items())  # in the order of their places
    for numel, places in alike.items():
        numbers = [[place for place in places if place[0] == group] for group in range(len(assigned))]
        names |= Evidence(numbers, {p.name: p.shape for p in fitting.get(numel, ())}, of).certain(in_order)
    for (group, at), shape in of.items():
        if (group, at) not in names:
            rank, position = assigned[group][at]
            raise UnsupportedError(
                f"parameter {position} of group {group} of rank {rank}, of shape {shape}, has no certain name",
                advice=NAMES_ADVICE,
            )
    position_of = positions(checkpoint.parameters)
    return [
        sorted((names[group, at] for at in range(len(order))), key=position_of.__getitem__)
        for group, order in enumerate(assigned)
    ]


def _shape(state: OptimizerState, number: int, rank: int) -> Shape:
    """Return the shape of a parameter, which all tensors of its state have."""
    tensors = {key: v.shape for key, v in state.state.get(number, {}).items() if isinstance(v, Tensor)}
    found = {shape for key, shape in tensors.items() if key != "step"}
    if len(found) != 1:
        raise UnsupportedError(
            f"rank {rank}'s parameter {number} has no state to show its shape, so the others' names are uncertain, too",
            advice=NAMES_ADVICE,
        )
    return found.pop()


def read(directory: Directory, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a directory.

    Ranks' files number their parameters by themselves, in the order in which they were assigned. Which is which
    follows from the sizes of all of them in the optimizer's order: as `metadata.pt` has it where zckpt wrote the
    directory; else by `names`, or as deduced, and then by the sizes that the model has.

    `names`: names of the optimizer's parameters, in its order. Raises SourceError: files are missing or damaged,
    contradict each other, or do not tell which parameter is which; UsageError: `names` do not fit.
    """
    metadata = directory.metadata
    return read_foreign(directory, names) if metadata is None else read_own(directory, metadata, names)


def read_own(directory: Directory, metadata: TorchFile, names: GivenNames) -> Checkpoint:
    """Read a directory that zckpt wrote; `metadata.pt` says which tensors are buffers and which are tied."""
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    for model in directory.models:
        torch_reader.add_model(checkpoint, model, metadata.root)
    with about(metadata.path):
        order, shapes, held, has_numbers = _numbering(metadata, len(directory.ranks))
    if names is not None and has_numbers:
        order = order_by_names(names, [len(group) for group in order], checkpoint)
    else:
        note_not_used(checkpoint, names)
    outside = [name for name in chain(*order) if name not in checkpoint.parameters]
    for name in outside:
        checkpoint.parameters[name] = Parameter(name, shapes.get(name, ()), "float32")
    if directory.ranks:
        attach_ranks(checkpoint, read_ranks(checkpoint, directory.ranks), order, held)
    elif order:
        path = directory.path / OPTIMIZER_NAME
        attach_named(checkpoint, torch_reader.read_optimizer(checkpoint, path), str(path), list(chain(*order)))
    for name in outside:
        parameter = checkpoint.parameters.pop(name)
        if parameter.slots or parameter.state:
            checkpoint.unnamed[name] = parameter
    restore_from(checkpoint, metadata, Rule((KEY, "**"), IMPLIED, "which rank has which parameters"))
    return checkpoint


def _numbering(metadata: TorchFile, world_size: int) -> tuple[Order, dict[str, Shape], Shares | None, bool]:
    """Return the optimizer's order, shapes of what is not the model's, which rank has what, and whether names lack.

    What ranks have is said where it does not follow from sizes (parameters that were put on RPC workers).
    """
    said = as_mapping(as_mapping(metadata.root).get(KEY))
    names, held = said.get("names"), said.get("held")
    order = [as_names(group) for group in (names if isinstance(names, list) else [None])]
    if not are_distinct(list(chain(*order))):
        raise DamagedFileError("the optimizer has a parameter twice")
    shapes: dict[str, Shape] = {}
    for name, shape in as_mapping(said.get("shapes")).items():
        if not isinstance(shape, list) or not are_sizes(shape):
            raise DamagedFileError("unexpected content", expected=f"the shape of {name}")
        shapes[str(name)] = tuple(shape)
    if held is not None:
        by_rank = [list_of(one) for one in list_of(held)]
        fits = all(len(one) == len(order) and all(isinstance(its, list) for its in one) for one in by_rank)
        is_of_all = world_size in (0, len(by_rank))  # 0: there are no files of ranks
        if not isinstance(held, list) or not fits or not is_of_all:
            raise DamagedFileError("unexpected content", expected="lists of parameters by rank")
        for number, group in enumerate(order):
            found = [one for its in by_rank for one in its[number]]
            if sorted(map(repr, found)) != sorted(map(repr, range(len(group)))):
                raise DamagedFileError("ranks do not have every parameter exactly once")
    return order, shapes, held, bool(said.get("unnamed"))


def read_foreign(directory: Directory, names: GivenNames) -> Checkpoint:
    """Read a directory that another program wrote."""
    path = str(directory.path)
    checkpoint = _model(directory, names)
    model, checkpoint.source, checkpoint.format = checkpoint.source, path, FORMAT
    if checkpoint.param_groups:
        _note_ranks(checkpoint, directory)
        return checkpoint
    ranks = read_ranks(checkpoint, directory.ranks)
    states = [rank.state for rank in ranks]
    if (total := sum(len(state.every_number) for state in states)) > (owned := len(checkpoint.owners)):
        shapes = [[state.shape(number) for number in state.every_number] for state in states]
        others = Counter(shape for shape in shapes[0] if shape) - Counter(one.shape for one in checkpoint.owners)
        sums = {tuple(sorted(one.crc32 for one in rank.file.records if "/data/" in one.name)) for rank in ranks}
        if (others and len(sums) > 1) or differ(shapes):
            raise UnsupportedError(
                "each rank has pieces of the optimizer's state, as FSDP1's optimizer and optimizers that cut rows have "
                "them, and no file says where they lie",
                path=path,
                expected="the state of whole parameters, or sharded tensors",
                advice="save it whole in its own program, under FSDP1 what FSDP.optim_state_dict returns; for the "
                f"model alone give {model}",
            )
        raise UnsupportedError(
            "rank files have parameters several times: they are copies, as if each rank of DistributedDataParallel "
            "had saved all of them, not shares of one model",
            path=path,
            expected=f"{owned} parameters on {len(ranks)} ranks",
            found=total,
            advice=f"give one of them, such as {directory.ranks[0]}",
        )
    lengths = [sum(map(len, shares)) for shares in zip(*(state.numbers for state in states), strict=True)]
    recorded = [list_of(group.get("param_names")) for group in states[0].groups]
    if names is None and list(map(len, recorded)) == lengths:  # of all ranks: torch copies them once it has loaded any
        names = list(map(str, chain(*recorded)))
    if names is not None:
        order = order_by_names(names, lengths, checkpoint)
    else:
        order = order_by_model(states, checkpoint)
        checkpoint.is_numbered = True
        checkpoint.warnings.append(
            "the files do not state the order of the optimizer's parameters; within each group it is assumed to be "
            f"the model's ({NAMES_ADVICE})"
        )
    attach_ranks(checkpoint, ranks, order)
    for rank, file in zip(ranks, checkpoint.files[-len(ranks) :], strict=True):
        for key, value in rank.others.items():  # what their files hold besides the optimizer and the model
            if not dict_of(value).keys() >= checkpoint.parameters.keys():
                name = f"{Path(rank.file.path).stem}.{key}"
                checkpoint.metadata[name] = carried(rank.file, value)
                if is_leaf(value):  # which has this name only in the metadata
                    file.rules += (Rule((exactly(key),), CARRIED, name),)
    checkpoint.step = checkpoint.step if checkpoint.step is not None else checkpoint.most_steps
    return checkpoint


def _note_ranks(checkpoint: Checkpoint, directory: Directory) -> None:
    """Note the state in the ranks' own files as copies, where one file holds that of all of them."""
    known = {**checkpoint.unnamed, **checkpoint.parameters}
    labels = [group.parameters for group in checkpoint.param_groups]
    bare = {name: Parameter(name, p.shape, p.dtype, tied_to=p.tied_to) for name, p in known.items()}
    own = Checkpoint(checkpoint.source, FORMAT, parameters=bare)
    try:
        ranks = read_ranks(own, directory.ranks)
        slots = (slot for p in known.values() for slot in p.slots.values() if slot.name != WEIGHT)
        states = (state for rank in ranks for state in rank.state.state.values())
        theirs = ((key, one) for state in states for key, one in state.items() if isinstance(one, Tensor))
        if Counter((one.name, one.shape, one.dtype) for one in slots) != Counter(
            (key, one.shape, one.dtype) for key, one in theirs
        ):
            checkpoint.warnings.append("the rank files hold other state than the consolidated file")
            return
        is_named = known.keys() >= {*checkpoint.grouped}
        order = labels if is_named else order_by_model([rank.state for rank in ranks], checkpoint)
        if list(map(len, order)) != list(map(len, labels)):
            return
        attach_ranks(own, ranks, order)
    except (LayoutError, UnsupportedError):  # nothing says which is which, for some have no state; all are there
        claim = Claim(COPY, "the ranks' own shares of the state, equal in number and shapes")
        checkpoint.claims |= {str(path): claim for path in directory.ranks}
        return
    except SourceError as error:
        checkpoint.warnings.append(f"the rank files are not read: {error}")
        return
    checkpoint.files += own.files
    for name, label in zip(chain(*order), chain(*labels), strict=True):
        for key, slot in own.parameters[name].slots.items():
            original = known[label].slots.get(key) if label in known else None
            if original is not None and original.shape == slot.shape:
                checkpoint.duplicates.append(Duplicate("parameter", label, label, slot, original))


def _model(directory: Directory, names: GivenNames) -> Checkpoint:
    """Return the content of the file that has the model: one next to the ranks' files, or else rank 0's own."""
    found: list[Checkpoint] = []
    first, *others = directory.ranks
    for path in directory.others:
        try:
            checkpoint = torch_reader.read(path)
        except UnsupportedError:  # no state dict: a scheduler's state, a random state
            continue
        if checkpoint.parameters:
            found.append(torch_reader.read(path, names=names) if checkpoint.param_groups and names else checkpoint)
    if len(found) > 1:
        raise UnknownFormatError(
            "several files hold a model",
            expected="one next to the rank files",
            found=", ".join(Path(one.source).name for one in found),
        )
    if found:
        return found[0]
    one = torch_reader.read(first)  # the model of a rank's file, whose optimizer has only a share of the parameters
    if not one.parameters:
        raise UnsupportedError(
            "rank files have their own numbers for parameters, and only the sizes of the model's parameters tell "
            "which is which",
            advice="put the model's state dict next to them, as model.pt",
        )
    if why := unlike(first, others):
        raise UnsupportedError(
            "each rank's file has a model of its own, as of pipeline stages, slices of tensor parallelism or "
            "FSDP's local tensors, and no file says how they belong together",
            path=directory.path,
            expected="the whole model in each, or sharded tensors",
            found=why,
            advice="save it whole, or with torch.distributed.checkpoint, in its own program",
        )
    checkpoint = Checkpoint(one.source, FORMAT, buffers=one.buffers, warnings=[f"the model is read from {first.name}"])
    for name, p in one.parameters.items():
        slots = {WEIGHT: p.weight} if p.weight else {}
        checkpoint.parameters[name] = Parameter(name, p.shape, p.dtype, slots, tied_to=p.tied_to)
    checkpoint.duplicates += _copies(checkpoint, others)
    return checkpoint


def _copies(checkpoint: Checkpoint, others: Sequence[Path]) -> Iterator[Duplicate]:
    """Yield the model's tensors that are in the files of further ranks, too."""
    for rank, path in enumerate(others, 1):
        one = torch_reader.read(path)
        for kind, mine, its in (
            ("parameter", checkpoint.parameters, one.parameters),
            ("buffer", checkpoint.buffers, one.buffers),
        ):
            for name in filter(its.__contains__, mine):
                if (original := mine[name].weight) is not None and (copy := its[name].weight) is not None:
                    yield Duplicate(kind, name, name, copy, original, rank)
