"""What each program looks for when it resumes, and what it takes from there: tables, one for each program.

A program has ways in (`Way`): the first whose mark is on a checkpoint is the one that it would take. Each says what
must be there (`needs`), of what it is not known what comes of it (`doubts`), which parts come back (`takes`), and which
begin anew where they are not there (`keeps`). Read in, and run against, DeepSpeed 0.19, transformers 5.23,
Accelerate 1.15, torch 2.15, Lightning 2.6 and Megatron-Core 0.16; verl in its source alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

from zckpt.errors import listed
from zckpt.formats.fsdp_rank_files import directory as rank_files
from zckpt.formats.low_bit import codes_in
from zckpt.formats.remainder import RANDOM as RANDOM_STATES
from zckpt.formats.remainder import are_of_save
from zckpt.formats.transformers_trainer.directory import APART
from zckpt.immutable import immutable
from zckpt.operations.resume_check.parts import (
    BUFFERS,
    CUSTOM,
    DATA,
    FROZEN,
    MASTERS,
    OTHER,
    RANDOM,
    SCALE,
    SCHEDULER,
    SETTINGS,
    STATE,
    STEP,
    WEIGHTS,
    Facts,
)
from zckpt.state.partition import flat_partition_numel
from zckpt.storage.files import entries_of, is_file

Need = Callable[[Facts], str | None]
"""Returns why a checkpoint does not do; None if it does."""

ANY = ".*"
CORE = {WEIGHTS: ANY, FROZEN: ANY, BUFFERS: ANY, MASTERS: ANY, STATE: ANY, SETTINGS: ANY, STEP: ANY}
"""What every load of a model and its optimizer takes."""


@immutable(kw_only=True)
class Way:
    """One way in which a program resumes."""

    mark: Callable[[Facts], object]  # tells whether a checkpoint has what makes the program take this way
    call: str  # what to call, of `{path}`, `{step}` and `{tag}`
    given: str = ""  # how the program has to be set up, of `{stage}`, `{ranks}`, `{placed}` and `{with_torch}`
    needs: tuple[Need, ...] = ()  # without which it raises; of which it is not known what it does
    doubts: tuple[Need, ...] = ()
    takes: Mapping[str, str] = field(default_factory=lambda: CORE)
    """Of each part that comes back a pattern of the keys that it is read from."""
    lacks: tuple[tuple[str, Need], ...] = ()  # parts that do not come back though they are there, and why
    keeps: tuple[str, ...] = ()
    """What a training in this program has in any case, and begins anew where it is not there."""
    strict: bool = True  # whether it raises where the model has tensors that are not there, or there are others
    returns: str = ""  # where its caller gets what it does not read itself


@immutable(kw_only=True)
class Make:
    """A command that makes what a program resumes from."""

    verb: str = "convert"  # `reshard`, or `convert`
    to: str = ""  # a format
    options: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Options without a default: a value to try it with, and what stands for it in the command."""
    sized: bool = False  # whether the number of ranks is an option
    of: tuple[str, ...] = ()  # formats that it is made of; empty: any
    of_masters: bool = False  # whether it is for what has masters that weights of their type do not hold


@immutable(kw_only=True)
class Program:
    """What is known of a program."""

    title: str
    looks_for: str  # what it resumes from
    ways: tuple[Way, ...]
    holds: tuple[Need, ...] = ()  # what a checkpoint must hold, in whatever files: no command adds it
    makes: tuple[Make, ...] = ()  # in the order in which they are tried
    advice: str = ""  # what to do where no command helps
    yours: str = ""  # what it never keeps


def unless(holds: Callable[[Facts], object], said: str) -> Need:
    """Return a need, by what is to hold, and what is said where it does not."""
    return lambda facts: None if holds(facts) else said


def said_by(needs: Iterable[Need], facts: Facts) -> list[str]:
    """Return what needs say that a checkpoint does not meet."""
    return [said for need in needs if (said := need(facts)) is not None]


