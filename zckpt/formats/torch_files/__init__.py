"""Files of torch.save, with one state dict or several. Other formats are directories of such files.

reader          from a file to a Checkpoint
beside          other ranks' files, beside which a file may hold only a share of a model
content         which dicts are models, which are optimizers, and which optimizer is whose
tensors         tensors as slots and spans, single values as numbers
optimizer       an optimizer's state dict in each of its forms, as slots and param groups, with names for its parameters
writer          a tree with tensors as a file that torch.load reads
strip           a file without its optimizer's slots
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError
from zckpt.formats.format import ROOTS, Format, Found, InFolder, NearMiss, Search
from zckpt.formats.latest import LastStep, last_file
from zckpt.storage.files import read_head

if TYPE_CHECKING:
    from zckpt.formats.stripping import Request, Stripping
    from zckpt.state import Checkpoint

ZIP, PICKLE = b"PK", b"\x80"
"""First bytes of what torch.save writes, today and before 2020."""

FIRST_RECORD = b"data.pkl"
"""In the name of the first record of its archives."""

HEAD_NBYTES = 512


class TorchSave(Format):
    """One file of torch.save, with a state dict or several."""

    name = "torch"
    title = "files of torch.save"
    reads = (
        ("files of `torch.save`", "one or several state dicts (GANs, Lightning, Composer), optimizer states by "
         "number or by name; zip and legacy, both byte orders, every dtype, strided and shared storages"),
    )  # fmt: skip

    takes = frozenset({ROOTS})

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell a file by its first bytes; of any other it is tried last, as its reader says best what is wrong.

        Of a directory, the last of Composer's files, or those of FSDP's ranks under any names.
        """
        path = search.path
        if path.is_dir():
            from zckpt.formats.fsdp_rank_files import free_names

            last = last_file(path)
            ranks = free_names.find(search, last.path.name if isinstance(last, LastStep) else None)
            if ranks is not None:
                return Found(ranks)
            if isinstance(last, LastStep):
                return None if search.roots else Found(last.path)
            return last
        if search.roots:
            return None
        head = read_head(str(path), HEAD_NBYTES)
        return Found(path, sure=head.startswith(PICKLE) or (head.startswith(ZIP) and FIRST_RECORD in head))

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the tree of the file."""
        place = found.place
        if not isinstance(place, Path):
            from zckpt.formats.fsdp_rank_files.reader import read as read_ranks

            return read_ranks(place, names=search.names)
        from zckpt.formats.companions import warned
        from zckpt.formats.torch_files.beside import share_among_ranks
        from zckpt.formats.torch_files.reader import read
        from zckpt.state.inventory import FOREIGN, Claim

        try:
            checkpoint = warned(read(place, names=search.names), place)
        except UnsupportedError as error:
            if error.ranks and not search.path.is_dir():
                from zckpt.formats.fsdp_rank_files import free_names

                raise free_names.led(error, place) from None
            raise
        if search.path.is_dir():
            others = LastStep(place).others
            checkpoint.claims |= {str(path): Claim(FOREIGN, "another checkpoint") for path in others}
        share = share_among_ranks(place)
        checkpoint.warnings += [share] if share else []
        return checkpoint

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots and unused bytes out of the file."""
        from zckpt.formats.stripping import Stripping
        from zckpt.formats.torch_files.strip import shaped_slots, strip_file

        source = Path(checkpoint.source)  # of a run the last one's
        file = strip_file(source, source.name, request, shaped_slots(checkpoint))
        return Stripping([file], request.notes)


class TorchDirectory(InFolder):
    """A directory of torch files, and of safetensors."""

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots out of every file that has some."""
        from zckpt.formats.torch_files.strip import strip_directory

        return strip_directory(checkpoint, source, request)


FORMATS = (TorchSave(),)
