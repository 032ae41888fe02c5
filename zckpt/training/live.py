"""What is trained, as this rank has it."""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.optim.ranks import Ranks
from zckpt.optim.states.several import Given, Optimizers
from zckpt.optim.tensors import Model, ModelState, is_cut_apart, model_state
from zckpt.training.slices import Slices


@dataclass(frozen=True, slots=True)
class Live:
    """A model and its optimizers on this rank; `slices`: parameters are slices."""

    model: Model
    tensors: ModelState
    optimizers: Optimizers
    slices: Slices | None

    @classmethod
    def of(cls, model: Model, optimizer: Given, slices: Slices | None = None) -> Live:
        """Find out what there is; nothing is copied."""
        tensors = model_state(model)
        optimizers = Optimizers(
            optimizer, tensors.names(), tensors.members,
            in_parts=isinstance(model, (list, tuple)), is_sliced=slices is not None,
        )  # fmt: skip
        return cls(model, tensors.renamed(optimizers.renamed), optimizers, slices)

    def is_in_parts(self, ranks: Ranks) -> bool:
        """Tell whether this rank knows that ranks have different parts."""
        its = [*self.tensors.tensors.values(), *self.optimizers.parameters().values()]
        return self.optimizers.are_parts or isinstance(self.model, (list, tuple)) or is_cut_apart(its, ranks.world_size)
