"""The files of a model and of an optimizer as the dict that they were, read as one of DCP."""

from __future__ import annotations

from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, ShardError, about
from zckpt.formats.colossalai import MODELS, OPTIMIZER
from zckpt.formats.companions import carry
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.reader import fill, taken
from zckpt.formats.dcp.tree import GROUPS, STATE, Tree
from zckpt.formats.safetensors import file as safetensors
from zckpt.formats.torch_files.reader import add_model
from zckpt.formats.torch_files.tensors import as_mapping, by_name, describe
from zckpt.state import Checkpoint, GivenNames
from zckpt.state.inventory import IMPLIED, REST, Claim, Rule
from zckpt.state.inventory import STATE as AS_STATE
from zckpt.storage.files import is_file, json_object
from zckpt.torchfile import brief, read_torchfile

SCHEDULER = "lr_scheduler"


def read(place: tuple[Path, Path, Path], *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of all files.

    `place`: the directory, and in it the folders of model and optimizer; `names`: of the optimizer's parameters, in its
    order. Raises ShardError: one that an index names is missing; DamagedFileError: one holds something else than the
    index says.
    """
    path, model, optimizer = place
    checkpoint = Checkpoint(str(path), "colossalai")
    of_model = model / MODELS[0]
    if is_file(of_model):
        found = Checkpoint(str(model), "")
        for name in sorted({*safetensors.weight_map(of_model).values()}):
            add_model(found, _file(of_model, name))
        found.claims[str(of_model)] = Claim(IMPLIED, "which file each tensor is in")
    else:
        found = safetensors.read(model)
    root: Tree = {"model": taken(checkpoint, found)}
    state: Tree = {}
    index = optimizer / OPTIMIZER
    where = safetensors.weight_map(index)
    for name in sorted({*where.values()}):
        file = read_torchfile(_file(index, name))
        content = by_name(as_mapping(file.root, file.path), file.path)
        if content.keys() != {key for key, its in where.items() if its == name}:
            raise DamagedFileError("holds state of parameters other than those in the index", path=file.path)
        for key, its in content.items():
            state[key] = ObjectItem(key, file, as_mapping(its, file.path))
        checkpoint.files.append(describe(file, "optimizer", rules=(Rule(("*", "*"), AS_STATE, "of a parameter"),)))
    said = json_object(index, "index", most=safetensors.MAXIMUM_INDEX_NBYTES).get("metadata")
    file = read_torchfile(_file(index, str(said.get(GROUPS)) if isinstance(said, dict) else ""))
    with about(file.path):
        if not isinstance(file.root, list):
            raise DamagedFileError("unexpected content", expected="a list of param groups", found=brief(file.root, 60))
        root["optimizer"] = {STATE: state, GROUPS: ObjectItem(GROUPS, file, list(map(as_mapping, file.root)))}
    rules = (Rule(("*", "params", REST), IMPLIED, "numbers of parameters"), Rule((REST,), AS_STATE, "hyperparameters"))
    checkpoint.files.append(describe(file, "optimizer", rules=rules))
    checkpoint.claims[str(index)] = Claim(IMPLIED, "which file each parameter's state is in")
    fill(checkpoint, root, names=names)
    if is_file(path / SCHEDULER):
        carry(checkpoint, path / SCHEDULER)
    return checkpoint


def _file(index: Path, name: str) -> Path:
    """Return a file that an index names."""
    if not name or Path(name).name != name or not is_file(index.parent / name):
        raise ShardError(f"the file {name or 'of param groups'} is missing", path=index.parent,
                         expected=f"every file that {index.name} names", code=MISSING_FILE)  # fmt: skip
    return index.parent / name
