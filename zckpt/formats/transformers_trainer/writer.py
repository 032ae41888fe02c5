"""A directory from which Hugging Face's Trainer resumes, of a checkpoint of any format.

The Trainer has one model, one optimizer, and no masters besides the weights: those are written as they are, so that it
goes on in their precision. Its optimizer has two param groups (`decay`), in the model's order. It takes the optimizer
only where a scheduler is with it, and the step from its own account: what the source has not, is written by rule.

scheduler.pt          of a LambdaLR: the source's, if it is one; else at the source's step, with the Trainer's own rates
trainer_state.json    the source's; else its step
rng_state*.pth        the Trainer's or Accelerate's; else none, and the Trainer begins with the seed of its arguments
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from zckpt.engine import DEFAULT_MAX_SHARD_NBYTES
from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError
from zckpt.evidence import refuse_unnamed
from zckpt.evidence.modules import TooManyOrdersError, possible
from zckpt.formats.adapters import names_in_files
from zckpt.formats.assets import ADAPTER_CONFIG, CONFIG_NAME, copies_of, find_assets, is_adapter, modules_of
from zckpt.formats.consolidated.model import trained_tensors
from zckpt.formats.consolidated.optimizer import optimizer_tree, rest_at_top
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.remainder import remainder
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.safetensors.layout import Entry
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import arguments_of
from zckpt.formats.transformers_trainer.architectures import Architecture, architecture
from zckpt.formats.transformers_trainer.directory import ADAPTER_STEM, STATE_NAME
from zckpt.formats.transformers_trainer.reader import FORMAT
from zckpt.formats.transformers_trainer.readings import DECAYED, UNDECAYED, group_of, shortened
from zckpt.formats.transformers_trainer.states import FILES, random_states, scheduler
from zckpt.state import Checkpoint, ParamGroup, dict_of, number_of, size_of, stated, without
from zckpt.state.names import renamed
from zckpt.storage.files import read_json

OPTIMIZER_NAME = "optimizer.pt"

CALLBACKS = {
    "TrainerControl": {
        "args": dict.fromkeys(
            ("should_epoch_stop", "should_evaluate", "should_log", "should_save", "should_training_stop"), False
        ),
        "attributes": {},
    }
}
"""What the Trainer looks for in its account when it saves the next time (transformers 4.42 and later)."""

EVERY = ("logging_steps", "eval_steps", "save_steps")
"""How often the Trainer does what: of a run that goes on it takes that from its account, not from its arguments."""


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a directory.

    Raises UnsupportedError: the Trainer could not resume from it: there are several models or optimizers, parameters
    without names, groups that are not its own and cannot be made so, or no step is known.
    """
    checkpoint = job.checkpoint
    _check(checkpoint)
    assets = find_assets(checkpoint)
    if ADAPTER_CONFIG in assets:  # beside which PEFT looks for its own names
        checkpoint = renamed(replace(checkpoint), names_in_files(checkpoint))
    model_type = (read_json(assets[CONFIG_NAME]) or {}).get("model_type") if CONFIG_NAME in assets else None
    known = architecture(model_type)
    notes: list[str] = []
    entries = [Entry(name, *one) for name, one in trained_tensors(checkpoint).items()]
    adapter = is_adapter(checkpoint.names, assets)
    if adapter:
        files = [safetensors_layout.lay_out(f"{ADAPTER_STEM}.safetensors", entries)]
    else:
        files = safetensors_layout.lay_out_directory(entries, DEFAULT_MAX_SHARD_NBYTES, folders=modules_of(assets))
    if checkpoint.param_groups:
        checkpoint = as_the_trainer_has_them(checkpoint, known, notes)
        slots = checkpoint.optimizer_slot_names()
        files.append(torch_writer.lay_out(OPTIMIZER_NAME, optimizer_tree(checkpoint, slots)))
        files.append(torch_writer.lay_out("scheduler.pt", scheduler(checkpoint, notes)))
    else:
        notes.append("the source has no optimizer: the Trainer resumes with the weights and the step only")
    files.append(_trainer_state(checkpoint, job.options.train_batch_size, notes))
    states = random_states(checkpoint)
    if not states:
        notes.append("the source has no random state that the Trainer can load: it begins with its arguments' seed")
    own = {name: checkpoint.metadata[key] for key, name in FILES.items() if key in checkpoint.metadata} | states
    files += [torch_writer.lay_out(name, value) for name, value in own.items()]
    rest = remainder(checkpoint)
    carried = {"trainer_state", *(Path(name).stem for name in own)}
    carried |= {"scheduler"} if checkpoint.param_groups else set()
    rest["metadata"] = without(checkpoint.metadata, *carried)
    files.append(torch_writer.lay_out(OWN_NAME, rest))
    files += copies_of(assets)
    if ADAPTER_CONFIG not in assets and adapter:
        notes.append(
            f"the source has no {ADAPTER_CONFIG}, without which the Trainer cannot load an adapter: add the file, "
            "which save_pretrained of the model with the adapter writes"
        )
    elif not assets:
        notes.append("the source has no config.json: give the Trainer the model, or add the file")
    return TargetFiles(files, notes=notes, copied=frozenset(assets), keeps_rest=bool(rest_at_top(checkpoint)))


