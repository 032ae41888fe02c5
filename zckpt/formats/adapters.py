"""What PEFT keeps of a LoRA adapter: its configuration, and what its tensors are to the model that it was trained on.

DIR/adapter_config.json                                  JSON: peft_type, r, lora_alpha, rank_pattern, ...
DIR/lora_train_meta.json                                 in its place, verl: r and lora_alpha alone
DIR/adapter_model.safetensors or .bin                    tensors, named base_model.model.MODULE. and:

lora_A.weight, lora_B.weight                             (r, in), (out, r): scale * B @ A is added to MODULE.weight
lora_embedding_A, lora_embedding_B                       (r, rows), (columns, r): scale * (B @ A).T is
lora_magnitude_vector                                    DoRA: what the norm of each row of the sum is made, or of each
                                                         column where the weight lies as (in, out), of an embedding too
lora_B.bias                                              scale * it is added to MODULE.bias
token_adapter.trainable_tokens_delta                     (n, columns): rows `trainable_token_indices` of MODULE.weight
(base_layer.)*lora_A.weight, lora_B.weight               (e r, in), (out, r e): of `target_parameters` of MODULE, the
                                                         first the innermost; scale * B[:, :, e] @ A[e] is to index e
NAME, base_layer.NAME, modules_to_save.ADAPTER.NAME      takes the place of MODULE.NAME

In the state dict of a whole model the adapter's name comes behind these (`lora_A.default.weight`), what is wrapped is
`base_layer.NAME` and `original_module.NAME`, and there is no configuration. Source: PEFT 0.21, tuners/lora and utils.

Of mlx-lm (0.32, tuner/), adapter_config.json says `fine_tune_type` and `lora_parameters`, and adapters.safetensors has
lora_a, lora_b, (in, r) and (r, out), and m, of DoRA the magnitudes; or, of `full`, what takes the place of tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, SourceError, UnsupportedError, UsageError, about, listed
from zckpt.formats.patterns import Patterns
from zckpt.formats.suffixes import ADAPTER_NAME
from zckpt.immutable import immutable, mutable
from zckpt.state import WEIGHT, Checkpoint, Parameter, Shape, Slot, are_sizes, are_texts, dict_of, first_of
from zckpt.state.names import MAGNITUDE, PEFT, PEFT_MODEL, is_of_adapter, without_adapter
from zckpt.state.views import transpose
from zckpt.storage.files import json_object
from zckpt.torchfile import brief

CONFIG_NAME = "adapter_config.json"
VERL_NAME = "lora_train_meta.json"
COPY = "lora_adapter"
MODEL_NAMES = (ADAPTER_NAME, "adapter_model.bin", "adapters.safetensors")
VISION = "vit.safetensors"
"""What ms-swift trains whole beside an adapter, under PEFT's names."""

VALUE_HEADS = ("value_head.safetensors", "value_head.bin", "scoring_head.safetensors")
"""What LLaMA-Factory and ms-swift add to a model that has an adapter."""

MAXIMUM_CONFIG_NBYTES = 1 << 24

UNNAMED = "one without a name"

MOST_PARAMETERS = 4
"""Of one module; models have two of experts."""

MOST = 3.4e38
"""What is multiplied with factors must be a number of their type."""

_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices",
    "use_dora", "use_rslora",
})  # fmt: skip
"""Keys of a configuration that change nothing of what is added, or that are read here; any other must be unset."""

_OF_SETTINGS = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}
"""What every module has where a configuration says so."""

