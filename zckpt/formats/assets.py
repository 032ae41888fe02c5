"""The files next to a model's weights that programs load it with: configuration, tokenizer, chat template, own code.

They are copied as they are, from the directory that was opened, the checkpoint's own in it, or `huggingface/` in either
(verl); or all from a directory that the user names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.errors import UsageError
from zckpt.formats.companions import copy_of
from zckpt.state import Checkpoint, without
from zckpt.state.names import PEFT, PEFT_MODEL, PROMPT, is_added, without_adapter
from zckpt.storage.files import entries_of, files_in, folders_in, read_head

CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model."
OF_CODES = (
    "hf_quant_config.json", "quantization_config.json", "quantize_config.json", "quant_config.json", "quanto_qmap.json",
)  # fmt: skip
"""Files that say how weights are quantised."""

FOLDERS = ("", "huggingface")

MAXIMUM_CONFIG_NBYTES = 1 << 20

STEM, DIFFUSERS_STEM = "model", "diffusion_pytorch_model"
_DIFFUSERS_KEY = b'"_diffusers_version"'
_LIVE = frozenset({"default", "modules_to_save", "original_module"})
"""Parts of names in a live model of PEFT that its files do not have."""

MODULES_NAME = "modules.json"
MODULE = re.compile(r"([0-9]+)_\w+")
"""A folder of what sentence-transformers puts behind a model, which lies in the directory itself: `2_Dense`."""

_NAMES = re.compile(
    r"(?:config|generation_config|adapter_config|preprocessor_config|processor_config|video_preprocessor_config"
    r"|special_tokens_map|added_tokens|vocab|tokenizer|tokenizer_config|chat_template"
    r"|modules|sentence_bert_config|config_sentence_transformers)\.json"
    r"|merges\.txt|vocab\.txt|chat_template\.jinja|tokenizer\.model|spiece\.model|sentencepiece[^/]*\.model"
    r"|[^/]+\.tiktoken|(?:modeling|configuration|tokenization|processing|image_processing)_[^/]+\.py"
)


def find_assets(checkpoint: Checkpoint, given: Path | None = None) -> dict[str, Path]:
    """Return the files that go with a checkpoint's weights, by name; those of one directory at most.

    The configuration of an adapter that lies beside a whole model, and is not read, does not go with the model:
    `from_pretrained` would look for the adapter.

    `given`: the directory that they are in. Raises UsageError: the directory that was given holds no configuration.
    """
    if given is not None:
        found = _assets_in(given)
        if not {CONFIG_NAME, ADAPTER_CONFIG} & found.keys():
            raise UsageError("holds no model configuration", path=given, expected=CONFIG_NAME)
        return found
    of_models = {Path(file.path).parent for file in checkpoint.files if file.role == "model"}
    beside = of_models if len(of_models) == 1 else ()
    roots = dict.fromkeys([*(Path(root) for root in (checkpoint.opened, checkpoint.source) if root), *beside])
    every = [_assets_in(root / folder) for root in roots for folder in FOLDERS]
    whole = [found for found in every if {CONFIG_NAME, ADAPTER_CONFIG} & found.keys()]
    assets = next(iter(whole), {})
    config = assets.get(ADAPTER_CONFIG)
    adapters = {one.name for one in entries_of(config.parent) if one.name.startswith(ADAPTER_FILE)} if config else set()
    is_read = not adapters.isdisjoint(file.name for file in checkpoint.files)
    if not adapters or is_read or any(name.startswith(PEFT) for name in checkpoint.names):
        return assets
    return without(assets, ADAPTER_CONFIG)


def is_adapter(names: Iterable[str], assets: Collection[str]) -> bool:
    """Tell whether a model is what PEFT's files have of an adapter, not one that an adapter was added to.

    Where no `adapter_config.json` says it, as in what the Trainer saves under FSDP, names do.

    `names`: of its tensors; `assets`: names of the files that go with it.
    """
    every = {name: name.split(".") for name in names}
    live = any(_LIVE & {*parts} for parts in every.values())
    if not every or live:
        return False
    if ADAPTER_CONFIG in assets and (PROMPT in every or all(name.startswith(PEFT_MODEL) for name in every)):
        return True
    own = {name for name in every if name.startswith(PEFT_MODEL) and is_added(name)}
    if not all(name in own or name.startswith(PEFT) for name in every):
        return False
    return not own.isdisjoint(map(without_adapter, own))  # in memory the adapter's name is in each


def stem_of(assets: Mapping[str, Path]) -> str:
    """Return what the file of a model is called that these files go with: diffusers has a name of its own."""
    config = assets.get(CONFIG_NAME)
    is_diffusers = config is not None and _DIFFUSERS_KEY in read_head(str(config), MAXIMUM_CONFIG_NBYTES)
    return DIFFUSERS_STEM if is_diffusers else STEM


def modules_of(assets: Mapping[str, Path]) -> dict[str, str]:
    """Return the folders of sentence-transformers' modules, by what the names of their tensors begin with."""
    folders = [name.partition("/")[0] for name in assets if "/" in name]
    return {f"{int(folder.partition('_')[0])}.": folder for folder in folders}


def copies_of(assets: dict[str, Path]) -> list[TargetFile]:
    """Return the files of a target that are copies of assets."""
    return [copy_of(path, name) for name, path in assets.items()]


def _assets_in(directory: Path) -> dict[str, Path]:
    every = files_in(directory) if directory.is_dir() else []
    if MODULES_NAME in every:
        inside = [one for one in folders_in(directory) if MODULE.fullmatch(one.name)]
        every = [*every, *(f"{one.name}/{name}" for one in inside for name in files_in(one))]
    names = {name: name.rpartition("/")[2] for name in every}
    return {name: directory / name for name, own in names.items() if own in OF_CODES or _NAMES.fullmatch(own)}
