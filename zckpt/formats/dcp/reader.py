"""Reading a checkpoint of torch's DCP: its items, which of them are model and optimizer, and all that is neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import ShardError, UnsupportedError, listed
from zckpt.evidence import may_be_trained
from zckpt.formats.account.trees import LazyTree
from zckpt.formats.companions import COPIED, note_models
from zckpt.formats.dcp.directory import MEGATRON_NAMES, Directory, is_megatrons, is_whole, rank_of
from zckpt.formats.dcp.items import ItemFile, ObjectItem, is_empty, read_items
from zckpt.formats.dcp.metadata import Keys, Metadata, read_metadata
from zckpt.formats.dcp.models import Optimizer, attach, find_models, is_average, owners, read_optimizer, without_modules
from zckpt.formats.dcp.own import prepare, restore_own, without_carried
from zckpt.formats.dcp.tree import (
    DEEPEST,
    Branch,
    ModelPart,
    Node,
    Tree,
    branch,
    build,
    carry,
    dicts_of_tensors,
    dotted,
    find_optimizers,
)
from zckpt.formats.fsdp_rank_files.contents import FLAT
from zckpt.formats.fsdp_rank_files.held import is_share, shares
from zckpt.formats.remainder import names_of_models, of_modules
from zckpt.formats.safetensors import file as safetensors
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.optimizer import MASTERS, looks_like_optimizer, optimizer_rules
from zckpt.formats.torch_files.reader import COMPOSERS_STEP, STEP_KEYS
from zckpt.formats.torch_files.tensors import TensorItem, carried, describe, holds_tensors, scalars_in
from zckpt.immutable import immutable
from zckpt.state import WEIGHT, Checkpoint, GivenNames, SourceFile, are_distinct, dict_of
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, REST, STATE, Claim, Rule
from zckpt.state.names import aligned
from zckpt.storage.files import files_in, is_file
from zckpt.torchfile import TorchFile, read_torchfile, value_at

FORMAT = "dcp"

STEP_PLACES = ("train_state", "trainer_state", "trainer", "progress")
"""Keys under which programs keep a dict that has the step."""


def read(directory: Directory, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a directory that torch's DCP wrote.

    `names`: names of the optimizer's parameters in its order, for a directory that only numbers them. Raises
    SourceError: files are missing, damaged, or contradict each other; or hold something that zckpt does not know, as
    those of Megatron-Core do.
    """
    for folder in filter(is_megatrons, directory.folders.values()):
        raise UnsupportedError(
            "is Megatron-Core's torch_dist format, but metadata.json is missing, which identifies it",
            path=folder,
            found=", ".join(MEGATRON_NAMES),
            advice="copy metadata.json to the other files",
        )
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    root, folders = tree_of(directory, checkpoint)
    own = read_torchfile(directory.own) if directory.own is not None else None
    fill(checkpoint, root, names=names, own=own, pairs=directory.by_number())
    sharded = list(filter(safetensors.is_sharded, directory.folders.values()))
    for folder in sharded:
        note_models(checkpoint, [folder / name for name in files_in(folder) if COPIED.fullmatch(name)], folder)
    for one in checkpoint.owners if sharded else ():
        if whole := next((slot for slot in one.slots.values() if slot.numel > one.numel), None):
            raise ShardError(
                f"the pieces of {one.name} end before its {whole.name} does: the last shards are missing",
                path=sharded[0],
                expected=whole.shape,
                found=one.shape,
                code=MISSING_FILE,
                parameters=[one.name],
            )
    say_what_values_are(checkpoint, folders, rewritten=own is not None)
    if own is None and directory.lightning is not None:
        file = read_torchfile(directory.lightning)
        checkpoint.files.append(describe(file, "metadata"))
        content = dict_of(file.root)
        for key, value in content.items():
            checkpoint.metadata.setdefault(str(key), carried(file, value))
        counted = (content[key] for key in STEP_KEYS if type(content.get(key)) is int)
        checkpoint.step = next(counted, checkpoint.step)
    if directory.unfinished:
        checkpoint.warnings.append(f"later steps are incomplete: {listed(directory.unfinished)}")
    return checkpoint


