"""What PEFT keeps of a LoRA adapter: its configuration, and what its tensors are to the model that it was trained on.

DIR/adapter_config.json                                  JSON: peft_type, r, lora_alpha, rank_pattern, ...
DIR/adapter_model.safetensors or .bin                    tensors, named base_model.model.MODULE. and:

lora_A.weight, lora_B.weight                             (r, in), (out, r): scale * B @ A is added to MODULE.weight
lora_embedding_A, lora_embedding_B                       (r, rows), (columns, r): scale * (B @ A).T is
NAME, base_layer.NAME, modules_to_save.ADAPTER.NAME      takes the place of MODULE.NAME

In the state dict of a whole model the adapter's name comes behind these (`lora_A.default.weight`), what is wrapped is
`base_layer.NAME` and `original_module.NAME`, and there is no configuration. Source: PEFT 0.21, tuners/lora and utils.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, SourceError, UnsupportedError, UsageError, listed
from zckpt.formats import open_checkpoint
from zckpt.formats.patterns import Patterns
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.names import PEFT
from zckpt.storage.files import json_object
from zckpt.torchfile import brief

CONFIG_NAME = "adapter_config.json"
MODEL_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
MAXIMUM_CONFIG_NBYTES = 1 << 24

UNNAMED = "one without a name"

MOST = 3.4e38
"""What is multiplied with factors must be a number of their type."""

_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Keys of a configuration that change nothing of what is added, or that are read here; any other must be unset."""