def of_format(name: str) -> Callable[[Facts], bool]:
    """Return what tells checkpoints of a format."""
    return lambda facts: facts.checkpoint.format == name


def one_of(*names: str) -> Need:
    """Return a need: one of some files in the directory."""
    return unless(lambda facts: facts.names & {*names}, f"{names[0]} is not there")


def lies(*names: str) -> Need:
    """Return a need: files in the directory."""
    return lambda facts: (gone := facts.missing(*names)) and f"{gone} is missing"


def same_ranks(facts: Facts) -> str | None:
    """Say why another number of ranks does not do."""
    if facts.ranks != facts.saved_ranks:
        return f"it was saved by {facts.saved_ranks} ranks, and {facts.ranks} are to resume it"
    return None


has_optimizer = unless(
    lambda facts: STATE in facts.parts or facts.checkpoint.param_groups, "no state of an optimizer is in it"
)

of_few_bits = unless(
    lambda facts: not codes_in(facts.checkpoint), "its weights are low-bit codes, for which this is unknown"
)
"""Doubted of every program."""


def masters_beside(facts: Facts) -> str | None:
    """Say that weights come back rounded: only zckpt puts masters where stock optimizers look for none."""
    if facts.planned is None and facts.rounded is not None and "origin" in facts.checkpoint.details:
        return f"nothing there looks for them, and weights come back rounded to {facts.rounded}"
    return None


BESIDE = (MASTERS, masters_beside)


def odd_shapes(facts: Facts) -> str | None:
    """Doubt parallel layouts at another number of ranks."""
    sizes = facts.checkpoint.topology
    if facts.ranks != facts.saved_ranks and max(sizes.tp, sizes.pp, sizes.ep) > 1:
        return "of tensor, pipeline or expert parallelism at another number of ranks this is not known"
    return None


# DeepSpeed


_elastic = unless(
    lambda facts: facts.checkpoint.details.get("optimizer_form") != "elastic",
    "its optimizer is in the elastic form, which DeepSpeed 0.19 fails to load with AdamW",
)


def _lacks_frozen(facts: Facts) -> str | None:
    lost = [one.name for one in facts.checkpoint.owners if not one.slots]
    return f"it has no weights of {len(lost)} parameters, such as {lost[0]}" if lost else None


def _universal_empty(facts: Facts) -> str | None:
    """Say that a rank would have nothing of a group, which DeepSpeed's loader does not expect."""
    one = facts.checkpoint
    if one.zero_stage not in (1, 2):
        return None
    for number, group in enumerate(one.param_groups):
        total = sum(one.owner(name).numel for name in group.parameters if name in one.parameters)
        if total <= (facts.ranks - 1) * flat_partition_numel(total, facts.ranks):
            return f"a rank of {facts.ranks} would hold nothing of param group {number}: DeepSpeed raises IndexError"
    return None


def _universal_slots(facts: Facts) -> str | None:
    odd = sorted({*facts.checkpoint.optimizer_slot_names()} - {"exp_avg", "exp_avg_sq", "step"})
    return f"DeepSpeed's universal loader knows Adam's moments, and {', '.join(odd)} is none" if odd else None


def _alike_groups(facts: Facts) -> bool:
    groups = facts.checkpoint.param_groups
    return all(group.hyperparameters == groups[0].hyperparameters for group in groups)


_ENGINE: dict[str, Any] = {
    "needs": (lambda facts: same_ranks(facts) if (facts.checkpoint.zero_stage or 0) > 0 else None,),
    "doubts": (_elastic, odd_shapes),
}
_ENGINE_TAKES = CORE | {SCALE: "loss_scaler", SCHEDULER: "lr_scheduler", DATA: "data_sampler", OTHER: ANY}
"""What DeepSpeed's engine does, whoever calls it; what it does not know goes to the caller."""

_STAGE = "ZeRO stage {stage}, as its files are"

