"""The map of a checkpoint as a picture: ranks down, parameters across, to scale; SVG by itself, PNG with matplotlib.

Both are drawn from one list of shapes, back to front: columns, bands of rows, bars, names cut to fit. Where there are
more ranks than there is room for, neighbours are drawn as one band: what any of them holds is filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from html import escape
from importlib import import_module
from io import BytesIO
from itertools import pairwise
from os.path import commonprefix
from pathlib import PurePath
from typing import Any

from zckpt.errors import MissingPackageError
from zckpt.immutable import immutable, mutable
from zckpt.report.text import Document, count, size

WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 130, 150, 96, 24
ROW = 40
"""Pixels of a row, where there are few."""

MOST_HEIGHT = 560
"""Pixels of all rows; more of them become lower."""

BAND_LEAST = 10
"""Pixels; where rows would be lower, neighbouring ranks are drawn as one band."""

LEAST = 0.4
"""Pixels; gaps narrower than this are closed and spans narrower than this drawn so wide, which bounds the picture."""

SLOT_COLOURS = ("#3f6fa6", "#2d98bd", "#228833", "#a58a0b", "#dd5466", "#aa3377", "#7d848c")
"""Paul Tol's bright scheme, darkened; the first is the weight's, the second the master's."""

TEXT, QUIET, LINE, GROUND, SUNKEN = "#1b1f24", "#59626d", "#d9dde2", "#ffffff", "#f4f5f7"
SPAN_NUMBERS = 6
"""How many numbers the map has for one span of elements."""

MOST_LABELS = 60
FITTING = 0.6
"""Modules are named one level deeper as long as their names fit over this share of the axis."""

CHARACTER = 0.58
"""Width of a character relative to the font's size, for cutting labels."""


@immutable
class Shape:
    """A rectangle, or a text whose left end (right end: `right`) and middle are at (x, y)."""

    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    fill: str = ""
    hatch: str = ""
    text: str = ""
    font: int = 12
    bold: bool = False
    right: bool = False


@mutable
class Column:
    """A parameter, or the padding (row, start, numel) of a param group, and where it is on the axis in elements."""

    parameter: Document | None
    start: int
    numel: int
    padding: list[tuple[int, int, int]] = field(default_factory=list)


@immutable
class Band:
    """Rows [first, end) that are drawn as one."""

    first: int
    end: int
    ranks: bool
    label: str
    slots: list[int]
    y: float
    height: float


Part = tuple[str, int, int]
"""What stands over some of the axis, from where to where."""


def shapes(map_data: Document) -> tuple[list[Shape], int]:
    """Return what to draw, back to front, and the picture's height."""
    columns, sections = _columns(map_data)
    total = max(1, columns[-1].start + columns[-1].numel if columns else 1)
    bands, room = _bands(map_data), WIDTH - LEFT - RIGHT
    scale = room / total
    shapes = list(_heading(map_data))
    shapes += (Shape(LEFT, band.y, room, band.height, fill=SUNKEN) for band in bands)
    shapes += (Shape(LEFT, band.y - 0.5, room, 1, fill=LINE) for band in bands[1:] if band.height >= BAND_LEAST)
    for column in columns:
        shapes += _column(map_data, column, bands, scale)
    shapes = _joined(shapes)
    shapes += _labels(columns, sections, bands, scale)
    shapes += _bars(map_data, bands)
    return shapes, round(bands[-1].y + bands[-1].height + BOTTOM) if bands else TOP + BOTTOM


def _columns(map_data: Document) -> tuple[list[Column], list[Part]]:
    """Return columns in the order of the param groups, each group's padding behind it; and what stands over them."""
    parameters = [one for one in map_data["parameters"] if one["kind"] != "tied"]
    groups = sorted({p[0] for p in map_data["padding"]} | {p["group"] for p in parameters if p["group"] is not None})
    members: dict[int | str | None, list[Document]] = {group: [] for group in (*groups, None, "buffers")}
    for one in parameters:
        members["buffers" if one["kind"] == "buffer" else one["group"]].append(one)
    alone = "frozen" if all(one["kind"] == "frozen" for one in members[None]) else "no group"
    columns: list[Column] = []
    sections: list[Part] = []
    at = 0
    for group, own in members.items():
        start = at
        for member in own:
            columns.append(Column(member, at, member["numel"]))
            at += member["numel"]
        column = Column(None, at, 0)
        for owner, row, numel, _ in map_data["padding"]:
            if owner == group:
                column.padding.append((row, column.numel, numel))
                column.numel += numel
        if column.numel:
            columns.append(column)
            at += column.numel
        if at > start:
            label = alone if group is None else f"group {group}" if isinstance(group, int) else group
            sections.append((label, start, at))
    return columns, sections


