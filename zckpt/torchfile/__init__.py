"""Files that torch.save wrote, as structure and byte ranges.

`read_torchfile` returns the object tree of a file and, for each tensor, its dtype, shape, strides and
where its bytes are. It reads no tensor data, imports neither torch nor numpy, and never imports or
calls anything that a file names: an unknown class becomes an inert `Object` that can be written back.
"""

from __future__ import annotations

from zckpt.torchfile.archive import Record
from zckpt.torchfile.arrays import NumpyArray, NumpyDType, NumpyScalar
from zckpt.torchfile.objects import (
    DefaultMapping,
    Device,
    DType,
    Global,
    Layout,
    MemoryFormat,
    Namespace,
    Object,
    OrderedMapping,
    Size,
)
from zckpt.torchfile.pickle_storage_writer import FromFile
from zckpt.torchfile.plain import brief, plain
from zckpt.torchfile.reader import read_pickle, read_torchbytes, read_torchfile
from zckpt.torchfile.tensors import (
    DeviceTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SparseTensor,
    Storage,
    Tensor,
)
from zckpt.torchfile.torch_file import PickleFile, TorchFile
from zckpt.torchfile.walk import walk_tensors

__all__ = [
    "DType",
    "DefaultMapping",
    "Device",
    "DeviceTensor",
    "FromFile",
    "Global",
    "Layout",
    "MemoryFormat",
    "MetaTensor",
    "Namespace",
    "NestedTensor",
    "NumpyArray",
    "NumpyDType",
    "NumpyScalar",
    "Object",
    "OrderedMapping",
    "PickleFile",
    "QuantizedTensor",
    "Record",
    "Size",
    "SparseTensor",
    "Storage",
    "Tensor",
    "TorchFile",
    "brief",
    "plain",
    "read_pickle",
    "read_torchbytes",
    "read_torchfile",
    "walk_tensors",
]
