"""What LeRobot keeps of a training, without a pickle, beside a model in `pretrained_model`.

DIR/training_state/optimizer_state.safetensors              `state/<number>/<slot>` -> tensor
DIR/training_state/optimizer_param_groups.json              the param groups of torch.optim
DIR/training_state/rng_state.safetensors                    random states
DIR/training_state/{scheduler_state,training_step}.json     values
DIR/pretrained_model/policy_preprocessor_*.safetensors      what is done to inputs and outputs

A run that is sharded keeps its optimizer by DCP, in `training_state/optimizer_0`: see `dcp.directory`.
Source: LeRobot 0.4 and its main branch of August 2026, `optim/optimizers.py`, `common/train_utils.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.errors import DamagedFileError, SourceError
from zckpt.formats.safetensors.file import read_header, rules_of, source_file
from zckpt.formats.torch_files.optimizer import GROUPS_KEY, STATE_KEY, OptimizerState, parse
from zckpt.formats.torch_files.writer import in_pieces, view
from zckpt.state import Checkpoint, Slot, dict_of
from zckpt.state.inventory import CARRIED, LEFT_OUT, STATE, Claim
from zckpt.state.names import is_number
from zckpt.storage.files import entries_of, json_object, json_of
from zckpt.torchfile import FromFile, Storage, Tensor

GROUPS = "optimizer_param_groups.json"
FOLDERS = ("training_state", "pretrained_model")

MOST_NBYTES = 1 << 28
"""Of JSON: param groups list the numbers of all parameters."""

_CARRIED = re.compile(r"(?:rng_state|policy_\w+)\.safetensors|(?:scheduler_state|training_step)\.json")


def read_optimizer(checkpoint: Checkpoint, path: Path) -> OptimizerState:
    """Read an optimizer's state and param groups; errors are those of `parse`."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, slot in _tensors(checkpoint, path, "optimizer").items():
        kind, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
        if kind != STATE_KEY or not is_number(number) or not name:
            raise DamagedFileError("unexpected content", path=path, expected="state/NUMBER/SLOT", found=key)
        offset = slot.spans[0].offset if slot.spans else 0
        state.setdefault(number, {})[name] = view(Storage(key, slot.dtype, slot.nbytes, "cpu", offset), slot.shape)
    beside = path.with_name(GROUPS)
    checkpoint.claims[str(beside)] = Claim(STATE, "param groups")
    stored = json_of(beside, "param groups", list, most=MOST_NBYTES)
    groups = [
        {key: tuple(one) if isinstance(one, list) else one for key, one in dict_of(each).items()} for each in stored
    ]
    return parse({STATE_KEY: state, GROUPS_KEY: groups}, str(path))


def carry_beside(checkpoint: Checkpoint, directory: Path) -> None:
    """Keep what lies beside a model and an optimizer, under the names of its files; not what cannot be read."""
    beside = [Path(entry.path) for folder in FOLDERS for entry in entries_of(directory / folder, lenient=True)]
    for path in (one for one in beside if _CARRIED.fullmatch(one.name) and one.stem not in checkpoint.metadata):
        try:
            if path.suffix == ".json":
                checkpoint.metadata[path.stem] = json_object(path, "content", most=MOST_NBYTES)
                checkpoint.claims[str(path)] = Claim(CARRIED, path.stem)
                continue
            tensors = _tensors(checkpoint, path, "metadata")
            held = {key: in_pieces(key, slot) for key, slot in tensors.items()}
            checkpoint.metadata[path.stem] = FromFile(held, str(path))
        except SourceError as error:
            checkpoint.claims[str(path)] = Claim(LEFT_OUT, f"it cannot be read: {error.message}")


def _tensors(checkpoint: Checkpoint, path: Path, role: str) -> dict[str, Slot]:
    slots, texts, nbytes = read_header(path)
    checkpoint.files.append(source_file(path, slots, texts, nbytes, rules_of(texts, slots), role))
    return slots
