"""Directories of Hugging Face's Trainer, of Accelerate, PEFT and diffusers, where no DeepSpeed and no DCP is inside.

DIR/model.safetensors, or model-0000I-of-0000N.safetensors with model.safetensors.index.json
DIR/pytorch_model.bin, or its shards with pytorch_model.bin.index.json; diffusion_pytorch_model.*, consolidated.*
DIR/adapter_model.safetensors or .bin, adapter_config.json         PEFT: what it adds to a model
DIR/model_index.json, unet/, vae/, text_encoder/ ...               diffusers: a pipeline of models, each in its folder
DIR/unet/, unet_ema/, optimizer.bin, random_states_0.pkl           diffusers: what Accelerate's hooks keep of a training
DIR/value_head.*, vit.*, scoring_head.*                            LLaMA-Factory, ms-swift: the rest of a model
DIR/modules.json, 2_Dense/ ...                                     sentence-transformers: what comes after a model
DIR/pytorch_model_fsdp.bin                                         FSDP, FULL_STATE_DICT
DIR/model_1.safetensors, optimizer_1.bin ...                       Accelerate: further models and optimizers
DIR/optimizer.pt, optimizer.bin                                    {state, param_groups} of torch.optim
DIR/{model,weights}.{pt,pth,bin}, {optimizer,optim}.{pt,pth,bin}   the same two of a loop of one's own; or under any
                                                                   names, if they are the only ones
DIR/pretrained_model/, training_state/*.safetensors                LeRobot: see `formats.lerobot`
DIR/scheduler.*, rng_state*, random_states*, scaler.pt, trainer_state.json, training_args.bin     see `companions`
DIR/zckpt.pt                                                       written by zckpt: what none of these has room for

directory       which files are there               readings        whose state each number of an optimizer is
model           the weights, and their order        architectures   the orders that models of transformers have
reader          all of it as a Checkpoint           states          schedulers, random states
writer          what the Trainer resumes from
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.formats.format import Found, NearMiss, Search
from zckpt.formats.options import option
from zckpt.formats.suffixes import OWN_MODEL, OWN_NAME
from zckpt.formats.torch_files import TorchDirectory
from zckpt.immutable import immutable
from zckpt.storage.ownership import Owned, called

if TYPE_CHECKING:
    from zckpt.state import Checkpoint


@immutable
class Options:
    """What `convert --to transformers-trainer` can be given."""

    train_batch_size: int | None = option(
        "Batch size per device, for trainer_state.json. Required unless SOURCE states it.",
        metavar="N",
    )


_OWN = r"(?:optimizer|scheduler|scaler|zckpt)\.pt|rng_state(?:_[0-9]+)?\.pth|training_args\.bin|trainer_state\.json"
"""A pattern of the files that a directory has of its own besides its model's, as zckpt writes it."""


class TransformersTrainer(TorchDirectory):
    """A directory that the Trainer, Accelerate or PEFT saved, without DeepSpeed and DCP."""

    name = "transformers-trainer"
    title = "Hugging Face's Trainer and Accelerate"
    reads = (
        (
            "Hugging Face's Trainer, Accelerate",
            "one or several models (safetensors or torch files) and optimizers; FSDP's full state dicts",
        ),
        (
            "PEFT, diffusers",
            "adapters, alone or in a Trainer's directory; pipelines, whole or one model of them; training states",
        ),
        ("LeRobot", "its steps, whose optimizer is in safetensors; of sharded runs in DCP"),
    )
    writes = "for Hugging Face's Trainer without DeepSpeed"
    options = Options
    owns = Owned(called(f"{_OWN}|{OWN_MODEL}"), lambda directory: (directory / OWN_NAME).is_file())

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the files by their names; or, if no other format does, those of a model and an optimizer by content."""
        found = super().find(search)
        if found is not None or not search.path.is_dir():
            return found
        pair = self.module("directory").by_content(search.path)
        return None if pair is None else Found(pair, sure=False)

    def follows(self, key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:  # noqa: ARG002
        """Tell what a scheduler says that was written by rule, beside none."""
        if not key.startswith("metadata.scheduler.") or sides[0].format == sides[1].format:
            return False
        from zckpt.formats.transformers_trainer.states import is_by_rule

        return any(is_by_rule(one, other) for one, other in (sides, sides[::-1]))


FORMATS = (TransformersTrainer(),)
