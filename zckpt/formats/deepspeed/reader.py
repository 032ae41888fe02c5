"""From the files of a tag directory to a Checkpoint. Structure only; no tensor is read.

What is true of a checkpoint as a whole, from the files of all its ranks: topology, metadata, what else they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.codes import MISSING_FILE, OTHER_WORLD_SIZE
from zckpt.errors import DamagedFileError, ShardError, UnknownFormatError, about
from zckpt.evidence import note_not_used
from zckpt.formats.deepspeed.auto_ep import check_kind, common
from zckpt.formats.deepspeed.directory import (
    EXPERT,
    EXPERT_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    PIPELINE_LAYER,
    Shard,
    TagDirectory,
)
from zckpt.formats.deepspeed.expert_optimizers import attach_experts
from zckpt.formats.deepspeed.expert_ranks import expert_files, lost_ranks, spread_over
from zckpt.formats.deepspeed.experts import SLICED_EXPERTS, check_empty, is_expert
from zckpt.formats.deepspeed.gpt_model import completed
from zckpt.formats.deepspeed.group_order import in_one_order
from zckpt.formats.deepspeed.one_bit import ONE_BIT_RULES, compresses
from zckpt.formats.deepspeed.origin import Origin, RankFiles, RankState
from zckpt.formats.deepspeed.pipeline import degrees, join, stage_weights, with_shapes
from zckpt.formats.deepspeed.rank_state import read_rank
from zckpt.formats.deepspeed.ranks import (
    check_models,
    check_models_alike,
    data_parallel_size,
    listed_ranks,
    missing_ranks,
    ranks_text,
    select,
)
from zckpt.formats.deepspeed.shards import (
    MODEL_KEYS,
    ModelShard,
    OptimizerShard,
    configuration,
    read_models,
    read_optimizer,
    section,
)
from zckpt.formats.deepspeed.stage0 import STATE_KEYS, attach_optimizer, keep_other_state
from zckpt.formats.deepspeed.stage_order import stage_orders
from zckpt.formats.deepspeed.tensor_parallel import merge
from zckpt.formats.deepspeed.tp_rules import INFO_KEY, VOCABULARY_KEYS, Rules, read_rules
from zckpt.formats.deepspeed.unsaved import base_shards, is_unsaved, note_unsaved
from zckpt.formats.deepspeed.values import (
    MODEL_RULES,
    apart_between,
    copies_of,
    copies_of_optimizers,
    keep_others,
    shard_rules,
    weight_in,
)
from zckpt.formats.deepspeed.zenflow import DETAIL, WARNING, uses_zenflow
from zckpt.formats.torch_files.tensors import by_name, carried, describe
from zckpt.state import Checkpoint, SourceFile, Topology, as_float
from zckpt.state.inventory import Rule
from zckpt.torchfile import Object, TorchFile, plain, read_torchfile


def read(directory: TagDirectory, *, names: Sequence[str] | None = None, tp_rules: Path | None = None) -> Checkpoint:
    """Read the structure of a DeepSpeed checkpoint.

    Parameters
    ----------
    names : sequence of str, optional
        Names of the optimizer's parameters in its order, for files that have only numbers (stage 0).
    tp_rules : Path, optional
        A JSON file with rules for tensor-parallel slices, which are used instead of the checkpoint's own.

    Raises
    ------
    SourceError
        Files are missing, damaged, or contradict each other.
    UsageError
        The file of rules cannot be used.
    """
    given = None if tp_rules is None else read_rules(tp_rules)
    models = read_models(directory.of(MODEL))
    if not models:
        raise ShardError(
            "no model file",
            expected="mp_rank_00_model_states.pt",
            advice="give the directory that holds it with --root",
            code=MISSING_FILE,
        )
    optimizers = in_one_order([read_optimizer(shard) for shard in directory.of(OPTIMIZER)])
    with about(models[0].path):
        check_kind(models, optimizers, directory.of(EXPERT_OPTIMIZER))
    outside = [(shard, read_torchfile(shard.path)) for shard in [*directory.of(EXPERT), *directory.of(PIPELINE_LAYER)]]
    of_experts = [(shard, read_torchfile(shard.path)) for shard in directory.of(EXPERT_OPTIMIZER)]
    checkpoint = Checkpoint(str(directory.path), "deepspeed", leftovers=directory.leftovers)
    files = [*((m.shard, m.file) for m in models), *((o.shard, o.file) for o in optimizers), *outside, *of_experts]
    checkpoint.files = _described(files)
    for model in models:
        if not isinstance(model.content.get("module"), dict) and not directory.of(PIPELINE_LAYER):
            raise UnknownFormatError("holds no model", path=model.path, expected="a dict `module`")
    if optimizers:
        check_empty(of_experts)
        for model in models:  # that of a mixture of experts has no configuration before 0.19
            model.configuration = model.configuration or configuration(optimizers[0])
    with about(directory.path):
        ranks = _ranks(directory, models, optimizers, outside, checkpoint)
    states, members = [rank.state for rank in ranks], next((r.members for r in ranks if r.members), ())
    pp, tp = degrees([rank.models[0] for rank in ranks], directory.of(PIPELINE_LAYER))
    said = plain(models[0].content.get(INFO_KEY))
    said = said if isinstance(said, dict) else None
    info = completed(models[0], said, states[::tp], sliced=tp > 1) if given is None else given
    known = {} if info is None else {key: info[key] for key in (VOCABULARY_KEYS if tp == 1 else info) if key in info}
    rules = None if info is None else Rules(known, str(tp_rules or models[0].path))
    layers = bool(directory.of(PIPELINE_LAYER))
    attached: list[str] | None = None
    if not optimizers and of_experts and len(ranks) > 1:
        from zckpt.formats.deepspeed.stage0_ranks import attach_experts_to_ranks

        attached = attach_experts_to_ranks(checkpoint.source, ranks, of_experts, tp, names)
    elif not optimizers and not of_experts:
        from zckpt.formats.deepspeed.stage0_ranks import attach_to_ranks

        attached = attach_to_ranks(checkpoint.source, ranks, rules, info, tp, names, layers=layers)
    with about(models[0].path):
        state = join(stages := [merge(states[i : i + tp], rules) for i in range(0, len(states), tp)])
    for name in ("parameters", "buffers", "per_rank", "padding", "padding_spans", "duplicates"):
        setattr(checkpoint, name, getattr(state, name))
    checkpoint.param_groups = state.groups
    checkpoint.details |= stage_orders(stages) if layers else {}
    experts = [(shard, file) for shard, file in outside if shard.role == EXPERT]
    checkpoint.origin = Origin(
        directory, models[0], members, ranks, experts, of_experts, info, None if tp_rules is None else str(tp_rules),
        [(shard, file) for shard, file in outside if shard.role == PIPELINE_LAYER],
    )  # fmt: skip
    checkpoint.warnings += state.warnings
    describe_whole(checkpoint, directory, models, members, state, pp=pp, tp=tp, first=states[0])
    keep_all_others(checkpoint, models, optimizers, members, of_experts)
    checkpoint.warnings += attached or []
    if not optimizers:
        _attach_without_zero(checkpoint, models, of_experts, names, by_rank=attached is not None)
    else:
        note_not_used(checkpoint, names, "the files have")
    return checkpoint


def _described(files: Sequence[tuple[Shard, TorchFile]]) -> list[SourceFile]:
    """Return what is said of each file, of those that say the same once."""
    found: dict[tuple[int, str], SourceFile] = {}
    listed = []
    for shard, file in files:
        rules = MODEL_RULES if shard.role in (MODEL, EXPERT_OPTIMIZER) else ()
        like = found.get((id(file.root), shard.role))
        listed.append(describe(file, shard.role, shard.dp_rank, shard.mp_rank, rules=rules, like=like))
        found.setdefault((id(file.root), shard.role), listed[-1])
    return listed


def _attach_without_zero(
    checkpoint: Checkpoint,
    models: Sequence[ModelShard],
    of_experts: Sequence[tuple[Shard, TorchFile]],
    names: Sequence[str] | None,
    *,
    by_rank: bool,
) -> None:
    """Give a checkpoint of stage 0 the optimizer in its model or expert files, if its ranks do not have one already."""
    content = models[0].content.get("optimizer")
    if by_rank and checkpoint.param_groups and isinstance(content, dict):
        keep_other_state(checkpoint, content, models[0].file)
        return
    for parameter in checkpoint.parameters.values():
        parameter.frozen = False  # a file without groups does not say
    if is_unsaved(models, of_experts):
        note_unsaved(checkpoint, models)
    if by_rank or (content is None and not of_experts):
        return
    if of_experts:
        attach_experts(checkpoint, of_experts, models[0], names)
    else:
        attach_optimizer(checkpoint, models[0], names)


def _named(shard: Shard, file: TorchFile) -> dict[str, object]:
    """Return what a file of weights holds, by name."""
    if not isinstance(file.root, dict):
        raise DamagedFileError("unexpected content", path=shard.path, expected="a dict of weights")
    return by_name(file.root, shard.path)


def _ranks(
    directory: TagDirectory,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    outside: Sequence[tuple[Shard, TorchFile]],
    checkpoint: Checkpoint,
) -> list[RankFiles]:
    """Return the files and the state of each model-parallel rank."""
    mp_ranks = sorted({m.mp_rank for m in models} | {o.mp_rank for o in optimizers})
    recorded = models[0].content.get("mp_world_size")
    expected = recorded if isinstance(recorded, int) and recorded > 0 else len(mp_ranks)
    absent = missing_ranks(expected, mp_ranks)
    if absent or len(mp_ranks) != expected:
        raise ShardError(
            f"files of model-parallel ranks {absent} are missing" if absent else "too many model-parallel ranks",
            expected=f"{expected} model-parallel ranks",
            found=listed_ranks(mp_ranks),
            code=MISSING_FILE if absent else OTHER_WORLD_SIZE,
        )
    shared = {alias: owner for model in models for alias, owner in (model.shared or {}).items()}
    layers = [(shard, file) for shard, file in outside if shard.role == PIPELINE_LAYER]
    firsts = [next((m for m in models if m.mp_rank == rank), models[0]) for rank in mp_ranks]
    check_models_alike(firsts)
    tp = degrees(firsts, directory.of(PIPELINE_LAYER))[1]
    models = with_shapes(models, optimizers, layers, tp) if layers else models
    firsts = [next((m for m in models if m.mp_rank == rank), models[0]) for rank in mp_ranks]
    weights, copies = stage_weights(layers, firsts, tp) if layers else ({}, [])
    unsaved = is_unsaved(models, optimizers)
    found: list[tuple[int, list[ModelShard], list[OptimizerShard]]] = []
    for mp_rank in mp_ranks:
        own = [m for m in models if m.mp_rank == mp_rank]
        shards = [o for o in optimizers if o.mp_rank == mp_rank]
        if not own:
            if any(shard.role == EXPERT for shard, _ in outside):
                raise lost_ranks(mp_rank)
            raise ShardError(f"no model file of mp_rank {mp_rank}", code=MISSING_FILE)
        members: list[OptimizerShard] = []
        if shards or (not unsaved and any(m.content.get("param_shapes") for m in own)):
            members, leftovers = select(directory.path, own, shards, mp_rank)
            checkpoint.leftovers |= leftovers
            checkpoint.warnings += dict.fromkeys(leftovers.values())
        found.append((mp_rank, _model_members(own, members), members))
    every = expert_files(outside, {shard.path: _named(shard, file) for shard, file in outside})
    ranks: list[RankFiles] = []
    apart = apart_between([members[0] for _, _, members in found if members])
    for number, (mp_rank, files, members) in enumerate(found):
        first, lane = number - number % tp, number % tp
        of_stage = found[first : first + tp]
        experts = every.of_stage([rank for rank, _, _ in of_stage])
        spread = spread_over([one for _, _, one in of_stage], lane, files[0], experts)
        across = spread.lanes > 1
        of_experts = experts.all() if across else experts.by_lane.get(lane, {})
        outer = {**of_experts, **weights.get(mp_rank, {})}
        with about(files[0].path):
            state = read_rank(mp_rank, files, members, outer, shared, spread=spread, apart=apart)
        if across:
            state.lanes, state.whole = spread.lanes, frozenset(name for name in state.parameters if is_expert(name))
            state.duplicates += experts.copies() if lane == 0 else ()
        ranks.append(RankFiles(files, members, state))
    for mp_rank, name, path, tensor in copies:  # further files of a tied layer
        state = ranks[mp_rank].state
        if name in state.parameters:
            used = state.parameters[name].slots
            state.duplicates += copies_of(name, weight_in(tensor, path), used, kind="tied")
    return ranks


def _model_members(own: Sequence[ModelShard], members: Sequence[OptimizerShard]) -> list[ModelShard]:
    """Return the model files of one model-parallel rank: one, or for ZeRO-3 one for each data-parallel rank."""
    if not members or members[0].stage != 3:
        return list(own[:1])
    by_rank = {m.rank: m for m in own}
    missing = missing_ranks(len(members), by_rank)
    if missing:
        raise ShardError(
            f"model files are missing for {ranks_text(missing)}",
            expected=f"{len(members)} ranks",
            advice="give their directory with --root",
            code=MISSING_FILE,
            ranks=[rank for rank in range(len(members)) if rank not in by_rank],
        )
    check_models(found := [by_rank[rank] for rank in range(len(members))], members)
    return found


EXTRA_STATE_KEY = "module_extra_state"
"""Where the state of modules that is no tensor is kept, by name; DeepSpeed has it among the weights."""

OPTIMIZER_METADATA_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What an optimizer file holds besides the optimizer's state and how it is cut."""


