"""A checkpoint as the files of a universal checkpoint. Lays out; writes nothing."""

from __future__ import annotations

from zckpt.engine.plan import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats import torch_archive
from zckpt.formats.universal.folders import folders
from zckpt.formats.universal.names import FOLDER, MODEL_NAME, OPTIMIZER_NAME, ZERO3_MODEL_NAME, parameter_file
from zckpt.formats.universal.write_model import model_tree
from zckpt.formats.universal.write_optimizer import optimizer_tree, zero3_hindrance
from zckpt.state import Checkpoint
from zckpt.torchfile import FromFile, plain

SHOWN_NAMES = 8


def lay_out(checkpoint: Checkpoint) -> list[TargetFile]:
    """Return the files of a universal checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of any format.

    Raises
    ------
    UnsupportedError
        It has no param groups, state of parameters without names, or names that cannot be files'.
    """
    _refuse(checkpoint)
    made = list(folders(checkpoint))
    files = [
        torch_archive.lay_out(MODEL_NAME, model_tree(checkpoint, parameterwise=False)),
        torch_archive.lay_out(ZERO3_MODEL_NAME, model_tree(checkpoint, parameterwise=True)),
        torch_archive.lay_out(f"{FOLDER}/{OPTIMIZER_NAME}", optimizer_tree(checkpoint, made)),
    ]
    files += [
        torch_archive.lay_out(parameter_file(folder.name, stem), tree)
        for folder in made
        for stem, tree in folder.files.items()
    ]
    return files


def notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say what DeepSpeed's own loader will not take of the files, where that depends on the checkpoint."""
    found = []
    hindrance = zero3_hindrance(checkpoint, list(folders(checkpoint)))
    if hindrance is not None:
        found.append(f"DeepSpeed loads this at ZeRO-1 and 2; its ZeRO-3 loader stops: {hindrance}")
    untrained = [p for p in checkpoint.tensors() if p.group is None and p.tied_to is None]
    if untrained:
        found.append(f"DeepSpeed's universal loader does not load the {len(untrained)} frozen parameters and buffers")
    config = checkpoint.metadata.get("ds_config")
    zero = plain(config.node if isinstance(config, FromFile) else config)
    zero = zero.get("zero_optimization") if isinstance(zero, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients") and not zero.get("parameter_alignment"):
        found.append("with round_robin_gradients DeepSpeed's universal loader takes parameters for one another; "
                     "switch it off, or parameter_alignment on")  # fmt: skip
    return tuple(found)


def _refuse(checkpoint: Checkpoint) -> None:
    listed = [name for group in checkpoint.param_groups for name in group.parameters]
    names = list(dict.fromkeys([*checkpoint.unnamed, *(n for n in listed if n not in checkpoint.parameters)]))
    if names:
        raise UnsupportedError(
            "a universal checkpoint has a folder for each parameter by name, and the names of some are not known",
            path=checkpoint.source,
            found=", ".join(names[:SHOWN_NAMES]) + (" ..." if len(names) > SHOWN_NAMES else ""),
            advice="give --names FILE",
        )
    if checkpoint.optimizers():
        raise UnsupportedError(
            "holds several optimizers, and a universal checkpoint has one",
            path=checkpoint.source,
            found=", ".join(checkpoint.optimizers()),
            advice="convert to zckpt or dcp",
        )
    if not checkpoint.param_groups:
        raise UnsupportedError(
            "has no optimizer; DeepSpeed loads a universal checkpoint by its param groups, and nothing without them",
            path=checkpoint.source,
        )
