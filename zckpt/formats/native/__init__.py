"""zckpt's own format: a directory that loses nothing, without a pickle anywhere. `docs/formats.md` specifies it.

DIR/checkpoint.json                       everything but the elements of tensors; written last
DIR/rank-00000-of-00002.safetensors       the elements, and a checksum of each tensor
DIR/rank-00001-of-00002.safetensors

The document says for each slot which elements of it lie in which file, so that files may hold whole tensors, flat
ranges as ZeRO cuts them, or boxes as tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import SourceError
from zckpt.formats.format import TAG, Found, Job, NearMiss, Search, Strippable, Survey, TargetFiles
from zckpt.formats.latest import is_tag, latest_name
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, RANK_ROLE, is_native
from zckpt.formats.options import option
from zckpt.immutable import immutable

if TYPE_CHECKING:
    from zckpt.engine.checking import Sum
    from zckpt.state import Checkpoint, SourceFile


@immutable
class Options:
    """What `convert --to zckpt` can be given."""

    world_size: int = option("Number of files; any number of ranks can load them.", 1, metavar="N")


class Zckpt(Strippable):
    """The format of zckpt itself."""

    name = "zckpt"
    title = "zckpt"
    reads = (("zckpt", "JSON and safetensors, no pickle; [specified](formats.md#the-zckpt-format-version-2)"),)
    writes = "zckpt's own: JSON and safetensors, no pickle"
    takes = frozenset({TAG})
    options = Options
    owns = OWNED
    fingerprinted = True
    keeps_optimizers = True
    needs_groups = False
    lists_files = True

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find a directory of this format, or the one that a run's directory has under the tag or in `latest`."""
        path = search.path
        if not path.is_dir():
            return None
        name = search.tag or latest_name(path) or ""
        with suppress(OSError):  # a name too long to be one, or a folder that may not be looked into
            if is_tag(name) and (path / name / DOCUMENT_NAME).is_file():
                return Found(path / name)
        return Found(path) if search.tag is None and is_native(path) else None

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell a directory of this format, complete or not."""
        return is_native(directory)

    def lay_out(self, job: Job) -> TargetFiles:
        """Return the document and a file for each rank."""
        from zckpt.formats.native.writer import lay_out

        return TargetFiles(lay_out(job.checkpoint, world_size=job.options.world_size))

    def checks(self, file: SourceFile) -> Iterable[Sum]:
        """Return the digest of each tensor; refuse a file that was replaced after the checkpoint was opened."""
        from zckpt.formats.native.rank_file import Listed, listed_sums, recorded

        if file.role != RANK_ROLE:
            return []
        if file.header is not None:
            try:
                return listed_sums(file.path, Listed("", file.nbytes, *file.header))
            except SourceError as error:
                error.ranks = () if file.dp_rank is None else (file.dp_rank,)
                raise
        return recorded(file.path)

    def contradictions(self, checkpoint: Checkpoint) -> Iterable[SourceError]:
        """Return the files whose header is not what the document says."""
        from zckpt.formats.native.reader import contradictions

        return contradictions(Path(checkpoint.source))

    def survey(self, search: Search, found: Found | None) -> Survey:  # noqa: ARG002
        """Read the document, then each file that it lists."""
        from zckpt.formats.native.document import read_document
        from zckpt.formats.native.rank_file import open_rank_file
        from zckpt.state import SourceFile, dict_of, list_of

        surveyed = Survey()
        if found is None:
            return surveyed
        directory = found.place
        document, nbytes = read_document(directory)
        surveyed.files.append(SourceFile(str(directory / DOCUMENT_NAME), nbytes, "document"))
        for rank, one in enumerate(list_of(document.get("files"))):
            name, size = map(dict_of(one).get, ("name", "nbytes"))
            if not isinstance(name, str) or not isinstance(size, int) or Path(name).name != name:
                continue
            try:
                file = open_rank_file(directory / name, identity=str(document.get("id")), nbytes=size)
                surveyed.files.append(SourceFile(file.path, file.nbytes, RANK_ROLE, rank))
            except SourceError as error:
                error.ranks = error.ranks or (rank,)
                surveyed.errors.append(error)
        return surveyed


FORMATS = (Zckpt(),)
