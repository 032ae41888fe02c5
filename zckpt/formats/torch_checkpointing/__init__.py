"""Directories of torch-checkpointing, torchtitan's further backend: a torch file for each item of each rank.

DIR/model_R.pt               rank R's state dict, with DTensors or whole tensors
DIR/optimizer_R.pt           {state: {number or name: ...}, param_groups}, or with flattened keys
DIR/ITEM_R.pt                any other value that was saved: `step`, `lr_scheduler`, ...
DIR/metadata.pkl             a pickle of plain data: how many ranks, and how each tensor of some items is cut; there
                             where the program has asked for items that other ranks may load
DIR/zckpt.pt                 written by zckpt: what these have no place for

What ranks have is read as `fsdp_rank_files` reads it.

reader          which files those are            writer          the files, and their `metadata.pkl`
"""

from __future__ import annotations

from zckpt.formats.format import Found, InFolder, Search
from zckpt.formats.options import option
from zckpt.formats.suffixes import OWN_NAME
from zckpt.immutable import immutable
from zckpt.storage.files import entries_of
from zckpt.storage.ownership import Owned, called

_is_named = called(r"[A-Za-z0-9_-]+_[0-9]+\.pt|metadata\.pkl|zckpt\.pt")


@immutable
class Options:
    """What `convert --to torch-checkpointing` can be given."""

    world_size: int | None = option(
        "Ranks with files; any number can load model and optimizer. Default: as SOURCE.", metavar="N"
    )
    keys: str = option(
        "Optimizer state: by numbers, as in state_dict; by names, as optimizer_transform_pre; flat, as in torchtitan.",
        "numbers",
        choices=("numbers", "names", "flat"),
    )
    device: str = option("The ranks' device type: cuda, cpu, npu, ...", "cuda", metavar="TYPE")


class TorchCheckpointing(InFolder):
    """A torch file for each item of each rank."""

    name = "torch-checkpointing"
    title = "torch-checkpointing"
    reads = (("torch-checkpointing", "one torch file per item and rank: DTensor of any mesh, whole tensors"),)
    writes = "torch-checkpointing, for any number of ranks"
    options = Options
    owns = Owned(_is_named, lambda directory: (directory / OWN_NAME).is_file())

    def find(self, search: Search) -> Found | None:
        """Find the files by `metadata.pkl`, or by those of the model."""
        if not (search.path.is_dir() and any(_is_named(one.name) for one in entries_of(search.path))):
            return None
        from zckpt.formats.torch_checkpointing.reader import find

        found = find(search.path)
        return None if found is None else Found(found)


FORMATS = (TorchCheckpointing(),)
