"""What DeepSpeed's format leaves to choose of a target."""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.formats.options import option

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Options:
    """What `convert --to deepspeed` can be given; None: as the source is."""

    world_size: int | None = option(
        int,
        None,
        "Data-parallel ranks. Default: as SOURCE, if it is DeepSpeed's under the same names; else needed.",
        metavar="N",
    )
    stage: int | None = option(
        int, None, "ZeRO stage. Default: as SOURCE, if it says one; else needed.", choices=STAGES
    )
    elastic: bool | None = option(
        bool, None, "Form of the optimizer state (ZeRO-1, 2). Default: as SOURCE; rigid, if that is not DeepSpeed's.",
        opposite="rigid",
    )  # fmt: skip
    round_robin: bool | None = option(
        bool, None, "As round_robin_gradients of the training. Default: as SOURCE, or no.", opposite="no-round-robin"
    )
    parameter_alignment: bool | None = option(
        bool, None, "As parameter_alignment of the training. Default: as SOURCE, or no.",
        opposite="no-parameter-alignment",
    )  # fmt: skip
    hyperparameters: str | None = option(
        str, None, "JSON list, an object for each param group: for what an elastic SOURCE does not hold.",
        metavar="FILE",
    )  # fmt: skip
    expert_parallel_size: int | None = option(
        int, None, "Ranks over which experts are spread. Default: as SOURCE.", metavar="E"
    )
    sliced_experts: bool | None = option(
        bool, None, "Experts as enable_expert_tensor_parallelism of the training has them: all on each tensor-parallel "
        "rank, cut by the rules. Default: as SOURCE; where it does not say, if a rule other than that for what is "
        "whole names them.", opposite="spread-experts",
    )  # fmt: skip
    requantize: bool | None = option(
        bool, None, "Where blocks of quantised state (bitsandbytes, torchao) cannot be cut as they are, quantise anew. "
        "Default: refuse.", opposite="no-requantize",
    )  # fmt: skip
    pipeline_parallel_size: int | None = option(
        int, None, "Stages over which a pipeline's layers are dealt. Default: as SOURCE.", metavar="P"
    )
    partition_method: str | None = option(
        str,
        None,
        "As partition_method of the training's PipelineModule: uniform, parameters or type:REGEX. Default: the one "
        "that gave SOURCE's stages.",
        metavar="METHOD",
    )
    stage_bounds: str | None = option(
        str,
        None,
        "Instead of a method: 0, the first layer of each further stage, and the number of layers.",
        metavar="0,N,...",
    )
    pipeline_layers: str | None = option(
        str,
        None,
        "The layers that PipelineModule gets, where files leave that open: Embedding=KEY,Block*24,relu,...; KEY of a "
        "TiedLayerSpec.",
        metavar="LAYER,...",
    )
    tensor_parallel_size: int | None = option(
        int, None, "Ranks over which parameters are sliced. Default: as SOURCE, if it is DeepSpeed's; else 1.",
        metavar="T",
    )  # fmt: skip
    slice_rules: str | None = option(
        str,
        None,
        "Rules by which TARGET's parameters are sliced, as --tp-rules has them, where SOURCE is of another format or "
        "becomes one model. Default: those that SOURCE has taken along.",
        metavar="FILE",
    )
    padded_vocab_size: int | None = option(
        int,
        None,
        "Rows of the vocabulary in TARGET's model. Default: SOURCE's, or the next multiple of T.",
        metavar="ROWS",
    )


@dataclass(frozen=True, slots=True)
class RecutOptions(Options):
    """What `reshard` can be given."""

    world_size: int = option(int, 1, "Data-parallel ranks that will load TARGET.", metavar="N")
