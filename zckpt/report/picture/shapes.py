"""The shapes of a map's picture, back to front: ground, spans of elements, bars and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from zckpt.report.picture.axes import (
    BAND_LEAST,
    BOTTOM,
    CHARACTER,
    LEAST,
    LEFT,
    LINE,
    QUIET,
    RIGHT,
    SLOT_COLOURS,
    SPAN_NUMBERS,
    SUNKEN,
    TEXT,
    TOP,
    WIDTH,
    Band,
    Column,
    Shape,
    colour,
    cut,
    labels,
    place_bands,
    place_columns,
)
from zckpt.report.text import count, size


def shapes(map_data: Mapping[str, Any]) -> tuple[list[Shape], int]:
    """Return what to draw, back to front, and the picture's height."""
    columns, sections = place_columns(map_data)
    total = max(1, columns[-1].start + columns[-1].numel if columns else 1)
    scale = (WIDTH - LEFT - RIGHT) / total
    bands = place_bands(map_data)
    shapes = list(_heading(map_data))
    shapes += _ground(bands)
    for column in columns:
        shapes += _column(map_data, column, bands, scale)
    shapes = _joined(shapes)
    shapes += labels(columns, sections, bands, scale)
    shapes += _bars(map_data, bands)
    return shapes, round(bands[-1].y + bands[-1].height + BOTTOM) if bands else TOP + BOTTOM


def _heading(map_data: Mapping[str, Any]) -> Iterator[Shape]:
    name = "/".join(PurePath(map_data["source"]).parts[-2:])
    yield Shape(16, 24, text=cut(name, 700, 17), font=17, bold=True, fill=TEXT)
    held = [sum(row["held"][s] for row in map_data["rows"]) for s in range(len(map_data["slots"]))]
    stage = "" if map_data["zero_stage"] is None else f", ZeRO stage {map_data['zero_stage']}"
    about = f"{map_data['format']}{stage}, {count(num_parameters(map_data), 'parameter')}, {size(sum(held))}"
    yield Shape(WIDTH - 16, 24, text=about, fill=QUIET, right=True, font=13)
    x = 16.0
    kinds = {one["kind"] for one in map_data["parameters"]}
    entries = [(slot, colour(map_data["slots"], i), "") for i, slot in enumerate(map_data["slots"]) if held[i]]
    entries += [("frozen", SLOT_COLOURS[0], "frozen")] * ("frozen" in kinds)
    entries += [("padding", SUNKEN, "padding")] * bool(map_data["padding"])
    for label, fill, hatch in entries:
        yield Shape(x, 45, 12, 12, fill=fill, hatch=hatch)
        yield Shape(x + 18, 51, text=label, fill=TEXT, font=13)
        x += 18 + len(label) * 13 * CHARACTER + 22


def _ground(bands: Sequence[Band]) -> Iterator[Shape]:
    for band in bands:
        yield Shape(LEFT, band.y, WIDTH - LEFT - RIGHT, band.height, fill=SUNKEN)
    for band in bands[1:]:
        if band.height >= BAND_LEAST:
            yield Shape(LEFT, band.y - 0.5, WIDTH - LEFT - RIGHT, 1, fill=LINE)


def _lane(band: Band, slot: int) -> tuple[float, float]:
    """Return the top and height of a slot's lane in a band."""
    gap = 2.0 if band.height > 20 else 1.0
    each = (band.height - 2 * gap) / len(band.lanes)
    return band.y + gap + band.lanes.index(slot) * each, each - (1 if each > 6 else 0)


def _column(map_data: Mapping[str, Any], column: Column, bands: Sequence[Band], scale: float) -> Iterator[Shape]:
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
        for band, begin, end in _by_band(spans, bands):
            for slot in slots:
                y, height = _lane(band, slot)
                width = max((end - begin) * step, LEAST)
                yield Shape(x + begin * step, y, width, height, colour(map_data["slots"], slot), hatch)


def _by_band(spans: Sequence[int], bands: Sequence[Band]) -> Iterator[tuple[Band, int, int]]:
    """Yield what the rows of a band hold together, as elements [begin, end)."""
    for at in range(0, len(spans), SPAN_NUMBERS):
        row, number, start, share, stop = spans[at : at + SPAN_NUMBERS - 1]
        for band in bands:
            first, last = max(band.first, row), min(band.end, row + number)
            if first < last:
                yield band, start + (first - row) * share, min(start + (last - row) * share, stop)


def _joined(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes with neighbours of one lane and colour put together, which bounds how many there are."""
    done: list[Shape] = []
    open_: dict[tuple[float, float, str, str], int] = {}
    for one in shapes:
        if one.text or one.fill in (SUNKEN, LINE):
            done.append(one)
            continue
        key = (one.y, one.height, one.fill, one.hatch)
        before = done[open_[key]] if key in open_ else None
        if before and -LEAST * 2 <= one.x - before.x - before.width < LEAST:
            width = max(before.width, one.x + one.width - before.x)
            done[open_[key]] = Shape(before.x, one.y, width, one.height, one.fill, one.hatch)
        else:
            open_[key] = len(done)
            done.append(one)
    return done


def _bars(map_data: Mapping[str, Any], bands: Sequence[Band]) -> Iterator[Shape]:
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
        for slot in band.lanes:
            width = sum(row["held"][slot] for row in members) / len(members) / most * room
            yield Shape(x, middle - height / 2, width, height, fill=colour(map_data["slots"], slot))
            x += width
        width = sum(row["padding"] for row in members) / len(members) / most * room
        if width > LEAST:
            yield Shape(x, middle - height / 2, width, height, fill=SUNKEN, hatch="padding")


def num_parameters(map_data: Mapping[str, Any]) -> int:
    """Return how many parameters of the model there are, buffers and other names aside."""
    return sum(one["kind"] in ("parameter", "frozen") for one in map_data["parameters"])
