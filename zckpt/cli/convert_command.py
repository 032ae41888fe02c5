"""`zckpt convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import (
    fingerprint_option,
    show,
    source_options,
    verify_option,
    write_options,
)


class ConvertCommand(click.Command):
    """A command whose options formats state; they are looked up when it is called, so that no other verb waits."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of formats included."""
        if not any(one.name == "to" for one in self.params):
            from zckpt.cli.options import complete

            complete(self)
        return super().get_params(ctx)


@click.command("convert", cls=ConvertCommand, short_help="Write a checkpoint in another format, with all of its state.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@verify_option
@fingerprint_option
@write_options
@source_options
def convert_command(
    source: Path,
    target: Path,
    to: str,
    verify: bool,
    fingerprint: bool | None,
    as_json: bool,
    quiet: bool,
    writing: dict[str, Any],
    where: dict[str, Any],
    **options: object,
) -> None:
    """Write a checkpoint in another format, with all of its state."""
    from zckpt.cli.options import typed
    from zckpt.cli.streams import reporter
    from zckpt.operations.convert import convert

    done = convert(
        source,
        target,
        to=to,
        verify=verify,
        fingerprint=fingerprint,
        reporter=reporter("convert", quiet=quiet),
        **writing,
        **where,
        **typed(options),
    )
    show(done, as_json=as_json, quiet=quiet)
