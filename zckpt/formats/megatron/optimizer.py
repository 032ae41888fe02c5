"""The optimizer's param groups, which `common.pt` has without any parameters: which each has, Megatron's rule says.

common.pt["optimizer"]
    {"param_groups": [...], "state": {"common_step": 4.0}}                                  FP32Optimizer
    {"optimizer": {"param_groups": [...], "state": {"common_step": 4.0}}, "grad_scaler": ...}     16 bits
    {"optimizer": {"param_groups": [{..., "step": 4.0}, ...]}, "param_state_sharding_type": ...}  DistributedOptimizer
    {0: one of these, 1: one of these}                                                      chained: the rest, experts
    [one of these]                                                                          NeMo

In buffers' formats `optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1` has the groups.

The rule: parameters of one axis, and biases, have no weight decay (`wd_mult` 0), experts have groups of their own.
A program may give another. So it is taken only where it leaves one group for each parameter, and said that it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.errors import DamagedFileError
from zckpt.formats.megatron.objects import OPTIMIZER, Common
from zckpt.formats.torch_files.tensors import carried, describe, read_scalars, with_scalars
from zckpt.state import Checkpoint, Parameter, ParamGroup
from zckpt.state.inventory import ANY, CARRIED, IMPLIED, REST, STATE, Rule
from zckpt.torchfile import Tensor

GROUPS, STATES, STEP, COMMON_STEP, SCALER = "param_groups", "state", "step", "common_step", "grad_scaler"
PARAM_STATE = "param_state"

SHARDING = "param_state_sharding_type"
SHOWN = 40

WEIGHT_DECAY, EXPERTS = "wd_mult", "is_expert_parallel"

_EXPERT = re.compile(r"(?:^|.*\.)experts\..*")
_QK_NORM = re.compile(r".*\.[qk]_layernorm\..*")

Steps = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """An optimizer in `common.pt`: its dict and the one around it, and the steps to each."""

    node: Mapping[object, object]
    steps: Steps
    outer: Mapping[object, object]
    outer_steps: Steps


@dataclass(frozen=True, slots=True)
class Group:
    """A param group as it is in `common.pt`, without parameters: hyperparameters, state, and the steps to it."""

    hyperparameters: dict[str, object]
    state: dict[str, object]
    steps: Steps

    @property
    def is_experts(self) -> bool:
        """Whether it is of experts' parameters, that not all data-parallel ranks share."""
        return bool(self.hyperparameters.get(EXPERTS))

    @property
    def decays(self) -> bool:
        """Whether it has any weight decay of its own."""
        return self.hyperparameters.get(WEIGHT_DECAY) != 0


def is_expert(name: str) -> bool:
    """Tell by its name whether a parameter is an expert's."""
    return _EXPERT.fullmatch(name) is not None


def by_rule_decays(parameter: Parameter) -> bool:
    """Tell whether Megatron's default rule has any weight decay for a parameter."""
    return not (len(parameter.shape) == 1 or parameter.name.endswith(".bias"))


def attach(checkpoint: Checkpoint, common: Common, members: Sequence[Sequence[str]] | None = None) -> None:
    """Give a checkpoint its param groups, and what else `common.pt` holds.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters and their slots.
    common : Common
    members : sequence of sequence of str, optional
        The names of each group's parameters, where they are known.

    Raises
    ------
    SourceError
        A step cannot be read.
    """
    every = list(optimizers(common.content.get(OPTIMIZER), (OPTIMIZER,)))
    groups = [group for held in every for group in _groups(held, common)]
    rules = [Rule((*held.steps, STATES, COMMON_STEP), STATE, "the step") for held in every]
    known = _given(checkpoint, groups, members, common) if members is not None else None
    found = known if known is not None else _members(checkpoint, groups, common) if groups else []
    if found is None:
        checkpoint.warnings.append(
            "which parameters each param group has is not in the files, and Megatron's default rule does not tell: the "
            "groups are kept as they are"
        )
    for group, names in zip(groups, found or (), strict=False):
        checkpoint.param_groups.append(ParamGroup(group.hyperparameters, names, group.state))
        rules.append(Rule((*group.steps, ANY, REST), STATE, "hyperparameters"))
    taken = {STATES, OPTIMIZER, *([] if found is None else [GROUPS])}
    for held in every:
        for node, steps in ((held.node, held.steps), (held.outer, held.outer_steps)):
            for key, value in node.items():
                if key == PARAM_STATE and _has_only_steps(value, checkpoint.param_groups, common):
                    rules.append(
                        Rule((*steps, PARAM_STATE, REST), IMPLIED, "the step of the groups, for each parameter")
                    )
                elif key not in taken:
                    _keep(checkpoint, common, (*steps, str(key)), value, rules)
    others = {key: value for key, value in common.content.items() if key != OPTIMIZER}
    checkpoint.metadata |= {key: carried(common.file, value) for key, value in others.items()}
    checkpoint.files.append(describe(common.file, "metadata", rules=rules))
    scale = _loss_scale(every, common)
    checkpoint.loss_scale = checkpoint.loss_scale if scale is None else scale


