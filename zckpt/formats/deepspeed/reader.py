"""From the files of a tag directory to a Checkpoint. Structure only; no tensor is read.

What is true of a checkpoint as a whole, from the files of all its ranks: topology, metadata, what else they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from zckpt.codes import MISSING_FILE, OTHER_WORLD_SIZE
from zckpt.errors import ShardError, UnknownFormatError, UnsupportedError, about
from zckpt.evidence import note_not_used
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.deepspeed.axes.auto_ep import check_kind, common
from zckpt.formats.deepspeed.axes.expert_ranks import expert_files, spread_over
from zckpt.formats.deepspeed.axes.experts import SLICED_EXPERTS, is_expert
from zckpt.formats.deepspeed.axes.pipeline import degrees, join, stage_weights, with_shapes
from zckpt.formats.deepspeed.axes.tp_rules import ARGUMENTS, INFO_KEY, Rules, read_rules
from zckpt.formats.deepspeed.directory import (
    EXPERT,
    EXPERT_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    PIPELINE_LAYER,
    TagDirectory,
)
from zckpt.formats.deepspeed.layouts.layout import Layout, in_one_order
from zckpt.formats.deepspeed.loss_scaling import SCALING_KEYS
from zckpt.formats.deepspeed.origin import Origin, Rank, by_stage
from zckpt.formats.deepspeed.ranks import (
    check_models,
    data_parallel_size,
    listed_ranks,
    missing_files,
    missing_ranks,
    select,
    tied_names,
    with_lost,
)
from zckpt.formats.deepspeed.rare.unsaved import base_shards, is_unsaved, note_unsaved
from zckpt.formats.deepspeed.shards import (
    EXTRA_STATE_KEY,
    GROUPS_KEY,
    KEPT_KEYS,
    MODEL_KEYS,
    ModelShard,
    OptimizerShard,
    read_models,
    read_optimizer,
)
from zckpt.formats.deepspeed.values import (
    MODEL_RULES,
    Content,
    FileRules,
    copies_of,
    copies_of_optimizers,
    keep_others,
    shard_rules,
)
from zckpt.formats.torch_files.tensors import as_mapping, carried, describe
from zckpt.state import WEIGHT, Checkpoint, GivenNames, SourceFile, Topology, as_float, dict_of, size_of
from zckpt.state.checkpoint import HAS_FROZEN
from zckpt.state.inventory import LEFT_OUT, UNNAMED_STATE, Rule
from zckpt.torchfile import Object, read_torchfile

OPTIMIZER_METADATA_KEYS = (*SCALING_KEYS, "clip_grad")
"""What an optimizer file holds besides the optimizer's state and how it is cut."""