_RESHARD = Make(verb="reshard", sized=True, of=("deepspeed",))

DEEPSPEED = Program(
    title="DeepSpeed",
    looks_for="a tag's directory with mp_rank_00_model_states.pt and its ranks' optimizer files, or universal form",
    ways=(
        Way(
            mark=of_format("deepspeed"),
            call='engine.load_checkpoint("{run}", tag="{tag}")',
            given=_STAGE,
            **_ENGINE,
            takes=_ENGINE_TAKES,
            returns="client_state",
        ),
        Way(
            mark=of_format("universal"),
            call='engine.load_checkpoint("{run}", tag="{tag}")',
            given='"checkpoint": {{"load_universal": true}} in the configuration, ZeRO stage {stage}',
            needs=(_universal_empty, _universal_slots),
            doubts=(unless(lambda facts: facts.checkpoint.topology.ep == 1,
                           "of experts in universal form this is not known"),),
            takes=_ENGINE_TAKES,
            returns="client_state",
            lacks=(
                *((part, lambda _: "DeepSpeed loads only what is trained from universal form: these stay as the model "
                                   "was made") for part in (FROZEN, BUFFERS)),
                (SETTINGS, unless(lambda facts: facts.checkpoint.zero_stage != 3 or _alike_groups(facts),
                                  "each param group gets the settings of the first")),
            ),
        ),
    ),
    holds=(has_optimizer, _lacks_frozen),
    makes=(
        _RESHARD,
        Make(to="deepspeed", sized=True),
        Make(to="deepspeed", sized=True, options={"stage": 2}),
    ),
    advice="zckpt.deepspeed.load_checkpoint reads any of zckpt's formats into a live engine",
    yours="random states and the position in the data, except what the script gives as client_state",
)  # fmt: skip

# The Trainer

_TRAINER_WEIGHTS = (
    "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip


def _rng(facts: Facts) -> str | None:
    """Say which ranks begin with other random numbers: a single process reads another file than several do."""
    files = ["rng_state.pth"] if facts.ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(facts.ranks)]
    gone = facts.missing(*files)
    return f"{facts.ranks} ranks read {files[0]}{' and so on' * (facts.ranks > 1)}: no {gone}" if gone else None


def _batches(facts: Facts) -> str | None:
    """Say that samples follow otherwise."""
    saved = sum(name.startswith("rng_state") for name in facts.names)
    if saved not in (0, facts.ranks):
        return f"{saved} ranks have saved it, and {facts.ranks} ranks' batches are others: it skips as many steps"
    return None


def _pair(facts: Facts) -> str | None:
    """Say that the Trainer takes optimizer.pt and scheduler.pt together, or neither, without a word."""
    gone = facts.missing("optimizer.pt", "scheduler.pt")
    return f"{gone} is not there, and the Trainer then loads neither an optimizer nor a scheduler" if gone else None


def _apart(facts: Facts) -> str | None:
    """Say which files with some of the model's tensors the Trainer does not look for."""
    found = sorted(name for name in facts.names if APART.fullmatch(name))
    return (
        f"the Trainer does not read {listed(found)}: your program must give the model what is in it" if found else None
    )


_CONVERTED = (
    "transformers has other names for this model in memory than in its files, and the Trainer's resuming converts "
    "none: such tensors stay as the model was made, unless from_pretrained has loaded them"
)


_in_files = unless(lambda facts: facts.shapes is not None or not facts.in_files, _CONVERTED)
_maybe_in_files = unless(lambda facts: facts.shapes is not None or facts.in_files is not None, _CONVERTED)


_TRAINER_REST = {SCHEDULER: "scheduler", RANDOM: "rng_state(_[0-9]+)?", DATA: "trainer_state", SCALE: "scaler"}
_ACCOUNT = lies("trainer_state.json")
_TrainerWay = partial(
    Way, call='trainer.train(resume_from_checkpoint="{path}")', keeps=(STATE, SETTINGS, SCHEDULER, RANDOM)
)


