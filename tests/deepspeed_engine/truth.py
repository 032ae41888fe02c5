"""The truth about a checkpoint: every slot of every parameter in full, gathered from the live optimizer.

Nothing here goes through DeepSpeed's own mappings of slices, which are wrong in some configurations; it
knows instead in which order and with which padding each wrapper of the optimizer flattens its parameters.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.deepspeed_engine import gpt_pipe, tensor_parallel
from tests.deepspeed_engine.spec import Spec, ds_config

Slots = dict[str, dict[str, torch.Tensor]]

MOMENTUM = "momentum_buffer"


@dataclass
class Live:
    """What the optimizer and the model hold at one moment, by name."""

    slots: Slots = field(default_factory=dict)  # name -> {"fp32": ..., slot: ...}, full, as fp32
    order: list[list[str]] = field(default_factory=list)  # names per (sub-)group in flat order
    scalars: list[dict[str, Any]] = field(default_factory=list)  # the state that is no tensor, per group
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    per_rank_order: list[list[list[str]]] = field(default_factory=list)


def read_live(engine: Any, spec: Spec) -> Live:
    """Gather the truth on every rank; collective."""
    live = Live()
    wrapper = type(engine.optimizer).__name__
    names = {p: name for name, p in engine.module.named_parameters()}
    if wrapper in ("DeepSpeedZeroOptimizer_Stage3", "SuperOffloadOptimizer_Stage3"):
        _read_stage3(engine.optimizer, names, live)
    elif wrapper in ("DeepSpeedZeroOptimizer", "BF16_Optimizer") or wrapper.startswith("ZenFlowZeroOptimizer"):
        _read_flat(engine.optimizer, names, live)
    elif wrapper == "FP16_Optimizer":
        _read_fused(engine.optimizer, names, live)
    elif wrapper == "FP16_UnfusedOptimizer":
        its = engine.optimizer
        _read_each(its.fp16_groups, its.fp32_groups, its.optimizer.state, names, live)
    else:
        groups = [group["params"] for group in engine.optimizer.param_groups]
        _read_each(groups, groups, engine.optimizer.state, names, live)
    live.weights = _weights(engine)
    live.buffers = {name: b.detach().clone() for name, b in engine.module.named_buffers()}
    maps = engine.module.universal_checkpoint_info["affine_map"]["params"] if spec.auto_tp else {}
    _merge_ranks(live, spec, engine, maps)
    return live


def _read_stage3(optimizer: Any, names: dict, live: Live) -> None:
    """ZeRO-3: every parameter gives ceil(n / ranks) elements to each rank, sub-group by sub-group."""
    for i, params in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[i]
        own = getattr(params[0], "ds_process_group", None) if params else None
        group = own or optimizer.dp_process_group  # experts of AutoEP have one of their own
        ranks, offset = _gather(_slots(flat, optimizer.optimizer.state[flat]), group), 0
        for p in params:
            size = math.ceil(p.ds_numel / len(ranks))
            live.slots[names[p]] = {
                slot: _upright(
                    torch.cat([rank[slot][offset : offset + size] for rank in ranks])[: p.ds_numel].reshape(
                        tuple(p.ds_shape)
                    ),
                    transposed=getattr(optimizer, "zenflow", False),
                ).float()
                for slot in ranks[0]
            }
            offset += size
        if offset != flat.numel():
            raise AssertionError(f"sub-group {i} has {flat.numel()} elements, its parameters {offset}")
        live.order.append([names[p] for p in params])
        live.scalars.append(_scalars(optimizer.optimizer.state[flat]))


def _read_flat(optimizer: Any, names: dict, live: Live) -> None:
    """ZeRO-1/2 and BF16_Optimizer: each group is one flat tensor, cut into equal partitions."""
    bf16 = type(optimizer).__name__ == "BF16_Optimizer"
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    groups = optimizer.bf16_groups if bf16 else optimizer.round_robin_bit16_groups
    columns = any(p.dim() == 2 and p.data.stride() == (1, len(p)) != (1, 1) for group in groups for p in group)
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)  # parameter_alignment, per parameter
    for i, params in enumerate(groups):
        state = optimizer.optimizer.state[flats[i]]
        own = _slots(flats[i], state)
        matrices = _matrices(optimizer, i, names)
        own = {slot: value for slot, value in own.items() if slot != MOMENTUM or matrices is None}
        ranks, offset = _gather(own, optimizer.real_dp_process_group[i]), 0
        whole = {slot: torch.cat([rank[slot] for rank in ranks]) for slot in ranks[0]}
        for j, p in enumerate(params):
            live.slots[names[p]] = {
                slot: _upright(
                    flat[offset : offset + p.numel()].reshape(p.shape[::-1] if columns and p.dim() == 2 else p.shape),
                    transposed=columns,
                ).float()
                for slot, flat in whole.items()
            }
            offset += p.numel() + (paddings[i][j] if paddings and not bf16 else 0)
        for name, value in (matrices or {}).items():
            live.slots[name][MOMENTUM] = value
        live.order.append([names[p] for p in params])
        live.scalars.append(_scalars(state))


def _upright(stored: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Return a parameter as the model has it; ZenFlow stores the columns of matrices as rows."""
    return stored.t().contiguous() if transposed and stored.dim() == 2 else stored


