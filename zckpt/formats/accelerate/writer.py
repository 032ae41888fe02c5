"""The files of a directory that Accelerate's `load_state` takes.

Masters are written as the models' weights, so that they go on in their precision; there is no other place for them.
Without FSDP, parameters are numbered, by the order of each param group, and `load_state` wants each model in one file.
Under FSDP they have names. DCP wants every value that the optimizer in memory has: what other programs' param groups
lack, and what their steps are not, has torch's default and torch's form.

scheduler.bin            the source's, if it is one; else that of a LambdaLR at the source's step
random_states_R.pkl      Accelerate's own or the Trainer's; else none, and Accelerate goes on with its seed
sampler.bin, scaler.pt, custom_checkpoint_0.pkl ...      only where the source is Accelerate's
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import refuse_unnamed
from zckpt.evidence.order import DCP, other_order
from zckpt.formats.assets import copies_of, find_assets, is_adapter
from zckpt.formats.consolidated.model import model_tree, trained_tensors
from zckpt.formats.consolidated.optimizer import optimizer_tree, rest_at_top
from zckpt.formats.dcp import writer as dcp_writer
from zckpt.formats.dcp.own import own_tree
from zckpt.formats.dcp.write_items import items_of, named_tree
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.fsdp_rank_files.kept import ONE, one_group
from zckpt.formats.remainder import of_modules, remainder, types_of_weights
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import refuse_trees
from zckpt.formats.transformers_trainer.states import random_states_of_accelerate, scheduler
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Parameter, ParamGroup, Scalar, stated, without
from zckpt.state.names import renamed


@immutable
class Parts:
    """What Accelerate prepares."""

    whole: Checkpoint  # all of it, with the param groups in the order of `optimizers`
    models: list[Checkpoint]  # only the tensors count
    optimizers: list[Checkpoint]  # only the param groups count, and the parameters that are in them
    model_of: list[int] = field(default_factory=list)  # each optimizer, where it is of one model


def parts_of(checkpoint: Checkpoint, *, paired: bool) -> Parts:
    """Split a checkpoint into what Accelerate has prepared.

    `paired`: whether each optimizer has to be of one model, as under FSDP, whose optimizers have names. Raises
    UnsupportedError: optimizers of some of the models only, or of several at once.
    """
    refuse_unnamed(checkpoint, "so it is unknown where Accelerate should find whose state")
    models = checkpoint.models()
    if not models:
        if checkpoint.optimizers():
            raise _unpaired(checkpoint, "one model, or which parameters are of which")
        return Parts(checkpoint, [checkpoint], [checkpoint] if checkpoint.param_groups else [])
    names = checkpoint.names
    modules, alone_there = of_modules(checkpoint)
    apart = []  # what is of one model under its own names; param groups only where all of their parameters are
    arranged: list[list[ParamGroup]] = []  # of each model
    for front in (f"{model}." for model in models):
        own = {name: name.removeprefix(front) for name in names if name.startswith(front)}
        its = {name.removeprefix(front): one for name, one in modules.items() if name.startswith(front)}
        alone = replace(
            checkpoint,
            parameters={
                name: _held(checkpoint, one, own) for name, one in checkpoint.parameters.items() if name in own
            },
            buffers={name: one for name, one in checkpoint.buffers.items() if name in own},
            metadata={**without(checkpoint.metadata, *alone_there), **its},
        )
        groups = [one for one in checkpoint.param_groups if one.parameters and own.keys() >= {*one.parameters}]
        apart.append(renamed(alone.regrouped(groups), own))
        arranged.append(groups)
    if not checkpoint.optimizers() and not paired:
        return Parts(checkpoint, apart, [checkpoint] if checkpoint.param_groups else [])
    if sum(map(len, arranged)) != len(checkpoint.param_groups):
        raise _unpaired(checkpoint, "an optimizer for each model")
    if not checkpoint.param_groups:
        return Parts(checkpoint, apart, [])
    if any(len({g.optimizer for g in groups}) != 1 for groups in arranged):
        raise _unpaired(checkpoint, "one optimizer for each model")
    numbers = {} if paired else {f"{OPTIMIZER}_{n}" if n else OPTIMIZER: n for n in range(len(apart))}
    order = sorted(range(len(apart)), key=lambda at: numbers.get(str(arranged[at][0].optimizer), 0))  # else as models
    groups = [group for at in order for group in arranged[at]]
    return Parts(checkpoint.regrouped(groups), apart, [apart[at] for at in order], order)


def _held(checkpoint: Checkpoint, one: Parameter, own: Container[str]) -> Parameter:
    """Return a parameter as a model by itself has it: one that is another model's, too, is its own there."""
    owner = checkpoint.owner(one.name)
    slot = owner.master or owner.weight
    return one if owner is one or owner.name in own or slot is None else Parameter.of(one.name, slot)


