"""A checkpoint of any size as an adapter would describe it, without files: a flat layout cut by partition.py."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from zckpt.state import Checkpoint, Extent, Padding, Parameter, ParamGroup, Slot, SourceFile, Span, Topology
from zckpt.state.partition import flat_padding, flat_partition_numel, flat_shares, flat_starts, shard_share

HOSTILE = [
    '</script><script>alert("name")</script>.weight',
    "<img src=x onerror=alert(1)>.weight",
    "<!--<script>.weight",
    "quote\"'`&amp;.weight",
    "new\nline\u2028.\ud800.weight",
    "__proto__.constructor",
    "\u202egnirts.weight",
]
SLOTS = ("master", "exp_avg", "exp_avg_sq")


def large(*, layers: int, per_layer: int, ranks: int) -> Checkpoint:
    """A ZeRO-2 checkpoint of layers * per_layer parameters, sizes as uneven as a mixture of experts has them."""
    shapes = {}
    for layer in range(layers):
        for i in range(per_layer):
            block, leaf = divmod(i, 4)
            name = (
                f"model.layers.{layer}.mlp.experts.{block}.{('up_proj', 'gate_proj', 'down_proj', 'norm')[leaf]}.weight"
            )
            shapes[name] = (64,) if leaf == 3 else (96 + layer % 7, 64 + block % 5)
    return flat(shapes, ranks)


def flat(shapes: dict[str, tuple[int, ...]], ranks: int, *, frozen: tuple[str, ...] = ()) -> Checkpoint:
    """A ZeRO-2 checkpoint of one param group; the frozen parameters have a weight alone."""
    checkpoint = Checkpoint(
        source="run/global_step7",
        format="deepspeed",
        zero_stage=2,
        world_size=ranks,
        step=7,
        topology=Topology(dp=ranks),
    )
    model = SourceFile("run/global_step7/mp_rank_00_model_states.pt", 0, "model", None, 0)
    shards = [f"run/global_step7/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)]
    checkpoint.files = [model, *(SourceFile(path, 0, "optimizer", r, 0) for r, path in enumerate(shards))]
    names = [name for name in shapes if name not in frozen]
    whole = {name: Extent.whole(shape) for name, shape in shapes.items()}
    numels = [whole[name].numel for name in names]
    starts = flat_starts(numels)
    partition = flat_partition_numel(starts[-1], ranks)
    spans: dict[str, dict[str, list[Span]]] = {name: {slot: [] for slot in SLOTS} for name in names}
    for rank, path in enumerate(shards):
        low = max(0, bisect_right(starts, rank * partition) - 1)
        high = bisect_left(starts, (rank + 1) * partition)
        for part in flat_shares(numels[low:high], starts[low:high], partition, rank):
            name = names[low + part.index]
            extent = Extent.flat(shapes[name], part.start, part.numel)
            for number, slot in enumerate(SLOTS):
                spans[name][slot].append(Span(extent, path, 4 * (number * partition + part.position), "float32"))
        padding = flat_padding(starts[-1], partition, rank)
        checkpoint.padding.append(Padding(rank, 0, padding, 12 * padding))
    for name, shape in shapes.items():
        weight = Slot("weight", "bfloat16", shape, (Span(whole[name], model.path, 0, "bfloat16"),))
        cut = {slot: Slot(slot, "float32", shape, tuple(spans[name][slot])) for slot in SLOTS if name in spans}
        checkpoint.parameters[name] = Parameter(
            name,
            shape,
            "bfloat16",
            {"weight": weight, **cut},
            group=None if name in frozen else 0,
            frozen=name in frozen,
        )
    checkpoint.param_groups = [ParamGroup({"lr": 0.001, "betas": (0.9, 0.999)}, names)]
    return checkpoint


def per_parameter(shapes: dict[str, tuple[int, ...]], ranks: int) -> Checkpoint:
    """A ZeRO-3 checkpoint, masters alone: every parameter is cut over all ranks."""
    checkpoint = Checkpoint(source="run/global_step7", format="deepspeed", zero_stage=3, world_size=ranks)
    paths = [f"run/global_step7/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)]
    checkpoint.files = [SourceFile(path, 0, "optimizer", r, 0) for r, path in enumerate(paths)]
    for name, shape in shapes.items():
        spans = []
        for rank, path in enumerate(paths):
            start, numel = shard_share(Extent.whole(shape).numel, ranks, rank)
            spans.append(Span(Extent.flat(shape, start, numel), path, 0, "float32"))
        checkpoint.parameters[name] = Parameter(
            name, shape, "float32", {"master": Slot("master", "float32", shape, tuple(spans))}, group=0
        )
    checkpoint.param_groups = [ParamGroup({"lr": 0.001}, list(shapes))]
    return checkpoint