_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they were; PiSSA, OLoRA, CorDA and others change them."""

_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<inner>(?:\.base_layer)*)\.lora_(?P<factor>(?:embedding_)?[AB]|magnitude_vector)"
    r"(?:\.(?P<adapter>(?!(?:weight|bias)$)[^.]+))?(?P<of>\.weight|\.bias)?"
)
_FACTORS = {
    "A.weight": "lora_A", "B.weight": "lora_B", "embedding_A": "lora_embedding_A", "embedding_B": "lora_embedding_B",
    "magnitude_vector": "lora_magnitude_vector", "magnitude_vector.weight": "lora_magnitude_vector",
    "B.bias": "lora_B.bias",
}  # fmt: skip
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<name>.+)")
_OF_BASE = re.compile(
    r"(?P<module>.+?)(?:\.(?:base_layer|original_module|token_adapter))+"
    r"\.(?P<name>(?!.*\b(?:base_layer|original_module|token_adapter)\.).+)"
)
_ADDED = re.compile(r"\.(?:lora_|modules_to_save\.|(?:ia3_|hada_|lokr_|oft_|vera_|boft_|trainable_tokens_)\w*)")
"""What no part of a plain model is called."""

_OF_MLX = re.compile(r"(.+)\.(lora_[ab]|m)")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|wte|(?:(?:tok|word)_)?embeddings?)")
_OF_PROMPTS = ("prompt_encoder.", "word_embeddings.")


@immutable
class Product:
    """What is added to the weight of a module: scale * B @ A; of an embedding its transpose.

    `module`: as the model has it; `name`: of its weight. Of experts there are `num_experts` products: `a` has their
    rows one expert after the other, `b` their columns one rank after the other. `magnitude`: of DoRA; `bias`: scale *
    it is added to the module's.
    """

    module: str
    a: Slot
    b: Slot
    scale: float
    is_embedding: bool
    name: str = ""
    num_experts: int | None = None
    magnitude: Slot | None = None
    bias: Slot | None = None

    @property
    def bias_name(self) -> str:
        """What `bias` is added to."""
        return f"{self.module}.bias"


@mutable
class Adapter:
    """An adapter: what its tensors are to a model, as its configuration says."""

    checkpoint: Checkpoint  # its tensors
    settings: Mapping[str, Any]  # its configuration
    path: Path  # the file of that
    products: list[Product] = field(default_factory=list)
    replaced: dict[str, Parameter] = field(default_factory=dict)
    """What takes the place of tensors of the model, by their names there."""
    experts: dict[str, list[tuple[Slot, Slot]]] = field(default_factory=dict)
    """By module, A and B of its parameters, the innermost first."""
    tokens: dict[str, tuple[Parameter, list[int]]] = field(default_factory=dict)
    """Rows that take the place of those of a weight, by its name."""
    saved: frozenset[str] = frozenset()
    """Those of `replaced` that belong to modules of their own, which the model may not have."""
    patterns: Patterns = field(default_factory=Patterns)  # of the configuration

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether weights lie as (in, out)."""
        return bool(self.settings.get("fan_in_fan_out"))

    def read(self, chosen: str | None) -> None:
        """Say what each tensor is to the model, those of the `chosen` one of several adapters."""
        for setting, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("modules_to_save", list)):
            if not isinstance(self.settings.get(setting) or kind(), kind):
                raise DamagedFileError(f"unusable {setting}", path=self.path, found=brief(self.settings[setting]),
                                       expected="an object" if kind is dict else "a list")  # fmt: skip
        names = _plain(self.checkpoint.names)
        kinds = _FACTOR, _TOKENS, _SAVED
        of = {name: first_of(kind.fullmatch(name) for kind in kinds) for name in names.values()}
        adapters = {match["adapter"] or UNNAMED for match in of.values() if match}
        unlike = {match["adapter"] for match in of.values() if match and match.re is not _SAVED}
        several = listed(sorted(adapters))
        if chosen is not None and adapters - {UNNAMED} and chosen not in adapters:
            raise UsageError(f"no adapter is called {chosen}", expected=several)
        if chosen is None and (len(unlike) > 1 or len(adapters - {UNNAMED}) > 1):
            raise UnsupportedError(f"holds several adapters: {several}", advice="select one with --adapter")
        read = {
            filed: (name, match) for filed, name in names.items() for match in (of[name],)
            if chosen is None or match is None or match["adapter"] in (chosen, None)
        }  # fmt: skip
        self._add(read)
        if not self.products and not self.experts and not self.replaced and not self.tokens:
            raise UsageError("holds no adapter", expected="tensors called lora_A, lora_B")

    def _add(self, read: Mapping[str, tuple[str, re.Match[str] | None]]) -> None:
        more = {one for key, one in _OF_SETTINGS.items() if self.settings.get(key)}
        modules = self.settings.get("modules_to_save") or []
        ensured = bool(modules and self.settings.get("ensure_weight_tying"))  # then heads are saved, too
        factors: dict[str, dict[int, dict[str, Slot]]] = {}
        tokens: dict[str, list[str]] = {}
        saved, strange = set[str](), list[str]()
        for filed, (name, match) in read.items():
            owner = self.checkpoint.owner(filed)
            if match and match.re is _FACTOR:
                factor = _FACTORS.get(match["factor"] + (match["of"] or ""), "")
                if factor in {"", *_OF_SETTINGS.values()} - more:
                    strange.append(name)
                own = factors.setdefault(match["module"], {}).setdefault(match["inner"].count("."), {})
                own[factor] = owner.master or owner.slots[WEIGHT]
            elif match and match.re is _TOKENS:
                tokens.setdefault(owner.name, []).append(match["module"])
            elif not match and _ADDED.search(f".{name}"):
                strange.append(name)
            elif match or ".original_module." not in name:
                plain = f"{match['module']}.{match['name']}" if match else _unwrapped(name)
                if plain in self.replaced:
                    raise DamagedFileError(f"has {plain} twice", found=name)
                self.replaced[plain] = owner
                if match or ensured or any(f".{one}." in f".{plain}" for one in modules):
                    saved.add(plain)
        if strange:
            raise UnsupportedError(
                f"{listed(strange)}: cannot be added to weights as B @ A",
                advice="merge it with PEFT's merge_and_unload",
            )
        for filed, every in tokens.items():
            rows = self._rows(every, self.checkpoint.owner(filed).shape)
            self.tokens |= {f"{module}.weight": (self.checkpoint.owner(filed), rows) for module in every}
        self.saved = frozenset(saved)
        self._add_products(factors, more)

    def _rows(self, modules: Sequence[str], shape: Shape) -> list[int]:
        """Return which rows were trained of the weight of modules, which are tied."""
        stated = found = self.settings.get("trainable_token_indices")
        if isinstance(stated, dict):
            every = [rows for name, rows in stated.items() if any(f".{one}".endswith(f".{name}") for one in modules)]
            found = every[0] if len(every) == 1 else None
        if not isinstance(found, list) or not are_sizes(found) or not len(set(found)) == len(found) == shape[0]:
            raise DamagedFileError("unusable trainable_token_indices", path=self.path, found=brief(stated),
                                   expected=f"{shape[0]} different rows of {listed(modules)}")  # fmt: skip
        return found

    def _add_products(self, factors: Mapping[str, Mapping[int, Mapping[str, Slot]]], more: Collection[str]) -> None:
        wanted = [{f"lora_{kind}A", f"lora_{kind}B", *more} for kind in ("", "embedding_")]
        for module, depths in factors.items():
            for own in depths.values():
                if own.keys() not in wanted:
                    raise DamagedFileError(
                        f"{module} has only {listed(sorted(own))}", expected=listed(sorted(wanted[0]))
                    )
            if sorted(depths) != list(range(len(depths))):
                raise DamagedFileError(f"{module} lacks one of its nested adapters")
            embedding = "lora_embedding_A" in depths[0]
            if self._is_of_parameters(module, is_embedding=embedding, depth=len(depths)):
                self.experts[module] = [
                    (depths[n]["lora_A"], depths[n]["lora_B"]) for n in sorted(depths, reverse=True)
                ]
            else:
                self.products.append(self._product(module, embedding, depths[0]))

    def _is_of_parameters(self, module: str, *, is_embedding: bool, depth: int) -> bool:
        """Tell factors of `target_parameters` from those of a module; raise UnsupportedError: both at once."""
        targets = self.settings.get("target_parameters") or []
        if not isinstance(targets, list) or not are_texts(targets):
            raise DamagedFileError(
                "unusable target_parameters", path=self.path, expected="a list of names", found=brief(targets)
            )
        parents = [one.rpartition(".")[0] for one in targets]
        fits = not is_embedding and any(not one or f".{module}".endswith(f".{one}") for one in parents)
        modules = self.settings.get("target_modules")
        if depth > 1 and not fits:
            expected = f"its target_parameters in {self.path.name}"
            raise DamagedFileError(f"{module} has {depth} nested adapters", expected=expected)
        if fits and modules is not None and self._is_target(module, modules):
            raise UnsupportedError(f"{module} is in both target_modules and target_parameters", path=self.path,
                                   advice="merge it with PEFT's merge_and_unload")  # fmt: skip
        return fits

    def of_parameters(self, shapes: Mapping[str, Shape]) -> list[Product]:
        """Return what is added to `target_parameters` of a model, whose parameters have these shapes.

        Raises UsageError: the model has no such parameters; UnsupportedError: several that the factors fit.
        """
        found: list[Product] = []
        targets = self.settings["target_parameters"] if self.experts else []
        for module, factors in self.experts.items():
            names = [
                name for name in shapes if name.rpartition(".")[0] == module
                and any(name == one or name.endswith(f".{one}") for one in targets)
            ]  # fmt: skip
            fitting = []
            if len(names) == len(factors) <= MOST_PARAMETERS:
                for order in permutations(names):
                    pairs = zip(order, factors, strict=True)
                    every = [self._of_parameter(name, *both, shapes[name]) for name, both in pairs]
                    fitting += [[one for one in every if one]] if all(every) else []
            if len(fitting) != 1:
                ends = "fit its parameters in several orders" if fitting else "do not fit the model's parameters"
                raise (UnsupportedError if fitting else UsageError)(
                    f"adapters for {listed(targets)} in {module} {ends}",
                    path=self.checkpoint.source,
                    expected=listed([f"{name} {shapes[name]}" for name in names])
                    if names
                    else "a base that has these names",
                    found=", ".join(f"A {a.shape}, B {b.shape}" for a, b in factors),
                    advice="merge it with PEFT's merge_and_unload"
                    if fitting
                    else "give the model that the adapter was trained on; if its experts have a tensor each, --map "
                    "(for example --map=transformers) makes them one, as they are in memory",
                )
            found += fitting[0]
        return found

    def _of_parameter(self, name: str, a: Slot, b: Slot, shape: Shape) -> Product | None:
        """Return what is added to a parameter, of one matrix or of each expert's; None if the factors do not fit it."""
        module, num_experts = name.rpartition(".")[0], shape[0] if len(shape) == 3 else None
        rank = self._number("r", name, "rank_pattern")
        rows = rank * (num_experts or 1)
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == rows:
            return None
        straight = (b.shape[0], a.shape[1])
        if shape[-2:] != straight and (num_experts is None or shape[-2:] != straight[::-1]):
            return None
        return Product(module, a, b, self._scale(name, rank), False, name, num_experts)

    def _product(self, module: str, is_embedding: bool, factors: Mapping[str, Slot]) -> Product:
        targets = self.settings.get("target_modules")
        if not self._is_target(module, targets):
            if self.settings.get("ensure_weight_tying"):
                raise UnsupportedError(f"{module} is tied to another module, and both have an adapter", path=self.path,
                                       advice="merge it with PEFT's merge_and_unload")  # fmt: skip
            raise DamagedFileError(f"{module} is not in target_modules", path=self.path, expected=str(targets))
        a, b = (factors[f"lora_{'embedding_' * is_embedding}{one}"] for one in "AB")
        rank = self._number("r", module, "rank_pattern")
        if len(a.shape) < 2 or len(b.shape) < 2 or not a.shape[0] == b.shape[1] == rank:
            raise DamagedFileError(
                f"the factors of {module} do not fit",
                expected=f"a rank of {rank:g}, as {self.path.name} says",
                found=f"A {a.shape}, B {b.shape}",
                advice="ungathered partitions of ZeRO-3 or FSDP look like this" if 0 in a.shape else None,
            )
        magnitude, bias = (factors.get(one) for one in _OF_SETTINGS.values())
        name, scale = f"{module}.weight", self._scale(module, rank)
        return Product(module, a, b, scale, is_embedding, name, magnitude=magnitude, bias=bias)

    def _scale(self, name: str, rank: float) -> float:
        alpha = self._number("lora_alpha", name, "alpha_pattern")
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _number(self, key: str, module: str, patterns: str) -> float:
        """Return the rank or alpha of a module: that of the first pattern that its name ends in, or the common one."""
        values = self.settings.get(patterns) or {}
        common = values.get(module, self.settings.get(key, 8))
        ends = (value for pattern, value in values.items() if self._matches(rf"(?:.*\.)?(?:{pattern})", module))
        found: float = next(ends, common)
        if type(found) not in (int, float) or not -MOST <= found <= MOST:
            raise DamagedFileError(
                f"unusable {key}", path=self.path, expected="a number of float32", found=brief(found)
            )
        if not found or (key == "r" and found < 0):  # verl's merger wrote an alpha of 0, by which nothing is added
            raise DamagedFileError(f"unusable {key}", path=self.path, expected="a number above 0", found=found)
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


