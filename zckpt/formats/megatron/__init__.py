"""Checkpoints of Megatron-Core, and of the programs that are built on it: Megatron-LM, NeMo.

RUN/latest_checkpointed_iteration.txt      "4": the directory that was saved last; or "release"
RUN/iter_0000004/                          `torch_dist`: metadata.json, .metadata, __R_N.distcp, common.pt
RUN/iter_0000004/metadata.json, <key>/     `zarr`, of up to 0.9: an array for each tensor
NAME/weights/, NAME/context/               NeMo 2: the same in `weights`
NAME/model_weights/, model_config.yaml     NeMo 1, unpacked
RUN/iter_0000004/.metadata, __R_N.distcp   `fsdp_dtensor`: of torch's DCP, with names, and no metadata.json
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/   legacy: model_optim_rng.pt, distrib_optim.pt

directory     which of these a path is
What a model is on disk and on ranks, both ways, for those that read and those that write:

names         which layer, expert and norm a name is of
keys          under which key, and where in it, `torch_dist` has each tensor
cut           what a tensor-parallel rank has of a parameter
fused         experts that are one parameter of a rank, transposed
stages        what pipeline stages, their chunks and expert-parallel ranks have, in which order
buckets       where the distributed optimizer has a parameter in buffers without names, and whether masters prove it

torch_dist    from `.metadata` and `common.pt` to a Checkpoint
zarr          the tensors and objects of such a directory in arrays
flat          the distributed optimizer's flat buffers as slots of parameters
optimizer     param groups
remainders    masters of which the files have the lower halves
objects       values that are no tensors, and what a directory that zckpt wrote has besides
fsdp_dtensor  Megatron-FSDP's directories as a Checkpoint
legacy        from ranks' files to a Checkpoint
local         what the optimizer of one rank has of its parameters

writer        a run's directory with one `torch_dist` checkpoint
legacy_writer one with legacy files for fixed ranks
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.format import ROOTS, TAG, Found, InFolder, Job, Search, Survey, TargetFiles
from zckpt.formats.megatron.directory import LEGACY, ZARR, is_written, names_own
from zckpt.formats.options import dtype_option, option
from zckpt.immutable import immutable
from zckpt.storage.ownership import Owned

if TYPE_CHECKING:
    from zckpt.state import Checkpoint


@immutable
class Ranks:
    """What legacy files are for."""

    tensor_parallel_size: int | None = option("Tensor-parallel ranks. Default: as SOURCE.", metavar="T")
    pipeline_parallel_size: int | None = option("Pipeline stages. Default: as SOURCE.", metavar="P")
    virtual_pipeline_parallel_size: int | None = option(
        "Chunks of the model on each stage (virtual pipeline). Default: as SOURCE, or 1.", metavar="V"
    )
    stage_bounds: str | None = option(
        "First layer of each chunk, then the number of layers. Default: as SOURCE, or evenly.",
        metavar="0,N,...",
    )
    padded_vocab_size: int | None = option(
        "Rows of the vocabulary in TARGET's model. Default: SOURCE's.", metavar="ROWS"
    )
    ddp_bucket_size: int | None = option(
        "Size in elements of the training's gradient buckets; 0: unlimited. Default: as SOURCE says.",
        metavar="N",
    )


@immutable
class Options(Ranks):
    """What `convert --to megatron` can be given."""

    world_size: int = option("Number of files; any parallelism can load them.", 1, metavar="N")
    dtype: str = dtype_option()
    optimizer: str | None = option(
        "distributed; flattened: distributed up to megatron-core 0.13; plain: not distributed. Default: as SOURCE, "
        "or distributed.",
        choices=("distributed", "flattened", "plain"),
    )
    layers: str | None = option(
        "All layers in one tensor, or each apart (moe_layer_freq, heterogeneous). Default: as SOURCE, or stacked if "
        "alike.",
        choices=("stacked", "apart"),
    )
    expert_parallel_size: int | None = option(
        "Expert-parallel ranks that will load it; above 1, experts have a separate optimizer. Default: "
            "as SOURCE.",
        metavar="E",
    )  # fmt: skip
    iteration: int | None = option("Iteration that it was saved at. Default: SOURCE's step.", metavar="N")
    ckpt_format: str = option(
        "As in Megatron-LM; torch: its legacy files for fixed ranks, which the parallel sizes and bounds describe.",
        "torch_dist",
        choices=("torch_dist", "torch"),
    )
    transformer_impl: str | None = option(
        "Implementation of the model that will load it. Default: as SOURCE's arguments or names, or "
        "transformer_engine.",
        choices=("local", "transformer_engine"),
    )


@immutable
class RecutOptions(Ranks):
    """What `reshard` of legacy files can be given."""

    world_size: int = option("Data-parallel ranks that will load TARGET.", 1, metavar="N")
    expert_parallel_size: int | None = option("Expert-parallel ranks. Default: as SOURCE.", metavar="E")


class Megatron(InFolder):
    """Checkpoints of Megatron-Core."""

    name = "megatron"
    title = "Megatron-Core"
    reads = (
        (
            "Megatron-Core, NeMo 2",
            "`torch_dist` of any tensor, pipeline, expert and data parallelism; 16-bit and fp32 optimizers, the "
            "distributed one's `fully_reshardable`, `fully_sharded_model_space` and, checked against "
            "the weights, `dp_reshardable` and `dp_zero_gather_scatter`; Megatron-FSDP's `fsdp_dtensor`; `zarr` up "
            "to 0.9",
        ),
        (
            "Megatron's legacy `mp_rank_XX`",
            "tensor, pipeline (also virtual) and expert ranks as one model; numbered optimizer states; "
            "`distrib_optim.pt`, checked against the weights; old orders of query, key and value; resharded to any "
            "degree "
            "of each",
        ),
    )
    writes = (
        "Megatron-Core: `torch_dist`, which any tensor, pipeline, expert and data parallelism loads; or legacy files"
    )
    options = Options
    recut_options = RecutOptions
    owns = Owned(names_own, is_written)
    takes = frozenset({ROOTS, TAG})
    own_metadata = frozenset({
        "args", "checkpoint_version", "content_metadata", "iteration", "num_floating_point_operations_so_far",
        "opt_param_scheduler", "rng_state",
    })  # fmt: skip

    def read(self, found: Found, search: Search) -> Checkpoint:  # noqa: ARG002
        """Read `.metadata`, the headers of the items, and `common.pt`."""
        from zckpt.state.inventory import IMPLIED, Claim

        place = found.place
        checkpoint: Checkpoint = self.module(place.kind).read(place)
        if place.tracker is not None:
            checkpoint.claims[str(place.tracker)] = Claim(IMPLIED, "which checkpoint of the run is the newest")
        return checkpoint

    def lay_out(self, job: Job) -> TargetFiles:
        """Return the files of a run's directory."""
        from zckpt.formats.megatron import legacy_writer, writer

        if job.options.ckpt_format == "torch":
            other = "--layers" if job.options.layers is not None else "--optimizer=flattened"
            if job.options.layers is not None or job.options.optimizer == "flattened":
                raise UsageError(f"{other} only applies to torch_dist",
                                 expected="--ckpt-format=torch without it")  # fmt: skip
            return legacy_writer.lay_out(job)
        for one in fields(Ranks):
            if getattr(job.options, one.name) is not None:
                raise UsageError(
                    f"--{one.name.replace('_', '-')} only applies to legacy files: any number of ranks loads "
                    "torch_dist",
                    expected="--ckpt-format=torch with it",
                )
        return writer.lay_out(job)

    def recut(self, job: Job) -> TargetFiles:
        """Return legacy files for other ranks."""
        from zckpt.formats.megatron.legacy_writer import lay_out

        if job.checkpoint.format_version != LEGACY:
            raise UnsupportedError(
                "any number of ranks can load this checkpoint as it is",
                found=job.checkpoint.format_version,
                advice="`zckpt convert --to megatron --ckpt-format torch` writes legacy files for fixed ranks",
            )
        return lay_out(job)

    def survey(self, search: Search, found: Found | None) -> Survey:
        """Read every file, and hold each item against `.metadata`."""
        from zckpt.formats.dcp.items import faults
        from zckpt.formats.dcp.metadata import read_metadata
        from zckpt.formats.survey import survey_files

        surveyed = survey_files(search.path if found is None else found.place.path)
        if found is not None and found.place.kind not in (LEGACY, ZARR):
            surveyed.errors += faults(read_metadata(found.place.path))
        return surveyed

    def follows(self, key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:  # noqa: ARG002
        """Tell what only says how many ranks there were, and how they wrote."""
        top, _, rest = key.partition(".")
        kind, _, argument = rest.partition(".")
        if top != "metadata" or any(one.format != self.name for one in sides):
            return False
        return kind == "content_metadata" or (kind == "args" and argument in OF_RANKS)


OF_RANKS = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "transformer_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size", "world_size", "rank",
    "padded_vocab_size",
    "local_rank", "ckpt_fully_parallel_save", "dist_ckpt_optim_fully_reshardable", "use_distributed_optimizer",
})  # fmt: skip
"""Arguments of Megatron-LM that say on how many ranks it ran, and how these share out the state."""

FORMATS = (Megatron(),)
