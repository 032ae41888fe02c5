"""What `zckpt --help` and a verb's `--help` say, and which other words are understood for verbs and values."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zckpt.storage.remote import is_url

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice

GROUPS = {
    "Look": {
        "inspect": "Show format, parallelism, parameters, files; reads no tensor.",
        "list": "List the checkpoints of a run: step, size, sound, latest.",
        "stats": "Show min, max, mean, norm, zeros and NaN of every tensor.",
        "show": "Print some elements of one tensor.",
        "map": "Draw which rank holds what of which parameter.",
        "formats": "List the formats that can be read and written.",
    },
    "Write": {
        "consolidate": "Merge shards into one model: a file or a Hugging Face folder.",
        "reshard": "Change the number of GPUs of a DeepSpeed ZeRO checkpoint.",
        "convert": "Convert a whole training to DeepSpeed, DCP, FSDP and others.",
        "strip": "Write a smaller copy: no optimizer, padding or unused bytes.",
        "sanitize": "Write a copy with data and known classes only.",
        "average": "Average the weights of several checkpoints.",
        "merge-adapter": "Merge a LoRA or DoRA adapter into its base model.",
    },
    "Check": {
        "verify": "Check that a checkpoint is whole; --watch checks a run.",
        "scan": "Tell what its pickles would import and call, if loaded.",
        "diff": "Compare two checkpoints of any formats, tensor by tensor.",
        "fingerprint": "Print a digest of the state, the same in every format.",
        "resume-check": "Tell whether a program will resume it, and what is lost.",
    },
    "Keep a run": {
        "prune": "Remove checkpoints that no rule keeps.",
        "pack": "Store the checkpoints of a run in less space, as differences.",
        "unpack": "Restore checkpoints from a store, bit for bit.",
        "patch": "Write what changed between two checkpoints.",
        "apply": "Apply such a patch.",
    },
}
"""The verbs, as people look for them, with a line on each."""

EXAMPLES = {
    "inspect": (
        "run/",
        "run/global_step500 --parameters",
        "s3://bucket/run --json",
    ),
    "list": (
        "run/",
        "run/ --deep",
        "run/ --json",
    ),
    "stats": (
        "run/",
        "run/ --layers",
        "run/ --slots exp_avg_sq --csv",
    ),
    "show": (
        "run/ lm_head.weight --slice 0:4,:8",
        "run/ lm_head.weight --slot exp_avg",
        "run/ lm_head.weight --npy head.npy",
    ),
    "map": (
        "run/ shards.svg",
        "run/ shards.png --slots master",
        "run/ --json",
    ),
    "consolidate": (
        "run/ model.safetensors",
        "run/ model/ --dtype bfloat16",
        "run/ whole.pt --slots all",
    ),
    "reshard": (
        "run/ run6/ --world-size 6",
        "run/ run8/ --world-size 8 --stage 3",
        "run/ run6/ --world-size 6 --dry-run",
    ),
    "convert": (
        "run/ dcp/ --to dcp --dtype float32",
        "dcp/ run/ --to deepspeed --world-size 8 --stage 2",
        "run/ universal/ --to universal",
    ),
    "strip": (
        "run/ small/ --optimizer",
        "run/ small/ --padding --unreferenced",
        "run/ small/ --keep-slots exp_avg",
    ),
    "sanitize": (
        "downloaded/ clean/",
        "model.pt clean.pt",
        "run/ clean/ --dry-run",
    ),
    "average": (
        "step400/ step500/ mean.safetensors",
        "a/ b/ m.pt --weights 1,3",
        "a/ b/ c/ model/ --ema 0.9",
    ),
    "merge-adapter": (
        "base/ adapter/ merged/",
        "base/ adapter/ m.safetensors --dtype bfloat16",
        "base/ adapter/ merged/ --verify",
    ),
    "verify": (
        "run/",
        "run/ --deep",
        "run/ --watch --on-finding 'mail -s zckpt me@example.org'",
    ),
    "scan": (
        "run/",
        "downloaded/ --json",
        "model.pt --sarif model.sarif",
    ),
    "diff": (
        "run/ dcp/",
        "a/ b/ --rtol 1e-3",
        "--series step100/ step200/ step300/",
    ),
    "fingerprint": (
        "run/",
        "run/ --write",
        "run/ --json",
    ),
    "prune": (
        "run/ --keep-last 3",
        "run/ --keep-last 3 --keep-every 1000 --delete",
        "run/ --keep-last 1 --keep-best eval_loss",
    ),
    "resume-check": (
        "run/ --for deepspeed --world-size 6",
        "out/checkpoint-500 --for trainer",
        "dcp/ --for fsdp2 --model config.json",
    ),
    "pack": (
        "run/ run.zckpt",
        "run/ run.zckpt --full-every 20",
        "run/ run.zckpt --json",
    ),
    "unpack": (
        "run.zckpt run/",
        "run.zckpt/step500 step500/",
        "run.zckpt/step500 step500/ --dry-run",
    ),
    "patch": (
        "step400/ step500/ step500.patch",
        "dcp/ step500/ step500.patch",
        "step400/ step500/ step500.patch --json",
    ),
    "apply": (
        "step400/ step500.patch step500/",
        "dcp/ step500.patch step500/",
        "step400/ step500.patch step500/ --dry-run",
    ),
}
"""Arguments that work, by verb."""

ALIASES = {"ls": "list", "info": "inspect", "compare": "diff", "merge": "consolidate"}

VALUES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "trainer": "transformers-trainer", "fsdp2": "dcp", "verl": "fsdp-rank-files",
}  # fmt: skip
"""What people call values that an option has under another name."""

MODELS = frozenset({"hf", "huggingface", "safetensors", "torch", "pt", "pytorch"})
"""What people call a model by itself, which `consolidate` writes."""

OTHERWISE = {
    "fsdp": "not one format: use dcp (torch.distributed.checkpoint), fsdp-rank-files (verl) or accelerate with --fsdp",
    "lightning": "not a format that can be written; zckpt.lightning has strategies that read any format",
}
"""What `--to` is told of programs that have several formats, or none."""

SHELLS = ("bash", "zsh", "fish")

EMPTY = "it is empty: is a variable of the shell not set?"

RARE = frozenset({
    "roots", "names", "tp_rules", "tag_b", "roots_b", "names_b", "tp_rules_b", "strip_prefix", "rename", "map",
    "map_config", "add_prefix", "memory", "executor", "direct", "weight_check", "checksums", "resume", "restart",
    "overflow", "fill_masters", "tied", "max_shard_size", "hyperparameters", "exclude_frozen",
})  # fmt: skip
"""Options that few need: a verb's help has them with --help-all."""

