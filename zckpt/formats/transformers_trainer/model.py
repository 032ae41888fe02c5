"""The weights of a model from its files, and what these tell of the order that its parameters have.

Files of safetensors have their tensors sorted by type and name. Shards are filled in the model's order, but for a
tensor that is larger than a shard may be: that has one to itself, with the number that was next. Torch files are in
the model's order. But transformers 5 sorts what it saves of a model that it had loaded: an order in which the names are
sorted tells nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zckpt.evidence import may_be_trained
from zckpt.formats.assets import ADAPTER_CONFIG, CONFIG_NAME
from zckpt.formats.safetensors.file import add_file, aliases_in, indexed_files, take_index
from zckpt.formats.torch_files.reader import add_model
from zckpt.formats.transformers_trainer.architectures import architecture
from zckpt.formats.transformers_trainer.directory import Directory, ModelFiles
from zckpt.formats.transformers_trainer.readings import Weights
from zckpt.state import WEIGHT, Checkpoint, Parameter
from zckpt.storage.files import read_json


def read_model(checkpoint: Checkpoint, files: ModelFiles, prefix: str, directory: Directory) -> Weights:
    """Give a checkpoint the tensors of one model; return what its files tell of its parameters.

    `prefix`: put before all names, where there are several models. Raises SourceError: a file is damaged or missing, or
    the index says otherwise than the files.
    """
    paths = indexed_files(files.path) if files.is_indexed else [files.path]
    one = Checkpoint(str(directory.path), "")
    place_of: dict[str, int] = {}
    for number, path in enumerate(paths):
        (_read_safetensors if path.suffix == ".safetensors" else add_model)(one, path)
        for name in (*one.parameters, *one.buffers):
            place_of.setdefault(name, number)
    if files.is_indexed:
        take_index(one, files.path, {name: paths[number].name for name, number in place_of.items()})
    weights = _weights(one, place_of, paths)
    weights.known = architecture(_model_type(directory))
    checkpoint.files += one.files
    checkpoint.claims |= one.claims
    checkpoint.metadata |= {f"{prefix}{key}": value for key, value in one.metadata.items()}
    for section in ("parameters", "buffers"):
        for name, tensor in getattr(one, section).items():
            tied = None if tensor.tied_to is None else f"{prefix}{tensor.tied_to}"
            getattr(checkpoint, section)[f"{prefix}{name}"] = replace(tensor, name=f"{prefix}{name}", tied_to=tied)
    return weights


def _weights(one: Checkpoint, place_of: Mapping[str, int], paths: list[Path]) -> Weights:
    shapes = {p.name: p.shape for p in one.parameters.values() if p.tied_to is None}
    counts = Counter(place_of.values())
    shared = [name for name in shapes if counts[place_of[name]] > 1 or len(paths) == 1]
    if all(path.suffix != ".safetensors" for path in paths):
        if shared == sorted(shared):
            return Weights(shapes)
        known = frozenset(shared)
        return Weights(shapes, {name: at for at, name in enumerate(shapes) if name in known}, shared == [*shapes])
    places = {name: place_of[name] for name in shared}
    in_turn = [places[name] for name in sorted(shared)]
    return Weights(shapes, {} if in_turn == sorted(in_turn) else places)


def _read_safetensors(one: Checkpoint, path: Path) -> None:
    slots, texts = add_file(one, path)
    dtypes = {name: slot.dtype for name, slot in slots.items()}
    for name, slot in slots.items():
        kind = one.parameters if may_be_trained(name, dtypes) else one.buffers
        kind[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot})
    for alias, owner in aliases_in(texts, slots).items():
        if owner in one.parameters:
            one.parameters[alias] = replace(one.parameters[owner], name=alias, slots={}, tied_to=owner)


def _model_type(directory: Directory) -> str | None:
    """Return the type of a model as its configuration has it; of an adapter that of the model it is added to."""
    config = read_json(directory.path / CONFIG_NAME)
    if config is None and directory.is_adapter:
        base = (read_json(directory.path / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        if isinstance(base, str) and "\0" not in base:
            config = read_json(directory.path / base / CONFIG_NAME)
    found = (config or {}).get("model_type")
    return found if isinstance(found, str) else None