def optimizers(
    node: object, steps: Steps, outer: tuple[Mapping[object, object], Steps] | None = None
) -> Iterator[Held]:
    """Yield the optimizers of a value: itself, or those of a list or a chain of several."""
    if isinstance(node, list):
        for number, one in enumerate(node):
            yield from optimizers(one, (*steps, str(number)))
    elif isinstance(node, dict) and isinstance(node.get(GROUPS), list):
        yield Held(node, steps, *(outer or ({}, ())))
    elif isinstance(node, dict) and isinstance(node.get(OPTIMIZER), dict):
        yield from optimizers(node[OPTIMIZER], (*steps, OPTIMIZER), (node, steps))
    elif isinstance(node, dict) and node and all(str(key).isdecimal() for key in node):
        for key, one in node.items():
            yield from optimizers(one, (*steps, str(key)))
    elif isinstance(node, dict) and node:
        yield Held({}, (*steps, OPTIMIZER), node, steps)


def _groups(held: Held, common: Common) -> Iterator[Group]:
    states = held.node.get(STATES)
    step = states.get(COMMON_STEP) if isinstance(states, dict) else None
    value: object = read_scalars(common.file.path, [step])[0] if isinstance(step, Tensor) and step.numel == 1 else step
    listed = held.node.get(GROUPS)
    for number, node in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(node, dict):
            raise DamagedFileError("unexpected content", path=common.file.path, expected="a param group as a dict",
                                   found=type(node).__name__)  # fmt: skip
        values = with_scalars(node, common.file.path)
        own = values.pop(STEP, value)
        state = {} if own is None else {STEP: own}
        yield Group(values, state, (*held.steps, GROUPS, str(number)))


def _members(checkpoint: Checkpoint, groups: Sequence[Group], common: Common) -> list[list[str]] | None:
    """Return the names of each group's parameters; None where the rule does not tell."""
    trained = [one for one in checkpoint.parameters.values() if len(one.slots) > 1]
    found: list[list[str]] = [[] for _ in groups]
    qk_norms_decay = common.arguments.get("apply_wd_to_qk_layernorm") is True
    ruled = False
    for one in trained or [*checkpoint.parameters.values()]:
        fitting = [at for at, group in enumerate(groups) if group.is_experts == is_expert(one.name)]
        fitting = fitting or [at for at, group in enumerate(groups) if not group.is_experts]
        if len(fitting) > 1:
            decays = by_rule_decays(one) or (qk_norms_decay and bool(_QK_NORM.fullmatch(one.name)))
            fitting = [at for at in fitting if groups[at].decays == decays]
            ruled = True
        if len(fitting) != 1:
            return None
        found[fitting[0]].append(one.name)
    for at, names in enumerate(found):
        for name in names:
            checkpoint.parameters[name].group = at
    if ruled:
        checkpoint.details["param groups"] = (
            "of which parameters is not in the files: by Megatron's default rule, those of one axis and biases are in "
            "the group without weight decay"
        )
    return found


def _given(
    checkpoint: Checkpoint, groups: Sequence[Group], members: Sequence[Sequence[str]], common: Common
) -> list[list[str]]:
    """Return the names of each group's parameters as they are given."""
    names = [name for its in members for name in its]
    if len(members) != len(groups) or len(set(names)) != len(names) or not set(names) <= set(checkpoint.parameters):
        expected = f"{len(members)} groups, whose parameters the model has"
        raise DamagedFileError(
            "param groups of other parameters", path=common.file.path, expected=expected, found=len(groups)
        )
    for at, its in enumerate(members):
        for name in its:
            checkpoint.parameters[name].group = at
    return [list(its) for its in members]


def _has_only_steps(value: object, groups: Sequence[ParamGroup], common: Common) -> bool:
    """Tell whether what is left of each parameter's state is the step of the groups, as torch's Adam counts it."""
    nodes = list(value.values()) if isinstance(value, dict) else []
    steps = [node[STEP] for node in nodes if isinstance(node, dict) and list(node) == [STEP]]
    tensors = [one for one in steps if isinstance(one, Tensor) and one.numel == 1]
    if not groups or len(tensors) != len(nodes):
        return False
    found = {float(one.value) for one in read_scalars(common.file.path, tensors)}
    return found <= {group.state.get(STEP) for group in groups}


def _keep(checkpoint: Checkpoint, common: Common, steps: Steps, value: object, rules: list[Rule]) -> None:
    """Keep what an optimizer has besides; of a further one under a longer key, unless the value is the same."""
    key = steps[-1]
    if key == SHARDING:
        checkpoint.details["optimizer sharding"] = str(value)[:SHOWN]
        rules.append(Rule(steps, IMPLIED, "how the optimizer's state is cut"))
        return
    kept = checkpoint.optimizer_metadata
    is_same = key in kept and type(value) in (str, int, float, bool) and kept[key] == value
    if key in kept and not is_same:
        key = ".".join(steps[1:])
    kept[key] = carried(common.file, value)
    rules.append(Rule((*steps, REST), CARRIED, key))


def _loss_scale(every: Sequence[Held], common: Common) -> float | None:
    for held in every:
        scaler = held.outer.get(SCALER)
        scale = scaler.get("scale") if isinstance(scaler, dict) else None
        if isinstance(scale, Tensor) and scale.numel == 1:
            return float(read_scalars(common.file.path, [scale])[0].value)
    return None
