"""What the optimizer of one rank has of its parameters, in the legacy files; all by the names of the rank's own model.

model_optim_rng.pt["optimizer"]
    {"state": {0: {...}}, "param_groups": [{"params": [0, 1], ...}, ...]}                            FP32Optimizer
    {"optimizer": the same, "fp32_from_fp16_params": [[master, ...], ...], "grad_scaler": {...}}      16 bits
    {"optimizer": {"param_groups": [...]}}                                                           distributed
    [one of these, one of these]                                                                     the rest, experts

Parameters have numbers: over all groups, within each in the model's order. The distributed optimizer has them in flat
buffers without names, in `distrib_optim.pt`:

{"buckets_coalesced": True, 0: {(bfloat16, float32): {"param": flat, "exp_avg": flat, ..., "numel_unpadded": n}}, ...}
[the same, or None; the same]                                                                        with experts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.compare.weights import rounds_to
from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.evidence import Evidence
from zckpt.formats.megatron.buckets import Line, Member, between, lay_out, padding_of
from zckpt.formats.megatron.proof import unproven
from zckpt.formats.megatron.ranks import EXPERT
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, joined, optimizer_rules, parse
from zckpt.formats.torch_files.tensors import as_mapping, slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.state.inventory import ANY, IMPLIED, REST, Rule
from zckpt.state.views import reshape
from zckpt.torchfile import DType, Tensor, TorchFile

OPTIMIZER, GROUPS, STATES, MASTERS = "optimizer", "param_groups", "state", "fp32_from_fp16_params"
EXPERTS, ATTRIBUTES = "is_expert_parallel", "attributes"

PARAM, UNPADDED, JOINED = "param", "numel_unpadded", "buckets_coalesced"

Steps = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the optimizers of a rank: its torch state dict with the steps to it, and the dict around that, if any."""

    node: Mapping[object, object]
    steps: Steps
    outer: Mapping[object, object] | None
    outer_steps: Steps

    @property
    def is_plain(self) -> bool:
        """Whether its state is here, by numbers."""
        return isinstance(self.node.get(STATES), dict)


def parts_of(node: object, steps: Steps = (OPTIMIZER,)) -> list[Part]:
    """Return the optimizers that a rank's file holds.

    Raises UnsupportedError: it is no optimizer of Megatron-Core's.
    """
    if isinstance(node, list):
        return [part for at, one in enumerate(node) for part in parts_of(one, (*steps, str(at)))]
    if isinstance(node, dict) and isinstance(node.get(GROUPS), list):
        return [Part(node, steps, None, ())]
    inner = node.get(OPTIMIZER) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(inner, dict) and isinstance(inner.get(GROUPS), list):
        return [Part(inner, (*steps, OPTIMIZER), node, steps)]
    raise UnsupportedError("holds an optimizer of a kind that is not known",
                           expected="one with param_groups, or several")  # fmt: skip


def attach_plain(checkpoint: Checkpoint, parts: Sequence[Part], path: str) -> list[Rule]:
    """Give a rank's parameters what its optimizers have of them; return what the inventory has to know.

    `checkpoint`: of the rank's model alone; `parts`: each is plain. Raises UnsupportedError: which numbers are which
    parameters is not certain.
    """
    states, loose = [], []
    for part in parts:
        state = parse(part.node, path)
        masters = part.outer.get(MASTERS) if part.outer is not None else None
        states.append(state)
        loose.append(_masters(masters, state))
    several = [(None, "", OptimizerState(s.state, s.groups, m)) for s, m in zip(states, loose, strict=True)]
    whole = joined(several)
    certain = _names(checkpoint, whole)
    unknown = [number for number in whole.every_number if number not in certain]
    if unknown:
        raise UnsupportedError(
            f"which parameters the optimizer's numbers {listed(list(map(str, unknown)))} are is not certain",
            expected="groups in the model's order, of shapes that tell",
            advice="write it as torch_dist with the program that wrote it",
        )
    attach(checkpoint, whole, path, certain=certain)
    cut = "how tensor parallelism cuts a parameter"
    rules = [Rule((*part.outer_steps, MASTERS, ANY, ANY, ATTRIBUTES, REST), IMPLIED, cut) for part in parts]
    return [*rules, *(rule for part in parts for rule in optimizer_rules(*part.steps))]


