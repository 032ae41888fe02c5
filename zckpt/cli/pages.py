"""`--html FILE`: the option of the verbs that also write a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def page_options(command: Command) -> Command:
    """Add `--html` and `--overwrite`."""
    html = click.option(
        "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page."
    )
    return html(click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")(command))


def check_page(page: Path | None, *, overwrite: bool) -> None:
    """Raise TargetError if a page cannot be written, before the work for it is done."""
    from zckpt.storage.ownership import check_target

    if page is not None:
        check_target(page, overwrite=overwrite)


def write_page(page: Path, content: str | bytes, *, overwrite: bool) -> None:
    """Write a page or a picture, whole or not at all.

    Raises
    ------
    TargetError
        It is there already, or the disk does not take it.
    """
    from zckpt.errors import TargetError
    from zckpt.storage.durable import written_files

    with written_files([page], overwrite=overwrite) as (partial,):
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise TargetError("cannot be written", path=page, found=error.strerror) from error