def holds_adapter(path: Path) -> bool:
    """Tell a directory of PEFT by its configuration."""
    return any((path / one).is_file() for one in (CONFIG_NAME, VERL_NAME))


def read_adapter(path: Path, opened: Callable[[Path], Checkpoint], config: Path | None, name: str | None) -> Adapter:
    """Read the structure of a LoRA adapter.

    Parameters
    ----------
    path : Path
        A directory of PEFT, the file of its tensors, or any checkpoint that has them.
    opened : callable
        Opens a checkpoint.
    config : Path, optional
        `adapter_config.json`, or the directory that it is in; by default the adapter's.
    name : str, optional
        Which of several. PEFT has the one called default in the directory itself, others in folders of it.

    Raises
    ------
    UsageError
        There is no configuration, or no adapter.
    UnsupportedError
        It is not something that is added to weights.
    DamagedFileError
        It contradicts itself.
    """
    if path.is_dir():
        folders = {one.parent.name: one.parent for one in sorted(path.glob(f"*/{CONFIG_NAME}"))}
        own = {"default": path} if holds_adapter(path) else {}
        again = re.compile(f"checkpoint-.*|{COPY}")  # a Trainer's last steps beside it, verl's copy of it
        several = own | {one: its for one, its in folders.items() if not (own and again.fullmatch(one))}
        if len(several) > 1 and name not in several:
            raise UsageError(f"holds adapters: {listed(list(several))}", path=path, found=name,
                             advice=f"select one: --adapter={next(iter(several))}")  # fmt: skip
        path = several.get(name or "", path if name or own else next(iter(several.values()), path))
    file = next((path / one for one in MODEL_NAMES if (path / one).is_file()), None)
    apart = [one for one in VALUE_HEADS if (path / one).is_file()]
    checkpoint = opened(path if file is None or (path / VISION).is_file() else file)
    if apart:
        checkpoint.warnings.append(
            f"{apart[0]} is of no tensor of the base, and is not merged: keep it beside the model"
        )
    where = config or (path if path.is_dir() else path.parent)
    if config is None and not holds_adapter(where):
        step = Path(checkpoint.source)  # a run's last
        where = next((one for one in (step, step / COPY) if holds_adapter(one)), step if step.is_dir() else where)
    if where.is_dir():
        where /= VERL_NAME if (where / VERL_NAME).is_file() and not (where / CONFIG_NAME).is_file() else CONFIG_NAME
    if not where.is_file():
        raise UsageError(
            f"holds no {CONFIG_NAME}, which states the adapter's scale",
            path=where.parent,
            advice="give it with --adapter-config",
        )
    adapter = Adapter(checkpoint, _settings(where), where)
    if "fine_tune_type" in adapter.settings:
        adapter.checkpoint = _as_of_peft(checkpoint)
    with about(checkpoint.source):
        adapter.read(name)
    return adapter