KEPT_KEYS = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "num_experts",
    "ds_config", "sparse_tensor_module_names",
)  # fmt: skip
"""DeepSpeed's own keys of a model file that go along as they are; so do all of the client's."""


def describe_whole(
    checkpoint: Checkpoint,
    directory: TagDirectory,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    state: RankState,
    *,
    pp: int,
    tp: int,
    first: RankState,
) -> None:
    """Fill in what is true of the checkpoint as a whole.

    Parameters
    ----------
    state, first : RankState
        That of all model-parallel ranks, put together, and that of the first one.
    """
    model = models[0]
    dp = data_parallel_size(models, members)
    checkpoint.topology = Topology(dp=dp, tp=tp, pp=pp, ep=state.expert_parallel)
    checkpoint.world_size = dp * tp * pp
    version = model.content.get("ds_version") or (members[0].version if members else None)
    checkpoint.format_version = version if isinstance(version, str) else None
    step = model.content.get("global_steps")
    checkpoint.step = step if type(step) is int else None
    configured = section(model.config, "zero_optimization").get("stage")
    checkpoint.zero_stage = configured if isinstance(configured, int) else 1 if members else 0
    if members and not members[0].bf16_optimizer:
        checkpoint.zero_stage = members[0].stage
    scaler = members[0].content.get("loss_scaler") if members else None
    checkpoint.loss_scale = as_float(scaler.get("cur_scale")) if isinstance(scaler, Object) else None
    checkpoint.details["tag"] = directory.tag
    if members:
        checkpoint.details["optimizer_form"] = "elastic" if members[0].elastic else "rigid"
        checkpoint.details["round_robin_gradients"] = model.zero_option("round_robin_gradients")
        pads = any(any(group) for group in members[0].alignment_paddings or [])
        checkpoint.details["parameter_alignment"] = pads or model.zero_option("parameter_alignment")
        checkpoint.details["bf16_optimizer"] = members[0].bf16_optimizer
        if uses_zenflow(model.config):
            checkpoint.details[DETAIL] = first.transposed
            checkpoint.warnings.append(WARNING)
        checkpoint.warnings += base_shards(checkpoint.parameters, model.path)
        if members[0].elastic and not members[0].groups:
            checkpoint.warnings.append("the elastic form of the optimizer state does not hold hyperparameters")
    checkpoint.metadata = {
        key: carried(model.file, value) for key, value in model.content.items() if key not in MODEL_KEYS
    }
    checkpoint.metadata |= {
        key: carried(model.file, model.content[key]) for key in KEPT_KEYS if model.content.get(key) is not None
    }
    if tp > 1 and any(map(is_expert, checkpoint.parameters)):
        checkpoint.details[SLICED_EXPERTS] = first.lanes == 1
    if model.configuration is not None:
        checkpoint.metadata.setdefault("ds_config", carried(model.file, model.configuration))
    if members:
        content = members[0].content
        checkpoint.optimizer_metadata = {
            key: carried(members[0].file, content[key]) for key in OPTIMIZER_METADATA_KEYS if key in content
        }


