"""The page of all errors, docs/errors.md, from their classes."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt import errors

WHAT_TO_DO = {
    "usage": "Correct the argument that the message names; `zckpt VERB --help` lists all of them.",
    "missing-package": "Install the package, with the command in the message.",
    "source": "Look at the path in the message: whether it exists, can be read, and is the one that you meant.",
    "unknown-format": "Give the directory or file of the checkpoint itself. `zckpt formats` lists what can be read.",
    "damaged-file": "Copy the file again from where it came from, or use an earlier checkpoint; "
    "`zckpt verify --deep` lists everything that is wrong, and `--salvage` goes on with what is left.",
    "pickle": "Do not load the file with anything that runs pickles, unless you know who wrote it.",
    "unsupported": "Use the verb or option that the message names.",
    "shard": "Give the files of all ranks, from one save, with `--root` for those on other nodes.",
    "layout": "Use an earlier checkpoint, or report the file: its own metadata disagree.",
    "left-out": "Name what may be lost with `--drop`, or write a format that has room for it.",
    "weight-mismatch": "The files are of different saves, or one was changed: use another checkpoint, "
    "or `--no-weight-check`.",
    "target": "Make room, or choose a place that can be written.",
    "target-exists": "Choose another name, or give `--overwrite`.",
    "worker": "Start the workers again, and run the command with `--resume`.",
    "not-restored": "Load the checkpoint with the settings that the message names, or resume with `zckpt.load`.",
}

HEAD = """# Errors

Every error is one line on standard error: the file, what was expected, what was found, and what to do. With `--json`,
standard output has it as a document, too:

```json
{"error": {"code": "target-exists", "finding": null, "exit_status": 4, "path": "model.safetensors",
           "message": "already exists", "expected": null, "found": null, "advice": "give --overwrite to replace it"}}
```

A code is never used for anything else. `finding` is what `zckpt verify` calls the same thing, where it has a name for
it ([verify](verify.md)). In Python, each code is a class of `zckpt.errors`, and `error.as_dict()` is the document.

| code | class | exit status | what it means | what to do |
|---|---|---|---|---|
"""


def page() -> str:
    """Return docs/errors.md."""
    rows = (
        f"| `{one.kind()}` | `{one.__name__}` | {one.exit_status} | {_meaning(one)} | {WHAT_TO_DO[one.kind()]} |\n"
        for one in _classes(errors.ZckptError)
    )
    return HEAD + "".join(rows)


def _classes(base: type[errors.ZckptError]) -> Iterator[type[errors.ZckptError]]:
    for one in base.__subclasses__():
        if one.__module__ != errors.__name__:  # of one room alone: it is never seen elsewhere
            continue
        yield one
        yield from _classes(one)


def _meaning(one: type[errors.ZckptError]) -> str:
    return " ".join((one.__doc__ or "").split("\n\n")[0].split())
