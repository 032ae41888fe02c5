"""Train a small GPT on 4 processes, kill one at a random step, and resume on 4, 3 and 2, as if nothing had been.

    python examples/train_and_resume.py [--directory DIR] [--steps N] [--seed S] [--png FILE] [--quick]

The processes, and the training itself, are in killed_ranks.py: `_train` is some thirty lines, of which
`Checkpointer(...)`, `.resume(...)` and `.step(...)` are zckpt's part. The losses are held against those of a run that
was left alone, and both are drawn in one picture. Exit status 1: they do not agree.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from killed_ranks import SMALL, Part, Size, Training, run

from zckpt.errors import TargetError, TargetExistsError, UsageError, ZckptError
from zckpt.storage.durable import written

TOLERANCE = 1e-2
"""How far a loss may be from the one of the run left alone, relative to it, where sums over ranks are taken in another
order: about 1e-7 after a step, which hundreds of further steps make more of."""

WORLDS = (4, 4, 3, 2)
"""Ranks before the first kill, after it, after the second, and to the end."""

SAVES = 20
"""Checkpoints of the whole run."""

STEPS = 400
QUICK_STEPS = 24

LEAST_STEPS = 16
"""Each part must have a step to be killed at."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went.

    Parameters
    ----------
    whole : Part
        The run that was left alone.
    parts : list of Part
        The other one.
    wrong : list of str
        What is not as it should be; empty: all is well.
    picture : Path or None
    """

    whole: Part
    parts: list[Part]
    wrong: list[str] = field(default_factory=list)
    picture: Path | None = None


def demonstrate(
    directory: str | os.PathLike[str],
    *,
    tell: Callable[[str], None],
    steps: int | None = None,
    seed: int = 0,
    png: str | os.PathLike[str] | None = None,
    quick: bool = False,
) -> Outcome:
    """Train a small GPT on 4 processes, kill one of them, and resume, on 4, 3 and 2; compare with a run left alone.

    Parameters
    ----------
    directory : path-like
        Gets the checkpoints, in `run`; made if it does not exist, and must be empty.
    tell : callable
        Gets each line of what happens.
    steps : int, optional
        By default 400; 24 if quick.
    seed : int
        Of the model, the data, and what is killed when.
    png : path-like, optional
        The picture's file; by default `loss.png` in the directory.
    quick : bool
        Train a smaller model.

    Returns
    -------
    Outcome

    Raises
    ------
    UsageError
        The directory is not empty, or there are too few steps.
    TargetError
        The picture exists already, or cannot be written.
    ZckptError
        A rank failed that was not killed.
    """
    path = Path(directory)
    if steps is None:
        steps = QUICK_STEPS if quick else STEPS
    if steps < LEAST_STEPS:
        raise UsageError("too few steps", expected=f"at least {LEAST_STEPS}", found=steps)
    if path.is_dir() and any(path.iterdir()):
        raise UsageError("is not empty", path=path, advice="give a directory for this run alone")
    if png is not None and os.path.lexists(png):
        raise TargetExistsError("already exists", path=png, advice="choose another name")
    chances = random.Random(seed)  # noqa: S311  # nobody is to be kept from guessing
    size = SMALL if quick else Size()
    every = max(1, steps // SAVES)
    tell(f"{steps} steps of a small GPT on {WORLDS[0]} processes, left alone")
    whole = run(Training(path / "alone", steps, None, seed, size), WORLDS[0])
    tell(f"  loss {whole.losses[1]:.4f} at step 1, {whole.losses[steps]:.4f} at step {steps}")
    tell(f"the same with trouble, saved every {every} steps in {path / 'run'}")
    training = Training(path / "run", steps, every, seed, size)
    parts = []
    for index, world_size in enumerate(WORLDS):
        kill = None if world_size == WORLDS[-1] else (_moment(chances, steps, index), chances.randrange(world_size))
        parts.append(run(training, world_size, kill=kill))
        tell(_summary(parts[-1]))
    wrong = [*disagreements(whole, parts, steps)]
    agreement = f"losses agree: of {WORLDS[0]} ranks bit-equal, of fewer within {TOLERANCE:g} of the run left alone"
    tell(
        "\n".join(f"WRONG: {one}" for one in wrong)
        if wrong
        else f"{agreement} (at most {_apart(whole, parts):.2g} apart)"
    )
    plot = Plot(whole, parts)
    picture = draw(plot, Path(png) if png is not None else path / "loss.png")
    tell(f"both curves are in {picture}" if picture else f"{table(plot)}\nmatplotlib is not here to draw a picture")
    return Outcome(whole, parts, wrong, picture)


def _moment(chances: random.Random, steps: int, index: int) -> int:
    """Return a step in the second half of a part."""
    length = steps // len(WORLDS)
    return chances.randrange(index * length + length // 2, (index + 1) * length) + 1


def _summary(part: Part) -> str:
    first, last = min(part.losses, default=part.resumed), max(part.losses, default=part.resumed)
    begun = f"resumed at step {part.resumed}, saved by {part.saved_by} ranks" if part.resumed else "started"
    ended = "to the end" if part.killed is None else f"until rank {part.killed} was killed"
    return f"  {part.world_size} ranks: {begun}; steps {first} to {last}, {ended}"


def _apart(whole: Part, parts: list[Part]) -> float:
    """Return how far any loss is from the one it should be, relative to that."""
    return max(abs(loss / whole.losses[step] - 1) for part in parts for step, loss in part.losses.items())


def disagreements(whole: Part, parts: list[Part], steps: int) -> Iterator[str]:
    """Yield what is not as it should be in the parts of a run, compared with a whole one."""
    if any(part.killed is None for part in parts[:-1]):
        yield "nothing was killed"
    for before, part in itertools.pairwise(parts):
        if part.saved_by != before.world_size or not 0 < part.resumed <= max(before.losses):
            yield f"{part.world_size} ranks did not resume what {before.world_size} had saved"
    missing = set(range(1, steps + 1)).difference(*(part.losses for part in parts))
    if missing:
        yield f"no loss of step {min(missing)}"
    for part in parts:
        exact = part.world_size == whole.world_size
        for step, loss in part.losses.items():
            expected = whole.losses[step]
            if loss != expected and (exact or not abs(loss - expected) <= TOLERANCE * abs(expected)):
                yield f"loss {loss} of {part.world_size} ranks at step {step}, where it was {expected}"
                break


ROWS = 20


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn: the run that was left alone, and the parts of the other."""

    whole: Part
    parts: list[Part]


