"""What DeepSpeed's format leaves to choose of a target."""

from __future__ import annotations

from zckpt.formats.options import dtype_option, option
from zckpt.immutable import immutable

STAGES = (1, 2, 3)


@immutable
class Options:
    """What `convert --to deepspeed` and `reshard` can be given; None: as the source is."""

    world_size: int | None = option(
        "Data-parallel ranks. Required unless SOURCE is DeepSpeed's and keeps its names; then the default is SOURCE's.",
        metavar="N",
    )
    stage: int | None = option("ZeRO stage. Required unless SOURCE states one, which is the default.", choices=STAGES)
    elastic: bool | None = option(
        "Form of the optimizer state (ZeRO-1, 2). Default: as SOURCE, or rigid if SOURCE is not "
            "DeepSpeed's.",
        opposite="rigid",
    )  # fmt: skip
    round_robin: bool | None = option(
        "The training's round_robin_gradients. Default: as SOURCE, or no.", opposite="no-round-robin"
    )
    parameter_alignment: bool | None = option(
        "The training's parameter_alignment. Default: as SOURCE, or no.",
        opposite="no-parameter-alignment",
    )  # fmt: skip
    hyperparameters: str | None = option(
        "JSON list with one object per param group, for an elastic SOURCE, which has no hyperparameters.",
        metavar="FILE",
    )  # fmt: skip
    expert_parallel_size: int | None = option("Expert-parallel ranks. Default: as SOURCE.", metavar="E")
    sliced_experts: bool | None = option(
        "Slice experts by the rules, with all of them on each tensor-parallel rank, as with "
        "enable_expert_tensor_parallelism. Default: as SOURCE; if it does not say, slice those that a rule names, "
        "other than the rule for whole parameters.", opposite="spread-experts",
    )  # fmt: skip
    requantize: bool | None = option(
        "Quantise state (bitsandbytes, torchao) again if its blocks cannot be cut as they are. "
        "Default: refuse.", opposite="no-requantize",
    )  # fmt: skip
    pipeline_parallel_size: int | None = option("Pipeline stages. Default: as SOURCE.", metavar="P")
    partition_method: str | None = option(
        "The partition_method of the training's PipelineModule: uniform, parameters or type:REGEX. Default: the one "
        "that made SOURCE's stages.",
        metavar="METHOD",
    )
    stage_bounds: str | None = option(
        "Instead of a method: 0, the first layer of each further stage, then the number of layers.",
        metavar="0,N,...",
    )
    pipeline_layers: str | None = option(
        "PipelineModule's layers, if the files do not tell: Embedding=KEY,Block*24,relu,...; KEY is that of a "
        "TiedLayerSpec.",
        metavar="LAYER,...",
    )
    tensor_parallel_size: int | None = option(
        "Tensor-parallel ranks. Default: as SOURCE if it is DeepSpeed's, otherwise 1.",
        metavar="T",
    )  # fmt: skip
    slice_rules: str | None = option(
        "Rules for slicing TARGET's parameters, in the form of --tp-rules, if SOURCE has another format or "
        "becomes one model. Default: the rules that SOURCE has.",
        metavar="FILE",
    )
    padded_vocab_size: int | None = option(
        "Rows of the vocabulary in TARGET's model. Default: SOURCE's, or the next multiple of T.",
        metavar="ROWS",
    )


@immutable
class ConvertOptions(Options):
    """What `convert --to deepspeed` can be given."""

    dtype: str = dtype_option()


@immutable
class RecutOptions(Options):
    """What `reshard` can be given."""

    world_size: int = option("Data-parallel ranks that will load TARGET.", 1, metavar="N")
