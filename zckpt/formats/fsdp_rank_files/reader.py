"""From the files of ranks to a Checkpoint. Structure only; no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import LayoutError, SourceError, UnsupportedError, about
from zckpt.evidence import note_not_used
from zckpt.formats.companions import COPIED, carry, note_adapter, note_models
from zckpt.formats.deepspeed.values import keep_others
from zckpt.formats.fsdp_rank_files.across import Across, RankFiles
from zckpt.formats.fsdp_rank_files.contents import Model, add_part, read_models, read_optimizers, tie_as_configured
from zckpt.formats.fsdp_rank_files.directory import CONFIG_NAME, EXTRA, HUGGINGFACE, LORA_NAME, MODEL, Directory
from zckpt.formats.fsdp_rank_files.held import elements, is_share, shares, versions_with, with_shares
from zckpt.formats.fsdp_rank_files.kept import KEY, KEYS, OF_ITS_RANK, RULE, as_grouped, of_rank, recorded_names
from zckpt.formats.fsdp_rank_files.readings import attach, beside_whole
from zckpt.formats.fsdp_rank_files.units import units_in
from zckpt.formats.lost import is_lost
from zckpt.formats.remainder import as_masters, restore_from
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.reader import step_of
from zckpt.formats.torch_files.tensors import as_mapping, as_names, by_name, carried
from zckpt.formats.torch_files.writer import in_pieces
from zckpt.state import WEIGHT, Checkpoint, Duplicate, GivenNames, Topology, list_of, without
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, REST, Claim, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import Place, Tensor, TorchFile, read_torchfile, value_at

Content = tuple[int, TorchFile, dict[str, object]]
"""A rank, its file, and what that has by key."""

ADAPTER = "lora_adapter/adapter_model.safetensors"
"""LoRA's parameters, under PEFT's names."""


def read(directory: Directory, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of all ranks' files.

    `names`: names of the optimizer's parameters, in its order. Raises SourceError: files are damaged or contradict each
    other, or do not say whose state is whose; UsageError: `names` do not fit.
    """
    checkpoint = Checkpoint(str(directory.path), directory.format)
    checkpoint.world_size = directory.world_size
    model = read_models(checkpoint, directory.models, directory.places[0])
    weights = None
    if directory.whole is not None:
        from zckpt.formats.transformers_trainer.reader import read_model

        weights = read_model(checkpoint, directory.whole.models[0], "", directory.whole)
    own = read_torchfile(directory.own) if directory.own is not None else None
    _describe_mesh(checkpoint, model)
    _keep_rest(checkpoint, model, directory)
    if directory.optimizers:
        known = names
        if own is not None:
            note_not_used(checkpoint, names)
            known = recorded_names(own, list(checkpoint.parameters))
        optimizer = read_optimizers(checkpoint, directory.optimizers, directory.places[1])
        reading = beside_whole(optimizer, weights, known) if weights is not None else None
        attach(checkpoint, model, optimizer, known, ties_are_known=own is not None, reading=reading)
    if own is None:
        tie_as_configured(checkpoint, model, directory.path)
    # verl saves the model once more, whole, beside the files of ranks if it is told to.
    folder = directory.path / HUGGINGFACE
    files = sorted(folder.iterdir()) if folder.is_dir() and weights is None else []
    note_models(checkpoint, [path for path in files if COPIED.fullmatch(path.name) and is_file(path)], folder)
    if is_file(directory.path / ADAPTER):
        note_adapter(checkpoint, directory.path / ADAPTER)
    _read_rest(checkpoint, directory)
    _claim(checkpoint, directory)
    checkpoint.step = step_of(checkpoint, checkpoint.metadata) if directory.step is None else directory.step
    if own is not None:
        restore_from(checkpoint, own, RULE)
        with about(own.path):  # weights had another type than their masters, whose names these are
            said = as_mapping(as_mapping(own.root).get(KEY))
            as_masters(checkpoint, as_mapping(said.get("dtypes", {})))
            as_grouped(checkpoint, list(map(as_names, list_of(said.get("names")))))
        checkpoint.is_numbered = False
    for path in directory.beside:
        if own is not None and path.stem in checkpoint.metadata:
            checkpoint.claims[str(path)] = Claim(COPY, f"as in {OWN_NAME}")
        else:
            carry(checkpoint, path)
    return checkpoint


