"""Which files of a directory are models, and which are their optimizers; by names, or by what they hold.

Of several forms of one model the first in `_STEMS` is read, and `companions` takes the others for copies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.errors import SourceError, listed
from zckpt.formats.assets import ADAPTER_CONFIG, MODULE, MODULES_NAME
from zckpt.formats.dcp.directory import FOLDER
from zckpt.formats.format import NearMiss, Search
from zckpt.formats.safetensors.file import SHARD, read_header
from zckpt.formats.suffixes import LEROBOTS_OPTIMIZER, OWN_NAME, READ_SUFFIXES
from zckpt.immutable import immutable
from zckpt.storage.files import files_in, folders_in, is_file, read_json

if TYPE_CHECKING:
    from zckpt.formats.torch_files.optimizer import OptimizerState
    from zckpt.state import Shape

STATE_NAME = "trainer_state.json"
PIPELINE_NAME = "model_index.json"

FULL_STEM, ADAPTER_STEM = "pytorch_model_fsdp", "adapter_model"

_STEMS = (
    (FULL_STEM, ".bin"),
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    *product(("diffusion_pytorch_model", ADAPTER_STEM, "pytorch_lora_weights"), (".safetensors", ".bin")),
    ("consolidated", ".safetensors"),  # Mistral's own
)
"""What programs call the file of a model, that which is read first."""

_BESIDE_OPTIMIZER = tuple(product(("model", "weights"), (".safetensors", ".pt", ".pth", ".bin", ".ckpt")))
"""What loops of their own call it, where the optimizer's file is beside it."""

_ADD_MODEL = "add the model that was saved with the optimizer: its files have the parameter names"

MOST_FILES = 8
"""Of a folder, those that are looked into where names say nothing."""

_NUMBERED = re.compile(r"(?i)(?:model|optim(?:izer)?)[-_.]?[0-9]+[^0-9]*$")

APART = re.compile(r"(value_head|scoring_head|vit)\.(?:safetensors|bin)")
"""What LLaMA-Factory (a reward's or a critic's head) and ms-swift keep of a model in a file beside its own."""

_OPTIMIZER = re.compile(r"optimizer(?:_([1-9][0-9]{0,3}))?\.(pt|bin)")
_OF_A_LOOP = re.compile(r"optim(?:izer)?\.(?:pt|pth|bin|ckpt)")
_FURTHER = re.compile(r"(model|pytorch_model|pytorch_model_fsdp)_([1-9][0-9]{0,3})\.(safetensors|bin)")


@immutable
class ModelFiles:
    """The files of one model.

    `stem`: what they are called: `model`, `pytorch_model_1`, `adapter_model`; of a pipeline's the name of their folder;
    `path`: the file, or the index of several; the first of several without an index.
    """

    stem: str
    path: Path

    @property
    def is_indexed(self) -> bool:
        """Whether it is several files."""
        return self.path.suffix == ".json"


@immutable
class Part:
    """A file with some of a model's tensors, beside its own.

    `prefix`: before their names in the model; `is_last`: whether the model has them after all others.
    """

    path: Path
    prefix: str = ""
    is_last: bool = True


@immutable
class Directory:
    """What a directory holds."""

    path: Path
    models: tuple[ModelFiles, ...]  # in the order of their numbers
    optimizers: tuple[Path, ...] = ()
    own: Path | None = None  # what zckpt wrote besides
    parts: tuple[Part, ...] = ()  # of the first model

    @property
    def averages(self) -> tuple[bool, ...]:
        """Of each model whether it is the average of another, which diffusers keeps beside it: no optimizer has it."""
        stems = {one.stem for one in self.models}
        return tuple(one.stem.endswith("_ema") and one.stem[:-4] in stems for one in self.models)

    @property
    def is_adapter(self) -> bool:
        """Whether it is what PEFT adds to a model."""
        return self.models[0].stem == ADAPTER_STEM

    @property
    def other_adapters(self) -> list[Path]:
        """Folders of further adapters of an adapter's model, any of which may be what was trained."""
        every = _adapters(folders_in(self.path)) if self.is_adapter else []
        return [self.path / name for name in every if not name.startswith("checkpoint-")]  # a run's steps beside it

    @property
    def adapter_config(self) -> dict[str, Any]:
        """What an adapter says of itself; nothing where it does not."""
        return read_json(self.models[0].path.with_name(ADAPTER_CONFIG)) or {}


