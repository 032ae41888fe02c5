"""What can be chosen of a DeepSpeed checkpoint that is written; None: as the source is. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.formats.options import option

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Options:
    """What `convert --to deepspeed` can be given."""

    world_size: int | None = option(int, None, "Data-parallel ranks. Default: as SOURCE.", metavar="N")
    stage: int | None = option(int, None, "ZeRO stage. Default: as SOURCE.", choices=STAGES)
    elastic: bool | None = option(bool, None, "Form of the optimizer state (ZeRO-1, 2).", opposite="rigid")
    round_robin: bool | None = option(
        bool, None, "As round_robin_gradients of the training.", opposite="no-round-robin"
    )
    parameter_alignment: bool | None = option(
        bool, None, "As parameter_alignment of the training.", opposite="no-parameter-alignment"
    )


@dataclass(frozen=True, slots=True)
class RecutOptions(Options):
    """What `reshard` can be given."""

    world_size: int = option(int, 1, "Data-parallel ranks that will load TARGET.", metavar="N")
    expert_parallel_size: int | None = option(int, None, "Ranks over which experts are spread.", metavar="E")
    tensor_parallel_size: int | None = option(int, None, "Ranks over which parameters are sliced.", metavar="T")
    padded_vocab_size: int | None = option(
        int,
        None,
        "Rows of the vocabulary in TARGET's model. Default: SOURCE's, or the next multiple of T.",
        metavar="ROWS",
    )
