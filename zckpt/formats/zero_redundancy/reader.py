"""From the files of a directory to a Checkpoint. Structure only; no tensor is read.

Where zckpt wrote it, `metadata.pt` has the order of the optimizer's parameters, and everything else. Other programs
write one file for each rank, and the model in a file next to them or in each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import DamagedFileError, LayoutError, SourceError, UnknownFormatError, UnsupportedError, about
from zckpt.evidence import NAMES_ADVICE, note_not_used
from zckpt.formats.remainder import remainder_rules, restore
from zckpt.formats.torch_files import reader as torch_reader
from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe
from zckpt.formats.zero_redundancy.directory import FORMAT, KEY, OPTIMIZER_NAME, Directory, find
from zckpt.formats.zero_redundancy.ranks import (
    Order,
    Shares,
    attach_named,
    attach_ranks,
    order_by_model,
    order_by_names,
    read_ranks,
)
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter
from zckpt.state.inventory import COPY, IMPLIED, Claim, Rule
from zckpt.torchfile import Tensor, TorchFile


def read(path: Path, *, names: Sequence[str] | None = None) -> Checkpoint:
    """Read the structure of a directory.

    Ranks' files number their parameters by themselves, in the order in which they were assigned. Which is which
    follows from the sizes of all of them in the optimizer's order: as `metadata.pt` has it where zckpt wrote the
    directory; else by `names`, or as deduced, and then by the sizes that the model has.

    Parameters
    ----------
    names : sequence of str, optional
        Names of the optimizer's parameters, in its order.

    Raises
    ------
    SourceError
        Files are missing or damaged, contradict each other, or do not tell which parameter is which.
    UsageError
        `names` do not fit.
    """
    directory = find(path)
    if directory is None:
        raise UnknownFormatError("holds no state of a ZeroRedundancyOptimizer", path=path)
    if directory.metadata is not None:
        return read_own(directory, directory.metadata, names)
    return read_foreign(directory, names)


def read_own(directory: Directory, metadata: TorchFile, names: Sequence[str] | None) -> Checkpoint:
    """Read a directory that zckpt wrote; `metadata.pt` says which tensors are buffers and which are tied."""
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    for model in directory.models:
        torch_reader.add_model(checkpoint, model, metadata.root)
    with about(metadata.path):
        order, shapes, held, has_numbers = _numbering(metadata)
    if names is not None and has_numbers:
        order = order_by_names(names, [len(group) for group in order], checkpoint)
    else:
        note_not_used(checkpoint, names)
    outside = [name for group in order for name in group if name not in checkpoint.parameters]
    for name in outside:
        checkpoint.parameters[name] = Parameter(name, shapes.get(name, ()), "float32")
    if directory.ranks:
        attach_ranks(checkpoint, read_ranks(checkpoint, directory.ranks), order, held)
    elif order:
        path = directory.path / OPTIMIZER_NAME
        every = [name for group in order for name in group]
        attach_named(checkpoint, torch_reader.read_optimizer(checkpoint, path), str(path), every)
    for name in outside:
        parameter = checkpoint.parameters.pop(name)
        if parameter.slots or parameter.state:
            checkpoint.unnamed[name] = parameter
    rules = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "which rank has which parameters"))
    checkpoint.files.append(describe(metadata, "metadata", rules=rules))
    restore(checkpoint, metadata.root, metadata)
    return checkpoint


def _numbering(metadata: TorchFile) -> tuple[Order, dict[str, tuple[int, ...]], Shares | None, bool]:
    """Return the optimizer's order, shapes of what is not the model's, which rank has what, and whether names lack.

    What ranks have is said where it does not follow from sizes (parameters that were put on RPC workers).
    """
    said = as_mapping(as_mapping(metadata.root, metadata.path).get(KEY), metadata.path)
    names, held = said.get("names"), said.get("held")
    order = [as_names(group) for group in (names if isinstance(names, list) else [None])]
    every = [name for group in order for name in group]
    if len(set(every)) != len(every):
        raise DamagedFileError("the optimizer has a parameter twice")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in as_mapping(said.get("shapes"), metadata.path).items():
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise DamagedFileError("unexpected content", expected=f"the shape of {name}")
        shapes[str(name)] = tuple(shape)
    if held is not None:
        if not isinstance(held, list) or not all(isinstance(one, list) and len(one) == len(order) for one in held):
            raise DamagedFileError("unexpected content", expected="lists of parameters by rank")
        for number, group in enumerate(order):
            found = [one for its in held for one in (its[number] if isinstance(its[number], list) else [its[number]])]
            if sorted(map(repr, found)) != sorted(map(repr, range(len(group)))):
                raise DamagedFileError("ranks do not have every parameter once")
    return order, shapes, held, bool(said.get("unnamed"))


def read_foreign(directory: Directory, names: Sequence[str] | None) -> Checkpoint:
    """Read a directory that another program wrote."""
    path = str(directory.path)
    checkpoint = _model(directory, names)
    checkpoint.source, checkpoint.format = path, FORMAT
    if checkpoint.param_groups:
        _note_ranks(checkpoint, directory)
        return checkpoint
    ranks = read_ranks(checkpoint, directory.ranks)
    states = [rank.state for rank in ranks]
    lengths = [sum(map(len, shares)) for shares in zip(*(state.numbers for state in states), strict=True)]
    listed = names if names is not None else _param_names(states[0], lengths)
    if listed is not None:
        order = order_by_names(listed, lengths, checkpoint)
    else:
        order = order_by_model(states, checkpoint)
        checkpoint.is_numbered = True
        checkpoint.warnings.append(
            "the files do not say the order of the optimizer's parameters; within each group it is taken to be the "
            f"model's ({NAMES_ADVICE})"
        )
    attach_ranks(checkpoint, ranks, order)
    for rank in ranks:  # what their files hold besides the optimizer and the model
        for key, value in rank.others.items():
            if not (isinstance(value, dict) and value.keys() >= checkpoint.parameters.keys()):
                checkpoint.metadata[f"{Path(rank.file.path).stem}.{key}"] = carried(rank.file, value)
    checkpoint.step = checkpoint.step if checkpoint.step is not None else checkpoint.most_steps
    return checkpoint


def _note_ranks(checkpoint: Checkpoint, directory: Directory) -> None:
    """Note the state in the ranks' own files as copies, where one file holds that of all of them."""
    known = {**checkpoint.unnamed, **checkpoint.parameters}
    labels = [group.parameters for group in checkpoint.param_groups]
    own = Checkpoint(checkpoint.source, FORMAT)
    for p in known.values():
        own.parameters[p.name] = Parameter(p.name, p.shape, p.dtype, tied_to=p.tied_to)
    try:
        ranks = read_ranks(own, directory.ranks)
        held = [slot for p in known.values() for slot in p.slots.values() if slot.name != WEIGHT]
        states = [state for rank in ranks for state in rank.state.state.values()]
        theirs = [(key, one) for state in states for key, one in state.items() if isinstance(one, Tensor)]
        if Counter((one.name, one.shape, one.dtype) for one in held) != Counter(
            (key, one.shape, one.dtype) for key, one in theirs
        ):
            checkpoint.warnings.append("the ranks' own files hold other state than the file of all of them")
            return
        named = all(label in known for group in labels for label in group)
        order = labels if named else order_by_model([rank.state for rank in ranks], checkpoint)
        if [len(group) for group in order] != [len(group) for group in labels]:
            return
        attach_ranks(own, ranks, order)
    except (LayoutError, UnsupportedError):  # nothing says which is which, for some have no state; all are there
        claim = Claim(COPY, "the ranks' own shares of the state, equal in number and shapes")
        checkpoint.claims |= {str(path): claim for path in directory.ranks}
        return
    except SourceError as error:
        checkpoint.warnings.append(f"the ranks' own files are not read: {error}")
        return
    checkpoint.files += own.files
    pairs = zip((n for group in order for n in group), (n for group in labels for n in group), strict=True)
    for name, label in pairs:
        for key, slot in own.parameters[name].slots.items():
            original = known[label].slots.get(key) if label in known else None
            if original is not None and original.shape == slot.shape:
                checkpoint.duplicates.append(Duplicate("parameter", label, label, slot, original))