COMMON = frozenset({"to", "world_size", "stage", "dtype"})
"""Of the options that formats state, those that most need."""

_ALL, _WORDS = "zckpt.help_all", "zckpt.words"


def chosen_format(ctx: click.Context) -> str | None:
    """Return the format that `--to` names, of a help that is asked for before options are taken."""
    words = ctx.meta.get(_WORDS, [])
    found = [after for word, after in pairwise(words) if word == "--to"]
    found += [word.removeprefix("--to=") for word in words if word.startswith("--to=")]
    known = next((one.type for one in ctx.command.params if one.name == "to"), None)
    choices = known.choices if isinstance(known, click.Choice) else ()
    word = found[-1].lower() if found else None
    return next((one for one in choices if str(one) in (word, VALUES.get(word or ""))), None)


class Verb(click.Command):
    """A verb whose help has examples, and the options that few need only with --help-all."""

    of_formats: frozenset[str] = frozenset()
    """Options that formats state."""

    def __init__(self, *arguments: Any, **given: Any) -> None:  # noqa: ANN401  # click's own
        super().__init__(*arguments, **given)
        self.params.append(
            click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all,
                         help="Show all options, and exit.")
        )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what is given; all that is needed and is not there is named at once."""
        given = ctx.meta[_WORDS] = [*args]
        try:
            rest = super().parse_args(ctx, args)
        except click.BadOptionUsage as error:
            error.ctx = error.ctx or ctx  # so that it says of which verb
            raise
        except click.MissingParameter:
            found, *_ = self.make_parser(ctx).parse_args(given)
            asked = {one.name or "": one for one in self.get_params(ctx) if one.required}
            needed = [one for name, one in asked.items() if name not in found or one.value_is_missing(found[name])]
            if len(needed) < 2:
                raise
            names = [one.opts[0] if isinstance(one, click.Option) else one.make_metavar(ctx) for one in needed]
            raise click.UsageError(f"Missing {', '.join(names[:-1])} and {names[-1]}", ctx) from None
        for one in self.get_params(ctx):
            if ctx.params.get(one.name or "") == "" and "prefix" not in str(one.name):  # a prefix may be none
                raise click.BadParameter(EMPTY, ctx, one)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that most need; all of them with --help-all."""
        records: list[tuple[str, str]] = []
        left = 0
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx) if isinstance(one, click.Option) else None
            if record is None:
                continue
            of_many = one.name in self.of_formats and one.name not in COMMON and chosen_format(ctx) is None
            is_rare = (one.name in RARE and one.name not in self.of_formats) or of_many
            if is_rare and not ctx.meta.get(_ALL):
                left += 1
            else:
                records.append(record)
        with formatter.section("Options"):
            formatter.write_dl(records)
        if left:
            formatter.write_paragraph()
            formatter.write_text(f"{left} more options: {ctx.command_path} --help-all")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's
        """Write the examples."""
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            with formatter.section("Examples"):
                for one in examples:
                    formatter.write(f"{'':{formatter.current_indent}}zckpt {self.name} {one}\n")


