"""Take optimizer state out of torch files: every dict in them that is a `torch.optim` state dict, wherever it is.

{state: {number: {slot: tensor, step}}, param_groups}  ->  {state: {}, param_groups}        the whole state
                                                           {state: {number: {kept slots, step}}, param_groups}

The dict itself and its hyperparameters stay, so that `load_state_dict` takes it: without state, as at the start of
a training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.formats.companions import files_below
from zckpt.formats.safetensors import file as safetensors_file
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.stripping import Edit, Edited, Request, Rewritten, Stripping, completed, gone, replaced, rewrite
from zckpt.formats.suffixes import LEROBOTS_OPTIMIZER, READ_SUFFIXES, is_optimizers
from zckpt.formats.torch_files.optimizer import GROUPS_KEY, STATE_KEY, apart, looks_flattened, looks_like_optimizer
from zckpt.state import Checkpoint, without
from zckpt.torchfile import Tensor, TorchFile, children, each, is_leaf, read_torchfile, walk_tensors

_LEROBOTS = re.compile(r"state/[0-9]+/(.+)", re.DOTALL)


def strip_file(path: Path, name: str, request: Request, slots: Collection[str]) -> Rewritten:
    """Return a torch file without what is to go.

    `name`: within the target; `slots`: the names of slots, as far as they are known: a 0-d tensor of any other name is
    a single value.
    """
    return rewrite(path, name, optimizer_edit(request, slots), unreferenced=request.unreferenced)


def strip_directory(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of a directory of torch and safetensors files; all others are copied."""
    known = {file.path for file in checkpoint.files}
    slots = shaped_slots(checkpoint)
    files = []
    for name, path in files_below(source):
        if is_optimizers(name) and request.slots:
            entries, metadata, nbytes = safetensors_file.read_header(path)
            kept: list[safetensors_layout.Entry] = []
            kinds: Counter[str] = Counter()
            dropped, whole = request.of({_kind(key) for key, slot in entries.items() if slot.shape})
            for key, slot in entries.items():
                kind = _kind(key)
                if whole or kind in dropped:
                    kinds[kind] += slot.nbytes
                else:
                    kept.append(safetensors_layout.Entry(key, slot, slot.dtype))
            if kept or name == LEROBOTS_OPTIMIZER:
                laid = safetensors_layout.lay_out(name, kept, without(metadata, "format"))
                files.append(replaced(name, nbytes, laid, kinds))
            else:
                files.append(gone(path, name, kinds))
        elif path.suffix in READ_SUFFIXES and (str(path) in known or _is_torch(path)):
            files.append(strip_file(path, name, request, slots))
    return completed(source, source, files, notes=request.notes)


def shaped_slots(checkpoint: Checkpoint) -> list[str]:
    """Return the names that stand for one value per element, or for several."""
    owned = checkpoint.all_parameters
    shaped = {key for one in owned for key, slot in one.slots.items() if slot.shape}
    return [key for key in checkpoint.optimizer_slot_names() if key in shaped]


def optimizer_slots(source: Path) -> list[str]:
    """Return the names of slots in the safetensors files of optimizers in a directory."""
    found = [path for name, path in files_below(source) if is_optimizers(name)]
    return [_kind(key) for path in found for key in safetensors_file.read_header(path)[0]]


def _kind(key: str) -> str:
    """Return the slot of `<slot>/<parameter>`, or as LeRobot has it `state/<number>/<slot>`."""
    numbered = _LEROBOTS.fullmatch(key)
    return numbered[1] if numbered else key.split("/", 1)[0]


def _is_torch(path: Path) -> bool:
    """Tell whether a file that is no part of the checkpoint, but may have more of its state, is one of torch's."""
    try:
        read_torchfile(path)
    except SourceError:
        return False
    return True


def optimizer_edit(request: Request, slots: Collection[str]) -> Edit:
    """Return the edit that takes slots out of every optimizer in a tree."""

    def edit(file: TorchFile) -> Edited:
        edited = Edited(file.root)
        for node in each(file.root, _below) if request.slots else ():
            if looks_like_optimizer(node):
                state = node[STATE_KEY]
                before = {number for number, one in state.items() if one}
                drop_slots(list(state.values()), request, slots, edited)
                for number in [number for number, one in state.items() if number in before and not one]:
                    del state[number]
            elif looks_flattened(node):
                _drop_joined(node, request, slots, edited)
        return edited

    return edit


def _below(node: object) -> list[object]:
    below = without(node, STATE_KEY, GROUPS_KEY) if looks_like_optimizer(node) else node  # which may hold another
    return [child for _, child in children(below) if not is_leaf(child)]


def drop_slots(states: list[object], request: Request, slots: Collection[str], edited: Edited) -> None:
    """Take slots out of the states of an optimizer's parameters.

    What is no tensor and what is a single value (a step) stays where a slot does, and goes with the last one: an
    optimizer takes a state that is not empty for one that is complete.
    """
    dicts = [one for one in states if isinstance(one, dict)]
    names = {str(key) for one in dicts for key, value in one.items() if any(t.shape for t in _tensors(value))}
    names |= set(slots)
    for one in dicts:
        present = {str(key) for key, value in one.items() if str(key) in names and _tensors(value)}
        gone, whole = request.of(present)
        for key in [key for key in one if whole or str(key) in gone]:
            edited.dropped += [(str(key), tensor) for tensor in _tensors(one.pop(key))]
            edited.changed = True


def _drop_joined(node: dict[str, object], request: Request, slots: Collection[str], edited: Edited) -> None:
    """Take slots out of a state dict whose keys are joined."""
    states, _ = apart(node)
    drop_slots(list(states.values()), request, slots, edited)
    kept = {f"{STATE_KEY}.{name}.{slot}" for name, its in states.items() for slot in its}
    for key in [key for key in node if key.startswith(f"{STATE_KEY}.") and key not in kept]:
        del node[key]


def _tensors(value: object) -> list[Tensor]:
    return [tensor for _, tensor in walk_tensors(value)]