def fill(
    checkpoint: Checkpoint,
    root: Branch,
    *,
    names: GivenNames = None,
    own: TorchFile | None = None,
    pairs: Sequence[Sequence[str]] = (),
) -> None:
    """Give a checkpoint all that a saved dict has.

    Parameters
    ----------
    checkpoint : Checkpoint
    root : mapping
        The dict: a tree of items.
    names : sequence of str, optional
        As for `read`.
    own : TorchFile, optional
        What zckpt has written into `zckpt.pt`; then the rest of the dict is not looked at.
    pairs : sequence of sequence of str
        Keys of the dict under which a model and its optimizer are, where the dict is of Accelerate's folders.

    Raises
    ------
    SourceError
        As `read`.
    """
    models, optimizers = _find(checkpoint, root if own is None else without_carried(own, root), own, pairs)
    if not models and not optimizers:
        raise UnsupportedError(
            "holds neither a model nor an optimizer", path=checkpoint.source, found=listed(list(root))
        )
    flat = [name for model in models for name in model.tensors if name.rpartition(".")[2] == FLAT]
    if flat and own is None:  # beside them, with use_orig_params, one rank's piece of each parameter
        raise UnsupportedError(
            "holds FSDP1's flat parameters, as of LOCAL_STATE_DICT, and no file says which parameters are in them",
            path=checkpoint.source,
            expected="parameters by their names",
            found=listed(flat),
            advice="load it in its own program and save it as SHARDED_STATE_DICT",
        )
    # As in any state dict, integers and bools are buffers and so are the running statistics of a batch norm; the rest
    # are taken for parameters. A tied parameter is there twice, and nothing says that it is tied.
    for model in models:
        dtypes = {bare: item.dtype for bare, item in model.tensors.items()}
        for bare, item in model.tensors.items():
            name = model.prefix + bare
            checkpoint.place(name, item.slot(WEIGHT), trained=may_be_trained(bare, dtypes))
            if (filed := model.prefix + model.filed.get(bare, bare)) != name:
                checkpoint.wrapped[name] = filed
    parts = [{model.prefix + bare for bare in model.tensors} for model in models if not is_average(model)]
    names = names if own is None else prepare(checkpoint, optimizers, own, names)
    optimizers = attach(checkpoint, optimizers, names, parts)
    model_paths, optimizer_paths = [part.path for part in models], [part.path for part in optimizers]
    checkpoint.step = _step(checkpoint, root, [*model_paths, *optimizer_paths])
    if own is not None:
        restore_own(checkpoint, own, root)
        return
    for one in optimizers:
        checkpoint.optimizer_metadata.update({key: carry(node) for key, node in one.others.items()})
    masters = {(*one.path[:-1], key) for one in optimizers if one.state.masters for key in MASTERS}
    for at, node in _rest(root, (), {*model_paths}, {*optimizer_paths, *masters}):
        checkpoint.metadata[dotted(at)] = carry(node)


def _find(
    checkpoint: Checkpoint, root: Branch, own: TorchFile | None, pairs: Sequence[Sequence[str]]
) -> tuple[list[ModelPart], list[Optimizer]]:
    """Return the models of a dict, and its optimizers.

    Several models of Accelerate's have each its own names, which may be those of another: they begin with what the
    model is called, `model` and `model_1` as where Accelerate writes them as files.
    """
    if len(pairs) < 2:
        found = find_optimizers(root)
        candidates = list(dicts_of_tensors(root, *(part.path for part in found)))
        tensors = {name for one in candidates for name in one.tensors}
        optimizers = [read_optimizer(part, tensors, checkpoint.source, checkpoint.warnings) for part in found]
        without_modules(optimizers, candidates)
        models = find_models(candidates, optimizers, checkpoint.warnings, front=own is None)
        _name(optimizers, models)
        return models, optimizers
    known = names_of_models(own, [f"model_{number}" if number else "model" for number in range(len(pairs))])
    checkpoint.details["models"] = known
    every: tuple[list[ModelPart], list[Optimizer]] = [], []
    for name, folders in zip(known, pairs, strict=True):
        models, optimizers = _find(checkpoint, {folder: root[folder] for folder in folders}, own, ())
        if len(models) != 1 or len(optimizers) > 1:
            raise UnsupportedError(
                "does not hold a model and its optimizer under each number",
                path=checkpoint.source,
                expected=f"one model and at most one optimizer in {' and '.join(folders)}",
                found=f"{len(models)} and {len(optimizers)}",
            )
        models[0] = replace(models[0], prefix=f"{name}.")
        for one in optimizers:
            one.prefix, one.name = models[0].prefix, f"optimizer_{len(every[1])}" if every[1] else "optimizer"
        every[0].extend(models)
        every[1].extend(optimizers)
    return every


