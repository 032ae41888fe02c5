"""The inventory of a checkpoint that was opened: all files, and of each that was read all records and leaves.

Every file below the directory that was opened is listed. Of one that no tree is looked through, a rule says that it is
foreign, and each such rule has a name. A file that no rule knows is left out; it is state of a model or of an optimizer
if it holds tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from zckpt.codes import TRUNCATED
from zckpt.errors import DamagedFileError, SourceError
from zckpt.formats.account.ranges import MANY, Coverage, shares, whole
from zckpt.formats.account.trees import FileAccount, taken
from zckpt.formats.suffixes import MODELS
from zckpt.immutable import immutable
from zckpt.state import Checkpoint
from zckpt.state.inventory import FILE, FOREIGN, IMPLIED, LEFT_OUT, STATE, Claim, Inventory, Item
from zckpt.storage.files import collector_paused, entries_of, opened, read_head, real_path
from zckpt.storage.ownership import REMOVED
from zckpt.torchfile import read_torchfile, walk_tensors

_Account = tuple[list[Item], dict[str, int]]
"""What a file holds, and how many of its bytes have each fate."""


_rest = attrgetter(*(one.name for one in fields(Item) if one.name != "file"))
"""All of an item but its file."""


@collector_paused()
def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Return what became of everything that a checkpoint's files hold. Reads no tensor.

    Parameters
    ----------
    checkpoint : Checkpoint
        As `open_checkpoint` returned it: not one whose slots were changed.

    Returns
    -------
    Inventory
        What is left out comes last.
    """
    found = Inventory()
    known, values = Coverage(checkpoint), taken(checkpoint)
    root = os.path.realpath(checkpoint.named)
    folders = dict[str, str]()
    places = [real_path(file.path, folders) for file in checkpoint.files]
    read = {real: shown(file.path, real, root) for file, real in zip(checkpoint.files, places, strict=True)}
    before: dict[object, _Account] = {}
    trees: set[int] = set()
    for file, real in zip(checkpoint.files, places, strict=True):
        name = read[real]
        if file.path in checkpoint.leftovers:
            found.items.append(Item(name, "", FILE, FOREIGN, checkpoint.leftovers[file.path], file.nbytes))
            continue
        if file.tree is None:
            claim = checkpoint.claims.get(file.path, Claim(STATE, "read whole: what it does not know is an error"))
            found.items.append(Item(name, "", FILE, claim.fate, claim.about, file.nbytes))
            found.nbytes[name] = {claim.fate: file.nbytes}
            continue
        is_first = id(file.tree) not in trees
        trees.add(id(file.tree))
        is_shared = isinstance(file.tree, (int, float, str))  # by files that have nothing else in common
        is_alone = is_first or is_shared or file.path in values.paths
        covered, key = known.of(file.path), None
        if not is_alone and (len(file.records) >= MANY or not covered.is_long):  # else it is gone through as fast
            key = id(file.tree), file.role, file.rules, covered.key
        if key in before:  # of a file that is alike
            items, nbytes = before[key]
            items = [Item(name, *_rest(item)) for item in items]
        else:
            account = FileAccount(file, name, covered, values, is_first=is_first)
            items, nbytes = account.items(), shares(covered, account.elements, account.ranges)
            if key is not None:
                before[key] = items, nbytes
        found.items += items
        found.nbytes[name] = whole(nbytes, file.nbytes)
    found.items += file_items(checkpoint, read, folders)
    found.items.sort(key=lambda item: item.fate == LEFT_OUT)  # which keeps the order of the others
    return found


def shown(path: str, real: str, root: str) -> str:
    """Return a file's name within the directory that was opened; of others the path. `real` and `root` are resolved."""
    if real == root:
        return Path(path).name
    return real[len(root) :].lstrip(os.sep) if within(real, root) else path


_STATE = re.compile(
    r"(?:optimizer|optim|scheduler|scaler|rng_state|random_states|custom_checkpoint|dl_state_dict|sampler"
    r"|training_args)[^/]*"
    r"|(?:pytorch_model|model|adapter_model|diffusion_pytorch_model|consolidated)[^/]*\.(?:bin|pt|pth|safetensors)",
    re.IGNORECASE,
)
"""Names that programs give files of training state which they keep beside a checkpoint's own directory."""

_OPTIMIZER = re.compile(r"optim(?:izer)?(?:_[0-9]+)?")
"""Folders of DCP that have the state of this checkpoint's optimizer, and are no other checkpoint."""

SEARCHED_DEPTH = 2
"""Folders below a directory in which other checkpoints are looked for."""

MAXIMUM_DEPTH = 16
"""Folders below a directory that are looked into."""

NEVER_EMPTY = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".safetensors", ".th")
"""Of files that hold tensors, as a rule: none of them is foreign by its name alone."""

MAXIMUM_JSON_NBYTES = 1 << 20
"""Of a text that is read as a whole; of a longer one that much of its end is looked at."""


