"""What the optimizer of one rank has of its parameters, in the legacy files; all by the names of the rank's own model.

model_optim_rng.pt["optimizer"]
    {"state": {0: {...}}, "param_groups": [{"params": [0, 1], ...}, ...]}                            FP32Optimizer
    {"optimizer": the same, "fp32_from_fp16_params": [[master, ...], ...], "grad_scaler": {...}}      16 bits
    {"optimizer": {"param_groups": [...]}}                                                           distributed
    [one of these, one of these]                                                                     the rest, experts

Parameters have numbers: over all groups, within each in the model's order. The distributed optimizer has them in flat
buffers without names, in `distrib_optim.pt`: what `buckets.gathered` reads, or with experts [that, or None; that].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.compare.weights import rounds_to
from zckpt.errors import LayoutError, UnsupportedError, about, listed
from zckpt.evidence import Evidence, in_order
from zckpt.formats.megatron.buckets import Buffer, Member, gathered, gathered_rules, lay_out, unproven
from zckpt.formats.megatron.names import is_expert
from zckpt.formats.megatron.optimizer import EXPERTS, MASTERS, Held
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.optimizer import OptimizerState, joined, masters_of, optimizer_rules, parse
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, by_key, dict_of
from zckpt.state.inventory import ANY, IMPLIED, REST, Rule
from zckpt.torchfile import TorchFile

GRADIENTS = "gradients"
"""Under which the details have their types by the weights', where they are not float32."""


def attach_plain(checkpoint: Checkpoint, every: Sequence[Held], path: str) -> tuple[list[Rule], dict[str, int]]:
    """Give a rank's parameters what its optimizers have of them, by their numbers.

    Returns what the inventory has to know, and along which dimension masters say that a parameter is cut.

    Raises UnsupportedError: which numbers are which parameters is not certain.
    """
    several = []
    for one in every:
        state = parse(one.node, path, masters_of(one.outer, one.node))
        if one.outer.get(MASTERS) is not None and len(state.masters) < len(state.every_number):
            raise UnsupportedError("does not have a master for each parameter of each group",
                                   expected=f"{len(state.groups)} lists of tensors")  # fmt: skip
        several.append((None, "", state))
    whole = joined(several)
    certain = _names(checkpoint, whole)
    unknown = [number for number in whole.every_number if number not in certain]
    if unknown:
        raise UnsupportedError(
            f"it is uncertain which parameters the optimizer's numbers {listed(unknown)} stand for",
            expected="groups in the model's order, with unambiguous shapes",
            advice="save it as torch_dist with the program that wrote it",
        )
    attach(checkpoint, whole, path, certain=certain)
    said: dict[str, int] = {}
    for number, master in whole.masters.items():
        its = master.attributes or {}
        dimension = its.get("partition_dim")
        if its.get("tensor_model_parallel") is True and type(dimension) is int:
            said[certain[number]] = dimension
    cut = "how tensor parallelism cuts a parameter"
    rules = [Rule((*one.outer_steps, MASTERS, ANY, ANY, "attributes", REST), IMPLIED, cut) for one in every]
    return [*rules, *(rule for one in every for rule in optimizer_rules(*one.steps))], said


def _names(checkpoint: Checkpoint, state: OptimizerState) -> dict[int, str]:
    """Return the names that are certain by shapes; where those leave a choice, by what masters round to, too."""
    kinds = {number: group.get(EXPERTS) for group in state.groups for number in map(int, group["params"])}
    has_kinds = True in kinds.values()

    def is_of_kind(number: int, name: str) -> bool:
        return not has_kinds or kinds[number] == is_expert(name)

    def rounds(number: int, name: str) -> bool:
        master, weight = state.masters.get(number), checkpoint.parameters[name].slots[WEIGHT]
        return master is None or rounds_to(slot_of(MASTER, master, checkpoint.source), weight)

    said = Evidence.of(
        checkpoint, state.numbers, {number: state.shape(number) for number in kinds}, rules=(is_of_kind,)
    )
    found = said.certain(in_order)
    if len(found) < len(kinds) and state.masters:
        found = replace(said, rules=(is_of_kind, rounds)).certain(in_order)
    return found


def attach_distributed(
    checkpoint: Checkpoint,
    chunks: Sequence[Sequence[str]],
    file: TorchFile,
    shared: Sequence[str],
    bucket_numels: Sequence[int | None],
) -> list[Rule]:
    """Give a rank's parameters what `distrib_optim.pt` has of them, and prove it.

    `checkpoint`: of the rank's model alone; `chunks`: names of each chunk's parameters, in the model's order; `shared`:
    names of embeddings that two stages may share; `bucket_numels` (elements): at which sizes buckets may have ended.
    Raises UnsupportedError: an older form, or what lies where is not proven.
    """
    rules: list[Rule] = []
    several = file.root if isinstance(file.root, list) else [file.root]
    with about(file.path):
        for at, node in enumerate(several):
            if node is None:
                continue
            groups: list[tuple[str, list[str]]] = []  # of each chunk in turn, for each type a buffer
            for names in chunks:
                own = (n for n in names if len(several) == 1 or (at == len(several) - 1) == is_expert(n))
                groups += by_key((checkpoint.parameters[name].dtype, name) for name in own).items()
            buffers = gathered(node, file.path)
            if [one.dtype for one in buffers] != [kind for kind, _ in groups]:
                raise LayoutError("the distributed optimizer's buffers do not match the model",
                                  expected=f"buffers for {listed([kind for kind, _ in groups])}",
                                  found=listed([one.dtype or "?" for one in buffers]))  # fmt: skip
            for buffer, (_, names) in zip(buffers, groups, strict=True):
                members = [Member(name, checkpoint.parameters[name].numel, name in shared) for name in names]
                _attach_buffer(checkpoint, buffer, members, bucket_numels)
                if buffer.gradients not in ("", "float32"):
                    checkpoint.details[GRADIENTS] = {
                        **dict_of(checkpoint.details.get(GRADIENTS)),
                        buffer.dtype: buffer.gradients,
                    }
            rules += gathered_rules(*([str(at)] if several is file.root else []))
    return rules


def _attach_buffer(
    checkpoint: Checkpoint, buffer: Buffer, members: Sequence[Member], bucket_numels: Sequence[int | None]
) -> None:
    every = checkpoint.parameters
    weights = {one.name: every[one.name].slots[WEIGHT] for one in members}
    wrong = ""
    for layout in buffer.layouts(members, bucket_numels):
        starts = layout.starts()
        slots = {
            key: {name: line.part(start, every[name].shape) for name, start in starts.items()}
            for key, line in buffer.slots.items()
        }
        found = unproven(slots[MASTER], weights)
        if found is None:
            for name in starts:
                every[name].slots.update({key: its[name] for key, its in slots.items()})
            checkpoint.padding_spans.append(
                list(buffer.padding((start, every[name].numel) for name, start in starts.items()))
            )
            return
        wrong = wrong or found
    if not wrong:
        raise LayoutError("the rank's parameters do not fill its distributed-optimizer buffer",
                          expected=f"{lay_out(members, bucket_numels[0]).numel} elements", found=buffer.numel,
                          advice="with frozen parameters or buckets of unknown size the order cannot be proven; "
                              "save it as torch_dist, fully_reshardable, with its own program")  # fmt: skip
    raise UnsupportedError(
        f"the order of parameters in the distributed optimizer's buffer is not proven: {wrong}",
        expected="masters that round to their weights, each element",
        advice="the files may be from two steps; if not, save it as torch_dist, fully_reshardable, with its own "
        "program",
    )
