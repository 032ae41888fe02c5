"""Write a large ZeRO-2 checkpoint in bf16 without training one: checkpoint.py TEMPLATE_TAG_DIR RUN_DIR [WIDTH].

Every container, key, key order, class and relation of view to storage is that of TEMPLATE, a small real
checkpoint (fixtures/s2_bf16_dp4/global_step5): its dicts are copied, and only tensors, shapes, paddings,
counts, slice mappings and the numbers of the configuration are replaced. The result has the shapes of a
GPT-2 of 301,772,802 parameters on 8 ranks, or of a narrower one. Needs deepspeed, whose classes it writes.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

RANKS = 8
WIDTH = 1280
LAYERS = 12
VOCABULARY = 50257
POSITIONS = 1024
STEP = 1000
SEED = 7

Shapes = OrderedDict[str, torch.Size]


def model_shapes(width: int) -> Shapes:
    """Return the parameters of the model in its own order."""
    shapes = {"transformer.wte.weight": (VOCABULARY, width), "transformer.wpe.weight": (POSITIONS, width)}
    for layer in range(LAYERS):
        for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }.items():  # fmt: skip
            shapes[f"transformer.h.{layer}.{name}"] = shape
    shapes |= {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
    # Sizes that make both groups need padding. No tied head: zero_to_fp32 refuses tied weights.
    shapes |= {"value_head.weight": (1, width + 1), "value_head.bias": (1,)}
    return OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())


def flatten(group: Shapes) -> torch.Tensor:
    """Return the fp32 masters of a group as one flat tensor, padded to a multiple of 2 x RANKS."""
    total = sum(shape.numel() for shape in group.values())
    flat = torch.zeros(-(-total // (2 * RANKS)) * 2 * RANKS)
    flat[:total].normal_(0, 0.02)
    return flat


def model_file(template: dict[str, Any], shapes: Shapes, groups: list[Shapes], flats: list[torch.Tensor]) -> dict:
    """Return mp_rank_00_model_states.pt, where the weights are views of one bf16 tensor per group."""
    views = {}
    for group, flat in zip(groups, flats, strict=True):
        weights, offset = flat.to(torch.bfloat16), 0
        for name, shape in group.items():
            views[name] = weights[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
    return replaced(
        template,
        module=OrderedDict((name, views[name]) for name in shapes),
        buffer_names=[],
        param_shapes=groups,
        frozen_param_shapes=OrderedDict(),
        frozen_param_fragments=OrderedDict(),
        shared_params={},
        global_steps=STEP,
        global_samples=64 * STEP,
        dp_world_size=RANKS,
        ds_config=configuration(template),
    )


def optimizer_file(template: dict[str, Any], rank: int, groups: list[Shapes], flats: list[torch.Tensor]) -> dict:
    """Return bf16_zero_pp_rank_<rank>_mp_rank_00_optim_states.pt."""
    old = template["optimizer_state_dict"]
    state, masters, paddings, mappings = {}, [], [], []
    for i, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        size = flat.numel() // RANKS
        total = sum(shape.numel() for shape in group.values())
        padding = min(size, max(0, (rank + 1) * size - total))
        master = flat[rank * size : (rank + 1) * size].clone()
        first, second = torch.empty(size).normal_(0, 1e-4), torch.empty(size).normal_(0, 1e-4).square_()
        first[size - padding :] = second[size - padding :] = 0
        state[i] = {"step": torch.tensor(float(STEP)), "exp_avg": first, "exp_avg_sq": second}
        masters.append(master[: size - padding].requires_grad_(True))
        paddings.append(padding)
        mappings.append(slice_mapping(group, rank * size, (rank + 1) * size))
    param_groups = copy.deepcopy(old["base_optimizer_state"]["param_groups"][: len(groups)])
    new = replaced(
        old,
        base_optimizer_state={"state": state, "param_groups": param_groups},
        single_partition_of_fp32_groups=masters,
        group_paddings=paddings,
        param_alignment_paddings=[[0] * len(group) for group in groups],
        partition_count=[RANKS] * len(groups),
        param_slice_mappings=mappings,
    )
    return replaced(template, optimizer_state_dict=new, ds_config=configuration(template))


def slice_mapping(group: Shapes, start: int, stop: int) -> OrderedDict[str, Any]:
    """Return where each parameter lies within the partition [start, stop) of its group, in elements."""
    from deepspeed.utils.tensor_fragment import fragment_address

    mapping, offset = OrderedDict(), 0
    for name, shape in group.items():
        first, last = max(offset, start), min(offset + shape.numel(), stop)
        if first < last:
            mapping[name] = fragment_address(start=first - start, numel=last - first)
        offset += shape.numel()
    return mapping


def configuration(template: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration of the larger run."""
    return copy.deepcopy(template["ds_config"]) | {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
    }


def replaced(template: dict[str, Any], **new: Any) -> dict[str, Any]:
    """Copy `template` with other values for some of its keys, in the same order."""
    if not new.keys() <= template.keys():
        raise KeyError(f"the template has no {sorted(new.keys() - template.keys())}")
    return {key: new[key] if key in new else copy.deepcopy(value) for key, value in template.items()}


def main(template: Path, run: Path, width: int = WIDTH) -> None:
    """Write the run directory `run` after the tag directory `template`."""
    torch.manual_seed(SEED)
    tag = run / f"global_step{STEP}"
    tag.mkdir(parents=True, exist_ok=True)
    model, optimizer = (
        torch.load(template / name, weights_only=False)  # this repository's own file
        for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    )
    shapes = model_shapes(width)
    matrices = OrderedDict((name, shape) for name, shape in shapes.items() if len(shape) >= 2)
    vectors = OrderedDict((name, shape) for name, shape in shapes.items() if len(shape) < 2)
    groups = [matrices, vectors]
    flats = [flatten(group) for group in groups]
    torch.save(model_file(model, shapes, groups, flats), tag / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save(optimizer_file(optimizer, rank, groups, flats), tag / name)
    (run / "latest").write_text(tag.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