_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they were; PiSSA, OLoRA, CorDA and others change them."""

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>A|B)(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<factor>A|B)(?:\.(?P<adapter>[^.]+))?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<name>.+)")
_OF_BASE = re.compile(r"(?P<module>.+)\.(?:base_layer|original_module)\.(?P<name>.+)")
_ADDED = re.compile(r"\.(?:lora_|modules_to_save\.|(?:ia3_|hada_|lokr_|oft_|vera_|boft_|trainable_tokens_)\w*)")


@dataclass(frozen=True, slots=True)
class Product:
    """What is added to the weight of a module: scale * B @ A; of an embedding its transpose.

    `module`: as the model has it.
    """

    module: str
    a: Slot
    b: Slot
    scale: float
    is_embedding: bool


@dataclass(slots=True)
class Adapter:
    """An adapter that was read.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its tensors.
    products : list of Product
    replaced : dict of str to Parameter
        What takes the place of tensors of the model, by their names there.
    saved : frozenset of str
        Those of `replaced` that belong to modules which the model may not have.
    fan_in_fan_out : bool
        Whether the configuration says that weights lie as (in, out).
    """

    checkpoint: Checkpoint
    products: list[Product] = field(default_factory=list)
    replaced: dict[str, Parameter] = field(default_factory=dict)
    saved: frozenset[str] = frozenset()
    fan_in_fan_out: bool = False


def read_adapter(path: Path, opened: Callable[[Path], Checkpoint], config: Path | None = None) -> Adapter:
    """Read the structure of a LoRA adapter.

    Parameters
    ----------
    path : Path
        A directory of PEFT, the file of its tensors, or any checkpoint that has them.
    opened : callable
        Opens a checkpoint that is none of PEFT's.
    config : Path, optional
        `adapter_config.json`, or the directory that it is in; by default the adapter's.

    Raises
    ------
    UsageError
        There is no configuration, or no adapter.
    UnsupportedError
        It is not something that is added to weights.
    DamagedFileError
        It contradicts itself.
    """
    file = next((path / name for name in MODEL_NAMES if (path / name).is_file()), None)
    if file is None and path.is_dir():
        several = sorted(one.parent.name for one in path.glob(f"*/{CONFIG_NAME}"))
        if several:
            raise UsageError(f"holds adapters: {listed(several)}", path=path, advice=f"give one: {path / several[0]}")
    where = config or (path if path.is_dir() else path.parent)
    where = where / CONFIG_NAME if where.is_dir() else where
    if not where.is_file():
        raise UsageError(
            f"holds no {CONFIG_NAME}, which says how an adapter is scaled",
            path=where.parent,
            advice="give it with --adapter-config",
        )
    settings = _settings(where)
    checkpoint = open_checkpoint(file) if file else opened(path)
    return _Reading(checkpoint, settings, where).read()


def without_adapters(names: Iterable[str]) -> dict[str, str]:
    """Return the name that each tensor of a model has without what PEFT puts around it; none of what PEFT adds."""
    found = _plain(names)
    kept = {name: short for name, short in found.items() if not _ADDED.search(f".{short}")}
    return {name: _unwrapped(short) for name, short in kept.items()}


def _plain(names: Iterable[str]) -> dict[str, str]:
    found = {name: name for name in names}
    while found and all(short.startswith(PEFT) for short in found.values()):
        found = {name: short.removeprefix(PEFT) for name, short in found.items()}
    return found


def _unwrapped(name: str) -> str:
    match = _OF_BASE.fullmatch(name)
    return name if match is None else f"{match['module']}.{match['name']}"


def _settings(path: Path) -> dict[str, Any]:
    """Return a configuration of LoRA whose every option is understood."""
    found = json_object(path, "configuration", most=MAXIMUM_CONFIG_NBYTES)
    kind = found.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError("is no LoRA adapter", path=path, expected="peft_type LORA", found=kind,
                               advice="merge it with PEFT's merge_and_unload")  # fmt: skip
    unknown = sorted(key for key, value in found.items() if key not in _HARMLESS and value not in (None, False, [], {}))
    if unknown:
        raise UnsupportedError(
            f"{listed(unknown)}: not merged as weight + scale * B @ A",
            path=path,
            expected="plain LoRA",
            advice="merge it with PEFT's merge_and_unload",
        )
    if found.get("init_lora_weights") not in _INITIAL:
        raise UnsupportedError(
            f"an adapter that began as {found['init_lora_weights']!r} belongs to weights that this changed",
            path=path,
            expected="plain LoRA",
            advice="save it with PEFT's path_initial_model_for_weight_conversion",
        )
    return found


@dataclass(slots=True)
class _Reading:
    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    path: Path
    patterns: Patterns = field(default_factory=Patterns)

    def read(self) -> Adapter:
        for setting, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("modules_to_save", list)):
            if not isinstance(self.settings.get(setting) or kind(), kind):
                raise DamagedFileError(f"unusable {setting}", path=self.path, found=brief(self.settings[setting]),
                                       expected="an object" if kind is dict else "a list")  # fmt: skip
        found = Adapter(self.checkpoint, fan_in_fan_out=bool(self.settings.get("fan_in_fan_out")))
        factors: dict[tuple[str, bool], dict[str, Slot]] = {}
        adapters, others, strange = set[str](), set[str](), list[str]()
        parameters = {one.name: one for one in self.checkpoint.tensors()}
        for filed, name in _plain(parameters).items():
            match = _FACTOR.fullmatch(name) or _EMBEDDING.fullmatch(name)
            saved = _SAVED.fullmatch(name)
            if match:
                key = match["module"], "lora_embedding" in match[0][len(match["module"]) :]
                slots = self.checkpoint.owner(filed).slots
                factors.setdefault(key, {})[match["factor"]] = slots.get(MASTER) or slots[WEIGHT]
                adapters.add(match["adapter"] or UNNAMED)
            elif _ADDED.search(f".{name}") and not saved:
                strange.append(name)
            elif saved or ".original_module." not in name:
                plain = f"{saved['module']}.{saved['name']}" if saved else _unwrapped(name)
                others |= {saved["adapter"]} if saved else set()
                if plain in found.replaced:
                    raise DamagedFileError(f"has {plain} twice", path=self.checkpoint.source, found=name)
                found.replaced[plain] = parameters[filed] if saved else self.checkpoint.owner(filed)
        if strange:
            raise UnsupportedError(f"{listed(strange)}: not added to weights as B @ A", path=self.checkpoint.source,
                                   advice="merge it with PEFT's merge_and_unload")  # fmt: skip
        if len(adapters) > 1 or len(others | adapters - {UNNAMED}) > 1:
            several = listed(sorted(adapters | others))
            raise UnsupportedError(f"holds several adapters: {several}", path=self.checkpoint.source,
                                   advice="save one by itself, with PEFT's save_pretrained")  # fmt: skip
        if not factors and not found.replaced:
            raise UsageError("holds no adapter", path=self.checkpoint.source, expected="tensors called lora_A, lora_B")
        found.products = [self._product(module, embedding, both) for (module, embedding), both in factors.items()]
        modules = self.settings.get("modules_to_save") or []
        found.saved = frozenset(name for name in found.replaced if any(f".{one}." in f".{name}" for one in modules))
        return found

    def _product(self, module: str, is_embedding: bool, factors: Mapping[str, Slot]) -> Product:
        if len(factors) < 2:
            raise DamagedFileError(f"{module} has only lora_{next(iter(factors))}", path=self.checkpoint.source,
                                   expected="lora_A and lora_B")  # fmt: skip
        targets = self.settings.get("target_modules")
        if not self._is_target(module, targets):
            raise DamagedFileError(f"{module} is none of target_modules", path=self.path, expected=str(targets))
        a, b = factors["A"], factors["B"]
        rank = self._number("r", module, "rank_pattern")
        if len(a.shape) < 2 or len(b.shape) < 2 or not a.shape[0] == b.shape[1] == rank:
            raise DamagedFileError(
                f"the factors of {module} do not fit",
                path=self.checkpoint.source,
                expected=f"a rank of {rank:g}, as {self.path.name} says",
                found=f"A {a.shape}, B {b.shape}",
                advice="partitions of ZeRO-3 or FSDP that were not gathered look like this" if 0 in a.shape else None,
            )
        alpha = self._number("lora_alpha", module, "alpha_pattern")
        scale = alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)
        return Product(module, a, b, scale, is_embedding)

    def _number(self, key: str, module: str, patterns: str) -> float:
        """Return the rank or alpha of a module: that of the first pattern that its name ends in, or the common one."""
        values = self.settings.get(patterns) or {}
        found = values.get(module, self.settings.get(key, 8))
        for pattern, value in values.items():
            if self._matches(rf"(?:.*\.)?(?:{pattern})", module):
                found = value
                break
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not -MOST <= found <= MOST:
            raise DamagedFileError(
                f"unusable {key}", path=self.path, expected="a number of float32", found=brief(found)
            )
        if key == "r" and found <= 0:
            raise DamagedFileError("unusable r", path=self.path, expected="a number above 0", found=found)
        return found

    def _is_target(self, module: str, targets: object) -> bool:
        """Tell whether a module is one that was to get an adapter; a text is a pattern of whole names."""
        if targets is None or targets == "all-linear":
            return True
        if isinstance(targets, str):
            return self._matches(targets, module)
        return isinstance(targets, list) and any(module == one or module.endswith(f".{one}") for one in targets)

    def _matches(self, pattern: str, name: str) -> bool:
        try:
            return self.patterns.match(pattern, name)
        except ValueError as error:
            raise SourceError(f"unusable pattern, {error}", path=self.path, found=brief(pattern)) from error
