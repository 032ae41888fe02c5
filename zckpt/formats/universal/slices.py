"""How a tensor-parallel training cuts a parameter again, as its files say it.

    cat_dim               slices along this dimension
    param_n_sub_params    that many equal parts along it, each sliced
    sub_param_shape       parts of these sizes, each sliced
    vocab_tensor          rows of a vocabulary, padded again for the number of ranks

Source: `merge_tp_slices` of DeepSpeed 0.19; the patterns are those of `tp_rules`.
"""

from __future__ import annotations

from zckpt.formats.deepspeed.tp_rules import AVERAGED, REPLICATED, Rules
from zckpt.state import Checkpoint, Parameter
from zckpt.torchfile import FromFile, Global, Object, plain

_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")

INFO_KEY = "universal_checkpoint_info"


class Slices:
    """The rules that a checkpoint carries, if it carries any.

    Raises
    ------
    UnsupportedError
        Rules that zckpt does not know or cannot match safely.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        info = checkpoint.metadata.get(INFO_KEY)
        found = plain(info.node if isinstance(info, FromFile) else info)
        self.info = found if isinstance(found, dict) else {}
        self.rules = Rules(self.info, checkpoint.source)

    def keys(self, parameter: Parameter) -> dict[str, object]:
        """Return what stands beside the tensor in each file of a parameter."""
        keys = self._cut(parameter)
        if self.rules.is_vocabulary(parameter.name):
            keys["vocab_tensor"] = True
        return keys

    def _cut(self, parameter: Parameter) -> dict[str, object]:
        name = parameter.name
        if self._matches(REPLICATED, name) or self._matches(AVERAGED, name):
            return {}
        if self._matches("two", name):
            return {"cat_dim": 0, "param_n_sub_params": 2}
        for pattern, dim, sizes in self.rules.sub_params:
            if pattern.match(name) and dim < len(parameter.shape):
                return {"sub_param_shape": self._sub_params(pattern.pattern, dim, sizes, parameter.shape[dim])}
        return {"cat_dim": 1 if self._matches("row", name) else 0}

    def _matches(self, kind: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self.rules.patterns[kind])

    def _sub_params(self, pattern: str, dim: int, sizes: object, whole: int) -> Object:
        """Return DeepSpeed's object for a rule, with the sizes of its parts: older rules say how many equal ones."""
        rule = next(one for one in self.info["parameter_with_sub_params"] if pattern in one["patterns"])
        shape = [tuple(n) if isinstance(n, list) else n for n in rule["shape"]]
        shape[dim] = (whole // sizes,) * sizes if isinstance(sizes, int) and sizes > 0 else shape[dim]
        state: dict[object, object] = {
            "patterns": list(rule["patterns"]),
            "shape": tuple(shape),
            "partition_dim": dim,
        }
        return Object(_SUB_PARAM_SHAPE, how="newobj", state=state, has_state=True)
