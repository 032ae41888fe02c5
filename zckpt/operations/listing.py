"""Which formats and maps there are, as a JSON-able document. Opens no checkpoint."""

from __future__ import annotations

from zckpt.formats.format import Format
from zckpt.formats.options import options_of
from zckpt.formats.registry import BUILT_IN, BrokenPluginError, formats
from zckpt.naming.document import read_map, shipped
from zckpt.state import Document, values_of


def list_formats() -> Document:
    """Return what is known of each format, and the errors about formats of other packages that cannot be loaded.

    Returns
    -------
    dict
        JSON-able: `formats`, in the order in which they are asked whose a path is, `broken`, and the `maps` that come
        with zckpt.
    """
    broken: list[BrokenPluginError] = []
    found = [
        {
            "name": one.name,
            "title": one.title,
            "built_in": one.name in BUILT_IN,
            "reads": [{"what": what, "details": details} for what, details in one.reads] or [{"what": one.title}],
            "written": bool(one.writes),
            "writes": one.writes or None,
            "options": [
                {
                    "name": option.name,
                    "type": option.kind.__name__,
                    **values_of(option, ("default", "choices", "help")),
                }
                for option in options_of(one.options)
            ],
            "reshard": type(one).recut is not Format.recut,
            "strip": type(one).strip is not Format.strip,
        }
        for one in formats(broken)
    ]
    maps = [
        {"name": one.name, "sides": [side.name for side in one.sides], "about": one.about}
        for one in map(read_map, shipped())
    ]
    return {"formats": found, "broken": [str(error) for error in broken], "maps": maps}
