"""The model once more, whole, which verl saves beside the files of ranks if it is told to.

DIR/huggingface/model*.safetensors, pytorch_model*.bin      all of it, as `from_pretrained` wants it
DIR/lora_adapter/adapter_model.safetensors                  LoRA's parameters, under PEFT's names: without `default`

A file of which every tensor has the name and the shape of one of the model's is a copy. Of those of the same type
`verify --deep` holds every byte against the ranks'; one of another type is a model that was cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.formats.companions import COPIED, INDEXES
from zckpt.formats.fsdp_rank_files.directory import HUGGINGFACE
from zckpt.formats.safetensors.file import METADATA_KEY, RULES, read_header
from zckpt.formats.torch_files.tensors import describe, slot_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Slot, SourceFile
from zckpt.state.inventory import COPY, IMPLIED, Claim
from zckpt.storage.files import is_file
from zckpt.torchfile import Tensor, read_torchfile

ADAPTER = "lora_adapter/adapter_model.safetensors"


def read_copies(checkpoint: Checkpoint, directory: Path) -> None:
    """Note what a directory holds of the model besides the files of ranks. Reads no tensor."""
    names = {name: name for name in [*checkpoint.parameters, *checkpoint.buffers]}
    folder = directory / HUGGINGFACE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [_note(checkpoint, path, names) for path in files if COPIED.fullmatch(path.name) and is_file(path)]
    if any(found):
        indexes = {str(folder / name): Claim(IMPLIED, "which file each tensor is in") for name in INDEXES}
        checkpoint.claims |= {path: claim for path, claim in indexes.items() if is_file(path)}
    if is_file(directory / ADAPTER):
        _note(checkpoint, directory / ADAPTER, {name.replace(".default.", "."): name for name in names})


def _note(checkpoint: Checkpoint, path: Path, names: Mapping[str, str]) -> bool:
    """Note a file that is a copy; tell whether it is one. Nothing is said of any other: no one has read it then."""
    try:
        slots, file = _slots(path)
    except SourceError:
        return False
    originals: dict[str, Slot] = {}
    for name, slot in slots.items():
        known = names.get(name)
        weight = checkpoint.owner(known).slots.get(WEIGHT) if known is not None else None
        if weight is None or weight.shape != slot.shape:
            return False
        originals[name] = weight
    if not slots:
        return False
    if any(originals[name].dtype != slot.dtype for name, slot in slots.items()):
        checkpoint.claims[str(path)] = Claim(COPY, "the model once more, in another type")
        return True
    checkpoint.files.append(file)
    for name, slot in slots.items():
        known = names[name]
        one = checkpoint.parameters.get(known)
        kind = "buffer" if one is None else "parameter" if one.tied_to is None else "tied"
        owner = known if one is None else one.tied_to or known
        checkpoint.duplicates.append(Duplicate(kind, known, owner, slot, originals[name]))
    return True


def _slots(path: Path) -> tuple[dict[str, Slot], SourceFile]:
    """Return the tensors of a file, as weights, and what the inventory needs of it."""
    if path.suffix == ".safetensors":
        slots, texts, nbytes = read_header(path)
        found = {name: Slot(WEIGHT, slot.dtype, slot.shape, slot.spans) for name, slot in slots.items()}
        used = sum(slot.nbytes for slot in slots.values())
        tree = {METADATA_KEY: texts, **found}
        return found, SourceFile(str(path), nbytes, "model", tensor_nbytes=used, tree=tree, rules=RULES)
    file = read_torchfile(path)
    root = file.root if isinstance(file.root, dict) else {}
    tensors = {str(name): one for name, one in root.items() if isinstance(one, Tensor)}
    whole = tensors if len(tensors) == len(root) else {}
    return {name: slot_of(WEIGHT, one, file.path) for name, one in whole.items()}, describe(file, "model")
