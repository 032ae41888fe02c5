"""What a target of legacy files is to be: how many ranks of each kind, and what the module on them is like.

Whatever the user does not say is as in SOURCE where that has it: in its own files, or in the arguments of Megatron-LM
that came with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.megatron.buckets import default_bucket_numel
from zckpt.formats.megatron.cut import VOCABULARY
from zckpt.formats.megatron.fused import ONE
from zckpt.formats.megatron.legacy import APART, BOUNDS, CHUNKS, EXPERTS, FUSED, NUMBERED
from zckpt.formats.megatron.norms import ENGINE, LOCAL, filed_names
from zckpt.formats.megatron.objects import ARGUMENTS, size_of
from zckpt.formats.megatron.own import ROWS
from zckpt.formats.megatron.stages import Bounds, bounds_of, layer_count
from zckpt.formats.torch_files.tensors import arguments_of
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Topology, stated


@immutable
class Target:
    """What the ranks are.

    Parameters
    ----------
    topology : Topology
    chunks : int
        Of the model on each stage.
    bounds : tuple of int
        First layer of each chunk, and the number of layers.
    rows : int or None
        Of the vocabulary; None: SOURCE's.
    engine : bool
        Whether layers are Transformer Engine's.
    bucket_numel : int or None, elements
        After which a bucket of gradients ends; None: nowhere.
    experts : {FUSED, NUMBERED, APART}
        How experts are in it, where their names do not say so.
    """

    topology: Topology
    chunks: int
    bounds: Bounds
    rows: int | None
    engine: bool
    bucket_numel: int | None
    experts: str = APART


def target_of(checkpoint: Checkpoint, options: object) -> Target:
    """Return what the target is to be, by the options of `convert` or `reshard`. Raises UsageError: an odd size."""

    def said(name: str) -> Any:  # noqa: ANN401  # of any type that an option may have
        return getattr(options, name, None)

    arguments, own = arguments_of(checkpoint.metadata.get(ARGUMENTS)), checkpoint.topology
    given = {"dp": said("world_size"), "tp": said("tensor_parallel_size"), "pp": said("pipeline_parallel_size"),
             "ep": said("expert_parallel_size")}  # fmt: skip
    chunks, size = said("virtual_pipeline_parallel_size"), said("ddp_bucket_size")
    for value in (*given.values(), chunks):
        if value is not None and value < 1:
            raise UsageError("unusable number of ranks", expected="at least 1", found=value)
    if size is not None and size < 0:
        raise UsageError("unusable --ddp-bucket-size", expected="at least 0", found=size)
    topology = replace(own, **stated(given))
    known = checkpoint.details.get(CHUNKS, 1)
    chunks = chunks or (known if isinstance(known, int) and topology.pp == own.pp else 1)
    if chunks > 1 and topology.pp == 1:
        raise UsageError("a virtual pipeline needs several stages", expected="--pipeline-parallel-size P",
                         found=topology.pp)  # fmt: skip
    bounds = said("stage_bounds")
    if bounds is None and (topology.pp, chunks) == (own.pp, known) and isinstance(checkpoint.details.get(BOUNDS), str):
        bounds = str(checkpoint.details[BOUNDS])
    names = [one.name for one in checkpoint.tensors()]
    if size is None:
        size = default_bucket_numel(arguments, topology.dp) if arguments.get("overlap_grad_reduce") is True else None
    engine = _is_engine(checkpoint, said("transformer_impl"), arguments)
    return Target(
        topology=topology,
        chunks=chunks,
        bounds=bounds_of(bounds, layer_count(names), topology.pp * chunks),
        rows=_rows(checkpoint, said("padded_vocab_size")),
        engine=engine,
        bucket_numel=size or None,
        experts=_experts(checkpoint, names, arguments, engine=engine),
    )


def _rows(checkpoint: Checkpoint, rows: int | None) -> int | None:
    """Return the rows of the vocabulary: those that the user says, or SOURCE's model had; None: those that it has."""
    present = max((one.shape[0] for one in checkpoint.tensors() if one.name.endswith(VOCABULARY)), default=0)
    known = checkpoint.details.get(ROWS)
    rows = known if rows is None and isinstance(known, int) else rows
    if rows is not None and rows < present:
        raise UsageError(
            "unusable --padded-vocab-size",
            expected=f"at least SOURCE's {present} rows, which are all trained",
            found=rows,
        )
    return rows if rows != present else None


def _is_engine(checkpoint: Checkpoint, said: str | None, arguments: Mapping[object, object]) -> bool:
    if said is not None:
        return said == ENGINE
    names = [one.name for one in checkpoint.tensors()]
    if filed_names(names) != {name: name for name in names}:
        return False
    return arguments.get("transformer_impl") != LOCAL


def _experts(checkpoint: Checkpoint, names: Sequence[str], arguments: Mapping[object, object], *, engine: bool) -> str:
    """Return how the module has experts: as in SOURCE's legacy files, or as its program's arguments say."""
    if checkpoint.format_version == "legacy":
        return str(checkpoint.details.get(EXPERTS, APART))
    if arguments.get("moe_grouped_gemm") is not True or not any(map(ONE.fullmatch, names)):
        return APART
    if not engine or arguments.get("moe_use_legacy_grouped_gemm") is True:
        return FUSED
    if arguments.get("moe_use_legacy_grouped_gemm") is False:
        return NUMBERED
    raise UnsupportedError(
        "its experts are grouped in the module, and their names there are unknown",
        expected="moe_use_legacy_grouped_gemm as well as moe_grouped_gemm in the arguments",
        advice="write torch_dist, which any kind of experts can load",
    )


def sizes_of(target: Target, arguments: Mapping[object, object]) -> dict[str, object]:
    """Return what Megatron-LM's arguments say of the target's sizes, by those of SOURCE."""
    top = target.topology
    return {
        "tensor_model_parallel_size": top.tp,
        "pipeline_model_parallel_size": top.pp,
        "transformer_pipeline_model_parallel_size": top.pp,
        "virtual_pipeline_model_parallel_size": target.chunks if target.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": target.bounds[1] - target.bounds[0] if target.chunks > 1 else None,
        "expert_model_parallel_size": top.ep,
        "expert_tensor_parallel_size": top.tp,
        "data_parallel_size": top.dp,
        "world_size": top.dp * top.tp * top.pp * (size_of(arguments, "context_parallel_size") or 1),
        **stated({"padded_vocab_size": target.rows}),
    }
