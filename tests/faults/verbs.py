"""Every verb that writes, on a checkpoint as small as can be: what it is given, and what it may leave."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import zckpt
from tests.cli.console import run, succeeded
from zckpt.errors import ZckptError

Tree = dict[str, bytes | None]
"""All that is below a directory, relative to it; a directory is None."""

TINY, LATER, RUN, PLAIN, ADAPTER, STORE, PATCH = "tiny", "later", "run", "plain", "adapter", "store", "patch"


@dataclass(frozen=True)
class Verb:
    """A verb as it is run: in a directory with `in`, which it only reads, and `out`, in which it writes.

    Parameters
    ----------
    arguments : tuple of str
        `in/NAME` and `out/NAME` are paths.
    before : callable
        Makes what is in `out` before.
    again : tuple of str
        What a run that comes after one that failed is given in addition.
    whole : callable
        Says what is whole in `out`, and raises if something that is said to be whole is not. By default the bytes of
        all that has a name.
    allowed : callable
        Tells, by what was whole before, is now, and is where nothing fails, whether that may be. By default it is one
        of both.
    may_stay : bool
        It leaves alone what it cannot read or remove, and says so: that is no failure.
    """

    arguments: tuple[str, ...] | Callable[[Path], object]
    before: Callable[[Path], object] = lambda out: None
    again: tuple[str, ...] = ()
    whole: Callable[[Path], object] = lambda out: seen(tree(out))
    allowed: Callable[[Any, Any, Any], bool] = lambda before, found, after: found in (before, after)
    may_stay: bool = False

    def act(self, base: Path, *more: str) -> CompletedProcess[str]:
        """Run it."""
        if callable(self.arguments):
            return called(self.arguments, base / "out")
        words = [str(base / one) if one.startswith(("in/", "out")) else one for one in (*self.arguments, *more)]
        return run(*words)


def called(function: Callable[[Path], object], out: Path) -> CompletedProcess[str]:
    """Call a function as the command line calls a verb."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            function(out)
        except ZckptError as error:
            return CompletedProcess([], error.exit_status, "", f"zckpt: {error}\n")
    return CompletedProcess([], 0, "", "".join(f"{one.message}\n" for one in warned))


def tree(top: Path) -> Tree:
    found: Tree = {}
    for path in top.rglob("*"):
        name = str(path)[len(str(top)) + 1 :]
        link = path.is_symlink()
        found[name] = str(path.readlink()).encode() if link else None if path.is_dir() else path.read_bytes()
    return found


def seen(found: Tree) -> Tree:
    """The files and links that have a name: no temporary one."""
    return {name: data for name, data in found.items() if data is not None and ".zckpt-" not in name}


def put(top: Path, content: Tree) -> None:
    """Make a directory hold exactly this."""
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    for name, data in sorted(content.items()):
        if data is None:
            (top / name).mkdir(parents=True, exist_ok=True)
        else:
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes(data)


def trained(steps: int) -> tuple[Any, Any]:
    """A model of two small tensors, and its optimizer, after some steps."""
    import torch  # which most verbs do without, and a process that is forked for each fault is the smaller for it

    from tests import live

    torch.manual_seed(0)
    return live.trained(torch.nn.Sequential(OrderedDict(linear=torch.nn.Linear(5, 3))), steps=steps, lr=0.1)


def inputs(top: Path) -> None:
    """What the verbs are given: checkpoints of one model in several formats, an adapter, a store, a patch."""
    for name, steps in ((TINY, 1), (LATER, 2)):
        model, optimizer = trained(steps)
        zckpt.save(top / "native" / name, model=model, optimizer=optimizer, step=steps)
        zckpt.convert(top / "native" / name, top / name, to="deepspeed", world_size=2, stage=2)
    for steps in (1, 2, 3):
        model, optimizer = trained(steps)
        zckpt.save(top / RUN / f"step-{steps:08}", model=model, optimizer=optimizer, step=steps)
    for path in [*(top / RUN).rglob("*")]:
        os.utime(path, (1e9, 1e9))
    zckpt.consolidate(top / TINY, top / PLAIN / "model.safetensors")
    adapter(top)
    succeeded("pack", top / RUN, top / STORE)
    succeeded("patch", top / "native" / TINY, top / "native" / LATER, top / PATCH)