def partitions(checkpoint: Checkpoint, parts: Sequence[Part]) -> dict[str, int | None]:
    """Return along which dimension each parameter is cut, as far as its master says so; None: it is not.

    `checkpoint`: of the rank, with its masters.
    """
    by_offset: dict[int, int | None] = {}
    for part in parts:
        lists = (part.outer or {}).get(MASTERS)
        for tensor in (one for group in (lists if isinstance(lists, list) else []) for one in group):
            about = tensor.attributes or {}
            if about.get("tensor_model_parallel") is True and type(about.get("partition_dim")) is int:
                by_offset[tensor.offset] = about["partition_dim"]
    found = {}
    for name, parameter in checkpoint.parameters.items():
        master = parameter.slots.get(MASTER)
        if master is not None and master.spans and master.spans[0].offset in by_offset:
            found[name] = by_offset[master.spans[0].offset]
    return found


def _masters(node: object, state: OptimizerState) -> dict[int, Tensor]:
    """Return masters by number: each group has one for each of its parameters, those of 32 bits left out."""
    if node is None:
        return {}
    if not isinstance(node, list) or len(node) != len(state.groups):
        raise DamagedFileError("masters and param groups disagree", expected=f"{len(state.groups)} lists")
    found: dict[int, Tensor] = {}
    for numbers, masters in zip(state.numbers, node, strict=True):
        own = masters if isinstance(masters, list) else []
        if len(own) != len(numbers) or not all(isinstance(one, Tensor) for one in own):
            raise UnsupportedError("has masters of some parameters of a group only",
                                   expected=f"{len(numbers)} tensors", found=len(own))  # fmt: skip
        found |= {number: one for number, one in zip(numbers, own, strict=True) if isinstance(one, Tensor)}
    return found


def _names(checkpoint: Checkpoint, state: OptimizerState) -> dict[int, str]:
    """Return the names that are certain by shapes; where those leave a choice, by what masters round to, too."""
    kinds = {number: group.get(EXPERTS) for group in state.groups for number in map(int, group["params"])}
    has_kinds = True in kinds.values()

    def is_of_kind(number: int, name: str) -> bool:
        return not has_kinds or kinds[number] == (EXPERT.fullmatch(name) is not None)

    def rounds(number: int, name: str) -> bool:
        master, weight = state.masters.get(number), checkpoint.parameters[name].slots[WEIGHT]
        return master is None or rounds_to(slot_of(MASTER, master, checkpoint.source), weight)

    said = Evidence.of(
        checkpoint, state.numbers, {number: state.shape(number) for number in kinds}, rules=(is_of_kind,)
    )
    found = said.certain(sorted_too=False)
    if len(found) < len(kinds) and state.masters:
        found = replace(said, rules=(is_of_kind, rounds)).certain(sorted_too=False)
    return found


def attach_distributed(
    checkpoint: Checkpoint,
    chunks: Sequence[Sequence[str]],
    file: TorchFile,
    shared: Sequence[str],
    bucket_numels: Sequence[int | None],
) -> list[Rule]:
    """Give a rank's parameters what `distrib_optim.pt` has of them, and prove it.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of the rank's model alone.
    chunks : sequence of sequence of str
        Names of each chunk's parameters, in the model's order.
    file : TorchFile
    shared : sequence of str
        Names of embeddings that two stages may share.
    bucket_numels : sequence of int or None, elements
        At which sizes buckets may have ended.

    Raises
    ------
    UnsupportedError
        An older form, or what lies where is not proven.
    """
    rules = []
    root = file.root if isinstance(file.root, list) else [file.root]
    apart = len(root) > 1
    for at, node in enumerate(root):
        if node is None:
            continue
        steps = (str(at),) if isinstance(file.root, list) else ()
        own = [
            [name for name in names if not apart or (at == len(root) - 1) == bool(EXPERT.fullmatch(name))]
            for names in chunks
        ]
        with about(file.path):
            for lines, names in list(_buffers(checkpoint, own, as_mapping(node, file.path), file.path)):
                members = [Member(name, checkpoint.parameters[name].numel, name in shared) for name in names]
                _attach_buffer(checkpoint, lines, members, bucket_numels)
        rules += [
            Rule((*steps, JOINED), IMPLIED, "that buckets are one tensor"),
            Rule((*steps, ANY, ANY, UNPADDED), IMPLIED, "how many elements a buffer has"),
            Rule((*steps, ANY, ANY, ANY), IMPLIED, "the types of a buffer"),
        ]
    return rules