def _keep_rest(checkpoint: Checkpoint, model: Model, directory: Directory) -> None:
    """Keep what modules have besides tensors: what all ranks have once, what one has otherwise by its rank."""
    if not model.rest:
        return
    described = {one.path: one for one in checkpoint.files}
    place = tuple(map(str, directory.places[0]))
    first = next(iter(model.rest.values()))
    for rank, (file, rest) in model.rest.items():
        rules: Sequence[Rule] = ()
        if directory.own is not None:
            rules = [Rule((*place, key, "**"), COPY, f"as in {OWN_NAME}", tensors=True) for key in rest]
        elif file is first[0]:
            checkpoint.metadata |= {key: carried(file, value) for key, value in rest.items()}
        else:
            others, its = keep_others([first, (file, rest)], rest, *place)
            for name, value in others.items():
                key = name.removeprefix(f"{Path(file.path).stem}.")
                checkpoint.metadata[of_rank(MODEL, checkpoint.world_size, rank, key)] = value
            rules = its[file.path]
        described[file.path].rules = (*rules, *described[file.path].rules)


def _describe_mesh(checkpoint: Checkpoint, model: Model) -> None:
    firsts = [held.first for held in model.held.values()]
    meshes = list(dict.fromkeys(one.mesh for one in firsts if one.mesh is not None))
    if meshes and meshes[0].device:
        checkpoint.details["device"] = meshes[0].device
    if model.form is not None:
        checkpoint.details["torch_version"] = versions_with(model.form)
    checkpoint.details["tensors"] = list(dict.fromkeys(one.kind for one in firsts))
    if meshes:
        largest = max(meshes, key=lambda one: len(one.sizes))
        checkpoint.details["mesh"] = largest.named or list(largest.sizes)
    tp = max((one.named.get("tp", 1) for one in meshes), default=1)
    checkpoint.topology = Topology(dp=checkpoint.world_size // tp, tp=tp)
    units = units_in(model.modules)
    if units:
        checkpoint.details["fsdp_units"] = units


def _read_rest(checkpoint: Checkpoint, directory: Directory) -> None:
    """Keep what files hold besides a model and an optimizer: what all ranks have once, a rank's own by its rank."""
    parts: dict[tuple[str, Place, tuple[Path, ...]], set[object]] = {
        (key, (), paths): set() for key, paths in directory.extras.items() if paths
    }
    depth = len(directory.places[0] or directory.places[1])
    for paths, place in zip((directory.models, directory.optimizers), directory.places, strict=True):
        for at_depth in range(min(len(place), depth) if paths else 0):
            parts.setdefault(("", place[:at_depth], paths), set()).add(place[at_depth])
    every: list[str] = []
    about = tuple(Rule((key,), IMPLIED, "which rank the file is of") for key in OF_ITS_RANK)
    if directory.own is not None:
        about += (Rule(("**",), COPY, f"as in {OWN_NAME}", tensors=True),)
    for (key, where, paths), gone in parts.items():
        found: list[Content] = []
        for rank, path in enumerate(paths):
            if is_lost(path):
                continue
            file = read_torchfile(path)
            file = replace(file, root={key: file.root}) if key else file
            root = as_mapping(value_at(file.root, where), file.path)
            found.append((rank, file, by_name(without(root, *gone), file.path)))
        whole, shown = _take_shares(checkpoint, paths, found)
        first = found[0][1:]
        keys = list(dict.fromkeys(one for *_, content in found for one in content))
        twice = [one for one in keys if one in every or one in checkpoint.metadata]
        if twice:
            raise UnsupportedError(f"{twice[0]} is both in the model's and in the optimizer's files",
                                   path=first[0].path)  # fmt: skip
        every += keys
        keys = [one for one in keys if one not in OF_ITS_RANK]
        checkpoint.metadata |= {one: carried(first[0], {**first[1], **whole}[one]) for one in keys if one in first[1]}
        for (rank, file, content), its in zip(found, shown, strict=True):
            others, rules = keep_others([first, (file, content)] if rank != found[0][0] else [], keys)
            for name, value in others.items():  # names of files may be the same on two nodes
                one = name.removeprefix(f"{Path(file.path).stem}.")
                checkpoint.metadata[of_rank(EXTRA, directory.world_size, rank, one)] = value
            own = (*about, *rules.get(file.path, ()), *(Rule((one, REST), CARRIED, one) for one in its))
            add_part(checkpoint, file, "metadata", rank, own, where, {**content, **its})
        every = [one for one in every if one not in whole]
    checkpoint.details[KEYS] = every


def _take_shares(
    checkpoint: Checkpoint, paths: Sequence[Path], found: Sequence[Content]
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Take the tensors that ranks share out of what their files have; return whole ones, and each rank's, by key."""
    shared = dict.fromkeys(
        key for _, file, content in found if is_share(file) for key, one in content.items() if any(shares(one))
    )
    whole: dict[str, object] = {}
    for key in shared:
        try:
            whole[key] = _together(checkpoint, key, paths, found)
        except SourceError as error:
            checkpoint.warnings.append(f"{key} is not read: {error.message}")
    shown = []
    for *_, content in found:
        own = {key: one for key in shared if (one := content.pop(key, None)) is not None and key in whole}
        shown.append({key: with_shares(one, elements) for key, one in own.items()})
        content |= {key: with_shares(one, lambda _: None) for key, one in own.items()}
    return whole, shown


def _together(checkpoint: Checkpoint, key: str, paths: Sequence[Path], found: Sequence[Content]) -> object:
    """Return the first rank's value of a key, each tensor that ranks share whole, of which others may have copies.

    Raises SourceError: they have not every element, each as often.
    """
    files, across = RankFiles([str(path) for path in paths]), dict[Place, Across]()
    for rank, file, content in found:
        reader = files.begin(rank, file)[1]
        for place, node in shares(content.get(key)):
            if (held := reader.held(node)) is not None:
                across.setdefault(place, Across(files)).by_tree[rank] = held
    first, tensors, others = found[0][2].get(key), dict[int, Tensor](), list[Duplicate]()
    for place, node in shares(first):
        label = ".".join(map(str, (key, *place)))
        [(_, slot), *copies] = files.joined(WEIGHT, label, across.pop(place))
        tensors[id(node)] = in_pieces(label, slot)
        others += [Duplicate("parameter", label, label, copy, slot, rank) for rank, copy in copies]
    whole = with_shares(first, lambda node: tensors[id(node)])
    if across or any(shares(whole)):
        raise LayoutError(f"ranks do not have the same tensors in {key}", path=paths[0])
    checkpoint.duplicates += others
    return whole


def _claim(checkpoint: Checkpoint, directory: Directory) -> None:
    """Say what files without tensors are."""
    known = dict.fromkeys(directory.trackers, "which step is the last")
    known[directory.path / CONFIG_NAME] = "the version of FSDP, and how many ranks"
    known[directory.path / LORA_NAME] = "the configuration of LoRA"
    checkpoint.claims |= {str(path): Claim(IMPLIED, about) for path, about in known.items() if is_file(path)}
    if directory.config:
        checkpoint.details["fsdp_config"] = dict(directory.config)
    if directory.others:
        said = f"not of the checkpoint: files of ranks of another world size, such as {directory.others[0].name}"
        checkpoint.warnings.append(said)
        checkpoint.leftovers |= {str(path): said for path in directory.others}
