"""One torch file for each rank of FSDP: verl, SkyRL, OpenRLHF and slime, and Accelerate where it is kept from DCP.

DIR/{model,optim,extra_state}_world_size_W_rank_R.pt      every rank's share of the model, its optimizer, all else
DIR/fsdp_config.json, huggingface/                        which FSDP it was; the model's configuration and tokenizer,
                                                          and as verl can be told, the model once more
DIR/lora_adapter/adapter_model.safetensors                LoRA's parameters once more

What ranks have of a tensor is a DTensor, a ShardedTensor, or the whole of it; the optimizer's state may also be that of
flat parameters, in which FSDP1 keeps the parameters of a layer. No file names what is in those: see `readings`.

directory   which files those are            held          what a rank's file has of a tensor
contents    names, ties; values by number    across        what all ranks have of it, put together as spans
units       which parameters FSDP1 has wrapped together
readings    whose state each number is, and that state given to its parameters
kept        other state, groups, zckpt.pt    writer        the files for other ranks
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.format import ROOTS, TAG, InFolder
from zckpt.formats.fsdp_rank_files.directory import OWNED
from zckpt.formats.options import option
from zckpt.immutable import immutable


@immutable
class Options:
    """What `convert --to fsdp-rank-files` can be given."""

    world_size: int | None = option("Ranks that will load it. Default: as SOURCE.", metavar="N")
    fsdp_version: int | None = option(
        "FSDP version: 1 writes the optimizer as flat parameters, 2 as DTensors. Default: as SOURCE, or 2.",
        choices=(1, 2),
    )
    fsdp_size: int | None = option(
        "Ranks that share one copy; further ranks have copies (HSDP). Default: all.", metavar="N"
    )
    device: str | None = option(
        "Device type that will load it: cuda, cpu, npu, ... Default: as SOURCE, or cuda.", metavar="TYPE"
    )
    torch_version: str | None = option(
        "torch that will load it, 2.3 or newer; each has its own form. Default: as SOURCE, or newest.",
        metavar="N.N",
    )  # fmt: skip
    groups: str = option(
        "Keep SOURCE's param groups, or write one group of all parameters in the model's order, as verl has it.",
        "keep",
        choices=("keep", "one"),
    )
    units: str | None = option(
        "Modules that FSDP1 wraps, such as model.layers.*. Default: as SOURCE.", metavar="PATTERN,..."
    )


class FsdpRankFiles(InFolder):
    """One torch file for each rank of FSDP."""

    name = "fsdp-rank-files"
    title = "files of FSDP's ranks"
    reads = (
        (
            "verl, SkyRL, OpenRLHF, Accelerate",
            "one torch file per rank: FSDP1 and FSDP2, DTensor of any mesh, ShardedTensor, flat parameters",
        ),
    )
    takes = frozenset({ROOTS, TAG})
    writes = "verl and SkyRL: one torch file per rank, for FSDP2, or FSDP1 with flat parameters"
    options = Options
    owns = OWNED
    every_name = True

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell by names whether a directory has files of ranks."""
        from zckpt.formats.fsdp_rank_files.directory import has_rank_files

        return has_rank_files(directory)


FORMATS = (FsdpRankFiles(),)
