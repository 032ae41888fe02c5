"""From the files of ranks to a Checkpoint. Structure only; no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import DamagedFileError
from zckpt.evidence import note_not_used
from zckpt.formats.companions import COPIED, carry, note_adapter, note_models
from zckpt.formats.deepspeed.values import keep_others
from zckpt.formats.fsdp_rank_files.attach import attach
from zckpt.formats.fsdp_rank_files.directory import CONFIG_NAME, FORMAT, HUGGINGFACE, LORA_NAME, OWN_NAME, Directory
from zckpt.formats.fsdp_rank_files.extra import KEYS, OF_ITS_RANK
from zckpt.formats.fsdp_rank_files.model import Model, read_models
from zckpt.formats.fsdp_rank_files.optimizer import read_optimizers
from zckpt.formats.fsdp_rank_files.own import RULES, give_masters, recorded_names
from zckpt.formats.fsdp_rank_files.ties import tie_as_configured
from zckpt.formats.fsdp_rank_files.units import units_in
from zckpt.formats.remainder import restore
from zckpt.formats.torch_files.tensors import by_name, carried, describe
from zckpt.state import Checkpoint, Topology
from zckpt.state.inventory import COPY, IMPLIED, Claim, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import TorchFile, brief, read_torchfile

ADAPTER = "lora_adapter/adapter_model.safetensors"
"""LoRA's parameters, under PEFT's names."""


def read(directory: Directory, *, names: Sequence[str] | None = None) -> Checkpoint:
    """Read the structure of all ranks' files.

    Parameters
    ----------
    directory : Directory
    names : sequence of str, optional
        Names of the optimizer's parameters, in its order.

    Raises
    ------
    SourceError
        Files are damaged or contradict each other, or do not say whose state is whose.
    UsageError
        `names` do not fit.
    """
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    checkpoint.world_size = directory.world_size
    model = read_models(checkpoint, directory.models)
    own = read_torchfile(directory.own) if directory.own is not None else None
    _describe_mesh(checkpoint, model)
    if directory.optimizers:
        known = names if own is None else _recorded(checkpoint, own, names)
        optimizer = read_optimizers(checkpoint, directory.optimizers)
        attach(checkpoint, model, optimizer, known, ties_are_known=own is not None)
    if own is None:
        tie_as_configured(checkpoint, model, directory.path)
    _read_copies(checkpoint, directory.path)
    _read_extras(checkpoint, directory)
    for path in directory.beside:
        carry(checkpoint, path)
    _claim(checkpoint, directory)
    checkpoint.step = directory.step if directory.step is not None else _step(checkpoint)
    if own is not None:
        checkpoint.files.append(describe(own, "metadata", rules=RULES))
        restore(checkpoint, own.root, own)
        give_masters(checkpoint, own)
        checkpoint.is_numbered = False
    return checkpoint


def _recorded(checkpoint: Checkpoint, own: TorchFile, names: Sequence[str] | None) -> list[str] | None:
    note_not_used(checkpoint, names)
    return recorded_names(own, list(checkpoint.parameters))


def _describe_mesh(checkpoint: Checkpoint, model: Model) -> None:
    device = next((held[0].mesh.device for held in model.held.values() if held[0].mesh is not None), "")
    if device:
        checkpoint.details["device"] = device
    meshes = {(one.sizes, one.names) for held in model.held.values() if (one := held[0].mesh) is not None}
    kinds = dict.fromkeys(held[0].kind for held in model.held.values())
    checkpoint.details["tensors"] = list(kinds)
    if meshes:
        sizes, names = max(meshes, key=lambda one: len(one[0]))
        checkpoint.details["mesh"] = dict(zip(names, sizes, strict=True)) if names else list(sizes)
    tp = max((dict(zip(names, sizes, strict=False)).get("tp", 1) for sizes, names in meshes), default=1)
    checkpoint.topology = Topology(dp=checkpoint.world_size // max(tp, 1), tp=max(tp, 1))
    units = units_in(model.modules)
    if units:
        checkpoint.details["fsdp_units"] = units


def _read_extras(checkpoint: Checkpoint, directory: Directory) -> None:
    """Keep what ranks' further files hold: what all have once, what is each rank's own under its file's name."""
    contents: list[tuple[TorchFile, dict[str, object]]] = []
    for path in directory.extras:
        file = read_torchfile(path)
        if not isinstance(file.root, dict):
            raise DamagedFileError("unexpected content", path=path, expected="a dict", found=brief(file.root, 60))
        contents.append((file, by_name(file.root, file.path)))
    if not contents:
        return
    every = list(dict.fromkeys(key for _, content in contents for key in content))
    checkpoint.details[KEYS] = every
    keys = [key for key in every if key not in OF_ITS_RANK]
    file, content = contents[0]
    metadata = {key: carried(file, content[key]) for key in keys if key in content}
    others, rules = keep_others(contents[0], contents[1:], keys)
    checkpoint.metadata |= {key: value for key, value in metadata.items() if key not in checkpoint.metadata} | others
    about = tuple(Rule((key,), IMPLIED, "which rank the file is of") for key in OF_ITS_RANK)
    for rank, (one, _) in enumerate(contents):
        own = (Rule(("**",), COPY, f"as in {OWN_NAME}", tensors=True),) if directory.own is not None else ()
        checkpoint.files.append(describe(one, "metadata", rank, rules=(*about, *own, *rules.get(one.path, ()))))


def _read_copies(checkpoint: Checkpoint, directory: Path) -> None:
    """Note the model once more, whole, which verl saves beside the files of ranks if it is told to."""
    folder = directory / HUGGINGFACE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    note_models(checkpoint, [path for path in files if COPIED.fullmatch(path.name) and is_file(path)], folder)
    if is_file(directory / ADAPTER):
        note_adapter(checkpoint, directory / ADAPTER)


def _claim(checkpoint: Checkpoint, directory: Directory) -> None:
    """Say what files without tensors are."""
    for path in directory.trackers:
        checkpoint.claims[str(path)] = Claim(IMPLIED, "which step is the last")
    if is_file(directory.path / CONFIG_NAME):
        checkpoint.claims[str(directory.path / CONFIG_NAME)] = Claim(IMPLIED, "the version of FSDP, and how many ranks")
    if is_file(directory.path / LORA_NAME):
        checkpoint.claims[str(directory.path / LORA_NAME)] = Claim(IMPLIED, "the configuration of LoRA")
    if directory.config:
        checkpoint.details["fsdp_config"] = dict(directory.config)
    if directory.others:
        said = f"not of the checkpoint: files of ranks of another world size, such as {directory.others[0].name}"
        checkpoint.warnings.append(said)
        checkpoint.leftovers |= {str(path): said for path in directory.others}


def _step(checkpoint: Checkpoint) -> int | None:
    """Return the step that a program has counted, or else the optimizer."""
    found = checkpoint.metadata.get("global_step")
    if type(found) is int:
        return found
    return checkpoint.most_steps