def _as_of_peft(checkpoint: Checkpoint) -> Checkpoint:
    """Return an adapter of mlx-lm with PEFT's names, and factors as these lie."""
    found = dict[str, Parameter]()
    for name, one in checkpoint.parameters.items():
        module, factor = match.groups() if (match := _OF_MLX.fullmatch(name)) else ("", "")
        kind = MAGNITUDE if factor == "m" else f"lora_{factor[-1:].upper()}.weight"
        if factor != "m" and _EMBEDDING.fullmatch(module):
            kind = f"lora_embedding_{factor[-1:].upper()}"
        turned = len(one.shape) == 2 and kind != MAGNITUDE
        slots = {key: transpose(slot, (1, 0)) if turned else slot for key, slot in one.slots.items()}
        new = replace(one, name=f"{module}.{kind}", shape=one.shape[::-1] if turned else one.shape, slots=slots)
        found |= {new.name: new} if match else {name: one}
    return replace(checkpoint, parameters=found)


def has_live_adapter(names: Iterable[str]) -> bool:
    """Tell whether a model has an adapter in it: what PEFT added, and what it wrapped, or a prompt before it all."""
    every = _plain(names).values()
    if every and all(name.startswith((PEFT_MODEL, *_OF_PROMPTS)) for name in every):
        return any(name.startswith(_OF_PROMPTS) or is_of_adapter(name) for name in every)
    return any(map(is_of_adapter, every)) and any(_OF_BASE.fullmatch(one) for one in every)


