"""Both curves as a picture, if matplotlib is there, or as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from zckpt.errors import TargetError
from zckpt.storage.durable import written_files
from zckpt.training.demo.ranks import Part

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
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title="killed and resumed, beside a run left alone")
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
        with written_files([path], overwrite=False) as [partial]:
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
