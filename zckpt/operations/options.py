"""Options that several verbs share. Each is said here, once: its type, its default, what it means, its flag.

A verb takes a group of them as `**shared: Unpack[Group]`, under `@shares(Group)`, which fills defaults in and shows
each in the verb's signature and docstring. `cli/options.py` makes flags of the same lines.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypedDict, TypeVar

from zckpt.engine import DEFAULT_MAX_SHARD_NBYTES, DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.errors import UsageError
from zckpt.immutable import immutable

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Unpack as Unpack  # noqa: PLC0414  # for all verbs

    from zckpt.naming import Config, MapSource, Naming
else:
    Unpack = None  # of annotations, which nothing evaluates

Given = ParamSpec("Given")
Result = TypeVar("Result")
Place = str | os.PathLike[str]


@immutable
class Shared:
    """One option that verbs share.

    Parameters
    ----------
    default : object
    text : str
        What it means.
    decides : bool
        Whether another value writes other bytes: no run goes on with what one with another value has left.
    flag : str or None
        On the command line, where that is another than its name; empty: there it is not.
    unset : str
        What the flag means, if it says no.
    kind : str
        Of the flag's value: text, names (with commas between them), file, or place (a path or URL). A flag whose
        default is a bool has none, that of a number takes a size, and one whose default is empty may be repeated.
    metavar : str or None
    choices : tuple of str
        All values there are; empty: any.
    """

    default: object
    text: str
    decides: bool = False
    flag: str | None = None
    unset: str = ""
    kind: str = "text"
    metavar: str | None = None
    choices: tuple[str, ...] = ()


class Reading(TypedDict, total=False):
    """Which checkpoint is meant, where the source is a path."""

    tag: Annotated[
        str | None, Shared(None, "Which checkpoint of a run directory. Default: the one that `latest` names.")
    ]
    roots: Annotated[Sequence[Place], Shared(
        (), "The same directory from another node; its files are added.",
        flag="root", kind="place", metavar="DIR",
    )]  # fmt: skip
    names: Annotated[Sequence[str] | None, Shared(
        None,
        "Names of the optimizer's parameters in its order (in a file, one per line), if SOURCE only numbers them; for "
        "safetensors, names of the model's parameters in its order.",
        decides=True, kind="file", metavar="FILE",
    )]  # fmt: skip
    tp_rules: Annotated[Place | None, Shared(
        None,
        "How tensor-parallel slices form parameters: `universal_checkpoint_info` as JSON. Default: the checkpoint's "
        "own.",
        kind="place", metavar="FILE",
    )]  # fmt: skip


class ReadingB(TypedDict, total=False):
    """The same, of a verb's second source."""

    tag_b: Annotated[str | None, Shared(None, "As `tag`, for B.")]
    roots_b: Annotated[Sequence[Place], Shared((), "As `roots`, for B.")]
    names_b: Annotated[Sequence[str] | None, Shared(None, "As `names`, for B.")]
    tp_rules_b: Annotated[Place | None, Shared(None, "As `tp_rules`, for B.")]


class Renaming(TypedDict, total=False):
    """Other names for tensors, which `zckpt.naming.Naming` gives them."""

    strip_prefix: Annotated[str | None, Shared(
        None, "Remove the prefix P from names, before the other renaming options.", decides=True, metavar="P"
    )]  # fmt: skip
    rename: Annotated[Sequence[tuple[str, str]], Shared(
        (),
        "Replace each match of the regular expression OLD in a name by NEW (\\1: a group); with * in both, OLD is a "
        "glob for whole names.",
        decides=True, metavar="OLD=NEW",
    )]  # fmt: skip
    map: Annotated["MapSource | None", Shared(
        None,
        "Give weights and all slots another program's names and arrangement: the NAME of a map that `zckpt formats` "
        "lists, a map of your own (docs/maps.md), or `transformers`: between the names in files and in memory.",
        decides=True, metavar="NAME|FILE",
    )]  # fmt: skip
    map_config: Annotated["Config | None", Shared(
        None, "The model's config.json or params.json, or its directory, for the map. Default: the source's.",
        decides=True, kind="path", metavar="PATH",
    )]  # fmt: skip
    add_prefix: Annotated[
        str | None,
        Shared(None, "Add the prefix P to all names, after the other renaming options.", decides=True, metavar="P"),
    ]


class Copying(TypedDict, total=False):
    """Who reads the elements, and with how much memory."""

    memory: Annotated[int, Shared(
        DEFAULT_MEMORY_NBYTES, "Limit, in bytes, for the buffers of all workers together."
    )]  # fmt: skip
    reporter: Annotated[Reporter | None, Shared(None, "Reports how many bytes are done.", flag="")]
    executor: Annotated["Executor | str | None", Shared(
        None, "Workers that read and write: docs/scale.md. Default: threads; under torchrun, its ranks.",
        metavar="threads|processes|dask://HOST:PORT|mpi|ray|torchrun",
    )]  # fmt: skip
    direct: Annotated[bool, Shared(
        False, "Read and write without the page cache if possible: docs/copying.md."
    )]  # fmt: skip