def find(search: Search) -> Directory | NearMiss | None:
    """Find the models and optimizers of a directory; None where they are another format's, or a model by itself."""
    path = search.path
    if not path.is_dir():
        return None
    names, inside = {*files_in(path)}, folders_in(path)
    if (  # of DeepSpeed, of DCP, or a consolidated one, next to whose files are such as these
        "latest" in names
        or ".metadata" in names
        or {"metadata.pt", "model.safetensors.index.json"} <= names
        or any(FOLDER.fullmatch(one.name) and is_file(one / ".metadata") for one in inside)
    ):
        return None
    if is_file(path / LEROBOTS_OPTIMIZER):
        folder = path / "pretrained_model"
        model = first_model(folder)
        lost = NearMiss("is LeRobot's, without the model's files", _ADD_MODEL, expected=f"{folder}/model.safetensors")
        return Directory(path, (model,), (path / LEROBOTS_OPTIMIZER,)) if model else lost
    first = first_model(path, names)
    numbered = {int(match[1] or 0): path / name for name in sorted(names) if (match := _OPTIMIZER.fullmatch(name))}
    optimizers = tuple(numbered[number] for number in sorted(numbered))  # `.bin` before `.pt`, which is the Trainer's
    beside = [path / name for name in names if _OF_A_LOOP.fullmatch(name)]
    if len(beside) == 1 and not numbered.keys() - {0} and "metadata.pt" not in names:
        first, optimizers = first or model_beside_optimizer(path, names), tuple(beside)
    own = path / OWN_NAME if OWN_NAME in names else None
    is_state = "random_states_0.pkl" in names and bool(optimizers)
    if first is None and (PIPELINE_NAME in names or is_state):  # of diffusers, whose models are called as their folders
        found = {folder.name: first_model(folder) for folder in inside}
        models = tuple(ModelFiles(name, one.path) for name, one in sorted(found.items()) if one is not None)
        if models:
            return Directory(path, models, optimizers if is_state else (), own)
    if first is None:
        return _near(path, names, inside, has_optimizer=bool(optimizers))
    others = {int(m[2]): m[0] for name in names if (m := _FURTHER.fullmatch(name)) and m[1] == first.stem}
    further = [ModelFiles(f"{first.stem}_{number}", path / others[number]) for number in sorted(others)]
    plain = first.path.name in ("model.safetensors", "model.safetensors.index.json")
    parts: list[Part] = []
    if not further:
        apart = {match[1]: name for name in sorted(names, reverse=True) if (match := APART.fullmatch(name))}
        parts = [Part(path / name, is_last=stem != "vit") for stem, name in sorted(apart.items())]
    if not further and MODULES_NAME in names:
        places = {int(m[1]): one for one in inside if (m := MODULE.fullmatch(one.name))}
        files = {number: first_model(folder) for number, folder in sorted(places.items())}
        parts += [Part(one.path, f"{number}.") for number, one in files.items() if one is not None]
    if plain and not further and not optimizers and STATE_NAME not in names and own is None and not parts:
        return None
    return Directory(path, (first, *further), optimizers, own, tuple(parts))


def by_content(path: Path) -> Directory | None:
    """Return the only model of a folder and its optimizer, under any names; None if there are others, or parts."""
    names = sorted(name for name in files_in(path) if name.endswith((*READ_SUFFIXES, ".safetensors")))
    if not 1 < len(names) <= MOST_FILES or any(map(_NUMBERED.search, names)):
        return None
    from zckpt.evidence import may_be_trained
    from zckpt.formats.fsdp_rank_files.held import is_share
    from zckpt.formats.torch_files.beside import OF_A_RANK
    from zckpt.formats.torch_files.content import can_have, content_of, shapes_of
    from zckpt.state import dict_of
    from zckpt.torchfile import read_torchfile

    if any(map(OF_A_RANK.search, names)):
        return None
    models: list[tuple[Path, Mapping[str, Shape]]] = []
    optimizers: list[tuple[Path, OptimizerState]] = []
    for one in (path / name for name in names):
        try:
            if one.suffix == ".safetensors":
                slots = read_header(one)[0]
                dtypes = {name: slot.dtype for name, slot in slots.items()}
                models.append((one, {name: slots[name].shape for name in slots if may_be_trained(name, dtypes)}))
                continue
            file = read_torchfile(one)
            content = content_of(dict_of(file.root), one)
        except SourceError:
            return None
        if is_share(file) or (content.models and content.state):
            return None
        models += [(one, shapes_of(model)) for model in content.models.values()]
        optimizers += [(one, content.state)] if content.state else []
    if len(models) != 1 or len(optimizers) != 1:
        return None
    [(model, shapes)], [(optimizer, state)] = models, optimizers
    if len(state.every_number) != len(shapes) or not can_have(shapes, [state]):  # a rank's share has fewer
        return None
    return Directory(path, (ModelFiles(model.stem, model),), (optimizer,))


def first_model(path: Path, names: Collection[str] | None = None) -> ModelFiles | None:
    """Return the model of a folder; `names`: of its files, where they are known."""
    names = files_in(path, lenient=True) if names is None else names
    for stem, suffix in _STEMS:
        for name in (f"{stem}{suffix}", f"{stem}{suffix}.index.json"):
            if name in names:
                return ModelFiles(stem, path / name)
    shards = sorted(name for name in names if SHARD.fullmatch(name))
    is_alone = bool(shards) and all(name.endswith(".bin") for name in shards)
    return ModelFiles("model", path / shards[0]) if is_alone else None


def model_beside_optimizer(path: Path, names: Collection[str]) -> ModelFiles | None:
    """Return the model of a folder where an optimizer is, as a program or a loop of one's own may call it."""
    found = [ModelFiles(stem, path / f"{stem}{end}") for stem, end in _BESIDE_OPTIMIZER if f"{stem}{end}" in names]
    return first_model(path, names) or (found[0] if len(found) == 1 else None)


def _adapters(folders: Iterable[Path]) -> list[str]:
    return [one.name for one in folders if ADAPTER_CONFIG in files_in(one, lenient=True)]


def _near(path: Path, names: set[str], folders: Iterable[Path], *, has_optimizer: bool) -> NearMiss | None:
    """Say what a directory without a model is, if it is anything of these programs."""
    adapters = _adapters(folders)
    if adapters:
        return NearMiss(f"holds PEFT adapters in folders: {listed(adapters)}", f"give one: {path / adapters[0]}")
    if has_optimizer and STATE_NAME in names:
        return NearMiss(
            "is a Trainer directory without the model's files",
            _ADD_MODEL,
            expected="model.safetensors",
        )
    return None
