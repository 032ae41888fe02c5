"""Reading what zckpt wrote: `metadata.pt` tells the order of the optimizer's parameters, and everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.errors import DamagedFileError
from zckpt.formats.remainder import remainder_rules, restore
from zckpt.formats.tensors import describe, slot_of
from zckpt.formats.torch_optimizer import optimizer_rules, parse
from zckpt.formats.zero_redundancy.directory import FORMAT, KEY, OPTIMIZER_NAME, Directory
from zckpt.formats.zero_redundancy.order import Order, told_by_names
from zckpt.formats.zero_redundancy.ranks import Shares, attach_named, attach_ranks, read_ranks
from zckpt.state import WEIGHT, Checkpoint, Parameter
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import Tensor, TorchFile, read_torchfile


def read_own(directory: Directory, metadata: TorchFile, names: Sequence[str] | None) -> Checkpoint:
    """Read a directory that zckpt wrote. Parameters and errors are those of `read`."""
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    for model in directory.models:
        file = read_torchfile(model)
        checkpoint.files.append(describe(file, "model"))
        _place(checkpoint, file)
    about = _mapping(_mapping(metadata.root, metadata).get(KEY), metadata)
    order = _order(about, metadata)
    if names is not None and about.get("unnamed"):
        order = told_by_names(names, [len(group) for group in order], checkpoint, str(directory.path))
    elif names is not None:
        checkpoint.warnings.append("--names is not used: the directory has the names of the parameters")
    outside = [name for group in order for name in group if name not in checkpoint.parameters]
    shapes = _shapes(about, metadata)
    for name in outside:
        checkpoint.parameters[name] = Parameter(name, shapes.get(name, ()), "float32")
    _attach(checkpoint, directory, order, _held(about, order, metadata))
    for name in outside:
        parameter = checkpoint.parameters.pop(name)
        if parameter.slots or parameter.state:
            checkpoint.unnamed[name] = parameter
    rules = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "which rank has which parameters"))
    checkpoint.files.append(describe(metadata, "metadata", rules=rules))
    restore(checkpoint, metadata.root, metadata)
    return checkpoint


def _place(checkpoint: Checkpoint, file: TorchFile) -> None:
    """Take over a model's tensors; `metadata.pt` says which are buffers and which are tied."""
    for key, tensor in _mapping(file.root, file).items():
        if isinstance(tensor, Tensor):
            name = str(key)
            if name in checkpoint.parameters:
                raise DamagedFileError(f"{name} is there twice", path=file.path)
            slots = {WEIGHT: slot_of(WEIGHT, tensor, file.path)}
            checkpoint.parameters[name] = Parameter(name, tensor.shape, tensor.dtype, slots)


def _attach(checkpoint: Checkpoint, directory: Directory, order: Order, held: Shares | None) -> None:
    if directory.ranks:
        attach_ranks(checkpoint, read_ranks(checkpoint, directory.ranks), order, held)
    elif order:
        file = read_torchfile(directory.path / OPTIMIZER_NAME)
        checkpoint.files.append(describe(file, "optimizer", rules=optimizer_rules()))
        every = [name for group in order for name in group]
        attach_named(checkpoint, parse(file.root, file.path), file.path, every)


def _order(about: Mapping[object, object], metadata: TorchFile) -> Order:
    names = about.get("names")
    if not isinstance(names, list) or not all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in names
    ):
        raise DamagedFileError("unexpected content", path=metadata.path, expected="lists of names")
    every = [name for group in names for name in group]
    if len(set(every)) != len(every):
        raise DamagedFileError("the optimizer has a parameter twice", path=metadata.path)
    return names


def _held(about: Mapping[object, object], order: Order, metadata: TorchFile) -> Shares | None:
    """Return which rank has what, where that does not follow from sizes (parameters that were put on RPC workers)."""
    held = about.get("held")
    if held is None:
        return None
    every: list[list[object]] = [[] for _ in order]
    if not isinstance(held, list) or not all(isinstance(groups, list) and len(groups) == len(order) for groups in held):
        raise DamagedFileError("unexpected content", path=metadata.path, expected="lists of parameters by rank")
    for groups in held:
        for known, mine in zip(every, groups, strict=True):
            known.extend(mine if isinstance(mine, list) else [mine])
    if any(
        sorted(map(repr, known)) != sorted(map(repr, range(len(group))))
        for known, group in zip(every, order, strict=True)
    ):
        raise DamagedFileError("ranks do not have every parameter once", path=metadata.path)
    return held


def _shapes(about: Mapping[object, object], metadata: TorchFile) -> dict[str, tuple[int, ...]]:
    """Return the recorded shapes of parameters that the model does not hold."""
    shapes = _mapping(about.get("shapes"), metadata)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise DamagedFileError("unexpected content", path=metadata.path, expected=f"the shape of {name}")
        found[str(name)] = tuple(shape)
    return found


def _mapping(node: object, file: TorchFile) -> Mapping[object, object]:
    if not isinstance(node, dict):
        raise DamagedFileError("unexpected content", path=file.path, expected="a dict", found=type(node).__name__)
    return node