def names_in_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return PEFT's names in files for what an adapter is in memory; none where a base or another adapter is there.

    Buffers of the base have none: DeepSpeed leaves out frozen parameters alone.
    """
    names = [name for name in checkpoint.names if name not in checkpoint.buffers or is_of_adapter(name)]
    found = {name: without_adapter(name) for name in names if name.startswith(PEFT_MODEL) and is_of_adapter(name)}
    return found if len(found) == len(names) == len({*found.values()}) else {}


def short_names(names: Collection[str]) -> dict[str, str]:
    """Return the names of an adapter's parameters without its own; none where others are there, or several adapters."""
    own = all(_ADDED.search(f".{one}") or (one.startswith(PEFT_MODEL) and is_of_adapter(one)) for one in names)
    found = {name: without_adapter(name) for name in names if own}
    return found if len(found) == len({*found.values()}) else {}


def of_modules(config: Path, names: Iterable[str]) -> bytes:
    """Return the configuration of an adapter whose tensors got other names, of modules.

    Raises UsageError: it says more of the old names.
    """
    found = json_object(config, "configuration", most=MAXIMUM_CONFIG_NBYTES)
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name})
    stated = {key: value for key in ("rank_pattern", "alpha_pattern") if (value := found.get(key))}
    if stated or {"experts", "base_layer"} & {*modules}:
        raise UsageError("has other names than the map gives", path=config, found=brief(stated or modules),
                         advice=f"write a {CONFIG_NAME} for them, and give its directory with --config "
                             "DIR")  # fmt: skip
    found |= {"target_parameters": None, "target_modules": modules}
    return json.dumps(found, indent=2).encode() + b"\n"


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
    if path.name == VERL_NAME:
        if missing := {"r", "lora_alpha"} - found.keys():
            raise DamagedFileError(f"has no {listed(sorted(missing))}", path=path, advice="give --adapter-config")
        found = {"peft_type": "LORA", "init_lora_weights": True, **found}
    if isinstance(kind := found.get("fine_tune_type"), str) and "peft_type" not in found:
        told = dict_of(found.get("lora_parameters"))
        if kind not in ("lora", "dora", "full") or "alpha" in told:  # older versions: scale x alpha / rank
            raise UnsupportedError(
                f"an adapter of mlx-lm, {'with an alpha' if 'alpha' in told else kind}", path=path,
                expected="lora, dora or full, with a rank and a scale", advice="give PEFT's with --adapter-config",
            )  # fmt: skip
        r, scale = told.get("rank"), told.get("scale")
        alpha = r * scale if isinstance(r, (int, float)) and isinstance(scale, (int, float)) else scale
        own = {"peft_type": "LORA", "r": r, "lora_alpha": alpha, "use_dora": kind == "dora"}
        return {"fine_tune_type": kind, **own}
    kind = found.get("peft_type")
    if kind != "LORA":
        stays = re.search("PROMPT|PREFIX|P_TUNING|CPT|CARTRIDGE|POLY|XLORA", str(kind))
        raise UnsupportedError(
            "is not a LoRA adapter", path=path, expected="peft_type LORA", found=kind,
            advice="no weights of the model can hold it: load it with PEFT beside the model" if stays else
            "merge it with PEFT's merge_and_unload",
        )  # fmt: skip
    unknown = sorted(key for key, value in found.items() if key not in _HARMLESS and value not in (None, False, [], {}))
    if unknown:
        raise UnsupportedError(
            f"{listed(unknown)}: does not merge as weight + scale * B @ A",
            path=path,
            expected="plain LoRA",
            advice="merge it with PEFT's merge_and_unload",
        )
    if found.get("init_lora_weights") not in _INITIAL:
        raise UnsupportedError(
            f"an adapter that began as {found['init_lora_weights']!r} belongs to a base that this changed",
            path=path,
            expected="plain LoRA",
            advice="save it with PEFT's path_initial_model_for_weight_conversion",
        )
    return found