def _bands(map_data: Document) -> list[Band]:
    """Return the bands that the rows are drawn as: one each, or some ranks together where there are too many."""
    rows = map_data["rows"]
    ranks = sum(row["dp"] is not None for row in rows)
    together = 1
    while ranks / together + len(rows) - ranks > MOST_HEIGHT / BAND_LEAST and together < ranks:
        together *= 2
    starts: list[int] = []
    for index, row in enumerate(rows):
        first = rows[starts[-1]] if starts else row
        is_near = row["dp"] is not None and first["dp"] is not None and row["mp"] == first["mp"]
        if not (starts and is_near and index - starts[-1] < together):
            starts.append(index)
    height = min(ROW, MOST_HEIGHT / max(1, len(starts)))
    bands: list[Band] = []
    for start, end in pairwise([*starts, len(rows)]):
        first, *more = members = rows[start:end]
        slots = [s for s in range(len(map_data["slots"])) if any(row["held"][s] for row in members)]
        label = first["label"]
        if more:
            slices = "" if label.startswith("rank") else f" mp {first['mp']}"
            label = f"ranks {first['dp']}\u2013{more[-1]['dp']}{slices}"
        bands.append(Band(start, end, first["dp"] is not None, label, slots, TOP + len(bands) * height, height))
    return bands


def _heading(map_data: Document) -> Iterator[Shape]:
    name = "/".join(PurePath(map_data["source"]).parts[-2:])
    yield Shape(16, 24, text=cut(name, 700, 17), font=17, bold=True, fill=TEXT)
    slots = map_data["slots"]
    held = [sum(row["held"][s] for row in map_data["rows"]) for s in range(len(slots))]
    stage = "" if map_data["zero_stage"] is None else f", ZeRO stage {map_data['zero_stage']}"
    about = f"{map_data['format']}{stage}, {parameters_of(map_data)}, {size(sum(held))}"
    yield Shape(WIDTH - 16, 24, text=about, fill=QUIET, right=True, font=13)
    x = 16.0
    legend = [(slot, _colour(slots, i), "") for i, slot in enumerate(slots) if held[i]]
    if any(one["kind"] == "frozen" for one in map_data["parameters"]):
        legend.append(("frozen", SLOT_COLOURS[0], "frozen"))
    if map_data["padding"]:
        legend.append(("padding", SUNKEN, "padding"))
    for label, fill, hatch in legend:
        yield Shape(x, 45, 12, 12, fill=fill, hatch=hatch)
        yield Shape(x + 18, 51, text=label, fill=TEXT, font=13)
        x += 18 + len(label) * 13 * CHARACTER + 22


def _column(map_data: Document, column: Column, bands: Sequence[Band], scale: float) -> Iterator[Shape]:
    x = LEFT + column.start * scale
    if column.parameter is None:
        for row, start, numel in column.padding:
            band = next(band for band in bands if band.first <= row < band.end)
            width = max(numel * scale, 1.0)
            yield Shape(x + start * scale, band.y + 1, width, band.height - 2, fill=SUNKEN, hatch="padding")
        return
    hatch = "frozen" if column.parameter["kind"] == "frozen" else ""
    for slots, _, numel, spans in column.parameter["cuts"]:
        step = column.numel * scale / numel if numel else 0.0
        for at in range(0, len(spans), SPAN_NUMBERS):
            row, number, start, share, stop = spans[at : at + SPAN_NUMBERS - 1]
            for band in bands:
                first, last = max(band.first, row), min(band.end, row + number)
                if first >= last:
                    continue
                begin, end = start + (first - row) * share, min(start + (last - row) * share, stop)
                gap = 2.0 if band.height > 20 else 1.0
                each = (band.height - 2 * gap) / len(band.slots)
                width = max((end - begin) * step, LEAST)
                for slot in slots:
                    y = band.y + gap + band.slots.index(slot) * each
                    height = each - (1 if each > 6 else 0)
                    yield Shape(x + begin * step, y, width, height, _colour(map_data["slots"], slot), hatch)