def _has_scheduler(facts: Facts) -> bool:
    """Tell whether the Trainer's scheduler has a file; one of DeepSpeed's own is the engine's."""
    config = facts.checkpoint.metadata.get("ds_config")
    return "scheduler.pt" in facts.names or (isinstance(config, Mapping) and config.get("scheduler") is not None)


TRAINER = Program(
    title="Hugging Face's Trainer",
    looks_for="checkpoint-N with trainer_state.json, and the model's files or DeepSpeed's global_stepN",
    ways=(
        _TrainerWay(
            mark=lambda facts: facts.checkpoint.format == "deepspeed"
            and any(name.startswith("global_step") for name in facts.names),
            given="deepspeed= with " + _STAGE,
            needs=(_ACCOUNT, lies("latest"), unless(_has_scheduler, "scheduler.pt is not there"), *_ENGINE["needs"]),
            doubts=_ENGINE["doubts"],
            takes=_ENGINE_TAKES | _TRAINER_REST | {SCHEDULER: "(lr_)?scheduler", SCALE: "loss_scaler"},
            lacks=((RANDOM, _rng),),
        ),
        _TrainerWay(
            mark=lambda facts: facts.names & {"pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"},
            given="fsdp= of the same version and state_dict_type",
            needs=(_ACCOUNT,),
            doubts=(one_of("scheduler.pt"),),
            takes=CORE | _TRAINER_REST,
            lacks=((RANDOM, _rng), (DATA, _batches)),
        ),
        _TrainerWay(
            mark=lambda facts: facts.checkpoint.format != "deepspeed" and facts.names & {*_TRAINER_WEIGHTS},
            given="no deepspeed= and no fsdp=",
            needs=(_ACCOUNT,),
            doubts=(_maybe_in_files,),
            takes=CORE | _TRAINER_REST,
            lacks=((WEIGHTS, _in_files), (WEIGHTS, _apart), BESIDE,
                   *((part, _pair) for part in (STATE, SETTINGS, STEP, SCHEDULER)), (RANDOM, _rng), (DATA, _batches)),
            strict=False,
        ),
    ),
    holds=(_lacks_frozen,),
    makes=(
        _RESHARD,
        Make(to="transformers-trainer"),
        Make(to="transformers-trainer", asked={"train_batch_size": (1, "SAMPLES")}),
    ),
)  # fmt: skip

# Accelerate


def _states(facts: Facts) -> str | None:
    return lies(*(f"random_states_{rank}.pkl" for rank in range(facts.ranks)))(facts)


_ACCELERATE_REST = {
    SCHEDULER: "scheduler(_[0-9]+)?",
    RANDOM: "random_states_[0-9]+",
    DATA: "(sampler|dl_state_dict)(_[0-9]+)?",
    SCALE: "scaler",
    CUSTOM: "custom_checkpoint_[0-9]+",
}
_AccelerateWay = partial(Way, call='accelerator.load_state("{path}")', keeps=(STATE, SETTINGS, RANDOM))


