"""What DeepSpeed's files hold, brought to one form whatever wrote them. Reads structure and single numbers.

model file      module, buffer_names, param_shapes, shared_params, frozen_*, ..., the client's own keys
optimizer file  {optimizer_state_dict: Z, ds_config, ds_version}; Z differs by stage:

    ZeRO-1/2          base_optimizer_state  rigid:   {state: {group: {slot: tensor}}, param_groups}
                                            elastic: [{slot: tensor}, ...], padding stripped
                      single_partition_of_fp32_groups, group_paddings, partition_count, param_slice_mappings
    BF16_Optimizer    the same without zero_stage
    ZeRO-3            optimizer_state_dict {state, param_groups}, fp32_flat_groups, partition_count (one number)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Any

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.nested import filed_names, flattened
from zckpt.formats.torch_files.tensors import as_mapping, by_name, refuse_taken, scalars_in, slot_of, with_scalars
from zckpt.immutable import mutable
from zckpt.state import MASTER, WEIGHT, Shape, Slot, are_sizes, are_texts, dict_of, without
from zckpt.torchfile import Global, Object, Tensor, TorchFile, brief, plain, read_torchfile

Files = Sequence[tuple[Shard, TorchFile]]

Weights = dict[str, Slot]
"""Of parameters and buffers, by name."""

Shapes = dict[str, Shape]
"""Shapes by name, as `param_shapes` and its kin have them."""

Addresses = dict[str, tuple[int, int]]
"""Where parameters begin in a partition, and how many of their elements it has, by name."""

STRUCTURE_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_autoep_layers",
})  # fmt: skip
"""Keys of a model file that describe the model or how it was cut, and are written for each checkpoint."""

KEPT_KEYS = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "num_experts",
    "ds_config", "sparse_tensor_module_names",
)  # fmt: skip
"""DeepSpeed's own keys of a model file that go along as they are; so do all of the client's."""

MODEL_KEYS = STRUCTURE_KEYS.union(KEPT_KEYS, ["ds_version"])
"""Keys that DeepSpeed itself writes into a model file; all others are the client's."""

GROUPS_KEY = "ds_zero_partition_groups"
"""In an optimizer file: which ranks share a sub-group, where not all do, see `auto_ep_shards`."""

EXTRA_STATE_KEY = "module_extra_state"
"""Where the state of modules that is no tensor is kept, by name; DeepSpeed has it among the weights."""

BOOKKEEPING = MODEL_KEYS - {"lr_scheduler"}
"""Those that are about the run's files and counters, which another program has no need of."""


def section(config: Mapping[Any, object], name: str) -> Mapping[Any, Any]:
    """Return a part of DeepSpeed's configuration; empty where absent."""
    return dict_of(config.get(name))


@mutable
class _OfRank:
    """A file of a rank."""

    shard: Shard
    file: TorchFile

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.shard.path

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.shard.dp_rank or 0

    @property
    def mp_rank(self) -> int:
        """Model-parallel rank."""
        return self.shard.mp_rank or 0


@mutable
class ModelShard(_OfRank):
    """A model file."""

    module: dict[str, Tensor]
    buffer_names: set[str]
    param_shapes: list[Shapes] | None
    """Shape by name for each group, in flat order; None in files that do not record it."""
    frozen_shapes: Shapes | None
    frozen_fragments: dict[str, Tensor]
    shared: dict[str, str]  # alias to owner; empty in files that do not record it
    content: dict[str, object]  # the file's whole top level
    extra: Mapping[str, object] = field(default_factory=dict)  # what of `module` is no tensor
    configuration: object = None  # DeepSpeed's, from this file or, where it has none, from an optimizer's
    filed: dict[str, str] = field(default_factory=dict)
    """Names in the file's module by those that are listed, see `nested`; here `module` has the latter."""

    @property
    def config(self) -> dict[str, object]:
        """DeepSpeed's configuration as JSON-able data; empty where absent."""
        return dict_of(plain(self.configuration))

    @property
    def trained(self) -> Shapes:
        """Shapes of the parameters that its groups list."""
        return {name: shape for group in self.param_shapes or () for name, shape in group.items()}

    @property
    def frozen(self) -> Shapes:
        """Shapes of the frozen parameters that it lists."""
        return self.frozen_shapes or {}

    @property
    def zero(self) -> Mapping[Any, Any]:
        """What the configuration says of ZeRO."""
        return section(self.config, "zero_optimization")

    def zero_option(self, name: str) -> bool:
        """Return a boolean option of `zero_optimization` in the configuration; false where absent."""
        return self.zero.get(name) is True

    @property
    def reorders(self) -> bool:
        """Whether flat buffers have an order of their own."""
        return self.zero_option("round_robin_gradients")

    @property
    def uses_zenflow(self) -> bool:
        """Whether the configuration turns ZenFlow on, see `zenflow`."""
        return self.zero.get("zenflow") is not None

    @property
    def optimizer(self) -> dict[object, object] | None:
        """The optimizer in the file, which there is without ZeRO."""
        found = self.content.get("optimizer")
        return found if isinstance(found, dict) else None

    @property
    def dtype(self) -> str:
        """Element type of the model's weights, as the configuration says."""
        for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            if section(self.config, key).get("enabled") is True:
                return dtype
        return "float32"