def _matrices(optimizer: Any, group: int, names: dict) -> dict[str, torch.Tensor] | None:
    """Muon keeps the momentum of every matrix that a rank holds a part of, whole; None in other groups.

    Where several ranks have the same one, they must be equal.
    """
    base = optimizer.optimizer
    if type(base).__name__ != "MuonWithAuxAdam" or not base.param_groups[group].get("use_muon"):
        return None
    state = base.state[optimizer.single_partition_of_fp32_groups[group]]
    held, offset = {}, 0
    for p in optimizer.params_in_partition[group] if MOMENTUM in state else []:
        held[names[p]] = state[MOMENTUM][offset : offset + p.numel()].reshape(p.shape).float().clone()
        offset += p.numel()
    found: dict[str, torch.Tensor] = {}
    for rank in _gather(held, optimizer.real_dp_process_group[group]):
        for name, value in rank.items():
            if not torch.equal(found.setdefault(name, value), value):
                raise AssertionError(f"ranks differ in the momentum of {name}")
    return found


def _read_fused(optimizer: Any, names: dict, live: Live) -> None:
    """Stage 0 in 16 bits with a fused optimizer: each group is one flat tensor, whole."""
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        state = optimizer.optimizer.state[flat]
        whole, at = _slots(flat, state), 0
        for p in params:
            live.slots[names[p]] = {
                slot: value[at : at + p.numel()].reshape(p.shape).float() for slot, value in whole.items()
            }
            at += p.numel()
        live.order.append([names[p] for p in params])
        live.scalars.append(_scalars(state))


def _read_each(groups: list[list[Any]], masters: list[list[Any]], state: dict, names: dict, live: Live) -> None:
    """Stage 0 with state per parameter, in 16 bits of an fp32 copy, in fp32 of the parameter itself."""
    for params, own in zip(groups, masters, strict=True):
        for p, master in zip(params, own, strict=True):
            live.slots[names[p]] = {slot: value.float() for slot, value in _slots(master, state[master]).items()}
        live.order.append([names[p] for p in params])
        live.scalars.append(_scalars(state[own[0]]))


