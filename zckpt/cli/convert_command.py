"""`zckpt convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import (
    fingerprint_option,
    show,
    source_options,
    verify_option,
    write_options,
)

FORMATS = ("deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy")


HELP = """Write a checkpoint in another format, with all of its state.

\b
deepspeed        a run directory that stock DeepSpeed loads
universal        DeepSpeed's universal checkpoint, for any optimizer
consolidated     one model and one torch.optim state, in a directory or one .pt file
zckpt            zckpt's own: JSON and safetensors, no pickle
dcp              torch.distributed.checkpoint
zero-redundancy  PyTorch's ZeroRedundancyOptimizer; with --world-size each rank's file
"""
"""The paragraph after the character that click takes for it is not wrapped."""


@click.command("convert", help=HELP)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(FORMATS), required=True, help="Format of TARGET.")
@click.option("--world-size", type=int, metavar="N", help="Ranks that TARGET is cut for, where its format is cut.")
@click.option("--stage", type=click.Choice(["1", "2", "3"]), help="ZeRO stage of a DeepSpeed TARGET.")
@click.option("--elastic/--rigid", default=None, help="Form of a DeepSpeed TARGET's optimizer state (ZeRO-1, 2).")
@click.option("--round-robin/--no-round-robin", default=None, help="As round_robin_gradients of the training.")
@click.option(
    "--parameter-alignment/--no-parameter-alignment",
    default=None,
    help="As parameter_alignment of the training.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "keep"]),
    help="Element type of trained parameters in the model (consolidated, dcp, zero-redundancy). Default: keep.",
)
@verify_option
@fingerprint_option
@write_options
@source_options
def convert_command(
    source: Path,
    target: Path,
    to: str,
    world_size: int | None,
    stage: str | None,
    elastic: bool | None,
    round_robin: bool | None,
    parameter_alignment: bool | None,
    dtype: str | None,
    verify: bool,
    fingerprint: bool | None,
    as_json: bool,
    quiet: bool,
    writing: dict[str, Any],
    where: dict[str, Any],
) -> None:
    """Write a checkpoint in another format."""
    from zckpt.cli.progress import reporter
    from zckpt.operations.convert import convert

    done = convert(
        source,
        target,
        to=to,
        world_size=world_size,
        stage=None if stage is None else int(stage),
        elastic=elastic,
        round_robin=round_robin,
        parameter_alignment=parameter_alignment,
        dtype=dtype,
        verify=verify,
        fingerprint=fingerprint,
        reporter=reporter("convert", quiet=quiet),
        **writing,
        **where,
    )
    show(done, as_json=as_json, quiet=quiet)