@immutable
class Foreign:
    """A rule: files whose names fit are not of a checkpoint; one that is `written` with it is whole, if that was."""

    about: str
    pattern: re.Pattern[str]
    written: bool = False


ANOTHER_MODEL = "a model for another program"
"""Not said of files whose names end as those of files that were read."""

FOREIGN_RULES = (
    Foreign("a tokenizer", re.compile(
        r"(?:tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece|sentencepiece|chat_template|bpe)"
        r"[^/]*\.(?:json|txt|model|jinja|jsonl)|[^/]+\.tiktoken", re.IGNORECASE), written=True),
    Foreign("digests of a checkpoint", re.compile(r"fingerprint\.json"), written=True),
    Foreign("a configuration of the model", re.compile(
        r"(?:config|generation_config|train_config|adapter_config|(?:pre)?processor_config|quantize_config|model_index|args)\.json"),
        written=True),
    Foreign("the version of OLMo-core's files", re.compile(r"\.metadata\.json"), written=True),
    Foreign("another configuration", re.compile(r"[^/]+_config\.json")),
    Foreign("the Trainer's account of the training", re.compile(
        r"trainer_state\.json|all_results\.json"), written=True),
    Foreign("logs", re.compile(r"events\.out\.tfevents\..*|.*\.(?:log|out|err|jsonl|csv|tsv)", re.IGNORECASE)),
    Foreign("notes", re.compile(
        r"(?:README|LICENSE|NOTICE|USE_POLICY|CHANGELOG)(?:\..*)?|.*\.(?:md|rst|txt|html?|pdf|png|jpe?g|svg|gif)",
        re.IGNORECASE)),
    Foreign("settings", re.compile(r".*\.(?:json|ya?ml|toml|cfg|ini|conf|jinja|env)", re.IGNORECASE)),
    Foreign("programs", re.compile(r".*\.(?:py|sh|ipynb|slurm|sbatch)", re.IGNORECASE)),
    Foreign(ANOTHER_MODEL, re.compile(
        ".*(?:" + "|".join(map(re.escape, MODELS)) + ")", re.IGNORECASE)),
    Foreign("marks and checksums of other programs", re.compile(
        r"\.?_?(?:success|completed?|done|finished)|.*\.(?:lock|md5|sha(?:1|256|512)|crc32?|sum|chk)", re.IGNORECASE)),
    Foreign("left by a write that was interrupted", re.compile(r"\..*\.zckpt-[a-z]+")),
    Foreign("the system's or a version control's", re.compile(
        r"\.DS_Store|Thumbs\.db|desktop\.ini|\.git(?:attributes|ignore|keep|modules)|\.nfs[0-9a-f]+|.*~|\.[^/]*\.sw[op]|\._.+",
        re.IGNORECASE)),
)  # fmt: skip
"""In this order, by the last part of a file's path."""

POINTERS = frozenset({"latest", "latest_universal", "latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt",
                      "last_checkpoint"})  # fmt: skip
"""Files that name the newest checkpoint of a run."""

NEWEST = Claim(IMPLIED, "which checkpoint of the run is the newest")

FOREIGN_FOLDERS = frozenset({".git", "__pycache__", ".ipynb_checkpoints", "wandb", "tensorboard", "runs", ".cache",
                             REMOVED})  # fmt: skip

BESIDE, EMPTY = "beside the checkpoint's own directory", "empty files"

_OWN = re.compile("zero_to_[a-z0-9]+[.]py")
"""Programs that DeepSpeed puts into checkpoints."""

CARD, CARD_MARK, CARD_NBYTES = "README.md", b"library_name: peft", 4096
"""What PEFT writes beside an adapter."""

_WITH = ("another configuration", "marks and checksums of other programs", "left by a write that was interrupted")


def is_stranger(item: Item, root: Path) -> bool:
    """Tell whether no program is known to write a file with the checkpoint in a directory: it may be a user's."""
    if item.kind != FILE or item.fate not in (FOREIGN, LEFT_OUT, IMPLIED):
        return False
    path = root / item.file
    if _OWN.fullmatch(path.name) or (path.name == CARD and CARD_MARK in read_head(str(path), CARD_NBYTES)):
        return False
    rules = {rule.about for rule in FOREIGN_RULES if not rule.written and rule.about not in _WITH}
    foreign = item.about in {*rules, BESIDE, EMPTY, "another checkpoint"} or item.about.startswith("in the folder ")
    return item.fate == LEFT_OUT or foreign


