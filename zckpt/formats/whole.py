"""The formats without ranks: files of torch.save, safetensors, and a whole model with the rest of its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import UsageError
from zckpt.formats.format import Format, Found, Job, NearMiss, Search, TargetFiles, dtype_option
from zckpt.storage.durable import interrupted
from zckpt.storage.files import read_head
from zckpt.storage.ownership import Owned

if TYPE_CHECKING:
    from zckpt.formats.stripping import Request, Stripping
    from zckpt.state import Checkpoint

ZIP, PICKLE = b"PK", b"\x80"
"""First bytes of what torch.save writes, today and before 2020."""

FIRST_RECORD = b"data.pkl"
"""In the name of the first record of its archives."""

HEAD_NBYTES = 512


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What `convert --to consolidated` can be given."""

    dtype: str = dtype_option()


def _is_own(name: str) -> bool:
    from zckpt.formats.consolidated import is_own

    return is_own(name)


def _warned(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return a checkpoint with a warning if what is to go with its file is not there yet."""
    unfinished = interrupted(path)
    checkpoint.warnings += [unfinished] if unfinished else []
    return checkpoint


class Consolidated(Format):
    """A directory with a Hugging Face model, `optimizer.pt` and `metadata.pt`."""

    name = "consolidated"
    title = "consolidated"
    reads = (("consolidated", "a Hugging Face model, `optimizer.pt` for torch.optim, and all the rest beside them"),)
    writes = "one model and one torch.optim state, in a directory or one .pt file"
    options = ModelOptions
    owns = Owned(_is_own)

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the two files that only it has together."""
        from zckpt.formats.consolidated import find

        path = find(search.path)
        return Found(path) if path is not None else None

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the model, the optimizer and the rest."""
        from zckpt.formats.consolidated import read

        return read(found.place, names=search.names)

    def lay_out(self, job: Job) -> TargetFiles:
        """Return a directory, or one file where the target's name ends as torch's files do."""
        from zckpt.formats import consolidated
        from zckpt.formats.suffixes import SAFETENSORS, TORCH, kind_of_model

        kind = kind_of_model(job.target)
        if kind == SAFETENSORS:
            raise UsageError(
                "one safetensors file holds a model only",
                path=job.target,
                expected="a directory or a .pt file",
                advice="use `zckpt consolidate` for the model by itself",
            )
        if kind == TORCH:
            file = consolidated.lay_out_file(job.target.name, job.checkpoint, dtype=job.options.dtype)
            return TargetFiles([file], is_file=True)
        return TargetFiles(consolidated.lay_out(job.checkpoint, dtype=job.options.dtype))

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots out of the torch files."""
        from zckpt.formats.torch_strip import strip_directory

        return strip_directory(checkpoint, source, request)


class Safetensors(Format):
    """A file of safetensors, a directory as Hugging Face lays it out, or the shards that torch's writer leaves."""

    name = "safetensors"
    title = "safetensors"
    reads = (("safetensors", "one file, a Hugging Face directory, or the shards of torch's Hugging Face writer"),)

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell a file by its header, a directory by its names; other formats keep more beside such a model."""
        from zckpt.formats import safetensors_file, safetensors_shards

        if search.path.is_dir() and safetensors_shards.is_sharded(search.path):
            return Found("shards")
        if safetensors_file.is_safetensors(search.path):
            return Found("whole", sure=not search.path.is_dir())
        return None

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell a directory as Hugging Face lays it out; shards by themselves are pieces of another."""
        from zckpt.formats.safetensors_file import is_safetensors

        return is_safetensors(directory)

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the headers, and those of the optimizer that `consolidate` has put into a directory."""
        from zckpt.formats import safetensors_file, safetensors_shards
        from zckpt.formats.optimizer_file import IN_DIRECTORY, attach_optimizer

        path = search.path
        if found.place == "shards":
            return safetensors_shards.read(path)
        checkpoint = safetensors_file.read(path)
        if path.is_dir() and (path / IN_DIRECTORY).is_file():
            attach_optimizer(checkpoint, path / IN_DIRECTORY)
        return _warned(checkpoint, path)

    def slot_names(self, checkpoint: Checkpoint, source: Path) -> list[str]:
        """Return the slots of the model and of all optimizers' files in its directory."""
        from zckpt.formats.torch_strip import slots_beside

        found = slots_beside(source) if source.is_dir() else []
        return list(dict.fromkeys([*checkpoint.slot_names(), *found]))

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots out of the files in a directory that are an optimizer's."""
        from zckpt.formats.stripping import Stripping, as_it_is
        from zckpt.formats.torch_strip import strip_directory

        if source.is_dir():
            return strip_directory(checkpoint, source, request)
        return Stripping([as_it_is(source, source.name)], ("a safetensors file has no bytes to spare",))


class TorchSave(Format):
    """One file of torch.save, with a state dict or several."""

    name = "torch"
    title = "files of torch.save"
    reads = (
        ("files of `torch.save`", "state dicts, optimizers; zip and legacy, both byte orders, every dtype, strided and "
         "shared storages"),
    )  # fmt: skip

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell a file by its first bytes; of any other it is tried last, as its reader says best what is wrong."""
        path = search.path
        if path.is_dir():
            return None
        head = read_head(str(path), HEAD_NBYTES)
        return Found(path, sure=head.startswith(PICKLE) or (head.startswith(ZIP) and FIRST_RECORD in head))

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the tree of the file."""
        from zckpt.formats.torch_file import read

        return _warned(read(found.place, names=search.names), found.place)

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots and unused bytes out of the file."""
        from zckpt.formats.stripping import Stripping
        from zckpt.formats.torch_strip import notes, shaped_slots, strip_file

        file = strip_file(source, source.name, request, shaped_slots(checkpoint))
        return Stripping([file], notes(request))


FORMATS = (Consolidated(), Safetensors(), TorchSave())
