"""One torch file for each rank of FSDP: verl, SkyRL, OpenRLHF and slime, and Accelerate where it is kept from DCP.

DIR/{model,optim,extra_state}_world_size_W_rank_R.pt      every rank's share of the model, its optimizer, all else
DIR/fsdp_config.json, huggingface/                        which FSDP it was; the model's configuration and tokenizer

What ranks have of a tensor is a DTensor, a ShardedTensor, or the whole of it; the optimizer's state may also be that of
flat parameters, in which FSDP1 keeps the parameters of a layer. No file names what is in those: see `readings`.

directory   which files those are            held, mesh    what one rank's file has of a tensor
model       names, buffers, ties             cut           what all ranks have, as spans
optimizer   values by number                 units         which parameters FSDP1 has wrapped together
readings    whose state each number is       attach        that state, given to its parameters
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.formats.format import TAG, Format, Found, NearMiss, Search

if TYPE_CHECKING:
    from zckpt.state import Checkpoint


class FsdpRankFiles(Format):
    """One torch file for each rank of FSDP."""

    name = "fsdp-rank-files"
    title = "files of FSDP's ranks"
    reads = (
        (
            "verl, SkyRL, OpenRLHF, Accelerate",
            "a torch file for each rank: FSDP1 and FSDP2, DTensor of any mesh, ShardedTensor, flat parameters",
        ),
    )
    takes = frozenset({TAG})

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the files by their names: in the directory, in a step's or a role's below it."""
        from zckpt.formats.fsdp_rank_files.directory import Directory, find

        answer = find(search)
        return Found(answer) if isinstance(answer, Directory) else answer

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell by names whether a directory has files of ranks."""
        from zckpt.formats.fsdp_rank_files.directory import has_rank_files

        return has_rank_files(directory)

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the structure of all ranks' files."""
        from zckpt.formats.fsdp_rank_files.reader import read

        return read(found.place, names=search.names)


FORMATS = (FsdpRankFiles(),)
