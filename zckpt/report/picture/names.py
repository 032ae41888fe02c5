"""Names in a map's picture, cut to the room there is, and the colours of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zckpt.report.picture.place import (
    CHARACTER,
    FITTING,
    GROUND,
    LEFT,
    MOST_LABELS,
    QUIET,
    SLOT_COLOURS,
    TEXT,
    TOP,
    Band,
    Column,
    Shape,
)


def labels(
    columns: Sequence[Column], sections: Sequence[tuple[str, int, int]], bands: Sequence[Band], scale: float
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


def _modules(columns: Sequence[Column], scale: float) -> list[tuple[str, int, int]]:
    """Return runs of columns of one module, at the depth at which most names still fit."""
    best: list[tuple[str, int, int]] = []
    for depth in range(1, 9):
        found: list[tuple[str, int, int]] = []
        for column in columns:
            if not column.numel or column.parameter is None:
                continue
            parts = column.parameter["name"].split(".")
            name = ".".join(parts[: min(depth, max(1, len(parts) - 1))])
            if found and found[-1][0] == name and found[-1][2] == column.start:
                found[-1] = (name, found[-1][1], column.start + column.numel)
            else:
                found.append((name, column.start, column.start + column.numel))
        named = _without_shared(found)
        fitting = sum(stop - start for name, start, stop in named if cut(name, (stop - start) * scale - 6, 11) == name)
        if best and (len(found) > MOST_LABELS or fitting < FITTING * sum(stop - start for _, start, stop in named)):
            break
        best = named
    return best


def _without_shared(found: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    shared = _shared([name for name, _, _ in found])
    return [(".".join(name.split(".")[shared:]), start, stop) for name, start, stop in found]


def _shared(names: Sequence[str]) -> int:
    """Return how many leading parts, the last aside, all dotted names have in common."""
    parts = [name.split(".") for name in set(names)]
    if len(parts) < 2:
        return 0
    depth = 0
    while all(len(one) > depth + 1 and one[depth] == parts[0][depth] for one in parts):
        depth += 1
    return depth


def colour(slots: Sequence[str], slot: int) -> str:
    """Return the colour of a slot: weight and master have their own, the others take turns."""
    fixed = {"weight": 0, "master": 1}
    if slots[slot] in fixed:
        return SLOT_COLOURS[fixed[slots[slot]]]
    others = [name for name in slots if name not in fixed]
    return SLOT_COLOURS[2 + others.index(slots[slot]) % (len(SLOT_COLOURS) - 2)]


def cut(value: str, room: float, font: int) -> str:
    """Return as much of a text as fits in `room` pixels; empty where that is nothing of use."""
    most = int(room / (font * CHARACTER))
    if len(value) <= most:
        return value
    return f"{value[: most - 1]}\u2026" if most >= 3 else ""
