"""What Accelerate keeps besides models and optimizers, of whatever the source has: schedulers, random states, samplers.

scheduler.bin            the source's, if it is one; else that of a LambdaLR at the source's step
random_states_R.pkl      Accelerate's own or the Trainer's; else none, and Accelerate goes on with its seed
sampler.bin, scaler.pt, custom_checkpoint_0.pkl ...      only where the source is Accelerate's
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from zckpt.formats.transformers_trainer.states import random_states_of_accelerate, scheduler
from zckpt.state import Checkpoint

SCHEDULER = "scheduler"

_CARRIED = {
    re.compile(r"(?:sampler|dl_state_dict)(?:_[0-9]+)?"): ".bin",
    re.compile(r"custom_checkpoint_[0-9]+"): ".pkl",
    re.compile(r"scaler"): ".pt",
    re.compile(r"scheduler_[0-9]+"): ".bin",
}
"""Keys under which Accelerate's files are carried, and what the files' names end with."""

OWN = re.compile(
    r"(?:scheduler|sampler|dl_state_dict)(?:_[0-9]+)?\.bin|custom_checkpoint_[0-9]+\.pkl|scaler\.pt|random_states_[0-9]+\.pkl"
)
"""The files that are written."""


def state_files(checkpoint: Checkpoint, optimizers: Sequence[Checkpoint], notes: list[str]) -> dict[str, object]:
    """Return the content of all these files, by name.

    `optimizers`: with the param groups of each; `notes`: gets what was written by rule, and what is missing.
    """
    found: dict[str, object] = {}
    for number, one in enumerate(optimizers):
        key = f"{SCHEDULER}_{number}" if number else SCHEDULER
        found[f"{key}.bin"] = _scheduler(one, key, notes)
    for key, value in checkpoint.metadata.items():
        suffix = next((suffix for pattern, suffix in _CARRIED.items() if pattern.fullmatch(key)), None)
        if suffix is not None:
            found.setdefault(f"{key}{suffix}", value)
    states = random_states_of_accelerate(checkpoint)
    if not states:
        notes.append("no random state is in the source that Accelerate takes: it goes on with the program's seed")
    return found | states


def _scheduler(optimizer: Checkpoint, key: str, notes: list[str]) -> object:
    metadata = optimizer.metadata
    if key in metadata:
        return metadata[key]
    own = {"lr_scheduler": metadata["lr_scheduler"]} if key == SCHEDULER and "lr_scheduler" in metadata else {}
    before = len(notes)
    found = scheduler(replace(optimizer, metadata=own), notes, name=f"{key}.bin")
    if len(notes) > before:
        notes[-1] += "; with several processes Accelerate steps it once for each, unless it is told otherwise"
    return found
