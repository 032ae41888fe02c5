"""zckpt's own format: a directory that loses nothing, without a pickle anywhere. `docs/formats.md` specifies it.

DIR/checkpoint.json                       everything but the elements of tensors; written last
DIR/rank-00000-of-00002.safetensors       the elements, and a checksum of each tensor
DIR/rank-00001-of-00002.safetensors

The document says for each slot which elements of it lie in which file, so that files may hold whole tensors, flat
ranges as ZeRO cuts them, or boxes as tensor parallelism does.
"""

from __future__ import annotations

from zckpt.formats.native.digests import Mismatch, check_digests
from zckpt.formats.native.names import OWNED, is_native, is_own
from zckpt.formats.native.reader import read
from zckpt.formats.native.writer import lay_out

__all__ = ["OWNED", "Mismatch", "check_digests", "is_native", "is_own", "lay_out", "read"]
