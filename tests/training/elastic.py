"""What an elastic launcher runs again and again: resume, train, write down each step, until a file says it is enough.

python -m tests.training.elastic DIRECTORY [spare]

With `spare`, it saves every hundredth step only, and keeps each in memory; SPARE_IN is where. A step is then written
down when it has been kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zckpt
from tests.training.trainings import BY_NAME, Training

EVERY = 5
SECONDS = 0.1  # that a step takes


def main(directory: Path, *, spare: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training = Training.of(BY_NAME["zero2-plain-float32"])
    options: dict[str, Any] = {"every": EVERY}
    if spare:
        options = {"every": 100, "replicate": True, "replicate_in": os.environ.get("SPARE_IN")}
    with zckpt.Checkpointer(directory / "run", **options) as checkpointer:
        restored = checkpointer.resume(**training.given)
        first = (restored.step or 0) if restored else 0
        step = first
        while not checkpointer.is_ending:
            enough = torch.tensor(int((directory / "enough").exists()))
            dist.all_reduce(enough, op=dist.ReduceOp.MAX)
            if enough:
                break
            [loss] = training.train([step])
            time.sleep(SECONDS)
            step += 1
            if spare:
                checkpointer.step(step, **training.given)
            if rank == 0:
                told = {"step": step, "loss": loss, "ranks": world_size, "first": first, "pid": os.getpid()}
                with (directory / "steps").open("a") as file:
                    file.write(json.dumps(told) + "\n")
            if not spare:
                checkpointer.step(step, **training.given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), spare=sys.argv[2:] == ["spare"])
