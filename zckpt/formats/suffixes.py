"""What the end of a target's name says of it: a file of safetensors, a file of torch, or a directory.

A name that ends as other programs' files do is refused: a directory of that name, or a file in another format, is not
what was asked for.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.errors import UsageError

SAFETENSORS = "safetensors"
TORCH = "torch"
DIRECTORY = "directory"

TORCH_SUFFIXES = (".pt", ".bin", ".pth")
"""Of the files of torch.save that zckpt writes."""

READ_SUFFIXES = (*TORCH_SUFFIXES, ".ckpt", ".th")
"""Of the files of torch.save that programs write."""

ADAPTER_NAME = "adapter_model.safetensors"
"""PEFT's of an adapter."""

OWN_NAME = "zckpt.pt"
"""Of a directory of another program: what zckpt writes besides, for which that program has no room."""

OWN_MODEL = (
    r"(?:diffusion_pytorch_)?model(?:(?:-\d{5}-of-\d{5})?\.safetensors|\.safetensors\.index\.json)"
    r"|(?:optimizer|adapter_model|[0-9]+_\w+/model)\.safetensors"
)
"""A pattern of the files of a model's directory that are safetensors, or their index, as zckpt writes it."""

IN_DIRECTORY = "optimizer.safetensors"
"""The name of the optimizer's file in a model's directory."""

LEROBOTS_OPTIMIZER = "training_state/optimizer_state.safetensors"
"""LeRobot's, in a checkpoint whose model is in `pretrained_model`."""

A_MODEL = "a model of another program"

OTHERS = {
    "a checkpoint of Lightning or TensorFlow": ".ckpt .index .meta .pb .tflite",
    A_MODEL: ".gguf .ggml .onnx .h5 .hdf5 .keras .mlmodel .mlpackage .nemo .engine .msgpack "
    ".safetensor .tensors .mar .joblib",
    "arrays": ".npy .npz .mat .parquet .arrow .feather",
    "a pickle": ".pkl .pickle",
    "a part of a torch.distributed.checkpoint": ".distcp .metadata",
    "an archive": ".zip .tar .tgz .gz .bz2 .xz .zst .7z",
    "text": ".json .jsonl .yaml .yml .toml .txt .md .csv .html .svg .py .log",
}
"""Ends of names that are other programs', by what they are."""

MODELS = tuple(OTHERS[A_MODEL].split())
"""Ends of names of other programs' models."""

_FOREIGN = {suffix: what for what, every in OTHERS.items() for suffix in every.split()}


def kind_of_model(target: Path) -> str:
    """Return what a target is that holds a model: SAFETENSORS, TORCH or DIRECTORY.

    Raises UsageError: its name ends as another program's files do.
    """
    suffix = target.suffix.lower()
    if suffix == ".safetensors":
        return SAFETENSORS
    if suffix in TORCH_SUFFIXES:
        return TORCH
    if suffix in _FOREIGN:
        raise UsageError(
            f"{suffix} is the ending of {_FOREIGN[suffix]}, which zckpt does not write",
            path=target,
            expected=f"x.safetensors or {', '.join(f'x{one}' for one in TORCH_SUFFIXES)} for a file, or the name of a "
            "directory, which gets safetensors files and an index",
        )
    return DIRECTORY


def check_directory(target: Path) -> None:
    """Raise UsageError if a directory is to be written under a file's name; Lightning has `x.ckpt` for some."""
    suffix = target.suffix.lower()
    if suffix != ".ckpt" and (suffix in (".safetensors", *TORCH_SUFFIXES) or suffix in _FOREIGN):
        raise UsageError(
            "the target is a directory, but its name ends like a file's",
            path=target,
            expected="the name of a directory",
            found=suffix,
            advice=f"name it {target.stem or 'differently'}",
        )


def optimizer_path(model: Path) -> Path:
    """Return where the optimizer's file of a model goes that is one file."""
    return model.with_name(f"{model.stem}.optimizer{model.suffix}")


def is_optimizers(name: str) -> bool:
    """Tell the name of a file of an optimizer's tensors in a directory that holds a model, zckpt's own or LeRobot's."""
    return name in (IN_DIRECTORY, LEROBOTS_OPTIMIZER) or name.endswith(f".{IN_DIRECTORY}")
