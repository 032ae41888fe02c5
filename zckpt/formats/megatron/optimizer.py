"""The optimizer's param groups, which `common.pt` has without any parameters: which each has, Megatron's rule says.

common.pt["optimizer"]
    {"param_groups": [...], "state": {"common_step": 4.0}}                                  FP32Optimizer
    {"optimizer": {"param_groups": [...], "state": {"common_step": 4.0}}, "grad_scaler": ...}     16 bits
    {"optimizer": {"param_groups": [{..., "step": 4.0}, ...]}, "param_state_sharding_type": ...}  DistributedOptimizer
    {0: one of these, 1: one of these}                                                      chained: the rest, experts
    [one of these]                                                                          NeMo

In buffers' formats `optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1` has the groups.

The rule: parameters of one axis, and biases, have no weight decay (`wd_mult` 0), experts have groups of their own, and
so have the words' embedding and the output layer where their learning rate is decoupled; Muon's groups have no `betas`.
A program may give another. So it is taken only where it leaves one group for each parameter, and said that it was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.formats.megatron.names import is_expert
from zckpt.formats.megatron.objects import OPTIMIZER, Common
from zckpt.formats.torch_files.tensors import as_mapping, carried, read_scalars, with_scalars
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Parameter, ParamGroup, are_distinct, dict_of, differ, list_of, number_of, without
from zckpt.state.inventory import ANY, CARRIED, IMPLIED, REST, STATE, Rule
from zckpt.torchfile import Tensor

GROUPS, STATES, STEP, COMMON_STEP, SCALER = "param_groups", "state", "step", "common_step", "grad_scaler"
PARAM_STATE, MASTERS = "param_state", "fp32_from_fp16_params"

SHARDING = "param_state_sharding_type"
SHOWN = 40

WEIGHT_DECAY, EXPERTS, DECOUPLED = "wd_mult", "is_expert_parallel", "is_decoupled_lr"

HYPERPARAMETERS = "hyperparameters"
"""What the inventory says of values in param groups."""

_WORDS = ("word_embeddings.weight", "output_layer.weight")
"""Parameters whose learning rate may be decoupled from the others'."""

_QK_NORM = re.compile(r".*\.[qk]_layernorm\..*")

Steps = tuple[str, ...]


@immutable
class Held:
    """An optimizer in a file: its dict and the one around it, and the steps to each."""

    node: Mapping[object, object]
    steps: Steps
    outer: Mapping[object, object]
    outer_steps: Steps


def factor(values: Mapping[str, object], key: str) -> object:
    """Return what a group has under a key, or as NeMo calls it."""
    return values.get(key, values.get(f"pre_{key}"))


def by_rule_decays(parameter: Parameter) -> bool:
    """Tell whether Megatron's default rule has any weight decay for a parameter."""
    return not (len(parameter.shape) == 1 or parameter.name.endswith(".bias"))


def attach(checkpoint: Checkpoint, common: Common, members: Sequence[Sequence[str]] | None = None) -> list[Rule]:
    """Give a checkpoint its param groups, and what else `common.pt` has of optimizers; return the inventory's rules.

    `checkpoint`: has its parameters and their slots; `members`: the names of each group's parameters, where they are
    known. Raises SourceError: a step cannot be read.
    """
    every = list(optimizers(common.content.get(OPTIMIZER), (OPTIMIZER,)))
    rules = [Rule((*held.steps, STATES, COMMON_STEP), STATE, "the step") for held in every]
    groups: list[ParamGroup] = []  # as yet without parameters
    path = common.file.path
    for held in every:
        step = dict_of(held.node.get(STATES)).get(COMMON_STEP)
        value: object = read_scalars(path, [step])[0] if isinstance(step, Tensor) and step.numel == 1 else step
        for node in list_of(held.node.get(GROUPS)):
            values = with_scalars(as_mapping(node, path, "a param group as a dict"), path)
            own = values.pop(STEP, value)
            groups.append(ParamGroup(values, [], {} if own is None else {STEP: own}))
    found = _by_rule(checkpoint, groups, common) if members is None else members
    if found is None:
        checkpoint.warnings.append(
            "neither the files nor Megatron's default rule tell which parameters each param group has: the groups "
            "are kept unchanged"
        )
        for file in checkpoint.files:  # those beside flat buffers
            file.rules = tuple(
                replace(one, fate=CARRIED, about=GROUPS) if (one.fate, one.about) == (STATE, HYPERPARAMETERS) else one
                for one in file.rules
            )
    else:
        names = [name for its in found for name in its]
        if len(found) != len(groups) or not are_distinct(names) or not set(names) <= set(checkpoint.parameters):
            expected = f"{len(found)} groups, whose parameters the model has"
            raise DamagedFileError(
                "param groups with other parameters", path=path, expected=expected, found=len(groups)
            )
        for at, (group, its) in enumerate(zip(groups, found, strict=True)):
            group.parameters = list(its)
            for name in its:
                checkpoint.parameters[name].group = at
        checkpoint.param_groups += groups
        rules += [Rule((*held.steps, GROUPS, ANY, ANY, REST), STATE, HYPERPARAMETERS) for held in every]
    scales = (loss_scale_of(held.outer.get(SCALER), path) for held in every)
    checkpoint.loss_scale = next((one for one in scales if one is not None), checkpoint.loss_scale)
    return rules + keep_rest(checkpoint, common, every, () if found is None else (GROUPS,))