def _name(optimizers: Sequence[Optimizer], models: Sequence[ModelPart]) -> None:
    """Give optimizers the names that their models have.

    Before names is put what was put before those of the model, and before numbers that have to differ from another
    optimizer's, where that one is. Several are called by their keys, or by numbers where Lightning has made keys of a
    list.
    """
    numbered = sum(not one.names for one in optimizers) > 1
    for one, model in zip(optimizers, owners(optimizers, models), strict=True):
        if model is not None and one.names:
            one.prefix = model.prefix
            one.rename(aligned(model.tensors, one.names))
        elif not one.names:
            one.prefix = f"{dotted(one.path)}." if numbered else ""
            if model is not None:
                one.state.scopes.update(dict.fromkeys(one.state.every_number, model.prefix))
    keys = [str(one.path[-1]) if one.path else "" for one in optimizers]
    _by_their_keys(optimizers, models, keys)
    if len(optimizers) > 1:
        if set(keys) == {f"optimizer_{number}" for number in range(len(keys))}:
            keys = [key.removeprefix("optimizer_") for key in keys]
        elif not are_distinct(keys):
            keys = [dotted(one.path) for one in optimizers]
        for one, key in zip(optimizers, keys, strict=True):
            one.name = key


def _by_their_keys(optimizers: Sequence[Optimizer], models: Sequence[ModelPart], keys: Sequence[str]) -> None:
    """Where each of several optimizers has one parameter, under its name, say so: they step in the backward pass."""
    single = all(not one.names and len(one.state.every_number) == 1 for one in optimizers)
    for model in models if single and len(keys) > 1 else ():
        names = aligned(model.tensors, keys)
        if len(set(names.values())) == len(keys):
            for one, key in zip(optimizers, keys, strict=True):
                one.rename({one.state.every_number[0]: names[key]})
                one.prefix = model.prefix
            return


@immutable
class Folder:
    """Of a folder: the path in the saved dict of each key, its own name included, and tensors of several chunks.

    `quantised`: keys of slots of which each chunk is codes with their scales and map.
    """

    paths: dict[str, Keys]
    several: list[str]
    quantised: list[str]


def say_what_values_are(checkpoint: Checkpoint, folders: Mapping[str, Folder], *, rewritten: bool) -> None:
    """Give files the rules for values that are no tensors: by the key that state or metadata have them under.

    What `zckpt.pt` holds as it was (`rewritten`) is there once more for programs that do not know that file.
    """
    kept = {*checkpoint.metadata, *checkpoint.optimizer_metadata, *of_modules(checkpoint)[0]}
    single = {key for one in checkpoint.holders() for key in (*one.state, *one.optimizer_slots)}
    single |= {key for group in checkpoint.param_groups for key in (*group.hyperparameters, *group.state)}
    for file in checkpoint.files:
        folder = folders.get(file.path)
        if folder is None or not isinstance(file.tree, LazyTree):
            continue
        rules = [Rule((key, "*", "*", "qmap"), COPY, "the map of each chunk", tensors=True) for key in folder.quantised]
        rules += [rule for place in _pickled(file.tree.held) for rule in optimizer_rules(*place)]
        for key in (*file.tree.held, *(folder.several if rewritten else ())):
            steps = folder.paths.get(key, (key,))  # metadata have what lies there, or around it, under some of these
            ends = combinations(range(len(steps) + 1), 2)
            name = next((name for start, end in ends if (name := dotted(steps[start:end])) in kept), None)
            if name is not None:
                fate, about = (COPY, f"{name}, as in {OWN_NAME}") if rewritten else (CARRIED, name)
                rules.append(Rule((key, REST), fate, about, tensors=rewritten))
            elif key in STEP_KEYS and checkpoint.step is not None:
                rules.append(Rule((key, REST), IMPLIED, "the step"))
            elif not holds_tensors(file.tree.held.get(key)) or single & {str(one).rpartition(".")[2] for one in steps}:
                # without tensors, of an optimizer, or of a dict of it: torch before 2.4 kept these whole
                rules.append(Rule((key, REST), STATE, "single values and hyperparameters"))
        file.rules = (*file.rules, *rules)


def _pickled(node: object, *place: str) -> Iterator[tuple[str, ...]]:
    """Yield where optimizers are that are part of one item, with `flatten_state_dict=False`."""
    if looks_like_optimizer(node):
        yield place
    elif len(place) < DEEPEST:
        for step, child in dict_of(node).items() if not isinstance(node, list) else enumerate(node):
            yield from _pickled(child, *place, str(step))


