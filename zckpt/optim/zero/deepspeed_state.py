"""State in DeepSpeed's form: what one rank's file of a ZeRO-1/2 checkpoint holds.

Rigid: the local optimizer's own state dict, of padded partitions. Elastic: a list of each group's state without
padding, from which any number of ranks can make theirs. DeepSpeed puts what it finds in a file in the place of its own,
so that objects (a loss scaler) are written as those of its classes; DeepSpeed itself need not be there.

Source: DeepSpeed 0.19, whose keys these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.loss_scaling import scaler_of
from zckpt.formats.deepspeed.shards import address_of, stage_of
from zckpt.optim.param_groups import copied
from zckpt.optim.zero.flat import FlatGroup, FlatOptimizer
from zckpt.optim.zero.stepping import LossScaler, Scaler
from zckpt.torchfile import DType, Object

VERSION = "0.19.8"
"""The version of DeepSpeed whose form this is."""

MASTERS = "single_partition_of_fp32_groups"
STATE = "base_optimizer_state"
STEP = "base_optimizer_state_step"


class DeepSpeedState(dict[str, Any]):
    """A state dict in DeepSpeed's form; whoever looks for torch's form gets an error. Copies and pickles are plain."""

    def __missing__(self, key: str) -> NoReturn:
        if key in ("state", "param_groups"):
            raise UnsupportedError(
                "a ZeroOptimizer's state dict is in DeepSpeed's form, with slices of flat groups, which "
                "get_state_dict of torch.distributed.checkpoint and others cannot split by parameter",
                advice="save with zckpt.save(path, model=model, optimizer=optimizer), which zckpt.load reads at any "
                "number of ranks and `zckpt convert` turns into torch's formats; or save state_dict() as it is",
            )
        raise KeyError(key)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


@dataclass
class ShareAddress:
    """Where a parameter's share lies in a rank's partition."""

    numel: int
    start: int


class States:
    """The states of all ranks, or of this one, as files hold them or bare; `own`: this rank's.

    Raises TypeError: `given` is something else.
    """

    def __init__(self, given: object, optimizer: FlatOptimizer) -> None:
        self._every: list[Mapping[str, Any]] = []
        self._optimizer = optimizer
        for state in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
            inner = state.get("optimizer_state_dict", state) if isinstance(state, Mapping) else None
            if not isinstance(inner, Mapping) or MASTERS not in inner or STATE not in inner:
                raise TypeError(f"expected a ZeRO-1/2 state dict with {MASTERS} and {STATE}, or a list of them")
            self._every.append(inner)
        if not self._every:
            raise TypeError("an empty list of state dicts")
        self.own = self._every[min(optimizer.rank, len(self._every) - 1)]
        self._is_rigid = isinstance(self._every[0][STATE], Mapping)

    def check(self) -> None:
        """Raise ValueError unless they are of param groups of these sizes and can be cut as this optimizer cuts."""
        groups = self._optimizer.groups
        for state in self._every:
            if len(state[MASTERS]) != len(groups):
                raise ValueError(
                    f"the state dict has {len(state[MASTERS])} param groups, but the optimizer has {len(groups)}"
                )
            pads = state.get("param_alignment_paddings")
            ours = [list(group.pads) for group in groups]
            if pads is not None and [list(one) for one in pads] != ours and any(map(any, [*pads, *ours])):
                raise ValueError(
                    "the state dict was made with another parameter_alignment; create the optimizer with the same, "
                    "or use `zckpt reshard --parameter-alignment` or `--no-parameter-alignment`"
                )
        for index, group in enumerate(groups):
            counts = {int(state["partition_count"][index]) for state in self._every if "partition_count" in state}
            if self._is_rigid and len(counts) == 1 and counts != {group.world_size}:
                raise ValueError(
                    f"rigid state of {counts.pop()} ranks does not fit {group.world_size}; `zckpt reshard SOURCE "
                    f"TARGET --world-size {group.world_size}` writes files that do"
                )
            expected = group.partition - group.padding if self._is_rigid else group.total
            numel = sum(state[MASTERS][index].numel() for state in self.having(group))
            if numel != expected:
                raise ValueError(
                    f"param group {index} has {numel} elements in the state dict, but {expected} in the optimizer"
                )

    def local(self) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        """Return the local optimizer's state, cut for this rank, by param group, and the param groups."""
        if self._is_rigid:
            held = self.own[STATE]["state"].items()
            state = {index: {key: copied(value) for key, value in values.items()} for index, values in held}
            return state, self.own[STATE]["param_groups"]
        state = {}
        for index, group in enumerate(self._optimizer.groups):
            having = self.having(group)
            for key, made in having[0][STATE][index].items():
                every = [one[STATE][index][key] for one in having]
                if all(
                    isinstance(found, torch.Tensor) and found.dim() > 0 and found.shape == one[MASTERS][index].shape
                    for found, one in zip(every, having, strict=True)
                ):
                    made = torch.zeros(group.partition, dtype=made.dtype, device=made.device)  # noqa: PLW2901
                    self.fill(made, every, group)
                state.setdefault(index, {})[key] = made
        groups = [{**group} for group in self._optimizer.optim.state_dict()["param_groups"]]
        for one in groups:
            if "step" in one and STEP in self.own:
                one["step"] = self.own[STEP]
        return state, groups

    def having(self, group: FlatGroup) -> list[Mapping[str, Any]]:
        """Return the states that make up a group, or this rank's partition; of experts, every so many ranks'."""
        if self._is_rigid:
            return [self.own]
        if not group.is_expert or len(self._every) == 1:
            return self._every
        apart = self._optimizer.world_size // group.world_size
        return self._every[self._optimizer.rank % apart :: apart]

    def fill(self, into: torch.Tensor, lean: Sequence[torch.Tensor], group: FlatGroup) -> None:
        """Copy this rank's elements of partitions to the front, and zeros behind them: padding."""
        values = lean[0]
        if not self._is_rigid:
            begin, end, at, pieces = group.rank * group.partition, (group.rank + 1) * group.partition, 0, []
            for tensor in lean:
                pieces.append(tensor[max(begin - at, 0) : max(end - at, 0)])
                at += tensor.numel()
            values = torch.cat(pieces)
        into[: values.numel()].copy_(values)
        into[values.numel() :].zero_()


def with_objects(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that can be written, and that DeepSpeed takes for its own."""
    return {
        **state_dict,
        "loss_scaler": scaler_object(state_dict["loss_scaler"]),
        "zero_stage": stage_of(state_dict["zero_stage"]),
        "param_slice_mappings": [
            {name: address_of(its.numel, its.start) for name, its in mapping.items()}
            for mapping in state_dict["param_slice_mappings"]
        ],
    }


def scaler_object(scaler: Scaler) -> Object:
    """Return a loss scaler as an object of DeepSpeed's class."""
    if isinstance(scaler, LossScaler):
        return scaler_of({"cur_scale": scaler.cur_scale, "dynamic": False})
    return scaler_of({"dynamic": True, "dtype": DType("float16")} | vars(scaler))
