"""What wrappers put into names of tensors, and the one rule by which every boundary goes without it. Pure.

Names are treated as lists, or a checkpoint's tensors get other ones: those of the bare model (`bare`), of a live one
(`like_model`), or those that its files have (`as_filed`).

    _orig_mod                       torch.compile
    _forward_module                 Lightning's Fabric and its DeepSpeed strategy
    _fsdp_wrapped_module            FullyShardedDataParallel
    _checkpoint_wrapped_module      checkpoint_wrapper: activations computed again
    module                          DistributedDataParallel, DataParallel, AveragedModel, DeepSpeed's engine
    base_model.model                PEFT

The first four are attributes of torch's that no model has: they are left out wherever they stand. `module.` may be a
child of the model itself, so it is left out at the front only, once, and only if every tensor of the model has it: one
that has not shows that it is a child, but the count that AveragedModel keeps of its own. Neither is left out where two
names would become one. A model that is nothing but a child called `module` looks like one in a wrapper; where a live
model is at hand, its own names decide, see `aligned`. For comparing, `module.` and PEFT's prefix, which is part of the
names that PEFT loads, are left out as often as all names have them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from zckpt.state.checkpoint import Checkpoint, Parameter
from zckpt.state.mappings import without


def is_number(text: str) -> bool:
    """Tell a number in a file's texts that is one of a layer, an expert, a parameter: not of thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that takes numbers in a name as numbers."""
    return [(int(word), "") if is_number(word) else (-1, word) for word in re.split(r"([0-9]{1,18})", name)]


