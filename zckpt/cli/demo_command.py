"""`zckpt demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where checkpoints and the picture go; empty or new. Default: a temporary one, which stays.",
)
@click.option("--steps", type=int, metavar="N", help="Steps of training. Default: 400; with --quick 24.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the model, the data, and what is killed when.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Default: loss.png in DIR.")
@click.option("--quick", is_flag=True, help="A smaller model and few steps.")
def demo_command(directory: Path | None, steps: int | None, seed: int, png: Path | None, quick: bool) -> int:
    """Train a small GPT on 4 processes of this machine, kill one, and resume on 4, then 3, then 2.

    The losses are held against those of the same run left alone, and both curves are drawn. Takes less than two
    minutes. Exit status 1: they do not agree.
    """
    import tempfile

    from zckpt.training.demo import demonstrate

    place = directory or Path(tempfile.mkdtemp(prefix="zckpt-demo-"))
    done = demonstrate(place, tell=click.echo, steps=steps, seed=seed, png=png, quick=quick)
    return 1 if done.wrong else 0
