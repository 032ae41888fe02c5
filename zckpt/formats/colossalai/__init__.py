"""Directories of ColossalAI's booster: a model and its optimizer, each in a folder of whole tensors in several files.

DIR/modeling/pytorch_model-00001.bin ...                   or model-00001.safetensors ..., with their index
DIR/optimizer/pytorch_optim-00001.bin ...                  {number: {slot: value}}
DIR/optimizer/pytorch_optim.bin.index.json                 the file of each number
DIR/optimizer/pytorch_optim_group.bin                      the param groups
DIR/lr_scheduler, running_states.json                      of its examples

The folders may have any names. Ranks have put their parts together before they save.
"""

from __future__ import annotations

from zckpt.formats.format import Found, InFolder, NearMiss, Search
from zckpt.storage.files import folders_in, is_file

OPTIMIZER, ASYNCHRONOUS = "pytorch_optim.bin.index.json", "pytorch_optim.safetensors.index.json"
MODELS = ("pytorch_model.bin.index.json", "model.safetensors.index.json")


class ColossalAI(InFolder):
    """A model's folder and its optimizer's."""

    name = "colossalai"
    title = "ColossalAI's booster"
    reads = (("ColossalAI", "what its booster saves in shards: a model folder with the optimizer's beside it"),)

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the folder of an optimizer, and the only one of a model beside it."""
        path = search.path
        folders = folders_in(path) if path.is_dir() else []
        optimizers = [one for one in folders if is_file(one / OPTIMIZER) or is_file(one / ASYNCHRONOUS)]
        models = [one for one in folders if any(is_file(one / name) for name in MODELS)]
        if not optimizers:
            return None
        if len(models) != 1 or len(optimizers) != 1 or is_file(optimizers[0] / ASYNCHRONOUS):
            return NearMiss(
                "is a ColossalAI checkpoint in a form that zckpt does not read",
                "save model and optimizer in shards, in two folders beside each other, without use_async",
                intact=True,
                expected="one folder with a model's index, and one with pytorch_optim.bin.index.json",
            )
        return Found((path, models[0], optimizers[0]))


FORMATS = (ColossalAI(),)
