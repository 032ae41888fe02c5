"""Directories of `torch.distributed.checkpoint` (DCP): read whatever wrote them, written for whatever reads them.

DIR/.metadata                      a pickle: which tensors and objects there are, in which pieces, and where each lies
DIR/__<rank>_<n>.distcp            items one after the other, each a whole file of `torch.save`
DIR/zckpt.pt                       where zckpt wrote it: what such a directory has no place for
RUN/step-N/, step_N/, iter_N/ ...  runs of torchtitan, prime-rl, Cosmos, Composer: the last, see `formats.latest`

Models, optimizers and anything else are under whatever keys the program chose. Every chunk is a box of its tensor, so
that FSDP, tensor parallelism and both are read in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.formats.dcp.directory import Directory, find, is_own, is_whole, lacks_metadata, rank_of
from zckpt.formats.format import ROOTS, TAG, Found, Job, NearMiss, Search, Strippable, Survey, TargetFiles
from zckpt.formats.latest import COSMOS, TRACKER, LastStep, folder_of, is_name, is_tag, last_folder, latest_name
from zckpt.formats.options import dtype_option, option
from zckpt.immutable import immutable
from zckpt.storage.ownership import Owned


@immutable
class Options:
    """What `convert --to dcp` can be given."""

    world_size: int = option("Number of files; any number of ranks can load them.", 1, metavar="N")
    dtype: str = dtype_option()
    keys: str = option(
        "nested: as get_state_dict; flat: as torchtitan, with the model's names at the top level and flat optimizer "
        "keys.",
        "nested",
        choices=("nested", "flat"),
    )


def _find(path: Path, tag: str | None) -> Directory | NearMiss | None:
    """Return the checkpoint that a path is, or that is the last one of a run, or the one of that tag."""
    if not path.is_dir() or not (tag is None or is_tag(tag)):
        return None
    named = latest_name(path, TRACKER) if tag is None else None  # Megatron's, of `torch_dcp`
    directory = find(path if tag is None else path / tag)
    if directory is None and named is not None and is_name(folder_of(named)):
        directory = find(path / folder_of(named))
    last = last_folder(path, _is_step) if directory is None and tag is None else None
    if not isinstance(last, LastStep):
        return directory or last
    directory = find(last.path)
    return None if directory is None else replace(directory, unfinished=last.unfinished, is_sure=True)


def _is_step(folder: Path) -> bool:
    """Tell whether a folder of a run is a checkpoint; Megatron's are called like Cosmos's, and have a `.metadata`."""
    found = find(folder)
    return found is not None and not ("" in found.folders and COSMOS.fullmatch(folder.name))


class Dcp(Strippable):
    """Directories of torch.distributed.checkpoint."""

    name = "dcp"
    title = "torch.distributed.checkpoint"
    reads = (
        (
            "torch.distributed.checkpoint",
            "DDP, FSDP1, FSDP2, tensor parallel, torchrec; flattened, raw and nested keys; Megatron's `torch_dcp`",
        ),
        ("Trainer, Lightning, Accelerate", "the DeepSpeed and DCP directories inside their own"),
        (
            "transformers' distributed save, NeMo Automodel, Cosmos",
            "a model in shards of safetensors or of DCP, with the optimizer's DCP folder in it or beside it",
        ),
        (
            "OLMo-core, prime-rl, XTuner, FastVideo, NeMo RL, lingua",
            "their step directories: DCP in a folder (`model_and_optim`, `trainer`, `weights`, ...), values around it",
        ),
    )
    writes = "torch.distributed.checkpoint"
    options = Options
    takes = frozenset({ROOTS, TAG})
    owns = Owned(is_own)
    every_name = True

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find a directory with `.metadata`, Accelerate's two folders with one each, or the last one of a run."""
        path = search.path
        if path.is_file() and (path.name == ".metadata" or rank_of(path.name) is not None):
            return NearMiss(
                "is one file of a torch.distributed.checkpoint directory", f"give its directory, {path.parent}"
            )
        found = _find(path, search.tag)
        if found is not None:
            return found if isinstance(found, NearMiss) else Found(found, sure=found.is_sure)
        if path.is_dir() and lacks_metadata(path):
            return NearMiss(
                "the metadata file is missing",
                "the save did not finish, or the file was not copied: its name begins with a dot",
                code=MISSING_FILE,
                expected=".metadata",
            )
        return None

    def lay_out(self, job: Job) -> TargetFiles:
        """Return `.metadata`, the items, and what they have no place for."""
        from zckpt.formats.dcp.writer import lay_out

        options = job.options
        return TargetFiles(
            lay_out(job.checkpoint, world_size=options.world_size, dtype=options.dtype, keys=options.keys)
        )

    def survey(self, search: Search, found: Found | None) -> Survey:
        """Read every file, and hold each item against `.metadata`."""
        from zckpt.formats.dcp.items import faults
        from zckpt.formats.dcp.metadata import read_metadata
        from zckpt.formats.survey import survey_files

        surveyed = survey_files(search.path if found is None else found.place.path)
        for folder in found.place.folders.values() if found is not None else ():
            surveyed.errors += faults(read_metadata(folder)) if is_whole(folder) else []
        return surveyed


FORMATS = (Dcp(),)
