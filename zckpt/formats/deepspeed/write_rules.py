"""The rules for slices in a DeepSpeed checkpoint that is to be written: true of its own ranks. See `tp_rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.formats.deepspeed.affine import KEY as AFFINE_KEY
from zckpt.formats.deepspeed.origin import Origin, RankFiles
from zckpt.formats.deepspeed.tp_rules import INFO_KEY, VOCABULARY_KEYS, Rules, info_for
from zckpt.state import Checkpoint
from zckpt.torchfile import plain


def written_rules(
    origin: Origin, stages: Sequence[Sequence[RankFiles]], checkpoint: Checkpoint
) -> Mapping[str, object] | None:
    """Return the rules that the target's files are to carry; None where they are those of the source's, unchanged.

    Parameters
    ----------
    stages : sequence of sequence of RankFiles
        By stage and tensor-parallel rank; where there is no pipeline, one stage.
    checkpoint : Checkpoint
        The source.
    """
    degree, tp = len(stages[0]), checkpoint.topology.tp
    given = origin.rules_path is not None
    if origin.rules is None or (not given and degree == tp and not _resized(origin, stages, checkpoint)):
        return None
    own = origin.model.content.get(INFO_KEY)
    node = own if not given and isinstance(own, dict) and plain(own) == origin.rules else origin.rules
    written = info_for(node, _rows(origin, stages), degree)
    if AFFINE_KEY in written:
        rules = Rules(origin.rules, origin.rules_path or origin.model.path)
        names = dict.fromkeys(name for of_stage in stages for name in of_stage[0].state.parameters)
        written[AFFINE_KEY] = rules.maps_for(list(names), degree)
    return written


def _resized(origin: Origin, stages: Sequence[Sequence[RankFiles]], checkpoint: Checkpoint) -> bool:
    """Tell whether some parameter of a first rank has another shape than in the source."""
    firsts = [files.state.parameters for files in origin.ranks[:: checkpoint.topology.tp]] or [checkpoint.parameters]
    old = {name: p.shape for parameters in firsts for name, p in parameters.items()}
    return any(p.shape != old.get(n, p.shape) for of_stage in stages for n, p in of_stage[0].state.parameters.items())


def _rows(origin: Origin, stages: Sequence[Sequence[RankFiles]]) -> int | None:
    """Return the padded size of the vocabularies; None where they do not have the same."""
    rules = (
        Rules({key: origin.rules[key] for key in VOCABULARY_KEYS if key in origin.rules}, "") if origin.rules else None
    )
    found = {
        sum(files.state.parameters[name].shape[0] for files in of_stage)
        for of_stage in stages
        for name, p in of_stage[0].state.parameters.items()
        if rules is not None and rules.is_vocabulary(name) and p.shape
    }
    return found.pop() if len(found) == 1 else None
