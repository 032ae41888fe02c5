"""Files that torch.save wrote, as structure and byte ranges.

`read_torchfile` returns the object tree of a file and, for each tensor, its dtype, shape, strides and
where its bytes are. It reads no tensor data, imports neither torch nor numpy, and never imports or
calls anything that a file names: an unknown class becomes an inert `Object` that can be written back.
`dump` writes a tree as a pickle, and `lay_out_archive` says where everything lies in a file of it.
"""

from __future__ import annotations

from zckpt.storage.files import FileRange, opened
from zckpt.torchfile.archive import (
    ALIGNMENT,
    CENTRAL,
    LOCAL,
    AlikeRecords,
    NewRecord,
    Record,
    has_checksums,
    lay_out_archive,
    read_archive,
    read_entries,
    stated_sum,
)
from zckpt.torchfile.blanks import filled, find_blanks, has_blanks, numbers_at
from zckpt.torchfile.nodes import (
    DefaultMapping,
    Device,
    DeviceTensor,
    DType,
    Global,
    InPieces,
    Layout,
    MemoryFormat,
    MetaTensor,
    Namespace,
    NestedTensor,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Object,
    OrderedMapping,
    QuantizedTensor,
    Size,
    SparseTensor,
    Storage,
    Tensor,
)
from zckpt.torchfile.pickle_writer import Pickled, Writer, dump, in_order
from zckpt.torchfile.plain import Renderer, brief, plain
from zckpt.torchfile.reader import alike_file, read_pickle, read_source, read_torchfile
from zckpt.torchfile.rebuild import MAX_DIMENSIONS, MAX_ELEMENTS, Context, dense
from zckpt.torchfile.torch_file import NUMPY, FromFile, Mentioned, PlainParts, TorchFile, node_of, put_back
from zckpt.torchfile.trees import (
    LEAVES,
    MAX_DEPTH,
    PARTS,
    Below,
    Digests,
    Place,
    alike,
    check_depth,
    children,
    each,
    has_tensors,
    is_leaf,
    is_tensor,
    oddity,
    pieces,
    unwrapped,
    value_at,
    walk_tensors,
    with_value,
)
