"""Will a checkpoint resume in a program as it lies, and what will not come back: from structure alone.

`parts` says what of a training is in a checkpoint, `programs` what each program looks for and takes; here one is held
against the other, and commands are sought that make what the program resumes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from zckpt.errors import MissingPackageError, UsageError, ZckptError, listed
from zckpt.formats.account import take_inventory
from zckpt.formats.assets import find_assets, is_adapter
from zckpt.formats.companions import CARRIED, TRAINER_STATE
from zckpt.formats.consolidated.model import optimizer_slots
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.options import choose
from zckpt.formats.registry import get
from zckpt.formats.transformers_trainer.architectures import lacks_tied_name
from zckpt.immutable import immutable
from zckpt.naming import TRANSFORMERS, Naming
from zckpt.operations.convert import ADAPTERS_NAME, as_converted, under_names
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import Source, open, opened  # noqa: A004
from zckpt.operations.options import Place, Reading, Unpack, shares
from zckpt.operations.reshard import recut
from zckpt.operations.resume_check.parts import MASTERS, PARTS, TRAINING, WEIGHTS, Facts, Shapes
from zckpt.operations.resume_check.programs import (
    CORE,
    OWN_NAMES,
    PROGRAMS,
    Make,
    Program,
    Way,
    of_few_bits,
    said_by,
    same_ranks,
    step_folder,
    takes,
)
from zckpt.state import MASTER, Checkpoint, Document, Result, by_key
from zckpt.state.names import as_filed
from zckpt.storage.files import is_file, read_json
from zckpt.storage.remote.mount import PACKED
from zckpt.storage.stand_ins import is_remote, place

if TYPE_CHECKING:
    from torch.nn import Module

WHOLE, PARTLY, NO, UNKNOWN = "whole", "partly", "no", "unknown"
"""All comes back; some things do not; nothing does, or it raises; it is not known."""

SHOWN = 3


@immutable(repr=True)
class ResumeCheck(Result):
    """Whether a program can resume a checkpoint.

    Parameters
    ----------
    source, format : str
    program, title : str
        Its name for `--for`, and its common name.
    world_size : int, ranks
        Ranks that will resume it.
    step : int or None
    verdict : str
        `whole`, `partly`, `no` or `unknown`.
    call : str or None
        What to call.
    given : str or None
        How the program must be configured.
    comes_back : list of dict
        What comes back: `part`, and `from`, the keys or slots that hold it.
    not_back : list of dict
        What does not, or starts over: `part` and `why`.
    why : list of str
        Why it does not resume, or why that is unknown.
    commands : list of str
        Commands that write a checkpoint that resumes, or of which more comes back, to TARGET.
    not_back_after : list of dict
        What does not come back after that command, as `not_back`.
    advice : str or None
    yours : str or None
        What the program never saves, so your script must.
    """

    source: str
    format: str
    program: str
    title: str
    world_size: int
    step: int | None
    verdict: str
    call: str | None = None
    given: str | None = None
    comes_back: list[Document] = field(default_factory=list)
    not_back: list[Document] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    not_back_after: list[Document] = field(default_factory=list)
    advice: str | None = None
    yours: str | None = None

    @property
    def resumes(self) -> bool:
        """Whether everything comes back."""
        return self.verdict == WHOLE


@shares(Reading)
def resume_check(
    source: Source,
    *,
    program: str,
    world_size: int | None = None,
    model: Place | Module | None = None,
    **shared: Unpack[Reading],
) -> ResumeCheck:
    """Return whether a program can resume a checkpoint as it is, and what would be lost. Reads no tensor.

    Parameters
    ----------
    source : path-like or Checkpoint
    program : str
        "deepspeed", "trainer", "accelerate", "fsdp2", "megatron", "verl", "lightning" or "zckpt".
    world_size : int, optional
        Data-parallel ranks that will resume it. Default: as many as saved it.
    model : path-like or Module, optional
        The model that will resume it: a live one, a transformers config.json or its directory, or any checkpoint of it.
        Its names and shapes are compared with the source's.
    **shared

    Raises
    ------
    UsageError
        There is no such program, or an option cannot be used.
    SourceError
        The source, or the model, cannot be read.
    """
    about = PROGRAMS.get(program)
    if about is None:
        raise UsageError("unknown program", expected=", ".join(PROGRAMS), found=repr(program))
    if world_size is not None and world_size < 1:
        raise UsageError("unusable --world-size", expected="1 or more", found=world_size)
    checkpoint = opened(source, **shared)
    config, shapes = _shapes(model)
    if shapes is not None and _wants_every_name(about):
        shapes = {(name,): shape for names, shape in shapes.items() for name in names}
    facts = Facts(checkpoint, world_size, shapes, config)
    found = ResumeCheck(
        checkpoint.named, checkpoint.format, program, about.title, facts.ranks, checkpoint.step, NO,
        yours=about.yours or None,
    )  # fmt: skip
    scheme = None if program == "zckpt" else _scheme(checkpoint)
    if scheme == PACKED:
        stored = f"it is in a store of checkpoints, and {about.title} looks for its files"
        return replace(found, why=[stored], commands=[f"zckpt unpack {quote(checkpoint.named)} TARGET"])
    way = next((one for one in about.ways if one.mark(facts)), None)
    lacks = said_by(about.holds, facts)
    if way is None:
        why = [f"{about.title} looks for {about.looks_for}", *lacks, *_of_model(facts, strict=True)]
        return _with_commands(replace(found, why=why), about, facts)
    reasons = said_by(way.needs, facts) + lacks
    mismatch = _of_model(facts, strict=way.strict)
    reasons += mismatch if way.strict else [one for one in mismatch if "shape" in one]
    doubts = said_by((of_few_bits, *way.doubts, _lost), facts)
    if scheme is not None:
        doubts.append(
            "it is not on a file system, and it is unknown whether the program can read it there: copy it first"
        )
    words = _words(facts)
    found = replace(found, call=way.call.format(**words), given=way.given.format(**words) or None)
    if reasons:
        only_size = reasons == [same_ranks(facts)] and not doubts
        return _with_commands(replace(found, why=reasons, call=None), about, facts, only_size=only_size)
    back, gone = _divided(facts, about, way)
    verdict = UNKNOWN if doubts else PARTLY if gone else WHOLE
    found = replace(found, verdict=verdict, comes_back=back, not_back=gone, why=doubts)
    may_help = verdict == PARTLY and any(one["part"] in CORE for one in gone)
    return _with_commands(found, about, facts) if may_help else found


def _scheme(checkpoint: Checkpoint) -> str | None:
    """Return the scheme of the store that a checkpoint is in; None: it is on a file system."""
    path = Path(checkpoint.source if checkpoint.places is None else checkpoint.places[0])
    return place(path).parts[2] if is_remote(path) else None


def _lost(facts: Facts) -> str | None:
    """Doubt what has files missing, or things that zckpt knows not."""
    one = facts.checkpoint
    if one.lost:
        return f"{len(one.lost)} of its files are missing"
    left = [item.name for item in take_inventory(one).left_out if item.trained]
    return f"the contents of {listed(left, most=SHOWN)} are unknown" if left else None


def _words(facts: Facts) -> Document:
    """Return what a call and its conditions are filled in with."""
    within = facts.folder
    stage, torch = facts.checkpoint.zero_stage, facts.checkpoint.details.get("torch_version")
    step, usual = step_folder(facts), Path("RUN", f"global_step_{facts.checkpoint.step}")
    return {
        "path": facts.place,
        "run": within.parent,
        "tag": within.name,
        "stage": 0 if stage is None else stage,
        "ranks": facts.ranks,
        "step": step or usual,
        "placed": "" if step else f"these files in {usual}/actor, or those of SFT in {usual}; ",
        "with_torch": f", torch {torch}" if torch else "",
    }


def _divided(facts: Facts, program: Program, way: Way) -> tuple[list[Document], list[Document]]:
    """Return what of a checkpoint comes back, and what does not, or begins anew."""
    back: list[Document] = []
    gone: list[Document] = []
    files = {Path(name).stem: name for name in facts.names}
    if not way.strict and (mismatch := _of_model(facts, strict=False)):
        gone.append({"part": WEIGHTS, "why": f"{mismatch[0]}, and stay as the model was made"})
    for part in PARTS:
        keys = facts.parts.get(part)
        said = said_by((need for name, need in way.lacks if name == part), facts)
        if said and (keys or part in way.keeps):
            gone.append({"part": part, "why": said[0]})
        elif keys:
            taken = [key for key in keys if takes(way, part, key)]
            if taken:
                back.append({"part": part, "from": taken})
            if left := [key for key in keys if key not in taken]:
                shown = listed([files.get(key, key) for key in left], most=SHOWN)
                returned = f"load_checkpoint returns {shown} in {way.returns}, and your script must set it"
                own = way.returns and not files.keys() & {*left}
                gone.append({"part": part, "why": returned if own else f"{program.title} does not read {shown}"})
        elif part in way.keeps or part in TRAINING:
            gone.append({"part": part, "why": "it is not in the checkpoint, and starts over"})
    return back, gone


# Commands that make what resumes


def _with_commands(found: ResumeCheck, program: Program, facts: Facts, *, only_size: bool = False) -> ResumeCheck:
    """Add the first command that would be accepted and better, and what it loses; else why there is none."""
    refused: list[str] = []
    form = facts.checkpoint.format
    strange = form in OWN_NAMES and form not in {make.to for make in program.makes}
    better = iter(()) if strange else _commands(found, program, facts, refused, only_size=only_size)
    command, lost, advice = next(better, (None, [], None))
    if command is not None:
        if MASTERS in {one["part"] for one in found.not_back}:
            advice = program.advice or None
        return replace(found, commands=[command], not_back_after=lost, advice=advice)
    if found.verdict != NO:
        return found
    if strange:
        refused.append(
            f"its tensors have names of {form}'s: `zckpt convert --map NAME` gives them others (docs/maps.md)"
        )
    none = "no zckpt command writes what it resumes from"
    lacks = said_by(program.holds, facts) or _of_model(facts, strict=True)
    more = [program.advice] if program.advice and not lacks else []
    return replace(found, advice="; ".join([none, *refused[-1:], *more]))


def _commands(
    found: ResumeCheck, program: Program, facts: Facts, refused: list[str], *, only_size: bool
) -> Iterator[tuple[str, list[Document], str | None]]:
    """Yield commands that would be accepted and better, what they lose, and advice; note what is said of others."""
    one = facts.checkpoint
    gone = {part["part"] for part in found.not_back}
    for naming, named in _named(facts, refused, every_name=_wants_every_name(program)):
        strict = all(way.strict for way in program.ways)
        if said_by(program.holds, named) or _of_model(named, strict=strict):
            continue
        for make in program.makes:
            if (make.of and one.format not in make.of) or (make.verb == "reshard" and (not only_size or naming)):
                continue
            if make.of_masters and MASTER not in optimizer_slots(named.checkpoint, "keep"):
                continue
            options = {**make.options, **({"world_size": facts.ranks} if make.sized else {})}
            values = {key: value for key, (value, _) in make.asked.items()}
            verb = f"{make.verb} --to {make.to}" if make.to else make.verb
            try:
                laid = _lay_out(make, facts, {**options, **values}, Naming(**naming))
            except ZckptError as error:
                refused.append(f"`zckpt {verb}` says: {error.message}")
                continue
            lost = _after(make, laid, named, program)
            if found.verdict != NO and not {part["part"] for part in lost} < gone:
                continue
            shown = {**options, **{key: word for key, (_, word) in make.asked.items()}, **naming}
            shown = {"to": make.to, **shown} if make.to else shown
            shown |= {"rename": "=".join(*naming["rename"])} if "rename" in naming else {}
            flags = [f"--{key.replace('_', '-')} {quote(str(value))}" for key, value in shown.items()]
            names = "tensor names do not change; --model checks whether they are the model's"
            kept = names if facts.shapes is None and not only_size and not naming else None
            yield " ".join(["zckpt", make.verb, quote(one.named), "TARGET", *flags]), lost, kept


def _wants_every_name(program: Program) -> bool:
    """Tell whether a program looks for tensors under each name that a model has in memory."""
    return any(make.to and get(make.to).every_name for make in program.makes)


def _named(facts: Facts, refused: list[str], *, every_name: bool) -> Iterator[tuple[dict[str, Any], Facts]]:
    """Yield a checkpoint under its own names, and under those that transformers has in memory; with options for it."""
    one = facts.checkpoint
    names = one.names

    def under(**naming: Any) -> tuple[dict[str, Any], Facts]:  # noqa: ANN401  # of Naming
        return naming, replace(facts, checkpoint=under_names(opened(one), Naming(**naming))[0])

    if every_name and is_adapter(names, find_assets(one)) and any("lora_A.weight" in name for name in names):
        yield under(rename=[ADAPTERS_NAME])
        return
    lacks = every_name and lacks_tied_name(facts.config, names)
    if not facts.in_files and not lacks:
        yield {}, facts
    strange = lacks or facts.in_files is not False or one.unnamed or _of_model(facts, strict=True)
    if strange and isinstance((facts.config or {}).get("model_type"), str):
        config = {"map_config": str(facts.given_config)} if facts.config is facts.model_config else {}
        try:
            yield under(map=TRANSFORMERS, **config)
        except ZckptError as error:
            refused.append(error.message)
            if lacks and not facts.in_files:
                yield {}, facts


def _lay_out(make: Make, facts: Facts, options: Mapping[str, Any], naming: Naming) -> TargetFiles:
    """Return what a command would write, or raise what it would before."""
    checkpoint: Checkpoint = opened(facts.checkpoint)
    target = Path("TARGET")
    if make.verb == "reshard":
        whole = as_filed(checkpoint)
        laid = recut(whole, target, options)
        check_nothing_lost([whole], (), copied=laid.copied)
        return laid
    written = get(make.to)
    chosen = choose(written.options, options, make.to)
    return written.lay_out(Job(as_converted(checkpoint, written, naming), facts.place, target, chosen))


def _after(make: Make, laid: TargetFiles, facts: Facts, program: Program) -> list[Document]:
    """Return what does not come back from a target that is not written."""
    names = frozenset(file.name.partition("/")[0] for file in (*laid.files, *laid.outside))
    beside = [Path(name).stem for name in names if CARRIED.fullmatch(name) or name == TRAINER_STATE]
    one = facts.checkpoint
    metadata = {**one.metadata, **{key: one.metadata.get(key, True) for key in beside}}
    planned = replace(facts, checkpoint=replace(one, format=make.to or one.format, metadata=metadata), planned=names)
    way = next((way for way in program.ways if way.mark(planned)), program.ways[0])
    return _divided(planned, program, way)[1]


# The model that is to resume it


def _of_model(facts: Facts, *, strict: bool) -> list[str]:
    """Say which tensors a model has and a checkpoint has not, and the other way round."""
    if facts.shapes is None:
        return []
    one = facts.checkpoint
    there = {parameter.name: tuple(parameter.shape) for parameter in one.tensors()}
    there |= {filed: there[bare] for bare, filed in one.wrapped.items() if bare in there}
    shapes = {name: shape for names, shape in facts.shapes.items() for name in names}
    said = (
        ("the model has tensors that the checkpoint lacks",
         [names[0] for names in facts.shapes if there.keys().isdisjoint(names)]),
        ("the checkpoint has tensors that the model lacks",
         [name for name in there if name not in shapes and name not in one.wrapped and strict]),
        ("tensors have another shape in the model",
         [name for name, shape in shapes.items() if there.get(name, shape) != shape]),
    )  # fmt: skip
    return [f"{text}: {listed(names, most=SHOWN)}" for text, names in said if names]


def _shapes(model: object) -> tuple[Path | None, Shapes | None]:
    """Return the config.json that a model was given by, and the shapes of its tensors by all the names of each."""
    if model is None:
        return None, None
    if hasattr(model, "state_dict"):
        return None, _live_shapes(model)
    path = Path(str(model))
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and is_file(config):
        return config, _live_shapes(_from_config(config))
    one = open(path)
    aliases = by_key((owner, name) for name, owner in one.aliases.items())
    owned = (parameter for parameter in one.tensors() if parameter.tied_to is None)
    return None, {(p.name, *aliases.get(p.name, [])): tuple(p.shape) for p in owned}


def _live_shapes(model: Any) -> Shapes:  # noqa: ANN401  # a Module
    state = {name: one for name, one in model.state_dict(keep_vars=True).items() if hasattr(one, "shape")}
    names = by_key((id(one), name) for name, one in state.items())
    return {tuple(some): tuple(state[some[0]].shape) for some in names.values()}


def _from_config(path: Path) -> object:
    """Return the model of a config.json, without elements."""
    config = read_json(path) or {}
    kinds = config.get("architectures")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: only transformers knows which tensors the model has, and it is not installed",
            advice="pip install transformers torch, or give a checkpoint of the model",
        ) from error
    kind = getattr(transformers, str(kinds[0]), None) if isinstance(kinds, list) and kinds else None
    if kind is None or getattr(kind, "config_class", None) is None:
        raise UsageError("not a transformers model", path=path, expected="architectures", found=kinds)
    try:
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(config))
    except Exception as error:  # whatever a model says of a configuration
        raise UsageError(
            "cannot create a model from it", path=path, found=f"{type(error).__name__}: {error}"
        ) from error