def _joined(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes with neighbours of one height and colour put together, which bounds how many there are."""
    done: list[Shape] = []
    open_: dict[tuple[float, float, str, str], int] = {}
    for one in shapes:
        if one.text or one.fill in (SUNKEN, LINE):
            done.append(one)
            continue
        key = (one.y, one.height, one.fill, one.hatch)
        before = done[open_[key]] if key in open_ else None
        if before and -LEAST * 2 <= one.x - before.x - before.width < LEAST:
            done[open_[key]] = replace(before, width=max(before.width, one.x + one.width - before.x))
        else:
            open_[key] = len(done)
            done.append(one)
    return done


def _labels(
    columns: Sequence[Column], sections: Sequence[Part], bands: Sequence[Band], scale: float
) -> Iterator[Shape]:
    """Yield the names of sections, of modules where they fit, and of rows."""
    bottom = bands[-1].y + bands[-1].height if bands else TOP
    for label, start, stop in sections:
        text = cut(label, (stop - start) * scale - 4, 11)
        if text:
            yield Shape(LEFT + start * scale + 2, TOP - 25, text=text, font=11, bold=True, fill=TEXT)
        if start:
            yield Shape(LEFT + start * scale - 0.5, TOP - 12, 1, bottom - TOP + 12, fill=QUIET)
    for label, start, stop in _modules(columns, scale):
        text = cut(label, (stop - start) * scale - 6, 11)
        if text:
            yield Shape(LEFT + start * scale + 2, TOP - 9, text=text, font=11, fill=QUIET)
        yield Shape(LEFT + start * scale - 0.25, TOP, 0.5, bottom - TOP, fill=GROUND)
    every = max(1, round(13 / bands[0].height)) if bands else 1
    ranks = 0
    for band in bands:
        if not band.ranks or ranks % every == 0:
            text = cut(band.label, LEFT - 24, 12)
            yield Shape(16, band.y + band.height / 2, text=text, font=12, fill=TEXT)
        ranks += band.ranks


def _modules(columns: Sequence[Column], scale: float) -> list[Part]:
    """Return neighbouring columns of one module, at the depth at which most names still fit."""
    best: list[Part] = []
    for depth in range(1, 9):
        found: list[Part] = []
        for column in columns:
            if not column.numel or column.parameter is None:
                continue
            steps = column.parameter["name"].split(".")
            name = ".".join(steps[: min(depth, max(1, len(steps) - 1))])
            joins = bool(found) and found[-1][0] == name and found[-1][2] == column.start
            start = found.pop()[1] if joins else column.start
            found.append((name, start, column.start + column.numel))
        inner = [name.split(".")[:-1] for name in {name for name, _, _ in found}]
        shared = len(commonprefix(inner)) if len(inner) > 1 else 0  # noqa: RUF071  # of steps, not of characters
        named = [(".".join(name.split(".")[shared:]), start, stop) for name, start, stop in found]
        fitting = sum(stop - start for name, start, stop in named if cut(name, (stop - start) * scale - 6, 11) == name)
        if best and (len(found) > MOST_LABELS or fitting < FITTING * sum(stop - start for _, start, stop in named)):
            break
        best = named
    return best


def _bars(map_data: Document, bands: Sequence[Band]) -> Iterator[Shape]:
    """Yield the bytes that each rank holds, slot by slot; of a band the mean, of other files a number."""
    rows = map_data["rows"]
    totals = [sum(row["held"]) + row["padding"] for row in rows]
    ranks = any(band.ranks for band in bands)
    most = max([n for n, row in zip(totals, rows, strict=True) if row["dp"] is not None or not ranks], default=0) or 1
    left, room = WIDTH - RIGHT + 14, RIGHT - 30
    yield Shape(left, TOP - 9, text=f"bytes, to {size(most)}", font=11, fill=QUIET)
    for band in bands:
        middle = band.y + band.height / 2
        if ranks and not band.ranks:
            yield Shape(left, middle, text=size(totals[band.first]), font=11, fill=QUIET)
            continue
        height = min(12, band.height - 2)
        members = rows[band.first : band.end]
        x = float(left)
        for slot in band.slots:
            width = sum(row["held"][slot] for row in members) / len(members) / most * room
            yield Shape(x, middle - height / 2, width, height, fill=_colour(map_data["slots"], slot))
            x += width
        width = sum(row["padding"] for row in members) / len(members) / most * room
        if width > LEAST:
            yield Shape(x, middle - height / 2, width, height, fill=SUNKEN, hatch="padding")


def _colour(slots: Sequence[str], slot: int) -> str:
    """Return the colour of a slot: weight and master have their own, the others take turns."""
    fixed = ("weight", "master")
    if slots[slot] in fixed:
        return SLOT_COLOURS[fixed.index(slots[slot])]
    others = [name for name in slots if name not in fixed]
    return SLOT_COLOURS[2 + others.index(slots[slot]) % (len(SLOT_COLOURS) - 2)]


def cut(value: str, room: float, font: int) -> str:
    """Return as much of a text as fits in `room` pixels; empty where that is nothing of use."""
    most = int(room / (font * CHARACTER))
    if len(value) <= most:
        return value
    return f"{value[: most - 1]}\u2026" if most >= 3 else ""


def parameters_of(map_data: Document) -> str:
    """Return how many parameters of the model there are, buffers and other names aside."""
    return count(sum(one["kind"] in ("parameter", "frozen") for one in map_data["parameters"]), "parameter")


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
    ]
    for one in drawn:
        if one.text:
            anchor = ' text-anchor="end"' if one.right else ""
            weight = ' font-weight="600"' if one.bold else ""
            lines.append(
                f'<text x="{one.x:.1f}" y="{one.y:.1f}" dy=".35em" font-size="{one.font}"{anchor}{weight} '
                f'fill="{one.fill}">{_safe(one.text)}</text>'
            )
        else:
            box = f'x="{one.x:.2f}" y="{one.y:.2f}" width="{one.width:.2f}" height="{one.height:.2f}"'
            hatch = f'<rect {box} fill="url(#{one.hatch})"/>' if one.hatch else ""
            lines.append(f'<rect {box} fill="{one.fill}"/>{hatch}')
    return "\n".join([*lines, "</svg>\n"])


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
