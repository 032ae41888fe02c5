"""Names of parameters without what wrappers put before them, so that one model has one set of names. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "base_model.model.")
"""Of DistributedDataParallel and DeepSpeed's engine, torch.compile, Lightning, and PEFT; in any order, repeated."""

COMPILED = "._orig_mod."
"""What torch.compile of a part of a model puts within a name."""


def canonical(name: str) -> str:
    """Return a name without what wrappers added."""
    short = name
    while any(short.startswith(prefix) for prefix in PREFIXES):
        prefix = next(prefix for prefix in PREFIXES if short.startswith(prefix))
        short = short[len(prefix) :]
    while COMPILED in short:
        short = short.replace(COMPILED, ".")
    return short or name


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return the canonical name of each name; names that would become one keep what tells them apart."""
    short = {name: canonical(name) for name in names}
    uses = Counter(short.values())
    taken = set(short)
    return {name: one if uses[one] == 1 and (one == name or one not in taken) else name for name, one in short.items()}
