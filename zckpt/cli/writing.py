"""The verbs that write checkpoints, stores of checkpoints and what changed, that prune a run, or watch it.

A command is its options and its help; the verb of its name gets what click makes of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

import zckpt
from zckpt.cli.options import (
    PATH,
    PLACE,
    ConvertCommand,
    ReshardCommand,
    comma_separated,
    json_option,
    quiet_option,
    source_argument,
    takes,
    target_argument,
    together,
)
from zckpt.cli.streams import json_text, reporter
from zckpt.cli.verbs import flag, verb
from zckpt.errors import SourceError, TargetError, UsageError, without_controls
from zckpt.operations.options import Averaging, Consolidating, Filled, Merging, ReadCopied, ReadWritten, Renamed
from zckpt.storage.remote import is_url


def runs(group: type) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Add the options that verbs share that write, and run the verb."""
    return together(takes(group), json_option, quiet_option, running("text.written"))


def running(text: str) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Let a command run the verb of its name; `text`: the function of the room `report` that says what it did."""

    def named(command: Callable[[], None]) -> Callable[..., None]:
        name = command.__name__.removesuffix("_command")

        def run(*, as_json: bool, quiet: bool, shared: Mapping[str, Any] = MappingProxyType({}), **own: Any) -> None:  # noqa: ANN401  # what click gives
            from zckpt.naming import TRANSFORMERS

            if "run" in own:  # the source of its function
                own["source"] = own.pop("run")
            if shared.get("map") == TRANSFORMERS and sys.stderr.isatty() and not quiet:
                click.echo("transformers makes the model, without memory, which takes some seconds ...", err=True)
            try:
                done = getattr(zckpt, name)(**own, **shared, reporter=reporter(name.partition("_")[0], quiet=quiet))
            except SourceError as error:
                places: list[Any] = [own.get("source"), own.get("target")]
                is_local = not any(one is None or is_url(one) for one in places)
                if is_local and [Path(one).exists() for one in places] == [False, True]:
                    error.advice = f"SOURCE comes first: zckpt {name.replace('_', '-')} {places[1]} {places[0]} ..."
                raise
            document = done.as_dict()
            if as_json:
                click.echo(json_text(document))
            elif done.dry_run or not quiet:
                module, _, function = text.partition(".")
                said = getattr(import_module(f"zckpt.report.{module}"), function)(document)
                click.echo(without_controls(said), err=not done.dry_run)

        run.__doc__ = command.__doc__
        return run

    return named


def _numbers(_context: click.Context, _option: click.Parameter, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(one) for one in text.split(",")]
    except ValueError as error:
        raise UsageError("unusable --weights", expected="numbers separated by commas", found=text) from error


def _last_is_target(command: Callable[..., None]) -> Callable[..., None]:
    """Let the last of the sources be the target, unless an option names it."""

    @wraps(command)
    def run(*, sources: tuple[Any, ...], target: Any, **given: Any) -> None:  # noqa: ANN401  # what click gives
        if target is None:
            *others, target = sources
            sources = tuple(others)
        if not sources:
            raise UsageError("sources and a target are required", expected="SOURCE... TARGET", found=f"only {target}")
        command(sources=sources, target=target, **given)

    return run


recomputed_option = flag("--verify", help="After writing, compute everything again and compare every byte.")
proof_options = together(
    flag("--verify", help="After writing, compare every byte with SOURCE."),
    click.option("--fingerprint/--no-fingerprint", default=None, help="Store TARGET's fingerprint with it."),
)


@verb("consolidate")
@source_argument
@target_argument
@click.option(
    "--hyperparameters",
    type=PLACE,
    metavar="FILE",
    help="JSON list with one object per param group, for --slots of an elastic SOURCE, which has no hyperparameters.",
)
@runs(Consolidating)
def consolidate_command() -> None:
    """Merge a sharded checkpoint into one model.

    If TARGET is x.safetensors, it is one file; if x.pt or x.bin, a torch state dict. Any other name is a Hugging Face
    directory for from_pretrained: safetensors, with SOURCE's config.json and tokenizer. Endings of other programs'
    files (.gguf, .onnx, .ckpt, ...) are refused.
    """


@click.command("reshard", cls=ReshardCommand)
@source_argument
@target_argument
@click.option("--world-size", type=int, required=True, metavar="N", help="Data-parallel ranks that will load TARGET.")
@proof_options
@runs(Renamed)
def reshard_command() -> None:
    """Reshard a DeepSpeed ZeRO checkpoint for another number of GPUs, other degrees of parallelism, or another stage.

    Stock DeepSpeed loads TARGET with load_checkpoint, as if that number of ranks had saved it. A run directory
    becomes a run directory with `latest`, a tag directory a tag directory. With T tensor-parallel ranks, N x T ranks
    will load it. For Hugging Face's Trainer, SOURCE is `checkpoint-N`: everything in it is copied, and the Trainer
    resumes from TARGET. Names do not change (`convert --to deepspeed` changes them), except that a pipeline becomes
    one model with --rename or --map.

    It also reshards Megatron's legacy files (mp_rank_TT_PPP) for other tensor-, pipeline- and expert-parallel ranks,
    and nanochat's for another number of ranks.
    """


@click.command("convert", cls=ConvertCommand, short_help="Convert a checkpoint to another format, with all its state.")
@source_argument
@target_argument
@proof_options
@runs(Filled)
def convert_command() -> None:
    """Convert a checkpoint to another format, with all its state."""


@verb("strip")
@source_argument
@target_argument
@flag("--padding", help="Remove the padding at the end of each rank's partition (ZeRO-1, 2).")
@flag(
    "--optimizer",
    help="Remove the optimizer's state: slots, and masters that also have a weight.",
)
@flag("--unreferenced", help="Remove bytes that no tensor uses.")
@click.option(
    "--keep-slots",
    multiple=True,
    metavar="SLOT,...",
    callback=lambda context, option, values: comma_separated(context, option, values) if values else None,
    help="Remove all optimizer slots except these; weights and masters stay. May be repeated.",
)
@runs(ReadWritten)
def strip_command() -> None:
    """Write a smaller copy of a checkpoint, without what is not needed; the same program loads TARGET.

    TARGET has SOURCE's format and form: a file, a run directory or a tag directory. Without any of the first four
    options, this shows how much each would save, and writes nothing.
    """


@verb("sanitize")
@source_argument
@target_argument
@runs(ReadWritten)
def sanitize_command() -> None:
    """Write a checkpoint again with data and classes of known frameworks only: nothing in it runs when it is loaded.

    TARGET has SOURCE's format and files, all of them. Every object of another class is left out and listed, and so is
    every file that cannot be followed to its end. `zckpt scan` says what is what.
    """


@verb("average")
@click.argument("sources", type=PLACE, nargs=-1, required=True, metavar="SOURCE... TARGET")
@click.option("--target", "-t", type=PLACE, help="What to write, if it is not the last argument.")
@click.option(
    "--weights",
    metavar="W,...",
    callback=_numbers,
    help="One weight per SOURCE, in any unit; they are divided by their sum. Default: equal weights.",
)
@click.option(
    "--ema",
    type=float,
    metavar="D",
    help="Exponential average, oldest SOURCE first: D x the average so far + (1 - D) x the next.",
)
@click.option(
    "--from-last",
    multiple=True,
    metavar="GLOB",
    help="Take these tensors from the last SOURCE, for example integers that differ. May be repeated.",
)
@recomputed_option
@_last_is_target
@runs(Averaging)
def average_command() -> None:
    """Average checkpoints of one model, of any formats and world sizes, into one model.

    Averages masters, or weights if there are no masters, in float32, and rounds once. TARGET is a name as for
    consolidate: x.safetensors, x.pt, or a directory. With several SOURCEs, --root is a directory that holds all of
    them. Names are changed in every SOURCE that has them; a map gives all SOURCEs the names that the first one lacks.
    """


@verb("merge-adapter")
@click.argument("base", type=PLACE)
@click.argument("adapter", type=PLACE)
@target_argument
@click.option(
    "--adapter-config",
    type=PLACE,
    metavar="FILE",
    help="The adapter_config.json, if it is not with ADAPTER's tensors.",
)
@click.option(
    "--adapter",
    "adapter_name",
    metavar="NAME",
    help="Which of several adapters: its folder in ADAPTER, or its name in a whole model.",
)
@click.option(
    "--fan-in-fan-out/--no-fan-in-fan-out",
    default=None,
    help="Whether square weights are (in, out), as in GPT-2, if neither shapes nor other weights tell.",
)
@recomputed_option
@runs(Merging)
def merge_adapter_command() -> None:
    """Merge a PEFT adapter (LoRA or DoRA) into its base model.

    BASE is the model that the adapter was trained on, in any format. ADAPTER is a directory that PEFT saved, or a
    checkpoint with an adapter in it, which can be BASE itself. TARGET is a name as for consolidate. --tag, --root,
    --names, --tp-rules and the renaming options apply to BASE; they give it the names that ADAPTER was trained with.
    """


writing_options = together(
    flag("--overwrite", help="Replace TARGET if it exists."),
    flag("--dry-run", help="Show what would be written; write nothing."),
    json_option,
    quiet_option,
)
store_argument = click.argument("store", type=PATH)


run_argument = click.argument("run", type=PLACE)


@verb("pack")
@run_argument
@store_argument
@click.option(
    "--full-every",
    default=10,
    show_default=True,
    metavar="K",
    help="At most K checkpoints must be read to restore one; a larger K saves more space.",
)
@click.option("--name", metavar="NAME", help="Name in STORE, if RUN is a single checkpoint. Default: its own name.")
@flag("--dry-run", help="Show what would be packed; write nothing.")
@json_option
@quiet_option
@running("reports.packed")
def pack_command() -> None:
    """Add a run's checkpoints, of any formats, to a STORE, in a fraction of the space.

    Every verb takes STORE/NAME as a SOURCE. RUN, and what is already in STORE, stay as they are.
    """


@verb("unpack")
@store_argument
@target_argument
@writing_options
@running("reports.unpacked")
def unpack_command() -> None:
    """Restore the files of one checkpoint, STORE/NAME, or of all in STORE, bit for bit."""


@verb("patch")
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@target_argument
@click.option(
    "--to",
    type=click.Choice(["zckpt", "slime"]),
    default="zckpt",
    show_default=True,
    help="slime: the changed bytes of weights, as slime publishes them; TARGET is called weight_v000001, ...",
)
@click.option("--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", help="For slime. Default: xor.")
@writing_options
@takes(ReadCopied)
@running("reports.patched")
def patch_command() -> None:
    """Write what turns checkpoint A into checkpoint B of the same model, whatever their formats and world sizes.

    A and B are identified by their fingerprints: a patch applies to A in any format, and to nothing else.
    """


@verb("apply")
@click.argument("a", type=PLACE)
@click.argument("patch", type=PATH)
@target_argument
@writing_options
@takes(ReadCopied)
@running("reports.unpacked")
def apply_command() -> None:
    """Apply PATCH to A: write the files of the other checkpoint, bit for bit.

    PATCH can also be a version that slime has published, weight_v000003, with A the model at any earlier version.
    """


STANDARD_ERROR = 2


@verb("prune")
@run_argument
@click.option("--keep-last", type=int, required=True, metavar="N", help="Keep the N sound ones with the highest steps.")
@click.option("--keep-every", type=int, metavar="K", help="Keep those whose step is a multiple of K.")
@click.option(
    "--keep-best", metavar="METRIC[:min|max]", help="Keep the best one by a logged metric; for a loss, the lowest."
)
@flag("--delete", help="Remove them. Without this, nothing changes.")
@click.option(
    "--also",
    multiple=True,
    metavar="PATTERN",
    help="Also remove these files with a checkpoint, even if they may be yours.",
)
@flag("--unsound", help="Also remove checkpoints that are not sound.")
@flag("--deep", help="Read every byte of each to check that it is sound.")
@click.option(
    "--settle",
    default=60.0,
    show_default=True,
    metavar="S",
    help="Keep what was written to in the last S seconds.",
)
@json_option
def prune_command(run: Path, as_json: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Show which checkpoints of a run can be removed, and how much that frees; --delete removes them.

    Only sound ones count. Checkpoints stay if `latest` or a link names them, if they are being written, are not sound,
    or hold files that may be yours. A kill never leaves half a checkpoint.
    """
    from zckpt.report.reports import render_pruned

    found = zckpt.prune(run, **given).as_dict()
    click.echo(json_text(found) if as_json else render_pruned(found))
    return TargetError.exit_status if found["failed"] else 0


def watched(run: Path, *, on_finding: str | None = None, quiet: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Print a line for each checkpoint that appears; a finding ends it, or runs a command that gets the line."""
    import subprocess
    import sys

    odd = False
    for one in zckpt.watch(run, **given):
        line = json_text(one.as_dict(), indent=None)
        if not quiet:
            click.echo(line)
            sys.stdout.flush()
        if one.findings:
            odd = True
            if on_finding is None:
                break
            command = ["sh", "-c", on_finding]  # the user's own
            subprocess.run(command, input=line.encode(), stdout=STANDARD_ERROR, check=False)  # noqa: S603
    return int(odd)
