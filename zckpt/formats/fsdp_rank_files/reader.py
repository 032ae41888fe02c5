"""From the files of ranks to a Checkpoint. Structure only; no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UnsupportedError
from zckpt.evidence import note_not_used
from zckpt.formats.companions import COPIED, carry, note_adapter, note_models
from zckpt.formats.deepspeed.values import keep_others
from zckpt.formats.fsdp_rank_files.contents import Model, add_part, read_models, read_optimizers, tie_as_configured
from zckpt.formats.fsdp_rank_files.directory import (
    CONFIG_NAME,
    EXTRA,
    FORMAT,
    HUGGINGFACE,
    LORA_NAME,
    Directory,
    rank_name,
)
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.fsdp_rank_files.kept import KEYS, OF_ITS_RANK, RULES, give_masters, recorded_names
from zckpt.formats.fsdp_rank_files.readings import attach
from zckpt.formats.fsdp_rank_files.units import units_in
from zckpt.formats.lost import is_lost
from zckpt.formats.remainder import restore
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.tensors import as_mapping, by_name, carried, describe
from zckpt.state import Checkpoint, Topology
from zckpt.state.inventory import COPY, IMPLIED, Claim, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import read_torchfile

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
    model = read_models(checkpoint, directory.models, directory.places[0])
    own = read_torchfile(directory.own) if directory.own is not None else None
    _describe_mesh(checkpoint, model)
    if directory.optimizers:
        known = names
        if own is not None:
            note_not_used(checkpoint, names)
            known = recorded_names(own, list(checkpoint.parameters))
        optimizer = read_optimizers(checkpoint, directory.optimizers, directory.places[1])
        attach(checkpoint, model, optimizer, known, ties_are_known=own is not None)
    if own is None:
        tie_as_configured(checkpoint, model, directory.path)
    # verl saves the model once more, whole, beside the files of ranks if it is told to.
    folder = directory.path / HUGGINGFACE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    note_models(checkpoint, [path for path in files if COPIED.fullmatch(path.name) and is_file(path)], folder)
    if is_file(directory.path / ADAPTER):
        note_adapter(checkpoint, directory.path / ADAPTER)
    _read_extras(checkpoint, directory)
    if any(directory.places):
        _read_rest(checkpoint, directory)
    for path in directory.beside:
        carry(checkpoint, path)
    _claim(checkpoint, directory)
    counted = checkpoint.metadata.get("global_step")  # by a program, or else by the optimizer
    counted = counted if type(counted) is int else checkpoint.most_steps
    checkpoint.step = counted if directory.step is None else directory.step
    if own is not None:
        checkpoint.files.append(describe(own, "metadata", rules=RULES))
        restore(checkpoint, own.root, own)
        give_masters(checkpoint, own)
        checkpoint.is_numbered = False
    return checkpoint


def _describe_mesh(checkpoint: Checkpoint, model: Model) -> None:
    firsts = [held[0] for held in model.held.values()]
    meshes = dict.fromkeys(one.mesh for one in firsts if one.mesh is not None)
    device = next(iter(meshes)).device if meshes else ""
    if device:
        checkpoint.details["device"] = device
    checkpoint.details["tensors"] = list(dict.fromkeys(one.kind for one in firsts))
    if meshes:
        largest = max(meshes, key=lambda one: len(one.sizes))
        named = dict(zip(largest.names, largest.sizes, strict=True)) if largest.names else list(largest.sizes)
        checkpoint.details["mesh"] = named
    tp = max((dict(zip(one.names, one.sizes, strict=False)).get("tp", 1) for one in meshes), default=1)
    checkpoint.topology = Topology(dp=checkpoint.world_size // max(tp, 1), tp=max(tp, 1))
    units = units_in(model.modules)
    if units:
        checkpoint.details["fsdp_units"] = units


def _read_extras(checkpoint: Checkpoint, directory: Directory) -> None:
    """Keep what ranks' further files hold: what all have once, what is each rank's own under its file's name."""
    files = map(read_torchfile, (path for path in directory.extras if not is_lost(path)))
    contents = [(file, by_name(as_mapping(file.root, file.path), file.path)) for file in files]
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


def _read_rest(checkpoint: Checkpoint, directory: Directory) -> None:
    """Keep what files with a model and an optimizer hold besides, as `_read_extras` does."""
    places: dict[tuple[Path, ...], set[object]] = {}
    for paths, place in zip((directory.models, directory.optimizers), directory.places, strict=True):
        if paths and place:
            places.setdefault(paths, set()).update(place)
    every: list[str] = []
    about = tuple(Rule((key,), IMPLIED, "which rank the file is of") for key in OF_ITS_RANK)
    for paths, gone in places.items():
        found = []
        for rank, path in enumerate(paths):
            if is_lost(path):
                continue
            file = read_torchfile(path)
            root = {key: value for key, value in as_mapping(file.root, file.path).items() if key not in gone}
            content = by_name(root, file.path)
            refuse_share(replace(file, root=content))
            found.append((rank, file, content))
        first = found[0][1:]
        keys = list(dict.fromkeys(key for *_, content in found for key in content))
        twice = [key for key in keys if key in every or key in checkpoint.metadata]
        if twice:
            raise UnsupportedError(f"{twice[0]} is there twice: in the files of the model, and of the optimizer",
                                   path=first[0].path)  # fmt: skip
        every += keys
        keys = [key for key in keys if key not in OF_ITS_RANK]
        checkpoint.metadata |= {key: carried(first[0], first[1][key]) for key in keys if key in first[1]}
        add_part(checkpoint, first[0], "model", 0, (), first[1], about)
        for rank, file, content in found[1:]:
            others, rules = keep_others(first, [(file, content)], keys)
            stem = Path(rank_name(EXTRA, directory.world_size, rank)).stem  # names may be the same on two nodes
            for key, value in others.items():
                checkpoint.metadata[f"{stem}.{key.removeprefix(f'{Path(file.path).stem}.')}"] = value
            own = (*about, *rules.get(file.path, ()))
            add_part(checkpoint, file, "model", rank, (), content, own)
    checkpoint.details[KEYS] = every


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
