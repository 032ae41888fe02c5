"""safetensors: one file, a directory of them with an index, or the shards that torch's Hugging Face writer leaves.

file      a file's header, read and written; a directory with an index; pieces of tensors without one
layout    where tensors go in files that are to be written
deltas    the bytes that changed, as slime publishes them
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.formats.format import Format, Found, NearMiss, Search

if TYPE_CHECKING:
    from zckpt.formats.stripping import Request, Stripping
    from zckpt.state import Checkpoint


class Safetensors(Format):
    """A file of safetensors, a directory as Hugging Face lays it out, or the shards that torch's writer leaves."""

    name = "safetensors"
    title = "safetensors"
    reads = (("safetensors", "one file, a Hugging Face directory, or the shards of torch's Hugging Face writer"),)

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell a file by its header, a directory by its names; other formats keep more next to such a model."""
        from zckpt.formats.native.files import is_rank_file
        from zckpt.formats.safetensors import file

        if is_rank_file(search.path):
            return NearMiss("is one rank's file of a zckpt checkpoint", f"give its directory, {search.path.parent}")
        if file.is_delta(search.path if search.path.is_dir() else search.path.parent):
            about = "is a version of a model's weights as slime publishes them: only the changes since the last one"
            return NearMiss(about, "`zckpt apply MODEL VERSION TARGET` writes the model at that version")
        if search.path.is_dir() and file.is_sharded(search.path):
            return Found("shards", sure=False)
        if file.is_safetensors(search.path):
            return Found("whole", sure=not search.path.is_dir())
        return None

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell a directory as Hugging Face lays it out; shards by themselves are pieces of another."""
        from zckpt.formats.safetensors.file import is_delta, is_safetensors

        return is_safetensors(directory) and not is_delta(directory)

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the headers, and those of the optimizer that `consolidate` has put into a directory.

        Names are those of the model's parameters in its order, which the files do not have.
        """
        from zckpt.evidence.order import put_in_order
        from zckpt.formats.companions import warned
        from zckpt.formats.consolidated.optimizer import attach_optimizer
        from zckpt.formats.safetensors import file
        from zckpt.formats.suffixes import IN_DIRECTORY

        path = search.path
        checkpoint = file.read_shards(path) if found.place == "shards" else file.read(path)
        if found.place != "shards" and path.is_dir() and (path / IN_DIRECTORY).is_file():
            attach_optimizer(checkpoint, path / IN_DIRECTORY)
        if search.names is not None:
            put_in_order(checkpoint, search.names)
        return checkpoint if found.place == "shards" else warned(checkpoint, path)

    def slot_names(self, checkpoint: Checkpoint, source: Path) -> list[str]:
        """Return the slots of the model and of all optimizers' files in its directory."""
        from zckpt.formats.torch_files.strip import optimizer_slots

        found = optimizer_slots(source) if source.is_dir() else []
        return list(dict.fromkeys([*checkpoint.slot_names(), *found]))

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Take slots out of the files in a directory that are an optimizer's."""
        from zckpt.formats.stripping import Stripping, as_it_is
        from zckpt.formats.torch_files.strip import strip_directory

        if source.is_dir():
            return strip_directory(checkpoint, source, request)
        return Stripping([as_it_is(source, source.name)], ("a safetensors file has no bytes to spare",))


FORMATS = (Safetensors(),)
