"""The page of all errors, docs/errors.md, from their classes."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt import errors

WHAT_TO_DO = {
    "usage": "Correct the argument that the message names; `zckpt VERB --help` lists them.",
    "missing-package": "Run the install command in the message.",
    "source": "Check the path in the message: does it exist, can it be read, is it the one that you meant?",
    "unknown-format": "Give the checkpoint's own directory or file. `zckpt formats` lists what can be read.",
    "damaged-file": "Copy the file again from its origin, or use an earlier checkpoint; "
    "`zckpt verify --deep` lists all damage. `--no-checksums` takes the bytes as they are, and "
    "`--salvage` does without files that are lost.",
    "pickle": "Do not load the file with a program that executes pickles, unless you know who wrote it.",
    "unsupported": "Use the verb or option that the message names.",
    "shard": "Give the files of all ranks from one save; `--root` adds those of other nodes.",
    "layout": "Use an earlier checkpoint, or report the file: its metadata contradicts itself.",
    "left-out": "Name what may be lost with `--drop`, or write a format that can hold it.",
    "weight-mismatch": "The files come from different saves, or one was changed: use another checkpoint, "
    "or `--no-weight-check`.",
    "target": "Free some space, or choose a place that you can write to.",
    "target-exists": "Choose another name, or give `--overwrite`.",
    "worker": "Start the workers again, and run the command with `--resume`.",
    "not-restored": "Load the checkpoint with the settings that the message names, or resume with `zckpt.load`.",
}

HEAD = """# Errors

Every error is one line on standard error: the file, what was expected, what was found, and what to do. With `--json`,
zckpt also writes it to standard output as a JSON document:

```json
{"error": {"code": "target-exists", "finding": null, "exit_status": 4, "path": "model.safetensors",
           "message": "already exists", "expected": null, "found": null,
           "advice": "choose another name, or give --overwrite"}}
```

A code never changes its meaning. `finding` is `zckpt verify`'s code for the same problem, if it has one
([verify](verify.md)). In Python, each code is a class of `zckpt.errors`, and `error.as_dict()` returns the document.

| code | class | exit status | what it means | what to do |
|---|---|---|---|---|
"""


def page() -> str:
    """Return docs/errors.md."""
    text = HEAD
    for one in _classes(errors.ZckptError):
        meaning = " ".join((one.__doc__ or "").split("\n\n")[0].split())
        text += f"| `{one.kind()}` | `{one.__name__}` | {one.exit_status} | {meaning} | {WHAT_TO_DO[one.kind()]} |\n"
    return text


def _classes(base: type[errors.ZckptError]) -> Iterator[type[errors.ZckptError]]:
    for one in base.__subclasses__():
        if one.__module__ != errors.__name__:  # of one room alone: it is never seen elsewhere
            continue
        yield one
        yield from _classes(one)