class Writing(Copying, total=False):
    """How a target is written."""

    weight_check: Annotated[bool, Shared(
        True, "Before writing, compare a sample of every master with its weight, and ranks' files with each other.",
        unset="Do not compare masters with weights, or ranks' files with each other.",
    )]  # fmt: skip
    checksums: Annotated[bool, Shared(
        True, "Compare what is copied with the source's checksums, and refuse damaged bytes.",
        unset="Copy bytes even if they do not match SOURCE's checksums, to salvage what is left.",
    )]  # fmt: skip
    overwrite: Annotated[bool, Shared(False, "Replace TARGET if it exists.")]
    resume: Annotated[bool, Shared(
        False, "Resume a killed run to TARGET."
    )]  # fmt: skip
    restart: Annotated[bool, Shared(False, "Remove what a killed run to TARGET left, and start over.")]
    drop: Annotated[Sequence[str], Shared(
        (), "Leave this out, which zckpt does not read: FILE, FILE:PLACE or PLACE, as in the inventory; * matches "
            "anything.",
        decides=True, metavar="PATTERN",
    )]  # fmt: skip
    dry_run: Annotated[bool, Shared(False, "Show what would be written; write nothing.")]


class Dequantized(TypedDict, total=False):
    """What is done with what is quantised."""

    dequantize: Annotated[bool, Shared(
        False,
        "Turn quantised weights, and quantised optimizer state (8-bit, 4-bit or fp8, of bitsandbytes or torchao), into "
        "floats: the state as float32, under torch's names for Adam.",
        decides=True,
    )]  # fmt: skip


class OfModel(TypedDict, total=False):
    """What of a model is written, and how."""

    dtype: Annotated[str | None, Shared(
        None,
        "Element type of trained parameters; frozen ones and buffers keep theirs. Default: float32 for masters, "
        "otherwise the parameter's own type; keep: the model's own type.",
        decides=True, choices=("float32", "bfloat16", "float16", "keep"),
    )]  # fmt: skip
    tied: Annotated[str, Shared(
        "duplicate", "Write a tied parameter under all its names, or under one only.",
        decides=True, choices=("duplicate", "drop"),
    )]  # fmt: skip
    max_shard_size: Annotated[int, Shared(
        DEFAULT_MAX_SHARD_NBYTES, "Size limit of each file in a directory.", decides=True
    )]  # fmt: skip
    config: Annotated[Place | None, Shared(
        None,
        "Directory with the config.json, tokenizer and so on for a TARGET directory. Default: the source's, or "
        "huggingface/ in it, except with a map.",
        decides=True, kind="place", metavar="DIR",
    )]  # fmt: skip
    quantize: Annotated[str | None, Shared(
        None,
        "Write linear layers' weights, into a directory, in FP8 with a scale for each block (128 x 128), as released "
        "models have them.",
        decides=True, metavar="fp8-block[:RxC]",
    )]  # fmt: skip


class OfWholeModel(OfModel, total=False):
    """The same, of a model that may have an optimizer."""

    slots: Annotated[str | Sequence[str], Shared(
        (),
        "Also write these optimizer slots, to TARGET's name with .optimizer added, or into the directory; all includes "
        "the masters if the model's file does not hold them exactly.",
        decides=True, kind="names", metavar="all|SLOT,...",
    )]  # fmt: skip
    exclude_frozen: Annotated[bool, Shared(False, "Leave frozen parameters out.", decides=True)]


class Renamed(Reading, Renaming, Writing, Dequantized, total=False):
    """Options of the verbs that write a checkpoint, under other names and in other types if that is asked for."""

    overflow: Annotated[str, Shared(
        "refuse", "If finite values do not fit the type that is written: refuse, or allow infinity and count them.",
        choices=("refuse", "allow"),
    )]  # fmt: skip


class Salvaged(Reading, total=False):
    """Options of the verbs that go on without lost files."""

    salvage: Annotated[bool, Shared(
        False, "If files are lost, use what is left, and list what is missing.", decides=True
    )]  # fmt: skip


class Filled(Salvaged, Renamed, total=False):
    """Options of the verbs that write a model or all of a training, of what is left of it, too."""

    fill_from: Annotated[Place | None, Shared(
        None,
        "Take what SOURCE lacks from this checkpoint, of any format: lost elements and missing tensors, by name. "
        "What is filled is listed.",
        decides=True, kind="place", metavar="BASE",
    )]  # fmt: skip
    fill_masters: Annotated[bool, Shared(
        False, "Fill lost elements of masters from weights (BASE's, or SOURCE's own) if no masters have them.",
        decides=True,
    )]  # fmt: skip


class Consolidating(OfWholeModel, Filled, total=False):
    """Options of `consolidate`."""

    model: Annotated[str | None, Shared(
        None,
        "Write only what names begin with, one of several models or a part of one; or what lies beside the model under "
        "KEY with its names and shapes: an average (ema), a reference model, KEY.KEY further in.",
        decides=True, metavar="KEY",
    )]  # fmt: skip


class Averaging(OfWholeModel, Renamed, total=False):
    """Options of `average`."""


class Merging(OfModel, Renamed, total=False):
    """Options of `merge_adapter`."""


