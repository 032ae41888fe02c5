"""Optimizers whose update of an element depends on other elements of its tensor, or on other tensors.

A ZeroOptimizer's local optimizer sees one rank's slice of a whole param group as one tensor. That is the same training
where each element is stepped by itself, and another one where a norm, a row, a matrix or the whole model decides. Which
classes those are is known here by their names, whoever's they are and whatever is derived from them.

Source: their papers and code. LAMB, LARS, NovoGrad, AdamP, SGDP, Nero: norms of a tensor. Adafactor, CAME, SM3,
Adam-mini: rows, columns or blocks. Muon, Shampoo, SOAP, Kron, GaLore, APOLLO, Dion, Scion: matrices. L-BFGS, Prodigy,
D-Adaptation: all tensors together.
"""

from __future__ import annotations

from torch.optim import Optimizer

NAMES = frozenset(
    [
        "adafactor", "adafactorbigvision", "adammini", "adamp", "adamuon", "apollo", "came", "dadaptadagrad",
        "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dion", "distributedmuon", "distributedshampoo",
        "fusedlamb", "fusedlars", "fusedmixedprecisionlamb", "fusednovograd", "galoreadafactor", "galoreadamw",
        "galoreadamw8bit", "kron", "lamb", "lamb32bit", "lamb8bit", "lars", "lars32bit", "lars8bit", "lbfgs", "muon",
        "muonwithauxadam", "nero", "novograd", "nvnovograd", "onebitlamb", "prodigy", "pytorchlars", "scalableshampoo",
        "scion", "sgdp", "shampoo", "singledevicemuon", "singledevicemuonwithauxadam", "sm3", "soap",
    ]
)  # fmt: skip
"""Names of classes, in lower case and without underscores."""


def is_per_tensor(optimizer_class: type) -> bool:
    """Tell whether a class is known, or derived from one that is known, to step elements that depend on each other."""
    return any(base.__name__.lower().replace("_", "") in NAMES for base in optimizer_class.__mro__)


def refuse(optimizer_class: object) -> None:
    """Raise ValueError for a class that is known to train otherwise on slices."""
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        return
    if is_per_tensor(optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} looks at whole tensors, and a ZeroOptimizer steps slices of a flat buffer: "
            f"it would train otherwise than unsharded. ZeroRedundancyOptimizer({optimizer_class.__name__}) steps whole "
            f"tensors; allow_per_tensor=True takes the slices for what they are"
        )