@mutable
class OptimizerShard(_OfRank):
    """An optimizer file of ZeRO."""

    stage: int
    elastic: bool
    bf16_optimizer: bool
    masters: list[Tensor]  # one flat partition for each group (ZeRO-3: sub-group)
    tensors: list[dict[str, Tensor]]  # for each of them, the state that is a tensor of at least one dimension, by slot
    scalars: list[dict[str, object]]  # for each of them, the state that is one value
    groups: list[dict[str, object]]
    """The base optimizer's param groups with `params`; empty in elastic files, which do not hold them."""
    partition_count: list[int]  # ranks that share each group
    paddings: list[int] | None = None
    alignment_paddings: list[list[int]] | None = None
    mappings: list[Addresses] | None = None
    """Where each parameter's elements lie in this rank's partition, as DeepSpeed computed it."""
    content: dict[str, object] = field(default_factory=dict)
    version: str | None = None
    order: Shape | None = None  # where the groups are in the file, if not in this order (`groups`)

    def group(self, index: int) -> dict[str, object]:
        """Return a param group of the base optimizer; empty where the file does not hold it."""
        return self.groups[index] if index < len(self.groups) else {}

    def mapping(self, index: int) -> Addresses:
        """Return where the parameters of a group lie in the partition; empty where the file does not say."""
        return self.mappings[index] if self.mappings and index < len(self.mappings) else {}

    def tensor(self, index: int, key: str) -> Tensor | None:
        """Return what the file has of a slot of a group."""
        return self.masters[index] if key == MASTER else self.tensors[index].get(key)

    def element_tensors(self, index: int, keys: Set[str]) -> dict[str, Tensor]:
        """Return the master of a group and those of its tensors that have one of the keys, by slot."""
        return {MASTER: self.masters[index], **{k: t for k, t in self.tensors[index].items() if k in keys}}


def mapped_numels(members: Sequence[OptimizerShard], index: int) -> dict[str, int]:
    """Return how many elements each parameter of a group has, in its order, as the ranks that share it record it.

    Raises LayoutError: they do not.
    """
    numels: dict[str, int] = {}
    for member in members:
        if member.mappings is None:
            raise LayoutError(
                "neither param_shapes nor param_slice_mappings",
                path=member.path,
                advice="the order of the flat buffer is unknown",
            )
        for name, (_, numel) in sorted(member.mappings[index].items(), key=lambda item: item[1][0]):
            numels[name] = numels.get(name, 0) + numel
    return numels


def read_models(shards: Sequence[Shard]) -> list[ModelShard]:
    """Read model files. Those that say the same share a tree and what is read from it.

    Raises DamagedFileError: one is not a model file of DeepSpeed; UnsupportedError: what one stands for is in another
    program's storage.
    """
    reader = AlikeReader()
    found: list[ModelShard] = []
    known: dict[int, ModelShard] = {}
    for shard in shards:
        file = reader.read(shard.path)
        like = known.get(id(file.root))
        with about(shard.path):
            one = model_of(shard, file) if like is None else replace(like, shard=shard, file=file)
        known.setdefault(id(file.root), one)
        found.append(one)
    return found


