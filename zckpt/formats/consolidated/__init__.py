"""A whole model and a whole torch.optim optimizer, for programs without shards: a directory, or one torch file.

model        the model, and the directory of all of it
optimizer    the optimizer as one file
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import UsageError
from zckpt.formats.format import Found, Job, NearMiss, Search, TargetFiles
from zckpt.formats.options import dtype_option
from zckpt.formats.suffixes import OWN_MODEL
from zckpt.formats.torch_files import TorchDirectory
from zckpt.immutable import immutable
from zckpt.storage.ownership import Owned, called

if TYPE_CHECKING:
    from zckpt.state import Checkpoint


@immutable
class ModelOptions:
    """What `convert --to consolidated` can be given."""

    dtype: str = dtype_option()


class Consolidated(TorchDirectory):
    """A directory with a Hugging Face model, `optimizer.pt` and `metadata.pt`."""

    name = "consolidated"
    title = "consolidated"
    reads = (("consolidated", "a Hugging Face model, `optimizer.pt` for torch.optim, and a file for everything else"),)
    writes = "one model and one torch.optim state, in a directory or one .pt file"
    options = ModelOptions
    owns = Owned(called(rf"optimizer\.pt|metadata\.pt|{OWN_MODEL}"))

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find the two files that only it has together."""
        from zckpt.formats.consolidated.model import METADATA_NAME
        from zckpt.formats.safetensors.file import INDEX_NAME

        path = search.path
        return Found(path) if (path / METADATA_NAME).is_file() and (path / INDEX_NAME).is_file() else None

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the model, the optimizer and the rest."""
        from zckpt.formats.consolidated.model import read

        return read(found.place, names=search.names)

    def lay_out(self, job: Job) -> TargetFiles:
        """Return a directory, or one file where the target's name ends as torch's files do."""
        from zckpt.evidence import refuse_unnamed
        from zckpt.evidence.order import order_notes
        from zckpt.formats.consolidated import model
        from zckpt.formats.consolidated.optimizer import rest_at_top
        from zckpt.formats.suffixes import SAFETENSORS, TORCH, kind_of_model
        from zckpt.state.names import is_number

        if job.checkpoint.parameters and not all(map(is_number, job.checkpoint.unnamed)):
            refuse_unnamed(job.checkpoint, "without which those of several optimizers are one another's")
        notes = order_notes(job.checkpoint)
        kind, keeps_rest = kind_of_model(job.target), bool(rest_at_top(job.checkpoint))
        if kind == SAFETENSORS:
            raise UsageError(
                "a single safetensors file can only hold a model",
                path=job.target,
                expected="a directory or a .pt file",
                advice="use `zckpt consolidate` to write only the model",
            )
        if kind == TORCH:
            file = model.lay_out_file(job.target.name, job.checkpoint, dtype=job.options.dtype)
            return TargetFiles([file], is_file=True, keeps_rest=keeps_rest, notes=notes)
        return TargetFiles(model.lay_out(job.checkpoint, dtype=job.options.dtype), keeps_rest=keeps_rest, notes=notes)


FORMATS = (Consolidated(),)
