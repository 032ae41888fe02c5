"""What lies below a directory."""

from __future__ import annotations

from pathlib import Path


def contents(directory: Path) -> dict[str, bytes]:
    """The files, by their names below the directory."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files_in(directory)}


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """The files, and None for each folder."""
    folders = {path.relative_to(directory).as_posix(): None for path in directory.rglob("*") if path.is_dir()}
    return folders | contents(directory)


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def nbytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in files_in(directory))
