"""IPython's door: a notebook shows the map of a checkpoint, small, where it would print a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.operations.open import OpenedCheckpoint


def load_ipython_extension(shell: Any) -> None:  # noqa: ANN401  # IPython's InteractiveShell
    """Draw checkpoints in this shell. `import zckpt` does so where IPython runs; `%load_ext zckpt.notebook`, too."""
    drawn = shell.display_formatter.formatters["text/html"]
    drawn.for_type_by_name("zckpt.operations.open", "OpenedCheckpoint", _picture)


def _picture(checkpoint: OpenedCheckpoint) -> str:
    from html import escape

    from zckpt.operations.map import map as map_of
    from zckpt.report.picture import svg

    said = escape(repr(checkpoint).replace("\n", "; "))
    return f'<div style="max-width: 48em">{svg(map_of(checkpoint).as_dict())}<p><small>{said}</small></p></div>'
