"""Figures of tensors, and elements of one, as text; from the documents of `stats` and `show`."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from zckpt.report.text import Document, about, count, named, printable, table

if TYPE_CHECKING:
    from zckpt.operations.show import Elements

COLUMNS = ("numel", "min", "max", "mean", "std", "norm", "zeros", "nan", "inf")

PRECISION = 6


def render(document: Document, *, layers: bool, width: int) -> str:
    """Return the document of `stats` as text; names are cut to what `width` columns leave, and figures are not."""
    document = printable(document)
    rows = document["layers" if layers else "slots"]
    cells = [(one["slot"], one["dtype"], *(f"{v:.4g}" if isinstance(v, float) else v for v in map(one.get, COLUMNS)))
             for one in rows]  # fmt: skip
    figures = table(("slot", "dtype", *COLUMNS), cells, right=range(2, 2 + len(COLUMNS)))
    names = ["layer" if layers else "parameter", *(one["name"] for one in rows)]
    source = document["source"]
    total = sum(one["numel"] for one in rows)
    return "\n".join(
        [
            f"{source['source']}: {about(source)}",
            *named(names, figures, width),
            f"{count(len(rows), 'row')}, {count(total, 'element')}",
        ]
    )


def comma_separated(document: Document, *, layers: bool) -> str:
    """Return the document of `stats` as lines of comma-separated values, the first with the names of the columns."""
    columns = ("name", "slot", "dtype", *(() if layers else ("shape",)), *COLUMNS)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    for one in document["layers" if layers else "slots"]:
        values = one | {"shape": "x".join(map(str, one["shape"] or ()))}
        lines.writerow([values[key] for key in columns])
    return text.getvalue()


def render_elements(found: Elements, *, width: int) -> str:
    """Return elements as NumPy prints them, under a line that says which they are."""
    import numpy as np

    what = f"{found.slot} of {found.name}: {found.dtype} {list(found.shape)}"
    part = "" if found.slice is None else f" [{found.slice}]"
    if found.values is None:
        return printable(f"wrote {found.file}: {what}{part}")
    wide = found.values if found.values.dtype.kind in "biufcV" else found.values.astype("float32")
    return "\n".join([printable(what + part), np.array2string(wide, max_line_width=width, precision=PRECISION)])
