"""The formats that bytes can be taken out of, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from zckpt.errors import SourceError, UnsupportedError
from zckpt.formats import safetensors_file
from zckpt.formats.files_below import files_below
from zckpt.formats.optimizer_file import is_optimizers
from zckpt.formats.stripping import Request, Rewritten, Stripping, as_it_is, replaced, without
from zckpt.formats.torch_strip import strip_file
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.torchfile import read_torchfile

NO_PADDING = "this format has no padding"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
    source : Path
        As the user named it.
    request : Request

    Raises
    ------
    UnsupportedError
        The format is one that nothing is taken out of.
    SourceError
        A file cannot be read, or holds what cannot be written.
    """
    if checkpoint.format not in _STRIPPERS:
        raise UnsupportedError(
            "nothing can be taken out of this format",
            path=checkpoint.source,
            expected=", ".join(_STRIPPERS),
            found=checkpoint.format,
            advice="use `zckpt convert`",
        )
    return _STRIPPERS[checkpoint.format](checkpoint, source, request)


def slot_names(checkpoint: Checkpoint, source: Path) -> list[str]:
    """Return the names of all slots that a source has, those in a file beside a model too."""
    found = checkpoint.slot_names()
    if checkpoint.format == "safetensors" and source.is_dir():
        for name, path in files_below(source):
            if is_optimizers(name):
                slots, _, _ = safetensors_file.read_header(path)
                found += [_kind(key) for key in slots]
    return list(dict.fromkeys(found))


def _kind(key: str) -> str:
    return key.split("/", 1)[0]


def _deepspeed(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    from zckpt.formats.deepspeed.strip import strip

    return strip(checkpoint, source, request)


def _file(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    return Stripping([strip_file(source, source.name, request, _slots(checkpoint))], _notes(request))


def _directory(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of a directory of torch and safetensors files; all others are copied."""
    known = {file.path for file in checkpoint.files}
    files = []
    for name, path in files_below(source):
        if is_optimizers(name) and request.slots:
            files.append(_safetensors_slots(path, name, request))
        elif path.suffix in TORCH_SUFFIXES and (str(path) in known or _is_torch(path)):
            files.append(strip_file(path, name, request, _slots(checkpoint)))
        else:
            files.append(as_it_is(path, name))
    return Stripping(files, _notes(request))


def _is_torch(path: Path) -> bool:
    """Tell whether a file that is no part of the checkpoint, but may have more of its state, is one of torch's."""
    try:
        read_torchfile(path)
    except SourceError:
        return False
    return True


def _safetensors(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    if source.is_dir():
        return _directory(checkpoint, source, request)
    return Stripping([as_it_is(source, source.name)], ("a safetensors file has no bytes to spare",))


def _safetensors_slots(path: Path, name: str, request: Request) -> Rewritten:
    """Return a file of `<slot>/<parameter>` tensors without some of the slots."""
    slots, metadata, nbytes = safetensors_file.read_header(path)
    kept: list[safetensors_file.Entry] = []
    kinds: dict[str, int] = {}
    for key, slot in slots.items():
        kind = _kind(key)
        if request.drops(kind):
            kinds[kind] = kinds.get(kind, 0) + slot.nbytes
        else:
            kept.append(safetensors_file.Entry(key, slot, slot.dtype, key))
    if not kept:
        return without(path, name, kinds)
    extra = {key: value for key, value in metadata.items() if key != "format"}
    return replaced(name, nbytes, safetensors_file.lay_out(name, kept, extra), kinds)


def _slots(checkpoint: Checkpoint) -> list[str]:
    """Return the names that stand for one value per element, or for several."""
    owned = [*checkpoint.parameters.values(), *checkpoint.unnamed.values()]
    shaped = {key for one in owned for key, slot in one.slots.items() if slot.shape}
    return [key for key in checkpoint.slot_names() if key in shaped and key not in (WEIGHT, MASTER)]


def _notes(request: Request) -> tuple[str, ...]:
    return (NO_PADDING,) if request.padding else ()


_STRIPPERS: Mapping[str, Callable[[Checkpoint, Path, Request], Stripping]] = {
    "deepspeed": _deepspeed,
    "torch": _file,
    "safetensors": _safetensors,
    "consolidated": _directory,
    "zero-redundancy": _directory,
}