def _check(checkpoint: Checkpoint) -> None:
    """Raise unless the Trainer has a place for a model and an optimizer like these."""
    if "models" in checkpoint.details or checkpoint.optimizers():
        raise UnsupportedError(
            "holds several models or optimizers, but the Trainer has one of each",
            found=", ".join(map(str, checkpoint.optimizers())) or "several models",
            advice="`--to=zckpt` holds all of them",
        )
    refuse_unnamed(checkpoint, "so that their order in the Trainer's groups is not known")
    if checkpoint.step is None:
        raise UnsupportedError(
            "does not state its step, which the Trainer needs to resume",
            advice="`zckpt consolidate` writes only the model",
        )


def _trainer_state(checkpoint: Checkpoint, batch_size: int | None, notes: list[str]) -> TargetFile:
    known, said = checkpoint.metadata.get("trainer_state"), arguments_of(checkpoint.metadata.get("training_args"))
    known = dict(known) if isinstance(known, Mapping) and "global_step" in known else {}
    if batch_size is not None or not known:
        config = checkpoint.metadata.get("ds_config")
        found: list[int] = [
            size
            for values, key in ((said, "per_device_train_batch_size"), (config, "train_micro_batch_size_per_gpu"))
            if type(size := dict_of(values).get(key)) is int
        ]
        if not batch_size and not found:
            raise UsageError(
                "does not state the batch size, which the Trainer needs to resume",
                expected="--train-batch-size N: samples per device and step",
            )
        known["train_batch_size"] = batch_size or found[0]
    if "global_step" not in known:
        known |= {"global_step": checkpoint.step, "stateful_callbacks": CALLBACKS}
        known |= stated({key: size_of(said, key) for key in EVERY})
        often = "as its arguments say" if EVERY[0] in known else "every 500 steps unless you change the file"
        notes.append(
            f"{STATE_NAME} was generated: epochs are computed from its step, there is no earlier log, and the "
            f"Trainer logs, evaluates and saves {often}"
        )
    text = (json.dumps(known, indent=2, sort_keys=True) + "\n").encode()
    return TargetFile.of(STATE_NAME, text)


Members = list[list[str]]
"""Names by the Trainer's group."""