def _help_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


verb = partial(click.command, cls=Verb)
"""As `click.command`."""

flag = partial(click.option, is_flag=True)
"""As `click.option`, of one without a value."""


class Verbs(click.Group):
    """The verbs in groups. `help VERB`, `completion SHELL`, other words for verbs and a path alone are understood."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `help VERB` for `VERB --help`, and what is there and is no verb for what is to be inspected."""
        if args[:2] == ["help", ""]:
            raise click.BadParameter(EMPTY, ctx, param_hint="VERB")
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        elif len(args) >= 1 and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            is_place = is_url(args[0]) or "/" in args[0] or Path(args[0]).exists()
            args = ["inspect", *args] if is_place else args
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb by its name, or another word for it."""
        if cmd_name == "completion":
            return _completion
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's
        """Write a line for each verb."""
        known = {name for group in GROUPS.values() for name in group}
        others = {name: one.get_short_help_str(80) for name, one in self.commands.items() if name not in known}
        width = max(map(len, self.commands))
        for title, lines in {**GROUPS, "Others": others}.items():
            rows = [(f"{name:{width}}", line) for name, line in lines.items() if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("zckpt help VERB, or zckpt VERB --help, explains a verb; zckpt PATH inspects PATH.")
        formatter.write_text("zckpt completion bash|zsh|fish prints a completion script for your shell.")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def _completion(shell: str) -> None:
    """Print a shell script that completes verbs, options and paths: eval "$(zckpt completion bash)"."""
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    found = get_completion_class(shell)
    if found is not None and isinstance(root.command, click.Group):
        click.echo(found(root.command, {}, "zckpt", "_ZCKPT_COMPLETE").source())


class Near(_Choice):
    """One of some values, in any case, under other names that people have for them; near ones are suggested."""

    def __init__(self, choices: Iterable[str]) -> None:
        super().__init__(list(choices))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  # click's
        """Return the value that is meant."""
        word = str(value).lower()
        found = value if value in self.choices else VALUES.get(word, word)
        if found not in self.choices:
            near = get_close_matches(found, list(self.choices), n=2)
            said = f"not one of {', '.join(self.choices)}"
            if param is not None and param.name == "to" and word in MODELS:
                said = "not a format for a whole training; for the model alone, use zckpt consolidate"
            elif param is not None and param.name == "to" and word in OTHERWISE:
                said = OTHERWISE[word]
            elif near:
                said += f". Did you mean {' or '.join(near)}?"
            self.fail(f"{value!r} is {said}", param, ctx)
        return found
