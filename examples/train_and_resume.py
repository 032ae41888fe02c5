"""Train a small GPT on 4 processes, kill one at a random step, and resume on 4, 3 and 2, as if nothing had been.

    python examples/train_and_resume.py [--directory DIR] [--steps N] [--seed S] [--png FILE] [--quick]

The processes are started here; the training itself is `_train` in zckpt/training/demo/ranks.py: some thirty lines,
of which `Checkpointer(...)`, `.resume(...)` and `.step(...)` are zckpt's part. The losses are held against those of a
run that was left alone, and drawn beside them. Exit status 1: they do not agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from zckpt.errors import ZckptError
from zckpt.training.demo import demonstrate


def main() -> int:
    """Run the example; return an exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--directory", help="for checkpoints and the picture; empty or new (default: a temporary one)")
    parser.add_argument("--steps", type=int, help="default: 400; with --quick 24")
    parser.add_argument("--seed", type=int, default=0, help="of model, data and kills (default: 0)")
    parser.add_argument("--png", help="default: loss.png in the directory")
    parser.add_argument("--quick", action="store_true", help="a smaller model, and few steps")
    given = parser.parse_args()
    directory = given.directory or tempfile.mkdtemp(prefix="zckpt-resume-")
    try:
        done = demonstrate(directory, tell=print, steps=given.steps, seed=given.seed, png=given.png, quick=given.quick)
    except ZckptError as error:
        print(f"train_and_resume: {error}", file=sys.stderr)
        return error.exit_status
    return 1 if done.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