ACCELERATE = Program(
    title="Accelerate",
    looks_for="model.safetensors and optimizer.bin, FSDP's pytorch_model_fsdp_0 and optimizer_0, or DeepSpeed's tag "
    "pytorch_model",
    ways=(
        _AccelerateWay(
            mark=lambda facts: facts.checkpoint.format == "deepspeed" and facts.folder.name == "pytorch_model"
            and "pytorch_model" in facts.names,
            given="a DeepSpeedPlugin of " + _STAGE,
            **_ENGINE,
            takes=_ENGINE_TAKES | _ACCELERATE_REST | {SCHEDULER: "(lr_)?scheduler(_[0-9]+)?", SCALE: "loss_scaler"},
            lacks=((RANDOM, _states),),
        ),
        _AccelerateWay(
            mark=lambda facts: facts.names & {"pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"},
            given="a FullyShardedDataParallelPlugin of the same version and state_dict_type",
            needs=(unless(lambda facts: facts.names & {"optimizer_0", "optimizer.bin"}, "optimizer_0 is missing"),),
            takes=CORE | _ACCELERATE_REST,
            lacks=((RANDOM, _states),),
        ),
        _AccelerateWay(
            mark=lambda facts: facts.checkpoint.format != "deepspeed" and facts.names & {*_TRAINER_WEIGHTS[:4]},
            given="no plugin for DeepSpeed or FSDP",
            needs=(one_of("model.safetensors", "pytorch_model.bin"), lies("optimizer.bin")),
            takes=CORE | _ACCELERATE_REST,
            lacks=(BESIDE, (RANDOM, _states)),
        ),
    ),
    holds=(has_optimizer, _lacks_frozen),
    makes=(_RESHARD, Make(to="accelerate")),
    advice="zckpt.accelerate.Accelerator and zckpt.load read it",
)  # fmt: skip

# torch.distributed.checkpoint under FSDP2


def _dcp(*, flat: bool) -> Callable[[Facts], bool]:
    def mark(facts: Facts) -> bool:
        paths = facts.dcp_paths
        below = {path[1] for path in paths if len(path) > 2 and path[0] == "optimizer"}
        flattened = any(path[0] == "optimizer" and len(path) == 2 for path in paths)
        keys = {str(path[2]) for path in paths if len(path) > 3 and path[:2] == ("optimizer", "state")}
        nested = {"state", "param_groups"} <= below and not any(map(str.isdecimal, keys))
        return any(path[0] == "model" for path in paths) and (flattened if flat else nested and not flattened)

    return mark


def _stateless(facts: Facts) -> str | None:
    """Say that a parameter has no state where its group has some: DCP raises, for the live optimizer has it."""
    one = facts.checkpoint
    for group in one.param_groups:
        names = [name for name in group.parameters if name in one.parameters]
        found = {name: one.owner(name).optimizer_slots for name in names}
        most = max((len(slots) for slots in found.values()), default=0)
        short = [name for name, slots in found.items() if len(slots) < most]
        if short:
            return f"{short[0]} has no state, for it never had a gradient: DCP misses its keys"
    return None


def _unnamed(facts: Facts) -> str | None:
    some = list(facts.checkpoint.unnamed)
    return f"whose state {some[0]} is, the optimizer's numbers do not tell (give --names)" if some else None


FSDP2 = Program(
    title="FSDP2 with torch.distributed.checkpoint",
    looks_for='a DCP directory of {"model": ..., "optimizer": ...} as get_state_dict returns them',
    ways=tuple(
        Way(
            mark=_dcp(flat=flat),
            call='dcp.load({{"model": model, "optimizer": optimizer}}, checkpoint_id="{path}"), then set_state_dict',
            given=options + "the dicts of get_state_dict, at any number of ranks",
            lacks=(BESIDE,),
        )
        for flat, options in ((False, ""), (True, "flatten_optimizer_state_dict=True, "))
    ),
    holds=(has_optimizer, _stateless, _unnamed),
    makes=(Make(to="dcp", options={"dtype": "float32"}, of_masters=True), Make(to="dcp")),
    advice="dcp.load with storage_reader=zckpt.dcp.Reader(PATH), or zckpt.load, brings back all of it, as it is",
    yours="scheduler, random states and the position in the data, except what the script saves with model and "
    "optimizer",
)

# Megatron


BUCKETS_ALIKE = 40
"""Data-parallel ranks up to which buckets of gradients end at the same parameters, unless their size is given."""


def _sharding(facts: Facts) -> object:
    one = facts.checkpoint
    return one.details.get("optimizer sharding") if str(one.format_version).startswith("torch_dist") else ""


def _buckets(facts: Facts) -> str | None:
    kind, most = _sharding(facts), max(facts.ranks, facts.saved_ranks)
    is_cut = kind == "fully_sharded_bucket_space" or (kind == "dp_reshardable" and most > BUCKETS_ALIKE)
    return same_ranks(facts) if is_cut else None


