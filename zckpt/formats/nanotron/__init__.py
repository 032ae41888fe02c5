"""Directories of nanotron: a file for each tensor, or each rank's part of it, and an optimizer file for each rank.

RUN/latest.txt                                                     the name of the last step's directory
DIR/checkpoint_metadata.json                                       version, ranks, steps and data stages
DIR/model/MODULE/.../model_NAME.safetensors                        a tensor that all ranks have whole
DIR/model/MODULE/.../model_NAME_pp-rank-P-of-N_tp-rank-T-of-M[_exp-rank-E-of-L].safetensors
                                                                   one rank's part; its header says of what
DIR/optimizer/optimizer_pp-P-of-N[_dp-D-of-W]_tp-T-of-M_exp-E-of-L.pt
                                                                   {state, param_groups, names: {number: name},
                                                                    gradient_accumulator: {name: fp32 master}}
DIR/optimizer/optimizer_config.json                                how ZeRO-1 has cut the first ranks' tensors
DIR/lr_scheduler/*.pt, DIR/random/*.pt                             each rank's own

With `dp` in the names, ZeRO-1 has cut each rank's tensors, flattened, into nearly equal ranges.
"""

from __future__ import annotations

from zckpt.formats.format import Found, InFolder, Search
from zckpt.formats.latest import is_name, latest_name
from zckpt.storage.files import is_file

METADATA = "checkpoint_metadata.json"
LATEST = "latest.txt"


class Nanotron(InFolder):
    """A file for each tensor or part of one."""

    name = "nanotron"
    title = "nanotron"
    reads = (("nanotron", "tensor, pipeline and expert parallel, with or without ZeRO-1, float32 masters"),)

    def find(self, search: Search) -> Found | None:
        """Find the account of a checkpoint, of the last one where a run is given."""
        path = search.path
        name = latest_name(path, LATEST) if path.is_dir() else None
        folder = path / name if name is not None and is_name(name) else path
        return Found(folder) if is_file(folder / METADATA) and (folder / "model").is_dir() else None


FORMATS = (Nanotron(),)