def read(directory: TagDirectory, *, names: GivenNames = None, tp_rules: Path | None = None) -> Checkpoint:
    """Read the structure of a DeepSpeed checkpoint.

    `names`: names of the optimizer's parameters in its order, for files that have only numbers (stage 0); `tp_rules`: a
    JSON file with rules for tensor-parallel slices, which are used instead of the checkpoint's own. Raises SourceError:
    files are missing, damaged, or contradict each other; UsageError: the file of rules cannot be used.
    """
    given = None if tp_rules is None else read_rules(tp_rules)
    files = _Files(directory)
    checkpoint, model, layers, tp = files.checkpoint, files.models[0], bool(files.layers), files.tp
    ranks = list(files.ranks())
    info: Mapping[str, object] | None = given
    if given is None and not model.content.keys().isdisjoint((INFO_KEY, ARGUMENTS)):
        from zckpt.formats.deepspeed.axes.gpt_model import known_rules

        shapes = {name: p.shape for rank in ranks[::tp] for name, p in rank.parameters.items()}
        with about(model.path):
            info = known_rules(model.content, shapes, model.path, sliced=tp > 1)
    make = Rules if tp > 1 else Rules.of_vocabulary  # the rules that also matter where nothing is sliced
    rules = None if info is None else make(info, str(tp_rules or model.path))
    reasons: list[str] = []
    if not files.optimizers:
        from zckpt.formats.deepspeed.layouts.stage0_ranks import attach_to_ranks

        reasons = attach_to_ranks(ranks, files.of_experts, info, tp, names, layers=layers)
    with about(model.path):
        stages = ranks
        if tp > 1 or rules is not None:
            from zckpt.formats.deepspeed.axes.tensor_parallel import merge

            stages = [merge(one, rules) for one in by_stage(ranks, tp)]
        state = join(stages) if len(stages) > 1 else stages[0]
    for name in ("parameters", "buffers", "unnamed", "param_groups", "per_rank", "padding", "padding_spans",
                 "duplicates", "optimizer_metadata", "loss_scale", "is_numbered"):  # fmt: skip
        setattr(checkpoint, name, getattr(state, name))
    if layers:
        from zckpt.formats.deepspeed.axes.stage_order import stage_orders

        checkpoint.details |= stage_orders(stages)
    origin = checkpoint.origin = Origin(
        directory, ranks, files.experts, files.of_experts, info,
        None if tp_rules is None else str(tp_rules), files.layers,
    )  # fmt: skip
    checkpoint.warnings += state.warnings
    files.describe(state, origin)
    files.account(origin.members)
    checkpoint.warnings += reasons
    if files.optimizers:
        note_not_used(checkpoint, names, "the files have")
    elif is_unsaved(files.models, files.of_experts):
        note_unsaved(checkpoint, files.models)
    return checkpoint


