"""The model once more, whole, which verl saves beside the files of ranks if it is told to.

DIR/huggingface/model*.safetensors, pytorch_model*.bin      all of it, as `from_pretrained` wants it
DIR/lora_adapter/adapter_model.safetensors                  LoRA's parameters, under PEFT's names: without `default`

They are copies as those next to other checkpoints are, see `companions`.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.companions import COPIED, INDEXES, note_copies
from zckpt.formats.fsdp_rank_files.directory import HUGGINGFACE
from zckpt.state import Checkpoint
from zckpt.state.inventory import IMPLIED, Claim
from zckpt.storage.files import is_file

ADAPTER = "lora_adapter/adapter_model.safetensors"


def read_copies(checkpoint: Checkpoint, directory: Path) -> None:
    """Note what a directory holds of the model besides the files of ranks."""
    folder = directory / HUGGINGFACE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if note_copies(checkpoint, [path for path in files if COPIED.fullmatch(path.name) and is_file(path)]):
        indexes = {str(folder / name): Claim(IMPLIED, "which file each tensor is in") for name in INDEXES}
        checkpoint.claims |= {path: claim for path, claim in indexes.items() if is_file(path)}
    if is_file(directory / ADAPTER):
        names = [*checkpoint.parameters, *checkpoint.buffers]
        note_copies(checkpoint, [directory / ADAPTER], {name.replace(".default.", "."): name for name in names})
