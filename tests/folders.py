"""What lies below a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def contents(directory: Path | str = ".") -> dict[str, bytes]:
    """The files, by their names below the directory."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files_in(directory)}


def snapshot(directory: Path | str = ".") -> dict[str, bytes | None]:
    """The files, and None for each folder."""
    folders = {path.relative_to(directory).as_posix(): None for path in Path(directory).rglob("*") if path.is_dir()}
    return folders | contents(directory)


def files_in(directory: Path | str = ".") -> list[Path]:
    return sorted(path for path in Path(directory).rglob("*") if path.is_file())


def names_in(directory: Path | str = ".") -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def nbytes_in(directory: Path | str) -> int:
    return sum(path.stat().st_size for path in files_in(directory))


def write_model(directory: Path | str, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    """Make a directory with a model and its configuration, as Hugging Face's libraries do."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
