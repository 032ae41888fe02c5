"""Stage 0: the optimizer is a plain one, in the model file; with 16-bit weights its masters are next to it.

optimizer = {state, param_groups}                                           fp32
optimizer = {optimizer_state_dict: {state, param_groups}, fp32_groups,      FP16_UnfusedOptimizer: a list of
             dynamic_loss_scale, cur_scale, cur_iter, ...}                  tensors for each group
optimizer = {optimizer_state_dict, fp32_groups_flat, ...}                   FP16_Optimizer: one flat tensor each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from zckpt.errors import DamagedFileError, about
from zckpt.evidence import NAMES_ADVICE, Orders, in_order_or_sorted
from zckpt.formats.deepspeed.one_bit import without_errors
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.stage0_flat import FLAT_KEY, unflattened
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, parse
from zckpt.formats.torch_files.tensors import carried, slot_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, as_float
from zckpt.torchfile import Tensor, TorchFile

STATE_KEYS = frozenset({"optimizer_state_dict", "fp32_groups", FLAT_KEY, "state", "param_groups"})
"""What of an optimizer is read as slots and groups; the rest is about loss scaling and clipping."""


class Numbered:
    """The optimizer in a file, which has numbers for its parameters, or flat masters of all of a group.

    Parameters
    ----------
    content : object
        A state dict, or one with masters.
    file : TorchFile
        The file that holds it.

    Raises
    ------
    DamagedFileError
        It is none that DeepSpeed writes.
    """

    def __init__(self, content: object, file: TorchFile) -> None:
        self.file = file
        with about(file.path):
            if not isinstance(content, dict):
                raise DamagedFileError(
                    "unexpected content", expected="an optimizer's state dict", found=type(content).__name__
                )
            groups, masters = content.get("fp32_groups"), []
            if "optimizer_state_dict" in content and isinstance(groups, list):
                masters = [t for group in groups for t in group if isinstance(t, Tensor)]
            base = None if FLAT_KEY in content else content
            state = parse(content.get("optimizer_state_dict", base), file.path, masters)
            self.content, self.state = content, without_errors(state)
            self.flats = _flats(content[FLAT_KEY], self.state) if FLAT_KEY in content else None

    def attach(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str] | None,
        orders: Orders = in_order_or_sorted,
    ) -> bool:
        """Give a checkpoint's parameters the optimizer's state; False: the order in flat masters is not certain.

        Parameters
        ----------
        names : sequence of str, optional
            Of all that the optimizer has, in its order, from the user.
        orders : callable
            In which groups may have their parameters, as for `Evidence.certain`.

        Raises
        ------
        UsageError
            `names` do not fit the file.
        """
        path, state = self.file.path, self.state
        if self.flats is not None:
            with about(path):
                found = unflattened(checkpoint, state, self.flats, path, names, orders)
            if found is not None:
                attach(checkpoint, found[0], path, certain=found[1])
            return found is not None

        def rounds_to_weight(master: Tensor, name: str) -> bool:
            from zckpt.compare.weights import rounds_to

            weight = checkpoint.parameters[name].slots.get(WEIGHT)
            return weight is not None and rounds_to(slot_of(MASTER, master, path), weight)

        sample = rounds_to_weight if state.masters else None
        attach(checkpoint, state, path, names=names, sample=sample, orders=orders)
        return True

    def count(self, numels: Sequence[int]) -> int:
        """Return how many parameters there are, given the elements of those of which the first make up flat masters."""
        if self.flats is None:
            return len(self.state.every_number)
        total = sum(flat.numel for flat in self.flats)
        return next((n for n, held in enumerate(accumulate(numels, initial=0)) if held >= total), len(numels))

    @property
    def recorded_names(self) -> list[str] | None:
        """The names that torch's optimizer wrote down with its numbers, where it was made of `named_parameters()`.

        They are those of the engine's module, as ZeRO's files have them. None: not all parameters have one.
        """
        names, listed = self.state.recorded_names, [group.get("param_names") for group in self.state.groups]
        counts = [len(its) if isinstance(its, (list, tuple)) else 0 for its in listed]
        whole = counts == [len(numbers) for numbers in self.state.numbers] if self.flats is None else all(counts)
        return names if names and whole and len(set(names)) == len(names) else None


def _flats(found: object, state: OptimizerState) -> list[Tensor]:
    if not isinstance(found, (list, tuple)) or not all(isinstance(t, Tensor) and len(t.shape) == 1 for t in found):
        raise DamagedFileError(f"unreadable {FLAT_KEY}", expected="a list of flat tensors")
    if [len(numbers) for numbers in state.numbers] != [1] * len(found):
        raise DamagedFileError(
            "flat masters and param groups disagree", expected=f"{len(found)} groups of one tensor",
            found=str(state.numbers)[:80],
        )  # fmt: skip
    return list(found)


def attach_optimizer(rank: Rank, names: Sequence[str] | None) -> None:
    """Give a rank of stage 0 the optimizer in its model file; errors are those of `Numbered`."""
    optimizer = Numbered(rank.model.content["optimizer"], rank.model.file)
    keep_other_state(rank, optimizer.content, rank.model.file)
    if optimizer.attach(rank, names):
        mark_frozen(rank)
    else:
        rank.warnings.append(
            f"{rank.model.path}: FP16_Optimizer holds its masters and state in one flat tensor for each group, and in "
            f"which order parameters make it up is not certain; they are left out, the weights are there "
            f"({NAMES_ADVICE})"
        )


def keep_other_state(checkpoint: Checkpoint, content: Mapping[object, object], file: TorchFile) -> None:
    """Keep what an optimizer has besides its state: the loss scale and how it changes, clipping."""
    for key, value in content.items():
        if key not in STATE_KEYS:
            checkpoint.optimizer_metadata[str(key)] = carried(file, value)
    if (scale := as_float(content.get("cur_scale"))) is not None:
        checkpoint.loss_scale = scale


def mark_frozen(checkpoint: Checkpoint) -> None:
    """Mark parameters that no number of the optimizer can stand for; what is not certain is not marked."""
    owned = {name for group in checkpoint.param_groups for name in group.parameters}
    shapes = {parameter.shape for parameter in checkpoint.unnamed.values()}
    if owned - set(checkpoint.parameters) - set(checkpoint.unnamed):
        return
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is None and parameter.name not in owned and parameter.shape not in shapes:
            parameter.frozen = True
