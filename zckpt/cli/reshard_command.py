"""`zckpt reshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import fingerprint_option, show, source_options, verify_option, write_options


@click.command("reshard")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--world-size", type=int, required=True, metavar="N", help="Data-parallel ranks that will load TARGET.")
@click.option(
    "--stage",
    type=click.Choice(["1", "2", "3"]),
    help="ZeRO stage of TARGET. Default of this and the next five: as SOURCE.",
)
@click.option("--elastic/--rigid", default=None, help="Form of the optimizer state (ZeRO-1, 2).")
@click.option("--round-robin/--no-round-robin", default=None, help="As round_robin_gradients of the training.")
@click.option(
    "--parameter-alignment/--no-parameter-alignment",
    default=None,
    help="As parameter_alignment of the training.",
)
@click.option("--expert-parallel-size", type=int, metavar="E", help="Ranks over which experts are spread.")
@click.option("--tensor-parallel-size", type=int, metavar="T", help="Ranks over which parameters are sliced.")
@click.option(
    "--padded-vocab-size",
    type=int,
    metavar="ROWS",
    help="Rows of the vocabulary in TARGET's model. Default: SOURCE's, or the next multiple of T.",
)
@verify_option
@fingerprint_option
@write_options
@source_options
def reshard_command(
    source: Path,
    target: Path,
    world_size: int,
    stage: str | None,
    elastic: bool | None,
    round_robin: bool | None,
    parameter_alignment: bool | None,
    expert_parallel_size: int | None,
    tensor_parallel_size: int | None,
    padded_vocab_size: int | None,
    verify: bool,
    fingerprint: bool | None,
    as_json: bool,
    quiet: bool,
    writing: dict[str, Any],
    where: dict[str, Any],
) -> None:
    """Cut a DeepSpeed ZeRO checkpoint for another number of data-, expert- or tensor-parallel ranks, or another stage.

    Stock DeepSpeed loads TARGET with load_checkpoint, as if that number of ranks had saved it. A run directory
    comes out as a run directory with `latest`, a tag directory as a tag directory. At T tensor-parallel ranks,
    N x T ranks will load it. Of Hugging Face's Trainer, SOURCE is `checkpoint-N`: all that it keeps there comes along,
    and the Trainer resumes from TARGET.
    """
    from zckpt.cli.streams import reporter
    from zckpt.operations.reshard import reshard

    done = reshard(
        source,
        target,
        world_size=world_size,
        stage=None if stage is None else int(stage),
        elastic=elastic,
        round_robin=round_robin,
        parameter_alignment=parameter_alignment,
        expert_parallel_size=expert_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        padded_vocab_size=padded_vocab_size,
        verify=verify,
        fingerprint=bool(fingerprint),
        reporter=reporter("reshard", quiet=quiet),
        **writing,
        **where,
    )
    show(done, as_json=as_json, quiet=quiet)
