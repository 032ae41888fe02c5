"""Names of the files of a DeepSpeed checkpoint, and what they tell. Touches no disk.

mp_rank_MM_model_states.pt                              model: ZeRO-0, 1, 2
zero_pp_rank_R_mp_rank_MM_model_states.pt               model: ZeRO-3, one for each data-parallel rank
[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt  optimizer; before 0.3.8 `_mp_rank_MMoptim_states.pt`
layer_L_expert_E_mp_rank_MM_model_states.pt             weights of expert E; older: expert_E_mp_rank_MM_...
expp_rank_R_mp_rank_MM_optim_states.pt                  optimizer of experts without ZeRO
layer_NN[-model_MM]-model_states.pt                     weights of a pipeline layer
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MODEL = "model"
OPTIMIZER = "optimizer"
EXPERT = "expert"
EXPERT_OPTIMIZER = "expert optimizer"
PIPELINE_LAYER = "pipeline layer"

_PATTERNS = (
    (OPTIMIZER, r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    (EXPERT_OPTIMIZER, r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    (MODEL, r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (MODEL, r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (EXPERT, r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (EXPERT, r"expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (PIPELINE_LAYER, r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt"),
)
_COMPILED = tuple((role, re.compile(pattern)) for role, pattern in _PATTERNS)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a checkpoint and what its name says.

    Parameters
    ----------
    path : str
    role : str
        One of the constants of this module.
    dp_rank, mp_rank : int or None
        The data- and model-parallel rank that wrote it.
    layer, expert : int or None
    """

    path: str
    role: str
    dp_rank: int | None = None
    mp_rank: int | None = None
    layer: int | None = None
    expert: int | None = None

    @property
    def identity(self) -> tuple[str, int | None, int | None, int | None, int | None]:
        """What no two files of one checkpoint share."""
        return self.role, self.dp_rank, self.mp_rank, self.layer, self.expert

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: ranks as numbers, not as text."""
        return tuple(-1 if x is None else x for x in (self.mp_rank, self.dp_rank, self.layer, self.expert))


def classify(name: str, path: str) -> Shard | None:
    """Return what a file name says, or None if it is not a name of a DeepSpeed checkpoint."""
    for role, pattern in _COMPILED:
        match = pattern.fullmatch(name)
        if match:
            numbers = {key: int(value) for key, value in match.groupdict().items() if value is not None}
            return Shard(path, role, numbers.get("dp"), numbers.get("mp"), numbers.get("layer"), numbers.get("expert"))
    return None


def is_own(name: str) -> bool:
    """Tell whether a file name is one that a DeepSpeed run directory has of its own."""
    return name == "latest" or classify(name, name) is not None
