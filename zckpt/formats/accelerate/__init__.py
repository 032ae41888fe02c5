"""Directories that Accelerate's `load_state` takes: written here, read by the formats whose files they are made of.

DIR/model.safetensors, model_1.safetensors ...                  alone, DDP: every prepared model, one file each
DIR/optimizer.bin, optimizer_1.bin ...                          {state, param_groups} of torch.optim, numbered

DIR/pytorch_model_fsdp_0/, optimizer_0/, pytorch_model_fsdp_1/ ...      FSDP, SHARDED_STATE_DICT: DCP, by names
DIR/pytorch_model_fsdp.bin, optimizer.bin, pytorch_model_fsdp_1.bin ... FSDP, FULL_STATE_DICT: torch files, by names

DIR/scheduler.bin, random_states_R.pkl, sampler.bin, scaler.pt, custom_checkpoint_0.pkl ...     in each of them
DIR/zckpt.pt                                                    what none of these has room for
"""

from __future__ import annotations

import re

from zckpt.formats.dcp.directory import is_own as is_dcps
from zckpt.formats.format import InFolder, Search
from zckpt.formats.options import option
from zckpt.formats.suffixes import OWN_NAME
from zckpt.immutable import immutable
from zckpt.storage.ownership import Owned


@immutable
class Options:
    """What `convert --to accelerate` can be given."""

    fsdp: str | None = option(
        "For FSDP with Accelerate's SHARDED_STATE_DICT or FULL_STATE_DICT. Default: for training without FSDP.",
        choices=("sharded", "full"),
    )
    world_size: int | None = option(
        "Number of files of a sharded model; any number of ranks can load them. Default: 1.", metavar="N"
    )
    groups: str = option(
        "Keep SOURCE's param groups, or write one group of all parameters in the model's order.",
        "keep",
        choices=("keep", "one"),
    )


_OWN = re.compile(
    r"model(?:_[0-9]+)?\.safetensors|(?:pytorch_model_fsdp|optimizer|scheduler|sampler|dl_state_dict)(?:_[0-9]+)?\.bin"
    r"|(?:custom_checkpoint|random_states)_[0-9]+\.pkl|(?:scaler|zckpt)\.pt"
)
_FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]+")


def _is_own(name: str) -> bool:
    """Tell whether a file name is one that a directory of this format has of its own, as zckpt writes it."""
    folder, slash, file = name.partition("/")
    if slash:
        return _FOLDER.fullmatch(folder) is not None and is_dcps(file)
    return _OWN.fullmatch(name) is not None


class Accelerate(InFolder):
    """What Accelerate's `load_state` takes, without DeepSpeed."""

    name = "accelerate"
    title = "Hugging Face's Accelerate"
    reads = (
        (
            "Accelerate's `save_state`",
            "without FSDP, with every form of FSDP, and with DeepSpeed: see the other rows",
        ),
    )
    writes = "for Accelerate's load_state, without FSDP or with FSDP1 or FSDP2"
    options = Options
    keeps_optimizers = True
    owns = Owned(_is_own, lambda directory: (directory / OWN_NAME).is_file())

    def find(self, search: Search) -> None:  # noqa: ARG002
        """Leave all directories to the formats that their files are of."""
        return


FORMATS = (Accelerate(),)