def keep_extra(checkpoint: Checkpoint, models: Sequence[ModelShard]) -> dict[str, tuple[Rule, ...]]:
    """Keep the state of modules that is no tensor, of each rank; return rules for what is as in the first's file."""
    if models[0].extra:
        checkpoint.metadata[EXTRA_STATE_KEY] = carried(models[0].file, dict(models[0].extra))
    keys = dict.fromkeys(key for model in models for key in model.extra)
    held = [(model.file, model.extra) for model in models]
    own, rules = keep_others(held[0], held[1:], [*keys], ("module",))
    checkpoint.metadata |= own
    return rules


def keep_all_others(
    checkpoint: Checkpoint,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    members: Sequence[OptimizerShard],
    of_experts: Sequence[tuple[Shard, TorchFile]],
) -> None:
    """Keep what ranks have of their own, and say of everything else in their files what it is."""
    keys = dict.fromkeys(key for m in models for key in m.content if key not in MODEL_KEYS or key in KEPT_KEYS)
    held = [(m.file, common(m)) for m in models]
    metadata, rules = keep_others(held[0], held[1:], [*keys])
    checkpoint.metadata |= metadata
    of_modules = keep_extra(checkpoint, models)
    rules = {path: (*one, *of_modules[path]) for path, one in rules.items()}
    if members:
        lead = members[0]
        others = [(o.file, o.content) for o in optimizers if o is not lead]
        own, more = keep_others((lead.file, lead.content), others, OPTIMIZER_METADATA_KEYS, ("optimizer_state_dict",))
        checkpoint.optimizer_metadata |= own
        rules |= {path: (*one, *shard_rules(first=False)) for path, one in more.items()}
        rules[lead.path] = shard_rules(first=True)
        for path, one in copies_of_optimizers(models, optimizers).items():
            rules[path] = (*rules.get(path, ()), *one)
    else:
        plain_ones = [(file, file.root) for _, file in of_experts] + [
            (m.file, m.content) for m in models if of_experts or checkpoint.param_groups
        ]
        contents = [(file, root["optimizer"]) for file, root in plain_ones
                    if isinstance(root, dict) and isinstance(root.get("optimizer"), dict)]  # fmt: skip
        kept = dict.fromkeys(str(key) for _, one in contents for key in one if key not in STATE_KEYS)
        own, more = keep_others(contents[0], contents[1:], [*kept], ("optimizer",)) if contents else ({}, {})
        checkpoint.optimizer_metadata |= own
        rules |= {path: (*rules.get(path, ()), *one) for path, one in more.items()}
    compressed = {m.path for m in models if compresses(m.content.get("optimizer"))}
    for file in checkpoint.files:
        ahead = ONE_BIT_RULES if file.path in compressed else ()
        file.rules = (*ahead, *file.rules, *rules.get(file.path, ()))
