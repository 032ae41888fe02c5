"""The map of a checkpoint as a picture: ranks down, parameters across, to scale; SVG by itself, PNG with matplotlib.

Both are drawn from one list of shapes. Where there are more ranks than there is room for, neighbours are drawn as one
band: what any of them holds is filled.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from io import BytesIO
from typing import Any

from zckpt.errors import MissingPackageError
from zckpt.report.picture.shapes import GROUND, QUIET, SUNKEN, WIDTH, Shape, parameters_of, shapes
from zckpt.report.text import Document, count


def svg(map_data: Document) -> str:
    """Return the map as an SVG document. `map_data`: from `zckpt.map`."""
    drawn, height = shapes(map_data)
    title = f"Map of {map_data['source']}"
    about = f"{count(len(map_data['rows']), 'row')} of ranks or files, {parameters_of(map_data)} to scale"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description" font-family="system-ui, Helvetica, Arial, sans-serif">',
        f'<title id="title">{_safe(title)}</title><desc id="description">{_safe(about)}</desc>',
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{SUNKEN}"/><path d="M0 0V6" stroke="{QUIET}" stroke-width="2"/></pattern>'
        '<pattern id="frozen" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V6" stroke="{GROUND}" stroke-width="3"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="{GROUND}"/>',
        *(_svg_shape(shape) for shape in drawn),
        "</svg>\n",
    ]
    return "\n".join(lines)


def png(map_data: Document) -> bytes:
    """Return the map as a PNG, at twice the SVG's pixels. Raises MissingPackageError: matplotlib is not installed."""
    try:
        figure_type: Any = import_module("matplotlib.figure").Figure
        canvas: Any = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
        rectangle: Any = import_module("matplotlib.patches").Rectangle
    except ImportError as error:
        raise MissingPackageError(
            "a PNG needs matplotlib, which is not installed", advice="pip install 'zckpt[png]', or write .svg"
        ) from error
    drawn, height = shapes(map_data)
    figure = figure_type(figsize=(WIDTH / 100, height / 100), dpi=200, facecolor=GROUND)
    canvas(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    for one in drawn:
        if one.text:
            axes.text(
                one.x,
                one.y,
                _plain(one.text).replace("$", r"\$"),
                fontsize=one.font * 0.72,
                color=one.fill,
                va="center_baseline",
                ha="right" if one.right else "left",
                weight="bold" if one.bold else "normal",
            )
            continue
        looks: list[dict[str, Any]] = [{"facecolor": one.fill}]
        if one.hatch:
            line = QUIET if one.hatch == "padding" else GROUND
            looks.append({"fill": False, "hatch": "//////", "edgecolor": line})
        for look in looks:
            axes.add_patch(rectangle((one.x, one.y), one.width, one.height, linewidth=0, **look))
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Title": _plain(f"Map of {map_data['source']}"), "Software": None})
    return out.getvalue()


def _plain(value: str) -> str:
    """Return text without what no XML and no font can hold."""
    return "".join(c if c.isprintable() else "\ufffd" for c in value)


def _safe(value: str) -> str:
    return escape(_plain(value), quote=True)


def _svg_shape(one: Shape) -> str:
    if one.text:
        anchor = ' text-anchor="end"' if one.right else ""
        weight = ' font-weight="600"' if one.bold else ""
        return (
            f'<text x="{one.x:.1f}" y="{one.y:.1f}" dy=".35em" font-size="{one.font}"{anchor}{weight} '
            f'fill="{one.fill}">{_safe(one.text)}</text>'
        )
    box = f'x="{one.x:.2f}" y="{one.y:.2f}" width="{one.width:.2f}" height="{one.height:.2f}"'
    drawn = f'<rect {box} fill="{one.fill}"/>'
    return drawn + (f'<rect {box} fill="url(#{one.hatch})"/>' if one.hatch else "")