def loss_scale_of(scaler: object, path: str) -> float | None:
    """Return the scale that a loss scaler of a file has; None where it has none."""
    scale = dict_of(scaler).get("scale")
    return float(read_scalars(path, [scale])[0].value) if isinstance(scale, Tensor) and scale.numel == 1 else None


def keep_common(checkpoint: Checkpoint, common: Common) -> None:
    """Keep what is there beside optimizers."""
    others = without(common.content, OPTIMIZER)
    checkpoint.metadata |= {key: carried(common.file, value) for key, value in others.items()}


def optimizers(
    node: object, steps: Steps, outer: tuple[Mapping[object, object], Steps] | None = None
) -> Iterator[Held]:
    """Yield the optimizers of a value: itself, or those of a list or a chain of several."""
    own = dict(enumerate(node)) if isinstance(node, list) else dict_of(node)
    if isinstance(own.get(GROUPS), list):
        yield Held(own, steps, *(outer or ({}, ())))
    elif isinstance(own.get(OPTIMIZER), dict):
        yield from optimizers(own[OPTIMIZER], (*steps, OPTIMIZER), (own, steps))
    elif own and all(str(key).isdecimal() for key in own):
        for key, one in own.items():
            yield from optimizers(one, (*steps, str(key)))
    elif own:
        yield Held({}, (*steps, OPTIMIZER), own, steps)


def _by_rule(checkpoint: Checkpoint, groups: Sequence[ParamGroup], common: Common) -> list[list[str]] | None:
    """Return the names of each group's parameters; None where the rule does not tell."""
    if not groups:
        return []
    trained = [one for one in checkpoint.parameters.values() if len(one.slots) > 1]
    found: list[list[str]] = [[] for _ in groups]
    every = [group.hyperparameters for group in groups]
    of_experts = {at for at, its in enumerate(every) if factor(its, EXPERTS)}
    decaying = {at for at, its in enumerate(every) if factor(its, WEIGHT_DECAY) != 0}
    rate = common.arguments.get("decoupled_lr", ())  # since 0.16 the groups have it, and are not marked
    decoupled = {
        at for at, its in enumerate(every) if factor(its, DECOUPLED) or number_of(its.get("max_lr", "")) == rate
    }
    of_adam = {at for at, its in enumerate(every) if "betas" in its}
    others = set(range(len(groups))) - of_experts
    qk_norms_decay = common.arguments.get("apply_wd_to_qk_layernorm") is True
    ruled = False
    for one in trained or [*checkpoint.parameters.values()]:
        fitting = (of_experts if is_expert(one.name) else others) or others
        for which, its in ((of_adam, "exp_avg_sq" in one.slots), (decoupled, one.name.endswith(_WORDS))):
            fitting = (fitting & which if its else fitting - which) or fitting
        if len(fitting) > 1:
            decays = by_rule_decays(one) or (qk_norms_decay and bool(_QK_NORM.fullmatch(one.name)))
            fitting = fitting & decaying if decays else fitting - decaying
            ruled = True
        if not fitting or differ([every[at] for at in fitting]):  # chunks of a model may have alike ones each
            return None
        found[min(fitting)].append(one.name)
    if ruled:
        checkpoint.details["param groups"] = (
            "the files do not list its parameters: by Megatron's default rule, those of one axis and biases are in "
            "the group without weight decay"
        )
    return found


def keep_rest(checkpoint: Checkpoint, common: Common, every: Sequence[Held], taken: Collection[str]) -> list[Rule]:
    """Keep what optimizers have besides: of a further one under a longer key, unless the value is the same.

    `taken`: keys of what has been read. Returns the inventory's rules.
    """
    rules, kept = [], checkpoint.optimizer_metadata
    for held in every:
        for name, value, steps in [
            (str(key), value, (*front, str(key)))
            for node, front in ((held.node, held.steps), (held.outer, held.outer_steps))
            for key, value in node.items()
            if key not in (STATES, OPTIMIZER, *taken)
        ]:
            if name == PARAM_STATE and _has_only_steps(value, checkpoint.param_groups, common):
                rules.append(Rule((*steps, REST), IMPLIED, "the step of the groups, for each parameter"))
            elif name == SHARDING:
                checkpoint.details["optimizer sharding"] = str(value)[:SHOWN]
                rules.append(Rule(steps, IMPLIED, "how the optimizer's state is cut"))
            else:
                is_same = type(value) in (str, int, float, bool) and kept.get(name) == value
                key = name if name not in kept or is_same else ".".join(steps[1:])
                kept[key] = carried(common.file, value)
                rules.append(Rule((*steps, REST), CARRIED, key))
    return rules


def _has_only_steps(value: object, groups: Sequence[ParamGroup], common: Common) -> bool:
    """Tell whether what is left of each parameter's state is the step of the groups, as torch's Adam counts it."""
    nodes = list(dict_of(value).values())
    steps = [node[STEP] for node in map(dict_of, nodes) if list(node) == [STEP]]
    tensors = [one for one in steps if isinstance(one, Tensor) and one.numel == 1]
    if not groups or len(tensors) != len(nodes):
        return False
    found = {float(one.value) for one in read_scalars(common.file.path, tensors)}
    return found <= {group.state.get(STEP) for group in groups}
