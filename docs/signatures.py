"""Lets the reference show the options that verbs share, as `help(zckpt.consolidate)` does: for `make docs`."""

from __future__ import annotations

import inspect

import griffe


class Signatures(griffe.Extension):
    """Takes signature and text of a function from what is imported, where those of its source are not all."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Replace the parameters of a verb."""
        found = griffe.dynamic_import(func.path) if func.path.startswith("zckpt.operations.") else None
        shown = getattr(found, "__signature__", None)
        if shown is None:
            return
        func.parameters = griffe.Parameters(*(
            griffe.Parameter(
                one.name,
                kind=griffe.ParameterKind(one.kind.description),
                annotation=None if one.annotation is one.empty else inspect.formatannotation(one.annotation).strip("'"),
                default=None if one.default is one.empty else repr(one.default),
            )
            for one in shown.parameters.values()
        ))  # fmt: skip
        func.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=func)
