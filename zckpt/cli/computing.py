"""The verbs that compute what they write: `average`, `merge-adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import (
    Place,
    comma_separated,
    exclude_frozen_option,
    max_shard_size_option,
    show,
    tied_option,
    write_options,
)
from zckpt.cli.streams import reporter
from zckpt.errors import UsageError
from zckpt.operations.options import Renamed

config_option = click.option(
    "--config",
    type=Place(),
    metavar="DIR",
    help="Where config.json, tokenizer and so on are that go into a directory. Default: the first SOURCE, or BASE.",
)
recomputed_option = click.option(
    "--verify", is_flag=True, help="After writing, compute everything once more and compare every byte."
)


@click.command("average")
@click.argument("sources", type=Place(), nargs=-1, required=True)
@click.option("--target", "-t", type=Place(), required=True, help="What to write.")
@click.option(
    "--weights",
    metavar="W,...",
    help="One for each SOURCE, in any unit; they are divided by their sum. Default: all the same.",
)
@click.option(
    "--ema",
    type=float,
    metavar="D",
    help="Exponential average in the order given, oldest first: D x what it was + (1 - D) x the next.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "keep"]),
    help="Element type of trained parameters; frozen ones and buffers keep theirs. "
    "Default: float32 where a SOURCE has masters, else the weights' own.",
)
@click.option(
    "--slots",
    multiple=True,
    metavar="all|SLOT,...",
    help="Also average these optimizer slots, to TARGET's name with .optimizer in it, or into the directory.",
)
@click.option(
    "--from-last",
    multiple=True,
    metavar="GLOB",
    help="Take these tensors from the last SOURCE: integers, say, that are not the same in all. May be repeated.",
)
@tied_option
@exclude_frozen_option
@max_shard_size_option
@config_option
@recomputed_option
@write_options(Renamed)
def average_command(
    sources: tuple[Path, ...],
    target: Path,
    weights: str | None,
    slots: tuple[str, ...],
    from_last: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **options: Any,  # noqa: ANN401  # what click gives
) -> None:
    """Write the mean of checkpoints of one model, of any formats and world sizes, as one model.

    Masters count where there are some, else weights; computed in float32 and rounded once. TARGET is named as that of
    consolidate: x.safetensors, x.pt, or a directory. Of several SOURCEs, --root is a folder that holds all of them.
    Names are changed in every SOURCE that has them; a map gives all of them the names that the first has not.
    """
    from zckpt.operations.average import average

    done = average(
        sources,
        target,
        weights=_numbers(weights),
        slots=comma_separated(slots),
        from_last=from_last,
        reporter=reporter("average", quiet=quiet),
        **options,
        **shared,
    )
    show(done, as_json=as_json, quiet=quiet)


@click.command("merge-adapter")
@click.argument("base", type=Place())
@click.argument("adapter", type=Place())
@click.argument("target", type=Place())
@click.option(
    "--adapter-config",
    type=Place(),
    metavar="FILE",
    help="The adapter_config.json, where it is not with ADAPTER's tensors.",
)
@click.option(
    "--fan-in-fan-out/--no-fan-in-fan-out",
    default=None,
    help="Whether square weights lie as (in, out), as in GPT-2, where neither shapes nor others tell.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "keep"]),
    help="Element type of trained parameters. Default: masters as float32, parameters without a master in their own.",
)
@tied_option
@max_shard_size_option
@config_option
@recomputed_option
@write_options(Renamed)
def merge_adapter_command(
    base: Path,
    adapter: Path,
    target: Path,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **options: Any,  # noqa: ANN401  # what click gives
) -> None:
    """Write a model with a LoRA adapter of PEFT merged into it.

    BASE is the model that the adapter was trained on, of any format; ADAPTER a directory that PEFT saved, or a
    checkpoint with an adapter in it, which may be BASE itself. TARGET is named as that of consolidate. Of BASE are
    --tag, --root, --names and --tp-rules, and the options for other names: those with which ADAPTER was trained.
    """
    from zckpt.operations.merge_adapter import merge_adapter

    done = merge_adapter(base, adapter, target, reporter=reporter("merge", quiet=quiet), **options, **shared)
    show(done, as_json=as_json, quiet=quiet)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise UsageError("unusable --weights", expected="numbers with commas between them", found=text) from error