def as_the_trainer_has_them(checkpoint: Checkpoint, known: Architecture, notes: list[str]) -> Checkpoint:
    """Return a checkpoint with the two param groups that the Trainer has, one of which may be empty.

    Groups that are the Trainer's stay as they are, as do those of a Trainer's directory, also by way of another format
    that says so: a Trainer with others (an optimizer of one's own, LLaMA-Factory's LoRA+, ms-swift, which drops an
    empty one) asks for as many. Others are parted and joined by its rule, where those that come to be in one group have
    the same hyperparameters. `known`: of the model; `notes`: gets what was done. Raises UnsupportedError: the Trainer's
    groups cannot be told, or have no hyperparameters that hold for all in one.
    """
    groups = checkpoint.param_groups
    members = [list(group.parameters) for group in groups]
    if checkpoint.converted_from.get("format", checkpoint.format) == FORMAT and "trainer_state" in checkpoint.metadata:
        _check_order(members, known)
        return checkpoint
    if len(groups) == 1 and not any(group_of(name, known) == UNDECAYED for name in members[0]):
        members.append([])
    if not _are_the_trainers(checkpoint, members, known):
        members = _parted(checkpoint, known)
        count = f"{len(groups)} param groups" if len(groups) > 1 else "the param group"
        notes.append(f"{count} became the Trainer's two: one with weight decay, one with norms and biases")
    _check_order(members, known)
    group_of_name = {name: group for group in groups for name in group.parameters}
    made: list[ParamGroup] = []
    for names in members:
        sources = list({id(group_of_name[name]): group_of_name[name] for name in names}.values())
        first, *others = sources or groups[:1]
        for other in others:
            mine, its = ({**without(one.hyperparameters, "param_names"), **one.state} for one in (first, other))
            unlike = [key for key in mine | its if mine.get(key) != its.get(key)]
            if unlike:
                ours, theirs = (number_of(one.get(unlike[0])) for one in (mine, its))
                raise UnsupportedError(
                    "param groups that are one in the Trainer differ",
                    expected="the same hyperparameters for all parameters with weight decay, and for all others",
                    found=f"{unlike[0]} {ours} and {theirs}",
                )
        made.append(ParamGroup(dict(first.hyperparameters), names, dict(first.state)))
    return checkpoint.regrouped(made)


def _are_the_trainers(checkpoint: Checkpoint, members: Members, known: Architecture) -> bool:
    """Tell whether groups are the Trainer's; one-dimensional tensors of classes that are not known may be in either."""
    return len(members) == 2 and all(
        (group := group_of(name, known)) == at or (group == DECAYED and len(checkpoint.parameters[name].shape) == 1)
        for at, names in enumerate(members)
        for name in names
    )


def _parted(checkpoint: Checkpoint, known: Architecture) -> Members:
    """Return the Trainer's groups of all that an optimizer has."""
    groups = checkpoint.param_groups
    owned = {*checkpoint.grouped}
    order = groups[0].parameters if len(groups) == 1 else [name for name in checkpoint.parameters if name in owned]
    shapes = {name: checkpoint.parameters[name].shape for name in order}
    unsure = [
        name
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 1 and shapes.get(f"{name[:-7]}.bias") == shape
        and not known.siblings and group_of(name, known) == DECAYED
    ]  # fmt: skip
    if unsure:
        raise UnsupportedError(
            "which parameters get weight decay in the Trainer depends on module classes, which are unknown",
            expected="the Trainer's two param groups, or a config.json of a known model_type with the source",
            found=f"{len(groups)} param groups, and {unsure[0][:-7]}, which may be a LayerNorm",
        )
    return [[name for name in order if group_of(name, known) == at] for at in (DECAYED, UNDECAYED)]


def _check_order(members: Members, known: Architecture) -> None:
    """Raise unless a model may have its parameters in the order of these groups."""
    short = [[shortened(name) for name in names] for names in members]
    groups = {name: group for group, names in enumerate(short) for name in names}

    def fits(name: str, group: int, number: int) -> bool:
        return short[group][number : number + 1] == [name]

    with suppress(TooManyOrdersError):
        if groups and not possible(groups, fits, {}, known.order):
            raise UnsupportedError(
                "the optimizer's parameters are in an order that the model cannot have, so the Trainer would confuse "
                "their state",
                expected="the order of model.named_parameters()",
                found=f"{next(chain(*members))} first",
            )