def adapter(top: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (top / ADAPTER).mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["linear"]}
    about["base_model_name_or_path"] = None
    factors = {"lora_A": torch.ones(2, 5), "lora_B": torch.ones(3, 2)}
    named = {f"base_model.model.linear.{key}.weight": value for key, value in factors.items()}
    save_file(named, top / ADAPTER / "adapter_model.safetensors")
    (top / ADAPTER / "adapter_config.json").write_text(json.dumps(about))


def copied(name: str) -> Callable[[Path], object]:
    """Make a copy of an input to write to."""

    def before(out: Path) -> None:
        shutil.copytree(out.parent / "in" / name, out / name, symlinks=True)

    return before


def old(*arguments: str) -> Callable[[Path], object]:
    """Let an older target be there, made by the same verb of something else."""

    def before(out: Path) -> None:
        done = Verb(arguments).act(out.parent)
        assert done.returncode == 0, done.stderr

    return before


def unpacked(out: Path) -> Iterator[tuple[str, Path]]:
    """What stores give back: yield each checkpoint's name, and where it is until the next one."""
    from zckpt.operations.pack import unpack
    from zckpt.storage.packed import is_store
    from zckpt.storage.packed.store import PackedStore

    for store in filter(is_store, out.rglob("sto*")):
        names, wrong = PackedStore(store).names()
        assert not wrong, wrong
        for name in names:
            at = out.parent / "unpacked"
            shutil.rmtree(at, ignore_errors=True)
            unpack(store / name, at)
            yield name, at


def stored(out: Path) -> dict[str, Tree]:
    return {name: tree(at) for name, at in unpacked(out)}


def in_units(before: dict[str, Any], found: dict[str, Any], after: dict[str, Any]) -> bool:
    """Each by itself is what it was, or what it is to be; what is there before and after is there meanwhile."""
    return found.keys() >= before.keys() & after.keys() and all(
        data in (before.get(name), after.get(name)) for name, data in found.items()
    )


def in_folders(out: Path) -> dict[str, Any]:
    """What is seen of each checkpoint of a run."""
    found: dict[str, Any] = {}
    for name, data in seen(tree(out)).items():
        found.setdefault(name.split("/")[1] if "/" in name else "", {})[name] = data
    return found


def a_pair(before: Tree, found: Tree, after: Tree) -> bool:
    """No optimizer is beside a model that is not its own; a model may be alone for a while."""
    return found in (before, after) or any(
        found == {name: both[name] for name in (PAIR[1],)} for both in (before, after)
    )


def a_universal(before: Tree, found: Tree, after: Tree) -> bool:
    """The file that names a universal checkpoint comes when that is there."""
    return found in (before, after, {name: data for name, data in after.items() if name != "latest_universal"})


PAIR = ("m.optimizer.safetensors", "m.safetensors")


# --- a run's directory


def checkpointer(out: Path) -> zckpt.Checkpointer:
    return zckpt.Checkpointer(out / RUN, keep=2, on_sigterm=False)


def saved(out: Path, *steps: int) -> None:
    for step in steps or (3,):
        model, optimizer = trained(step)
        with checkpointer(out) as saving:
            saving.save(step, model=model, optimizer=optimizer)


def whole_run(out: Path) -> dict[str, Any]:
    """What each checkpoint of a run has, and which one is the latest."""
    found = {path.name: whole_save(path) for path in (out / RUN).glob("step-*")}
    if (latest := out / RUN / "latest").exists():
        found["latest"] = latest.read_text()
        assert found["latest"] in found
    return found


