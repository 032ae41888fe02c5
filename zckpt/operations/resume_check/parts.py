"""What of a training a checkpoint has, by names that every program's table uses. Reads no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zckpt.errors import SourceError, ZckptError
from zckpt.formats.dcp.directory import find as find_dcp
from zckpt.formats.dcp.metadata import read_metadata
from zckpt.formats.fsdp_rank_files import directory as rank_files
from zckpt.formats.transformers_trainer.architectures import is_converted
from zckpt.naming.installed import has_names_of_files
from zckpt.state import MASTER, WEIGHT, Checkpoint, by_key, itemsize
from zckpt.storage.files import entries_of, is_file, read_json
from zckpt.torchfile import node_of

WEIGHTS = "weights"
FROZEN = "frozen weights"
BUFFERS = "buffers"
MASTERS = "master weights"
STATE = "optimizer state"
SETTINGS = "param groups"
STEP = "optimizer step"
SCHEDULER = "scheduler"
SCALE = "loss scale"
RANDOM = "random states"
DATA = "data position"
CUSTOM = "custom objects"
OTHER = "other values"

PARTS = (WEIGHTS, FROZEN, BUFFERS, MASTERS, STATE, SETTINGS, STEP, SCHEDULER, SCALE, RANDOM, DATA, CUSTOM, OTHER)

TRAINING = (WEIGHTS, STATE, SETTINGS)
"""Without which no training goes on."""

OF_METADATA = (
    (SCHEDULER, re.compile(r"(?:lr_)?scheduler(?:_[0-9]+)?|lr_schedulers|opt_param_scheduler")),
    (SCALE, re.compile(r"scaler|grad_scaler|loss_scaler|MixedPrecision|native_amp_scaling_state")),
    (RANDOM, re.compile(r"(?:.*\.)?rng(?:_states?(?:_[0-9]+)?)?|random_states(?:_[0-9]+)?|(?:np|py)_rng")),
    (DATA, re.compile(r"trainer_state|data_sampler|(?:sampler|dl_state_dict)(?:_[0-9]+)?|dataloader|loops")),
    (CUSTOM, re.compile(r"custom_checkpoint_[0-9]+|callbacks")),
)
"""Keys of a checkpoint's metadata, and what they are; any other is the program's own."""

SETTINGS_OF_PROGRAMS = re.compile(
    r"ds_config|training_args|args|checkpoint_version|content_metadata|skipped_steps|global_steps?|global_samples|iteration"
    r"|epoch|pytorch-lightning_version|hparams_name|hyper_parameters|hparams_type|datamodule_.*|ds_version|zckpt|step"
    r"|random_ltd"
)
"""Keys that describe a run, and are no state of it."""


Shapes = dict[tuple[str, ...], tuple[int, ...]]
"""By all the names of a tensor."""


@dataclass(frozen=True)
class Facts:
    """A checkpoint, and the ranks and the model that are to resume it."""

    checkpoint: Checkpoint
    asked: int | None  # ranks that will resume it; None: as many as saved it
    shapes: Shapes | None  # of the tensors that the model has, where it was given
    given_config: Path | None  # the config.json by which that model was given
    planned: frozenset[str] | None = None
    """What would lie in the directory of a target that is not written; None: it is there."""

    @cached_property
    def place(self) -> Path:
        """The directory or file that the user named."""
        return Path(self.checkpoint.named)

    @cached_property
    def folder(self) -> Path:
        """The directory, or the file, that has the checkpoint itself."""
        return Path(self.checkpoint.source)

    @cached_property
    def names(self) -> frozenset[str]:
        """Of what lies in that directory."""
        if self.planned is not None:
            return self.planned
        if not self.place.is_dir():
            return frozenset()
        return frozenset(entry.name for entry in entries_of(self.place, lenient=True))

    def missing(self, *names: str) -> str | None:
        """Return the first of some names that does not lie in that directory; None: all do."""
        return next((one for one in names if one not in self.names), None)

    @property
    def ranks(self) -> int:
        """How many ranks are to resume it."""
        return self.asked or self.saved_ranks

    @property
    def saved_ranks(self) -> int:
        """How many ranks have saved it, as far as a program asks for as many again."""
        one = self.checkpoint
        return one.topology.dp if one.format in ("deepspeed", "universal", "megatron") else one.world_size

    @cached_property
    def model_config(self) -> dict[str, object] | None:
        """The config.json that the model was given by."""
        return None if self.given_config is None else read_json(self.given_config)

    @cached_property
    def config(self) -> dict[str, object] | None:
        """The model's config.json that lies with it, else of the model that was given."""
        return read_json(self.place / "config.json") if is_file(self.place / "config.json") else self.model_config

    @cached_property
    def in_files(self) -> bool | None:
        """Whether it has names that transformers gives tensors in files only; None: that is not known."""
        if self.config is None or not is_converted(self.config):
            return False
        try:
            return has_names_of_files(self.checkpoint, self.config)
        except ZckptError:
            return None

    @cached_property
    def rounded(self) -> str | None:
        """The type of weights that have masters of more digits beside them."""
        held = ((one.weight, one.master) for one in self.checkpoint.owners)
        pairs = ((weight.dtype, master.dtype) for weight, master in held if weight and master)
        return next((weight for weight, master in pairs if itemsize(weight) < itemsize(master)), None)

    @cached_property
    def dcp_paths(self) -> frozenset[tuple[str | int, ...]]:
        """The paths of all that torch's DCP has saved in one directory; none of another format."""
        try:
            directory = find_dcp(self.folder)
            one = directory.folders.get("") if directory is not None else None
            return frozenset(read_metadata(one).paths.values()) if one is not None else frozenset()
        except SourceError:
            return frozenset()

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """What it has: of each part the keys or slots that hold it."""
        found = by_key(self._found())
        return {part: found[part] for part in PARTS if part in found}

    def _found(self) -> Iterator[tuple[str, str]]:
        one = self.checkpoint
        slots = one.slot_names()
        if any(parameter.weight or parameter.master for parameter in one.tensors()):
            yield WEIGHTS, WEIGHT if WEIGHT in slots else MASTER
        if any(parameter.frozen for parameter in one.owners) and one.param_groups:
            yield FROZEN, WEIGHT
        if one.buffers and one.param_groups:
            yield BUFFERS, WEIGHT
        if MASTER in slots:
            yield MASTERS, MASTER
        yield from ((STATE, name) for name in one.optimizer_slot_names() if name != "step")
        yield from ((STATE, value.key) for value in one.per_rank)
        if any(group.hyperparameters for group in one.param_groups):
            yield SETTINGS, f"{len(one.param_groups)} groups"
        if one.param_groups and one.step is not None:
            yield STEP, str(one.step)
        if one.loss_scale not in (None, 1.0) or one.optimizer_metadata.get("dynamic_loss_scale") is True:
            yield SCALE, "loss_scaler"
        for key, value in one.metadata.items():
            node = node_of(value)
            if node is None or node in ({}, [], ()) or SETTINGS_OF_PROGRAMS.fullmatch(key):
                continue
            is_data = one.format == rank_files.FORMAT and rank_files.OF_TRAINING.fullmatch(f"{key}.pt")
            yield DATA if is_data else next((one for one, keys in OF_METADATA if keys.fullmatch(key)), OTHER), key