def model_of(shard: Shard, file: TorchFile) -> ModelShard:
    """Return what a model file holds; errors are those of `read_models`."""
    if file.root == "":  # DeepSpeed before 0.19, `NebulaCheckpointEngine.save`
        raise UnsupportedError(
            "an empty file, as DeepSpeed's Nebula engine leaves it when it saves into its own storage",
            advice="load each file's content with `torch_nebula.get_checkpoint(tag=...).load`, and write it here "
            "with torch.save",
        )
    content = as_mapping(file.root, expected="a dict of model states")
    owners: dict[str, str] = {}  # by alias
    shared = content.get("shared_params")  # DeepSpeed 0.8 wrote a list of pairs
    pairs = [] if shared is None else list(shared.items()) if isinstance(shared, dict) else shared
    for pair in _items(pairs, "shared_params"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not are_texts(pair):
            raise DamagedFileError("unreadable shared_params", expected="pairs of names", found=brief(pair))
        owners[str(pair[0])] = str(pair[1])
    frozen_shapes = content.get("frozen_param_shapes")
    names = content.get("buffer_names")
    buffers = {str(name) for name in names} if isinstance(names, (list, set, tuple, frozenset)) else set()
    listed = content.get("param_shapes")
    if isinstance(listed, dict):  # before 2021, for all groups
        listed = [listed]
    shapes = None if listed is None else list(map(_shapes, _items(listed, "param_shapes")))
    frozen_by_name = None if frozen_shapes is None else _shapes(frozen_shapes)
    known = {*buffers, *(name for group in shapes or () for name in group), *(frozen_by_name or ())}
    module, extra = flattened(section(content, "module"), known, is_listed=shapes is not None)
    filed = filed_names(known, tensors := _tensors_by_name(module))
    names_listed = {own: name for name, own in filed.items()}
    return ModelShard(
        shard,
        file,
        {names_listed.get(name, name): tensor for name, tensor in tensors.items()},
        buffers,
        shapes,
        frozen_by_name,
        _tensors_by_name(dict_of(content.get("frozen_param_fragments"))),
        owners,
        by_name(content),
        extra,
        content.get("ds_config"),
        filed,
    )


def weights_of(file: TorchFile) -> Weights:
    """Return what a file of weights has, of experts or a pipeline's layer, by name."""
    tensors = _tensors_by_name(as_mapping(file.root, file.path, expected="a dict of weights"))
    return {name: slot_of(WEIGHT, tensor, file.path) for name, tensor in tensors.items()}


def _shapes(node: object) -> Shapes:
    found = {}
    for name, shape in as_mapping(node, expected="a dict of shapes").items():
        if not isinstance(shape, (tuple, list)) or not are_sizes(shape):
            raise DamagedFileError(f"unreadable shape of {name}", found=brief(shape))
        found[str(name)] = tuple(int(n) for n in shape)
    return found


def _tensors_by_name(node: dict[object, object]) -> dict[str, Tensor]:
    return by_name({key: value for key, value in node.items() if isinstance(value, Tensor)})


def read_optimizer(shard: Shard, read: Callable[[str], TorchFile] = read_torchfile) -> OptimizerShard:
    """Read an optimizer file of ZeRO-1, 2 or 3 or of BF16_Optimizer.

    Raises DamagedFileError: it is not an optimizer file of DeepSpeed; UnsupportedError: a stage or form that zckpt does
    not know.
    """
    with about(shard.path):
        return _optimizer(shard, read(shard.path))


def _optimizer(shard: Shard, file: TorchFile) -> OptimizerShard:
    top = as_mapping(file.root, expected="a dict of optimizer states")
    content = as_mapping(top.get("optimizer_state_dict"), expected="a dict optimizer_state_dict")
    z = {str(key): value for key, value in content.items()}
    stage = plain(z.get("zero_stage"))
    if stage is None:
        stage = 3 if "fp32_flat_groups" in z else 1
    if stage not in (0, 1, 2, 3):
        raise UnsupportedError("unknown ZeRO stage", expected="0, 1, 2 or 3", found=repr(stage))
    stage = max(int(stage), 1)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters: list[Tensor] = _items(z.get(key), key, Tensor, "tensors")
    states, groups, elastic = _base_state(z, stage, shard.path)
    held = {(i, str(key)): value for i in range(len(masters)) for key, value in states.get(i, {}).items()}
    refuse_taken((key for _, key in held), MASTER)
    single = scalars_in(held, shard.path)
    tensors: list[dict[str, Tensor]] = [{} for _ in masters]
    scalars: list[dict[str, object]] = [{} for _ in masters]
    for (index, key), value in (without(held, *single) | single).items():
        if isinstance(value, Tensor):
            tensors[index][key] = value
        else:
            scalars[index][key] = value
    common = None if stage == 3 else z.get("base_optimizer_state_step")
    for one, own in zip(scalars, tensors, strict=True):
        if common or (common is not None and own):  # 0 without state: there was no step yet
            one.setdefault("step", common)
    counts = z.get("partition_count")
    if stage == 3 and not isinstance(counts, int):
        raise DamagedFileError("unreadable partition_count", expected="a number", found=brief(counts))
    counts = [counts] * len(masters) if isinstance(counts, int) else _items(counts, "partition_count", int, "numbers")
    if len(counts) != len(masters):
        raise DamagedFileError("partition_count has the wrong length", expected=f"{len(masters)} groups",
                               found=len(counts))  # fmt: skip
    version = z.get("ds_version", top.get("ds_version"))
    found = OptimizerShard(
        shard, file, stage, elastic, stage != 3 and "zero_stage" not in z, masters, tensors, scalars, groups, counts,
        content=z, version=version if isinstance(version, str) else None,
    )  # fmt: skip
    if stage != 3:
        if (pads := z.get("group_paddings")) is not None:
            found.paddings = _items(pads, "group_paddings", int, "numbers")
        if (pads := z.get("param_alignment_paddings")) is not None:
            key = "param_alignment_paddings"
            found.alignment_paddings = [_items(one, key, int, "numbers") for one in _items(pads, key)]
        if (mappings := z.get("param_slice_mappings")) is not None:
            found.mappings = [
                {str(name): _address(value) for name, value in as_mapping(group, expected="slice mappings").items()}
                for group in _items(mappings, "param_slice_mappings")
            ]
    return found


def _items(node: object, what: str, kind: type = object, of: str = "") -> list[Any]:
    """Return what a list of a file has, all of one kind."""
    if not isinstance(node, (list, tuple)) or not all(isinstance(one, kind) and type(one) is not bool for one in node):
        expected = f"a list of {of}" if of else "a list"
        raise DamagedFileError(f"unreadable {what}", expected=expected, found=brief(node))
    return list(node)


def _base_state(
    z: Mapping[str, object], stage: int, path: str
) -> tuple[dict[object, dict[object, object]], list[dict[str, object]], bool]:
    """Return state by group index, the param groups, and whether it is the elastic form."""
    base = z.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    held: dict[object, object]
    if elastic := stage != 3 and isinstance(base, (list, tuple)):
        held = dict(enumerate(_items(base, "state")))
        listed = z.get("base_optimizer_param_groups", [])  # which `zckpt strip` keeps next to it
    else:
        content = as_mapping(base, expected="the base optimizer's state")
        held, listed = as_mapping(content.get("state"), expected="a dict of state"), content.get("param_groups")
    states = {
        key: as_mapping(one, expected="a dict of state")
        for key, one in held.items()
        if type(key) is int or isinstance(one, dict)
    }
    groups = [as_mapping(group, expected="a param group") for group in _items(listed, "param_groups")]
    return states, [with_scalars(without(group, "param_names"), path) for group in groups], elastic


def _address(node: object) -> tuple[int, int]:
    start, numel = (node.get("start"), node.get("numel")) if isinstance(node, Object) else (None, None)
    if type(start) is int and type(numel) is int:
        return start, numel
    raise DamagedFileError("unreadable slice mapping", expected="start and numel", found=brief(node))


def address_of(numel: int, start: int) -> Object:
    """Return where a parameter's share lies in a partition, as an object of DeepSpeed's class."""
    where: dict[object, object] = {"numel": numel, "start": start}
    return Object(Global("deepspeed.utils.tensor_fragment", "fragment_address"), how="newobj", state=where,
                  has_state=True)  # fmt: skip


def stage_of(stage: int) -> Object:
    """Return a stage of ZeRO as an object of DeepSpeed's class."""
    return Object(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(stage,))