def _model(directory: Directory, names: Sequence[str] | None) -> Checkpoint:
    """Return the content of the file that has the model: one next to the ranks' files, or else rank 0's own."""
    found: list[Checkpoint] = []
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
            expected="one next to the ranks' files",
            found=", ".join(Path(one.source).name for one in found),
        )
    if found:
        checkpoint = found[0]
    else:  # the model of a rank's file, whose optimizer has only a share of the parameters
        one = torch_reader.read(directory.ranks[0])
        checkpoint = Checkpoint(one.source, FORMAT, buffers=one.buffers)
        for name, p in one.parameters.items():
            slots = {WEIGHT: p.slots[WEIGHT]} if WEIGHT in p.slots else {}
            checkpoint.parameters[name] = Parameter(name, p.shape, p.dtype, slots, tied_to=p.tied_to)
    if not checkpoint.parameters:
        raise UnsupportedError(
            "ranks' files number their parameters by themselves, and only the sizes of all of the model's parameters "
            "tell which is which",
            advice="put the model's state dict next to them, as model.pt",
        )
    if not found:
        checkpoint.warnings.append(f"the model is read from {directory.ranks[0].name}")
    return checkpoint


def _param_names(state: OptimizerState, lengths: Sequence[int]) -> list[str] | None:
    """Return the names of all ranks' parameters, which torch copies to every rank once it has loaded any."""
    found: list[str] = []
    for group, length in zip(state.groups, lengths, strict=True):
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != length:
            return None
        found += map(str, names)
    return found
