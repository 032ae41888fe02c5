"""Reading what programs write: one file for each rank, and the model in a file beside them or in each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from zckpt.errors import LayoutError, SourceError, UnknownFormatError, UnsupportedError
from zckpt.formats import torch_file
from zckpt.formats.tensors import carried
from zckpt.formats.torch_optimizer import OptimizerState
from zckpt.formats.zero_redundancy.directory import FORMAT, Directory
from zckpt.formats.zero_redundancy.order import told_by_names, told_by_the_model
from zckpt.formats.zero_redundancy.ranks import RankFile, attach_ranks, read_ranks
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, Scalar
from zckpt.state.inventory import COPY, Claim
from zckpt.torchfile import Tensor


def read_foreign(directory: Directory, names: Sequence[str] | None) -> Checkpoint:
    """Read a directory that another program wrote. Parameters and errors are those of `read`."""
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
        order = told_by_names(listed, lengths, checkpoint, path)
    else:
        order = told_by_the_model(states, checkpoint, path)
        checkpoint.is_numbered = True
        checkpoint.warnings.append(
            "the files do not tell the order of the optimizer's parameters; within each group it is taken to be the "
            "model's (give --names FILE, one name a line in the optimizer's order)"
        )
    attach_ranks(checkpoint, ranks, order)
    _carry(checkpoint, ranks)
    checkpoint.step = checkpoint.step if checkpoint.step is not None else _step(checkpoint)
    return checkpoint


def _note_ranks(checkpoint: Checkpoint, directory: Directory) -> None:
    """Note the state in the ranks' own files as copies, where one file holds that of all of them."""
    known = {**checkpoint.unnamed, **checkpoint.parameters}
    labels = [group.parameters for group in checkpoint.param_groups]
    parts = Checkpoint(checkpoint.source, FORMAT)
    for p in known.values():
        parts.parameters[p.name] = Parameter(p.name, p.shape, p.dtype, tied_to=p.tied_to)
    try:
        ranks = read_ranks(parts, directory.ranks)
        if _shapes_of(known.values()) != Counter(_shapes_in(ranks)):
            checkpoint.warnings.append("the ranks' own files hold other state than the file of all of them")
            return
        named = all(label in known for group in labels for label in group)
        order = labels if named else told_by_the_model([rank.state for rank in ranks], checkpoint, checkpoint.source)
        if [len(group) for group in order] != [len(group) for group in labels]:
            return
        attach_ranks(parts, ranks, order)
    except (LayoutError, UnsupportedError):  # which is which cannot be told, for some have no state; all are there
        claim = Claim(COPY, "the ranks' own parts of the state, alike in number and shapes")
        checkpoint.claims |= {str(path): claim for path in directory.ranks}
        return
    except SourceError as error:
        checkpoint.warnings.append(f"the ranks' own files are not read: {error}")
        return
    checkpoint.files += parts.files
    pairs = zip((n for group in order for n in group), (n for group in labels for n in group), strict=True)
    for name, label in pairs:
        for key, slot in parts.parameters[name].slots.items():
            original = known[label].slots.get(key) if label in known else None
            if original is not None and original.shape == slot.shape:
                checkpoint.duplicates.append(Duplicate("parameter", label, label, slot, original))


def _shapes_of(parameters: Iterable[Parameter]) -> Counter[tuple[object, ...]]:
    """Count the slots of each name, shape and type that are the optimizer's."""
    slots = (slot for p in parameters for slot in p.slots.values() if slot.name != WEIGHT)
    return Counter((slot.name, slot.shape, slot.dtype) for slot in slots)


def _shapes_in(ranks: Sequence[RankFile]) -> Iterator[tuple[object, ...]]:
    """Yield the same of ranks' files."""
    for rank in ranks:
        for state in rank.state.state.values():
            for key, tensor in state.items():
                if isinstance(tensor, Tensor):
                    yield key, tensor.shape, tensor.dtype


def _model(directory: Directory, names: Sequence[str] | None) -> Checkpoint:
    """Return the content of the file that has the model: one beside the ranks' files, or else rank 0's own."""
    found: list[Checkpoint] = []
    for path in directory.others:
        try:
            checkpoint = torch_file.read(path)
        except UnsupportedError:  # no state dict: a scheduler's state, a random state
            continue
        if checkpoint.parameters:
            found.append(torch_file.read(path, names=names) if checkpoint.param_groups and names else checkpoint)
    if len(found) > 1:
        raise UnknownFormatError(
            "several files hold a model",
            path=directory.path,
            expected="one beside the ranks' files",
            found=", ".join(Path(one.source).name for one in found),
        )
    checkpoint = found[0] if found else _without_optimizer(torch_file.read(directory.ranks[0]))
    if not checkpoint.parameters:
        raise UnsupportedError(
            "ranks' files number their parameters by themselves, and only the sizes of all of the model's parameters "
            "tell which is which",
            path=directory.path,
            advice="put the model's state dict beside them, as model.pt",
        )
    if not found:
        checkpoint.warnings.append(f"the model is read from {directory.ranks[0].name}")
    return checkpoint


def _without_optimizer(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model of a rank's file, without the optimizer, which has only a share of the parameters."""
    bare = Checkpoint(checkpoint.source, FORMAT, buffers=checkpoint.buffers)
    for name, one in checkpoint.parameters.items():
        slots = {WEIGHT: one.slots[WEIGHT]} if WEIGHT in one.slots else {}
        bare.parameters[name] = Parameter(name, one.shape, one.dtype, slots, tied_to=one.tied_to)
    return bare


def _param_names(state: OptimizerState, lengths: Sequence[int]) -> list[str] | None:
    """Return the names of all ranks' parameters, which torch copies to every rank once it has loaded any."""
    found: list[str] = []
    for group, length in zip(state.groups, lengths, strict=True):
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != length:
            return None
        found += map(str, names)
    return found


def _carry(checkpoint: Checkpoint, ranks: Sequence[RankFile]) -> None:
    """Keep what ranks' files hold beside the optimizer and the model."""
    for rank in ranks:
        if rank.key is None or not isinstance(rank.file.root, dict):
            continue
        for key, value in rank.file.root.items():
            model = isinstance(value, dict) and value.keys() >= checkpoint.parameters.keys()
            if key not in (rank.key, "rank", "world_size") and not model:
                checkpoint.metadata[f"{Path(rank.file.path).stem}.{key}"] = carried(rank.file, value)


def _step(checkpoint: Checkpoint) -> int | None:
    steps = [group.state.get("step") for group in checkpoint.param_groups]
    numbers = [step.value if isinstance(step, Scalar) else step for step in steps]
    return max((int(n) for n in numbers if isinstance(n, (int, float))), default=None)
