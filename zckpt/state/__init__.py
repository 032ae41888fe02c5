"""What a checkpoint is: named parameters, their slots, where each element lies, and what became of everything else.

Data and arithmetic only. Nothing here opens a file, and nothing here knows a format.
"""

from __future__ import annotations

from zckpt.state.checkpoint import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    Padding,
    PaddingRule,
    PaddingSpan,
    Parameter,
    ParamGroup,
    Scalar,
    SourceFile,
    Topology,
)
from zckpt.state.spans import CutFiles, CutSpans, Extent, Slot, Span, Spans

__all__ = [
    "MASTER",
    "WEIGHT",
    "Checkpoint",
    "CutFiles",
    "CutSpans",
    "Duplicate",
    "Extent",
    "Padding",
    "PaddingRule",
    "PaddingSpan",
    "ParamGroup",
    "Parameter",
    "Scalar",
    "Slot",
    "SourceFile",
    "Span",
    "Spans",
    "Topology",
]