INNER = frozenset({"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which wrappers keep a module, that are never a model's own."""

FRONT = "module."
"""What a wrapper puts before every name, and a model may have as the name of a child."""

AVERAGED = "n_averaged"
"""What torch's AveragedModel has beside the model: of how many it is the mean."""

PEFT_MODEL = "base_model."
"""What all names begin with where a kind has something once for all modules: VeRA's projections, a bank of vectors."""

PEFT = f"{PEFT_MODEL}model."


def plain_name(name: str) -> str:
    """Return a name without the attributes in which wrappers keep modules."""
    if not any(one in name for one in INNER):
        return name
    return ".".join(step for step in name.split(".") if step not in INNER) or name


def without_wrappers(name: str) -> str:
    """Return a name without anything that a wrapper may have put there, all that the model's own names may be."""
    name = plain_name(name)
    while name.startswith(FRONT):
        name = name[len(FRONT) :]
    return name


ADDED = (
    "lora_", "ia3_", "hada_", "lokr_", "oft_", "vera_", "boft_", "trainable_tokens_", "adamss_", "beft_", "bone_",
    "c3a_", "deft_", "delora_", "fourierft_", "frod_", "glora_", "gralora_", "hira_", "hra_", "lily_", "ln_tuning_",
    "miss_", "osf_", "peanut_", "poly_", "psoft_", "pvera_", "randlora_", "road_", "shira_", "supertuning_",
    "tinylora_", "unilora_", "vblora_", "waveft_",
)  # fmt: skip
"""How what PEFT adds to a module is called; in memory the adapter's name is behind it (PEFT 0.21, `mapping`)."""

PROMPT = "prompt_embeddings"
"""What a prompt is in PEFT's files that has nothing else to train: the embedding of `prompt_encoder` in memory."""

_PROMPT = re.compile(r"prompt_encoder\.[^.]+\.embedding\.weight")


MAGNITUDE = "lora_magnitude_vector"
"""DoRA's, a module in memory and a tensor in files."""


def is_added(name: str) -> bool:
    """Tell a parameter of an adapter by its name."""
    return any(part.startswith(ADDED) for part in name.split("."))


def is_of_adapter(name: str) -> bool:
    """Tell the same of one that PEFT puts around a module, too: a copy of it that is trained."""
    return is_added(name) or "modules_to_save" in name.split(".")


def without_adapter(name: str) -> str:
    """Return PEFT's name for a parameter as its files have it: without that of the adapter."""
    parts = name.split(".")
    found: list[str] = []
    skip = False
    for at, part in enumerate(parts):
        if skip:
            skip = False
        elif part == "modules_to_save":
            skip = True
        else:
            found.append(part)
            skip = part.startswith(ADDED) and at + 1 < len(parts) and parts[at + 1] not in ("weight", "bias")
    return ".".join(found).replace(f"{MAGNITUDE}.weight", MAGNITUDE)


def bare_names(names: Iterable[str], *, front: bool = True) -> dict[str, str]:
    """Return the name that each tensor of one model has in the bare model, by the name it has here.

    Parameters
    ----------
    names : iterable of str
        Of all tensors of the model: of some of them only, a child called `module` may be taken for a wrapper.
    front : bool
        Whether `module.` may be a wrapper's. Not of names that were bare when they were written.
    """
    found = _plain_names(names)
    return _shortened(found, FRONT) if front and _have(found.values(), FRONT) else found


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names under which tensors of one model are compared, by the name that each has here."""
    found = _plain_names(names)
    while prefix := next((one for one in (FRONT, PEFT) if _have(found.values(), one)), None):
        found = _shortened(found, prefix)
    return found


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    found = {name: plain_name(name) for name in names}
    uses = Counter(found.values())
    return {name: short if uses[short] == 1 else name for name, short in found.items()}


def _shortened(found: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name: short.removeprefix(prefix) for name, short in found.items()}


def _have(names: Collection[str], prefix: str) -> bool:
    """Tell whether all names have a prefix, and something behind it."""
    some = [name for name in names if name != AVERAGED]
    return bool(some) and all(name.startswith(prefix) and name != prefix for name in some)


def aligned(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """Return our name of each of their tensors that we have: ours decide what a wrapper has put there.

    Names are the same without the attributes of wrappers, and with the same `module.` before all that are: as many of
    them are taken off one side as make most names meet, and fewer where as many meet. Their tensors that have not as
    many are then none of ours; and where one of those already has the name of ours that another would get, none is
    taken off. A parameter of an adapter has PEFT's name for it in memory on one side, and on the other that in a file.
    What is left may have a `module` within, as where one side has wrappers around parts of a model.

    `ours`: of a live model; `theirs`: of a checkpoint.
    """
    mine, its = _by_short(ours), _by_short(theirs)
    best = _meeting(mine, its)
    most = [max(map(_count, names), default=0) for names in (mine, its)]
    turns = [(times + 1, 0) for times in range(most[0])] + [(0, times + 1) for times in range(most[1])]
    for off_ours, off_theirs in sorted(turns, key=lambda turn: (sum(turn), turn)):  # one or the other, fewest first
        found = _meeting(_shorter(mine, off_ours), _shorter(its, off_theirs))
        both = set(found.values()) & (set(its.values()) - found.keys())
        if len(found) > len(best) and not both:
            best = found
    ours_left, its_left = _left(mine, best.values()), _left(its, best)
    best |= _meeting(_of_adapter(ours_left), its_left)
    best |= _meeting(ours_left, _of_adapter(its_left))
    ours_left, its_left = _left(mine, best.values()), _left(its, best)
    return best | _meeting(_within(ours_left), _within(without(its_left, *ours_left)))


def _left(names: Mapping[str, str], met: Collection[str]) -> dict[str, str]:
    taken = {*met}
    return {short: name for short, name in names.items() if name not in taken}


def _within(names: Mapping[str, str]) -> dict[str, str]:
    """Return names by those without `module` behind the first step; none where several have one."""
    pairs = [(re.sub(r"(?:\.module)+(?=\.)", "", short), name) for short, name in names.items()]
    uses = Counter(short for short, _ in pairs)
    return {short: name for short, name in pairs if uses[short] == 1}


def _of_adapter(names: Mapping[str, str]) -> dict[str, str]:
    """Return names that say an adapter by those without; none where several adapters have one.

    What an adapter adds has two: programs that put it into a model themselves do without PEFT's prefix in memory,
    and NeMo Automodel calls DoRA's magnitudes `lora_magnitude` there.
    """
    found = {name: without_adapter(short) for short, name in names.items()}
    prompts = {short: name for short, name in names.items() if short.startswith("prompt_encoder.")}
    if len(prompts) == 1 and _PROMPT.fullmatch(next(iter(prompts))):
        found[next(iter(prompts.values()))] = PROMPT
    pairs = [(short, name) for name, short in found.items()]
    pairs += [(short.removeprefix(PEFT), name) for short, name in pairs if short.startswith(PEFT) and is_added(short)]
    pairs += [(short.removesuffix("_vector"), name) for short, name in pairs if short.endswith(f".{MAGNITUDE}")]
    uses = Counter(short for short, _ in pairs)
    return {short: name for short, name in pairs if short not in names and uses[short] == 1}


def _by_short(names: Iterable[str]) -> dict[str, str]:
    return {short: name for name, short in bare_names(names, front=False).items()}


def _meeting(mine: Mapping[str, str], its: Mapping[str, str]) -> dict[str, str]:
    return {its[short]: name for short, name in mine.items() if short in its}


def _count(name: str) -> int:
    count = 0
    while name.startswith(FRONT):
        name, count = name[len(FRONT) :], count + 1
    return count


def _shorter(names: Mapping[str, str], times: int) -> dict[str, str]:
    """Return the names that have so many prefixes, without them."""
    prefix = FRONT * times
    return {
        short.removeprefix(prefix): name
        for short, name in names.items()
        if (short.startswith(prefix) and short != prefix) or short == AVERAGED
    }


def bare(checkpoint: Checkpoint) -> Checkpoint:
    """Give a checkpoint the names that its bare model has, or each of its models; `bare_names` says which these are.

    What zckpt wrote, or converted, had bare names when it was written; and an adapter may have known better.
    """
    front = "origin" not in checkpoint.details and not checkpoint.wrapped
    names, every = dict[str, str](), _names_of(checkpoint)
    for prefix in (*(f"{model}." for model in checkpoint.models()), ""):
        its = {name: name.removeprefix(prefix) for name in every if name.startswith(prefix) and name not in names}
        short = bare_names(its.values(), front=front)
        names |= {name: prefix + short[rest] for name, rest in its.items()}
    return renamed(checkpoint, names)


def like_model(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """Give a checkpoint the names that a live model has for its tensors, as far as it has them."""
    return renamed(checkpoint, aligned(names, _names_of(checkpoint)))


def as_filed(checkpoint: Checkpoint) -> Checkpoint:
    """Give a checkpoint the names that its files have, for formats whose program looks for them."""
    return renamed(checkpoint, checkpoint.wrapped)


def renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Give the tensors of a checkpoint new names, by their old ones, and keep which name each has in the files.

    Tensors that are in what the adapter keeps for itself have the names that they had there.
    """
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return checkpoint
    new = {name: changed.get(name, name) for name in dict.fromkeys([*_names_of(checkpoint), *changed])}
    filed = {new[name]: checkpoint.wrapped.get(name, name) for name in new}
    for section in ("parameters", "buffers", "unnamed"):  # which the adapter may have kept for itself, too
        tensors: dict[str, Parameter] = {}
        for one in getattr(checkpoint, section).values():
            name = new.get(one.name, one.name)
            tied_to = None if one.tied_to is None else new.get(one.tied_to, one.tied_to)
            tensors[name] = replace(one, name=name, tied_to=tied_to)
        setattr(checkpoint, section, tensors)
    checkpoint.param_groups = [
        replace(group, parameters=[new.get(name, name) for name in group.parameters])
        for group in checkpoint.param_groups
    ]
    checkpoint.duplicates = [
        replace(one, name=new.get(one.name, one.name), of=new.get(one.of, one.of)) for one in checkpoint.duplicates
    ]
    checkpoint.wrapped = {name: its for name, its in filed.items() if name != its}
    return checkpoint


def _names_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors; where there is no model, those by which the optimizer calls its parameters."""
    if checkpoint.parameters or checkpoint.buffers:
        return [*checkpoint.parameters, *checkpoint.buffers]
    listed = checkpoint.grouped
    return [name for name in dict.fromkeys([*checkpoint.unnamed, *listed]) if not name.isdecimal()]