def whole_save(path: Path) -> list[Any]:
    """What a checkpoint holds, every checksum of which is looked at."""
    model, optimizer = trained(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = zckpt.load(path, model=model, optimizer=optimizer).step
    return [step, *held(model, optimizer)]


def held(model: Any, optimizer: Any) -> list[Any]:
    """What a model and its optimizer hold."""
    state = [{key: value.tolist() for key, value in one.items()} for one in optimizer.state.values()]
    return [[one.tolist() for one in model.parameters()], state]


def save_over(out: Path, steps: int = 2) -> None:
    model, optimizer = trained(steps)
    zckpt.save(out / "new/step", model=model, optimizer=optimizer, step=steps, overwrite=True)


def whole_saves(out: Path) -> dict[str, Any]:
    return {path.name: whole_save(path) for path in out.glob("new/step")}


def over(*arguments: str, **more: Any) -> Verb:
    """A verb that replaces what it has made of something else."""
    other = [f"in/{LATER}" if one == f"in/{TINY}" else one for one in arguments]
    return Verb((*arguments, "--overwrite"), before=old(*other), **more)


def one_packed(out: Path) -> None:
    succeeded("pack", out.parent / "in" / RUN / "step-00000001", out / "store", "--name", "step-00000001")


MODEL = "out/m.safetensors"
VERBS: dict[str, Verb] = {
    "consolidate": Verb(("consolidate", f"in/{TINY}", MODEL)),
    "consolidate-over": over("consolidate", f"in/{TINY}", MODEL),
    "consolidate-pair-over": over("consolidate", f"in/{TINY}", MODEL, "--slots", "all", allowed=a_pair),
    "consolidate-deep": Verb(("consolidate", f"in/{TINY}", "out/new/deep/m.pt")),
    "consolidate-folder": over("consolidate", f"in/{TINY}", "out/folder", "--max-shard-size", "40"),
    "reshard": Verb(("reshard", f"in/{TINY}", "out/r", "--world-size", "3")),
    "reshard-over": over("reshard", f"in/{TINY}", "out/r", "--world-size", "3"),
    "zckpt-over": over("convert", f"in/{TINY}", "out/z", "--to", "zckpt", "--fingerprint"),
    "universal": Verb(("convert", f"in/{TINY}", "out/u", "--to", "universal"), allowed=a_universal),
    "dcp": Verb(("convert", f"in/{TINY}", "out/d", "--to", "dcp")),
    "deepspeed": Verb(
        ("convert", f"in/native/{TINY}", "out/s", "--to", "deepspeed", "--world-size", "2", "--stage", "3")
    ),
    "strip": Verb(("strip", f"in/{TINY}", "out/s", "--padding")),
    "average": Verb(("average", f"in/{TINY}", f"in/{LATER}", "--target", "out/a")),
    "merge-adapter": Verb(("merge-adapter", f"in/{PLAIN}", f"in/{ADAPTER}", MODEL)),
    "fingerprint": Verb(("fingerprint", f"out/{TINY}", "--write"), before=copied(TINY), again=("--overwrite",)),
    "map": Verb(("map", f"in/{TINY}", "out/map.svg")),
    "show": Verb(("show", f"in/{TINY}", "linear.weight", "--npy", "out/weight.npy")),
    "pack": Verb(("pack", f"in/{RUN}/step-00000001", "out/new/store"), whole=stored, allowed=in_units),
    "pack-more": Verb(("pack", f"in/{RUN}", "out/store"), before=one_packed, whole=stored, allowed=in_units),
    "unpack": Verb(("unpack", f"in/{STORE}", "out/u")),
    "patch": Verb(("patch", f"in/native/{TINY}", f"in/native/{LATER}", "out/p")),
    "apply": Verb(("apply", f"in/native/{TINY}", f"in/{PATCH}", "out/a")),
    "prune": Verb(
        ("prune", f"out/{RUN}", "--keep-last", "1", "--settle", "0", "--delete"),
        before=copied(RUN),
        whole=in_folders,
        allowed=in_units,
        may_stay=True,
    ),
    "save": Verb(save_over, whole=whole_saves),
    "save-over": Verb(save_over, before=lambda out: save_over(out, 1), whole=whole_saves),
    "Checkpointer": Verb(saved, before=lambda out: saved(out, 1, 2), whole=whole_run, allowed=in_units, may_stay=True),
    "Checkpointer-first": Verb(saved, whole=whole_run, allowed=in_units),
}