def _version(facts: Facts) -> str | None:
    version = str(facts.checkpoint.format_version or "")
    if version == "legacy" and facts.ranks != facts.saved_ranks:
        return "of legacy files at another number of ranks this is not known"
    return None if version.startswith(("torch_dist", "legacy")) else f"of files of {version} this is not known"


_MEGATRON = Way(
    mark=of_format("megatron"),
    call='--load "{run}"',
    given="the same tensor- and pipeline-parallel sizes, {ranks} data-parallel ranks",
    needs=(_buckets,),
    doubts=(_version,),
    takes=CORE | {SCHEDULER: "opt_param_scheduler", RANDOM: ANY, SCALE: ANY, OTHER: ANY},
)

MEGATRON = Program(
    title="Megatron-Core",
    looks_for="iter_NNNNNNN with .metadata and common.pt, or mp_rank_XX/model_optim_rng.pt",
    ways=(
        replace(
            _MEGATRON,
            mark=lambda facts: _sharding(facts) in ("fully_reshardable", "fully_sharded_model_space"),
            given="any tensor-, pipeline- and data-parallel sizes",
        ),
        _MEGATRON,
    ),
    holds=(has_optimizer,),
    makes=(Make(to="megatron", sized=True, of=("megatron",)), Make(to="megatron", of=("megatron",))),
    advice="Megatron-Core has its own names: `zckpt convert SOURCE TARGET --to megatron --map NAME` (docs/maps.md)",
    yours="the position in the data, but for the samples that args count",
)  # fmt: skip

# verl


def _rank_files(facts: Facts) -> str | None:
    folder, ranks, kinds = facts.folder, facts.ranks, ("model", "optim", "extra_state")
    names = (f"{kind}_world_size_{ranks}_rank_{rank}.pt" for kind in kinds for rank in range(ranks))
    return next((f"{one} is not there" for one in names if not (folder / one).is_file()), None)


def step_folder(facts: Facts) -> Path | None:
    """Return the folder that verl is given, of whose name it reads the step; the actor's is in it, but for SFT."""
    folder = facts.folder
    return next((one for one in (folder, folder.parent) if rank_files.STEP.fullmatch(one.name)), None)


def _has_data(facts: Facts) -> bool:
    there, step = facts.planned, step_folder(facts)
    if there is None:
        there = frozenset(one.name for one in entries_of(facts.folder)) - {"data.pt"}
        if step is not None and is_file(step / "data.pt"):
            return True
    return any(map(rank_files.OF_TRAINING.fullmatch, there))


def _is_of_skyrl(facts: Facts) -> bool:
    step = step_folder(facts)
    return step is not None and step != facts.folder and is_file(step / "trainer_state.pt")


VERL = Program(
    title="verl with FSDP",
    looks_for="model_world_size_W_rank_R.pt, optim_... and extra_state_... of each rank",
    ways=(
        Way(
            mark=_is_of_skyrl,
            call='trainer.resume_mode=from_path trainer.resume_path="{step}"',
            given="SkyRL, whose run it is, and not verl; {ranks} ranks{with_torch}",
            needs=(same_ranks, _rank_files),
            takes=CORE | {SCHEDULER: "lr_scheduler", RANDOM: ".*rng", DATA: "data|trainer_state",
                          OTHER: "client_state|fsdp_strategy|tag"},
            keeps=(RANDOM,),
        ),
        Way(
            mark=of_format("fsdp-rank-files"),
            call='trainer.resume_mode=resume_path trainer.resume_from_path="{step}"',
            given="{placed}{ranks} ranks of the same FSDP version{with_torch}",
            needs=(same_ranks, _rank_files),
            takes=CORE | {SCHEDULER: "lr_scheduler", RANDOM: ".*rng", DATA: "data(_[0-9]+)?"},
            lacks=((DATA, unless(_has_data, "data.pt is not in the folder of the step, global_step_N")),),
            keeps=(RANDOM,),
        ),
    ),
    holds=(has_optimizer,),
    makes=(Make(to="fsdp-rank-files", sized=True),),
)  # fmt: skip