def tree_of(directory: Directory, checkpoint: Checkpoint) -> tuple[Branch, dict[str, Folder]]:
    """Return the dict that was saved, by name of several folders; and the paths of keys, by the file of a folder."""
    trees: Tree = {}
    used: list[ItemFile] = []
    folders: dict[str, Folder] = {}
    for name, folder in directory.folders.items():
        if not is_whole(folder):
            model = (safetensors.read_shards if safetensors.is_sharded(folder) else safetensors.read)(folder)
            trees[name] = taken(checkpoint, model)
            continue
        metadata = read_metadata(folder)
        items = read_items(metadata)
        for item in items.objects.values():
            if isinstance(item.node, dict) and is_share(item.file) and any(shares(item.node)):
                raise UnsupportedError(
                    f"{item.key} is one value, pickled by a rank with its share of each tensor; the others are lost",
                    path=item.file.path,
                    expected="each tensor by itself, as torch saves them by default",
                    advice="save it again without flatten_state_dict=False",
                )
        trees[name] = build({**items.tensors, **items.objects}, metadata.paths, metadata.path)
        used += items.files
        above = (name,) if name else ()
        several = [key for key, item in items.tensors.items() if len(item.spans) > 1]
        paths = {key: (*above, *steps) for key, steps in metadata.paths.items()}
        folders |= dict.fromkeys((file.path for file in items.files), Folder(paths, several, items.quantised))
        describe_files(checkpoint, metadata, items.files)
        if metadata.unsaved:
            checkpoint.warnings.append(f"no rank saved any part of {listed(metadata.unsaved)}")
        checkpoint.format_version = checkpoint.format_version or metadata.version
    ranks = {rank for file in used if (rank := rank_of(file.path)) is not None}
    checkpoint.world_size = max(len(ranks), 1)
    checkpoint.details["ranks_with_files"] = sorted(ranks)
    checkpoint.details["serialization"] = "safetensors" if any(f.is_safetensors for f in used) else "torch_save"
    if list(trees) == [""]:
        only = trees[""]
        return dict_of(only), folders
    checkpoint.details["folders"] = list(map(str, trees))
    return trees, folders


def taken(checkpoint: Checkpoint, model: Checkpoint) -> Tree:
    """Add what a model that was read by itself has besides tensors to a checkpoint; return its tensors as items."""
    checkpoint.files, checkpoint.claims = checkpoint.files + model.files, checkpoint.claims | model.claims
    checkpoint.metadata |= model.metadata
    checkpoint.warnings += model.warnings
    slots = {one.name: model.owner(one.name).slots[WEIGHT] for one in model.tensors()}
    return {name: TensorItem(name, one.dtype, one.shape, one.spans, None, model.source) for name, one in slots.items()}


def describe_files(checkpoint: Checkpoint, metadata: Metadata, files: Sequence[ItemFile]) -> None:
    """Add `.metadata` and the files of the items to those of a checkpoint."""
    index = Path(metadata.path)
    folder = index.parent
    checkpoint.files.append(SourceFile(metadata.path, index.stat().st_size, "metadata"))
    checkpoint.claims[metadata.path] = Claim(IMPLIED, "the place of each item")
    for file in sorted(files, key=lambda one: (rank_of(one.path) or 0, one.path)):
        checkpoint.files.append(
            SourceFile(file.path, file.nbytes, "shard", rank_of(file.path), None, file.tensor_nbytes,
                       file.unreferenced_nbytes, file.archives, LazyTree(file.tree, file.several))
        )  # fmt: skip
    known = {Path(file.path) for file in files}
    others = [path for path in folder.glob("[!.]*.distcp") if path not in known]
    empty = {str(path) for path in others if is_file(path) and is_empty(path)}
    checkpoint.claims |= dict.fromkeys(empty, Claim(IMPLIED, "of a rank that had nothing to save"))
    stray = sorted(path.name for path in others if str(path) not in empty)
    if stray:
        said = f"not part of the checkpoint, which does not name them: {listed(stray)}"
        checkpoint.warnings.append(said)
        checkpoint.leftovers |= {str(folder / name): said for name in stray}


def _rest(node: Branch, path: Keys, models: set[Keys], optimizers: set[Keys]) -> Iterator[tuple[Keys, Node]]:
    """Yield the largest parts of a tree that hold no model and no optimizer."""
    if path in optimizers:
        return
    for step, child in node.items():
        at = (*path, step)
        within = any(taken[: len(at)] == at for taken in (*models, *optimizers))
        content = branch(child) if within else None
        if content is not None:
            yield from _rest(content, at, models, optimizers)
        elif not (path in models and isinstance(child, TensorItem)):
            yield at, child


def _step(checkpoint: Checkpoint, root: Branch, paths: Sequence[Keys]) -> int | None:
    """Return the step that the program counted: at the root, next to the model, or where its trainer keeps it."""
    places = [root, *(value_at(root, path[:end]) for path in paths for end in range(1, len(path)))]
    near = [one for place in places if isinstance(place, dict) for one in (place, *map(place.get, STEP_PLACES))]
    for ways in ([(key,) for key in STEP_KEYS], [COMPOSERS_STEP]):
        for place, way in product(near, ways):
            node = value_at(place, way)
            number = scalars_in({"": node}, "").get("")
            value = number.value if number is not None else node.node if isinstance(node, ObjectItem) else None
            if type(value) is int:
                return value
    return checkpoint.most_steps
