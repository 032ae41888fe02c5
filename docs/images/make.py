"""Make the pictures of this folder again: `python docs/images/make.py`, from the root of the repository.

They show real checkpoints of `fixtures/`. For the diff and the verification a copy is changed: masters and moments of
the optimizer drift the more the deeper the layer is, and one rank's second moments get a few NaN. Needs
playwright and the system's chromium; `--only NAME` makes one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from zckpt.formats import open_checkpoint
from zckpt.state import Checkpoint, Span

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "fixtures" / "hf_llama_s2_bf16_dp2"
WIDTH, HEIGHT = 1280, 1000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def zckpt(work: Path, *arguments: object) -> None:
    """Run a verb; a diff that differs and a checkpoint that is not sound are what is wanted here."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "zckpt", *map(str, arguments)],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)


def changed(span: Span, change: np.ndarray | float) -> None:
    """Multiply the fp32 elements of a span where it lies."""
    path = Path(span.path)
    data = bytearray(path.read_bytes())
    values = np.frombuffer(data, np.float32, span.extent.numel, span.offset)
    data[span.offset : span.offset + values.nbytes] = (values * change).astype(np.float32).tobytes()
    path.write_bytes(data)


def drifted(checkpoint: Checkpoint) -> None:
    """Let masters and moments drift, a decade more for each part of the model from front to back."""
    random = np.random.default_rng(1)
    for depth, parameter in enumerate(checkpoint.parameters.values()):
        for name, scale in (("master", 1e-6), ("exp_avg", 1e-3), ("exp_avg_sq", 1e-4)):
            if name not in parameter.slots or "norm" in parameter.name:
                continue
            for span in parameter.slots[name].spans:
                noise = random.standard_normal(span.extent.numel) * scale * 10 ** (depth / 8)
                changed(span, 1 + noise)


def spoilt(checkpoint: Checkpoint) -> None:
    """Put NaN into one rank's second moments."""
    slot = checkpoint.parameters["model.layers.1.mlp.up_proj.weight"].slots["exp_avg_sq"]
    factors = np.ones(slot.spans[-1].extent.numel)
    factors[100:103] = np.nan
    changed(slot.spans[-1], factors)


def shoot(page: Page, html: Path, name: str, *, prepare: str = "", height: int = HEIGHT) -> None:
    """Save what a window of the README's width shows of a page."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(html.as_uri())
    if prepare:
        page.evaluate(prepare)
    page.wait_for_timeout(300)
    page.screenshot(path=HERE / f"{name}.png")


def main() -> None:
    """Make all of them, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["inspect", "diff", "verify", "map"])
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        work = Path(place)
        program = next(filter(None, map(shutil.which, BROWSERS)))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        shutil.copytree(SOURCE, work / "run")
        if only in (None, "map"):
            zckpt(work, "map", "run", HERE / "map.svg", "--overwrite")
        if only in (None, "inspect"):
            zckpt(work, "inspect", "run", "--html", "inspect.html")
            shoot(page, work / "inspect.html", "inspect", prepare=POINT)
        if only in (None, "diff"):
            other = Path(shutil.copytree(SOURCE, work / "run-drifted"))
            drifted(open_checkpoint(other))
            zckpt(work, "diff", "run", other.name, "--html", "diff.html")
            shoot(page, work / "diff.html", "diff")
        if only in (None, "verify"):
            other = Path(shutil.copytree(SOURCE, work / "run-spoilt"))
            spoilt(open_checkpoint(other))
            zckpt(work, "verify", other.name, "--deep", "--html", "verify.html")
            shoot(page, work / "verify.html", "verify")
        browser.close()


POINT = """() => {
    const stage = document.getElementById("map-stage");
    stage.focus();
    for (const key of ["ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"]) {
        stage.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }
}"""
"""Move to a parameter, so that the picture shows what is said of it."""

if __name__ == "__main__":
    main()