class Compared(Reading, Renaming, Copying, Dequantized, total=False):
    """Options of the verbs that read every element."""


class ComparedTwo(Compared, ReadingB, total=False):
    """Options of `diff`."""


class ReadCopied(Reading, Copying, total=False):
    """Options of `verify`."""


class ReadWritten(Reading, Writing, total=False):
    """Options of `strip` and `sanitize`."""


class Scanning(TypedDict, total=False):
    """Options of `scan`: none that verbs share."""


class Resharded(Renamed, total=False):
    """Options of `reshard`, with those of the formats that come with zckpt; `reshard --help` says what they mean."""

    stage: int | None
    elastic: bool | None
    round_robin: bool | None
    parameter_alignment: bool | None
    hyperparameters: str | None
    requantize: bool | None
    expert_parallel_size: int | None
    sliced_experts: bool | None
    tensor_parallel_size: int | None
    padded_vocab_size: int | None
    slice_rules: str | None
    pipeline_parallel_size: int | None
    virtual_pipeline_parallel_size: int | None
    partition_method: str | None
    stage_bounds: str | None
    pipeline_layers: str | None
    ddp_bucket_size: int | None


class Converted(Filled, Resharded, total=False):
    """Options of `convert`, in the same way."""

    world_size: int | None
    train_batch_size: int | None
    dtype: str | None
    fsdp: str | None
    fsdp_version: int | None
    fsdp_size: int | None
    device: str | None
    torch_version: str | None
    groups: str | None
    units: str | None
    keys: str | None
    layers: str | None
    optimizer: str | None
    iteration: int | None
    ckpt_format: str | None
    transformer_impl: str | None


DECIDING = frozenset(name for name, hint in Consolidating.__annotations__.items() if hint.__metadata__[0].decides)
"""Options that another run must have, too, to go on with what one has left."""


def options_of(group: type) -> dict[str, Shared]:
    """Return the options of a group that verbs share, by name; of those that formats state, none."""
    hints = group.__annotations__.items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}


def only(group: type, given: Mapping[str, object]) -> dict[str, Any]:
    """Return those of the options given that a group has."""
    return {name: given[name] for name in group.__annotations__ if name in given}


def others(given: Mapping[str, object]) -> dict[str, Any]:
    """Return those of the options given that only a format knows."""
    return {key: value for key, value in given.items() if key not in Filled.__annotations__}


def naming_of(given: Mapping[str, object]) -> "Naming":
    """Return what tensors are to be called, by the options given."""
    from zckpt.naming import Naming

    return Naming(**only(Renaming, given))


def how_read(shared: Mapping[str, object]) -> dict[str, Any]:
    """Return how elements are read: with how much memory, who hears of it, and whether past the page cache."""
    return {name: shared[name] for name in ("memory", "reporter", "direct")}


def shares(group: type, *, more: bool = False) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Let a verb take the options of a group, and `more`, which only its formats know: its `**` gets all of them.

    And let it take URLs wherever it takes paths of what it reads.

    Raises
    ------
    TypeError
        When the verb is called with an option that it does not have.
    """
    options = options_of(group)
    defaults = {name: one.default for name, one in options.items()}

    def sharing(function: Callable[Given, Result]) -> Callable[Given, Result]:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        known = {*options, *(one.name for one in own)}
        shown = [
            rest.replace(
                name=name,
                kind=inspect.Parameter.KEYWORD_ONLY,
                default=one.default,
                annotation=group.__annotations__[name].__origin__,
            )
            for name, one in options.items()
        ]

        @wraps(function)
        def verb(*arguments: Given.args, **given: Given.kwargs) -> Result:
            unknown = set() if more else given.keys() - known
            if unknown:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            from zckpt.operations.places import called

            settled: dict[str, Any] = {**defaults, **given}
            for name in ("memory", "max_shard_size"):
                size = settled.get(name, 1)
                if not isinstance(size, Real) or size % 1 or size < 1:
                    expected = "a positive number of bytes"
                    raise UsageError(f"unusable --{name.replace('_', '-')}", expected=expected, found=repr(size))
                if name in settled:
                    settled[name] = int(settled[name])
            for name, one in options.items():
                value = settled[name]
                if one.choices and value not in (one.default, *one.choices):
                    raise UsageError(f"unusable --{name}", expected=" or ".join(one.choices), found=repr(value))
            if settled.get("executor") is not None:
                from zckpt.executors.using import check_executor

                check_executor(settled["executor"])
            if settled.get("resume") and settled.get("restart"):
                raise UsageError("--resume and --restart exclude each other", expected="one of them")
            return called(function, verb, arguments, settled)

        verb.__signature__ = signature.replace(parameters=[*own, *shown, *[rest.replace(name="options")] * more])  # type: ignore[attr-defined]
        if verb.__doc__ is not None:
            values = {name: f" One of {', '.join(one.choices)}." * bool(one.choices) for name, one in options.items()}
            text = "\n    ".join(f"{name}\n        {one.text}{values[name]}" for name, one in options.items())
            verb.__doc__ = verb.__doc__.replace("**shared", text, 1)
        return verb

    return sharing