# zckpt


def _random_of_others(facts: Facts) -> str | None:
    if not are_of_save(facts.checkpoint.metadata.get(RANDOM_STATES)):
        return "zckpt.load only restores random states of zckpt.save, and returns others in `extra`"
    return f"no random states of rank {facts.saved_ranks}" if facts.ranks > facts.saved_ranks else None


def _each_ranks_own(facts: Facts) -> str | None:
    own = facts.checkpoint.per_rank
    return f"each rank has its own {own[0].key}, for which this is unknown" if own else None


ZCKPT = Program(
    title="zckpt",
    looks_for="any format that it reads",
    ways=(
        Way(
            mark=lambda facts: True,  # noqa: ARG005
            call='zckpt.load("{path}", model=model, optimizer=optimizer)',
            given="scheduler= and grad_scaler=, if there are any; an optimizer with the same order, if files only "
            "number its parameters",
            doubts=(_each_ranks_own,),
            takes=CORE
            | {SCHEDULER: "(lr_)?scheduler", SCALE: "loss_scaler|scaler|grad_scaler", RANDOM: ANY, OTHER: ANY},
            lacks=((RANDOM, _random_of_others),),
        ),
    ),
    holds=(has_optimizer,),
    yours="the position in the data, except what the script gives as extra",
)

# Lightning


_LIGHTNING_REST = {SCHEDULER: "lr_schedulers", SCALE: ANY, DATA: "loops", CUSTOM: "callbacks", OTHER: ANY}


_LightningWay = partial(Way, call='trainer.fit(module, ckpt_path="{path}")', takes=CORE | _LIGHTNING_REST)


def _of_lightning(mark: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda facts: "pytorch-lightning_version" in facts.checkpoint.metadata and mark(facts)


LIGHTNING = Program(
    title="Lightning",
    looks_for="its own .ckpt: one file, or a directory of FSDP or DeepSpeed",
    ways=(
        _LightningWay(
            mark=_of_lightning(of_format("deepspeed")),
            given="DeepSpeedStrategy of " + _STAGE,
            **_ENGINE,
            takes=_ENGINE_TAKES | _LIGHTNING_REST | {SCALE: "loss_scaler"},
        ),
        _LightningWay(
            mark=_of_lightning(lambda facts: facts.checkpoint.format == "dcp" and "meta.pt" in facts.names),
            given="FSDPStrategy or ModelParallelStrategy, as it was saved",
        ),
        _LightningWay(
            mark=_of_lightning(lambda facts: not facts.place.is_dir() and "origin" not in facts.checkpoint.details),
            given="SingleDeviceStrategy or DDPStrategy; for the same batches, as many ranks as saved it",
        ),
    ),
    holds=(has_optimizer,),
    makes=(_RESHARD,),
    advice="nothing writes Lightning's files; zckpt.load reads it in on_fit_start, and zckpt.lightning has strategies "
    "that save and resume through zckpt",
    yours="random states",
)

OWN_NAMES = frozenset({"megatron", "nanotron", "meta"})
"""Formats whose tensors are called, and arranged, as in no other program: only a map makes others' of them."""

PROGRAMS: dict[str, Program] = {
    "deepspeed": DEEPSPEED,
    "trainer": TRAINER,
    "accelerate": ACCELERATE,
    "fsdp2": FSDP2,
    "megatron": MEGATRON,
    "verl": VERL,
    "lightning": LIGHTNING,
    "zckpt": ZCKPT,
}


def takes(way: Way, part: str, key: str) -> bool:
    """Tell whether a part comes back that is under a key."""
    return part in way.takes and re.fullmatch(way.takes[part], key) is not None