class _Files:
    """The files of a tag directory by role, and the checkpoint that they make up.

    Parameters
    ----------
    directory : TagDirectory
    """

    def __init__(self, directory: TagDirectory) -> None:
        self.directory, self.models = directory, read_models(directory.of(MODEL))
        if not self.models:
            raise ShardError(
                "no model file",
                expected="mp_rank_00_model_states.pt",
                advice="give the directory that holds it with --root",
                code=MISSING_FILE,
            )
        self.optimizers = in_one_order(list(map(read_optimizer, directory.of(OPTIMIZER), repeat(AlikeReader().read))))
        with about(self.models[0].path):
            check_kind(self.models, self.optimizers, directory.of(EXPERT_OPTIMIZER))
        self.experts, self.layers, self.of_experts = (
            [(shard, read_torchfile(shard.path)) for shard in directory.of(role)]
            for role in (EXPERT, PIPELINE_LAYER, EXPERT_OPTIMIZER)
        )
        leftovers = {shard.path: "another writer's, of the same as the first's" for shard in directory.further}
        self.checkpoint = Checkpoint(str(directory.path), "deepspeed", leftovers=leftovers)
        for shard, file in self.of_experts:
            is_empty = isinstance(file.root, dict) and all(value is None for value in file.root.values())
            if self.optimizers and not is_empty:
                raise UnsupportedError(
                    "holds optimizer state although ZeRO's files have all of it",
                    path=shard.path,
                    expected="{'optimizer': None}",
                    advice="if it is left over from a run without ZeRO, move it away",
                )
            if is_empty and not self.optimizers:
                raise ShardError(
                    "holds no optimizer state, as beside ZeRO's files, but there are none",
                    path=shard.path,
                    expected="a file zero_pp_rank_*_optim_states.pt of each rank",
                    advice="give the directory that holds them with --root; for the weights alone, move "
                    "*optim_states.pt away",
                    code=MISSING_FILE,
                )
        for model in self.models:
            if not isinstance(model.content.get("module"), dict) and not self.layers:
                raise UnknownFormatError("holds no model", path=model.path, expected="a dict `module`")
            if self.optimizers:  # a file of a mixture of experts has no configuration before 0.19
                model.configuration = model.configuration or as_mapping(self.optimizers[0].file.root).get("ds_config")
        self.mp_ranks = found = sorted({one.mp_rank for one in (*self.models, *self.optimizers)})
        expected = size_of(self.models[0].content, "mp_world_size") or len(found)
        absent = missing_ranks(expected, found)
        if absent or len(found) != expected:
            raise ShardError(
                f"files of model-parallel ranks {absent} are missing" if absent else "too many model-parallel ranks",
                expected=f"{expected} model-parallel ranks",
                found=listed_ranks(found),
                code=MISSING_FILE if absent else OTHER_WORLD_SIZE,
            )
        firsts = [next((m for m in self.models if m.mp_rank == rank), self.models[0]) for rank in found]
        check_models(firsts, "mp_rank")
        self.pp, self.tp = degrees(firsts, directory.of(PIPELINE_LAYER))

    def ranks(self) -> Iterator[Rank]:
        """Yield the files and the state of each model-parallel rank."""
        tp = self.tp
        shared = {alias: owner for model in self.models for alias, owner in model.shared.items()}
        if self.layers:
            self.models = with_shapes(self.models, self.optimizers, self.layers, tp)
        found = [self._of_rank(mp_rank) for mp_rank in self.mp_ranks]
        of_stages = [models[0] for models, _ in found]
        weights, copies = stage_weights(self.layers, of_stages, tp) if self.layers else ({}, [])
        every, firsts = expert_files(self.experts), [members[0] for _, members in found if members]
        for number, (mp_rank, (models, members)) in enumerate(zip(self.mp_ranks, found, strict=True)):
            first, lane = number - number % tp, number % tp
            experts = every.of_stage(self.mp_ranks[first : first + tp])
            spread = spread_over([one for _, one in found[first : first + tp]], lane, models[0], experts)
            across = spread.lanes > 1
            of_experts = experts.all() if across else experts.by_lane.get(lane, {})
            outer = {**of_experts, **weights.get(mp_rank, {})}
            with about(models[0].path):
                rank = Rank(str(self.directory.path), "deepspeed", mp_rank=mp_rank, model_files=models, members=members)
                _layout(members)(rank, outer, firsts).fill(shared, spread)
            if across:
                rank.lanes, rank.whole = spread.lanes, frozenset(filter(is_expert, rank.parameters))
                rank.duplicates += experts.copies() if lane == 0 else ()
            for owner, name, slot in copies:  # further files of a tied layer
                if owner == mp_rank and name in rank.parameters:
                    rank.duplicates += copies_of(name, {WEIGHT: slot}, rank.parameters[name].slots, kind="tied")
            yield rank

    def _of_rank(self, mp_rank: int) -> tuple[Sequence[ModelShard], Sequence[OptimizerShard]]:
        """Return the model file of a model-parallel rank, for ZeRO-3 those of all its ranks, and the optimizer's."""
        own = [m for m in self.models if m.mp_rank == mp_rank]
        shards = [o for o in self.optimizers if o.mp_rank == mp_rank]
        if not own:
            advice = (
                "DeepSpeed does not write it if experts are spread over fewer ranks than there are tensor-parallel "
                "ranks: what only it would hold is lost. Otherwise give its directory with --root"
            )
            expected = f"mp_rank_{mp_rank:02d}_model_states.pt"
            raise ShardError(
                f"no model file of mp_rank {mp_rank}", expected=expected if self.experts else None,
                advice=advice if self.experts else None, code=MISSING_FILE,
            )  # fmt: skip
        if not shards and (
            is_unsaved(self.models, self.optimizers) or not any(m.content.get("param_shapes") for m in own)
        ):
            return own[:1], []
        path, grouped = self.directory.path, any(one.content.get(GROUPS_KEY) for one in shards)
        is_plain = not (self.experts or self.of_experts or grouped)
        if is_plain:  # of experts each rank has others
            where = f" of mp_rank {mp_rank}" if mp_rank else ""
            shards = with_lost(shards, f"optimizer files{where}", data_parallel_size(own, shards), path)
        members, leftovers = select(path, own, shards, mp_rank)
        self.checkpoint.leftovers |= leftovers
        self.checkpoint.warnings += dict.fromkeys(leftovers.values())
        if members[0].stage != 3:
            return own[:1], members
        if is_plain:
            own = with_lost(own, "model files", len(members), path, tied_names(own))
        by_rank = {m.rank: m for m in own}
        if missing := missing_files("model files", len(members), by_rank):
            raise missing
        models = [by_rank[rank] for rank in range(len(members))]
        steps = [one["step"] for one in members[0].scalars if "step" in one]
        check_models(models, "rank", steps)
        return models, members

    def describe(self, state: Rank, origin: Origin) -> None:
        """Fill in what is true of the checkpoint as a whole; `state`: of all model-parallel ranks, put together."""
        checkpoint, model, members, details = self.checkpoint, self.models[0], origin.members, self.checkpoint.details
        dp, content = data_parallel_size(self.models, members), model.content
        checkpoint.topology = Topology(dp=dp, tp=self.tp, pp=self.pp, ep=state.topology.ep)
        checkpoint.world_size = dp * self.tp * self.pp
        version = content.get("ds_version") or (members[0].version if members else None)
        checkpoint.format_version = version if isinstance(version, str) else None
        checkpoint.step = step if type(step := content.get("global_steps")) is int else None
        configured = model.zero.get("stage")
        checkpoint.zero_stage = configured if isinstance(configured, int) else 1 if members else 0
        details["tag"] = self.directory.tag
        if members:
            lead = members[0]
            if not lead.bf16_optimizer:
                checkpoint.zero_stage = lead.stage
            scaler = lead.content.get("loss_scaler")
            checkpoint.loss_scale = as_float(scaler.get("cur_scale")) if isinstance(scaler, Object) else None
            pads = any(any(group) for group in lead.alignment_paddings or [])
            details |= {
                "optimizer_form": "elastic" if lead.elastic else "rigid",
                "round_robin_gradients": model.zero_option("round_robin_gradients"),
                "parameter_alignment": pads or model.zero_option("parameter_alignment"),
                "bf16_optimizer": lead.bf16_optimizer,
            }
            if _lacks_frozen(model, lead.stage, checkpoint):
                details[HAS_FROZEN] = False
            if model.uses_zenflow:
                from zckpt.formats.deepspeed.rare.zenflow import DETAIL, WARNING

                details[DETAIL] = origin.ranks[0].transposed
                checkpoint.warnings.append(WARNING)
            checkpoint.warnings += base_shards(checkpoint.parameters, model.path)
            if lead.elastic and not lead.groups:
                checkpoint.warnings.append("the elastic form of the optimizer state holds no hyperparameters")
            held = {key: lead.content[key] for key in OPTIMIZER_METADATA_KEYS if key in lead.content}
            checkpoint.optimizer_metadata = {key: carried(lead.file, value) for key, value in held.items()}
        if self.tp > 1 and any(map(is_expert, checkpoint.parameters)):
            details[SLICED_EXPERTS] = origin.ranks[0].lanes == 1
        own = [key for key in KEPT_KEYS if content.get(key) is not None]
        for key in (*(key for key in content if key not in MODEL_KEYS), *own):
            checkpoint.metadata[key] = carried(model.file, content[key])
        if model.configuration is not None:
            checkpoint.metadata.setdefault("ds_config", carried(model.file, model.configuration))

    def account(self, members: Sequence[OptimizerShard]) -> None:
        """Describe all files, and keep what ranks have of their own in them besides the state."""
        checkpoint, models = self.checkpoint, self.models
        keys: Iterable[str] = (key for m in models for key in m.content if key not in MODEL_KEYS or key in KEPT_KEYS)
        rules = keep_models(checkpoint, models, keys)
        before: FileRules = {}  # all others
        if members:
            lead, where, keys = members[0], "optimizer_state_dict", OPTIMIZER_METADATA_KEYS
            every = [lead, *(one for one in self.optimizers if one is not lead)]
            contents: list[Content] = [(one.file, one.content) for one in every]
            rules.append({one.path: shard_rules(first=one is lead) for one in every})
            rules.append(copies_of_optimizers(models, self.optimizers))
        else:
            from zckpt.formats.deepspeed.layouts.stage0 import STATE_KEYS
            from zckpt.formats.deepspeed.rare.one_bit import ONE_BIT_RULES, compresses

            where, of_experts = "optimizer", [file for _, file in self.of_experts]
            holders = of_experts + [m.file for m in models if of_experts or checkpoint.param_groups]
            held = ((file, dict_of(file.root).get(where)) for file in holders)
            contents = [(file, one) for file, one in held if isinstance(one, dict)]
            keys = (str(key) for _, one in contents for key in one if key not in STATE_KEYS)
            is_read = checkpoint.param_groups or checkpoint.unnamed
            left = () if is_read else (Rule((where, "**"), LEFT_OUT, UNNAMED_STATE, tensors=True),)
            before = dict.fromkeys((file.path for file in of_experts), left)
            for m in models:
                one_bit = ONE_BIT_RULES if compresses(m.optimizer) else ()
                before[m.path] = one_bit if m.optimizer is None else left + one_bit
        own, of_optimizers = keep_others(contents, keys, where)
        checkpoint.optimizer_metadata |= own
        rules.append(of_optimizers)
        known: dict[int, SourceFile] = {}
        of_ranks = [(one.shard, one.file) for one in (*models, *self.optimizers)]
        for shard, file in (*of_ranks, *self.experts, *self.layers, *self.of_experts):
            of_role = MODEL_RULES if shard.role in (MODEL, EXPERT_OPTIMIZER) else ()
            own_rules = [rule for one in (before, {file.path: of_role}, *rules) for rule in one.get(file.path, ())]
            one = describe(file, shard.role, shard.dp_rank, shard.mp_rank, rules=own_rules, known=known)
            checkpoint.files.append(one)


