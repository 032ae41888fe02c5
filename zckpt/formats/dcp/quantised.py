"""Slots that torchao has quantised: the item of a chunk is a tensor of a class of its own, which holds codes.

optim.state.NAME.exp_avg     chunk [0, 64): OptimState8bit {codes, scale, qmap}     chunk [64, 70): floats

They become what `zckpt.save` writes of such slots (`formats.torch_files.quantised`): `exp_avg.codes`, `.scale`, `.qmap`
and `.floats`, each of which chunks have pieces of, and a description under `exp_avg`. There blocks follow each other in
the whole tensor, so that a chunk has to be whole rows and to begin with a block; any other is refused.

Source: torchao 0.18 under FSDP2, saved by torch's DCP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zckpt.errors import UnsupportedError, about
from zckpt.formats.torch_files.quantised import CLASSES, PACKED
from zckpt.formats.torch_files.tensors import TORCHAO, TensorItem, span_of
from zckpt.immutable import immutable
from zckpt.state import ZEROS, Extent, Shape, Span
from zckpt.state.boxes import Box
from zckpt.torchfile import MetaTensor, Tensor, TorchFile


@immutable
class Chunk:
    """A chunk of a slot.

    `file`: the torch file that its item is; None of floats that were read as another item's like.
    """

    box: Box
    node: object
    path: str
    file: TorchFile | None = None

    def kind(self, numel: int) -> tuple[str, int, object]:
        """Return the class, elements of a block, and what tells one map of values from another; "" if unknown."""
        node = self.node
        if not isinstance(node, MetaTensor) or node.subclass is None or self.file is None:
            return "", 0, None
        codes, scale, qmap = (node.get(name) for name in ("codes", "scale", "qmap"))
        if not isinstance(codes, Tensor) or not isinstance(scale, Tensor) or not scale.numel or numel % scale.numel:
            return "", 0, None
        sums = {record.offset: record.crc32 for record in self.file.records}
        same = (qmap.shape, sums.get(qmap.offset)) if isinstance(qmap, Tensor) else None
        return node.subclass.name, numel // scale.numel, same


def pieces_of(key: str, shape: Shape, chunks: Sequence[Chunk]) -> tuple[dict[str, TensorItem], dict[str, object]]:
    """Return the pieces of a slot by their names, and its description.

    Raises UnsupportedError: chunks are quantised in different ways, or do not have whole rows and whole blocks.
    """
    chunks = sorted(chunks, key=lambda chunk: chunk.box[0])
    coded = [one for one in chunks if isinstance(one.node, MetaTensor)]
    kinds = {one.kind(math.prod(one.box[1])) for one in coded}
    cls, block, _ = next(iter(kinds))
    if len(kinds) > 1 or not block:
        raise UnsupportedError(f"chunks of {key} are quantised in different or unknown ways", path=coded[0].path)
    numel, row, per = math.prod(shape), math.prod(shape[1:]), 2 if cls == PACKED else 1
    shapes = {"codes": (-(-numel // 2),) if per > 1 else shape, "scale": (-(-numel // block),)}
    dtypes = {"codes": "uint8" if CLASSES[cls] else "float8_e4m3fn", "scale": "float32"}
    spans: dict[str, list[Span]] = {"codes": [], "scale": [], "floats": []}
    floats: list[list[int]] = []
    for one in chunks:
        (offsets, sizes), count = one.box, math.prod(one.box[1])
        start = offsets[0] * row
        with about(one.path):
            if any(offsets[1:]) or sizes[1:] != shape[1:] or start % block:
                raise UnsupportedError(
                    f"{key} is quantised in blocks of {block} elements, and cut within them",
                    expected="chunks of whole rows that begin with a block",
                    found=f"{sizes} at {offsets}",
                )
            for name, unit in (("codes", per), ("scale", block)):
                first, end = start // unit, -(-(start + count) // unit)
                extent = Extent.flat(shapes[name], first, end - first)
                node = one.node.get(name) if isinstance(one.node, MetaTensor) else None
                blank = Span(extent, ZEROS, 0, dtypes[name])
                spans[name].append(span_of(node, one.path, extent) if isinstance(node, Tensor) else blank)
            if isinstance(one.node, Tensor):
                at = sum(numel for _, numel in floats)
                spans["floats"].append(span_of(one.node, one.path, Extent((at,), (count,), 0, count)))
                floats.append([start, count])

    def item(name: str, dtype: str, its: Shape, where: Sequence[Span]) -> TensorItem:
        return TensorItem(f"{key}.{name}", dtype, its, tuple(where), None, coded[0].path)

    found = {name: item(name, dtypes[name], its, spans[name]) for name, its in shapes.items()}
    qmap = coded[0].node.get("qmap") if isinstance(coded[0].node, MetaTensor) else None
    if isinstance(qmap, Tensor):
        found["qmap"] = item("qmap", qmap.dtype, qmap.shape, [span_of(qmap, coded[0].path)])
    if floats:
        found["floats"] = item("floats", spans["floats"][0].dtype, (sum(n for _, n in floats),), spans["floats"])
    return found, {TORCHAO: cls, "block": block, "floats": floats}
