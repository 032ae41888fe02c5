"""Which checkpoint of a run was saved last: the one that a file beside them names, or the one of the highest step.

RUN/latest                            DeepSpeed, and others: the name of the directory next to it

RUN/step-N/                           torchtitan: a DCP directory for each step; it goes on from the last that is whole
RUN/stepN/, step_N/, iter_N/          OLMo-core, prime-rl and NeMo RL, Cosmos: the same, of DCP in folders below
RUN/ckpt-step-N/, global_step_N/      XTuner, VeOmni: the same; global_stepN/, as DeepSpeed's are called
RUN/0000000500/                       lingua: the same
RUN/epE-baB/                          Composer, sharded: the same, by epoch and batch
RUN/epE-baB-rank0.pt                  Composer, whole: a file of torch.save
RUN/latest-rank0.pt -> epE-baB...     Composer's link to the one that it saved last
RUN/last_checkpoint                   detectron2, mmengine: the name or path of the file that was saved last
DIR/consolidated.pth                  lingua: one step, in one file
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from zckpt import codes
from zckpt.errors import UnknownFormatError, listed
from zckpt.formats.format import NearMiss
from zckpt.immutable import immutable
from zckpt.storage.files import entries_of, is_file, read_head

LATEST = "latest"

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's: an iteration, or a name."""

_ITERATION = re.compile("[0-9]{1,18}")

LATEST_NBYTES = 4096
"""It holds one directory name; a longer file is something else."""

NAME_MAX, TAG_MAX = 255, 512
"""Bytes of a name, which file systems have no more room for; and characters of a tag, whose path has an end, too."""


def latest_name(source: Path, file: str = LATEST) -> str | None:
    """Return what a run's `latest`, or the like, holds; None if there is no such file."""
    latest = source / file
    return read_head(str(latest), LATEST_NBYTES).decode("utf-8", "replace").strip() if is_file(latest) else None


def folder_of(text: str) -> str:
    """Return the name of the directory that `TRACKER` names."""
    return f"iter_{int(text):07d}" if _ITERATION.fullmatch(text) else text


def is_name(name: str) -> bool:
    """Tell whether a name can be that of a directory directly in another."""
    is_plain = name not in ("", ".", "..") and "\0" not in name and Path(name).name == name
    return is_plain and len(name.encode("utf-8", "surrogatepass")) <= NAME_MAX


def is_tag(name: str) -> bool:
    """Tell whether a name can be a tag: of a directory below a run's, which may be several levels down."""
    return len(name) <= TAG_MAX and all(map(is_name, name.split("/")))


LINK = "latest-rank0.pt"

POINTER, LINGUAS = "last_checkpoint", "consolidated.pth"

MODELS = (".pth", ".pt", ".bin", ".safetensors")

_FRONTS = ("step-", "step", "step_", "global_step", "global_step_", "ckpt-step-")
_NUMBERED = [re.compile(f"{front}([0-9]{{1,18}})") for front in _FRONTS]
_LINGUA = re.compile(r"([0-9]{10})")
COSMOS = re.compile(r"iter_([0-9]{1,18})")
_COMPOSER = re.compile(r"ep([0-9]{1,18})-ba([0-9]{1,18})")
_COMPOSER_FILE = re.compile(r"ep([0-9]{1,18})-ba([0-9]{1,18})-rank0\.pt")

SHOWN = 4


@immutable
class LastStep:
    """The checkpoint that was saved last."""

    path: Path
    unfinished: tuple[str, ...] = ()  # names of later ones that are not whole

    @property
    def others(self) -> list[Path]:
        """Files beside it that are called like it up to the last `_`: `model_0000999`, `model_final`."""
        front, bar, _ = self.path.name.rpartition("_")
        alike = [
            self.path.parent / one.name for one in entries_of(self.path.parent) if one.name.startswith(front + bar)
        ]
        return [one for one in alike if bar and one != self.path and one.suffix == self.path.suffix]


def last_folder(run: Path, is_whole: Callable[[Path], bool]) -> LastStep | NearMiss | None:
    """Return the last of a run's folders; None where it has none that is whole.

    `run`: a directory; `is_whole`: tells whether a folder is a checkpoint. Raises SourceError: the directory cannot be
    read; UnknownFormatError: Composer's link names something that is not there.
    """
    names = [entry.name for entry in entries_of(run)]
    by_program = [
        {name: _order(match) for name in names if (match := pattern.fullmatch(name)) and (run / name).is_dir()}
        for pattern in (_COMPOSER, *_NUMBERED, COSMOS, _LINGUA)
    ]
    whole = [{name: at for name, at in found.items() if is_whole(run / name)} for found in by_program]
    if not any(whole):
        return None
    if sum(map(bool, whole)) > 1:
        return NearMiss(
            f"holds steps of two programs: {listed([max(one, key=one.__getitem__) for one in whole if one])}",
            "give one of them",
        )
    at = next(index for index, one in enumerate(whole) if one)
    if at == 0 and (run / LINK).is_symlink():
        return _linked(run, whole[0])
    answer = _last(run, whole[at])
    if isinstance(answer, NearMiss):
        return answer
    later = [name for name, order in by_program[at].items() if order > whole[at][answer.path.name]]
    return LastStep(answer.path, tuple(sorted(later)))


def last_file(run: Path) -> LastStep | NearMiss | None:
    """Return the last of Composer's files in a directory, or what `last_checkpoint` names; None where it has none.

    Errors are those of `last_folder`.
    """
    said = Path(latest_name(run, POINTER) or "").name  # a path is where the run was, which may have been moved
    if is_name(said) and is_file(run / said):
        return LastStep(run / said)
    names = [entry.name for entry in entries_of(run)]
    if [name for name in names if name.endswith(MODELS)] == [LINGUAS]:
        return LastStep(run / LINGUAS)
    found = {name: _order(match) for name in names if (match := _COMPOSER_FILE.fullmatch(name))}
    if not found:
        return None
    return _linked(run, found) if (run / LINK).is_symlink() else _last(run, found)


def _order(match: re.Match[str]) -> tuple[int, ...]:
    """Return what orders a name as it was saved: the batch or step, then the epoch."""
    return tuple(int(number) for number in reversed(match.groups()))


def _linked(run: Path, found: dict[str, tuple[int, ...]]) -> LastStep:
    name = Path(os.path.realpath(run / LINK)).name
    names = sorted(found, key=lambda one: found[one])
    if name not in found or os.path.realpath(run / LINK) != os.path.realpath(run / name):
        raise UnknownFormatError(
            "names no checkpoint",
            path=run / LINK,
            expected=f"a link to one beside it: {listed(names, most=SHOWN)}",
            found=name,
            advice=f"give the one that you mean: {run / names[-1]}",
            code=codes.LATEST,
        )
    return LastStep(run / name)


def _last(run: Path, found: dict[str, tuple[int, ...]]) -> LastStep | NearMiss:
    """Return the last one by batch, unless epochs say that those of several runs are mixed."""
    names = sorted(found, key=found.__getitem__)
    epochs = [found[name][1:] for name in names]
    if epochs != sorted(epochs):
        return NearMiss(
            f"holds checkpoints whose epochs and batches are in different orders: {listed(names, most=SHOWN)}",
            f"give the one that you mean, such as {run / names[-1]}",
        )
    return LastStep(run / names[-1])