def _lacks_frozen(model: ModelShard, stage: int, checkpoint: Checkpoint) -> bool:
    """Tell whether frozen parameters were left out when it was saved: of tied ones the second name stays, alone.

    Notes
    -----
    Source: DeepSpeed 0.14.5 to 0.19.8, `exclude_frozen_parameters`: ZeRO-2 and 3 have None for a list then; ZeRO-1 has
    none at all.
    """
    if stage != 1:
        return model.content.get("frozen_param_shapes", ()) is None
    return any(owner not in checkpoint.parameters for owner in model.shared.values())


def _layout(members: Sequence[OptimizerShard]) -> type[Layout]:
    """Return what reads a model-parallel rank with these optimizer files."""
    if not members:
        return Layout
    if members[0].stage == 3:
        if members[0].content.get(GROUPS_KEY):
            from zckpt.formats.deepspeed.axes.auto_ep_shards import ExpertShardedLayout

            return ExpertShardedLayout
        from zckpt.formats.deepspeed.layouts.per_parameter import ShardedLayout

        return ShardedLayout
    from zckpt.formats.deepspeed.layouts.flat import FlatLayout

    return FlatLayout


def keep_models(checkpoint: Checkpoint, models: Sequence[ModelShard], keys: Iterable[str]) -> list[FileRules]:
    """Keep what each rank's model file has otherwise than the first's under some keys, and state that is no tensor.

    Return rules for what is as in the first's.
    """
    own, of_models = keep_others(((model.file, common(model)) for model in models), keys)
    checkpoint.metadata |= own
    if models[0].extra:
        checkpoint.metadata[EXTRA_STATE_KEY] = carried(models[0].file, dict(models[0].extra))
    keys = (key for model in models for key in model.extra)
    own, of_modules = keep_others(((model.file, model.extra) for model in models), keys, "module")
    checkpoint.metadata |= own
    return [of_models, of_modules]