def file_items(checkpoint: Checkpoint, read: dict[str, str], folders: dict[str, str]) -> Iterator[Item]:
    """Yield an item for each file that no tree of is looked through; `folders` has real paths of some."""
    root = Path(checkpoint.named)
    if not root.is_dir():
        return
    own = os.path.realpath(checkpoint.source)
    claims = {os.path.realpath(path): Claim(FOREIGN, about) for path, about in checkpoint.leftovers.items()}
    claims |= {os.path.realpath(path): claim for path, claim in checkpoint.claims.items()}
    outside = os.path.realpath(root) != own
    ends = {os.path.splitext(path)[1] for path in read}  # noqa: PTH122  # of thousands
    for path, name, about in below(root, read, own):
        real = real_path(str(path), folders)
        if real in read:
            continue
        nbytes = _size(path)
        usual = NEWEST if path.name in POINTERS else None if about is None else Claim(FOREIGN, about)
        claim = claims.get(real) or usual
        rules = (one for one in FOREIGN_RULES if not (one.about == ANOTHER_MODEL and path.suffix in ends))
        rule = None if claim else next((rule for rule in rules if rule.pattern.fullmatch(path.name)), None)
        is_text = path.suffix == ".json" if real in claims else rule is not None and rule.written
        error = _damage(path, nbytes) if is_text and nbytes is not None else None
        if error is not None:
            claim = None
        elif rule is not None and nbytes is not None:
            claim = Claim(FOREIGN, rule.about)
        beside = outside and error is None and not within(real, own)
        if claim is None and beside and not _STATE.fullmatch(path.name):
            claim = Claim(FOREIGN, BESIDE)
        if claim is None and nbytes == 0 and error is None and not path.name.endswith(NEVER_EMPTY):
            claim = Claim(IMPLIED, EMPTY)
        if claim is not None:
            yield Item(name, "", FILE, claim.fate, claim.about, nbytes or 0)
        elif nbytes is None:
            yield Item(name, "", FILE, LEFT_OUT, "it is not a regular file, or cannot be read")
        else:
            yield _left_out(path, name, nbytes, error)


def within(path: str, directory: str) -> bool:
    """Tell whether a real path lies below a directory's."""
    return path.startswith(directory.rstrip(os.sep) + os.sep)


def below(root: Path, read: Collection[str], own: str) -> Iterator[tuple[Path, str, str | None]]:
    """Yield path, name and what makes it foreign of every file, those of one directory sorted.

    Directories that hold a checkpoint of their own, of which nothing was read, are foreign: a run's directory has its
    tags, and a trainer's final model lies beside `checkpoint-500`.
    """
    from zckpt.formats import is_checkpoint

    waiting: list[tuple[Path, str, str | None, int, bool]] = [(root, "", None, 0, True)]
    while waiting:
        directory, prefix, about, depth, searched = waiting.pop()
        folders = []
        for entry in entries_of(directory, lenient=True):
            name = prefix + entry.name
            if not entry.is_dir(follow_symlinks=False) or depth >= MAXIMUM_DEPTH:
                yield Path(entry.path), name, about
                continue
            why, real = about, os.path.realpath(entry.path)
            deeper = searched and entry.name not in FOREIGN_FOLDERS
            if deeper and real != own and not any(within(path, real) for path in read):
                is_own = _OPTIMIZER.fullmatch(entry.name) and Path(entry.path, ".metadata").is_file()
                is_another = not is_own and is_checkpoint(Path(entry.path))
                why = why or ("another checkpoint" if is_another else None)
                deeper = depth < SEARCHED_DEPTH
            if why is None and entry.name in FOREIGN_FOLDERS:
                why = f"in the folder {entry.name}"
            folders.append((Path(entry.path), f"{name}/", why, depth + 1, deeper and why is None))
        waiting.extend(reversed(folders))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _left_out(path: Path, name: str, nbytes: int, error: SourceError | None) -> Item:
    """Return the item of a file that no one has claimed: why it is left out, and whether it is state."""
    tensors: int | None = None
    try:
        if path.suffix == ".safetensors":
            from zckpt.formats.safetensors.file import read_header

            tensors = len(read_header(path)[0])
        elif path.name.endswith(NEVER_EMPTY):
            tensors = sum(bool(tensor.shape) for _, tensor in walk_tensors(read_torchfile(path).root))
    except SourceError as found:
        error = found
    if error is not None:
        return Item(name, "", FILE, LEFT_OUT, f"it cannot be read: {error.message}", nbytes, trained=True, error=error)
    if tensors:
        return Item(name, "", FILE, LEFT_OUT, f"nothing has read its {tensors} tensors", nbytes, trained=True)
    known = tensors is not None or path.suffix == ".distcp"
    about = "nothing has read it" if known else "no rule knows such a file"
    return Item(name, "", FILE, LEFT_OUT, about, nbytes, trained=known and tensors is None)


def _damage(path: Path, nbytes: int) -> SourceError | None:
    """Return what a crash or a full disk has left of a text that programs write, as far as that shows."""
    if not nbytes:
        return DamagedFileError("is empty", path=path, code=TRUNCATED)
    if path.suffix != ".json":
        return None
    first = max(0, nbytes - MAXIMUM_JSON_NBYTES)
    try:
        with opened(path) as file:
            text = file.at(first, nbytes - first)
        if not first:
            json.loads(text)
        elif not text.rstrip().endswith((b"}", b"]")):
            return DamagedFileError("is truncated JSON", path=path, code=TRUNCATED)
    except SourceError as error:
        return error
    except (ValueError, RecursionError) as error:
        return DamagedFileError("is not JSON", path=path, found=str(error)[:80])
    return None