def _buffers(
    checkpoint: Checkpoint, chunks: Sequence[Sequence[str]], node: Mapping[object, object], path: str
) -> Iterator[tuple[dict[str, Line], list[str]]]:
    """Yield the slots of each buffer of a file, and its parameters: of each chunk in turn, for each type one."""
    if node.get(JOINED) is not True:
        raise UnsupportedError(
            "holds the distributed optimizer's state in an older form",
            expected="buckets_coalesced, as Megatron-Core writes it since 0.6",
            advice="load and save it with a newer version of the program that wrote it",
        )
    groups: list[tuple[str, list[str]]] = []
    for names in chunks:
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(checkpoint.parameters[name].dtype, []).append(name)
        groups += kinds.items()
    by_types = [as_mapping(by_type, path) for number, by_type in node.items() if type(number) is int]
    buffers = [(key, value) for by_type in by_types for key, value in by_type.items()]
    types = [key[0].name if isinstance(key, tuple) and key and isinstance(key[0], DType) else "" for key, _ in buffers]
    if types != [kind for kind, _ in groups]:
        raise LayoutError("the distributed optimizer's buffers are not those of the model",
                          expected=f"buffers of {listed([kind for kind, _ in groups])}",
                          found=listed([kind or "?" for kind in types]))  # fmt: skip
    for (_, value), (_, names) in zip(buffers, groups, strict=True):
        tensors = {str(key): one for key, one in as_mapping(value, path).items() if isinstance(one, Tensor)}
        named = {key: MASTER if key == PARAM else key for key in tensors}
        yield {key: Line(slot_of(named[key], one, path)) for key, one in tensors.items()}, names


def _attach_buffer(
    checkpoint: Checkpoint, lines: Mapping[str, Line], members: Sequence[Member], bucket_numels: Sequence[int | None]
) -> None:
    shapes = {line.slot.shape for line in lines.values()}
    if PARAM not in lines or len(shapes) > 1 or len(lines[PARAM].slot.shape) != 1:
        raise DamagedFileError("an unreadable buffer of the distributed optimizer",
                               expected="flat tensors of one size, `param` among them",
                               found=listed(sorted(map(str, shapes))))  # fmt: skip
    numel = lines[PARAM].slot.numel
    whole = [replace(member, alone=False) for member in members]
    both = [members] if whole == members else [members, whole]
    layouts = [lay_out(its, size) for its in both for size in dict.fromkeys(bucket_numels)]
    fitting = [one for one in layouts if one.numel == numel]
    if not fitting:
        raise LayoutError("the rank's parameters do not fill its distributed optimizer's buffer",
                          expected=f"{layouts[0].numel} elements", found=numel,
                          advice="frozen parameters and buckets of unknown size leave the order unproven; "
                                 "write it as torch_dist, fully_reshardable, with its own program")  # fmt: skip
    wrong = ""
    for layout in fitting:
        places = [(checkpoint.parameters[name], start) for name, start in layout.starts().items()]
        slots = {
            key: {one.name: reshape(line.part(start, one.numel), one.shape) for one, start in places}
            for key, line in lines.items()
        }
        found = unproven(slots[PARAM], {one.name: one.slots[WEIGHT] for one, _ in places})
        if found is None:
            for one, _ in places:
                one.slots.update({its[one.name].name: its[one.name] for its in slots.values()})
            gaps = between([(start, one.numel) for one, start in places], numel)
            checkpoint.padding_spans.append([span for line in lines.values() for span in padding_of(line, gaps)])
            return
        wrong = wrong or found
    raise UnsupportedError(
        f"which parameter is where in the distributed optimizer's buffer is not proven: {wrong}",
        expected="masters that round to the weights beside them, each element",
        advice="the files may be of two steps; if they are not, write it as torch_dist, fully_reshardable, with the "
        "program that wrote it",
    )