def _slots(master: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    shaped = {k: v for k, v in state.items() if torch.is_tensor(v) and v.shape == master.shape}
    if master.dim() == 0:  # of a 0-d parameter, `step` has the same shape
        shaped.pop("step", None)
    for key in ("state1", "state2"):  # codes of a quantised moment, or what takes their place
        shaped.pop(key, None)
    return {slot: value.detach().cpu().clone() for slot, value in {"fp32": master, **shaped}.items()}


def _scalars(state: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        if not torch.is_tensor(value):
            found[key] = {"value": value, "type": type(value).__name__}
        elif value.dim() == 0:
            found[key] = {"value": value.item(), "type": f"tensor0d:{value.dtype}"}
    return found


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: torch's own way makes a file of each, which costs more than all else here."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        own = obj.detach().cpu().contiguous()
        return _unpickled, (own.reshape(-1).view(torch.uint8).numpy().tobytes(), own.dtype, tuple(own.shape))


def _unpickled(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _gather(value: Any, group: Any = None) -> list[Any]:
    pickled = io.BytesIO()
    _Pickler(pickled).dump(value)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, pickled.getvalue(), group=group)
    return [pickle.loads(one) for one in values]


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the model's own weights in full and in their dtype, frozen ones too."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters.values() if hasattr(p, "ds_id")]):
        stored = {name: p.detach().clone() for name, p in parameters.items()}
    columns = hasattr(next(iter(parameters.values()), None), "ds_id") and getattr(engine.optimizer, "zenflow", False)
    return {name: _upright(value, transposed=columns) for name, value in stored.items()}


def _merge_ranks(live: Live, spec: Spec, engine: Any, maps: dict[str, Any]) -> None:
    """Bring together what differs between ranks beyond data parallelism: experts, slices, stages."""
    if "expert_parallel" in spec.config:
        _join_experts(live, engine)
        return
    of_experts = "moe" in spec.model
    if of_experts:
        firsts = first_experts(engine)
        live.slots = {global_expert(name, firsts): value for name, value in live.slots.items()}
        live.weights = {global_expert(name, firsts): value for name, value in live.weights.items()}
        live.per_rank_order = _gather(live.order)
    if not of_experts and "megatron" not in spec.model and not spec.is_pipeline and not spec.auto_tp:
        return
    parts = _gather((live.slots, live.weights, live.buffers))
    live.slots = {
        name: {slot: _merge(name, [p.get(name, {}).get(slot) for p, _, _ in parts], spec, maps) for slot in slots}
        for part, _, _ in parts
        for name, slots in part.items()
    }
    live.weights = {
        name: _merge(name, [w.get(name) for _, w, _ in parts], spec, maps) for _, part, _ in parts for name in part
    }
    live.buffers = {name: value for _, _, part in reversed(parts) for name, value in part.items()}


def _join_experts(live: Live, engine: Any) -> None:
    """AutoEP: each rank has one tensor for its experts; put those of all expert ranks together."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.utils import groups

    own = {
        f"{prefix}.experts.{weight}": groups._get_expert_parallel_rank(module.ep_group_name)
        for prefix, module in engine.module.named_modules()
        if isinstance(module, AutoEPMoELayer)
        for weight in ("w1", "w2", "w3")
    }
    parts = _gather({name: (rank, live.slots.get(name, {}), live.weights[name]) for name, rank in own.items()})
    for name in own:
        by_rank = {part[name][0]: part[name] for part in parts}
        ordered = [by_rank[rank] for rank in sorted(by_rank)]
        live.slots[name] = {slot: torch.cat([one[1][slot] for one in ordered]) for slot in ordered[0][1]}
        live.weights[name] = torch.cat([one[2] for one in ordered])


def _merge(name: str, per_rank: list[torch.Tensor | None], spec: Spec, maps: dict[str, Any]) -> torch.Tensor:
    if "deepspeed_experts." in name:
        return next(value for value in per_rank if value is not None)
    have: dict[int, torch.Tensor] = {}
    for rank, value in enumerate(per_rank):  # of a layer tied over stages the first one's: copies drift by rounding
        if value is not None:
            have.setdefault(rank % spec.tensor_parallel, value)
    if spec.auto_tp:  # by DeepSpeed's own reading of its map
        from deepspeed.checkpoint.affine import ParamAffineMap

        return ParamAffineMap.from_dict(maps[f"^{re.escape(name)}$"]).rebuild(have)
    if spec.model.startswith("pipeline_megatron_"):
        return gpt_pipe.merge(name, [have[rank] for rank in range(spec.tensor_parallel)], spec)
    if "megatron" in spec.model:
        return tensor_parallel.merge(name, [have[rank] for rank in range(spec.tensor_parallel)])
    return have[0]


def first_experts(engine: Any) -> dict[str, int]:
    """Return the number of the first expert that this rank has of each layer."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    return {
        name: groups._get_expert_parallel_rank(module.expert_group_name) * module.num_local_experts
        for name, module in engine.module.named_modules()
        if isinstance(module, MoE)
    }


def global_expert(name: str, firsts: dict[str, int]) -> str:
    """Number an expert of this rank as the files do, over all ranks."""
    match = re.match(r"((.*?)\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)", name)
    return f"{match[1]}{int(match[3]) + firsts[match[2]]}{match[4]}" if match else name


def describe(engine: Any, spec: Spec, live: Live) -> dict[str, Any]:
    """Return everything of the truth that is no tensor, ready for JSON."""
    import deepspeed

    module, optimizer = engine.module, engine.optimizer
    first: dict[int, str] = {}
    tied = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            tied[name] = first[id(p)]
    persistent = set(module.state_dict())
    return {
        "spec": dataclasses.asdict(spec),
        "ds_config": ds_config(spec),
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "machine": machine(),
        "dp_world_size": spec.data_parallel,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": getattr(optimizer, "loss_scale", None),
        "lr": engine.get_lr(),
        "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "tied": tied,
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "shapes": {name: list(value.shape) for name, value in live.weights.items()},
        "persistent_buffers": [name for name, _ in module.named_buffers() if name in persistent],
        "optimizer_wrapper": type(optimizer).__name__,
        "base_optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "order": live.order,
        "scalar_state_per_group": live.scalars,
        "per_rank_order": live.per_rank_order,
    }


def machine() -> str:
    """Name what decides whether a training can be repeated bit for bit."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {_cpu_model()}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_truth(folder: Path, live: Live) -> None:
    """Write `truth.safetensors`: `<slot>/<name>`, `module/<name>`, `buffer/<name>`."""
    from safetensors.torch import save_file

    tensors = {f"{slot}/{name}": value for name, slots in live.slots.items() for slot, value in slots.items()}
    tensors |= {f"module/{name}": value for name, value in live.weights.items()}
    tensors |= {f"buffer/{name}": value for name, value in live.buffers.items()}
    own = {key: value.contiguous().clone() for key, value in tensors.items()}
    save_file(own, folder / "truth.safetensors")
