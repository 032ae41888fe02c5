"""The real checkpoints in `fixtures/`, as a user opens them, and what is left out of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"

LEFT_OUT = {"pp2_s0_fp32_dp2": "optimizer/*"}
"""What is left out of which: without ZeRO, pipeline stages number their optimizers' parameters by themselves."""


def _folders(root) -> Iterator[Path]:
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name in ("generated", "__pycache__"):
            continue
        if folder.name in ("other", "universal", "versions"):
            yield from _folders(folder)
        else:
            yield folder


def _opened(folder) -> Path:
    """What of a folder is opened: a run's directory itself, of other programs what lies beside the truth."""
    if folder.parent.name != "other":
        return folder
    found = [path for path in folder.iterdir() if not path.name.startswith("truth")]
    return found[0] if len(found) == 1 else folder


SOURCES = {folder.relative_to(FIXTURES).as_posix(): _opened(folder) for folder in _folders(FIXTURES)}
"""By the name of the fixture."""