def _unpaired(checkpoint: Checkpoint, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "Accelerate pairs models and optimizers by number, and these cannot be paired",
        expected=expected,
        found=f"{listed(checkpoint.models()) or 'one model'}; {listed(checkpoint.optimizers()) or 'one optimizer'}",
        advice="`--to=zckpt` holds all of them",
    )


MODEL, OPTIMIZER, FSDP_MODEL = "model", "optimizer", "pytorch_model_fsdp"
SHARDED, FULL = "sharded", "full"

DEFAULTS: dict[str, object] = {
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "amsgrad": False,
    "decoupled_weight_decay": False,  # AdamW of torch sets its own when it has loaded
}
"""Hyperparameters of torch's optimizers that others do not have, and what they are unless someone sets them."""

STEP = "step"


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a directory.

    Raises UsageError: files to spread over are asked of a form that has one for each model; UnsupportedError:
    Accelerate could not go on from it: parameters without names, several optimizers that it could not pair with models,
    an adapter without its model.
    """
    checkpoint, form = job.checkpoint, job.options.fsdp
    if job.options.world_size is not None and form != SHARDED:
        raise UsageError("--world-size only applies to sharded files", expected=f"--fsdp={SHARDED}")
    refuse_trees(checkpoint, "these files", "convert to zckpt, dcp or universal")
    assets = find_assets(checkpoint)
    if is_adapter(checkpoint.names, assets):
        raise UnsupportedError(
            "is an adapter, but Accelerate loads the whole model",
            advice="`zckpt merge-adapter` makes one model from both",
        )
    notes: list[str] = []
    if job.options.groups == ONE and checkpoint.param_groups:
        if checkpoint.models() or checkpoint.optimizers():
            raise UsageError("--groups=one only applies to a single model", expected="--groups=keep")
        checkpoint, said = one_group(checkpoint)
        notes += said
    names = other_order(checkpoint, DCP)  # which numbers them, and need not be the optimizer's own
    if form is None and names:
        raise UnsupportedError(
            "the optimizer lists its parameters in another order than the model (as FSDP1 does with flat ones), and "
            "without FSDP the order identifies them",
            found=f"{listed(names, most=3)} in a param group",
            advice=f"give --groups=one, or --fsdp={SHARDED}",
        )
    parts = parts_of(checkpoint, paired=form is not None)
    if form == SHARDED:
        files = list(_sharded(parts, job.options.world_size or 1, notes))
    else:
        files = list(_whole(parts, notes, full=form == FULL))
    if not checkpoint.param_groups:
        notes.append("the source has no optimizer: load_state only works if no optimizer was prepared")
    states = state_files(checkpoint, parts.optimizers, notes)
    files += [torch_writer.lay_out(name, value) for name, value in states.items()]
    whole, held = parts.whole, {Path(name).stem for name in states}  # which are read by their own names
    if form == SHARDED:
        own = own_tree(whole, (), without=held)
    else:
        told = stated({"model_of": parts.model_of or None})
        own = {**remainder(whole), **told, "metadata": without(whole.metadata, *held)}
    files.append(torch_writer.lay_out(OWN_NAME, {**own, "dtypes": types_of_weights(whole)}))
    kept = form is None and all(map(rest_at_top, parts.optimizers))
    return TargetFiles([*files, *copies_of(assets)], notes=notes, copied=frozenset(assets), keeps_rest=kept)


def _whole(parts: Parts, notes: list[str], *, full: bool) -> Iterator[TargetFile]:
    """Yield a file for each model and each optimizer: torch files by names for FSDP, else numbered state."""
    for number, model in enumerate(parts.models):
        after = f"_{number}" if number else ""
        if full:
            yield torch_writer.lay_out(f"{FSDP_MODEL}{after}.bin", model_tree(model, trained_tensors(model)))
            continue
        tied = model.aliases
        entries = [safetensors_layout.Entry(name, *one) for name, one in trained_tensors(model, tied="drop").items()]
        safetensors_layout.check_names([*(one.name for one in entries), *tied])
        yield safetensors_layout.lay_out(f"{MODEL}{after}.safetensors", entries, tied)
    for number, optimizer in enumerate(parts.optimizers):
        tree = _by_name(optimizer, notes) if full else optimizer_tree(optimizer, optimizer.optimizer_slot_names())
        yield torch_writer.lay_out(f"{OPTIMIZER}_{number}.bin" if number else f"{OPTIMIZER}.bin", tree)


def _sharded(parts: Parts, world_size: int, notes: list[str]) -> Iterator[TargetFile]:
    trees: dict[str, dict[str, object]] = {
        f"{FSDP_MODEL}_{number}": {"model": model_tree(model, trained_tensors(model))}
        for number, model in enumerate(parts.models)
    }
    for number, optimizer in enumerate(parts.optimizers):
        trees[f"{OPTIMIZER}_{number}"] = {"optimizer": _by_name(optimizer, notes)}
    for folder, tree in trees.items():
        for file in dcp_writer.lay_out_items(items_of(tree), world_size):
            yield replace(file, name=f"{folder}/{file.name}")


def _by_name(optimizer: Checkpoint, notes: list[str]) -> dict[str, object]:
    """Return an optimizer's state dict with names, in which all is that torch's own optimizers have."""
    tree: dict[str, Any] = named_tree(optimizer, optimizer.optimizer_slot_names())
    for values in tree["state"].values():
        step = values.get(STEP)
        if type(step) in (int, float):
            values[STEP] = torch_writer.value_node(Scalar(float(step), "float32"))
    groups = tree["param_groups"]
    for group in groups:
        for key, value in DEFAULTS.items():
            group.setdefault(key, value)
    if all("initial_lr" not in group and "lr" in group for group in groups):
        for group in groups:  # the rate that a scheduler began with, which torch's keep there
            group["initial_lr"] = group["lr"]
        said = "initial_lr, which the source does not have, is the rate of now: schedulers do not look at it again"
        notes += [] if said in notes else [said]
    return tree


SCHEDULER = "scheduler"

_CARRIED = {
    r"(?:sampler|dl_state_dict)(?:_[0-9]+)?|scheduler_[0-9]+": ".bin",
    r"custom_checkpoint_[0-9]+": ".pkl",
    r"scaler": ".pt",
}
"""Keys under which Accelerate's files are carried, and what the files' names end with."""


def state_files(checkpoint: Checkpoint, optimizers: Sequence[Checkpoint], notes: list[str]) -> dict[str, object]:
    """Return the content of all these files, by name.

    `optimizers`: with the param groups of each; `notes`: gets what was written by rule, and what is missing.
    """
    found: dict[str, object] = {}
    for number, one in enumerate(optimizers):
        key, metadata = f"{SCHEDULER}_{number}" if number else SCHEDULER, one.metadata
        if key in metadata:
            found[f"{key}.bin"] = metadata[key]
            continue
        own = {"lr_scheduler": metadata["lr_scheduler"]} if key == SCHEDULER and "lr_scheduler" in metadata else {}
        before = len(notes)
        found[f"{key}.bin"] = scheduler(replace(one, metadata=own), notes, name=f"{key}.bin")
        if len(notes) > before:
            notes[-1] += "; with several processes, Accelerate steps it once per process, unless told otherwise"
    for key, value in checkpoint.metadata.items():
        suffix = next((suffix for pattern, suffix in _CARRIED.items() if re.fullmatch(pattern, key)), None)
        if suffix is not None:
            found.setdefault(f"{key}{suffix}", value)
    states = random_states_of_accelerate(checkpoint)
    if not states:
        notes.append("the source has no random state that Accelerate can load: the program's seed applies")
    return found | states
