"""A checkpoint as one model and one `torch.optim` optimizer, whole: what any program without shards reads.

DIR/model-00001-of-0000N.safetensors ...  model.safetensors.index.json      the model, as Hugging Face lays it out
DIR/optimizer.pt                          {state, param_groups}, for `torch.optim.Optimizer.load_state_dict`
DIR/metadata.pt                           everything else: scheduler, client state, which parameters are frozen

FILE.pt                                   {"model": {name: tensor}, "optimizer": {state, param_groups}, "zckpt": ...}

Masters that the model does not hold exactly are in the optimizer's state, under `master`.

Other writers of whole models take from here which tensors there are, from which slots and of which types.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.engine import DEFAULT_MAX_SHARD_NBYTES
from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.consolidated.optimizer import optimizer_tree
from zckpt.formats.remainder import KEY, known_names, names_in, of_modules, remainder, restore_from
from zckpt.formats.safetensors import file as safetensors_file
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.reader import read_optimizer
from zckpt.formats.torch_files.writer import is_readable
from zckpt.state import MASTER, WEIGHT, Checkpoint, GivenNames, Parameter, Slot, is_floating
from zckpt.torchfile import OrderedMapping, read_torchfile

Tensors = dict[str, tuple[Slot, str]]
"""What is written under each name: a slot and its element type in the target."""


def model_tensors(
    checkpoint: Checkpoint, dtype: str | None, *, tied: str = "duplicate", exclude_frozen: bool = False
) -> Tensors:
    """Return what a whole model holds under each name; see `consolidate` for the parameters."""
    tensors: Tensors = {}
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is not None and tied == "drop":
            continue
        owner = checkpoint.owner(parameter.name)
        if owner.frozen and owner.master is None and exclude_frozen:  # one that was frozen later was trained
            continue
        chosen = chosen_slot(owner, dtype)
        if chosen is not None:
            tensors[parameter.name] = chosen
    for buffer in checkpoint.buffers.values():
        tensors[buffer.name] = (buffer.slots[WEIGHT], buffer.slots[WEIGHT].dtype)
    return tensors


def trained_tensors(checkpoint: Checkpoint, *, tied: str = "duplicate") -> Tensors:
    """Return what a whole model holds for programs without masters: these in the place of weights, as they are."""
    found = model_tensors(checkpoint, None, tied=tied)
    return {name: (slot, slot.dtype) for name, (slot, _) in found.items()}


def chosen_slot(parameter: Parameter, dtype: str | None) -> tuple[Slot, str] | None:
    """Return the slot that a parameter is written from, and its element type in the target."""
    weight, master = parameter.weight, parameter.master
    best = master or weight
    if best is None:
        return None
    if (parameter.frozen and master is None) or not is_floating(best.dtype):
        return best, best.dtype
    if dtype == "keep":
        if weight is not None and weight.dtype != best.dtype:
            return weight, weight.dtype
        return best, parameter.dtype
    if dtype is None:
        return best, "float32" if master is not None else best.dtype
    return best, dtype


def optimizer_slots(checkpoint: Checkpoint, dtype: str | None) -> list[str]:
    """Return the slots that the optimizer's file needs: all, but for masters that the model's file holds exactly."""
    found = [name for name in checkpoint.slot_names() if name != WEIGHT]
    chosen = [chosen_slot(one, dtype) for one in checkpoint.parameters.values() if one.master]
    exact = all(one is not None and one[0].name == MASTER and one[1] == one[0].dtype for one in chosen)
    return [name for name in found if name != MASTER or not exact]


OPTIMIZER_NAME = "optimizer.pt"
METADATA_NAME = "metadata.pt"


def model_tree(checkpoint: Checkpoint, tensors: Tensors) -> OrderedMapping:
    """Return a model's state dict, with what modules keep besides tensors; names of one slot share its storage."""
    root = OrderedMapping()
    root.update((name, value) for name, value in of_modules(checkpoint)[0].items() if is_readable(value))
    tensors_of: dict[int, torch_writer.SlotTensor] = {}
    for name, (slot, dtype) in tensors.items():
        root[name] = tensors_of.setdefault(id(slot), torch_writer.SlotTensor(slot, dtype, name))
    return root


def lay_out(checkpoint: Checkpoint, *, dtype: str = "keep") -> list[TargetFile]:
    """Return the files of a directory.

    `dtype`: of trained parameters in the model's files. Raises UnsupportedError: state that no single parameter can
    hold, or no model.
    """
    tensors = model_tensors(checkpoint, dtype)
    if not tensors:
        raise UnsupportedError(
            "holds only optimizer state, but the directory needs a model as well",
            advice="give a .pt file as the target, or `--to=dcp` or `--to=zckpt`",
        )
    entries = [safetensors_layout.Entry(name, *one) for name, one in tensors.items()]
    files = safetensors_layout.lay_out_directory(entries, DEFAULT_MAX_SHARD_NBYTES, indexed=True)
    if checkpoint.param_groups:
        tree = optimizer_tree(checkpoint, optimizer_slots(checkpoint, dtype))
        files.append(torch_writer.lay_out(OPTIMIZER_NAME, tree))
    return [*files, torch_writer.lay_out(METADATA_NAME, remainder(checkpoint) | known_names(checkpoint))]


def lay_out_file(name: str, checkpoint: Checkpoint, *, dtype: str = "keep") -> TargetFile:
    """Return one torch file of all of it. Parameters and errors are those of `lay_out`."""
    tensors = model_tensors(checkpoint, dtype)
    root: dict[str, object] = {"model": model_tree(checkpoint, tensors)}
    if checkpoint.param_groups:
        root["optimizer"] = optimizer_tree(checkpoint, optimizer_slots(checkpoint, dtype))
    return torch_writer.lay_out(name, {**root, KEY: remainder(checkpoint) | known_names(checkpoint)})


def read(path: Path, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a directory.

    Raises SourceError: a file is damaged, or the files contradict each other.
    """
    checkpoint = safetensors_file.read(path)
    checkpoint.format = "consolidated"
    optimizer = path / OPTIMIZER_NAME
    rest = read_torchfile(path / METADATA_NAME)
    if optimizer.is_file():
        state = read_optimizer(checkpoint, optimizer)
        certain = None if names is not None else names_in(rest.root, checkpoint, rest.path)
        attach(checkpoint, state, str(optimizer), names=names, certain=certain)
    restore_from(checkpoint, rest)
    return checkpoint