def draw(plot: Plot, path: Path) -> Path | None:
    """Write a PNG and return its path; None if matplotlib is missing.

    Raises
    ------
    TargetError
        It exists, or cannot be written.
    """
    try:
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
        import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    except ImportError:
        return None
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title="killed and resumed, and a run left alone")
    whole = plot.whole.losses
    axes.plot([*whole], [*whole.values()], color="0.75", linewidth=5, label=f"{plot.whole.world_size} ranks, alone")
    for part in plot.parts:
        steps, losses = [*part.losses], [*part.losses.values()]
        [line] = axes.plot(steps, losses, linewidth=1.2, label=f"{part.world_size} ranks from step {part.resumed}")
        if part.killed is not None and steps:
            axes.plot(steps[-1], losses[-1], "x", color=line.get_color(), markersize=10, markeredgewidth=2)
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written([path], overwrite=False) as [partial]:
            figure.savefig(partial, format="png", dpi=120)
    except TargetError:
        raise
    except OSError as error:
        raise TargetError("cannot be written", path=path, found=error.strerror) from error
    return path


def table(plot: Plot) -> str:
    """Return some of the losses side by side."""
    latest = {step: (loss, part.world_size) for part in plot.parts for step, loss in part.losses.items()}
    steps = sorted(plot.whole.losses)
    shown = sorted({*steps[:: max(1, len(steps) // ROWS)], steps[-1]})
    lines = ["  step     alone   resumed  ranks"]
    for step in shown:
        loss, ranks = latest[step]
        lines.append(f"{step:6d}  {plot.whole.losses[step]:8.4f}  {loss:8.4f}  {ranks:5d}")
    return "\n".join(lines)


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
